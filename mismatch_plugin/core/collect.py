"""What a batch adds to the step's statistics: token columns summed per sequence, then rows summed over sequences.

A row holds one number a sequence: mostly the mean of a token quantity over its response tokens. One matrix product
sums every row under both measures, `tokens` and `sequences`; so the number of kernels does not grow with N.
Ratios are carried as ρ − 1 (`expm1`), which is 0 at padding and keeps its digits when the two engines nearly agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from mismatch_plugin.core.diagnostics import full_diagnostics
from mismatch_plugin.core.levels import SAFETY_BOUND, bounded_exp
from mismatch_plugin.core.stage import Stage, any_of
from mismatch_plugin.core.statistics import Statistics
from mismatch_plugin.core.validity import KINDS, count_kinds

_RATIO_ROWS = ("ratio", "clamped", "clamped_squared", "high", "low")


def token_columns(stage: Stage, masked_T: Tensor | None, rejected_T: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """(name, [T]) columns to be summed per sequence, 0 at padding; one at a time, so that few live at once."""
    config, tokens = stage.config, stage.tokens
    log_ratio = tokens.log_ratio
    if stage.measured:
        yield "train", tokens.train  # the sum of log π_rollout is that of train − log_ratio
    yield "log_ratio", log_ratio
    yield "tokens", tokens.mask
    if rejected_T is not None:
        yield "rejected", rejected_T
    if stage.weights_T is not None:
        if config.tis.batch_normalize:
            yield "weight_unit", stage.weights_T
            if stage.outside_mode_T is not None:
                yield "outside_mode", stage.outside_mode_T
        if config.metrics != "off":
            weight = stage.weights_T if rejected_T is None else stage.weights_T.masked_fill(rejected_T, 0.0)
            yield "weight", weight
            yield "weight_squared", stage.wide_T.copy_(weight).square_()
            del weight
    if config.metrics == "off":
        return
    if masked_T is not None and masked_T is not rejected_T:
        yield "masked", masked_T
    for name, outside in stage.outside_criteria_T.items():
        if outside is not masked_T:
            yield f"out_{name}", outside
    if not stage.measured:
        return
    bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = bounded.expm1()
    yield "k3", torch.sub(ratio, bounded, out=stage.wide_T)
    plus = torch.add(ratio, 2.0, out=bounded)
    yield "chi2", torch.mul(ratio, plus, out=stage.wide_T)  # ρ² − 1 = (ρ − 1)(ρ + 1)
    del bounded, plus
    if stage.level == "token":
        yield from _ratio_rows(stage, log_ratio, ratio, tokens.padding)


def collect_statistics(stage: Stage, counts_sequences: bool) -> Statistics:
    """The batch's sums and maxima. One matrix product and one maximum over [K, N]; no host sync.

    counts_sequences: False on the ranks of a context-parallel group that leave the counting to another one.
    """
    has = stage.tokens_N > 0
    rows = _rows(stage, has)
    totals = torch.stack(list(rows.values())) @ torch.stack([stage.tokens_N, has]).T
    if not counts_sequences:
        totals = torch.zeros_like(totals)
    names = [f"{row}@{measure}" for row in rows for measure in ("tokens", "sequences")]
    values = [totals.flatten()]
    maximum_names, maxima = _maxima(stage, has)
    if stage.tokens.code is not None:
        names += [f"invalid_{kind}" for kind in KINDS]
        values.append(count_kinds(stage.tokens.code))
    if stage.measured and stage.config.metrics == "full":
        sums, extra = full_diagnostics(stage, counts_sequences)
        for name, value in extra.items():
            maximum_names += [name] if value.dim() == 0 else _indexed(name, value.numel())
            maxima.append(value.reshape(-1))
        for name, value in sums.items():
            names += _indexed(name, value.numel())
            values.append(value)
    maximum_values = torch.cat([value.double() for value in maxima]) if maxima else totals.new_zeros(0)
    return Statistics(
        torch.cat(values), maximum_values, tuple(names), tuple(maximum_names), stage.config, stage.locators
    )


@lru_cache
def _indexed(name: str, size: int) -> tuple[str, ...]:
    """The names of a vector's elements; made once, for the histogram has 2048."""
    return tuple(f"{name}[{index}]" for index in range(size))


def _rows(stage: Stage, has: Tensor) -> dict[str, Tensor]:
    """One number a sequence, all finite; a sequence without response tokens is weighed 0 by both measures."""
    config, means = stage.config, stage.means_N
    kept = stage.kept_N / stage.divisor_N
    rows = {"one": has, "kept": kept, "kept_any": kept > 0}
    if config.weighted and config.tis.batch_normalize:
        rows |= stage.unit_rows()
    if config.metrics == "off":
        return rows
    rows |= _rejection_rows(stage)
    rows |= _weight_rows(stage, kept)
    if not stage.measured:
        return rows
    log_probs = {name: means[name] for name in ("train", "log_ratio")}
    log_probs["rollout"] = log_probs["train"] - log_probs["log_ratio"]
    rows |= {**log_probs, "k3": means["k3"], "chi2": means["chi2"]}
    rows |= _perplexities(**log_probs)
    rows["log_ratio_abs"] = means["log_ratio"].abs()
    doubled = 2.0 * stage.sums_N["log_ratio"]
    rows["chi2_seq"] = doubled.clamp_(-2 * SAFETY_BOUND, 2 * SAFETY_BOUND).expm1_()
    if stage.level == "token":
        ratio_rows = {name: means[name] for name in _RATIO_ROWS}
        upper, lower = config.tis.upper - 1.0, config.tis.lower - 1.0
        rows |= {"seq_high": ratio_rows["ratio"] > upper, "seq_low": ratio_rows["ratio"] < lower}
    else:
        log_ratio = stage.aggregated()
        ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).expm1_()
        ratio_rows = dict(_ratio_rows(stage, log_ratio, ratio, None))
    rows |= ratio_rows
    rows["ratio_squared"] = ratio_rows["ratio"].square()
    return rows


def _perplexities(train: Tensor, log_ratio: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """exp of −mean log-prob, and of minus the mean log-ratio: the perplexities and their ratio."""
    means = {"training_ppl": train, "rollout_ppl": rollout, "ppl_ratio": log_ratio}
    values = torch.stack(list(means.values())).neg_().clamp_(max=SAFETY_BOUND).exp_()
    return dict(zip(means, values.unbind(0), strict=True))


def _ratio_rows(stage: Stage, log_ratio: Tensor, ratio: Tensor, padding: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """ρ − 1; c − center with c = ρ clamped to [1/hi, hi]; its square; whether l is above or below the bounds.

    [T] with padding, where everything must be 0, or [N].
    """
    tis = stage.config.tis

    def cleared(value: Tensor, is_zero: bool) -> Tensor:
        return value if padding is None or is_zero else value.masked_fill_(padding, 0)

    yield "ratio", ratio
    low, high = sorted((1.0 / tis.upper, tis.upper))
    clamped = ratio.clamp(low - 1.0, high - 1.0) if stage.center else bounded_exp(log_ratio).clamp_(low, high)
    clamped = cleared(clamped, stage.center > 0)
    yield "clamped", clamped
    wide = torch.empty_like(clamped, dtype=torch.float64) if padding is None else stage.wide_T
    yield "clamped_squared", wide.copy_(clamped).square_()
    yield "high", cleared(log_ratio > math.log(tis.upper), tis.upper >= 1.0)
    yield "low", cleared(log_ratio < (math.log(tis.lower) if tis.lower > 0 else -math.inf), tis.lower <= 1.0)


def _weight_rows(stage: Stage, kept: Tensor) -> dict[str, Tensor]:
    """Weights really used, Σ over kept tokens divided by all tokens of the sequence.

    They stand before batch normalisation, which the metrics apply from the merged sums; but for the scope micro_batch,
    whose factors differ, after it.
    """
    if stage.weights_N is not None:
        weight = stage.weights_N * kept
        squared = stage.weights_N * weight
    elif stage.weights_T is not None:
        used = kept > 0
        weight, squared = stage.means_N["weight"] * used, stage.means_N["weight_squared"] * used
    else:
        return {}
    weight, squared = _normalized(stage, weight), _normalized(stage, _normalized(stage, squared))
    return {"weight": weight, "weight_squared": squared, "seq_weight_squared": weight.square()}


def _normalized(stage: Stage, values: Tensor) -> Tensor:
    if stage.factor is None or stage.config.tis.batch_normalize_scope != "micro_batch":
        return values
    return values / stage.factor


def _rejection_rows(stage: Stage) -> dict[str, Tensor]:
    """Shares of rejected tokens and whether anything of a sequence was rejected, by cause."""
    rows: dict[str, Tensor] = {}
    masked_N = any_of([stage.outside_N[c.name] for c in stage.config.criteria if c.aggregate != "token"])
    masked_N = any_of([masked_N, stage.outside_mode_N])
    masked = stage.means_N.get("masked", stage.means_N.get("rejected") if stage.masks_tokens else None)
    if masked is not None:
        rows["masked"] = masked if masked_N is None else masked.masked_fill(masked_N, 1.0)
        rows["masked_any"] = rows["masked"] > 0
    elif masked_N is not None:
        rows |= {"masked": masked_N, "masked_any": masked_N}
    for criterion in stage.config.criteria:
        if criterion.aggregate == "token":
            assert masked is not None
            rows[f"out_{criterion.name}"] = stage.means_N.get(f"out_{criterion.name}", masked)
        else:
            rows[f"out_{criterion.name}"] = stage.outside_N[criterion.name]
    if stage.config.rs.veto_threshold is not None:
        rows |= {"vetoed": stage.outside_N["veto"], "catastrophic": stage.means_N["catastrophic"]}
    return rows


def _maxima(stage: Stage, has: Tensor) -> tuple[list[str], list[Tensor]]:
    """Names and values [·] of maxima; a minimum is carried as the maximum of the negative, "-name". −inf where there is
    nothing."""
    if stage.config.metrics == "off":
        return [], []
    both, above = {}, {}
    if stage.measured:
        both["log_ratio_seq"] = stage.means_N["log_ratio"]
        if stage.level == "token":
            both["ratio_seq"] = stage.means_N["ratio"]
        else:
            both["log_aggregate"] = stage.aggregated()
    if stage.weights_N is not None:
        above["weight"] = _normalized(stage, stage.weights_N.masked_fill(stage.kept_N == 0, 0.0))
    parts = [_extremes(both, above, has.logical_not())]
    if stage.measured and stage.level == "token":
        parts.append(_extremes({"log_aggregate": stage.tokens.log_ratio}, {}, stage.tokens.padding))
    if stage.weights_T is not None:
        weight = _normalized(stage, stage.weights_T * stage.keep_T)
        parts.append(_extremes({}, {"weight": weight}, stage.tokens.padding))
    return [name for names, _ in parts for name in names], [values for names, values in parts if names]


def _extremes(both: dict[str, Tensor], above: dict[str, Tensor], absent: Tensor) -> tuple[list[str], Tensor]:
    """Names and values of the maxima of all rows and the negated minima of the first kind, over what is not absent."""
    names = [*both, *above, *(f"-{name}" for name in both)]
    if not names or absent.numel() == 0:
        return names, absent.new_full((len(names),), -torch.inf, dtype=torch.float64)
    rows = [*both.values(), *above.values()]
    values = torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)
    parts = [values.masked_fill(absent, -torch.inf).amax(1)]
    if both:
        parts.append(values[: len(both)].masked_fill(absent, torch.inf).amin(1).neg())
    return names, torch.cat(parts) if len(parts) > 1 else parts[0]
