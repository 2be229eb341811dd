"""Combinations that mean nothing, and values outside the range in which they are known to work."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from mismatch_plugin.config.fields import flag_names, value_and_default
from mismatch_plugin.config.sections import EPS_CLIP
from mismatch_plugin.config.settings import Settings
from mismatch_plugin.config.units import PRODUCTS
from mismatch_plugin.limits import SAFETY_BOUND, USUAL_KL, VANISHING_LOG_WEIGHT


def notes_on(config: Settings, by_hand: Collection[str] | None, typed: Collection[str] = ()) -> list[str]:
    """Sentences on settings that have no effect or are outside their known range.

    by_hand: the dotted paths that a person asked for; None: whatever is not at its default. typed: those of them that
    were flags, which are asked for also at their default, and are spelled as flags.
    Raises: ValueError for settings that exclude each other, and for one that was asked for and has no effect.
    """
    for holds, sentence in contradictions(config):
        if holds:
            raise ValueError(f"{spelled(sentence, typed)}.")
    notes: dict[str, str] = {}
    for path, why in without_effect(config):
        value, default = value_and_default(config, path)
        off = value is None or value is False  # to switch off what is off is no mistake
        asked = not off if path in typed else value != default
        shown = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
        fix = " or set ".join([f"leave <{path}> out", *re.findall(r"<[a-z_.]+>", why)])
        sentence = spelled(f"<{path}>{shown} {why}: {fix}.", typed if path in typed else ())
        if asked and (by_hand is None or path in by_hand):
            raise ValueError(sentence)
        if value != default:
            notes.setdefault(path, sentence)
    return [*notes.values(), *(sentence for holds, sentence in outside_known_range(config) if holds)]


def spelled(sentence: str, typed: Collection[str]) -> str:
    """Every `<dotted.path>` of the sentence as its flag where one of them was typed as a flag, else as it is."""
    as_flags = any(f"<{path}>" in sentence for path in typed)
    flags = flag_names(Settings) if as_flags else {}
    return re.sub(r"<([a-z_.]+)>", lambda match: flags.get(match[1], match[1]), sentence)


def without_effect(config: Settings) -> list[tuple[str, str]]:
    """(path, why) of every setting that this combination would not use."""
    weighted, objective, mode = config.weighted, config.policy_objective, config.tis.mode
    reinforce = "in algorithm 3" if config.algorithm == 3 else "under <objective> reinforce"
    clip = "ppo.eps_clip_low ppo.eps_clip_high ppo.dual_clip"
    bounds = "tis.lower_bound tis.upper_bound tis.lower_bound_positive tis.upper_bound_positive tis.bound_growth"
    weights = f"tis.mode {bounds} tis.batch_normalize tis.batch_normalize_scope"
    # fmt: off
    rules = (
        (not config.use_tis, f"tis.level {weights}", "changes no weight without <use_tis>"),
        (config.use_tis and not weighted, weights, "changes nothing at <tis.level> none (every weight is 1)"),
        (weighted and mode == "truncate", "tis.lower_bound tis.lower_bound_positive",
            "bounds no weight under <tis.mode> truncate (it only sets a metric's fraction)"),
        (weighted and mode == "gamma", bounds,
            "bounds no weight under <tis.mode> gamma, whose weights are at most 1.25"),
        (weighted and not config.unit.multiplies, "tis.bound_growth",
            f"needs a <tis.level> whose ratio is a product ({', '.join(PRODUCTS)})"),
        (weighted and not config.tis.batch_normalize, "tis.batch_normalize_scope",
            "changes nothing without <tis.batch_normalize>"),
        (config.algorithm == 3, "objective", "changes nothing in algorithm 3, which is REINFORCE"),
        (objective == "reinforce", clip, f"changes nothing {reinforce} (REINFORCE has no clip)"),
        (objective == "sapo", clip, "changes nothing under <objective> sapo, which has a gate in place of a clip"),
        (objective in ("cispo", "gmpo"), "ppo.dual_clip", f"changes nothing under <objective> {objective}"),
        (objective != "sapo", "ppo.tau_positive ppo.tau_negative", "changes nothing without <objective> sapo"),
        (config.aggregation != "seq-mean-token-sum", "length_norm", "needs <aggregation> seq-mean-token-sum"),
        (not config.terms.kl_coef, "terms.kl_type terms.kl_importance_weighted",
            "changes nothing without <terms.kl_coef>"),
        (not weighted, "terms.kl_importance_weighted", "needs importance weights (<use_tis>)"),
        (not config.terms.rollout_kl_coef, "terms.rollout_kl_type terms.rollout_kl_on",
            "changes nothing without <terms.rollout_kl_coef>"),
        (not config.rejects, "terms.rollout_kl_on rs.group", "needs something that rejects, such as <rs.criteria>"),
        (not config.judges, "rs.policy", "needs <rs.criteria> or <rs.veto_threshold> to judge"),
        (config.use_rollout_log_probs and config.rs.policy == "current", "rs.policy",
            f"changes nothing in algorithm {config.algorithm}, which judges π_θ anyway"),
        (config.rs.group != "drop", "rs.min_group", "changes nothing without <rs.group> drop"),
        (config.metrics == "off", "gate_kl", "compares k3_kl, which <metrics> off does not form"),
        (not weighted and not config.judges and config.rs.max_staleness is None, "dry_run",
            "has nothing to try: there is no <use_tis>, criterion or veto")
    )
    # fmt: on
    return [(path, why) for holds, paths, why in rules if holds for path in paths.split()]


def contradictions(config: Settings) -> list[tuple[bool, str]]:
    """(holds, sentence) of settings that exclude each other, whoever gave them."""
    tis, rs = config.tis, config.rs
    positive_lower, positive_upper = tis.positive
    smallest = math.exp(-SAFETY_BOUND)
    early = f"<rs.group> {rs.group} needs to know what is accepted before advantages are computed, and"
    grouped = rs.group != "keep"
    gamma_lacks = ["<use_rollout_log_probs>"] * (not config.use_rollout_log_probs)
    gamma_lacks += ["<tis.level> sequence"] * (tis.level != "sequence")
    # fmt: off
    return [
        (tis.upper_bound < smallest,
            f"<tis.upper_bound> {tis.upper_bound:g} is below e^-20 = 2.1e-9, the smallest ratio that is told apart: "
            f"raise it (2.0 is usual)"),
        (tis.lower > tis.upper,
            f"<tis.lower_bound> {tis.lower:g} is above <tis.upper_bound> {tis.upper:g}: lower it, or raise the other"),
        (tis.mode != "truncate" and tis.lower_bound is None and tis.upper < 1.0,
            f"<tis.upper_bound> {tis.upper:g} is below the lower bound that <tis.mode> {tis.mode} has by default, "
            f"1/hi = {1.0 / tis.upper:g}: give <tis.lower_bound>, or raise the upper one"),
        (positive_lower > positive_upper or positive_upper < smallest,
            f"<tis.lower_bound_positive> to <tis.upper_bound_positive> is {positive_lower:g} to {positive_upper:g}, "
            f"which holds no ratio from e^-20 on: lower the first, or raise the other"),
        (tis.bound_growth > 0 and not ("upper_bound" in tis.model_fields_set and tis.lower <= 1.0 <= tis.upper),
            f"<tis.bound_growth> {tis.bound_growth:g} needs bounds around 1 for a product of one token, such as "
            f"<tis.lower_bound> 0.975 and <tis.upper_bound> 1.05: give them"),
        (tis.growth > 0 and tis.differs_by_sign,
            "<tis.bound_growth> grows one pair of bounds: leave it out, or the bounds for A ≥ 0"),
        (math.exp(SAFETY_BOUND) < config.ppo.eps_clip_high < math.inf,
            f"<ppo.eps_clip_high> {config.ppo.eps_clip_high:g} is above e^20 = 4.9e8, the largest ratio: write inf "
            f"for no upper clip"),
        (tis.level == "none" and config.algorithm != 3,
            "<tis.level> none is REINFORCE with rejection only: it needs <use_rollout_log_probs> and <use_tis>: set "
            "both, or choose another level"),
        (config.weighted and tis.mode == "gamma" and bool(gamma_lacks),
            f"<tis.mode> gamma weighs responses by π_θ/π_rollout: it needs {' and '.join(gamma_lacks)}, or choose "
            f"another mode"),
        (rs.group == "drop" and rs.min_group is None,
            "<rs.group> drop needs <rs.min_group>, the accepted responses that a group must have: give it"),
        (grouped and config.use_rollout_log_probs,
            f"{early} algorithm {config.algorithm} judges π_θ: choose keep, or algorithm 0 or 2"),
        (grouped and config.rejects_on_current_policy,
            f"{early} <rs.policy> current judges π_θ: choose keep, or <rs.policy> auto"),
        (grouped and bool(config.advantage_readers),
            f"{early} {', '.join(config.advantage_readers)} needs these: choose keep, or leave that out"),
        (grouped and bool(config.budgets),
            f"{early} the budget of {', '.join(one.name for one in config.budgets)} moves at every step: choose keep")
    ]
    # fmt: on


def outside_known_range(config: Settings) -> list[tuple[bool, str]]:
    """(holds, sentence) of settings that are legal and used, but not where they are known to work."""
    algorithm, objective = config.algorithm, config.policy_objective
    low, high = config.ppo.eps_clip_low, config.ppo.eps_clip_high
    geometric = "the geometric mean of a response moves by hundredths of a percent: within 0.01 to 0.1 % of 1 is usual"
    trusted = any(criterion.condition == "away" for criterion in config.criteria)  # DPPO, whose weights are a token's
    usual = EPS_CLIP["gmpo"][0]
    masks = config.weighted and config.unit.aggregate == "mean" and config.tis.mode == "mask"
    # fmt: off
    rows = [(masks and config.tis.upper > 1.1,
        f"tis.upper_bound {config.tis.upper:g} at geometric level masks hardly anything: {geometric}.")]
    for criterion in config.criteria:
        name, upper, bounds = criterion.name, criterion.upper_bound or 0.0, criterion.log_bounds
        at_most_one = criterion.statistic == "tv" and not criterion.unit.multiplies and upper >= 1.0
        rows += [
            (criterion.unit.aggregate == "mean" and criterion.in_log_space and 1.1 < upper < math.inf,
                f"rs criterion {name} with upper bound {upper:g} rejects hardly anything: {geometric}."),
            (bounds[0] is None and (bounds[1] is None or at_most_one),
                f"rs criterion {name} rejects nothing: no value is outside its bounds.")
        ]
    return [*rows,
        (algorithm == 3 and config.weighted and config.unit.per_token and not trusted,
            "algorithm 3 at token level is biased: the rollout-correction guide has it at sequence level."),
        (objective in ("gspo", "sapo", "gmpo") and config.aggregation != "seq-mean-token-mean",
            f"objective {objective} with aggregation {config.aggregation} (where the host does not decide that): the "
            f"paper's loss is seq-mean-token-mean, in which every response counts the same."),
        (objective == "gspo" and high > 0.01,
            f"objective gspo with ε {low:g} and {high:g} clips hardly anything: {geometric} (the paper has 3e-4 and "
            f"4e-4)."),
        (objective == "gmpo" and min(low, high) < usual,
            f"objective gmpo with ε {low:g} and {high:g} clips earlier than the paper, which has {usual:g} for both: "
            f"a host that owns ε (slime: --eps-clip {usual:g}) has to be told."),
        (objective == "cispo" and low < 1.0,
            f"objective cispo with lower ε {low:g} also clips small ratios: the paper has no lower bound (ε 1)."),
        (algorithm == 1 and config.objective == "reinforce",
            "objective reinforce in algorithm 1 has no ratio, so that nothing corrects the mismatch but rejection: "
            "add use_tis (algorithm 3) for weights."),
        (algorithm == 3 and not config.weighted and not config.judges,
            "algorithm 3 without weights and without rejection is plain REINFORCE: nothing corrects the mismatch. "
            "Choose a tis.level (verl: rollout_is), or add a criterion or a veto (verl: rollout_rs).")
    ]
    # fmt: on


def bound_warnings(config: Settings, response_length: object = None) -> list[str]:
    """Sentences on weights that do harm: an upper bound that is none, or hides a smaller step, and products of ratios
    of which a typical one, e^(−KL · tokens), vanishes (a turn counts as a response; prefix: half of one).

    response_length: a host's value; what is no number, such as a reference to another key, is not known."""
    tis = config.tis
    if not config.weighted:
        return []
    fault = tis.upper_bound_fault
    notes = [f"--tis-upper-bound {tis.upper_bound:g}: {fault}. 2 is usual."] if fault else []
    if tis.unit.multiplies and isinstance(response_length, int):
        length, product = response_length, "of ratios"
        if tis.unit.needs_second_reduction:
            length, product = response_length / 2, "up to the middle token"
        typical = math.exp(-length * USUAL_KL)
        floor = tis.lower if tis.mode == "clip" and not tis.bound_growth else 0.0
        if max(typical, floor) < math.exp(VANISHING_LOG_WEIGHT):
            harm = "few responses carry" if tis.batch_normalize else "little is left of"
            notes.append(
                f"--tis-level {tis.level} over {response_length} tokens: at KL {USUAL_KL:g} a typical product "
                f"{product} is {typical:.2g}, so that {harm} the gradient. Choose token level."
            )
    return notes
