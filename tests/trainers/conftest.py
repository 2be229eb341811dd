"""What the tests of all whole trainers share. `make test` leaves them out; make test-HOST runs one folder.

MISMATCH_HOST_PYTHON: the environment. TRAINERS_AT_ONCE: runs at once (2); one of a single rank keeps about one core
busy. TRAINERS_REUSE=1: take a run that is there already, of the same job, for work on the tests.

A host's trainer.py has `make_host`. A module's `JOBS` are all started before the first test, two at a time; a test asks
for one by name: `trained("name")`. Where only some tests were chosen (-k, a file, ::), it starts when one asks for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest

from tests.trainers.run import end_runs
from tests.trainers.whole import RUNS, Host, Job, Runs, Sources, Start, Trained

_WHOLE = pytest.StashKey[bool]()
"""Whether all tests of a trainer were asked for."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_WHOLE] = not any("::" in word or word.endswith(".py") for word in config.args)
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(*_: object) -> None:
    end_runs()
    pytest.exit("terminated", 1)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        items[0].config.stash[_WHOLE] = False


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest) -> Host:
    """The trainer in whose folder the tests are, with its inputs made."""
    (folder,) = {item.path.parent.name for item in request.session.items}
    return import_module(f"tests.trainers.{folder}.trainer").make_host()


@pytest.fixture(scope="session")
def sources(host: Host) -> Sources:
    return host.sources


@pytest.fixture(scope="session")
def start(host: Host, pytestconfig: pytest.Config) -> Iterator[Start]:
    """Start a job, `name` a path below runs/trainers/HOST. The lines that say so need --capture=no."""
    reporter: Any = pytestconfig.pluginmanager.getplugin("terminalreporter")

    def say(line: str) -> None:
        reporter.write_line(f"\n{time.strftime('%H:%M:%S')} {line}")

    def train(job: Job, name: str) -> Trained:
        say(f"{RUNS / host.name / name}/log")
        run = host.train(job, name)
        say(f"{name}: {run.finished.status} after {run.finished.seconds / 60:.1f} min")
        return run

    with ThreadPoolExecutor(host.at_once) as pool:
        yield lambda name, job: pool.submit(train, job, name)
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def _started(request: pytest.FixtureRequest, start: Start) -> Callable[[str], Future[Trained]]:
    modules = dict.fromkeys(getattr(item, "module", None) for item in request.session.items)
    jobs = {f"{_short(module)}/{name}": job for module in modules for name, job in getattr(module, "JOBS", {}).items()}
    started = dict[str, "Future[Trained]"]()

    def one(name: str) -> Future[Trained]:
        if name not in started:
            started[name] = start(name, jobs[name])
        return started[name]

    for name in jobs if request.config.stash[_WHOLE] else ():
        one(name)
    return one


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, _started: Callable[[str], Future[Trained]]) -> Runs:
    """The end of the module's job of that name."""
    return lambda name: _started(f"{_short(request.module)}/{name}").result()


def _short(module: Any) -> str:
    return module.__name__.rpartition(".")[2].removeprefix("test_")
