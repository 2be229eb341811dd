"""What a run writes: steps that are numbered, appended and readable, by one run at a time, on any disk."""

from __future__ import annotations

import errno
import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks.megatron_step import MegatronStep
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.report import log
from mismatch_plugin.report.log import log_step, read_steps, validate_same_settings, write_step

CONFIG = mp.MismatchConfig()


def numbers(folder: Path) -> list[float]:
    return [step["step"] for step in read_steps(folder)]


def test_steps_are_numbered_where_none_is_given(tmp_path: Path) -> None:
    for _ in range(2):
        write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})
    write_step(tmp_path, CONFIG, {"step": 7, "rollout_corr/kl": 0.1})
    write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})
    assert numbers(tmp_path) == [1, 2, 7, 8]
    assert list(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])) == ["step", "rollout_corr/kl"]


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ('{"step": 4}\n{"step": 5, "metrics": {"a": 1}', 5),  # a kill cut the last line
        ('{"step": 4}\n\n  \n', 5),
        ('{"a": 1}\n{"a": 2}\n', 3),  # of a version that wrote none
        ('{"a": 1}\n{"a": 2}\n{"a": {"b": 1}', 3),
        ('{"step": 3.0}\n', 4),
        ('{"step": 12}\n{"step": ' + "[" * 100_000 + "\n", 13),
        ('{"step": 2}\n' + '{"step": 3, "x": "' + "y" * 200_000 + '"}\n', 4),  # longer than what is read at once
        ("", 1),
    ],
)
def test_numbers_go_on_after_what_is_in_the_file(tmp_path: Path, before: str, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(before)
    write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == step


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metric loss is a Tensor, not a number: give float\(value\)"):
        write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1, "loss": torch.tensor(1.0)})  # type: ignore[dict-item]
    write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})
    assert numbers(tmp_path) == [1]  # nothing of the refused step is there


_RUN = """
import sys
import mismatch_plugin as mp
from mismatch_plugin.report.log import log_step, validate_same_settings
config, how, folder = mp.MismatchConfig(), *sys.argv[1:]
try:
    validate_same_settings(folder, config, holds=how == "starts")
except ValueError as error:
    sys.exit(f"refused: {error}")
if how == "steps":
    log_step(folder, config, {"rollout_corr/kl": 0.1})
print("begun", flush=True)
sys.stdin.read()
"""


def _run(how: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that `starts` a run, or takes its first `steps`, or only `asks`; and its first line."""
    words = [sys.executable, "-c", _RUN, how, str(folder)]
    process = subprocess.Popen(words, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.mark.skipif(sys.platform == "win32", reason="on Linux")
@pytest.mark.parametrize("how", ["starts", "steps"])
def test_a_folder_has_one_live_run(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    (tmp_path / "same").symlink_to(folder)
    first, said = _run(how, folder)
    assert said == "begun\n"
    for second in (folder, tmp_path / "same"):
        with pytest.raises(ValueError, match=f"another run is writing to {folder}: give this run another folder"):
            validate_same_settings(second, CONFIG)
        with pytest.raises(ValueError, match="another run is writing"):
            write_step(second, CONFIG, {"rollout_corr/kl": 0.2})
    assert (folder / "metrics.jsonl").exists() == (how == "steps")  # the refused run has written nothing
    assert "refused: another run is writing to" in _run("starts", folder)[1]
    write_step(tmp_path / "other", CONFIG, {"rollout_corr/kl": 0.2})
    first.kill()
    first.wait()
    validate_same_settings(folder, CONFIG, holds=True)  # the run goes on in this process
    write_step(folder, CONFIG, {"rollout_corr/kl": 0.2})
    assert numbers(folder)[-1] == (2 if how == "steps" else 1)
    assert "refused" in _run("asks", folder)[1]


def test_asking_holds_nothing_and_a_disk_without_locks_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate_same_settings(tmp_path / "run", CONFIG)
    assert not (tmp_path / "run").exists()
    fcntl = pytest.importorskip("fcntl", reason="on Linux")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    validate_same_settings(tmp_path / "run", CONFIG, holds=True)
    write_step(tmp_path / "run", CONFIG, {"rollout_corr/kl": 0.1})
    assert numbers(tmp_path / "run") == [1] and tmp_path / "run" not in log._HELD


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk on which nothing can be opened for writing as long as the list holds True."""
    full, real = [True], Path.open

    def opened(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if full[0] and set(mode) & set("wa"):
            raise OSError(28, "No space left on device", str(self))
        return real(self, mode, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(log, "_warned", set())
    return full


def test_a_hook_warns_once_and_goes_on_where_metrics_cannot_be_written(
    tmp_path: Path, full_disk: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        for _ in range(3):
            log_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})
    (record,) = caplog.records
    assert f"training goes on (said once for {tmp_path})" in record.message and "No space left" in record.message
    with pytest.raises(OSError, match="No space left"):  # a loop of one's own is told at once
        write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})
    full_disk[0] = False
    log_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})  # it is tried again at every step
    assert numbers(tmp_path) == [1]
    (tmp_path / "file").write_text("")  # no folder, and the folder of another run
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        for folder, config in (("file", CONFIG), (".", mp.preset("seq_is"))):
            log_step(tmp_path / folder, config, {"rollout_corr/kl": 0.1})
    assert len(caplog.records) == 2 and numbers(tmp_path) == [1]


def test_a_step_that_cannot_be_written_does_not_end_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    deep: Any = 0.1
    for _ in range(100_000):
        deep = [deep]
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        for value in (deep, deep, 0.1):
            log_step(tmp_path, CONFIG, {"rollout_corr/kl": value})
    assert len(caplog.records) == 1 and "recursion" in caplog.records[0].message
    assert numbers(tmp_path) == [1]


def test_a_line_that_a_kill_cut_is_left_out_however_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "state": {"a": 1}\n{"step": 3, "x\n{"step": 4}\n')
    assert numbers(tmp_path) == [1, 4]
    for line in (
        '"step": 5}',
        "[1]",
        "step 5",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        f'{{"a": 1{"0" * 400}}}',
    ):
        path.write_text('{"step": 1}\n' + line + '\n{"step": 6}\n')
        with pytest.raises(ValueError, match="line 2 is no step"):
            numbers(tmp_path)


def test_steps_come_back_as_written_and_those_of_other_settings_are_refused(tmp_path: Path) -> None:
    step = {"rollout_corr/kl": math.nan, "rollout_corr/chi2_seq": math.inf, "rollout_corr/k3_kl": 0.1}
    write_step(tmp_path / "deep" / "run", CONFIG, step)
    (found,) = read_steps(tmp_path / "deep" / "run")
    assert math.isnan(found.pop("rollout_corr/kl"))
    assert found == {"step": 1, "rollout_corr/chi2_seq": math.inf, "rollout_corr/k3_kl": 0.1}
    with pytest.raises(ValueError, match=r"run holds .* with .*: .* folder"):
        write_step(tmp_path / "deep" / "run", mp.preset("seq_is"), step)
    assert mp.MismatchConfig.from_file(tmp_path / "deep" / "run" / "settings.json") == CONFIG
    write_step(tmp_path / "deep" / "run", CONFIG.model_copy(update={"report_dir": "elsewhere"}), step)  # the same one
    assert numbers(tmp_path / "deep" / "run") == [1, 2]
    with pytest.raises(ValueError, match="is not there"):
        numbers(tmp_path / "other.jsonl")
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(ValueError, match=r"settings\.json is a pipe, not a regular file"):
        write_step(tmp_path, CONFIG, {"rollout_corr/kl": 0.1})


def test_slime_asks_before_its_first_step(tmp_path: Path) -> None:
    write_step(tmp_path, mp.preset("seq_is"), {"rollout_corr/kl": 0.1})
    run = MegatronStep(lambda args, metrics, number, first: None)
    config = CONFIG.model_copy(update={"report_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="holds steps of a run with use_tis True, now False: give this run another"):
        run.begin(Namespace(), config, ParallelGroups(), SimpleNamespace(), 0)


def test_a_run_of_ones_own_is_no_damage_to_the_report(tmp_path: Path) -> None:
    """Lines with and without a step: what an older version wrote has none."""
    pytest.importorskip("scipy", reason="the comparison's statistics need scipy (extra lab)")
    from mismatch_plugin.compare.statistics import read_folder

    folder = tmp_path / "cluster" / "0" / "seed0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"rollout_corr/kl": 0.1}\n{"rollout_corr/kl": 0.2}\n')
    write_step(folder, CONFIG, {"rollout_corr/kl": 0.3})
    (folder / "done.json").write_text("{}")
    found = read_folder(tmp_path)
    run = found.runs["cluster", "0", 0]
    assert [of.tolist() for of in run.curve("rollout_corr/kl")] == [[1, 2, 3], [0.1, 0.2, 0.3]]
    assert [sentence for sentence in found.missing if "run.json" not in sentence] == []


def test_a_disk_that_hangs_does_not_hold_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, real = threading.Event(), log.write_step

    def write(*step: Any) -> None:
        hangs.wait(60)
        real(*step)

    monkeypatch.setattr(log, "write_step", write)
    monkeypatch.setattr(log, "_WRITER", log._Writer())
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(log, "WAIT_S", 0.2)
    monkeypatch.setattr(log, "KEPT", 5)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        for step in range(20):
            log_step(tmp_path, CONFIG, {"step": step, "rollout_corr/kl": 0.1})
    assert time.monotonic() - begun < 5.0
    (record,) = caplog.records
    assert "its disk hangs, and 5 steps wait for it" in record.message
    hangs.set()
    deadline = time.monotonic() + 30
    while not (tmp_path / "metrics.jsonl").exists() or len(numbers(tmp_path)) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert numbers(tmp_path) == [0, 1, 2, 3, 4, 5]  # in order


def _log(folder: Path) -> None:
    log_step(folder, CONFIG, {"rollout_corr/kl": 0.1})


def test_a_forked_process_writes_with_a_thread_of_its_own(tmp_path: Path) -> None:
    _log(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_log, args=(tmp_path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and numbers(tmp_path) == [1, 2]


def test_numbers_of_a_host_are_ours_by_name_and_its_own() -> None:
    given = {
        "actor/rollout_corr/kl": np.float64(0.5),
        "actor/grad_norm": torch.tensor(2.0),
        "lengths": np.ones(3),
        "run": "a",
        "done": True,
        "none": None,
        "steps": 7,
    }
    assert log.numbers_in(given) == {"rollout_corr/kl": 0.5, "actor/grad_norm": 2.0, "steps": 7.0}
