"""Which setting to choose: the rules, as data. The tables of docs are made of them, and `recommend` goes by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mismatch_plugin.core.correction import training_side
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.table import Table

SMALL_KL = 1e-3
"""Below it no algorithm differs from another in the comparison of docs/compare.md (bf16 and int8 engines: 1e-4)."""
CLIPPED_KL = 3e-3
"""Below it, Gaussian noise puts fewer than 1.5 % of the ratios outside PPO's 1 ± 0.2."""
STRONG_KL = 0.1
SMALL_ESS = 0.3
TAIL = 1e-4
"""Share of tokens far away (see Figures.tail) from which on they are a population of their own."""
MOST_TAIL = 0.05
SHORT = 100
"""Trained tokens of the longest response."""


@dataclass(frozen=True)
class Figures:
    """What the rules look at.

    k3_kl: nats a token, the estimate of KL. ess: effective sample size of the tokens' ratios, a share.
    mean_length, max_length: trained tokens a response; inf where nobody knows.
    tail: share of tokens with a ratio outside [½, 2] and |l| above ten medians: Gaussian noise of one size has none.
    drifting: share of responses whose mean log-ratio, times √length, is six robust deviations from the median one; each
    token's limited to six medians of |l|, so that single tokens are no drift.
    stale: weight versions that the oldest tokens are behind.
    one_step: one optimizer step a rollout batch. expensive_pass: the user would save the second forward pass.
    """

    k3_kl: float
    ess: float
    mean_length: float
    max_length: float
    tail: float = 0.0
    drifting: float = 0.0
    stale: float = 0.0
    one_step: bool = False
    expensive_pass: bool = False

    @property
    def kl_length(self) -> float:
        """k3 times the longest response: half the variance of the log of its product of ratios."""
        return self.k3_kl * self.max_length


def figures_of(
    packed: PackedSequences, *, stale: float | None = None, one_step: bool = False, expensive_pass: bool = False
) -> Figures:
    """The figures of a batch with rollout log-probs and π_old (`old_log_probs`).

    stale: how many steps the oldest tokens are behind; None: newest minus oldest of `weight_versions`.
    Raises: ValueError where no token trains.
    """
    packed = packed.prepared()
    assert packed.rollout_log_probs is not None
    mask = packed.loss_mask & torch.isfinite(packed.rollout_log_probs)
    raw = training_side(packed) - packed.rollout_log_probs
    log_ratio = raw[mask].double().clamp(-SAFETY_BOUND, SAFETY_BOUND)
    if not len(log_ratio):
        raise ValueError("no token trains: nothing can be recommended.")
    ratio, size = log_ratio.exp(), log_ratio.abs()
    far = (size > math.log(2.0)) & (size > 10 * size.median())
    count = len(packed.lengths)
    lengths = torch.zeros(count, dtype=torch.float64).index_add_(0, packed.sequence_index[mask], torch.ones_like(ratio))
    limit = float(6 * size.median())
    sums = torch.zeros(count, dtype=torch.float64)
    sums.index_add_(0, packed.sequence_index[mask], log_ratio.clamp(-limit, limit))
    sums, lengths = sums[lengths > 0], lengths[lengths > 0]
    shift = (sums / lengths - (sums / lengths).median()) * lengths.sqrt()
    deviation = 1.4826 * shift.abs().median()
    versions = packed.weight_versions
    if stale is None:
        stale = 0.0 if versions is None else float(versions[mask].max() - versions[mask].min())
    return Figures(
        k3_kl=float(k3(log_ratio).mean()),
        ess=float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        mean_length=float(lengths.mean()),
        max_length=float(lengths.max()),
        tail=float(far.double().mean()),
        drifting=float((shift.abs() > 6 * deviation).double().mean()) if deviation > 0 else 0.0,
        stale=stale,
        one_step=one_step,
        expensive_pass=expensive_pass,
    )


def _always(_: Figures) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of "which setting to choose".

    run: the user's run, in words. also: what else must hold of the figures.
    kl: [from, to) of k3, nats a token. length: the longest response at most, trained tokens. kl_length: their product
    at most.
    preset: the settings. reason: why these. keeps: share of the tokens that they leave in the loss, at least.
    bounds: level of the bounds on the ratio that the data may give in place of the preset's, "" for none. data_bounds:
    they always do.
    """

    name: str
    run: str
    preset: str
    reason: str
    also: Callable[[Figures], bool] = _always
    kl: tuple[float, float] = (0.0, math.inf)
    length: float = math.inf
    kl_length: float = math.inf
    bounds: str = ""
    data_bounds: bool = False
    keeps: float = 0.9

    def holds(self, figures: Figures) -> bool:
        """Whether this is the row of such a run."""
        inside = self.kl[0] <= figures.k3_kl < self.kl[1] and figures.max_length <= self.length
        return inside and figures.kl_length <= self.kl_length and self.also(figures)

    def with_bounds(self, lower: float, upper: float) -> dict[str, Any]:
        """The changes that put bounds of the data in the place of the preset's."""
        if self.bounds == "geometric":
            return {"rs": {"criteria": [f"sequence_mean:ratio:{lower!r}:{upper!r}"]}}
        return {"tis": {"lower_bound": lower, "upper_bound": upper}}


RULES = (
    Rule(
        name="drifting",
        run="a few responses that drift as a whole",
        preset="geo_rs_token_tis",
        reason="a response that is off in all its tokens is dropped, by bounds from your own data; the others have "
        "token weights",
        also=lambda figures: 0.002 <= figures.drifting <= 0.05,
        kl=(0.0, STRONG_KL),
        bounds="geometric",
        data_bounds=True,
    ),
    Rule(
        name="experts",
        run="in sync, single tokens far away from all others (a mixture of experts whose router chooses otherwise)",
        preset="token_icepop",
        reason="single tokens are far off, for which a truncated weight would still be its bound: their weight is 0, "
        "all others keep theirs. Of a mixture of experts replay the routing if the host can",
        also=lambda figures: TAIL <= figures.tail <= MOST_TAIL and figures.stale < 1,
        kl=(0.0, STRONG_KL),
        bounds="token",
    ),
    Rule(
        name="strong",
        run=f"strong: KL from {STRONG_KL:g}, or ESS below {SMALL_ESS:g}",
        preset="token_is",
        reason="find the cause first: no weight repairs a wrong temperature, a filter or old weights, and inspect "
        "recommends nothing until then; where it is meant (--accept far_apart) token weights bound the gradient and "
        "reject nothing",
        also=lambda figures: figures.k3_kl >= STRONG_KL or figures.ess < SMALL_ESS,
        keeps=1.0,
    ),
    Rule(
        name="one step",
        run="one optimizer step a rollout batch, and the second forward pass is expensive",
        preset="pg_is",
        reason="the pass is saved and the weights are made anew at every step; there is no trust region, so not with "
        "several mini-batches",
        also=lambda figures: figures.one_step and figures.expensive_pass,
        kl=(SMALL_KL, STRONG_KL),
        kl_length=1.0,
        keeps=1.0,
    ),
    Rule(
        name="saved pass",
        run="the second forward pass is expensive, small mismatch, rollouts in sync",
        preset="ppo_is_bypass",
        reason="the pass is saved and the clip kept, which so small a mismatch hardly reaches; the first to break when "
        "it grows (int4 in the comparison)",
        also=lambda figures: figures.expensive_pass and not figures.stale,
        kl=(0.0, CLIPPED_KL),
        keeps=1.0,
    ),
    Rule(
        name="in sync",
        run="engines of one precision, small mismatch",
        preset="disabled",
        reason="no algorithm differs at such a mismatch: a weight adds variance for nothing. Keep the metrics",
        kl=(0.0, SMALL_KL),
        keeps=1.0,
    ),
    Rule(
        name="stale",
        run="rollouts some steps old, asynchronous",
        preset="token_is",
        reason="the clip stays anchored at π_old and the weight covers the lag; bypass would clip the lag itself",
        also=lambda figures: figures.stale >= 1,
        kl=(SMALL_KL, STRONG_KL),
        keeps=1.0,
    ),
    Rule(
        name="short",
        run="short responses, one reward each",
        preset="seq_is",
        reason="the weight of the whole response: unbiased up to its bound while π_θ is π_old, and so short a product "
        "of ratios keeps its variance small",
        kl=(SMALL_KL, STRONG_KL),
        length=SHORT,
        kl_length=1.0,
        keeps=1.0,
    ),
    Rule(
        name="long",
        run="all others: other precision or kernels, responses of any length",
        preset="token_is",
        reason="least variance of all weights, at any length; a product of ratios would spread with the length until "
        "one response has all the weight. Its bias (what came before a token is not reweighted) is small while the "
        "mismatch is",
        kl=(SMALL_KL, STRONG_KL),
        keeps=1.0,
    ),
)
"""The first that holds is taken."""


def rules_table(short: bool = False) -> Table:
    """Which setting to choose. short: without the reasons, for the README."""
    rows = [
        (rule.run, _kl(rule), _length(rule), f"`{rule.preset}`{', bounds from `inspect`' * rule.data_bounds}",
         "all" if rule.keeps == 1.0 else f"≥ {rule.keeps:.0%}", rule.reason)
        for rule in RULES
    ]  # fmt: skip
    headers = ("your run", "KL, nats a token", "longest response", "setting", "tokens kept", "why")
    notes = (
        "The first row that fits is taken, by k3 as the estimate of KL. mismatch-plugin inspect does it, predicts what "
        "the setting keeps of your own tokens, and takes bounds from them, or the next row, where that is below 90 %.",
        "For every row the tests make data in its range, and fail where less is kept or another is taken.",
    )
    table = Table("Which setting to choose", headers, tuple(rows), notes=notes)
    return Table(table.title, headers[:4], tuple(row[:4] for row in rows)) if short else table


def _kl(rule: Rule) -> str:
    low, high = rule.kl
    if low == 0.0:
        return "any" if high == math.inf else f"below {high:g}"
    return f"{low:g} to {high:g}"


def _length(rule: Rule) -> str:
    parts = [f"to {rule.length:g} tokens"] if rule.length < math.inf else []
    parts += [f"KL × length to {rule.kl_length:g}"] if rule.kl_length < math.inf else []
    return ", ".join(parts) or "any"
