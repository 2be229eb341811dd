"""What the options choose, the run folder, and the processes that fill it: stopped, killed, damaged and taken up."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.compare import experiments
from mismatch_plugin.compare.command import Block, blocks, choose, open_folder, run_all, run_block
from mismatch_plugin.compare.experiments import Settings, variant_config, variant_name
from mismatch_plugin.compare.loop import Runs, warm_weights
from mismatch_plugin.compare.model import FINAL_NORM, OUTPUT
from mismatch_plugin.files import lock_file
from tests.full import FULL

needs_lab = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("scipy", "matplotlib", "jinja2")),
    reason="needs [lab]",
)
SECONDS = 300
SMALL = ["hidden=16", "ffn=24", "prompts_per_batch=8", "samples_per_prompt=4"]
SMALL += ["warm_up_steps=4", "eval_every=2", "eval_prompts=16"]
FEW = ["--algorithms", "0,1", "--settings", "control", "--seeds", "1", "--workers", "1", "--steps", "80"]


def chosen(**changes: Any) -> dict[str, Any]:
    """What the defaults choose, with changes."""
    given: dict[str, Any] = {"algorithms": None, "seeds": None, "first_seed": 100, "settings": None, "given": ()}
    return choose(**{**given, "full": False, "quick": False, **changes})


def small_blocks(root: Path, **changes: Any) -> list[Block]:
    few = {"algorithms": ["PPO", "bypass"], "seeds": 2, "settings": ["int2"], "given": [*SMALL, "steps=4"]}
    return blocks(root, chosen(**{**few, **changes}))


def compare(*words: str) -> tuple[int, str]:
    """Exit status, and what is said, on one line."""
    result = CliRunner().invoke(app, ["compare", *words], env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("labels", "name", "algorithm", "level", "mode"),
    [
        ("0 disabled", "PPO", 0, "token", "truncate"),
        ("2 2:token:truncate token_is:threshold=2", "token_is", 2, "token", "truncate"),
        ("3", "pg_is", 3, "sequence", "truncate"),
        ("3:geometric", "3:geometric", 3, "geometric", "truncate"),
    ],
)
def test_labels_and_their_one_name(labels: str, name: str, algorithm: int, level: str, mode: str) -> None:
    for label in labels.split():
        config = variant_config(label)
        found = (config.algorithm, config.tis.level, config.tis.mode, config.metrics)
        assert found == (algorithm, level, mode, "full")
        assert variant_name(label) == name and variant_config(name) == config


def test_what_the_defaults_choose_and_what_options_change() -> None:
    """Six settings, twelve seeds that chose nothing; a difference of every variant can be significant."""
    assert [variant_name(label) for label in experiments.VARIANTS] == list(experiments.VARIANTS)
    (criterion,) = variant_config("geo_rs_token_tis").rs.criteria
    assert (criterion.aggregate, criterion.lower_bound, criterion.upper_bound) == ("sequence_mean", 0.8, 1.25)
    found = chosen()
    assert found["settings"] == list(experiments.SETTINGS) and found["seeds"] == list(range(100, 112))
    assert "none is among them" in found["about_seeds"]
    assert "8, 9 are among them" in chosen(seeds=4, first_seed=8)["about_seeds"]
    assert all(labels[0] == "PPO" for labels in found["plan"].values())
    assert set(found["plan"]["stale32"]) == set(found["variants"]) == set(experiments.VARIANTS)
    assert 2 / 2 ** len(found["seeds"]) * (len(experiments.VARIANTS) - 1) < 0.01  # Holm's smallest threshold
    quick = chosen(quick=True)
    assert quick["settings"] == ["control", "int2", "stale32"] and len(quick["seeds"]) == 8
    more = chosen(settings=["int2_long", "staleness=12+rollout_dtype=int4"], given=["lr=0.001"])
    own = more["about_settings"]["staleness=12+rollout_dtype=int4"]
    assert own["changes"] == {"staleness": 12, "rollout_dtype": "int4"} and more["lab"]["lr"] == 0.001
    assert own["what"].endswith("Changed for all settings: lr=0.001.")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--algorithms 5", "algorithm '5' is unknown: write PPO, bypass"),
        ("--algorithms 2,token_is", "'token_is,token_is' is empty or names one twice"),
        ("--settings int5", "settings 'int5': give each once, and choose from control, int2, stale24"),
        ("--settings staleness=-1", "staleness is -1"),
        ("--lab mini_batches=3", "mini_batches 3 must divide 8, samples_per_prompt"),
        ("--lab lr=0.001", "--lab lr: setting moe_flips has its own, 0.006"),
        ("--full --algorithms 0", "leave out what chooses them, too"),
    ],
)
@needs_lab
def test_bad_options_are_refused_before_anything_runs(tmp_path: Path, options: str, sentence: str) -> None:
    status, said = compare("--output", str(tmp_path / "run"), *options.split())
    assert status == 2 and not (tmp_path / "run").exists()
    assert sentence in said


def test_a_folder_is_never_overwritten_and_resumed_with_the_same_alone(tmp_path: Path) -> None:
    folder, first = tmp_path / "run", chosen(settings=["control", "int2"], seeds=2)
    open_folder(folder, first, resume=False)
    record = folder / "run.json"
    written = record.read_text()
    assert json.loads(written).items() >= first.items()
    lock = lock_file(folder / ".lock")
    status, told = compare("--output", str(folder), "--resume", "--settings", "control,int2", "--seeds", "2")
    assert status == 2 and "another compare is writing to" in told and lock is not None
    lock.close()
    for changes, said in (
        ({"seeds": 3}, r"holds a run with seeds \[100, 101\], now \[100, 101, 102\]: resume it with the same"),
        ({"given": ["steps=8"]}, "lab.steps 360, now 8"),
    ):
        with pytest.raises(ValueError, match=said):
            open_folder(folder, chosen(**{"settings": ["control", "int2"], "seeds": 2, **changes}), resume=True)
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        open_folder(folder, first, resume=False)
    record.write_text('{"seeds": 1, "sett')
    with pytest.raises(ValueError, match=r"run\.json is damaged: "):
        open_folder(folder, first, resume=True)
    record.rename(folder / "notes.txt")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        open_folder(folder, first, resume=True)


def metrics_of(block: Block) -> dict[str, str]:
    return {f"{run.variant}{run.seed}": (run.folder / "metrics.jsonl").read_text() for run in block}


def test_a_block_fills_the_folders_of_its_runs_and_says_which_diverged(tmp_path: Path) -> None:
    (block,), steps, warm = small_blocks(tmp_path), list[int](), tmp_path / ".warm"
    settings = block[0].settings
    broken = {name: weight[0] for name, weight in warm_weights(settings, [101], warm).items()}
    broken[FINAL_NORM] = broken[FINAL_NORM] * 1e-30
    broken[OUTPUT] = broken[OUTPUT] * 1e30  # the same logits, and a gradient whose square is more than float32 holds
    torch.save(broken, warm / settings.warm_up_key(101))
    run_block(block, warm, steps.append)
    assert sum(steps) == 4 * 4 and len({*metrics_of(block).values()}) == 4
    for run in block:
        config = json.loads((run.folder / "config.json").read_text())
        assert config["variant"] == run.variant and config["settings"] == settings.model_dump(mode="json")
        assert config["mismatch"] == run.config.model_dump(mode="json")
        done = json.loads((run.folder / "done.json").read_text())
        assert (done["status"], done["step"]) == ("finished" if run.seed == 100 else "diverged", 4) and run.finished


def test_what_is_damaged_is_made_again_with_the_same_numbers(tmp_path: Path) -> None:
    """Of two blocks one is whole: it is left alone."""
    planned = small_blocks(tmp_path, settings=["int2", "control"])
    assert run_all(planned, tmp_path / ".warm", 2) == []
    before = [metrics_of(block) for block in planned]
    kept, damaged = planned[1][0].folder / "metrics.jsonl", planned[0][1]
    written = kept.stat().st_mtime_ns
    for name, text in (("done.json", '{"step"'), ("done.json", "[]"), ("metrics.jsonl", '{"step": 4')):
        whole = (damaged.folder / name).read_text()
        (damaged.folder / name).write_text(text)
        assert not damaged.finished
        (damaged.folder / name).write_text(whole)
        assert damaged.finished
    (damaged.folder / "metrics.jsonl").unlink()
    next((tmp_path / ".warm").iterdir()).write_bytes(b"cut")
    assert run_all(planned, tmp_path / ".warm", 2) == []
    assert [metrics_of(block) for block in planned] == before and all(run.finished for run in planned[0])
    assert kept.stat().st_mtime_ns == written


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("metrics.jsonl"))


@needs_lab
def test_what_fails_is_said_then_ctrl_c_then_a_kill_then_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--output", str(folder), *FEW, *(word for field in SMALL for word in ("--lab", field))]

    def start() -> subprocess.Popen[str]:
        """In a session of its own, so that a signal reaches it and its workers and not this test; makes 10 steps."""
        process = subprocess.Popen(
            [sys.executable, "-m", "mismatch_plugin", "compare", "--resume", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        deadline = time.monotonic() + SECONDS
        while lines(folder) < 10:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.01)
        return process

    open_folder(folder, chosen(algorithms=["0", "1"], seeds=1, settings=["control"], given=[*SMALL, "steps=80"]), False)
    (folder / ".warm").touch()  # a file, in the place of the folder
    status, said = compare("--resume", *words)
    assert status == 4 and "failed: control, seeds 100 to 100: [Errno 17] File exists" in said
    (folder / ".warm").unlink()

    process = start()
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 130, said
    assert "writing a report of what is there" in said and "--resume" in said
    assert "</html>" in (folder / "report.html").read_text() and 10 <= lines(folder) < 162

    for path in folder.rglob("metrics.jsonl"):
        path.unlink()
    process = start()  # the unfinished run begins again
    process.kill()
    process.communicate(timeout=SECONDS)  # its workers end with it: they hold its output open
    assert lines(folder) < 162 and not any(folder.rglob("done.json"))

    assert compare("--resume", *words)[0] == 0
    outcomes = [json.loads(path.read_text()) for path in sorted(folder.rglob("done.json"))]
    assert [(outcome["status"], outcome["step"]) for outcome in outcomes] == [("finished", 80)] * 2
    assert lines(folder) == 162


RECORDED = {
    "int2": [0.40625, -0.36309, 0.62984],
    "control": [0.699219, 0.09113, 0.41281],
    "moe_flips": [0.563802, -0.070031, 0.44671],
}


@pytest.mark.parametrize("name", [*RECORDED] if FULL else ["int2"])
def test_numbers_are_those_of_the_recorded_comparison(name: str) -> None:
    """Of token_is with seed 101 at step 4: reward, loss, gradient norm."""
    settings = Settings.model_validate({**experiments.SETTINGS[name].changes, "steps": 4})
    runs = Runs(settings, [101], [variant_config("token_is")], warm_weights(settings, [101]))
    last = [*runs.steps()][-1][0]
    found = [last["reward"], last["loss"], last["grad_norm"]]
    assert found == pytest.approx(RECORDED[name], rel=1e-3, abs=1e-4)
