"""How large the mismatch is: the metrics of training, the distribution of the log-ratio, and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.metrics.full import PROBABILITY_EDGES
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import bounded_exp, segment_max, segment_sum
from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number, version_of_tokens
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.packing import at_tokens, numbered_versions, pieces, samples_of
from mismatch_plugin.diagnose.result import Group, Size
from mismatch_plugin.limits import SAFETY_BOUND

QUANTILES = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)
"""In percent."""
POSITION_EDGES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
LENGTH_EDGES = (64, 256, 1024, 4096, 16384, 65536)
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
MAX_TURNS = 8
MAX_NAMES = 24
MAX_STALENESS = 8
UNKNOWN = -(2**31)
"""Staleness of a token whose version, or whose trainer's version, has no number."""
OLD_SHARE = 0.05
"""Of the tokens: so few of the oldest may be left out."""


def measure(batch: Batch, packed: PackedSequences, config: MismatchConfig) -> tuple[dict[str, float], Size]:
    """(the metrics that training reports at level full for these settings, how large the mismatch is).

    packed: `packed_of(batch)`. Raises OverflowError where gaps cannot be added up.
    """
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    with ignore_mismatch_warnings():
        config = config.replace(metrics="full")
    # π_θ is π_old in the first step, which is judged here.
    corrections = (correct(piece, config, log_probs=piece.old_log_probs) for piece in pieces(packed))
    statistics = reduce(Statistics.merge, (correction.statistics for correction in corrections))
    gap = packed.old_log_probs - packed.rollout_log_probs
    if not gap.abs().sum().isfinite():
        raise OverflowError("log-probs are too large to be added up: look at those below -1e300.")
    quantiles = np.quantile(gap.numpy(), np.array(QUANTILES) / 100).tolist()
    ratio = bounded_exp(gap)
    columns = [column.numpy() for column in (gap.abs(), -gap, k3(gap), ratio, ratio.square())]
    size = Size(
        quantiles={f"p{share:g}": value for share, value in zip(QUANTILES, quantiles, strict=True)},
        breakdowns={name: _groups(labels, codes, columns) for name, labels, codes in _parts(batch, packed)},
    )
    return statistics.metrics(), size


# Where it comes from -------------------------------------------------------------------------------------------------


def _groups(labels: Sequence[str], codes: Ints, columns: Sequence[Floats]) -> tuple[Group, ...]:
    """The buckets that hold a token, in order. columns: |Δ log p|, k1, k3, ρ, ρ²."""
    count = np.bincount(codes, minlength=len(labels))
    sums = np.stack([np.bincount(codes, column, len(labels)) for column in columns], axis=1)
    groups = []
    for label, n, (absolute, kl, k3_kl, ratio, squared) in zip(labels, count.tolist(), sums.tolist(), strict=True):
        if n:
            ess = min(ratio**2 / (n * squared), 1.0)
            groups.append(Group(name=label, tokens=n, abs_mean=absolute / n, kl=kl / n, k3_kl=k3_kl / n, ess=ess))
    return tuple(groups)


def _parts(batch: Batch, packed: PackedSequences) -> Iterator[tuple[str, Sequence[str], Ints]]:
    """By what; its buckets' labels; [T] the bucket of each token, an index into them.

    position: index in the response. length: response tokens. probability: π_rollout. entropy: nats, as told by the
    training side. turn: which run of tokens that train, where a response has several. version: the weights that sampled
    the token. staleness: how many steps they are behind the trainer's. server, dp_rank. advantage: its sign.
    """
    samples, lengths = samples_of(batch, packed), np.array(packed.lengths)
    assert packed.positions is not None and packed.rollout_log_probs is not None
    yield "position", _counted(POSITION_EDGES), _bucket(packed.positions, POSITION_EDGES)
    of_sample = _bucket(np.array([len(sample) for sample in samples]), LENGTH_EDGES)
    yield "length", _counted(LENGTH_EDGES), np.repeat(of_sample, lengths)
    yield "probability", _between(PROBABILITY_EDGES), _bucket(packed.rollout_log_probs, np.log(PROBABILITY_EDGES))
    if packed.entropy is not None:
        yield "entropy", _between(ENTROPY_EDGES), _bucket(packed.entropy, ENTROPY_EDGES)
    turns = packed.unit_numbers()[0].numpy()
    if turns.max() > 0:
        labels = [*map(str, range(1, MAX_TURNS + 1)), f"from {MAX_TURNS + 1}"]
        yield "turn", labels, np.minimum(turns, MAX_TURNS)
    if told := {span.version for sample in samples for span in sample.weight_versions}:
        newest = sorted(told, key=lambda name: (-1 if (n := version_number(name)) is None else n, name))[-MAX_NAMES:]
        code = dict.fromkeys(told, len(newest)) | {version: i for i, version in enumerate(newest)}
        none = len(newest) + 1
        codes = at_tokens(lambda s: version_of_tokens(s.weight_versions, code, len(s), none), samples, packed)
        yield "version", [*newest, "older", "unknown"], codes
    steps = at_tokens(_behind, samples, packed)
    if (steps != UNKNOWN).any():
        labels = ["ahead", *map(str, range(MAX_STALENESS + 1)), f"from {MAX_STALENESS + 1}", "unknown"]
        codes = np.clip(steps, -1, MAX_STALENESS + 1) + 1
        yield "staleness", labels, np.where(steps == UNKNOWN, len(labels) - 1, codes)
    for part, name in enumerate(("server", "dp_rank")):
        values = [sample.worker[part] for sample in samples]
        if named := sorted({value for value in values if value is not None}):
            known = named[:MAX_NAMES]
            place: dict[Any, int] = dict.fromkeys(named, len(known)) | {value: i for i, value in enumerate(known)}
            codes = np.repeat([place.get(value, len(known) + 1) for value in values], lengths)
            yield name, [*map(str, known), "others", "unknown"], codes
    if packed.advantages is not None:
        yield "advantage", ("negative", "zero", "positive"), packed.advantages.sign().long().add_(1).numpy()


def _behind(sample: Sample) -> Ints:
    """[n] trainer's version − token's version, in steps of the numbers at their ends; UNKNOWN where one has none."""
    trainer, numbers = version_number(sample.trainer_version), numbered_versions(sample)
    return np.where(numbers < 0, UNKNOWN, UNKNOWN if trainer is None else np.maximum(trainer - numbers, UNKNOWN + 1))


def _bucket(values: Tensor | Ints, edges: Sequence[float] | Floats) -> Ints:
    """How many edges are ≤ the value."""
    return np.searchsorted(np.asarray(edges), np.asarray(values), side="right")


def _counted(edges: Sequence[int]) -> tuple[str, ...]:
    """Labels of whole numbers."""
    inner = [str(low) if high == low + 1 else f"{low} to {high - 1}" for low, high in pairwise((0, *edges))]
    return (*inner, f"from {edges[-1]}")


def _between(edges: Sequence[float]) -> tuple[str, ...]:
    inner = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    return (f"below {edges[0]:g}", *inner, f"from {edges[-1]:g}")


# What a setting is chosen by -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What the rules look at.

    k3_kl: nats a token, the estimate of KL. ess: effective sample size of the tokens' ratios, a share.
    max_length: trained tokens of the longest response; inf where nobody knows.
    tail: share of tokens with a ratio outside [½, 2] and |l| above ten medians: Gaussian noise of one size has none.
    mean_turns: runs of tokens that train, a response. longest_turn: its trained tokens; inf where nobody knows.
    credit: share of the responses whose advantages differ from token to token.
    drifting: share of responses whose mean log-ratio, times √length, is six robust deviations from the median one; each
    token's limited to six medians of |l|, so that single tokens are no drift.
    stale: weight versions that the oldest tokens are behind. fresh: versions that all but `OLD_SHARE` of the tokens are
    behind at most; inf where nobody knows. old_kl: k3 of the others, over that of these; 0 without others.
    one_step: one optimizer step a rollout batch. expensive_pass: the user would save the second forward pass.
    """

    k3_kl: float
    ess: float
    max_length: float
    tail: float = 0.0
    drifting: float = 0.0
    stale: float = 0.0
    fresh: float = math.inf
    old_kl: float = 0.0
    mean_turns: float = 1.0
    longest_turn: float = math.inf
    credit: float = 0.0
    one_step: bool = False
    expensive_pass: bool = False

    @property
    def kl_length(self) -> float:
        """k3 times the longest response: half the variance of the log of its product of ratios."""
        return self.k3_kl * self.max_length

    @property
    def kl_turn(self) -> float:
        return self.k3_kl * self.longest_turn


def figures_of(packed: PackedSequences, *, stale: float, one_step: bool, expensive_pass: bool) -> Figures:
    """The figures of a batch as `packed_of` makes it: every token trains, every sequence has one."""
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    log_ratio = (packed.old_log_probs - packed.rollout_log_probs).double().clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio, size, divergence = log_ratio.exp(), log_ratio.abs(), k3(log_ratio)
    median = float(size.median())
    far = (size > math.log(2.0)) & (size > 10 * median)
    lengths = torch.tensor(packed.lengths, dtype=torch.float64)
    means = segment_sum(log_ratio.clamp(-6 * median, 6 * median), packed.offsets) / lengths
    shift = (means - means.median()) * lengths.sqrt()
    deviation = 1.4826 * shift.abs().median()
    of_turns = packed.units.offsets.diff().double()
    versions, fresh, old_kl = packed.weight_versions, math.inf, 0.0
    if versions is not None and packed.trainer_version is not None:
        behind = packed.trainer_version - versions
        fresh = float(max(int(behind.sort().values[math.ceil((1.0 - OLD_SHARE) * len(behind)) - 1]), 0))
        old = behind > fresh
        rest = float(divergence[~old].mean())
        old_kl = float(divergence[old].mean()) / rest if old.any() and rest > 0 else 0.0
    credit = 0.0
    if packed.advantages is not None:
        values = packed.advantages.double()
        most, least = segment_max(values, packed.offsets), -segment_max(-values, packed.offsets)
        credit = float((most - least > 1e-6 * torch.maximum(most.abs(), least.abs())).double().mean())
    return Figures(
        k3_kl=float(divergence.mean()),
        ess=float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        max_length=float(lengths.max()),
        tail=float(far.double().mean()),
        drifting=float((shift.abs() > 6 * deviation).double().mean()) if deviation > 0 else 0.0,
        stale=stale,
        fresh=fresh,
        old_kl=old_kl,
        mean_turns=float((of_turns > 0).sum() / len(lengths)),
        longest_turn=float(of_turns.max()),
        credit=credit,
        one_step=one_step,
        expensive_pass=expensive_pass,
    )
