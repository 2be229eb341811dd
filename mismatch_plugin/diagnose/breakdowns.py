"""Where the mismatch is: the gap by position, length, probability, entropy, turn, version, server and advantage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mismatch_plugin.core.metrics.full import PROBABILITY_EDGES
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.packing import numbered_versions, pieces
from mismatch_plugin.diagnose.result import Group

POSITION_EDGES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
LENGTH_EDGES = (64, 256, 1024, 4096, 16384, 65536)
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
MAX_TURNS = 8
MAX_NAMES = 24
MAX_STALENESS = 8
UNKNOWN = -(2**31)
"""Staleness of a token whose version, or whose trainer's version, has no number."""


class Breakdown(NamedTuple):
    """name: by what. labels: of the buckets. codes: [T] the bucket of each token, an index into `labels`."""

    name: str
    labels: tuple[str, ...]
    codes: Ints


def breakdowns(batch: Batch, packed: PackedSequences) -> dict[str, tuple[Group, ...]]:
    """By what → its groups that hold a token, in order. Every token is in one group of each.

    position: index in the response. length: response tokens. probability: π_rollout. entropy: nats, as told by the
    training side. turn: which run of tokens that train, where a response has several. version: the weights that sampled
    the token. staleness: how many steps they are behind the trainer's. server, dp_rank. advantage: its sign.
    """
    assert packed.rollout_log_probs is not None and packed.old_log_probs is not None
    found = list(_breakdowns(batch, packed))
    totals = [np.zeros((6, len(item.labels))) for item in found]
    for where, _ in pieces(packed):
        gap = packed.old_log_probs[where] - packed.rollout_log_probs[where]
        ratio = bounded_exp(gap)
        columns = [gap.abs(), -gap, k3(gap), ratio, ratio.square()]
        for item, total in zip(found, totals, strict=True):
            codes, size = item.codes[where], len(item.labels)
            total[0] += np.bincount(codes, minlength=size)
            for row, column in enumerate(columns, start=1):
                total[row] += np.bincount(codes, weights=column.numpy(), minlength=size)
    groups = {}
    for item, total in zip(found, totals, strict=True):
        rows = zip(item.labels, total.T.tolist(), strict=True)
        groups[item.name] = tuple(_group(label, *row) for label, row in rows if row[0])
    return groups


def _group(name: str, tokens: float, absolute: float, kl: float, k3_kl: float, ratio: float, squared: float) -> Group:
    means = {"abs_mean": absolute / tokens, "kl": kl / tokens, "k3_kl": k3_kl / tokens}
    return Group(name=name, tokens=int(tokens), **means, ess=min(ratio**2 / (tokens * squared), 1.0))


def _breakdowns(batch: Batch, packed: PackedSequences) -> Iterator[Breakdown]:
    samples = [batch.samples[index] for index in packed.sequence_ids if isinstance(index, int)]
    lengths = np.array(packed.lengths)
    assert packed.positions is not None and packed.rollout_log_probs is not None
    positions = packed.positions.numpy()
    yield Breakdown("position", _counted(POSITION_EDGES), _bucket(positions, POSITION_EDGES))
    of_sample = _bucket(np.array([len(sample) for sample in samples]), LENGTH_EDGES)
    yield Breakdown("length", _counted(LENGTH_EDGES), np.repeat(of_sample, lengths))
    log_edges = np.log(PROBABILITY_EDGES)
    probability = _bucket(packed.rollout_log_probs.numpy(), log_edges)
    yield Breakdown("probability", _between(PROBABILITY_EDGES), probability)
    if packed.entropy is not None:
        yield Breakdown("entropy", _between(ENTROPY_EDGES), _bucket(packed.entropy.numpy(), ENTROPY_EDGES))
    places = np.split(positions, np.cumsum(lengths)[:-1])
    turns = packed.turn_numbers()[0].numpy()
    if turns.max(initial=0) > 0:
        labels = (*map(str, range(1, MAX_TURNS + 1)), f"from {MAX_TURNS + 1}")
        yield Breakdown("turn", labels, np.minimum(turns, MAX_TURNS).astype(np.int8))
    if any(sample.weight_versions for sample in samples):
        yield _by_version(samples, places)
    steps = staleness(samples, places)
    if (steps != UNKNOWN).any():
        labels = ("ahead", *map(str, range(MAX_STALENESS + 1)), f"from {MAX_STALENESS + 1}", "unknown")
        codes = np.where(steps == UNKNOWN, len(labels) - 1, np.clip(steps, -1, MAX_STALENESS + 1) + 1)
        yield Breakdown("staleness", labels, codes.astype(np.int8))
    for part, name in enumerate(("server", "dp_rank")):
        values = [sample.worker[part] for sample in samples]
        if any(value is not None for value in values):
            known = sorted({value for value in values if value is not None})[:MAX_NAMES]
            place = {value: index for index, value in enumerate(known)}
            of_sample = [len(known) + 1 if value is None else place.get(value, len(known)) for value in values]
            labels = (*map(str, known), "others", "unknown")
            yield Breakdown(name, labels, np.repeat(np.array(of_sample, dtype=np.int8), lengths))
    if packed.advantages is not None:
        sign = packed.advantages.sign().to(torch.int8).add_(1).numpy()
        yield Breakdown("advantage", ("negative", "zero", "positive"), sign)


def _bucket(values: Ints | Floats, edges: Sequence[float] | Floats) -> Ints:
    """How many edges are ≤ the value."""
    return np.searchsorted(np.asarray(edges), values, side="right").astype(np.int8)


def _counted(edges: Sequence[int]) -> tuple[str, ...]:
    """Labels of whole numbers."""
    inner = [str(low) if high == low + 1 else f"{low} to {high - 1}" for low, high in pairwise((0, *edges))]
    return (*inner, f"from {edges[-1]}")


def _between(edges: Sequence[float]) -> tuple[str, ...]:
    inner = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    return (f"below {edges[0]:g}", *inner, f"from {edges[-1]:g}")


def _by_version(samples: Sequence[Sample], places: Sequence[Ints]) -> Breakdown:
    spans = {span.version for sample in samples for span in sample.weight_versions}

    def rank(version: str) -> tuple[int, str]:
        number = version_number(version)
        return (-1 if number is None else number), version

    known = sorted(spans, key=rank)[-MAX_NAMES:]
    place_of = {version: index for index, version in enumerate(known)}
    parts = []
    for sample, place in zip(samples, places, strict=True):
        codes = np.full(len(sample), len(known) + 1, dtype=np.int8)
        for span in sample.weight_versions:
            codes[span.start : span.end] = place_of.get(span.version, len(known))
        parts.append(codes[place])
    return Breakdown("version", (*known, "older", "unknown"), np.concatenate(parts))


def staleness(samples: Sequence[Sample], places: Sequence[Ints]) -> Ints:
    """[T] trainer's version − token's version, in steps of the numbers at their ends; UNKNOWN where one has none."""
    parts = []
    for sample, place in zip(samples, places, strict=True):
        trainer = version_number(sample.trainer_version)
        numbers = numbered_versions(sample)[place]
        steps = np.full(len(place), UNKNOWN, dtype=np.int32)
        if trainer is not None:
            steps[numbers >= 0] = np.clip(trainer - numbers[numbers >= 0], UNKNOWN + 1, 2**31 - 1)
        parts.append(steps)
    return np.concatenate(parts)
