"""slime's settings: `mis.yaml` and flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.criteria import Criterion, parse_criterion
from mismatch_plugin.config.model import MismatchConfig
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import known_only, lower_epsilon, note, number, present, switch_of, unknown

MIS_KEYS = (
    *("tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
)
_SLIME_KEYS = (
    *("use_tis", "use_rollout_logprobs", "use_rollout_log_probs", "tis_clip", "tis_clip_low"),
    *("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    *("advantage_estimator", "use_opsm", "opsm_delta", "use_unbiased_kl", "calculate_per_token_loss", *MIS_KEYS),
)
OPSM_DELTA = 1e-4
"""slime's own default."""
_OBJECTIVES = ("gspo", "cispo")
"""Of slime's advantage estimators those that choose an objective; the others are PPO's."""


def from_slime(mapping: Mapping[str, Any]) -> MismatchConfig:
    """A configuration from slime's settings: keys of `mis.yaml`, and flags by their argparse names.

    An absent level, mode or upper bound has its value in `mis.yaml` (token, truncate, 2.0); an absent or null bound is
    what slime makes of null: tis_lower_bound 1/tis_upper_bound, rs bounds those of TIS. Absent switches are off. With
    `use_tis` and no other key of `mis.yaml` it is slime's built-in: token ratios clipped to [tis_clip_low, tis_clip].
    `use_rs` without `use_tis` rejects, as slime's page says; slime's code skips it.
    advantage_estimator gspo and cispo are objectives, use_opsm a criterion (see `with_opsm`).
    Raises: ValueError naming an unknown key, or an invalid value. Warns: MismatchWarning for what has no effect.
    """
    given = known_only(mapping, _SLIME_KEYS, "slime key")
    use_tis = switch_of(given, "use_tis")
    use_mis = any(key in given for key in MIS_KEYS)
    bypass = switch_of(given, "use_rollout_logprobs") or switch_of(given, "use_rollout_log_probs")
    data: dict[str, Any] = {"use_rollout_log_probs": bypass, "use_tis": use_tis}
    if use_mis:
        data["tis"] = _mis_weights(given)
        data["rs"] = _mis_rejection(given, data["tis"], use_tis)
    elif use_tis:
        data["tis"] = {
            "mode": "clip",
            "lower_bound": number(given.get("tis_clip_low", 0.0), "tis_clip_low"),
            "upper_bound": number(given.get("tis_clip", 2.0), "tis_clip"),
        }
    if use_mis or not use_tis:
        for key, default in (("tis_clip", 2.0), ("tis_clip_low", 0.0)):
            if key in given and number(given[key], key) != default:
                where = "next to mis.yaml's keys" if use_tis else "without use_tis"
                note(f"{key} {given[key]} changes nothing {where}: slime reads it in its built-in TIS only.")
    low, high = given.get("eps_clip"), given.get("eps_clip_high")
    high = low if high is None else high
    low = None if low is None else lower_epsilon(low, "eps_clip")
    data["ppo"] = present(eps_clip_low=low, eps_clip_high=high, dual_clip=given.get("eps_clip_c"))
    if (objective := host_objective(str(given.get("advantage_estimator")))) != "ppo":
        data["objective"] = objective
    data["terms"] = present(entropy_coef=given.get("entropy_coef"))
    coefficient = number(given.get("kl_loss_coef") or 0.0, "kl_loss_coef")
    if coefficient and switch_of(given, "use_kl_loss"):
        data["terms"] |= {"kl_coef": coefficient, "kl_type": given.get("kl_loss_type", "k1")}
    elif coefficient:
        note(f"kl_loss_coef {coefficient:g} changes nothing without use_kl_loss, in slime as here.")
    if "calculate_per_token_loss" in given:
        per_token = switch_of(given, "calculate_per_token_loss")
        data["aggregation"] = "token-mean" if per_token else "seq-mean-token-mean"
    if switch_of(given, "use_unbiased_kl") and data["terms"].get("kl_coef"):
        raise ValueError("use_unbiased_kl is no setting here: slime's hook (mismatch_plugin.hooks.slime) computes it.")
    if switch_of(given, "use_opsm"):
        data = with_opsm(data, number(given.get("opsm_delta", OPSM_DELTA), "opsm_delta"))
        if not bypass:
            note("use_opsm judges π_θ against π_rollout, the sampler: slime's own policy_loss takes π_old.")
    return MismatchConfig.build(data)


def host_objective(estimator: str) -> str:
    """The objective of slime's own policy loss with that advantage estimator."""
    return estimator if estimator in _OBJECTIVES else "ppo"


def with_opsm(data: dict[str, Any], delta: float) -> dict[str, Any]:
    """The settings with slime's off-policy sequence masking as a criterion of our loss.

    Dropped where the sequence's mean A < 0 and mean(log π_rollout − log π_θ) > δ (arXiv 2512.02556). slime takes each
    token's own A, and in algorithms 0 and 2 its anchor π_old in the place of π_rollout.
    Raises: ValueError where algorithm 0 or 2 judges other criteria or a veto by π_old: one policy holds for all.
    """
    rule = Criterion(
        aggregate="sequence_mean",
        statistic="k1",
        lower_bound=math.exp(-delta),
        upper_bound=math.inf,
        condition="negative",
    )
    rs = dict(data.get("rs") or {})
    others = [Criterion.model_validate(parse_criterion(one)) for one in rs.get("criteria") or ()]
    if rule not in others:  # a file's settings, read before, have it
        if not data["use_rollout_log_probs"] and rs.get("policy") != "current":
            if others or rs.get("veto_threshold") is not None:
                raise ValueError(
                    "--use-opsm judges π_θ, and the other criteria or the veto π_old: give --rs-policy current, which "
                    "holds for all of them, or leave one of the two out."
                )
            rs["policy"] = "current"
        rs["criteria"] = [*(one.model_dump(exclude_unset=True) for one in others), rule.model_dump()]
    return {**data, "rs": rs}


def _mis_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = present(
        mode=given.get("tis_mode"),
        level=given.get("tis_level"),
        lower_bound=given.get("tis_lower_bound"),
        upper_bound=given.get("tis_upper_bound"),
    )
    for name in ("lower_bound", "upper_bound"):
        if name in weights:
            weights[name] = number(weights[name], f"tis_{name}")
    normalized = switch_of(given, "tis_batch_normalize")
    if normalized and switch_of(given, "use_tis") and weights.get("mode") == "mask":
        note(
            "tis_batch_normalize in mode mask: the mean runs over the accepted units here, in slime over all of them, "
            "the rejected by their unbounded ratio. Weights and loss differ from slime's by the quotient of the two."
        )
    return weights | {"batch_normalize": normalized}


def _mis_rejection(given: Mapping[str, Any], weights: Mapping[str, Any], use_tis: bool) -> dict[str, Any]:
    veto = given.get("rs_veto_threshold")
    if not switch_of(given, "use_rs"):
        if veto is not None:
            note(f"rs_veto_threshold {veto} changes nothing without use_rs, in slime's code as here: add use_rs.")
        for key in ("rs_level", "rs_lower_bound", "rs_upper_bound"):
            if given.get(key) not in (None, "token"):  # token is mis.yaml's own
                note(f"{key} {given[key]} changes nothing without use_rs: add it, or leave {key} out.")
        return {}
    if not use_tis:
        note("use_rs without use_tis rejects here, as slime's page says: slime's own code skips it.")
    level = given.get("rs_level", "token")
    if level not in RS_LEVELS:
        raise unknown("rs_level", level, RS_LEVELS)
    tis_upper = weights.get("upper_bound", 2.0)
    tis_lower = weights.get("lower_bound", 1.0 / tis_upper if tis_upper > 0 else 0.0)
    upper, lower = given.get("rs_upper_bound"), given.get("rs_lower_bound")
    criterion = {
        "aggregate": level,
        "upper_bound": tis_upper if upper is None else number(upper, "rs_upper_bound"),
        # slime takes TIS's lower bound, not the reciprocal of rejection's own upper bound
        "lower_bound": tis_lower if lower is None else number(lower, "rs_lower_bound"),
    }
    rejection: dict[str, Any] = {"criteria": [criterion]}
    return rejection if veto is None else rejection | {"veto_threshold": number(veto, "rs_veto_threshold")}
