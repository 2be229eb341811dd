"""`correct`: from log-probs to importance weights, accepted tokens and mergeable statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mismatch_plugin.core import rejection
from mismatch_plugin.core.correction_state import CorrectionState
from mismatch_plugin.core.metrics.collect import collect_statistics, second_columns, token_columns
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import Column, named_rows, segment_sums, spread
from mismatch_plugin.core.validity import TRAIN_DEFECTS, Tokens, invalid_error, select_tokens, stopping_kinds

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


Further = Callable[[Tokens], Iterable[Column]]
"""Columns of a caller, made of the selected tokens, whose sums travel in the same SUM: see `Correction.sums_N`."""


class SequenceGroups(Protocol):
    """The context-parallel reductions that core uses, and who counts a sequence."""

    @property
    def cp_size(self) -> int:
        """Ranks that hold parts of the same sequences."""
        ...

    @property
    def counts_sequences(self) -> bool:
        """True on the one rank of the group that counts each sequence."""
        ...

    def sum(self, partials: Tensor) -> Tensor:
        """Sum over the ranks that hold parts of the same sequences; may work in place."""
        ...

    def max(self, partials: Tensor) -> Tensor:
        """Maximum over the same ranks; may work in place."""
        ...


@dataclass(frozen=True, eq=False)
class Correction:
    """weights [T]: importance weights, 0 at padding and where mask mode rejects. keep [T]: 1 where a token stays in
    the loss, else 0. Both in the log-probs' dtype, without gradient; the loss is multiplied by `weights · keep`.
    tokens: the selected log-probs. tokens_N, kept_N [N]: response tokens of each whole sequence, and how many of them
    stay (float64). factor: the mean that batch normalisation divided by, None without it. sums_N: the reduced sums of
    every column that was summed over whole sequences, by name.
    """

    weights: Tensor
    keep: Tensor
    statistics: Statistics
    tokens: Tokens
    tokens_N: Tensor
    kept_N: Tensor
    factor: Tensor | float | None = None
    sums_N: Mapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        kept, tokens = int(self.kept_N.sum()), int(self.tokens_N.sum())
        mean = float(self.applied.sum()) / max(kept, 1)
        return f"Correction({kept} of {tokens} tokens kept, mean weight {mean:.4g}; [T] .weights, .keep)"

    @property
    def applied(self) -> Tensor:
        """[T] w · keep: what a token's loss is multiplied by."""
        return self.weights * self.keep

    def applied_to(self, loss_T: Tensor) -> Tensor:
        """w · keep · a loss of the host's own, [T]. Selected: inf or NaN where nothing trains must not become NaN."""
        return torch.where(self.keep > 0, loss_T * self.weights.to(loss_T.dtype), 0.0)


def correct(
    packed: PackedSequences,
    config: MismatchConfig,
    groups: SequenceGroups | None = None,
    batch_factor: Tensor | float | None = None,
    log_probs: Tensor | None = None,
    thresholds: Mapping[str, Tensor] | None = None,
) -> Correction:
    """Importance weights, accepted tokens and statistics of a batch.

    The training side is `packed.old_log_probs`. l_t = log π_train − log π_rollout on the loss mask and 0 elsewhere;
    then level, mode, batch normalisation, criteria, veto and staleness.

    groups: context-parallel reductions; None means whole sequences here.
    batch_factor: mean weight of the whole step (`Statistics.batch_factor`); None takes that of this batch. Unused
        without batch normalisation.
    log_probs: log π_θ, [T] or as `PackedSequences.flatten` takes it; read under `rs.policy` current alone.
    thresholds: `Statistics.thresholds` of the step before, for budgets; None in the first step: the bounds as written.
    Collectives: one SUM of [K, N] (at turn level with the sums of every turn, at prefix level of every chunk), at
        prefix level a second one of [K', N], and one MAX where a sequence_max criterion is set; none without groups.
    Host syncs: none. Gradient: none.
    Raises: TypeError where config is none; ValueError for missing fields; InvalidLogProbError where the packed data
        were found to hold invalid log-probs that are used and the policy is `error` (`metrics()` reports a device's).
    """
    validate_config_type(config)
    _raise_invalid(packed, config, stopping_kinds(config))
    if packed.old_log_probs is None:
        raise ValueError(
            "old_log_probs is missing: correct needs the training side's log-probs of the same tokens "
            "(train_log_probs is its other spelling)."
        )
    current = None if log_probs is None else packed.flatten(log_probs, "log_probs")
    return compute_correction(packed.old_log_probs.detach(), packed, config, groups, batch_factor, current, thresholds)


@torch.no_grad()
def compute_correction(
    train_T: Tensor,
    packed: PackedSequences,
    config: MismatchConfig,
    groups: SequenceGroups | None,
    batch_factor: Tensor | float | None,
    current_T: Tensor | None = None,
    thresholds: Mapping[str, Tensor] | None = None,
    further: Further | None = None,
) -> Correction:
    """`correct` with the training side handed in (`policy_loss` passes π_old or π_θ), and log π_θ."""
    validate_fields(packed, config)
    for name in config.unit.needs if groups is not None and groups.cp_size > 1 else ():
        if getattr(packed, name) is None:
            raise ValueError(
                f"{name} is missing: --tis-level {config.tis.level} under context parallelism needs "
                f"{' and '.join(config.unit.needs)}, which parallel.context.shard sets."
            )
    excludes_invalid = config.metrics != "off" and packed.rollout_log_probs is not None and config.excludes_invalid
    tokens = select_tokens(train_T, packed.loss_mask, packed.rollout_log_probs, excludes_invalid)
    judged = rejection.rejection_inputs(config, packed, tokens, current_T, thresholds)
    stale_T = rejection.stale_tokens(config, packed)
    state = CorrectionState(config, packed, tokens, judged, train_T)

    # Decisions and weights that need one token only.
    state.outside_T = rejection.reject_tokens(config, judged, stale_T)
    if state.unit.per_token:
        state.weigh()
    masked_T, rejected_T = state.rejected_tokens()

    # One sum (and where asked one maximum) a sequence, over all of its tokens wherever they live.
    columns = chain(
        token_columns(state, masked_T, rejected_T), rejection.rejection_columns(config, judged, state.measured)
    )
    if further is not None:
        columns = chain(columns, further(tokens))
    if excludes_invalid:
        fresh = [] if stale_T is None else [Column("fresh", packed.loss_mask.logical_and(stale_T.logical_not()))]
        columns = chain(columns, [Column("trained", packed.loss_mask), *fresh])
    names, partials = segment_sums(columns, packed.offsets)
    part_columns = list(state.part_columns(masked_T, rejected_T))
    if part_columns:
        part_names, part_sums = segment_sums(part_columns, state.parts.offsets)
        if groups is not None:  # one SUM
            both = groups.sum(torch.cat([partials.flatten(), part_sums.flatten()]))
            sums, sums_of_parts = both.split([partials.numel(), part_sums.numel()])
            partials, part_sums = sums.view_as(partials), sums_of_parts.view_as(part_sums)
        state.read(names, partials)
        state.sums_U = named_rows(part_names, part_sums)
    else:
        state.read(names, partials if groups is None else groups.sum(partials))
        state.sums_U = state.sums_N
    maxima_N = rejection.sequence_maxima(config, judged, packed.offsets)
    if maxima_N and groups is not None:
        maxima = groups.max(torch.stack(list(maxima_N.values())))
        maxima_N = dict(zip(maxima_N, maxima.unbind(), strict=True))

    # Decisions and weights that need the whole unit or sequence.
    state.outside_N, state.values_N = rejection.reject_sequences(config, judged, state.sums_N, state.means_N, maxima_N)
    if not state.unit.per_token:
        state.weigh()
    if state.unit.needs_second_reduction:
        masked_T, rejected_T = state.rejected_tokens()
        names, sums = segment_sums(second_columns(state, masked_T, rejected_T), packed.offsets)
        if names:
            state.read(names, sums if groups is None else groups.sum(sums))

    # Back to tokens.
    state.settle(rejected_T)
    if config.normalizes:
        state.factor = state.batch_factor() if batch_factor is None else batch_factor
    counts = groups is None or groups.counts_sequences
    statistics = collect_statistics(state, counts_sequences=counts)
    weights, keep, tokens_N, kept_N = tokens.mask, tokens.mask, state.tokens_N, state.tokens_N
    if excludes_invalid:  # nothing is weighed or judged by its log-prob, and the loss runs over all that train
        weights = keep = packed.loss_mask.to(tokens.mask.dtype)
        tokens_N = kept_N = state.sums_N["trained"]
        trained = torch.stack([tokens_N.sum(), (tokens_N > 0).sum().double()]) * float(counts)
        statistics = statistics.with_vector(("trained_tokens", "trained_sequences"), trained)
        if stale_T is not None and not config.dry_run:
            keep, kept_N = keep.masked_fill(stale_T, 0.0), state.sums_N["fresh"]
    elif not config.dry_run:
        keep, kept_N = state.keep_T, state.kept_N
        if state.weights_U is not None:
            weights = state.weights_U.to(keep.dtype)
            weights = weights if state.unit.one_ratio_per_token else tokens.mask * spread(weights, state.parts.index)
        if state.factor is not None:
            weights = weights / state.factor
    factor = None if excludes_invalid or config.dry_run else state.factor
    return Correction(weights, keep, statistics, tokens, tokens_N, kept_N, factor, state.sums_N)


@torch.no_grad()
def given_correction(
    weights_T: Tensor,
    train_T: Tensor,
    packed: PackedSequences,
    config: MismatchConfig,
    groups: SequenceGroups | None = None,
    further: Further | None = None,
) -> Correction:
    """A correction made elsewhere: these weights [T] where the mask trains, nothing rejected, nothing measured.

    Collectives: one SUM of [K, N] with groups.
    """
    tokens = select_tokens(train_T, packed.loss_mask, None)
    columns = [Column("tokens", tokens.mask), *(further(tokens) if further is not None else ())]
    names, partials = segment_sums(columns, packed.offsets)
    sums_N = named_rows(names, partials if groups is None else groups.sum(partials))
    weights = torch.where(packed.loss_mask, weights_T.to(tokens.mask.dtype), 0.0)
    nothing, counts_N = partials.new_zeros(0), sums_N["tokens"]
    statistics = Statistics(nothing, nothing, (), (), config)
    return Correction(weights, tokens.mask, statistics, tokens, counts_N, counts_N, sums_N=sums_N)


def validate_fields(packed: PackedSequences, config: MismatchConfig) -> None:
    """Raise what `correct` raises where the batch lacks what the configuration needs."""
    validate_config_type(config)
    if packed.rollout_log_probs is None and config.needs_rollout_log_probs:
        raise ValueError(
            f"rollout_log_probs is missing: algorithm {config.algorithm} with these settings needs the log-probs that "
            f"the rollout engine returned (SGLang: return_logprob)."
        )
    if config.advantage_readers and packed.advantages is None:
        raise ValueError(
            f"advantages is missing: {', '.join(config.advantage_readers)} hangs on it: pass one advantage a token (or "
            f"a sequence, in from_lists), or leave that out."
        )
    for name in ("weight_versions", "trainer_version") if config.rs.max_staleness is not None else ():
        if getattr(packed, name) is None:
            raise ValueError(
                f"{name} is missing: rs.max_staleness needs the version of the weights that sampled each token and of "
                f"those that train: pass both, or leave the limit out."
            )
    # Under bypass the training side is π_θ, and π_old, against which the data were checked, enters nothing: it makes no
    # fill of a 0.0 either. The step finds those of π_θ.
    passed = (*TRAIN_DEFECTS, "zero_fill") if config.use_rollout_log_probs else ()
    _raise_invalid(packed, config, [kind for kind in stopping_kinds(config) if kind not in passed])


def _raise_invalid(packed: PackedSequences, config: MismatchConfig, kinds: Collection[str]) -> None:
    found = [item for item in packed.invalid if item.kind in kinds]
    if found and config.rollout_log_prob_policy == "error":
        raise invalid_error(found, sum(packed.invalid_counts.get(kind, 0) for kind in kinds))


def validate_config_type(config: object) -> None:
    """Raise TypeError for what has no algorithm, such as a preset's name or a dict of settings."""
    if not hasattr(config, "algorithm"):
        raise TypeError(
            f"config is {config!r}, a {type(config).__name__}: pass a MismatchConfig, such as "
            f'mismatch_plugin.preset("token_is") or MismatchConfig(use_tis=True).'
        )
