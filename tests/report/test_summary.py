"""`summary.json`: the numbers of the page, as they are computed."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.report.data import read_run_folder
from mismatch_plugin.report.statistics import summarise
from mismatch_plugin.report.summary import write_summary
from tests.report.synthetic import SEEDS, write_comparison, write_run


def written(root: Path, picture: Path | None = None) -> dict[str, Any]:
    folder = read_run_folder(root)
    return json.loads(write_summary(folder, summarise(folder), picture).read_text())


def test_every_number_is_the_summary_s(tmp_path: Path):
    write_comparison(tmp_path, settings=["stale32", "control"])
    write_run(tmp_path, "stale32", "0", 100, grad_norm=900.0)  # the median over seeds is that of the others
    found = written(tmp_path)
    assert found["complete"] and found["seeds"] == [*SEEDS] and "picture" not in found
    assert [*found["settings"]] == ["stale32", "control"] and [*found["cross_check"]] == ["stale32"]
    entry = found["settings"]["stale32"]
    assert (entry["title"], entry["what"], entry["measure"]) == ("Very stale", "Weights are <old>.", "exact")
    summary = summarise(read_run_folder(tmp_path))[0]
    assert entry["headline"] == summary.headline
    for s in summary.variants:
        mine, d = entry["variants"][s.variant], s.difference
        expected = {"mean": s.final["exact"].mean, "error": s.final["exact"].error, "area": s.area.mean}
        if d is None:
            assert "verdict" not in mine
        else:
            expected |= {"difference": d.mean, "p": d.p, "p_holm": d.p_holm, "effect_size": d.effect_size}
            assert mine["interval"] == pytest.approx([d.low, d.high], rel=1e-5) and mine["verdict"] == d.verdict
        for name, value in expected.items():  # what is not finite is null in JSON
            assert mine[name] == (pytest.approx(value, rel=1e-5) if math.isfinite(value) else None), name
        assert (mine["seeds"], mine["runs"], mine["collapsed"]) == (12, 12, s.collapsed_runs)
    assert entry["variants"]["0"]["mechanism"] == {"grad_norm": 300.0, "kl": 0.5, "impossible": 0.09}
    assert entry["variants"]["2:token:truncate"]["mechanism"] == {"grad_norm": 2.0, "kl": 0.5, "impossible": 0.022}
    bypass = entry["variants"]["1"]
    assert bypass["p"] < bypass["p_holm"] < 0.01 and bypass["interval"][0] < bypass["difference"]


def test_a_run_that_is_missing_shows_and_the_picture_is_named_by_its_content(tmp_path: Path):
    write_comparison(tmp_path, check=False, settings=["control"])
    (tmp_path / "control" / "1" / "seed100" / "done.json").unlink()
    picture = tmp_path / "collapse.png"
    assert "picture" not in written(tmp_path, picture)
    picture.write_bytes(b"a picture")
    found = written(tmp_path, picture)
    assert not found["complete"] and found["settings"]["control"]["variants"]["1"]["seeds"] == 11
    assert found["picture"] == hashlib.sha256(b"a picture").hexdigest() and "cross_check" not in found
