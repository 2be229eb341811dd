"""From a checked batch to packed tensors, and how large the mismatch is and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.metrics.registry import PROBABILITY_EDGES
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import bounded_exp, segment_max, segment_sum
from mismatch_plugin.core.validity import KINDS, SOUND, classify
from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number, version_of_tokens
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.result import Group, Size
from mismatch_plugin.limits import SAFETY_BOUND

OF_PREDICTIONS = "predictions take 1, without settings whose criteria depend on the advantage"
MAX_TOKENS = 500_000
"""Tokens on which settings are predicted; of more, a random part is taken."""


def packed_of(batch: Batch) -> tuple[PackedSequences, list[str]]:
    """(the batch in the form that training corrects, what a reader must know).

    Float64; of tokens that train and have a sound number on both sides. `positions` are those in the response,
    `sequence_ids` the samples' indices. advantages: those of the samples, else of the rewards, as GRPO has them. What
    not every token has (entropy, weight_versions) is None. unit_ids: of whole responses: what is left out splits no
    turn.
    Raises InputError where no token is left.
    """
    tokens, notes = batch.tokens, list[str]()
    if lost := batch.token_count - len(tokens):
        notes.append(f"{lost} of {batch.token_count} tokens that train have no number on one side: they are left out")
    everywhere = torch.ones(len(tokens), dtype=torch.bool)
    codes = classify(torch.from_numpy(tokens.training), torch.from_numpy(tokens.rollout), ~everywhere)
    if (codes != SOUND).any():
        counts = zip(KINDS, torch.bincount(codes, minlength=len(KINDS)).tolist(), strict=True)
        shown = ", ".join(f"{count} {kind}" for kind, count in counts if count and kind != "sound")
        notes.append(
            f"tokens with an invalid log-prob ({shown}) are left out, where training stops at them unless "
            f"--rollout-log-prob-policy says otherwise"
        )
        tokens = tokens.where((codes == SOUND).numpy())
    if not len(tokens):
        raise InputError("no token that trains has a sound log-prob on both sides: there is nothing to measure.")
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    packed = PackedSequences(
        loss_mask=everywhere[: len(tokens)],
        lengths=tuple(np.diff(starts, append=len(tokens)).tolist()),
        rollout_log_probs=torch.from_numpy(tokens.rollout),
        old_log_probs=torch.from_numpy(tokens.training),
        positions=torch.from_numpy(tokens.position),
        sequence_ids=tuple(tokens.sample[starts].tolist()),
    )
    samples = samples_of(batch, packed)
    versions = at_tokens(numbered_versions, samples, packed)
    trained_at = {version_number(sample.trainer_version) for sample in samples}
    advantages, note = _advantages(batch, samples, packed)
    packed = packed.replace(
        advantages=advantages,
        entropy=_given("entropy", samples, packed),
        weight_versions=None if versions.min() < 0 else torch.from_numpy(versions),
        trainer_version=trained_at.pop() if len(trained_at) == 1 else None,
        unit_ids=torch.from_numpy(at_tokens(_turns, samples, packed)),
    )
    return packed, [*notes, note] if note else notes


def samples_of(batch: Batch, packed: PackedSequences) -> list[Sample]:
    """The sample of each packed sequence."""
    return [batch.samples[index] for index in packed.sequence_ids if isinstance(index, int)]


def at_tokens(values: Callable[[Sample], np.ndarray], samples: Sequence[Sample], packed: PackedSequences) -> np.ndarray:
    """[T] of the values [n] of each sample those at its packed tokens."""
    assert packed.positions is not None
    places = np.split(packed.positions.numpy(), np.cumsum(packed.lengths)[:-1])
    return np.concatenate([values(sample)[place] for sample, place in zip(samples, places, strict=True)])


def numbered_versions(sample: Sample) -> Ints:
    """[n] number at the end of each token's weight version; −1 where there is none."""
    told = {span.version: version_number(span.version) for span in sample.weight_versions}
    numbers = {version: -1 if number is None else number for version, number in told.items()}
    return version_of_tokens(sample.weight_versions, numbers, len(sample))


def _turns(sample: Sample) -> Ints:
    """[n] number of each token's turn: runs of tokens that train, those between two with the first of them."""
    begins = np.diff(sample.mask.astype(np.int8), prepend=0) == 1
    return np.maximum(np.cumsum(begins) - 1, 0)


def _given(name: str, samples: Sequence[Sample], packed: PackedSequences) -> Tensor | None:
    """[T] this field, or None where a token has no finite value."""
    if any(getattr(sample, name) is None or len(getattr(sample, name)) != len(sample) for sample in samples):
        return None
    found = at_tokens(lambda sample: getattr(sample, name), samples, packed)
    return torch.from_numpy(found) if np.isfinite(found).all() else None


def _advantages(batch: Batch, samples: Sequence[Sample], packed: PackedSequences) -> tuple[Tensor | None, str]:
    """([T] advantages, a note)."""
    found = _given("advantages", samples, packed)
    if found is not None:
        return (found, "") if found.any() else (None, f"all advantages are 0, which trains nothing: {OF_PREDICTIONS}")
    partly = "some tokens have no advantage, so none is used; " * any(s.advantages is not None for s in samples)
    if not all(map(_rewarded, samples)):
        return None, f"{partly}there are no advantages, and no reward of every response: {OF_PREDICTIONS}"
    groups, how = _groups([sample for sample in batch if _rewarded(sample)])
    if len(set(groups.ids)) == len(groups.ids):
        groups = Groups(groups.rewards, [0] * len(groups.ids))
        how = "over the batch, for no two responses share a group or prompt"
    values = group_advantages(groups.rewards, groups.ids)
    if not values.any():
        return None, f"{partly}rewards are the same {how}: {OF_PREDICTIONS}"
    of_sample = dict(zip([sample.index for sample in batch if _rewarded(sample)], values.tolist(), strict=True))
    by_sample = torch.tensor([of_sample[sample.index] for sample in samples], dtype=torch.float64)
    note = f"{partly}advantages are made of the rewards, centred and divided by their deviation {how}"
    return by_sample.repeat_interleave(torch.tensor(packed.lengths)), note


def _rewarded(sample: Sample) -> bool:
    return sample.reward is not None and bool(np.isfinite(sample.reward))


class Groups(NamedTuple):
    """rewards: [N] float64. ids: the group of each response, N of them."""

    rewards: Tensor
    ids: Sequence[Hashable]


def _groups(samples: Sequence[Sample]) -> tuple[Groups, str]:
    """(by the record's group, else by the prompt; within what)."""
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    if all(sample.group is not None for sample in samples):
        return Groups(rewards, [sample.group for sample in samples]), "within each group"
    return Groups(rewards, [sample.prompt_ids.tobytes() for sample in samples]), "within each prompt"


def groups_of(batch: Batch, packed: PackedSequences) -> Groups | None:
    """Rewards and groups of the packed responses; None where one has no finite reward, or no two share a group."""
    samples = samples_of(batch, packed)
    if not all(map(_rewarded, samples)):
        return None
    groups, _ = _groups(samples)
    return None if len(set(groups.ids)) == len(groups.ids) else groups


def subset(packed: PackedSequences) -> tuple[PackedSequences, list[str]]:
    """(whole responses drawn at random, in their order, of at most MAX_TOKENS; a note): all where they fit."""
    total = sum(packed.lengths)
    if total <= MAX_TOKENS:
        return packed, []
    lengths = np.array(packed.lengths)
    order = np.random.default_rng(0).permutation(len(lengths))
    count = max(int(np.searchsorted(np.cumsum(lengths[order]), MAX_TOKENS, side="right")), 1)
    part = _responses(packed, np.sort(order[:count]))
    return part, [f"settings are predicted on {sum(part.lengths)} of {total} tokens: {count} responses drawn at random"]


def pieces(packed: PackedSequences) -> Iterator[PackedSequences]:
    """Whole responses one after the other, about a million tokens at a time: memory hardly grows with the batch."""
    lengths = np.array(packed.lengths)
    piece = (np.cumsum(lengths) - lengths) // 2**20
    for number in np.unique(piece):
        yield packed if number == piece[-1] == 0 else _responses(packed, np.flatnonzero(piece == number))


def _responses(packed: PackedSequences, rows: Ints) -> PackedSequences:
    """These alone; rows ascend."""
    where = torch.from_numpy(np.repeat(np.isin(np.arange(len(packed.lengths)), rows), packed.lengths))
    tensors = {item.name: getattr(packed, item.name) for item in fields(packed)}
    changed: dict[str, Any] = {name: value[where] for name, value in tensors.items() if isinstance(value, Tensor)}
    kept = {name: tuple(np.array(getattr(packed, name))[rows].tolist()) for name in ("lengths", "sequence_ids")}
    return packed.replace(**changed, **kept)


# How large it is ------------------------------------------------------------------------------------------------------

QUANTILES = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)
"""In percent."""
POSITION_EDGES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
LENGTH_EDGES = (64, 256, 1024, 4096, 16384, 65536)
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
MAX_TURNS = 8
MAX_NAMES = 24
MAX_STALENESS = 8
OLD_SHARE = 0.05
"""Of the tokens: so few of the oldest may be left out."""


def measure(batch: Batch, packed: PackedSequences, config: MismatchConfig) -> tuple[dict[str, float], Size]:
    """(the metrics that training reports at level full for these settings, how large the mismatch is).

    packed: `packed_of(batch)`. Raises OverflowError where gaps cannot be added up.
    """
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    with ignore_mismatch_warnings():
        config = config.replace(metrics="full", gate_kl=None)
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
        breakdowns={name: _buckets(labels, codes, columns) for name, labels, codes in _parts(batch, packed)},
    )
    return statistics.metrics(), size


# Where it comes from -------------------------------------------------------------------------------------------------


def _buckets(labels: Sequence[str], codes: Ints, columns: Sequence[Floats]) -> tuple[Group, ...]:
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
    """By what; its buckets' labels; [T] the bucket of each token, an index into them. probability: π_rollout. turn:
    which run of tokens that train. staleness: steps that a token's version is behind the trainer's."""
    samples, lengths = samples_of(batch, packed), np.array(packed.lengths)
    assert packed.positions is not None and packed.rollout_log_probs is not None
    positions, log_probs = packed.positions.numpy(), packed.rollout_log_probs.numpy()
    yield "position", _counted(POSITION_EDGES), np.digitize(positions, POSITION_EDGES)
    of_sample = np.digitize([len(sample) for sample in samples], LENGTH_EDGES)
    yield "length", _counted(LENGTH_EDGES), np.repeat(of_sample, lengths)
    yield "probability", _between(PROBABILITY_EDGES), np.digitize(log_probs, np.log(PROBABILITY_EDGES))
    if packed.entropy is not None:
        yield "entropy", _between(ENTROPY_EDGES), np.digitize(packed.entropy.numpy(), ENTROPY_EDGES)
    turns = packed.unit_numbers()[0].numpy()
    if turns.max() > 0:
        labels = [*map(str, range(1, MAX_TURNS + 1)), f"from {MAX_TURNS + 1}"]
        yield "turn", labels, np.minimum(turns, MAX_TURNS)
    if told := {span.version for sample in samples for span in sample.weight_versions}:
        oldest = sorted(told, key=lambda name: (-1 if (n := version_number(name)) is None else n, name))
        code, labels = _named(oldest[::-1], "older")
        codes = at_tokens(lambda s: version_of_tokens(s.weight_versions, code, len(s), code[None]), samples, packed)
        yield "version", labels, codes
    steps = at_tokens(_behind, samples, packed)
    if (known := np.isfinite(steps)).any():
        labels = ["ahead", *map(str, range(MAX_STALENESS + 1)), f"from {MAX_STALENESS + 1}", "unknown"]
        codes = np.clip(np.where(known, steps, 0), -1, MAX_STALENESS + 1).astype(np.int64) + 1
        yield "staleness", labels, np.where(known, codes, len(labels) - 1)
    for part, name in enumerate(("server", "dp_rank")):
        values = [sample.worker[part] for sample in samples]
        if named := sorted({value for value in values if value is not None}):
            code, labels = _named(named, "others")
            yield name, labels, np.repeat([code[value] for value in values], lengths)
    if packed.advantages is not None:
        yield "advantage", ("negative", "zero", "positive"), packed.advantages.sign().long().add_(1).numpy()


def _named(names: Sequence[Any], others: str) -> tuple[dict[Any, int], list[str]]:
    """(bucket of each name, of None too, labels of the buckets): the first MAX_NAMES have one of their own."""
    code = {name: min(place, MAX_NAMES) for place, name in enumerate(names)}
    shown = names[:MAX_NAMES]
    return code | {None: len(shown) + 1}, [*map(str, shown), others, "unknown"]


def _behind(sample: Sample) -> Floats:
    """[n] trainer's version − token's version, in steps of the numbers at their ends; NaN where one has none."""
    trainer, numbers = version_number(sample.trainer_version), numbered_versions(sample)
    return np.where(numbers < 0, math.nan, (math.nan if trainer is None else trainer) - numbers)


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
    tail: share of tokens that `moe_routing` names.
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


def figures_of(packed: PackedSequences) -> Figures:
    """Those that a batch as `packed_of` makes it has itself: every token trains, every sequence has one."""
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    log_ratio = (packed.old_log_probs - packed.rollout_log_probs).double().clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio, size, divergence = log_ratio.exp(), log_ratio.abs(), k3(log_ratio)
    median = float(size.median())
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
        drifting=float((shift.abs() > 6 * deviation).double().mean()) if deviation > 0 else 0.0,
        fresh=fresh,
        old_kl=old_kl,
        mean_turns=float((of_turns > 0).sum() / len(lengths)),
        longest_turn=float(of_turns.max()),
        credit=credit,
    )
