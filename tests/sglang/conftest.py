"""Two real SGLang servers on CPU with the model of examples/megatron_core, in float32 and in bfloat16, for all tests.

`make test-sglang` runs this folder; plain `make test` leaves it out (`norecursedirs` in pyproject.toml), since it needs
the environment that ci/sglang_cpu.sh makes. Without one these tests fail and say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples.megatron_core.train import SERVER_ARGUMENTS, write_checkpoint
from examples.sglang_server import CpuServer, ServerDtype, start_cpu_server
from tests.sglang.world import World, make_world

DTYPES: tuple[ServerDtype, ...] = ("float32", "bfloat16")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model, which may go on for longer than the example needs."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, context=1024)
    return folder


@pytest.fixture(scope="session")
def servers(checkpoint: Path) -> Iterator[dict[ServerDtype, CpuServer]]:
    with ExitStack() as stack, ThreadPoolExecutor(len(DTYPES)) as pool:

        def start(dtype: ServerDtype) -> CpuServer:
            return stack.enter_context(start_cpu_server(checkpoint, dtype=dtype, arguments=SERVER_ARGUMENTS))

        yield dict(zip(DTYPES, pool.map(start, DTYPES), strict=True))


@pytest.fixture(scope="session")
def float32_server(servers: dict[ServerDtype, CpuServer]) -> CpuServer:
    return servers["float32"]


@pytest.fixture(scope="session")
def bfloat16_server(servers: dict[ServerDtype, CpuServer]) -> CpuServer:
    return servers["bfloat16"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the cases and, under `checkpoints`, of their weights."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="session")
def world(folder: Path) -> Iterator[World]:
    """Two servers more, in bfloat16, with a model that was trained on text."""
    with ExitStack() as stack:
        yield make_world(folder / "checkpoints", stack)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failed test shows what its servers printed last."""
    report = yield
    if report.failed:
        values: dict[str, Any] = getattr(item, "funcargs", {})
        shown = {name: value for name, value in values.items() if isinstance(value, CpuServer)}
        # A server that has ended took its log along, unless it was told where to write it.
        report.sections += [
            (f"log of {name}", server.log_tail()) for name, server in shown.items() if server.log.exists()
        ]
    return report
