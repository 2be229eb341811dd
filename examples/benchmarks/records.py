"""Benchmark: lists of numbers and files of records become tensors, side by side with plain conversions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mismatch_plugin as mp
from examples.benchmarks.machine import Case, measure
from examples.benchmarks.results import MEASURED, NotHereError, Row, Section, noted
from mismatch_plugin.check.inputs import check_files
from mismatch_plugin.core.validity import find_invalid
from mismatch_plugin.rollout.files import iter_records
from mismatch_plugin.rollout.packing import to_packed
from mismatch_plugin.rollout.records import RolloutRecord

NOTES = [
    "ns: nanoseconds a response token, on the CPU whatever the device. Time: the process's own CPU time (with several "
    "threads the wall time), medians of calls in turns.",
    "pack: loss mask, rollout and old log-probs as one list of Python numbers a sequence, and one advantage a "
    "sequence; the contenders convert the three lists and neither check nor join them. with null: every seventh token "
    "is of a tool, without log-prob and with mask 0.",
    "to_packed: records and the training side's log-probs, checked as under the policy error.",
    "read: JSONL of records, each dropped once read; plain: ids, log-probs and names; full: loss mask, sampling, "
    "weight versions, server and text too. The contenders parse the same lines and check nothing.",
    "check: the command's library part, from the files of records and of the training side to the verdict.",
    "invalid: find_invalid where every log-prob is invalid: a few are named, all are counted.",
]
Build = Callable[[], Callable[[], object]]
_OURS = "mismatch_plugin"


class Data:
    """Records of N responses with n tokens each, as lists, tensors and files below `folder`."""

    def __init__(self, sequences: int, length: int, folder: Path) -> None:
        rng = np.random.default_rng(0)
        rollout = -rng.exponential(0.4, (sequences, length)).astype(np.float32)
        noise = np.where(rollout < -0.05, rng.normal(0.0, 0.02, rollout.shape), 0.0)
        self.tokens = sequences * length
        self.rollout: list[list[float]] = rollout.tolist()
        self.train: list[list[float]] = np.minimum(rollout + noise, 0.0).astype(np.float32).tolist()
        self.masks = [[1] * length for _ in range(sequences)]
        self.advantages = rng.normal(size=sequences).tolist()
        self.ids: list[list[int]] = rng.integers(0, 150_000, (sequences, length)).tolist()
        self.tools = [[None if at % 7 == 0 else value for at, value in enumerate(row)] for row in self.rollout]
        self.tool_masks = [[int(at % 7 != 0) for at in range(length)] for _ in range(sequences)]
        prompts: list[list[int]] = rng.integers(0, 150_000, (sequences, 128)).tolist()
        self.plain, self.full, self.training = (folder / f"{name}.jsonl" for name in ("plain", "full", "training"))
        rows = [
            {"prompt_ids": prompt, "response_ids": ids, "rollout_log_probs": values, "sample_id": f"s{at}"}
            for at, (prompt, ids, values) in enumerate(zip(prompts, self.ids, self.rollout, strict=True))
        ]
        self.records = [RolloutRecord.model_validate(row) for row in rows]
        half = length // 2
        more = {
            "loss_mask": [1] * length,
            "sampling": {"temperature": 1.0, "max_new_tokens": length},
            "weight_versions": [
                {"version": "step_7", "start": 0, "end": half},
                {"version": "step_8", "start": half, "end": length},
            ],
            "finish_reason": "stop",
            "server": "http://rollout:30000",
            "text": "word " * half,
            "reward": 1.0,
        }
        self.plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.full.write_text("".join(json.dumps({**row, **more}) + "\n" for row in rows))
        told = enumerate(zip(self.ids, self.train, strict=True))
        lines = ({"sample_id": f"s{at}", "token_ids": ids, "train_log_probs": train} for at, (ids, train) in told)
        self.training.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _tensors(rows: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def _converted(data: Data, convert: Callable[[Any], object]) -> Callable[[], object]:
    lists: list[list[Any]] = [data.rollout, data.train, data.masks]
    return lambda: [[convert(row) for row in rows] for rows in lists]


def _packed(rollout: Any, old: Any, masks: Any, advantages: Any) -> Callable[[], object]:
    return lambda: mp.PackedSequences.from_lists(
        loss_masks=masks, rollout_log_probs=rollout, old_log_probs=old, advantages=advantages
    )


def _parsed(path: Path) -> Callable[[], object]:
    try:
        from orjson import loads  # type: ignore[import-not-found]
    except ImportError:
        raise NotHereError("orjson is not installed") from None

    def run() -> None:
        with path.open("rb") as stream:
            for line in stream:
                loads(line)

    return run


def _read(path: Path) -> Callable[[], object]:
    def run() -> None:
        for _ in iter_records(path):
            pass

    return run


def _all_invalid(tokens: int) -> Callable[[], object]:
    train, rollout = torch.full((tokens,), -1.0), torch.full((tokens,), torch.nan)
    return lambda: find_invalid(train, rollout, torch.ones(tokens, dtype=torch.bool), [tokens], [0])


def cases(data: Data) -> dict[str, dict[str, Build]]:
    """Contenders by task; ours is called so."""
    rollout, train, masks = (_tensors(rows) for rows in (data.rollout, data.train, data.masks))
    return {
        "pack": {
            _OURS: lambda: _packed(data.rollout, data.train, data.masks, data.advantages),
            f"{_OURS} (with null)": lambda: _packed(data.tools, data.train, data.tool_masks, data.advantages),
            f"{_OURS} (tensors)": lambda: _packed(rollout, train, masks, data.advantages),
            "numpy.asarray": lambda: _converted(data, np.asarray),
            "torch.tensor": lambda: _converted(data, torch.tensor),
        },
        "to_packed": {
            _OURS: lambda: lambda: to_packed(data.records, data.train),
            f"{_OURS} (tensors)": lambda: lambda: to_packed(data.records, train),
        },
        "read, plain": {_OURS: lambda: _read(data.plain), "orjson alone": lambda: _parsed(data.plain)},
        "read, full": {_OURS: lambda: _read(data.full), "orjson alone": lambda: _parsed(data.full)},
        "check, plain": {_OURS: lambda: lambda: check_files(data.plain, data.training)},
        "check, full": {_OURS: lambda: lambda: check_files(data.full, data.training)},
        "invalid": {_OURS: lambda: _all_invalid(data.tokens)},
    }


def section(device: torch.device, quick: bool, repeats: int, tell: Callable[[str], object]) -> Section:
    """All tasks, on the CPU whatever `device` is. `tell` hears of each before it starts."""
    sequences, length = (8, 64) if quick else (1024, 512)
    with tempfile.TemporaryDirectory() as folder:
        data = Data(sequences, length, Path(folder))
        rows = [row for task, builds in cases(data).items() for row in _rows(task, builds, data.tokens, repeats, tell)]
    facts = {"sequences": sequences, "length": length}
    return Section("records", "Lists and files of records", rows, facts, NOTES)


def _rows(task: str, builds: dict[str, Build], tokens: int, repeats: int, tell: Callable[[str], object]) -> list[Row]:
    tell(f"{task}: {tokens} tokens")
    rows: list[Row] = []
    runs: list[Case] = []
    for name, build in builds.items():
        row: Row = {"name": name, "task": task, "tokens": tokens}
        rows.append(row)
        with noted(row):
            case = Case(name, build())
            case.run()
            runs.append(case)
    timings = measure(runs, torch.device("cpu"), repeats)
    for row in (row for row in rows if row["status"] == MEASURED):
        timing = timings[row["name"]]
        row |= {"ns": 1e6 * timing.ms / tokens, "times_ours": timing.ms / timings[_OURS].ms}
    return rows
