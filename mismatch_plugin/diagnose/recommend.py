"""One setting for a batch, by the rules, with what is predicted for it on these data and what to watch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mismatch_plugin.config import MismatchConfig, preset
from mismatch_plugin.config.values import no_notes
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.units import units_of
from mismatch_plugin.diagnose.findings import Status
from mismatch_plugin.diagnose.flags import config_of, flags_for, preset_of
from mismatch_plugin.diagnose.hosts import HOSTS
from mismatch_plugin.diagnose.levels import Bounds
from mismatch_plugin.diagnose.measure import Figures
from mismatch_plugin.diagnose.result import Prediction, Recommendation
from mismatch_plugin.diagnose.rules import ADDITIONS, RULES, Rule
from mismatch_plugin.report.table import figure

LEAST_KEPT = 0.9
"""Of the user's own tokens, by the prediction."""
SHARES = ("99%", "99.9%")
"""Of the bounds from the data: the tightest that is there is taken."""
GROWN = 2.0
"""k3 that has grown so many times within ten steps says that something has changed."""


def recommend(
    figures: Figures,
    predictions: Sequence[Prediction] = (),
    bounds: Bounds | None = None,
    *,
    status: Status = "clean",
    predict: Callable[[MismatchConfig], Prediction] | None = None,
) -> Recommendation | None:
    """The setting of the first rule that holds and whose setting keeps LEAST_KEPT of these tokens.

    A setting that may reject is taken only with a prediction that says so (from `predictions`, found by its settings,
    or by `predict`), or with bounds from the data in place of its own. status: of `check`; None where it found a fault
    (fix that first) or could not decide, and where no rule holds.
    """
    if status != "clean":
        return None
    for rule in RULES:
        if rule.holds(figures):
            found = _setting(rule, predictions, bounds or {}, predict)
            if found is not None:
                config, prediction, why = found
                reasons = [why] if why else []
                for addition in ADDITIONS:
                    if addition.holds(figures, prediction):
                        more = _added(config, addition.changes(figures), predictions, predict)
                        if more is not None:
                            config, prediction = more
                            reasons.append(f"{addition.run}: {addition.reason}")
                return _recommendation(rule, figures, config, prediction, reasons)
    return None


def _added(
    config: MismatchConfig,
    changes: dict[str, Any],
    predictions: Sequence[Prediction],
    predict: Callable[[MismatchConfig], Prediction] | None,
) -> tuple[MismatchConfig, Prediction] | None:
    """The settings with the changes, and what is predicted for them; None where they do not go together, or too little
    is kept."""
    try:
        with no_notes():
            changed = config.replace(**changes)
    except ValueError:
        return None
    prediction = _predicted(changed, predictions, predict)
    return None if prediction is None or prediction.kept < LEAST_KEPT else (changed, prediction)


def _setting(
    rule: Rule,
    predictions: Sequence[Prediction],
    bounds: Bounds,
    predict: Callable[[MismatchConfig], Prediction] | None,
) -> tuple[MismatchConfig, Prediction | None, str] | None:
    """(settings, prediction, a sentence on bounds from the data or "") of a rule; None where too little is kept."""
    with no_notes():
        config = preset(rule.preset).replace(**rule.changes)
    prediction = _predicted(config, predictions, predict)
    if not rule.data_bounds and (prediction.kept >= LEAST_KEPT if prediction else not config.rejects):
        return config, prediction, ""
    given = bounds.get(rule.bounds, {})
    share = next((share for share in SHARES if share in given), None)
    if share is None:
        return None
    lower, upper = _rounded(*given[share])
    with no_notes():
        changed = config.replace(**rule.with_bounds(lower, upper))
    new = _predicted(changed, predictions, predict)
    if new is not None and new.kept < LEAST_KEPT:
        return None
    own = f"; the preset's own would keep {prediction.kept:.0%}" if prediction is not None else ""
    why = f"bounds {lower:g} and {upper:g} on the {rule.bounds} ratio keep {share.replace('%', ' %')} of your data{own}"
    return changed, new, why


def _predicted(
    config: MismatchConfig,
    predictions: Sequence[Prediction],
    predict: Callable[[MismatchConfig], Prediction] | None,
) -> Prediction | None:
    found = next((prediction for prediction in predictions if config_of(prediction.settings) == config), None)
    return predict(config) if found is None and predict is not None else found


def _rounded(lower: float, upper: float) -> tuple[float, float]:
    """Bounds as one types them: outwards, to a hundredth of their distance from 1."""

    def outwards(bound: float, up: bool) -> float:
        if math.isinf(bound):
            return bound
        distance = abs(bound - 1.0) or 1e-6
        digits = max(0, 2 - math.floor(math.log10(distance)))
        unit = 10.0**digits
        return round((math.ceil(bound * unit) if up else math.floor(bound * unit)) / unit, digits)

    return max(outwards(lower, False), 0.0), outwards(upper, True)


def _recommendation(
    rule: Rule, figures: Figures, config: MismatchConfig, prediction: Prediction | None, more: Sequence[str]
) -> Recommendation:
    name = preset_of(config)
    reasons = [f"{rule.run}: {_figures(figures, rule)}", rule.reason]
    reasons += more
    if prediction is not None:
        reasons.append(
            f"on your data: {prediction.kept:.1%} of the tokens kept, mean weight {figure(prediction.mean_weight)}, "
            f"effective sample size {prediction.ess:.0%}"
        )
    return Recommendation(
        setting=name or _name(rule, config),
        preset=name,
        settings=config.model_dump(mode="json", exclude_unset=True),
        flags={host: flags_for(config, host) for host in HOSTS},
        reasons=tuple(reasons),
        watch=_watch(figures, config, prediction),
    )


def _name(rule: Rule, config: MismatchConfig) -> str:
    """The rule's setting and what was changed: bounds, additions."""
    with no_notes():
        base = preset(rule.preset).replace(**rule.changes)
    parts = [rule.setting]
    if (config.tis, config.rs.criteria) != (base.tis, base.rs.criteria):
        parts.append("bounds from your data")
    if config.rs.max_staleness is not None:
        parts.append(f"max_staleness {config.rs.max_staleness}")
    if config.rs.group != base.rs.group:
        parts.append(f"group {config.rs.group}")
    return ", ".join(parts)


def _figures(figures: Figures, rule: Rule) -> str:
    shown = [f"k3 {figure(figures.k3_kl, 2)} nat a token"]
    if figures.max_length < math.inf:
        shown.append(f"longest response {figures.max_length:,.0f} tokens")
    if rule.kl_length < math.inf:
        shown.append(f"their product {figure(figures.kl_length, 2)}")
    more = {
        "experts": f"{figures.tail:.2%} of the tokens far away",
        "strong": f"effective sample size {'not recorded' if math.isnan(figures.ess) else f'{figures.ess:.0%}'}",
        "drifting": f"{figures.drifting:.1%} of the responses",
        "stale": f"{figures.stale:.0f} versions behind",
        "turns": f"{figure(figures.mean_turns)} turns a response, the longest of {figures.longest_turn:,.0f} tokens",
        "credit": f"advantages within {figures.credit:.0%} of the responses differ",
    }
    return ", ".join([*shown, *([more[rule.name]] if rule.name in more else [])])


def _watch(figures: Figures, config: MismatchConfig, prediction: Prediction | None) -> tuple[str, ...]:
    """What to look at in the first ten steps, with the values to expect."""
    lines = [
        f"{PREFIX}k3_kl near {figure(figures.k3_kl, 2)}; above {figure(GROWN * figures.k3_kl, 2)} something has "
        f"changed (weights that did not arrive, a filter, a temperature)"
    ]
    if prediction is None:
        return tuple(lines)
    if config.weighted:
        of = units_of(config).ess
        lines.append(
            f"{PREFIX}rollout_is_weight_after_mean near {prediction.mean_weight:.3g}; below 0.5 the step shrinks"
        )
        lines.append(
            f"{PREFIX}rollout_is_weight_after_{of}eff_sample_size near {prediction.ess:.2g}; below 0.3 few units lead"
        )
    if config.rejects:
        lines.append(f"{PREFIX}accepted_token_fraction near {prediction.kept:.3g}; below 0.9 widen the bounds")
    return tuple(lines)
