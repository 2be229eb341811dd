"""Runs of a trainer: started two at a time before the first test asks for one, or one by one."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.columns import commit_of

REUSE = os.environ.get("TRAINERS_REUSE") == "1"
_PORTS, _STARTED = threading.Lock(), [-math.inf]
AT_ONCE = int(os.environ.get("TRAINERS_AT_ONCE", "2"))


def needed(*names: str) -> None:
    """End the session in one line where a variable is not set, or names a folder that is not there."""
    for name in names:
        value = os.environ.get(name)
        if value is None or not Path(value).exists():
            told = "is not set" if value is None else f"is {value}, which is not there"
            pytest.exit(f"not run: {name} {told}; `make help` and docs/trainers.md have the command", returncode=4)


def made_from(*checkouts: Path) -> str:
    """What is kept with something that is made once, so that it is made again for other checkouts."""
    return "".join(f"{checkout} {commit_of(checkout)}\n" for checkout in checkouts)


def is_made(mark: Path, made: str) -> bool:
    return mark.exists() and mark.read_text() == made


def wait_for_ports(starts_a_server: bool) -> None:
    """Until the server that was started last has its ports: slime and miles both look for free ones from 15000 on."""
    if starts_a_server:
        with _PORTS:
            time.sleep(max(0.0, _STARTED[-1] + 90 - time.monotonic()))
            _STARTED.append(time.monotonic())


@contextmanager
def submitting(
    train: Callable[..., Any],
    sources: Any,
    folder: Path,
    ended: Callable[[list[Any], float], None],
    say: Callable[[str], None],
) -> Iterator[Callable[[str, Any], Future[Any]]]:
    """A function that starts a run, `name` a path below `folder`.

    ended: gets the runs that came to an end, and the seconds since the first was started. say: prints a line.
    """
    begun, started = time.monotonic(), list["Future[Any]"]()

    def one(name: str, job: Any) -> Any:
        say(f"{time.strftime('%H:%M:%S')} {folder / name}/log")
        return train(job, sources, folder / name, REUSE)

    with ThreadPoolExecutor(AT_ONCE) as pool:

        def submit(name: str, job: Any) -> Future[Any]:
            started.append(pool.submit(one, name, job))
            return started[-1]

        yield submit
        pool.shutdown(cancel_futures=True)
    runs = [future.result() for future in started if not future.cancelled() and not future.exception()]
    if runs:
        ended(runs, time.monotonic() - begun)


@contextmanager
def one_by_one(*arguments: Any) -> Iterator[Callable[[str, Any], Any]]:
    """As `submitting`, for a function that runs a job to its end, once a name."""
    with submitting(*arguments) as submit:
        started = dict[str, "Future[Any]"]()

        def one(name: str, job: Any) -> Any:
            if name not in started:
                started[name] = submit(name, job)
            return started[name].result()

        yield one


def shimmed(runs: list[Any]) -> list[list[str]]:
    """What the first run that says so had in place of what, and why."""
    said = next((lines for run in runs if (lines := run.said("^shimmed: "))), [])
    return [line.split(": ", 2)[1:] for line in dict.fromkeys(said)]  # more than one process may say it
