"""What holds for any ragged batch, any mask, any ratio and any legal configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import mismatch_plugin as mp
from tests.ragged import FLOATS, GARBAGE, Batch, batches, configs, equal, run, tolerance

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

fixed = settings(
    derandomize=True,
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
)
"""The same examples everywhere, so that CI is stable."""


def padded(batch: Batch, extra: int, filling: float, **fields: Any) -> tuple[mp.PackedSequences, Tensor, list[int]]:
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
        **fields,
    )
    return packed, columns["current"].flatten().requires_grad_(), [len(row) for row in batch.masks]


def no_difference(first: dict[str, float], second: dict[str, float], limit: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value == pytest.approx(second[name], rel=limit, abs=limit), name


@fixed
@given(batches(), configs())
def test_packed_is_sequence_by_sequence(batch: Batch, config: mp.MismatchConfig) -> None:
    """Catches anything that leaks from one sequence to another, and offsets that are off by one."""
    whole = run(batch, config)
    factor = whole.result.statistics.batch_factor()
    parts = [run(batch.select([i]), config, factor) for i in range(len(batch))]
    equal(whole.weights, [part.weights[0] for part in parts], tolerance(batch))
    equal(whole.keep, [part.keep[0] for part in parts])
    loss_sum = sum((part.loss_sum for part in parts), torch.zeros((), dtype=whole.loss_sum.dtype))
    equal([whole.loss_sum], [loss_sum], 1e-4 if batch.dtype == torch.float32 else 1e-9)
    assert int(whole.result.denominator) == sum(int(part.result.denominator) for part in parts)


@fixed
@given(batches(), configs(), st.integers(0, 2), st.sampled_from(GARBAGE))
def test_packed_is_padded(batch: Batch, config: mp.MismatchConfig, extra: int, filling: float) -> None:
    whole = run(batch, config)
    packed, log_probs, lengths = padded(batch, extra, filling)
    result = mp.policy_loss(log_probs, packed, config)
    for found, expected in ((result.correction.weights, whole.weights), (result.correction.keep, whole.keep)):
        found_rows = packed.unpack(found)
        equal([row[:n] for row, n in zip(found_rows, lengths, strict=True)], expected, tolerance(batch))
        assert all(not row[n:].any() for row, n in zip(found_rows, lengths, strict=True))
    equal([result.loss.detach()], [whole.loss], tolerance(batch))
    no_difference(result.statistics.metrics(), whole.metrics, 1e-4 if batch.dtype == torch.float32 else 1e-9)


@fixed
@given(batches(), configs())
def test_weights_stay_within_their_bounds(batch: Batch, config: mp.MismatchConfig) -> None:
    """Before normalisation; and keep is a subset of the mask, rejection leaves weights alone, no gradient flows."""
    packed = batch.packed(old_log_probs=[row.requires_grad_() for row in batch.rows("train")])
    correction = mp.policy_loss(batch.log_probs(), packed, config, batch_factor=1.0).correction
    weights, keep, mask = correction.weights, correction.keep, packed.loss_mask
    assert not weights.requires_grad and not keep.requires_grad
    assert not weights[~mask].any() and not keep[~mask].any()
    assert bool(((keep == 0) | (keep == 1)).all())
    used = weights[mask]
    if not config.weighted or config.dry_run:
        assert bool((used == 1).all())
        return
    lower, upper = config.tis.lower * (1 - 1e-6), config.tis.upper * (1 + 1e-6)
    assert bool((used >= 0).all()) and bool((used <= upper).all())
    if config.tis.mode == "clip":
        assert bool((used >= lower).all())
    if config.tis.mode == "mask":
        assert bool(((used == 0) | (used >= lower)).all())
        assert not keep[mask][used == 0].any() or lower == 0  # weight 0 and keep 0 go together
    bare = config.model_copy(update={"rs": mp.Rejection()})
    equal([mp.policy_loss(batch.log_probs(), packed, bare, batch_factor=1.0).correction.weights], [weights])


@fixed
@given(batches(), configs())
def test_nothing_is_nan_or_infinite(batch: Batch, config: mp.MismatchConfig) -> None:
    outcome = run(batch, config)
    assert math.isfinite(outcome.loss) and math.isfinite(outcome.loss_sum)
    for tensors in (outcome.gradient, outcome.weights, outcome.keep):
        assert all(bool(row.isfinite().all()) for row in tensors)
    assert {name: value for name, value in outcome.metrics.items() if not math.isfinite(value)} == {}
    assert bool(outcome.metrics) == (config.metrics != "off")


@fixed
@given(batches(), configs())
def test_metrics_stay_in_their_range(batch: Batch, config: mp.MismatchConfig) -> None:
    """Shares are shares, nothing that is a mean of squares or absolute values is negative, extremes enclose means."""
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in run(batch, config).metrics.items()}
    for name, value in metrics.items():
        if "fraction" in name or name.endswith("eff_sample_size") or name.startswith("accepted_"):
            assert -1e-6 <= value <= 1 + 1e-6, (name, value)
        if name in ("k3_kl", "log_ppl_abs_diff", "training_ppl", "entropy") or name.endswith("_std"):
            assert value >= 0, (name, value)
    if not metrics:
        return
    for head in ("rollout_is_", "rollout_is_seq_"):
        low, mean, high = (metrics[f"{head}{which}"] for which in ("min", "mean", "max"))
        slack = 1e-5 * high
        assert low - slack - 1e-8 <= mean <= high + slack + 1e-8, head


@fixed
@given(batches(), configs(), st.sampled_from(GARBAGE))
def test_garbage_under_the_mask_changes_nothing_bitwise(batch: Batch, config: mp.MismatchConfig, bad: float) -> None:
    def spoil(rows: list[list[Any]], value: Any) -> list[list[Any]]:
        return [
            [item if kept else value for item, kept in zip(row, mask, strict=True)]
            for row, mask in zip(rows, batch.masks, strict=True)
        ]

    spoiled = Batch(
        masks=batch.masks,
        versions=spoil(batch.versions, 10**6),
        dtype=batch.dtype,
        **{name: spoil(getattr(batch, name), bad) for name in FLOATS},
    )
    clean, dirty = run(batch, config), run(spoiled, config)
    equal(clean.weights, dirty.weights)
    equal(clean.keep, dirty.keep)
    equal([clean.loss, *clean.gradient], [dirty.loss, *dirty.gradient])
    assert clean.metrics == dirty.metrics


@fixed
@given(batches(min_tokens=1), configs(metrics=("basic", "full")), st.sampled_from(["token", "sequence_mean"]))
def test_everything_rejected(batch: Batch, config: mp.MismatchConfig, aggregate: Any) -> None:
    """A zero loss with a graph behind it and a metric that says so; no exception, no NaN."""
    nothing = mp.Criterion(statistic="tv", aggregate=aggregate, lower_bound=2.0, upper_bound=3.0)
    config = config.model_copy(update={"rs": mp.Rejection(criteria=(nothing,)), "dry_run": False, "terms": mp.Terms()})
    outcome = run(batch, config)
    assert float(outcome.loss) == 0.0 and outcome.result.loss.grad_fn is not None
    assert not any(row.any() for row in outcome.gradient) and not any(row.any() for row in outcome.keep)
    assert outcome.metrics["rollout_corr/all_rejected"] == 1.0
    assert outcome.metrics["rollout_corr/accepted_token_fraction"] == 0.0
    assert int(outcome.result.denominator) == 0 or config.denominator == "original"


@fixed
@given(batches(), configs(metrics=("full",)))
def test_equal_engines_give_one_everywhere(batch: Batch, config: mp.MismatchConfig) -> None:
    config = config.model_copy(update={"rs": mp.Rejection(veto_threshold=0.5)})
    same = Batch(**{**batch.__dict__, "train": batch.rollout, "current": batch.rollout})
    outcome = run(same, config)
    masks = [torch.tensor(row, dtype=same.dtype) for row in batch.masks]
    equal(outcome.weights, masks)
    equal(outcome.keep, masks)
    ones = ("mean", "min", "max", "eff_sample_size", "seq_mean", "seq_min", "seq_max")
    for name in (*(f"rollout_is_{name}" for name in ones), "ppl_ratio"):
        assert outcome.metrics[f"rollout_corr/{name}"] == 1.0, name
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "rollout_is_std"):
        assert outcome.metrics[f"rollout_corr/{name}"] == 0.0, name


@fixed
@given(batches(dtype=torch.float64), configs(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_widened(batch: Batch, config: mp.MismatchConfig, half: torch.dtype) -> None:
    """Half-precision input gives bitwise what the same numbers give in float32."""
    narrow = {name: [torch.tensor(row).to(half) for row in getattr(batch, name)] for name in FLOATS}

    def answer(rows: dict[str, list[Tensor]]) -> tuple[mp.PolicyLoss, Tensor]:
        packed = batch.packed(
            rollout_log_probs=rows["rollout"],
            old_log_probs=rows["train"],
            ref_log_probs=rows["ref"],
            advantages=rows["advantages"],
            entropy=rows["entropy"],
        )
        leaf = torch.cat([*rows["current"], torch.zeros(0, dtype=(rows["current"] or [torch.zeros(0)])[0].dtype)])
        return mp.policy_loss(leaf.requires_grad_(), packed, config), leaf

    (low, leaf), (high, _) = answer(narrow), answer({name: [row.float() for row in narrow[name]] for name in FLOATS})
    assert low.correction.weights.dtype == low.loss.dtype == torch.float32
    for first, second in ((low.correction, high.correction), (low, high)):
        names = ("weights", "keep") if first is low.correction else ("loss", "loss_sum")
        equal([getattr(first, name) for name in names], [getattr(second, name) for name in names])
    low.loss.backward()
    assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype


@fixed
@given(st.floats(-1000, 1000), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_never_negative(log_ratio: float, dtype: torch.dtype) -> None:
    """Near 0 the naive e^l − 1 − l is negative by rounding."""
    top = torch.tensor(-0.5 - max(log_ratio, 0.0), dtype=dtype)
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[(top + log_ratio)[None]], rollout_log_probs=[top[None]], loss_masks=[[1]]
    )
    metrics = mp.correct(packed, mp.MismatchConfig()).statistics.metrics()
    assert metrics["rollout_corr/k3_kl"] >= 0.0
