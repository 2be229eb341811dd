"""`make test-miles` runs this folder: miles's own train.py, whole, on CPU. Plain `make test` leaves it out.

MILES_SRC, MEGATRON_SRC (radixark/Megatron-LM): checkouts. MISMATCH_HOST_PYTHON: the environment of ci/slime_cpu.sh.
TRAINERS_AT_ONCE, TRAINERS_REUSE and a module's `JOBS`: as slime's, whose fixtures these are.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.columns import Shown, write_shown
from tests.trainers.miles.trainer import Job, Sources, Trained, make_inputs, train
from tests.trainers.slime.conftest import (
    _VERSIONS,
    RUNS,
    _jobs,
    pytest_configure,
    pytest_runtest_makereport,
    shows,
    trained,
)

__all__ = ["_jobs", "pytest_configure", "pytest_runtest_makereport", "shows", "trained"]
COMMAND = "make test-miles MILES_SRC=… MEGATRON_SRC=…"


@pytest.fixture(scope="session")
def sources() -> Sources:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what runs
    miles, megatron = (Path(os.environ[name]).resolve() for name in ("MILES_SRC", "MEGATRON_SRC"))
    found = Sources(miles, megatron, Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "miles/inputs")
    make_inputs(found)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, shows: Shown) -> Iterator[Callable[[str, Job], Future[Trained]]]:
    """Start a run, `name` a path below runs/trainers/miles; at the end of the session what was shown is written."""
    started = list["Future[Trained]"]()
    reuse = os.environ.get("TRAINERS_REUSE") == "1"
    with ThreadPoolExecutor(int(os.environ.get("TRAINERS_AT_ONCE", "2"))) as pool:

        def submit(name: str, job: Job) -> Future[Trained]:
            started.append(pool.submit(train, job, sources, RUNS / "miles" / name, reuse))
            return started[-1]

        yield submit
        pool.shutdown(cancel_futures=True)
    ended = [future.result() for future in started if not future.cancelled() and not future.exception()]
    first = next((run for run in ended if run.said("^shimmed: ")), None)
    if first is not None:
        # One after the other, kept ones as well; those of its script are not among them.
        facts = {**_facts(sources, first), "seconds": round(sum(run.finished.seconds for run in ended))}
        facts["peak_gib"] = round(max(run.finished.peak_gib for run in ended), 1)
        shimmed = [line.split(": ", 2)[1:] for line in first.said("^shimmed: ")]
        write_shown(RUNS / "miles.json", shows, facts, shimmed)


def _facts(sources: Sources, run: Trained) -> dict[str, Any]:
    host = re.search(r"host: miles (\S+) at (\w+)", run.text)
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_VERSIONS}}}))"
    versions = json.loads(subprocess.run([str(sources.python), "-c", code], capture_output=True, check=True).stdout)
    megatron = (sources.megatron / "megatron/core/package_info.py").read_text()
    core = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", megatron, re.MULTILINE))
    return {
        "host": "miles",
        "commit": host[2] if host else "unknown",
        "versions": {**versions, "megatron-core": core} | ({"miles": host[1]} if host else {}),
        "command": COMMAND,
    }
