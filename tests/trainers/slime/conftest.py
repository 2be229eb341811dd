"""`make test-slime` runs this folder: slime's own train.py, whole, on CPU. Plain `make test` leaves it out.

SLIME_SRC, MEGATRON_SRC: checkouts. MISMATCH_HOST_PYTHON: the environment of ci/slime_cpu.sh. TRAINERS_AT_ONCE: runs at
once (2); one of a single rank keeps about one core busy. TRAINERS_REUSE=1: take a run that is there already, of the
same command line, for work on the tests.

A module's `JOBS` are all started before the first test; a test asks for one by name: `trained("name")`.
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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.columns import Shown, write_shown
from tests.trainers.slime.trainer import ROOT, Job, Sources, Trained, make_inputs, patched_megatron, train

RUNS = ROOT / "runs/trainers"
COMMAND = "make test-slime SLIME_SRC=… MEGATRON_SRC=…"
_VERSIONS = ("torch", "transformers", "ray", "sglang", "sglang-router", "numpy")
_SHOWN = pytest.StashKey[Shown]()
Start = Callable[[str, Job], "Future[Trained]"]


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what runs
    slime = Path(os.environ["SLIME_SRC"]).resolve()
    megatron = patched_megatron(Path(os.environ["MEGATRON_SRC"]).resolve(), slime, RUNS / "slime/megatron")
    found = Sources(slime, megatron, Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "slime/inputs")
    make_inputs(found)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, shows: Shown) -> Iterator[Start]:
    """Start a run, `name` a path below runs/trainers/slime; at the end of the session what was shown is written."""
    begun, started = time.monotonic(), list["Future[Trained]"]()
    reuse = os.environ.get("TRAINERS_REUSE") == "1"
    with ThreadPoolExecutor(int(os.environ.get("TRAINERS_AT_ONCE", "2"))) as pool:

        def submit(name: str, job: Job) -> Future[Trained]:
            started.append(pool.submit(train, job, sources, RUNS / "slime" / name, reuse))
            return started[-1]

        yield submit
        pool.shutdown(cancel_futures=True)
    ended = [
        future.result() for future in started if future.done() and not future.cancelled() and not future.exception()
    ]
    first = next((run for run in ended if run.said("^shimmed: ")), None)
    if first is not None:
        facts = {**_facts(sources, first), "seconds": round(time.monotonic() - begun)}
        facts["peak_gib"] = round(max(run.finished.peak_gib for run in ended), 1)
        shimmed = [line.split(": ", 2)[1:] for line in first.said("^shimmed: ")]
        write_shown(RUNS / "slime.json", shows, facts, shimmed)


@pytest.fixture(scope="session")
def _jobs(request: pytest.FixtureRequest, start: Start) -> dict[str, Future[Trained]]:
    modules = dict.fromkeys(getattr(item, "module", None) for item in request.session.items)
    jobs = {f"{_short(module)}/{name}": job for module in modules for name, job in getattr(module, "JOBS", {}).items()}
    return {name: start(name, job) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, _jobs: dict[str, Future[Trained]]) -> Callable[[str], Trained]:
    """The end of the module's job of that name."""
    return lambda name: _jobs[f"{_short(request.module)}/{name}"].result()


def _short(module: Any) -> str:
    return module.__name__.rpartition(".")[2].removeprefix("test_")


def _facts(sources: Sources, run: Trained) -> dict[str, Any]:
    host = re.search(r"host: slime (\S+) at (\w+)", run.text)
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_VERSIONS}}}))"
    versions = json.loads(subprocess.run([str(sources.python), "-c", code], capture_output=True, check=True).stdout)
    megatron = (sources.megatron / "megatron/core/package_info.py").read_text()
    core = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", megatron, re.MULTILINE))
    return {
        "host": "slime",
        "commit": host[2] if host else "unknown",
        "versions": {**versions, "megatron-core": core} | ({"slime": host[1]} if host else {}),
        "command": COMMAND,
    }
