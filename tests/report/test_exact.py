"""The seed-free tables: what is exact is exact, what is biased is biased, and both are computed once a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_plugin.report import exact


def test_exact_bias_of_the_settings():
    gaps = {"mild": exact.Mismatch(0.05), "strong": exact.Mismatch(1.0), "moved": exact.Mismatch(1.0, 0.5)}
    labels = ("0", "1", "2:sequence:untruncated", "2:sequence:truncate", "3:sequence:untruncated", "3:token:truncate")
    result = exact.exact_bias(gaps, labels, problems=6, length=3)
    bias = result.bias
    assert max(bias["3:sequence:untruncated"].values()) < 1e-10
    assert max(bias["2:sequence:untruncated"][name] for name in ("mild", "strong")) < 1e-10
    assert bias["2:sequence:untruncated"]["moved"] > 0.05
    assert bias["0"]["mild"] < 0.2 < 0.5 < bias["0"]["strong"]
    assert bias["2:sequence:truncate"]["strong"] < bias["0"]["strong"]
    spread = result.deviation
    assert spread["3:sequence:untruncated"]["strong"] > 1.5 * spread["2:sequence:truncate"]["strong"]
    assert result.kl["mild"] < result.kl["strong"] and result.ess["mild"] > result.ess["strong"]
    table = exact.exact_bias_table(result)
    assert len(table.rows) == len(labels) and "1e-" not in table.rows[0][1]


def test_exact_dynamics_of_the_settings():
    engines = {"in sync": exact.Engine(), "rounded": exact.Engine(rounding=4.0)}
    labels = ("true gradient", "0", "1", "3:sequence:untruncated")
    result = exact.exact_dynamics(engines, labels, problems=3, steps=80, length=3)
    end = result.final
    assert end["true gradient"]["in sync"] == end["true gradient"]["rounded"] > 1.9
    assert all(abs(end[label]["in sync"] - end["true gradient"]["in sync"]) < 0.02 for label in labels)
    assert end["3:sequence:untruncated"]["rounded"] == pytest.approx(end["true gradient"]["rounded"], abs=1e-3)
    assert end["1"]["rounded"] < end["0"]["rounded"] - 0.2
    assert len(exact.exact_dynamics_table(result).rows) == len(labels)


def test_exact_tables_are_kept_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def few_problems() -> exact.ExactBias:
        calls.append(1)
        return exact.exact_bias({"mild": exact.Mismatch(0.05)}, ("0",), problems=1, length=2)

    path = tmp_path / "exact.json"
    first = exact._cached(path, few_problems, exact.ExactBias)
    assert exact._cached(path, few_problems, exact.ExactBias) == first
    assert len(calls) == 1
    path.write_text(path.read_text()[:20])
    assert exact._cached(path, few_problems, exact.ExactBias) == first
    assert len(calls) == 2
