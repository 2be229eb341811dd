"""The CPU's own ways give what a device's give, are taken for sound data, and only then."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.counting import OperationCounter
from mismatch_plugin.core import host, segments, tokens
from mismatch_plugin.core.segments import Column, segment_sums
from mismatch_plugin.core.tokens import select_tokens
from mismatch_plugin.core.validity import KINDS, classify
from tests.ragged import Batch, Outcome, batches, configs, equal, run, tolerance

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
fixed = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

ROLLOUT_DEFECTS = (math.nan, -math.inf, -9999.0, 0.0, 0.2, math.inf)
TRAIN_DEFECTS = (math.nan, -math.inf, 0.2, math.inf)


def of_a_device(batch: Batch, config: mp.MismatchConfig, **fields: Any) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "ENABLED", False)
        return run(batch, config, **fields)


def same(first: Outcome, second: Outcome, limit: float) -> None:
    equal(first.weights, second.weights, limit)
    equal(first.keep, second.keep)
    equal(first.gradient, second.gradient, limit)
    assert first.metrics.keys() == second.metrics.keys()
    for name, value in first.metrics.items():
        assert value == pytest.approx(second.metrics[name], rel=1e-6, abs=1e-9), name


@fixed
@given(batches(), configs())
def test_sound_data(batch: Batch, config: mp.MismatchConfig) -> None:
    same(run(batch, config), of_a_device(batch, config), 1e-6 if batch.dtype == torch.float32 else tolerance(batch))


@fixed
@given(batches(min_tokens=1), configs(), st.sampled_from([*ROLLOUT_DEFECTS]), st.sampled_from(TRAIN_DEFECTS), st.data())
def test_defects(batch: Batch, config: mp.MismatchConfig, rollout: float, train: float, data: st.DataObject) -> None:
    """Anywhere, padding included, under each policy that goes on with them."""
    policy = data.draw(st.sampled_from(["neutral", "drop-token", "drop-sequence"]))
    changed = {name: [list(row) for row in getattr(batch, name)] for name in ("rollout", "train")}
    for name, bad in (("rollout", rollout), ("train", train)):
        row = data.draw(st.sampled_from([row for row in changed[name] if row]))
        if data.draw(st.booleans()):
            row[data.draw(st.integers(0, len(row) - 1))] = bad
    spoilt = replace(batch, **changed)
    config = mp.MismatchConfig.model_validate(config.model_dump() | {"rollout_log_prob_policy": policy})
    limit = 1e-6 if batch.dtype == torch.float32 else tolerance(batch)
    same(run(spoilt, config), of_a_device(spoilt, config), limit)


def packed(rollout: list[float], train: list[float], mask: list[int]) -> mp.PackedSequences:
    return mp.PackedSequences.from_lists(loss_masks=[mask], rollout_log_probs=[rollout], old_log_probs=[train])


@pytest.mark.parametrize(
    ("rollout", "train", "sound"),
    [
        (-1.0, -1.2, True), (0.0, -2.9, True), (0.05, 0.05, True), (-4999.0, -1.0, True), (-1.0, -1e30, True),
        (0.0, -3.1, False), (-5001.0, -1.0, False), (0.2, -1.0, False), (math.nan, -1.0, False),
        (-math.inf, -1.0, False), (-1.0, math.nan, False), (-1.0, -math.inf, False), (-1.0, 0.2, False),
    ],
)  # fmt: skip
def test_what_is_sound_is_what_the_codes_say(rollout: float, train: float, sound: bool) -> None:
    batch = packed([-1.0, rollout, -5.0], [-1.0, train, -2.0], [1, 1, 0])
    assert batch.old_log_probs is not None and batch.rollout_log_probs is not None
    found = select_tokens(batch.old_log_probs, batch)
    assert found.all_sound is sound and found.code is not None
    codes = classify(batch.old_log_probs, batch.rollout_log_probs, ~batch.loss_mask)
    assert found.code.tolist() == codes.tolist()
    expected = [codes.tolist().count(code) for code in range(len(KINDS))]
    assert found.count_kinds().tolist() == expected


def test_sound_data_are_not_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU saves, and that a filled 0.0 at padding (a tool's output) does not make it classify."""

    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("classified")

    monkeypatch.setattr(tokens, "classify", refuse)
    batch = packed([-1.0, 0.0, -2.0], [-1.5, -9.0, -2.0], [1, 0, 1])
    assert mp.correct(batch, mp.MismatchConfig(use_tis=True)).weights.tolist() == pytest.approx([math.exp(-0.5), 0, 1])
    with pytest.raises(AssertionError, match="classified"), OperationCounter():
        mp.correct(batch, mp.MismatchConfig(use_tis=True))


@pytest.mark.parametrize("tile", [1, 7, 64, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_sums_over_any_tiles(tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences first, last and between; some longer than a tile; a mean far from 0, which float32 would lose."""
    monkeypatch.setattr(host, "_TILE", tile)
    lengths = [0, 3, 0, 0, 200, 7, 7, 1, 0, 64, 0]
    values = (torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)) + 1000).to(dtype)
    values = values if dtype != torch.bool else torch.arange(len(values)) % 3 == 0
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    columns = [
        Column("sum", values, None if dtype == torch.bool else "squares"),
        Column("twice", values.double(), "again"),
    ]
    rows = [row.double().tolist() for row in values.split(lengths)]
    plain, squares = [math.fsum(row) for row in rows], [math.fsum(x * x for x in row) for row in rows]
    expected = {"sum": plain, "squares": squares, "twice": plain, "again": squares}
    for enabled in (True, False):  # as a device sums, all columns together or as many as the tile has room for
        monkeypatch.setattr(host, "ENABLED", enabled)
        monkeypatch.setattr(segments, "_TOGETHER", tile)
        names, sums = segment_sums(columns, offsets)
        assert {*names} == {*expected} - ({"squares"} if dtype == torch.bool else set())
        for name, found in zip(names, sums.tolist(), strict=True):
            assert found == pytest.approx(expected[name], rel=1e-15 if enabled else 1e-14)


def test_sums_without_a_sequence_or_a_token() -> None:
    for lengths in ([], [0, 0]):
        _, sums = segment_sums([Column("sum", torch.zeros(0))], torch.tensor([0, *lengths]).cumsum(0))
        assert sums.shape == (1, len(lengths)) and not sums.any()


@pytest.mark.parametrize(
    ("values", "absent", "highest", "lowest"),
    [
        ([0.5, 0.0, -2.0], [0, 1, 0], 0.5, -2.0),
        ([-0.5, 0.0, -2.0], [0, 1, 0], -0.5, -2.0),  # the 0 of what is absent is above all others
        ([0.5, 0.0, 2.0], [0, 1, 0], 2.0, 0.5),
        ([0.0, 0.0, -1.0], [0, 1, 0], 0.0, -1.0),
        ([0.0, 0.0], [1, 1], -math.inf, math.inf),
        ([math.nan, 0.0], [0, 1], math.nan, math.nan),
    ],
)
def test_largest(values: list[float], absent: list[int], highest: float, lowest: float) -> None:
    rows = torch.tensor(values), torch.tensor(absent).bool()
    assert float(host.largest(*rows)) == pytest.approx(highest, nan_ok=True)
    assert -float(host.largest(*rows, of_negated=True)) == pytest.approx(lowest, nan_ok=True)


def test_a_recorded_or_transformed_call_goes_the_way_of_a_device() -> None:
    values = torch.zeros(2)
    assert host.on_host(values)
    with OperationCounter():
        assert not host.on_host(values)
    batch = packed([-1.0, -2.0], [-1.5, -1.8], [1, 1]).replace(advantages=torch.tensor([1.0, -2.0]))

    def loss(log_probs: Tensor) -> Tensor:
        return mp.policy_loss(log_probs, batch, mp.MismatchConfig(use_tis=True)).loss

    leaf = torch.tensor([-1.4, -1.9])
    transformed = torch.func.grad(loss)(leaf)
    assert torch.equal(transformed, torch.autograd.grad(loss(leaf.requires_grad_()), leaf)[0])


def test_half_precision_is_widened_for_the_sums() -> None:
    values = torch.tensor([1.5, -2.25, 3.0])
    for dtype in (torch.float16, torch.bfloat16):
        _, sums = segment_sums([Column("sum", values.to(dtype), "squares")], torch.tensor([0, 2, 3]))
        assert sums.tolist() == [[-0.75, 3.0], [7.3125, 9.0]]


def test_true_is_its_own_square() -> None:
    _, sums = segment_sums([Column("sum", torch.tensor([True, False, True]), "squares")], torch.tensor([0, 2, 3]))
    assert sums.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("rest", [(), (2,)])
@pytest.mark.parametrize("lengths", [(), (0, 0), (3, 0, 2), (4, 4)])
@pytest.mark.parametrize("width", [None, 4, 6])
def test_rows_are_those_of_a_device(
    rest: tuple[int, ...], lengths: tuple[int, ...], width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    batch = mp.PackedSequences(loss_mask=mask, lengths=lengths, padded_width=width)
    values = torch.randn(sum(lengths), *rest)
    found = batch.to_padded(values, padding=-7.0)
    monkeypatch.setattr(host, "ENABLED", False)
    assert torch.equal(found, batch.to_padded(values, padding=-7.0))
    assert found.shape == (len(lengths), max(lengths, default=0) if width is None else width, *rest)
    for row, length, part in zip(found, lengths, batch.unpack(values), strict=True):
        assert torch.equal(row[:length], part) and bool((row[length:] == -7.0).all())
