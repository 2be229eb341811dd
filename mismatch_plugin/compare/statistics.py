"""From a run folder of `compare` to statements: outcomes of runs, paired differences to PPO, and what is significant.

`command` says what the folder holds. Outcomes are named before the run. Primary: the final value (exact match where it
was recorded, else reward). Secondary: area under the curve, and collapsed or not. Differences are paired: variant minus
PPO on the same seed. Each outcome has its own p-values, by Holm's method for the variants of a setting. Only finished
runs count. All tests are two-sided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.files import read_json_object
from mismatch_plugin.report.log import number_in, read_records

Array = NDArray[np.float64]

BASELINE = "PPO"
LEVEL = 0.05
"""Two-sided level of significance, after Holm's correction."""
FEW_SEEDS = 3
"""Below this many paired seeds nothing is judged."""
EXACT_SEEDS = 40
"""Up to so many pairs p is exact, over all 2^n signs; beyond them it is that of Student's t."""
WINDOW = 3
"""Evaluations of a running mean; a final value is the mean of at least so many."""
_SAME = 1e-12
"""Differences up to this are rounding."""

KL = f"{PREFIX}kl"
OUTCOMES = ("held_out_exact", "held_out_reward", "exact", "reward")


@dataclass(frozen=True)
class Paired:
    """Mean paired difference, standard error, 95 % interval of Student's t, p-value, and p after Holm's correction."""

    n: int
    mean: float
    error: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def same(self) -> bool:
        """True where the two gave the same value on every seed."""
        return self.n > 0 and abs(self.mean) <= _SAME and not self.error > _SAME

    @property
    def verdict(self) -> str:
        """`same`, `too few seeds`, `not significant`, `better` or `worse`; higher values are better."""
        if self.same:
            return "same"
        if self.n < FEW_SEEDS:
            return "too few seeds"
        return ("better" if self.mean > 0 else "worse") if self.p_holm < LEVEL else "not significant"

    @property
    def effect_size(self) -> float:
        """Cohen's d_z: mean over standard deviation of the differences; NaN where there is no deviation."""
        return self.mean / (self.error * math.sqrt(self.n)) if self.error > _SAME else math.nan


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired:
    """values − baseline (by seed) over the seeds that both have, with p of the sign-flip test."""
    d = np.array([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())])
    if len(d) < 2:
        return Paired(len(d), float(d.mean()) if len(d) else math.nan)
    mean, error = float(d.mean()), float(stats.sem(d))
    half = float(stats.t.ppf(0.975, len(d) - 1)) * error
    exact = len(d) <= EXACT_SEEDS
    p = sign_flip_p(d) if exact else 2.0 * float(stats.t.sf(abs(mean) / max(error, _SAME), len(d) - 1))
    return Paired(len(d), mean, error, mean - half, mean + half, p)


def sign_flip_p(differences: Sequence[float] | Array) -> float:
    """Share of the 2^n signs of the differences under which |Σ| is at least the observed one (Fisher 1935).

    Were the two variants exchangeable, each difference could have had either sign. Of differences of zeros and ones
    this is McNemar's exact test.
    """
    d = np.asarray(differences, dtype=np.float64)
    halves = [d[: len(d) // 2], d[len(d) // 2 :]]
    for i, half in enumerate(halves):
        sums = np.zeros(1)
        for value in half.tolist():
            sums = np.concatenate((sums + value, sums - value))
        halves[i] = np.sort(sums)
    reach = abs(d.sum()) - _SAME * np.abs(d).sum()  # equal sums count, up to rounding
    below = np.searchsorted(halves[1], -reach - halves[0], "right").sum()
    return min(1.0, 2.0 * float(below) / 2.0 ** len(d))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order = np.argsort(p_values, kind="stable")
    scaled = np.minimum(1.0, np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1))
    return np.maximum.accumulate(scaled)[np.argsort(order)].tolist()


def corrected(pairs: Sequence[Paired]) -> list[Paired]:
    """Holm over the comparisons that can be judged: enough seeds, and not the same on all, whose p is 1 in any case."""
    judged = [i for i, pair in enumerate(pairs) if pair.n >= FEW_SEEDS and not pair.same]
    p_holm = dict(zip(judged, holm([pairs[i].p for i in judged]), strict=True))
    return [replace(pair, p_holm=p_holm.get(i, math.nan)) for i, pair in enumerate(pairs)]


@dataclass(frozen=True, eq=False)
class Run:
    """One seed of one variant in one setting: steps [T], and columns [T] by name, NaN where nothing was recorded."""

    steps: Array
    columns: dict[str, Array] = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    finished: bool = False
    diverged: bool = False
    """Its gradient stopped being finite: finished and collapsed, and its outcome is 0 from there on."""

    def curve(self, name: str) -> tuple[Array, Array]:
        """(steps, values) where the column has a finite value."""
        values = self.columns.get(name, np.full(len(self.steps), np.nan))
        there = np.isfinite(values)
        return self.steps[there], values[there]


@dataclass(frozen=True, eq=False)
class Folder:
    """What a run folder holds: variants by setting, runs by (setting, variant, seed), sentences on what is missing."""

    info: dict[str, Any]
    variants: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    runs: dict[tuple[str, str, int], Run] = field(repr=False)
    missing: tuple[str, ...] = ()

    def of(self, setting: str, variant: str) -> dict[int, Run]:
        """The finished runs of a variant by seed; the unfinished ones where there is no other."""
        runs = {seed: run for (s, v, seed), run in sorted(self.runs.items()) if (s, v) == (setting, variant)}
        return {seed: run for seed, run in runs.items() if run.finished} or runs

    def about(self, setting: str) -> dict[str, str]:
        """Title, what and task of a setting as run.json has them; its name as the title where it says nothing of it."""
        entry = mapping(mapping(self.info.get("about_settings")).get(setting))
        return {"title": setting, "what": "", "task": "", **{key: str(text) for key, text in entry.items() if text}}

    def measure(self) -> str | None:
        """The column that judges: exact match on held-out prompts, else the reward there, else those of the batches."""
        return next((name for name in OUTCOMES if any(len(run.curve(name)[0]) for run in self.runs.values())), None)


def read_folder(root: Path) -> Folder:
    """Read a run folder. What is missing or cut is skipped and said; OSError, ValueError without a whole run.json."""
    info, missing = read_json_object(root / "run.json"), list[str]()
    if not {"settings", "seeds"} <= info.keys():
        raise ValueError(f"{root / 'run.json'} has no settings or no seeds: it is not what compare wrote.")
    plan: dict[str, list[str]] = info.get("plan", {})  # runs that were collected have none
    runs: dict[tuple[str, str, int], Run] = {}
    started: dict[tuple[str, str, int], None] = {}
    for folder in sorted(root.glob("*/*/seed*")):
        if not (number := folder.name.removeprefix("seed")).isdecimal():
            continue
        config = _read_json(folder / "config.json") or {}
        key = (folder.parent.parent.name, str(config.get("variant") or folder.parent.name), int(number))
        started[key] = None
        run, notes = _read_run(folder, config)
        missing += [f"{key[0]}, {key[1]}, seed {key[2]}: {note}" for note in notes]
        if run is not None:
            runs[key] = run
    variants: dict[str, tuple[str, ...]] = {}
    for setting in info["settings"]:
        planned = plan.get(setting, [])
        variants[setting] = tuple(dict.fromkeys([*planned, *(v for s, v, _ in started if s == setting)]))
        for variant in planned:
            if absent := [str(seed) for seed in info["seeds"] if (setting, variant, seed) not in started]:
                missing.append(f"{setting}, {variant}: seed{'s' * (len(absent) > 1)} {', '.join(absent)} not started.")
    return Folder(info, variants, tuple(info["seeds"]), runs, tuple(missing))


def _read_run(folder: Path, config: dict[str, Any]) -> tuple[Run | None, list[str]]:
    """The run, None where it holds no step; and sentences about what is wrong with it."""
    records: dict[int, dict[str, Any]] = {}
    bad, last, notes = 0, 0, list[str]()
    for record in read_records(folder / "metrics.jsonl"):
        step = None if record is None else record.get("step", last + 1)
        if record is None or not isinstance(step, int | float) or step % 1:
            bad += 1
            continue
        last = int(step)
        records[last] = record  # a step written twice counts as it was written last
    if bad:
        notes.append(f"{bad} damaged line{'s' * (bad > 1)} skipped.")
    if not records:
        return None, [*notes, "started, but holds no step."]
    done, last = _read_json(folder / "done.json"), max(records)
    finished, diverged, end = done is not None, mapping(done).get("status") == "diverged", mapping(done).get("step")
    if isinstance(end, int) and last < end:
        finished = False
        notes.append(f"ended at step {end}, and its metrics stop at step {last}; left out of every comparison.")
    elif not finished:
        why = "done.json is damaged" if (folder / "done.json").exists() else f"unfinished, {len(records)} steps"
        notes.append(f"{why}; left out of every comparison.")
    steps = np.array(sorted(records), dtype=np.float64)
    rows = [{**records[step], **mapping(records[step].get("metrics"))} for step in sorted(records)]
    written = [c for c in COLUMNS if any(c in row for row in rows)]
    columns = {c: np.array([number_in(row.get(c)) for row in rows], dtype=float) for c in written}  # None is NaN
    if diverged:
        broken = ~np.isfinite(columns.get("grad_norm", np.zeros(len(steps)))) & (steps > 0)
        after = steps >= (steps[broken].min() if broken.any() else steps[-1])
        columns |= {name: np.where(after, 0.0, columns[name]) for name in OUTCOMES if name in columns}
    for column in ("reward", "exact", *(() if diverged else ("grad_norm",))):  # step 0 is an evaluation alone
        if lost := int((~np.isfinite(columns.get(column, steps)[steps > 0])).sum()):
            notes.append(f"{column} is no finite number at {lost} step{'s' * (lost > 1)}.")
    return Run(steps, columns, config, finished, diverged), notes


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return None


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object as it is; of anything else an empty one."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Variant:
    """One variant in one setting. finals, areas, collapsed: by seed; the differences are to PPO, None for PPO."""

    name: str
    finals: dict[int, float]
    collapsed: dict[int, bool]
    areas: dict[int, float] = field(default_factory=dict[int, float])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    difference: Paired | None = None
    area_difference: Paired | None = None
    collapse_difference: Paired | None = None

    @property
    def mean(self) -> float:
        """Mean final value over the seeds; NaN without any."""
        return float(np.mean([*self.finals.values()])) if self.finals else math.nan

    @property
    def error(self) -> float:
        """Its standard error; NaN below two seeds."""
        return float(stats.sem([*self.finals.values()])) if len(self.finals) > 1 else math.nan

    @property
    def fell(self) -> int:
        """How many runs collapsed."""
        return sum(self.collapsed.values())

    @property
    def verdict(self) -> str:
        """Of the final value against PPO; empty for PPO and where no pair has finished."""
        return self.difference.verdict if self.difference is not None and self.difference.n else ""


Results = dict[str, dict[str, Variant]]
"""Setting → name → variant."""


def summarise(folder: Folder) -> Results:
    """Every variant of every setting, compared with PPO."""
    measure, results = folder.measure(), Results()
    for setting, names in folder.variants.items():
        variants: list[Variant] = []
        for name in names:
            runs = folder.of(setting, name)
            curves = {seed: run.curve(measure) for seed, run in runs.items() if measure and run.finished}
            curves = {seed: curve for seed, curve in curves.items() if len(curve[0])}
            diverged = {seed for seed, run in runs.items() if run.diverged}
            finals = {seed: 0.0 if seed in diverged else final_value(values) for seed, (_, values) in curves.items()}
            fell = {seed: seed in diverged or has_collapsed(values) for seed, (_, values) in curves.items()}
            areas = {seed: area_under_curve(*curve) for seed, curve in curves.items()}
            variants.append(Variant(name, finals, fell, areas, figures_of(runs.values())))
        results[setting] = judged(variants)
    return results


def judged(variants: Iterable[Variant]) -> dict[str, Variant]:
    """The variants of a setting by name, each with its differences to PPO, corrected by Holm's method."""
    found = {variant.name: variant for variant in variants}
    if (base := found.get(BASELINE)) is not None:
        others = [variant for variant in found.values() if variant is not base]
        ends = corrected([paired_difference(v.finals, base.finals) for v in others])
        areas = corrected([paired_difference(v.areas, base.areas) for v in others])
        upright = {v.name: {seed: float(not fell) for seed, fell in v.collapsed.items()} for v in found.values()}
        collapses = corrected([paired_difference(upright[v.name], upright[base.name]) for v in others])
        for v, end, area, collapse in zip(others, ends, areas, collapses, strict=True):
            found[v.name] = replace(v, difference=end, area_difference=area, collapse_difference=collapse)
    return found


def final_value(values: Array) -> float:
    """Mean of the last tenth of the evaluations, at least three; NaN where there is none."""
    return float(values[-max(WINDOW, -(-len(values) // 10)) :].mean()) if len(values) else math.nan


def has_collapsed(values: Array) -> bool:
    """Whether the final value is less than half of the highest mean of three evaluations. False below three of them."""
    if len(values) < WINDOW:
        return False
    peak = float(np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid").max())
    return peak > 0.0 and final_value(values) < 0.5 * peak


def area_under_curve(steps: Array, values: Array) -> float:
    """Area by the trapezoid rule over the range of steps: the mean height of the curve. NaN where there is none."""
    if len(values) < 2:
        return float(values[0]) if len(values) else math.nan
    return float(np.diff(steps) @ (values[1:] + values[:-1]) / 2.0 / (steps[-1] - steps[0]))


FIGURES: dict[str, tuple[str, Callable[[Array], Any], Callable[..., Any]]] = {
    "grad_norm": ("grad_norm", np.max, np.median),
    "kl": (KL, final_value, np.mean),
    "impossible": ("impossible_tokens", final_value, np.mean),
    "mean_kl": (KL, np.mean, np.mean),
    "ratio_ess": (f"{PREFIX}rollout_is_ratio_eff_sample_size", np.mean, np.mean),
    "weight": (f"{PREFIX}rollout_is_weight_after_mean", np.mean, np.mean),
    "weight_ess": (f"{PREFIX}rollout_is_weight_after_eff_sample_size", np.mean, np.mean),
    "rejected": (f"{PREFIX}accepted_token_fraction", lambda accepted: 1.0 - accepted.mean(), np.mean),
}
"""What was measured along the way: its column, what is taken of a run's steps, and what over seeds.

grad_norm: before clipping. impossible: share of sampled tokens that the trainer gives a probability below 1e-4.
"""
COLUMNS = {*OUTCOMES, *(column for column, *_ in FIGURES.values())}
"""What is read of a step; the files hold more."""


def figures_of(runs: Iterable[Run]) -> dict[str, float]:
    """The FIGURES that the runs recorded."""
    figures: dict[str, float] = {}
    for name, (column, of_steps, over_seeds) in FIGURES.items():
        if found := [of_steps(values) for run in runs if len(values := run.curve(column)[1])]:
            figures[name] = float(over_seeds(found))
    return figures
