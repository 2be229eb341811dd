"""The three levels by hand, and that nothing but `core/units.py` and the settings asks which one it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config.sections import Level
from mismatch_plugin.core.units import UNITS, acting_bounds, units_of

LOG_RATIO = torch.tensor([0.1, 0.0, 0.5, -0.4])  # the second token is masked, the third sequence is empty
INDEX = torch.tensor([0, 0, 0, 1])
SUMS = {"log_ratio": torch.tensor([0.6, -0.4, 0.0]), "tokens": torch.tensor([2.0, 1.0, 0.0])}


@pytest.mark.parametrize(
    ("level", "aggregated", "spread"),
    [
        ("token", [0.1, 0.0, 0.5, -0.4], [0.1, 0.0, 0.5, -0.4]),
        ("sequence", [0.6, -0.4, 0.0], [0.6, 0.6, 0.6, -0.4]),
        ("geometric", [0.3, -0.4, 0.0], [0.3, 0.3, 0.3, -0.4]),
    ],
)
def test_aggregates_and_their_way_back(level: str, aggregated: list[float], spread: list[float]) -> None:
    units = UNITS[level]
    found = units.aggregate(LOG_RATIO, SUMS)
    assert found.tolist() == pytest.approx(aggregated)
    assert units.to_tokens(found, INDEX).tolist() == pytest.approx(spread)


def test_every_level_of_the_settings_has_its_units() -> None:
    assert {*UNITS, "none"} == {*get_args(Level)}
    assert [name for name, units in UNITS.items() if units.per_token] == ["token"]
    assert [name for name, units in UNITS.items() if units.multiplies] == ["sequence"]
    assert units_of(mp.preset("pg_rs")).name == "token"  # level none: metrics of tokens


def test_the_bounds_that_act() -> None:
    assert acting_bounds(mp.MismatchConfig()) is None
    assert acting_bounds(mp.preset("seq_is")) == ("sequence", 0.5, 2.0)
    assert acting_bounds(mp.preset("geo_rs")) == ("geometric", 1 / 1.001, 1.001)
    assert acting_bounds(mp.preset("ppo_is_bypass")) == ("token", 0.5, 2.0)


def test_nothing_else_asks_which_level_it_is() -> None:
    root = Path(mp.__file__).parent
    asks = re.compile(r"level (==|!=|in|not in) |aggregate (==|!=) \"token\"")
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] in ("core", "parallel", "hooks")]
    asking = [path.name for path in files if path.name != "units.py" and asks.search(path.read_text())]
    assert len(files) > 40 and asking == []
