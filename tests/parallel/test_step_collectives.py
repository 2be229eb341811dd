"""Which collectives a step makes: reduction, ranks, shape and bytes, counted exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config.values import merge
from tests.distributed.correction_cases import LAYOUTS, LENGTHS, PRODUCT, Layout, Settings, make
from tests.distributed.correction_worker import Call, Case, run_budgets, run_counted
from tests.distributed.launch import launch

BATCHES = ("product", "single", "untrained_replica", "rejected", "empty", "nothing")
SOME = tuple(PRODUCT[::23])
PLAIN = Settings(0, "-", "-", False, False, "accepted", "token-mean", rotation=2)
WEIGHTED = replace(PLAIN, algorithm=2, mode="truncate")

# Columns of the one SUM, counted by hand. Without metrics: the log-ratio and the token count. The guide's metrics add
# log π_train (log π_rollout is that less the log-ratio), k3, ρ − 1 and its square; token level also ρ clamped, its
# square, high and low; token weights their sum, that of their squares and of (w − 1)². Token criteria add the rejected
# tokens, a veto its column; k3 is there already; conditions of sequences add the advantages. Under rotation 3 k3 is
# that of π_θ, which is not there, and staleness is a second token criterion, so that each has a column; and gspo's two.
# The other levels' second numbers: what is summed over every part (log-ratios, tokens), then columns of the second SUM,
# where prefix has its weights (three), ρ − 1, ρ clamped, both squared, ρ², high and low.
COLUMNS = (
    ("off", PLAIN, 2),
    ("off", replace(WEIGHTED, level="token"), 2),
    ("off", replace(WEIGHTED, level="sequence"), 2),
    ("off", replace(WEIGHTED, level="token", normalizes=True), 3),
    ("basic", replace(WEIGHTED, level="sequence"), 6),
    ("basic", replace(WEIGHTED, level="geometric", normalizes=True), 6),
    ("full", replace(WEIGHTED, level="geometric", normalizes=True), 6),
    ("basic", replace(WEIGHTED, level="token"), 13),
    ("off", replace(PLAIN, rotation=4), 4),  # gspo: Σ log r and the tokens that enter
    ("basic", replace(WEIGHTED, level="token", rotation=4), 15),
    ("basic", replace(WEIGHTED, level="sequence", rejects=True, rotation=0), 9),
    ("basic", replace(WEIGHTED, level="sequence", rejects=True, rotation=3), 14),
    ("off", replace(WEIGHTED, level="turn", normalizes=True), 2, 2),
    ("basic", replace(WEIGHTED, level="turn"), 6, 2),
    ("basic", replace(WEIGHTED, level="turn", rejects=True, rotation=0), 9, 3),
    ("off", replace(WEIGHTED, level="prefix"), 2, 2),
    ("off", replace(WEIGHTED, level="prefix", normalizes=True), 2, 2, 1),
    ("off", replace(WEIGHTED, level="prefix", mode="mask"), 2, 2, 1),
    ("basic", replace(WEIGHTED, level="prefix"), 6, 2, 11),
    ("basic", replace(WEIGHTED, level="prefix", rejects=True, rotation=0), 8, 2, 12),
)


@cache
def counted(world_size: int) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
    """By batch and layout: for every rank, for each of the settings, its collectives."""
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size]
    cases = [Case(batch, layout, 2, SOME) for layout in layouts for batch in BATCHES]
    results = launch(run_counted, cases, world_size)
    return {(case.batch, case.layout.name): ranks for case, ranks in zip(cases, results, strict=True)}


@dataclass(frozen=True)
class Rank:
    """The groups that a rank is in."""

    layout: Layout
    rank: int

    def inside(self, *wanted: tuple[str, tuple[int, ...]]) -> list[Call]:
        """Over its context-parallel group. No sequences, nothing to reduce: on all ranks of the group alike."""
        first = self.rank // self.layout.cp * self.layout.cp
        ranks = tuple(range(first, first + self.layout.cp))
        calls = [Call(operation, ranks, shape, torch.float64) for operation, shape in wanted]
        return [call for call in calls if len(ranks) > 1 and call.bytes > 0]

    def over_data(self, operation: str, size: int) -> Call:
        return Call(operation, tuple(range(self.layout.world_size)), (size,), torch.float64)


PARTS = ("turn", "prefix")


def parts_of(settings: Settings, layout: Layout, sequences: int, turns: int) -> int:
    """Numbers that the first SUM has for turns or chunks: log-ratio and tokens, of turns also what is rejected, and the
    advantages where these are read."""
    chunks = {"none": 1, "zigzag": 2 * layout.cp, "contiguous": layout.cp}[layout.context]
    return {"turn": (2 + settings.rejects + settings.by_sign) * turns, "prefix": 2 * chunks * sequences}.get(
        settings.level, 0
    )


def columns_of(call: Call, sequences: int, parts: int) -> int:
    """Columns that are summed over sequences."""
    return call.shape[0] if len(call.shape) == 2 else (call.shape[0] - parts) // sequences


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_exactly_these_collectives(layout: Layout):
    """Catches a MAX nobody needs, a reduction over data inside a micro-batch, one that autograd differentiates through,
    a number of them that depends on what a rank holds, and a dtype in which counts are not exact.
    """
    assert {any("sequence_max" in criterion for criterion in s.criteria) for s in SOME if s.rejects} == {False, True}
    for number, settings in enumerate(SOME):
        steps = [
            (Rank(layout, rank), counts[number])
            for batch in BATCHES
            for rank, counts in enumerate(counted(layout.world_size)[batch, layout.name])
        ]
        maxima = sum(criterion.startswith("sequence_max") for criterion in settings.criteria)
        shapes = [
            (loss, n, parts_of(settings, layout, n, turns))
            for _, counts in steps
            for loss, n, turns in zip(counts["losses"], counts["sequences"], counts["turns"], strict=True)
            if loss
        ]
        first = {columns_of(loss[0], n, parts) for loss, n, parts in shapes}
        second = {loss[-1].shape[0] for loss, _, _ in shapes if settings.level == "prefix"}
        assert len(first) == (1 if layout.cp > 1 else 0), "as many columns, whatever there is on a rank"
        assert len(second) == (settings.level == "prefix" and layout.cp > 1)
        (columns,), (late,) = first or {0}, second or {0}
        for rank, counts in steps:
            losses, masks = [], []
            for n, turns in zip(counts["sequences"], counts["turns"], strict=True):
                parts = parts_of(settings, layout, n, turns)
                shape = (columns * n + parts,) if settings.level in PARTS else (columns, n)
                losses.append(rank.inside(("SUM", shape), ("MAX", (maxima, n)), ("SUM", (late, n))))
                masks.append(rank.inside(("SUM", (n * (1 + settings.limits_staleness),))))
            assert counts["losses"] == losses, settings
            assert counts["backward"] == []
            sums, extremes = counts["state"]
            agreement = rank.inside(("MAX", (9,))) + [rank.over_data("MAX", 9)] * (layout.dp > 1)
            assert counts["start"] == agreement, "over CP, and over DP × CP where that is more"
            assert counts["finish"] == [rank.over_data("SUM", sums), rank.over_data("MAX", extremes)]
            # What is kept or weighed is known from π_old; elsewhere the masks alone are counted.
            config = settings.config()
            judged = config.normalizes_step or (config.rejects_by_log_probs and not config.dry_run)
            judged = judged and settings.algorithm in (0, 2)
            reused = judged and not settings.rejects_on_current_policy and settings.objective not in ("gspo", "gmpo")
            assert counts["again"] == ([[] for _ in losses] if reused else losses), "nothing is reduced twice"
            *before, total = counts["prepare"]
            assert total == rank.over_data("SUM", 7)
            if reused or not judged:
                assert before == [call for calls in (losses if reused else masks) for call in calls]
            else:  # as the loss, whose SUM has the columns of metrics and objective, too
                kinds = [(call.operation, call.ranks) for call in before]
                expected = [rank.inside(("SUM", (columns, n)), ("MAX", (maxima, n))) for n in counts["sequences"]]
                assert settings.level == "prefix" or kinds == [
                    (call.operation, call.ranks) for calls in expected for call in calls
                ]
                assert sum(call.bytes for call in before) <= sum(call.bytes for calls in losses for call in calls)


BUDGETS = (
    ({}, ("token:k2:0.002:mean=0.004", "sequence_mean:k3:0.001:share=0.3")),
    ({"use_rollout_log_probs": True, "metrics": "off"}, ("sequence_max:k2:0.05:share=0.2",)),
    ({"rs": {"policy": "current"}, "metrics": "full"}, ("token:tv:0.02:share=0.05", "sequence_sum:k2:0.1:mean=0.2")),
    ({"use_tis": True, "use_rollout_log_probs": True}, ("token:binary_kl:0.002:share=0.1",)),
)


@pytest.mark.parametrize("world_size", [2, 4])
def test_budgets_are_the_same_for_every_split(world_size: int) -> None:
    """And bring no collective: the histogram travels in the step's SUM."""

    def configs(criteria: Callable[[str], str]) -> list[tuple[str, mp.MismatchConfig]]:
        """Under names of their own, as a case wants its changes."""
        return [
            (f"{number}", mp.MismatchConfig.model_validate(merge(given, {"rs": {"criteria": [*map(criteria, rules)]}})))
            for number, (given, rules) in enumerate(BUDGETS)
        ]

    budgets, plain = configs(str), configs(lambda rule: rule.rpartition(":")[0])
    whole = make("product")
    packed = whole.packed().prepared()
    cases = [
        Case("product", layout, count, (), tuple(changes))
        for layout in LAYOUTS
        if layout.world_size == world_size
        for count in (1, 3)
        for changes in (budgets, plain)
    ]
    results = launch(run_budgets, cases, world_size)
    for number, (_, config) in enumerate(budgets):
        keep, thresholds = [], None
        for _ in range(2):
            result = mp.policy_loss(whole.log_probs, packed, config, thresholds=thresholds)
            keep.append(result.correction.keep)
            thresholds = result.statistics.thresholds()
        assert thresholds is not None
        assert not torch.equal(*keep), f"{config.rs} changes nothing in the second step"
        for of_budgets, of_plain in zip(results[::2], results[1::2], strict=True):
            found = [torch.zeros_like(each) for each in keep]
            for rank, (places, kept, bounds, calls) in enumerate(each[number] for each in of_budgets):
                for own, mine in zip(found, kept, strict=True):
                    own[places] = mine
                assert bounds == {name: float(value) for name, value in thresholds.items()}
                assert calls == of_plain[rank][number][-1]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, keep, strict=True)), config.rs


def test_columns_counted_by_hand():
    n = len(LENGTHS)
    cases = [Case("product", LAYOUTS[0], 1, (settings,), (("metrics", metrics),)) for metrics, settings, *_ in COLUMNS]
    for (metrics, settings, columns, *more), (ranks, _) in zip(COLUMNS, launch(run_counted, cases, 2), strict=True):
        (counts,) = ranks
        parts = counts["turns"][0] if settings.level == "turn" else 4 * n
        shapes = [(columns * n + more[0] * parts,)] if more else [(columns, n)]
        maxima = sum(criterion.startswith("sequence_max") for criterion in settings.criteria)
        shapes += [(maxima, n)] * (maxima > 0) + [(late, n) for late in more[1:]]
        assert [call.shape for call in counts["losses"][0]] == shapes, f"{metrics}, {settings}"
        assert len(counts["finish"]) == (1 if metrics == "off" else 2)
