"""verl's settings: the `rollout_correction` block of November 2025 and of August 2026, and the actor's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.model import MismatchConfig
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import (
    bounds,
    get_path,
    known_only,
    lower_epsilon,
    note,
    number,
    parse_bool,
    present,
    unknown,
)

CORRECTION = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
"""The block's keys about weights and rejection, August 2026, with the values of verl's YAML."""
CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
"""The actor's clip bounds, with the values of verl's YAML."""
GATE = {"tau_pos": "tau_positive", "tau_neg": "tau_negative"}
"""The actor's temperatures of SAPO → ours."""
UNREAD = {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "entropy_coeff": 0, "use_kl_loss": False}
"""The actor's terms and aggregation, with the values of verl's YAML."""
SPELLED = {
    "use_tis": "rollout_is",
    "tis.level": "rollout_is",
    "tis.mode": "rollout_is_threshold",
    "tis.lower_bound": "rollout_is_threshold",
    "tis.upper_bound": "rollout_is_threshold",
    "tis.batch_normalize": "rollout_is_batch_normalize",
    "denominator": "rollout_is_threshold",
}
"""Our setting → the key of the block that says it."""
OBJECTIVES = {
    "vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "gpg": "reinforce"
}  # fmt: skip
"""The actor's `policy_loss.loss_mode` → our objective."""
_DPPO = "preset {} with bypass_mode, which judges π_θ against π_rollout: verl's judges it against old_log_prob"
OTHER_LOSSES = {
    "dppo_tv": _DPPO.format("dppo_tv"),
    "dppo_kl": _DPPO.format("dppo_kl"),
    "clip_cov": "objective ppo: verl's takes tokens out at random, by their covariance",
    "kl_cov": "terms.rollout_kl_coef: verl's penalises the tokens of the largest covariance",
    "dro": "terms.rollout_kl_coef: verl's is a penalty on π_θ/π_old in the place of the clip",
}
"""Those that we do not have → what comes next to it, and what is different."""
_KEYS = (
    *CORRECTION,
    *("rollout_rs_threshold_lower", "rollout_token_veto_threshold", "bypass_mode", "bypass_old_logprob_for_rollout"),
    *("use_policy_gradient", "use_pure_rollout_correction", "loss_type", "loss_mode", *CLIP, *GATE),
)
_AGGREGATES = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
_CRITERIA = {
    f"{scope}_{statistic}": (aggregate, statistic)
    for scope, aggregate in _AGGREGATES.items()
    for statistic in ("k1", "k2", "k3")
    if (scope, statistic) != ("seq_max", "k1")
}


def from_verl(mapping: Mapping[str, Any]) -> MismatchConfig:
    """A configuration from verl's settings: the `rollout_correction` block, itself or in its place in verl's tree.

    Both spellings of every key are read, and of the actor (next to the block, or `actor_rollout_ref.actor`) `loss_mode`
    and the clip. Absent keys have the values of verl's YAML (`rollout_is: null`).

    bypass · policy gradient · rollout_is → algorithm: no · no · null 0, set 2; yes · no · any 1; yes · yes · any 3.
    With bypass, policy gradient, and neither rollout_is nor rollout_rs it is REINFORCE that nothing corrects.
    `rollout_is_threshold: "lo_hi"` is IcePop: mask mode, the rejected stay in the denominator. The bounds of `*_k1` act
    on 1/ρ in verl; here they become [1/hi, 1/lo] on ρ, which accepts the same.
    `loss_mode` gspo, cispo, sapo, geo_mean (GMPO) and gpg (REINFORCE) are objectives; in bypass mode verl runs its own
    loss whatever it says. sapo and geo_mean are seq-mean-token-mean in verl, whatever `loss_agg_mode` says.
    Raises: ValueError naming an unknown key or a contradiction. Warns: MismatchWarning for what has no effect.
    """
    given = known_only(_flat(mapping), _KEYS, "verl key")
    bypass = _either(given, "bypass_mode", "bypass_old_logprob_for_rollout")
    gradient = _policy_gradient(given, bypass)
    level, threshold = given.get("rollout_is"), given.get("rollout_is_threshold")
    if level not in (None, *RS_LEVELS):
        raise unknown("rollout_is", level, RS_LEVELS)
    threshold = 2.0 if threshold is None else threshold
    lower, upper = bounds(threshold, "rollout_is_threshold")
    data: dict[str, Any] = {"use_rollout_log_probs": bypass, "use_tis": gradient or (level is not None and not bypass)}
    tis: dict[str, Any] = {"batch_normalize": parse_bool(given.get("rollout_is_batch_normalize"), "batch_normalize")}
    if level is not None:
        tis |= {"level": level, "upper_bound": upper} | present(lower_bound=lower)
    elif gradient:
        tis["level"] = "none"
    if level is not None and not data["use_tis"]:
        note(f"rollout_is {level} weights no loss in bypass mode with PPO clipping: it only sets the metrics.")
    data |= {"tis": tis, "rs": _rejection(given, threshold)}
    if level is not None and lower is not None and data["use_tis"]:
        tis["mode"], data["denominator"] = "mask", "original"
        if tis["batch_normalize"]:
            note(
                "rollout_is_batch_normalize with two thresholds (IcePop): the mean runs over the accepted units here, "
                "in verl over all, the rejected as 0. Weights and loss are verl's times the accepted share."
            )
        if given.get("rollout_rs"):
            note("an IcePop threshold keeps what rollout_rs rejects in the denominator too: there is one for both.")
    if level is None and upper != 2.0 and not (given.get("rollout_rs") and given.get("rollout_rs_threshold") is None):
        note(f"rollout_is_threshold {threshold} bounds nothing where rollout_is is null: set it, or leave it out.")
    data |= _objective(given, bypass)
    return MismatchConfig.build({**data, "ppo": verl_clip(given, data.get("objective", "ppo"))})


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The correction block and what the actor says of the loss as one dict, wherever in verl's tree they are."""
    places = ("algorithm", "actor_rollout_ref", "rollout_correction", "policy_loss")
    flat = {key: value for key, value in mapping.items() if key not in places}
    block = mapping.get("rollout_correction")
    if "algorithm" in mapping:
        block = get_path(mapping, "algorithm.rollout_correction")
        if block is None:
            raise ValueError("verl's section algorithm has no block rollout_correction: add it, or pass the block.")
        # A whole tree: its other sections (data, trainer, …) are not about the loss, a stray setting is a mistake.
        flat = {key: value for key, value in flat.items() if not isinstance(value, Mapping)}
    actor = get_path(mapping, "actor_rollout_ref.actor") or {}
    flat |= {key: actor[key] for key in (*CLIP, *GATE) if key in actor}
    if unread := [key for key, usual in UNREAD.items() if actor.get(key, usual) not in (usual, None)]:
        note(f"{', '.join(unread)} of the actor are not about the correction: set aggregation and terms yourself.")
    mode = get_path(actor or mapping, "policy_loss.loss_mode")
    flat |= present(loss_mode=mode) | dict(block or {})
    return {key: value for key, value in flat.items() if not str(key).startswith("_")}  # Hydra's _target_


def _either(given: Mapping[str, Any], *keys: str) -> bool:
    """A switch with two spellings. Raises ValueError where both are there and differ."""
    values = {parse_bool(given[key], key) for key in keys if key in given}
    if len(values) > 1:
        raise ValueError(f"{' and '.join(keys)} are two spellings of one switch and differ: leave one of them out.")
    return True in values


def _policy_gradient(given: Mapping[str, Any], bypass: bool) -> bool:
    names = ("use_policy_gradient", "use_pure_rollout_correction")
    gradient, loss_type = _either(given, *names), given.get("loss_type")
    if loss_type not in (None, "ppo_clip", "reinforce"):
        raise unknown("loss_type", loss_type, ("ppo_clip", "reinforce"))
    if loss_type is not None and not given.keys().isdisjoint(names) and gradient != (loss_type == "reinforce"):
        raise ValueError(f"{' or '.join(names)} contradicts loss_type {loss_type}: leave one of the two out.")
    if gradient and not bypass:
        raise ValueError(f"{' or '.join(names)} requires bypass_mode=True in verl: set it, or leave that out.")
    if loss_type == "reinforce" and not bypass:
        note("loss_type reinforce changes nothing without bypass_mode, in verl as here: set bypass_mode to use it.")
    return bypass and (gradient or loss_type == "reinforce")


def _rejection(given: Mapping[str, Any], is_threshold: Any) -> dict[str, Any]:
    """Veto and criteria; a threshold that is absent is that of the weights."""
    rejection = present(veto_threshold=given.get("rollout_token_veto_threshold"))
    names = [name.strip() for name in str(given.get("rollout_rs") or "").split(",") if name.strip()]
    names = list(dict.fromkeys(names))  # verl drops duplicates before it counts thresholds
    threshold, below = given.get("rollout_rs_threshold"), given.get("rollout_rs_threshold_lower")
    if not names:
        if threshold is not None or below is not None:
            note("rollout_rs_threshold changes nothing where rollout_rs is null: set rollout_rs, or leave it out.")
        return rejection
    given_limit = is_threshold if threshold is None else threshold
    limits = threshold.split(",") if isinstance(threshold, str) else [given_limit]
    if len(limits) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold {threshold!r} has {len(limits)} thresholds for {len(names)} options of rollout_rs: "
            f"give one for each, or one for all."
        )
    limits *= len(names) // len(limits)
    criteria = [_criterion(name, limit, below, threshold is None) for name, limit in zip(names, limits, strict=True)]
    return {**rejection, "criteria": criteria}


def _criterion(name: str, limit: Any, below: Any, inherits: bool) -> dict[str, Any]:
    """One option of `rollout_rs`: token, sequence, geometric (2025) bound ρ, *_k1 (2026) 1/ρ; k2, k3 have one bound."""
    lower, upper = bounds(limit, "rollout_rs_threshold")
    lower = lower if below is None else number(below, "rollout_rs_threshold_lower")
    if name in RS_LEVELS:
        return {"aggregate": name, "upper_bound": upper} | present(lower_bound=lower)
    if name not in _CRITERIA:
        raise unknown("option of rollout_rs", name, (*RS_LEVELS, *_CRITERIA))
    aggregate, statistic = _CRITERIA[name]
    if statistic != "k1":
        if inherits or lower is not None:
            raise ValueError(
                f"rollout_rs {name} needs one number as rollout_rs_threshold: it bounds a divergence above."
            )
        return {"aggregate": aggregate, "statistic": statistic, "upper_bound": upper}
    criterion = {"aggregate": aggregate, "statistic": "ratio"}
    # verl keeps log(lower) ≤ −aggregate(log ρ) ≤ log(upper); on ρ itself that is [1/upper, 1/lower].
    if lower is None or math.isclose(lower * upper, 1.0, rel_tol=1e-12):
        return criterion | {"upper_bound": upper} | present(lower_bound=lower)
    inverted = [1.0 / bound if bound > 0 else math.inf for bound in (upper, lower)]
    note(
        f"rollout_rs {name} bounds 1/ρ in verl: [{lower:g}, {upper:g}] is [{inverted[0]:.7g}, {inverted[1]:.7g}] on ρ, "
        f"which accepts the same."
    )
    return criterion | {"lower_bound": inverted[0], "upper_bound": inverted[1]}


def _objective(given: Mapping[str, Any], bypass: bool) -> dict[str, Any]:
    mode = given.get("loss_mode")
    if mode in (None, "bypass_mode", "mismatch"):  # they say nothing of the objective
        return {}
    if mode in OTHER_LOSSES:
        raise ValueError(no_such_loss(mode))
    if mode not in OBJECTIVES:
        raise unknown("loss_mode", mode, OBJECTIVES)
    if bypass and mode != "vanilla":
        note(f"loss_mode {mode} changes nothing in bypass mode, where verl runs its own bypass_mode: set objective.")
        return {}
    objective = OBJECTIVES[mode]
    own = {"aggregation": "seq-mean-token-mean"} if objective in ("sapo", "gmpo") else {}
    return {"objective": objective, **own}


def no_such_loss(mode: str) -> str:
    """Why one of `OTHER_LOSSES` is no setting here, and what comes next to it."""
    return f"loss_mode {mode} is no setting here; next to it comes {OTHER_LOSSES[mode]}."


def verl_clip(given: Mapping[str, Any], objective: str) -> dict[str, Any]:
    """The actor's clip as `ppo` settings, as far as verl's loss of that objective reads it."""
    clip, low, high = (given.get(f"clip_ratio{side}") for side in ("", "_low", "_high"))
    low = clip if low is None else low
    bounds_ = present(
        eps_clip_low=None if low is None else lower_epsilon(low, "clip_ratio_low"),
        eps_clip_high=clip if high is None else high,
    )
    dual = present(dual_clip=given.get("clip_ratio_c"))
    gate = present(**{ours: given.get(theirs) for theirs, ours in GATE.items()})
    return {"ppo": bounds_ | dual, "sapo": gate, "reinforce": {}}.get(objective, bounds_)
