"""NeMo-RL's settings: the section `loss_fn`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.compat.reading import present
from mismatch_plugin.config.values import number, unknown

CORRECTION_TYPE = "truncated_importance_sampling_type"
_MODES = {"tis": "clip", "icepop": "mask"}


def nemo_rl_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Our nested settings by NeMo-RL's own keys: the clip, the aggregation, and its importance sampling correction.

    The correction without a type is algorithm 2 with token weights bounded at e^20 only; `tis` is mode clip with
    lo = its minimum or 0, `icepop` mode mask, `seq-mask-tis` a geometric criterion next to unbounded token weights.
    Raises: ValueError for a type that is unknown or a bound that is no number.
    """
    clip = {"eps_clip_low": section.get("ratio_clip_min", 0.2), "eps_clip_high": section.get("ratio_clip_max", 0.2)}
    data: dict[str, Any] = {
        "ppo": present(**clip, dual_clip=section.get("ratio_clip_c")),
        "aggregation": "token-mean" if section.get("token_level_loss", True) else "seq-mean-token-mean",
    }
    if not section.get("use_importance_sampling_correction"):
        return data
    data["use_tis"] = True
    kind = section.get(CORRECTION_TYPE)
    if kind is None:
        return data | {"tis": {"upper_bound": math.inf}}
    upper, lower = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
    low = 0.0 if section.get(lower) is None else number(section[lower], lower)
    bounds = {"lower_bound": low, "upper_bound": number(section.get(upper), upper)}
    if kind == "seq-mask-tis":
        criterion = {"aggregate": "sequence_mean", **bounds}
        return data | {"tis": {"level": "token", "upper_bound": math.inf}, "rs": {"criteria": [criterion]}}
    if kind not in _MODES:
        raise unknown(CORRECTION_TYPE, kind, (*_MODES, "seq-mask-tis"))
    return data | {"tis": {"level": "token", "mode": _MODES[kind], **bounds}}
