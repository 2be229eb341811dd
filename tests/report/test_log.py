"""What a run writes: steps that are numbered, appended and readable, by one run at a time, on any disk."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.report import log
from mismatch_plugin.report.log import log_step, read_steps, validate_same_settings, write_step

CONFIG = mp.MismatchConfig()
STEP = {"rollout_corr/kl": 0.1}


def numbers(folder: Path) -> list[float]:
    return [step["step"] for step in read_steps(folder)]


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ("", 1),
        ('{"step": 4}\n{"step": 5, "metrics": {"a": 1}', 5),  # a kill cut the last line
        ('{"step": 4}\n\n  \n', 5),
        ('{"a": 1}\n{"a": 2}\n{"a": {"b": 1}', 3),  # of a version that wrote none
    ],
)
def test_numbers_go_on_after_what_is_in_the_file(tmp_path: Path, before: str, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(before)
    write_step(tmp_path, CONFIG, STEP)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == step and [*last] == ["step", "rollout_corr/kl"]


def test_steps_come_back_as_written_and_those_of_other_settings_are_refused(tmp_path: Path) -> None:
    step = {"rollout_corr/kl": math.nan, "rollout_corr/chi2_seq": math.inf, "rollout_corr/k3_kl": 0.1}
    folder = tmp_path / "deep" / "run"
    write_step(folder, CONFIG, step)
    (found,) = read_steps(folder)
    assert math.isnan(found.pop("rollout_corr/kl"))
    assert found == {"step": 1, "rollout_corr/chi2_seq": math.inf, "rollout_corr/k3_kl": 0.1}
    for call in (write_step, lambda *given: validate_same_settings(*given[:2])):
        with pytest.raises(ValueError, match=r"run holds .* with .*: .* folder"):
            call(folder, mp.preset("seq_is"), step)
    assert mp.MismatchConfig.from_file(folder / "settings.json") == CONFIG
    write_step(folder, CONFIG.model_copy(update={"report_dir": "elsewhere"}), {"step": 7, **step})  # the same one
    write_step(folder, CONFIG, step)
    assert numbers(folder) == [1, 7, 8]
    with pytest.raises(ValueError, match=r"not a number: .*Tensor.* Give float\(value\)"):
        write_step(folder, CONFIG, {**STEP, "loss": torch.tensor(1.0)})  # type: ignore[dict-item]
    assert numbers(folder) == [1, 7, 8]  # nothing of the refused step is there
    with pytest.raises(ValueError, match="is not there"):
        numbers(tmp_path / "other.jsonl")


@pytest.mark.parametrize("line", ['"step": 5}', "[1]"])
def test_a_line_that_a_kill_cut_is_left_out_and_one_that_is_no_step_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "state": {"a": 1}\n{"step": 3, "x\n{"step": 4}\n')
    assert numbers(tmp_path) == [1, 4]
    path.write_text('{"step": 1}\n' + line + '\n{"step": 6}\n')
    with pytest.raises(ValueError, match="line 2 is no step"):
        numbers(tmp_path)


_RUN = """
import sys
import mismatch_plugin as mp
from mismatch_plugin.report.log import log_step, validate_same_settings
config, folder = mp.MismatchConfig(), sys.argv[1]
validate_same_settings(folder, config, holds=True)
log_step(folder, config, {"rollout_corr/kl": 0.1})
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="on Linux")
def test_a_folder_has_one_live_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "same").symlink_to(folder)
    first = subprocess.Popen([sys.executable, "-c", _RUN, str(folder)], stdin=-1, stdout=-1, text=True)
    assert first.stdout is not None and first.stdout.readline() == "begun\n"
    for second in (folder, tmp_path / "same"):
        with pytest.raises(ValueError, match=f"another run is writing to {folder}: give this run another folder"):
            validate_same_settings(second, CONFIG)
        with pytest.raises(ValueError, match="another run is writing"):
            write_step(second, CONFIG, STEP)
    write_step(tmp_path / "other", CONFIG, STEP)
    first.kill()
    first.wait()
    validate_same_settings(folder, CONFIG, holds=True)  # the run goes on in this process
    write_step(folder, CONFIG, STEP)
    assert numbers(folder)[-1] == 2


def test_a_hook_warns_once_and_goes_on_where_metrics_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    write_step(tmp_path / "seq", mp.preset("seq_is"), STEP)
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        for _ in range(3):
            log_step(tmp_path / "file", CONFIG, STEP)
            log_step(tmp_path / "seq", CONFIG, STEP)  # the folder of another run
    assert len(caplog.records) == 2 and f"training goes on (said once for {tmp_path}" in caplog.records[0].message
    with pytest.raises(OSError, match="file"):  # a loop of one's own is told at once
        write_step(tmp_path / "file", CONFIG, STEP)
    (tmp_path / "file").unlink()
    log_step(tmp_path / "file", CONFIG, STEP)  # it is tried again at every step
    assert numbers(tmp_path / "file") == [1]


def test_a_disk_that_hangs_does_not_hold_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, written, real = threading.Event(), threading.Event(), log.write_step

    def write(folder: Path, config: mp.MismatchConfig, step: Any) -> None:
        hangs.wait()
        real(folder, config, step)
        if step["step"] == 9:
            written.set()

    for name, value in {"write_step": write, "_WRITER": log._Writer(), "WAIT_S": 0.1}.items():
        monkeypatch.setattr(log, name, value)
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        for step in range(10):
            log_step(tmp_path, CONFIG, {"step": step, **STEP})
    (record,) = caplog.records
    assert "its disk hangs; steps wait until it answers" in record.message
    hangs.set()
    assert written.wait(60) and numbers(tmp_path) == [*range(10)]  # in order


def _log(folder: Path) -> None:
    log_step(folder, CONFIG, STEP)


def test_a_forked_process_writes_with_a_thread_of_its_own(tmp_path: Path) -> None:
    _log(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_log, args=(tmp_path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and numbers(tmp_path) == [1, 2]


def test_numbers_of_a_host_are_ours_by_name_and_its_own() -> None:
    given = {"actor/rollout_corr/kl": np.float64(0.5), "actor/grad_norm": torch.tensor(2.0), "lengths": np.ones(3)}
    given |= {"run": "a", "done": True, "none": None, "steps": 7}
    assert log.numbers_in(given) == {"rollout_corr/kl": 0.5, "actor/grad_norm": 2.0, "steps": 7.0}
