"""What verl's configuration and our block in it say together, and what is refused before training starts.

Our settings are in `algorithm.rollout_correction.mismatch`: verl hands that block on as it is, to the driver and,
through `actor_rollout_ref.actor.policy_loss.rollout_correction`, to the workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal

from mismatch_plugin.config import ALGORITHM_NAMES, MismatchConfig, bound_warnings
from mismatch_plugin.config.compat.verl import CLIP, CORRECTION, GATE, OBJECTIVES, SPELLED, from_verl, verl_clip
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import dotted_fields_set, get_path, ignore_mismatch_warnings, merge
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.block import BLOCK, plain, settings_given, take_block
from mismatch_plugin.hooks.verl.groups import check_estimator

LOSS_NAME = "mismatch"
RC, ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LOG_PROBS = f"{ROLLOUT}.calculate_log_probs"
REFERENCE_LINE = f"+{ACTOR}.policy_loss.rollout_correction='${{{RC}}}'"
"""The override that lets workers see the block; verl fixes their configuration before it copies the block itself."""
LOSS_LINES = f"{ACTOR}.policy_loss.loss_mode={LOSS_NAME} and {REFERENCE_LINE}"
"""The two overrides that make the plugin's loss the workers'."""
# Start of the path of a setting that verl owns → what to set instead.
_OWNED_BY_VERL = {
    "terms.entropy_coef": f"set {ACTOR}.entropy_coeff",
    "terms.kl": f"set {ACTOR}.use_kl_loss, kl_loss_coef and kl_loss_type",
    "aggregation": f"set {ACTOR}.loss_agg_mode",
    "length_norm": f"set {ACTOR}.loss_scale_factor",
    "rs.max_staleness": "its rollout correction is not told which weights train, nor in the v1 trainers which sampled; "
    "set trainer.v1's max_off_policy_threshold, or async_training.staleness_threshold",
    "log_prob_backend": "set actor_rollout_ref.model.use_fused_kernels (verl computes log-probs itself)",
    "inplace_logits": "verl computes log-probs itself",
    "fused_head": "set actor_rollout_ref.model.use_fused_kernels (verl computes log-probs itself)",
    "verify_weights": "its weight updates are not watched",
}


def settings(host_config: Any) -> MismatchConfig:
    """The configuration that verl's own keys and our block give together.

    host_config: verl's whole tree, an actor configuration (its `policy_loss.rollout_correction` is read), or the
    `rollout_correction` block itself. Clip bounds are the actor's, entropy, KL and aggregation stay verl's. A preset is
    `mismatch.preset`. `tis.batch_normalize_scope` auto becomes what verl gives: the rollout batch for algorithm 2,
    whose weights the driver makes, one micro-batch for algorithm 3.
    Raises: ValueError, one sentence, where the block contradicts verl's keys or asks for what verl decides.
    """
    block, actor = _parts(host_config)
    return _build(json.dumps([block, actor], sort_keys=True))


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
    check_estimator(config, algorithm)
    if config.use_rollout_log_probs and not uses_loss:
        objective = OBJECTIVES.get(mode, "ppo")
        spelled = "" if objective == "ppo" else f" ({mode} is +{RC}.{BLOCK}.objective={objective} there)"
        raise ValueError(
            f"{RC}.bypass_mode with a block {BLOCK} needs our loss in the workers: add {LOSS_LINES}{spelled}."
        )
    if not uses_loss and config.objective != OBJECTIVES.get(mode, "ppo"):
        raise ValueError(
            f"{BLOCK}.objective {config.objective} needs our loss in the workers, where verl's own {mode} runs: add "
            f"{LOSS_LINES}."
        )
    if uses_loss and plain(policy_loss.get("rollout_correction")) != plain(block):
        raise ValueError(f"{ACTOR}.policy_loss.rollout_correction is not {RC}: add {REFERENCE_LINE}.")
    if config.denominator == "accepted" and config.rejects and _counts_first(tree):
        raise ValueError(
            f"{BLOCK}.denominator accepted cannot hold in verl's v1 trainers, which count tokens before the driver "
            f"rejects: choose auto or original, or set trainer.use_v1=false."
        )
    needs = config.needs_rollout_log_probs
    if needs and (reference.get("rollout") or {}).get("calculate_log_probs", True) is False:
        raise ValueError(
            f"algorithm {config.algorithm} needs the rollout engine's log-probs, and verl would skip it silently: set "
            f"{LOG_PROBS}=true."
        )
    return config


def describe(config: MismatchConfig, host_args: Any) -> list[str]:
    """Lines of the start-up block: what will run, and what of it is verl's. host_args: verl's tree or an actor."""
    reference = host_args.get("actor_rollout_ref")
    actor = host_args if reference is None else reference["actor"]
    policy_loss = actor.get("policy_loss") or {}
    block = policy_loss.get("rollout_correction") if reference is None else host_args["algorithm"]["rollout_correction"]
    bypass, lines = config.use_rollout_log_probs, config.describe().splitlines()
    lines = [line for line in lines if not line.startswith("loss: ")]
    if bypass:
        lines.append("weights and rejection are made in the workers' loss, micro-batch by micro-batch")
    elif has_block(block):
        lines.append("weights and rejection are made on the driver, over the rollout batch")
    else:
        lines = [line for line in lines if not line.startswith("invalid rollout log-probs: ")]
        lines.append(
            f"weights, rejection and metrics are made by verl's own function on the driver: there is no {RC}.{BLOCK}; "
            f"for the plugin's add +{RC}.{BLOCK}.metrics=basic"
        )
    mode = policy_loss.get("loss_mode") or "vanilla"
    if mode == LOSS_NAME:
        lines.append(f"loss in the workers: the plugin's; loss_mode {LOSS_NAME} is algorithm {config.algorithm} here")
    elif not bypass:
        if mode not in OBJECTIVES:
            lines = [line for line in lines if not line.startswith("objective: ")]
        lines.append(
            f"loss in the workers: verl's own {mode}, with the driver's weights and mask; for the plugin's add "
            f"{LOSS_LINES}"
        )
    lines.append(f"second forward pass: {'no' if bypass else 'yes'}")
    lines += filter(None, [_sampling_filter((reference or {}).get("rollout") or {})])
    kept = not bypass and config.denominator == "original"
    before = bypass or kept or reference is None or _counts_first(host_args)
    mode = actor.get("loss_agg_mode", "token-mean")
    divided = f"as in verl, {mode}: rejected tokens {'still' if before else 'do not'} count"
    if before and not kept and config.rejects and mode == "seq-mean-token-mean":
        divided += "; the mean inside a sequence is over what is left of it"
    if not (bypass or kept) and config.rejects:
        lines.append("verl's entropy and KL terms leave rejected tokens out too; denominator original keeps them")
    lines.append(f"divided {divided}")
    if bypass:
        lines.append("metrics are verl's plain mean over micro-batches; extremes, deviations, quantiles are left out")
    if config.gate_kl is not None:
        compared = "each micro-batch, in the worker that holds it" if bypass else "the rollout batch, on the driver"
        lines.append(f"the gate judges {compared}")
    if config.normalizes:
        units = ""
        if config.tis.mode == "mask":
            mine = bypass or has_block(block)
            units = ", accepted units only (verl's own: all, the rejected as 0)" if mine else ", the rejected as 0"
        lines.append(f"batch normalisation over: {config.tis.batch_normalize_scope}{units}")
    length = (host_args.get("data") or {}).get("max_response_length")
    return lines + [f"! {warning}" for warning in bound_warnings(config, length)]


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
    return bias and f"! sampling filter: {bias}. verl passes no mask on: set {ROLLOUT}.top_p=1.0 and top_k=-1"


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
def _build(text: str) -> MismatchConfig:
    block, actor = json.loads(text)
    own, name = take_block(block, RC)
    with ignore_mismatch_warnings():  # the merged configuration says what has no effect
        theirs = from_verl({**block, **actor})
    base = theirs.model_dump(exclude_unset=True)
    _validate_no_contradiction(own, theirs, None if name is not None else block)
    if name is not None:
        _validate_switches(name, block, theirs)
        base = {**find_preset(name).settings(), **{key: base[key] for key in ("objective",) if key in base}}
    base["ppo"] = verl_clip(actor, own.get("objective") or base.get("objective", "ppo"))
    criteria = base.get("rs", {}).get("criteria", ()), (own.get("rs") or {}).get("criteria") or ()
    if all(criteria):
        own = merge(own, {"rs": {"criteria": [*criteria[0], *criteria[1]]}})
    if base.get("use_tis") and base.get("use_rollout_log_probs"):
        base.pop("ppo")  # REINFORCE has no clip
    data, by_hand = merge(base, own), dotted_fields_set(own)
    config = MismatchConfig.build(data, by_hand)
    _validate_driver_settings(config)
    return _scoped(config, data, by_hand)


def _validate_driver_settings(config: MismatchConfig) -> None:
    """Raises ValueError for what only the workers' loss in bypass mode has: π_θ, advantages, rollout log-probs."""
    if config.use_rollout_log_probs:
        if config.terms.rollout_kl_coef and config.terms.rollout_kl_on == "all" and config.changes_denominator:
            raise ValueError(
                f"{BLOCK}.terms.rollout_kl_on all reaches no rejected token in verl, which aggregates over accepted "
                f"ones: choose accepted, or denominator original."
            )
        return
    where = f"without {RC}.bypass_mode"
    if config.rejects_on_current_policy:
        raise ValueError(
            f"{BLOCK}.rs.policy current needs π_θ, which verl's driver, the judge {where}, lacks: choose auto."
        )
    if config.needs_advantages:
        names = ", ".join(config.advantage_readers)
        raise ValueError(
            f"{BLOCK}: {names} needs advantages, which verl's driver, the judge {where}, computes later: leave that "
            f"out, or set bypass_mode."
        )
    if config.terms.rollout_kl_coef:
        raise ValueError(
            f"{BLOCK}.terms.rollout_kl_coef needs rollout log-probs in the workers' loss, which gets none {where}: set "
            f"it, or leave the penalty out."
        )


def _validate_switches(name: str, block: Mapping[str, Any], theirs: MismatchConfig) -> None:
    """Raises ValueError where verl's own keys are next to a preset, or its switches choose another algorithm."""
    record = find_preset(name)
    for key, default in CORRECTION.items():
        if block.get(key, default) not in (default, None):
            raise ValueError(f"{RC}.{key} {block[key]} is next to {BLOCK}.preset {name}: leave one of them out.")
    bypass, reinforce = record.algorithm in (1, 3), record.algorithm == 3
    if theirs.use_rollout_log_probs != bypass or (bypass and (theirs.algorithm == 3) != reinforce):
        switches = f"{RC}.bypass_mode={str(bypass).lower()}"
        if bypass:
            switches += f" and {RC}.loss_type={'reinforce' if reinforce else 'ppo_clip'}"
        raise ValueError(
            f"preset {name} is algorithm {record.algorithm}, {ALGORITHM_NAMES[record.algorithm]}: set {switches}."
        )


def _validate_no_contradiction(own: dict[str, Any], theirs: MismatchConfig, block: Mapping[str, Any] | None) -> None:
    """Raises ValueError where ours set what verl decides, or (block; not with a preset) other values than it."""
    bypass, decided = theirs.use_rollout_log_probs, theirs.model_dump(exclude_unset=True)
    for path, value in settings_given(own, RC, "verl", _OWNED_BY_VERL):
        set_by_verl = get_path(decided, path)
        if path == "use_rollout_log_probs" and value != bypass:
            raise ValueError(f"{BLOCK}.{path} {value} contradicts bypass_mode {bypass}: set {RC}.bypass_mode={value}.")
        if path == "use_tis" and bypass and value != theirs.use_tis:
            kind = "reinforce" if value else "ppo_clip"
            raise ValueError(f"{BLOCK}.use_tis {value} in bypass mode is {RC}.loss_type={kind}: set that.")
        if set_by_verl in (None, value):
            continue
        if path == "objective":
            raise ValueError(
                f"{BLOCK}.objective {value} contradicts {ACTOR}.policy_loss.loss_mode, which makes it {set_by_verl}: "
                f"leave one of them out."
            )
        if path.startswith("ppo."):
            raise ValueError(f"{BLOCK}.{path} {value} contradicts {ACTOR}.clip_ratio* {set_by_verl}: set it there.")
        key = SPELLED.get(path)
        # rollout_is null names no level, and asks for no weights.
        if key is not None and block is not None and (key != "rollout_is" or block.get(key) is not None):
            raise ValueError(
                f"{BLOCK}.{path} {value} contradicts {RC}.{key}, which makes it {set_by_verl}: set it there."
            )


def _scoped(config: MismatchConfig, data: dict[str, Any], by_hand: set[str]) -> MismatchConfig:
    """The configuration with the scope of batch normalisation that verl gives, and its denominator checked."""
    bypass = config.use_rollout_log_probs
    if bypass and config.denominator == "accepted" and config.rejects:
        raise ValueError(
            f"{BLOCK}.denominator accepted cannot hold in bypass mode, where verl counts tokens before the loss runs: "
            f"choose auto or original."
        )
    if not config.normalizes:
        return config
    scope: Literal["micro_batch", "rollout_batch"] = "micro_batch" if bypass else "rollout_batch"
    if config.tis.batch_normalize_scope not in ("auto", scope):
        where = "the loss of one micro-batch" if bypass else "the driver, over the rollout batch"
        raise ValueError(
            f"{BLOCK}.tis.batch_normalize_scope {config.tis.batch_normalize_scope} is not what verl gives: algorithm "
            f"{config.algorithm} makes its weights in {where}, so choose {scope} or auto."
        )
    with ignore_mismatch_warnings():  # said by the first build
        return MismatchConfig.build(merge(data, {"tis": {"batch_normalize_scope": scope}}), by_hand)
