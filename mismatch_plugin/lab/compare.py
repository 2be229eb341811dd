"""`mismatch-plugin compare`: the same small RL run under every algorithm, mismatch setting and seed, and the report.

Runs go side by side, one thread each, and live in files only: `RUN/<setting>/<variant>/seed<k>/`.
So a comparison can be stopped at any time and taken up again, and the page is made from whatever is there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig, preset
from mismatch_plugin.config.presets import preset_names
from mismatch_plugin.files import read_json_object, write_whole
from mismatch_plugin.lab.run import DONE, METRICS, run_one
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.report.data import read_objects
from mismatch_plugin.report.log import differences

SETTINGS: dict[str, dict[str, Any]] = {
    "control": {},
    "int4": {"rollout_dtype": "int4"},
    "stale16": {"staleness": 16},
    "bfloat16": {"rollout_dtype": "bfloat16"},
}
"""Mismatch settings by name: the control (float32 in sync), persistent mismatch, stale weights, and what servers do."""
DEFAULT_SETTINGS = {"transformers": "control,int4,stale16", "sglang": "bfloat16"}
"""By engine. int4 is made by transformers alone; a server in float32 differs from the trainer by rounding only."""
_DEFAULT_LEVEL = {2: "token", 3: "sequence"}


@dataclass(frozen=True)
class Job:
    """One run: where it goes, what it trains with."""

    folder: Path
    setting: str
    variant: str
    settings: LabSettings
    config: MismatchConfig

    @property
    def done(self) -> bool:
        return (self.folder / DONE).exists()

    @property
    def steps_done(self) -> int:
        """Optimizer steps written so far."""
        path = self.folder / METRICS
        if not path.exists():
            return 0
        with path.open("rb") as lines:
            return max(sum(1 for _ in lines) - 1, 0)

    def last(self, name: str) -> float | None:
        """The newest value of a metric in the run's file."""
        for record in reversed([*read_objects(self.folder / METRICS)]):
            value = (record or {}).get(name)  # None: the line being written
            if isinstance(value, (int, float)):
                return float(value)
        return None


def variant_config(label: str) -> MismatchConfig:
    """The configuration of a label: `0`…`3`, `ALGORITHM:LEVEL[:MODE]` as `2:sequence:mask`, or a preset's name.

    A bare 2 is token level, a bare 3 sequence level, both truncate. Raises ValueError naming what exists.
    """
    parts = label.split(":")
    if len(parts) > 3 or parts[0] not in ("0", "1", "2", "3") or (parts[0] in "01" and len(parts) > 1):
        if label in preset_names():
            return preset(label)
        raise ValueError(
            f"algorithm {label!r} is unknown: write 0, 1, 2, 3, ALGORITHM:LEVEL:MODE as in 2:sequence:mask, or a "
            f"preset ({', '.join(preset_names())})."
        )
    algorithm = int(parts[0])
    data: dict[str, Any] = {"use_rollout_log_probs": bool(algorithm & 1), "use_tis": bool(algorithm & 2)}
    if algorithm > 1:
        level = parts[1] if len(parts) > 1 else _DEFAULT_LEVEL[algorithm]
        data["tis"] = {"level": level, "mode": parts[2] if len(parts) > 2 else "truncate"}
    return MismatchConfig.build({**data, "metrics": "full"})


def plan(
    folder: Path, variants: Sequence[str], seeds: int, settings: dict[str, dict[str, Any]], lab: dict[str, Any]
) -> list[Job]:
    """Every run, seed by seed, so that a comparison stopped early has whole seeds. Raises ValueError for bad labels."""
    if not variants:
        raise ValueError("algorithms is empty: name at least one, for example 0,2:token:truncate.")
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: give at least 1 (more than 3 for error bars worth reading).")
    if len(set(variants)) < len(variants):
        raise ValueError(f"algorithms names one twice ({', '.join(variants)}): give each once.")
    configs = {label: variant_config(label) for label in variants}
    _refuse_same("algorithms", {label: config.model_dump(exclude={"metrics"}) for label, config in configs.items()})
    _refuse_same("settings", {name: LabSettings(**{**lab, **changes}) for name, changes in settings.items()})
    jobs = []
    for seed in range(seeds):
        for setting, changes in settings.items():
            for label, config in configs.items():
                place = folder / setting / label.replace(":", "_") / f"seed{seed}"
                jobs.append(Job(place, setting, label, LabSettings(**{**lab, **changes, "seed": seed}), config))
    return jobs


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
        before = {name: value for name, value in before.items() if name in description}
        found = list(differences(before, description))
        # What a setting means differs, too, where other settings were chosen.
        found = [entry for entry in found if not entry[0].startswith("lab.of_setting")] or found
        if found:
            changed = [f"{_option(name)} {_show(old)}, now {_show(new)}" for name, old, new in found]
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


def _option(name: str) -> str:
    """The option that a name in `run.json` comes from."""
    last = name.split(".")[-1]
    return "--" + {"variants": "algorithms"}.get(last, last).replace("_", "-")


def _show(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, dict)) else str(value)


def run_all(
    jobs: Sequence[Job],
    workers: int,
    watch: Callable[[Sequence[Job], float], None],
    urls: Mapping[str, str] | None = None,
) -> list[str]:
    """Run what is not done on `workers` processes; `watch(jobs, seconds)` is called twice a second meanwhile.

    urls: servers to roll out with, by rollout_dtype. One has one set of weights, so `workers` must be 1 then.
    Returns sentences about runs that failed. KeyboardInterrupt stops the workers and is raised again.
    """
    todo = [job for job in jobs if not job.done]
    if not todo:
        return []
    context = multiprocessing.get_context("spawn")
    queue, failures = context.Queue(), context.Queue()
    warm_up_first = {job.settings.warm_up_key: job for job in reversed(todo)}
    for job in [*warm_up_first.values(), *(job for job in todo if warm_up_first[job.settings.warm_up_key] is not job)]:
        queue.put(job)
    count = min(workers, len(todo))
    for _ in range(count):
        queue.put(None)
    locks = {key: context.Lock() for key in warm_up_first}
    processes = [
        context.Process(target=_work, args=(queue, failures, locks, urls or {}), daemon=True) for _ in range(count)
    ]
    start = time.monotonic()
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            watch(jobs, time.monotonic() - start)
            time.sleep(0.5)
    except KeyboardInterrupt:
        for process in processes:
            process.terminate()
        raise
    watch(jobs, time.monotonic() - start)
    sentences = []
    while not failures.empty():
        sentences.append(failures.get())
    if crashed := [process.exitcode for process in processes if process.exitcode]:
        sentences.append(f"a worker process ended with exit code {crashed[0]} (out of memory?)")
    return sentences


def _work(queue: Any, failures: Any, locks: dict[str, Any], urls: Mapping[str, str]) -> None:
    """One worker: imports everything once, then runs job after job on one thread."""
    import signal
    import warnings

    import torch

    from mismatch_plugin.lab.trainer import warm_up

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (job := queue.get()) is not None:
        try:
            warm, url = job.folder.parents[2] / ".warm", urls.get(job.settings.rollout_dtype)
            if job.settings.tp * job.settings.pp * job.settings.cp > 1:
                _run_under_torchrun(job, warm, url)
                continue
            with locks[job.settings.warm_up_key]:  # the first run of a seed warms up for all of them
                if not (warm / job.settings.warm_up_key).exists():
                    warm_up(job.settings, warm)
            run_one(job.settings, job.config, job.folder, warm_up_cache=warm, server_url=url)
        except Exception as error:  # one failed run must not end the others
            failures.put(f"{job.setting}, algorithm {job.variant}, seed {job.settings.seed}: {error}")


def _run_under_torchrun(job: Job, warm: Path, url: str | None) -> None:
    """A run on several processes, for layouts other than one process."""
    world = job.settings.tp * job.settings.pp * job.settings.cp
    job.folder.mkdir(parents=True, exist_ok=True)
    config = job.folder / "mismatch.json"
    config.write_text(json.dumps(job.config.model_dump(mode="json", exclude_defaults=True)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "mismatch_plugin.lab.run", "--folder", str(job.folder), "--warm-up-cache", str(warm)]
    command += ["--mismatch-config", str(config), *([] if url is None else ["--server-url", url])]
    for name, value in job.settings.model_dump(exclude_defaults=True).items():
        command += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, (list, tuple)) else [value])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "torchrun failed")


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
            for record in read_objects(path):
                if record is None or "step" not in record:
                    continue
                metrics = record.get("metrics", {})
                for name, value in {**record, **{name: metrics.get(name) for name in _EVENT_METRICS}}.items():
                    if isinstance(value, float):
                        writer.add_scalar(name, value, record["step"])
        written += 1
    return written
