"""What a run of a trainer left, and `once`, which runs it or takes the one that is there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from tests.trainers.run import Finished

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs/trainers"
CPU_SHIM = ROOT / "examples/megatron_core"  # holds cpu_shim.py; last on PYTHONPATH, since hosts have a train.py, too
LAUNCHER = ("-m", "mismatch_plugin.launch")


@dataclass(frozen=True)
class Trained:
    """A run's end, its log and the files below `folder`."""

    job: Any
    folder: Path
    finished: Finished
    EVENTS: ClassVar[str] = "tensorboard"
    """Where the trainer puts TensorBoard's files."""

    @property
    def text(self) -> str:
        return self.finished.text

    @cached_property
    def tracked(self) -> dict[str, dict[int, float]]:
        """All that reached TensorBoard's files: name → step → value."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        found: dict[str, dict[int, float]] = {}
        for file in sorted((self.folder / self.EVENTS).rglob("*tfevents*")):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
                    found.setdefault(value.tag, {})[event.step] = number
        return found

    def said(self, pattern: str) -> list[str]:
        """The log's lines that match."""
        return [line for line in self.text.splitlines() if re.search(pattern, line)]


def once(folder: Path, told: Sequence[str], reuse: bool, start: Callable[[], Finished]) -> Finished:
    """Run into a folder, which is emptied before. reuse: take the run that is there if it was told the same."""
    ended = folder / "ended.json"
    if reuse and ended.exists():
        record = json.loads(ended.read_text())
        if record.pop("said") == list(told):
            return Finished(log=folder / "log", **record)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    finished = start()
    record = {"status": finished.status, "seconds": finished.seconds, "peak_gib": finished.peak_gib}
    ended.write_text(json.dumps({"said": list(told), **record}))
    return finished
