"""PackedSequences: in from lists and padded tensors, back again, and every error by its message."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.packed import flatten_entries

FLOAT_FIELDS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
LENGTHS = (3, 0, 2, 1)
MASKS = [[1, 0, 1], [], [0, 0], [1]]
ONES = torch.ones(2, 3)


def rows(start: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Different numbers everywhere, all legal log-probs."""
    values = -(start + torch.arange(1, 7, dtype=torch.float64) / 10)
    return list(values.to(dtype).split(LENGTHS))


def everything() -> dict[str, Any]:
    fields: dict[str, Any] = {name: rows(i / 100) for i, name in enumerate(FLOAT_FIELDS)}
    fields["positions"] = [[4, 5, 6], [], [0, 1], [9]]
    fields["weight_versions"] = [[7, 7, 8], [], [7, 7], [6]]
    return fields


# In and out -----------------------------------------------------------------------------------------------------------


def test_from_lists_keeps_every_value_in_order() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=MASKS, rewards=[1, 2, 3, 4], sequence_ids="abcd", **everything())
    assert packed.lengths == LENGTHS and packed.sequence_ids == tuple("abcd")
    assert packed.loss_mask.tolist() == [True, False, True, False, False, True]
    assert packed.offsets.tolist() == [0, 3, 3, 5, 6]
    assert packed.sequence_index.tolist() == [0, 0, 0, 2, 2, 3]
    assert mp.PackedSequences.from_lists(loss_masks=MASKS).response_positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert packed.rewards is not None and packed.rewards.tolist() == [1, 2, 3, 4]
    spread = mp.PackedSequences.from_lists(loss_masks=MASKS, advantages=[1.5, 7.0, -2.0, torch.tensor(0.5)])
    assert spread.advantages is not None and spread.advantages.tolist() == [1.5, 1.5, 1.5, -2, -2, 0.5]
    for i, name in enumerate(FLOAT_FIELDS):
        value = getattr(packed, name)
        assert value.dtype == torch.float64 and torch.equal(value, torch.cat(rows(i / 100)))
    for name in ("positions", "weight_versions"):
        value = getattr(packed, name)
        assert value.dtype == torch.int64 and value.tolist() == [item for row in everything()[name] for item in row]


def test_unpack_and_to_padded_round_trip() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=MASKS, **everything())
    assert packed.old_log_probs is not None
    back = packed.unpack(packed.old_log_probs)
    assert all(torch.equal(a, b) for a, b in zip(back, rows(0.0), strict=True))
    square = packed.to_padded(packed.old_log_probs, padding=9.0)
    assert mp.PackedSequences.from_lists(loss_masks=[]).to_padded(torch.zeros(0)).shape == (0, 0)
    wide = mp.PackedSequences(loss_mask=torch.ones(5).bool(), lengths=(3, 2), padded_width=4)
    assert wide.to_padded(torch.ones(5, 2), padding=7.0)[1].tolist() == [[1, 1], [1, 1], [7, 7], [7, 7]]
    assert square.tolist() == [[*row.tolist(), *[9.0] * (3 - len(row))] for row in back]
    cut = mp.PackedSequences.from_padded(
        old_log_probs=square, loss_masks=packed.to_padded(packed.loss_mask), lengths=packed.lengths
    )
    assert cut.lengths == LENGTHS and torch.equal(cut.loss_mask, packed.loss_mask)
    assert cut.old_log_probs is not None and torch.equal(cut.old_log_probs, packed.old_log_probs)


def test_train_log_probs_is_the_other_spelling_of_old_log_probs() -> None:
    """Catches two fields that could hold two policies, of which `correct` and `policy_loss` took different ones: ρ =
    e^.5 by either spelling; the loss of algorithm 2 at π_θ = π_old is −ρ A."""
    for name in ("old_log_probs", "train_log_probs"):
        lists: dict[str, Any] = {name: [[-0.5]], "rollout_log_probs": [[-1.0]], "loss_masks": [[1]]}
        packed, config = mp.PackedSequences.from_lists(**lists, advantages=[2.0]), mp.MismatchConfig(use_tis=True)
        assert packed.train_log_probs is packed.old_log_probs is not None
        assert float(mp.correct(packed, config).weights[0]) == pytest.approx(1.6487213)
        assert float(mp.policy_loss(torch.tensor([-0.5]), packed, config).loss) == pytest.approx(-3.2974425)
        replaced = packed.replace(train_log_probs=torch.tensor([-4.0])).old_log_probs
        assert replaced is not None and replaced.tolist() == [-4.0]
        assert packed.replace(train_log_probs=None).old_log_probs is None
    padded = mp.PackedSequences.from_padded(loss_masks=ONES, train_log_probs=-ONES)
    assert padded.old_log_probs is not None
    message = "old_log_probs and train_log_probs are two names of log π_old"
    with pytest.raises(ValueError, match=message):
        mp.PackedSequences.from_lists(loss_masks=[[1]], old_log_probs=[[-1.0]], train_log_probs=[[-1.0]])
    with pytest.raises(ValueError, match=message):
        padded.replace(old_log_probs=torch.zeros(6), train_log_probs=torch.zeros(6))


def test_what_was_found_goes_with_the_values() -> None:
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[None, -1.0]], old_log_probs=[[-1.0, -1.0]], loss_masks=[[1, 1]]
    )
    assert packed.invalid and packed.invalid_counts == {"nan": 1}
    other = packed.replace(rollout_log_probs=torch.tensor([-1.0, -1.0]))
    assert not other.invalid and not other.invalid_counts


def test_lists_become_what_torch_makes_of_each() -> None:
    """None is NaN; Python's floats become float32, arrays and tensors of float64 stay."""
    rows: list[Any] = [[1, 2.5, None, True], (1e300, -0.0), np.array([0.1]), torch.tensor([0.1]).double()]
    flat = flatten_entries("entropy", rows, (4, 2, 1, 1), tuple("abcd"))
    expected = torch.tensor([1.0, 2.5, math.nan, 1.0, math.inf, 0.0, 0.1, 0.1], dtype=torch.float64)
    torch.testing.assert_close(flat, expected, rtol=0, atol=1e-8, equal_nan=True)
    assert flatten_entries("entropy", rows[:1], (4,), ("a",)).dtype == torch.float32
    assert flatten_entries("positions", [[2**52 + 1, 7]], (2,), ("a",), integer=True)[0] == 2**52 + 1


# Refused --------------------------------------------------------------------------------------------------------------

LISTS, PADDED = mp.PackedSequences.from_lists, mp.PackedSequences.from_padded
ONE, SQUARE = {"loss_masks": [[1]]}, {"loss_masks": ONES}
TWO = {"loss_masks": [[1], [1, 1, 1]], "sequence_ids": ["p7", "p8"]}
FLAT = {"loss_mask": torch.ones(3).bool(), "lengths": (2, 1)}
ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (LISTS, ONE | {"entropy": [[-1.0], [-1.0]]}, "entropy has 2 sequences, loss_masks 1"),
    (LISTS, TWO | {"rollout_log_probs": [[-1.0], [-1.0, -1.0]]}, r"of sequence p8 has shape \(2,\), its loss mask 3"),
    (LISTS, TWO | {"rollout_log_probs": [[-1.0], None]}, "rollout_log_probs of sequence p8 is no list of numbers"),
    (LISTS, {"loss_masks": [[1, 1]], "entropy": [torch.zeros(1, 2)]}, r"entropy .* has shape \(1, 2\)"),
    (LISTS, {"loss_masks": [[1, 2]]}, "loss_masks holds 2: a mask is 1"),
    (LISTS, ONE | {"sequence_ids": ["a", "b"]}, r"sequence_ids has 2"),
    (LISTS, ONE | {"trainer_version": -1}, r"trainer_version is -1: pass the number of the weights"),
    (PADDED, SQUARE | {"ref_log_probs": ONES.bool()}, "ref_log_probs of sequence 0 .*it holds bools: is it a mask"),
    (LISTS, ONE | {"rewards": [1.0, 2.0]}, "rewards"),
    (LISTS, TWO | {"weight_versions": [[0], [0, 1.5, 0]]}, "weight_versions of sequence p8 is 1.5 at position 1"),
    (LISTS, TWO | {"advantages": [[0.5], [0.5, math.nan, 0.5]]}, "advantages of sequence p8 is nan at position 1"),
    (LISTS, TWO | {"ref_log_probs": [[0.5], [0.5, math.inf, 1]]}, "ref_log_probs of sequence p8 is inf at position 1"),
    (PADDED, {"loss_masks": torch.ones(3)}, r"from_padded takes \[batch, length\] tensors"),
    (PADDED, SQUARE | {"entropy": torch.ones(2, 4)}, r"entropy has shape \(2, 4\): .* of loss_masks, \(2, 3\)"),
    (PADDED, SQUARE | {"rollout_log_probs": [[1.0] * 3] * 2}, "rollout_log_probs is no tensor"),
    (PADDED, SQUARE | {"lengths": [3, 4]}, r"lengths \[3, 4\] do not fit"),
    (PADDED, SQUARE | {"advantages": torch.ones(2, 1)}, r"advantages has shape \(2, 1\).*advantages may be \[batch\]"),
    (mp.PackedSequences, FLAT | {"loss_mask": torch.ones(3)}, r"loss_mask has dtype torch\.float32"),
    (mp.PackedSequences, FLAT | {"lengths": (3, 1)}, r"loss_mask has shape \(3,\), but lengths add up to 4"),
    (mp.PackedSequences, FLAT | {"entropy": torch.zeros(2)}, r"entropy has shape \(2,\), but lengths add up to 3"),
    (mp.PackedSequences, FLAT | {"positions": torch.zeros(3)}, "positions has dtype torch.float32: pass whole numbers"),
]


@pytest.mark.parametrize(("pack", "fields", "message"), ERRORS, ids=range(len(ERRORS)))
def test_what_is_no_batch_is_refused(pack: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**fields)


def test_half_precision_becomes_float32() -> None:
    half = mp.PackedSequences(loss_mask=torch.ones(3).bool(), lengths=(3,), old_log_probs=-torch.ones(3).bfloat16())
    assert half.old_log_probs is not None and half.old_log_probs.dtype == torch.float32


def test_packing_takes_keywords_only() -> None:
    """Catches rollout and training log-probs handed over in the wrong order, which swaps every ratio in silence."""
    packs: tuple[Any, ...] = (LISTS, PADDED)
    for pack in packs:
        with pytest.raises(TypeError, match="positional"):
            pack(-ONES, -ONES, ONES)
        with pytest.raises(TypeError, match=r"keyword.* argument.* 'loss_mask"):
            pack(loss_mask=ONES)
        with pytest.raises(TypeError, match="unexpected keyword argument 'rollouts'"):
            pack(loss_masks=ONES, rollouts=ONES)


def test_shape_errors_say_what_to_write() -> None:
    square = mp.PackedSequences.from_lists(loss_masks=[[1] * 16] * 32, advantages=[1.0] * 32)
    ragged = mp.PackedSequences.from_lists(loss_masks=[[1, 1], [1]], advantages=[1.0, 2.0])
    padded = mp.PackedSequences.from_padded(loss_masks=ONES, advantages=torch.ones(2), lengths=[3, 1])
    pack_rows = r"pass \(512,\), one value a token, or pack with from_padded, which takes \[B, S\]"
    wrong: list[tuple[mp.PackedSequences, tuple[int, ...], str]] = [
        (square, (32, 16), rf"\(32, 16\), the packed batch 512 tokens of 32 sequences: {pack_rows}"),
        (ragged, (4,), r"\(4,\), the packed batch 3 tokens of 2 sequences: pass \(3,\), one value a token"),
        (padded, (2, 4), r"4 tokens of 2 sequences: pass \(4,\), one value a token, or \(2, 3\) as before"),
    ]
    for packed, shape, message in wrong:
        with pytest.raises(ValueError, match=message):
            mp.policy_loss(torch.zeros(shape), packed, mp.MismatchConfig())
    with pytest.raises(TypeError, match="packed is a Tensor: policy_loss takes log_probs, then the PackedSequences"):
        mp.policy_loss(ragged, torch.zeros(3), mp.MismatchConfig())  # type: ignore[arg-type]
