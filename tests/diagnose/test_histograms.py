"""What the page's sliders are worked out from, and its script's arithmetic, against the core."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config.criteria import LEVEL_TO_AGGREGATE
from mismatch_plugin.diagnose import page
from mismatch_plugin.diagnose.levels import LEVELS, bound_edges, histograms
from mismatch_plugin.diagnose.words import Controls, controls_of
from tests.diagnose.browser import start
from tests.diagnose.diagnoses import SETTINGS, data, packed, prediction

FIGURES = ("kept", "kept_positive", "kept_negative", "mean_weight", "ess")
BOUNDS = ((0.5, 2.0), (0.9, 1.1), (0.1, 20.0), (0.999, 1.0005))


def settings() -> list[dict[str, Any]]:
    """Every level × mode × bounds, and rejection alone."""
    found = []
    for level in LEVELS:
        for lower, upper in BOUNDS:
            for mode in ("truncate", "clip", "mask"):
                tis = {"level": level, "mode": mode, "upper_bound": upper}
                found.append({"use_tis": True, "tis": tis | ({} if mode == "truncate" else {"lower_bound": lower})})
            if aggregate := LEVEL_TO_AGGREGATE.get(level):
                rule = {"aggregate": aggregate, "lower_bound": lower, "upper_bound": upper}
                found.append({"rs": {"criteria": [rule]}})
    return found


def test_edges_are_round_ratios_and_hold_what_is_asked_for():
    edges = bound_edges([2.345678, 0.0, math.inf, 1.0])
    assert (np.diff(edges) > 0).all() and 0.0 not in edges and len(edges) > 1500
    ratios = np.exp(edges)
    assert np.isclose(ratios, 2.345678, rtol=1e-12).any() and np.isfinite(edges).all()
    assert (np.diff(edges) < 0.03 * np.abs(edges[1:]) + 1e-5).all()


def test_counts_add_up_and_extremes_lie_in_the_open_bins():
    batch = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, -1.5, -1.0], [-3.0], [-2.0, -2000.0]],
        train_log_probs=[[-1001.0, -2.0, -1.0], [-5.0], [-1.5, -1000.0]],
        advantages=[[1.0, 1, 0], [5.0], [-1.0, -1]],
        loss_masks=[[1, 1, 1], [0], [1, 1]],
    )
    of = histograms(batch)
    token, sequence = of.levels["token"], of.levels["sequence"]
    assert (sum(token.units), sum(token.positive), sum(token.negative)) == (5, 2, 2)
    assert (token.bins[0], token.bins[-1]) == (0, len(of.edges))
    assert sum(sequence.units) == 2 and sum(sequence.tokens) == 5  # sequence 1 has no token
    assert token.ratio[-1] == math.exp(20.0) and all(map(math.isfinite, token.squared))
    assert not histograms(batch.replace(advantages=None)).signed


@pytest.mark.parametrize("verdict", ["normal", "large", "fault"])
def test_the_script_computes_what_the_core_computes(verdict: Any, tmp_path: Path):
    of = data(verdict)
    batch = packed(of)
    batch = batch.replace(turn_ids=torch.cat([torch.arange(length) // 7 for length in batch.lengths]))
    both = [bound for pair in BOUNDS for bound in pair]
    histogram = histograms(batch, both)
    script = (Path(page.__file__).with_name("page.js")).read_text()
    browser = start(tmp_path)
    try:
        browser.evaluate(script[: script.index("function start")] + f";var h = {histogram.model_dump_json()}; 0")
        for one in settings():
            at = controls_of(one)
            assert at is not None
            expected = prediction("", one, batch)
            place = [
                np.abs(np.array(histogram.edges) - math.log(b)).argmin() if b else None
                for b in vars(at).values()
                if not isinstance(b, str)
            ]
            lower = -1 if place[0] is None else int(place[0])
            found = browser.evaluate(
                f"recompute(h.edges, h.levels[{json.dumps(at.level)}], {json.dumps(at.mode)}, {lower}, {place[1]})"
            )
            for name in FIGURES:
                got, wanted = found[name], getattr(expected, name)
                if name == "mean_weight" and expected.kept == 0:
                    assert got is None
                    continue
                assert got == pytest.approx(wanted, rel=1e-6, abs=1e-12), (one, name)
    finally:
        browser.close()


def test_where_a_setting_is_among_the_controls():
    assert controls_of({"use_tis": True}) == Controls("token", "truncate", None, 2.0)
    assert controls_of({"use_tis": True, "tis": {"mode": "mask", "upper_bound": math.inf, "lower_bound": 0}}) == (
        Controls("token", "mask", None, None)
    )
    assert controls_of(SETTINGS["geo_rs"]) == Controls("geometric", "reject", 0.98, 1.02)
    assert controls_of({}) is None and controls_of(SETTINGS["token:k3:0.1"]) is None
    assert controls_of({"no_such_setting": 1}) is None and controls_of({"preset": "no such"}) is None
    assert controls_of({"preset": "prefix_is"}) is None, "bounds that grow are no place on a slider"
    assert controls_of({"preset": "dppo_tv"}) == Controls("token", "truncate", None, 20.0)
    assert controls_of({"preset": "kpop"}) is None and controls_of({"rs": {"max_staleness": 1}}) is None
    assert controls_of({"rs": {"criteria": ["token:ratio:2@negative"]}}) is None
    assert controls_of({"preset": "seq_mis"}) == Controls("sequence", "truncate", None, 2.0)
