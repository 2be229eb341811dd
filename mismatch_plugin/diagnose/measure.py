"""How large the mismatch is: the metrics of training, the distribution of the log-ratio, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import no_notes
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.breakdowns import UNKNOWN, breakdowns, staleness
from mismatch_plugin.diagnose.packing import packed_of, pieces
from mismatch_plugin.diagnose.result import Size

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
    # In pieces of whole responses, whose statistics merge exactly: memory hardly grows with the batch.
    # π_θ is π_old in the first step, which is judged here.
    corrections = (correct(piece, config, log_probs=piece.old_log_probs) for _, piece in pieces(packed))
    statistics = reduce(Statistics.merge, (correction.statistics for correction in corrections))
    shares = np.array(QUANTILES) / 100
    named = dict(zip(QUANTILES, np.quantile(_gap(packed), shares, overwrite_input=True).tolist(), strict=True))
    # The middle 99.8 % and a quarter more; the outer bins hold the tails.
    edge = max(1.25 * max(abs(named[0.1]), abs(named[99.9])), _SMALLEST)
    edges = np.linspace(-edge, edge, BINS + 1)
    counts = sum(np.histogram(np.clip(_gap(piece), -edge, edge), edges)[0] for _, piece in pieces(packed))
    size = Size(
        edges=tuple(edges.tolist()),
        counts=tuple(np.asarray(counts).tolist()),
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
    by_steps: dict[int, np.ndarray] = {}
    one_pass = np.zeros((2, 3))
    for _, piece in pieces(packed):
        gap, order = _gap(piece), [index for index in piece.sequence_ids if isinstance(index, int)]
        assert piece.positions is not None and piece.rollout_log_probs is not None
        places = np.split(piece.positions.numpy(), np.cumsum(piece.lengths)[:-1])
        steps = staleness([batch.samples[row] for row in order], places)
        for kind in np.unique(steps[steps != UNKNOWN]).tolist():
            by_steps[kind] = by_steps.get(kind, np.zeros(3)) + _sums(gap[steps == kind])
        if rescored is not None:
            middle = np.concatenate([rescored[row][place] for row, place in zip(order, places, strict=True)])
            sampled = middle - piece.rollout_log_probs.numpy()
            known = np.isfinite(middle)
            one_pass += np.stack([_sums(sampled[known]), _sums((gap - sampled)[known])])
    found = _by_staleness(by_steps)
    for name, (count, absolute, k3_sum) in zip(("sampled", "trainer"), one_pass.tolist(), strict=True):
        if count:
            found |= {f"{name}_abs": absolute / count, f"{name}_k3": k3_sum / count}
    return found


def _sums(gap: Floats) -> np.ndarray:
    """Tokens, Σ |Δ log p|, Σ k3."""
    return np.array([len(gap), np.abs(gap).sum(), float(k3(torch.from_numpy(gap)).sum())])


def _by_staleness(by_steps: dict[int, np.ndarray]) -> dict[str, float]:
    if not by_steps:
        return {}
    count, _, k3_sum = np.sum([*by_steps.values()], axis=0)
    whole = float(k3_sum / count)
    if 0 in by_steps:
        fresh = by_steps[0]
        found = {"engine_abs": float(fresh[1] / fresh[0]), "engine_k3": float(fresh[2] / fresh[0])}
        if len(by_steps) > 1:
            stale = np.sum([values for kind, values in by_steps.items() if kind], axis=0)
            found |= {"stale_abs": float(stale[1] / stale[0]), "stale_k3": float(stale[2] / stale[0])}
        return found | {"staleness_k3": max(whole - found["engine_k3"], 0.0)}
    points = {kind: values for kind, values in by_steps.items() if values[0] >= _FEW}
    if len(points) < 2:
        return {}
    counts, _, sums = np.stack([*points.values()]).T
    slope, level = np.polyfit([*points], sums / counts, 1, w=np.sqrt(counts))
    engine = min(max(float(level), 0.0), whole)
    return {"engine_k3": engine, "staleness_k3": whole - engine, "k3_per_step": float(slope)}
