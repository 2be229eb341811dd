"""Bounds keep a wished share of these data and hardly more; the page's arithmetic on histograms is that of the core."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.diagnose import page
from mismatch_plugin.diagnose.levels import LEVELS, bound_edges, bounds_for, histograms, levels_of, units_in
from mismatch_plugin.diagnose.packing import packed_of
from mismatch_plugin.diagnose.predict import predict_one
from mismatch_plugin.diagnose.words import Controls, controls_of
from tests import ragged
from tests.diagnose.browser import start
from tests.diagnose.dumps import batch_of, drawn

PACKED, _ = packed_of(drawn(400, spread=0.1))
PACKED = PACKED.replace(unit_ids=torch.cat([torch.arange(length) // 5 for length in PACKED.lengths]))
FIGURES = ("kept", "kept_positive", "kept_negative", "mean_weight", "ess")


def kept(packed: mp.PackedSequences, level: str, lower: float, upper: float, growth: float = 0.0) -> float:
    """Share of the level's units within these bounds, as training reports it."""
    tis = {"level": level, "mode": "mask", "lower_bound": lower, "upper_bound": upper, "bound_growth": growth}
    with ignore_mismatch_warnings():
        metrics = mp.correct(packed, mp.MismatchConfig.build({"use_tis": True, "tis": tis})).statistics.metrics()
    return 1.0 - sum(metrics[f"rollout_corr/rollout_is_ratio_fraction_{side}"] for side in ("high", "low"))


@pytest.mark.parametrize("wished", [0.5, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("name", [*LEVELS, "turn_growing", "sequence_growing", "prefix_growing"])
def test_bounds_of_a_level_keep_the_wished_share_and_hardly_more(name: str, wished: float):
    level, growth = name.removesuffix("_growing"), 0.5 * name.endswith("_growing")
    lower, upper = bounds_for(PACKED, {"": wished})[name][""]
    units, found = len(units_in(level, PACKED).log_ratio_U), kept(PACKED, level, lower, upper, growth)
    # Rounding outwards and whole units let in a little more.
    assert wished - 1e-12 <= found <= wished + 2 / units + 0.003
    assert wished == 1.0 or kept(PACKED, level, lower ** (1 / 1.2), upper ** (1 / 1.2), growth) < found
    assert name.startswith("turn") != (name in bounds_for(PACKED.replace(unit_ids=None)))


@pytest.mark.parametrize("wished", [0.5, 0.99])
@pytest.mark.parametrize(("aggregate", "statistic"), [("sequence_mean", "k3"), ("sequence_max", "k2")])
def test_the_bound_of_a_statistic_keeps_the_wished_share(aggregate: str, statistic: str, wished: float):
    lower, upper = bounds_for(PACKED, {"": wished})[f"{aggregate}_{statistic}"][""]
    shares = []
    for bound in (upper, upper / 1.1):
        rule = {"aggregate": aggregate, "statistic": statistic, "upper_bound": bound}
        metrics = mp.correct(PACKED, mp.MismatchConfig.build({"rs": {"criteria": [rule]}})).statistics.metrics()
        shares.append(metrics["rollout_corr/accepted_seq_fraction"])
    most = wished + 1 / len(PACKED.lengths) + 0.003
    assert lower == 0.0 and wished - 1e-12 <= shares[0] <= most and shares[1] < shares[0]


def test_bounds_by_hand():
    gaps = [0.001 * at for at in range(-50, 50)]  # −0.05 … 0.049
    hundred, _ = packed_of(batch_of([[-2.0] * 100], [[-2.0 + gap for gap in gaps]]))
    found = bounds_for(hundred, {"90%": 0.9, "100%": 1.0})["token"]
    assert found["100%"] == pytest.approx((math.exp(-0.05), math.exp(0.049)), rel=1e-4)
    # They are short numbers, and lie outside of what they keep.
    assert found["90%"] == (0.95599, 1.04499) and kept(hundred, "token", *found["90%"]) == 0.9
    apart, _ = packed_of(batch_of([[-2.0] * 50], [[-1.0] * 50]))
    lower, upper = bounds_for(apart)["token"]["99%"]
    assert lower < 1.0 < math.e <= upper < 2.73, "1 is always inside"
    equal, _ = packed_of(batch_of([[-2.0] * 5], [[-2.0] * 5]))
    for level in levels_of(equal):
        lower, upper = bounds_for(equal)[level]["99.9%"]
        assert 0.99999 < lower < 1.0 < upper < 1.00001 and kept(equal, level, lower, upper) == 1.0
    rows = [torch.tensor([-1.0, end], dtype=torch.float64) for end in (-1.1, -1.2, -1.3, -1e308)]
    huge = mp.PackedSequences.from_lists(
        rollout_log_probs=[torch.full((2,), -1.0).double()] * 4, old_log_probs=rows, loss_masks=[[1, 1]] * 4
    )
    found = bounds_for(huge, {"100%": 1.0, "50%": 0.5})["sequence_max_k2"]
    assert found["100%"] == (0.0, math.inf) and 0.0 < found["50%"][1] < 1.0


@settings(max_examples=40, deadline=None)
@given(ragged.batches(torch.float64, min_tokens=1), st.sampled_from([0.5, 0.8, 0.99, 1.0]))
def test_any_batch_keeps_what_is_promised(batch: ragged.Batch, wished: float):
    packed = batch.packed()
    for level in levels_of(packed):
        lower, upper = bounds_for(packed, {"": wished})[level][""]
        if lower > 0 and upper < math.inf:  # else mask mode ends at e^±20
            assert lower <= 1.0 <= upper and kept(packed, level, lower, upper) >= wished - 1e-12


def test_edges_are_round_ratios_and_counts_add_up_with_the_extremes_in_the_open_bins():
    edges = bound_edges([2.345678, 0.0, math.inf, 1.0])
    assert (np.diff(edges) > 0).all() and 0.0 not in edges and len(edges) > 1500 and np.isfinite(edges).all()
    assert np.isclose(np.exp(edges), 2.345678, rtol=1e-12).any()
    assert (np.diff(edges) < 0.03 * np.abs(edges[1:]) + 1e-5).all()
    batch = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, -1.5, -1.0], [-3.0], [-2.0, -2000.0]],
        train_log_probs=[[-1001.0, -2.0, -1.0], [-5.0], [-1.5, -1000.0]],
        advantages=[[1.0, 1, 0], [5.0], [-1.0, -1]],
        loss_masks=[[1, 1, 1], [0], [1, 1]],
    )
    of = histograms(batch)
    token, sequence = of["levels"]["token"], of["levels"]["sequence"]
    assert [sum(token[name]) for name in ("units", "positive", "negative")] == [5, 2, 2]
    assert (token["bins"][0], token["bins"][-1]) == (0, len(of["edges"]))
    assert sum(sequence["units"]) == 2 and sum(sequence["tokens"]) == 5  # sequence 1 has no token
    assert token["ratio"][-1] == math.exp(20.0) and all(map(math.isfinite, token["squared"]))


@pytest.mark.parametrize("spread", [0.1, 0.9])
def test_the_script_computes_what_the_core_computes(spread: float, tmp_path: Path):
    """Every level × mode × bounds, and rejection alone."""
    batch, _ = packed_of(drawn(60, spread))
    batch = batch.replace(
        unit_ids=torch.cat([torch.arange(length) // 7 for length in batch.lengths]),
        advantages=torch.repeat_interleave(torch.arange(60) % 3 - 1.0, torch.tensor(batch.lengths)).double(),
    )
    bounds = ((0.5, 2.0), (0.9, 1.1), (0.1, 20.0), (0.999, 1.0005))
    histogram = histograms(batch, [bound for pair in bounds for bound in pair])
    edges, given = np.array(histogram["edges"]), []
    for level, (lower, upper) in [(level, pair) for level in LEVELS for pair in bounds]:
        for mode in ("truncate", "clip", "mask"):
            tis = {"level": level, "mode": mode, "upper_bound": upper}
            given.append({"use_tis": True, "tis": tis | ({} if mode == "truncate" else {"lower_bound": lower})})
        if (aggregate := level) in RS_LEVELS:
            given.append({"rs": {"criteria": [{"aggregate": aggregate, "lower_bound": lower, "upper_bound": upper}]}})
    script = Path(page.__file__).with_name("page.js").read_text()
    browser = start(tmp_path)
    try:
        browser.evaluate(script[: script.index("function start")] + f";var h = {json.dumps(histogram)}; 0")
        for one in given:
            at = controls_of(one)
            assert at is not None and at.upper is not None
            lower, upper = (
                -1 if b is None else int(np.abs(edges - math.log(b)).argmin()) for b in (at.lower, at.upper)
            )
            found = browser.evaluate(
                f"recompute(h.edges, h.levels[{json.dumps(at.level)}], {json.dumps(at.mode)}, {lower}, {upper})"
            )
            with ignore_mismatch_warnings():
                expected = predict_one(batch, mp.MismatchConfig.build(one))
            for name in FIGURES:
                if name == "mean_weight" and not expected.kept:
                    assert found[name] is None
                else:
                    assert found[name] == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-12), (one, name)
        shown = browser.evaluate("bars(h.edges, h.levels.token, [])")
        assert sum(shown["counts"]) + sum(shown["beyond"]) == pytest.approx(len(batch.loss_mask), abs=1.5)
    finally:
        browser.close()


def test_where_a_setting_is_among_the_controls():
    for given_settings, found in (
        ({"use_tis": True}, Controls("token", "truncate", None, 2.0)),
        ({"use_tis": True, "tis": {"mode": "mask", "upper_bound": math.inf, "lower_bound": 0}},
         Controls("token", "mask", None, None)),
        ({"rs": {"criteria": ["sequence_mean:ratio:0.98:1.02"]}}, Controls("geometric", "reject", 0.98, 1.02)),
        ({"preset": "dppo_tv"}, Controls("token", "truncate", None, 20.0)),
        ({"preset": "seq_mis"}, Controls("sequence", "truncate", None, 2.0)),
    ):  # fmt: skip
        assert controls_of(given_settings) == found
    # Not understood, or no place on a slider: no bound, bounds that grow, a condition, staleness.
    for none in ({}, {"rs": {"criteria": ["token:k3:0.1"]}}, {"no_such_setting": 1}, {"preset": "no such"},
                 {"preset": "prefix_is"}, {"preset": "kpop"}, {"rs": {"max_staleness": 1}},
                 {"rs": {"criteria": ["token:ratio:2@negative"]}}):  # fmt: skip
        assert controls_of(none) is None, none
