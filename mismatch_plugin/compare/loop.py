"""Many small RL runs in one tensor program: every seed under every variant of the loss, in one setting.

    warm = warm_weights(settings, seeds)                              # a model that half knows the task
    for records in Runs(settings, seeds, configs, warm).steps(): ...  # after each optimizer step one record a run

The file is in the order of the data: rollout engine (where the mismatch is), reward, optimizer, the loop itself,
evaluation and warm-up; `experiments` has settings and tasks, `model` the policy. Every weight and activation has a
leading dimension, the run: run n is variant n // S with seed n % S. Runs of a seed share initial weights, prompts and
sampling noise, and so differ by their loss alone, which is `mp.policy_loss` of their own responses; no formula of it is
written here.

Shapes: N runs, P prompts and B responses a run, T positions, R of them the response's, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.compare.experiments import PAD, Settings, Split, Task, get_task, seed_for
from mismatch_plugin.compare.model import (
    OUTPUT,
    Reroute,
    Weights,
    forward,
    initial_weights,
    log_softmax,
    map_weights,
    repeated,
    response_log_probs,
    token_log_probs,
)
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.files import replacing


def rollout_weights(weights: Weights, dtype: str) -> Weights:
    """As the rollout engine has them: linear layers (not embeddings, norms, routers) rounded, or all as they are."""
    if dtype == "float32":
        return weights
    bits, linear = int(dtype.removeprefix("int")), [name for name in weights if "linear" in name or name == OUTPUT]
    return {**weights, **{name: quantised(weights[name], bits) for name in linear}}


def quantised(weight: Tensor, bits: int) -> Tensor:
    """`weight` [..., out, in] rounded to symmetric integers of `bits` with one scale per output channel, as floats."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / largest
    return (weight / scale).round().clamp(-largest, largest) * scale


class ExpertFlips:
    """Instead of a share of the chosen experts another one, each as likely, independently by token and layer.

    Draws of a seed come from its own generator and are shared by its runs.
    """

    def __init__(self, share: float, experts: int, seeds: Sequence[int]) -> None:
        self.share, self.experts = share, experts
        self.generators = [torch.Generator().manual_seed(zlib.crc32(f"{seed}.experts".encode())) for seed in seeds]

    def __call__(self, chosen: Tensor) -> Tensor:
        drawn = torch.stack([torch.rand(2, chosen.shape[1], generator=generator) for generator in self.generators])
        flips, by = drawn.repeat(len(chosen) // len(drawn), 1, 1).unbind(1)
        others = (chosen + 1 + (by * (self.experts - 1)).long()) % self.experts
        return others.where(flips < self.share, chosen)


class Responses(NamedTuple):
    """Each [N, B, R]. ids: PAD behind the end. log_probs: log π_rollout, 0 there. mask: True up to the end."""

    ids: Tensor
    log_probs: Tensor
    mask: Tensor


def exponential(seeds: Sequence[int], *size: int) -> Tensor:
    """Noise for `generate`, [len(seeds), *size]: of each seed from a generator of its own."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.empty(size).exponential_(generator=generator) for generator in generators])


@torch.no_grad()
def generate(
    settings: Settings, weights: Weights, prompts_NPT: Tensor, noise_NBRV: Tensor, reroute: Reroute | None = None
) -> Responses:
    """B / P responses a prompt, as long as the noise; with an `eos` they end there.

    noise_NBRV: Exponential(1) draws. argmax p / E draws from p; runs that share noise and weights draw the same.
    """
    N, B, R, _ = noise_NBRV.shape
    eos, samples = get_task(settings.task).eos, B // prompts_NPT.shape[1]
    logits, cache = forward(settings, weights, prompts_NPT, last_only=True, reroute=reroute)
    logits, cache = logits.repeat_interleave(samples, dim=1), repeated(cache, samples)
    alive = torch.ones(N, B, dtype=torch.bool)
    ids, log_probs, mask = [], [], []
    for t in range(R):
        log_p = log_softmax(logits[:, :, 0] / settings.temperature)
        drawn = (log_p.exp() / noise_NBRV[:, :, t]).argmax(-1)
        ids.append(drawn.where(alive, PAD))
        log_probs.append(log_p.gather(2, drawn[..., None])[..., 0].where(alive, 0.0))
        mask.append(alive)
        if eos is not None:
            alive = alive & (drawn != eos)
        if t + 1 < R:
            logits, cache = forward(settings, weights, ids[-1][..., None], cache, reroute=reroute)
    return Responses(*(torch.stack(parts, dim=2) for parts in (ids, log_probs, mask)))


def questions(task: Task, count: int, seeds: Sequence[int], split: Split = "train") -> tuple[Tensor, Tensor]:
    """(prompts [S, count, T], right answers [S, count, R] with PAD behind the end) of every seed."""
    prompts = [task.prompts(count, seed, split) for seed in seeds]
    targets = [[task.target(prompt) for prompt in row] for row in prompts]
    answers = [[[*target, *[PAD] * (task.max_response - len(target))] for target in row] for row in targets]
    return torch.tensor(prompts), torch.tensor(answers)


def score(answers_NBR: Tensor, drawn: Responses) -> tuple[Tensor, Tensor]:
    """(dense, exact) rewards [N, B]. dense: right positions / the longer of answer and response, so that running on
    costs as much as stopping; exact: 1.0 if all are right, else 0.0."""
    there = answers_NBR != PAD
    right = (drawn.ids == answers_NBR) & drawn.mask & there
    longer = torch.maximum(there.sum(-1), drawn.mask.sum(-1))
    dense = right.sum(-1).double() / longer
    return dense, (dense == 1.0).float()


class BatchedAdamW:
    """torch's AdamW, which works element by element and so on each run by itself, after megatron's clipping:
    gradients times min(1, clip_grad / (norm + 1e-6)), with each run's own norm.

    `live` [N] says which runs go on. A run whose gradient norm is not finite stops for good: its weights stay.
    """

    def __init__(self, weights: Weights, settings: Settings, lr: float, weight_decay: float = 0.0) -> None:
        self.weights, self.clip_grad = list(weights.values()), settings.clip_grad
        self.adamw = torch.optim.AdamW(self.weights, lr, settings.betas, weight_decay=weight_decay, foreach=True)
        self.live = torch.ones(len(self.weights[0]), dtype=torch.bool)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step; returns the gradient norms before clipping, [N]."""
        # Rows of dimension 1: sums over dimension 0 would add up in an order that depends on the number of runs.
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients], dim=1).sum(1).sqrt()
        self.live &= norms.isfinite()
        scale = (self.clip_grad / (norms + 1e-6)).clamp(max=1.0)
        stopped = (~self.live).nonzero()[:, 0]
        before = [weight[stopped] for weight in self.weights]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient * scale.view(-1, *[1] * (gradient.dim() - 1))
        self.adamw.step()
        for weight, kept in zip(self.weights, before, strict=True):
            weight[stopped] = kept
        return norms


IMPOSSIBLE = math.log(1e-4)
"""A sampled token that the trainer gives less than this is all but impossible to it."""
Record = dict[str, Any]


class Batch(NamedTuple):
    """A rollout batch of every run, or a mini-batch of it. Responses to a prompt are neighbours."""

    prompts_NPT: Tensor
    drawn: Responses
    advantages_NB: Tensor
    version: int  # optimizer steps that the weights had made which sampled it
    old_NBR: Tensor | None = None  # log π_old; 0 for runs that need none

    def mini(self, j: int, count: int) -> Batch:
        """Mini-batch j of `count`: its share of every prompt's responses."""

        def share(rows: Tensor) -> Tensor:
            groups = rows.unflatten(1, (self.prompts_NPT.shape[1], -1))
            return groups.chunk(count, dim=2)[j].flatten(1, 2)

        old = None if self.old_NBR is None else share(self.old_NBR)
        drawn = Responses(*map(share, self.drawn))
        return self._replace(drawn=drawn, advantages_NB=share(self.advantages_NB), old_NBR=old)


class Runs:
    """The runs of a block. warm_weights: [S, …], of the seeds in their order; a seed's variants start from the same."""

    def __init__(
        self, settings: Settings, seeds: Sequence[int], configs: Sequence[MismatchConfig], warm_weights: Weights
    ) -> None:
        self.settings, self.seeds, self.variants = settings, tuple(seeds), len(configs)
        self.task = get_task(settings.task)
        self.configs = [config for config in configs for _ in seeds]
        self.quiet = [config.replace(metrics="off") for config in self.configs]
        self.thresholds: list[dict[str, Tensor]] = [{} for _ in self.configs]  # of the last step, for budgets
        self.needs_old = [n for n, config in enumerate(self.configs) if not config.use_rollout_log_probs]
        self.weights = map_weights(warm_weights, lambda weight: self._by_variant(weight).requires_grad_())
        self.optimizer = BatchedAdamW(self.weights, settings, settings.lr, settings.weight_decay)
        held_out = questions(self.task, settings.eval_prompts, self._seeds("held-out"), "held_out")
        self.held_out = [self._by_variant(of_seeds) for of_seeds in held_out]
        self.versions: dict[int, Weights] = {}  # by optimizer steps, as long as a rollout batch may need them

    def steps(self) -> Iterator[list[Record]]:
        """Train; before the first optimizer step and after each, the records of all runs.

        step; reward, exact, response_length (means over the rollout batch), weight_version (that sampled it); loss,
        grad_norm (before clipping); held_out_exact after an evaluation, an expectation without sampling noise; metrics
        (the plugin's) and impossible_tokens (share of sampled tokens with log π_train below log 1e-4) at the first step
        after one. A record of step 0 holds the evaluation alone.
        """
        settings, mini_batches = self.settings, self.settings.mini_batches
        self._keep(0)
        yield [{"step": 0, "held_out_exact": exact} for exact in self._held_out_exact()]
        for first in range(0, settings.steps, mini_batches):
            batch, facts = self._roll_out(first)
            batch = batch._replace(old_NBR=self._old_log_probs(batch))
            for j, step in enumerate(range(first + 1, min(first + mini_batches, settings.steps) + 1)):
                measured = j == 0 and first % (settings.eval_every or settings.steps) < mini_batches
                trained = self._train_step(batch.mini(j, mini_batches), step, measured)
                self._keep(step)
                records = [{"step": step, **fact, **own} for fact, own in zip(facts, trained, strict=True)]
                if step == settings.steps or (settings.eval_every and step % settings.eval_every == 0):
                    for record, exact in zip(records, self._held_out_exact(), strict=True):
                        record["held_out_exact"] = exact
                yield records

    def _roll_out(self, step: int) -> tuple[Batch, list[Record]]:
        """A rollout batch with its advantages, and what is reported of each run's."""
        settings, task, samples = self.settings, self.task, self.settings.samples_per_prompt
        version = max(0, step - settings.staleness)
        self.versions = {known: kept for known, kept in self.versions.items() if known >= version}
        weights = rollout_weights(self.versions[version], settings.rollout_dtype)

        asked = questions(task, settings.prompts_per_batch, self._seeds("prompts", step))
        prompts, answers = map(self._by_variant, asked)
        seeds = self._seeds("rollout", step)
        noise = self._by_variant(exponential(seeds, settings.samples, task.max_response, task.vocab))
        flips = ExpertFlips(settings.expert_flips, settings.experts, seeds) if settings.expert_flips else None
        drawn = generate(settings, weights, prompts, noise, flips)

        dense, exact = score(answers.repeat_interleave(samples, dim=1), drawn)
        groups = torch.arange(dense.numel()) // samples
        advantages = mp.group_advantages(dense.flatten(), groups).view(dense.shape).float()
        lengths = drawn.mask.float().sum(-1)
        means = {"reward": dense, "exact": exact, "response_length": lengths}
        facts = [{name: rows[n].mean().item() for name, rows in means.items()} for n in range(len(self.configs))]
        return Batch(prompts, drawn, advantages, version), [{**fact, "weight_version": version} for fact in facts]

    @torch.no_grad()
    def _old_log_probs(self, batch: Batch) -> Tensor:
        """log π_old, of the weights that are about to train on the batch, for the runs that need it; 0 for others."""
        n, old = self.needs_old, torch.zeros_like(batch.drawn.log_probs)
        if n:
            some = map_weights(self.weights, lambda weight: weight[n])
            old[n] = token_log_probs(self.settings, some, batch.prompts_NPT[n], batch.drawn.ids[n])
        return old

    def _train_step(self, batch: Batch, step: int, measured: bool) -> list[Record]:
        """One optimizer step of every run on a mini-batch: loss, grad_norm and, if `measured`, the metrics."""
        ids, mask = batch.drawn.ids, batch.drawn.mask
        table = response_log_probs(self.settings, self.weights, batch.prompts_NPT, ids)
        log_probs = table.gather(3, ids[..., None])[..., 0]
        entropy = -(table.detach().exp() * table.detach()).sum(-1) if measured else None
        finite = (log_probs.isfinite() & batch.drawn.log_probs.isfinite() | ~mask).all(-1).all(-1).tolist()

        # Each run's loss is of its own log-probs. Their gradients then go back through the model all at once.
        leaves = [own.requires_grad_() for own in log_probs.detach().unbind()]
        losses: list[Tensor] = []
        records: list[Record] = [{} for _ in leaves]
        for n, (record, own) in enumerate(zip(records, leaves, strict=True)):
            if not finite[n]:  # its weights overflowed: it stops, and the others of the block go on
                losses.append((own * math.nan).sum())
                continue
            config = self.configs[n] if measured else self.quiet[n]
            packed = self._packed(batch, n, step, entropy)
            result = mp.policy_loss(own[mask[n]], packed, config, thresholds=self.thresholds[n])
            self.thresholds[n] = result.statistics.thresholds()
            losses.append(result.loss)
            if measured:
                below = (own < IMPOSSIBLE) & mask[n]
                record["impossible_tokens"] = (below.sum() / mask[n].sum()).item()
                record["metrics"] = result.statistics.metrics()
        upstream = torch.stack(torch.autograd.grad(losses, leaves))
        gradients = torch.autograd.grad(log_probs, list(self.weights.values()), upstream)
        norms = self.optimizer.step(gradients).tolist()
        for record, loss, norm in zip(records, torch.stack(losses).tolist(), norms, strict=True):
            record |= {"loss": loss, "grad_norm": norm}
        return records

    def _packed(self, batch: Batch, n: int, step: int, entropy_NBR: Tensor | None) -> mp.PackedSequences:
        """Run n's responses, one behind the other."""
        mask = batch.drawn.mask[n]
        lengths = mask.sum(-1)
        old = None if self.configs[n].use_rollout_log_probs else batch.old_NBR
        return mp.PackedSequences(
            loss_mask=mask[mask],
            lengths=tuple(lengths.tolist()),
            rollout_log_probs=batch.drawn.log_probs[n][mask],
            old_log_probs=None if old is None else old[n][mask],
            advantages=batch.advantages_NB[n].repeat_interleave(lengths),
            weight_versions=torch.full((int(lengths.sum()),), batch.version),
            trainer_version=step - 1,
            entropy=None if entropy_NBR is None else entropy_NBR[n][mask],
        )

    def _keep(self, step: int) -> None:
        """Keep a copy of the weights after `step` optimizer steps, if a later rollout batch samples from them."""
        if step == 0 or (step + self.settings.staleness) % self.settings.mini_batches == 0:
            self.versions[step] = map_weights(self.weights, lambda weight: weight.detach().clone())

    def _held_out_exact(self) -> list[float]:
        return exact_match(self.settings, self.weights, *self.held_out)[0].tolist()

    def _seeds(self, *purpose: object) -> list[int]:
        return [seed_for(seed, *purpose) for seed in self.seeds]

    def _by_variant(self, of_seeds: Tensor) -> Tensor:
        """[S, …] -> [N, …]: the same for every variant."""
        return of_seeds.repeat(self.variants, *[1] * (of_seeds.dim() - 1))


@torch.no_grad()
def exact_match(
    settings: Settings, weights: Weights, prompts_NPT: Tensor, answers_NPR: Tensor
) -> tuple[Tensor, Tensor]:
    """(expected exact match, mean probability of the right token) over the prompts, [N] each: no sampling, no noise.

    The first is the mean of π(answer | prompt), the product over its tokens, at temperature 1.
    """
    settings = settings.model_copy(update={"temperature": 1.0})
    rows = []
    for n in range(len(prompts_NPT)):  # run by run: its activations fit the processor's cache
        one = map_weights(weights, lambda weight, n=n: weight[n : n + 1])
        rows.append(token_log_probs(settings, one, prompts_NPT[n : n + 1], answers_NPR[n : n + 1]))
    there = answers_NPR != PAD
    log_probs = torch.cat(rows).where(there, 0.0)
    right = log_probs.exp().where(there, 0.0).sum((1, 2)) / there.sum((1, 2))
    return log_probs.sum(-1).exp().mean(1), right


def warm_up(settings: Settings, seeds: Sequence[int]) -> Weights:
    """Supervised training of every seed until its mean probability of the right token is `warm_up_target`: [S, …].

    A seed that is there stops, the others go on: its weights do not depend on those that are trained with it, to the
    last bit on one thread.
    """
    settings, task = settings.model_copy(update={"temperature": 1.0}), get_task(settings.task)
    weights = map_weights(initial_weights(settings, seeds), lambda weight: weight.requires_grad_())
    optimizer = BatchedAdamW(weights, settings, settings.warm_up_lr)
    held_out = questions(task, settings.eval_prompts, [seed_for(seed, "held-out") for seed in seeds], "held_out")
    for step in range(settings.warm_up_steps):
        if step % 4 == 0:
            optimizer.live &= exact_match(settings, weights, *held_out)[1] < settings.warm_up_target
            if not bool(optimizer.live.any()):
                break
        drawn = [seed_for(seed, "warm-up", step) for seed in seeds]
        prompts, answers = questions(task, settings.warm_up_batch, drawn)
        log_probs = token_log_probs(settings, weights, prompts, answers)
        there = answers != PAD
        loss = -(log_probs.where(there, 0.0).sum((1, 2)) / there.sum((1, 2))).sum()
        optimizer.step(torch.autograd.grad(loss, list(weights.values())))
    return map_weights(weights, torch.Tensor.detach)


def warm_weights(settings: Settings, seeds: Sequence[int], cache: Path | None = None) -> Weights:
    """`warm_up` of every seed, [S, …] in their order. The folder `cache` keeps them, a file a seed.

    One that cannot be read is made again.
    """
    found: dict[int, Weights] = {}
    files = {seed: cache / settings.warm_up_key(seed) for seed in seeds} if cache else {}
    for seed, file in files.items():
        with suppress(Exception):  # absent, cut short or damaged, which torch says in many ways
            found[seed] = torch.load(file, weights_only=True)
    if missing := [seed for seed in seeds if seed not in found]:
        trained = warm_up(settings, missing)
        found |= {s: map_weights(trained, lambda weight, i=i: weight[i].clone()) for i, s in enumerate(missing)}
    for seed in files.keys() & missing:
        files[seed].parent.mkdir(parents=True, exist_ok=True)
        with replacing(files[seed]) as part:
            torch.save(found[seed], part)
    return {name: torch.stack([found[seed][name] for seed in seeds]) for name in found[seeds[0]]}
