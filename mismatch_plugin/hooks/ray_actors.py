"""Whether the package can be imported where the training processes will run: on every node of the Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def check_actors() -> None:
    """Import the package in a task on every node, with the job's runtime environment.

    Ray is started as the host would start it on first use; where it is not installed nothing is checked.
    Raises: ValueError naming the nodes where it cannot be imported, or where its version differs.
    """
    try:
        ray = import_module("ray")
    except ImportError:
        return
    from mismatch_plugin import __version__

    if not ray.is_initialized():
        ray.init()
    strategy = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    task = ray.remote(num_cpus=0)(_probe())
    answers = {
        node["NodeManagerAddress"]: task.options(scheduling_strategy=strategy(node["NodeID"], soft=False)).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    found = {address: ray.get(answer) for address, answer in sorted(answers.items())}
    missing = [f"{address} ({reason})" for address, (version, reason) in found.items() if version is None]
    if missing:
        raise ValueError(
            f"mismatch_plugin cannot be imported in Ray's processes on {', '.join(missing)}: pip install it in the "
            f"image of every node, or add its folder to PYTHONPATH under env_vars in --runtime-env-json."
        )
    other = [f"{address} has {version}" for address, (version, _) in found.items() if version != __version__]
    if other:
        raise ValueError(
            f"mismatch_plugin is {__version__} here, but {', '.join(other)}: install one version on every node."
        )


def _probe() -> Callable[[], Any]:
    """A function that Ray sends by value: one of this module could not be loaded where the package is missing."""

    def probe() -> tuple[str | None, str]:
        import importlib

        try:
            return importlib.import_module("mismatch_plugin").__version__, ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    return probe
