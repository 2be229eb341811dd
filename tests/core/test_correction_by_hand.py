"""Weights and accepted tokens worked out by hand: every mode × level, every statistic × aggregate, veto, batch norm.

The batch below is small enough for a pencil. Probabilities are given, so each ratio is a fraction one can read off.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf

#            A: ρ = .6, 1, 3       B: ρ = 4, masked, .25   C: .1    D: masked   E: ρ = 1.5, 1.6
TRAIN = [[0.30, 0.50, 0.75], [0.80, NAN, 0.20], [0.05], [INF], [0.60, 0.80]]
ROLLOUT = [[0.50, 0.50, 0.25], [0.20, INF, 0.80], [0.50], [NAN], [0.40, 0.50]]
MASKS = [[1, 1, 1], [1, 0, 1], [1], [0], [1, 1]]
# Π ρ:  A 0.6·1·3 = 1.8 · B 4·0.25 = 1 · C 0.1 · E 1.5·1.6 = 2.4
# geometric mean (of the response tokens only):  A 1.8^(1/3) · B 1 · C 0.1 · E √2.4 = 1.549…
GEO_A, GEO_E = 1.8 ** (1 / 3), 2.4**0.5


def logs(rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64).log() for row in rows]


def packed(train: list[list[float]], rollout: list[list[float]], masks: list[list[int]]) -> mp.PackedSequences:
    return mp.PackedSequences.from_lists(old_log_probs=logs(train), rollout_log_probs=logs(rollout), loss_masks=masks)


BATCH = packed(TRAIN, ROLLOUT, MASKS)


def tis(**settings: Any) -> mp.MismatchConfig:
    rest = {name: settings.pop(name) for name in ("rs", "dry_run", "metrics") if name in settings}
    return mp.MismatchConfig(use_tis=True, tis=mp.ImportanceSampling(**settings), **rest)


def rejection(*criteria: mp.Criterion | str, veto: float | None = None, **rest: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate({"rs": {"criteria": criteria, "veto_threshold": veto}, **rest})


def rows(batch: mp.PackedSequences, values: torch.Tensor) -> list[list[float]]:
    return [row.tolist() for row in batch.unpack(values)]


def same(found: list[list[float]], expected: list[list[float]]) -> bool:
    return [len(row) for row in found] == [len(row) for row in expected] and all(
        a == pytest.approx(b, rel=1e-12, abs=1e-300)
        for f, e in zip(found, expected, strict=True)
        for a, b in zip(f, e, strict=True)
    )


ALL = [[1, 1, 1], [1, 0, 1], [1], [0], [1, 1]]
WEIGHTS = {  # (mode, level, hi): weights, keep; lo = 1/hi
    # token, [0.5, 2]: 3 and 4 come down to 2; clip lifts .25 and .1 to .5; mask drops these four.
    ("truncate", "token", 2.0): ([[0.6, 1, 2], [2, 0, 0.25], [0.1], [0], [1.5, 1.6]], ALL),
    ("clip", "token", 2.0): ([[0.6, 1, 2], [2, 0, 0.5], [0.5], [0], [1.5, 1.6]], ALL),
    ("mask", "token", 2.0): ([[0.6, 1, 0], [0, 0, 0], [0], [0], [1.5, 1.6]], [[1, 1, 0], [0, 0, 0], [0], [0], [1, 1]]),
    # sequence, [0.5, 2]: 1.8, 1, 0.1, 2.4. B stays although both of its tokens are outside.
    ("truncate", "sequence", 2.0): ([[1.8] * 3, [1, 0, 1], [0.1], [0], [2, 2]], ALL),
    ("clip", "sequence", 2.0): ([[1.8] * 3, [1, 0, 1], [0.5], [0], [2, 2]], ALL),
    ("mask", "sequence", 2.0): ([[1.8] * 3, [1, 0, 1], [0], [0], [0, 0]], [[1] * 3, [1, 0, 1], [0], [0], [0, 0]]),
    # geometric, [2/3, 1.5]: 1.216…, 1, 0.1, 1.549…
    ("truncate", "geometric", 1.5): ([[GEO_A] * 3, [1, 0, 1], [0.1], [0], [1.5, 1.5]], ALL),
    ("clip", "geometric", 1.5): ([[GEO_A] * 3, [1, 0, 1], [2 / 3], [0], [1.5, 1.5]], ALL),
    ("mask", "geometric", 1.5): ([[GEO_A] * 3, [1, 0, 1], [0], [0], [0, 0]], [[1] * 3, [1, 0, 1], [0], [0], [0, 0]]),
}


@pytest.mark.parametrize(("mode", "level", "upper"), WEIGHTS)
def test_weights_and_keep(mode: str, level: str, upper: float) -> None:
    weights, keep = WEIGHTS[mode, level, upper]
    found = mp.correct(BATCH, tis(mode=mode, level=level, upper_bound=upper))
    assert same(rows(BATCH, found.weights), weights)
    assert rows(BATCH, found.keep) == keep


MEANS = {  # what batch normalisation divides by
    # 8 tokens: .6 + 1 + 2 | 2 + .25 | .1 | 1.5 + 1.6 = 9.05. Clip: .25 and .1 are .5: 9.7. Mask: the four inside: 4.7.
    ("truncate", "token", 2.0): 9.05 / 8,
    ("clip", "token", 2.0): 9.7 / 8,
    ("mask", "token", 2.0): 4.7 / 4,
    # 4 sequences with a response token (D counts nowhere), each once whatever its length.
    ("truncate", "sequence", 2.0): (1.8 + 1 + 0.1 + 2) / 4,
    ("clip", "sequence", 2.0): (1.8 + 1 + 0.5 + 2) / 4,
    ("mask", "sequence", 2.0): (1.8 + 1) / 2,
    ("truncate", "geometric", 1.5): (GEO_A + 1 + 0.1 + 1.5) / 4,
    ("clip", "geometric", 1.5): (GEO_A + 1 + 2 / 3 + 1.5) / 4,
    ("mask", "geometric", 1.5): (GEO_A + 1) / 2,
}


@pytest.mark.parametrize("with_rejection", [False, True])
@pytest.mark.parametrize(("mode", "level", "upper"), MEANS)
def test_batch_normalisation(mode: str, level: str, upper: float, with_rejection: bool) -> None:
    # The veto 0.3 rejects B and C; neither the weights nor their mean may notice.
    weights, keep = WEIGHTS[mode, level, upper]
    rs = mp.Rejection(veto_threshold=0.3) if with_rejection else mp.Rejection()
    config = tis(mode=mode, level=level, upper_bound=upper, batch_normalize=True, rs=rs)
    found = mp.correct(BATCH, config)
    mean = MEANS[mode, level, upper]
    assert same(rows(BATCH, found.weights), [[weight / mean for weight in row] for row in weights])
    assert float(found.statistics.batch_factor()) == pytest.approx(mean, rel=1e-12)
    assert found.statistics.metrics()["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean, rel=1e-12)
    if with_rejection:
        keep = [keep[0], [0, 0, 0], [0], [0], keep[4]]
    assert rows(BATCH, found.keep) == keep


def test_a_given_batch_factor_replaces_the_mean_of_this_batch() -> None:
    found = mp.correct(BATCH, tis(batch_normalize=True), batch_factor=0.5)
    assert same(rows(BATCH, found.weights), [[1.2, 2, 4], [4, 0, 0.5], [0.2], [0], [3, 3.2]])
    # Without batch normalisation it is not used.
    assert same(rows(BATCH, mp.correct(BATCH, tis(), batch_factor=0.5).weights), WEIGHTS["truncate", "token", 2.0][0])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_mean_of_zero_is_factor_one(level: str) -> None:
    # Mask mode, every ratio 4: all are rejected, and 0/0 must not turn up.
    batch = packed([[0.8, 0.8], [0.8]], [[0.2, 0.2], [0.2]], [[1, 1], [1]])
    found = mp.correct(batch, tis(mode="mask", level=level, batch_normalize=True))
    assert rows(batch, found.weights) == [[0, 0], [0]] == rows(batch, found.keep)
    assert float(found.statistics.batch_factor()) == 1.0


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


def aggregated(statistic: str, aggregate: str) -> float:
    first, second = STATISTICS[statistic]
    if aggregate == "sequence_max":
        return max(first, second)
    if statistic in ("ratio", "k1"):
        return first * second if aggregate == "sequence_sum" else math.sqrt(first * second)
    return first + second if aggregate == "sequence_sum" else (first + second) / 2


def kept(criterion: mp.Criterion) -> list[list[float]]:
    batch = packed([[0.25, NAN, 0.6], [0.5], [0.5]], [[0.5, 0.9, 0.2], [0.5], [INF]], [[1, 0, 1], [1], [0]])
    return rows(batch, mp.correct(batch, rejection(criterion)).keep)


@pytest.mark.parametrize("aggregate", ["sequence_sum", "sequence_mean", "sequence_max"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_sequence_criteria(statistic: Any, aggregate: Any) -> None:
    """The aggregate lies between a bound that keeps the sequence and one that rejects it, 2e-7 apart."""
    value = aggregated(statistic, aggregate)

    def verdict(lower: float, upper: float) -> list[list[float]]:
        return kept(mp.Criterion(statistic=statistic, aggregate=aggregate, lower_bound=lower, upper_bound=upper))

    whole, nothing = [[1, 0, 1], [1], [0]], [[0, 0, 0], [1], [0]]
    assert verdict(0.0, value + EDGE) == whole
    assert verdict(0.0, value - EDGE)[0] == nothing[0]
    assert verdict(value - EDGE, 100.0)[0] == whole[0]
    assert verdict(value + EDGE, 100.0)[0] == nothing[0]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_token_criteria(statistic: Any) -> None:
    first, second = STATISTICS[statistic]

    def verdict(lower: float, upper: float) -> list[float]:
        return kept(mp.Criterion(statistic=statistic, lower_bound=lower, upper_bound=upper))[0]

    assert verdict(0.0, second + EDGE) == [1, 0, 1]
    assert verdict(0.0, second - EDGE) == [1, 0, 0]
    assert verdict(0.0, first - EDGE) == [0, 0, 0]
    assert verdict(first + EDGE, 100.0) == [0, 0, 1]
    assert verdict(first - EDGE, 100.0) == [1, 0, 1]


def test_absent_bounds_of_a_ratio_criterion() -> None:
    # hi from TIS = 2, lo = 1/hi = 0.5: of A's .6, 1, 3 the last goes.
    config = tis(rs=mp.Rejection(criteria=(mp.Criterion(),)))
    assert rows(BATCH, mp.correct(BATCH, config).keep) == [[1, 1, 0], [0, 0, 0], [0], [0], [1, 1]]
    with pytest.raises(ValueError, match="no upper bound and there is no TIS bound"):
        rejection(mp.Criterion())
    with pytest.raises(ValueError, match="token_k2 has no upper bound"):
        tis(rs=mp.Rejection(criteria=(mp.Criterion(statistic="k2"),)))


def test_veto() -> None:
    # B holds ρ = .25 and C ρ = .1; the masked tokens are NaN and must veto nothing.
    assert rows(BATCH, mp.correct(BATCH, rejection(veto=0.3)).keep) == [[1] * 3, [0] * 3, [0], [0], [1, 1]]
    assert rows(BATCH, mp.correct(BATCH, rejection(veto=0.2)).keep) == [[1] * 3, [1, 0, 1], [0], [0], [1, 1]]
    # Unclamped: two ratios beyond the safety bound, e^-25 < 1e-10 and e^-22 > 1e-10.
    batch = mp.PackedSequences.from_lists(
        old_log_probs=[[-26.0], [-23.0]], rollout_log_probs=[[-1.0], [-1.0]], loss_masks=[[1], [1]]
    )
    assert rows(batch, mp.correct(batch, rejection(veto=1e-10)).keep) == [[0], [1]]
