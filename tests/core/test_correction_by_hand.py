"""Weights and accepted tokens worked out by hand: every mode × level, every statistic × aggregate, veto, batch norm.

The batch below is small enough for a pencil. Probabilities are given, so each ratio is a fraction one can read off.
"""

from __future__ import annotations

import math
from typing import Any

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


def packed(train: list[list[float]], rollout: list[list[float]], masks: list[list[int]]) -> mp.PackedSequences:
    return mp.PackedSequences.from_lists(old_log_probs=logs(train), rollout_log_probs=logs(rollout), loss_masks=masks)


BATCH = packed(TRAIN, ROLLOUT, MASKS)


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


def test_a_given_batch_factor_replaces_the_mean_of_this_batch() -> None:
    found = mp.correct(BATCH, config(**weighted(batch_normalize=True)), batch_factor=0.5)
    assert same(rows(BATCH, found.weights), [[1.2, 2, 4], [4, 0, 0.5], [0.2], [0], [3, 3.2]])
    plain = mp.correct(BATCH, config(**weighted()), batch_factor=0.5)  # not used without batch normalisation
    assert same(rows(BATCH, plain.weights), WEIGHTS["token", "truncate", 2.0][0])


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric", "prefix"])
def test_a_mean_of_zero_is_factor_one(level: str) -> None:
    # Mask mode, every ratio 4: all are rejected, and 0/0 must not turn up.
    batch = packed([[0.8, 0.8], [0.8]], [[0.2, 0.2], [0.2]], [[1, 1], [1]])
    found = mp.correct(batch, config(**weighted(level, "mask", batch_normalize=True)))
    assert rows(batch, found.weights) == [[0, 0], [0]] == rows(batch, found.keep)
    assert float(found.statistics.batch_factor()) == 1.0


@pytest.mark.parametrize("level", ["token", "turn", "prefix"])
def test_a_ratio_at_its_bound_is_inside(level: str) -> None:
    """ρ is exactly ½, 2 and just beyond either."""
    ln2 = math.log(2.0)
    for train, stays in ((-2 * ln2, True), (0.0, True), (-2 * ln2 - 1e-9, False), (1e-9, False)):
        values = torch.tensor([-ln2, train], dtype=torch.float64)
        batch = of_log_ratios([[0.0]]).replace(rollout_log_probs=values[:1], old_log_probs=values[1:])
        weights = mp.correct(batch, config(**weighted(level, "mask", upper_bound=2.0))).weights
        assert bool(weights[0] > 0) is stays


# Criteria -------------------------------------------------------------------------------------------------------------

# Two response tokens (and a masked one between them) p → q:  0.5 → 0.25 (l = −ln 2)  and  0.2 → 0.6 (l = ln 3).
LN2, LN3, LN15 = math.log(2), math.log(3), math.log(1.5)
STATISTICS = {  # the statistic at either token
    "k2": (LN2**2 / 2, LN3**2 / 2),  # 0.2402265, 0.6034745
    "k3": (0.5 - 1 + LN2, 3 - 1 - LN3),  # 0.1931472, 0.9013877
    "tv": (0.25, 0.4),
    # KL(.5‖.25) = .5 ln 2 + .5 ln(.5/.75) · KL(.2‖.6) = .2 ln(1/3) + .8 ln(.8/.4)
    "binary_kl": (0.5 * LN2 - 0.5 * LN15, -0.2 * LN3 + 0.8 * LN2),  # 0.1438410, 0.3347953
    # KL(.25‖.5) = .25 ln(1/2) + .75 ln 1.5 · KL(.6‖.2) = .6 ln 3 + .4 ln(.4/.8)
    "binary_kl_reverse": (-0.25 * LN2 + 0.75 * LN15, 0.6 * LN3 - 0.4 * LN2),  # 0.1308120, 0.3819085
    # Bounds of ratio and k1 are bounds on ρ: 1/2 and 3; product 1.5, geometric mean √1.5, largest 3.
    "ratio": (0.5, 3.0),
    "k1": (0.5, 3.0),
}
EDGE = 1e-7


def aggregated(statistic: str, aggregate: str) -> tuple[float, float]:
    """What the first and the second token are judged by."""
    first, second = STATISTICS[statistic]
    if aggregate == "token":
        return first, second
    if aggregate == "sequence_max":
        return max(first, second), max(first, second)
    if statistic in ("ratio", "k1"):
        both = first * second if aggregate == "sequence_sum" else math.sqrt(first * second)
    else:
        both = first + second if aggregate == "sequence_sum" else (first + second) / 2
    return both, both


@pytest.mark.parametrize("aggregate", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_criteria(statistic: Any, aggregate: Any) -> None:
    """What is judged lies between a bound that keeps it and one that rejects it, 2e-7 apart."""
    batch = packed([[0.25, NAN, 0.6], [0.5], [0.5]], [[0.5, 0.9, 0.2], [0.5], [INF]], [[1, 0, 1], [1], [0]])
    values = aggregated(statistic, aggregate)
    for bound in values:
        for edge in (bound - EDGE, bound + EDGE):
            for lower, upper in ((0.0, edge), (edge, 100.0)):
                rule = mp.Criterion(statistic=statistic, aggregate=aggregate, lower_bound=lower, upper_bound=upper)
                first, second = (float(lower <= value <= upper) for value in values)
                found = rows(batch, mp.correct(batch, config(rs={"criteria": (rule,)})).keep)
                assert found[0] == [first, 0, second] and found[2] == [0]


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


def test_veto() -> None:
    # B holds ρ = .25 and C ρ = .1; the masked tokens are NaN and must veto nothing.
    for threshold, kept in ((0.3, [0] * 3), (0.2, [1, 0, 1])):
        found = rows(BATCH, mp.correct(BATCH, config(rs={"veto_threshold": threshold})).keep)
        assert found == [[1] * 3, kept, [0], [0], [1, 1]]
    # Unclamped: two ratios beyond the safety bound, e^-25 < 1e-10 and e^-22 > 1e-10.
    batch = of_log_ratios([[-25.0], [-22.0]])
    assert mp.correct(batch, config(rs={"veto_threshold": 1e-10})).keep.tolist() == [0, 1]
