"""The RL loop of `lab.trainer` for many runs at once: every seed under every variant of one setting.

    weights = warm_up(settings, seeds)
    for records in train(settings, seeds, configs, weights): ...      # records[i][j]: variant i, seed j, this step

Runs of a seed share initial weights, prompts and sampling noise, so that variants differ by their loss alone. Each
run's loss is `mp.policy_loss` of its own responses; no formula of it is written here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.hooks.base import refuse_group_advantages
from mismatch_plugin.lab.batched.mini_batches import MiniBatch, mini_batch
from mismatch_plugin.lab.batched.model import (
    Shape,
    Weights,
    initial_weights,
    map_weights,
    response_log_probs,
    token_log_probs,
)
from mismatch_plugin.lab.batched.optimizer import BatchedAdamW
from mismatch_plugin.lab.batched.rollout import Responses, expert_flips, exponential, generate, rollout_weights
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import Task, get_task

IMPOSSIBLE = math.log(1e-4)
"""A sampled token that the trainer gives less than this is all but impossible to it."""


def shape_of(settings: LabSettings) -> Shape:
    """The model's sizes. Raises ValueError for a model that this trainer does not have."""
    if settings.position != "learned_absolute" or settings.kv_groups != settings.heads:
        raise ValueError("the batched trainer has position learned_absolute, and kv_groups = heads: set both.")
    task = get_task(settings.task)
    length = len(task.prompts(1, 0)[0]) + task.max_response
    return Shape(settings.layers, settings.hidden, settings.heads, settings.ffn, task.vocab, length, settings.experts)


def for_seeds(settings: LabSettings, seeds: Sequence[int], *purpose: object) -> list[int]:
    """Each seed's seed for one purpose."""
    return [settings.model_copy(update={"seed": seed}).seed_for(*purpose) for seed in seeds]


class Questions(NamedTuple):
    """prompts [S, P, T] and right answers [S, P, R] (`pad` behind the end) of every seed."""

    prompts: Tensor
    answers: Tensor

    @classmethod
    def drawn(cls, task: Task, count: int, seeds: Sequence[int], split: Any = "train") -> Questions:
        prompts = [task.prompts(count, seed, split) for seed in seeds]
        targets = [[task.target(prompt) for prompt in row] for row in prompts]
        answers = [[[*x, *[task.pad] * (task.max_response - len(x))] for x in row] for row in targets]
        return cls(torch.tensor(prompts), torch.tensor(answers))

    @classmethod
    def held_out(cls, settings: LabSettings, seeds: Sequence[int]) -> Questions:
        """Those that every evaluation asks."""
        given = for_seeds(settings, seeds, "held-out")
        return cls.drawn(get_task(settings.task), settings.eval_prompts, given, "held_out")

    def times(self, variants: int) -> Questions:
        return Questions(self.prompts.repeat(variants, 1, 1), self.answers.repeat(variants, 1, 1))


class Scores(NamedTuple):
    """`Task.score` of every response, [N, B] each."""

    dense: Tensor
    exact: Tensor


def scores(task: Task, answers_NBR: Tensor, drawn: Responses) -> Scores:
    """dense = right positions / the longer of answer and response; exact = all of them."""
    there = answers_NBR != task.pad
    right = (drawn.ids == answers_NBR) & drawn.mask & there
    longer = torch.maximum(there.sum(-1), drawn.mask.sum(-1))
    dense = right.sum(-1).double() / longer
    return Scores(dense, (dense == 1.0).float())


@torch.no_grad()
def exact_match(shape: Shape, task: Task, weights: Mapping[str, Tensor], held_out: Questions) -> tuple[Tensor, Tensor]:
    """(expected exact match, mean probability of the right token) over the prompts, [N] each: no sampling, no noise.

    The first is the mean of π(answer | prompt), the product over its tokens.
    """
    rows = []
    for n in range(len(held_out.prompts)):  # run by run: its activations fit the processor's cache
        one = {name: weight[n : n + 1] for name, weight in weights.items()}
        rows.append(token_log_probs(shape, one, held_out.prompts[n : n + 1], held_out.answers[n : n + 1]))
    log_probs = torch.cat(rows)
    there = held_out.answers != task.pad
    log_probs = log_probs.where(there, 0.0)
    right = log_probs.exp().where(there, 0.0).sum((1, 2)) / there.sum((1, 2))
    return log_probs.sum(-1).exp().mean(1), right


def warm_up(settings: LabSettings, seeds: Sequence[int]) -> Weights:
    """Supervised training of every seed until its mean probability of the right token is `warm_up_target`: [S, …].

    A seed that is there stops, the others go on.
    """
    shape, task = shape_of(settings), get_task(settings.task)
    weights = map_weights(initial_weights(shape, seeds), lambda weight: weight.requires_grad_())
    optimizer = BatchedAdamW(weights, lr=settings.warm_up_lr, betas=settings.betas, clip_grad=settings.clip_grad)
    held_out = Questions.held_out(settings, seeds)
    for step in range(settings.warm_up_steps):
        if step % 4 == 0:
            optimizer.live &= exact_match(shape, task, weights, held_out)[1] < settings.warm_up_target
            if not bool(optimizer.live.any()):
                break
        questions = Questions.drawn(task, settings.warm_up_batch, for_seeds(settings, seeds, "warm-up", step))
        log_probs = token_log_probs(shape, weights, questions.prompts, questions.answers)
        there = questions.answers != task.pad
        loss = -(log_probs.where(there, 0.0).sum((1, 2)) / there.sum((1, 2))).sum()
        optimizer.step(torch.autograd.grad(loss, list(weights.values())))
    return map_weights(weights, torch.Tensor.detach)


def train(
    settings: LabSettings, seeds: Sequence[int], configs: Sequence[MismatchConfig], warm_weights: Weights
) -> Iterator[list[list[dict[str, Any]]]]:
    """Run `settings.steps` optimizer steps of every run; after each, the records of all: [variant][seed].

    warm_weights: [S, …], of the seeds in their order; variants of a seed start from the same. Records are those of
    `lab.trainer.train`, but metrics are there at the steps after an evaluation only (one optimizer step in
    `eval_every`), `impossible_tokens` (share of sampled tokens whose log π_train is below log 1e-4) with them, and
    `seconds` are CPU seconds, a block's divided by the runs that took part. held_out_exact is exact, no sample.
    Raises ValueError for what this trainer does not have: a KL to a reference, an entropy bonus, rejection from the
    advantages, filters, parallel layouts, micro-batches.
    """
    return Runs(settings, seeds, configs, warm_weights).steps()


class Runs:
    """State of the runs; the arguments are those of `train`. Run n is variant n // S, seed n % S."""

    def __init__(
        self, settings: LabSettings, seeds: Sequence[int], configs: Sequence[MismatchConfig], warm_weights: Weights
    ) -> None:
        refuse(settings, configs)
        self.settings, self.seeds, self.configs = settings, tuple(seeds), tuple(configs)
        self.task, self.shape = get_task(settings.task), shape_of(settings)
        self.of_run = [config for config in configs for _ in seeds]
        self.quiet = [config.replace(metrics="off") for config in self.of_run]
        self.needs_old = [n for n, config in enumerate(self.of_run) if not config.use_rollout_log_probs]
        self.weights = map_weights(
            warm_weights, lambda w: w.repeat(len(configs), *[1] * (w.dim() - 1)).requires_grad_()
        )
        self.optimizer = BatchedAdamW(
            self.weights,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
        )
        self.held_out = Questions.held_out(settings, seeds).times(len(configs))
        self.versions: dict[int, Weights] = {}
        self.seconds: dict[str, float] = {}

    def steps(self) -> Iterator[list[list[dict[str, Any]]]]:
        """The loop."""
        settings, mini = self.settings, self.settings.mini_batches
        self._keep(0)
        yield self._by_variant([{"step": 0, "held_out_exact": exact} for exact in self._exact()])
        for first in range(0, settings.steps, mini):
            self.seconds = dict.fromkeys(("rollout", "old_log_probs", "train"), 0.0)
            with self._timed("rollout"):
                prompts, drawn, advantages, facts = self._roll_out(first)
            old: Tensor | None = None
            if self.needs_old:
                with self._timed("old_log_probs"):
                    old = self._old_log_probs(prompts, drawn)
            for j, step in enumerate(range(first + 1, min(first + mini, settings.steps) + 1)):
                records = [{"step": step, **fact} for fact in facts]
                with self._timed("train"):
                    measured = j == 0 and first % (settings.eval_every or settings.steps) < mini
                    part = mini_batch(j, mini, prompts, drawn, advantages, old)
                    part = part._replace(versions=(facts[0]["weight_version"], step - 1))
                    self._train_step(part, measured, records)
                    self._keep(step)
                for record, seconds in zip(records, self._seconds(), strict=True):
                    record["seconds"] = seconds
                if settings.evaluates(step):
                    for record, exact in zip(records, self._exact(), strict=True):
                        record["held_out_exact"] = exact
                self.seconds = dict.fromkeys(self.seconds, 0.0)
                yield self._by_variant(records)

    def _roll_out(self, step: int) -> tuple[Tensor, Responses, Tensor, list[dict[str, Any]]]:
        """Prompts [N, P, T], responses, their advantages [N, B], and what is reported of each run."""
        settings, task = self.settings, self.task
        version = settings.version_for(step)
        K, S = len(self.configs), len(self.seeds)
        asked = Questions.drawn(task, settings.prompts_per_batch, for_seeds(settings, self.seeds, "prompts", step))
        asked = asked.times(K)
        seeds = for_seeds(settings, self.seeds, "rollout", step)
        noise = exponential(seeds, settings.samples, task.max_response, task.vocab).repeat(K, 1, 1, 1)
        weights = rollout_weights(self.versions[version], settings.rollout_dtype)
        samples, temperature = settings.samples_per_prompt, settings.temperature
        drawn = generate(
            self.shape,
            weights,
            asked.prompts,
            noise,
            samples=samples,
            temperature=temperature,
            eos=task.eos,
            pad=task.pad,
            reroute=expert_flips(settings.expert_flips, settings.experts, seeds),
        )
        scored = scores(task, asked.answers.repeat_interleave(samples, dim=1), drawn)
        groups = torch.arange(K * S * settings.prompts_per_batch).repeat_interleave(samples)
        advantages = mp.group_advantages(scored.dense.flatten(), groups).view(K * S, -1).float()
        self.versions = {known: kept for known, kept in self.versions.items() if known >= version}
        means = zip(
            scored.dense.mean(1).tolist(),
            scored.exact.mean(1).tolist(),
            drawn.mask.float().sum(-1).mean(1).tolist(),
            strict=True,
        )
        facts = [
            {"reward": reward, "exact": exact, "response_length": length, "weight_version": version}
            for reward, exact, length in means
        ]
        return asked.prompts, drawn, advantages, facts

    @torch.no_grad()
    def _old_log_probs(self, prompts_NPT: Tensor, drawn: Responses) -> Tensor:
        """log π_old of every run that needs it; rows of the others are 0."""
        n, temperature = self.needs_old, self.settings.temperature
        old = torch.zeros_like(drawn.log_probs)
        some = map_weights(self.weights, lambda weight: weight[n])
        old[n] = token_log_probs(self.shape, some, prompts_NPT[n], drawn.ids[n], temperature)
        return old

    def _train_step(self, part: MiniBatch, measured: bool, records: list[dict[str, Any]]) -> None:
        """One optimizer step of every run; adds loss, grad_norm and what was measured to their records."""
        ids, temperature = part.drawn.ids, self.settings.temperature
        table = response_log_probs(self.shape, self.weights, part.prompts, ids, temperature)
        log_probs = table.gather(3, ids[..., None])[..., 0]
        leaves = [own.requires_grad_() for own in log_probs.detach().unbind()]
        losses: list[Tensor] = []
        sound = (log_probs.isfinite() & part.drawn.log_probs.isfinite() | ~part.drawn.mask).all(-1).all(-1).tolist()
        if measured:
            part = part._replace(entropy=-(table.detach().exp() * table.detach()).sum(-1))
        for n, record in enumerate(records):
            config = self.of_run[n] if measured else self.quiet[n]
            if not sound[n]:  # its weights overflowed: it stops, and the others of the block go on
                losses.append((leaves[n] * math.nan).sum())
                continue
            result = mp.policy_loss(leaves[n][part.drawn.mask[n]], part.packed(n, config), config)
            losses.append(result.loss)
            if measured:
                below = (leaves[n] < IMPOSSIBLE) & part.drawn.mask[n]
                record["impossible_tokens"] = (below.sum() / part.drawn.mask[n].sum()).item()
                record["metrics"] = result.statistics.metrics()
        upstream = torch.stack(torch.autograd.grad(losses, leaves))
        gradients = torch.autograd.grad(log_probs, list(self.weights.values()), upstream)
        norms = self.optimizer.step(gradients).tolist()
        for record, loss, norm in zip(records, torch.stack(losses).tolist(), norms, strict=True):
            record |= {"loss": loss, "grad_norm": norm}

    def _exact(self) -> list[float]:
        return exact_match(self.shape, self.task, self.weights, self.held_out)[0].tolist()

    def _keep(self, step: int) -> None:
        """Keep a copy of the weights after `step` optimizer steps, if a later rollout batch samples from them."""
        if self.settings.samples_later(step):
            self.versions[step] = map_weights(self.weights, lambda weight: weight.detach().clone())

    def _by_variant(self, records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return [records[i : i + len(self.seeds)] for i in range(0, len(records), len(self.seeds))]

    def _seconds(self) -> list[dict[str, float]]:
        """CPU seconds of this step by part, of every run: what it took part in, shared equally."""
        N, old = len(self.of_run), set(self.needs_old)
        each = {"rollout": self.seconds["rollout"] / N, "train": self.seconds["train"] / N}
        pass_ = self.seconds["old_log_probs"] / max(len(old), 1)
        return [{**each, "old_log_probs": pass_ if n in old else 0.0} for n in range(N)]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[part] += time.process_time() - start


def refuse(settings: LabSettings, configs: Sequence[MismatchConfig]) -> None:
    """Raise ValueError for what this trainer does not have."""
    shape_of(settings)
    for config in configs:
        if config.terms.kl_coef:
            raise ValueError("the lab keeps no reference policy: leave out --mismatch-kl-coef.")
        if config.terms.entropy_coef:
            raise ValueError("the batched trainer has no entropy bonus: use megatron's, or leave out the coefficient.")
        refuse_group_advantages(config, "the lab", "it forms advantages before any log-prob of the training side")
    if settings.top_p != 1.0 or max(settings.tp, settings.pp, settings.cp, settings.micro_batches) > 1:
        raise ValueError("the batched trainer has no top_p, no parallel layout and no micro-batches: use megatron's.")
