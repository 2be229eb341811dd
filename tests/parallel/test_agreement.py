"""Ranks that do not bring the same to a step: all say so, with one sentence, before anything else of it runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.health import GateError
from mismatch_plugin.log_probs.arguments import check_kept_ids, ragged_mask
from mismatch_plugin.parallel.agreement import difference, step_kind
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step, end_step
from tests.distributed.agreement_worker import SETTINGS, Case, Grid, batch, begin, hook_of
from tests.distributed.launch import launch

LAYOUTS = (Grid(cp=2), Grid(dp=2), Grid(pp=2), Grid(tp=2), Grid(cp=2, dp=2), Grid(dp=2, pp=2))
EVERYWHERE = {
    "other configuration": "ppo.eps_clip_high",
    "mean of micro-batches": "calculate_per_token_loss",
    "empty list": "no micro-batch",
}
ON_THE_LAST_STAGE = {
    "no old log-probs": "old_log_probs",
    "no rollout log-probs": "rollout_log_probs",
    "no versions": "weight_versions",
}
ONCE = {"versions once": "weight_versions"}
MICRO_BATCHES, SEQUENCES = {"one micro-batch": "micro-batch"}, {"other sequences": "sequences"}
LEGAL = ("nothing", "other report folder")


def planted(grid: Grid) -> dict[Case, str]:
    """The differences that a layout can have, and what the sentence must name besides the rank."""
    replica = grid.world_size // grid.dp
    words = EVERYWHERE | ONCE
    words |= ON_THE_LAST_STAGE if grid.world_size > grid.pp else {}
    words |= MICRO_BATCHES if replica > 1 else {}
    words |= SEQUENCES if replica > grid.pp else {}
    found = {Case(grid, plant, grid.world_size - 1): word for plant, word in words.items()}
    if grid.pp > 1:  # a stage without the loss
        found |= {Case(grid, plant, 0): word for plant, word in EVERYWHERE.items()}
    return found


def legal(grid: Grid) -> list[Case]:
    """What ranks may differ in: replicas hold other data."""
    free = (*MICRO_BATCHES, *SEQUENCES) if grid.dp == grid.world_size else ()
    return [Case(grid, plant, grid.world_size - 1) for plant in (*LEGAL, *free)]


@cache
def outcomes(world_size: int) -> dict[Case, list[dict[str, Any]]]:
    """What every rank said. A rank that is left waiting fails the launch."""
    grids = [grid for grid in LAYOUTS if grid.world_size == world_size]
    every = [case for grid in grids for case in (*planted(grid), *legal(grid))]
    return dict(zip(every, launch(begin, every, world_size, timeout=20.0), strict=True))


@pytest.mark.parametrize("grid", LAYOUTS, ids=str)
def test_ranks_that_differ_are_named_on_every_rank(grid: Grid) -> None:
    for case, word in planted(grid).items():
        said = {rank["error"] for rank in outcomes(grid.world_size)[case]}
        assert len(said) == 1, f"{case}: {said}"
        (sentence,) = said
        assert sentence.startswith("ValueError: ") and word in sentence, f"{case}: {sentence}"
        assert f"rank {case.rank}" in sentence, f"{case}: {sentence}"


@pytest.mark.parametrize("grid", LAYOUTS, ids=str)
def test_what_ranks_may_differ_in_runs(grid: Grid) -> None:
    for case in legal(grid):
        ranks = outcomes(grid.world_size)[case]
        assert not any(rank["error"] for rank in ranks), ranks
        metrics = [rank["metrics"] for rank in ranks[-grid.world_size // grid.pp :]]
        assert metrics[0]["rollout_corr/tokens"] > 0 and all(each == metrics[0] for each in metrics)


# One process ----------------------------------------------------------------------------------------------------------


def test_a_step_without_micro_batches_is_refused_alone_too() -> None:
    hook = hook_of(mp.MismatchConfig(**SETTINGS), ParallelGroups())
    with pytest.raises(ValueError, match=r"^no micro-batch was given to this step\. Give every rank at least one"):
        hook.start([])
    with pytest.raises(ValueError, match="no step was begun"):
        hook.from_log_probs(batch(1).loss_mask.double(), batch(1))


def test_old_log_probs_in_some_micro_batches_only_are_refused() -> None:
    """Some would be anchored at another policy than the others, without a word."""
    hook = hook_of(mp.MismatchConfig(), ParallelGroups())
    with pytest.raises(ValueError, match="micro-batch 0 has old_log_probs, micro-batch 1 does not"):
        hook.start([batch(2), batch(2).replace(old_log_probs=None)])


def test_a_micro_batch_that_start_was_not_given_is_refused_where_it_runs() -> None:
    step, known = Step(mp.MismatchConfig(metrics="full"), ParallelGroups()), batch(1).replace(trainer_version=1)
    step.start([known, known])
    step.loss(known.loss_mask.double() - 2.0, known)
    with pytest.raises(ValueError, match=r"cannot be merged: one has version_log_ratio"):
        step.loss(known.loss_mask.double() - 2.0, known.replace(weight_versions=None))


def test_other_units_are_named_where_they_are_summed_over() -> None:
    """Sums of another number of units would not fit into one another."""
    kinds = {}
    for level in ("turn", "sequence"):
        config = mp.MismatchConfig(use_tis=True, tis={"level": level})  # pyright: ignore[reportArgumentType]
        for rank in (0, 1):
            packed = batch(1).replace(unit_ids=torch.tensor([0, 0, 1]), unit_counts=(2 + rank,))
            kinds[level, rank] = step_kind(config, [packed], has_loss=True)
    assert difference({0: {rank: kinds["sequence", rank] for rank in (0, 1)}}) == ""
    said = difference({0: {rank: kinds["turn", rank] for rank in (0, 1)}})
    assert "rank 0 has 1 with 2 units in micro-batch 0, rank 1 has 1 with 3 units in micro-batch 0" in said


class Chunk(torch.nn.Linear):
    """A megatron chunk, which scales its gradients."""

    scaled = 1.0

    def scale_gradients(self, factor: float) -> None:
        self.scaled *= factor


def begun(config: mp.MismatchConfig, rollout: float = -1.0, prepares: bool = False, thresholds: Any = None) -> Step:
    """A step of two micro-batches of one token each, ρ = e^.5 in the first."""
    step = Step(config, ParallelGroups(), thresholds)
    rows = {"old_log_probs": [[-0.5]], "loss_masks": [[1]], "advantages": [1.0]}
    batches = [mp.PackedSequences.from_lists(rollout_log_probs=[[value]], **rows) for value in (rollout, -0.5)]
    step.start([each.replace(invalid=()) for each in batches])
    if prepares:
        step.prepare(batches)
    for each in batches:
        step.loss(torch.tensor([-0.5]), each)
    return step


def test_the_end_of_a_step_divides_gradients_or_raises() -> None:
    """By a mean weight that is known only then; invalid log-probs and the gate name the step."""
    normalized = mp.MismatchConfig(use_tis=True, tis={"batch_normalize": True})  # pyright: ignore[reportArgumentType]
    for prepares, mean in ((False, (1 + 1.6487212707) / 2), (True, 1.0)):
        chunk, step = Chunk(1, 1), begun(normalized, prepares=prepares)
        ended = end_step(step, normalized, ParallelGroups(), [chunk])
        assert ended is not None and chunk.scaled == pytest.approx(1 / mean)
    assert end_step(None, normalized, ParallelGroups(), [Chunk(1, 1)]) is None
    gate = normalized.replace(gate_kl=1e-3)
    with pytest.raises(GateError, match=r"^step 7: k3_kl"):
        end_step(begun(gate), gate, ParallelGroups(), [Chunk(1, 1)], 7)
    with pytest.raises(mp.InvalidLogProbError, match="sequence 0, position 0"):
        end_step(begun(normalized, rollout=5.0), normalized, ParallelGroups(), [Chunk(1, 1)])


def test_budgets_are_of_the_step_before() -> None:
    """Whether `prepare` has judged already or the loss does; alone, a micro-batch has the bound that was given."""
    config = mp.MismatchConfig.build({"rs": {"criteria": ["token:k2:0.05:share=0.4"]}})
    first, _ = begun(config).finish()
    assert first is not None and float(first.sum_of("kept@tokens")) == 1
    for prepares in (False, True):
        second, _ = begun(config, prepares=prepares, thresholds=first.thresholds()).finish()
        assert second is not None and float(second.sum_of("kept@tokens")) == 2


def test_kept_ids_are_one_list_a_token_with_the_sampled_id() -> None:
    mask = ragged_mask([[3, 1], [], [7]])
    assert (mask.token_ids.tolist(), mask.offsets.tolist()) == ([3, 1, 7], [0, 2, 2, 3])
    check_kept_ids([[1, 2], [], [9]], [2, 5, 7], [1, 1, 0], "a")
    with pytest.raises(ValueError, match="kept_ids of sample a has 1 entries for 2 response tokens"):
        check_kept_ids([[1]], [1, 2], [1, 1], "a")
    with pytest.raises(ValueError, match="kept_ids of sample a, position 2: the sampled id 7 is not among the 1 kept"):
        check_kept_ids([[1, 2], [], [9]], [2, 5, 7], [1, 1, 1], "a")
