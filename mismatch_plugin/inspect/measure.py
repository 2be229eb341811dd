"""How large the mismatch is: the metrics of training, the distribution of the log-ratio, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from mismatch_plugin.check.batch import Batch
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import no_notes
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.inspect.breakdowns import UNKNOWN, breakdowns, staleness
from mismatch_plugin.inspect.packing import packed_of, pieces
from mismatch_plugin.inspect.result import Size
from mismatch_plugin.rollout.responses import Floats

QUANTILES = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)
"""In percent."""
BINS = 80
_SMALLEST = 1e-6
_FEW = 100
"""Tokens below which a staleness is no point of the regression."""


def measure(
    batch: Batch,
    config: MismatchConfig,
    packed: PackedSequences | None = None,
    rescored: Sequence[Floats] | None = None,
) -> tuple[dict[str, float], Size]:
    """(the metrics that training reports at level full for these settings, how large the mismatch is).

    packed: `packed_of(batch)`, where the caller has it. rescored: as in `separate`.
    Raises InputError where no token can be compared.
    """
    if packed is None:
        packed, _ = packed_of(batch)
    with no_notes():
        config = config.replace(metrics="full")
    # In pieces of whole responses, whose statistics merge exactly: memory does not grow with the batch.
    statistics = reduce(Statistics.merge, (correct(piece, config).statistics for _, piece in pieces(packed)))
    gap = _gap(packed)
    named = dict(zip(QUANTILES, np.quantile(gap, np.array(QUANTILES) / 100).tolist(), strict=True))
    # The middle 99.8 % and a quarter more; the outer bins hold the tails.
    edge = max(1.25 * max(abs(named[0.1]), abs(named[99.9])), _SMALLEST)
    edges = np.linspace(-edge, edge, BINS + 1)
    counts = np.histogram(np.clip(gap, -edge, edge), edges)[0]
    size = Size(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        quantiles={f"p{share:g}": value for share, value in named.items()},
        breakdowns=breakdowns(batch, packed),
        separated=separate(batch, rescored, packed),
    )
    return statistics.metrics(), size


def _gap(packed: PackedSequences) -> Floats:
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    return (packed.old_log_probs - packed.rollout_log_probs).numpy()


def separate(
    batch: Batch, rescored: Sequence[Floats] | None = None, packed: PackedSequences | None = None
) -> dict[str, float]:
    """What of the gap is the engine's and what comes from older weights, by name; {} where nothing tells.

    rescored: [n] log-probs of each sample that the rollout server computed afterwards for the same tokens, in one pass.

    Where token and trainer name their weight versions, staleness = trainer − token, and with tokens of staleness 0:
    engine_abs, engine_k3: mean |Δ log p| and k3 of those: same weights, so that the engines alone differ
    stale_abs, stale_k3: of the others
    staleness_k3: k3 of all − engine_k3, at least 0: what fresh weights would save
    Without such tokens, but with two or more stalenesses of 100 tokens each:
    engine_k3: value at staleness 0 of the least-squares line of their mean k3 (each weighed by its tokens), at least 0:
        an extrapolation, which holds while the policy drifts evenly; staleness_k3: the rest; k3_per_step: its slope
    With a rescoring (x sampled, y rescored, z trainer):
    sampled_abs, sampled_k3: mean |y − x| and k3: sampling against one pass of the same server (batch composition,
        kernels), and the weights loaded in between
    trainer_abs, trainer_k3: the same of z − y: the two engines, and how far the trainer is from the server's weights
    """
    if packed is None:
        packed, _ = packed_of(batch)
    table = {sample.index: sample for sample in batch}
    samples = [table[index] for index in packed.sequence_ids if isinstance(index, int)]
    assert packed.positions is not None and packed.rollout_log_probs is not None and packed.old_log_probs is not None
    places = np.split(packed.positions.numpy(), np.cumsum(packed.lengths)[:-1])
    found = _by_staleness(staleness(samples, places), _gap(packed))
    if rescored is not None:
        order = {sample.index: row for row, sample in enumerate(batch)}
        middle = np.concatenate(
            [rescored[order[sample.index]][place] for sample, place in zip(samples, places, strict=True)]
        )
        known = np.isfinite(middle)
        sides = {"sampled": middle - packed.rollout_log_probs.numpy(), "trainer": packed.old_log_probs.numpy() - middle}
        for name, gap in sides.items():
            if known.any():
                found |= {f"{name}_abs": float(np.abs(gap[known]).mean()), f"{name}_k3": float(_k3(gap[known]).mean())}
    return found


def _by_staleness(steps: np.ndarray, gap: Floats) -> dict[str, float]:
    known = steps != UNKNOWN
    if not known.any():
        return {}
    steps, gap = steps[known], gap[known]
    values = _k3(gap)
    fresh, whole = steps == 0, float(values.mean())
    if fresh.any():
        engine = float(values[fresh].mean())
        found = {"engine_abs": float(np.abs(gap[fresh]).mean()), "engine_k3": engine}
        if not fresh.all():
            found |= {"stale_abs": float(np.abs(gap[~fresh]).mean()), "stale_k3": float(values[~fresh].mean())}
        return found | {"staleness_k3": max(whole - engine, 0.0)}
    kinds, which, counts = np.unique(steps, return_inverse=True, return_counts=True)
    means = np.bincount(which, weights=values) / counts
    many = counts >= _FEW
    if many.sum() < 2:
        return {}
    slope, level = np.polyfit(kinds[many], means[many], 1, w=np.sqrt(counts[many]))
    engine = min(max(float(level), 0.0), whole)
    return {"engine_k3": engine, "staleness_k3": whole - engine, "k3_per_step": float(slope)}


def _k3(gap: Floats) -> Floats:
    return k3(torch.from_numpy(gap)).numpy()
