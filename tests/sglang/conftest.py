"""Real SGLang servers on CPU, each started once for all tests that can share it.

`make test-sglang` runs this folder; plain `make test` leaves it out (`norecursedirs` in pyproject.toml), since it needs
the environment that ci/sglang_cpu.sh makes. Without one these tests fail and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ci.sglang_cpu.tiny_model import write_tiny_model
from examples import sglang_server as server_module
from examples.megatron_core.train import SERVER_ARGUMENTS, write_checkpoint
from examples.sglang_server import CpuServer, ServerDtype, start_cpu_server

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
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, "llama", seed=0)
    return folder


@contextmanager
def start_tiny(
    folder: Path, name: str, *arguments: str, set: Mapping[str, str] | None = None, **options: Any
) -> Iterator[CpuServer]:
    """Float32 and, unlike what `start_cpu_server` starts by default, with a radix cache. set: environment variables."""
    defaults = tuple(word for word in server_module._ARGUMENTS if word != "--disable-radix-cache")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_module, "_ARGUMENTS", defaults)
            for variable, value in (set or {}).items():
                patch.setitem(server_module._ENVIRONMENT, variable, value)
            options = {"timeout": 900.0, "log": folder / f"{name}.log", **options}
            starting = start_cpu_server(folder, arguments=arguments, **options)
            server = stack.enter_context(starting)
        yield server


@pytest.fixture(scope="session")
def one(tiny_folder: Path) -> Iterator[CpuServer]:
    """With the plugin, as `two`."""
    with start_tiny(tiny_folder, "one") as server:
        yield server


@pytest.fixture(scope="session")
def two(tiny_folder: Path) -> Iterator[CpuServer]:
    with start_tiny(tiny_folder, "two") as server:
        yield server


@pytest.fixture(scope="session")
def bare(tiny_folder: Path) -> Iterator[CpuServer]:
    """With the plugin turned off."""
    with start_tiny(tiny_folder, "bare", set={"MISMATCH_PLUGIN_SGLANG": "off"}) as server:
        yield server


@pytest.fixture(scope="session")
def tp2(tiny_folder: Path) -> Iterator[CpuServer]:
    """Two tensor-parallel ranks with the plugin."""
    with start_tiny(tiny_folder, "tp2", "--tp-size", "2", set={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as server:
        yield server


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
