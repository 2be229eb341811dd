"""One line at the end says which tests were not run, and how to run them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Machines differ, and a test that shares its cores with others is slow now and then.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

# What a reason for skipping holds → what to do to run those tests. Each reason in the suite matches exactly one.
HOW = {
    "full suite": "make test-all",
    "host source absent": "set MISMATCH_HOST_SRC to a folder with the checkouts of docs/hosts.md",
    "verl": "make test-verl",
    r"TRL|SkyRL|prime-rl": "make test-trl, test-skyrl, test-prime-rl",
    r"ray is|hydra": "pip install ray hydra-core",
    "not unpacked": "make test",
    r"Python 3\.10": "with Python 3.11 or later",
    "a GPU": "on a machine with (here: without) a GPU",
    r"megatron-core|matplotlib|jinja2|tensorboard|TensorBoard|\[io\]|\[lab\]|pyarrow|lab": "pip install '.[io,lab]'",
    r"Linux|Triton": "on Linux, with the Triton that torch asks for",
}


TESTS = Path(__file__).parent
# Files start in this order, then all others: begun last, a long one would run while the other process is idle.
LONGEST = (
    "log_probs/test_log_prob_triton.py",
    "parallel/test_step.py",
    "hooks/megatron_core/test_layouts.py",
    "diagnose/detectors/test_planted.py",
    "compare/test_command.py",
    "hooks/slime/test_launch.py",
    "launch/test_guard.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Called by pytest; `--no-loadscope-reorder` makes xdist keep this order."""
    rank = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def how_to_run(reason: str) -> str:
    """What to do for a test that was skipped for this reason. Raises ValueError where nobody has said it."""
    for pattern, how in HOW.items():
        if re.search(pattern, reason):
            return how
    raise ValueError(f"skip reason {reason!r} is not in tests/conftest.py: say there how such a test is run.")


def not_run(reasons: Iterable[str]) -> str:
    """The line: how many tests were skipped, and for each cause how many and how to run them."""
    counts = Counter(how_to_run(reason) for reason in reasons)
    causes = "; ".join(f"{count}: {how}" for how, count in counts.most_common())
    return f"not run: {counts.total()} ({causes})" if counts else "not run: none"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Called by pytest, in the process that reports."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(not_run(report.longrepr[2].removeprefix("Skipped: ") for report in skipped))
