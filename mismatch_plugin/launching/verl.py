"""verl: our flags become Hydra overrides of its own configuration tree; the entry point does the rest in every process.

```bash
python -m mismatch_plugin.launch -m verl.trainer.main_ppo … --use-tis --tis-level geometric
```
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.hooks.verl_settings import BLOCK, LOSS_NAME, REFERENCE_LINE, check_tree, describe
from mismatch_plugin.launching.command_line import Given
from mismatch_plugin.launching.hydra import put, read_overrides, text
from mismatch_plugin.launching.plan import Host, Plan

_RC, _ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
_POLICY_LOSS = f"{_ACTOR}.policy_loss"
_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
# The actor's clip bounds in verl's own YAML.
_CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def plan(given: Given, script: Path | None) -> Plan:
    """The run of main_ppo: overrides for verl's switches, our block, and the loss in the workers.

    Raises: ValueError where an override on the line says otherwise, or asks for what verl decides.
    """
    overrides = read_overrides(given.host_argv)
    if not given.flags and f"{_RC}.{BLOCK}" not in {key for name in overrides for key in _prefixes(name)}:
        return Plan.untouched("verl", given)
    wanted = _wanted(given) if given.flags else {}
    for name, value in wanted.items():
        mine = overrides.get(name, value)
        if mine != value:
            raise ValueError(
                f"{name}={text(mine)} contradicts algorithm {given.config.algorithm} of the plugin's flags, which "
                f"makes it {text(value)}: leave one of them out."
            )
    block = {name: value for name, value in given.settings.items() if name != "use_rollout_log_probs"}
    if given.config.use_rollout_log_probs:
        block.pop("use_tis", None)  # bypass_mode and loss_type say it
    if given.config.algorithm == 3:  # without a level verl's own REINFORCE has no weights
        block["tis"] = {"level": given.config.tis.level, **(block.get("tis") or {})}
    taken = sorted(name for name in overrides if name.startswith(f"{_RC}.{BLOCK}"))
    if given.flags and taken:
        raise ValueError(f"{taken[0]} stands beside the plugin's flags: give the settings in one of the two ways.")
    added = [f"{name}={text(value)}" for name, value in wanted.items() if name not in overrides]
    tree = _tree({**overrides, **wanted}, block)
    if given.flags:
        added.append(f"+{_RC}.{BLOCK}={text(block)}")
        if f"{_POLICY_LOSS}.rollout_correction" not in overrides:
            added.append(REFERENCE_LINE.replace("'", ""))
    lines = describe(check_tree(tree) or MismatchConfig(), tree)
    return Plan((*given.host_argv, *added), tuple(added), tuple(lines), refuse_unregistered)


def refuse_unregistered() -> None:
    """Raises ValueError where verl's processes would not load the loss, or it is written for another verl."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "mismatch_plugin" not in policy.split(","):
        raise ValueError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading the plugin: unset it, or name mismatch_plugin."
        )
    if not any(entry.name == "mismatch_plugin" for entry in entry_points(group="verl.plugins")):
        raise ValueError(
            "verl finds the plugin by the entry point of an installed package, which is missing here: pip install it "
            "in the image of every node (a folder on PYTHONPATH is not enough)."
        )


def _wanted(given: Given) -> dict[str, Any]:
    """verl's own switches for the algorithm."""
    bypass = given.config.use_rollout_log_probs
    kind = "reinforce" if given.config.algorithm == 3 else "ppo_clip"
    wanted: dict[str, Any] = {f"{_RC}.bypass_mode": bypass, f"{_RC}.loss_type": kind}
    return {**wanted, f"{_POLICY_LOSS}.loss_mode": LOSS_NAME, _LOG_PROBS: True}


def _tree(overrides: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """The part of verl's tree that the settings depend on, with verl's defaults."""
    tree: dict[str, Any] = {}
    for name, value in {**{f"{_ACTOR}.{key}": value for key, value in _CLIP.items()}, **overrides}.items():
        if name.startswith((f"{_RC}.", f"{_ACTOR}.", "actor_rollout_ref.rollout.calculate")):
            put(tree, name, value)
    correction = tree.setdefault("algorithm", {}).setdefault("rollout_correction", {})
    if block:
        correction[BLOCK] = dict(block)
    actor = tree["actor_rollout_ref"]["actor"]
    actor["policy_loss"] = {**actor.get("policy_loss", {}), "rollout_correction": correction}
    return tree


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: index + 1]) for index in range(len(parts))]


HOST = Host("verl", ("verl",), frozenset(), plan)
