"""What the full-loop tests share: the task that is learned, and `inspect` on what a run left."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.trainers.slime.trainer import Job, Trained
from tests.trainers.whole import ROOT, Sources

REVERSE = """
    --custom-rm-path slime_task.reversed_digits --rollout-batch-size 16 --n-samples-per-prompt 8 --lr 1e-3
    --rollout-max-response-len 8 --global-batch-size 32 --max-tokens-per-gpu 4096 --sglang-max-running-requests 128
    --mismatch-metrics full --mismatch-report-dir {run}/report
"""
"""128 answers a rollout, four optimizer steps on them."""


def reverse(flags: str, **settings: Any) -> Job:
    """A run on six digits to be reversed, from the warm checkpoint. flags: more of the command line."""
    words = (*REVERSE.split(), *flags.split())
    return Job(words, dump=None, checkpoint=Path("warm"), prompts=Path("warm/prompts.jsonl"), **settings)


def rewards(run: Trained) -> list[float]:
    """Mean reward of every rollout, as slime logged it."""
    return [float(found) for found in re.findall(r"rollout \d+: .*?'rollout/raw_reward': ([-0-9.e]+)", run.text)]


def dumps(run: Trained, rollouts: Sequence[int], side: str = "train") -> Path:
    """A folder of slime's dumps of these rollouts alone, of one side: what the run writes is all in one."""
    folder = run.folder / f"{side}_{min(rollouts)}_{max(rollouts)}"
    folder.mkdir(exist_ok=True)
    for rollout in rollouts:
        link = folder / f"{rollout}.pt"
        if not link.exists():
            link.symlink_to(run.folder / f"{side}_{rollout}.pt")
    return folder


def inspect(sources: Sources, *words: str | Path) -> tuple[int, dict[str, Any]]:
    """(exit status, what --json prints) of `mismatch-plugin inspect`, in the trainer's environment."""
    command = [str(sources.python), "-m", "mismatch_plugin", "inspect", *map(str, words), "--json", "--no-report"]
    env = Job().environment(sources, Path("/tmp"), Path("/tmp"))
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=ROOT)
    try:
        return done.returncode, json.loads(done.stdout)
    except json.JSONDecodeError:
        raise AssertionError(f"{command} ended {done.returncode}: {done.stdout}{done.stderr}") from None
