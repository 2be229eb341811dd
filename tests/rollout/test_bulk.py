"""Records in bulk: faults as a loop over the tokens finds them, and no Python call a token or a defect."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.diagnose.batch import median, stable_order
from mismatch_plugin.rollout.files import read_records
from mismatch_plugin.rollout.packing import to_packed
from mismatch_plugin.rollout.records import RolloutRecord, WeightSpan, check_records
from tests.calls import calls

EDGES = [0.0, -0.0, 0.1, math.nextafter(0.1, 1), 0.1 + 1e-10, FLOOR, math.nextafter(FLOOR, 0), FLOOR - 1e-4]
VALUES = st.one_of(st.none(), st.floats(-9, 0), st.floats(), st.sampled_from(EDGES))
TRAIN = st.one_of(st.floats(-9, 0), st.sampled_from([-3.0, math.nextafter(-3.0, -4), -3.0000000001, -2.9999]))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[RolloutRecord], list[list[float]] | None]:
    records, train = [], []
    behaviour = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, 4))
        row = st.lists(VALUES, min_size=n, max_size=n)
        rollout = draw(st.one_of(row, row, st.lists(VALUES, max_size=4)))
        both: dict[str, Any] = {"behaviour_log_probs": draw(row), "kept_ids": [[]] * n} if behaviour else {}
        mask = draw(st.lists(st.sampled_from([0, 1, 1]), min_size=n, max_size=n))
        ids = list(range(n))
        records.append(
            RolloutRecord(prompt_ids=[1], response_ids=ids, rollout_log_probs=rollout, loss_mask=mask, **both)
        )
        train.append(draw(st.lists(TRAIN, min_size=n, max_size=n)))
    return records, draw(st.sampled_from([train, None]))


def plain_faults(record: RolloutRecord, train: list[float] | None) -> list[tuple[int, str]]:
    """Token by token, from the description."""
    found: list[tuple[int, str]] = []
    for values in (record.rollout_log_probs, record.behaviour_log_probs):
        if values is None:
            continue
        if len(values) != len(record.response_ids):
            found.append((min(len(values), len(record.response_ids)), "length"))
            continue
        for at, value in enumerate(values):
            if not record.loss_mask[at]:
                continue
            if value is None:
                found.append((at, "missing"))
            elif math.isnan(value):
                found.append((at, "nan"))
            elif value == math.inf:
                found.append((at, "positive_infinite"))
            elif value > POSITIVE_TOLERANCE:
                found.append((at, "positive"))
            elif value <= FLOOR:
                found.append((at, "floor"))
            elif value == 0 and train is not None and train[at] < -ZERO_FILL_GAP:
                found.append((at, "zero_fill"))
    return sorted(found, key=lambda item: item[0])


@given(batches(), st.integers(0, 3))
def test_faults_are_those_of_a_loop(batch: tuple[list[RolloutRecord], list[list[float]] | None], limit: int) -> None:
    records, train = batch
    rows: list[Any] = [None] * len(records) if train is None else train
    expected = [plain_faults(record, row) for record, row in zip(records, rows, strict=True)]
    for record, row, wanted in zip(records, rows, expected, strict=True):
        assert [(fault.position, fault.kind) for fault in record.faults(train_log_probs=row)] == wanted
        assert record.faults(train_log_probs=row, limit=limit) == record.faults(train_log_probs=row)[:limit]
        assert record.count_faults(train_log_probs=row) == len(wanted)
    every = check_records(records, train)
    assert [(fault.sample, fault.position, fault.kind) for fault in every] == [
        (index, *item) for index, items in enumerate(expected) for item in items
    ]
    assert check_records(records, train, limit=limit) == every[:limit]
    if every:
        with pytest.raises(mp.InvalidLogProbError) as caught:
            to_packed(records, train)
        said = str(caught.value)
        assert all(str(fault) in said for fault in every[:3])
        assert (f"and {len(every) - 3} more" in said) == (len(every) > 3)
    else:
        packed = to_packed(records, train)
        used = [r.rollout_log_probs if r.behaviour_log_probs is None else r.behaviour_log_probs for r in records]
        flat = torch.tensor([math.nan if value is None else value for row in used for value in row])
        assert packed.rollout_log_probs is not None
        assert torch.equal(packed.rollout_log_probs.nan_to_num(), flat.nan_to_num())
        assert packed.loss_mask.tolist() == [bool(mask) for record in records for mask in record.loss_mask]


def long_record(length: int, tools: bool = False) -> RolloutRecord:
    values: list[float | None] = [-0.5 - at / 7 for at in range(length)]
    mask = [1] * length
    if tools:
        values[2], mask[2] = None, 0
    spans = [WeightSpan(version="3", start=0, end=5), WeightSpan(version="4", start=5, end=length)]
    return RolloutRecord(
        prompt_ids=[1],
        response_ids=list(range(length)),
        rollout_log_probs=values,
        loss_mask=mask,
        weight_versions=spans,
    )


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("tensors", [False, True])
def test_packing_calls_nothing_a_token(tools: bool, tensors: bool) -> None:
    def packing(length: int) -> Callable[[], object]:
        records = [long_record(length, tools)] * 3
        train: list[Any] = [[-0.4] * length] * 3
        train = [torch.tensor(row) for row in train] if tensors else train
        return lambda: to_packed(records, train)

    assert calls(packing(8)) == calls(packing(2000))


def test_reading_calls_nothing_a_token(tmp_path: Path) -> None:
    def reading(length: int) -> Callable[[], object]:
        path = tmp_path / f"{length}.jsonl"
        path.write_text((long_record(length).model_dump_json() + "\n") * 3)
        return lambda: read_records(path)

    assert calls(reading(8)) == calls(reading(2000))


def test_a_million_faults_are_counted_and_three_are_named() -> None:
    length = 1_000_000
    bad = RolloutRecord(prompt_ids=[1], response_ids=[0] * length, rollout_log_probs=[math.nan] * length)

    def said() -> str:
        with pytest.raises(mp.InvalidLogProbError) as caught:
            to_packed([bad])
        return str(caught.value)

    assert "position 2 is NaN" in said() and f"and {length - 3} more" in said()
    tracemalloc.start()
    try:
        said()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * length  # arrays and positions; an object a fault takes 600 bytes each


LINE = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0], "sample_id": "q"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"response_ids": [2, -3]},
            r"sample q\)?.*response_ids\.1.*greater than or equal to 0 \(value '-3'\)|response_ids\.1",
        ),
        ({"response_ids": [2, 2**63]}, rf"response_ids\.1: Input should be less than {2**63}"),
        ({"prompt_ids": [2**80]}, r"prompt_ids\.0"),
        ({"response_ids": [2, "x"]}, r"response_ids\.1: Input should be a valid integer"),
        ({"response_ids": [2, 1.5]}, r"response_ids\.1: Input should be a valid integer"),
        ({"rollout_log_probs": [-1.0, "x"]}, r"rollout_log_probs\.1: Input should be a valid number"),
        ({"rollout_log_probs": [[-1.0]]}, r"rollout_log_probs\.0: Input should be a valid number"),
        ({"loss_mask": [1, 2]}, r"loss_mask holds 2 at position 1 \(sample q\)"),
        ({"loss_mask": []}, r"loss_mask has 0 entries, response_ids 2 \(sample q\)"),
        ({"loss_mask": [1, None]}, r"loss_mask\.1: Input should be a valid integer"),
    ],
)
def test_bad_lines_name_field_and_position(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, **change}) + "\n")
    with pytest.raises(ValueError, match=rf"line 2.*({says})"):
        read_records(path)


def test_ids_beyond_32_bits_and_a_null_mask_are_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({**LINE, "response_ids": [2**40, 2**63 - 1], "loss_mask": None}) + "\n")
    (record,) = read_records(path)
    assert record.response_ids == [2**40, 2**63 - 1] and record.loss_mask == [1, 1]
    assert "loss_mask" in record.model_fields_set
    assert RolloutRecord.model_validate_json(record.model_dump_json()) == record


@given(st.lists(st.sampled_from([-2.0, -1.5, -1.0, -0.0, 0.0, -math.inf, -0.25]) | st.floats(-5, 0), max_size=60))
def test_the_order_is_the_stable_one_and_the_median_numpy_s(values: list[float]) -> None:
    array = np.array(values, dtype=np.float64)
    assert stable_order(array).tolist() == np.argsort(array, kind="stable").tolist()
    whole = np.round(array[np.isfinite(array)]).astype(np.int32)
    assert stable_order(whole).tolist() == np.argsort(whole, kind="stable").tolist()
    if values:
        assert np.array_equal(median(array), float(np.median(array)), equal_nan=True)
