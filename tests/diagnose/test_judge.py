"""Metrics written by a run and what `mismatch-plugin inspect` makes of them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.diagnose.judge import inspect_steps
from mismatch_plugin.report.log import read_steps, to_json, write_step
from mismatch_plugin.report.table import compact

CONFIG = mp.preset("token_is")


def metrics(shift: float) -> dict[str, float]:
    """Of a batch whose training log-probs lie `shift` above those of the rollout engine."""
    generator = torch.Generator().manual_seed(0)
    rollout = [-2.0 - torch.rand(30, generator=generator, dtype=torch.float64) for _ in range(8)]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rollout, train_log_probs=[x + shift for x in rollout], loss_masks=[[1] * 30] * 8
    )
    return mp.correct(packed, CONFIG).statistics.metrics()


def test_steps_come_back_as_written(tmp_path: Path) -> None:
    steps = [metrics(0.0), {**metrics(0.1), "rollout_corr/kl": math.nan, "rollout_corr/chi2_seq": math.inf}]
    for step in steps:
        write_step(tmp_path / "deep" / "run", CONFIG, step)
    found = list(read_steps(tmp_path / "deep" / "run"))
    assert len(found) == 2 and [*found[0]] == ["step", *steps[0]]
    assert math.isnan(found[1]["rollout_corr/kl"]) and found[1]["rollout_corr/chi2_seq"] == math.inf
    assert found[0] == {"step": 1, **steps[0]}
    settings = tmp_path / "deep" / "run" / "settings.json"
    assert mp.MismatchConfig.from_file(settings) == CONFIG


def test_a_line_cut_by_a_kill_is_left_out_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rollout_corr/kl": 0.1}\n{"rollout_co')
    assert list(read_steps(path)) == [{"rollout_corr/kl": 0.1}]
    write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.3})  # the run is resumed
    assert [step["rollout_corr/kl"] for step in read_steps(path)] == [0.1, 0.3]
    path.write_text('{"rollout_corr/kl": 0.1}\n[1]\n{"rollout_corr/kl": 0.2}\n')
    with pytest.raises(ValueError, match="line 2 is no step"):
        list(read_steps(path))
    with pytest.raises(ValueError, match="is not there"):
        list(read_steps(tmp_path / "other.jsonl"))


@pytest.mark.parametrize("line", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", f'{{"a": 1{"0" * 400}}}'])
def test_a_line_that_python_cannot_hold_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rollout_corr/kl": 0.1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is no step"):
        list(read_steps(path))


def test_what_is_no_metrics_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rollout_corr/kl": 0.1}', encoding="utf-16")
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe.csv")
    reasons = {
        path: "metrics.jsonl is no metrics.jsonl: ",
        tmp_path / "folder": "holds neither metrics.jsonl nor TensorBoard events",
        tmp_path / "pipe.csv": "is a pipe, not a regular file",
        Path("/dev/zero"): "is a device, not a regular file",
    }
    for given, reason in reasons.items():
        result = CliRunner().invoke(app, ["inspect", str(given)], env={"COLUMNS": "400"})
        assert result.exit_code == 2 and reason in result.output
    (tmp_path / "settings.json").write_text("[" * 100_000)
    path.write_text('{"rollout_corr/kl": 0.1}\n')
    result = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "settings.json is not valid" in result.output


def test_numbers_of_any_size_stay_whole_on_80_columns(tmp_path: Path) -> None:
    """The widest numbers next to the longest name; a narrower terminal loses the last columns, not digits."""
    sizes = [-0.00012346, -1.2346e-10, -1.2346e300, 0.00012346, -0.012346]
    for size in sizes:
        write_step(tmp_path, CONFIG, dict.fromkeys(metrics(0.0), size))
    shown = {"-1.235e-4", "-1.23e-10", "-1.2e+300", "0.0001235", "-0.01235"}
    assert {compact(size) for size in sizes} == shown
    for columns in (200, 80, 60):
        arguments = ["inspect", str(tmp_path), "--no-pictures"]
        output = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}).output
        row = next(line for line in output.splitlines() if line.startswith("rollout_is_weight_after_eff_sample_size "))
        cells = row.split()[1:]
        assert cells == ["-0.01235", "-2.5e+299", "-1.2e+300", "0.0001235"][: len(cells)]
        assert len(cells) == (4 if columns >= 80 else 2), output
        assert max(map(len, output.splitlines())) <= columns


def test_a_sound_run_and_an_unsound_one() -> None:
    sound = inspect_steps([metrics(0.0)] * 12, CONFIG)
    assert sound.sound and sound.verdict == (
        "data: small mismatch, as of two engines in one precision: |mean kl| 0 nat a token over the last 10 steps.\n"
        "correction: holds (mean weight 1, effective sample size 1, tokens kept 1)."
    )
    unsound = inspect_steps([metrics(0.0)] * 12 + [metrics(-0.9)] * 12, CONFIG)
    assert not unsound.sound and unsound.steps == 24
    assert unsound.data == (
        "large mismatch: |mean kl| 0.9 nat a token over the last 10 steps, 2 warnings (kl, rollout_is_ratio_mean). "
        "No correction repairs a shift that all tokens share: find the cause (mismatch-plugin check)."
    )
    assert unsound.correction == (
        "does not hold: 1 warning (rollout_is_weight_after_mean); mean weight 0.41, effective sample size 1, tokens "
        "kept 1."
    )
    assert {warning.metric: count for warning, count in unsound.warnings}["rollout_corr/kl"] == 10
    rows = {row[0]: row[1:] for row in unsound.table.rows}
    assert rows["kl"] == ("0.9", "0.9", "0", "0.9")
    bypass = inspect_steps([metrics(-0.9)] * 12, CONFIG.replace(use_rollout_log_probs=True, use_tis=False))
    assert "In bypass mode this is of the policy that trains" in bypass.data
    moderate = inspect_steps([metrics(0.05)] * 12, CONFIG)
    assert moderate.sound and moderate.data == (
        "noticeable mismatch: |mean kl| 0.05 nat a token over the last 10 steps. See whether precision alone explains "
        "it: mismatch-plugin check."
    )
    assert inspect_steps([metrics(0.005)] * 12, CONFIG).data.startswith("moderate mismatch: |mean kl| 0.005 nat")


def test_a_correction_that_works_is_sound_on_data_that_are_not() -> None:
    """χ² is of the data, and no correction changes it: the second verdict says what is left of it."""
    rollout = [torch.full((30,), -3.0, dtype=torch.float64)] * 4
    old = [row + torch.tensor([2.0, *[0.0] * 29]) for row in rollout]  # one ρ of e² in thirty: χ² 1.8, KL −.07
    packed = mp.PackedSequences.from_lists(rollout_log_probs=rollout, old_log_probs=old, loss_masks=[[1] * 30] * 4)
    for name, sound in (("disabled", False), ("token_is", True)):
        config = mp.preset(name)
        found = inspect_steps([mp.correct(packed, config).statistics.metrics()] * 3, config)
        assert "large mismatch" in found.data and "chi2_token" in found.data
        assert found.sound is sound
        start = "holds (mean weight 1," if sound else "none: the loss takes the data as they are."
        assert found.correction.startswith(start)


def test_the_verdict_and_the_table_tell_one_figure() -> None:
    """Noise of both signs is no mismatch; a step without the metric does not count."""
    steps = [{"rollout_corr/kl": kl} for kl in (*[9.0] * 3, *[0.06, -0.02] * 5)]
    found = inspect_steps(steps, CONFIG)
    assert "|mean kl| 0.02 nat a token over the last 10 steps" in found.data
    assert found.table.column("mean of the last 10") == ["0.02"] and found.table.title.endswith("by the last 10")


def test_full_metrics_are_a_table_of_their_own(tmp_path: Path) -> None:
    full = dict.fromkeys(
        ("rollout_is_ratio_p99_9", "log_ratio_abs_by_probability_0.001_to_0.01", "log_ratio_by_version_lag_2"),
        -1.2346e-9,
    )
    step = {**metrics(0.0), "rollout_corr/rollout_is_ratio_fraction_high": 0.0}
    assert inspect_steps([step], CONFIG).full is None
    write_step(tmp_path, CONFIG, {**step, **{f"rollout_corr/{name}": value for name, value in full.items()}})
    arguments = ["inspect", str(tmp_path), "--no-pictures"]
    short = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).output
    assert "full metrics" not in short and "more metrics: --all or --json" in short
    lines = CliRunner().invoke(app, [*arguments, "--all"], env={"COLUMNS": "80"}).output.splitlines()
    shown = lines[lines.index(next(line for line in lines if line.startswith("full metrics"))) + 3 :][: len(full)]
    assert [line.split() for line in shown] == [[name, "-1.235e-9", "-1.235e-9"] for name in full]
    assert max(map(len, lines)) <= 80 and any(line.startswith("1 step, ") for line in lines)
    body = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output)
    assert [row["metric"] for row in body["metrics"]][-3:] == list(full)


def test_a_metric_is_there_once() -> None:
    """Several families of full metrics begin with rollout_rs_; the shares rejected are basic."""
    step = {**metrics(0.0), "rollout_corr/rollout_rs_token_ratio_masked_fraction": 0.25}
    assert inspect_steps([step], CONFIG).full is None
    full = inspect_steps([{**step, "rollout_corr/rollout_rs_token_ratio_mean": 1.0}], CONFIG).full
    assert full is not None and full.column("metric") == ["rollout_rs_token_ratio_mean"]


def test_advice_is_wrapped_at_words(tmp_path: Path) -> None:
    write_step(tmp_path, CONFIG, metrics(-0.9))
    output = CliRunner().invoke(app, ["inspect", str(tmp_path), "--no-pictures"], env={"COLUMNS": "80"}).output
    assert max(map(len, output.splitlines())) <= 80
    words = output.split()
    (warning, _), *_ = inspect_steps([metrics(-0.9)], CONFIG).warnings
    assert " ".join(str(warning).split()) + " (1 step)" in " ".join(words)


def test_a_dry_run_corrects_nothing() -> None:
    dry = CONFIG.model_copy(update={"dry_run": True})
    assert inspect_steps([metrics(0.05)] * 12, dry).correction == "reported only (dry run)."


def test_steps_of_other_settings_are_refused(tmp_path: Path) -> None:
    write_step(tmp_path, CONFIG, metrics(0.0))
    with pytest.raises(ValueError, match=rf"{tmp_path.name} holds .* with tis.level token, now sequence: .* folder"):
        write_step(tmp_path, mp.preset("seq_is"), metrics(0.0))
    assert len(list(read_steps(tmp_path))) == 1
    assert mp.MismatchConfig.from_file(tmp_path / "settings.json") == CONFIG
    write_step(tmp_path, CONFIG.model_copy(update={"report_dir": "elsewhere"}), metrics(0.0))  # the same folder
    assert len(list(read_steps(tmp_path))) == 2


def test_the_last_tenth_is_judged_and_what_is_long_past_is_no_alarm() -> None:
    assert inspect_steps([metrics(-0.9)] * 5 + [metrics(0.0)] * 40, CONFIG).sound
    assert not inspect_steps([metrics(0.0)] * 180 + [metrics(-0.9)] * 2 + [metrics(0.0)] * 15, CONFIG).sound


def test_the_command(tmp_path: Path) -> None:
    for shift in (0.0, -0.9):
        folder = tmp_path / str(shift)
        write_step(folder, CONFIG, metrics(shift))
        result = CliRunner().invoke(app, ["inspect", str(folder)])
        assert result.exit_code == (1 if shift else 0), result.output
        assert ("does not hold" in result.output) == ("large mismatch" in result.output) == bool(shift)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "-0.9" / "metrics.jsonl"), "--json"])
    body = json.loads(result.output)
    assert result.exit_code == 1 and body["sound"] is False and body["warnings"][0]["steps"] == 1
    (tmp_path / "empty.jsonl").write_text(to_json({"loss": 1.0}) + "\n")
    for path, reason in ((tmp_path / "empty.jsonl", "no step holds a metric"), (tmp_path / "none", "is not there")):
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert result.exit_code == 2 and reason in " ".join(result.output.replace("│", " ").split())


def test_a_run_of_the_lab_can_be_inspected(tmp_path: Path) -> None:
    """Its lines hold the metrics below "metrics", and before the first step there are none."""
    line = {"step": 1, "reward": 0.5, "metrics": metrics(0.0), "seconds": {"train": 0.1}}
    (tmp_path / "metrics.jsonl").write_text(to_json({"step": 0, "held_out_reward": 0.1}) + "\n" + to_json(line) + "\n")
    assert inspect_steps(list(read_steps(tmp_path)), mp.MismatchConfig()).sound


def test_steps_without_tokens_are_nothing_to_judge(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no response token"):
        inspect_steps([{"rollout_corr/tokens": 0.0, "rollout_corr/kl": 0.0}] * 12, CONFIG)


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_a_run_is_judged_with_the_settings_it_had(tmp_path: Path) -> None:
    """A preset may hold a threshold that only sets a metric, which is refused where it is given by hand."""
    write_step(tmp_path, mp.preset("ppo_is_bypass", threshold=3.0), metrics(0.0))
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 0


def test_a_shift_that_all_tokens_share_is_not_sound_whatever_corrects_it() -> None:
    """Weights hold at ρ = .7 everywhere; the KL of .36 nat is somebody's fault all the same."""
    found = inspect_steps([metrics(math.log(0.7))] * 3, CONFIG)
    assert found.correction.startswith("holds") and not found.sound
    assert "No correction repairs a shift" in found.data


def test_without_the_run_s_settings_its_correction_is_not_judged(tmp_path: Path) -> None:
    """What an export lacks is not made up: the defaults correct nothing, and this run has weights."""
    path = tmp_path / "export.jsonl"
    path.write_text("".join(to_json({"step": step, **metrics(0.0)}) + "\n" for step in range(3)))
    result = CliRunner().invoke(app, ["inspect", str(path), "--no-pictures"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "correction: not judged, since the run's settings are not known: give them with --config" in result.output
    settings = tmp_path / "settings.yaml"
    settings.write_text("preset: token_is\n")
    result = CliRunner().invoke(app, ["inspect", str(path), "--no-pictures", "--config", str(settings)])
    assert "correction: holds" in result.output


def test_a_dry_run_that_would_reject_everything_says_so() -> None:
    config = mp.preset("geo_rs").replace(dry_run=True)
    rollout = [torch.full((10,), -2.0, dtype=torch.float64)] * 4
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rollout, old_log_probs=[row + 0.05 for row in rollout], loss_masks=[[1] * 10] * 4
    )
    found = inspect_steps([mp.correct(packed, config).statistics.metrics()] * 3, config)
    assert not found.sound and found.correction == "reported only (dry run); 1 warning (accepted_token_fraction)."
