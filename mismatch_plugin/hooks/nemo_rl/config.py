"""What NeMo-RL's `loss_fn` section and our block in it, `loss_fn.mismatch`, say together."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mismatch_plugin.config import MismatchConfig, MismatchWarning, preset
from mismatch_plugin.config.values import dotted_fields_set, merge, number, unknown

_BLOCK = "mismatch"
# Switches of NeMo-RL that make another loss than the four algorithms: name → value that leaves it off.
_OTHER_LOSSES = {
    "disable_ppo_ratio": "−A log π_θ weighted by π_old/π_rollout; REINFORCE + IS is algorithm 3 of loss_fn.mismatch",
    "use_cispo": "CISPO",
    "sequence_level_importance_ratios": "GSPO",
    "positive_example_nll_weight": "a likelihood term on correct samples",
}
# Setting that NeMo-RL owns → where it is set.
_OWNED_BY_NEMO_RL = {
    "terms.entropy_coef": "NeMo-RL's loss gets no entropy",
    "terms.kl": "set loss_fn.reference_policy_kl_penalty and reference_policy_kl_type",
    "aggregation": "set loss_fn.token_level_loss",
    "length_norm": "NeMo-RL has no such norm",
    "log_prob_backend": "NeMo-RL computes log-probs itself",
    "report_dir": "metrics go to NeMo-RL's logger",
}


def loss_settings(host_config: Any) -> dict[str, Any]:
    """The `loss_fn` section as a dict, from the master configuration or the section itself (model or mapping)."""
    section: Any = host_config
    found = host_config.get("loss_fn") if isinstance(host_config, Mapping) else getattr(host_config, "loss_fn", None)
    if found is not None:
        section = found
    if hasattr(section, "model_dump"):
        section = section.model_dump()
    return dict(section)


def settings(host_config: Any) -> MismatchConfig:
    """The configuration that NeMo-RL's own keys and `loss_fn.mismatch` (our settings, or `preset`) give together.

    NeMo-RL's correction without a type is algorithm 2 with token weights bounded at e^20 only; `tis` is mode clip with
    lo = its minimum or 0, `icepop` mode mask, `seq-mask-tis` a geometric criterion next to unbounded token weights.
    Clip bounds and aggregation are NeMo-RL's; the denominator is original, because it counts tokens before the loss.
    Raises: ValueError, one sentence, where the two contradict each other or NeMo-RL would run another loss.
    """
    host = loss_settings(host_config)
    return _build(json.dumps({key: value for key, value in host.items() if _is_plain(value)}, sort_keys=True))


def describe(config: MismatchConfig, host_args: Any) -> list[str]:
    """Lines of the start-up block. host_args: as for `settings`."""
    host = loss_settings(host_args)
    lines = [line for line in config.describe().splitlines() if not line.startswith("loss: ")]
    count = "tokens" if host.get("token_level_loss", True) else "sequences"
    lines.append(f"loss: {config.aggregation}, normaliser NeMo-RL's global {count}, rejected ones included")
    if host.get("force_on_policy_ratio"):
        anchor = "rollout log-probs" if config.use_rollout_log_probs else "π_θ itself"
        lines.append(f"old log-probs pass: skipped (force_on_policy_ratio); the anchor is {anchor}")
    elif config.use_rollout_log_probs:
        lines.append(
            "old log-probs pass: runs unused; loss_fn.force_on_policy_ratio=true skips it where a rollout is one step"
        )
    else:
        lines.append("old log-probs pass: runs")
    if host.get("use_importance_sampling_correction") and config.use_rollout_log_probs:
        lines.append("use_importance_sampling_correction has no effect: the rollout policy is the anchor already")
    lines.append("metrics: means only, exact over the step; NeMo-RL adds a loss's metrics up")
    return lines


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))


@lru_cache(maxsize=16)
def _build(text: str) -> MismatchConfig:
    host = json.loads(text)
    own = host.pop(_BLOCK, None) or {}
    if not isinstance(own, dict):
        raise ValueError(f"loss_fn.{_BLOCK} is {own!r}, not a mapping of settings: write them under it.")
    name = own.pop("preset", None)
    for key, meaning in _OTHER_LOSSES.items():
        if host.get(key):
            raise ValueError(f"loss_fn.{key} {host[key]} makes another loss ({meaning}): switch it off.")
    base = _from_nemo_rl(host, own, name)
    known = dotted_fields_set(MismatchConfig().model_dump())
    for path in sorted(dotted_fields_set(own)):
        if path not in known:
            raise unknown(f"setting of loss_fn.{_BLOCK}", path, sorted(known))
        for prefix, instead in _OWNED_BY_NEMO_RL.items():
            if path.startswith(prefix):
                raise ValueError(f"{_BLOCK}.{path} is NeMo-RL's: leave it out ({instead}).")
        theirs, value = _at(base, path), _at(own, path)
        fixed = path.startswith("ppo.") or (name is None and host.get("truncated_importance_sampling_type") is not None)
        if path != "denominator" and fixed and theirs is not None and theirs != value:
            raise ValueError(
                f"{_BLOCK}.{path} {value} contradicts NeMo-RL's loss_fn, which makes it {theirs}: set one only."
            )
    if name is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MismatchWarning)  # the merged configuration says what still holds
            base = merge(preset(name).model_dump(exclude_unset=True), base)
    accepted = own.get("denominator") == "accepted"
    data = merge(base, own)
    if data.get("use_tis") and data.get("use_rollout_log_probs"):
        data["ppo"] = own.get("ppo", {})  # REINFORCE has no clip
    config = MismatchConfig.build(data, dotted_fields_set(own))
    if host.get("use_importance_sampling_correction") and config.algorithm == 0:
        raise ValueError(
            "loss_fn.use_importance_sampling_correction asks for weights, and algorithm 0 of these settings has "
            "none: switch it off, or choose another algorithm."
        )
    if accepted and config.rejects:
        raise ValueError(
            f"{_BLOCK}.denominator accepted cannot hold: NeMo-RL counts tokens before the loss does. Choose auto or "
            f"original."
        )
    if config.weighted and config.tis.batch_normalize and config.tis.batch_normalize_scope != "micro_batch":
        raise ValueError(
            f"{_BLOCK}.tis.batch_normalize_scope {config.tis.batch_normalize_scope} is not what NeMo-RL gives: its "
            f"loss sees one micro-batch (one sequence when packing): choose micro_batch, or no batch_normalize."
        )
    if config.denominator == "original":
        return config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)  # said by the first build
        return MismatchConfig.build({**data, "denominator": "original"}, dotted_fields_set(own))


def _from_nemo_rl(host: Mapping[str, Any], own: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Settings by NeMo-RL's own keys: the clip, the aggregation, and its importance sampling correction."""
    clip = {
        "eps_clip_low": host.get("ratio_clip_min", 0.2),
        "eps_clip_high": host.get("ratio_clip_max", 0.2),
        "dual_clip": host.get("ratio_clip_c"),
    }
    base: dict[str, Any] = {"ppo": {key: value for key, value in clip.items() if value is not None}}
    base["aggregation"] = "token-mean" if host.get("token_level_loss", True) else "seq-mean-token-mean"
    kind = host.get("truncated_importance_sampling_type")
    if kind is not None and (name is not None or own.get("use_rollout_log_probs")):
        given = f"preset {name}" if name is not None else "use_rollout_log_probs"
        raise ValueError(
            f"loss_fn.truncated_importance_sampling_type {kind} is next to {_BLOCK}.{given}: leave one of them out."
        )
    # The bare switch, which asynchronous GRPO insists on, asks for a correction and not for which.
    if not host.get("use_importance_sampling_correction") or name is not None or own.get("use_rollout_log_probs"):
        return base
    base["use_tis"] = True
    upper, lower = host.get("truncated_importance_sampling_ratio"), host.get("truncated_importance_sampling_ratio_min")
    if kind is None:
        return base | ({} if "tis" in own else {"tis": {"upper_bound": math.inf}})
    high = number(upper, "truncated_importance_sampling_ratio")
    low = 0.0 if lower is None else number(lower, "truncated_importance_sampling_ratio_min")
    if kind == "seq-mask-tis":
        criterion = {"aggregate": "sequence_mean", "lower_bound": low, "upper_bound": high}
        return base | {"tis": {"level": "token", "upper_bound": math.inf}, "rs": {"criteria": [criterion]}}
    modes = {"tis": "clip", "icepop": "mask"}
    if kind not in modes:
        raise unknown("truncated_importance_sampling_type", kind, (*modes, "seq-mask-tis"))
    return base | {"tis": {"level": "token", "mode": modes[kind], "lower_bound": low, "upper_bound": high}}


def _at(nested: Mapping[str, Any], path: str) -> Any:
    for part in path.split("."):
        if not isinstance(nested, Mapping) or part not in nested:
            return None
        nested = nested[part]
    return nested
