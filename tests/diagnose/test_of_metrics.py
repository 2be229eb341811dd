"""`inspect` of a run's metrics as a command: its gate, its settings, what comes first, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.report.log import to_json, write_step
from tests.diagnose.test_judge import CONFIG, metrics


def _run(folder: Path, k3_kl: list[float], tokens: float | None = 4096.0) -> Path:
    for value in k3_kl:
        step = {**metrics(0.0), "rollout_corr/k3_kl": value}
        step.pop("rollout_corr/tokens")
        write_step(folder, CONFIG, step if tokens is None else {**step, "rollout_corr/tokens": tokens})
    return folder


def _inspected(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", str(folder), "--no-pictures", *arguments], env={"COLUMNS": "80"})
    return result.exit_code, result.output


@pytest.mark.parametrize(("slope", "large"), [(10.0, True), (0.5, False)])
def test_k3_that_has_grown_a_hundred_times_is_large(tmp_path: Path, slope: float, large: bool) -> None:
    """From step 15 on, k3 rises linearly from 5e-5: to 160 times and to nine times at step 30."""
    run = _run(tmp_path, [5e-5 * (1 + slope * max(0, step - 14)) * (1 + 0.01 * (step % 3)) for step in range(31)])
    status, body = _inspected(run, "--json")
    found = json.loads(body)
    assert status == int(large) and found["verdict"] == ("large" if large else "normal")
    assert ("growth" in [item["kind"] for item in found["findings"]]) is large and found["trend"]["began"] <= 17
    said = "large mismatch: k3_kl has grown 16" if large else "small mismatch"
    assert found["data"].startswith(said)
    assert (("more than precision explains" in found["data"]) and "Find the cause" in found["data"]) is large


def test_growth_that_ends_below_what_precision_gives_is_not_large(tmp_path: Path) -> None:
    status, body = _inspected(_run(tmp_path, [1e-7 * 500 ** (step >= 15) for step in range(30)]), "--json")
    assert status == 0 and json.loads(body)["verdict"] == "normal" and json.loads(body)["trend"]["after"] > 4e-5


def test_a_run_is_gated(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [9e-4, *[6e-4] * 10])  # of which the last ten are judged
    for arguments, status, said in (
        ((), 0, ""),
        (("--gate",), 0, "gate: passed: k3_kl 0.0006, bar 0.001 nat a token"),
        (("--gate-kl", "1e-4"), 1, "gate: FAILED: k3_kl 0.0006, bar 0.0001 nat a token"),
    ):
        found, output = _inspected(run, *arguments)
        assert found == status and said in output and ("gate:" in output) == bool(arguments)
        found, output = _inspected(run, *arguments, "--json")
        gate = json.loads(output)["gate"]
        assert found == status and (gate and gate["passed"]) == (not status if arguments else None)
    few = _run(tmp_path / "few", [6e-4] * 10, tokens=9.0)
    status, output = _inspected(few, "--gate")
    assert status == 3 and "gate: not decided, too few tokens" in output
    untold = _run(tmp_path / "untold", [6e-4] * 10, tokens=None)  # by k3 alone
    assert _inspected(untold, "--gate")[0] == 0 and _inspected(untold, "--gate-kl", "5e-4")[0] == 1
    status, output = _inspected(run, "--gate-kl", "0")
    assert status == 2 and "the bar of the gate is 0" in " ".join(output.replace("│", " ").split())


def test_flags_and_presets_are_the_settings_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text("".join(to_json({"step": step, **metrics(0.005)}) + "\n" for step in range(3)))
    assert "correction: not judged" in _inspected(path)[1] and "launch train.py" in _inspected(path)[1]
    verl = _inspected(path, "--host", "verl")[1]
    assert "launch train.py" not in verl and "setting: " in verl
    for given in (("--preset", "token_is"), ("--flags", "--use-tis --tis-upper-bound 3")):
        status, output = _inspected(path, *given)
        assert status == 0 and "correction: holds" in output and "setting: " not in output
        assert given[1] in json.loads(_inspected(path, *given, "--json")[1])["settings"]
    assert "correction: none: the loss takes" in _inspected(path, "--preset", "disabled")[1]
    for bad in (("--preset", "token_is", "--flags", "--use-tis"), ("--flags", "--lr 3"), ("--preset", "no_such")):
        assert _inspected(path, *bad)[0] == 2
    follow = CliRunner().invoke(app, ["inspect", str(path), "--follow-for", "0", "--preset", "token_is"])
    assert follow.exit_code == 0 and "correction: holds" in follow.output


DUMP_ONLY = {
    "--samples": "3", "--prompts": "prompts.json", "--max-staleness": "2", "--weight-version": "7", "--eos-id": "0",
    "--temperature": "0", "--max-new-tokens": "9", "--url": "http://localhost:1", "--accept": "staleness",
}  # fmt: skip


def test_no_option_without_a_meaning_is_ignored(tmp_path: Path) -> None:
    run = _run(tmp_path, [6e-4] * 10)
    for option, value in DUMP_ONLY.items():
        for more in ([], ["--follow-for", "0"]):
            result = CliRunner().invoke(app, ["inspect", str(run), option, value, *more])
            assert result.exit_code == 2 and f"{option} is not for that" in result.output, option
    for option in (["--gate"], ["--gate-kl", "1"], ["--run", "a"], ["--all"], ["--host", "verl"]):
        result = CliRunner().invoke(app, ["inspect", str(run), *option, "--follow-for", "0"])
        assert result.exit_code == 2 and f"{option[0]} is not for that" in result.output
    assert "--interval is not for that" in _inspected(run, "--interval", "5")[1]
    assert _inspected(run, "--samples", "64", "--max-staleness", "1")[0] == 0  # what they are by default


def test_the_verdict_comes_first_and_fits_one_screen(tmp_path: Path) -> None:
    rollout = [torch.full((30,), -3.0, dtype=torch.float64)] * 8
    old = [row + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(0)) for row in rollout]
    packed = mp.PackedSequences.from_lists(rollout_log_probs=rollout, old_log_probs=old, loss_masks=[[1] * 30] * 8)
    for name in ("disabled", "token_is"):
        config = mp.preset(name)
        path = tmp_path / f"{name}.jsonl"
        step = mp.correct(packed, config).statistics.metrics()
        path.write_text("".join(to_json({"step": i, **step}) + "\n" for i in range(30)))
        status, output = _inspected(path)  # without its settings: what is recommended is shown
        lines = output.splitlines()
        assert status == 0 and len(lines) <= 24, output
        starts = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in
                  ("data: ", "correction: ", "setting: ", "ray job", "trend: ", "30 steps")]  # fmt: skip
        assert starts == sorted(starts) and starts[0] == 0
        assert "rollout_is_std" not in output and "more metrics: --all or --json" in lines[-1]
        every = _inspected(path, "--all")[1]
        assert "rollout_is_std" in every and "more metrics" not in every and every.startswith("data: ")


def test_an_empty_report_folder_has_no_step_yet(tmp_path: Path) -> None:
    for files in ((), ("settings.json",)):
        for name in files:
            (tmp_path / name).write_text("{}")
        status, output = _inspected(tmp_path)
        assert status == 2 and "holds no step yet" in output and "--follow waits for it" in output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("else")
    status, output = _inspected(tmp_path / "other")
    assert status == 2 and "holds no dump" in output and "step yet" not in output


def test_metrics_that_cannot_be_read_are_one_sentence_or_json(tmp_path: Path) -> None:
    path = _run(tmp_path, [6e-4] * 10)
    (path / "metrics.jsonl" if path.is_dir() else path).write_text('{"rollout_corr/kl": 0.1}\n[1]\n')
    status, output = _inspected(path)
    assert status == 2 and output.startswith("cannot inspect: ") and "line 2 is no step" in output
    status, output = _inspected(path, "--json")
    found = json.loads(output)
    assert status == 2 and found["verdict"] == "cannot_read" and "line 2 is no step" in found["headline"]
