"""What the statistics hold of the level's units: their ratios, plain and clamped, and the weights really used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.correction_state import CorrectionState
from mismatch_plugin.core.segments import Column, bounded_exp
from mismatch_plugin.core.units import center
from mismatch_plugin.core.weights import grown

if TYPE_CHECKING:
    from mismatch_plugin.config.units import Unit


def outside_bounds(state: CorrectionState) -> dict[str, Tensor]:
    """Which units of the level are above and below the bounds that act on them, [U] bool each."""
    bounds, scale = state.bounds, state.scale_U
    assert bounds is not None
    return {
        "high": state.log_ratio_U > grown(bounds.log_upper, scale),
        "low": state.log_ratio_U < grown(bounds.log_lower, scale),
    }


def weight_columns(state: CorrectionState, weights_T: Tensor, rejected_T: Tensor | None) -> Iterator[Column]:
    """Of weights that are known a token at a time: bounded ones, and of the kept tokens Σ w, Σ w², Σ (w − 1)²."""
    if state.config.tis.batch_normalize:
        yield Column("weight_unit", weights_T)
        if "mode" in state.outside_T:
            yield Column("outside_mode", state.outside_T["mode"])
    if state.config.metrics != "off":
        kept, weight = state.tokens.mask, weights_T
        if rejected_T is not None:
            kept, weight = kept.masked_fill(rejected_T, 0.0), weight.masked_fill(rejected_T, 0.0)
        yield Column("weight", weight, "weight_squared")
        yield Column(None, weight - kept, "weight_deviation")


def measures_parts(unit: Unit) -> bool:
    """A sequence has several units, and is judged by its tokens' mean ρ."""
    return unit.measure != "sequences"


def mean_ratio(rows: dict[str, Tensor]) -> Tensor:
    """Mean of ρ − 1 over the response tokens of each sequence, ρ that of the token's unit."""
    return rows["unit_ratio"] if "unit_ratio" in rows else rows["ratio"]


def unit_ratio_rows(state: CorrectionState) -> dict[str, Tensor]:
    """Of units that are (parts of) sequences: moments of ρ, plain and clamped, and whether it is outside the bounds."""
    ratio = state.ratio_U
    rows = {"unit_ratio": ratio - 1.0, "unit_square": ratio.square()}
    if state.parts is None:  # of turns there are many
        rows["unit_plain"] = ratio
    rows["unit_ratio_squared"] = rows["unit_ratio"].square()
    rows["clamped"] = clamped(state, rows["unit_ratio"], state.log_ratio_U)
    rows["clamped_squared"] = rows["clamped"].square()
    if state.bounds is not None and state.bounds.unit == state.unit:
        rows |= outside_bounds(state)
    return rows


def token_weight_rows(state: CorrectionState, kept: Tensor) -> dict[str, Tensor]:
    """Weights really used of units that are tokens, Σ over kept tokens divided by all tokens of the sequence.

    They are those before batch normalisation, which the metrics apply from the merged sums; but for the scope
    micro_batch, whose factors differ, after it.
    """
    if state.weights_U is None:
        return {}
    factor, used = own_factor(state), kept > 0
    weight, squared = state.means_N["weight"] * used, state.means_N["weight_squared"] * used
    deviation = state.means_N["weight_deviation"] * used
    if factor is not None:
        # Σ (w/f − 1)² from the sums about w = 1.
        shift = 1.0 - factor
        deviation = (deviation + 2.0 * shift * (weight - kept) + shift**2 * kept) / factor**2
        weight, squared = weight / factor, squared / factor**2
    return {"weight": weight, "weight_squared": squared, "weight_deviation": deviation}


def unit_weight_rows(state: CorrectionState, kept: Tensor) -> dict[str, Tensor]:
    """The same of units that are (parts of) sequences, divided by all tokens of the unit. kept: of whole sequences."""
    if state.weights_U is None:
        return {}
    factor = own_factor(state)
    unit = state.weights_U if factor is None else state.weights_U / factor
    if state.parts is not None:
        kept = state.kept_U / state.sums_U["tokens"].clamp(min=1)
    weight = unit * kept
    rows = {"weight": weight, "weight_squared": unit * weight, "weight_deviation": (unit - 1.0).square_() * kept}
    return rows if state.parts is None else rows | {"unit_weight_squared": weight.square()}


def own_factor(state: CorrectionState) -> Tensor | float | None:
    """What this batch's weights are divided by here: factors of the scope micro_batch differ, so they cannot wait."""
    return state.factor if state.config.tis.batch_normalize_scope == "micro_batch" else None


def clamped(state: CorrectionState, ratio: Tensor, log_ratio: Tensor, padding: Tensor | None = None) -> Tensor:
    """c − center, c = ρ clamped to [1/hi, hi] (also where hi is below 1), 0 at padding. ratio: ρ − 1."""
    upper, middle = state.config.tis.upper, center(state.config)
    low, high = sorted((1.0 / upper, upper))
    if middle:
        return ratio.clamp(low - middle, high - middle)
    clamped = bounded_exp(log_ratio).clamp_(low, high)
    return clamped if padding is None else clamped.masked_fill_(padding, 0)


def masked_with_units(state: CorrectionState) -> Tensor:
    """Share of each sequence's tokens that token criteria reject, or mask mode with their unit."""
    tokens, outside = state.sums_U["tokens"], state.outside_U["mode"]
    by_token = state.sums_U.get("masked", state.sums_U.get("rejected") if state.outside_T else None)
    by_token = torch.zeros_like(tokens) if by_token is None else by_token
    masked_U = torch.where(outside, 1.0, by_token / tokens.clamp(min=1))
    return state.of_sequences({"masked": masked_U})["masked"]
