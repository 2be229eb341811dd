"""What verl's configuration and our block in it say together, and what is refused before training starts.

Our settings are in `algorithm.rollout_correction.mismatch`: verl hands that block on as it is, to the driver and,
through `actor_rollout_ref.actor.policy_loss.rollout_correction`, to the workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

from mismatch_plugin.config import ALGORITHM_NAMES, MismatchConfig
from mismatch_plugin.config.compat.verl import CLIP, CORRECTION, GATE, OBJECTIVES, SPELLED, from_verl, verl_clip
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import get_path, ignore_mismatch_warnings, merge
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import block_lines, resolve
from mismatch_plugin.hooks.hosts import VERL
from mismatch_plugin.hooks.tree import BLOCK, plain, put, take_block, text

LOSS_NAME = "mismatch"
RC, ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
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
    return _build(json.dumps(_parts(host_config), sort_keys=True))


def has_block(rollout_correction: Any) -> bool:
    """Whether a `rollout_correction` block asks for this package (verl's own code runs otherwise)."""
    return isinstance(rollout_correction, Mapping) and rollout_correction.get(BLOCK) is not None


def check_tree(tree: Any) -> MismatchConfig | None:
    """Settings of verl's whole configuration; None where it does not ask for this package.

    Raises: ValueError also where workers would not see the settings, or log-probs would be missing.
    """
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
    before = bypass or kept or _counts_first(tree)
    count = "still" if before else "do not"
    if not (bypass or kept) and config.rejects:
        lines.append("verl's entropy and KL terms leave rejected tokens out too; denominator original keeps them")
    if bypass:
        lines.append("metrics are verl's plain mean over micro-batches; extremes, deviations, quantiles are left out")
    if config.gate_kl is not None:
        lines.append(f"the gate judges {'each micro-batch' if bypass else 'the rollout batch'}")
    if config.normalizes:
        lines.append(f"batch normalisation over: {config.tis.batch_normalize_scope}")
    return block_lines(
        config,
        lines,
        divided=f"as in verl, {actor.get('loss_agg_mode', 'token-mean')}: rejected tokens {count} count",
        second_pass="no" if bypass else "yes",
        filtered=_sampling_filter(reference.get("rollout") or {}),
        length=(tree.get("data") or {}).get("max_response_length"),
        leave_out=leave_out,
    )


def _counts_first(tree: Any) -> bool:
    """Whether verl's trainer divides by tokens that it counts before the driver rejects.

    The v1 trainers do (`loss_mask` of the queue, which no rejection reaches); the others copy the mask afterwards.
    Those under verl.experimental have a section `rollout`.
    """
    return tree.get("rollout") is None and bool((tree.get("trainer") or {}).get("use_v1", False))


def _sampling_filter(rollout: Any) -> str:
    """What the section's filters leave in the ratio; empty where they are off."""
    processed = rollout.get("logprobs_mode", "processed_logprobs") == "processed_logprobs"
    bias = filter_bias(
        top_p=rollout.get("top_p"),
        top_k=rollout.get("top_k"),
        renormalised={"vllm": processed, "sglang": False}.get(rollout.get("name") or ""),
    )
    return bias and f"{bias}. verl passes no mask on: set {ROLLOUT}.top_p=1.0 and top_k=-1"


def _parts(host_config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the rollout_correction block, the actor's clip settings) as plain data."""
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
    return plain(block or {}), chosen


@lru_cache(maxsize=16)
def _build(given: str) -> MismatchConfig:
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
    base.pop("ppo", None)
    if name is not None:
        _validate_switches(name, block, read)
        base = find_preset(name).settings()
        base.pop("ppo", None)
    else:  # rollout_is null names no level, and asks for no weights
        said = {path for path, key in SPELLED.items() if key != "rollout_is" or block.get(key) is not None}
        for path in sorted(path for path in said if get_path(base, path) is not None):
            put(theirs, path, get_path(base, path))
        criteria = base.get("rs", {}).get("criteria", ()), (own.get("rs") or {}).get("criteria") or ()
        if all(criteria):
            own = merge(own, {"rs": {"criteria": [*criteria[0], *criteria[1]]}})
    config = resolve(VERL, own, theirs, base=base)
    if bypass and config.changes_denominator and config.terms.rollout_kl_coef and config.terms.rollout_kl_on == "all":
        raise ValueError(
            f"{BLOCK}.terms.rollout_kl_on all reaches no rejected token in verl, which aggregates over accepted ones: "
            f"choose accepted, or denominator original."
        )
    return config


def _validate_switches(name: str, block: Mapping[str, Any], theirs: MismatchConfig) -> None:
    """Raise ValueError where verl's own keys are next to a preset, or its switches choose another algorithm."""
    record = find_preset(name)
    for key, default in CORRECTION.items():
        if block.get(key, default) not in (default, None):
            raise ValueError(f"{RC}.{key} {block[key]} is next to {BLOCK}.preset {name}: leave one of them out.")
    bypass, reinforce = record.algorithm in (1, 3), record.algorithm == 3
    if theirs.use_rollout_log_probs != bypass or (bypass and (theirs.algorithm == 3) != reinforce):
        switches = " and ".join(f"{key}={text(value)}" for key, value in switches_of(record.algorithm).items())
        raise ValueError(
            f"preset {name} is algorithm {record.algorithm}, {ALGORITHM_NAMES[record.algorithm]}: set {switches}."
        )


def switches_of(algorithm: int) -> dict[str, Any]:
    """verl's own switches for an algorithm."""
    return {f"{RC}.bypass_mode": algorithm in (1, 3), f"{RC}.loss_type": "reinforce" if algorithm == 3 else "ppo_clip"}
