"""Runs of `verl.trainer.main_ppo` on CPU, each started once; `make test-verl-whole` makes their environment.

What the tests have shown goes to runs/trainers/verl.json when the session ends.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from make_inputs import write_inputs
from run import Run, finished, run

from tests.trainers.columns import facts

PACKAGES = ("verl", "torch", "transformers", "sglang", "ray", "TransferQueue", "tensordict", "numpy")
Start = Callable[..., Run]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def runs() -> dict[str, Run]:
    """What has run in this session, by name."""
    return {}


@pytest.fixture(scope="session")
def start(inputs: Path, runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a run by name, once. VERL_WHOLE_RUNS names a folder that keeps runs: what it holds is not started again."""
    kept = Path(os.environ.get("VERL_WHOLE_RUNS") or tmp_path_factory.mktemp("runs"))

    def by_name(name: str, *flags: str, **how: Any) -> Run:
        folder = kept / name
        if name not in runs and (folder / "result.json").exists():
            runs[name] = finished(folder)
        if name not in runs:
            runs[name] = run(folder, inputs, *flags, "--mismatch-report-dir", str(folder / "report"), **how)
        return runs[name]

    return by_name


@pytest.fixture(scope="session", autouse=True)
def _recorded(runs: dict[str, Run], record: Callable[..., None]) -> Iterator[None]:
    begun = time.monotonic()
    yield
    commits, versions = {"verl": f"{version('verl')} from PyPI"}, {name: version(name) for name in PACKAGES}
    peaks, seconds = (each.peak_gib for each in runs.values()), time.monotonic() - begun
    record(facts("verl", "make test-verl-whole", commits, versions, seconds, peaks), shimmed())


def shimmed() -> list[list[str]]:
    """SHIMMED of the shim, read without verl in this process."""
    import ast

    tree = ast.parse((Path(__file__).parent / "shim" / "verl_cpu.py").read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SHIMMED")
    return [[*pair] for pair in ast.literal_eval(value)]
