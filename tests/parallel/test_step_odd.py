"""The correction over several processes where ranks hold odd things, log-probs are invalid, or a host is odd.

Everything must equal one process, as in `test_step.py`, and nothing may hang: a launch ends after 60 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step
from tests.distributed.correction_cases import (
    BAD_POSITION,
    BAD_SEQUENCE,
    LAYOUTS,
    PRODUCT,
    Layout,
    Outcome,
    make,
    one_process,
)
from tests.distributed.correction_check import differences, distances, together
from tests.distributed.correction_worker import Case, Part, run, run_different, run_invalid
from tests.distributed.launch import launch

ODD = (
    "first_chunk",  # no response token on most ranks of a context-parallel group
    "last_token",  # only the prompt on all ranks but one
    "untrained_replica",  # no response token on a whole replica
    "rejected_replica",
    "rejected",  # everything everywhere
    "single",  # sequences of one token: the other ranks have none of it
    "empty",  # a micro-batch without sequences, on one replica or on all
    "nothing",  # all of them
)
SOME = tuple(PRODUCT[::11])  # 11 meets every value of every setting: see the first test
Key = tuple[str, str]
Steps = dict[Key, list[tuple[Part, ...]]]


def launch_all(function: Callable[[Case], list[Any]], cases: list[Case]) -> dict[Key, list[tuple[Any, ...]]]:
    """By batch and layout: for each of its settings, what every rank returned."""
    found = {}
    for world_size in (2, 4):
        mine = [case for case in cases if case.layout.world_size == world_size]
        for case, ranks in zip(mine, launch(function, mine, world_size), strict=True):
            found[case.batch, case.layout.name] = list(zip(*ranks, strict=True))
    return found


def test_the_settings_are_of_every_kind():
    for name in ("algorithm", "level", "mode", "rejects", "normalizes", "denominator", "aggregation"):
        assert {getattr(s, name) for s in SOME} == {getattr(s, name) for s in PRODUCT}, name


@pytest.fixture(scope="module")
def odd() -> Steps:
    return launch_all(run, [Case(batch, layout, 2, SOME) for layout in LAYOUTS for batch in ODD])


@pytest.mark.parametrize("batch", ODD)
def test_odd_ranks_equal_one_process(odd: Steps, batch: str):
    for layout in LAYOUTS:
        for parts in odd[batch, layout.name]:
            settings = parts[0].settings
            found = differences(together(parts), one_process(make(batch), settings.config()))
            assert not found, f"{layout}, {settings}: {found}"


def test_the_odd_ranks_are_odd():
    """What the batches' names promise is so in at least one layout."""
    holds: dict[str, set[tuple[bool, bool]]] = {}
    for batch in ODD:
        for layout in LAYOUTS:
            for rank in range(layout.world_size):
                for packed, _ in make(batch).micro_batches(layout, 2, rank):
                    holds.setdefault(batch, set()).add((bool(packed.loss_mask.numel()), bool(packed.loss_mask.any())))
    for batch in ("first_chunk", "last_token", "untrained_replica"):
        assert (True, False) in holds[batch], "some rank has tokens and none that trains"
    assert (False, False) in holds["single"] and (False, False) in holds["empty"]
    assert holds["nothing"] == {(False, False)}


@pytest.mark.parametrize("batch", [*(name for name in ODD if name != "nothing"), "product"])
def test_data_keep_away_from_every_bound(batch: str):
    settings, distance = min(((s, min(distances(batch, s))) for s in SOME), key=lambda item: item[1])
    assert distance > 1e-6, f"{distance:g} under {settings}"


def test_everything_rejected_is_a_zero_loss(odd: Steps):
    rejecting = 0
    for layout in LAYOUTS:
        for parts in odd["rejected", layout.name]:
            settings, whole = parts[0].settings, together(parts)
            if not (settings.rejects or settings.mode == "mask"):
                continue
            rejecting += 1
            assert sum(part.sums[0] for part in parts) == 0.0 and not any(part.tokens[2].any() for part in parts)
            assert not (whole.keep * whole.weights).any() and whole.gradient.isfinite().all()
            assert whole.metrics["rollout_corr/all_rejected"] == 1.0
            assert whole.metrics["rollout_corr/accepted_token_fraction"] == 0.0
            assert all(map(math.isfinite, whole.metrics.values()))
            assert whole.denominators[0] == (0 if settings.denominator == "accepted" else whole.denominators[1])
            if settings.mode == "mask" and settings.normalizes:
                assert parts[0].factor == 1.0, "there is no weight to average"
    assert rejecting > 50


# Rollout log-probs that are none --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_bad_token() -> dict[Key, list[tuple[Any, ...]]]:
    used = tuple(s for s in SOME if s.config().uses_rollout_values)[::5]
    return launch_all(run_invalid, [Case("bad_token", layout, 2, used) for layout in LAYOUTS])


def test_an_error_on_one_rank_is_raised_on_all(one_bad_token: dict[Key, list[tuple[Any, ...]]]):
    """Catches a rank that raises alone and leaves the others in a collective, and one that would step regardless."""
    for layout in LAYOUTS:
        for ranks in one_bad_token["bad_token", layout.name]:
            assert [rank["holds"] for rank in ranks].count(True) == 1
            assert [rank["invalid"] for rank in ranks] == [1.0] * layout.world_size
            for rank in ranks:
                if rank["holds"]:
                    assert f"sequence {BAD_SEQUENCE}, position " in rank["message"]
                    assert "is missing or NaN (value nan, kind nan)" in rank["message"]
                else:
                    assert "invalid log-probs on another rank: 1 of kind nan" in rank["message"]
                assert "--rollout-log-prob-policy neutral, drop-token or drop-sequence" in rank["message"]


def test_an_error_names_the_position_in_the_whole_sequence(
    one_bad_token: dict[Key, list[tuple[Any, ...]]],
):
    """Not in the part of it that the rank holds."""
    for layout in LAYOUTS:
        for ranks in one_bad_token["bad_token", layout.name]:
            (message,) = (rank["message"] for rank in ranks if rank["holds"])
            assert f"sequence {BAD_SEQUENCE}, position {BAD_POSITION} " in message, f"{layout}: {message}"


@pytest.mark.parametrize("policy", ["neutral", "drop-token", "drop-sequence"])
def test_invalid_log_probs_under_every_policy(policy: str):
    """A sequence is dropped on every rank that has a part of it, though only one of them sees the bad token."""
    changes = (("rollout_log_prob_policy", policy),)
    steps = launch_all(run, [Case("bad_tokens", layout, 2, SOME[::2], changes) for layout in LAYOUTS])
    for layout in LAYOUTS:
        for parts in steps["bad_tokens", layout.name]:
            config = parts[0].settings.config(rollout_log_prob_policy=policy)
            actual = together(parts)
            assert not differences(actual, one_process(make("bad_tokens"), config)), f"{layout}, {parts[0].settings}"
            assert {part.invalid for part in parts} == {4.0}
            for kind in ("nan", "floor", "positive", "zero_fill"):
                assert actual.metrics[f"rollout_corr/invalid_{kind}"] == 1.0
            if policy == "drop-sequence":
                kept = [row.any().item() for row in actual.keep.split(make("bad_tokens").lengths)]
                assert not any(kept[number] for number in (0, 2, 4, 5))


# Ranks that do not hold the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp2", "cp2-zigzag"])
def test_ranks_with_different_fields_or_settings_are_refused_on_all(name: str):
    """Under a host that calls no `start`: vectors of different lengths in one all-reduce, a rank that raises alone."""
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    sentences = {
        "no versions": "rank 0 has version_log_ratio, rank 1 has no version_log_ratio",
        "versions once": "on rank 0: statistics cannot be merged: one has -version, version, ",
    }
    if layout.cp == 1:  # under CP the loss itself would wait, or abort: hence `start`
        sentences["other metrics"] = "rank 0 has metrics = 'full', rank 1 has metrics = 'basic'"
        sentences["no loss"] = "rank 1 ran no micro-batch in this step, other ranks did"
    cases = [Case(batch, layout, 2, SOME[:2]) for batch in sentences]
    for ranks, sentence in zip(launch(run_different, cases, layout.world_size), sentences.values(), strict=True):
        for one, two in zip(*ranks, strict=True):
            assert one == two and sentence in one, one


# Batch normalisation over a micro-batch -------------------------------------------------------------------------------


def by_micro_batch(layout: Layout, count: int, config: mp.MismatchConfig) -> Outcome:
    """Each micro-batch in one process by itself, all of them added up."""
    whole = make("product")
    starts = [0, *torch.tensor(whole.lengths).cumsum(0).tolist()]
    tokens, loss, denominators, statistics = torch.full((3, starts[-1]), math.nan).double(), 0.0, [0, 0], None
    for replica in range(layout.dp):
        for ids in whole.ids(layout, count, replica):
            places = torch.tensor([place for i in ids for place in range(starts[i], starts[i + 1])])
            log_probs = whole.log_probs[places].requires_grad_()
            result = mp.policy_loss(log_probs, whole.packed(ids), config)
            (gradient,) = torch.autograd.grad(result.loss_sum, log_probs)
            tokens[:, places] = torch.stack([gradient, result.correction.weights, result.correction.keep])
            loss += float(result.loss_sum.detach())
            denominators[0] += int(result.denominator)
            denominators[1] += int(result.terms_denominator)
            statistics = result.statistics if statistics is None else statistics.merge(result.statistics)
    assert statistics is not None
    gradient, weights, keep = tokens.unbind(0)
    divisor = max(denominators[0], 1)
    metrics = statistics.metrics()
    return Outcome(loss / divisor, (denominators[0], denominators[1]), gradient / divisor, weights, keep, metrics)


def test_normalisation_over_a_micro_batch():
    """The mean runs over the micro-batch's whole sequences, on all context-parallel ranks, and over no other one."""
    chosen = tuple(
        replace(s, rotation=s.rotation * 3 + 1) for s in PRODUCT if s.normalizes and s.denominator == "accepted"
    )
    changes = (("scope", "micro_batch"),)
    steps = launch_all(run, [Case("product", layout, 2, chosen, changes) for layout in LAYOUTS])
    for layout in LAYOUTS:
        for parts in steps["product", layout.name]:
            settings, actual = parts[0].settings, together(parts)
            assert parts[0].factor == 1.0, "nothing is left to divide by at the end of the step"
            found = differences(actual, by_micro_batch(layout, 2, settings.config(scope="micro_batch")))
            assert not found, f"{layout}, {settings}: {found}"


# What a host may do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["on_policy", "mixed"])
def test_old_log_probs_absent(batch: str):
    """The weights of algorithm 2 are known only after the step: on all ranks, though only some lack them (mixed)."""
    chosen = tuple(s for s in PRODUCT[::5] if s.algorithm in (0, 2))
    starts = batch != "mixed"  # `start` refuses that
    steps = launch_all(run, [Case(batch, layout, 2, chosen, starts=starts) for layout in (LAYOUTS[0], LAYOUTS[3])])
    for (_, layout), results in steps.items():
        for parts in results:
            settings, actual = parts[0].settings, together(parts)
            whole = one_process(make(batch), settings.config())
            assert not differences(actual, whole), f"{layout}, {settings}"
            _, original, accepted, factor = parts[0].totals
            assert original == whole.denominators[1]
            assert factor is None and (accepted is None) == (settings.rejects or settings.mode == "mask")
            assert settings.algorithm != 2 or (parts[0].factor != 1.0) == settings.normalizes


@pytest.mark.parametrize("algorithm", range(4))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("dry", [False, True])
def test_staleness_alone_is_known_before_the_step(algorithm: int, aggregation: str, dry: bool):
    """It reads no log-prob: what is accepted is known under bypass, too, and what is invalid changes nothing of it."""
    config = mp.MismatchConfig.model_validate(
        {
            "use_rollout_log_probs": algorithm in (1, 3),
            "use_tis": algorithm in (2, 3),
            "aggregation": aggregation,
            "rs": {"max_staleness": 1},
            "dry_run": dry,
        }
    )
    rollout = [[-1.0, -2.0, -1.0], [-1.0, math.nan if algorithm == 0 else -1.5]]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rollout, old_log_probs=[[-1.1, -1.9, -1.2], [-0.9, -1.3]], loss_masks=[[1, 1, 1], [1, 1]],
        advantages=[1.0, -1.0], weight_versions=[[4, 6, 7], [2, 4]], trainer_version=7,
    )  # fmt: skip
    step = Step(config, ParallelGroups())
    step.start([packed])
    totals = step.prepare([packed])
    result = step.loss(torch.full((5,), -1.2), packed)
    assert totals.accepted is not None
    original, accepted = (5, 2) if aggregation == "token-mean" else (2, 1)
    assert int(totals.accepted) == int(result.denominator) == (original if dry else accepted)
    assert int(totals.original) == original
    assert result.correction.keep.tolist() == ([1] * 5 if dry else [0, 1, 1, 0, 0])


@pytest.mark.parametrize(("policy", "known"), [("auto", True), ("current", False)])
def test_what_the_current_policy_judges_is_not_known_before_the_step(policy: str, known: bool):
    config = mp.MismatchConfig.model_validate({"rs": {"criteria": ["token:k2:0.5"], "policy": policy}})
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, -3.0]], old_log_probs=[[-1.0, -1.0]], loss_masks=[[1, 1]], advantages=[1.0]
    )
    totals = Step(config, ParallelGroups()).prepare([packed])
    assert (None if totals.accepted is None else int(totals.accepted)) == (1 if known else None)


def test_a_dry_run_changes_nothing():
    """Neither the denominators known before the step nor the gradients after it."""
    chosen = tuple(s for s in SOME if s.rejects or s.weighted)
    steps = launch_all(run, [Case("product", LAYOUTS[3], 2, chosen, (("dry_run", True),))])
    for parts in steps["product", LAYOUTS[3].name]:
        settings, actual = parts[0].settings, together(parts)
        assert not differences(actual, one_process(make("product"), settings.config(dry_run=True))), settings
        assert parts[0].factor == 1.0 and bool((actual.weights == actual.keep).all()), settings
        tokens, original, accepted, factor = parts[0].totals
        assert (accepted, factor) in ((original, 1.0), (original, None)), settings
        assert actual.denominators == (original, original) and tokens == actual.keep.sum()


@pytest.mark.parametrize("change", ["written", "replaced", "other versions", "none"])
def test_a_prepared_correction_is_used_for_the_same_data_only(change: str) -> None:
    """A loader that fills one buffer a micro-batch must not get the first one's weights again."""
    settings = {"use_tis": True, "tis": {"batch_normalize": True}, "rs": {"max_staleness": 1}}
    config = mp.MismatchConfig.model_validate(settings)
    batch = mp.PackedSequences.from_lists(
        loss_masks=[[1, 1], [1]], rollout_log_probs=[[-1.0, -2.0], [-0.5]], old_log_probs=[[-1.2, -1.9], [-0.9]],
        advantages=[1.0, -1.0], weight_versions=[[3, 3], [2]], trainer_version=3,
    )  # fmt: skip
    step = Step(config, ParallelGroups())
    totals = step.prepare([batch])
    assert batch.rollout_log_probs is not None and totals.batch_factor is not None
    if change == "written":
        batch.rollout_log_probs.sub_(0.3)
    elif change == "replaced":
        batch = batch.replace(rollout_log_probs=batch.rollout_log_probs - 0.3)
    elif change == "other versions":
        batch = batch.replace(trainer_version=4)
    found = step.loss(torch.tensor([-1.1, -1.8, -0.7]), batch)
    expected = mp.correct(batch, config, batch_factor=totals.batch_factor)
    assert torch.equal(found.correction.weights, expected.weights)
    assert torch.equal(found.correction.keep, expected.keep)
