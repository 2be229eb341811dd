"""Combinations that mean nothing, and values outside the range in which they are known to work."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import ValidationInfo

from mismatch_plugin.config.fields import spell, value_and_default
from mismatch_plugin.config.sections import EPS_CLIP
from mismatch_plugin.config.settings import Settings
from mismatch_plugin.config.units import PRODUCTS
from mismatch_plugin.limits import GAMMA_POSITIVE, MIN_EFFECTIVE_SAMPLE_SIZE, MIN_MEAN_WEIGHT, SAFETY_BOUND, USUAL_KL


def notes_on(config: Settings, info: ValidationInfo) -> list[str]:
    """Sentences on settings that have no effect or are outside their known range.

    The validation context's `by_hand` holds the dotted paths that a person asked for; without it, whatever is not at
    its default counts as asked for.
    Raises: ValueError for the first setting that was asked for and has no effect.
    """
    by_hand, typed = (info.context or {}).get("by_hand"), (info.context or {}).get("typed", ())
    notes: dict[str, str] = {}
    for path, rest in without_effect(config):
        value, default = value_and_default(config, path)
        asked = value is not None and value is not False  # switching off what is off is no mistake
        # A flag that was typed is asked for; in a file, which may list every setting, what differs from its default.
        refused = value != default if by_hand is None or path not in typed else asked
        refused = refused and (by_hand is None or path in by_hand)
        if refused or value != default:
            shown = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
            sentence = spell(f"<{path}>{shown} {rest}", info, path)
            if refused:
                raise ValueError(sentence)
            notes.setdefault(path, sentence)
    return [*notes.values(), *outside_known_range(config)]


def without_effect(config: Settings) -> Iterable[tuple[str, str]]:
    """(path, what follows its name in a sentence) of every setting that this combination would not use.

    `<path>` in the sentence stands for a setting: see `spell`.
    """
    bounds = ("lower_bound", "upper_bound", "lower_bound_positive", "upper_bound_positive", "bound_growth")
    tis = ("mode", *bounds, "batch_normalize", "batch_normalize_scope")
    if not config.use_tis:
        for name in ("level", *tis):
            yield f"tis.{name}", "changes no weight without <use_tis>: add <use_tis>, or leave it out."
    elif config.tis.level == "none":
        for name in tis:
            yield f"tis.{name}", "changes nothing at <tis.level> none (every weight is 1): leave it out."
    else:
        for name in ("lower_bound", "lower_bound_positive") if config.tis.mode == "truncate" else ():
            yield (
                f"tis.{name}",
                "bounds no weight under <tis.mode> truncate (it only sets a metric's fraction): choose clip or mask, "
                "or leave it out.",
            )
        for name in bounds if config.tis.mode == "gamma" else ():
            yield (
                f"tis.{name}",
                "bounds no weight under <tis.mode> gamma, whose weights are at most 1.25: leave it out.",
            )
        if not config.unit.multiplies:
            yield (
                "tis.bound_growth",
                f"needs a <tis.level> whose ratio is a product ({', '.join(PRODUCTS)}): choose one.",
            )
        if not config.tis.batch_normalize:
            yield (
                "tis.batch_normalize_scope",
                "changes nothing without <tis.batch_normalize>: add it, or leave the scope out.",
            )
    if config.algorithm == 3:
        yield "objective", "changes nothing in algorithm 3, which is REINFORCE: leave it out."
    if config.policy_objective == "reinforce":
        where = "in algorithm 3" if config.algorithm == 3 else "under <objective> reinforce"
        for name in ("eps_clip_low", "eps_clip_high", "dual_clip"):
            yield f"ppo.{name}", f"changes nothing {where} (REINFORCE has no clip): leave it out."
    if config.policy_objective == "cispo":
        yield "ppo.dual_clip", "changes nothing under <objective> cispo, whose ratio has no gradient: leave it out."
    if config.policy_objective == "gmpo":
        yield "ppo.dual_clip", "changes nothing under <objective> gmpo, whose bounds are on log-ratios: leave it out."
    for name in ("eps_clip_low", "eps_clip_high", "dual_clip") if config.policy_objective == "sapo" else ():
        yield (
            f"ppo.{name}",
            "changes nothing under <objective> sapo, which has a gate in place of a clip: leave it out.",
        )
    for name in ("tau_positive", "tau_negative") if config.policy_objective != "sapo" else ():
        yield f"ppo.{name}", "changes nothing without <objective> sapo: choose it, or leave this out."
    if config.aggregation != "seq-mean-token-sum":
        yield "length_norm", "needs <aggregation> seq-mean-token-sum: choose it, or leave the norm out."
    if not config.terms.kl_coef:
        for name in ("kl_type", "kl_importance_weighted"):
            yield f"terms.{name}", "changes nothing without <terms.kl_coef>: set it, or leave this out."
    if not config.weighted:
        yield "terms.kl_importance_weighted", "needs importance weights: add <use_tis>, or leave it out."
    if not config.terms.rollout_kl_coef:
        for name in ("rollout_kl_type", "rollout_kl_on"):
            yield f"terms.{name}", "changes nothing without <terms.rollout_kl_coef>: set it, or leave this out."
    if not config.rejects:
        yield "terms.rollout_kl_on", "needs something that rejects tokens: add a criterion, or leave it out."
        yield "rs.group", "needs something that rejects responses: add a criterion, or leave it out."
    if not config.judges:
        yield "rs.policy", "needs a criterion or a veto to judge: add one, or leave it out."
    if config.use_rollout_log_probs and config.rs.policy == "current":
        yield "rs.policy", f"changes nothing in algorithm {config.algorithm}, which judges π_θ anyway: leave it out."
    if config.rs.group != "drop":
        yield "rs.min_group", "changes nothing without <rs.group> drop: choose it, or leave the number out."
    if config.metrics == "off":
        yield "gate_kl", "compares k3_kl, which <metrics> off does not form: choose basic, or leave the gate out."
    if not config.weighted and not config.judges and config.rs.max_staleness is None:
        yield "dry_run", "has nothing to try: add <use_tis>, a criterion or a veto, or leave it out."


def contradictions(config: Settings) -> Iterable[tuple[str, str]]:
    """(path, sentence) of settings that exclude each other, whoever gave them."""
    if config.tis.level == "none" and config.algorithm != 3:
        yield (
            "tis.level",
            "<tis.level> none is REINFORCE with rejection only: it needs <use_rollout_log_probs> and <use_tis>: set "
            "both, or choose another level.",
        )
    if (
        config.weighted
        and config.tis.mode == "gamma"
        and not (config.algorithm == 3 and config.tis.level == "sequence")
    ):
        yield (
            "tis.mode",
            "<tis.mode> gamma weighs responses by π_θ/π_rollout: it needs <use_rollout_log_probs>, <use_tis> and "
            "<tis.level> sequence: set them, or choose another mode.",
        )
    if config.tis.growth and config.tis.differs_by_sign:
        yield (
            "tis.bound_growth",
            "<tis.bound_growth> grows one pair of bounds: leave it out, or the bounds for A ≥ 0.",
        )
    if config.rs.group == "drop" and config.rs.min_group is None:
        yield (
            "rs.group",
            "<rs.group> drop needs <rs.min_group>, the accepted responses that a group must have: give it.",
        )
    if config.rs.group != "keep":
        first = f"<rs.group> {config.rs.group} needs to know what is accepted before advantages are computed"
        if config.use_rollout_log_probs:
            yield "rs.group", f"{first}, and algorithm {config.algorithm} judges π_θ: choose keep, or algorithm 0 or 2."
        if config.rejects_on_current_policy:
            yield "rs.group", f"{first}, and <rs.policy> current judges π_θ: choose keep, or <rs.policy> auto."
        if config.needs_advantages:
            names = ", ".join(config.advantage_readers)
            yield "rs.group", f"{first}, and {names} needs these: choose keep, or leave that out."
        for criterion in config.budgets:
            yield "rs.group", f"{first}, and the budget of {criterion.name} moves at every step: choose keep."


def outside_known_range(config: Settings) -> list[str]:
    """Sentences for settings that are legal and used, but not where they are known to work."""
    notes = []
    geometric = "the geometric mean of a response moves by hundredths of a percent: within 0.01 to 0.1 % of 1 is usual"
    if config.weighted and config.unit.aggregate == "mean" and config.tis.mode == "mask" and config.tis.upper > 1.1:
        notes.append(f"tis.upper_bound {config.tis.upper:g} at geometric level masks hardly anything: {geometric}.")
    for criterion in config.criteria:
        upper = criterion.upper_bound
        if criterion.unit.aggregate == "mean" and criterion.in_log_space and 1.1 < (upper or 0.0) < math.inf:
            notes.append(
                f"rs criterion {criterion.name} with upper bound {upper:g} rejects hardly anything: {geometric}."
            )
        if criterion.rejects_nothing:
            notes.append(f"rs criterion {criterion.name} rejects nothing: no value is outside its bounds.")
    trusted = any(criterion.condition == "away" for criterion in config.criteria)  # DPPO, whose weights are a token's
    if config.algorithm == 3 and config.weighted and config.unit.per_token and not trusted:
        notes.append("algorithm 3 at token level is biased: the rollout-correction guide has it at sequence level.")
    if config.policy_objective in ("gspo", "sapo", "gmpo") and config.aggregation != "seq-mean-token-mean":
        notes.append(
            f"objective {config.objective} with aggregation {config.aggregation} (where the host does not decide "
            f"that): the paper's loss is seq-mean-token-mean, in which every response counts the same."
        )
    if config.policy_objective == "gspo" and config.ppo.eps_clip_high > 0.01:
        notes.append(
            f"objective gspo with ε {config.ppo.eps_clip_low:g} and {config.ppo.eps_clip_high:g} clips hardly "
            f"anything: {geometric} (the paper has 3e-4 and 4e-4)."
        )
    usual = EPS_CLIP["gmpo"][0]
    if config.policy_objective == "gmpo" and min(config.ppo.eps_clip_low, config.ppo.eps_clip_high) < usual:
        notes.append(
            f"objective gmpo with ε {config.ppo.eps_clip_low:g} and {config.ppo.eps_clip_high:g} clips earlier than "
            f"the paper, which has {usual:g} for both: a host that owns ε (slime: --eps-clip {usual:g}) has to be told."
        )
    if config.policy_objective == "cispo" and config.ppo.eps_clip_low < 1.0:
        notes.append(
            f"objective cispo with lower ε {config.ppo.eps_clip_low:g} also clips small ratios: the paper has no lower "
            f"bound (ε 1)."
        )
    if config.algorithm == 1 and config.objective == "reinforce":
        notes.append(
            "objective reinforce in algorithm 1 has no ratio, so that nothing corrects the mismatch but rejection: add "
            "use_tis (algorithm 3) for weights."
        )
    if config.algorithm == 3 and not config.weighted and not config.judges:
        notes.append(
            "algorithm 3 without weights and without rejection is plain REINFORCE: nothing corrects the mismatch. "
            "Choose a tis.level (verl: rollout_is), or add a criterion or a veto (verl: rollout_rs)."
        )
    return notes


def bound_warnings(config: Settings, response_length: object = None) -> list[str]:
    """Sentences on bounds of weights that do harm: an upper one that is none, or hides a smaller step, and, where the
    tokens of a response are known, one that cannot hold the product over them (a turn counts as a response).

    response_length: a host's value; what is no number, such as a reference to another key, is not known."""
    tis = config.tis
    if not config.weighted:
        return []
    fault = tis.upper_bound_fault
    notes = [f"--tis-upper-bound {tis.upper_bound:g}: {fault}. 2 is usual."] if fault else []
    if tis.unit.multiplies and isinstance(response_length, int) and response_length > 0:
        mean, ess = truncated_product(config, response_length)
        if mean < MIN_MEAN_WEIGHT or ess < MIN_EFFECTIVE_SAMPLE_SIZE:
            bound = f"{tis.upper_bound:g}" + (f"^(n^{tis.bound_growth:g})" if tis.bound_growth else "")
            bound = "of mode gamma" if tis.mode == "gamma" else f"bounded by {bound}"
            notes.append(
                f"--tis-level {tis.level} over {response_length} tokens: at KL {USUAL_KL:g} weights {bound} "
                f"have mean {mean:.2g}, ESS {ess:.1%}. Choose token level."
            )
    return notes


def truncated_product(config: Settings, length: int, kl: float = USUAL_KL) -> tuple[float, float]:
    """(mean, effective sample size) of the weights where ρ is a product over `length` tokens.

    With independent tokens log ρ is Normal(−s, 2s), s = length · kl, so that E ρ = 1. With Φ its distribution, shifted
    by 2ks: E ρ^k between two bounds is e^(k(k−1)s) · (Φ(log hi) − Φ(log lo)). Truncate and clip add hi^k times the
    share above, clip lo^k times that below. ESS = (E w)² / E w². Prefix level: both moments are means over the tokens.
    Mode gamma: summed over log ρ, for A ≥ 0.
    """
    tis = config.tis

    def moment(k: int, tokens: int) -> float:
        s, growth = min(tokens * kl, 300.0), tokens**tis.bound_growth  # e^600 is finite, and by then no weight is left
        if tis.mode == "gamma":
            total, (power, decay) = 0.0, GAMMA_POSITIVE
            for z in (step / 50.0 for step in range(-400, 401)):
                log_ratio = -s + math.sqrt(2.0 * s) * z
                log_weight = decay + power * log_ratio - decay * math.exp(min(log_ratio, SAFETY_BOUND))
                total += math.exp(k * log_weight - z * z / 2.0)
            return total / (50.0 * math.sqrt(2.0 * math.pi))
        lower = tis.lower if tis.mode != "truncate" else 0.0
        hi = min(math.log(tis.upper) * growth, SAFETY_BOUND)
        lo = max(math.log(lower) * growth, -SAFETY_BOUND) if lower else -SAFETY_BOUND

        def below(bound: float, shift: float = 0.0) -> float:
            return 0.5 * math.erfc((shift - s - bound) / math.sqrt(4.0 * s))

        total = math.exp(k * (k - 1) * s) * (below(hi, 2.0 * k * s) - below(lo, 2.0 * k * s))
        if tis.mode != "mask":
            total += math.exp(k * hi) * (1.0 - below(hi))
        if tis.mode == "clip":
            total += math.exp(k * lo) * below(lo)
        return total

    lengths = range(1, length + 1, 1 + length // 256) if tis.unit.needs_second_reduction else [length]
    first, second = (sum(moment(k, n) for n in lengths) / len(lengths) for k in (1, 2))
    return first, first * first / second if second else 0.0
