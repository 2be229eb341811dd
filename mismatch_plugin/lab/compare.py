"""A comparison's plan and its folder: the same small RL runs under every algorithm, mismatch setting and seed.

Runs live in files only: `RUN/<setting>/<variant>/seed<k>/`. So a comparison can be stopped at any time and taken up
again, and the page is made from whatever is there. `workers` runs them.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import IO, Any, Literal

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.files import read_json_object, write_whole
from mismatch_plugin.lab.experiments import variant_config
from mismatch_plugin.lab.run import DONE, METRICS
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.report.log import differences, read_records

Trainer = Literal["batched", "megatron"]
BLOCK = 24
"""Batched runs in one tensor program: more are not faster."""


@dataclass(frozen=True)
class Job:
    """One run: where it goes, what it trains with, and through which trainer."""

    folder: Path
    setting: str
    variant: str
    settings: LabSettings
    config: MismatchConfig
    trainer: Trainer
    warm: Path
    """Folder of the warm weights, shared by all runs."""

    @property
    def done(self) -> bool:
        return (self.folder / DONE).exists()

    @property
    def steps_done(self) -> int:
        """Optimizer steps written so far."""
        path = self.folder / METRICS
        if self.done:
            return self.settings.steps
        if not path.exists():
            return 0
        with path.open("rb") as lines:
            return max(sum(1 for _ in lines) - 1, 0)

    def last(self, name: str) -> float | None:
        """The newest value of a metric in the run's file."""
        for record in reversed([*read_records(self.folder / METRICS)]):
            value = (record or {}).get(name)  # None: the line being written
            if isinstance(value, (int, float)):
                return float(value)
        return None


def plan(
    folder: Path,
    variants: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    settings: Mapping[str, Mapping[str, Any]],
    lab: Mapping[str, Any],
    trainer: Trainer = "megatron",
    warm: Path | None = None,
) -> list[Job]:
    """Every run, seed by seed, so that a comparison stopped early has whole seeds. Raises ValueError for bad labels.

    variants: labels by setting. settings: fields of LabSettings by setting, over those of `lab`. warm: folder of warm
    weights, by default `.warm` in `folder`.
    """
    if not seeds:
        raise ValueError("seeds is 0: give at least 1 (more than 3 for error bars worth reading).")
    configs: dict[str, MismatchConfig] = {}
    for labels in variants.values():
        if not labels:
            raise ValueError("algorithms is empty: name at least one, for example 0,2:token:truncate.")
        if len(set(labels)) < len(labels):
            raise ValueError(f"algorithms names one twice ({', '.join(labels)}): give each once.")
        configs |= {label: variant_config(label) for label in labels if label not in configs}
    _refuse_same("algorithms", {label: config.model_dump(exclude={"metrics"}) for label, config in configs.items()})
    _refuse_same("settings", {name: LabSettings(**{**lab, **changes}) for name, changes in settings.items()})
    if trainer == "batched":
        from mismatch_plugin.lab.batched.trainer import refuse

        for setting, changes in settings.items():
            refuse(LabSettings(**{**lab, **changes}), [configs[label] for label in variants[setting]])
    jobs = []
    for seed in seeds:
        for setting, changes in settings.items():
            for label in variants[setting]:
                place = folder / setting / label.replace(":", "_") / f"seed{seed}"
                run = LabSettings(**{**lab, **changes, "seed": seed})
                jobs.append(Job(place, setting, label, run, configs[label], trainer, warm or folder / ".warm"))
    return jobs


def tasks(jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
    """What a worker runs at a time: one run through megatron-core; batched, whole seeds of one setting, about BLOCK.

    Blocks follow from the plan, not from what is done: a block that was cut runs again as a whole.
    """
    batched: dict[str, dict[int, list[Job]]] = {}
    alone = [(job,) for job in jobs if job.trainer == "megatron"]
    for job in jobs:
        if job.trainer == "batched":
            batched.setdefault(job.setting, {}).setdefault(job.settings.seed, []).append(job)
    blocks: list[tuple[int, tuple[Job, ...]]] = []
    for of_seed in batched.values():
        seeds = list(of_seed.values())
        count = -(-len(seeds) // max(1, BLOCK // len(seeds[0])))
        for part in range(count):
            first, last = part * len(seeds) // count, (part + 1) * len(seeds) // count
            blocks.append((part, tuple(job for seed in seeds[first:last] for job in seed)))
    blocks.sort(key=lambda block: block[0])  # the first seeds of every setting first
    return [*(block for _, block in blocks), *alone]


def _refuse_same(kind: str, runs: Mapping[str, object]) -> None:
    for (first, one), (second, other) in combinations(runs.items(), 2):
        if one == other:
            raise ValueError(f"{kind} {first} and {second} are the same run: leave one of them out.")


def open_folder(folder: Path, description: dict[str, Any], resume: bool) -> None:
    """Make the run folder, or take it up again. Raises ValueError where it holds another run or something else."""
    record = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --output.")
    if record.exists():
        if not resume:
            raise ValueError(f"{folder} holds a run already: add --resume to go on with it, or choose another --output")
        try:
            before = read_json_object(record)
        except ValueError as error:
            raise ValueError(f"{error} It says what the run is: restore it, or choose another --output.") from None
        now = {name: value for name, value in description.items() if name in _IDENTITY}
        found = list(differences({name: before[name] for name in now if name in before}, now))
        # What a setting means differs, too, where other settings were chosen.
        found = [entry for entry in found if not entry[0].startswith(("lab.of_setting", "plan"))] or found
        if found:
            changed = [f"{_option(name)} {_show(old, name)}, now {_show(new, name)}" for name, old, new in found]
            raise ValueError(
                f"{folder} holds a run with {'; '.join(changed)}: resume it with the same, or choose another --output."
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no run: choose another --output.")
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_whole(record, json.dumps({**description, "versions": versions, "started": started}, indent=2) + "\n")


def hold(folder: Path) -> IO[str]:
    """The folder's lock, which ends with this process at the latest. Raises ValueError where another one has it."""
    stream = (folder / ".lock").open("w")
    if sys.platform == "win32":
        return stream
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ValueError(f"another compare is writing to {folder}: wait for it, or choose another --output.") from None
    except OSError:  # a file system without locks
        pass
    return stream


_IDENTITY = ("settings", "variants", "seeds", "trainer", "plan", "lab", "cross_check")
"""Parts of `run.json` that a resumed comparison must have in common with it."""


def _option(name: str) -> str:
    """The option that a name in `run.json` comes from."""
    last = name.split(".")[-1]
    return "--" + {"variants": "algorithms"}.get(last, last).replace("_", "-")


def _show(value: object, name: str) -> str:
    if name == "seeds" and isinstance(value, list) and value:
        return f"{len(value)} from {value[0]}"
    return ",".join(map(str, value)) if isinstance(value, (list, dict)) else str(value)


_EVENT_METRICS = tuple(
    f"rollout_corr/{name}"
    for name in ("kl", "k3_kl", "rollout_is_mean", "rollout_is_weight_after_mean", "accepted_token_fraction", "pg_loss")
)


def write_events(jobs: Iterable[Job]) -> int:
    """TensorBoard events next to each run's metrics, from its file. Returns how many runs had any."""
    from torch.utils.tensorboard.writer import SummaryWriter

    written = 0
    for job in jobs:
        path = job.folder / METRICS
        if not path.exists() or (job.folder / "events").exists():
            continue
        with SummaryWriter(str(job.folder / "events")) as writer:
            for record in read_records(path):
                if record is None or "step" not in record:
                    continue
                metrics = record.get("metrics", {})
                for name, value in {**record, **{name: metrics.get(name) for name in _EVENT_METRICS}}.items():
                    if isinstance(value, float):
                        writer.add_scalar(name, value, record["step"])
        written += 1
    return written
