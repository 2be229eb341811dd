"""A comparison as `compare` writes it, with planted outcomes: five settings, each with its own variants, twelve seeds.

control: nothing differs. int2: 1 is lost. stale16: nothing. stale32: 0 collapses on every seed, 0 with dual clip too, 1
and 2 token do not, 2 sequence ends even lower. both: 1 is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEEDS = tuple(range(100, 112))
STEPS = range(0, 401, 20)
ENDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "control": {"0": (0.98, 0.98), "1": (0.98, 0.98), "2:token:truncate": (0.98, 0.98)},
    "int2": {"0": (0.9, 0.9), "1": (0.2, 0.01), "2:token:truncate": (0.9, 0.9)},
    "stale16": {"0": (0.95, 0.8), "1": (0.95, 0.8)},
    "stale32": {
        "0": (0.95, 0.1),
        "0:dual_clip": (0.95, 0.1),
        "1": (0.95, 0.9),
        "2:token:truncate": (0.95, 0.6),
        "2:sequence:truncate": (0.95, 0.03),
        "token_icepop": (0.95, 0.75),
    },
    "both": {"0": (0.9, 0.88), "1": (0.1, 0.01)},
}
"""Setting → variant → (peak, final value)."""
GRADIENTS = {"0": 300.0, "2:token:truncate": 2.0}
"""Largest gradient norm of a run; of the others 5."""
IMPOSSIBLE = {"0": 0.09, "2:token:truncate": 0.022}
METRICS = (
    *("k3_kl", "rollout_is_ratio_mean", "rollout_is_ratio_eff_sample_size", "ppl_ratio", "chi2_token", "chi2_seq"),
    *("rollout_is_weight_after_mean", "rollout_is_weight_after_max", "rollout_is_weight_after_eff_sample_size"),
    *(f"rollout_is_ratio_{q}" for q in ("p1", "p50", "p99", "p99_9")),
)
MISMATCH: Mapping[str, Mapping[str, Any]] = {
    "0": {"use_tis": False},
    "0:dual_clip": {"ppo": {"dual_clip": 3.0}},
    "1": {"use_rollout_log_probs": True},
    "2:token:truncate": {"use_tis": True, "tis": {"level": "token", "mode": "truncate"}},
    "2:sequence:truncate": {"use_tis": True, "tis": {"level": "sequence", "mode": "truncate"}},
    "token_icepop": {
        "use_tis": True,
        "tis": {"level": "token", "mode": "mask", "lower_bound": 0.5, "upper_bound": 5.0},
    },
}
_TASK = "Six digits are reversed."
INFO: Mapping[str, Any] = {
    "settings": [*ENDS],
    "variants": [*MISMATCH],
    "seeds": [*SEEDS],
    "plan": {setting: [*variants] for setting, variants in ENDS.items()},
    "about_settings": {
        "stale32": {"title": "Very stale", "what": "Weights are <old>.", "task": _TASK, "changes": {"staleness": 32}},
        "stale16": {"task": _TASK},
        "control": {"title": "In sync", "what": "Nothing lies between.", "task": _TASK, "changes": {}},
    },
    "outcomes": {"primary": "final exact match", "secondary": ["area under the curve", "collapsed"]},
    "about_seeds": "Parameters were chosen on seeds 0 to 9.",
    "command": "mismatch-plugin compare --output RUN",
    "lab": {"task": "reverse6", "data": "/somewhere/private/file.txt"},
    "versions": {"torch": "2.x"},
}
CROSS_CHECK = {"folder": "megatron", "settings": ["stale32"], "variants": ["0", "2:token:truncate"], "seeds": [100]}


def exact_at(step: int, peak: float, end: float) -> float:
    """Up to the peak by step 100, on it until 160, down to the end by step 280."""
    if step <= 160:
        return peak * min(1.0, 0.2 + step / 125)
    return end + (peak - end) * max(0.0, (280 - step) / 120)


def write_run(
    root: Path, setting: str, variant: str, seed: int, ends: tuple[float, float] | None = None, **columns: float
) -> None:
    """One finished run. ends: peak and final value; columns: in place of those planned."""
    folder = root / setting / variant.replace(":", "_") / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"variant": variant, "mismatch": MISMATCH[variant], "settings": {"lr": 3e-3, "steps": 400}}
    config["settings"] |= {"prompts_per_batch": 16, "samples_per_prompt": 8, "mini_batches": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "done.json").write_text("{}")
    peak, end = ends or ENDS[setting][variant]
    sign = (-1) ** (seed + [*MISMATCH].index(variant) // 2)  # a little noise, of no sign on the whole
    lines: list[dict[str, Any]] = []
    for step in STEPS:
        exact = exact_at(step, peak, end) * (1 + 0.02 * sign)
        lines.append({"step": step, "held_out_exact": exact})
        if not step:
            continue
        apart = setting != "control"
        kl = columns.get("kl", 0.5 if apart else 0.02 if variant == "1" else 0.0)
        lines[-1] |= {
            "reward": exact,
            "exact": exact,
            "grad_norm": columns.get("grad_norm", GRADIENTS.get(variant, 5.0)) if step == 300 else 1.0,
            "seconds": {"rollout": 0.025, "old_log_probs": 0.0 if variant == "1" else 0.025, "train": 0.05},
            "impossible_tokens": IMPOSSIBLE.get(variant, 0.05) if apart else 0.0,
            "metrics": {f"rollout_corr/{name}": columns.get("ratio", 0.5 + 1e-3 * step) for name in METRICS}
            | {"rollout_corr/kl": kl, "rollout_corr/rollout_is_veto_fraction": 0.0}
            | {"rollout_corr/accepted_token_fraction": 1.0},
        }
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def write_comparison(root: Path, check: bool = True, **info: Any) -> Path:
    """All runs, and `run.json` with the entries of `info` in place of those of INFO. check: with the cross-check."""
    described = {**INFO, **({"cross_check": CROSS_CHECK} if check else {}), **info}
    for setting in described["settings"]:
        for variant in ENDS[setting]:
            for seed in described["seeds"]:
                write_run(root, setting, variant, seed)
    if check:
        write_run(root / "megatron", "stale32", "0", 100, (0.8, 0.05))
        write_run(root / "megatron", "stale32", "2:token:truncate", 100, (0.8, 0.4))
    (root / "run.json").write_text(json.dumps(described))
    return root
