"""What the detectors' constants rest on: what they are compared with, in held-out clean batches and planted faults.

python -m tests.diagnose.detectors.calibration
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from mismatch_plugin.diagnose.batch import Batch, Outcome, make_batch
from mismatch_plugin.diagnose.detectors import distribution, tokens, weights
from mismatch_plugin.diagnose.result import Finding
from mismatch_plugin.report.table import Table
from tests.diagnose.detectors.test_planted import HELD_OUT, SIZES, Run, clean_of_families, of_model
from tests.fixtures.sglang_check.plants import CASES, EOS
from tests.fixtures.sglang_check.policies import checkpoint, of_family, score

CLEAN_BATCHES = 60


def planted_batch(run: Run) -> Batch:
    """One fault in responses of one model."""
    case, strong = CASES[run.case], run.size == "strong"
    with of_family(run.family, 40 + run.seed):
        samples = (case.strong if strong else case.mild)([*of_model(run.family, run.seed)])
        start, now = (form.format(case.sizes[strong]) for form in (case.start, case.now))
        if start:
            first = score(start, samples)
            samples = [s.with_fields(ref_log_probs=f.train_log_probs) for s, f in zip(samples, first, strict=True)]
        batch = make_batch(samples, eos_ids=[EOS])
        if now:
            batch = replace(batch, now=checkpoint(now), start=checkpoint(start), from_checkpoint=True)
        return batch


class Statistic(NamedTuple):
    """What a detector compares with a constant. opened: constants at which it says whatever it measured."""

    find: Callable[[Batch], Outcome]
    fault: str
    name: str
    module: ModuleType
    constant: str
    opened: dict[str, float]

    def of(self, batch: Batch) -> float:
        """NaN where the detector's other conditions are not met."""
        with patch.multiple(self.module, **dict[str, Any](self.opened)):
            items = [item for item in self.find(batch)[0] if isinstance(item, Finding) and item.fault == self.fault]
        return abs(float(items[0].statistics.get(self.name, np.nan))) if items else np.nan


_SLOPE = {"MIN_SLOPE": 0.0, "SLOPE_OVER_NOISE": 0.0, "SLOPE_Z_SCORE": 0.0, "SLOPE_SHARE": 0.0}
_REPEATED = {"REPEATED_Z_SCORE": 0.0, "REPEATED_SHARE": 0.0}
_ENTROPY = {"MIN_ENTROPY_GAP_NATS": 0.0, "ENTROPY_Z_SCORE": 0.0}
_OFFSET = {"MIN_OFFSET_NATS": 0.0, "OFFSET_TIMES_TYPICAL": 3.0, "OFFSET_TIMES_OTHER_IDS": 0.0}
_DECAY = {"DECAY": 0.0, "STANDARD_ERRORS": -1e9, "MIN_GAP_NATS": 0.0}
_RANKS = {"LARGEST_P": 1.0, "PAIRS_FURTHER": 0.5}
_SPLIT = {"SPLIT_RATIO": 1.0, "SEPARATION": 0.0, "SPLIT_GAP": 0.0}
STATISTICS = (
    Statistic(distribution.find_temperature, "temperature", "standard_errors", distribution, "SLOPE_Z_SCORE", _SLOPE),
    Statistic(distribution.find_temperature, "temperature", "explained", distribution, "SLOPE_SHARE", _SLOPE),
    Statistic(distribution.find_penalty, "penalty", "standard_errors", distribution, "REPEATED_Z_SCORE", _REPEATED),
    Statistic(distribution.find_penalty, "penalty", "explained", distribution, "REPEATED_SHARE", _REPEATED),
    Statistic(distribution.find_sampling, "truncation", "standard_errors", distribution, "ENTROPY_Z_SCORE", _ENTROPY),
    Statistic(
        tokens.find_token_offset,
        "token_offset",
        "times_other_ids",
        tokens,
        "OFFSET_TIMES_OTHER_IDS",
        _OFFSET,
    ),
    Statistic(tokens.find_wrong_prompt, "wrong_prompt", "ratio", tokens, "DECAY", _DECAY),
    Statistic(tokens.find_wrong_prompt, "wrong_prompt", "deviations", tokens, "STANDARD_ERRORS", _DECAY),
    Statistic(weights.find_stale_server, "stale_server", "area", weights, "PAIRS_FURTHER", _RANKS),
    Statistic(weights.find_split, "stale_server", "ratio", weights, "SPLIT_RATIO", _SPLIT),
    Statistic(weights.find_split, "stale_server", "separation", weights, "SEPARATION", _SPLIT),
)


def main() -> None:
    """Quantiles of each statistic over clean batches and under its own fault, of the batches in which it is defined."""
    batches = [make_batch(clean_of_families(seed)[0], eos_ids=[EOS]) for seed in range(CLEAN_BATCHES)]

    def shown(values: Iterator[float], *quantiles: float) -> tuple[str, ...]:
        told = [value for value in values if np.isfinite(value)]
        return (str(len(told)), *(f"{np.quantile(told, q):.3g}" if told else "–" for q in quantiles))

    rows = []
    for one in STATISTICS:
        cells = [one.fault, one.name, f"{one.constant} {getattr(one.module, one.constant):g}"]
        cells += shown(map(one.of, batches), 0.5, 0.95, 1.0)
        for size in SIZES:
            mine = [run for run in HELD_OUT if CASES[run.case].fault == one.fault and run.size == size]
            cells += shown((one.of(planted_batch(run)) for run in mine), 0.0, 0.5)
        rows.append(tuple(cells))
    headers = ("fault", "statistic", "constant", "clean", "50 %", "95 %", "most")
    headers += ("mild", "least", "median", "strong", "least ", "median ")
    print(Table("Detectors' constants and what they are compared with", headers, tuple(rows)).to_markdown())


if __name__ == "__main__":
    main()
