"""What the detectors' constants rest on: what they are compared with, in held-out clean batches and planted faults.

python -m tests.diagnose.detectors.calibration            statistics next to the constants that judge them
python -m tests.diagnose.detectors.calibration --table    the table of docs/inspect.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors import distribution, tokens, weights
from mismatch_plugin.diagnose.findings import Finding
from mismatch_plugin.report.table import Table
from tests.fixtures.held_out import RUNS, SIZES, Run, clean
from tests.fixtures.sglang_check.plants import CASES


def planted_table(found: Mapping[Run, list[str]]) -> Table:
    """fault → how often it was named, and first; and under how many other faults it was named."""
    rows = []
    for fault in dict.fromkeys(case.fault for case in CASES):
        mine = [run for run in found if CASES[run.case].fault == fault]
        others = [run for run in found if CASES[run.case].fault != fault]
        cells = [fault]
        for size in SIZES:
            of = [found[run] for run in mine if run.size == size]
            cells.append(f"{sum(fault in names for names in of)} of {len(of)}")
        cells.append(f"{sum(found[run][:1] == [fault] for run in mine)} of {len(mine)}")
        cells.append(f"{sum(fault in found[run] for run in others)} of {len(others)}")
        rows.append(tuple(cells))
    headers = ("fault", "found, mild", "found, strong", "named first", "under other faults")
    return Table("faults planted in other model families", headers, tuple(rows))


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


def statistics_table(seeds: Iterable[int]) -> Table:
    """Quantiles of each statistic over clean batches and under its own fault, of the batches in which it is defined."""
    batches = [clean(seed) for seed in seeds]

    def shown(values: Iterator[float], *quantiles: float) -> tuple[str, ...]:
        told = [value for value in values if np.isfinite(value)]
        return (str(len(told)), *(f"{np.quantile(told, q):.3g}" if told else "–" for q in quantiles))

    rows = []
    for one in STATISTICS:
        cells = [one.fault, one.name, f"{one.constant} {getattr(one.module, one.constant):g}"]
        cells += shown(map(one.of, batches), 0.5, 0.95, 1.0)
        for size in SIZES:
            mine = [run for run in RUNS if CASES[run.case].fault == one.fault and run.size == size]
            cells += shown((one.of(run.batch()) for run in mine), 0.0, 0.5)
        rows.append(tuple(cells))
    headers = ("fault", "statistic", "constant", "clean", "50 %", "95 %", "most")
    headers += ("mild", "least", "median", "strong", "least ", "median ")
    return Table("Detectors' constants and what they are compared with", headers, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--clean", type=int, default=60, help="clean batches")
    options = parser.parse_args()
    table = (
        planted_table({run: run.named() for run in RUNS}) if options.table else statistics_table(range(options.clean))
    )
    print(table.to_markdown())


if __name__ == "__main__":
    main()
