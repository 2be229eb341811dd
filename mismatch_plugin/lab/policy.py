"""The lab's policy: a real megatron-core GPTModel with its schedules, DDP and optimizer, in any parallel layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.hooks.megatron_core.batch import MegatronBatch, Sample, make_batch
from mismatch_plugin.lab import model as lab
from mismatch_plugin.lab.batched.trainer import shape_of
from mismatch_plugin.lab.export import llama_state_dict
from mismatch_plugin.lab.parameters import gather_parameters, load_parameters
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import get_task
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.log_probs import Backend, vocab_parallel_log_probs


def model_settings(settings: LabSettings) -> lab.ModelSettings:
    """The megatron model of a run."""
    own = settings.model_dump(include={"layers", "hidden", "heads", "kv_groups", "ffn", "experts", "position", "seed"})
    if settings.position == "learned_absolute":
        own["experts_per_token"] = 1
        own["max_length"] = shape_of(settings).max_length
    return lab.ModelSettings.model_validate({**own, "vocab": get_task(settings.task).vocab})


def broadcast(value: Any, src: int = 0) -> Any:
    """`value` of rank `src` on every rank. Collective over the world."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src)
    return box[0]


@torch.no_grad()
def _widen_embeddings(model: list[Any]) -> None:
    """Initial embeddings of standard deviation 0.5: as small as the other weights they drown in what the layers add,
    and RL then moves so far in a step that it first forgets what the warm-up taught."""
    embedding = getattr(model[0].module, "embedding", None)  # on the first pipeline stage
    if embedding is not None:
        embedding.word_embeddings.weight.mul_(10.0)


class Policy:
    """This rank's part of the policy. Every method is called on all ranks.

    Building one re-builds megatron's process groups: policies built before must not be used any more.
    """

    def __init__(self, settings: LabSettings, weights: Mapping[str, Tensor] | None, *, lr: float) -> None:
        lab.initialize_parallel(settings.tp, settings.pp, settings.cp)
        self.settings, self.task = settings, get_task(settings.task)
        self.model = lab.build_model(model_settings(settings))
        if weights is not None:
            load_parameters(self.model, weights)
        else:
            _widen_embeddings(self.model)
        self.optimizer: Any = lab.build_optimizer(
            self.model, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, clip_grad=settings.clip_grad
        )
        self.groups = ParallelGroups.from_megatron()
        self.device = next(self.model[0].parameters()).device
        self.backend: Backend = "auto"

    def hook(self, config: MismatchConfig) -> MegatronLoss:
        """The corrected loss on this policy. Call it once: it wraps the model's `finalize_model_grads_func`."""
        self.backend = config.log_prob_backend  # for old log-probs, too
        return MegatronLoss(
            config, self.model[0].config, self.groups, vocab_size=self.task.vocab, temperature=self.settings.temperature
        )

    def weights(self) -> dict[str, Tensor]:
        """Full weights by megatron's global names, on every rank. Collective over TP and PP."""
        return gather_parameters(self.model)

    def export(self) -> dict[str, Tensor]:
        """The same under the names that the rollout engine takes: Hugging Face's, or megatron's for batched."""
        if self.settings.engine == "batched":
            return self.weights()
        return llama_state_dict(self.weights(), model_settings(self.settings))

    def batches(self, samples: Sequence[Sample], trainer_version: int | None = None) -> list[MegatronBatch]:
        """This rank's micro-batches of an optimizer step on `samples`, which all ranks know."""
        size, rank = self.groups.dp_size, 0 if self.groups.dp is None else self.groups.dp.rank()
        mine = samples[rank::size]
        count = self.settings.micro_batches
        return [
            make_batch(
                mine[part::count],
                self.groups,
                layout="zigzag" if self.settings.cp > 1 else "none",
                form="bshd",  # lengths hardly differ, and attention over [b, s] costs far less than over one long row
                padding_id=self.task.pad,
                device=self.device,
                trainer_version=trainer_version,
            )
            for part in range(count)
        ]

    def run(self, forward_step: lab.ForwardStep, batches: Sequence[MegatronBatch]) -> list[Any]:
        """Forward and backward, then the optimizer. Returns what loss_func reported, and last the gradient norm."""
        reports = lab.run_step(self.model, forward_step, iter(batches), len(batches))
        _, norm, _ = self.optimizer.step()
        return [*reports, float(norm)]

    def supervised_step(self, data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
        """megatron's forward_step for −Σ log π of the batch's tokens; its reports hold the log-probs."""
        batch = next(data_iterator)
        output = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
        return output, partial(self._log_likelihood, batch)

    def _log_likelihood(self, batch: MegatronBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs = vocab_parallel_log_probs(
            logits.flatten(0, -2),
            batch.targets,
            tp_group=self.groups.tp,
            temperature=self.settings.temperature,
            vocab_size=self.task.vocab,
            sampling_mask=batch.sampling_mask,
            rows=batch.rows,
            backend=self.backend,
        ).log_probs
        count = torch.tensor(batch.targets.numel(), device=log_probs.device)
        return -log_probs.sum(), count, {"log_probs": log_probs.detach()}

    @torch.no_grad()
    def with_old_log_probs(self, batches: Sequence[MegatronBatch]) -> list[MegatronBatch]:
        """The batches with log π_old from a forward pass. They exist where the loss lives, on the last stage."""
        reports = lab.run_step(self.model, self.supervised_step, iter(batches), len(batches), forward_only=True)
        if not self.groups.is_last_stage:
            return list(batches)
        scored = zip(batches, reports, strict=True)
        return [
            replace(batch, packed=batch.packed.replace(old_log_probs=report["log_probs"])) for batch, report in scored
        ]

    def step_loss(self, reports: Sequence[Mapping[str, Tensor]]) -> float | None:
        """The optimizer step's loss, from the hook's reports; None but on the last stage. One SUM over DP × CP."""
        if not self.groups.is_last_stage:
            return None
        parts = [torch.stack([r["policy_loss"].double(), r["denominator"].double()]) for r in reports]
        total, count = self.groups.sum_over_data(torch.stack(parts).sum(0)).tolist()
        return total / max(count, 1.0)
