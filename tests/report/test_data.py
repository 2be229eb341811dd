"""What a run folder says of itself: plan, settings, outcomes, cross-check; and labels in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.config import MismatchConfig, preset
from mismatch_plugin.report.data import AboutSetting, Outcomes, describe, read_run_folder, short
from mismatch_plugin.report.labels import corrections
from mismatch_plugin.report.overview import headline
from mismatch_plugin.report.page import _how_measured, build_report, final_table
from mismatch_plugin.report.results import results_table
from mismatch_plugin.report.statistics import summarise
from mismatch_plugin.report.summary import write_summary

INFO: dict[str, Any] = {
    "settings": ["control", "stale32"],
    "variants": ["0", "1", "token_icepop"],
    "seeds": [100, 101],
    "plan": {"control": ["1", "0"], "stale32": ["0", "token_icepop"]},
    "about_settings": {"stale32": {"title": "Very stale", "what": "Weights are old.", "changes": {"staleness": 32}}},
    "outcomes": {"primary": "final exact match", "secondary": ["area under the curve", "collapsed"]},
    "cross_check": {"folder": "megatron", "settings": ["stale32"], "variants": ["0"], "seeds": [100, 101]},
    "command": "mismatch-plugin compare --full",
}


def write_run(root: Path, setting: str, variant: str, seed: int) -> None:
    """41 steps: gradient norms at each, metrics at every 20th."""
    folder = root / setting / variant.replace(":", "_") / f"seed{seed}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"variant": variant}))
    (folder / "done.json").write_text("{}")
    lines: list[dict[str, Any]] = [{"step": 0, "held_out_exact": 0.5}]
    for step in range(1, 41):
        lines.append({"step": step, "reward": 0.5, "exact": 0.1, "grad_norm": 1.0})
        if step % 20 == 0:
            lines[-1] |= {"held_out_exact": 0.5, "metrics": {"rollout_corr/kl": 0.1}, "impossible_tokens": 0.01}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_folder(root: Path, info: dict[str, Any]) -> Path:
    for setting, variants in INFO["plan"].items():
        for variant in variants:
            for seed in INFO["seeds"]:
                write_run(root, setting, variant, seed)
    for seed in INFO["seeds"]:
        write_run(root / "megatron", "stale32", "0", seed)
    (root / "run.json").write_text(json.dumps(info))
    return root


def test_a_folder_is_complete_by_its_plan(tmp_path: Path):
    """Metrics at every 20th step are no loss, and a variant that was not planned is not missing."""
    folder = read_run_folder(write_folder(tmp_path, INFO))
    assert folder.missing == () and folder.complete
    assert folder.seeds == (100, 101) and folder.command == "mismatch-plugin compare --full"
    assert folder.variants_of("control") == ("0", "1") and folder.variants_of("stale32") == ("0", "token_icepop")
    assert folder.about("stale32") == AboutSetting("Very stale", "Weights are old.", "", {"staleness": 32})
    assert folder.about("control") == AboutSetting("control")
    assert folder.outcomes == Outcomes("final exact match", ("area under the curve", "collapsed"))
    steps, values = folder.runs["control", "0", 100].curve("rollout_corr/kl")
    assert steps.tolist() == [20, 40] and values.tolist() == [0.1, 0.1]
    assert [row[1:] for row in final_table(summarise(folder)).rows] == [
        ("0.50", "0.50"),
        ("0.50", "–"),
        ("–", "0.50"),
    ]


def diverge(root: Path, setting: str, variant: str, seed: int, at: int) -> None:
    """The run's gradient is infinite at a step, and its weights stay: as the lab writes it."""
    folder = root / setting / variant / f"seed{seed}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[at]["grad_norm"] = None
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "done.json").write_text(json.dumps({"status": "diverged", "step": 40}))


def test_a_diverged_run_does_not_look_better_than_it_is(tmp_path: Path):
    """Its weights stayed where they were, and so did its exact match: that is no result of training."""
    root = write_folder(tmp_path, INFO)
    diverge(root, "control", "0", 100, at=39)
    diverge(root / "megatron", "stale32", "0", 101, at=20)
    folder = read_run_folder(root)
    run = folder.runs["control", "0", 100]
    assert run.finished and run.diverged and folder.diverged == [run] and folder.complete
    steps, values = run.curve("held_out_exact")
    assert values[steps < 39].tolist() == [0.5, 0.5] and not values[steps >= 39].any() and steps[-1] == 40
    control, stale = summarise(folder)
    base, other = control.variants
    assert base.values == {100: 0.0, 101: 0.5} and base.collapsed == {100: True, 101: False}
    assert base.final["reward"].mean == 0.25 and base.areas[100] < base.areas[101]
    assert other.difference is not None and other.difference.mean == 0.25 and not stale.variants[0].collapsed_runs
    assert _how_measured(folder)[-2:] == [
        "Diverged (the gradient was no longer finite; 0 from there on, and counted as collapsed): control, 0 PPO, seed "
        "100.",
        "Diverged in the cross-check (the gradient was no longer finite; 0 from there on, and counted as collapsed): "
        "stale32, 0 PPO, seed 101.",
    ]
    whole = json.loads(write_summary(folder, [control, stale]).read_text())
    assert whole["diverged"] == [["control", "0", 100]]
    assert whole["settings"]["control"]["variants"]["0"]["collapsed"] == 1


def test_runs_that_did_not_diverge_are_not_said_to(tmp_path: Path):
    folder = read_run_folder(write_folder(tmp_path, INFO))
    assert folder.diverged == [] and "iverged" not in " ".join(_how_measured(folder))
    assert "diverged" not in json.loads(write_summary(folder, summarise(folder)).read_text())


def test_metrics_that_were_cut_are_no_finished_run(tmp_path: Path):
    root = write_folder(tmp_path, INFO)
    place = root / "control" / "0" / "seed100"
    (place / "done.json").write_text('{"status": "finished", "step": 40}')
    assert read_run_folder(root).complete
    kept = (place / "metrics.jsonl").read_text().splitlines()[:31]
    (place / "metrics.jsonl").write_text("\n".join(kept))
    folder = read_run_folder(root)
    assert not folder.runs["control", "0", 100].finished
    assert folder.missing == (
        "control, 0 PPO, seed 100: ended at step 40, and its metrics stop at step 30; left out of every comparison.",
    )


def test_a_step_of_400_digits_is_a_damaged_line(tmp_path: Path):
    root = write_folder(tmp_path, INFO)
    with (root / "control" / "0" / "seed100" / "metrics.jsonl").open("a") as lines:
        lines.write('\n{"step": 1' + "0" * 400 + "}")
    assert read_run_folder(root).missing == ("control, 0 PPO, seed 100: 1 damaged line skipped.",)


def test_text_that_no_file_takes_is_written_escaped(tmp_path: Path):
    page = build_report(write_folder(tmp_path, {**INFO, "title": "<b>\ud800", "plan": {}, "settings": []}), exact=False)
    assert "&lt;b&gt;\\ud800" in page.read_text() and "<b>" not in page.read_text()


def test_without_a_plan_every_variant_is_asked_of_every_setting(tmp_path: Path):
    folder = read_run_folder(write_folder(tmp_path, {name: INFO[name] for name in ("settings", "variants", "seeds")}))
    assert folder.missing == (
        "control, 2 decoupled PPO, IcePop 0.5 to 5: seeds 100, 101 not started.",
        "stale32, 1 bypass PPO: seeds 100, 101 not started.",
    )
    assert folder.variants_of("control") == folder.variants and folder.cross_check is None and folder.outcomes is None


def test_a_run_beyond_the_plan_is_read_and_a_planned_one_missed(tmp_path: Path):
    plan = {**INFO["plan"], "control": ["0", "2:token:truncate"]}
    folder = read_run_folder(write_folder(tmp_path, {**INFO, "plan": plan}))
    assert folder.missing == ("control, 2 decoupled PPO, token truncate: seeds 100, 101 not started.",)
    assert folder.variants_of("control") == ("0", "1", "2:token:truncate")


def test_the_cross_check_is_a_folder_of_its_own(tmp_path: Path):
    folder = read_run_folder(write_folder(tmp_path, INFO))
    check = folder.cross_check
    assert check is not None and check.root == tmp_path / "megatron" and check.complete
    assert (check.settings, check.variants, check.seeds) == (("stale32",), ("0",), (100, 101))
    assert len(check.finished("stale32", "0")) == 2 and ("stale32", "token_icepop", 100) in folder.runs
    (tmp_path / "megatron" / "stale32" / "0" / "seed101" / "done.json").unlink()
    folder = read_run_folder(tmp_path)
    assert folder.missing == (
        "cross-check, stale32, 0 PPO, seed 101: unfinished, 41 steps; left out of every comparison.",
    )
    later = {**INFO, "cross_check": {**INFO["cross_check"], "folder": "later"}}
    (tmp_path / "run.json").write_text(json.dumps(later))
    assert read_run_folder(tmp_path).missing == ("cross-check, stale32, 0 PPO: seeds 100, 101 not started.",)


@pytest.mark.parametrize("place", ["../elsewhere", "/somewhere", "..", ".", "", "a/b", "a\0", "a" * 5000, 3, None])
def test_the_cross_check_lies_inside_the_folder(place: object, tmp_path: Path):
    folder = read_run_folder(write_folder(tmp_path, {**INFO, "cross_check": {"folder": place}}))
    assert folder.cross_check is None
    assert folder.missing == ("run.json names no folder of the cross-check: it is left out.",)


@pytest.mark.parametrize(
    "name", ["plan", "about_settings", "outcomes", "cross_check", "command", "settings", "variants"]
)
@pytest.mark.parametrize("value", [None, 3, "x", [], [[1]], {"stale32": 3}, {"primary": [], "folder": {}}, math.nan])
def test_a_damaged_description_is_read(name: str, value: object, tmp_path: Path):
    folder = read_run_folder(write_folder(tmp_path, {**INFO, name: value}))
    summaries = summarise(folder)
    assert len(folder.runs) == 8 and {"control", "stale32"} <= {summary.setting for summary in summaries}
    assert all(isinstance(folder.about(setting).title, str) for setting in folder.settings)
    assert isinstance(folder.command, str) and isinstance(folder.outcomes, Outcomes | None)


@pytest.mark.parametrize(
    ("label", "long", "legend"),
    [
        ("0", "0 PPO", "0 PPO"),
        ("0:dual_clip", "0 PPO, dual clip", "0 dual clip"),
        ("2:token:truncate", "2 decoupled PPO, token truncate", "2 token truncate"),
        ("2:sequence:mask", "2 decoupled PPO, sequence mask", "2 sequence mask"),
        ("2:geo_rs", "2 decoupled PPO, geometric rejection", "2 geometric rejection"),
        ("token_icepop", "2 decoupled PPO, IcePop 0.5 to 5", "2 IcePop"),
        ("bypass_pg_token_icepop", "3 REINFORCE + IS, IcePop 0.5 to 5", "3 IcePop"),
        (
            "geo_rs_token_tis",
            "2 decoupled PPO, token truncate at most 2, geometric rejection outside 0.999 to 1.001",
            "2 token truncate + geometric rejection",
        ),
        (
            "geo_rs",
            "0 PPO, geometric rejection outside 0.999 to 1.001, veto below 0.0001",
            "0 geometric rejection + veto",
        ),
        ("k3_rs", "0 PPO, mean k3 rejection above 0.01", "0 mean k3 rejection"),
        ("opsm", "0 PPO, geometric rejection below 0.9048", "0 geometric rejection"),
        ("bypass_ppo_clip", "1 bypass PPO", "1 bypass PPO"),
        ("mine", "mine", "mine"),
    ],
)
def test_labels_in_words(label: str, long: str, legend: str):
    assert (describe(label), short(label)) == (long, legend)


def test_words_follow_the_settings():
    assert corrections(preset("token_icepop", threshold=4.0)) == ("IcePop 0.5 to 4",)
    config = MismatchConfig.build({"ppo": {"dual_clip": 3.0}, "rs": {"veto_threshold": 1e-3}})
    assert corrections(config) == ("veto below 0.001", "dual clip at 3")


def test_with_two_evaluations_nobody_says_that_no_run_collapsed(tmp_path: Path):
    root = write_folder(tmp_path, INFO)
    (control, stale) = summarise(read_run_folder(root))
    assert headline(control) == "Algorithm 0 collapses in none of 2 runs"
    assert results_table(control, "").column("collapsed") == ["0 of 2", "0 of 2"]
    for path in root.glob("control/*/*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[20].pop("held_out_exact")
        path.write_text("\n".join(map(json.dumps, lines)))
    control, stale = summarise(read_run_folder(root))
    assert headline(control) == "Too few evaluations to tell whether algorithm 0 collapses"
    assert results_table(control, "").column("collapsed") == ["–", "–"]
    assert headline(stale) == "Algorithm 0 collapses in none of 2 runs"
