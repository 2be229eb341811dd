"""What slime's own arguments and ours say together, which combinations are refused, and the start-up block.

miles is a fork with the same arguments, so it reads them here too; `host` is the name that sentences use.
"""

from __future__ import annotations

import difflib
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from mismatch_plugin.config import MismatchConfig, MismatchWarning, compat
from mismatch_plugin.config.fields import flag_names
from mismatch_plugin.config.flags import destinations, given_flags
from mismatch_plugin.config.model import warn_of_another_algorithm
from mismatch_plugin.config.values import dotted_fields_set, merge, number, switch, unknown
from mismatch_plugin.hooks.base import refuse_log_prob_settings

# Switches and values of `mis.yaml`: attributes that slime's --custom-config-path leaves on the Namespace.
MIS_KEYS = (
    *("tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
)
# Attributes that begin like ours and are the host's own, or the launcher's.
_NOT_FLAGS = ("tis_clip", "tis_clip_low", "mismatch_settings")
# Our setting → the host's flag that owns it.
OWNED_BY_HOST = {
    "ppo.eps_clip_low": "--eps-clip",
    "ppo.eps_clip_high": "--eps-clip-high",
    "ppo.dual_clip": "--eps-clip-c",
    "terms.entropy_coef": "--entropy-coef",
    "terms.kl_coef": "--kl-loss-coef (with --use-kl-loss)",
    "terms.kl_type": "--kl-loss-type",
}
TIS_CLIP, TIS_CLIP_LOW = 2.0, 0.0
"""The host's defaults of `--tis-clip` and `--tis-clip-low`: at these, nobody is taken to have asked for them."""
_LOSS_SOURCES = ("policy_loss", "custom_loss")


def read_settings(args: Namespace, host: str) -> MismatchConfig:
    """The configuration: ours (launcher, flags or YAML) with what the host owns filled in from its arguments.

    `args.mismatch_settings` (nested settings, from the launcher) is used where it is there; else the Namespace's plain
    attributes: keys of `mis.yaml` as slime reads them, the rest as flags.
    Raises: ValueError where the two contradict each other, naming both flags. Warns: MismatchWarning as `compat`.
    """
    ours = _given(args)
    data = merge(ours, _hosts_values(args, ours, host))
    for name, spelled in (("use_rollout_log_probs", "use_rollout_logprobs"), ("use_tis", "use_tis")):
        data[name] = bool(ours.get(name)) or switch(getattr(args, spelled, None), spelled)
    if data["use_rollout_log_probs"] and not switch(
        getattr(args, "use_rollout_logprobs", None), "use_rollout_logprobs"
    ):
        raise ValueError(
            f"use_rollout_log_probs is set, but {host}'s own use_rollout_logprobs is not, and it decides which "
            f"log-probs are computed: write --use-rollout-logprobs (use_rollout_logprobs: true in YAML), or start "
            f"through `python -m mismatch_plugin.launch`."
        )
    if data["use_tis"]:
        data["tis"] = _tis_bounds(args, dict(data.get("tis") or {}), host)
    if data.get("denominator") == "accepted":
        raise ValueError(
            f"--mismatch-denominator accepted cannot be had in {host}: it divides by the tokens of the original masks "
            f"itself, so that what is rejected stays in the denominator. Leave it out, or choose original."
        )
    return refuse_log_prob_settings(MismatchConfig.build(data), host)


def _given(args: Namespace) -> dict[str, Any]:
    """What was given by hand, preset or file, as nested settings."""
    settings = getattr(args, "mismatch_settings", None)
    if settings is not None:
        return dict(settings)
    names = {name: value for name, value in vars(args).items() if name != "mismatch_explain_only"}
    refuse_unknown_settings(names)
    mis = {key: names[key] for key in MIS_KEYS if names.get(key) is not None}
    registered = all(hasattr(args, name) for name in destinations())
    if not mis or (registered and not names.get("custom_config_path")):
        return MismatchConfig.from_args(Namespace(**names)).model_dump(exclude_unset=True)
    read = _with_mis(names, mis)
    if registered and "criteria" in read.get("rs", {}):
        # Nobody can tell here which of them the host's file has set, and which were typed as our flags.
        as_flags = given_flags(Namespace(**names)).get("rs", {}).get("criteria", ())
        if (
            MismatchConfig.build(merge(read, {"rs": {"criteria": as_flags}})).criteria
            != MismatchConfig.build(read).criteria
        ):
            raise ValueError(
                "the bounds that --use-rs leaves out mean one thing in mis.yaml (those of TIS) and another as flags "
                "(1/hi), and both may have set them here: give rs_lower_bound and rs_upper_bound."
            )
    return read


def _with_mis(names: Mapping[str, Any], mis: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of mis.yaml as slime reads them, whatever is next to them: preset < mis.yaml < our other settings."""
    start = Namespace(**{name: names.get(name) for name in ("mismatch_preset", "mismatch_config")})
    base = MismatchConfig.from_args(start)
    typed = given_flags(Namespace(**{name: value for name, value in names.items() if name not in MIS_KEYS}))
    for name in ("preset", "config"):
        typed.pop(name, None)
    switches = {"use_tis": base.use_tis or switch(names.get("use_tis"), "use_tis")}
    switches["use_rollout_logprobs"] = base.use_rollout_log_probs or typed.get("use_rollout_log_probs", False)
    theirs = compat.from_slime({**mis, **switches}).model_dump(exclude_unset=True, include={"use_tis", "tis", "rs"})
    if "tis_batch_normalize" not in mis:
        theirs["tis"].pop("batch_normalize")
    criteria = [*typed.get("rs", {}).get("criteria", ()), *theirs.get("rs", {}).get("criteria", ())]
    if criteria:
        theirs = merge(theirs, {"rs": {"criteria": criteria}})
        typed.get("rs", {}).pop("criteria", None)
    data = merge(merge(base.model_dump(exclude_unset=True), theirs), typed)
    by_hand = dotted_fields_set(typed)
    config = MismatchConfig.build(data, by_hand, by_hand)
    if start.mismatch_preset is not None:
        warn_of_another_algorithm(start.mismatch_preset, base, config, by_hand)
    return config.model_dump(exclude_unset=True)


def refuse_unknown_settings(names: Iterable[str]) -> None:
    """Raise ValueError for a misspelt key of ours in the host's YAML, every key of which becomes an argument."""
    known = (*destinations(), *_NOT_FLAGS)
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name.startswith("mismatch_") or (near and name.startswith(("tis_", "rs_", "rollout_log_prob"))):
            raise unknown("setting", name, known if near else ())


def _hosts_values(args: Namespace, ours: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Clip, entropy, KL and aggregation as the host has them. Raises ValueError where ours say otherwise."""
    low = number(getattr(args, "eps_clip", 0.2), "eps_clip")
    high, dual = getattr(args, "eps_clip_high", None), getattr(args, "eps_clip_c", None)
    kl = switch(getattr(args, "use_kl_loss", None), "use_kl_loss")
    values: dict[str, dict[str, Any]] = {
        "ppo": {
            "eps_clip_low": low,
            "eps_clip_high": low if high is None else number(high, "eps_clip_high"),
            "dual_clip": None if dual is None else number(dual, "eps_clip_c"),
        },
        "terms": {
            "entropy_coef": number(getattr(args, "entropy_coef", 0.0), "entropy_coef"),
            "kl_coef": number(getattr(args, "kl_loss_coef", 0.0), "kl_loss_coef") if kl else 0.0,
        },
    }
    if values["terms"]["kl_coef"]:
        values["terms"]["kl_type"] = getattr(args, "kl_loss_type", "k1")
    for path, theirs in OWNED_BY_HOST.items():
        section, name = path.split(".")
        mine = (ours.get(section) or {}).get(name)
        owned = values[section].get(name)
        if mine is not None and mine != owned:
            flag = flag_names(MismatchConfig)[path]
            shown = "off" if owned is None else owned
            raise ValueError(
                f"{flag} {mine} contradicts {host}'s {theirs}, which is {shown}: leave {flag} out, and set {theirs}."
            )
    per_token = switch(getattr(args, "calculate_per_token_loss", None), "calculate_per_token_loss")
    aggregation = "token-mean" if per_token else "seq-mean-token-mean"
    if ours.get("aggregation") not in (None, aggregation):
        raise ValueError(
            f"--mismatch-aggregation {ours['aggregation']} contradicts {host}, which aggregates itself "
            f"({aggregation} {'with' if per_token else 'without'} --calculate-per-token-loss): leave it out, and "
            f"choose by --calculate-per-token-loss."
        )
    return {**values, "aggregation": aggregation}


def _tis_bounds(args: Namespace, tis: dict[str, Any], host: str) -> dict[str, Any]:
    """The bounds of the weights, with the host's --tis-clip and --tis-clip-low where ours are not given."""
    if tis.get("level") == "none":
        return tis
    low = number(getattr(args, "tis_clip_low", TIS_CLIP_LOW), "tis_clip_low")
    high = number(getattr(args, "tis_clip", TIS_CLIP), "tis_clip")
    for name, theirs, value, default in (
        ("upper_bound", "--tis-clip", high, TIS_CLIP),
        ("lower_bound", "--tis-clip-low", low, TIS_CLIP_LOW),
    ):
        mine = tis.get(name)
        if value != default and mine is not None and number(mine, name) != value:
            raise ValueError(
                f"--tis-{name.replace('_', '-')} {mine} contradicts {host}'s {theirs} {value:g}: leave one of them out."
            )
    if high != TIS_CLIP:
        tis["upper_bound"] = high
    if low != TIS_CLIP_LOW:
        if tis.get("mode") == "truncate":
            raise ValueError(
                f"{host}'s --tis-clip-low {low:g} bounds no weight under --tis-mode truncate: choose clip or mask, or "
                f"leave it out."
            )
        tis = {"mode": "clip", **tis, "lower_bound": low}
    return tis


def check_entry(args: Namespace, config: MismatchConfig, host: str, *, custom_loss: bool) -> None:
    """Refuse what the loss type cannot mean. custom_loss: our whole loss runs; else our weights in the host's loss.

    Raises ValueError with what to change. It depends on the arguments alone, so every rank raises or none does.
    """
    whole = f"--loss-type custom_loss --custom-loss-function-path mismatch_plugin.hooks.{host}.policy_loss"
    fix = f"start through `python -m mismatch_plugin.launch`, or set {whole}"
    if not custom_loss and config.algorithm == 3:
        raise ValueError(
            f"use_rollout_log_probs and use_tis together mean algorithm 3, REINFORCE + IS, but loss_type policy_loss "
            f"clips π_θ/π_rollout already, so that the importance weight would count twice: {fix}."
        )
    if not custom_loss and config.algorithm == 1:
        raise ValueError(
            f"under use_rollout_log_probs the rejection and the metrics compare π_θ with π_rollout, which {host}'s "
            f"policy_loss does not pass on: {fix}."
        )
    if not custom_loss:
        return
    estimator = getattr(args, "advantage_estimator", "grpo")
    refused = {
        f"--advantage-estimator {estimator}": estimator in ("gspo", "cispo"),
        "--use-opsm": bool(getattr(args, "use_opsm", False)),
        "--use-unbiased-kl": bool(getattr(args, "use_unbiased_kl", False) and config.terms.kl_coef),
        "--custom-pg-loss-reducer-function-path": bool(getattr(args, "custom_pg_loss_reducer_function_path", None)),
    }
    for flag, given in refused.items():
        if given:
            raise ValueError(
                f"{flag} belongs to {host}'s own policy_loss and has no meaning in the plugin's loss (algorithm "
                f"{config.algorithm}): leave it out, or use algorithm 0 or 2 with --loss-type policy_loss "
                f"--custom-tis-function-path mismatch_plugin.hooks.{host}.tis_function."
            )


def check_arguments(args: Namespace, host: str) -> MismatchConfig | None:
    """The configuration once the whole argument list is consistent; None where neither of our losses will run.

    Raises ValueError with one sentence that says what to change.
    """
    module = f"mismatch_plugin.hooks.{host}"
    loss_type = getattr(args, "loss_type", "policy_loss")
    if loss_type not in _LOSS_SOURCES:
        return None
    config = read_settings(args, host)
    if loss_type == "custom_loss":
        if getattr(args, "custom_loss_function_path", None) == f"{module}.policy_loss":
            check_entry(args, config, host, custom_loss=True)
        return config
    path = getattr(args, "custom_tis_function_path", None)
    hooked = path == f"{module}.tis_function"
    asked = hooked and bool(getattr(args, "get_mismatch_metrics", False) or getattr(args, "use_tis", False))
    if config.algorithm == 3 or (config.algorithm == 1 and (asked or config.rejects)):
        check_entry(args, config, host, custom_loss=False)
    if path is None and (config.use_tis or config.rejects):
        raise ValueError(
            f"weights or rejection are asked for, but no hook of the plugin would run (use_tis alone is {host}'s "
            f"built-in): set --custom-tis-function-path {module}.tis_function, or start through "
            f"`python -m mismatch_plugin.launch`."
        )
    if hooked and not asked and config.rejects:
        raise ValueError(
            f"rejection is asked for, but {host} calls --custom-tis-function-path only with --use-tis or "
            f"--get-mismatch-metrics: add --get-mismatch-metrics."
        )
    return config


def describe_settings(config: MismatchConfig, args: Namespace, host: str) -> list[str]:
    """Lines of the start-up block: what will run, whose normaliser divides, which passes are skipped."""
    module = f"mismatch_plugin.hooks.{host}"
    custom = getattr(args, "loss_type", "policy_loss") == "custom_loss"
    lines = [line for line in config.describe().splitlines() if not line.startswith("loss:")]  # the host's: see below
    lines.append(f"through: {module}.policy_loss" if custom else f"through: {host}'s policy_loss")
    if getattr(args, "custom_tis_function_path", None) and not custom:
        lines[-1] += f" with {args.custom_tis_function_path}"
    reducer = None if custom else getattr(args, "custom_pg_loss_reducer_function_path", None)
    if reducer:
        masks = "the masks without what is rejected" if config.rejects else "the original masks"
        lines.append(f"normaliser: that of {reducer}, which gets {masks}")
    elif config.aggregation == "token-mean":
        lines.append(f"normaliser: {host}'s, the step's tokens of the original masks; what is rejected stays in it")
    else:
        lines.append(
            f"normaliser: {host}'s, each rollout's tokens of the original masks, then the step's rollouts; what is "
            f"rejected stays in it"
        )
    left = reducer and config.rejects  # the host knows one set of masks
    lines.append(f"entropy and KL terms: over {'what is not rejected' if left else 'the original masks'}")
    if config.weighted and config.tis.batch_normalize:
        lines.append(f"batch normalisation over: {_scope(args, config, host)}")
    lines.append(f"old log-probs pass: {_old_pass(args, config, custom)}")
    if getattr(args, "custom_megatron_before_train_step_hook_path", None) != f"{module}.before_train_step":
        lines.append(
            "step metrics: none, and an invalid rollout log-prob turns the loss into NaN instead of an error, unless "
            f"--custom-megatron-before-train-step-hook-path runs {module}.before_train_step"
        )
    return lines + [f"note: {note}" for note in _notes(args, host)]


def _scope(args: Namespace, config: MismatchConfig, host: str) -> str:
    if config.tis.batch_normalize_scope == "micro_batch":
        return "each micro-batch"
    module = f"mismatch_plugin.hooks.{host}"
    if getattr(args, "custom_megatron_before_train_step_hook_path", None) != f"{module}.before_train_step":
        needed = f"--custom-megatron-before-train-step-hook-path runs {module}.before_train_step"
        if config.tis.batch_normalize_scope == "auto":
            return f"each micro-batch, unless {needed}"
        return f"the optimizer step; the first one is refused unless {needed}"
    known_before = getattr(args, "rollout_data_postprocess_path", None) == f"{module}.rollout_data_postprocess"
    if config.use_rollout_log_probs or host != "slime" or not known_before:
        return "the optimizer step (gradients are divided by the mean weight at its end)"
    return "the optimizer step (its mean weight is known before it)"


def _old_pass(args: Namespace, config: MismatchConfig, custom: bool) -> str:
    metrics = bool(getattr(args, "get_mismatch_metrics", False))
    if getattr(args, "skip_actor_forward_only", False):
        return "skipped (--skip-actor-forward-only)"
    if config.use_rollout_log_probs:
        return "runs, for --get-mismatch-metrics alone: leave that out to skip it" if metrics else "skipped"
    if custom or metrics:
        return "runs"
    return "runs, where the host does not reuse the loss's own on a single step per rollout"


def _notes(args: Namespace, host: str) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", MismatchWarning)
        read_settings(args, host)
    notes = (str(note.message) for note in found if issubclass(note.category, MismatchWarning))
    return list(dict.fromkeys(notes))
