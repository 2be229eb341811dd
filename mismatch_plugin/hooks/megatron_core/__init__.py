"""The loss hook for any megatron-core training loop: `forward_step` and `loss_func` for megatron's schedules.

```python
hook = MegatronLoss(config, model_config, ParallelGroups.from_megatron(), vocab_size=32000)
hook.start(batches)                                             # once a step, before the schedule
forward_backward(forward_step_func=hook.forward_step, data_iterator=iter(batches), ...)
optimizer.step()
metrics = hook.metrics()                                        # {} but on the last pipeline stage
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.loss import PolicyLoss
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.hooks.megatron_core.batch import MegatronBatch, Sample, make_batch
from mismatch_plugin.hooks.megatron_core.model import (
    extra_losses,
    hidden_states,
    logits_with_labels,
    mtp_arguments,
    validate_fused_head,
)
from mismatch_plugin.log_probs import (
    BORROWED,
    Entropy,
    LogProbs,
    vocab_parallel_linear_log_probs,
    vocab_parallel_log_probs,
)
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step, deferred_with, end_step
from mismatch_plugin.report.log import log_step, validate_same_settings

__all__ = ["MegatronBatch", "MegatronLoss", "Sample", "make_batch"]


class MegatronLoss:
    """The corrected policy loss as megatron's schedules want it, on every pipeline stage.

    It wraps `model_config.finalize_model_grads_func`, where a step's statistics are reduced (one SUM and one MAX over
    DP × CP on the last stage), invalid rollout log-probs are raised on all ranks together, and the weight mean of
    algorithm 3's batch normalisation is applied, all before the optimizer steps.

    What gradients are divided by: with `calculate_per_token_loss` the step's tokens or sequences, through the integer
    megatron sums; where the model adds MoE or MTP losses of its own, that integer counts the tokens they are multiplied
    by, for them to have the same weight in every layout, and the policy loss is multiplied by that / its denominator.

    Args:
        model_config: megatron's TransformerConfig of the model.
        vocab_size: the real vocabulary; columns beyond it are padding. None: every column counts.
        temperature: what the sampler divided the logits by.

    Raises ValueError where a setting cannot be exact in this loop, with the reason and the fix.
    """

    def __init__(
        self,
        config: MismatchConfig,
        model_config: Any,
        groups: ParallelGroups,
        *,
        vocab_size: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.config, self.groups = config, groups
        self.vocab_size, self.temperature = vocab_size, temperature
        observed: Entropy = "detached" if config.metrics == "full" else "none"
        self.entropy: Entropy = "grad" if config.terms.entropy_coef else observed
        self.backend = config.log_prob_backend
        self.per_token = bool(model_config.calculate_per_token_loss)
        self.extra_losses = extra_losses(model_config)
        self.mtp_layers = int(getattr(model_config, "mtp_num_layers", None) or 0)
        self.sequence_parallel = bool(getattr(model_config, "sequence_parallel", False))
        if self.backend in BORROWED and self.entropy != "none":
            needs = "an entropy term needs" if self.entropy == "grad" else "--mismatch-metrics full shows"
            raise ValueError(
                f"the log-prob backend {self.backend} gives no entropy, which {needs}: choose auto, torch or triton, "
                f"or leave that out."
            )
        if config.fused_head:
            validate_fused_head(model_config, self.mtp_layers, self.backend)
        _refuse(config, self.per_token, self.extra_losses)
        tp_size = 1 if groups.tp is None else groups.tp.size()
        # The router multiplies by the tokens of one rank, whose losses are summed over CP and, split, over TP.
        self._fed_share = (1.0 / tp_size if self.extra_losses != ["MTP"] else 1.0) if groups.cp_rank == 0 else 0.0
        self.writes = groups.is_last_stage and groups.is_first_of_stage  # of the run's files
        if config.report_dir is not None and self.writes:
            validate_same_settings(config.report_dir, config, holds=True)
        self.step: Step | None = None
        self.micro_batches = 0
        self.finished: Statistics | None = None
        self.thresholds: Mapping[str, Tensor] | None = None
        """Of the step before, on the last pipeline stage; to be saved and set again where a run resumes."""
        self._finalize: Callable[..., Any] | None = model_config.finalize_model_grads_func
        model_config.finalize_model_grads_func = self.finalize_model_grads

    @property
    def needs_totals(self) -> bool:
        """True where `start` must see the step's data: sums over it are needed before the first backward pass."""
        known_weights = self.config.normalizes_step and not self.config.use_rollout_log_probs
        own_terms = bool(self.config.other_terms) and self.config.changes_denominator
        return not self.per_token or bool(self.extra_losses) or known_weights or own_terms

    def start(self, batches: Sequence[MegatronBatch | PackedSequences]) -> None:
        """Begin an optimizer step with all of this rank's micro-batches (their data, not yet run).

        On every rank of every pipeline stage; off the last one only their number and their kind count.
        Collectives: those of `ParallelGroups.agree`. If `needs_totals`, then those of `Step.prepare` on the last
        pipeline stage, and with a pipeline one of an object, for a refusal that depends on the data to be raised on all
        ranks together. Host syncs: one each; none in the micro-batches.
        Raises ValueError, the same on every rank, where ranks differ in configuration, fields of the data or numbers of
        micro-batches and sequences, naming them, and where a rank has no micro-batch.
        """
        self.step, self.finished, self.micro_batches = None, None, len(batches)
        fed = sum(self._fed_tokens(batch) for batch in batches) if self.extra_losses else 0
        step = Step(self.config, self.groups, self.thresholds)
        packed = [_packed(batch) for batch in batches]
        step.start(packed, calculate_per_token_loss=self.per_token, extra_losses=tuple(self.extra_losses))
        if self.needs_totals:
            refusal, others = "", self.config.other_terms + self.extra_losses
            if self.groups.is_last_stage:
                totals = step.prepare(packed, fed)
                refusal = deferred_with(others) if step.defers_factor else ""
                if totals.accepted is None and self.config.changes_denominator and self.config.keep_known_before_step:
                    refusal = refusal or (
                        "old_log_probs is missing in a micro-batch, and without it the accepted tokens are not known "
                        "before the step: pass it, or choose --mismatch-denominator original."
                    )
            self.groups.raise_with_last_stage(refusal)
        self.step = step

    def forward_step(self, data_iterator: Iterator[MegatronBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        """megatron's forward_step: run the model on the next micro-batch; the loss follows on the last stage."""
        batch = next(data_iterator)
        inputs, loss_func = (batch.tokens, batch.position_ids, None), partial(self.loss_func, batch)
        if self.config.fused_head:
            noted: list[Tensor] = []
            with hidden_states(model, noted):
                output = model(*inputs, packed_seq_params=batch.packed_seq_params)
            return output, partial(self.loss_func, batch, head_weight=noted[0] if noted else None)
        if not self.mtp_layers or not self.groups.is_last_stage:
            return model(*inputs, packed_seq_params=batch.packed_seq_params), loss_func
        totals = self._started().totals
        scale = batch.packed.loss_mask.new_ones(()) if totals is None else totals.fed / totals.tokens.clamp(min=1)
        labels = mtp_arguments(batch, scale)
        with logits_with_labels(model, self.mtp_layers):
            return model(*inputs, packed_seq_params=batch.padded_seq_params, **labels), loss_func

    def loss_func(self, batch: MegatronBatch, output: Tensor, head_weight: Tensor | None = None) -> tuple[Any, ...]:
        """megatron's loss_func from vocab-parallel logits [b, s, V/tp]; see `from_log_probs` for what it returns.

        With `head_weight` [V/tp, H] the tensor is hidden states [b, s, H] ([b, s/tp, H] under sequence parallelism).
        Where the batch has a sampling mask, log-probs and entropy are of the logits renormalised over the kept ids:
        with π^M_θ(y) = π_θ(y) / Σ_kept π_θ on both sides of the ratio, its mean over the sampler is 1, and the gradient
        is that of the policy filtered as the sampler filtered it (the kept sets held fixed).
        Collectives: one all-gather over tp, one SUM (and one MAX if a sequence_max criterion is set) over cp; from
        hidden states those of `vocab_parallel_linear_log_probs`.
        """
        options: dict[str, Any] = {
            "tp_group": self.groups.tp,
            "temperature": self.temperature,
            "entropy": self.entropy,
            "vocab_size": self.vocab_size,
            "sampling_mask": batch.sampling_mask,
            "backend": self.backend,
        }
        result: LogProbs
        if head_weight is None:
            # Logits that a model made, which nothing but this loss reads; a leaf is the caller's own.
            inplace = self.config.inplace_logits == "auto" and self.backend not in BORROWED and not output.is_leaf
            result = vocab_parallel_log_probs(
                output.flatten(0, -2), batch.targets, rows=batch.rows, inplace_gradient=inplace, **options
            )
        else:  # rows of [s, b], as sequence parallelism gathers them; half-precision models give float32 outputs
            count, length = batch.tokens.shape
            result = vocab_parallel_linear_log_probs(
                output.transpose(0, 1).flatten(0, 1).to(head_weight.dtype),
                head_weight,
                batch.targets,
                rows=batch.rows % length * count + batch.rows.div(length, rounding_mode="floor"),
                sequence_parallel=self.sequence_parallel,
                **options,
            )
        packed = batch.packed.replace(entropy=result.entropy)
        return self.from_log_probs(result.log_probs, replace(batch, packed=packed))

    def from_log_probs(self, log_probs: Tensor, batch: MegatronBatch | PackedSequences) -> tuple[Any, ...]:
        """The same from log-probs [R] of this micro-batch's tokens, for hosts that compute them themselves.

        With `calculate_per_token_loss` (loss sum, integer count to divide the step by, metrics), else
        (loss, metrics) scaled for megatron's mean over micro-batches and ranks. Exact for any split either way.
        """
        result = self._started().loss(log_probs, _packed(batch))
        loss, count = self._scaled(result), result.denominator
        report = {"policy_loss": result.loss_sum.detach().clone(), "denominator": count.clone()}
        if not self.per_token:
            return loss, report
        if self.extra_losses:
            count = torch.full_like(count, self._fed_tokens(batch))
        return loss, count, report

    def _started(self) -> Step:
        if self.step is None:
            raise ValueError("no step was begun: call start(batches) before the schedule, on every rank.")
        return self.step

    def _fed_tokens(self, batch: MegatronBatch | PackedSequences) -> int:
        """What a micro-batch adds to the step's integer: over all ranks the tokens its router is fed on one of them."""
        if not isinstance(batch, MegatronBatch):
            raise ValueError(
                "the model adds MoE or MTP losses, whose scale needs the count of fed tokens: pass MegatronBatch, not "
                "PackedSequences."
            )
        return int(batch.tokens.numel() * self._fed_share)

    def _scaled(self, result: PolicyLoss) -> Tensor:
        """The micro-batch's loss, for what megatron divides gradients by."""
        totals = self._started().totals
        terms = sum(result.terms.values()) if result.terms else None
        if totals is None:
            return result.loss_sum if terms is None else result.loss_sum + terms
        # megatron divides by `unit`: what is to be divided by something else is multiplied by unit / that.
        accepted = totals.accepted if self.config.changes_denominator else None
        divisor = totals.original if accepted is None else accepted
        if not self.per_token:
            unit = torch.full_like(divisor, float(self.micro_batches * self.groups.dp_size))
        elif self.extra_losses:
            unit = totals.fed
        else:
            unit = divisor.clamp(min=1)  # with nothing accepted megatron divides by nothing, and the terms still count
        loss = result.loss_sum * (unit / divisor.clamp(min=1))
        return loss if terms is None else loss + terms * (unit / totals.original.clamp(min=1))

    def finalize_model_grads(self, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        """megatron's finalize_model_grads, then `end_step`: errors on all ranks, the deferred weight mean."""
        if self._finalize is None:
            from megatron.core.distributed import finalize_model_grads

            self._finalize = finalize_model_grads
        outcome = self._finalize(model, *args, **kwargs)
        step, self.step = self.step, None
        self.finished = end_step(step, self.config, self.groups, model, None)
        self.thresholds = None if self.finished is None else self.finished.thresholds()
        return outcome

    def metrics(self) -> dict[str, float]:
        """The step's metrics, the same on every rank of the last pipeline stage; {} on the others.

        Collectives: after a training step none; after a forward-only pass those of `ParallelGroups.reduce_step`. With
        `report_dir` one rank appends them to its `metrics.jsonl`.
        """
        if self.finished is None and self.step is not None and self.groups.is_last_stage:
            self.finished, _ = self.step.finish()
            self.step = None
        if self.finished is None:
            return {}
        metrics = self.finished.metrics()
        if self.config.report_dir is not None and self.writes:
            log_step(self.config.report_dir, self.config, metrics)
        return metrics


def _refuse(config: MismatchConfig, per_token: bool, extra: list[str]) -> None:
    """Settings that this loop cannot make exact."""
    Step(config, ParallelGroups())  # refuses a scope that no loop of micro-batches can give
    if config.rs.group != "keep":
        raise ValueError(
            f"--rs-group {config.rs.group} cannot be had in the megatron-core hook, whose batches bring advantages: "
            f"form them by mismatch_plugin.group_advantages, and leave it out."
        )
    if "MTP" in extra and not per_token:
        raise ValueError(
            "without calculate_per_token_loss megatron divides the MTP loss by each micro-batch's own trained tokens, "
            "which may be none: switch calculate_per_token_loss on, or MTP off."
        )
    others = config.other_terms + extra
    if config.normalizes_step and config.use_rollout_log_probs and others:
        raise ValueError(deferred_with(others))
    if config.changes_denominator and not config.keep_known_before_step and (others or not per_token):
        reason = "; ".join(others) if others else "calculate_per_token_loss is off"
        who = f"algorithm {config.algorithm}" if config.use_rollout_log_probs else "--rs-policy current"
        raise ValueError(
            f"{who} knows its accepted tokens only after the step, and they are needed before it ({reason}): choose "
            f"--mismatch-denominator original."
        )


def _packed(batch: MegatronBatch | PackedSequences) -> PackedSequences:
    return batch.packed if isinstance(batch, MegatronBatch) else batch
