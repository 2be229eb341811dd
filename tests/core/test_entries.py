"""Lists into flat tensors: in bulk as one by one, whatever they hold, and without a Python call a token."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core import entries
from mismatch_plugin.core.validity import NAMED, find_invalid
from tests.calls import calls

NUMBERS = st.one_of(
    st.floats(),
    st.floats(width=32),
    st.integers(-3, 3),
    st.integers(),
    st.sampled_from([True, False, None, 2**53 + 1, 2**63, -(2**63), 10**400, 1e300, -0.0]),
)
OTHERS = st.sampled_from(
    [
        "1.0", "", b"1", [1.0], (), {}, 1j, Decimal("0.5"), Fraction(1, 2), object(), np.float64(0.1), np.float32(0.1),
        np.int64(3), np.bool_(True), np.array(0.1), np.array([0.1]), torch.tensor(0.1), torch.tensor([0.1]),
        torch.tensor(0.1, dtype=torch.float64), torch.tensor(1), np.str_("1"), np.datetime64("2020"),
    ]
)  # fmt: skip
ROWS = st.one_of(
    st.lists(st.floats(width=32), max_size=4),
    st.lists(st.sampled_from([0, 1]), max_size=4),
    st.lists(NUMBERS, max_size=4),
    st.lists(st.one_of(NUMBERS, OTHERS), max_size=4),
    st.lists(NUMBERS, max_size=4).map(tuple),
    st.lists(st.floats(width=32), max_size=4).map(lambda row: torch.tensor(row, dtype=torch.float64)),
    st.lists(st.floats(width=32), max_size=4).map(np.array),
    st.sampled_from([None, 0.5, 2, "12", 10**400]),
)
FIELDS = ("loss_masks", "rollout_log_probs", "advantages", "weight_versions")


def outcome(run: Callable[[], Tensor]) -> tuple[object, ...]:
    """Dtype and bits, or the error."""
    try:
        flat = run()
    except Exception as error:  # whatever it is, both ways must give it
        return type(error), str(error)
    return flat.dtype, flat.shape, flat.double().numpy().tobytes()


@given(st.sampled_from(FIELDS), st.lists(ROWS, max_size=4), st.data())
def test_in_bulk_is_one_by_one(name: str, values: list[Any], data: st.DataObject) -> None:
    lengths = tuple(len(row) if hasattr(row, "__len__") else data.draw(st.integers(0, 3)) for row in values)
    if data.draw(st.booleans()):
        lengths = tuple(data.draw(st.integers(0, 4)) for _ in values)
    arguments = (name, values, lengths, tuple("abcd"[: len(values)]), name == "weight_versions")
    with pytest.MonkeyPatch.context() as patch:
        found = outcome(lambda: entries.flatten_entries(*arguments))
        patch.setattr(entries, "_in_bulk", lambda *_: None)
        expected = outcome(lambda: entries.flatten_entries(*arguments))
    if name == "loss_masks" and isinstance(found[0], torch.dtype):  # of which only what is not 0 is used
        assert isinstance(expected[0], torch.dtype) and found[1:] == expected[1:]
    else:
        assert found == expected


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
