"""`make test-megatron-rl` runs this folder: Megatron-LM's own train_rl.py, whole, on CPU. `make test` leaves it out.

MEGATRON_SRC: a checkout. MISMATCH_HOST_PYTHON: the environment. TRAINERS_REUSE=1: take a run that is there already,
of the same command line, for work on the tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.patching import apply, patches_of
from tests.trainers.columns import Shown, write_shown
from tests.trainers.megatron_rl.trainer import HERE, ROOT, Job, Sources, Trained, train

RUNS = ROOT / "runs/trainers"
BIAS = {"MEGATRON_ENGINE_BIAS": "0.5"}
_VERSIONS = ("torch", "transformers", "numpy")
_SHOWN = pytest.StashKey[Shown]()
Start = Callable[[str, Job], Trained]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows(*columns): columns of the table that are not shown where the test fails")
    config.stash[_SHOWN] = Shown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed:
        for marker in item.iter_markers("shows"):
            item.config.stash[_SHOWN].failed.update(marker.args)
    return report


@pytest.fixture(scope="session")
def shows(pytestconfig: pytest.Config) -> Shown:
    return pytestconfig.stash[_SHOWN]


@pytest.fixture(scope="session")
def sources() -> Sources:
    """With a tokenizer, and what one run of the checkout makes: a checkpoint to start from, and rollouts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what runs
    megatron = Path(os.environ["MEGATRON_SRC"]).resolve()
    python, runs = Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "megatron_rl"
    found = Sources(megatron, python, runs / "inputs", runs / "patched")
    if not (found.inputs / "made").exists():
        found.inputs.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(python), str(HERE / "inputs.py"), str(found.inputs)], check=True)
        recorded = found.inputs / "rollouts.jsonl"
        recorded.unlink(missing_ok=True)
        save = ("--lr", "0", "--save", str(found.inputs / "checkpoint"), "--save-interval", "100")
        env = {**BIAS, "MEGATRON_ROLLOUTS_TO": str(recorded)}
        made = train(Job(save, launch=False, patched=False, rollouts=None, start=False, env=env), found, found.inputs)
        assert made.finished.status == 0, made.text[-3000:]
        (found.inputs / "made").touch()
    if not found.patched.exists():
        subprocess.run(["git", "clone", "-q", "--shared", str(megatron), str(found.patched)], check=True)
        apply(patches_of("megatron-lm"), found.patched)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, shows: Shown) -> Iterator[Start]:
    """Run a job to its end, `name` a folder below runs/trainers/megatron_rl; what was shown is written at the end."""
    begun, ended = time.monotonic(), dict[str, Trained]()

    def one(name: str, job: Job) -> Trained:
        if name not in ended:
            ended[name] = train(job, sources, RUNS / "megatron_rl" / name, os.environ.get("TRAINERS_REUSE") == "1")
        return ended[name]

    yield one
    first = next((run for run in ended.values() if run.said("^shimmed: ")), None)
    if first is not None:
        facts = {**_facts(sources, first), "seconds": round(time.monotonic() - begun)}
        facts["peak_gib"] = round(max(run.finished.peak_gib for run in ended.values()), 1)
        shimmed = [line.split(": ", 2)[1:] for line in first.said("^shimmed: ")]
        write_shown(RUNS / "megatron_rl.json", shows, facts, shimmed)


def _facts(sources: Sources, run: Trained) -> dict[str, Any]:
    host = re.search(r"host: megatron-lm (\S+) at (\w+)", run.text)
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_VERSIONS}}}))"
    versions = json.loads(subprocess.run([str(sources.python), "-c", code], capture_output=True, check=True).stdout)
    return {
        "host": "megatron-lm",
        "commit": host[2] if host else "unknown",
        "versions": {**versions} | ({"megatron-core": host[1]} if host else {}),
        "command": "make test-megatron-rl MEGATRON_SRC=…",
    }
