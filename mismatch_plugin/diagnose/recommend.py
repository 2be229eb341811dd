"""Which setting to choose: the rules, as data, and one setting for a batch by them, with what to watch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import dotted_fields_set, get_path, ignore_mismatch_warnings
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.flags import HOSTS, config_of, flags_for, preset_of
from mismatch_plugin.diagnose.levels import Bounds
from mismatch_plugin.diagnose.measure import OLD_SHARE, Figures
from mismatch_plugin.diagnose.normal import FAR_K3, SMALL_K3, UNEXPLAINED
from mismatch_plugin.diagnose.result import Prediction, Recommendation
from mismatch_plugin.limits import MIN_EFFECTIVE_SAMPLE_SIZE
from mismatch_plugin.report.presets import quiet_preset
from mismatch_plugin.report.table import NOTHING, Table, figure

CLIPPED_KL = 3e-3
"""Below it, Gaussian noise puts fewer than 1.5 % of the ratios outside PPO's 1 ± 0.2."""
TAIL, MOST_TAIL = 1e-4, 0.05
"""Share of tokens far away (see Figures.tail) from which on, and up to which, they are a population of their own."""
SHORT = 100
"""Trained tokens of the longest response."""
OLD_KL = 4.0
"""Tokens of the oldest weights with so many times the k3 of the others are not worth keeping."""
HEAVY = 0.1
"""Share of groups whose baseline rejected responses move."""
CREDIT = 0.5
"""Share of responses from which on their tokens have advantages of their own."""
LEAST_KEPT = 0.9
"""Of the user's own tokens, by the prediction."""
SHARES = ("99%", "99.9%")
"""Of the bounds from the data: the tightest that is there is taken."""
GROWN = 2.0
"""k3 that has grown so many times within ten steps says that something has changed."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of "which setting to choose".

    run: the user's run, in words. also: what else must hold of the figures.
    kl: [from, to) of k3, nats per token. length: the longest response at most, trained tokens. kl_length: their product
    at most.
    preset: the settings. changes: what differs from it, as nested settings. reason: why these. keeps: share of the
    tokens that they leave in the loss, at least.
    bounds: level of the bounds on the ratio that the data may give in place of the preset's, "" for none. data_bounds:
    they always do.
    """

    name: str
    run: str
    preset: str
    reason: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    also: Callable[[Figures], bool] = lambda _: True
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

    @property
    def setting(self) -> str:
        """The preset, and the changes as one types them: `seq_is, tis.level turn`."""
        changed = sorted(dotted_fields_set(dict(self.changes)))
        return ", ".join([self.preset, *(f"{path} {get_path(self.changes, path)}" for path in changed)])

    @property
    def config(self) -> MismatchConfig:
        """The settings."""
        with ignore_mismatch_warnings():
            return quiet_preset(self.preset).replace(**self.changes)

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
        kl=(0.0, FAR_K3),
        bounds="geometric",
        data_bounds=True,
    ),
    Rule(
        name="experts",
        run="in sync, single tokens far off (a mixture of experts whose router chooses otherwise)",
        preset="token_icepop",
        reason="single tokens are far off, for which a truncated weight would still be its bound: their weight is 0, "
        "all others keep theirs. Of a mixture of experts replay the routing if the host can",
        also=lambda figures: TAIL <= figures.tail <= MOST_TAIL and figures.stale < 1,
        kl=(0.0, FAR_K3),
        bounds="token",
    ),
    Rule(
        name="strong",
        run=f"strong: KL from {FAR_K3:g} or ESS below {MIN_EFFECTIVE_SAMPLE_SIZE:g}",
        preset="token_is",
        reason=f"only where it is meant (--accept {UNEXPLAINED}): token weights bound the gradient and reject nothing. "
        "Else inspect recommends nothing, since no weight repairs a wrong temperature, a filter or old weights",
        also=lambda figures: figures.k3_kl >= FAR_K3 or figures.ess < MIN_EFFECTIVE_SAMPLE_SIZE,
        keeps=1.0,
    ),
    Rule(
        name="one step",
        run="one optimizer step a rollout batch, and the second forward pass is expensive",
        preset="pg_is",
        reason="the pass is saved and the weights are made anew at every step; there is no trust region, so not with "
        "several mini-batches",
        also=lambda figures: figures.one_step and figures.expensive_pass,
        kl=(SMALL_K3, FAR_K3),
        kl_length=1.0,
        keeps=1.0,
    ),
    Rule(
        name="saved pass",
        run="the second forward pass is expensive, small mismatch, rollouts in sync",
        preset="ppo_is_bypass",
        reason="the pass is saved and the clip kept, which so small a mismatch hardly reaches; the first to break when "
        "it grows (lost at two bits in the comparison)",
        also=lambda figures: figures.expensive_pass and not figures.stale,
        kl=(0.0, CLIPPED_KL),
        keeps=1.0,
    ),
    Rule(
        name="in sync",
        run="engines of one precision, small mismatch",
        preset="disabled",
        reason="no algorithm differs at such a mismatch: a weight adds variance for nothing. Keep the metrics",
        kl=(0.0, SMALL_K3),
        keeps=1.0,
    ),
    Rule(
        name="stale",
        run="rollouts some steps old, asynchronous",
        preset="token_is",
        reason="the clip stays anchored at π_old, the weight covers the lag. In the comparison, where KL is larger, it "
        "gained wherever rollouts were stale. Bypass, whose clip limits the lag itself, ended higher there; it was "
        "lost where weights were rounded, too",
        also=lambda figures: figures.stale >= 1,
        kl=(SMALL_K3, FAR_K3),
        keeps=1.0,
    ),
    Rule(
        name="credit",
        run="an advantage for each token",
        preset="prefix_is",
        reason="a token's advantage is about what follows it, so the product of the ratios up to it is its weight. Its "
        "bias is below that of token weights; at a larger KL × length few tokens have much of the weight",
        also=lambda figures: figures.credit >= CREDIT,
        kl=(SMALL_K3, FAR_K3),
        kl_length=0.5,
        keeps=1.0,
    ),
    Rule(
        name="short",
        run="short responses, one reward each",
        preset="seq_is",
        reason="the weight of the whole response: unbiased up to its bound while π_θ is π_old, and so short a product "
        "of ratios keeps its variance small",
        kl=(SMALL_K3, FAR_K3),
        length=SHORT,
        kl_length=1.0,
        keeps=1.0,
    ),
    Rule(
        name="turns",
        run="several short turns, too long together for a product of ratios",
        preset="seq_is",
        changes={"tis": {"level": "turn"}},
        reason="the weight of a turn is a product over its own tokens: its variance stays small where that of the "
        "product over all turns does not. Exact where turns are contexts of their own; else what earlier turns change "
        "is not reweighted",
        also=lambda figures: figures.mean_turns >= 2 and figures.kl_turn <= 1.0 < figures.kl_length,
        kl=(SMALL_K3, FAR_K3),
        keeps=1.0,
    ),
    Rule(
        name="long",
        run="all others: other precision or kernels, any length",
        preset="token_is",
        reason="least variance of all weights, at any length; a product of ratios would spread with the length until "
        "one response has all the weight. Its bias (what came before a token is not reweighted) is small while the "
        "mismatch is",
        kl=(SMALL_K3, FAR_K3),
        keeps=1.0,
    ),
)
"""The first that holds is taken."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What is added to the setting of a rule, whichever it is. flag: what one types.

    holds: of the figures and of what is predicted for the setting; None where nothing is. changes: nested settings.
    """

    name: str
    run: str
    flag: str
    reason: str
    holds: Callable[[Figures, Prediction | None], bool]
    changes: Callable[[Figures], dict[str, Any]]


ADDITIONS = (
    Addition(
        name="too old",
        run=f"a few tokens (at most {OLD_SHARE:.0%}) of older weights, {OLD_KL:g} times as far off as the others",
        flag="`--rs-max-staleness`, the number from `inspect`",
        reason="they are so few and so far off that they are not worth their variance",
        holds=lambda figures, _: math.isfinite(figures.fresh) and figures.old_kl >= OLD_KL,
        changes=lambda figures: {"rs": {"max_staleness": int(figures.fresh)}},
    ),
    Addition(
        name="groups",
        run=f"rejected responses in at least {HEAVY:.0%} of the groups (GRPO)",
        flag="`--rs-group exclude`",
        reason="a rejected response's reward stays in its group's mean and deviation, and moves the advantages of the "
        "others; without it they are those of the accepted responses",
        holds=lambda _, found: found is not None and (found.groups_changed or 0.0) >= HEAVY,
        changes=lambda _: {"rs": {"group": "exclude"}},
    ),
)
"""Looked at in this order, once the setting is chosen."""


def recommend(
    figures: Figures,
    predictions: Sequence[Prediction] = (),
    bounds: Bounds | None = None,
    *,
    accepted: bool = False,
    predict: Callable[[MismatchConfig], Prediction] | None = None,
) -> Recommendation | None:
    """The setting of the first rule that holds and whose setting keeps LEAST_KEPT of these tokens.

    A setting that may reject is taken only with a prediction that says so (from `predictions`, found by its settings,
    or by `predict`), or with bounds from the data in place of its own. accepted: a mismatch as strong as no sound pair
    has is meant. Else it has a cause to be found, and there is no setting; nor where no rule holds.
    """

    def predicted(config: MismatchConfig) -> Prediction | None:
        found = next((prediction for prediction in predictions if config_of(prediction.settings) == config), None)
        return predict(config) if found is None and predict is not None else found

    for rule in (rule for rule in RULES if rule.holds(figures)):
        if rule.name == "strong" and not accepted:
            return None
        if (found := _setting(rule, bounds or {}, predicted)) is None:
            continue
        config, prediction, reasons = found
        for addition in ADDITIONS:
            if addition.holds(figures, prediction):
                try:
                    with ignore_mismatch_warnings():
                        changed = config.replace(**addition.changes(figures))
                except ValueError:  # algorithms 1 and 3 judge π_θ, too late for groups
                    continue
                more = predicted(changed)
                if more is not None and more.kept >= LEAST_KEPT:
                    config, prediction = changed, more
                    reasons.append(f"{addition.run}: {addition.reason}")
        return _recommendation(rule, figures, config, prediction, reasons)
    return None


def _setting(
    rule: Rule, bounds: Bounds, predicted: Callable[[MismatchConfig], Prediction | None]
) -> tuple[MismatchConfig, Prediction | None, list[str]] | None:
    """(settings, prediction, sentences on bounds from the data) of a rule; None where too little is kept."""
    config = rule.config
    prediction = predicted(config)
    if not rule.data_bounds and (prediction.kept >= LEAST_KEPT if prediction else not config.rejects):
        return config, prediction, []
    given = bounds.get(rule.bounds, {})
    share = next((share for share in SHARES if share in given), None)
    if share is None:
        return None
    lower, upper = _rounded(*given[share])
    with ignore_mismatch_warnings():
        changed = config.replace(**rule.with_bounds(lower, upper))
    new = predicted(changed)
    if new is not None and new.kept < LEAST_KEPT:
        return None
    own = f"; the preset's own would keep {prediction.kept:.0%}" if prediction is not None else ""
    why = f"bounds {lower:g} and {upper:g} on the {rule.bounds} ratio keep {share.replace('%', ' %')} of your data{own}"
    return changed, new, [why]


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
    reasons = [f"{rule.run}: {_figures(figures, rule)}", rule.reason, *more]
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
    base = rule.config
    parts = [rule.setting]
    if (config.tis, config.rs.criteria) != (base.tis, base.rs.criteria):
        parts.append("bounds from your data")
    if config.rs.max_staleness is not None:
        parts.append(f"max_staleness {config.rs.max_staleness}")
    if config.rs.group != base.rs.group:
        parts.append(f"group {config.rs.group}")
    return ", ".join(parts)


def _figures(figures: Figures, rule: Rule) -> str:
    shown = [f"k3 {figure(figures.k3_kl, 2)} nat per token"]
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
        of = config.unit.ess
        lines.append(
            f"{PREFIX}rollout_is_weight_after_mean near {prediction.mean_weight:.3g}; below 0.5 the step shrinks"
        )
        lines.append(
            f"{PREFIX}rollout_is_weight_after_{of}eff_sample_size near {prediction.ess:.2g}; below 0.3 few units lead"
        )
    if config.rejects:
        lines.append(f"{PREFIX}accepted_token_fraction near {prediction.kept:.3g}; below 0.9 widen the bounds")
    return tuple(lines)


def rules_table() -> Table:
    """Which setting to choose."""
    rows = [
        (rule.run, _kl(rule), _length(rule), f"`{rule.preset}`{_more(rule)}",
         "all" if rule.keeps == 1.0 else f"≥ {rule.keeps:.0%}", rule.reason)
        for rule in RULES
    ]  # fmt: skip
    added = [(f"in addition: {item.run}", "any", "any", item.flag, NOTHING, item.reason) for item in ADDITIONS]
    headers = ("your run", "KL, nats per token", "longest response", "setting", "tokens kept", "why")
    notes = (
        "The first row that fits is taken, by k3 as the estimate of KL. mismatch-plugin inspect does it, predicts what "
        "the setting keeps of your own tokens, and takes bounds from them, or the next row, where that is below 90 %.",
        "For every row the tests make data in its range, and fail where less is kept or another is taken.",
    )
    return Table("Which setting to choose", headers, (*rows, *added), notes=notes)


def _more(rule: Rule) -> str:
    return f"{rule.setting.removeprefix(rule.preset)}{', bounds from `inspect`' * rule.data_bounds}"


def _kl(rule: Rule) -> str:
    low, high = rule.kl
    if low == 0.0:
        return "any" if high == math.inf else f"below {high:g}"
    return f"{low:g} to {high:g}"


def _length(rule: Rule) -> str:
    parts = [f"to {rule.length:g} tokens"] if rule.length < math.inf else []
    parts += [f"KL × length to {rule.kl_length:g}"] if rule.kl_length < math.inf else []
    return ", ".join(parts) or "any"
