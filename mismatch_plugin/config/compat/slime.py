"""slime's settings: `mis.yaml`, its built-in TIS, and its off-policy sequence masking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.criteria import Criterion, parse_criterion
from mismatch_plugin.config.model import MismatchConfig
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import known_only, note, number, parse_bool, present, unknown

MIS_KEYS = (
    *("tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
)
_SLIME_KEYS = ("use_tis", "use_rollout_logprobs", "use_rollout_log_probs", "tis_clip", "tis_clip_low", *MIS_KEYS)


def from_slime(mapping: Mapping[str, Any]) -> MismatchConfig:
    """A configuration from slime's settings: keys of `mis.yaml`, and the flags of its built-in TIS.

    An absent level, mode or upper bound has its value in `mis.yaml` (token, truncate, 2.0); an absent or null bound is
    what slime makes of null: tis_lower_bound 1/tis_upper_bound, rs bounds those of TIS. Absent switches are off. With
    `use_tis` and no other key of `mis.yaml` it is slime's built-in: token ratios clipped to [tis_clip_low, tis_clip].
    `use_rs` without `use_tis` rejects, as slime's page says; slime's code skips it.
    Raises: ValueError naming an unknown key, or an invalid value. Warns: MismatchWarning for what has no effect.
    """
    given = known_only(mapping, _SLIME_KEYS, "slime key")
    use_tis, use_rs = (parse_bool(given.get(key), key) for key in ("use_tis", "use_rs"))
    bypass = any(parse_bool(given.get(key), key) for key in ("use_rollout_logprobs", "use_rollout_log_probs"))
    data: dict[str, Any] = {"use_rollout_log_probs": bypass, "use_tis": use_tis}
    if not any(key in given for key in MIS_KEYS):
        if use_tis:
            bounds = {"lower_bound": given.get("tis_clip_low", 0.0), "upper_bound": given.get("tis_clip", 2.0)}
            data["tis"] = {"mode": "clip", **bounds}
        return MismatchConfig.build(data)
    names = ("mode", "level", "lower_bound", "upper_bound")
    tis = present(**{name: given.get(f"tis_{name}") for name in names})
    tis["batch_normalize"] = parse_bool(given.get("tis_batch_normalize"), "tis_batch_normalize")
    if tis["batch_normalize"] and use_tis and tis.get("mode") == "mask":
        note(
            "tis_batch_normalize in mode mask: the mean runs over the accepted units here, in slime over all of them, "
            "the rejected by their unbounded ratio. Weights and loss differ from slime's by the quotient of the two."
        )
    if use_rs:
        data["rs"] = _rejection(given, tis)
        if not use_tis:
            note("use_rs without use_tis rejects here, as slime's page says: slime's own code skips it.")
    for key in [key for key in ("tis_clip", "tis_clip_low") if key in given]:
        note(f"{key} {given[key]} changes nothing next to mis.yaml's keys: slime reads it in its built-in TIS only.")
    for key in () if use_rs else ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
        if given.get(key) not in (None, "token"):  # mis.yaml's own rs_level
            note(f"{key} {given[key]} changes nothing without use_rs, in slime's code as here: add use_rs.")
    return MismatchConfig.build({**data, "tis": tis})


def _rejection(given: Mapping[str, Any], tis: Mapping[str, Any]) -> dict[str, Any]:
    """One criterion; slime takes TIS's lower bound for it, not the reciprocal of rejection's own upper bound."""
    level, upper = given.get("rs_level", "token"), number(tis.get("upper_bound", 2.0), "tis_upper_bound")
    if level not in RS_LEVELS:
        raise unknown("rs_level", level, RS_LEVELS)
    bounds = {"lower_bound": tis.get("lower_bound", 1.0 / upper if upper > 0 else 0.0), "upper_bound": upper}
    bounds |= present(lower_bound=given.get("rs_lower_bound"), upper_bound=given.get("rs_upper_bound"))
    return {"criteria": [{"aggregate": level, **bounds}]} | present(veto_threshold=given.get("rs_veto_threshold"))


def host_objective(estimator: str) -> str:
    """The objective of slime's own policy loss with that advantage estimator; most are PPO's."""
    return estimator if estimator in ("gspo", "cispo") else "ppo"


def with_opsm(data: dict[str, Any], delta: float) -> dict[str, Any]:
    """The settings with slime's off-policy sequence masking as a criterion of our loss.

    Dropped where the sequence's mean A < 0 and mean(log π_rollout − log π_θ) > δ (arXiv 2512.02556). slime takes each
    token's own A, and in algorithms 0 and 2 its anchor π_old in the place of π_rollout.
    Raises: ValueError where algorithm 0 or 2 judges other criteria or a veto by π_old: one policy holds for all.
    """
    (rule,) = find_preset("opsm").settings(delta=delta)["rs"]["criteria"]
    rs = dict(data.get("rs") or {})
    others = [Criterion.model_validate(parse_criterion(one)) for one in rs.get("criteria") or ()]
    if Criterion.model_validate(parse_criterion(rule)) not in others:  # a file's settings, read before, have it
        if not data["use_rollout_log_probs"] and rs.get("policy") != "current":
            if others or rs.get("veto_threshold") is not None:
                raise ValueError(
                    "--use-opsm judges π_θ, and the other criteria or the veto π_old: give --rs-policy current, which "
                    "holds for all of them, or leave one of the two out."
                )
            rs["policy"] = "current"
        rs["criteria"] = [*(one.model_dump(exclude_unset=True) for one in others), rule]
    return {**data, "rs": rs}
