"""Weights and accepted tokens worked out by hand, mode × level, with veto and batch normalisation; values at bounds.

The batch below is small enough for a pencil. Probabilities are given, so each ratio is a fraction one can read off. All
else: `test_loss_differential`, which keeps away from bounds.
"""

from __future__ import annotations

import math

import pytest
import torch

import mismatch_plugin as mp
from tests.core.worked import config, logs, of_log_ratios, weighted

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf

#            A: ρ = .6, 1, 3       B: ρ = 4, masked, .25   C: .1    D: masked   E: ρ = 1.5, 1.6
TRAIN = [[0.30, 0.50, 0.75], [0.80, NAN, 0.20], [0.05], [INF], [0.60, 0.80]]
ROLLOUT = [[0.50, 0.50, 0.25], [0.20, INF, 0.80], [0.50], [NAN], [0.40, 0.50]]
MASKS = [[1, 1, 1], [1, 0, 1], [1], [0], [1, 1]]
# Π ρ:  A 0.6·1·3 = 1.8 · B 4·0.25 = 1 · C 0.1 · E 1.5·1.6 = 2.4
# geometric mean (of the response tokens only):  A 1.8^(1/3) · B 1 · C 0.1 · E √2.4 = 1.549…
GEO_A = 1.8 ** (1 / 3)


BATCH = mp.PackedSequences.from_lists(old_log_probs=logs(TRAIN), rollout_log_probs=logs(ROLLOUT), loss_masks=MASKS)


def rows(batch: mp.PackedSequences, values: torch.Tensor) -> list[list[float]]:
    return [row.tolist() for row in batch.unpack(values)]


def same(found: list[list[float]], expected: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, rel=1e-12, abs=1e-300) for a, b in zip(found, expected, strict=True))


WEIGHTS = {  # (level, mode, hi): weights; what batch normalisation divides by. lo = 1/hi
    # token, [0.5, 2]: 3 and 4 come down to 2; clip lifts .25 and .1 to .5; mask drops these four.
    ("token", "truncate", 2.0): ([[0.6, 1, 2], [2, 0, 0.25], [0.1], [0], [1.5, 1.6]], 9.05 / 8),
    ("token", "clip", 2.0): ([[0.6, 1, 2], [2, 0, 0.5], [0.5], [0], [1.5, 1.6]], 9.7 / 8),
    ("token", "mask", 2.0): ([[0.6, 1, 0], [0, 0, 0], [0], [0], [1.5, 1.6]], 4.7 / 4),
    # turn: B's two turns have 4 and .25.
    ("turn", "truncate", 2.0): ([[1.8] * 3, [2, 0, 0.25], [0.1], [0], [2, 2]], 6.15 / 5),
    ("turn", "clip", 2.0): ([[1.8] * 3, [2, 0, 0.5], [0.5], [0], [2, 2]], 6.8 / 5),
    ("turn", "mask", 2.0): ([[1.8] * 3, [0, 0, 0], [0], [0], [0, 0]], 1.8),
    # sequence, [0.5, 2]: 1.8, 1, 0.1, 2.4. B stays although both of its tokens are outside.
    ("sequence", "truncate", 2.0): ([[1.8] * 3, [1, 0, 1], [0.1], [0], [2, 2]], 4.9 / 4),
    ("sequence", "clip", 2.0): ([[1.8] * 3, [1, 0, 1], [0.5], [0], [2, 2]], 5.3 / 4),
    ("sequence", "mask", 2.0): ([[1.8] * 3, [1, 0, 1], [0], [0], [0, 0]], 2.8 / 2),
    # geometric, [2/3, 1.5]: 1.216…, 1, 0.1, 1.549…
    ("geometric", "truncate", 1.5): ([[GEO_A] * 3, [1, 0, 1], [0.1], [0], [1.5, 1.5]], (GEO_A + 2.6) / 4),
    ("geometric", "clip", 1.5): ([[GEO_A] * 3, [1, 0, 1], [2 / 3], [0], [1.5, 1.5]], (GEO_A + 2.5 + 2 / 3) / 4),
    ("geometric", "mask", 1.5): ([[GEO_A] * 3, [1, 0, 1], [0], [0], [0, 0]], (GEO_A + 1) / 2),
    # prefix: .6, .6, 1.8 | 4, 1 | .1 | 1.5, 2.4
    ("prefix", "truncate", 2.0): ([[0.6, 0.6, 1.8], [2, 0, 1], [0.1], [0], [1.5, 2]], 9.6 / 8),
    ("prefix", "clip", 2.0): ([[0.6, 0.6, 1.8], [2, 0, 1], [0.5], [0], [1.5, 2]], 10 / 8),
    ("prefix", "mask", 2.0): ([[0.6, 0.6, 1.8], [0, 0, 1], [0], [0], [1.5, 0]], 5.5 / 5),
}


@pytest.mark.parametrize(("level", "mode", "upper"), WEIGHTS)
def test_weights_accepted_tokens_and_their_mean(level: str, mode: str, upper: float) -> None:
    weights, mean = WEIGHTS[level, mode, upper]
    keep = [[float(w > 0) for w in row] for row in weights]
    found = mp.correct(BATCH, config(**weighted(level, mode, upper_bound=upper)))
    assert same(rows(BATCH, found.weights), weights) and rows(BATCH, found.keep) == keep
    # The veto 0.3 rejects B and C; neither the weights nor their mean may notice.
    for veto, kept in ((None, keep), (0.3, [keep[0], [0, 0, 0], [0], [0], keep[4]])):
        settings = weighted(level, mode, upper_bound=upper, batch_normalize=True) | {"rs": {"veto_threshold": veto}}
        found = mp.correct(BATCH, config(**settings))
        assert same(rows(BATCH, found.weights), [[weight / mean for weight in row] for row in weights])
        assert float(found.statistics.batch_factor()) == pytest.approx(mean, rel=1e-12)
        assert found.statistics.metrics()["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean)
        assert rows(BATCH, found.keep) == kept


@pytest.mark.parametrize("level", ["token", "turn", "prefix"])
def test_a_ratio_at_its_bound_is_inside(level: str) -> None:
    """ρ is exactly ½, 2 and just beyond either."""
    ln2 = math.log(2.0)
    for train, stays in ((-2 * ln2, True), (0.0, True), (-2 * ln2 - 1e-9, False), (1e-9, False)):
        values = torch.tensor([-ln2, train], dtype=torch.float64)
        batch = of_log_ratios([[0.0]]).replace(rollout_log_probs=values[:1], old_log_probs=values[1:])
        weights = mp.correct(batch, config(**weighted(level, "mask", upper_bound=2.0))).weights
        assert bool(weights[0] > 0) is stays


@pytest.mark.parametrize(("advantage", "condition"), [(-1.0, "negative"), (1.0, "away")])
def test_a_value_at_its_bound_stays(advantage: float, condition: str) -> None:
    """Strictly outside goes, under a condition too. 0.25 and ρ = 2 are exact."""
    batch = mp.PackedSequences.from_lists(
        old_log_probs=[torch.tensor([0.5]).log()], rollout_log_probs=[torch.tensor([0.25]).log()],
        loss_masks=[[1]], advantages=[advantage],
    )  # fmt: skip
    for bound, keep in (("0.25", 1.0), (f"{math.nextafter(0.2499999, 0)}", 0.0)):
        found = mp.correct(batch, config(rs={"criteria": [f"token:tv:{bound}@{condition}"]}))
        assert found.keep.tolist() == [keep]


def test_the_veto_sees_ratios_beyond_the_safety_bound() -> None:
    """e^-25 < 1e-10 and e^-22 > 1e-10."""
    batch = of_log_ratios([[-25.0], [-22.0]])
    assert mp.correct(batch, config(rs={"veto_threshold": 1e-10})).keep.tolist() == [0, 1]
