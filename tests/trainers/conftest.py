"""What the tests of all whole trainers share: `shows`, and that they are started with what they need."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.trainers.columns import Shown, write_shown
from tests.trainers.run import end_runs
from tests.trainers.trained import RUNS

Record = Callable[[Mapping[str, Any], Sequence[Sequence[str]]], None]
_SHOWN = pytest.StashKey[Shown]()
WHOLE = pytest.StashKey[bool]()
"""Whether all tests of a trainer were asked for."""
_RECORD = pytest.StashKey[tuple[Mapping[str, Any], Sequence[Sequence[str]]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows(*columns): columns of the table that are not shown where the test fails")
    config.stash[_SHOWN] = Shown()
    signal.signal(signal.SIGTERM, _terminated)
    config.stash[WHOLE] = not any("::" in word or word.endswith(".py") for word in config.args)


def _terminated(*_: object) -> None:
    end_runs()
    pytest.exit("terminated", 1)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        items[0].config.stash[WHOLE] = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if not report.passed:
        for marker in item.iter_markers("shows"):
            item.config.stash[_SHOWN].failed.update(marker.args)
    return report


@pytest.fixture(scope="session")
def shows(pytestconfig: pytest.Config) -> Shown:
    return pytestconfig.stash[_SHOWN]


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Record:
    """Hand over what is known of the session next to what was shown: written when all tests of a host have run."""

    def keep(facts: Mapping[str, Any], shimmed: Sequence[Sequence[str]]) -> None:
        pytestconfig.stash[_RECORD] = (facts, shimmed)

    return keep


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Print a line now, with --capture=no: a run takes minutes."""
    reporter: Any = pytestconfig.pluginmanager.getplugin("terminalreporter")
    return lambda line: reporter.write_line(f"\n{line}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    ended, record = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), config.stash.get(_RECORD, None)
    if ended and config.stash[WHOLE] and record is not None:
        write_shown(RUNS / f"{record[0]['host']}.json", config.stash[_SHOWN], *record)
