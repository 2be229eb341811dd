"""NeMo-RL's settings: the section `loss_fn`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.values import lower_epsilon, number, present, unknown

CORRECTION_TYPE = "truncated_importance_sampling_type"
OBJECTIVES = {"disable_ppo_ratio": "reinforce", "use_cispo": "cispo", "sequence_level_importance_ratios": "gspo"}
"""NeMo-RL's switch → our objective."""
_MODES = {"tis": "clip", "icepop": "mask"}


def nemo_rl_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Our nested settings by NeMo-RL's own keys: objective, clip, aggregation, and its importance sampling correction.

    The correction without a type is algorithm 2 with weights of a sequence under sequence_level_importance_ratios
    (GSPO), else of a token; NeMo-RL bounds them by nothing, here our default does. `tis` is mode clip with lo = its
    minimum or 0, `icepop` mode mask, `seq-mask-tis` a geometric criterion next to token weights up to e^20. Under
    force_on_policy_ratio the ratio is 1, whatever its switches say.
    Raises: ValueError for two switches that make different losses, an unknown type, or a bound that is no number.
    """
    low = lower_epsilon(section.get("ratio_clip_min", 0.2), "ratio_clip_min")
    clip = present(
        eps_clip_low=low, eps_clip_high=section.get("ratio_clip_max", 0.2), dual_clip=section.get("ratio_clip_c")
    )
    aggregation = "token-mean" if section.get("token_level_loss", True) else "seq-mean-token-mean"
    data: dict[str, Any] = {"ppo": clip, "aggregation": aggregation}
    switches = [name for name in OBJECTIVES if section.get(name)]
    if len(switches) > 1:
        raise ValueError(f"{' and '.join(switches)} make different losses: switch one of them off.")
    if switches and not section.get("force_on_policy_ratio"):
        data["objective"] = OBJECTIVES[switches[0]]
        if data["objective"] == "reinforce":
            data["ppo"] = {}
    level = "sequence" if section.get("sequence_level_importance_ratios") else "token"
    if not section.get("use_importance_sampling_correction"):
        return data
    data["use_tis"] = True
    kind = section.get(CORRECTION_TYPE)
    if kind is None:
        return data | {"tis": {"level": level}}
    upper, lower = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
    low = 0.0 if section.get(lower) is None else number(section[lower], lower)
    bounds = {"lower_bound": low, "upper_bound": number(section.get(upper), upper)}
    if kind == "seq-mask-tis":
        criterion = {"aggregate": "sequence_mean", **bounds}
        return data | {"tis": {"level": "token", "upper_bound": math.inf}, "rs": {"criteria": [criterion]}}
    if kind not in _MODES:
        raise unknown(CORRECTION_TYPE, kind, (*_MODES, "seq-mask-tis"))
    return data | {"tis": {"level": level, "mode": _MODES[kind], **bounds}}
