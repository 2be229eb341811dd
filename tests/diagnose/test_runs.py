"""`inspect` of a run: its own file, exports of trackers, other trainers' names; size, growth, what the correction
leaves, and the pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.metrics.registry import METRICS
from mismatch_plugin.diagnose.runs import PANELS
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.report.log import to_json, write_step
from tests.diagnose.door import run, text, told

CONFIG = mp.preset("token_is")
KL, K3, GAP = "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/log_ratio_abs_mean"
AFTER = "rollout_corr/rollout_is_weight_after"
WEIGHT, ESS = f"{AFTER}_mean", f"{AFTER}_eff_sample_size"
KEPT, TOKENS, NONE_LEFT = (f"rollout_corr/{name}" for name in ("accepted_token_fraction", "tokens", "all_rejected"))
Step = Mapping[str, object]


def metrics(shift: float, config: mp.MismatchConfig = CONFIG) -> dict[str, float]:
    """Of a batch whose training log-probs lie `shift` above those of the rollout engine."""
    draw = torch.Generator().manual_seed(0)
    rollout = [-2.0 - torch.rand(30, generator=draw, dtype=torch.float64) for _ in range(8)]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rollout, train_log_probs=[x + shift for x in rollout], loss_masks=[[1] * 30] * 8
    )
    return mp.correct(packed, config).statistics.metrics()


def write(path: Path, content: str | Sequence[Step]) -> Path:
    """A text, or lines of steps."""
    if not isinstance(content, str):
        content = "".join(to_json(step) + "\n" for step in content)
    path.write_text(content, encoding="utf-8")
    return path


@pytest.fixture
def judge(tmp_path: Path) -> Any:
    """What is said of these steps, under the settings of these words."""

    def judged(steps: Sequence[Step], *options: object) -> dict[str, Any]:
        path = write(tmp_path / "export.jsonl", [{"step": at, **step} for at, step in enumerate(steps, start=1)])
        return told(path, *options)

    return judged


TOKEN_IS = ("--preset", "token_is")


def values(found: dict[str, Any], metric: str = "kl") -> tuple[Any, Any, Any]:
    """(last, smallest, largest) of a metric."""
    (row,) = [row for row in found["metrics"] if row["metric"] == metric]
    return row["last step"], row["smallest"], row["largest"]


CHART = (
    '\ufeff"Step","run-7 - train/rollout_corr/kl","run-7 - train/rollout_corr/kl__MIN",'
    '"run-7 - train/rollout_corr/kl__MAX"\r\n'
    '"1","0.01","0.01","0.01"\r\n"2","","",""\r\n"3","1.5e-05","1.5e-05","1.5e-05"\r\n'
)
TWO = "Step,a - train/rollout_corr/kl,b - train/rollout_corr/kl,b - val/rollout_corr/kl\n1,0.1,0.2,0.3\n"
MINE = {"_runtime": 3.5, "_timestamp": 1.7e9}


@pytest.mark.parametrize(
    ("name", "content", "options", "metric", "expected", "steps"),
    [
        # `run.history()` as lines: every column in every row, null where nothing was logged, NaN as text.
        ("a.jsonl", [{"_step": 10, **MINE, f"train/{KL}": 0.1, "train/step": 1, "eval/reward": None},
                     {"_step": 11, **MINE, f"train/{KL}": None, "train/step": None, "eval/reward": 0.5},
                     {"_step": 20, **MINE, f"train/{KL}": "NaN", "train/step": 2, "eval/reward": None},
                     {"_step": 30, **MINE, f"train/{KL}": 0.2, "train/step": 3}], (), "kl", (0.2, 0.1, 0.2), 3),
        ("a.csv", CHART, (), "kl", (1.5e-5, 1.5e-5, 0.01), 2),
        ("a.csv", TWO, ("--run", "a"), "kl", (0.1, 0.1, 0.1), 1),  # "a" is in "val", too
        ("a.csv", TWO, ("--run", "b - val/"), "kl", (0.3, 0.3, 0.3), 1),
        ("a.csv", "Step,a - train/mis_kl,b - train/mis_kl\n1,0.1,0.2\n", ("--run", "b"), "kl", (0.2, 0.2, 0.2), 1),
        ("a.jsonl", [{K3: 1e-4, "train/gen_kl_error": 2e-4, "train/mis_k3_kl": 3e-4, "train/tis_abs": 0.1}], (),
         "k3_kl", (1e-4, 1e-4, 1e-4), 1),  # ours come first
    ],
)  # fmt: skip
def test_exports_are_read(
    name: str, content: Any, options: tuple[str, ...], metric: str, expected: Any, steps: int, tmp_path: Path
) -> None:
    found = told(write(tmp_path / name, content), *options)
    assert values(found, metric) == expected and found["steps"] == steps


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("a.csv", TWO, (), "rollout_corr/kl for several runs, 'a - train/', 'b - train/'"),
        ("a.csv", TWO, ("--run", "c"), "--run c is none of those in"),
        ("a.csv", "Step,a - train/mis_kl,b - train/mis_kl\n1,0.1,0.2\n", (), "holds mis_kl for several runs"),
        ("a.csv", "Step,loss\n1,2\n", (), "Step, loss. The plugin writes none with --mismatch-metrics off"),
        ("a.csv", f'"Step,{KL}\n1,0.1\n2,0.2\n', (), "a quote not closed"),
        ("metrics.jsonl", "Step,loss\n1,2\n", (), "metrics.jsonl, line 1 is no step"),
        ("metrics.jsonl", f'{{"{TOKENS}": 0, "{KL}": 0}}\n', (), "no response token"),
        ("metrics.jsonl", f'{{"{KL}": 0.1}}\n', ("--eos-id", "0"), "--eos-id is not for that"),
        ("metrics.jsonl", f'{{"{KL}": 0.1}}\n', ("--gate-kl", "0"), "the bar of the gate is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_one_sentence(
    name: str, content: str, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    found = told(write(tmp_path / name, content), *options)
    assert (found["status"], found["verdict"]) == (2, "cannot_read") and said in found["headline"]
    assert run(tmp_path / name, *options).output.startswith("cannot inspect: ")


def test_folders_and_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    assert "holds no step yet" in told(tmp_path)["headline"]
    (tmp_path / "metrics.jsonl").write_text(f'{{"{KL}": 0.1}}\n')
    (tmp_path / "settings.json").write_text("[")
    assert "settings.json cannot be read" in told(tmp_path)["headline"]


def test_a_folder_of_charts_is_one_run(tmp_path: Path) -> None:
    write(tmp_path / "kl.csv", CHART)
    write(tmp_path / "k3.csv", "Step,run-7 - train/mis_k3_kl\n3,0.5\n1,0.25\n2,NaN\n")
    write(tmp_path / "machines.csv", "host,gpus\na,8\n")
    found = told(tmp_path)
    assert found["steps"] == 3 and values(found, "k3_kl") == (0.5, 0.25, 0.5)
    assert values(found) == (1.5e-5, 1.5e-5, 0.01)
    write(tmp_path / "again.csv", "train/step,run-7 - train/mis_kl\n1,7\n")
    assert "counts by Step, another by train/step: export all charts" in told(tmp_path)["headline"]


OTHERS = {
    "slime": {"train/train_rollout_logprob_abs_diff": 0.01, "train/pg_loss": 0.3, "rollout/response_len/mean": 90.0},
    "slime, mis.py": {"train/mis_k3_kl": 8e-4, "train/mis_kl": 1e-4, "train/mis_tis_weight_after_bound": 0.99},
    "verl": {"training/rollout_probs_diff_mean": 0.003, "rollout_corr/kl": 1e-4, "rollout_corr/k3_kl": 8e-4},
    "NeMo-RL": {"train/gen_kl_error": 8e-4, "train/token_mult_prob_error": 1.02, "train/reward": 0.5},
    "TRL": {"train/sampling/sampling_logp_difference/mean": 0.01, "train/sampling/importance_sampling_ratio/mean": 1.0},
    "prime-rl": {"mismatch_kl/all/mean": 8e-4, "masked_mismatch_kl/all/mean": 3.0, "mismatch_kl/all/max": 9.0},
}


@pytest.mark.parametrize("trainer", OTHERS)
def test_what_other_trainers_record_is_read_and_judged(tmp_path: Path, trainer: str) -> None:
    """Sound, and two hundred times that; no number of theirs is taken for another."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "metric_names.md").read_text(encoding="utf-8")
    assert [name for host in HOSTS.values() for name in host.metrics if f"`{name}`" not in page] == []
    for times, verdict in ((1.0, "normal"), (200.0, "large")):
        rows = [{"_step": i, **{name: value * times for name, value in OTHERS[trainer].items()}} for i in range(30)]
        path = write(tmp_path / "export.jsonl", rows)
        found = told(path)
        assert found["verdict"] == verdict and found["steps"] == 30, found
        metric, value = ("log_ratio_abs_mean", 0.01) if trainer in ("slime", "TRL") else ("k3_kl", 8e-4)
        assert values(found, metric)[0] == pytest.approx(value * times)
        assert "metrics of the trainer itself are read under our names" in found["notes"][0]


def events(folder: Path, *, start: int = 1, shift: float = 0.0, suffix: str = "") -> Path:
    pytest.importorskip("tensorboard", reason="TensorBoard's files need the extra [lab]")
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for step in range(start, start + 3):
            writer.add_scalar(f"train/{KL}", 0.25 * step + shift, step)
            writer.add_scalar("reward", 1.0, step)
        writer.add_text("rollout_corr/note", "text and tensors hide no number", 1)
        writer.add_histogram("rollout_corr/weights", torch.arange(5.0), 1)
        writer.add_tensor("rollout_corr/shape", torch.ones(2, 2), 1)
    return folder


def test_tensorboard_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = events(tmp_path / "logs" / "run")
    for given in (tmp_path, folder, next(folder.iterdir())):
        found = told(given)
        assert values(found) == (0.75, 0.25, 0.75) and found["steps"] == 3
    events(tmp_path / "other")
    assert "events of 2 runs: give one of logs/run, other" in told(tmp_path)["headline"]
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for data, steps in ((whole[:-5], 3), (whole[:240], 1)):  # a kill cut it: it is read up to there
        path.write_bytes(data)
        assert told(folder)["steps"] == steps
    path.write_bytes(b"no events at all")
    assert "holds no events with a number" in told(folder)["headline"]
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    said = "tensorboard is not installed: pip install 'mismatch-plugin[lab]'"
    assert said in told(tmp_path / "other")["headline"]


def test_of_a_resumed_run_what_it_went_back_over_does_not_count(tmp_path: Path) -> None:
    for name, start, shift, steps, expected in (
        ("apart", 4, 0.0, 6, (1.5, 0.25, 1.5)),
        ("overlap", 3, 5.0, 5, (6.25, 0.25, 6.25)),
    ):
        events(tmp_path / name, suffix=".a")  # 1, 2, 3
        found = told(events(tmp_path / name, start=start, shift=shift, suffix=".b"))
        assert found["steps"] == steps and values(found) == expected, name
        assert found["notes"][0].startswith("2 event files of one folder are read as one run that was resumed")
        assert all(file.name in found["notes"][0] for file in (tmp_path / name).iterdir()), "both are named"


def test_a_sound_run_and_one_whose_tokens_all_shift(judge: Any) -> None:
    sound = judge([metrics(0.0)] * 12, *TOKEN_IS)
    assert sound["sound"] and (sound["verdict"], sound["status"]) == ("normal", 0)
    assert sound["data"].startswith("small mismatch, as of two engines in one precision: k3_kl 0, |kl| 0 nats")
    assert sound["correction"] == "holds (tokens kept 1, mean weight 1, effective sample size 1)."
    unsound = judge([metrics(0.0)] * 12 + [metrics(-0.9)] * 12, *TOKEN_IS)
    assert (unsound["steps"], unsound["judged"], unsound["verdict"], unsound["status"]) == (24, 10, "fault", 1)
    assert unsound["data"].startswith("large mismatch: k3_kl 0.31, |kl| 0.9 nats per token over the last 10 steps.")
    assert "No correction repairs a shift that all tokens share: find the cause" in unsound["data"]
    grown = (
        "k3_kl was 0 nats per token in the first steps and is 0.31 in the last; it grows from about step 13 on; |kl|"
    )
    assert unsound["trend"].startswith(grown)
    shown = "(tokens kept 1, mean weight 0.41, effective sample size 1)."
    assert unsound["correction"] == f"does not hold, by rollout_is_weight_after_mean {shown}"
    found = {one["fault"]: one for one in unsound["findings"]}
    assert {*found} == {"kl", "rollout_is_ratio_mean", "rollout_is_weight_after_mean", "growth"}
    assert "(10 steps)" in found["kl"]["evidence"] and found["kl"]["severity"] == "note"
    assert values(unsound) == (pytest.approx(0.9), 0.0, pytest.approx(0.9))
    bypass = judge([metrics(-0.9)] * 12, "--flags", "--use-rollout-log-probs")
    assert "In bypass mode this is of the policy that trains" in bypass["data"]
    assert judge([metrics(-0.9)] * 5 + [metrics(0.0)] * 40, *TOKEN_IS)["sound"]  # long past: the last tenth is judged
    assert not judge([metrics(0.0)] * 180 + [metrics(-0.9)] * 2 + [metrics(0.0)] * 15, *TOKEN_IS)["sound"]


def test_what_was_not_recorded_is_no_figure(judge: Any) -> None:
    found = judge([{WEIGHT: 0.9}] * 30, *TOKEN_IS)
    assert found["data"] == "not judged: neither KL nor the mean |log ratio| was recorded over the last 10 steps."
    assert found["correction"] == "holds (mean weight 0.9)."
    assert (found["verdict"], found["status"]) == ("undecided", 3)
    assert found["trend"] == "not judged, since nothing that tells the size was recorded."


def test_a_step_that_rejected_everything_has_no_weight_and_one_without_tokens_says_nothing(judge: Any) -> None:
    kept = {WEIGHT: 0.99, ESS: 0.97, KEPT: 0.8, TOKENS: 100.0, NONE_LEFT: 0.0, KL: 0.0}
    rejected = {WEIGHT: 0.0, ESS: 0.0, KEPT: 0.0, TOKENS: 100.0, NONE_LEFT: 1.0, KL: 0.0}
    found = judge([rejected] * 5 + [kept] * 20 + [kept, kept, kept, rejected] * 5, *TOKEN_IS)
    shown = "tokens kept 0.56, mean weight 0.99, effective sample size 0.97"
    counts = "Everything was rejected in 10 steps; means of weights leave these out."
    assert found["correction"] == f"does not hold, by all_rejected ({shown}). {counts}" and not found["sound"]
    assert values(found, "rollout_is_weight_after_mean")[1] == 0.99
    assert "Everything was rejected" not in judge([kept] * 45, *TOKEN_IS)["correction"]
    steps = [{TOKENS: 10.0, KL: 0.0}] * 30 + [{TOKENS: 0.0, KL: 0.0}] * 9 + [{TOKENS: 10.0, KL: 0.02}]
    assert "|kl| 0.02 nats per token over the last 1 step." in judge(steps, *TOKEN_IS)["data"]


@pytest.mark.parametrize(
    ("metric", "ends"), [(KL, (1e-3, 1e-2, 0.1)), (K3, (1e-3, 1e-2, 0.1)), (GAP, (0.036, 0.11, 0.35))]
)
def test_each_of_three_metrics_tells_the_size(metric: str, ends: tuple[float, ...], judge: Any) -> None:
    """Whichever says most: k1 of noise is 0, and what others record is the mean |log ratio| alone."""
    words = ["small mismatch, as of", "moderate mismatch", "noticeable mismatch", "large mismatch"]
    others = dict.fromkeys((KL, K3, GAP), 0.0) if metric != KL else {}
    for index, end in enumerate(ends):
        below, above = (judge([{**others, metric: factor * end}] * 3) for factor in (0.95, 1.05))
        assert below["data"].startswith(words[index]) and below["sound"] and below["verdict"] == "normal"
        assert above["data"].startswith(words[index + 1]) and above["sound"] is (index < 2)
        assert (above["verdict"] == "large") is (index == 2) is ("ind the cause with mismatch-plugin" in above["data"])


def test_a_correction_that_works_is_sound_on_data_that_are_not(judge: Any) -> None:
    """χ² is of the data, and no correction changes it: the second verdict says what is left of it."""
    rollout = [torch.full((30,), -3.0, dtype=torch.float64)] * 4
    old = [row + torch.tensor([2.0, *[0.0] * 29]) for row in rollout]  # one ρ of e² in thirty: χ² 1.8, KL −.07
    packed = mp.PackedSequences.from_lists(rollout_log_probs=rollout, old_log_probs=old, loss_masks=[[1] * 30] * 4)
    for name, sound in (("disabled", False), ("token_is", True)):
        steps = [mp.correct(packed, mp.preset(name)).statistics.metrics()] * 3
        found = judge(steps, "--preset", name)
        assert "large mismatch" in found["data"] and found["sound"] is sound
        assert "chi2_token" in [one["fault"] for one in found["findings"]]
        assert found["correction"].startswith("holds (tokens kept 1, mean weight 1," if sound else "none: the loss")
    shifted = judge([metrics(math.log(0.7))] * 3, *TOKEN_IS)  # weights hold at ρ = .7 everywhere; somebody's fault
    assert shifted["correction"].startswith("holds") and not shifted["sound"]
    assert "No correction repairs a shift" in shifted["data"]


def write_run(folder: Path, k3_kl: Sequence[float], tokens: float | None = 4096.0) -> Path:
    for value in k3_kl:
        step = {**metrics(0.0), K3: value}
        step.pop(TOKENS)
        write_step(folder, CONFIG, step if tokens is None else {**step, TOKENS: tokens})
    return folder


def test_a_run_is_gated(tmp_path: Path) -> None:
    sound = write_run(tmp_path / "run", [9e-4, *[6e-4] * 10])  # of which the last ten are judged
    few = write_run(tmp_path / "few", [6e-4] * 10, tokens=9.0)
    untold = write_run(tmp_path / "untold", [6e-4] * 10, tokens=None)  # by k3 alone
    against = "k3 0.0006 nats per token against a bar of"
    for path, options, status, said in (
        (sound, (), 0, ""),
        (sound, ("--gate",), 0, f"gate: passed: {against} 0.001 (the default), over these steps."),
        (sound, ("--gate-kl", "1e-4"), 1, f"gate: failed: {against} 0.0001 (given by hand)"),
        (few, ("--gate",), 3, "gate: not decided, too few tokens"),
        (untold, ("--gate",), 0, "gate: passed"),
    ):
        result, shown = run(path, "--no-report", *options), text(path, "--no-report", *options)
        assert result.exit_code == status and said in shown and ("gate:" in shown) == bool(options)
        gate = told(path, *options)["gate"]
        assert (gate and gate["passed"]) == ({0: True, 1: False, 3: None}[status] if options else None)


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_settings_are_those_of_the_run_or_those_that_are_given(tmp_path: Path) -> None:
    path = write(tmp_path / "export.jsonl", [{"step": at, **metrics(0.0)} for at in range(3)])
    said = text(path, "--no-report", columns=200)
    assert "correction: not judged, since the run's settings are not known: give them with --config" in said
    write(tmp_path / "settings.yaml", "preset: token_is\n")
    assert "correction: holds" in text(path, "--no-report", "--config", tmp_path / "settings.yaml")
    # A preset may hold a threshold that only sets a metric, which is refused where it is given by hand.
    write_step(tmp_path / "run", mp.preset("ppo_is_bypass", threshold=3.0), metrics(0.0))
    assert told(tmp_path / "run")["status"] == 0
    assert "has the settings of its run, and those given are others" in text(tmp_path / "run", *TOKEN_IS, columns=200)
    # `compare` writes them into config.json, and the metrics below "metrics".
    (tmp_path / "lab").mkdir()
    line = {"step": 1, "reward": 0.5, "metrics": {KL: 0.05, WEIGHT: 1.0}, "seconds": {"train": 0.1}}
    write(tmp_path / "lab" / "metrics.jsonl", [{"step": 0, "held_out": 0.1}, line])
    config = {"settings": {}, "mismatch": CONFIG.model_dump(mode="json")}
    (tmp_path / "lab" / "config.json").write_text(json.dumps(config))
    assert told(tmp_path / "lab")["correction"].startswith("holds")


def drawn(steps: int, seed: int, memory: float = 0.0, spread: float = 0.2) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0.0, spread, steps)
    for i in range(1, steps):
        noise[i] = memory * noise[i - 1] + math.sqrt(1 - memory**2) * noise[i]
    return -8.0 + noise


def exp(log_values: np.ndarray, metric: str = K3) -> list[Step]:
    return [{metric: math.exp(value)} for value in log_values]


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_a_flat_run_has_no_trend(memory: float, judge: Any) -> None:
    flat = [drawn(150, seed, memory) for seed in range(5)] + [drawn(25, seed, memory, 0.5) for seed in range(5)]
    assert sum(bool(judge(exp(one))["trends"]) for one in flat) <= 1
    for quiet in (
        drawn(150, 0) - 0.02 * np.arange(150),  # falls
        drawn(400, 3, spread=0.05) + 0.3 * (np.arange(400) >= 200),  # little
        np.full(50, -8.0),
        np.linspace(-8.0, -2.0, 19),  # too few
    ):
        assert judge(exp(quiet))["trends"] == []
    assert judge([{KL: 7e-4}] * 19)["trend"] == "too few steps to tell: 19, and it takes 20."
    assert judge([{KL: 7e-4, K3: 4e-4}] * 200)["trend"] == "no growth of k3_kl or |kl| in 200 steps."


SINCE = np.maximum(np.arange(120) - 59.0, 0.0)
SHAPES = (0.06 * SINCE, 3.0 * (SINCE > 0), np.log1p(10 * SINCE), np.log1p(SINCE))


@pytest.mark.parametrize(("shape", "metric"), [(0, KL), (1, K3), (2, GAP), (3, K3)])
def test_growth_is_named_whichever_metric_shows_it(shape: int, metric: str, judge: Any) -> None:
    for memory in (0.0, 0.5):
        (found,) = judge(exp(drawn(120, shape, memory) + SHAPES[shape], metric))["trends"]
        assert found["metric"] == metric.removeprefix("rollout_corr/") and 50 <= found["began"] <= 71, found
        assert found["after"] / found["before"] == pytest.approx(math.exp(SHAPES[shape][-6:].mean()), rel=0.6)


def test_a_kl_that_grows_under_a_k3_that_stays_is_told_and_steps_are_put_in_order(judge: Any) -> None:
    """The shift of half the tokens up and half down, or k3 of an estimator that is clamped."""
    steps = [{"step": at, **row} for at, row in enumerate(exp(drawn(120, 0) + SHAPES[1]), start=1)]
    turned = [{"step": 120, K3: 9e9}, *reversed(steps)]  # of a step that is there twice the later counts
    assert judge(turned)["trends"] == judge(steps)["trends"] != []
    kl = [7e-4 * (9300 ** (max(0, step - 100) / 99)) for step in range(200)]
    found = judge([{KL: value, K3: 4e-4} for value in kl])
    (trend,) = found["trends"]
    assert trend["metric"] == "kl" and found["verdict"] == "large" and not found["sound"]
    assert found["trend"].startswith("|kl| was ") and " times as much; it grows from about step " in found["trend"]


def test_inspect_draws_what_is_there_and_the_verdict_does_not_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra [lab]")
    names = {name for _, names, _ in PANELS for name in names}
    assert names - {metric.name for metric in METRICS} == {"log_ratio_abs_mean"}
    own = tmp_path / "run"
    write_step(own, CONFIG, {f"rollout_corr/{name}": 0.5 for name in names})
    write_step(own, CONFIG, {"step": 9, KL: math.nan, "rollout_corr/chi2_token": math.inf})
    result = run(own)
    assert result.output.splitlines()[-1] == f"picture: {own}/plots/six_panels.png"
    assert "recommends one" not in result.output, "of a fault"
    found = told(own, "--out", tmp_path / "p")
    assert found["picture"] == str(tmp_path / "p" / "six_panels.png")
    assert (tmp_path / "p" / "six_panels.png").read_bytes().startswith(b"\x89PNG")
    assert found["source"] == str(own / "metrics.jsonl")
    assert "picture" not in run(own, "--no-report").output
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = run(own)
    assert "pip install 'mismatch-plugin[lab]'" in without.output
    assert without.exit_code == result.exit_code
