"""verl: our flags become Hydra overrides of its own configuration tree; the entry point does the rest in every process.

```bash
python -m mismatch_plugin.launch -m verl.trainer.main_ppo … --use-tis
```

Settings may also be overrides on the line; the loss in the workers is then added where the line names none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mismatch_plugin.config.compat.verl import CLIP, OBJECTIVES, OTHER_LOSSES, no_such_loss
from mismatch_plugin.hooks.base import Given, Host, Plan
from mismatch_plugin.hooks.tree import BLOCK, put, read_overrides, text
from mismatch_plugin.hooks.verl.config import (
    ACTOR,
    LOG_PROBS,
    LOSS_NAME,
    RC,
    REFERENCE_LINE,
    ROLLOUT,
    check_tree,
    describe,
    has_block,
    switches_of,
)

_POLICY_LOSS = f"{ACTOR}.policy_loss"
_LOSS_MODE = f"{_POLICY_LOSS}.loss_mode"

FLAGS: frozenset[str] = frozenset()
# Hydra reads verl's YAML files, not the launcher; the entry point sees the whole tree.
_UNTOUCHED = (
    "none of the plugin's flags or settings is on the line: nothing is added. Settings in verl's YAML files, if any, "
    "are checked and printed when verl reads them"
)


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run of main_ppo: overrides for verl's switches, our block, and the loss in the workers.

    Without our flags, settings that are overrides on the line (our block, or `loss_mode=mismatch`) count.
    Raises: ValueError where an override on the line says otherwise, or asks for what verl decides.
    """
    overrides = read_overrides(given.host_argv)
    line = _tree(overrides, {}, script)
    mode = line["actor_rollout_ref"]["actor"]["policy_loss"].get("loss_mode")
    if not given.flags and mode != LOSS_NAME and not has_block(line["algorithm"]["rollout_correction"]):
        return Plan.untouched(host, given, _UNTOUCHED)
    block = {name: value for name, value in given.settings.items() if name != "use_rollout_log_probs"}
    host_argv = given.host_argv
    if given.flags and mode in (*OBJECTIVES, *OTHER_LOSSES):
        block |= _objective(given, mode)
        overrides.pop(_LOSS_MODE, None)
        host_argv = tuple(token for token in host_argv if token.partition("=")[0].lstrip("+~") != _LOSS_MODE)
    wanted: dict[str, Any] = {_LOSS_MODE: LOSS_NAME} if given.flags or mode is None else {}
    if given.flags:
        wanted = {**switches_of(given.config.algorithm), **wanted, LOG_PROBS: True}
    if given.config.tis.batch_normalize:
        wanted[f"{RC}.rollout_is_batch_normalize"] = True  # its default, False, would contradict ours
    for name, value in wanted.items():
        mine = overrides.get(name, value)
        if mine != value:
            raise ValueError(
                f"{name}={text(mine)} contradicts algorithm {given.config.algorithm} of the plugin's flags, which "
                f"makes it {text(value)}: leave one of them out."
            )
    if given.config.use_rollout_log_probs:
        block.pop("use_tis", None)  # bypass_mode and loss_type say it
    if given.config.algorithm == 3:  # without a level verl's own REINFORCE has no weights
        block["tis"] = {"level": given.config.tis.level, **(block.get("tis") or {})}
    if given.flags and has_block(line["algorithm"]["rollout_correction"]):
        taken = next((name for name in overrides if name.startswith(f"{RC}.{BLOCK}")), RC)
        raise ValueError(f"{taken} is on the line next to the plugin's flags: give the settings in one place.")
    added = [f"{name}={text(value)}" for name, value in wanted.items() if name not in overrides]
    if given.flags:
        added.append(f"+{RC}.{BLOCK}={text(block)}")
    tree = _tree({**overrides, **wanted}, block, script)
    policy_loss = tree["actor_rollout_ref"]["actor"]["policy_loss"]
    if policy_loss.get("loss_mode") == LOSS_NAME and "rollout_correction" not in policy_loss:
        added.append(REFERENCE_LINE.replace("'", ""))
    policy_loss["rollout_correction"] = tree["algorithm"]["rollout_correction"]
    config = check_tree(tree)
    assert config is not None  # the tree has our block or our loss
    return Plan((*host_argv, *added), tuple(added), tuple(describe(config, tree)), validate_registration, config)


def validate_registration() -> None:
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


def _objective(given: Given, mode: str) -> dict[str, Any]:
    """The objective of verl's loss_mode, which gives its place to ours. Raises ValueError where it cannot be had."""
    if mode in OTHER_LOSSES:
        raise ValueError(f"{_LOSS_MODE}={mode} is verl's own: {no_such_loss(mode)} Leave it or the plugin's flags out.")
    theirs, mine = OBJECTIVES[mode], given.settings.get("objective")
    if given.config.algorithm == 3:
        mine = "reinforce"
    if mine not in (None, theirs):
        whose = "algorithm 3 (REINFORCE)" if given.config.algorithm == 3 else f"--mismatch-objective {mine}"
        raise ValueError(f"{_LOSS_MODE}={mode} contradicts {whose}: leave one of them out.")
    return {} if theirs == "ppo" or given.config.algorithm == 3 else {"objective": theirs}


def _tree(overrides: Mapping[str, Any], block: Mapping[str, Any], script: Path | None) -> dict[str, Any]:
    """The part of verl's tree that the settings depend on, with verl's defaults and what its script is for."""
    tree: dict[str, Any] = {}
    for name, value in {**{f"{ACTOR}.{key}": value for key, value in CLIP.items()}, **overrides}.items():
        heads = (f"{RC}.", f"{ACTOR}.", f"{ROLLOUT}.", "algorithm.adv_estimator.", "data.", "trainer.", "rollout.")
        if f"{name}.".startswith(heads):
            put(tree, name, deepcopy(value))
    correction = tree.setdefault("algorithm", {}).setdefault("rollout_correction", {})
    if block:
        correction[BLOCK] = dict(block)
    tree["actor_rollout_ref"]["actor"].setdefault("policy_loss", {})
    experimental = script is not None and "experimental" in script.parts
    if experimental:  # its trainers have a section `rollout`
        tree.setdefault("rollout", {})
    old = experimental or (script is not None and script.stem == "main_ppo_v0")
    tree.setdefault("trainer", {}).setdefault("use_v1", not old)  # as main_ppo of 0.9
    return tree
