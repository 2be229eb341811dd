"""What holds for any ragged batch and legal configuration; the CPU's own ways give what a device's give."""

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
from mismatch_plugin.core import host, segments
from mismatch_plugin.core.segments import Column, segment_sums
from tests.ragged import FLOATS, GARBAGE, Batch, Outcome, batches, configs, equal, run, tolerance

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

fixed = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
)
"""The same examples everywhere, so that CI is stable."""


def same(first: Outcome, second: Outcome, limit: float) -> None:
    """Weights, what is kept, loss, gradient and metrics."""
    equal(first.weights, second.weights, limit)
    equal(first.keep, second.keep)
    equal([first.loss, *first.gradient], [second.loss, *second.gradient], limit)
    assert first.metrics.keys() == second.metrics.keys()
    for name, value in first.metrics.items():
        assert value == pytest.approx(second.metrics[name], rel=max(limit, 1e-6), abs=max(limit, 1e-9)), name


# Any batch ------------------------------------------------------------------------------------------------------------


def padded(batch: Batch, extra: int, filling: float) -> tuple[mp.PackedSequences, Tensor]:
    """The batch as [B, S] tensors with `filling` behind each sequence: not cut off, only masked."""
    width = max((len(row) for row in batch.masks), default=0) + extra

    def rectangle(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        square = [[*row, *[fill] * (width - len(row))] for row in rows]
        return torch.tensor(square, dtype=dtype).reshape(len(rows), width)

    columns = {name: rectangle(getattr(batch, name), filling, batch.dtype) for name in FLOATS}
    packed = mp.PackedSequences.from_padded(
        rollout_log_probs=columns["rollout"],
        loss_masks=rectangle(batch.masks, 0, torch.int64),
        old_log_probs=columns["train"],
        ref_log_probs=columns["ref"],
        advantages=columns["advantages"],
        entropy=columns["entropy"],
        weight_versions=rectangle(batch.versions, 0, torch.int64),
    )
    return packed, columns["current"].requires_grad_()


@fixed
@given(batches(), configs(), st.integers(0, 2), st.sampled_from(GARBAGE))
def test_packed_is_padded(batch: Batch, config: mp.MismatchConfig, extra: int, filling: float) -> None:
    whole = run(batch, config)
    packed, log_probs = padded(batch, extra, filling)
    result = mp.policy_loss(log_probs, packed, config)
    for found, expected in ((result.correction.weights, whole.weights), (result.correction.keep, whole.keep)):
        for row, part in zip(packed.unpack(found), expected, strict=True):
            equal([row[: len(part)]], [part], tolerance(batch))
            assert not row[len(part) :].any()
    equal([result.loss.detach()], [whole.loss], tolerance(batch))
    (square,) = torch.autograd.grad(result.loss, log_probs)
    for row, part in zip(square, whole.gradient, strict=True):
        equal([row[: len(part)]], [part], tolerance(batch))
        assert not row[len(part) :].any(), "padding, whatever it holds, gets no gradient"
    limit, metrics = 1e-4 if batch.dtype == torch.float32 else 1e-9, result.statistics.metrics()
    assert metrics == pytest.approx(whole.metrics, rel=limit, abs=limit)


@fixed
@given(batches(), configs())
def test_weights_stay_within_their_bounds_and_nothing_is_infinite(batch: Batch, config: mp.MismatchConfig) -> None:
    """Before normalisation; and keep is a subset of the mask, rejection leaves weights alone, no gradient flows."""
    packed = batch.packed(old_log_probs=[row.requires_grad_() for row in batch.rows("train")])
    correction = mp.policy_loss(batch.log_probs(), packed, config, batch_factor=1.0).correction
    weights, keep, mask = correction.weights, correction.keep, packed.loss_mask
    assert not weights.requires_grad and not keep.requires_grad
    assert not weights[~mask].any() and bool(((keep == 0) | (keep == 1) & mask).all())
    used = weights[mask]
    if config.weighted and not config.dry_run:
        lower = config.tis.lower if config.tis.mode == "clip" else 0.0
        low, high = (torch.tensor(bound).to(used) for bound in (lower, min(config.tis.upper, math.exp(20))))
        assert bool(((used >= low * (1 - 1e-6)) & (used <= high * (1 + 1e-6))).all())
    outcome = run(batch, config)
    for tensors in (outcome.gradient, outcome.weights, [outcome.loss, outcome.loss_sum]):
        assert all(bool(row.isfinite().all()) for row in tensors)
    assert {name: value for name, value in outcome.metrics.items() if not math.isfinite(value)} == {}
    assert bool(outcome.metrics) == (config.metrics != "off")


@fixed
@given(batches(), configs(), st.sampled_from(GARBAGE))
def test_garbage_under_the_mask_changes_nothing_bitwise(batch: Batch, config: mp.MismatchConfig, bad: float) -> None:
    def spoil(rows: list[list[Any]], value: Any) -> list[list[Any]]:
        pairs = [list(zip(*both, strict=True)) for both in zip(rows, batch.masks, strict=True)]
        return [[item if kept else value for item, kept in pair] for pair in pairs]

    columns: dict[str, Any] = {name: spoil(getattr(batch, name), bad) for name in FLOATS}
    clean, dirty = run(batch, config), run(replace(batch, versions=spoil(batch.versions, 10**6), **columns), config)
    same(clean, dirty, 0.0)
    assert clean.metrics == dirty.metrics


# The CPU's own ways ---------------------------------------------------------------------------------------------------

ROLLOUT_DEFECTS = (math.nan, -math.inf, -9999.0, 0.0, 0.2, math.inf)
TRAIN_DEFECTS = (math.nan, -math.inf, 0.2, math.inf)


@fixed
@given(batches(min_tokens=1), configs(), st.sampled_from(ROLLOUT_DEFECTS), st.sampled_from(TRAIN_DEFECTS), st.data())
def test_the_host_gives_what_a_device_gives(
    batch: Batch, config: mp.MismatchConfig, rollout: float, train: float, data: st.DataObject
) -> None:
    """Of sound data, and of defects anywhere, padding included, under each policy that goes on with them."""
    changed = {name: [list(row) for row in getattr(batch, name)] for name in ("rollout", "train")}
    for name, bad in (("rollout", rollout), ("train", train)):
        row = data.draw(st.sampled_from([row for row in changed[name] if row]))
        if data.draw(st.booleans()):
            row[data.draw(st.integers(0, len(row) - 1))] = bad
    policy = data.draw(st.sampled_from(["neutral", "drop-token", "drop-sequence"]))
    spoilt = config.model_copy(update={"rollout_log_prob_policy": policy})
    for each, chosen in ((batch, config), (replace(batch, **changed), spoilt)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "ENABLED", False)
            device = run(each, chosen)
        same(run(each, chosen), device, 1e-6 if batch.dtype == torch.float32 else tolerance(batch))


@pytest.mark.parametrize("tile", [1, 7, 64, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_sums_over_any_tiles(tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences first, last and between; some longer than a tile; a mean far from 0, which float32 would lose."""
    monkeypatch.setattr(host, "_TILE", tile)
    lengths = [0, 3, 0, 0, 200, 7, 7, 1, 0, 64, 0]
    values = (torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)) + 1000).to(dtype)
    values = values if dtype != torch.bool else torch.arange(len(values)) % 3 == 0
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    columns = [Column("alone", values), Column("sum", values, "squares"), Column("twice", values.double(), "again")]
    rows = [row.double().tolist() for row in values.split(lengths)]
    plain, squares = [math.fsum(row) for row in rows], [math.fsum(x * x for x in row) for row in rows]
    for enabled in (True, False):  # a device sums all columns together, or as many as there is room for
        monkeypatch.setattr(host, "ENABLED", enabled)
        monkeypatch.setattr(segments, "_TOGETHER", tile)
        names, sums = segment_sums(columns, offsets)
        assert names == ["alone", "sum", "squares", "twice", "again"]
        for found, expected in zip(sums.tolist(), [plain, plain, squares, plain, squares], strict=True):
            assert found == pytest.approx(expected, rel=1e-15 if enabled else 1e-14)
    for empty in ([], [0, 0]):
        _, sums = segment_sums([Column("sum", torch.zeros(0))], torch.tensor([0, *empty]).cumsum(0))
        assert sums.shape == (1, len(empty)) and not sums.any()
