"""The plan of a comparison, its folder, and its refusals. The runs themselves are tested in `test_run.py`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.lab import command
from mismatch_plugin.lab.compare import SETTINGS, open_folder, plan, variant_config
from mismatch_plugin.lab.run import _finished


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


def test_every_algorithm_gets_the_same_seeds_in_every_setting(tmp_path: Path) -> None:
    jobs = plan(tmp_path, ["0", "2:token:truncate"], 3, SETTINGS, {"steps": 8})
    assert len(jobs) == 2 * len(SETTINGS) * 3
    assert {job.settings.seed for job in jobs} == {0, 1, 2}
    assert [job.settings.seed for job in jobs] == sorted(job.settings.seed for job in jobs)  # whole seeds first
    stale = next(job for job in jobs if job.setting == "stale16" and job.variant == "2:token:truncate")
    assert stale.settings.staleness == 16 and stale.settings.steps == 8
    assert stale.folder == tmp_path / "stale16" / "2_token_truncate" / "seed0"
    assert len({job.settings.warm_up_key for job in jobs}) == 3  # one warm-up a seed


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
        plan(tmp_path, variants, seeds, SETTINGS, {})


def test_two_settings_that_are_one_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="settings control and 0 are the same run: leave one of them out"):
        plan(tmp_path, ["0"], 1, {"control": {}, "0": {"staleness": 0}}, {})


def refused(folder: Path, *options: str) -> str:
    """What `compare` says when it refuses the options, before it makes a folder."""
    result = CliRunner().invoke(app, ["compare", "--output", str(folder), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert not folder.exists()
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--engine vllm", "engine 'vllm' is unknown: choose transformers or sglang"),
        ("--url http://127.0.0.1:1", "--url is for a server: add --engine sglang"),
        ("--start-server", "--start-server is for a server: add --engine sglang"),
        ("--engine sglang", "needs --start-server or --url, and not both"),
        ("--engine sglang --start-server --url http://127.0.0.1:1", "and not both"),
        ("--engine sglang --start-server --workers 2", "one server has one set of weights"),
        ("--engine sglang --start-server --rollout-dtype int8", "int8 is made by the engine transformers"),
        ("--engine sglang --start-server --settings int4", "int4 is made by the engine transformers"),
        ("--engine sglang --url 127.0.0.1:1", "is not a server's address"),
        ("--algorithms 5", "algorithm '5' is unknown"),
        ("--algorithms ,", "algorithms is empty"),
        ("--seeds 0", "seeds is 0"),
        ("--workers -1", "workers is -1"),
        ("--settings int5", "settings 'int5'"),
        ("--steps 0", "steps is 0"),
        ("--staleness -1", "staleness is -1"),
        ("--top-p 0", "top_p is 0.0: it should be greater than 0."),
        ("--task chess", "Invalid value: task 'chess' is unknown"),
        ("--tp 3", "Invalid value: tp is 3 and must divide kv_groups, which is 4."),
        ("--pp 5", "pp is 5"),
        ("--staleness 4 --settings int4", "--settings int4 and staleness are two ways to choose"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(tmp_path: Path, options: str, sentence: str) -> None:
    assert sentence in refused(tmp_path / "run", *options.split())


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and never listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "does not answer" in refused(tmp_path / "run", "--engine", "sglang", "--url", url)


def test_what_is_missing_is_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_SGLANG_PYTHON", str(tmp_path / "absent"))
    said = refused(tmp_path / "run", "--engine", "sglang", "--start-server")
    assert "make one with ci/sglang_cpu.sh" in said
    monkeypatch.setattr(command, "_NEEDED", ("json", "no_such_module"))
    said = refused(tmp_path / "run")
    assert "no_such_module cannot be imported" in said and "[lab]" in said


def test_servers_are_started_for_what_is_not_done(tmp_path: Path) -> None:
    from mismatch_plugin.lab.servers import servers_for

    jobs = plan(tmp_path, ["0"], 1, {"bfloat16": SETTINGS["bfloat16"], "control": {}}, {"engine": "sglang"})
    with servers_for(jobs, "http://127.0.0.1:1") as urls:
        assert urls == {"bfloat16": "http://127.0.0.1:1", "float32": "http://127.0.0.1:1"}
    for job in jobs:
        job.folder.mkdir(parents=True)
        (job.folder / "done.json").write_text("{}")
    with servers_for(jobs, None) as urls:
        assert urls == {}


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
        ({"settings": ["control"], "lab": {"steps": 6, "of_setting": {"control": {}}}}, "--settings .*, now control: "),
        ({"lab": {"steps": 6, "of_setting": {"control": {}, "4": {"staleness": 8}}}}, "--staleness 4, now 8: "),
    ],
)
def test_resuming_with_other_options_names_them(tmp_path: Path, now: dict[str, Any], said: str) -> None:
    before: dict[str, Any] = {"settings": ["control", "4"], "variants": ["0", "2:token:truncate"]}
    settings = {"control": {}, "4": {"staleness": 4}}
    before["lab"] = {"steps": 6, "of_setting": settings}
    open_folder(tmp_path / "run", before, resume=False)
    now = {**before, **now, "lab": {"of_setting": settings, **now.get("lab", before["lab"])}}
    with pytest.raises(ValueError, match=f"holds a run with {said}resume it"):
        open_folder(tmp_path / "run", now, resume=True)


def test_the_default_algorithms_stand_whole_in_the_help() -> None:
    output = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    words = output.replace("│", " ").split()
    assert all(f"{name}" in " ".join(words) for name in command.DEFAULT_ALGORITHMS.split(",")) and "…" not in output
