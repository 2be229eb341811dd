"""Tokens by the weights that made them, as servers with our SGLang plugin told, and what findings say of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.served import LastUpdate, Served, ServedWeights
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.populations import called
from mismatch_plugin.diagnose.findings import FaultName, Finding, Place, Severity

MOST_NAMES = 4

Worker = tuple[str, int | None]
Key = tuple[Worker, str | None]
"""A worker, and the label of its tokens."""


class Piece(NamedTuple):
    """Tokens of one response that train, sampled under one label from one state of the weights.

    label: None where the record has no versions. first, tokens: position of the first one, and how many they are.
    last: no later weights made tokens of this response: `update` is the one that brought these.
    """

    sample: Sample
    served: Served
    label: str | None
    weights: ServedWeights
    first: int
    tokens: int
    last: bool

    @property
    def key(self) -> Key:
        return self.served.worker, self.label

    @property
    def update(self) -> LastUpdate | None:
        """The update that brought these weights; None where there was none, or it is not told."""
        return self.served.update if self.last else None

    @property
    def idle(self) -> LastUpdate | None:
        """The update, where it changed nothing."""
        return None if self.update is None or self.update.changed else self.update


def pieces_of(sample: Sample) -> Iterator[Piece]:
    """The tokens of a response that train, in order."""
    served, versions = sample.served, sample.weight_versions
    if served is None:
        return
    labels = [(span.version, span.start, span.end) for span in versions] or [(None, 0, len(sample))]
    for weights in served.weights:
        for label, begin, stop in labels:
            start = max(begin, weights.start)
            at = np.flatnonzero(sample.mask[start : max(min(stop, weights.end), start)])
            if len(at):
                last = weights is served.weights[-1]
                yield Piece(sample, served, label, weights, start + int(at[0]), len(at), last)


def finding(
    batch: Batch,
    fault: FaultName,
    evidence: str,
    fix: str,
    pieces: Sequence[Piece],
    *,
    severity: Severity = "fault",
    statistics: dict[str, float] | None = None,
) -> Finding:
    """A certain one about these tokens."""
    first = min(pieces, key=lambda piece: (piece.sample.index, piece.first))
    version = None if first.label is None else f"version {first.label}"
    place = Place(sample=first.sample.index, sample_id=first.sample.sample_id, position=first.first, rollout=version)
    samples = [*{piece.sample.index: piece.sample for piece in pieces}.values()]
    tokens = sum(piece.tokens for piece in pieces)
    given = {"tokens": tokens, "first": place, "statistics": statistics or {}}
    made = batch.finding(fault, "rollout", evidence, fix, samples, confidence="certain", **given)
    return made.model_copy(update={"severity": severity})


def counted(pieces: Sequence[Piece]) -> str:
    """How many tokens, and whose."""
    return f"{sum(piece.tokens for piece in pieces)} tokens of {names_of(pieces)}"


def names_of(pieces: Iterable[Piece]) -> str:
    """Their workers."""
    return few(piece.served.worker for piece in pieces)


def few(workers: Iterable[Worker]) -> str:
    """The first of these names, and how many more there are."""
    names = [called(worker) for worker in dict.fromkeys(workers)]
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
