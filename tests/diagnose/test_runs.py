"""What a run's metrics tell: size, growth, what the correction leaves; and the command that prints it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.diagnose.run_sources import Source
from mismatch_plugin.diagnose.runs import MIN_STEPS, Run, Trend, judge_run, trends_of
from mismatch_plugin.report.log import to_json, write_step

CONFIG = mp.preset("token_is")
KL, K3, GAP = "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/log_ratio_abs_mean"
WEIGHT, ESS, KEPT, TOKENS, NONE_LEFT = (
    f"rollout_corr/{name}"
    for name in ("rollout_is_weight_after_mean", "rollout_is_weight_after_eff_sample_size", "accepted_token_fraction",
                 "tokens", "all_rejected")
)  # fmt: skip


def metrics(shift: float) -> dict[str, float]:
    """Of a batch whose training log-probs lie `shift` above those of the rollout engine."""
    generator = torch.Generator().manual_seed(0)
    rollout = [-2.0 - torch.rand(30, generator=generator, dtype=torch.float64) for _ in range(8)]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rollout, train_log_probs=[x + shift for x in rollout], loss_masks=[[1] * 30] * 8
    )
    return mp.correct(packed, CONFIG).statistics.metrics()


def judge(steps: Sequence[dict[str, float]], config: mp.MismatchConfig | None = CONFIG) -> Run:
    return judge_run(Source(tuple(steps), tuple(map(float, range(1, len(steps) + 1))), Path("export.csv")), config)


def inspect(path: Path, *arguments: object, columns: int = 80) -> tuple[int, str]:
    words = ["inspect", str(path), "--no-pictures", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def write_run(folder: Path, k3_kl: Sequence[float], tokens: float | None = 4096.0) -> Path:
    for value in k3_kl:
        step = {**metrics(0.0), K3: value}
        step.pop(TOKENS)
        write_step(folder, CONFIG, step if tokens is None else {**step, TOKENS: tokens})
    return folder


def export(path: Path, steps: Sequence[dict[str, float]]) -> Path:
    path.write_text("".join(to_json({"step": i, **step}) + "\n" for i, step in enumerate(steps)))
    return path


# How large it is.


def test_a_sound_run_and_one_whose_tokens_all_shift() -> None:
    sound = judge([metrics(0.0)] * 12)
    assert sound.sound and sound.verdict == "normal"
    assert sound.data == (
        "small mismatch, as of two engines in one precision: k3_kl 0, |kl| 0 nats per token over the last 10 steps."
    )
    assert sound.correction == "holds (mean weight 1, effective sample size 1, tokens kept 1)."
    unsound = judge([metrics(0.0)] * 12 + [metrics(-0.9)] * 12)
    assert not unsound.sound and (unsound.steps, unsound.judged, unsound.verdict) == (24, 10, "fault")
    assert unsound.data == (
        "large mismatch: k3_kl 0.31, |kl| 0.9 nats per token over the last 10 steps, growth of k3_kl and |kl|, 2 "
        "warnings (kl, rollout_is_ratio_mean). No correction repairs a shift that all tokens share: find the cause "
        "with mismatch-plugin inspect DUMP."
    )
    assert unsound.trend.startswith(
        "k3_kl has grown since about step 13, from 0 to 0.31 nats per token; |kl| has grown"
    )
    assert unsound.correction == (
        "does not hold: 1 warning (rollout_is_weight_after_mean); mean weight 0.41, effective sample size 1, tokens "
        "kept 1."
    )
    (of_kl, *_, growth) = unsound.findings
    assert of_kl["fault"] == "kl" and "(10 steps)" in of_kl["evidence"] and growth["fault"] == "growth"
    assert unsound.metrics[1] == {
        "metric": "kl", "last step": pytest.approx(0.9), "mean of the last 10": pytest.approx(0.9), "smallest": 0.0,
        "largest": pytest.approx(0.9),
    }  # fmt: skip
    bypass = CONFIG.replace(use_rollout_log_probs=True, use_tis=False)
    assert "In bypass mode this is of the policy that trains" in judge([metrics(-0.9)] * 12, bypass).data
    assert judge([metrics(-0.9)] * 5 + [metrics(0.0)] * 40).sound  # long past: the last tenth is judged
    assert not judge([metrics(0.0)] * 180 + [metrics(-0.9)] * 2 + [metrics(0.0)] * 15).sound


def test_what_was_not_recorded_is_no_figure(tmp_path: Path) -> None:
    found = judge([{WEIGHT: 0.9}] * 30)
    assert found.data == "not judged: neither KL nor the mean |log ratio| was recorded over the last 10 steps."
    assert found.correction == "holds (mean weight 0.9, effective sample size not recorded, tokens kept not recorded)."
    assert found.verdict == "undecided" and found.trend == "none in 30 steps (KL not recorded)."
    assert "not judged: mean weight not recorded, effective" in judge([{KL: 0.0}] * 3).correction
    path = export(tmp_path / "weights.jsonl", [{WEIGHT: 0.9}] * 3)
    assert inspect(path)[0] == 3
    for gap, advised in ((0.01, True), (0.2, False)):  # nothing says "disabled" below "noticeable"
        said = inspect(export(path, [{K3: 4e-4, GAP: gap}] * 30))[1]
        assert ("setting: disabled" in said) == advised == ("small mismatch" in said)
    status, said = inspect(export(path, [{K3: 0.05}] * 30))  # advice from k3 alone
    assert status == 0 and "setting: " in said and "%" not in said and "sample size" not in said


def test_a_step_that_rejected_everything_has_no_weight() -> None:
    kept = {WEIGHT: 0.99, ESS: 0.97, KEPT: 0.8, TOKENS: 100.0, NONE_LEFT: 0.0, KL: 0.0}
    rejected = {WEIGHT: 0.0, ESS: 0.0, KEPT: 0.0, TOKENS: 100.0, NONE_LEFT: 1.0, KL: 0.0}
    found = judge([rejected] * 5 + [kept] * 20 + [kept, kept, kept, rejected] * 5)
    shown = "mean weight 0.99, effective sample size 0.97, tokens kept 0.56"
    counts = "Everything was rejected in 3 of the last 10 steps (10 of all 45); means of weights leave these out."
    assert found.correction == f"does not hold: 1 warning (all_rejected); {shown}. {counts}" and not found.sound
    (row,) = [row for row in found.metrics if row["metric"] == "rollout_is_weight_after_mean"]
    assert row["smallest"] == 0.99 and math.isnan(float(row["last step"]))
    assert "Everything was rejected" not in judge([kept] * 45).correction


def test_steps_without_tokens_say_nothing() -> None:
    steps = [{TOKENS: 10.0, KL: 0.0}] * 30 + [{TOKENS: 0.0, KL: 0.0}] * 9 + [{TOKENS: 10.0, KL: 0.02}]
    assert "|kl| 0.02 nats per token over the last 1 step." in judge(steps).data
    with pytest.raises(ValueError, match="no response token"):
        judge([{TOKENS: 0.0, KL: 0.0}] * 12)


# Growth.


def noise(steps: int, seed: int, memory: float = 0.0, spread: float = 0.2) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0.0, spread, steps)
    for i in range(1, steps):
        values[i] = memory * values[i - 1] + math.sqrt(1 - memory**2) * values[i]
    return values


def trends(log_values: np.ndarray, metric: str = K3) -> list[Trend]:
    return trends_of(range(1, len(log_values) + 1), [{metric: math.exp(value)} for value in log_values])


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_a_flat_run_has_no_trend(memory: float) -> None:
    alarms = [seed for seed in range(60) if trends(-8.0 + noise(150, seed, memory))]
    alarms += [seed for seed in range(60) if trends(-8.0 + noise(25, seed, memory, 0.5))]
    assert len(alarms) <= 2, alarms
    assert not trends(-8.0 + noise(150, 0) - 0.02 * np.arange(150))  # falls
    assert not trends(-8.0 + noise(400, 3, spread=0.05) + 0.3 * (np.arange(400) >= 200))  # little
    assert not trends(np.full(50, -8.0)) and not trends(np.full(50, -np.inf))  # aligned kernels
    assert not trends(np.linspace(-8.0, -2.0, MIN_STEPS - 1)) and not trends(np.full(50, np.nan))


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_growth_is_named_whichever_metric_shows_it(memory: float) -> None:
    since = np.maximum(np.arange(120) - 59.0, 0.0)
    shapes = [0.06 * since, 3.0 * (since > 0), np.log1p(10 * since), np.log1p(since)]
    for seed, (shape, metric) in enumerate(product(shapes, (KL, K3, GAP))):
        log_values = -8.0 + noise(120, seed, memory) + shape
        (found,) = trends(log_values, metric)
        assert found.metric == metric.removeprefix("rollout_corr/") and 50 <= found.began <= 70, found
        assert found.after / found.before == pytest.approx(math.exp(shape[-6:].mean()), rel=0.6)
    (found,) = trends(-8.0 + noise(5000, 2) + 0.002 * np.maximum(np.arange(5000) - 2999.0, 0.0))
    assert abs(found.began - 3000) <= 300
    log_values = -8.0 + noise(120, 0) + 3.0 * (since > 0)
    order = np.random.default_rng(0).permutation(120)  # put in order, and of a step that is there twice the later
    rows = [{K3: math.exp(value)} for value in log_values]
    again = trends_of([120, *(int(i) + 1 for i in order)], [{K3: 9e9}, *(rows[i] for i in order)])
    assert again == trends(log_values)


def test_a_kl_that_grows_under_a_k3_that_stays_is_told() -> None:
    """The shift of half the tokens up and half down, or k3 of an estimator that is clamped."""
    kl = [7e-4 * (9300 ** (max(0, step - 100) / 99)) for step in range(200)]
    found = judge([{KL: value, K3: 4e-4} for value in kl], None)
    (trend,) = found.trends
    assert trend.metric == "kl" and trend.broke and found.verdict == "large" and not found.sound
    assert found.trend.startswith("|kl| has grown ") and found.trend.endswith("nats per token.")
    assert found.data.startswith("large mismatch: k3_kl 0.0004, |kl| ") and "growth of |kl|, 1 warning" in found.data
    grown = judge([{K3: 5e-5 * 6.0 ** (step > 100)} for step in range(200)], None)  # six times is no fault
    assert grown.sound and grown.verdict == "normal" and "has grown" in grown.trend
    assert judge([{KL: 7e-4, K3: 4e-4}] * 200, None).trend == "none in 200 steps (k3_kl, |kl|)."
    assert judge([{KL: 7e-4}] * 19, None).trend == "none in 19 steps: it takes 20 to tell."


def test_a_run_is_gated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [9e-4, *[6e-4] * 10])  # of which the last ten are judged
    for arguments, status, said in (
        ((), 0, ""),
        (("--gate",), 0, "gate: passed: k3_kl 0.0006, bar 0.001 nats per token"),
        (("--gate-kl", "1e-4"), 1, "gate: FAILED: k3_kl 0.0006, bar 0.0001 nats per token"),
    ):
        found, output = inspect(run, *arguments)
        assert found == status and said in output and ("gate:" in output) == bool(arguments)
        gate = json.loads(inspect(run, *arguments, "--json")[1])["gate"]
        assert (gate and gate["passed"]) == (not status if arguments else None)
    status, output = inspect(write_run(tmp_path / "few", [6e-4] * 10, tokens=9.0), "--gate")
    assert status == 3 and "gate: not decided, too few tokens" in output
    untold = write_run(tmp_path / "untold", [6e-4] * 10, tokens=None)  # by k3 alone
    assert inspect(untold, "--gate")[0] == 0 and inspect(untold, "--gate-kl", "5e-4")[0] == 1
    status, output = inspect(export(tmp_path / "kl.jsonl", [{KL: 0.0}] * 3), "--gate")
    assert status == 3 and "gate: not decided, k3_kl was not recorded: bar 0.001" in output
    status, output = inspect(run, "--gate-kl", "0")
    assert status == 2 and "the bar of the gate is 0" in output


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_settings_are_those_of_the_run_or_those_that_are_given(tmp_path: Path) -> None:
    path = export(tmp_path / "export.jsonl", [metrics(0.0)] * 3)
    unknown = "correction: not judged, since the run's settings are not known: give them with --config"
    status, output = inspect(path, columns=200)
    assert status == 0 and unknown in output and "launch" not in output  # nobody's names
    for host, line in (("verl", "verl.trainer.main_ppo"), ("slime", "launch train.py")):
        assert line in inspect(path, "--host", host, columns=200)[1]
    (tmp_path / "settings.yaml").write_text("preset: token_is\n")
    for given in (("--preset", "token_is"), ("--flags", "--use-tis --tis-upper-bound 3"),
                  ("--config", tmp_path / "settings.yaml")):  # fmt: skip
        status, output = inspect(path, *given)
        assert status == 0 and "correction: holds" in output and "setting: " not in output
        assert json.loads(inspect(path, *given, "--json")[1])["settings"] == str(given[1])
    assert "correction: none: the loss takes" in inspect(path, "--preset", "disabled")[1]
    for bad in (("--preset", "token_is", "--flags", "--use-tis"), ("--flags", "--lr 3"), ("--preset", "no_such")):
        assert inspect(path, *bad)[0] == 2
    # A preset may hold a threshold that only sets a metric, which is refused where it is given by hand.
    write_step(tmp_path / "run", mp.preset("ppo_is_bypass", threshold=3.0), metrics(0.0))
    assert inspect(tmp_path / "run")[0] == 0
    # `compare` writes them into config.json, and the metrics below "metrics".
    (tmp_path / "lab").mkdir()
    line = {"step": 1, "reward": 0.5, "metrics": {KL: 0.05, WEIGHT: 1.0}, "seconds": {"train": 0.1}}
    (tmp_path / "lab" / "metrics.jsonl").write_text(to_json({"step": 0, "held_out": 0.1}) + "\n" + to_json(line) + "\n")
    lab = {"settings": {}, "mismatch": CONFIG.model_dump(mode="json")}
    (tmp_path / "lab" / "config.json").write_text(json.dumps(lab))
    body = json.loads(inspect(tmp_path / "lab", "--json")[1])
    assert body["settings"] == str(tmp_path / "lab" / "config.json") and body["correction"].startswith("holds")


DUMP_ONLY = {
    "--samples": "3", "--prompts": "prompts.json", "--max-staleness": "2", "--weight-version": "7", "--eos-id": "0",
    "--temperature": "0", "--max-new-tokens": "9", "--url": "http://localhost:1", "--accept": "staleness",
}  # fmt: skip


def test_no_option_without_a_meaning_is_ignored(tmp_path: Path) -> None:
    run = write_run(tmp_path, [6e-4] * 10)
    for option, value in DUMP_ONLY.items():
        status, output = inspect(run, option, value)
        assert status == 2 and f"{option} is not for that" in output, option
    assert inspect(run, "--samples", "64", "--max-staleness", "1")[0] == 0  # what they are by default
    result = CliRunner().invoke(app, ["inspect", str(run), "--no-pictures", "--pictures", "x"])
    assert result.exit_code == 2 and "contradict each other" in result.output


def test_what_cannot_be_read_is_one_sentence_or_json(tmp_path: Path) -> None:
    for name in (None, "settings.json"):
        if name is not None:
            (tmp_path / name).write_text("{}")
        status, output = inspect(tmp_path)
        assert status == 2 and "holds no step yet" in output
    (tmp_path / "metrics.jsonl").write_text(f'{{"{KL}": 0.1}}\n[1]\n')
    status, output = inspect(tmp_path)
    assert status == 2 and output.startswith("cannot inspect: ") and "line 2 is no step" in output
    found = json.loads(inspect(tmp_path, "--json")[1])
    assert found["verdict"] == "cannot_read" and "line 2 is no step" in found["headline"]
    (tmp_path / "metrics.jsonl").write_text(f'{{"{KL}": 0.1}}\n')
    (tmp_path / "settings.json").write_text("[" * 100_000)
    status, output = inspect(tmp_path)
    assert status == 2 and "settings.json is not valid" in output


@pytest.mark.parametrize("metric", [KL, K3, GAP])
def test_each_of_three_metrics_tells_the_size(metric: str) -> None:
    """Whichever says most: k1 of noise is 0, and what others record is the mean |log ratio| alone."""
    ends = (0.036, 0.11, 0.35) if metric == GAP else (1e-3, 1e-2, 0.1)
    words = ["small mismatch, as of", "moderate mismatch", "noticeable mismatch", "large mismatch"]
    others = dict.fromkeys((KL, K3, GAP), 0.0) if metric != KL else {}
    for index, end in enumerate(ends):
        below, above = (judge([{**others, metric: factor * end}] * 3, None) for factor in (0.95, 1.05))
        assert below.data.startswith(words[index]) and below.sound and below.verdict == "normal"
        assert above.data.startswith(words[index + 1]) and above.sound is (index < 2)
        assert (above.verdict == "large") is (index == 2) is ("ind the cause with mismatch-plugin" in above.data)


def test_a_correction_that_works_is_sound_on_data_that_are_not() -> None:
    """χ² is of the data, and no correction changes it: the second verdict says what is left of it."""
    rollout = [torch.full((30,), -3.0, dtype=torch.float64)] * 4
    old = [row + torch.tensor([2.0, *[0.0] * 29]) for row in rollout]  # one ρ of e² in thirty: χ² 1.8, KL −.07
    packed = mp.PackedSequences.from_lists(rollout_log_probs=rollout, old_log_probs=old, loss_masks=[[1] * 30] * 4)
    for name, sound in (("disabled", False), ("token_is", True)):
        config = mp.preset(name)
        found = judge([mp.correct(packed, config).statistics.metrics()] * 3, config)
        assert "large mismatch" in found.data and "chi2_token" in found.data and found.sound is sound
        assert found.correction.startswith("holds (mean weight 1," if sound else "none: the loss takes the data as")
    shifted = judge([metrics(math.log(0.7))] * 3)  # weights hold at ρ = .7 everywhere; somebody's fault all the same
    assert shifted.correction.startswith("holds") and not shifted.sound
    assert "No correction repairs a shift" in shifted.data


def test_the_verdict_comes_first_and_fits_one_screen(tmp_path: Path) -> None:
    rollout = [torch.full((30,), -3.0, dtype=torch.float64)] * 8
    old = [row + 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(0)) for row in rollout]
    packed = mp.PackedSequences.from_lists(rollout_log_probs=rollout, old_log_probs=old, loss_masks=[[1] * 30] * 8)
    for name in ("disabled", "token_is"):
        step = mp.correct(packed, mp.preset(name)).statistics.metrics()
        path = export(tmp_path / f"{name}.jsonl", [step] * 30)
        status, output = inspect(path)  # without its settings: what is recommended is shown
        lines = output.splitlines()
        assert status == 0 and len(lines) <= 24, output
        starts = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in
                  ("data: ", "correction: ", "setting: ", "--mismatch-preset", "trend: ", "30 steps")]  # fmt: skip
        assert starts == sorted(starts) and starts[0] == 0
        assert "rollout_is_std" not in output and "more metrics: --all or --json" in lines[-1]
        every = inspect(path, "--all")[1]
        assert "rollout_is_std" in every and "more metrics" not in every and every.startswith("data: ")
