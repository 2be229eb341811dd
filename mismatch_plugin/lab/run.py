"""One run of the lab into a folder: `run_one`, and `python -m mismatch_plugin.lab.run`, alone or under torchrun.

A folder holds `config.json` (what ran), `metrics.jsonl` (one line for the evaluation before the first optimizer step,
then one a step, see `trainer.train`) and, once the run ended, `done.json`. Importing this imports no megatron-core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_origin

import mismatch_plugin
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.files import read_json_object, write_whole
from mismatch_plugin.lab.engines import RolloutEngine
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import get_task
from mismatch_plugin.report.log import to_json

CONFIG, METRICS, DONE = "config.json", "metrics.jsonl", "done.json"
_PACKAGES = ("torch", "megatron-core", "transformers")


def run_one(
    settings: LabSettings,
    variant_config: MismatchConfig,
    folder: str | Path,
    *,
    warm_up_cache: str | Path | None = None,
    server_url: str | None = None,
) -> dict[str, Any]:
    """Warm up, train, and leave everything in `folder`. Returns what `done.json` holds.

    A finished run with the same settings is left as it is; an unfinished or different one starts again.
    warm_up_cache: folder of warm weights, shared by all runs of a seed; None: `warm` next to `folder`.
    server_url: of the SGLang server to roll out with, where the settings name that engine. One run at a time.
    `done.json`: status (finished, or diverged if the gradient stopped being finite), steps, seconds, and the last
    evaluation. Collective under torchrun: rank 0 reads and writes the files.
    """
    from mismatch_plugin.lab import model as lab
    from mismatch_plugin.lab.policy import broadcast
    from mismatch_plugin.lab.trainer import is_first_rank, train, warm_up

    if (settings.engine == "sglang") != (server_url is not None):
        raise ValueError(f"the engine is {settings.engine} and server_url {server_url}: give both of one kind.")
    folder = Path(folder)
    cache = folder.parent / "warm" if warm_up_cache is None else Path(warm_up_cache)
    lab.initialize_parallel(settings.tp, settings.pp, settings.cp)
    first = is_first_rank()
    description = describe_run(settings, variant_config, lab.dist.get_world_size())
    if (outcome := broadcast(_finished(folder, description) if first else None)) is not None:
        return outcome

    start = time.perf_counter()
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DONE).unlink(missing_ok=True)
        write_description(folder, description)
    weights = warm_up(settings, cache)
    warm_seconds = time.perf_counter() - start
    last: dict[str, Any] = {}
    with (
        (folder / METRICS if first else Path(os.devnull)).open("w") as lines,
        server_engine(settings, server_url if first else None) as engine,
    ):

        def on_step(record: dict[str, Any]) -> None:
            last.update({name: value for name, value in record.items() if name == "step" or "held_out" in name})
            lines.write(to_json(record) + "\n")
            lines.flush()

        finished = train(settings, variant_config, weights, on_step, engine=engine)
    seconds = {"warm_up": warm_seconds, "total": time.perf_counter() - start}
    outcome = {"status": "finished" if finished else "diverged", "seconds": seconds, **last}
    if first:
        write_whole(folder / DONE, to_json(outcome, indent=2) + "\n")
    return broadcast(outcome)


def server_engine(settings: LabSettings, url: str | None) -> AbstractContextManager[RolloutEngine | None]:
    """The engine behind `url`; without one nothing, so that `train` makes its own."""
    if url is None:
        return nullcontext()
    from mismatch_plugin.lab.sglang_engine import SGLangEngine

    task = get_task(settings.task)
    if task.eos is None:
        raise ValueError(f"task {task.name} has no end token, by which a server stops: choose another.")
    return SGLangEngine(url, eos=task.eos, vocab=task.vocab, dtype=settings.rollout_dtype)


def _finished(folder: Path, description: dict[str, Any]) -> dict[str, Any] | None:
    """What `done.json` says, if it is there and belongs to these settings.

    Raises ValueError where a file is damaged: a run that may have finished is not thrown away.
    """
    if not (folder / DONE).exists() or not (folder / CONFIG).exists():
        return None
    try:
        before = read_json_object(folder / CONFIG)
        same = json.loads(to_json(description)) == {name: before.get(name) for name in description}
        return read_json_object(folder / DONE) if same else None
    except ValueError as error:
        raise ValueError(f"{error} Delete {DONE} to run it again.") from None


def describe_run(settings: LabSettings, config: MismatchConfig, world_size: int = 1) -> dict[str, Any]:
    """What tells a run from others."""
    parts = {"settings": settings.model_dump(mode="json"), "mismatch": config.model_dump(mode="json")}
    return {**parts, "world_size": world_size}


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """`config.json`: it, and the versions of what the run's numbers depend on."""
    write_whole(folder / CONFIG, to_json({**description, "versions": _versions()}, indent=2) + "\n")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mismatch-plugin": mismatch_plugin.__version__}
    return {**found, **{name: metadata.version(name) for name in _PACKAGES}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mismatch_plugin.lab.run", description=_DESCRIPTION)
    parser.add_argument("--folder", type=Path, required=True, help="where the run's files go")
    parser.add_argument("--warm-up-cache", type=Path, help="folder of warm weights (default: warm, next to the folder)")
    parser.add_argument("--server-url", help="of the SGLang server, with --engine sglang")
    group = parser.add_argument_group("lab")
    for name, field in LabSettings.model_fields.items():
        options: dict[str, Any] = {"help": f"(default: {field.default})", "default": argparse.SUPPRESS}
        if get_origin(field.annotation) is tuple:
            options.update(type=float, nargs=len(get_args(field.annotation)))
        elif choices := get_args(field.annotation):
            options["choices"] = choices
        else:
            options["type"] = field.annotation
        group.add_argument("--" + name.replace("_", "-"), **options)
    return add_arguments(parser)


_DESCRIPTION = (
    "One small RL run on CPU: a megatron-core policy, rollouts by transformers, SGLang or the batched lab's engine, "
    "and the corrected loss."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print what `done.json` holds. Under torchrun rank 0 prints."""
    import torch

    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        settings = LabSettings(**{k: v for k, v in vars(given).items() if k in LabSettings.model_fields})
        config = MismatchConfig.from_args(given)
        if (settings.engine == "sglang") != (given.server_url is not None):
            raise ValueError("--engine sglang and --server-url go together: give both or none.")
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)  # at this size a second thread costs more than it does
    outcome = run_one(settings, config, given.folder, warm_up_cache=given.warm_up_cache, server_url=given.server_url)
    if int(os.environ.get("RANK", "0")) == 0:
        print(to_json(outcome, indent=2))


if __name__ == "__main__":
    main()
