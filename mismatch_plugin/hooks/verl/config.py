"""What verl's configuration and our block in it say together, what is refused before training starts, and the launcher.

Our settings are in `algorithm.rollout_correction.mismatch`: verl hands that block on as it is, to the driver and,
through `actor_rollout_ref.actor.policy_loss.rollout_correction`, to the workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import is_dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mismatch_plugin.config import ALGORITHM_NAMES, MismatchConfig
from mismatch_plugin.config.compat.verl import (
    CLIP,
    CORRECTION,
    GATE,
    OBJECTIVES,
    OTHER_LOSSES,
    SPELLED,
    from_verl,
    no_such_loss,
    verl_clip,
)
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import get_path, ignore_mismatch_warnings, merge
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import Given, Host, Plan, block_lines, resolve
from mismatch_plugin.hooks.hosts import ACTOR, RC, VERL
from mismatch_plugin.hooks.tree import BLOCK, plain, put, read_overrides, take_block, text

LOSS_NAME = "mismatch"
ROLLOUT = "actor_rollout_ref.rollout"
LOG_PROBS = f"{ROLLOUT}.calculate_log_probs"
REFERENCE_LINE = f"+{ACTOR}.policy_loss.rollout_correction='${{{RC}}}'"
"""The override that lets workers see the block; verl fixes their configuration before it copies the block itself."""
ESTIMATORS = ("grpo", "grpo_vectorized")
"""verl's estimators that are (R − mean) / (deviation + 1e-6) within a prompt's responses."""
LOSS_LINES = f"{ACTOR}.policy_loss.loss_mode={LOSS_NAME} and {REFERENCE_LINE}"
"""The two overrides that make the plugin's loss the workers'."""


def settings(host_config: Any) -> MismatchConfig:
    """The configuration that verl's own keys and our block give together.

    host_config: verl's whole tree, an actor configuration (its `policy_loss.rollout_correction` is read), or the
    `rollout_correction` block itself. Clip bounds are the actor's, entropy, KL and aggregation stay verl's. A preset is
    `mismatch.preset`. `tis.batch_normalize_scope` auto becomes what verl gives: the rollout batch for algorithm 2,
    whose weights the driver makes, one micro-batch for algorithm 3.
    Raises: ValueError, one sentence, where the block contradicts verl's keys or asks for what verl decides.
    """
    # `get`, not `in`: verl's dataclasses are mappings whose `in` raises AttributeError.
    if host_config.get("algorithm") is not None:
        block, actor = host_config["algorithm"].get("rollout_correction"), host_config["actor_rollout_ref"]["actor"]
    elif host_config.get("policy_loss") is not None:
        actor = host_config
        block = actor["policy_loss"].get("rollout_correction")
        # The dataclass default says nothing about what the driver does: it may well be in bypass mode.
        if block is None or (is_dataclass(block) and block == type(block)()):
            raise ValueError(f"the workers do not see {RC}: add {REFERENCE_LINE} (loss_mode {LOSS_NAME} reads it).")
    else:
        block, actor = host_config, {}
    chosen = {key: actor.get(key) for key in (*CLIP, *GATE) if actor.get(key) is not None}
    mode = (actor.get("policy_loss") or {}).get("loss_mode")
    if mode in OBJECTIVES and mode != "vanilla":  # verl's default, next to which ours may choose
        chosen["loss_mode"] = mode
    return _build(json.dumps([plain(block or {}), chosen], sort_keys=True))


def has_block(rollout_correction: Any) -> bool:
    """Whether a `rollout_correction` block asks for this package (verl's own code runs otherwise)."""
    return isinstance(rollout_correction, Mapping) and rollout_correction.get(BLOCK) is not None


def check_tree(tree: Any) -> MismatchConfig | None:
    """Settings of verl's whole configuration; None where it does not ask for this package. Raises: ValueError, also
    where workers would not see the settings, or log-probs would be missing."""
    algorithm, reference = tree["algorithm"], tree["actor_rollout_ref"]
    block = algorithm.get("rollout_correction")
    policy_loss = reference["actor"].get("policy_loss") or {}
    uses_loss = policy_loss.get("loss_mode") == LOSS_NAME
    if not uses_loss and not has_block(block):
        return None
    config, mode = settings(tree), policy_loss.get("loss_mode") or "vanilla"
    estimator = algorithm.get("adv_estimator")
    if config.rs.group != "keep" and estimator is not None and estimator not in ESTIMATORS:
        raise ValueError(
            f"rs.group {config.rs.group} is about the responses to one prompt, and algorithm.adv_estimator "
            f"{getattr(estimator, 'value', estimator)} compares other ones: choose {' or '.join(ESTIMATORS)}, or leave "
            f"rs.group out."
        )
    objective = OBJECTIVES.get(mode, "ppo")
    if not uses_loss and (config.use_rollout_log_probs or config.objective != objective):
        why = f"{RC}.bypass_mode with a block {BLOCK}"
        if not config.use_rollout_log_probs:
            why = f"{BLOCK}.objective {config.objective}, where verl's own {mode} runs,"
        raise ValueError(f"{why} needs our loss in the workers: add {LOSS_LINES}.")
    if uses_loss and plain(policy_loss.get("rollout_correction")) != plain(block):
        raise ValueError(f"{ACTOR}.policy_loss.rollout_correction is not {RC}: add {REFERENCE_LINE}.")
    needs = config.needs_rollout_log_probs
    if needs and (reference.get("rollout") or {}).get("calculate_log_probs", True) is False:
        raise ValueError(
            f"algorithm {config.algorithm} needs the rollout engine's log-probs, and verl would skip it silently: set "
            f"{LOG_PROBS}=true."
        )
    return config


def describe(config: MismatchConfig, tree: Any) -> list[str]:
    """Lines of the start-up block: what will run, and what of it is verl's. tree: verl's whole configuration."""
    reference, block = tree["actor_rollout_ref"], tree["algorithm"]["rollout_correction"]
    actor = reference["actor"]
    bypass, mode = config.use_rollout_log_probs, (actor.get("policy_loss") or {}).get("loss_mode") or "vanilla"
    lines, leave_out = list[str](), tuple[str, ...]()
    if bypass:
        lines.append("weights and rejection are made in the workers' loss, micro-batch by micro-batch")
    elif has_block(block):
        lines.append("weights and rejection are made on the driver, over the rollout batch")
    else:
        leave_out = ("invalid rollout log-probs: ",)
        lines.append(
            f"weights, rejection and metrics are made by verl's own function on the driver: there is no {RC}.{BLOCK}; "
            f"for the plugin's add +{RC}.{BLOCK}.metrics=basic"
        )
    if mode == LOSS_NAME:
        lines.append(f"loss in the workers: the plugin's; loss_mode {LOSS_NAME} is algorithm {config.algorithm} here")
    elif not bypass:
        leave_out += () if mode in OBJECTIVES else ("objective: ",)
        lines.append(
            f"loss in the workers: verl's own {mode}, with the driver's weights and mask; for the plugin's add "
            f"{LOSS_LINES}"
        )
    kept = not bypass and config.denominator == "original"
    # verl's v1 trainers count tokens of a mask that no rejection reaches, the others afterwards; those under
    # verl.experimental, which have a section `rollout`, too.
    early = tree.get("rollout") is None and (tree.get("trainer") or {}).get("use_v1", False)
    count = "still" if bypass or kept or early else "do not"
    if not (bypass or kept) and config.rejects:
        lines.append("verl's entropy and KL terms leave rejected tokens out too; denominator original keeps them")
    if bypass:
        lines.append("metrics are verl's plain mean over micro-batches; extremes, deviations, quantiles are left out")
    if config.gate_kl is not None:
        lines.append(f"the gate judges {'each micro-batch' if bypass else 'the rollout batch'}")
    if config.normalizes:
        lines.append(f"batch normalisation over: {config.tis.batch_normalize_scope}")
    rollout = reference.get("rollout") or {}
    processed = rollout.get("logprobs_mode", "processed_logprobs") == "processed_logprobs"
    renormalised = {"vllm": processed, "sglang": False}.get(rollout.get("name") or "")
    bias = filter_bias(top_p=rollout.get("top_p"), top_k=rollout.get("top_k"), renormalised=renormalised)
    return block_lines(
        config,
        lines,
        divided=f"as in verl, {actor.get('loss_agg_mode', 'token-mean')}: rejected tokens {count} count",
        second_pass="no" if bypass else "yes",
        filtered=bias and f"{bias}. verl passes no mask on: set {ROLLOUT}.top_p=1.0 and top_k=-1",
        length=(tree.get("data") or {}).get("max_response_length"),
        leave_out=leave_out,
    )


@lru_cache(maxsize=16)
def _build(given: str) -> MismatchConfig:
    """verl's keys and our block as one. Raises ValueError where they contradict each other. given: both as JSON."""
    block, actor = json.loads(given)
    own, name = take_block(block, RC)
    with ignore_mismatch_warnings():  # the merged configuration says what has no effect
        read = from_verl({**block, **actor})
    base, bypass = read.model_dump(exclude_unset=True), read.use_rollout_log_probs
    theirs: dict[str, Any] = {"use_rollout_log_probs": bypass}
    if bypass:
        theirs["use_tis"] = read.use_tis
    if "objective" in base:
        theirs["objective"] = base["objective"]
    if not read.use_tis or not bypass:  # REINFORCE has no clip
        theirs["ppo"] = verl_clip(actor, own.get("objective") or base.get("objective", "ppo"))
    if name is not None:
        _validate_switches(name, block, read)
        base = find_preset(name).settings()
    else:  # rollout_is null names no level, and asks for no weights
        said = {path for path, key in SPELLED.items() if key != "rollout_is" or block.get(key) is not None}
        for path in sorted(path for path in said if get_path(base, path) is not None):
            put(theirs, path, get_path(base, path))
        criteria = base.get("rs", {}).get("criteria", ()), (own.get("rs") or {}).get("criteria") or ()
        if all(criteria):
            own = merge(own, {"rs": {"criteria": [*criteria[0], *criteria[1]]}})
    base.pop("ppo", None)
    config = resolve(VERL, own, theirs, base=base)
    if bypass and config.changes_denominator and config.terms.rollout_kl_coef and config.terms.rollout_kl_on == "all":
        raise ValueError(
            f"{BLOCK}.terms.rollout_kl_on all reaches no rejected token in verl, which aggregates over accepted ones: "
            f"choose accepted, or denominator original."
        )
    return config


def _validate_switches(name: str, block: Mapping[str, Any], theirs: MismatchConfig) -> None:
    """Raise ValueError where verl's own keys are next to a preset, or its switches choose another algorithm."""
    for key, default in CORRECTION.items():
        if block.get(key, default) not in (default, None):
            raise ValueError(f"{RC}.{key} {block[key]} is next to {BLOCK}.preset {name}: leave one of them out.")
    meant, bypass = find_preset(name).algorithm, theirs.use_rollout_log_probs
    # Without bypass_mode verl's switches say nothing of weights.
    if bypass != (meant in (1, 3)) or (bypass and theirs.algorithm != meant):
        switches = " and ".join(f"{key}={text(value)}" for key, value in switches_of(meant).items())
        raise ValueError(f"preset {name} is algorithm {meant}, {ALGORITHM_NAMES[meant]}: set {switches}.")


def switches_of(algorithm: int) -> dict[str, Any]:
    """verl's own switches for an algorithm."""
    return {f"{RC}.bypass_mode": algorithm in (1, 3), f"{RC}.loss_type": "reinforce" if algorithm == 3 else "ppo_clip"}


# The launcher: our flags become overrides; the entry point does the rest in every process -----------------------------

_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"

FLAGS: frozenset[str] = frozenset()
# Hydra reads verl's YAML files, not the launcher; the entry point sees the whole tree.
_UNTOUCHED = (
    "none of the plugin's flags or settings is on the line: nothing is added. Settings in verl's YAML files, if any, "
    "are checked and printed when verl reads them"
)


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run of main_ppo: overrides for verl's switches, our block, and the loss in the workers. Without our flags,
    settings that are overrides on the line (our block, or `loss_mode=mismatch`) count. Raises: ValueError where an
    override on the line says otherwise, or asks for what verl decides."""
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
