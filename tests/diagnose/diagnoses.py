"""A diagnosis of each verdict, with the figures of real (synthetic) log-probs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

import mismatch_plugin as mp
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.diagnose.findings import FaultName, Finding, Mismatch, Place, Undecided
from mismatch_plugin.diagnose.levels import histograms
from mismatch_plugin.diagnose.predict import predict_one
from mismatch_plugin.diagnose.result import (
    Comparable,
    Diagnosis,
    Gate,
    Group,
    Prediction,
    Recommendation,
    Size,
    Verdict,
)

SCALE: dict[Verdict, float] = {"fault": 0.9, "large": 0.25, "normal": 0.012, "undecided": 0.02}
SEQUENCES: dict[Verdict, int] = {"fault": 60, "large": 200, "normal": 200, "undecided": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "algorithm 2, token, truncate 2": {"use_tis": True},
    "algorithm 0, no weights": {},
    "algorithm 1, bypass": {"use_rollout_log_probs": True},
    "algorithm 3, sequence, truncate 5": {
        "use_tis": True, "use_rollout_log_probs": True, "tis": {"level": "sequence", "upper_bound": 5.0}},
    "algorithm 2, token, mask 0.5 to 2": {"use_tis": True, "tis": {"mode": "mask", "lower_bound": 0.5}},
    "algorithm 2, sequence, clip 0.8 to 1.25": {
        "use_tis": True, "tis": {"level": "sequence", "mode": "clip", "lower_bound": 0.8, "upper_bound": 1.25}},
    "algorithm 2, geometric, mask 0.99 to 1.01": {
        "use_tis": True, "tis": {"level": "geometric", "mode": "mask", "lower_bound": 0.99, "upper_bound": 1.01}},
    "geo_rs": {"rs": {"criteria": [{"aggregate": "sequence_mean", "lower_bound": 0.98, "upper_bound": 1.02}]}},
    "token:k3:0.1": {"rs": {"criteria": [{"aggregate": "token", "statistic": "k3", "upper_bound": 0.1}]}},
}  # fmt: skip
FLAGS = {
    "slime": "--use-tis --tis-mode truncate --tis-level token --tis-upper-bound 2",
    "miles": "--use-tis --tis-mode truncate --tis-level token --tis-upper-bound 2",
    "megatron-lm": "--use-tis --tis-mode truncate --tis-level token --tis-upper-bound 2 --mismatch-metrics full",
    "verl": "+algorithm.mismatch.use_tis=true +algorithm.mismatch.tis.upper_bound=2.0",
    "nemo-rl": "mismatch:\n  use_tis: true\n  tis:\n    upper_bound: 2.0",
    "python": "config = mp.MismatchConfig(use_tis=True)",
}


def cause(fault: FaultName, **told: Any) -> Finding:
    """One finding of ten samples."""
    return Finding(**{"fault": fault, "samples": 1, "of_samples": 10, "tokens": 5, "of_tokens": 50, **told})


def data(verdict: Verdict) -> dict[str, Any]:
    """Flat arrays: rollout, train, sequence, advantage, lengths."""
    generator = np.random.default_rng(7)
    lengths = generator.integers(20, 400, SEQUENCES[verdict])
    tokens = int(lengths.sum())
    rollout = -generator.exponential(0.6, tokens) - 1e-3
    gap = SCALE[verdict] * generator.standard_t(4, tokens) * np.minimum(1.0, -rollout)
    train = np.minimum(rollout + gap, -1e-6)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    return {
        "rollout": rollout,
        "train": train,
        "sequence": sequence,
        "lengths": lengths,
        "advantage": generator.choice([-1.0, 0.0, 1.5], len(lengths))[sequence],
    }


def packed(of: dict[str, Any]) -> mp.PackedSequences:
    """The same for the core."""
    cut = np.cumsum(of["lengths"])[:-1]
    columns = {name: [torch.tensor(part) for part in np.split(of[name], cut)] for name in ("rollout", "train")}
    return mp.PackedSequences.from_lists(
        rollout_log_probs=columns["rollout"],
        train_log_probs=columns["train"],
        advantages=[torch.tensor(part) for part in np.split(of["advantage"], cut)],
        loss_masks=[torch.ones(n) for n in of["lengths"].tolist()],
    )


def prediction(name: str, settings: dict[str, Any], batch: mp.PackedSequences) -> Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return predict_one(batch, MismatchConfig.build(settings), name).model_copy(update={"settings": settings})


def breakdown(of: dict[str, Any], bucket: np.ndarray, names: list[str]) -> tuple[Group, ...]:
    gap = of["train"] - of["rollout"]
    groups = []
    for i, name in enumerate(names):
        d = gap[bucket == i]
        if len(d):
            r = np.exp(d)
            figures = {"abs_mean": np.abs(d).mean(), "kl": -d.mean(), "k3_kl": (r - 1 - d).mean()}
            ess = r.sum() ** 2 / (len(d) * (r * r).sum())
            groups.append(Group(name=name, tokens=len(d), ess=ess, **figures))
    return tuple(groups)


def diagnosis(verdict: Verdict, **changes: Any) -> Diagnosis:
    """One of each verdict, as the command makes it."""
    of = data(verdict)
    gap = of["train"] - of["rollout"]
    ratio = np.exp(gap)
    mean, k3, tokens = float(np.abs(gap).mean()), float((ratio - 1 - gap).mean()), len(gap)
    position = np.concatenate([np.arange(n) for n in of["lengths"]])
    probability = np.exp(of["rollout"])
    size = Size(
        quantiles={f"p{q:g}": float(np.quantile(gap, q / 100)) for q in (0.1, 1, 5, 50, 95, 99, 99.9)},
        breakdowns={
            "position": breakdown(of, np.digitize(position, [16, 64, 256]), ["0–15", "16–63", "64–255", "from 256"]),
            "probability": breakdown(
                of, np.digitize(probability, [0.1, 0.5, 0.9]), ["below 0.1", "0.1–0.5", "0.5–0.9", "from 0.9"]
            ),
            "server": breakdown(of, of["sequence"] % 2, ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]),
        },
    )
    level = Mismatch(tokens=tokens, samples=len(of["lengths"]), kl=float(-gap.mean()), k3_kl=k3, abs_mean=mean,
                     abs_p50=float(np.median(np.abs(gap))), abs_p90=float(np.quantile(np.abs(gap), 0.9)),
                     abs_p99=float(np.quantile(np.abs(gap), 0.99)), abs_max=float(np.abs(gap).max()), correlation=0.99,
                     effective_sample_size=float(ratio.sum() ** 2 / (tokens * (ratio * ratio).sum())))  # fmt: skip
    batch = packed(of)
    metrics = mp.correct(batch, mp.preset("token_is")).statistics.metrics()
    causes = {
        "fault": (
            cause("weights_not_updated", confidence="certain",
                  evidence="all 12 000 tokens fit the weights of the start better than the current ones: mean "
                           "|Δ log p| 0.004 against 0.61 nats per token, in every sample",
                  first=Place(sample=0, sample_id="prompt-17/3", position=0, rollout=-1.204, training=-3.417),
                  fix="send the weights after every optimizer step: call update_weights_from_distributed on every "
                      "server, and check its reply"),
            cause("moe_routing", confidence="possible", evidence="0.2 % of tokens carry 40 % of the gap",
                  first=None, fix="replay the routing"),
        ),
        "large": (
            cause("quantised", confidence="likely", evidence="the gap is that of fp8 weights on one side",
                  first=Place(sample=3, position=11, rollout=-0.2, training=-0.9),
                  fix="export the weights that the engine quantises the same way"),
        ),
    }  # fmt: skip
    normal = (
        Comparable(pair="dense bf16", what="a 4B model", figure="mean |Δ log p|", low=0.005, high=0.02, value=mean,
                   where="inside" if mean <= 0.02 else "above", source="facts of 2026, a dashboard of engine pairs"),
        Comparable(pair="MoE bf16", what="30B-A3B", figure="mean |Δ log p|", low=0.14, high=0.34, value=mean,
                   where="below" if mean < 0.14 else "inside" if mean < 0.34 else "above", source="the same"),
        Comparable(pair="fp8, both sides alike", what="35B-A3B", figure="k3", low=3.7e-4, high=8.7e-3, value=k3,
                   where="below" if k3 < 3.7e-4 else "inside" if k3 < 8.7e-3 else "above", source="xtuner #2044"),
    )  # fmt: skip
    headlines = {
        "fault": f"Fault found: the rollout weights were never updated (k3 {k3:.2g} nats per token).",
        "large": f"Above normal: k3 {k3:.2g} nats per token, and nothing is broken.",
        "normal": f"Normal: k3 {k3:.2g} nats per token, as of two engines in bf16.",
        "undecided": f"Not decided: {tokens} tokens are too few (1000 are needed).",
    }
    settings = list(SETTINGS.items())
    advice = Recommendation(
        setting=settings[0][0], preset=None, settings=settings[0][1], flags=FLAGS,
        reasons=("Token weights keep every token; products over 400 tokens would lose half of the effective sample.",
                 "The second pass is paid for by the smaller bias."),
        watch=("rollout_corr/k3_kl stays below 0.01", "rollout_corr/rollout_is_weight_after_mean stays within 0.95 to "
               "1.05", "grad_norm does not grow for ten steps"),
    )  # fmt: skip
    full = verdict in ("large", "normal")
    fields: dict[str, Any] = {
        "verdict": verdict,
        "headline": headlines[verdict],
        "next_step": "Inspect a larger dump." if verdict == "undecided" else "",
        "source": f"runs/debug/rollout_{verdict}.pt",
        "format": "slime",
        "samples": len(of["lengths"]),
        "tokens": tokens,
        "findings": causes.get(verdict, ()),
        "undecided": (Undecided(faults=("stale_server",), reason="not enough tokens to tell: 2 samples"),)
        if verdict == "undecided"
        else (),
        "mismatch": level,
        "metrics": metrics,
        "size": size,
        "normal": normal,
        "normality": f"normal, as published for dense bf16: mean |Δ log p| {mean:.2g} (published 0.005 to 0.02)."
        if mean < 0.02
        else f"not normal for dense bf16, {mean / 0.02:.2g} times the largest published: mean |Δ log p| {mean:.2g}.",
        "predictions": tuple(
            prediction(n, s, batch).model_copy(update={"own": i == 1}) for i, (n, s) in enumerate(settings)
        )
        if full
        else (),
        "bounds": {"token": {"99%": (0.9, 1.1), "99.9%": (0.7, 1.4)}, "sequence": {"99%": (0.5, 2.1)}} if full else {},
        "recommendation": advice if full else None,
        "gate": Gate(value=k3, bar=0.01, passed=k3 < 0.01, source="published bf16 gaps"),
        "histograms": histograms(batch, (0.5, 2, 0.8, 1.25, 0.98, 1.02, 0.99, 1.01, 5)),
        "notes": ("log-probs of the records are of the raw distribution (temperature 1).",),
    }
    return Diagnosis(**(fields | changes))
