"""The plan of a comparison, its folder, and its refusals. The runs themselves are tested in `test_run.py`."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.lab import command, experiments
from mismatch_plugin.lab.chosen import choose
from mismatch_plugin.lab.compare import BLOCK, Job, open_folder, plan, tasks
from mismatch_plugin.lab.experiments import SETTINGS, variant_config
from mismatch_plugin.lab.run import _finished
from mismatch_plugin.lab.settings import LabSettings


@pytest.mark.parametrize(
    ("label", "algorithm", "level", "mode"),
    [
        ("0", 0, "token", "truncate"),
        ("1", 1, "token", "truncate"),
        ("2", 2, "token", "truncate"),
        ("3", 3, "sequence", "truncate"),
        ("2:sequence:mask", 2, "sequence", "mask"),
        ("3:geometric", 3, "geometric", "truncate"),
        ("pg_is", 3, "sequence", "truncate"),
    ],
)
@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_labels(label: str, algorithm: int, level: str, mode: str) -> None:
    config = variant_config(label)
    assert (config.algorithm, config.tis.level, config.tis.mode) == (algorithm, level, mode)


@pytest.mark.parametrize("label", ["4", "0:token", "2:token:truncate:1", "", "token"])
def test_unknown_labels_are_refused(label: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm '{label}' is unknown"):
        variant_config(label)


def test_named_variants() -> None:
    assert variant_config("0:dual_clip").ppo.dual_clip == 3.0 and variant_config("0:dual_clip").algorithm == 0
    (criterion,) = variant_config("2:geo_rs").rs.criteria
    assert (criterion.aggregate, criterion.lower_bound, criterion.upper_bound) == ("sequence_mean", 0.8, 1.25)
    assert variant_config("2:geo_rs").tis == variant_config("2").tis
    assert variant_config("token_icepop").metrics == "full"  # as every other, so that pictures have all of them


def test_every_algorithm_gets_the_same_seeds_in_every_setting(tmp_path: Path) -> None:
    settings = {"control": {}, "stale16": {"staleness": 16}}
    variants = {"control": ["0"], "stale16": ["0", "2:token:truncate"]}
    jobs = plan(tmp_path, variants, [5, 6, 7], settings, {"steps": 8})
    assert len(jobs) == 3 * 3
    assert [job.settings.seed for job in jobs] == [5, 5, 5, 6, 6, 6, 7, 7, 7]  # whole seeds first
    stale = next(job for job in jobs if job.setting == "stale16" and job.variant == "2:token:truncate")
    assert stale.settings.staleness == 16 and stale.settings.steps == 8
    assert stale.folder == tmp_path / "stale16" / "2_token_truncate" / "seed5"
    assert len({job.settings.warm_up_key for job in jobs}) == 3  # one warm-up a seed
    assert {job.warm for job in jobs} == {tmp_path / ".warm"}


def test_blocks_are_whole_seeds_of_one_setting_and_follow_from_the_plan(tmp_path: Path) -> None:
    jobs, checked = choose().jobs(tmp_path)
    blocks = tasks([*jobs, *checked])
    assert [job for block in blocks for job in block if job.trainer == "megatron"] == checked
    assert {job.warm for job in [*jobs, *checked]} == {tmp_path / ".warm"}  # both trainers start from the same weights
    batched = [block for block in blocks if block[0].trainer == "batched"]
    assert sorted(str(job.folder) for block in batched for job in block) == sorted(str(job.folder) for job in jobs)
    for block in batched:
        assert len({job.setting for job in block}) == 1 and len(block) <= BLOCK
        seeds = [job.settings.seed for job in block]
        assert len({seeds.count(seed) for seed in seeds}) == 1  # every variant of each seed
    assert {block[0].setting for block in batched[: len(SETTINGS)]} == set(SETTINGS)  # each setting's first seeds first

    def write(job: Job) -> None:
        job.folder.mkdir(parents=True)
        (job.folder / "done.json").write_text("{}")

    write(jobs[0])
    assert tasks([*jobs, *checked]) == blocks


def test_the_default_comparison() -> None:
    """What the issue of evidence asks for: five settings, ten seeds or more that chose nothing, a cross-check."""
    chosen = choose()
    assert len(chosen.settings) >= 5 and len(chosen.seeds) >= 10
    assert not set(chosen.seeds) & set(experiments.CHOSEN_ON)
    assert "none of them is reported" in chosen.description()["about_seeds"]
    assert all(labels[0] == "0" for labels in chosen.variants.values())
    assert set(chosen.variants[experiments.COLLAPSE]) == set(experiments.VARIANTS)
    runs = sum(len(labels) for labels in chosen.variants.values()) * len(chosen.seeds)
    assert len(chosen.seeds) == 12 and 150 <= runs <= 350
    # Holm's smallest threshold must be within reach of the exact test: 2 / 2^n times the number of comparisons.
    assert 2 / 2 ** len(chosen.seeds) * (len(experiments.VARIANTS) - 1) < 0.01
    assert chosen.cross_check["variants"] == ["0", "2:token:truncate"] and chosen.needs_megatron
    assert set(chosen.cross_check["seeds"]) <= set(chosen.seeds)
    for setting in chosen.settings.values():
        LabSettings(**{**chosen.lab, **setting.changes})


def test_full_and_quick() -> None:
    full, quick = choose(full=True), choose(quick=True)
    assert all(set(labels) == set(experiments.VARIANTS) for labels in full.variants.values())
    assert len(quick.settings) == 3 and len(quick.seeds) == 8 and not quick.cross_check and not quick.needs_megatron
    assert 2 / 2 ** len(quick.seeds) * 2 < 0.05  # so that a difference of both others can be significant
    assert choose(quick=True, seeds=2, first_seed=3).seeds == (3, 4)


def test_what_was_used_for_choosing_is_said() -> None:
    assert "of those reported here, 8, 9 are among them" in choose(seeds=4, first_seed=8).description()["about_seeds"]


def test_the_cross_check_is_of_the_collapse() -> None:
    assert choose(algorithms=["0", "1"]).cross_check == {}  # its second algorithm is not there to compare with
    assert choose(settings=["control"]).cross_check == {} and choose(cross_check=False).cross_check == {}
    assert choose(seeds=2).cross_check["seeds"] == [100, 101]


def test_every_further_setting_can_be_run() -> None:
    for name in experiments.MORE_SETTINGS:
        chosen = choose(settings=[name])
        jobs, checked = chosen.jobs(Path("run"))
        assert len(jobs) == 12 * len(chosen.variants[name]) and checked == []
        assert name not in choose().settings


def test_lab_fields_go_to_every_run() -> None:
    chosen = choose(lab=["lr=0.001", "hidden=16", "task=reverse6"], settings=["control"], steps=8)
    lab = LabSettings(**chosen.lab)
    assert (lab.lr, lab.hidden, lab.task, lab.steps) == (0.001, 16, "reverse6", 8)


@pytest.mark.parametrize(
    ("variants", "seeds", "message"),
    [
        ([], 2, "algorithms is empty"),
        (["0"], 0, "seeds is 0"),
        (["0", "0"], 1, "twice"),
        (["0", "2", "2:token:truncate"], 1, "algorithms 2 and 2:token:truncate are the same run"),
        (["3", "pg_is"], 1, "algorithms 3 and pg_is are the same run"),
    ],
)
def test_plans_that_mean_nothing(tmp_path: Path, variants: list[str], seeds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, {"control": variants}, range(seeds), {"control": {}}, {})


def test_two_settings_that_are_one_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="settings control and 0 are the same run: leave one of them out"):
        plan(tmp_path, {"control": ["0"], "0": ["0"]}, [0], {"control": {}, "0": {"staleness": 0}}, {})


SGLANG = "--trainer megatron --engine sglang"


def refused(folder: Path, *options: str) -> str:
    """What `compare` says when it refuses the options, before it makes a folder."""
    result = CliRunner().invoke(app, ["compare", "--output", str(folder), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert not folder.exists()
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--trainer verl", "trainer 'verl' is unknown: choose batched or megatron"),
        ("--engine vllm", "engine 'vllm' is unknown: choose batched, transformers or sglang"),
        ("--engine transformers", "--engine transformers goes with --trainer megatron: add it"),
        ("--url http://127.0.0.1:1", "--url is for a server: add --engine sglang"),
        ("--start-server", "--start-server is for a server: add --engine sglang"),
        (f"{SGLANG}", "needs --start-server or --url, and not both"),
        (f"{SGLANG} --start-server --url http://127.0.0.1:1", "and not both"),
        (f"{SGLANG} --start-server --workers 2", "one server has one set of weights"),
        (f"{SGLANG} --start-server --rollout-dtype int8", "int8 is not made by the engine sglang"),
        (f"{SGLANG} --start-server --settings int4", "int4 is not made by the engine sglang"),
        (f"{SGLANG} --url 127.0.0.1:1", "is not a server's address"),
        ("--algorithms 5", "algorithm '5' is unknown"),
        ("--algorithms ,", "algorithms is empty"),
        ("--seeds 0", "seeds is 0"),
        ("--first-seed -1", "first-seed is -1"),
        ("--workers -1", "workers is -1"),
        ("--settings int5", "settings 'int5' names none that exist: choose from control, int2, stale24"),
        ("--settings ,", "names none that exist"),
        ("--steps 0", "steps is 0"),
        ("--staleness -1", "staleness is -1"),
        ("--top-p 0.9", "top_p 0.9: the engine batched has no top_p"),
        ("--rollout-dtype bfloat16", "bfloat16 is not made by the engine batched"),
        ("--lab task=chess", "Invalid value: task 'chess' is unknown"),
        ("--lab speed=2", "--lab speed=2: write NAME=VALUE with one of task, layers"),
        ("--lab seed=2", "--lab seed=2: write NAME=VALUE"),
        ("--lab lr", "--lab lr: write NAME=VALUE"),
        ("--lab micro_batches=2", "the batched trainer has no top_p, no parallel layout and no micro-batches"),
        ("--lab position=rope", "position rope is not the engine batched's"),
        ("--lab hidden=30", "heads 4 must divide hidden, which is 30"),
        ("--lab betas=[0.9,1]", "betas is [0.9, 1.0]: each is at least 0 and below 1"),
        ("--lab lr=Infinity", "lr"),
        ("--lab clip_grad=Infinity", "clip_grad"),
        ("--lab task=swap", "task swap has prompts of several lengths"),
        ("--lab eval_temperature=0", "with the engine batched exact match is computed"),
        ("--lab top_p_log_probs=full", "top_p_log_probs full goes with top_p below 1"),
        ("--lab engine=transformers", "--lab engine=transformers: write NAME=VALUE"),
        ("--lab steps=8 --steps 9", "steps is given by --lab and by another option"),
        ("--lab lr=0.001", "--lab lr: setting moe_flips has its own, 0.006"),
        ("--staleness 4 --lab staleness=8", "--lab staleness: setting 4 has its own, 4"),
        ("--seeds 1000000000", "seeds is 1000000000: give at most 10000"),
        ("--trainer megatron --top-p 0.9", "the engine batched has no top_p"),
        ("--tp 2", "--tp goes with --trainer megatron"),
        ("--trainer megatron --tp 3", "Invalid value: tp is 3 and must divide kv_groups, which is 4."),
        ("--trainer megatron --pp 5", "pp is 5"),
        ("--staleness 4 --settings int2", "--settings int2 and staleness are two ways to choose"),
        ("--full --quick", "--full runs every algorithm: leave out --quick"),
        ("--full --algorithms 0", "--full runs every algorithm: leave out --algorithms"),
        ("--quick --settings int2", "--quick chooses the settings"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(tmp_path: Path, options: str, sentence: str) -> None:
    assert sentence in refused(tmp_path / "run", *options.split())


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and never listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "does not answer" in refused(tmp_path / "run", *SGLANG.split(), "--url", url)


def test_what_is_missing_is_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_SGLANG_PYTHON", str(tmp_path / "absent"))
    said = refused(tmp_path / "run", *SGLANG.split(), "--start-server")
    assert "make one with ci/sglang_cpu.sh" in said
    monkeypatch.setattr(command, "_DRAWN", ("json", "no_such_module"))
    said = refused(tmp_path / "run")
    assert "no_such_module cannot be imported" in said and "[lab]" in said


def test_servers_are_started_for_what_is_not_done(tmp_path: Path) -> None:
    from mismatch_plugin.lab.servers import servers_for

    settings = {"bfloat16": {"rollout_dtype": "bfloat16"}, "control": {}}
    jobs = plan(tmp_path, {"bfloat16": ["0"], "control": ["0"]}, [0], settings, {"engine": "sglang"})
    with servers_for(jobs, "http://127.0.0.1:1") as urls:
        assert urls == {"bfloat16": "http://127.0.0.1:1", "float32": "http://127.0.0.1:1"}
    for job in jobs:
        job.folder.mkdir(parents=True)
        (job.folder / "done.json").write_text("{}")
    with servers_for(jobs, None) as urls:
        assert urls == {}


def test_the_page_says_what_was_changed_for_all_settings() -> None:
    """The control's sentence says that nothing lies between the engines: with --lab that is no longer so."""
    about = choose(settings=["control"], lab=["rollout_dtype=int2", "lr=0.002"]).description()["about_settings"]
    assert about["control"]["what"].endswith("newest weights. Changed for all settings: rollout_dtype=int2, lr=0.002.")
    assert choose(settings=["control"]).description()["about_settings"]["control"]["what"].endswith("newest weights.")


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    description: dict[str, Any] = {"settings": ["control"], "variants": ["0"], "seeds": 1}
    folder = tmp_path / "run"
    open_folder(folder, description, resume=False)
    assert json.loads((folder / "run.json").read_text())["seeds"] == 1
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        open_folder(folder, description, resume=False)
    open_folder(folder, description, resume=True)
    with pytest.raises(ValueError, match="run holds a run with --seeds 1, now 2: resume it with the same"):
        open_folder(folder, {**description, "seeds": 2}, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match="is not empty and holds no run"):
            open_folder(tmp_path / "other", description, resume)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="is a file"):
        open_folder(tmp_path / "other" / "notes.txt", description, resume=False)


@pytest.mark.parametrize("damaged", ['{"seeds": 1, "sett', "", "[]", '{"seeds": ' + "[" * 100_000, "\\"])
def test_a_damaged_run_json_is_said_and_kept(tmp_path: Path, damaged: str) -> None:
    description: dict[str, Any] = {"settings": ["control"], "variants": ["0"], "seeds": 1}
    open_folder(tmp_path / "run", description, resume=False)
    record = tmp_path / "run" / "run.json"
    record.write_text(damaged)
    with pytest.raises(ValueError, match=r"run\.json is damaged: .*It says what the run is: restore it, or choose"):
        open_folder(tmp_path / "run", description, resume=True)
    assert record.read_text() == damaged


def test_run_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while it writes leaves no half of one: the file gets its name when all of it is there."""
    before: list[bool] = []

    def die(_: int) -> None:
        before.append((tmp_path / "run" / "run.json").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        open_folder(tmp_path / "run", {"seeds": 1}, resume=False)
    assert before == [False] and list((tmp_path / "run").iterdir()) == []
    monkeypatch.undo()
    open_folder(tmp_path / "run", {"seeds": 1}, resume=False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seeds"] == 1


@pytest.mark.parametrize("name", ["config.json", "done.json"])
def test_a_run_whose_record_is_damaged_is_not_thrown_away(tmp_path: Path, name: str) -> None:
    for written in ("config.json", "done.json"):
        (tmp_path / written).write_text("{}")
    assert _finished(tmp_path, {}) == {}
    (tmp_path / name).write_text('{"step": 4')
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*Delete done\.json to run it again"):
        _finished(tmp_path, {})


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"lab": {"steps": 8, "rollout_dtype": "bfloat16"}}, r"--steps 6, now 8; --rollout-dtype None, now bfloat16: "),
        ({"variants": ["0"]}, "--algorithms 0,2:token:truncate, now 0: "),
        ({"trainer": "megatron"}, "--trainer batched, now megatron: "),
        ({"seeds": [100, 101, 102]}, "--seeds 2 from 100, now 3 from 100: "),
        ({"settings": ["control"], "lab": {"steps": 6, "of_setting": {"control": {}}}}, "--settings .*, now control: "),
        ({"lab": {"steps": 6, "of_setting": {"control": {}, "4": {"staleness": 8}}}}, "--staleness 4, now 8: "),
    ],
)
def test_resuming_with_other_options_names_them(tmp_path: Path, now: dict[str, Any], said: str) -> None:
    before: dict[str, Any] = {"settings": ["control", "4"], "variants": ["0", "2:token:truncate"], "trainer": "batched"}
    before["seeds"] = [100, 101]
    settings = {"control": {}, "4": {"staleness": 4}}
    before["lab"] = {"steps": 6, "of_setting": settings}
    open_folder(tmp_path / "run", before, resume=False)
    now = {**before, **now, "lab": {"of_setting": settings, **now.get("lab", before["lab"])}}
    with pytest.raises(ValueError, match=f"holds a run with {said}resume it"):
        open_folder(tmp_path / "run", now, resume=True)


def test_the_help_is_whole_on_80_columns() -> None:
    output = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert "…" not in output and "--first-seed" in output


def test_help_names_every_setting() -> None:
    compare = get_command(app).commands["compare"]  # type: ignore[attr-defined]
    (said,) = (option.help for option in compare.params if option.name == "settings")
    for name in [*experiments.SETTINGS, *experiments.MORE_SETTINGS, *experiments.LLAMA_SETTINGS]:
        assert re.search(rf"\b{name}\b", said), name
