"""A trainer as a whole: a `Job` is one of its command lines, `Host.train` runs it, a `Trained` is what it left."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.trainers.run import Finished, run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
RUNS = ROOT / "runs/trainers"
CPU_SHIM = ROOT / "examples/megatron_core"  # holds cpu_shim.py; last on PYTHONPATH, since hosts have a train.py, too
SETTINGS = HERE / "settings.yaml"
LAUNCHER = ("-m", "mismatch_plugin.launch")
REUSE = os.environ.get("TRAINERS_REUSE") == "1"
AT_ONCE = int(os.environ.get("TRAINERS_AT_ONCE", "2"))
LOOPBACK = "127.0.0.1,localhost"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # slime compiles its policy loss: 17 s in the first step
    "GLOO_SOCKET_IFNAME": "lo",
    "SGLANG_USE_CPU_ENGINE": "1",
    "no_proxy": LOOPBACK,
    "NO_PROXY": LOOPBACK,
    # ray.init() of a trainer then starts a cluster for this run, and ends it.
    "RAY_ADDRESS": "local",
    "RAY_NODE_IP": "127.0.0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then keeps to 127.0.0.1
}
"""Of every trainer's processes."""


def ray_resources(gpus: int) -> str:
    """GPUs that are numbers only."""
    return json.dumps({"CPU": 8, "GPU": gpus, "object_store_memory": 200000000})


def largest(values: Iterable[float]) -> float:
    """The largest of differences, none of which may be NaN or infinite: `max` passes over a NaN."""
    found = [*values]
    assert found and all(math.isfinite(value) for value in found), found
    return max(found)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of a file in JSON lines, as our report folder has one."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Trained:
    """A run's end, its log and the files below `folder`."""

    job: Any
    folder: Path
    finished: Finished
    EVENTS: ClassVar[str] = "tensorboard"
    """Where the trainer puts TensorBoard's files."""

    @property
    def text(self) -> str:
        return self.finished.text

    @property
    def reported(self) -> list[dict[str, Any]]:
        """The steps in our report folder."""
        return lines_of(self.folder / "report/metrics.jsonl")

    @cached_property
    def tracked(self) -> dict[str, dict[int, float]]:
        """All that reached TensorBoard's files: name → step → value."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        found: dict[str, dict[int, float]] = {}
        for file in sorted((self.folder / self.EVENTS).rglob("*tfevents*")):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
                    found.setdefault(value.tag, {})[event.step] = number
        return found

    def said(self, pattern: str) -> list[str]:
        """The log's lines that match."""
        return [line for line in self.text.splitlines() if re.search(pattern, line)]


@dataclass(frozen=True)
class Sources:
    """An environment's Python, the checkouts of the trainer and of Megatron-LM, and the folder of made inputs."""

    python: Path
    checkout: Path
    inputs: Path
    megatron: Path = Path()


@dataclass(frozen=True)
class Job:
    """One run of a trainer.

    flags: the end of its command line, `{run}` in them is the run's folder. launch: through our launcher. env: more
    variables of every process. limit: seconds, many times what it takes, since other work may share the cores.
    """

    flags: Sequence[str] = ()
    launch: bool = True
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    limit: float = 1800
    RESULT: ClassVar[type[Trained]] = Trained

    @property
    def launcher(self) -> tuple[str, ...]:
        return LAUNCHER if self.launch else ()

    @property
    def starts_a_server(self) -> bool:
        return False

    def placed_flags(self, folder: Path) -> list[str]:
        return [flag.replace("{run}", str(folder)) for flag in self.flags]

    def command(self, sources: Sources, folder: Path) -> list[str]:
        """The command line after the interpreter."""
        raise NotImplementedError

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        """Of every process. ray: a short path, since Ray puts sockets below it."""
        raise NotImplementedError

    def prepare(self, folder: Path) -> None:
        """Write what the run reads, into its folder."""

    def cwd(self, sources: Sources, folder: Path) -> Path:
        return sources.checkout


@dataclass(frozen=True)
class Host:
    """A trainer under test. name: of its folder here. at_once: runs."""

    name: str
    sources: Sources
    at_once: int = AT_ONCE

    def train(self, job: Job, name: str) -> Any:
        """Run a job to its end, in a folder that is emptied before; under TRAINERS_REUSE=1 take what is there."""
        folder = RUNS / self.name / name
        ended = folder / "ended.json"
        if REUSE and ended.exists():
            record = json.loads(ended.read_text())
            if record.pop("job") == repr(job):
                return job.RESULT(job, folder, Finished(log=folder / "log", **record))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        job.prepare(folder)
        command = [str(self.sources.python), *job.command(self.sources, folder)]
        if job.starts_a_server:
            _wait_for_ports()
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray:
            env = {**job.environment(self.sources, folder, Path(ray)), **job.env}
            finished = run(command, folder / "log", limit=job.limit, env=env, cwd=job.cwd(self.sources, folder))
        record = {"status": finished.status, "seconds": finished.seconds}
        ended.write_text(json.dumps({"job": repr(job), **record}))
        return job.RESULT(job, folder, finished)


Start = Callable[[str, Job], "Future[Any]"]
Runs = Callable[[str], Any]
Record = Callable[[str, float], None]
"""pytest's `record_property`: a column of the table in docs/trainers.md and its number, in --junit-xml."""
_PORTS, _STARTED = threading.Lock(), [-math.inf]


def _wait_for_ports() -> None:
    """Until the server that was started last has its ports: slime and miles both look for free ones from 15000 on."""
    with _PORTS:
        time.sleep(max(0.0, _STARTED[-1] + 90 - time.monotonic()))
        _STARTED.append(time.monotonic())


def needed(*names: str) -> list[Path]:
    """The folders and files that variables name; ends the session in one line where one is not set or not there."""
    for name in names:
        value = os.environ.get(name)
        if value is None or not Path(value).exists():
            told = "is not set" if value is None else f"is {value}, which is not there"
            pytest.exit(f"not run: {name} {told}; `make help` and docs/trainers.md have the command", returncode=4)
    # Not resolved: a virtual environment is found by its own link to Python.
    return [Path(os.environ[name]).absolute() for name in names]


def commit_of(checkout: Path) -> str:
    """Its commit, with a + where files were changed; "no git" for a copy without."""
    if not (checkout / ".git").exists():
        return "no git"
    told = [["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
    head, changed = (
        subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=True).stdout
        for words in told
    )
    return head.strip() + ("+" if changed.strip() else "")


def made_once(folder: Path, checkouts: Sequence[Path], make: Callable[[], object]) -> None:
    """Make something in a folder, which is emptied before, unless it was made from these very checkouts."""
    made = "".join(f"{checkout} {commit_of(checkout)}\n" for checkout in checkouts)
    mark = folder / "made"
    if not mark.exists() or mark.read_text() != made:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make()
        mark.write_text(made)
