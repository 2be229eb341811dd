"""On the draws of the differential test: padded batches, the CPU's own ways and a device's give the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core import segments
from mismatch_plugin.core.segments import Column, segment_sums
from tests.differential_draws import GARBAGE, draw_batch, draw_config, pack

pytestmark = pytest.mark.filterwarnings("ignore")

FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy")


def drawn(seed: int, number: int) -> Iterator[tuple[mp.MismatchConfig, mp.PackedSequences, Tensor, Random]]:
    rng = Random(seed)
    while number:
        if (config := draw_config(rng)) is not None:
            packed, log_probs, _ = pack(draw_batch(rng, config))
            number -= 1
            yield config, packed, log_probs.detach(), rng


def outcome(
    config: mp.MismatchConfig, packed: mp.PackedSequences, log_probs: Tensor, on_host: bool = True
) -> tuple[list[Tensor], Tensor, dict[str, float]]:
    """(weights, what is kept and gradient, [T] each, loss, metrics); none has a gradient of its own."""
    leaf = log_probs.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "HOST_WAYS", on_host)
        result = mp.policy_loss(leaf, packed, config)
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        metrics = result.statistics.metrics()
    values = [result.correction.weights, result.correction.keep, packed.flatten(gradient)]
    assert not any(value.requires_grad for value in values) and all(map(math.isfinite, metrics.values()))
    return values, result.loss.detach(), metrics


def close(found: object, expected: object, limit: float) -> None:
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit, equal_nan=True)


def test_packed_is_padded() -> None:
    """Whatever stands behind a sequence that is only masked, not cut off: its weights and gradient are 0."""
    for config, packed, log_probs, rng in drawn(70, 60):
        packed = packed.replace(unit_ids=None)
        rows = {name: value for name in FLOATS if (value := getattr(packed, name)) is not None}
        filled: dict[str, Any] = {n: packed.to_padded(row.detach(), rng.choice(GARBAGE)) for n, row in rows.items()}
        whole = {"positions": packed.positions, "weight_versions": packed.weight_versions}
        filled |= {name: packed.to_padded(value) for name, value in whole.items() if value is not None}
        if "old_log_probs" in filled:
            filled["old_log_probs"].requires_grad_()
        masks = packed.to_padded(packed.loss_mask)
        square = mp.PackedSequences.from_padded(loss_masks=masks, trainer_version=packed.trainer_version, **filled)
        values, loss, metrics = outcome(config, packed, log_probs)
        found = outcome(config, square, packed.to_padded(log_probs, math.nan))
        close(found[0], [packed.to_padded(value).flatten() for value in values], 1e-10)
        close(found[1], loss, 1e-10)
        assert found[2] == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_host_gives_what_a_device_gives(dtype: torch.dtype) -> None:
    """Of sound data, and of defects under each policy that goes on with them."""
    limit = 1e-6 if dtype == torch.float32 else 1e-10
    for config, packed, log_probs, _ in drawn(71, 60):
        rows = {name: value.to(dtype) for name in FLOATS if (value := getattr(packed, name)) is not None}
        batch = packed.replace(**rows), log_probs.to(dtype)
        (values, loss, metrics), device = outcome(config, *batch), outcome(config, *batch, on_host=False)
        close([*device[0], device[1]], [*values, loss], limit)
        assert device[2] == pytest.approx(metrics, rel=1e-6, abs=max(limit, 1e-9))


@pytest.mark.parametrize("together", [1, 7, 64, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_sums_of_columns(together: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences first, last and between; a mean far from 0, which float32 would lose."""
    lengths = [0, 3, 0, 0, 200, 7, 7, 1, 0, 64, 0]
    values = (torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)) + 1000).to(dtype)
    values = values if dtype != torch.bool else torch.arange(len(values)) % 3 == 0
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    columns = [Column("alone", values), Column("sum", values, "squares"), Column("twice", values.double(), "again")]
    rows = [row.double().tolist() for row in values.split(lengths)]
    plain, squares = [math.fsum(row) for row in rows], [math.fsum(x * x for x in row) for row in rows]
    for enabled in (True, False):  # a device sums all columns together, or as many as there is room for
        monkeypatch.setattr(segments, "HOST_WAYS", enabled)
        monkeypatch.setattr(segments, "_TOGETHER", together)
        names, sums = segment_sums(columns, offsets)
        assert names == ["alone", "sum", "squares", "twice", "again"]
        for found, expected in zip(sums.tolist(), [plain, plain, squares, plain, squares], strict=True):
            assert found == pytest.approx(expected, rel=1e-15 if enabled else 1e-14)
    for empty in ([], [0, 0]):
        _, sums = segment_sums([Column("sum", torch.zeros(0))], torch.tensor([0, *empty]).cumsum(0))
        assert sums.shape == (1, len(empty)) and not sums.any()
