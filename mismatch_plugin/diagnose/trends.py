"""Over the steps of a run: when did the mismatch begin to grow, how sure is that, and with what did it rise?

The change point is that of log k3_kl: a level, from some step on a line that rises, or log(1 + c d) at distance d
(ramp), or a higher level (jump), fitted by least squares over all steps. log(1 + c d) is the growth of a k3 that rises
linearly; twice that, of a noise whose deviation does. How sure: the share of runs without growth that look as much like
it, made of the run's own noise with its memory (autoregressive of order 1). Where no shape fits but the last ten steps
all lie above the first ten, that is said (higher).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.table import compact

Array = npt.NDArray[np.float64]

MIN_STEPS = 20
MIN_FACTOR = 1.5
"""Ours: less growth than this, from the level before to the last step, is not told."""
MAX_P = 0.005
MIN_CORRELATION = 0.6
SHOWN = 3
MIN_APART = 5.0
"""Ours: the last steps are told of as higher from so many times the first ones (geometric means), whatever p is."""
_ENDS = 10
_PACES = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""c of log(1 + c d), a step: what the growth is in the first step, as a share of the level before."""
_WINDOWS = 400
_RUNS = 999
_INDEPENDENT = ("tokens", "sequences", "entropy", "ref_kl", "ppo_kl", "pg_clipfrac", "rollout_log_ppl", "invalid_")
"""Beginnings of our own metrics that are not made of the log-ratio itself, which all rise with it."""
_CLOCKS = re.compile(r"(^|/)_?(global_step|step|epoch|iteration|timestamp|runtime)s?$|^(timing|perf)", re.IGNORECASE)
LENGTH = "response length (tokens / sequences)"


Kind = Literal["ramp", "jump", "higher"]


@dataclass(frozen=True)
class Companion:
    """What rose (or fell) with k3_kl: Spearman's rank correlation over the steps from the change point on."""

    metric: str
    rank_correlation: float
    steps: int


@dataclass(frozen=True)
class Trend:
    """Growth of k3_kl. began: the first step of it; first, last: 95 % interval of that step. kind: ramp, jump, or
    higher, where no shape tells the step: then the interval is the whole run.

    before: geometric mean until then. after: fitted at the last step. p: share of runs without growth that look as
    much like it. companions: strongest first; empty where nothing else moved with it.
    """

    began: float
    first: float
    last: float
    kind: Kind
    before: float
    after: float
    p: float
    companions: tuple[Companion, ...]

    @property
    def times(self) -> float:
        """How many times it has grown."""
        return self.after / self.before

    def __str__(self) -> str:
        grown = f"from {compact(self.before)} to {compact(self.after)} nat a token ({compact(self.times)} times"
        if self.kind == "higher":
            said = f"k3_kl is higher in the last {_ENDS} steps than in the first: {grown}); since when is not clear."
        else:
            how = "has grown since" if self.kind == "ramp" else "rose at once at"
            where = "" if self.first == self.last else f" (between {self.first:g} and {self.last:g})"
            said = f"k3_kl {how} step {self.began:g}{where}, {grown}; p = {self.p:.2g})."
        if not self.companions:
            return said
        named = [f"{c.metric} (rank correlation {c.rank_correlation:+.2f})" for c in self.companions]
        return f"{said} With it moved {', '.join(named)}."

    def to_json(self) -> dict[str, Any]:
        """Its fields, and the sentence."""
        return {**asdict(self), "sentence": str(self)}


def trend_of(
    steps: Sequence[float], rows: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]] = ()
) -> Trend | None:
    """The growth of a run's k3_kl, None where there is none.

    steps: their numbers; of one that is there twice the later counts. rows: our metrics of each. others: what else was
    recorded of each.
    """
    name = f"{PREFIX}k3_kl"
    merged = {
        number: {**(others[i] if others else {}), **row}
        for i, (number, row) in enumerate(zip(steps, rows, strict=True))
        if math.isfinite(row.get(name, math.nan))
    }
    if len(merged) < MIN_STEPS:
        return None
    numbers = sorted(merged)
    k3_kl = np.array([merged[number][name] for number in numbers])
    found = _growth(np.log(np.maximum(k3_kl, 1e-12)))
    if found is None:
        return None
    place, low, high, kind, before, after, p = found
    companions = _companions(k3_kl, _columns([merged[number] for number in numbers]), place)
    at = (numbers[place], numbers[low], numbers[high])
    return Trend(*at, kind, math.exp(before), math.exp(after), p, companions)


def sentence(trend: Trend | None, steps: int) -> str:
    """What is said of a run of so many steps."""
    if trend is not None:
        return str(trend)
    return f"none in {steps} steps" + (f": it takes {MIN_STEPS} to tell." if steps < MIN_STEPS else ".")


def _growth(values: Array) -> tuple[int, int, int, Kind, float, float, float] | None:
    """(change point and its 95 % interval as indices, kind, level before, fitted last value, p); None for no growth."""
    found = _fitted(values)
    if found is not None and found[-1] <= MAX_P:
        return found
    first, last = values[:_ENDS], values[-_ENDS:]
    before, after = float(first.mean()), float(last.mean())
    if last.min() <= first.max() or after - before < math.log(MIN_APART):
        return None
    place, p = (found[0], found[-1]) if found is not None else (_ENDS, 1.0)
    return place, 0, len(values) - 1, "higher", before, after, p


def _fitted(values: Array) -> tuple[int, int, int, Kind, float, float, float] | None:
    """As `_growth`, of the shape that fits best, whatever p; None where none rises."""
    size = -(-len(values) // _WINDOWS)
    starts = np.arange(0, len(values), size)
    y = np.array([np.median(values[start : start + size]) for start in starts])
    n = len(y)
    at = np.arange(n)
    since = np.maximum(at[None] - (at[: n - 5, None] - 1), 0.0)  # the first step above the level is the change point
    ramps = np.concatenate([since, *(np.log1p(pace * since) for pace in _PACES)])
    jumps = (at[None] >= at[3 : n - 4, None]).astype(np.float64)
    shapes = np.concatenate([ramps, jumps])
    places = np.concatenate([np.tile(at[: n - 5], 1 + len(_PACES)), at[3 : n - 4]])
    centred = shapes - shapes.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    bases = centred / norms[:, None]
    score, best, rest = _fit(bases, y)
    if not score > 0:
        return None
    slope = float(bases[best] @ y / norms[best])
    rise, level = slope * float(shapes[best, -1]), float(y.mean() - slope * shapes[best].mean())
    if rise < math.log(MIN_FACTOR):
        return None
    residual = y - level - slope * shapes[best]
    square = float(residual @ residual)
    lag = float(residual[:-1] @ residual[1:]) / square if square else 0.0
    memory = float(np.clip(lag + 3.0 * (1.0 + 3.0 * lag) / n, 0.0, 0.95))  # a fit takes some of it away, in short runs
    p = (1 + int((_scores(bases, _without_growth(residual, memory)) >= score).sum())) / (1 + _RUNS)
    # Twice the log-likelihood ratio below 3.84, with as many independent steps as the residuals leave.
    independent = n * (1 - memory) / (1 + memory)
    likely = places[independent * np.log(rest / rest[best]) <= 3.84]
    first, low, high = (int(starts[place]) for place in (places[best], likely.min(), likely.max()))
    return first, low, high, "ramp" if best < len(ramps) else "jump", level, level + rise, p


def _fit(bases: Array, y: Array) -> tuple[float, int, Array]:
    """(explained over unexplained square of the best rising shape, which one, what each leaves unexplained)."""
    total = float(((y - y.mean()) ** 2).sum())
    explained = np.maximum(bases @ (y - y.mean()), 0.0) ** 2
    rest = np.maximum(total - explained, 1e-12)
    best = int(explained.argmax())
    return float(explained[best] / rest[best]), best, rest


def _scores(bases: Array, columns: Array) -> Array:
    """The first of `_fit` for each column."""
    centred = columns - columns.mean(0)
    explained = (np.maximum(bases @ centred, 0.0) ** 2).max(0)
    return explained / np.maximum((centred**2).sum(0) - explained, 1e-12)


def _without_growth(residual: Array, memory: float) -> Array:
    """[n, _RUNS] runs that remember as much as the residuals, of their own innovations in a random order."""
    innovations = residual[1:] - memory * residual[:-1]
    drawn = np.random.default_rng(0).choice(innovations, (len(residual) + 50, _RUNS))  # 50 for it to settle
    for before, now in pairwise(drawn):
        now += memory * before
    return drawn[50:]


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Array]:
    """What may have moved with k3_kl, by name: a value a step, NaN where it was not recorded."""
    names = dict.fromkeys(name for row in rows for name in row if _may_explain(name))
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    tokens, sequences = columns.get(f"{PREFIX}tokens"), columns.pop(f"{PREFIX}sequences", None)
    if tokens is not None and sequences is not None:
        columns[LENGTH] = tokens / np.maximum(sequences, 1.0)
        del columns[f"{PREFIX}tokens"]
    return columns


def _may_explain(name: str) -> bool:
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX).startswith(_INDEPENDENT)
    return not _CLOCKS.search(name)


def _companions(k3_kl: Array, columns: Mapping[str, Array], place: int) -> tuple[Companion, ...]:
    """The columns that correlate with k3_kl from the change point on, beyond chance among as many, and did not move in
    the same direction before it; those first that also follow its ups and downs around the common trend."""
    found: list[tuple[float, Companion]] = []
    chance = NormalDist().inv_cdf(1.0 - 0.005 / max(len(columns), 1))
    for name, column in columns.items():
        there = np.isfinite(column)
        after = there.copy()
        after[:place] = False
        before = there & ~np.isin(np.arange(len(column)), np.arange(place, len(column)))
        count = int(after.sum())
        if count < 8:
            continue
        correlation = _rank_correlation(column[after], k3_kl[after])
        if abs(correlation) < max(MIN_CORRELATION, chance / math.sqrt(count - 1)):
            continue
        time = np.arange(len(column), dtype=np.float64)
        drift = _rank_correlation(column[before], time[before]) if before.sum() >= 8 else 0.0
        if abs(drift) >= MIN_CORRELATION and drift * _rank_correlation(column[after], time[after]) > 0:
            continue
        follows = _rank_correlation(_detrended(column[after]), _detrended(np.log(np.maximum(k3_kl[after], 1e-12))))
        strength = abs(correlation) + max(follows * math.copysign(1.0, correlation), 0.0)
        found.append((strength, Companion(name, round(correlation, 3), count)))
    found.sort(key=lambda item: -item[0])
    return tuple(companion for _, companion in found[:SHOWN])


def _detrended(values: Array) -> Array:
    time = np.arange(len(values)) - (len(values) - 1) / 2
    return values - values.mean() - time * float(time @ values) / float(time @ time)


def _rank_correlation(x: Array, y: Array) -> float:
    """Spearman's, ties sharing their mean rank; 0 where one is constant."""
    a, b = (_ranks(values) for values in (x, y))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else 0.0


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return ranks - ranks.mean()
