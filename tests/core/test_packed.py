"""PackedSequences: in from lists and padded tensors, back again, and every error by its message."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp

FLOAT_FIELDS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
INTEGER_FIELDS = ("positions", "weight_versions")
LENGTHS = (3, 0, 2, 1)
MASKS = [[1, 0, 1], [], [0, 0], [1]]


def rows(start: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Different numbers everywhere, all legal log-probs."""
    values = -(start + torch.arange(1, 7, dtype=torch.float64) / 10)
    return list(values.to(dtype).split(LENGTHS))


def everything() -> dict[str, Any]:
    fields: dict[str, Any] = {name: rows(i / 100) for i, name in enumerate(FLOAT_FIELDS)}
    fields["positions"] = [[4, 5, 6], [], [0, 1], [9]]
    fields["weight_versions"] = [[7, 7, 8], [], [7, 7], [6]]
    return fields


def test_from_lists_keeps_every_value_in_order() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=MASKS, rewards=[1, 2, 3, 4], sequence_ids="abcd", **everything())
    assert packed.lengths == LENGTHS and packed.sequence_ids == tuple("abcd")
    assert packed.loss_mask.tolist() == [True, False, True, False, False, True]
    assert packed.offsets.tolist() == [0, 3, 3, 5, 6]
    assert packed.sequence_index.tolist() == [0, 0, 0, 2, 2, 3]
    assert packed.rewards is not None and packed.rewards.tolist() == [1, 2, 3, 4]
    for i, name in enumerate(FLOAT_FIELDS):
        value = getattr(packed, name)
        assert value.dtype == torch.float64 and torch.equal(value, torch.cat(rows(i / 100)))
    for name in INTEGER_FIELDS:
        value = getattr(packed, name)
        assert value.dtype == torch.int64 and value.tolist() == [item for row in everything()[name] for item in row]


def test_response_positions_start_again_in_each_sequence() -> None:
    assert mp.PackedSequences.from_lists(loss_masks=MASKS).response_positions.tolist() == [0, 1, 2, 0, 1, 0]
    packed = mp.PackedSequences.from_lists(loss_masks=MASKS, positions=everything()["positions"])
    assert packed.response_positions.tolist() == [4, 5, 6, 0, 1, 9]


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor, lambda row: torch.tensor(row) == 1])
def test_masks_of_any_kind(convert: Any) -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[convert(row) for row in MASKS])
    assert packed.loss_mask.dtype == torch.bool and packed.loss_mask.tolist() == [True, False, True, False, False, True]


def test_floating_masks_and_integer_log_probs() -> None:
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-1, -2]], rollout_log_probs=[[-1, -3]], loss_masks=[[1.0, 0.0]]
    )
    assert packed.loss_mask.tolist() == [True, False]
    assert packed.old_log_probs is not None and packed.old_log_probs.dtype == torch.float32


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_by_either_door(half: torch.dtype) -> None:
    values = [row.to(half) for row in rows(0.0)]
    for packed in (
        mp.PackedSequences.from_lists(old_log_probs=values, rollout_log_probs=values, loss_masks=MASKS),
        mp.PackedSequences(
            loss_mask=torch.ones(6, dtype=torch.bool),
            lengths=LENGTHS,
            rollout_log_probs=torch.cat(values),
            old_log_probs=torch.cat(values),
        ),
    ):
        assert packed.old_log_probs is not None and packed.old_log_probs.dtype == torch.float32
        assert torch.equal(packed.old_log_probs, torch.cat(values).float())


def test_one_advantage_a_sequence_is_spread_over_its_tokens() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=MASKS, advantages=[1.5, 7.0, -2.0, torch.tensor(0.5)])
    assert packed.advantages is not None and packed.advantages.tolist() == [1.5, 1.5, 1.5, -2, -2, 0.5]
    padded = mp.PackedSequences.from_padded(
        loss_masks=torch.ones(2, 3), lengths=[3, 1], advantages=torch.tensor([1.0, 2.0])
    )
    assert padded.advantages is not None and padded.advantages.tolist() == [1, 1, 1, 2]


def test_entropy_keeps_its_graph() -> None:
    entropy = [torch.tensor([0.5, 0.7], requires_grad=True), torch.tensor([0.1], requires_grad=True)]
    packed = mp.PackedSequences.from_lists(loss_masks=[[1, 1], [1]], entropy=entropy)
    assert packed.entropy is not None
    packed.entropy.sum().backward()
    assert entropy[0].grad is not None and entropy[0].grad.tolist() == [1, 1]


def test_unpack_and_to_padded_round_trip() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=MASKS, **everything())
    assert packed.old_log_probs is not None
    back = packed.unpack(packed.old_log_probs)
    assert [row.shape for row in back] == [(3,), (0,), (2,), (1,)]
    assert all(torch.equal(a, b) for a, b in zip(back, rows(0.0), strict=True))
    square = packed.to_padded(packed.old_log_probs, padding=9.0)
    assert square.tolist() == [[*row.tolist(), *[9.0] * (3 - len(row))] for row in back]
    again = mp.PackedSequences.from_padded(
        old_log_probs=square, loss_masks=packed.to_padded(packed.loss_mask), lengths=packed.lengths
    )
    assert again.lengths == LENGTHS and torch.equal(again.loss_mask, packed.loss_mask)
    assert again.old_log_probs is not None and torch.equal(again.old_log_probs, packed.old_log_probs)


def test_from_padded_without_lengths_keeps_the_padding_masked() -> None:
    masks = torch.tensor([[1, 1, 0], [1, 0, 0]])
    names: dict[str, Any] = {"sequence_ids": ["x", "y"]}
    packed = mp.PackedSequences.from_padded(
        old_log_probs=-torch.ones(2, 3), rollout_log_probs=-torch.ones(2, 3), loss_masks=masks, **names
    )
    assert packed.lengths == (3, 3) and packed.loss_mask.tolist() == [True, True, False, True, False, False]
    assert packed.sequence_ids == ("x", "y")


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_batches_without_a_token(lengths: list[int]) -> None:
    empty: list[list[float]] = [[] for _ in lengths]
    packed = mp.PackedSequences.from_lists(
        old_log_probs=empty, rollout_log_probs=empty, loss_masks=empty, advantages=empty, weight_versions=empty
    )
    assert packed.offsets.tolist() == [0, *lengths]
    assert [len(row) for row in packed.unpack(packed.loss_mask)] == lengths
    padded = packed.to_padded(packed.loss_mask)
    assert padded.shape == (len(lengths), 0)
    again = mp.PackedSequences.from_padded(
        old_log_probs=padded.float(), rollout_log_probs=padded.float(), loss_masks=padded
    )
    assert again.lengths == tuple(lengths)


ERRORS = {
    "no masks": ({}, "loss_masks is missing"),
    "sequences": ({"loss_masks": [[1]], "entropy": [[-1.0], [-1.0]]}, "entropy has 2 sequences, loss_masks 1"),
    "length": (
        {"loss_masks": [[1], [1, 1, 1]], "rollout_log_probs": [[-1.0], [-1.0, -1.0]], "sequence_ids": ["p7", "p8"]},
        r"rollout_log_probs of sequence p8 has shape \(2,\), its loss mask 3 tokens",
    ),
    "every field": ({"loss_masks": [[1]], "weight_versions": [[1, 2]]}, "weight_versions of sequence 0"),
    "two dimensions": ({"loss_masks": [[1, 1]], "entropy": [torch.zeros(1, 2)]}, r"entropy .* has shape \(1, 2\)"),
    "one number": ({"loss_masks": [[1]], "old_log_probs": [-1.0]}, r"old_log_probs of sequence 0 has shape \(\)"),
    "mask of 2": ({"loss_masks": [[1, 2]]}, "loss_masks holds 2: a mask is 1"),
    "mask of 0.5": ({"loss_masks": [[1, 0.5]]}, "loss_masks holds 0.5"),
    "mask of NaN": ({"loss_masks": [[1, None]]}, "loss_masks holds nan"),
    "names": ({"loss_masks": [[1]], "sequence_ids": ["a", "b"]}, r"sequence_ids has 2"),
    "rewards": ({"loss_masks": [[1]], "rewards": [1.0, 2.0]}, "rewards"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_from_lists_errors(case: str) -> None:
    fields, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        mp.PackedSequences.from_lists(**fields)


ONES = torch.ones(2, 3)
PADDED_ERRORS = {
    "no masks": ({}, r"loss_masks has shape None: from_padded takes \[batch, length\]"),
    "flat": ({"loss_masks": torch.ones(3)}, r"loss_masks has shape \(3,\)"),
    "shape": ({"loss_masks": ONES, "entropy": torch.ones(2, 4)}, r"entropy has shape \(2, 4\), loss_masks \(2, 3\)"),
    "few lengths": ({"loss_masks": ONES, "lengths": [3]}, r"lengths \[3\] do not fit"),
    "long": ({"loss_masks": ONES, "lengths": [3, 4]}, r"lengths \[3, 4\] do not fit"),
    "negative": ({"loss_masks": ONES, "lengths": [3, -1]}, "do not fit"),
    "advantages": ({"loss_masks": ONES, "advantages": torch.ones(3)}, "advantages has 3 sequences, loss_masks 2"),
}


@pytest.mark.parametrize("case", PADDED_ERRORS)
def test_from_padded_errors(case: str) -> None:
    fields, message = PADDED_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        mp.PackedSequences.from_padded(**fields)


@pytest.mark.parametrize("name", ["loss_masks", "rollout_log_probs", "entropy"])
@pytest.mark.parametrize("value", [[[1.0] * 3] * 2, {"a": 1}, np.ones((2, 3))])
def test_from_padded_takes_tensors_only(name: str, value: Any) -> None:
    fields = {"loss_masks": ONES, "rollout_log_probs": -ONES, name: value}
    with pytest.raises(
        TypeError, match=rf"{name} is a {type(value).__name__}: from_padded takes .* tensors; from_lists"
    ):
        mp.PackedSequences.from_padded(**fields)


def test_one_sentence_for_a_field_that_is_none_of_a_batch() -> None:
    packs: tuple[Any, ...] = (mp.PackedSequences.from_padded, mp.PackedSequences.from_lists)
    for pack in packs:
        with pytest.raises(TypeError, match=r"^loss_mask is no field of a batch: pass loss_masks, one mask a sequence"):
            pack(loss_mask=ONES)
        with pytest.raises(TypeError, match=r"^logprobs is no field of a batch: pass one of those in the signature"):
            pack(loss_masks=ONES, logprobs=-ONES)
        with pytest.raises(ValueError, match=r"old_log_probs has dtype torch\.bool: pass log-probs"):
            pack(loss_masks=ONES, old_log_probs=ONES.bool())
    lists, padded = (inspect.signature(pack).parameters.keys() for pack in reversed(packs))
    assert padded - lists == {"lengths"} and not lists - padded, "an IDE shows them all"


def test_what_a_loop_sees_is_short_and_swapped_arguments_are_named() -> None:
    fields: dict[str, Any] = {
        "old_log_probs": -ONES,
        "rollout_log_probs": -ONES,
        "loss_masks": ONES,
        "advantages": torch.ones(2),
    }
    packed, config = mp.PackedSequences.from_padded(**fields), mp.preset("token_is")
    result: Any = mp.policy_loss((-ONES).requires_grad_(), packed, config)
    ended = mp.step_loss([result])
    for shown in (packed, result, result.correction, result.statistics, ended):
        assert repr(shown).startswith(type(shown).__name__) and len(repr(shown)) < 200 and "\n" not in repr(shown)
    assert repr(packed) == (
        "PackedSequences(2 sequences, 6 tokens, 6 train; rollout_log_probs, old_log_probs, advantages)"
    )
    assert "loss -1 of this batch" in repr(result) and "6 of 6 tokens kept, mean weight 1" in repr(result.correction)
    swapped: Any = packed
    with pytest.raises(TypeError, match="packed is a Tensor: policy_loss takes log_probs, then the PackedSequences"):
        mp.policy_loss(swapped, swapped.old_log_probs, config)


def test_advantages_of_accepted_responses_need_rewards() -> None:
    """`rs.group` acts in `group_advantages` alone: a batch without rewards had none of it. Rewards let it through."""
    config = mp.MismatchConfig.build({"rs": {"criteria": ["sequence_mean:k3:0.1"], "group": "exclude"}})
    rows: dict[str, Any] = {
        "old_log_probs": -ONES,
        "rollout_log_probs": torch.tensor([[-1.0] * 3, [-3.0] * 3]),
        "loss_masks": ONES,
    }
    accepted = mp.correct(mp.PackedSequences.from_padded(**rows), config).kept_N
    assert accepted.tolist() == [3, 0]
    advantages = mp.group_advantages([1.0, 0.0], [0, 0], accepted)
    with pytest.raises(ValueError, match=r"rewards is missing: rs\.group exclude acts in mp\.group_advantages"):
        mp.policy_loss(-ONES, mp.PackedSequences.from_padded(**rows, advantages=advantages), config)
    packed = mp.PackedSequences.from_padded(**rows, advantages=advantages, rewards=[1.0, 0.0])
    assert float(mp.policy_loss(-ONES, packed, config).loss) == 0.0
    mp.policy_loss(-ONES, packed.replace(rewards=None), config.replace(rs={"group": "keep"}))


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, True),
        ({"use_tis": True}, True),
        ({"use_rollout_log_probs": True}, False),
        ({"objective": "reinforce"}, False),
    ],
)
def test_without_old_log_probs_nothing_clips_and_that_is_said(settings: dict[str, Any], warned: bool) -> None:
    config = mp.MismatchConfig.build(settings)
    packed = mp.PackedSequences.from_padded(rollout_log_probs=-ONES, loss_masks=ONES, advantages=torch.ones(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mp.policy_loss(-ONES, packed.replace(old_log_probs=-torch.ones(6)), config)
        assert not said
        mp.policy_loss(-ONES, packed, config)
    assert [str(each.message)[:60] for each in said] == (
        ["old_log_probs is missing, so π_old is π_θ and nothing clips:"] * warned
    )


def test_constructor_errors() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"loss_mask has dtype torch\.float32"):
        mp.PackedSequences(loss_mask=torch.ones(3), lengths=(3,))
    with pytest.raises(ValueError, match=r"loss_mask has shape \(3,\), but lengths add up to 4"):
        mp.PackedSequences(loss_mask=mask, lengths=(3, 1))
    with pytest.raises(ValueError, match=r"entropy has shape \(2,\), but lengths add up to 3"):
        mp.PackedSequences(loss_mask=mask, lengths=(2, 1), entropy=torch.zeros(2))
    with pytest.raises(ValueError, match="sequence_ids has 1 names for 2 sequences"):
        mp.PackedSequences(loss_mask=mask, lengths=(2, 1), sequence_ids=("a",))


@pytest.mark.parametrize("name", ["advantages", "ref_log_probs", "entropy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named(name: str, value: float) -> None:
    lists = {"rollout_log_probs": [[-1.0, -2.0], [-1.0, -2.0, -3.0]], "sequence_ids": ["a", "b"]}
    bad: Any = [[0.5, 0.5], [0.5, value, 0.5]]
    with pytest.raises(ValueError, match=rf"{name} of sequence b is {value} at position 1, a token that trains"):
        mp.PackedSequences.from_lists(loss_masks=[[1, 1], [1, 1, 1]], **lists, **{name: bad})
    mp.PackedSequences.from_lists(loss_masks=[[1, 1], [1, 0, 1]], **lists, **{name: bad})


def test_train_log_probs_is_the_other_spelling_of_old_log_probs() -> None:
    """Catches two fields that could hold two policies, of which `correct` and `policy_loss` took different ones."""
    lists: dict[str, Any] = {"loss_masks": [[1, 1], [1]], "rollout_log_probs": [[-1.0, -2.0], [-3.0]]}
    train = [[-1.0, -2.5], [-3.5]]
    ours = mp.PackedSequences.from_lists(**lists, old_log_probs=train)
    theirs = mp.PackedSequences.from_lists(**lists, train_log_probs=train)
    padded = mp.PackedSequences.from_padded(loss_masks=torch.ones(1, 2), train_log_probs=torch.tensor([[-1.0, -2.5]]))
    assert padded.old_log_probs is not None and padded.old_log_probs.tolist() == [-1.0, -2.5]
    replaced = ours.replace(train_log_probs=torch.tensor([-1.0, -2.0, -4.0]))
    for packed, expected in ((ours, -3.5), (theirs, -3.5), (replaced, -4.0)):
        assert packed.old_log_probs is not None and packed.old_log_probs.tolist()[2] == expected
        assert packed.train_log_probs is packed.old_log_probs
    assert ours.replace(train_log_probs=None).old_log_probs is None
    message = "old_log_probs and train_log_probs are two names of log π_old"
    with pytest.raises(ValueError, match=message):
        mp.PackedSequences.from_lists(**lists, old_log_probs=train, train_log_probs=train)
    with pytest.raises(ValueError, match=message):
        ours.replace(old_log_probs=torch.zeros(3), train_log_probs=torch.zeros(3))


def test_one_policy_in_the_correction_and_in_the_loss() -> None:
    """ρ = e^.5 by either spelling; the loss of algorithm 2 at π_θ = π_old is −ρ A."""
    config = mp.MismatchConfig(use_tis=True)
    for name in ("old_log_probs", "train_log_probs"):
        lists: dict[str, Any] = {name: [[-0.5]], "rollout_log_probs": [[-1.0]], "loss_masks": [[1]]}
        packed = mp.PackedSequences.from_lists(**lists, advantages=[2.0])
        weight = float(mp.correct(packed, config).weights[0])
        loss = float(mp.policy_loss(torch.tensor([-0.5]), packed, config).loss)
        assert (weight, loss) == (pytest.approx(1.6487213), pytest.approx(-3.2974425))


def test_packing_takes_keywords_only() -> None:
    """Catches rollout and training log-probs handed over in the wrong order, which swaps every ratio in silence."""
    pack: Any = mp.PackedSequences
    with pytest.raises(TypeError, match="positional"):
        pack.from_lists([[-1.0]], [[-2.0]], [[1]])
    with pytest.raises(TypeError, match="positional"):
        pack.from_padded(-torch.ones(1, 1), -torch.ones(1, 1), torch.ones(1, 1))


# Padded batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[3, 1, 0], None])
def test_policy_loss_takes_padded_log_probs(lengths: list[int] | None) -> None:
    """The same loss and gradient as from lists; padding, whatever it holds, gets none."""
    generator = torch.Generator().manual_seed(0)
    old, rollout, current = -0.1 - torch.rand(3, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    keep = [4, 4, 4] if lengths is None else lengths
    inside = torch.arange(4) < torch.tensor(keep)[:, None]
    rows = {"old_log_probs": old, "rollout_log_probs": rollout, "loss_masks": mask}
    padded: dict[str, Any] = {
        n: value.masked_fill(~inside, 0 if n == "loss_masks" else 7.0) for n, value in rows.items()
    }
    packed = mp.PackedSequences.from_padded(**padded, lengths=lengths, advantages=torch.tensor([1.0, -2.0, 3.0]))
    lists: dict[str, Any] = {n: [row[:k] for row, k in zip(v, keep, strict=True)] for n, v in rows.items()}
    expected = mp.PackedSequences.from_lists(**lists, advantages=[1.0, -2.0, 3.0])
    config = mp.MismatchConfig(use_tis=True)
    square = current.masked_fill(~inside, 7.0).requires_grad_()
    flat = torch.cat([row[:k] for row, k in zip(current, keep, strict=True)]).requires_grad_()
    result, other = mp.policy_loss(square, packed, config), mp.policy_loss(flat, expected, config)
    assert torch.equal(result.loss, other.loss)
    result.loss.backward()
    other.loss.backward()
    assert square.grad is not None and flat.grad is not None
    assert torch.equal(square.grad[inside], flat.grad) and not square.grad[~inside].any() and flat.grad.any()
    assert packed.to_padded(result.correction.weights).shape == (3, 4)
    assert torch.equal(mp.policy_loss(flat, packed, config).loss, other.loss), "[T] is taken, too"


def test_shape_errors_say_what_to_write() -> None:
    config = mp.MismatchConfig()
    square = mp.PackedSequences.from_lists(loss_masks=[[1] * 16] * 32, advantages=[1.0] * 32)
    ragged = mp.PackedSequences.from_lists(loss_masks=[[1, 1], [1]], advantages=[1.0, 2.0])
    padded = mp.PackedSequences.from_padded(loss_masks=torch.ones(2, 3), advantages=torch.ones(2), lengths=[3, 1])
    pack_rows = r"pass \(512,\), one value a token, or pack with from_padded, which takes \[B, S\]"
    wrong: list[tuple[mp.PackedSequences, tuple[int, ...], str]] = [
        (square, (32, 16), rf"\(32, 16\), the packed batch 512 tokens of 32 sequences: {pack_rows}"),
        (square, (512, 1), pack_rows),
        (ragged, (4,), r"\(4,\), the packed batch 3 tokens of 2 sequences: pass \(3,\), one value a token"),
        (padded, (2, 4), r"4 tokens of 2 sequences: pass \(4,\), one value a token, or \(2, 3\) as before"),
        (padded.replace(lengths=(2, 2)), (2, 3), "or pack with from_padded"),
    ]
    for packed, shape, message in wrong:
        with pytest.raises(ValueError, match=message):
            mp.policy_loss(torch.zeros(shape), packed, config)
    packs: tuple[Any, ...] = (mp.PackedSequences.from_padded, mp.PackedSequences.from_lists)
    for pack in packs:
        with pytest.raises(ValueError, match=r"for one advantage a sequence .*advantages\.squeeze\(1\)"):
            pack(loss_masks=torch.ones(2, 3), advantages=torch.ones(2, 1))


def test_lengths_are_whole_numbers() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert mp.PackedSequences.from_padded(loss_masks=mask, lengths=torch.tensor([2, 3]).tolist()).lengths == (2, 3)
    for odd in (3.7, True, "3"):
        with pytest.raises(ValueError, match="pass whole numbers of tokens"):
            mp.PackedSequences.from_padded(loss_masks=mask, lengths=[2, odd])  # pyright: ignore


@pytest.mark.parametrize("name", ["unit_ids", "weight_versions", "positions"])
def test_whole_numbers_are_not_cut_off(name: str) -> None:
    given: dict[str, Any] = {name: [torch.tensor([0.0, 1.0])]}
    packed = mp.PackedSequences.from_lists(loss_masks=[[1, 1]], **given)
    assert getattr(packed, name).tolist() == [0, 1]
    rows: tuple[Any, ...] = ([0, 1.5], [0, None], torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1e30]))
    for row in rows:
        given = {name: [[0], row]}
        with pytest.raises(ValueError, match=f"{name} of sequence 1 is .* at position 1: pass whole numbers"):
            mp.PackedSequences.from_lists(loss_masks=[[1], [1, 1]], **given)
    with pytest.raises(ValueError, match=rf"{name} has dtype torch.float32: pass whole numbers"):
        packed.replace(**{name: torch.tensor([0.0, math.nan])})


def test_what_was_found_goes_with_the_values() -> None:
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[None, -1.0]], old_log_probs=[[-1.0, -1.0]], loss_masks=[[1, 1]]
    )
    assert packed.invalid and packed.invalid_counts == {"nan": 1}
    other = packed.replace(rollout_log_probs=torch.tensor([-1.0, -1.0]))
    assert not other.invalid and not other.invalid_counts


def test_a_sample_without_any_list_is_named() -> None:
    with pytest.raises(ValueError, match="rollout_log_probs of sequence 1 is None: pass one number a response token"):
        mp.PackedSequences.from_lists(rollout_log_probs=[[-1.0], None], loss_masks=[[1], [1]])
