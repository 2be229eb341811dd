"""The functions that slime and miles call: both train with Megatron under Ray, and have the same kinds of hooks.

Their losses are flat tensors of this rank's own tokens, reduced by a function of the host's that knows its
denominators. A `RayAdapter` packs the samples, calls the correction, and hands the result back. A host is a subclass
that says where its log-probs, process groups and tracker are; what a step shares is in `hooks.megatron_step`, what the
arguments mean in `config`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from itertools import islice
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.loss import TokenLoss, token_loss
from mismatch_plugin.core.objectives import LOW_VARIANCE_BOUND, score_function_kl
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.data.versions import INITIAL_VERSION
from mismatch_plugin.hooks.base import wrap_once
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.hooks.megatron_step import MegatronStep, logger
from mismatch_plugin.hooks.slime.config import (
    POLICY_LOSSES,
    REDUCER,
    VERSIONS_PATCH,
    check_arguments,
    describe_settings,
    read_settings,
    runs,
    set_hook,
)
from mismatch_plugin.hooks.slime.samples import data_source
from mismatch_plugin.hooks.slime.updates import WeightUpdates
from mismatch_plugin.parallel.agreement import StepKind, settings_of
from mismatch_plugin.parallel.context import chunk_lengths, local_positions, padded_length, select_tokens_of
from mismatch_plugin.parallel.groups import ParallelGroups


def pack_local(
    args: Namespace, batch: Mapping[str, Any], groups: ParallelGroups, turns: bool = True, **tokens: Any
) -> PackedSequences:
    """This rank's tokens of a micro-batch. No collective, no host sync on what the samples hold.

    Under context parallelism it holds of each sequence (prompt and response) two chunks, in the zigzag layout, and of
    the response the tokens whose *predicting* position lies in them; maybe none.
    batch: loss_masks ([response] a sample, whole on every rank; anything but 0 trains), total_lengths,
        response_lengths, and under `--qkv-format bshd` (miles) max_seq_lens, which the chunks are cut from.
    turns: of the whole sequences, under context parallelism.
    tokens: per-token fields of `PackedSequences`, [this rank's tokens] a sample; None or [] leaves one out. All are
        detached but the entropy, whose gradient is the bonus.
    Raises ValueError where a field does not cover this rank's tokens of a sample.
    """
    masks, totals, responses = batch["loss_masks"], batch["total_lengths"], tuple(batch["response_lengths"])
    size, rank = groups.cp_size, groups.cp_rank
    for sample, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        if mask.shape != (response,):
            raise ValueError(
                f"loss_masks of sample {sample} has shape {tuple(mask.shape)}, its response {response} tokens: the "
                f"mask must cover the whole response on every rank."
            )
    packed = PackedSequences(loss_mask=torch.cat(list(masks)) != 0, lengths=responses)
    if size > 1:
        padded = batch.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None
        start, held, chunks = 0, [], []
        for sample, (length, total, response) in enumerate(zip(padded or totals, totals, responses, strict=True)):
            whole, prompt = padded_length(length, "zigzag", size), total - response
            at = local_positions(whole, "zigzag", size, rank)
            at = at[(at + 1 >= prompt) & (at + 1 < total)]  # those that predict a token of the response
            held.append(start + at + 1 - prompt)
            chunks.append(2 * size * sample + at // (whole // (2 * size)))
            start += response
        lengths = tuple(map(len, held))
        index = torch.cat(held).to(packed.loss_mask.device)
        packed = select_tokens_of(packed, index, lengths, chunk_lengths(torch.cat(chunks), 2 * size, packed), turns)
    fields: dict[str, Any] = {}
    for name, values in tokens.items():
        for sample, (value, length) in enumerate(zip(values or (), packed.lengths, strict=bool(values))):
            if value.shape != (length,):
                raise ValueError(
                    f"{name} of sample {sample} has shape {tuple(value.shape)}, but this rank holds {length} of "
                    f"the {responses[sample]} response tokens (rank {rank} of {size} in context parallelism)."
                )
        if values:
            joined = torch.cat(list(values))
            fields[name] = joined if name == "entropy" else joined.detach()
    return packed.replace(**fields)


Reduce = Callable[[Tensor], Tensor]
"""The host's reduction of per-token values [T] of this micro-batch: original masks and the host's denominators."""


_KEY = "weight_versions"


@dataclass(eq=False)
class Versions:
    """Which weights sampled the responses of a rollout and which train, in one training process: `rs.max_staleness`.

    Both hosts keep the version that SGLang names at the end of each call (`Sample.weight_versions`), and not which
    tokens it gave: a response is as old as the oldest of them. The trainer's version is the number of its last weight
    update, by which the engines know these weights. miles hands the versions to its training processes; slime does with
    the patch of `slime/ray/rollout.py`. A batch holds none: they are found by its loss masks, tensors of the rollout.

    host: its name. trainer: the version that trains; None before the first rollout. failure: why a version is not
    known, for all ranks to raise together; "" where all are.
    """

    host: str
    trainer: int | None = None
    failure: str = ""
    _held: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _told: bool = False

    def watch(self, actor: Any) -> None:
        """Let `train_actor` of the host's training class tell this of every rollout. Idempotent.

        Ray's actors are of a subclass of it, which has each of its methods again, wrapped for tracing: the methods of
        subclasses tell as well.
        """
        if "train_actor" in vars(actor):
            wrap_once(actor, "train_actor", self._tell)
        for below in actor.__subclasses__():
            self.watch(below)

    def _tell(self, own: Any, trainer: Any, rollout_id: int, rollout_data: Any, *args: Any, **kwargs: Any) -> Any:
        if self._told:  # a subclass's has told
            return own(trainer, rollout_id, rollout_data, *args, **kwargs)
        self.read(rollout_data, getattr(getattr(trainer, "weight_updater", None), "weight_version", None))
        self._told = True
        try:
            return own(trainer, rollout_id, rollout_data, *args, **kwargs)
        finally:
            self._told = False

    def read(self, rollout_data: dict[str, Any], trainer: int | None) -> None:
        """A rollout's loss masks and versions, one a sample. slime's own logging cannot read them: they are taken out.
        Host syncs: one for a sample without versions, to know whether it trains."""
        masks = rollout_data["loss_masks"]
        told = rollout_data.pop(_KEY, None) if self.host == "slime" else rollout_data.get(_KEY)
        names = rollout_data.get("sample_indices") or range(len(masks))
        rows = [*zip(names, masks, told or [()] * len(masks), strict=True)]
        self.trainer, self.failure, self._held = trainer, "", {}
        try:
            if trainer is None:
                raise ValueError(
                    f"--rs-max-staleness counts back from the number of the last weight update, and {self.host}'s "
                    f"training process has none: leave it out."
                )
            for name, mask, versions in rows:
                self._held[id(mask)] = mask, self._oldest(name, mask, versions, trainer)
        except ValueError as error:
            self.failure = str(error)

    def _oldest(self, name: Any, mask: Tensor, versions: Sequence[Any], trainer: int) -> int:
        # The hosts name their versions by the number of the update, from 1; SGLang's own name is that before the first.
        numbers = ["0" if str(version) == INITIAL_VERSION else str(version) for version in versions or ()]
        for number in numbers:
            if not number.isdecimal():
                raise ValueError(
                    f"sample {name}: weight version {number!r} is not the number of an update: leave "
                    f"--rs-max-staleness out."
                )
        if not numbers and bool((mask != 0).any()):
            patch = f"apply the patch ({VERSIONS_PATCH}), and " if self.host == "slime" else ""
            raise ValueError(
                f"sample {name} has no weight version (Sample.weight_versions): {patch}let a custom generate "
                f"function call Sample.update_from_meta_info with SGLang's meta_info, or leave --rs-max-staleness out."
            )
        return min(map(int, numbers), default=trainer)

    def on(self, packed: PackedSequences, config: MismatchConfig, loss_masks: Sequence[Tensor]) -> PackedSequences:
        """The packed batch with the versions of the samples whose masks these are, where the settings need them. Host
        syncs: none. Raises ValueError where a version is missing or the rollout was not read."""
        if config.rs.max_staleness is None:
            return packed
        if self.failure:
            raise ValueError(self.failure)
        held = [self._held.get(id(mask)) for mask in loss_masks]
        if self.trainer is None or None in held:
            raise ValueError(
                f"--rs-max-staleness needs the versions of {self.host}'s rollout, and the loss masks are not those of "
                f"one that was read: {set_hook(self.host, 'init')}."
            )
        versions = torch.tensor([version for _, version in filter(None, held)], dtype=torch.int64)
        tokens = torch.repeat_interleave(versions, torch.tensor(packed.lengths, dtype=torch.int64))
        return packed.replace(weight_versions=tokens.to(packed.loss_mask.device), trainer_version=self.trainer)


class RayAdapter(ABC):
    """The hooks of one host; its path arguments name the public methods. One per process.

    name: the host's. run: the optimizer step in progress. Hosts import themselves when a method is called.
    """

    name: str

    def __init__(self) -> None:
        self.host = host = HOSTS[self.name]
        self.settings, self.check = partial(read_settings, host=host), partial(check_arguments, host=host)
        self.describe, self.data_source = partial(describe_settings, host=host), partial(data_source, self.name)
        self.run = MegatronStep(self._log_step, self.is_first)
        self.versions, self.updates = Versions(self.name), WeightUpdates(self.name, self.run.rollout_metrics)
        self._read: tuple[Namespace, MismatchConfig] | None = None

    @abstractmethod
    def find_groups(self) -> ParallelGroups: ...

    @abstractmethod
    def log_probs(
        self, args: Namespace, batch: Mapping[str, Any], logits: Tensor
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Per sample log π_θ of this rank's tokens, with gradient, and entropy (None where it is not wanted)."""

    @abstractmethod
    def log(self, args: Namespace, metrics: dict[str, float]) -> None:
        """Hand metrics to the host's tracker."""

    def is_first(self, groups: ParallelGroups) -> bool:
        """Whether this rank of the last stage speaks for all."""
        return groups.is_first_of_stage

    @cached_property
    def groups(self) -> ParallelGroups:
        return self.find_groups()

    def init(self, args: Namespace) -> None:
        """When a training process starts: refuse what cannot run, say on rank 0 what will, and wrap the host's training
        class where weight versions are needed, and its weight updaters."""
        config = self.check(args)
        if config is None:
            return
        if config.rs.max_staleness is not None:
            actor = import_module(f"{self.name}.backends.megatron_utils.actor")
            self.versions.watch(actor.MegatronTrainRayActor)
        self.updates.watch(args, config.verify_weights)
        if getattr(args, "rank", 0) == 0:
            for line in self.describe(config, args):
                logger.info(line)

    def config(self, args: Namespace) -> MismatchConfig:
        """The checked settings, read once for these arguments, which are those of a policy loss."""
        if self._read is None or self._read[0] is not args:
            with ignore_mismatch_warnings():
                config = self.check(args)
            assert config is not None
            if config.normalizes_step and not runs(args, self.name, "before_train_step"):
                step = set_hook(self.name, "before_train_step")
                logger.warning("batch normalisation runs over each micro-batch; for the whole step %s.", step)
            self._read = args, config
        return self._read[1]

    def _log_step(self, args: Namespace, metrics: dict[str, float], number: int, first: bool) -> None:
        if first:
            self.log(args, {**{f"train/{name}": value for name, value in metrics.items()}, "train/step": number})

    def tis_function(
        self,
        args: Namespace,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor] | None,
        rollout_log_probs: Sequence[Tensor] | None,
        loss_masks: list[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        max_seq_lens: Sequence[int] | None = None,
        **rest: Any,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Importance weights and rejection on the host's own policy loss: algorithms 0 (rejection, metrics) and 2.

        pg_loss: [T] of this rank's response tokens. Lists: one tensor a sample; log-probs of this rank's tokens, loss
        masks of the whole response. max_seq_lens: padded length of each sample in a padded batch (miles).
        Returns the weighted loss (0 where rejected), the masks as they came, and metrics [T], the same names on every
        call: the host keeps the original denominator, and would apply other masks to its entropy and KL terms, too.
        Collectives: those of `correct` over CP. Raises ValueError as `config` and `correct`.
        """
        config = self.config(args)
        if train_log_probs is None:
            raise ValueError(f"{self.name} passes no training log-probs: weights of algorithm 2 need them.")
        lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths, "max_seq_lens": max_seq_lens}
        compared = {"old_log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs}
        packed = self._pack(args, {"loss_masks": loss_masks, **lengths}, compared)
        correction = correct(packed, config, self.groups, self.run.factor(config), thresholds=self.run.thresholds)
        loss = self.run.record(correction.applied_to(pg_loss), correction, config, loss_masks)
        return loss, loss_masks, _token_metrics(correction, config)

    def policy_loss(
        self, args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The corrected policy loss, all four algorithms, with entropy and KL terms: (0-d loss, 0-d metrics).

        logits: [1, T, V/tp] float32. sum_of_sample_mean: the host's reduction of this rank's tokens.
        """
        log_probs, entropy = self.log_probs(args, batch, logits)
        loss, report = self.loss(args, batch, log_probs, entropy, sum_of_sample_mean)
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
        Collectives: those of `correct` over CP. Raises ValueError as `config` and `correct`.
        """
        config = self.config(args)
        names = ("rollout_log_probs", "advantages", "ref_log_probs")
        fields = {name: batch.get(name) for name in names} | {"entropy": entropy}
        fields["old_log_probs"] = None if config.use_rollout_log_probs else batch.get("log_probs")
        packed = self._pack(args, batch, fields)
        token = token_loss(
            torch.cat(log_probs), packed, config, self.groups, self.run.factor(config), thresholds=self.run.thresholds
        )
        policy = self.run.record(token.policy, token.correction, config, batch["loss_masks"])
        reduce_policy, path = reduce, getattr(args, REDUCER, None)
        if path is not None:
            shape = (batch["total_lengths"], batch["response_lengths"], batch["loss_masks"])
            reduce_policy = resolve_name(path)(*shape, args.calculate_per_token_loss)
        pg_loss = loss = reduce_policy(policy)
        report: dict[str, Tensor] = {}
        if clipped := dict(token.clip_columns()):
            either = clipped["clip_high"] | clipped["clip_low"]
            report = {"pg_clipfrac": reduce(either.to(token.policy.dtype)), "ppo_kl": reduce(clipped["ppo_kl"])}
        for term in token.terms():
            if term.coefficient:
                weighted_here = term.name == "kl" and getattr(args, "use_unbiased_kl", False)
                added = reduce(unbiased_kl(token) if weighted_here else term.added)
                loss = loss + term.coefficient * added
            elif term.name == "entropy":  # reported as the host does; 0 times it would still be in the gradient
                added = reduce(term.added.detach())
            else:
                continue
            report[f"{term.name}_loss"] = added.detach()
        if packed.rollout_log_probs is not None:
            report["train_rollout_logprob_abs_diff"] = reduce(token.correction.tokens.log_ratio.abs())
        report |= {name: reduce(values) for name, values in _token_metrics(token.correction, config).items()}
        return loss, {"loss": loss.detach().clone(), "pg_loss": pg_loss.detach().clone(), **report}

    def _pack(self, args: Namespace, batch: Mapping[str, Any], fields: Mapping[str, Any]) -> PackedSequences:
        config = self.config(args)
        packed = pack_local(args, batch, self.groups, "unit_ids" in config.unit.needs, **fields)
        return self.versions.on(packed, config, batch["loss_masks"])

    def rollout_data_postprocess(self, args: Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
        """Before a rollout's steps, on every rank: checks the data, and knows mean weights that algorithm 2 divides by.

        Collectives: those of `ParallelGroups.agree` on every rank; then on the last stage, where weights are
        normalised over the step and known before it (algorithm 2), for each step those of `Step.prepare`.
        Raises ValueError, the same on every rank, where ranks differ, or rollout log-probs are needed and not there.
        """
        if args.loss_type not in POLICY_LOSSES:
            return
        config = self.config(args)
        counts, batches = list(rollout_data["num_microbatches"]), list(rollout_data["micro_batch_indices"])
        steps: list[PackedSequences] = []
        failure, held, sequences = self.versions.failure, None, None
        if self.groups.is_last_stage:
            held = ("loss_mask", *(name for key, name in _HELD.items() if rollout_data.get(key)))
            sequences = tuple(map(len, batches))
            try:
                if config.needs_rollout_log_probs and "rollout_log_probs" not in held:
                    raise ValueError(
                        f"the rollout batch has no rollout_log_probs, which algorithm {config.algorithm} with these "
                        f"settings needs: let the rollout return SGLang's log-probs (return_logprob) for every sample."
                    )
                left, known = iter(batches), config.normalizes_step and not config.use_rollout_log_probs
                for count in counts if known else ():
                    samples = [sample for batch in islice(left, count) for sample in batch]
                    lists = {key: rollout_data[key] for key in _PREPARED if rollout_data.get(key) is not None}
                    chosen = {key: [rows[i] for i in samples] for key, rows in lists.items()}
                    fields = {mine: chosen.get(theirs) for theirs, mine in _COMPARED.items()}
                    steps.append(self._pack(args, chosen, fields))
            except ValueError as error:  # on all ranks together
                failure = str(error)
        kind = StepKind(settings_of(config, optimizer_steps=len(counts)), held, tuple(counts), sequences, failure)
        self.run.prepare(config, self.groups, kind, steps)

    def before_train_step(
        self, args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, scheduler: Any
    ) -> None:
        """Begin an optimizer step, on every rank; it ends inside megatron's finalize_model_grads, before the optimizer.

        Steps of another loss (a critic's) are left alone.
        """
        if args.loss_type not in POLICY_LOSSES:
            return
        from megatron.core.utils import get_model_config

        config, model_config = self.config(args), get_model_config(model[0])
        number = rollout_id * (self.run.steps_per_rollout or _steps_per_rollout(args)) + step_id
        failure = self.versions.failure
        self.run.begin(args, config, self.groups, model_config, number, step_id=step_id, failure=failure)


_HELD = {"log_probs": "old_log_probs"} | {
    name: name for name in ("rollout_log_probs", "ref_log_probs", "advantages", "weight_versions")
}
_COMPARED = {"log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs", "advantages": "advantages"}
_PREPARED = ("loss_masks", "total_lengths", "response_lengths", "max_seq_lens", *_COMPARED)


def _steps_per_rollout(args: Namespace) -> int:
    """As the host counts them, where the rollout's data do not say."""
    steps = getattr(args, "num_steps_per_rollout", None)
    samples = (getattr(args, "rollout_batch_size", None) or 1) * (getattr(args, "n_samples_per_prompt", None) or 1)
    return int(steps or max(1, samples // (getattr(args, "global_batch_size", None) or samples)))


def unbiased_kl(token: TokenLoss) -> Tensor:
    """[T] π_θ/anchor · k(d) with the gradient of both, as --use-unbiased-kl has it (arXiv 2512.02556).

    d = log π_θ − log π_ref; anchor: π_rollout under bypass, else π_old. low_var_kl bounds the product to ±10.
    """
    packed, tokens, kind = token.packed, token.correction.tokens, token.config.terms.kl_type
    assert packed.ref_log_probs is not None  # `token_loss` has refused a coefficient without it
    anchor = tokens.rollout if token.config.use_rollout_log_probs else packed.old_log_probs
    anchor = token.log_probs if anchor is None else torch.where(token.selected, anchor, 0.0)
    ref = torch.where(token.selected, packed.ref_log_probs.detach(), 0.0)
    bound = LOW_VARIANCE_BOUND if kind == "low_var_kl" else math.inf
    return score_function_kl(token.log_probs, anchor, ref, "k3" if kind == "low_var_kl" else kind, math.inf, bound)


def _token_metrics(correction: Correction, config: MismatchConfig) -> dict[str, Tensor]:
    """[T] each, for the host's mean over the original masks: token ratio, |ratio − 1|, weight used, rejected or not."""
    if config.metrics == "off":
        return {}
    ratio = bounded_exp(correction.tokens.log_ratio)
    metrics = {"tis": ratio, "tis_abs": (ratio - 1.0).abs()}
    if config.weighted:
        metrics["tis_weight"] = correction.applied
    if config.rejects:
        metrics["tis_rejected"] = (correction.tokens.mask - correction.keep).clamp(min=0.0)
    return metrics
