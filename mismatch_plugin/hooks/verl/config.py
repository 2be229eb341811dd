"""What verl's configuration and our block in it say together, and what is refused before training starts.

Our settings are in `algorithm.rollout_correction.mismatch`: verl hands that block on as it is, to the driver and,
through `actor_rollout_ref.actor.policy_loss.rollout_correction`, to the workers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal

from mismatch_plugin.config import ALGORITHM_NAMES, MismatchConfig, MismatchWarning, compat, preset
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import dotted_fields_set, merge, unknown

LOSS_NAME = "mismatch"
BLOCK = "mismatch"
_RC = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"
REFERENCE_LINE = f"+{_ACTOR}.policy_loss.rollout_correction='${{{_RC}}}'"
"""The override that lets workers see the block; verl fixes their configuration before it copies the block itself."""
LOSS_LINES = f"{_ACTOR}.policy_loss.loss_mode={LOSS_NAME} and {REFERENCE_LINE}"
"""The two overrides that make the plugin's loss the workers'."""
_CLIP_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
_CORRECTION_DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
_VERL_NAMES = {
    "use_tis": "rollout_is",
    "tis.level": "rollout_is",
    "tis.mode": "rollout_is_threshold",
    "tis.lower_bound": "rollout_is_threshold",
    "tis.upper_bound": "rollout_is_threshold",
    "tis.batch_normalize": "rollout_is_batch_normalize",
    "denominator": "rollout_is_threshold",
}
# Settings that verl owns: (prefix of ours, what to set instead).
_OWNED_BY_VERL = (
    ("terms.entropy_coef", f"{_ACTOR}.entropy_coeff"),
    ("terms.kl", f"{_ACTOR}.use_kl_loss, kl_loss_coef and kl_loss_type"),
    ("aggregation", f"{_ACTOR}.loss_agg_mode"),
    ("length_norm", f"{_ACTOR}.loss_scale_factor"),
    ("log_prob_backend", "actor_rollout_ref.model.use_fused_kernels (verl computes log-probs itself)"),
    ("report_dir", "trainer.logger, which receives the metrics"),
)


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
    config = settings(tree)
    if config.use_rollout_log_probs and not uses_loss:
        raise ValueError(f"{_RC}.bypass_mode with a block {BLOCK} needs our loss in the workers: add {LOSS_LINES}.")
    if uses_loss and _plain(policy_loss.get("rollout_correction")) != _plain(block):
        raise ValueError(f"{_ACTOR}.policy_loss.rollout_correction is not {_RC}: add {REFERENCE_LINE}.")
    needs = config.algorithm != 0 or config.rejects
    if needs and (reference.get("rollout") or {}).get("calculate_log_probs", True) is False:
        raise ValueError(
            f"algorithm {config.algorithm} needs the rollout engine's log-probs, and verl would skip it silently: set "
            f"actor_rollout_ref.rollout.calculate_log_probs=true."
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
            f"weights, rejection and metrics are made by verl's own function on the driver: there is no {_RC}.{BLOCK}; "
            f"for the plugin's add +{_RC}.{BLOCK}.metrics=basic"
        )
    mode = policy_loss.get("loss_mode") or "vanilla"
    if mode == LOSS_NAME:
        lines.append(f"loss in the workers: the plugin's; loss_mode {LOSS_NAME} is algorithm {config.algorithm} here")
    elif not bypass:
        lines.append(
            f"loss in the workers: verl's own {mode}, with the driver's weights and mask; for the plugin's add "
            f"{LOSS_LINES}"
        )
    lines.append(f"old log-probs pass: {'skipped' if bypass else 'runs'}")
    normaliser = "verl's, of the response mask before rejection"
    if bypass and config.rejects and actor.get("loss_agg_mode") == "seq-mean-token-mean":
        normaliser += "; the mean inside a sequence is over what is left of it"
    if not bypass:
        kept = config.denominator == "original"
        normaliser = f"verl's, of the response mask {'before' if kept else 'after'} rejection"
        if not kept and config.rejects:
            lines.append("verl's entropy and KL terms leave rejected tokens out too; denominator original keeps them")
    lines.append(f"loss: {actor.get('loss_agg_mode', 'token-mean')}, normaliser {normaliser}")
    if bypass:
        lines.append("metrics are verl's plain mean over micro-batches; extremes and deviations are left out")
    if config.weighted and config.tis.batch_normalize:
        units = ""
        if config.tis.mode == "mask":
            mine = bypass or has_block(block)
            units = ", accepted units only (verl's own: all, the rejected as 0)" if mine else ", the rejected as 0"
        lines.append(f"batch normalisation over: {config.tis.batch_normalize_scope}{units}")
    return lines


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
            raise ValueError(f"the workers do not see {_RC}: add {REFERENCE_LINE} (loss_mode {LOSS_NAME} reads it).")
    else:
        block, actor = host_config, {}
    clip = {key: actor.get(key) for key in _CLIP_KEYS}
    return _plain(block or {}), {key: value for key, value in clip.items() if value is not None}


def _plain(value: Any) -> Any:
    """Nested mappings and sequences (OmegaConf's, verl's dataclasses) as dicts and lists, Hydra's keys left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value if not str(key).startswith("_")}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


@lru_cache(maxsize=16)
def _build(text: str) -> MismatchConfig:
    block, actor = json.loads(text)
    own = block.pop(BLOCK, None) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{_RC}.{BLOCK} is {own!r}, not a mapping of settings: write them under it.")
    name = own.pop("preset", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)  # the merged configuration says what still holds
        theirs = compat.from_verl({**block, **actor})
        base = theirs.model_dump(exclude_unset=True)
        if name is not None:
            base = {**_preset(name, block, theirs), "ppo": base.get("ppo", {})}
    set_by_verl = theirs.model_dump(exclude_unset=True) if name is None else {}
    if block.get("rollout_is") is None:  # null names no level
        for nested in (base if name is None else {}, set_by_verl):
            nested.get("tis", {}).pop("level", None)
        set_by_verl.pop("use_tis", None)
    _refuse_contradictions(own, set_by_verl, base)
    if (
        name is None
        and theirs.algorithm == 3
        and "level" not in base.get("tis", {})
        and "level" not in own.get("tis", {})
    ):
        base = merge(base, {"tis": {"level": "none"}})
    mine = dict(own.get("rs") or {})
    if mine.get("criteria") and base.get("rs", {}).get("criteria"):
        own = merge(own, {"rs": {"criteria": [*base["rs"]["criteria"], *mine["criteria"]]}})
    if (base.get("use_tis") or own.get("use_tis")) and base.get("use_rollout_log_probs"):
        base.pop("ppo", None)  # REINFORCE has no clip
    data = merge(base, own)
    by_hand = dotted_fields_set(own)
    return _scoped(MismatchConfig.build(data, by_hand), data, by_hand)


def _preset(name: str, block: Mapping[str, Any], theirs: MismatchConfig) -> dict[str, Any]:
    """Settings of a preset, whose algorithm must be the one that verl's switches choose."""
    record = find_preset(name)
    for key, default in _CORRECTION_DEFAULTS.items():
        if block.get(key, default) not in (default, None):
            raise ValueError(f"{_RC}.{key} {block[key]} is next to {BLOCK}.preset {name}: leave one of them out.")
    bypass, reinforce = record.algorithm in (1, 3), record.algorithm == 3
    if theirs.use_rollout_log_probs != bypass or (bypass and (theirs.algorithm == 3) != reinforce):
        switches = f"{_RC}.bypass_mode={str(bypass).lower()}"
        if bypass:
            switches += f" and {_RC}.loss_type={'reinforce' if reinforce else 'ppo_clip'}"
        raise ValueError(
            f"preset {name} is algorithm {record.algorithm}, {ALGORITHM_NAMES[record.algorithm]}: set {switches}."
        )
    return preset(name).model_dump(exclude_unset=True)


def _refuse_contradictions(own: dict[str, Any], set_by_verl: dict[str, Any], base: dict[str, Any]) -> None:
    """Raises ValueError where the block sets what verl decides, or another value than verl's keys do."""
    known = dotted_fields_set(MismatchConfig().model_dump())
    for path in sorted(dotted_fields_set(own)):
        if path not in known:
            raise unknown(f"setting of {_RC}.{BLOCK}", path, sorted(known))
        value = _at(own, path)
        for prefix, instead in _OWNED_BY_VERL:
            if path.startswith(prefix):
                raise ValueError(f"{BLOCK}.{path} is verl's to set: leave it out and set {instead}.")
        bypass = bool(base.get("use_rollout_log_probs"))
        if path == "use_rollout_log_probs" and value != bypass:
            raise ValueError(f"{BLOCK}.{path} {value} contradicts bypass_mode {bypass}: set {_RC}.bypass_mode={value}.")
        if path == "use_tis" and bypass and value != bool(base.get("use_tis")):
            kind = "reinforce" if value else "ppo_clip"
            raise ValueError(f"{BLOCK}.use_tis {value} in bypass mode is {_RC}.loss_type={kind}: set that.")
        if path.startswith("ppo."):
            actors = _at(base, path)
            if actors is not None and actors != value:
                raise ValueError(f"{BLOCK}.{path} {value} contradicts {_ACTOR}.clip_ratio* {actors}: set it there.")
        theirs, name = _at(set_by_verl, path), _VERL_NAMES.get(path)
        if name is not None and theirs is not None and theirs != value:
            raise ValueError(f"{BLOCK}.{path} {value} contradicts {_RC}.{name}, which makes it {theirs}: set it there.")


def _at(nested: Mapping[str, Any], path: str) -> Any:
    for name in path.split("."):
        if not isinstance(nested, Mapping) or name not in nested:
            return None
        nested = nested[name]
    return nested


def _scoped(config: MismatchConfig, data: dict[str, Any], by_hand: set[str]) -> MismatchConfig:
    """The configuration with the scope of batch normalisation that verl gives, and its denominator checked."""
    bypass = config.use_rollout_log_probs
    if bypass and config.denominator == "accepted" and config.rejects:
        raise ValueError(
            f"{BLOCK}.denominator accepted cannot hold in bypass mode, where verl counts tokens before the loss runs: "
            f"choose auto or original."
        )
    if not (config.weighted and config.tis.batch_normalize):
        return config
    scope: Literal["micro_batch", "rollout_batch"] = "micro_batch" if bypass else "rollout_batch"
    if config.tis.batch_normalize_scope not in ("auto", scope):
        where = "the loss of one micro-batch" if bypass else "the driver, over the rollout batch"
        raise ValueError(
            f"{BLOCK}.tis.batch_normalize_scope {config.tis.batch_normalize_scope} is not what verl gives: algorithm "
            f"{config.algorithm} makes its weights in {where}, so choose {scope} or auto."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)  # said by the first build
        return MismatchConfig.build(merge(data, {"tis": {"batch_normalize_scope": scope}}), by_hand)
