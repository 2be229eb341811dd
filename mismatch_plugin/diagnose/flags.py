"""A configuration as what one pastes: launch flags for each trainer, and an expression in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.fields import leaf_fields, value_and_default
from mismatch_plugin.config.presets import COMPLETE, find_preset
from mismatch_plugin.config.values import ignore_mismatch_warnings, merge
from mismatch_plugin.report.presets import as_flags, quiet_preset

Host = Literal["slime", "miles", "megatron-lm", "verl", "nemo-rl", "python"]
HOSTS: dict[Host, str] = {
    "slime": "slime",
    "miles": "miles",
    "megatron-lm": "Megatron-LM",
    "verl": "verl",
    "nemo-rl": "NeMo-RL",
    "python": "Python",
}
"""Host → its name as people write it, in the order in which they are shown."""
_HOST_OF_FORMAT: dict[str, Host] = {"miles_train": "miles", "verl": "verl", "nemo_rl": "nemo-rl"}
_COMMANDS: dict[str, str] = {
    "slime": "ray job submit … -- python3 -m mismatch_plugin.launch train.py …",
    "miles": "ray job submit … -- python3 -m mismatch_plugin.launch train.py …",
    "megatron-lm": "torchrun … -m mismatch_plugin.launch train_rl.py …",
    "verl": "python -m mismatch_plugin.launch -m verl.trainer.main_ppo …",
    "nemo-rl": "python -m mismatch_plugin.launch examples/run_grpo.py …",
}
"""Host → the launch line before our flags, as docs/hosts.md has it."""
_NORMALISED_ON_VERL = "algorithm.rollout_correction.rollout_is_batch_normalize=true"
"""verl's own key, whose default contradicts our flag."""
_NEVER = dict.fromkeys(("length_norm", "log_prob_backend", "fused_head", "inplace_logits"), "")
_RAY = {
    "ppo.eps_clip_low": "--eps-clip",
    "ppo.eps_clip_high": "--eps-clip-high",
    "ppo.dual_clip": "--eps-clip-c",
    "terms.entropy_coef": "--entropy-coef",
    "terms.kl": "--use-kl-loss, --kl-loss-coef and --kl-loss-type",
    "aggregation": "--calculate-per-token-loss",
}
_ACTOR = "actor_rollout_ref.actor"
_OWNED: dict[str, dict[str, str]] = {
    "slime": _NEVER | _RAY,
    "miles": _NEVER | _RAY | {"rs.group": "", "rs.min_group": ""},
    "megatron-lm": _NEVER
    | {
        "ppo.eps_clip_low": "--grpo-clamp-eps-lower",
        "ppo.eps_clip_high": "--grpo-clamp-eps-upper",
        "terms.entropy_coef": "--grpo-entropy-term-weight",
        "terms.kl": "--grpo-kl-beta",
        "rs.group": "",
        "rs.min_group": "",
        "rs.max_staleness": "",
        "aggregation": "",
    },
    "verl": {
        "ppo.": f"{_ACTOR}.clip_ratio_low, clip_ratio_high and clip_ratio_c",
        "terms.entropy_coef": f"{_ACTOR}.entropy_coeff",
        "terms.kl": f"{_ACTOR}.use_kl_loss, kl_loss_coef and kl_loss_type",
        "rs.max_staleness": "trainer.v1's max_off_policy_threshold, or async_training.staleness_threshold",
        "aggregation": f"{_ACTOR}.loss_agg_mode",
        "length_norm": f"{_ACTOR}.loss_scale_factor",
        "log_prob_backend": "actor_rollout_ref.model.use_fused_kernels",
        "fused_head": "actor_rollout_ref.model.use_fused_kernels",
        "inplace_logits": "",
    },
    "nemo-rl": _NEVER
    | {
        "ppo.": "loss_fn.ratio_clip_min, ratio_clip_max and ratio_clip_c",
        "rs.max_staleness": "grpo.async_grpo.max_trajectory_age_steps",
        "terms.entropy_coef": "",
        "terms.kl": "loss_fn.reference_policy_kl_penalty and reference_policy_kl_type",
        "aggregation": "loss_fn.token_level_loss",
    },
}
"""Host → start of the path of a setting that is its own to set → what sets it there ("": it cannot be had)."""


def host_of(format: str) -> Host:
    """The trainer whose dump has this format, as far as the format names one."""
    return _HOST_OF_FORMAT.get(format, "slime")


def config_of(settings: Mapping[str, Any]) -> MismatchConfig:
    """Of settings as a file for --mismatch-config has them, `preset: NAME` among them. Raises ValueError as `build`."""
    own = {name: value for name, value in settings.items() if name != "preset"}
    base = find_preset(str(settings["preset"])).settings() if "preset" in settings else {}
    with ignore_mismatch_warnings():
        return MismatchConfig.build(merge(base, own))


def flags_for(config: MismatchConfig, host: Host) -> str:
    """What to paste to run these settings on a host: its launch line, with `…` for the host's own words, and our flags.

    Settings that a host owns or cannot do are not among the flags; a comment line (#) before the command says so, and
    what to do instead. The flags are a preset's name where it gives these settings, else those that differ from the
    defaults. python: an expression for `import mismatch_plugin as mp`.
    Raises: ValueError for an unknown host.
    """
    if host == "python":
        name = preset_of(config)
        settings = f"MismatchConfig.build({config.model_dump(exclude_unset=True)!r})"
        return f'mp.preset("{name}")' if name else f"mp.{settings}"
    if host not in _COMMANDS:
        raise ValueError(f"host {host!r} is unknown: choose one of {', '.join(HOSTS)}.")
    allowed, notes = available(config, host)
    words = [_NORMALISED_ON_VERL] if host == "verl" and allowed.normalizes else []
    command = " ".join([_COMMANDS[host], *words, *shortest_flags(allowed)])
    return "\n".join([*(f"# {note}" for note in notes), command])


def shortest_flags(config: MismatchConfig) -> list[str]:
    """`--mismatch-preset NAME` where a preset gives these settings, else the flags of what is not at its default."""
    name = preset_of(config)
    return as_flags(config) if name is None else ["--mismatch-preset", name]


def preset_of(config: MismatchConfig) -> str | None:
    """The short name of the first preset that gives these settings."""
    for record in COMPLETE:
        if quiet_preset(record.name) == config:
            return record.short
    return None


def available(config: MismatchConfig, host: Host) -> tuple[MismatchConfig, tuple[str, ...]]:
    """(the settings that a host takes from us, sentences on the rest)."""
    data, notes = config.model_dump(exclude_unset=True), list[str]()
    for field in leaf_fields(MismatchConfig):
        value, default = value_and_default(config, field.path)
        for start, instead in _OWNED[host].items():
            if value != default and field.path.startswith(start):
                _drop(data, field.path)
                how = f"set it by {instead}" if instead else "it cannot be had there"
                notes.append(f"{field.path} {value} is {host}'s own: {how}")
    if host == "verl" and not config.use_rollout_log_probs and (lost := _not_on_driver(config)):
        rs = data.get("rs", {})
        rs.pop("policy", None)
        rs["criteria"] = [each for each in rs.get("criteria", ()) if each.get("condition", "any") == "any"]
        for name in ("coef", "type", "on"):
            data.get("terms", {}).pop(f"rollout_kl_{name}", None)
        notes.append(f"{lost} cannot be had on verl without use_rollout_log_probs: its driver rejects before the step")
    if config.denominator == "accepted" and (host != "verl" or config.rejects):
        data.pop("denominator")
        unless = "" if host != "verl" or config.use_rollout_log_probs else " unless trainer.use_v1=false"
        notes.append(f"denominator accepted cannot be had on {host}{unless}: what is rejected stays in its denominator")
    if config.normalizes:
        scope = _scope(config, host)
        if scope is not None:
            data = merge(data, {"tis": {"batch_normalize_scope": scope}})
            notes.append(f"batch normalisation runs over the {scope.replace('_', '-')} on {host}")
    if host == "slime" and config.rs.max_staleness is not None:
        notes.append("needs the patch: mismatch-plugin patch apply --host slime --root DIR")
    if host == "megatron-lm" and _needs_mask(config):
        notes.append("needs the patch: mismatch-plugin patch apply --host megatron-lm --root DIR")
    with ignore_mismatch_warnings():
        return MismatchConfig.build(data), tuple(notes)


def _not_on_driver(config: MismatchConfig) -> str:
    """What needs π_θ or advantages where verl's driver rejects, or rollout log-probs in its own loss."""
    lost = ["rs.policy current"] if config.rejects_on_current_policy else []
    lost += config.advantage_readers
    return ", ".join(lost + (["terms.rollout_kl_coef"] if config.terms.rollout_kl_coef else []))


def _scope(config: MismatchConfig, host: Host) -> Literal["micro_batch", "rollout_batch"] | None:
    """The scope of batch normalisation that the host gives, where the one that is asked for is refused."""
    wanted = config.tis.batch_normalize_scope
    if host == "nemo-rl":
        return "micro_batch" if wanted != "micro_batch" else None
    if host != "verl":
        return None
    given: Literal["micro_batch", "rollout_batch"] = "micro_batch" if config.use_rollout_log_probs else "rollout_batch"
    return given if wanted not in ("auto", given) else None


def _needs_mask(config: MismatchConfig) -> bool:
    """Whether Megatron-LM RL has to tell the loss which tokens train, which it does with the patch alone."""
    judges = config.weighted and (config.tis.level != "token" or config.normalizes)
    judges = judges or any(not criterion.judges_tokens for criterion in config.criteria)
    judges = judges or config.rs.veto_threshold is not None or config.rollout_log_prob_policy == "drop-sequence"
    counts = config.metrics == "full" or config.report_dir is not None or config.dry_run
    judges = judges or config.policy_objective == "gspo"
    idle = config.objective == "ppo" and not config.terms.rollout_kl_coef and not config.rejects
    return judges or counts or (config.algorithm == 0 and idle)


def _drop(data: dict[str, Any], path: str) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        data = data.get(parent, {})
    data.pop(name, None)
