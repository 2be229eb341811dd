"""The lab's RL loop: roll out with an engine, score, train with the hook, in any parallel layout.

    weights = warm_up(settings, folder)                     # once a seed, shared by all variants
    train(settings, config, weights, on_step=print)

Every rank calls both; the rollout engine lives on rank 0, which broadcasts its records and alone calls `on_step`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.hooks.megatron_core.batch import MegatronBatch, Sample
from mismatch_plugin.lab import model as lab
from mismatch_plugin.lab.batched.model import map_weights
from mismatch_plugin.lab.batched.rollout import BatchedEngine
from mismatch_plugin.lab.batched.trainer import Questions, exact_match, shape_of
from mismatch_plugin.lab.batched.warm import load_warm, save_warm, warm_weights
from mismatch_plugin.lab.engines import RolloutDtype, RolloutEngine, TransformersEngine
from mismatch_plugin.lab.export import llama_config
from mismatch_plugin.lab.policy import Policy, broadcast, model_settings
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import Score, Task, get_task
from mismatch_plugin.rollout.packing import number_versions
from mismatch_plugin.rollout.records import RolloutRecord

Weights = dict[str, Tensor]
OnStep = Callable[[dict[str, Any]], None]


def make_engine(settings: LabSettings, dtype: RolloutDtype) -> RolloutEngine:
    """The embedded engine in `dtype`, without weights."""
    task = get_task(settings.task)
    if settings.engine == "batched":
        return BatchedEngine(shape_of(settings), dtype, eos=task.eos, pad=task.pad, flips=settings.expert_flips)
    if task.eos is None:
        raise ValueError(f"task {task.name} has no end token, and goes with the engine batched: choose another.")
    config = llama_config(model_settings(settings), eos=task.eos, pad=task.pad)
    return TransformersEngine(config, dtype, eos=task.eos, pad=task.pad)


def is_first_rank() -> bool:
    """True on the rank that rolls out and reports."""
    return dist.get_rank() == 0


class Evaluation:
    """The float32 policy's own answers to held-out prompts, at `eval_temperature`. On rank 0."""

    def __init__(self, settings: LabSettings) -> None:
        self.settings, self.task = settings, get_task(settings.task)
        self.prompts = self.task.prompts(settings.eval_prompts, settings.seed_for("held-out"), "held_out")
        self.engine = make_engine(settings, "float32")

    def __call__(self, weights: Weights, version: int) -> dict[str, float]:
        """held_out_reward and held_out_exact, means over the prompts. The same seed each time: curves are smooth."""
        self.engine.load_weights(weights, version)
        records = self.engine.generate(
            self.prompts,
            max_new_tokens=self.task.max_response,
            temperature=self.settings.eval_temperature,
            seed=self.settings.seed_for("evaluation"),
        )
        score = scored(self.task, records)[1]
        return {"held_out_reward": score.dense, "held_out_exact": score.exact}


class ExactEvaluation:
    """The expected exact match of the batched lab, held_out_exact alone: no sample, no noise."""

    def __init__(self, settings: LabSettings) -> None:
        self.shape, self.task = shape_of(settings), get_task(settings.task)
        self.held_out = Questions.held_out(settings, [settings.seed])

    def __call__(self, weights: Weights, version: int) -> dict[str, float]:
        del version
        one = map_weights(weights, lambda weight: weight[None])
        return {"held_out_exact": exact_match(self.shape, self.task, one, self.held_out)[0].item()}


def scored(task: Task, records: Sequence[RolloutRecord]) -> tuple[list[Score], Score]:
    """The reward of every record, and their mean."""
    scores = [task.score(record.prompt_ids, record.response_ids) for record in records]
    return scores, Score(*map(statistics.fmean, zip(*scores, strict=True)))


def warm_up(settings: LabSettings, cache: Path | None = None) -> Weights:
    """Supervised training until the held-out reward is `warm_up_target`: full weights by megatron's names.

    With the engine batched it is that of the batched lab.
    cache: a folder in which they are kept; a run with the same `warm_up_key` finds them there. Collective.
    """
    lab.initialize_parallel(settings.tp, settings.pp, settings.cp)
    found = None
    if is_first_rank():
        found = load_warm(settings, cache)
        if found is None and settings.engine == "batched":
            with torch._C.DisableTorchFunction():  # the megatron shim looks at every torch call
                found = map_weights(warm_weights(settings, [settings.seed], cache), lambda weight: weight[0])
    if (found := broadcast(found)) is not None:
        return found
    # The optimizer step divides by all tokens of the batch, so micro-batches are of no use here.
    policy = Policy(settings.model_copy(update={"micro_batches": 1}), None, lr=settings.warm_up_lr)
    evaluation = Evaluation(settings) if is_first_rank() else None
    for step in range(settings.warm_up_steps):
        if step % 2 == 0:
            state = policy.export()
            reached = evaluation is not None and evaluation(state, step)["held_out_reward"] >= settings.warm_up_target
            if broadcast(reached):
                break
        prompts = policy.task.prompts(settings.warm_up_batch, settings.seed_for("warm-up", step))
        examples = [Sample(prompt, policy.task.target(prompt), 0.0) for prompt in prompts]
        policy.run(policy.supervised_step, policy.batches(examples))
    weights = policy.weights()
    if is_first_rank():
        save_warm(settings, cache, weights)
    return weights


def train(
    settings: LabSettings,
    config: MismatchConfig,
    warm_weights: Mapping[str, Tensor],
    on_step: OnStep,
    *,
    engine: RolloutEngine | None = None,
) -> bool:
    """Run `settings.steps` optimizer steps of RL from `warm_weights`; rank 0 calls `on_step` after each.

    Its dict: step; reward, exact, response_length (means over the rollout batch), weight_version (that sampled it);
    loss, grad_norm (before clipping); seconds {rollout, old_log_probs, train}, the first two on a rollout batch's first
    step, 0 on its others; metrics (the plugin's); and after an evaluation held_out_reward, held_out_exact (with the
    engine batched the latter alone, and exact). A first dict with step 0 holds the evaluation of the warm weights only.

    engine: the rollout engine (rank 0 uses it; elsewhere None); None: that of the settings, if it is embedded.
    Returns False if the run ended early because the gradient was no longer finite. Collective.
    Raises ValueError for a KL term, which needs a reference policy, and the lab keeps none; and if the settings name a
    server as the engine, and none was given.
    """
    if config.terms.kl_coef:
        raise ValueError("the lab keeps no reference policy: leave out --mismatch-kl-coef.")
    if is_first_rank() and engine is None and settings.engine == "sglang":
        raise ValueError(f"the engine is {settings.engine}: give the one to roll out with.")
    return Run(settings, config, warm_weights, on_step, engine).all_steps()


class Run:
    """State of one run; the arguments are those of `train`."""

    def __init__(
        self, settings: LabSettings, config: MismatchConfig, weights: Mapping[str, Tensor], on_step: OnStep, engine: Any
    ) -> None:
        self.settings, self.config, self.on_step = settings, config, on_step
        self.policy = Policy(settings, weights, lr=settings.lr)
        self.hook = self.policy.hook(config)
        self.engine: RolloutEngine | None = None
        self.evaluation: Evaluation | ExactEvaluation | None = None
        if is_first_rank():
            self.engine = engine or make_engine(settings, settings.rollout_dtype)
            self.evaluation = (ExactEvaluation if settings.engine == "batched" else Evaluation)(settings)
        self.versions: dict[int, Weights] = {}
        self.seconds: dict[str, float] = {}

    def all_steps(self) -> bool:
        """The loop; False if it ended early."""
        settings = self.settings
        self._keep(0)
        if held_out := self._held_out(0):
            self._report({"step": 0, **held_out})
        for first in range(0, settings.steps, settings.mini_batches):
            self.seconds = {"rollout": 0.0, "old_log_probs": 0.0, "train": 0.0}
            with self._timed("rollout"):
                samples, facts = self._roll_out(first)
            parts = enumerate(self._split(samples), first)
            mini_batches = [self.policy.batches(part, trainer_version=step) for step, part in parts]
            if not self.config.use_rollout_log_probs:
                with self._timed("old_log_probs"):
                    mini_batches = self._with_old_log_probs(mini_batches)
            for step, batches in enumerate(mini_batches[: settings.steps - first], first + 1):
                with self._timed("train"):
                    record = self._train_step(batches)
                    self._keep(step)
                finite = math.isfinite(record["grad_norm"])
                held_out = self._held_out(step) if finite else {}
                self._report({"step": step, **facts, **record, "seconds": self.seconds, **held_out})
                self.seconds = dict.fromkeys(self.seconds, 0.0)
                if not finite:
                    return False
        return True

    def _roll_out(self, step: int) -> tuple[list[Sample], dict[str, Any]]:
        """Samples with advantages on every rank, and the means that are reported."""
        settings, task = self.settings, self.policy.task
        version = settings.version_for(step)
        drawn: Any = None
        if self.engine is not None:
            self.engine.load_weights(self.versions[version], version)
            records = self.engine.generate(
                task.prompts(settings.prompts_per_batch, settings.seed_for("prompts", step)),
                samples_per_prompt=settings.samples_per_prompt,
                max_new_tokens=task.max_response,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=settings.seed_for("rollout", step),
            )
            scores, mean = scored(task, records)
            length = statistics.fmean(len(record.response_ids) for record in records)
            facts = {"reward": mean.dense, "exact": mean.exact, "response_length": length, "weight_version": version}
            groups = [row // settings.samples_per_prompt for row in range(len(records))]
            advantages = mp.group_advantages([score.dense for score in scores], groups)
            drawn = self._samples(records, advantages.tolist()), facts
        self.versions = {known: weights for known, weights in self.versions.items() if known >= version}
        return broadcast(drawn)

    def _samples(self, records: Sequence[RolloutRecord], advantages: Sequence[float]) -> list[Sample]:
        which = self.settings.top_p_log_probs
        rows = [record.version_of_token for record in records]
        numbers = number_versions([version for row in rows for version in row if version is not None])
        return [
            Sample(
                record.prompt_ids,
                record.response_ids,
                advantage,
                rollout_log_probs=(which != "full" and record.behaviour_log_probs) or record.rollout_log_probs,
                weight_versions=[numbers[version] for version in versions if version is not None] or None,
                kept_ids=record.kept_ids if which == "masked" else None,
            )
            for record, advantage, versions in zip(records, advantages, rows, strict=True)
        ]

    def _split(self, samples: list[Sample]) -> list[list[Sample]]:
        """Mini-batches: each has its share of every prompt's samples, so that all have all prompts."""
        group, count = self.settings.samples_per_prompt, self.settings.mini_batches
        share = group // count
        return [[sample for i, sample in enumerate(samples) if i % group // share == part] for part in range(count)]

    def _with_old_log_probs(self, mini_batches: list[list[MegatronBatch]]) -> list[list[MegatronBatch]]:
        """One forward pass over the rollout batch with the weights that are about to train on it."""
        size = self.settings.micro_batches
        scored = self.policy.with_old_log_probs([batch for batches in mini_batches for batch in batches])
        return [scored[i : i + size] for i in range(0, len(scored), size)]

    def _train_step(self, batches: list[MegatronBatch]) -> dict[str, Any]:
        """One optimizer step. What is known on the last pipeline stage goes to all ranks."""
        self.hook.start(batches)
        *reports, norm = self.policy.run(self.hook.forward_step, batches)
        record = {"loss": self.policy.step_loss(reports), "grad_norm": norm, "metrics": self.hook.metrics()}
        if self.settings.pp > 1:
            record = broadcast(record, src=dist.get_world_size() - 1)  # megatron's last rank is on the last stage
        return record

    def _keep(self, step: int) -> None:
        """Export the weights after `step` optimizer steps, if a later rollout batch is going to sample from them."""
        if self.settings.samples_later(step):
            self.versions[step] = self.policy.export()

    def _held_out(self, step: int) -> dict[str, float]:
        if not self.settings.evaluates(step):
            return {}
        state = self.versions.get(step) or self.policy.export()
        if self.evaluation is None:
            return {}
        return self.evaluation(state, step)

    def _report(self, record: dict[str, Any]) -> None:
        if is_first_rank():
            self.on_step(record)

    @contextmanager
    def _timed(self, part: str) -> Any:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start
