"""Which collectives a step makes: reduction, ranks, shape and bytes, counted exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.correction_cases import LAYOUTS, PRODUCT, Layout, Settings
from tests.distributed.correction_worker import Call, Case, run_counted
from tests.distributed.launch import launch

BATCHES = ("product", "single", "untrained_replica", "rejected", "empty", "nothing")
SOME = tuple(PRODUCT[::13])
PLAIN = Settings(0, "-", "-", False, False, "accepted", "token-mean", rotation=1)
WEIGHTED = replace(PLAIN, algorithm=2, mode="truncate")

# Columns of the one SUM, counted by hand. Without metrics: the log-ratio and the token count. The guide's metrics add
# both log-probs, k3 and χ², at token level also ratio, clamped, its square, high and low; token weights their sum and
# that of their squares. A criterion adds its column, a token criterion the rejected tokens; a veto its own.
COLUMNS = (
    ("off", PLAIN, 2),
    ("off", replace(WEIGHTED, level="token"), 2),
    ("off", replace(WEIGHTED, level="sequence"), 2),
    ("off", replace(WEIGHTED, level="token", normalizes=True), 3),
    ("basic", replace(WEIGHTED, level="sequence"), 6),
    ("basic", replace(WEIGHTED, level="geometric", normalizes=True), 6),
    ("full", replace(WEIGHTED, level="geometric", normalizes=True), 6),
    ("basic", replace(WEIGHTED, level="token"), 13),
    ("basic", replace(WEIGHTED, level="sequence", rejects=True, rotation=0), 9),
)


@cache
def counted(world_size: int) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
    """By batch and layout: for every rank, for each of the settings, its collectives."""
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size]
    cases = [Case(batch, layout, 2, SOME) for layout in layouts for batch in BATCHES]
    results = launch(run_counted, cases, world_size)
    return {(case.batch, case.layout.name): ranks for case, ranks in zip(cases, results, strict=True)}


def neighbours(layout: Layout, rank: int) -> tuple[int, ...]:
    first = rank // layout.cp * layout.cp
    return tuple(range(first, first + layout.cp))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_exactly_these_collectives(layout: Layout, batch: str):
    """Catches a MAX nobody needs, a reduction over data inside a micro-batch, one that autograd differentiates through,
    a number of them that depends on what a rank holds, and a dtype in which counts are not exact.
    """
    for rank, all_counts in enumerate(counted(layout.world_size)[batch, layout.name]):
        cp, everybody = neighbours(layout, rank), tuple(range(layout.world_size))
        for settings, counts in zip(SOME, all_counts, strict=True):
            maxima = sum(criterion.startswith("sequence_max") for criterion in settings.criteria)
            (columns,) = _columns(settings, layout) or {0}

            def inside(*shapes: tuple[str, tuple[int, ...]]) -> list[Call]:
                """No sequences, nothing to reduce: that is so on all ranks of the group."""
                together = layout.cp > 1
                wanted = [Call("all_reduce", op, cp, shape, torch.float64) for op, shape in shapes]
                return [call for call in wanted if together and call.bytes > 0]

            for sequences, loss in zip(counts["sequences"], counts["losses"], strict=True):
                assert loss == inside(("SUM", (columns, sequences)), ("MAX", (maxima, sequences)))
            assert counts["backward"] == []
            sums, extremes = counts["state"]
            assert counts["finish"] == [
                Call("all_reduce", "SUM", everybody, (sums,), torch.float64),
                Call("all_reduce", "MAX", everybody, (extremes,), torch.float64),
            ]
            known = settings.algorithm in (0, 2)
            masks = [inside(("SUM", (sequences,))) for sequences in counts["sequences"]]
            before = counts["losses"] if known else masks
            step = Call("all_reduce", "SUM", everybody, (5,), torch.float64)
            assert counts["prepare"] == [*(call for calls in before for call in calls), step]


def _columns(settings: Settings, layout: Layout) -> set[int]:
    """Rows of the SUM under these settings, over every batch, rank and micro-batch: one number, whatever they hold."""
    if layout.cp == 1:
        return set()
    found = set()
    for batch in BATCHES:
        for ranks in counted(layout.world_size)[batch, layout.name]:
            found |= {loss[0].shape[0] for loss in ranks[SOME.index(settings)]["losses"] if loss}
    return found


def test_columns_counted_by_hand():
    for metrics, settings, columns in COLUMNS:
        case = Case("product", LAYOUTS[0], 1, (settings,), (("metrics", metrics),))
        ((counts,), _) = launch(run_counted, [case], 2)[0]
        assert counts["losses"][0][0].shape == (columns, 15), f"{metrics}, {settings}"
        assert len(counts["finish"]) == (1 if metrics == "off" else 2)
