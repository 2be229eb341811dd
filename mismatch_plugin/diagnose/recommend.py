"""Which setting to choose: the rules, as data, and one setting for a batch by them, with what to watch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import dotted_fields_set, get_path, ignore_mismatch_warnings
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.flags import ANY, TITLES, flags_for, has_algorithm, preset_of, saves_the_pass
from mismatch_plugin.diagnose.measure import OLD_SHARE, Figures
from mismatch_plugin.diagnose.normal import FAR_K3, SMALL_K3, UNEXPLAINED
from mismatch_plugin.diagnose.predict import KEPT, Bounds
from mismatch_plugin.diagnose.result import Prediction, Recommendation
from mismatch_plugin.limits import MIN_EFFECTIVE_SAMPLE_SIZE, MIN_MEAN_WEIGHT
from mismatch_plugin.report.presets import quiet_preset
from mismatch_plugin.report.table import figure

CLIPPED_KL = 3e-3
"""Below it, Gaussian noise puts fewer than 1.5 % of the ratios outside PPO's 1 ± 0.2."""
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
GROWN = 2.0
"""k3 that has grown so many times within ten steps says that something has changed."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of "which setting to choose".

    run: the user's run, in words. also: what else must hold of the figures.
    kl: [from, to) of k3, nats per token. length: the longest response at most, trained tokens. kl_length: their product
    at most.
    preset: the settings. changes: what differs from it, as nested settings. reason: why these.
    bounds: level of the bounds on the ratio that the data may give in place of the preset's, "" for none. data_bounds:
    they always do.
    """

    name: str
    run: str
    preset: str
    reason: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    also: Callable[[Figures], bool] = lambda _: True
    kl: tuple[float, float] = (SMALL_K3, FAR_K3)
    length: float = math.inf
    kl_length: float = math.inf
    bounds: str = ""
    data_bounds: bool = False

    def holds(self, figures: Figures) -> bool:
        """Whether this is the row of such a run."""
        inside = self.kl[0] <= figures.k3_kl < self.kl[1] and figures.max_length <= self.length
        longer = figures.kl_length > self.kl_length  # not so where it is 0 times infinity
        return inside and not longer and self.also(figures)

    @property
    def setting(self) -> str:
        """The preset, and the changes as one types them: `seq_is, tis.level turn`."""
        changed = sorted(dotted_fields_set(dict(self.changes)))
        return ", ".join([self.preset, *(f"{path} {get_path(self.changes, path)}" for path in changed)])

    @property
    def config(self) -> MismatchConfig:
        with ignore_mismatch_warnings():
            return quiet_preset(self.preset).replace(**self.changes)


RULES = (
    Rule(
        name="sequence_outliers",
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
        name="moe_routing",
        run="in sync, single tokens far off (a mixture of experts whose router chooses otherwise)",
        preset="token_icepop",
        reason="single tokens are far off, for which a truncated weight would still be its bound: their weight is 0, "
        "all others keep theirs. Of a mixture of experts replay the routing if the host can",
        also=lambda figures: figures.tail > 0 and figures.stale < 1,
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
        kl=(0.0, math.inf),
    ),
    Rule(
        name="one step",
        run="one optimizer step a rollout batch, and the second forward pass is to be saved",
        preset="pg_is",
        reason="the pass is saved and the weights are made anew at every step; there is no trust region, so not with "
        "several mini-batches",
        also=lambda figures: figures.one_step and figures.expensive_pass,
        kl_length=1.0,
    ),
    Rule(
        name="bypass",
        run=f"the second forward pass is to be saved, KL below {CLIPPED_KL:g}, rollouts in sync",
        preset="ppo_is_bypass",
        reason="the pass is saved and the clip kept, which such a mismatch hardly reaches; the first to break when "
        "it grows (lost at two bits in the comparison)",
        also=lambda figures: figures.expensive_pass and not figures.stale,
        kl=(0.0, CLIPPED_KL),
    ),
    Rule(
        name="in sync",
        run="engines of one precision, small mismatch",
        preset="disabled",
        reason="no algorithm differs at such a mismatch: a weight adds variance for nothing. Keep the metrics",
        kl=(0.0, SMALL_K3),
    ),
    Rule(
        name="stale",
        run="rollouts some steps old, asynchronous",
        preset="token_is",
        reason="the clip stays anchored at π_old, the weight covers the lag. In the comparison, where KL is larger, it "
        "gained wherever rollouts were stale. Bypass, whose clip limits the lag itself, ended higher there; it was "
        "lost where weights were rounded, too",
        also=lambda figures: figures.stale >= 1,
    ),
    Rule(
        name="token_advantages",
        run="an advantage for each token",
        preset="prefix_is",
        reason="a token's advantage is about what follows it, so the product of the ratios up to it is its weight. Its "
        "bias is below that of token weights; at a larger KL × length few tokens have much of the weight",
        also=lambda figures: figures.credit >= CREDIT,
        kl_length=0.5,
    ),
    Rule(
        name="short",
        run="short responses, one reward each",
        preset="seq_is",
        reason="the weight of the whole response: unbiased up to its bound while π_θ is π_old, and so short a product "
        "of ratios keeps its variance small",
        length=SHORT,
        kl_length=1.0,
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
    ),
    Rule(
        name="long",
        run="other precision or kernels, any length",
        preset="token_is",
        reason="least variance of all weights, at any length; a product of ratios would spread with the length until "
        "one response has all the weight. Its bias (what came before a token is not reweighted) is small while the "
        "mismatch is",
    ),
    Rule(
        name="no pass",
        run="a trainer without log-probs of π_old (prime-rl), where no row above fits",
        preset="pg_is",
        changes={"tis": {"level": "token"}},
        reason="the weights are made anew at every step; per token their variance does not grow with the length",
        also=lambda figures: figures.one_step and figures.expensive_pass,
        kl=(0.0, FAR_K3),
    ),
)
"""The first that holds, and whose algorithm the trainer can run, is taken."""


class Addition(NamedTuple):
    """What is added to the setting of a rule, whichever it is. flag: what one types. name: of the setting, in `rs`.

    value: of the setting, by the figures and by what is predicted without it; None where the addition does not hold.
    """

    run: str
    flag: str
    reason: str
    name: str
    value: Callable[[Figures, Prediction], Any]


ADDITIONS = (
    Addition(
        f"a few tokens (at most {OLD_SHARE:.0%}) of older weights, {OLD_KL:g} times as far off as the others",
        "`--rs-max-staleness`, the number from `inspect`",
        "they are so few and so far off that they are not worth their variance",
        "max_staleness",
        lambda figures, _: int(figures.fresh) if figures.old_kl >= OLD_KL else None,
    ),
    Addition(
        f"rejected responses in at least {HEAVY:.0%} of the groups (GRPO)",
        "`--rs-group exclude`",
        "a rejected response's reward stays in its group's mean and deviation, and moves the advantages of the "
        "others; without it they are those of the accepted responses",
        "group",
        lambda _, found: "exclude" if (found.groups_changed or 0.0) >= HEAVY else None,
    ),
)
"""Looked at in this order, once the setting is chosen."""


def recommend(
    figures: Figures,
    bounds: Bounds,
    predict: Callable[[MismatchConfig], Prediction],
    accepted: bool,
    host: str = ANY,
) -> Recommendation | None:
    """The setting of the first rule that holds, that the host can run, and whose setting keeps LEAST_KEPT of these
    tokens, by its own bounds or by those from the data.

    accepted: the cause of a mismatch as strong as no sound pair has is known and meant. Else it is to be found, and
    there is no setting; nor where no rule holds.
    """
    if saves_the_pass(host):
        figures = replace(figures, one_step=True, expensive_pass=True)
    for rule in (rule for rule in RULES if rule.holds(figures)):
        if rule.name == "strong" and not accepted:
            return None
        config, name, reasons = rule.config, rule.setting, [rule.reason]
        if not has_algorithm(host, config):
            continue
        found = predict(config)
        if rule.data_bounds or found.kept < LEAST_KEPT:
            if rule.bounds not in bounds:
                continue
            lower, upper = bounds[rule.bounds]
            rs = {"criteria": [f"sequence_mean:ratio:{lower!r}:{upper!r}"]}
            tis = {"lower_bound": lower, "upper_bound": upper}
            reasons.append(
                f"bounds {lower:g} and {upper:g} on the {rule.bounds} ratio keep {KEPT:.0%} of your data; the preset's "
                f"own would keep {found.kept:.0%}"
            )
            with ignore_mismatch_warnings():
                config = config.replace(**({"rs": rs} if rule.bounds == "geometric" else {"tis": tis}))
            found = predict(config)
            if found.kept < LEAST_KEPT:
                continue
            name += ", bounds from your data"
        for item in ADDITIONS:
            if (value := item.value(figures, found)) is None:
                continue
            try:
                with ignore_mismatch_warnings():
                    changed = config.replace(rs={item.name: value})
            except ValueError:  # algorithms 1 and 3 judge π_θ, too late for groups
                continue
            if (more := predict(changed)).kept >= LEAST_KEPT:
                config, found = changed, more
                name += f", {item.name} {value}"
                reasons.append(f"{item.run}: {item.reason}")
        size = f"k3 {figure(figures.k3_kl, 2)} nats per token, longest response {figures.max_length:,.0f} tokens"
        predicted = (
            f"on your data: {found.kept:.1%} of the tokens kept, mean weight {figure(found.mean_weight)}, "
            f"effective sample size {found.ess:.1%}"
        )
        preset = preset_of(config)
        return Recommendation(
            setting=preset or name,
            preset=preset,
            settings=config.model_dump(mode="json", exclude_unset=True),
            flags={host: flags_for(config, host) for host in TITLES},
            reasons=(f"{rule.run}: {size}", *reasons, predicted),
            watch=tuple(_watch(figures, config, found)),
        )
    return None


def _watch(figures: Figures, config: MismatchConfig, found: Prediction) -> Iterator[str]:
    """What to look at in the first ten steps, with the values to expect."""
    grown = max(GROWN * figures.k3_kl, SMALL_K3 / 10)  # rounding may double
    yield (
        f"{PREFIX}k3_kl near {figure(figures.k3_kl, 2)}; above {figure(grown, 2)} something has "
        f"changed (weights that did not arrive, a filter, a temperature)"
    )
    if config.weighted:
        after = f"{PREFIX}rollout_is_weight_after_"
        yield f"{after}mean near {found.mean_weight:.3g}; below {MIN_MEAN_WEIGHT:g} the step shrinks"
        bar = MIN_EFFECTIVE_SAMPLE_SIZE
        yield f"{after}{config.unit.ess}eff_sample_size near {found.ess:.2g}; below {bar:g} few units lead"
    if config.rejects:
        yield f"{PREFIX}accepted_token_fraction near {found.kept:.3g}; below {LEAST_KEPT:g} widen the bounds"
