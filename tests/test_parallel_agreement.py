"""Ranks that do not bring the same to a step: all of them say so, with one sentence, before anything else of it runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.distributed.agreement_worker import Case, Grid, begin
from tests.distributed.launch import launch

TWO = (Grid(cp=2), Grid(dp=2), Grid(pp=2), Grid(tp=2))
FOUR = (Grid(cp=2, dp=2), Grid(dp=2, pp=2), Grid(cp=2, pp=2), Grid(tp=2, cp=2))
LAYOUTS = {str(grid): grid for grid in (*TWO, *FOUR)}
EVERYWHERE = {
    "other configuration": "ppo.eps_clip_high",
    "mean of micro-batches": "calculate_per_token_loss",
    "empty list": "no micro-batch",
}
ON_THE_LAST_STAGE = {
    "no old log-probs": "old_log_probs",
    "no rollout log-probs": "rollout_log_probs",
    "no versions": "weight_versions",
    "versions once": "weight_versions",
}
IN_A_REPLICA = {"one micro-batch": "micro-batch", "other sequences": "sequences"}
CONFIGS = ("plain", "normalized")


LEGAL = ("nothing", "other report folder")


def planted(grid: Grid) -> dict[Case, str]:
    """The differences that a layout can have, and what the sentence must name besides the rank."""
    last, replica = grid.world_size - 1, grid.world_size // grid.dp
    found = {Case(grid, plant, last, config): word for plant, word in EVERYWHERE.items() for config in CONFIGS}
    if grid.pp > 1:  # a stage without the loss
        found |= {Case(grid, plant, 0, config): word for plant, word in EVERYWHERE.items() for config in CONFIGS}
    words = ON_THE_LAST_STAGE if grid.world_size > grid.pp else {"versions once": "weight_versions"}
    if replica > 1:
        words = {**words, "one micro-batch": "micro-batch"}
    if replica > grid.pp:
        words = {**words, "other sequences": "sequences"}
    return found | {Case(grid, plant, last, config): word for plant, word in words.items() for config in CONFIGS}


def legal(grid: Grid) -> list[Case]:
    """What ranks may differ in: replicas hold other data."""
    plants = (*LEGAL, "one micro-batch", "other sequences") if grid.dp == grid.world_size else LEGAL
    return [Case(grid, plant, grid.world_size - 1, config) for plant in plants for config in CONFIGS]


@cache
def outcomes(world_size: int) -> dict[Case, list[dict[str, Any]]]:
    """What every rank said. A rank that is left waiting fails the launch."""
    grids = [grid for grid in LAYOUTS.values() if grid.world_size == world_size]
    cases = [case for grid in grids for case in (*planted(grid), *legal(grid))]
    return dict(zip(cases, launch(begin, cases, world_size, timeout=20.0), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_differ_are_named_on_every_rank(layout: str) -> None:
    grid = LAYOUTS[layout]
    for case, word in planted(grid).items():
        said = {rank["error"] for rank in outcomes(grid.world_size)[case]}
        assert len(said) == 1, f"{case}: {said}"
        (sentence,) = said
        assert sentence.startswith("ValueError: ") and word in sentence, f"{case}: {sentence}"
        assert f"rank {case.rank}" in sentence, f"{case}: {sentence}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_may_differ_in_runs(layout: str) -> None:
    grid = LAYOUTS[layout]
    for case in legal(grid):
        ranks = outcomes(grid.world_size)[case]
        assert not any(rank["error"] for rank in ranks), ranks
        metrics = [rank["metrics"] for rank in ranks[-grid.world_size // grid.pp :]]
        assert metrics[0]["rollout_corr/tokens"] > 0 and all(each == metrics[0] for each in metrics)


NINE = ("allreduce", 72)
SUM_OF_SEVEN = ("allreduce", 56)
TOLD = ("broadcast", 4)


@pytest.mark.parametrize(
    ("layout", "count"),
    [("cp2", 1), ("dp2", 1), ("pp2", 1), ("tp2", 1), ("cp2 dp2", 2), ("dp2 pp2", 2), ("cp2 pp2", 2), ("tp2 cp2", 2)],
)
def test_start_makes_one_small_reduction_a_dimension(layout: str, count: int) -> None:
    """Over DP × CP only where that is more than CP; what `prepare` needs comes after it, and none of it without."""
    grid = LAYOUTS[layout]
    for config in CONFIGS:
        for rank in outcomes(grid.world_size)[Case(grid, "nothing", grid.world_size - 1, config)]:
            first, after = rank["collectives"][:count], rank["collectives"][count:]
            assert first == [NINE] * count
            if config == "plain":
                assert not after
            elif grid.pp > 1:
                assert after[-1] == TOLD
            elif grid.dp > 1:
                assert after[-1] == SUM_OF_SEVEN
