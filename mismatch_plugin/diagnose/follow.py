"""`inspect DIR --follow`: a run that is being written, judged again whenever it has written a step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.judge import Inspection, counted, inspect_steps
from mismatch_plugin.diagnose.trends import sentence, trend_of
from mismatch_plugin.files import MAX_LINE, refuse_special
from mismatch_plugin.report.log import METRICS, numbers_of_line
from mismatch_plugin.report.table import compact

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mismatch_plugin.config import MismatchConfig

HEADLINE = ("kl", "k3_kl", "rollout_is_ratio_mean", "rollout_is_ratio_eff_sample_size", "accepted_token_fraction")
"""What the line of a step says."""
SHOWN = 5
"""Steps that are printed of a run that has begun, where the output is no terminal."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_BARS = 60
_READ = 1 << 24


@dataclass
class Tail:
    """The steps of a `metrics.jsonl` that grows, read once each. A file that became shorter, or was replaced, is
    another run's: it is read anew. A line without its end is still being written."""

    path: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    others: list[dict[str, float]] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    _offset: int = 0
    _lines: int = 0
    _file: tuple[int, int] | None = None

    def read(self) -> int:
        """Read what was written since; returns how many steps are new. Raises ValueError, OSError as `read_steps`."""
        if not self.path.exists():
            return 0
        refuse_special(self.path)
        before = len(self.rows)
        with self.path.open("rb") as stream:
            now = os.fstat(stream.fileno())
            file = now.st_dev, now.st_ino
            if now.st_size < self._offset or file != self._file:
                before, self._offset, self._lines, self._file = 0, 0, 0, file
                self.rows, self.others, self.numbers = [], [], []
            stream.seek(self._offset)
            rest = b""
            while block := stream.read(_READ):
                *lines, rest = (rest + block).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise ValueError(f"{self.path}, line {self._lines + len(lines) + 1} is too long for a step.")
                for line in lines:
                    self._offset += len(line) + 1
                    self._lines += 1
                    self._take(line.decode("utf-8", "replace").strip())
        return len(self.rows) - before

    def _take(self, line: str) -> None:
        step = numbers_of_line(self.path, self._lines, line) if line else None
        if step is None or not any(name.startswith(PREFIX) for name in step):
            return
        self.numbers.append(step.get("step", float(len(self.rows) + 1)))
        self.rows.append({name: value for name, value in step.items() if name.startswith(PREFIX)})
        self.others.append({name: v for name, v in step.items() if not name.startswith(PREFIX) and name != "step"})


def follow(
    path: Path,
    settings: Callable[[Path], tuple[MismatchConfig, bool]],
    console: Console,
    interval: float = 2.0,
    seconds: float | None = None,
) -> int:
    """Follow a run until Ctrl-C, or for so many seconds. Returns the exit status of the last verdict, 2 without one.

    path: the report folder, or its metrics.jsonl; it may not be there yet. settings: the run's, and whether they are
    known, given that file. On a terminal one screen is drawn anew; else each step is a line, and the end the verdict.
    """
    file = path if path.suffix == ".jsonl" else path / METRICS
    tail, end, found = Tail(file), math.inf if seconds is None else time.monotonic() + seconds, None
    live = _live(console) if console.is_terminal else None
    context: AbstractContextManager[Any] = live or nullcontext()
    try:
        with context:
            new = min(tail.read(), SHOWN)
            while True:
                if new:
                    found = _Found.of(tail, *settings(file))
                    for number, row in zip(tail.numbers[-new:], tail.rows[-new:], strict=True):
                        if live is None:
                            console.print(step_line(number, row), soft_wrap=True)
                if live is not None:
                    live.update(_screen(file, tail, found), refresh=True)
                if (left := end - time.monotonic()) <= 0:
                    break
                time.sleep(min(interval, left))
                new = tail.read()
    except KeyboardInterrupt:
        pass
    if found is None or isinstance(found.inspection, str):
        said = f"{file} holds no step yet" if found is None else found.inspection
        console.print(f"nothing to judge: {said}.", soft_wrap=True)
        return 2
    if live is None:
        console.print(found.text(), soft_wrap=True)
    return 0 if found.inspection.sound else 1


@dataclass(frozen=True)
class _Found:
    """inspection: or why there is nothing to judge."""

    inspection: Inspection | str
    trend: str

    @classmethod
    def of(cls, tail: Tail, config: MismatchConfig, known: bool) -> _Found:
        trend = trend_of(tail.numbers, tail.rows, tail.others)
        said = sentence(trend, len(tail.rows))
        try:
            return cls(inspect_steps(tail.rows, config, known, trend=trend), said)
        except ValueError as error:
            return cls(str(error).rstrip("."), said)

    def text(self) -> str:
        if isinstance(self.inspection, str):
            return f"nothing to judge: {self.inspection}."
        warnings = [f"{warning} ({counted(count)})" for warning, count in self.inspection.warnings]
        return "\n".join([self.inspection.verdict, f"trend: {self.trend}", *warnings])


def step_line(number: float, row: dict[str, float]) -> str:
    """`step 12: kl 0.0012, k3_kl 0.001, …` of the metrics that a run has."""
    shown = [(name, row[PREFIX + name]) for name in HEADLINE if PREFIX + name in row]
    figures = ", ".join(f"{name} {compact(value) if math.isfinite(value) else value}" for name, value in shown)
    return f"step {number:g}: {figures}"


def sparkline(values: Sequence[float]) -> str:
    """The values on a log scale, each block the mean of equally many steps; · where there is none above 0."""
    size = max(1, -(-len(values) // _BARS))
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    logs = [[math.log(v) for v in part if math.isfinite(v) and v > 0] for part in parts]
    means = [sum(part) / len(part) if part else math.nan for part in logs]
    there = [mean for mean in means if not math.isnan(mean)]
    if not there:
        return "·" * len(means)
    low, span = min(there), max(max(there) - min(there), math.log(2.0))
    return "".join("·" if math.isnan(m) else _BLOCKS[min(7, int(8 * (m - low) / span))] for m in means)


def _live(console: Console) -> Any:
    from rich.live import Live

    return Live(console=console, auto_refresh=False)


def _screen(file: Path, tail: Tail, found: _Found | None) -> RenderableType:
    """What fits on one screen: where the run is, k3_kl over its steps, the table, warnings, verdict, trend."""
    from rich.console import Group
    from rich.text import Text

    if found is None:
        return Text(f"waiting for {file}")
    age = max(0.0, time.time() - file.stat().st_mtime) if file.exists() else math.nan
    head = f"{file}: {counted(len(tail.rows))}, newest {tail.numbers[-1]:g}, written {age:.0f} s ago (Ctrl-C ends)"
    k3_kl = [row.get(f"{PREFIX}k3_kl", math.nan) for row in tail.rows]
    line = f"k3_kl {sparkline(k3_kl)} {compact(k3_kl[-1]) if math.isfinite(k3_kl[-1]) else k3_kl[-1]}"
    parts: list[RenderableType] = [Text(head), Text(line), Text(found.text())]
    if not isinstance(found.inspection, str):  # last: a small terminal cuts it
        parts.append(found.inspection.short.to_rich(80))
    return Group(*parts)
