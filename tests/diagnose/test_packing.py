"""From a batch to packed tensors: what is left out, where advantages come from, and what is said of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.packing import groups_of, packed_of, pieces
from tests.diagnose.dumps import batch_of, drawn

NAN = math.nan
ONE = "predictions take 1, without settings whose criteria depend on the advantage"
NO_ADVANTAGES = f"there are no advantages, and no reward of every response: {ONE}"


def advantages_of(responses: list[dict[str, Any]]) -> tuple[Any, str]:
    """(the advantage of each response's first token, the note) of responses with two tokens."""
    rows = [[-1.0, -2.0]] * len(responses)
    packed, notes = packed_of(batch_of(rows, rows, responses))
    values = None if packed.advantages is None else packed.advantages[::2].tolist()
    return values, " ".join(notes)


def test_only_trained_tokens_with_two_sound_numbers_are_packed():
    masks = [np.array([True, False, True, True]), np.array([True]), np.array([True, True])]
    batch = batch_of(
        [[-1.0, NAN, -3.0, -4.0], [NAN], [-9999.0, -0.5]],
        [[-1.1, -2.0, NAN, -4.1], [-1.0], [-1.0, -0.4]],
        [{"loss_mask": mask} for mask in masks],
    )
    packed, notes = packed_of(batch)
    assert packed.lengths == (2, 1) and packed.sequence_ids == (0, 2)
    assert packed.rollout_log_probs is not None and packed.rollout_log_probs.tolist() == [-1.0, -4.0, -0.5]
    assert packed.old_log_probs is not None and packed.old_log_probs.tolist() == [-1.1, -4.1, -0.4]
    assert packed.positions is not None and packed.positions.tolist() == [0, 3, 1]
    assert packed.loss_mask.all() and packed.old_log_probs.dtype == torch.float64
    assert notes[0] == "2 of 6 tokens that train have no number on one side: they are left out"
    assert notes[1].startswith("tokens with an invalid log-prob (1 floor) are left out, where training stops")
    assert notes[2] == NO_ADVANTAGES


@pytest.mark.parametrize(("rollout", "training"), [([NAN], [-1.0]), ([-9999.0], [-1.0]), ([-1.0], [-1.0, -2.0])])
def test_nothing_to_compare_is_an_error(rollout: list[float], training: list[float]):
    with pytest.raises(InputError, match="no token that trains has a sound log-prob on both sides"):
        packed_of(batch_of([rollout], [training]))


def test_advantages_are_rewards_normalised_within_group_prompt_or_batch():
    half, said = 0.5**0.5, "advantages are made of the rewards, centred and divided by their deviation"
    values, note = advantages_of(
        [{"group": group, "reward": r} for group, r in [(0, 1.0), (0, 0.0), (1, 5.0), (1, 5.0)]]
    )
    assert values == pytest.approx([half, -half, 0.0, 0.0], abs=1e-5) and note == f"{said} within each group"
    prompts = [([1], 1.0), ([2], 0.0), ([1], 3.0), ([2], 0.0)]
    values, note = advantages_of([{"prompt_ids": np.array(ids), "reward": reward} for ids, reward in prompts])
    assert values == pytest.approx([-half, 0.0, half, 0.0], abs=1e-5) and note == f"{said} within each prompt"
    values, note = advantages_of([{"group": index, "reward": float(index)} for index in range(3)])
    assert values == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert note == f"{said} over the batch, for no two responses share a group or prompt"


@pytest.mark.parametrize(
    ("responses", "note"),
    [
        ([{}, {}], NO_ADVANTAGES),
        ([{"reward": 1.0}, {}], NO_ADVANTAGES),
        ([{"reward": 1.0}, {"reward": NAN}], NO_ADVANTAGES),
        ([{"reward": 0.1}] * 3, f"rewards are the same within each prompt: {ONE}"),
        ([{"advantages": np.zeros(2)}], f"all advantages are 0, which trains nothing: {ONE}"),
        ([{"advantages": np.ones(2)}, {}], f"some tokens have no advantage, so none is used; {NO_ADVANTAGES}"),
        ([{"advantages": np.full(2, 2.0)}], ""),
        ([{"advantages": np.array([1.0, NAN])}], f"some tokens have no advantage, so none is used; {NO_ADVANTAGES}"),
    ],
)
def test_where_advantages_say_nothing_there_are_none(responses: list[dict[str, Any]], note: str):
    assert advantages_of(responses) == (None if note else [2.0], note)


def test_entropy_and_versions_where_every_token_has_one():
    spans = {"weight_versions": (WeightSpan(version="v3", start=0, end=1), WeightSpan(version="v4", start=1, end=2))}
    entropy = {"entropy": np.array([0.1, 0.2])}
    rows = [[-1.0, -2.0]] * 2
    packed, _ = packed_of(batch_of(rows, rows, [spans | entropy | {"trainer_version": "7"}] * 2))
    assert packed.weight_versions is not None and packed.weight_versions.tolist() == [3, 4, 3, 4]
    assert packed.entropy is not None and packed.entropy.tolist() == [0.1, 0.2, 0.1, 0.2]
    assert packed.trainer_version == 7 == [*pieces(packed, tokens=1)][1].trainer_version
    for version in ("8", None):
        other = {"entropy": np.array([0.1, NAN]), "trainer_version": version}
        packed, _ = packed_of(batch_of(rows, rows, [spans | entropy | {"trainer_version": "7"}, other]))
        assert packed.weight_versions is None and packed.entropy is None and packed.trainer_version is None


@pytest.mark.parametrize("tokens", [1, 50, 10**6])
def test_pieces_are_whole_responses_in_order(tokens: int):
    packed, _ = packed_of(drawn())
    found = [*pieces(packed, tokens)]
    for name in ("lengths", "sequence_ids"):
        assert [value for piece in found for value in getattr(piece, name)] == list(getattr(packed, name))
    for name in ("old_log_probs", "rollout_log_probs", "positions", "unit_ids"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in found]), getattr(packed, name))
    assert all(sum(piece.lengths[:-1]) <= tokens for piece in found) and (len(found) > 1) == (tokens < 100)


def test_turns_are_those_of_the_whole_response_whatever_is_left_out():
    mask = np.array([False, True, True, False, True, True, False, True])
    values = [-1.0, -1.0, NAN, -1.0, NAN, -1.0, -1.0, -1.0]
    packed, _ = packed_of(batch_of([values], [[-1.1] * 8], [{"loss_mask": mask}]))
    assert packed.positions is not None and packed.positions.tolist() == [1, 5, 7]
    assert packed.unit_ids is not None and packed.unit_ids.tolist() == [0, 1, 2]


def test_groups_are_the_record_s_else_the_prompt_s_where_every_response_has_a_reward():
    def found(*responses: dict[str, Any]) -> Any:
        batch = batch_of([[-1.0]] * len(responses), [[-1.1]] * len(responses), responses)
        return groups_of(batch, packed_of(batch)[0])

    named = found({"group": "a", "reward": 1.0}, {"group": "a", "reward": 0.0}, {"group": "b", "reward": 0.5})
    assert named is not None and list(named.ids) == ["a", "a", "b"] and named.rewards.tolist() == [1.0, 0.0, 0.5]
    by_prompt = found({"reward": 1.0}, {"reward": 0.0})
    assert by_prompt is not None and len(set(by_prompt.ids)) == 1
    assert found({"group": "a", "reward": 1.0}, {"group": "b", "reward": 0.0}) is None, "no two share a group"
    assert found({"group": "a", "reward": 1.0}, {"group": "a"}) is None, "a reward is missing"
