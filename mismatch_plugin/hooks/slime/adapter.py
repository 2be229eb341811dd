"""What the adapters of slime and miles share: both train with Megatron under Ray and call the same kinds of hooks.

Their losses are flat tensors of this rank's own tokens, reduced by a function of the host's that knows its
denominators. A `RayAdapter` packs the samples, calls the correction, and hands the result back. It uses the host's
log-probs, process groups and tracker (`Host`); how its data lie stands in `slime_batch`, what a step shares in
`slime_step`, what the arguments mean in `slime_settings`.
"""

from __future__ import annotations

import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.hooks.slime.batch import pack_local, without_rejected
from mismatch_plugin.hooks.slime.config import check_arguments, check_entry, describe_settings, read_settings
from mismatch_plugin.hooks.slime.step import StepRun, logger
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.parallel.agreement import StepKind, settings_of
from mismatch_plugin.parallel.groups import ParallelGroups

Reduce = Callable[[Tensor], Tensor]
"""The host's reduction of per-token values [T] of this micro-batch: original masks and the host's denominators."""


@dataclass(frozen=True)
class Host:
    """What differs between the two. All functions import the host when they are called.

    log_probs(args, batch, logits) → per sample log π_θ with gradient, and entropy (or None where it is not wanted).
    padded_lengths(args, batch or keywords of the hook) → what each sample's chunks are cut from, None for its length.
    log(args, metrics): the host's tracker. writes(args): whether this process writes files, of several replicas.
    """

    name: str
    groups: Callable[[], ParallelGroups]
    log_probs: Callable[[Namespace, Mapping[str, Any], Tensor], tuple[list[Tensor], list[Tensor] | None]]
    padded_lengths: Callable[[Namespace, Mapping[str, Any]], Sequence[int] | None]
    log: Callable[[Namespace, dict[str, float]], None]
    writes: Callable[[Namespace], bool] = lambda args: True


class RayAdapter:
    """The hooks of one host. One per process; `run` holds the optimizer step in progress."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.run = StepRun(host.name, host.log, host.writes)
        self._groups: ParallelGroups | None = None
        self._configs: dict[str, MismatchConfig] = {}

    @property
    def groups(self) -> ParallelGroups:
        """The host's process groups, looked up once."""
        if self._groups is None:
            self._groups = self.host.groups()
        return self._groups

    def config(self, args: Namespace) -> MismatchConfig:
        """`read_settings`, once for each state of the arguments; what it warns of stands in the start-up block."""
        key = repr(sorted((name, value) for name, value in vars(args).items() if isinstance(value, _PLAIN)))
        if key not in self._configs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MismatchWarning)
                self._configs = {key: read_settings(args, self.host.name)}
        return self._configs[key]

    def start(self, args: Namespace) -> None:
        """When a training process starts: refuse what cannot run, and say on rank 0 what will."""
        config = check_arguments(args, self.host.name)
        if config is not None and getattr(args, "rank", 0) == 0:
            for line in describe_settings(config, args, self.host.name):
                logger.info(line)

    def weigh(
        self,
        args: Namespace,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor] | None,
        rollout_log_probs: Sequence[Tensor] | None,
        loss_masks: list[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        **rest: Any,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Weights and rejection on the host's own policy loss [T] (algorithms 0 and 2).

        What is rejected gets loss 0; the masks are returned as they came, since the host keeps the original denominator
        and applies changed masks to its entropy and KL terms, too. Only a custom reducer of the policy loss, which
        may count the masks it is given, gets them without what is rejected. Metrics: [T], the same names on every call.
        Collectives: those of `correct` over CP, and with a reducer that of `without_rejected`.
        Raises ValueError as `check_entry` and `correct`.
        """
        config = self.config(args)
        check_entry(args, config, self.host.name, custom_loss=False)
        if train_log_probs is None:
            raise ValueError(f"{self.host.name} passes no training log-probs: weights of algorithm 2 need them.")
        packed = pack_local(
            loss_masks,
            total_lengths,
            response_lengths,
            self.groups.cp_size,
            self.groups.cp_rank,
            padded_lengths=self.host.padded_lengths(args, rest),
            old_log_probs=train_log_probs,
            rollout_log_probs=rollout_log_probs,
        )
        correction = correct(packed, config, self.groups, self.run.factor(config))
        self.run.record(correction.statistics, loss_masks)
        masks = loss_masks
        if config.rejects and getattr(args, "custom_pg_loss_reducer_function_path", None):
            masks = without_rejected(loss_masks, correction.keep, packed, self.groups)
        return (
            self._guarded(correction.applied_to(pg_loss), correction, config),
            masks,
            _token_metrics(correction, config),
        )

    def policy_loss(
        self, args: Namespace, batch: Mapping[str, Any], logits: Tensor, reduce: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The whole loss (all four algorithms) from the host's logits: (0-d loss with gradient, 0-d metrics)."""
        check_entry(args, self.config(args), self.host.name, custom_loss=True)
        log_probs, entropy = self.host.log_probs(args, batch, logits)
        loss, report = self.loss(args, batch, log_probs, entropy, reduce)
        if sum(part.numel() for part in log_probs) == 0:
            loss = loss + 0.0 * logits.sum()  # a rank without response tokens takes part in the backward pass, too
        return loss, report

    def loss(
        self,
        args: Namespace,
        batch: Mapping[str, Any],
        log_probs: list[Tensor],
        entropy: list[Tensor] | None,
        reduce: Reduce,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same from log π_θ and entropy, a tensor a sample of this rank's tokens.

        Entropy and KL run over the original masks. Metrics are named as the host's own policy loss names them.
        Collectives: those of `correct` over CP. Raises ValueError as `correct`.
        """
        config = self.config(args)
        old = None if config.use_rollout_log_probs else batch.get("log_probs")
        packed = pack_local(
            batch["loss_masks"],
            batch["total_lengths"],
            batch["response_lengths"],
            self.groups.cp_size,
            self.groups.cp_rank,
            padded_lengths=self.host.padded_lengths(args, batch),
            old_log_probs=old,
            rollout_log_probs=batch.get("rollout_log_probs"),
            advantages=batch["advantages"],
            ref_log_probs=batch.get("ref_log_probs"),
            entropy=entropy,
        )
        token = token_loss(torch.cat(log_probs), packed, config, self.groups, self.run.factor(config))
        self.run.record(token.correction.statistics, batch["loss_masks"])
        report: dict[str, Tensor] = {}
        clipped = dict(token.clip_columns())
        if clipped:
            either = clipped["clip_high"] | clipped["clip_low"]
            report = {"pg_clipfrac": reduce(either.to(token.policy.dtype)), "ppo_kl": reduce(clipped["ppo_kl"])}
        pg_loss = reduce(self._guarded(token.policy, token.correction, config))
        loss = pg_loss
        for term in token.terms():
            if term.coefficient or term.name == "entropy":
                added = reduce(term.added)
                report[f"{term.name}_loss"] = added.detach()
                loss = loss + term.coefficient * added
        if packed.rollout_log_probs is not None:
            report["train_rollout_logprob_abs_diff"] = reduce(token.correction.tokens.log_ratio.abs())
        report |= {name: reduce(values) for name, values in _token_metrics(token.correction, config).items()}
        return loss, {"loss": loss.detach().clone(), "pg_loss": pg_loss.detach().clone(), **report}

    def prepare_rollout(self, args: Namespace, rollout_data: Mapping[str, Any]) -> None:
        """Between the log-prob passes and training, on every rank: what is missing, and the steps' mean weights.

        Collectives: those of `ParallelGroups.agree` on every rank; then on the last stage, where weights are
        normalised over the step and known before it (algorithm 2), for each step those of `Step.prepare`.
        Raises ValueError, the same on every rank, where ranks differ, or rollout log-probs are needed and not there.
        """
        config = check_arguments(args, self.host.name)
        if config is None:
            return
        counts, batches = list(rollout_data["num_microbatches"]), list(rollout_data["micro_batch_indices"])
        data: list[PackedSequences] = []
        failure, held, sequences = "", None, None
        if self.groups.is_last_stage:
            held = ("loss_mask", *(name for key, name in _HELD.items() if rollout_data.get(key)))
            sequences = tuple(len(batch) for batch in batches)
            try:
                _refuse_missing(config, held)
                if config.normalizes_step and not config.use_rollout_log_probs:
                    data = self._pack_steps(args, rollout_data, counts, batches)
            except ValueError as error:  # on all ranks together
                failure = str(error)
        settings = settings_of(config, optimizer_steps=len(counts))
        self.run.prepare(
            config, self.groups, len(counts), data, StepKind(settings, held, tuple(counts), sequences, failure)
        )

    def begin_step(self, args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any]) -> None:
        """Before a step's first micro-batch, on every rank. Steps of another loss (a critic's) are left alone."""
        if getattr(args, "loss_type", "policy_loss") not in ("policy_loss", "custom_loss"):
            return
        from megatron.core.utils import get_model_config

        device = next((p.device for p in model[0].parameters()), "cpu")
        self.run.begin(args, self.config(args), self.groups, rollout_id, step_id, get_model_config(model[0]), device)

    def _pack_steps(
        self, args: Namespace, data: Mapping[str, Any], counts: Sequence[int], batches: Sequence[Sequence[int]]
    ) -> list[PackedSequences]:
        """One packed batch a step. counts: micro-batches of each. batches: the samples of every micro-batch."""
        packed, start = [], 0
        for count in counts:
            samples = [sample for batch in batches[start : start + count] for sample in batch]
            packed.append(self._pack_samples(args, data, samples))
            start += count
        return packed

    def _pack_samples(self, args: Namespace, data: Mapping[str, Any], samples: Sequence[int]) -> PackedSequences:
        chosen = {key: [data[key][i] for i in samples] for key in _PREPARED if data.get(key) is not None}
        return pack_local(
            chosen["loss_masks"],
            chosen["total_lengths"],
            chosen["response_lengths"],
            self.groups.cp_size,
            self.groups.cp_rank,
            padded_lengths=self.host.padded_lengths(args, chosen),
            old_log_probs=chosen.get("log_probs"),
            rollout_log_probs=chosen.get("rollout_log_probs"),
        )

    def _guarded(self, loss_T: Tensor, correction: Correction, config: MismatchConfig) -> Tensor:
        """Without a step whose end raises for invalid rollout log-probs, they turn the loss into NaN: never silent."""
        defective = correction.tokens.stopping(config)
        if self.run.step is not None or defective is None or config.rollout_log_prob_policy != "error":
            return loss_T
        return loss_T * torch.where(defective.any(), math.nan, 1.0).to(loss_T.dtype)


_PLAIN = (bool, int, float, str, list, dict, type(None))
_HELD = {
    "log_probs": "old_log_probs",
    **{name: name for name in ("rollout_log_probs", "ref_log_probs", "advantages", "weight_versions")},
}
_PREPARED = ("loss_masks", "total_lengths", "response_lengths", "log_probs", "rollout_log_probs", "max_seq_lens")


def _refuse_missing(config: MismatchConfig, held: Sequence[str]) -> None:
    if (config.algorithm != 0 or config.rejects) and "rollout_log_probs" not in held:
        raise ValueError(
            f"the rollout batch has no rollout_log_probs, and algorithm {config.algorithm} with these settings "
            f"needs them: let the rollout (or the custom generate function) return SGLang's log-probs "
            f"(return_logprob) for every sample, or leave the correction's flags out."
        )


def _token_metrics(correction: Correction, config: MismatchConfig) -> dict[str, Tensor]:
    """[T] each, for the host's mean over the original masks: token ratio, |ratio − 1|, weight used, rejected or not."""
    if config.metrics == "off":
        return {}
    ratio = correction.tokens.log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    metrics = {"tis": ratio, "tis_abs": (ratio - 1.0).abs()}
    if config.weighted:
        metrics["tis_weight"] = correction.weights * correction.keep
    if config.rejects:
        metrics["tis_rejected"] = (correction.tokens.mask - correction.keep).clamp(min=0.0)
    return metrics
