"""A comparison as `compare` writes it, with planted outcomes on twelve seeds.

control: all end alike. int2: bypass is lost. stale32: PPO collapses on every seed, with dual clip too; bypass, token_is
and token_icepop hold; seq_is ends even lower.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_plugin.compare.experiments import Settings

if TYPE_CHECKING:
    from mismatch_plugin.compare.statistics import Results

SEEDS = tuple(range(100, 112))
ENDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "control": {"PPO": (0.98, 0.98), "bypass": (0.98, 0.98), "token_is": (0.98, 0.98)},
    "int2": {"PPO": (0.9, 0.9), "bypass": (0.2, 0.01), "token_is": (0.9, 0.9)},
    "stale32": {
        "PPO": (0.95, 0.1),
        "dual_clip": (0.95, 0.1),
        "bypass": (0.95, 0.9),
        "token_is": (0.95, 0.6),
        "seq_is": (0.95, 0.03),
        "token_icepop": (0.95, 0.75),
    },
}
"""Setting → label → (peak, final value)."""
MISMATCH: Mapping[str, Mapping[str, Any]] = {
    "PPO": {"use_tis": False},
    "dual_clip": {"ppo": {"dual_clip": 3.0}},
    "bypass": {"use_rollout_log_probs": True},
    "token_is": {"use_tis": True},
    "seq_is": {"use_tis": True, "tis": {"level": "sequence"}},
    "token_icepop": {"use_tis": True, "tis": {"mode": "mask", "lower_bound": 0.5, "upper_bound": 5.0}},
}
_TASK = "Six digits are reversed."
INFO: Mapping[str, Any] = {
    "settings": [*ENDS],
    "seeds": [*SEEDS],
    "plan": {setting: [*variants] for setting, variants in ENDS.items()},
    "about_settings": {
        "control": {"title": "In sync", "task": _TASK},
        "int2": {"title": "Two bits", "task": _TASK},
        "stale32": {"title": "Very stale", "what": "Weights are <old>.", "task": _TASK, "changes": {"staleness": 32}},
    },
    "about_seeds": "Parameters were chosen on seeds 0 to 9.",
    "command": "mismatch-plugin compare --output RUN",
}


def small(**changes: Any) -> Settings:
    """The problem in small, for runs that are made."""
    sizes = {"hidden": 16, "ffn": 24, "steps": 4, "prompts_per_batch": 8, "samples_per_prompt": 4, "lr": 4e-3}
    warm = {"warm_up_target": 0.3, "warm_up_steps": 40, "warm_up_batch": 64, "warm_up_lr": 1e-2}
    return Settings.model_validate({**sizes, **warm, "eval_every": 2, "eval_prompts": 16, **changes})


def exact_at(step: int, peak: float, end: float) -> float:
    """Up to the peak by step 100, on it until 160, down to the end by step 280."""
    if step <= 160:
        return peak * min(1.0, 0.2 + step / 125)
    return end + (peak - end) * max(0.0, (280 - step) / 120)


def write_run(root: Path, setting: str, label: str, seed: int, ends: tuple[float, float] | None = None) -> Path:
    """One finished run of 21 evaluations. ends: peak and final value in place of those planned. Returns its folder."""
    folder = root / setting / label / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"variant": label, "mismatch": MISMATCH[label]}))
    (folder / "done.json").write_text("{}")
    peak, end = ends or ENDS[setting][label]
    sign = (-1) ** (seed + [*MISMATCH].index(label) // 2)  # a little noise, of no sign on the whole
    lines: list[dict[str, Any]] = []
    for step in range(0, 401, 20):
        exact = exact_at(step, peak, end) * (1 + 0.02 * sign)
        lines.append({"step": step, "held_out_exact": exact})
        if step:
            kl = 0.0 if setting == "control" else 0.5
            metrics = {"rollout_corr/kl": kl, "rollout_corr/accepted_token_fraction": 0.75}
            norm = (300.0 if label == "PPO" else 5.0) if step == 300 else 1.0
            lines[-1] |= {"reward": exact, "exact": exact, "grad_norm": norm, "metrics": metrics}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def write_comparison(root: Path, **info: Any) -> Path:
    """All runs, and `run.json` with the entries of `info` in place of those of INFO."""
    described = {**INFO, **info}
    for setting in described["settings"]:
        for label in ENDS[setting]:
            for seed in described["seeds"]:
                write_run(root, setting, label, seed)
    root.mkdir(exist_ok=True)
    (root / "run.json").write_text(json.dumps(described))
    return root


def outcome(means: Mapping[str, Mapping[str, float]], n: int = 12, spread: float = 0.02) -> Results:
    """Variants that end at these means on n seeds, each with noise of its own; those below 0.5 of 1 have collapsed."""
    from mismatch_plugin.compare.statistics import Variant, judged  # needs scipy

    random = np.random.default_rng(0)
    results: Results = {}
    for setting, of in means.items():
        finals = {name: dict(enumerate((mean + spread * random.normal(size=n)).tolist())) for name, mean in of.items()}
        results[setting] = judged(
            Variant(name, values, {seed: value < 0.5 for seed, value in values.items()})
            for name, values in finals.items()
        )
    return results
