"""`mismatch-plugin inspect` as its users call it, and the responses that the tests of this folder give it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
from typer.testing import CliRunner, Result

from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from tests.fixtures.sglang_check.policies import FOLDER, policy, score, training

CLEAN = "bfloat16_temperature_1.0"
RECORDS = FOLDER / f"{CLEAN}.jsonl"
"""What a real SGLang server in bf16 returned."""
NAN, INF = math.nan, math.inf
Rows = Sequence[Any] | np.ndarray[Any, Any]


def run(*arguments: object, columns: int = 100) -> Result:
    """`mismatch-plugin inspect` with these words."""
    words = ["inspect", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": str(columns), "TERM": "dumb"})


def text(*arguments: object, columns: int = 100) -> str:
    """What it prints, without its line breaks."""
    return " ".join(run(*arguments, columns=columns).output.split())


def told(*arguments: object) -> dict[str, Any]:
    """Its JSON, with the exit status."""
    page = () if {"--brief", "--out"} & {*map(str, arguments)} else ("--no-report",)
    result = run(*arguments, *page, "--json")
    assert result.stdout, result
    return json.loads(result.stdout) | {"status": result.exit_code}


def inspect(samples: Iterable[Sample], *options: object) -> dict[str, Any]:
    """`told` of a dump that holds these samples."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "dump.jsonl"
        write_samples(path, [*samples])
        return told(path, *options)


def findings(samples: Iterable[Sample], *options: object) -> list[dict[str, Any]]:
    """What is found in them, faults and notes."""
    return inspect(samples, "--brief", *options)["findings"]


def faults(found: Iterable[dict[str, Any]]) -> list[str]:
    """The names of those that make a batch faulty."""
    return [item["fault"] for item in found if item["severity"] == "fault" and not item["accepted"]]


def named(found: Iterable[dict[str, Any]], fault: str) -> dict[str, Any] | None:
    return next((item for item in found if item["fault"] == fault), None)


def samples_of(
    rollout: Rows,
    train: Rows | None = None,
    ids: Rows | None = None,
    each: Sequence[dict[str, Any]] = (),
    **fields: Any,
) -> list[Sample]:
    """One sample a row. each: further fields of each; fields: of all. Ids count up from 100, 1100 and so on
    unless given."""
    made = []
    for at, values in enumerate(rollout):
        length = len(values if train is None else train[at])
        own: dict[str, Any] = {
            "prompt_ids": [1, 2, 3],
            "response_ids": [*range(1000 * at + 100, 1000 * at + 100 + length)] if ids is None else ids[at],
            "rollout_log_probs": values,
        }
        if train is not None:
            own["train_log_probs"] = train[at]
        made.append(Sample(**own | fields | (each[at] if each else {})))
    return made


def noisy(
    spread: float = 0.05, sequences: int = 40, lengths: tuple[int, int] = (20, 60), seed: int = 0, **fields: Any
) -> list[Sample]:
    """Responses whose training side is normally distributed around the rollout's."""
    draw = np.random.default_rng(seed)
    rollout = [-draw.exponential(0.7, draw.integers(lengths[0], lengths[1] + 1)) - 1e-3 for _ in range(sequences)]
    train = [np.minimum(row + draw.normal(0, spread, len(row)), 0.0) for row in rollout]
    ids = [draw.integers(5, 9000, len(row)) for row in rollout]
    return samples_of(rollout, train, ids, **fields)


def wave(length: int, phase: float = 0.0) -> list[float]:
    """Log-probs between −4 and −0.1 that no shift maps onto themselves."""
    return [-2.05 - 1.95 * math.sin(1.7 * at * (1 + 0.01 * at) + phase) for at in range(length)]


@cache
def saved(form: str, model: str = "") -> Path:
    """The folder of a checkpoint: a form of the model that sampled the records. model: another name for another one."""
    folder = Path(mkdtemp()) / form
    policy(form).save_pretrained(folder)
    return folder


def training_file(folder: Path, form: str = "float32", name: str = CLEAN, first: int = 10**6, **changes: Any) -> Path:
    """The training side of the records in a file of its own; a change is a function of (index, line)."""
    path = folder / "training.jsonl"
    scored = training(form, name) if form == "float32" else score(form, training("float32", name))
    lines: list[dict[str, Any]] = [{"train_log_probs": one.train_log_probs.tolist()} for one in scored[:first]]
    for field, change in changes.items():
        for index, line in enumerate(lines):
            line[field] = change(index, line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
