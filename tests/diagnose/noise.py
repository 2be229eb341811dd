"""Batches with a known mismatch, E ρ = 1, and what the package's own correction does to them."""

from __future__ import annotations

import torch

import mismatch_plugin as mp
from mismatch_plugin.diagnose.predict import predict_one
from mismatch_plugin.diagnose.result import Prediction


def noise(
    kl: float,
    length: int,
    *,
    tail: float = 0.0,
    drift: float = 0.0,
    stale: bool = False,
    tokens: int = 60_000,
    responses: int = 30,
    equal: bool = False,
    turns: int = 1,
    credit: bool = False,
    old: float = 0.0,
    seed: int = 0,
) -> mp.PackedSequences:
    """l ~ N(−KL, 2 KL) a token, in responses of length/2 to `length` tokens (equal: of `length`).

    tail: share of tokens with l ~ N(−4.5, 9) instead, as a router that chooses otherwise. drift: share of responses
    whose KL is 0.1 (or ten times `kl`), as of other weights. stale: the first half is two versions behind. turns: of
    each response. credit: an advantage of its own for each token. old: share of tokens seven versions behind the others
    (which are one behind the trainer), with the spread of 20 `kl`.
    """
    maker = torch.Generator().manual_seed(seed)
    count = max(responses, tokens // length)
    low = length if equal else max(1, length // 2)
    lengths = torch.randint(low, length + 1, (count,), generator=maker)
    lengths[0] = length
    total = int(lengths.sum())
    kls = torch.full((count,), kl, dtype=torch.float64)
    kls[: round(drift * count)] = max(0.1, 10 * kl)
    per_token = kls.repeat_interleave(lengths)
    spread = torch.randn(total, dtype=torch.float64, generator=maker)
    log_ratio = -per_token + (2 * per_token).sqrt() * spread
    far = torch.rand(total, generator=maker) < tail
    log_ratio = torch.where(far, -4.5 + 3 * spread, log_ratio)
    ancient = torch.rand(total, generator=maker) < old
    log_ratio = torch.where(ancient, -20 * kl + (40 * kl) ** 0.5 * spread, log_ratio)
    rollout = torch.full((total,), -16.0, dtype=torch.float64)
    behind = torch.where(ancient, 2, 9) if old else torch.where(torch.arange(total) < total // 2, 0, 2)
    return mp.PackedSequences(
        loss_mask=torch.ones(total, dtype=torch.bool),
        lengths=tuple(lengths.tolist()),
        rollout_log_probs=rollout,
        old_log_probs=rollout + log_ratio,
        weight_versions=behind if stale or old else None,
        trainer_version=10 if old else None,
        unit_ids=torch.cat([torch.arange(n) * turns // n for n in lengths.tolist()]) if turns > 1 else None,
        advantages=torch.randn(total, dtype=torch.float64, generator=maker) if credit else None,
    )


def measured(packed: mp.PackedSequences, config: mp.MismatchConfig) -> Prediction:
    """What `correct` does with the batch."""
    return predict_one(packed, config, "measured")


def bounds_of(packed: mp.PackedSequences) -> dict[str, dict[str, tuple[float, float]]]:
    """Bounds that keep 99 % of the tokens, at token and geometric level."""
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    log_ratio = packed.old_log_probs - packed.rollout_log_probs
    means = torch.stack([part.mean() for part in packed.unpack(log_ratio)])
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for level, values in {"token": log_ratio[:1_000_000], "geometric": means}.items():
        low, high = (float(values.quantile(share).exp()) for share in (0.005, 0.995))
        found[level] = {"99%": (low, high)}
    return found
