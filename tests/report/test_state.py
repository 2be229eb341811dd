"""Statistics in a run's lines: what several steps say together is what one batch of all of them says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.report.log import read_steps, write_step
from mismatch_plugin.report.state import STATE, merge_states, merged_metrics, state_of

CONFIGS: dict[str, dict[str, Any]] = {
    "weights and criteria": {
        "use_tis": True,
        "tis": {"level": "sequence", "mode": "mask", "upper_bound": 3.0},
        "rs": {"criteria": ["sequence_max:k2:0.5"], "veto_threshold": 1e-4},
    },
    "normalised": {"use_tis": True, "tis": {"batch_normalize": True}},
    "measured only": {},
}


def batch(steps: range) -> mp.PackedSequences:
    """Three sequences a step, the same in a step of its own as among others; the mismatch grows."""
    rows: dict[str, list[Any]] = {"old": [], "rollout": [], "mask": [], "advantage": [], "version": []}
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for length in (40, 700, 1 + step):
            old = -3.0 * torch.rand(length, generator=generator, dtype=torch.float64) - 2.0
            noise = torch.randn(length, generator=generator, dtype=torch.float64)
            rows["old"].append(old)
            rows["rollout"].append(old - 0.02 * (step + 1) * noise)
            rows["mask"].append((torch.rand(length, generator=generator) > 0.2).long())
            rows["advantage"].append(torch.randn((), generator=generator, dtype=torch.float64))
            rows["version"].append(torch.full((length,), 3 + step % 2))
    return mp.PackedSequences.from_lists(
        old_log_probs=rows["old"],
        rollout_log_probs=rows["rollout"],
        loss_masks=rows["mask"],
        advantages=rows["advantage"],
        weight_versions=rows["version"],
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_together_are_one_batch(tmp_path: Path, name: str) -> None:
    config = mp.MismatchConfig(metrics="full", **CONFIGS[name])
    for step in range(6):
        statistics = mp.correct(batch(range(step, step + 1)), config).statistics
        write_step(tmp_path, config, {"step": step, **statistics.metrics()}, state_of(statistics))
    path = tmp_path / "metrics.jsonl"
    for last in (1, 4, 6):
        found = merged_metrics(path, config, last)
        whole = mp.correct(batch(range(6 - last, 6)), config).statistics.metrics()
        assert found is not None and found.keys() == whole.keys()
        assert found == pytest.approx(whole, rel=1e-9, abs=1e-12, nan_ok=True), last
    last_line = mp.correct(batch(range(5, 6)), config).statistics.metrics()
    assert merged_metrics(path, config, 1) == pytest.approx(last_line, rel=1e-12, nan_ok=True)
    assert max(map(len, path.read_text().splitlines())) < 1 << 16
    assert [step["step"] for step in read_steps(tmp_path)] == [*range(6)]


def test_inspect_judges_the_newest_steps_as_one_batch(tmp_path: Path) -> None:
    """A mean of the steps' deviations is not the deviation of their tokens."""
    config = mp.MismatchConfig(metrics="full", use_tis=True)
    for step in range(12):
        statistics = mp.correct(batch(range(step, step + 1)), config).statistics
        write_step(tmp_path, config, {"step": step, **statistics.metrics()}, state_of(statistics))
    whole = mp.correct(batch(range(2, 12)), config).statistics.metrics()
    body = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json", "--no-report"]).output)
    rows = {row["metric"]: row["the last 10 together"] for row in body["metrics"]}
    assert rows["rollout_is_ratio_std"] == pytest.approx(whole["rollout_corr/rollout_is_ratio_std"], rel=1e-9)
    assert rows["k3_kl"] == pytest.approx(whole["rollout_corr/k3_kl"], rel=1e-9)


def test_only_full_metrics_carry_it(tmp_path: Path) -> None:
    config = mp.MismatchConfig()
    statistics = mp.correct(batch(range(1)), config).statistics
    assert state_of(statistics) is None
    write_step(tmp_path, config, statistics.metrics(), state_of(statistics))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert STATE not in json.loads(line) and len(line) < 4096
    assert merged_metrics(tmp_path / "metrics.jsonl", config, 1) is None


def test_a_wild_step_is_still_a_short_line(tmp_path: Path) -> None:
    """Every bin of the histogram used."""
    config, generator = mp.MismatchConfig(metrics="full"), torch.Generator().manual_seed(0)
    old = -60.0 * torch.rand(200_000, generator=generator, dtype=torch.float64)
    rollout = old - torch.randn(200_000, generator=generator, dtype=torch.float64).exp() * old.sign()
    data = mp.PackedSequences.from_lists(
        old_log_probs=[old], rollout_log_probs=[rollout.clamp(max=0.0)], loss_masks=[torch.ones(200_000)]
    )
    statistics = mp.correct(data, config).statistics
    write_step(tmp_path, config, statistics.metrics(), state_of(statistics))
    assert len((tmp_path / "metrics.jsonl").read_text()) < 1 << 16


@pytest.mark.parametrize(
    "state",
    [
        {"sums": {"one@tokens": 1}, "maxima": {}},  # of other names
        {"sums": {"histogram": [2048, 5000, 1]}, "maxima": {}},
        {"sums": {"histogram": [1e12, 0, 1]}, "maxima": {}},
        {"sums": [], "maxima": {}},
        {"sums": {"one@tokens": "many"}, "maxima": {}},
        [],
        None,
    ],
)
def test_what_does_not_belong_together_is_not_merged(tmp_path: Path, state: Any) -> None:
    config = mp.MismatchConfig(metrics="full")
    statistics = mp.correct(batch(range(1)), config).statistics
    write_step(tmp_path, config, statistics.metrics(), state_of(statistics))
    path = tmp_path / "metrics.jsonl"
    assert merged_metrics(path, config, 2) is not None
    with path.open("a") as lines:
        lines.write(json.dumps({"step": 2, STATE: state}) + "\n")
    assert merged_metrics(path, config, 2) is None


def test_merging_keeps_what_it_is_given() -> None:
    states = [{"sums": {"a": 1, "h": [4, 1, 2]}, "maxima": {"m": -1.0, "v": [2, 0]}} for _ in range(2)]
    merged = merge_states(states)
    assert merged["sums"] == {"a": 2.0, "h[0]": 0.0, "h[1]": 4.0, "h[2]": 0.0, "h[3]": 0.0}
    assert merged["maxima"] == {"m": -1.0, "v[0]": float("-inf"), "v[1]": float("-inf")}
    assert states[0]["sums"] == {"a": 1, "h": [4, 1, 2]}
