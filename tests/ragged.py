"""Hypothesis strategies for ragged batches and legal configurations, and helpers that run them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config.criteria import Aggregate, Statistic

LEVELS = ("token", "turn", "sequence", "geometric", "prefix")
MODES = ("truncate", "clip", "mask")
GARBAGE = (math.nan, math.inf, -math.inf, -9999.0, 1e30, 0.0)
FLOATS = ("train", "rollout", "ref", "current", "advantages", "entropy")


@dataclass(frozen=True)
class Batch:
    """Rows of numbers, one a sequence, in the words of the package; `train` serves as π_old."""

    masks: list[list[int]]
    train: list[list[float]]
    rollout: list[list[float]]
    current: list[list[float]]
    ref: list[list[float]]
    advantages: list[list[float]]
    entropy: list[list[float]]
    versions: list[list[int]]
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.masks)

    def rows(self, name: str) -> list[Tensor]:
        return [torch.tensor(row, dtype=self.dtype) for row in getattr(self, name)]

    def select(self, order: list[int]) -> Batch:
        names = (*FLOATS, "masks", "versions")
        return replace(self, **{name: [getattr(self, name)[i] for i in order] for name in names})

    def packed(self, **fields: Any) -> mp.PackedSequences:
        given: dict[str, Any] = {
            "rollout_log_probs": self.rows("rollout"),
            "old_log_probs": self.rows("train"),
            "ref_log_probs": self.rows("ref"),
            "advantages": self.rows("advantages"),
            "entropy": self.rows("entropy"),
            "weight_versions": self.versions,
            "loss_masks": self.masks,
        }
        return mp.PackedSequences.from_lists(**(given | fields))

    def log_probs(self) -> Tensor:
        return torch.cat([*self.rows("current"), torch.zeros(0, dtype=self.dtype)]).requires_grad_()


@dataclass(frozen=True)
class Outcome:
    """What a batch gives under a configuration."""

    weights: list[Tensor]
    keep: list[Tensor]
    loss: Tensor
    loss_sum: Tensor
    gradient: list[Tensor]
    result: mp.PolicyLoss
    metrics: dict[str, float]


def run(batch: Batch, config: mp.MismatchConfig, batch_factor: Tensor | None = None, **fields: Any) -> Outcome:
    packed, log_probs = batch.packed(**fields), batch.log_probs()
    result = mp.policy_loss(log_probs, packed, config, batch_factor=batch_factor)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    correction = result.correction
    return Outcome(
        packed.unpack(correction.weights),
        packed.unpack(correction.keep),
        result.loss.detach(),
        result.loss_sum.detach(),
        packed.unpack(gradient),
        result,
        result.statistics.metrics(),
    )


log_ratios = st.one_of(
    st.floats(-3, 3),
    st.floats(-1e-3, 1e-3),
    st.sampled_from([0.0, 1000.0, -1000.0, 20.0, -20.0, 25.0, -25.0]),
)


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype | None = None, min_tokens: int = 0) -> Batch:
    """Any ragged batch: zero-length sequences, all-zero masks, no sequence at all, ratios to e^±1000."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1 if min_tokens else 0, max_size=5))
    if min_tokens and not any(lengths):
        lengths[0] = min_tokens
    dtype = dtype or draw(st.sampled_from([torch.float32, torch.float64]))
    columns: dict[str, list[list[Any]]] = {name: [] for name in (*FLOATS, "masks", "versions")}
    for length in lengths:
        row: dict[str, list[Any]] = {name: [] for name in columns}
        for _ in range(length):
            log_ratio, step = draw(log_ratios), draw(log_ratios)
            top = draw(st.floats(-4, -0.01))  # no log-prob is above 0, and 0.0 itself may be a fill
            rollout = top + min(0.0, -log_ratio)
            row["rollout"].append(rollout)
            row["train"].append(top + min(0.0, log_ratio))
            row["current"].append(top + min(0.0, step))
            row["ref"].append(draw(st.floats(-6, -0.01)))
            row["advantages"].append(draw(st.floats(-3, 3)))
            row["entropy"].append(draw(st.floats(0, 5)))
            row["masks"].append(draw(st.integers(0, 1)))
            row["versions"].append(draw(st.integers(90, 100)))
        for name, values in row.items():
            columns[name].append(values)
    if min_tokens and not any(map(any, columns["masks"])):
        next(row for row in columns["masks"] if row)[0] = 1
    return Batch(dtype=dtype, **columns)


criteria = st.builds(
    lambda aggregate, statistic, upper: {"aggregate": aggregate, "statistic": statistic, "upper_bound": upper},
    st.sampled_from(get_args(Aggregate)),
    st.sampled_from(get_args(Statistic)),
    st.sampled_from([1.0, 1.01, 1.5, 10.0, math.inf]),
)


def unique(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(row["aggregate"], row["statistic"].replace("k1", "ratio")): row for row in rows}.values())


@st.composite
def configs(draw: st.DrawFn, metrics: tuple[str, ...] = ("off", "basic", "full"), **fixed: Any) -> mp.MismatchConfig:
    """Any legal configuration: algorithm, mode, level, bounds, criteria, veto, normalisation, denominators, terms."""
    bypass, weighted = draw(st.booleans()), draw(st.booleans())
    values: dict[str, Any] = {
        "use_rollout_log_probs": bypass,
        "use_tis": weighted,
        "denominator": draw(st.sampled_from(["auto", "accepted", "original"])),
        "aggregation": draw(st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])),
        "metrics": draw(st.sampled_from(metrics)),
        "rs": {
            "criteria": unique(draw(st.lists(criteria, max_size=3))),
            "veto_threshold": draw(st.sampled_from([None, None, 1e-4, 0.3])),
        },
    }
    if weighted:
        mode = draw(st.sampled_from(MODES))
        tis: dict[str, Any] = {"mode": mode, "level": draw(st.sampled_from(LEVELS))}
        tis["upper_bound"] = draw(st.sampled_from([1.0, 1.01, 2.0, 10.0, math.inf]))
        if mode != "truncate":
            tis["lower_bound"] = draw(st.sampled_from([None, 0.0, 0.9]))
        tis["batch_normalize"] = draw(st.booleans())
        values["tis"] = tis
    if values["aggregation"] == "seq-mean-token-sum":
        values["length_norm"] = draw(st.sampled_from([None, 7.0]))
    if not (bypass and weighted):
        values["objective"] = draw(st.sampled_from(["ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce"]))
        dual = {"dual_clip": draw(st.sampled_from([None, 3.0]))} if values["objective"] in ("ppo", "gspo") else {}
        values["ppo"] = {} if values["objective"] in ("sapo", "reinforce") else {"eps_clip_high": 0.3, **dual}
    terms: dict[str, Any] = {"entropy_coef": draw(st.sampled_from([0.0, 0.01]))}
    if draw(st.booleans()):
        terms |= {"kl_coef": 0.1, "kl_type": draw(st.sampled_from(["k1", "k2", "k3", "low_var_kl"]))}
        if weighted:
            terms["kl_importance_weighted"] = draw(st.booleans())
    if draw(st.booleans()):
        terms |= {"rollout_kl_coef": 0.2, "rollout_kl_type": draw(st.sampled_from(["k2", "k3"]))}
    values["terms"] = terms
    if weighted or values["rs"]["criteria"] or values["rs"]["veto_threshold"]:
        values["dry_run"] = draw(st.sampled_from([False, False, False, True]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return mp.MismatchConfig.model_validate(values | fixed)


def tolerance(batch: Batch) -> float:
    return 1e-10 if batch.dtype == torch.float64 else 2e-5


def equal(first: list[Tensor], second: list[Tensor], limit: float = 0.0) -> None:
    """Tensor by tensor; bitwise without a limit."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)
