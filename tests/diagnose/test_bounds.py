"""Bounds that keep a wished share keep it on these data, and hardly more."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.config.values import no_notes
from mismatch_plugin.diagnose.levels import LEVELS, STATISTICS, bounds_for, levels_of, units_in
from mismatch_plugin.diagnose.packing import packed_of
from tests import ragged
from tests.diagnose.dumps import batch_of, drawn

PACKED, _ = packed_of(drawn(400, spread=0.1))
PACKED = PACKED.replace(turn_ids=torch.cat([torch.arange(length) // 5 for length in PACKED.lengths]))


def kept(packed: mp.PackedSequences, level: str, lower: float, upper: float, growth: float = 0.0) -> float:
    """Share of the level's units within these bounds, as training reports it."""
    tis = {"level": level, "mode": "mask", "lower_bound": lower, "upper_bound": upper, "bound_growth": growth}
    with no_notes():
        metrics = mp.correct(packed, mp.MismatchConfig.build({"use_tis": True, "tis": tis})).statistics.metrics()
    outside = [metrics[f"rollout_corr/rollout_is_ratio_fraction_{side}"] for side in ("high", "low")]
    return 1.0 - sum(outside)


def share(packed: mp.PackedSequences, config: mp.MismatchConfig, by_token: bool) -> float:
    metrics = mp.correct(packed, config).statistics.metrics()
    return metrics[f"rollout_corr/accepted_{'token' if by_token else 'seq'}_fraction"]


@pytest.mark.parametrize("wished", [0.5, 0.9, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("name", [*LEVELS, "turn_growing", "sequence_growing", "prefix_growing"])
def test_bounds_of_a_level_keep_the_wished_share_and_hardly_more(name: str, wished: float):
    level, growth = name.removesuffix("_growing"), 0.5 * name.endswith("_growing")
    (lower, upper) = bounds_for(PACKED, (wished,))[name][f"{wished * 100:g}%"]
    units = len(units_in(level, PACKED).log_ratio_U)
    found = kept(PACKED, level, lower, upper, growth)
    assert found >= wished - 1e-12
    # Rounding outwards and whole units let in a little more.
    assert found <= wished + 2 / units + 0.003
    if wished < 1.0:
        assert kept(PACKED, level, lower ** (1 / 1.2), upper ** (1 / 1.2), growth) < found


def test_turns_are_a_level_where_a_response_has_several():
    several = {"turn", "turn_growing"}
    assert several <= set(bounds_for(PACKED)) and not several & set(bounds_for(PACKED.replace(turn_ids=None)))


@pytest.mark.parametrize("wished", [0.5, 0.99])
@pytest.mark.parametrize("criterion", STATISTICS, ids="_".join)
def test_the_bound_of_a_statistic_keeps_the_wished_share(criterion: tuple[str, str], wished: float):
    aggregate, statistic = criterion
    lower, upper = bounds_for(PACKED, (wished,))[f"{aggregate}_{statistic}"][f"{wished * 100:g}%"]
    assert lower == 0.0
    shares = []
    for bound in (upper, upper / 1.1):
        rule = {"aggregate": aggregate, "statistic": statistic, "upper_bound": bound}
        shares.append(share(PACKED, mp.MismatchConfig.build({"rs": {"criteria": [rule]}}), aggregate == "token"))
    units = sum(PACKED.lengths) if aggregate == "token" else len(PACKED.lengths)
    assert wished - 1e-12 <= shares[0] <= wished + 1 / units + 0.003
    assert shares[1] < shares[0]


def test_bounds_by_hand():
    gaps = [0.001 * at for at in range(-50, 50)]  # −0.05 … 0.049
    packed, _ = packed_of(batch_of([[-2.0] * 100], [[-2.0 + gap for gap in gaps]]))
    found = bounds_for(packed, (0.9, 1.0))["token"]
    assert found["90%"] == pytest.approx((math.exp(-0.045), math.exp(0.044)), rel=1e-4)
    assert found["100%"] == pytest.approx((math.exp(-0.05), math.exp(0.049)), rel=1e-4)
    # They are short numbers, and lie outside of what they keep.
    assert found["90%"] == (0.95599, 1.04499) and kept(packed, "token", *found["90%"]) == 0.9


def test_one_is_always_inside():
    packed, _ = packed_of(batch_of([[-2.0] * 50], [[-1.0] * 50]))
    lower, upper = bounds_for(packed)["token"]["99%"]
    assert lower < 1.0 < math.e <= upper < 2.73


def test_equal_sides_have_bounds_next_to_one():
    packed, _ = packed_of(batch_of([[-2.0] * 5], [[-2.0] * 5]))
    for level in levels_of(packed):
        lower, upper = bounds_for(packed)[level]["99.9%"]
        assert 0.99999 < lower < 1.0 < upper < 1.00001
        assert kept(packed, level, lower, upper) == 1.0


@settings(max_examples=40, deadline=None)
@given(ragged.batches(torch.float64, min_tokens=1), st.sampled_from([0.5, 0.8, 0.99, 1.0]))
def test_any_batch_keeps_what_is_promised(batch: ragged.Batch, wished: float):
    packed = batch.packed()
    for level in levels_of(packed):
        lower, upper = bounds_for(packed, (wished,))[level][f"{wished * 100:g}%"]
        if not (lower > 0 and upper < math.inf):  # there mask mode ends at e^±20
            continue
        assert lower <= 1.0 <= upper
        assert kept(packed, level, lower, upper) >= wished - 1e-12


def test_what_is_asked_for_must_make_sense():
    with pytest.raises(ValueError, match=r"shares \[99\] must be above 0 and at most 1: 0.99 keeps 99 %"):
        bounds_for(PACKED, (99,))
    with pytest.raises(ValueError, match="need old_log_probs and rollout_log_probs"):
        bounds_for(PACKED.replace(rollout_log_probs=None))


def test_a_statistic_without_a_limit_has_no_bound():
    batch = random_pair(-1e308)
    found = bounds_for(batch, (1.0, 0.5))["sequence_max_k2"]
    assert found["100%"] == (0.0, math.inf)
    assert 0.0 < found["50%"][1] < 1.0


def random_pair(worst: float) -> mp.PackedSequences:
    """Four responses of two tokens; one training log-prob is `worst`."""
    rows = [[-1.0, -1.1], [-1.0, -1.2], [-1.0, -1.3], [-1.0, worst]]
    double = [torch.tensor(row, dtype=torch.float64) for row in rows]
    rollout = [torch.full((2,), -1.0, dtype=torch.float64) for _ in rows]
    return mp.PackedSequences.from_lists(rollout_log_probs=rollout, old_log_probs=double, loss_masks=[[1, 1]] * 4)
