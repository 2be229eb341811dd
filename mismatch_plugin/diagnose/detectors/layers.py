"""Which layers did not arrive: models that mix two checkpoints, and the mix that the rollout log-probs fit best."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.distance import logit_gap
from mismatch_plugin.diagnose.findings import Finding
from mismatch_plugin.diagnose.scorers import Checkpoint

BUDGET = 2000
"""Response tokens that each mix scores."""
STANDARD_ERRORS, FACTOR = 4.0, 0.85
"""By which the mix must fit better than each rival, and below which share of the best one's distance. Layers of real
servers gave 0.76 at mean |Δ log p| 0.02 under bf16; servers that are one step of four behind gave 1.02."""
DECIDED = 2.0
FIX = (
    'These tensors did not arrive: compare POST /weights_checker {"action": "checksum"} tensor by tensor, look for '
    "names that the server's loader skips (a `module.` prefix, fused qkv or gate_up, a pipeline stage's offset of the "
    "layers), for buckets that were never sent, and read the return code of every update; where our plugin "
    "serves, our client raises for what did not arrive."
)
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.(.+)$")


class Fit(NamedTuple):
    """mean: |logit gap| of the rollout side. deviations: standard errors (over samples) by which the mix fits
    better."""

    mean: float
    deviations: float


class Mix:
    """Log-probs under a model that has some tensors from the start and the rest from now, both in float32.

    parts: how the model may be divided: name of a part → its parameters, once by layer and once by kind of tensor.

    Raises InputError where the two checkpoints have other parameters.
    """

    def __init__(self, now: Checkpoint, start: Checkpoint) -> None:
        self._now, self._own = now, dict(now.model.named_parameters())
        self._start = dict(start.model.named_parameters())
        shapes = ({name: tuple(p.shape) for name, p in side.items()} for side in (self._own, self._start))
        ours, theirs = shapes
        other = next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
        if other is not None:
            raise InputError(
                f"--reference-checkpoint has another shape of {other} than --checkpoint ({theirs.get(other)} and "
                f"{ours.get(other)}): give two checkpoints of one model."
            )
        changed = [name for name, value in self._own.items() if not torch.equal(value, self._start[name])]
        self.parts = (_by_layer(changed), _by_kind(changed))

    def log_probs(self, sample: Sample, from_start: Collection[str]) -> Floats:
        """[n]. from_start: names of parameters."""
        with self._mixed(from_start):
            return self._now.scored([sample])[0]

    @contextmanager
    def _mixed(self, names: Collection[str]) -> Iterator[None]:
        kept = {name: self._own[name].data for name in names}
        try:
            for name in names:
                self._own[name].data = self._start[name].data
            yield
        finally:
            for name, value in kept.items():
                self._own[name].data = value


def _by_layer(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found = _LAYER.search(name)
        parts[f"layer {found[1]}" if found else _outside(name)].append(name)
    return {part: tuple(members) for part, members in parts.items()}


def _by_kind(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found = _LAYER.search(name)
        parts[re.sub(r"\.\d+\.", ".*.", found[2]) if found else _outside(name)].append(name)
    return {part: tuple(members) for part, members in parts.items()}


def _outside(name: str) -> str:
    """The part of a parameter that belongs to no layer."""
    if re.search(r"head|output", name):
        return "output head"
    return "final norm" if "norm" in name or "ln_f" in name else "embeddings"


def find_parts(batch: Batch, samples: Sequence[Sample], now: Sequence[Floats], share: float) -> Finding | None:
    """The mix that fits clearly better than either end, and than all weights moved by `share` towards the start.

    From the nearer end a first-order fit, rollout − end = Σ x (one part from the other end − end), tells which parts
    come from the other end (x above one half by `DECIDED` standard errors); that mix is then scored itself. A part
    that moves nothing stays with the nearer end. Passes: one a part, and one, for each way to divide the tensors.
    """
    mixes = batch.between
    assert mixes is not None
    step = max(1, math.ceil(sum(len(sample) for sample in samples) / BUDGET))
    chosen = range(0, len(samples), step)  # evenly over the batch, up to the budget of tokens; at least one
    few, own = [samples[at] for at in chosen], [now[at] for at in chosen]
    rollout = [sample.rollout_log_probs for sample in few]
    starts = [sample.ref_log_probs for sample in few if sample.ref_log_probs is not None]
    from_start = share > 0.5
    end = starts if from_start else own
    best: tuple[float, list[str], int, list[Floats]] | None = None
    for parts in mixes.parts:
        every = {name for names in parts.values() for name in names}

        def scored(
            flipped: Collection[str], parts: dict[str, tuple[str, ...]] = parts, every: set[str] = every
        ) -> list[Floats]:
            names = {name for part in flipped for name in parts[part]}
            return [mixes.log_probs(sample, every - names if from_start else names) for sample in few]

        effects = [_joined(few, scored([part]), end) for part in parts]
        flipped = _flipped(list(parts), effects, _joined(few, rollout, end))
        if not 0 < len(flipped) < len(parts):
            continue
        mixed = scored(flipped)
        distance = float(np.nanmean(np.abs(_joined(few, rollout, mixed))))
        if best is None or distance < best[0]:
            best = distance, flipped, len(parts), mixed
    if best is None:
        return None
    distance, flipped, count, mixed = best
    between = [ours + share * (theirs - ours) for ours, theirs in zip(own, starts, strict=True)]
    rivals = {"now": own, "start": starts, "between": between}
    tests = {name: _better(few, mixed, values) for name, values in rivals.items()}
    clear = min(test.deviations for test in tests.values())
    if clear < STANDARD_ERRORS or distance > FACTOR * min(test.mean for test in tests.values()):
        return None
    what = "only this is new" if from_start else "only this is old"
    shown = ", ".join(flipped[:8]) + (f" and {len(flipped) - 8} more" if len(flipped) > 8 else "")
    return batch.finding(
        "weights_partly_updated",
        "rollout",
        f"The rollout log-probs fit a mix of both checkpoints, {what}: {shown} ({len(flipped)} of {count} parts). Mean "
        f"logit gap {distance:.3g}, against {tests['now'].mean:.3g} to the present weights, {tests['start'].mean:.3g} "
        f"to those of the start and {tests['between'].mean:.3g} to a point between them ({clear:.0f} standard errors "
        f"or more over {len(few)} samples).",
        FIX,
        list(samples),
        statistics={
            "mix": distance,
            **{name: test.mean for name, test in tests.items()},
            "standard_errors": clear,
            "parts_old": count - len(flipped) if from_start else len(flipped),
            "parts": count,
        },
        confidence="likely",
    )


def _joined(samples: Sequence[Sample], ours: Sequence[Floats], theirs: Sequence[Floats]) -> Floats:
    """Logit gaps of all samples in one row."""
    return np.concatenate([logit_gap(s, a, b) for s, a, b in zip(samples, ours, theirs, strict=True)])


def _flipped(parts: list[str], effects: list[Floats], target: Floats) -> list[str]:
    """Parts whose share is clearly above one half; none where too few tokens are left to fit them."""
    design = np.stack(effects, axis=1)
    valid = np.isfinite(design).all(axis=1) & np.isfinite(target)
    design, target = design[valid], target[valid]
    if len(target) < 10 * len(parts):
        return []
    inverse = np.linalg.pinv(design.T @ design)
    shares = inverse @ (design.T @ target)
    variance = float(((target - design @ shares) ** 2).sum()) / (len(target) - len(parts))
    errors = np.sqrt(variance * np.diag(inverse))
    return [part for part, x, error in zip(parts, shares, errors, strict=True) if x - 0.5 > DECIDED * error]


def _better(samples: Sequence[Sample], mixed: Sequence[Floats], rival: Sequence[Floats]) -> Fit:
    gains, total, tokens = [], 0.0, 0
    for sample, mix, other in zip(samples, mixed, rival, strict=True):
        ours, theirs = (np.abs(logit_gap(sample, sample.rollout_log_probs, values)) for values in (mix, other))
        both = np.isfinite(ours) & np.isfinite(theirs)
        gains.append(float((theirs - ours)[both].sum()))
        total, tokens = total + float(theirs[both].sum()), tokens + int(both.sum())
    error = math.sqrt(len(gains)) * float(np.std(gains, ddof=1)) if len(gains) > 1 else math.inf
    return Fit(total / max(tokens, 1), float(np.sum(gains)) / max(error, 1e-12))
