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
from mismatch_plugin.inspect.judge import inspect_steps
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
    (tmp_path / "notes.txt").write_text("else")
    status, output = _inspected(tmp_path)
    assert status == 2 and "holds no dump" in output and "step yet" not in output
