"""The gate passes, fails, or says that the tokens are too few."""

from __future__ import annotations

import math

import pytest

from mismatch_plugin.core.gate import DEFAULT_GATE_KL
from mismatch_plugin.diagnose.gate import FEW, FEWEST, gate
from mismatch_plugin.diagnose.result import Diagnosis, Gate, Verdict


@pytest.mark.parametrize(
    ("k3_kl", "tokens", "bar", "error", "passed"),
    [
        (9e-4, FEW, None, None, True),
        (1.1e-3, FEW, None, None, False),
        (1.1e-3, FEW, 2e-3, None, True),
        (DEFAULT_GATE_KL, FEW, None, None, True),
        (9e-4, FEW - 1, None, None, None),  # within two standard errors of the bar
        (1e-4, 1000, None, None, True),
        (0.1, 1000, None, None, False),
        (1e-4, FEWEST - 1, None, None, None),
        (0.0, FEWEST, None, None, True),
        (0.0, 3, None, None, None),
        (9e-4, 500, None, 1e-5, True),
        (1.1e-3, 500, None, 1e-5, False),
        (1.1e-3, 500, None, 1e-4, None),
        (math.nan, 10**6, None, None, None),
    ],
)
def test_passes_fails_or_does_not_decide(
    k3_kl: float, tokens: int, bar: float | None, error: float | None, passed: bool | None
) -> None:
    found = gate(k3_kl, tokens, bar, error)
    assert found.passed is passed
    assert found.bar == (DEFAULT_GATE_KL if bar is None else bar)
    assert ("xtuner#2044" in found.source) == (bar is None)


@pytest.mark.parametrize("bar", [0.0, -1e-3, math.nan, math.inf])
def test_a_bar_that_is_none_is_refused(bar: float) -> None:
    with pytest.raises(ValueError, match="bar of the gate"):
        gate(1e-4, FEW, bar)


@pytest.mark.parametrize(
    ("verdict", "passed", "status"),
    [
        ("normal", True, 0),
        ("normal", False, 1),
        ("normal", None, 3),
        ("large", True, 0),
        ("fault", True, 1),
        ("fault", None, 1),
        ("undecided", True, 3),
        ("undecided", False, 1),
    ],
)
def test_exit_status(verdict: Verdict, passed: bool | None, status: int) -> None:
    checked = Gate(value=1e-4, bar=1e-3, passed=passed, source="given by hand")
    shown = Diagnosis(verdict=verdict, headline="", source="", format="", samples=1, tokens=1, gate=checked)
    assert shown.exit_status == status
