"""The worker processes of a comparison: each takes task after task on one thread."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mismatch_plugin.lab.compare import Job, tasks
from mismatch_plugin.lab.run import run_one

_PATIENCE = 60.0
"""Seconds to wait for another worker's warm-up: one that was killed never gives its lock back."""


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
    todo = [task for task in tasks(jobs) if not all(job.done for job in task)]
    if not todo:
        return []
    context = multiprocessing.get_context("spawn")
    queue, failures = context.Queue(), context.Queue()
    for task in todo:
        queue.put(task)
    count = min(workers, len(todo))
    for _ in range(count):
        queue.put(None)
    locks = {job.settings.warm_up_key: context.Lock() for task in todo for job in task}
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
    """One worker: imports everything once, then runs task after task on one thread."""
    import signal
    import warnings

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (task := queue.get()) is not None:
        if failed := _attempt(task, locks, urls):
            failures.put(failed)


def _end_with_parent() -> None:
    """A parent that was killed cannot stop its workers."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _attempt(task: tuple[Job, ...], locks: dict[str, Any], urls: Mapping[str, str]) -> str | None:
    """Run a task. Returns a sentence if it failed: one failed task must not end the others."""
    try:
        if task[0].trainer == "batched":
            _run_block(task, locks)
        else:
            _run_one(task[0], locks, urls)
    except Exception as error:
        seeds = ", ".join(sorted({str(job.settings.seed) for job in task}))
        variants = ", ".join(dict.fromkeys(job.variant for job in task))
        return f"{task[0].setting}, algorithm {variants}, seed {seeds}: {error}"
    return None


@contextmanager
def _warming(lock: Any) -> Iterator[None]:
    """One worker at a time warms up. Without the lock two compute the same, and each writes a whole file."""
    held = lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if held:
            lock.release()


def _run_block(task: tuple[Job, ...], locks: dict[str, Any]) -> None:
    from mismatch_plugin.lab.batched.run import run_block
    from mismatch_plugin.lab.batched.warm import warm_weights

    variants = list(dict.fromkeys(job.variant for job in task))
    by_key = {(job.variant, job.settings.seed): job for job in task}
    first, warm = task[0], task[0].warm
    seeds = list(dict.fromkeys(job.settings.seed for job in task))
    for seed in seeds:  # the first block of a seed warms up for all of them
        alone = by_key[variants[0], seed].settings
        with _warming(locks[alone.warm_up_key]):
            warm_weights(alone, [seed], warm)
    configs = [by_key[variant, seeds[0]].config for variant in variants]
    folders = [[by_key[variant, seed].folder for seed in seeds] for variant in variants]
    run_block(first.settings, configs, seeds, folders, warm)


def _run_one(job: Job, locks: dict[str, Any], urls: Mapping[str, str]) -> None:
    from mismatch_plugin.lab.trainer import warm_up

    warm, url = job.warm, urls.get(job.settings.rollout_dtype)
    if job.settings.tp * job.settings.pp * job.settings.cp > 1:
        return _run_under_torchrun(job, warm, url)
    with _warming(locks[job.settings.warm_up_key]):  # the first run of a seed warms up for all of them
        if not (warm / job.settings.warm_up_key).exists():
            warm_up(job.settings, warm)
    run_one(job.settings, job.config, job.folder, warm_up_cache=warm, server_url=url)
    return None


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
