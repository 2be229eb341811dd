"""What a batch adds to the step's statistics: token columns summed per sequence, then rows summed over sequences.

A row holds one number a sequence: mostly the mean of a token quantity over its response tokens. One matrix product
sums every row under both measures, `tokens` and `sequences`; so the number of kernels does not grow with N.
Ratios are carried as ρ − 1 (`expm1`), which is 0 at padding and keeps its digits when the two engines nearly agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from mismatch_plugin.core.levels import bounded_exp
from mismatch_plugin.core.metrics.full import full_diagnostics
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.rejection import token_statistic
from mismatch_plugin.core.stage import Stage, any_of
from mismatch_plugin.core.validity import KINDS, count_kinds
from mismatch_plugin.limits import SAFETY_BOUND


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
            kept = tokens.mask if rejected_T is None else tokens.mask.masked_fill(rejected_T, 0.0)
            yield "weight_deviation", stage.wide_T.copy_(weight).sub_(kept).square_()
            del weight, kept
    if config.metrics == "off":
        return
    if masked_T is not None and masked_T is not rejected_T:
        yield "masked", masked_T
    for name, outside in stage.outside_criteria_T.items():
        if outside is not masked_T:
            yield f"out_{name}", outside
    if not stage.measured:
        return
    if config.metrics == "full":
        yield from _token_criteria(stage)
    bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = bounded.expm1()
    yield "k3", torch.sub(ratio, bounded, out=stage.wide_T)
    del bounded
    yield "ratio", ratio
    yield "ratio_squared", stage.wide_T.copy_(ratio).square_()
    if stage.level == "token":
        yield from _clamped_tokens(stage, ratio)
    if stage.bounds is not None and stage.bounds.level == "token":
        outside = {"high": log_ratio > stage.bounds.log_upper, "low": log_ratio < stage.bounds.log_lower}
        excludes_one = not stage.bounds.lower <= 1.0 <= stage.bounds.upper
        for name, verdict in outside.items():
            yield name, verdict.masked_fill_(tokens.padding, False) if excludes_one else verdict


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
    rows |= {name: means[name] for name in ("train", "log_ratio", "k3", "ratio", "ratio_squared")}
    rows["rollout"] = rows["train"] - rows["log_ratio"]
    rows |= _perplexities(rows["train"], rows["rollout"])
    rows["log_ratio_abs"] = means["log_ratio"].abs()
    if stage.level == "token":
        rows |= {name: means[name] for name in ("clamped", "clamped_squared")}
        rows["seq_ratio_squared"] = rows["ratio"].square()
    else:
        ratio = stage.unit_ratio
        rows |= {"unit_ratio": ratio - 1.0, "unit_square": ratio.square()}
        rows["unit_ratio_squared"] = rows["unit_ratio"].square()
        low, high = _clamp(stage)
        rows["clamped"] = (rows["unit_ratio"] if stage.center else ratio).clamp(low - stage.center, high - stage.center)
        rows["clamped_squared"] = rows["clamped"].square()
    if stage.level != "sequence":  # there it is the unit's
        rows["product_square"] = bounded_exp(stage.sums_N["log_ratio"]).square_()
    if stage.bounds is not None:
        rows |= _outside_rows(stage)
    if config.metrics == "full":
        rows |= _criterion_rows(stage, has)
    return rows


def _outside_rows(stage: Stage) -> dict[str, Tensor]:
    """Whether a unit is above or below the bounds that act; at token level also whether a sequence's mean ρ is."""
    bounds = stage.bounds
    assert bounds is not None
    if bounds.level == "token":
        ratio = stage.means_N["ratio"]
        verdicts = {"seq_high": ratio > bounds.upper - 1.0, "seq_low": ratio < bounds.lower - 1.0}
        return {"high": stage.means_N["high"], "low": stage.means_N["low"], **verdicts}
    log_ratio = stage.aggregated(bounds.level)
    return {"high": log_ratio > bounds.log_upper, "low": log_ratio < bounds.log_lower}


def _token_criteria(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """What each token criterion measures, and what is above its bounds if it has two; extremes go to the stage."""
    tokens = stage.tokens
    for criterion in stage.config.criteria:
        if criterion.aggregate != "token":
            continue
        value = token_statistic(criterion.statistic, tokens.log_ratio, tokens.train, tokens.rollout)
        names, extremes = _extremes({f"value_{criterion.name}": value}, {}, tokens.padding)
        stage.token_extremes |= dict(zip(names, extremes.unbind(), strict=True))
        low, high = criterion.log_bounds
        if low is not None and high is not None:
            yield f"above_{criterion.name}", (value > high).masked_fill_(tokens.padding, False)
        if criterion.in_log_space:
            value = value.clamp(-SAFETY_BOUND, SAFETY_BOUND).expm1_()
        yield f"value_{criterion.name}", value


def _criterion_rows(stage: Stage, has: Tensor) -> dict[str, Tensor]:
    """The same of every criterion, one number a sequence. What is outside and not above is below."""
    rows: dict[str, Tensor] = {}
    for criterion in stage.config.criteria:
        name = criterion.name
        low, high = criterion.log_bounds
        if criterion.aggregate == "token":
            found = [key for side in ("value", "above") if (key := f"{side}_{name}") in stage.means_N]
            rows |= {key: stage.means_N[key] for key in found}
            continue
        value = stage.values_N[name].masked_fill(has.logical_not(), 0.0)
        if low is not None and high is not None:
            rows[f"above_{name}"] = value > high
        if criterion.in_log_space:
            value = value.clamp(-SAFETY_BOUND, SAFETY_BOUND).expm1()
        rows[f"value_{name}"] = value
    return rows


def _perplexities(train: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """exp of minus the mean log-prob, at most e^20."""
    values = torch.stack([train, rollout]).neg_().clamp_(max=SAFETY_BOUND).exp_()
    return dict(zip(("training_ppl", "rollout_ppl"), values.unbind(0), strict=True))


def _clamp(stage: Stage) -> tuple[float, float]:
    """[1/hi, hi], also where hi is below 1."""
    upper = stage.config.tis.upper
    low, high = sorted((1.0 / upper, upper))
    return low, high


def _clamped_tokens(stage: Stage, ratio: Tensor) -> Iterator[tuple[str, Tensor]]:
    """c − center, with c = ρ clamped to [1/hi, hi], and its square, [T], 0 at padding. ratio: ρ − 1."""
    low, high = _clamp(stage)
    if stage.center:
        clamped = ratio.clamp(low - 1.0, high - 1.0)
    else:
        clamped = bounded_exp(stage.tokens.log_ratio).clamp_(low, high).masked_fill_(stage.tokens.padding, 0)
    yield "clamped", clamped
    yield "clamped_squared", stage.wide_T.copy_(clamped).square_()


def _weight_rows(stage: Stage, kept: Tensor) -> dict[str, Tensor]:
    """Weights really used, Σ over kept tokens divided by all tokens of the sequence.

    They stand before batch normalisation, which the metrics apply from the merged sums; but for the scope micro_batch,
    whose factors differ, after it.
    """
    if stage.weights_N is not None:
        unit = _normalized(stage, stage.weights_N)
        weight = unit * kept
        squared, deviation = unit * weight, (unit - 1.0).square_() * kept
    elif stage.weights_T is not None:
        used = kept > 0
        weight, squared = stage.means_N["weight"] * used, stage.means_N["weight_squared"] * used
        deviation = stage.means_N["weight_deviation"] * used
        if (factor := _own_factor(stage)) is not None:
            # Σ (w/f − 1)² from the sums about w = 1.
            shift = 1.0 - factor
            deviation = (deviation + 2.0 * shift * (weight - kept) + shift**2 * kept) / factor**2
            weight, squared = weight / factor, squared / factor**2
    else:
        return {}
    rows = {"weight": weight, "weight_squared": squared, "weight_deviation": deviation}
    return rows | {"seq_weight_squared": weight.square()}


def _own_factor(stage: Stage) -> Tensor | float | None:
    """What this batch's weights are divided by here: factors of the scope micro_batch differ, so they cannot wait."""
    return stage.factor if stage.config.tis.batch_normalize_scope == "micro_batch" else None


def _normalized(stage: Stage, values: Tensor) -> Tensor:
    factor = _own_factor(stage)
    return values if factor is None else values / factor


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
        if stage.config.metrics == "full":
            both |= {f"value_{name}": value for name, value in stage.values_N.items()}
    if stage.weights_N is not None:
        above["weight"] = _normalized(stage, stage.weights_N.masked_fill(stage.kept_N == 0, 0.0))
    parts = [_extremes(both, above, has.logical_not())]
    if stage.token_extremes:
        parts.append((list(stage.token_extremes), torch.stack(list(stage.token_extremes.values()))))
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
