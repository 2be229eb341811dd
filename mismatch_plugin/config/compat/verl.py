"""verl's settings: the `rollout_correction` block of November 2025 and of August 2026, and the actor's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.model import MismatchConfig
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import bounds, known_only, lower_epsilon, note, number, present, switch_of, unknown

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
_OWN_NAMES = (None, "bypass_mode", "mismatch")
"""Values of loss_mode that say nothing of the objective."""
_VERL_BLOCK_KEYS = (
    *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
    *("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold"),
    *("bypass_mode", "bypass_old_logprob_for_rollout"),
    *("use_policy_gradient", "use_pure_rollout_correction", "loss_type"),
)
_VERL_ACTOR_KEYS = (
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coeff"),
    *("use_kl_loss", *GATE, "kl_loss_coef", "kl_loss_type", "loss_agg_mode", "loss_scale_factor", "loss_mode"),
)
_VERL_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
_VERL_AGGREGATE = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
_VERL_CRITERIA = {
    f"{scope}_{statistic}": (aggregate, statistic)
    for scope, aggregate in _VERL_AGGREGATE.items()
    for statistic in ("k1", "k2", "k3")
    if (scope, statistic) != ("seq_max", "k1")
}


def from_verl(mapping: Mapping[str, Any]) -> MismatchConfig:
    """A configuration from verl's settings: the `rollout_correction` block, itself or in its place in verl's tree.

    Both spellings of every key are read. Settings of the actor (`clip_ratio`, `kl_loss_coef`, …) may be next to the
    block or under `actor_rollout_ref.actor`. Absent keys have the values of verl's YAML (`rollout_is: null`).

    bypass · policy gradient · rollout_is → algorithm: no · no · null 0, set 2; yes · no · any 1; yes · yes · any 3.
    With bypass, policy gradient, and neither rollout_is nor rollout_rs it is REINFORCE that nothing corrects.
    `rollout_is_threshold: "lo_hi"` is IcePop: mask mode, the rejected stay in the denominator. The bounds of `*_k1` act
    on 1/ρ in verl; here they become [1/hi, 1/lo] on ρ, which accepts the same.
    `loss_mode` gspo, cispo, sapo, geo_mean (GMPO) and gpg (REINFORCE) are objectives; in bypass mode verl runs its own
    loss whatever it says. sapo and geo_mean are seq-mean-token-mean in verl, whatever `loss_agg_mode` says.
    Raises: ValueError naming an unknown key or a contradiction. Warns: MismatchWarning for what has no effect.
    """
    given = known_only(_verl_settings(mapping), (*_VERL_BLOCK_KEYS, *_VERL_ACTOR_KEYS), "verl key")
    bypass = _either(given, "bypass_mode", "bypass_old_logprob_for_rollout")
    gradient = _verl_policy_gradient(given, bypass)
    level = given.get("rollout_is")
    if level not in (None, *RS_LEVELS):
        raise unknown("rollout_is", level, RS_LEVELS)
    threshold = given.get("rollout_is_threshold")
    threshold = 2.0 if threshold is None else threshold
    lower, upper = bounds(threshold, "rollout_is_threshold")
    use_tis = gradient or (level is not None and not bypass)
    data: dict[str, Any] = {"use_rollout_log_probs": bypass, "use_tis": use_tis}
    tis: dict[str, Any] = {"batch_normalize": switch_of(given, "rollout_is_batch_normalize")}
    if level is not None:
        tis |= {"level": level, "upper_bound": upper} | present(lower_bound=lower)
    elif gradient:
        tis["level"] = "none"
    if level is not None and lower is not None and use_tis:
        tis["mode"] = "mask"
        data["denominator"] = "original"
        if tis["batch_normalize"]:
            note(
                "rollout_is_batch_normalize with two thresholds (IcePop): the mean runs over the accepted units here, "
                "in verl over all, the rejected as 0. Weights and loss are verl's times the accepted share."
            )
    if level is not None and not use_tis:
        note(
            f"rollout_is {level} weights no loss in bypass mode with PPO clipping, whose ratio is π_θ/π_rollout "
            f"already: it only sets the metrics."
        )
    data |= {"tis": tis, "rs": _verl_rejection(given, threshold)}
    if level is None and upper != 2.0 and not (given.get("rollout_rs") and given.get("rollout_rs_threshold") is None):
        note(f"rollout_is_threshold {threshold} bounds nothing where rollout_is is null: set it, or leave it out.")
    if given.get("rollout_rs") and "denominator" in data:
        note(
            "an IcePop threshold keeps what rollout_rs rejects in the denominator too: one denominator holds for both."
        )
    data |= _verl_objective(given, bypass)
    return MismatchConfig.build(data | _verl_actor(given, data.get("objective", "ppo")))


def _either(given: Mapping[str, Any], *keys: str) -> bool:
    """A switch with two spellings. Raises ValueError where both are there and differ."""
    values = {key: switch_of(given, key) for key in keys if key in given}
    if len(set(values.values())) > 1:
        raise ValueError(f"{' and '.join(keys)} are two spellings of one switch and differ: leave one of them out.")
    return any(values.values())


def _verl_settings(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The correction block and the actor's settings as one flat dict, wherever in verl's tree they are."""
    flat = {key: value for key, value in mapping.items() if not str(key).startswith("_")}  # Hydra's _target_
    algorithm, reference = flat.pop("algorithm", None), flat.pop("actor_rollout_ref", None) or {}
    if algorithm is not None:
        if not isinstance(algorithm, Mapping) or "rollout_correction" not in algorithm:
            raise ValueError(
                "verl's section algorithm has no block rollout_correction: add it, or pass the block itself."
            )
        flat["rollout_correction"] = algorithm["rollout_correction"]
        # A whole tree: its other sections (data, trainer, …) are not about the loss, a stray setting is a mistake.
        flat = {
            key: value for key, value in flat.items() if key == "rollout_correction" or not isinstance(value, Mapping)
        }
    block = flat.pop("rollout_correction", None) or {}
    if not isinstance(block, Mapping):
        raise ValueError(f"verl's rollout_correction is {block!r}, not a mapping of settings: write its keys under it.")
    actor = (reference.get("actor") or {}) if isinstance(reference, Mapping) else {}
    # The actor has many keys that are not about the loss; of the block, every key must be known.
    flat |= {key: value for key, value in actor.items() if key in _VERL_ACTOR_KEYS}
    policy_loss = flat.pop("policy_loss", None) or actor.get("policy_loss")
    if isinstance(policy_loss, Mapping) and policy_loss.get("loss_mode") is not None:
        flat["loss_mode"] = policy_loss["loss_mode"]
    return flat | {key: value for key, value in block.items() if not str(key).startswith("_")}


def _verl_policy_gradient(given: Mapping[str, Any], bypass: bool) -> bool:
    gradient = _either(given, "use_policy_gradient", "use_pure_rollout_correction")
    loss_type = given.get("loss_type")
    if loss_type not in (None, "ppo_clip", "reinforce"):
        raise unknown("loss_type", loss_type, ("ppo_clip", "reinforce"))
    spelled = next((key for key in ("use_policy_gradient", "use_pure_rollout_correction") if key in given), None)
    if loss_type is not None and spelled and gradient != (loss_type == "reinforce"):
        raise ValueError(f"{spelled} {gradient} contradicts loss_type {loss_type}: leave one of the two out.")
    if gradient and not bypass:
        raise ValueError(f"{spelled}=True requires bypass_mode=True in verl: set bypass_mode, or leave {spelled} out.")
    if loss_type == "reinforce" and not bypass:
        note("loss_type reinforce changes nothing without bypass_mode, in verl as here: set bypass_mode to use it.")
    return bypass and (gradient or loss_type == "reinforce")


def _verl_rejection(given: Mapping[str, Any], is_threshold: Any) -> dict[str, Any]:
    rejection: dict[str, Any] = {}
    veto = given.get("rollout_token_veto_threshold")
    if veto is not None:
        rejection["veto_threshold"] = number(veto, "rollout_token_veto_threshold")
    names = [name.strip() for name in str(given.get("rollout_rs") or "").split(",") if name.strip()]
    names = list(dict.fromkeys(names))  # verl drops duplicates before it counts thresholds
    if not names:
        for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
            if given.get(key) is not None:
                note(f"{key} {given[key]} changes nothing where rollout_rs is null: set rollout_rs, or leave it out.")
        return rejection
    threshold = given.get("rollout_rs_threshold")
    inherits = threshold is None
    threshold = is_threshold if inherits else threshold
    limits = [part.strip() for part in threshold.split(",")] if isinstance(threshold, str) else [threshold]
    if len(limits) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold {threshold!r} has {len(limits)} thresholds for {len(names)} options of rollout_rs: "
            f"give one for each, or one for all."
        )
    limits *= len(names) // len(limits)
    lower = given.get("rollout_rs_threshold_lower")
    rejection["criteria"] = [
        _verl_criterion(name, limit, lower, inherits) for name, limit in zip(names, limits, strict=True)
    ]
    return rejection


def _verl_criterion(name: str, limit: Any, below: Any, inherits: bool) -> dict[str, Any]:
    """One option of `rollout_rs`: token, sequence, geometric (2025) bound ρ, *_k1 (2026) 1/ρ; k2, k3 have one bound."""
    lower, upper = bounds(limit, "rollout_rs_threshold")
    if name in RS_LEVELS:
        lower = lower if below is None else number(below, "rollout_rs_threshold_lower")
        return {"aggregate": name, "upper_bound": upper} | present(lower_bound=lower)
    if name not in _VERL_CRITERIA:
        raise unknown("option of rollout_rs", name, (*RS_LEVELS, *_VERL_CRITERIA))
    if below is not None:
        raise ValueError(
            f"rollout_rs_threshold_lower {below} does not go with rollout_rs {name}: write rollout_rs_threshold as "
            f'"lower_upper".'
        )
    aggregate, statistic = _VERL_CRITERIA[name]
    if statistic == "k1":
        return {"aggregate": aggregate, "statistic": "ratio"} | _inverted(name, lower, upper)
    if inherits:
        raise ValueError(f"rollout_rs {name} needs rollout_rs_threshold: it bounds a divergence, not a ratio.")
    if lower is not None:
        raise ValueError(
            f"rollout_rs_threshold {limit!r} has two bounds, {name} has an upper one only: give one number."
        )
    return {"aggregate": aggregate, "statistic": statistic, "upper_bound": upper}


def _inverted(name: str, lower: float | None, upper: float) -> dict[str, float]:
    """verl keeps log(lower) ≤ −aggregate(log ρ) ≤ log(upper); on ρ itself that is [1/upper, 1/lower]."""
    if upper <= 0 or (lower is not None and lower <= 0):
        raise ValueError(
            f"rollout_rs_threshold of {name} has a bound that is not positive: both bound a ratio, raise it."
        )
    if lower is None or math.isclose(lower * upper, 1.0, rel_tol=1e-12):
        return {"upper_bound": upper} | present(lower_bound=lower)
    note(
        f"rollout_rs {name} bounds 1/ρ in verl: [{lower:g}, {upper:g}] is [{1 / upper:.7g}, {1 / lower:.7g}] on ρ, "
        f"which accepts the same."
    )
    return {"lower_bound": 1.0 / upper, "upper_bound": 1.0 / lower}


def _verl_objective(given: Mapping[str, Any], bypass: bool) -> dict[str, Any]:
    mode = given.get("loss_mode")
    if mode in _OWN_NAMES:
        return {}
    if mode in OTHER_LOSSES:
        raise ValueError(no_such_loss(mode))
    if mode not in OBJECTIVES:
        raise unknown("loss_mode", mode, OBJECTIVES)
    if bypass and mode != "vanilla":
        note(f"loss_mode {mode} changes nothing in bypass mode, where verl runs its own bypass_mode: set objective.")
        return {}
    return {"objective": OBJECTIVES[mode]}


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


def _verl_actor(given: Mapping[str, Any], objective: str) -> dict[str, Any]:
    """Clip, entropy, KL and aggregation; only what was given."""
    data: dict[str, Any] = {
        "ppo": verl_clip(given, objective),
        "terms": present(entropy_coef=given.get("entropy_coeff")),
    }
    coefficient = number(given.get("kl_loss_coef") or 0.0, "kl_loss_coef")
    if "use_kl_loss" in given and not switch_of(given, "use_kl_loss"):
        if coefficient not in (0.0, 0.001):  # 0.001 is verl's own
            note(f"kl_loss_coef {coefficient:g} changes nothing where use_kl_loss is false, in verl as here.")
    elif coefficient:
        kind = given.get("kl_loss_type", "low_var_kl")
        if kind not in _VERL_KL:
            raise unknown("kl_loss_type", kind, _VERL_KL)
        data["terms"] |= {"kl_coef": coefficient, "kl_type": _VERL_KL[kind]}
    mode = given.get("loss_agg_mode")
    if objective in ("sapo", "gmpo"):
        if mode not in (None, "seq-mean-token-mean"):
            note(f"loss_agg_mode {mode} changes nothing under loss_mode {given['loss_mode']}, in verl as here.")
        return data | {"aggregation": "seq-mean-token-mean"}
    if mode == "seq-mean-token-sum-norm":
        if given.get("loss_scale_factor") is None:
            raise ValueError(f"loss_agg_mode {mode} has no padded length to divide by here: give loss_scale_factor.")
        return data | {"aggregation": "seq-mean-token-sum", "length_norm": given["loss_scale_factor"]}
    scale = given.get("loss_scale_factor")
    if scale is not None:
        note(f"loss_scale_factor {scale} changes nothing without loss_agg_mode seq-mean-token-sum-norm.")
    return data | present(aggregation=mode)
