"""Parts of sequences, log-ratios of units (tokens, what `unit_ids` numbers, sequences, running sums), and weights.

How many parts there are is known on the host, so that finding and summing them waits for no device.
References: rollout-correction guide, sections 3.3 and 3.6; Liu & Li et al. 2025, "When Speed Kills Stability" (mask);
Precup, Sutton & Singh 2000 (running sums); Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training" (truncate); arXiv 2510.18855 (IcePop); arXiv 2605.07331 (bounds that grow); arXiv 2602.10693 (gamma).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.limits import GAMMA_NEGATIVE, GAMMA_POSITIVE, SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.config.units import Unit

LARGEST = 1e4
"""Of one token in a running sum, on every rank: what is beyond leaves other sequences their digits."""


@dataclass(frozen=True, eq=False)
class SequenceParts:
    """C parts of N sequences, those of a sequence one after the other. Any may be empty on this rank, or everywhere.

    offsets [C + 1] int64: a part holds this rank's tokens offsets[c] to offsets[c + 1]. index [T] integer: the part of
    each token. first [N + 1] int64: a sequence has the parts first[n] to first[n + 1]. sequence [C] int64: the sequence
    of each part. width: parts of every sequence where all have as many, else 0.
    """

    offsets: Tensor
    index: Tensor
    first: Tensor
    sequence: Tensor
    width: int = 0

    @property
    def splits(self) -> bool:
        """False where every sequence is one part, so that its sums are the parts'."""
        return self.width != 1

    def to_sequences(self, values_KC: Tensor) -> Tensor:
        """Σ over the parts of each sequence: [K, C] float64 → [K, N]."""
        if not self.splits:
            return values_KC
        return torch.segment_reduce(values_KC.T.contiguous(), "sum", offsets=self.first, unsafe=True).T

    def running(self, values_T: Tensor, sums_C: Tensor, whole: bool = False) -> Tensor:
        """Σ over the tokens of the sequence up to and with each: [T] → [T] float64, each within ±1e4. A rank sums its
        own part up to each token, and adds the reduced sums of the parts before. whole: of whole numbers."""
        sums = torch.zeros(len(values_T) + 1, dtype=torch.float64, device=values_T.device)
        values, before = sums[1:], sums
        values.copy_(values_T).clamp_(-LARGEST, LARGEST)
        if whole:
            values.cumsum_(0)
        else:  # one scan over all parts, brought back to 0 where each begins: it rounds as one part does, not as all do
            ended = torch.segment_reduce(values, "sum", offsets=self.offsets, unsafe=True)
            resets = torch.zeros_like(sums).index_add_(0, self.offsets[1:], ended)
            values.sub_(resets[:-1]).cumsum_(0)
            before = sums - resets
        running = values - before.index_select(0, self.offsets[:-1]).index_select(0, self.index)
        if self.splits:
            sums_NC = sums_C.view(-1, self.width)
            running.add_((sums_NC.cumsum(1) - sums_NC).flatten().index_select(0, self.index))
        return running


def chunk_parts(chunk_lengths: Sequence[Sequence[int]], device: torch.device) -> SequenceParts:
    """The chunks of every sequence, in order. chunk_lengths: this rank's tokens in each, as many chunks a sequence."""
    width = len(chunk_lengths[0]) if chunk_lengths else 1
    lengths = [length for chunks in chunk_lengths for length in chunks]
    tokens = torch.tensor(lengths, dtype=torch.int64, device=device)
    index = torch.repeat_interleave(torch.arange(len(lengths), device=device), tokens, output_size=sum(lengths))
    first = torch.arange(len(chunk_lengths) + 1, device=device) * width
    sequence = torch.arange(len(lengths), device=device) // width
    return SequenceParts(torch.cat([tokens.new_zeros(1), tokens.cumsum(0)]), index, first, sequence, width)


def unit_parts(unit_ids_T: Tensor, unit_counts: Sequence[int], sequence_index_T: Tensor) -> SequenceParts:
    """The units of every sequence, from the number of each token's unit in its sequence."""
    device, parts = unit_ids_T.device, sum(unit_counts)
    counts = torch.tensor(unit_counts, dtype=torch.int64, device=device)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    index = first.index_select(0, sequence_index_T) + unit_ids_T
    sequence = torch.repeat_interleave(torch.arange(len(unit_counts), device=device), counts, output_size=parts)
    return SequenceParts(torch.searchsorted(index, torch.arange(parts + 1, device=device)), index, first, sequence)


def number_runs(
    loss_mask_T: Tensor, lengths: tuple[int, ...], sequence_index_T: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """([T] int64 number of each token's turn in its sequence, turns of each sequence) of whole sequences.

    A turn is a maximal run of tokens that train; those between two belong to the first of them, where they add 0. A
    sequence has at least one, which may be empty. A mask on a device is not waited for: its sequences have as many as
    they could have, ⌈length / 2⌉, of which some are empty.
    """
    before = torch.cat([loss_mask_T.new_zeros(1), loss_mask_T[:-1]]) if len(loss_mask_T) else loss_mask_T
    within = torch.cat([loss_mask_T.new_zeros(1), sequence_index_T[1:] == sequence_index_T[:-1]])[: len(loss_mask_T)]
    starts = loss_mask_T & ~(before & within)
    running = torch.cat([torch.zeros(1, dtype=torch.int64, device=starts.device), starts.cumsum(0)])
    ends = torch.tensor([0, *lengths], device=starts.device).cumsum(0)
    turns = running.index_select(0, ends)
    ids = (running[1:] - turns.index_select(0, sequence_index_T) - 1).clamp_(min=0)
    if loss_mask_T.device.type != "cpu":
        return ids, tuple(max((length + 1) // 2, 1) for length in lengths)
    return ids, tuple(max(count, 1) for count in turns.diff().tolist())


def unit_log_ratio(unit: Unit, log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts) -> Tensor:
    """The log-ratio of every unit, [U], unclamped; 0 without response tokens.
    token: l_t · sum: Σ m l · mean: Σ m l / Σ m · running: Σ_{k≤t} m_k l_k, float64
    log_ratio_T: l, 0 at padding. sums: Σ m l (`log_ratio`) and Σ m (`tokens`) of each whole part, reduced; not looked
    at where the unit is a token.
    """
    if unit.per_token:
        return log_ratio_T
    if unit.aggregate == "running":
        return parts.running(log_ratio_T, sums["log_ratio"])
    return sums["log_ratio"] / sums["tokens"].clamp(min=1) if unit.aggregate == "mean" else sums["log_ratio"]


def unit_tokens(unit: Unit, mask_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts) -> Tensor:
    """Response tokens that a unit's log-ratio is the sum of, [U]."""
    if unit.per_token:
        return mask_T
    running = unit.aggregate == "running"
    return parts.running(mask_T, sums["tokens"], whole=True) if running else sums["tokens"]


def grown(log_bound: float, scale_U: Tensor | None) -> Tensor | float:
    """log bound · n^g, within ±20, [U]; as it is where nothing grows or nothing is bounded. scale_U: n^g."""
    if scale_U is None or math.isinf(log_bound):
        return log_bound
    return (scale_U * log_bound).clamp_(-SAFETY_BOUND, SAFETY_BOUND)


def outside_bounds(
    log_ratio: Tensor, log_lower: Tensor | float | None, log_upper: Tensor | float | None, padding: Tensor | None = None
) -> Tensor:
    """l < log lo or l > log hi, as bool. Padding (where l is 0) is never outside; with it bounds are numbers."""
    outside = torch.zeros_like(log_ratio, dtype=torch.bool) if log_upper is None else log_ratio > log_upper
    if log_lower is not None:
        outside = outside.logical_or_(log_ratio < log_lower)
    if padding is not None and not (log_lower or 0.0) <= 0.0 <= (log_upper or 0.0):
        outside = outside.masked_fill_(padding, False)
    return outside


def bound_weight(
    log_ratio: Tensor,
    mode: str,
    lower: float,
    upper: float,
    padding: Tensor | None = None,
    ratio: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The weight of a mode, and for `mask` which units are outside (None for the other modes).

    truncate: min(ρ, hi)
    clip: min(max(ρ, lo), hi)
    mask: ρ where lo ≤ ρ ≤ hi, else 0
    log_ratio: any shape, unclamped, zero where padded (there nothing is outside). ratio: `bounded_exp` of it, where the
    caller has it. scale: what log lo ≤ 0 and log hi ≥ 0 are multiplied by (`grown`), of the same shape.
    Host syncs: none. Gradient: none (call it without one).
    """
    ratio = bounded_exp(log_ratio) if ratio is None else ratio
    log_lower, log_upper = grown(math.log(lower), scale) if lower > 0 else None, grown(math.log(upper), scale)

    def bounded(low: float | None) -> Tensor:
        if not isinstance(log_upper, Tensor):
            return ratio.clamp(min=low, max=upper)
        below = torch.minimum(ratio, log_upper.exp())
        return below if low is None or not isinstance(log_lower, Tensor) else below.maximum(log_lower.exp())

    if mode == "truncate":
        return bounded(None), None
    if mode == "clip":
        return bounded(lower), None
    outside = outside_bounds(log_ratio, log_lower, log_upper, padding if scale is None else None)
    # The clamp only trims rounding at the bounds themselves: what is outside becomes 0.
    return bounded(lower).masked_fill_(outside, 0.0), outside


def gamma_weight(log_ratio_U: Tensor, ratio_U: Tensor, positive_U: Tensor) -> Tensor:
    """e^λ ρ^k e^(−λρ), [U]: 1 at ρ = 1, largest at ρ = k/λ (1.21 where A ≥ 0, else 1.24), 0 far away on either side.
    ratio_U: `bounded_exp` of the log-ratio. positive_U: bool, A ≥ 0. Host syncs: none. Gradient: none.
    """
    log_ratio_U = log_ratio_U.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    exponents = [k * log_ratio_U + scale * (1.0 - ratio_U) for k, scale in (GAMMA_POSITIVE, GAMMA_NEGATIVE)]
    return torch.where(positive_U, *exponents).exp_()


def batch_factor(weight_sum: Tensor, units: Tensor) -> Tensor:
    """Mean weight that batch normalisation divides by; 1 where it is 0 or there is nothing to average. weight_sum,
    units: 0-d sums over units, in mask mode over those inside the bounds. Host syncs: none."""
    mean = weight_sum / units.clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


class ActingBounds(NamedTuple):
    """The bounds that act on ratios, which the fractions outside of them are reported for.
    unit: whose ratio is compared. lower may be 0 (no bound), upper inf. growth: g, log lo and log hi grow as n^g.
    """

    unit: Unit
    lower: float
    upper: float
    growth: float = 0.0

    @property
    def log_lower(self) -> float:
        """−inf where there is no lower bound."""
        return math.log(self.lower) if self.lower > 0 else -math.inf

    @property
    def log_upper(self) -> float:
        """inf where there is no upper bound."""
        return math.log(self.upper)


def acting_bounds(config: MismatchConfig) -> ActingBounds | None:
    """The weights' bounds; without weights, or where the sign of the advantage decides on these, those of the first
    ratio criterion, at its level; without weights else a TIS bound that a preset or a person gave, for the metrics
    alone; None where nothing bounds a ratio.
    A criterion counts that bounds π_train's ratio in every unit: not under a condition, nor where π_θ is judged.
    """
    tis = config.tis
    own = ActingBounds(config.unit, tis.lower, tis.upper, tis.growth)
    if config.weighted and not config.weighs_by_sign:
        return own
    for criterion in () if config.rejects_on_current_policy else config.criteria:
        if criterion.in_log_space and criterion.condition == "any" and criterion.unit.aggregate != "max":
            upper = math.inf if criterion.upper_bound is None else criterion.upper_bound
            return ActingBounds(criterion.unit, criterion.lower_bound or 0.0, upper)
    given = not config.weighted and tis.model_fields_set & {"upper_bound", "lower_bound"}
    return own if given else None
