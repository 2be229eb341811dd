"""Statistics of one `correct` call: which columns are summed per sequence, and what the batch's sums are.

One matrix product sums every row (one number a sequence) under both measures, by response `tokens` and by `sequences`,
so that the number of kernels does not grow with N. Ratios are carried as ρ − 1 (`expm1`), which is 0 at padding and
keeps its digits when the two engines nearly agree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from mismatch_plugin.core.correction_state import CorrectionState, any_of
from mismatch_plugin.core.metrics import registry
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.rejection import budget_histogram
from mismatch_plugin.core.segments import Column, bounded_exp, histogram, verdict_columns
from mismatch_plugin.core.units import grown, unit_log_ratio
from mismatch_plugin.core.validity import KINDS, count_kinds
from mismatch_plugin.limits import SAFETY_BOUND


def token_columns(state: CorrectionState, masked_T: Tensor | None, rejected_T: Tensor | None) -> Iterator[Column]:
    """[T] columns to be summed per sequence, 0 at padding; one at a time, so that few live at once."""
    tokens, log_ratio, bounds = state.tokens, state.tokens.log_ratio, state.bounds
    if state.measured:
        yield Column("train", tokens.train)  # the sum of log π_rollout is that of train − log_ratio
    yield Column("log_ratio", log_ratio)
    yield Column("tokens", tokens.mask)
    if not state.unit.needs_second_reduction:
        yield from _verdict_columns(state, masked_T, rejected_T)
    if not state.measured:
        return
    if state.config.metrics == "full":
        yield from _token_criteria(state)
    bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = bounded.expm1()
    yield Column("k3", torch.sub(ratio, bounded, out=bounded))
    del bounded
    yield Column("ratio", ratio, "ratio_squared")
    if state.unit.per_token:
        yield Column("clamped", _clamped(state, ratio), "clamped_squared")
    if bounds is not None and bounds.unit.per_token:
        outside = {"high": log_ratio > bounds.log_upper, "low": log_ratio < bounds.log_lower}
        excludes_one = not bounds.lower <= 1.0 <= bounds.upper
        for name, verdict in outside.items():
            yield Column(name, verdict.masked_fill_(tokens.padding, False) if excludes_one else verdict)


def second_columns(state: CorrectionState, masked_T: Tensor | None, rejected_T: Tensor | None) -> Iterator[Column]:
    """The same of what is known of a token only after the first reduction: verdicts, weights, its unit's ρ."""
    yield from _verdict_columns(state, masked_T, rejected_T)
    if state.measured:
        yield from _unit_ratio_columns(state)


def _verdict_columns(state: CorrectionState, masked_T: Tensor | None, rejected_T: Tensor | None) -> Iterator[Column]:
    """What rejects tokens, and weights that tokens have of their own."""
    normalized = state.weights_U is not None and state.config.tis.batch_normalize
    shown = state.config.metrics != "off"
    causes = {f"out_{name}": outside for name, outside in state.outside_T.items() if normalized or name != "mode"}
    if state.weights_U is not None and normalized:
        yield Column("weight_unit", state.weights_U)
    if state.weights_U is not None and shown:  # of the kept tokens Σ w, Σ w², Σ (w − 1)²
        kept, weight = state.tokens.mask, state.weights_U
        if rejected_T is not None:
            kept, weight = kept.masked_fill(rejected_T, 0.0), weight.masked_fill(rejected_T, 0.0)
        yield Column("weight", weight, "weight_squared")
        yield Column("weight_minus_one", weight - kept, "weight_deviation")
    yield from verdict_columns({"rejected": rejected_T} | ({"masked": masked_T} if shown else {}) | causes)


def _token_criteria(state: CorrectionState) -> Iterator[Column]:
    """What each token criterion measures, and what it rejects above if it has two bounds; extremes go to `state`."""
    for criterion in state.config.criteria:
        if not criterion.unit.per_token:
            continue
        value = state.judged.values(criterion)
        names, extremes = _extremes({f"value_{criterion.name}": value}, {}, state.tokens.padding)
        state.token_extremes |= dict(zip(names, extremes.unbind(), strict=True))
        low, high = criterion.log_bounds
        if low is not None and high is not None:
            yield Column(f"above_{criterion.name}", (value > high).logical_and_(state.outside_T[criterion.name]))
        if criterion.in_log_space:
            value = value.clamp(-SAFETY_BOUND, SAFETY_BOUND).expm1_()
        yield Column(f"value_{criterion.name}", value)


def collect_statistics(state: CorrectionState, counts_sequences: bool) -> Statistics:
    """The batch's sums and maxima, by one matrix product and one maximum over [K, N]; no host sync. counts_sequences:
    False on the ranks of a context-parallel group that leave the counting to another one."""
    has = state.tokens_N > 0
    rows, unit_rows = _rows(state, has)
    values = [(torch.stack(list(rows.values())) @ torch.stack([state.tokens_N, has]).T).flatten()]
    names = [f"{row}@{measure}" for row in rows for measure in ("tokens", "sequences")]
    if state.parts.splits and not state.unit.one_ratio_per_token:
        unit_rows |= {"one": state.counts_U}
        values.append(torch.stack(list(unit_rows.values())) @ state.counts_U)
        names += [f"{row}@{state.unit.measure}" for row in unit_rows]
    if not counts_sequences:
        values = [torch.zeros_like(value) for value in values]
    maximum_names, maxima = _maxima(state, has, rows)
    if state.tokens.code is not None:
        names += [f"invalid_{kind}" for kind in KINDS]
        values.append(count_kinds(state.tokens.code))
    for criterion in state.config.budgets:
        tokens = state.tokens.padding.logical_not() if criterion.unit.per_token else has
        judged = state.judged.values(criterion) if criterion.unit.per_token else state.values_N[criterion.name]
        counts = budget_histogram(judged, tokens)
        names += _indexed(f"budget_{criterion.name}", len(counts))
        values.append(counts if counts_sequences or criterion.unit.per_token else torch.zeros_like(counts))
    if state.measured and state.config.metrics == "full":
        sums, extra = full_diagnostics(state, counts_sequences)
        maximum_names += extra
        maxima += [value.reshape(1) for value in extra.values()]
        for name, value in sums.items():
            names += _indexed(name, value.numel())
            values.append(value)
    maximum_values = torch.cat([value.double() for value in maxima]) if maxima else values[0].new_zeros(0)
    return Statistics(
        torch.cat(values), maximum_values, tuple(names), tuple(maximum_names), state.config, state.locators
    )


@lru_cache
def _indexed(name: str, size: int) -> tuple[str, ...]:
    """The names of a vector's elements; made once, for the histogram has 2048."""
    return tuple(f"{name}[{index}]" for index in range(size))


_OF_TOKENS = (
    "train", "log_ratio", "k3", "ratio", "ratio_squared", "clamped", "clamped_squared",
    "unit_ratio", "unit_ratio_squared", "unit_plain", "unit_square", "high", "low",
)  # fmt: skip
"""Columns whose means over the tokens of a sequence are rows, where they were summed."""


def _rows(state: CorrectionState, has: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One number a sequence, and one a unit where these are (parts of) sequences; all finite. What has no response
    tokens is weighed 0 by every measure."""
    config, means, unit = state.config, state.means_N, state.unit
    kept = state.kept_N / state.divisor_N
    rows = {"one": has, "kept": kept, "kept_any": kept > 0}
    own = state.unit_rows() if config.normalizes else {}
    if config.metrics != "off":
        own |= _weight_rows(state, kept)
        rows |= _rejection_rows(state)
    if unit.one_ratio_per_token:
        rows, unit_rows = rows | own, {}
    else:
        unit_rows = own
        for name, values, squares in _unit_ratio_columns(state) if state.measured else ():
            unit_rows[name] = values
            if squares is not None:
                unit_rows[squares] = values.square()
        rows |= state.of_sequences(unit_rows)
    if config.metrics == "off":
        return rows, unit_rows
    if "weight" in rows:
        rows["seq_weight_squared"] = rows["weight"].square()
    if not state.measured:
        return rows, unit_rows
    rows |= {name: means[name] for name in _OF_TOKENS if name in means}
    rows["rollout"] = rows["train"] - rows["log_ratio"]
    perplexities = torch.stack([rows["train"], rows["rollout"]]).neg_().clamp_(max=SAFETY_BOUND).exp_()
    rows |= dict(zip(("training_ppl", "rollout_ppl"), perplexities.unbind(0), strict=True))
    rows["log_ratio_mean_abs"] = means["log_ratio"].abs()
    of_sequences = unit.measure == "sequences"
    rows["level_ratio"] = rows.get("unit_ratio", rows["ratio"])
    rows["level_ratio_squared"] = rows["unit_ratio_squared"] if of_sequences else rows["level_ratio"].square()
    rows["product_square"] = (
        rows["unit_square"] if unit.multiplies and of_sequences else bounded_exp(state.sums_N["log_ratio"]).square_()
    )
    rows |= _outside_rows(state, rows)
    if config.metrics == "full":
        rows |= _criterion_rows(state, has)
    return rows, unit_rows


def _rejection_rows(state: CorrectionState) -> dict[str, Tensor]:
    """Shares of rejected tokens and whether anything of a sequence was rejected, by cause."""
    outside_N = {name: rejected for name, rejected in state.outside_N.items() if name not in ("veto", "invalid")}
    rows = {f"out_{name}": rejected for name, rejected in outside_N.items()}
    rows |= {f"out_{name}": state.means_N[f"out_{name}"] for name in state.outside_T if name != "mode"}
    of_mode = {} if state.parts.splits else state.outside_U
    masked, masked_N = state.means_N.get("masked"), any_of((outside_N | of_mode).values())
    if state.outside_U and state.parts.splits:  # token criteria, and mask mode with a token's unit
        tokens = state.sums_U["tokens"]
        shares = state.sums_U["masked"] / tokens.clamp(min=1) if state.outside_T else torch.zeros_like(tokens)
        masked = state.of_sequences({"masked": torch.where(state.outside_U["mode"], 1.0, shares)})["masked"]
    if masked is not None:
        rows["masked"] = masked if masked_N is None else masked.masked_fill(masked_N, 1.0)
        rows["masked_any"] = rows["masked"] > 0
    elif masked_N is not None:
        rows |= {"masked": masked_N, "masked_any": masked_N}
    if state.config.rs.veto_threshold is not None:
        rows |= {"vetoed": state.outside_N["veto"], "catastrophic": state.means_N["catastrophic"]}
    return rows


def _criterion_rows(state: CorrectionState, has: Tensor) -> dict[str, Tensor]:
    """`_token_criteria` of every criterion, one number a sequence. What is rejected and not above is below."""
    rows = {name: mean for name, mean in state.means_N.items() if name.startswith(("value_", "above_"))}
    for criterion in state.config.criteria:
        if criterion.unit.per_token:
            continue
        name, (low, high) = criterion.name, criterion.log_bounds
        value = state.values_N[name].masked_fill(has.logical_not(), 0.0)
        if low is not None and high is not None:
            rows[f"above_{name}"] = (value > high).logical_and_(state.outside_N[name])
        if criterion.in_log_space:
            value = value.clamp(-SAFETY_BOUND, SAFETY_BOUND).expm1()
        rows[f"value_{name}"] = value
    return rows


def _outside_rows(state: CorrectionState, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whether a sequence is above or below bounds that act on it, or its mean ρ above or below those that act on its
    parts (those of one token, where bounds grow)."""
    bounds = state.bounds
    if bounds is None:
        return {}
    if bounds.unit.measure != "sequences":
        ratio = rows["ratio"] if bounds.unit.per_token else rows["level_ratio"]
        return {"seq_high": ratio > bounds.upper - 1.0, "seq_low": ratio < bounds.lower - 1.0}
    high, low = rows.get("high"), rows.get("low")  # of the level's own units
    if high is None or low is None:
        log_ratio = unit_log_ratio(bounds.unit, state.tokens.log_ratio, state.sums_N, state.packed.whole)
        high, low = log_ratio > bounds.log_upper, log_ratio < bounds.log_lower
    return {"high": high, "low": low, "seq_high": high, "seq_low": low}


# Units of the level: their ratios, plain and clamped, and the weights really used ------------------------------------


def _unit_ratio_columns(state: CorrectionState) -> Iterator[Column]:
    """[U] of units that are not tokens, 0 at padding: moments of ρ about 1 and 0, those of ρ clamped, and what is above
    and below the bounds that act on them."""
    padding = state.tokens.padding if state.unit.one_ratio_per_token else None
    ratio, bounds, scale = state.ratio_U - 1.0, state.bounds, state.scale_U
    yield Column("unit_ratio", ratio, "unit_ratio_squared")
    yield Column("clamped", _clamped(state, ratio), "clamped_squared")
    yield Column(
        "unit_plain", state.ratio_U if padding is None else state.ratio_U.masked_fill(padding, 0.0), "unit_square"
    )
    if bounds is None or bounds.unit != state.unit:
        return
    high = state.log_ratio_U > grown(bounds.log_upper, scale)
    low = state.log_ratio_U < grown(bounds.log_lower, scale)
    yield Column("high", high if padding is None else high.masked_fill_(padding, False))
    yield Column("low", low if padding is None else low.masked_fill_(padding, False))


def _clamped(state: CorrectionState, ratio: Tensor) -> Tensor:
    """c − 1, c = ρ clamped to [1/hi, hi] (also where hi is below 1). ratio: ρ − 1."""
    low, high = sorted((1.0 / state.config.tis.upper, state.config.tis.upper))
    return ratio.clamp(low - 1.0, high - 1.0)


def _own_factor(state: CorrectionState) -> Tensor | float | None:
    """What this batch's weights are divided by here: factors of the scope micro_batch differ, so they cannot wait. All
    others the metrics apply to the merged sums."""
    return state.factor if state.config.tis.batch_normalize_scope == "micro_batch" else None


def _weight_rows(state: CorrectionState, kept: Tensor) -> dict[str, Tensor]:
    """Weights really used, Σ over kept tokens divided by all tokens of the sequence, or of the unit where units are
    more than a token. kept: of whole sequences."""
    if state.weights_U is None:
        return {}
    factor, used = _own_factor(state), kept > 0
    if not state.unit.one_ratio_per_token:
        unit = state.weights_U if factor is None else state.weights_U / factor
        if state.parts.splits:
            kept = state.kept_U / state.sums_U["tokens"].clamp(min=1)
        weight = unit * kept
        rows = {"weight": weight, "weight_squared": unit * weight, "weight_deviation": (unit - 1.0).square_() * kept}
        return rows | {"unit_weight_squared": weight.square()} if state.parts.splits else rows
    weight, squared = state.means_N["weight"] * used, state.means_N["weight_squared"] * used
    deviation = state.means_N["weight_deviation"] * used
    if factor is not None:
        # Σ (w/f − 1)² from the sums about w = 1.
        shift = 1.0 - factor
        deviation = (deviation + 2.0 * shift * (weight - kept) + shift**2 * kept) / factor**2
        weight, squared = weight / factor, squared / factor**2
    return {"weight": weight, "weight_squared": squared, "weight_deviation": deviation}


# Extremes -------------------------------------------------------------------------------------------------------------


def _maxima(state: CorrectionState, has: Tensor, rows: dict[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    """Names and values [·] of maxima; a minimum is carried as the maximum of the negative, "-name". −inf where there is
    nothing."""
    if state.config.metrics == "off":
        return [], []
    of_sequences: dict[str, Tensor] = {}
    of_units: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    if state.measured:
        of_sequences["log_ratio_seq"] = state.means_N["log_ratio"]
        of_units["log_aggregate"] = state.log_ratio_U
        if state.unit.measure != "sequences":
            of_sequences["ratio_seq"] = rows["level_ratio"]
        if state.config.metrics == "full":
            of_sequences |= {f"value_{name}": value for name, value in state.values_N.items()}
    per_token = state.unit.one_ratio_per_token
    if state.weights_U is not None:
        weight, factor = state.weights_U, _own_factor(state)
        weight = weight * state.keep_T if per_token else weight.masked_fill(state.kept_U == 0, 0.0)
        weights["weight"] = weight if factor is None else weight / factor
    if per_token or state.parts.splits:
        absent = state.tokens.padding if per_token else state.counts_U == 0
        found = [_extremes(of_sequences, {}, has.logical_not())]
        found += [_extremes(of_units, {}, absent), _extremes({}, weights, absent)]
    else:
        found = [_extremes(of_sequences | of_units, weights, has.logical_not())]
    if state.token_extremes:
        found.append((list(state.token_extremes), torch.stack(list(state.token_extremes.values()))))
    return [name for names, _ in found for name in names], [values for names, values in found if names]


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


# Level full: quantiles of the ratio, drift and acceptance, as sums over fixed buckets --------------------------------


def full_diagnostics(state: CorrectionState, counts_sequences: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """({name: sums [B]}, {name: maxima, 0-d}), float64, of the local tokens, and of whole sequences where counted here.
    About 60 kernels; no host sync."""
    tokens, packed = state.tokens, state.packed
    sums: dict[str, Tensor] = {}
    # Log-ratios beyond ±20 fall into the last bins.
    edge = registry.HISTOGRAM_EDGE * (1 - 1e-6)
    place = tokens.log_ratio.mul(1.0 / registry.HISTOGRAM_SCALE).asinh_().clamp_(-edge, edge)
    place.masked_fill_(tokens.padding, 2 * registry.HISTOGRAM_EDGE)  # outside the range: not counted
    sums["histogram"] = histogram(place, registry.HISTOGRAM_BINS, -registry.HISTOGRAM_EDGE, registry.HISTOGRAM_EDGE)
    del place
    maxima: dict[str, Tensor] = {}
    difference = tokens.train.exp().sub_(tokens.rollout.exp()).abs_()
    sums["probability_difference"] = difference.sum(dtype=torch.float64).reshape(1)
    maxima["probability_difference"] = difference.amax() if difference.numel() else difference.new_zeros(())
    del difference

    buffer = torch.empty_like(tokens.log_ratio, dtype=torch.float64)

    def add_drift(name: str, place: Tensor, size: int) -> None:
        sums[f"{name}_log_ratio"] = _by_bucket(place, size, buffer.copy_(tokens.log_ratio))
        if name != "version":
            sums[f"{name}_log_ratio_abs"] = _by_bucket(place, size, buffer.copy_(tokens.log_ratio).abs_())
        sums[f"{name}_tokens"] = _by_bucket(place, size, buffer.copy_(tokens.mask))

    if packed.weight_versions is not None and packed.trainer_version is not None:
        lag = (packed.trainer_version - packed.weight_versions).clamp_(0, registry.VERSION_LAGS)
        add_drift("version", lag, registry.VERSION_LAGS + 1)
    add_drift(
        "probability", bucket(tokens.rollout.exp(), registry.PROBABILITY_EDGES), len(registry.PROBABILITY_EDGES) + 1
    )
    add_drift("position", bucket(packed.response_positions, registry.POSITION_EDGES), len(registry.POSITION_EDGES) + 1)
    if packed.advantages is not None:
        sign = packed.advantages.masked_fill(tokens.padding, 0.0).sign_().add_(1.0).int()
        sums["advantage_tokens"] = _by_bucket(sign, 3, buffer.copy_(tokens.mask))
        sums["advantage_kept"] = _by_bucket(sign, 3, buffer.copy_(state.keep_T))
    length = bucket(state.tokens_N, registry.LENGTH_EDGES)
    counted = (state.tokens_N > 0).double() * float(counts_sequences)
    sums["length_sequences"] = _by_bucket(length, len(registry.LENGTH_EDGES) + 1, counted)
    sums["length_kept"] = _by_bucket(length, len(registry.LENGTH_EDGES) + 1, counted * (state.kept_N > 0))
    return sums, maxima


def _by_bucket(place: Tensor, size: int, values: Tensor) -> Tensor:
    return values.new_zeros(size).index_add_(0, place, values)


def bucket(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """Index of each value's bucket, int32: how many edges are ≤ the value. No NaN. One kernel."""
    return torch.bucketize(values, _constants(edges, values.dtype, values.device), right=True, out_int32=True)


# Made once: copying them to the device in the hook would be a host sync.
@lru_cache
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
