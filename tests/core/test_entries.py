"""Lists into flat tensors: as torch makes them, and without a Python call a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.core import entries
from mismatch_plugin.core.validity import NAMED, find_invalid
from tests.calls import calls

NUMBERS = st.one_of(
    st.floats(), st.floats(width=32), st.integers(-(2**53), 2**53), st.sampled_from([True, False, None, 1e300, -0.0])
)
ROWS = st.one_of(st.lists(NUMBERS), st.lists(NUMBERS).map(tuple), st.lists(st.integers(0, 1)), st.lists(st.booleans()))


def by_torch(row: Any) -> torch.Tensor:
    """NaN for None."""
    return torch.tensor([math.nan if value is None else value for value in row])


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_lists_become_what_torch_makes_of_each(rows: list[Any]) -> None:
    lengths, ids = tuple(map(len, rows)), tuple("abcd"[: len(rows)])
    for name in ("loss_masks", "rollout_log_probs"):
        found, expected = entries.flatten_entries(name, rows, lengths, ids), torch.cat(list(map(by_torch, rows)))
        if name != "loss_masks" and expected.dtype != torch.bool:
            assert found.dtype == torch.float32
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "row",
    [
        [np.float64(-0.1)], [np.float32(-0.1)], np.array([-0.1]), [torch.tensor(-0.1)],
        [-0.1, np.float32(-0.1)], torch.tensor([-0.1], dtype=torch.float64),
    ],
)  # fmt: skip
def test_numbers_of_other_libraries_are_taken(row: Any) -> None:
    found = entries.flatten_entries("rollout_log_probs", [row], (len(row),), ("a",))
    assert found.tolist() == pytest.approx([-0.1] * len(row))


@pytest.mark.parametrize(
    "row", [["1.0"], "12", [[1.0], [2.0, 3.0]], [{}], [-0.1, "x"], [b"1"], [Fraction(1, 2)], 10**400]
)
def test_what_is_no_list_of_numbers_is_named(row: Any) -> None:
    with pytest.raises(ValueError, match="of sequence a"):
        entries.flatten_entries("rollout_log_probs", [row], (1,), ("a",)).sum().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_counts_as_it_does_in_torch_tensor(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        packed = mp.PackedSequences.from_lists(loss_masks=[[1, 1]], old_log_probs=[[-0.1, None]], advantages=[0.1])
        expected = torch.tensor([-0.1, float("nan")]).to(torch.promote_types(dtype, torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert packed.old_log_probs is not None and packed.advantages is not None
    assert torch.equal(packed.old_log_probs.nan_to_num(), expected.nan_to_num())
    assert packed.advantages.dtype == packed.old_log_probs.dtype == expected.dtype


@pytest.mark.parametrize("missing", [False, True])
def test_no_call_a_token(missing: bool) -> None:
    def packing(length: int) -> Callable[[], object]:
        row: list[float | None] = [-0.5 - at / 7 for at in range(length)]
        mask = [1] * length
        if missing:
            row[1], mask[1] = None, 0
        fields: dict[str, Any] = {"rollout_log_probs": [row] * 3, "old_log_probs": [row] * 3}
        fields |= {"weight_versions": [[3] * length] * 3, "advantages": [0.5] * 3}
        return lambda: mp.PackedSequences.from_lists(loss_masks=[mask] * 3, **fields)

    assert calls(packing(8)) == calls(packing(2000))


def test_of_a_million_defects_a_few_are_objects_and_all_are_counted() -> None:
    tokens = 1_000_000
    rollout = torch.full((tokens,), float("nan"))
    rollout[::2] = 5.0
    arguments = (torch.full((tokens,), -1.0), rollout, torch.ones(tokens, dtype=torch.bool), [tokens], ["a"])
    found, counts = find_invalid(*arguments)
    assert counts == {"positive": tokens // 2, "nan": tokens // 2} and len(found) == 2 * NAMED
    assert [item.position for item in found] == list(range(2 * NAMED))
    train, _, mask, *_ = arguments
    few = (train[:100], rollout[:100], mask[:100], [100], ["a"])  # cut here: once torch.fx traced, that is calls, too
    assert calls(lambda: find_invalid(*arguments)) == calls(lambda: find_invalid(*few))
