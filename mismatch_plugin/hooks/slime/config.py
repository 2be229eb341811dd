"""What slime's own arguments and ours say together, which combinations are refused, and the start-up block.

miles is a fork with the same arguments, so it reads them here too; `host` is the name that sentences use.
"""

from __future__ import annotations

import difflib
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from mismatch_plugin.config import MismatchConfig, MismatchWarning, bound_warnings
from mismatch_plugin.config.compat.slime import MIS_KEYS, from_slime, with_opsm
from mismatch_plugin.config.fields import flag_names
from mismatch_plugin.config.flags import destinations, given_flags
from mismatch_plugin.config.model import warn_of_another_algorithm
from mismatch_plugin.config.values import dotted_fields_set, lower_epsilon, merge, number, parse_bool, unknown
from mismatch_plugin.hooks.base import validate_log_prob_settings
from mismatch_plugin.hooks.slime.groups import check_groups
from mismatch_plugin.hooks.slime.sampling import FILTERS, filter_lines
from mismatch_plugin.hooks.slime.switches import read_objective, switch_lines, why_our_loss
from mismatch_plugin.hooks.slime.versions import needs_init

HOOKS = {
    "policy_loss": "custom_loss_function_path",
    "tis_function": "custom_tis_function_path",
    "rollout_data_postprocess": "rollout_data_postprocess_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
    "init": "custom_megatron_init_path",
    "group_advantages": "custom_advantage_function_path",
}
"""Our function → the host's argument that names it."""
_REDUCER = "custom_pg_loss_reducer_function_path"
_SWITCHES = (
    *("use_rollout_logprobs", "use_tis", "get_mismatch_metrics", "calculate_per_token_loss", "use_kl_loss"),
    *("use_opsm", "use_unbiased_kl", "skip_actor_forward_only"),
)
_NUMBERS = {"tis_clip": 2.0, "tis_clip_low": 0.0, "eps_clip": 0.2, "opsm_delta": 1e-4, "entropy_coef": 0.0}
_WORDS = {"kl_loss_type": "k1", "loss_type": "policy_loss", "advantage_estimator": "grpo"}
ARGUMENTS: dict[str, tuple[type, Any]] = {
    **dict.fromkeys(_SWITCHES, (bool, False)),
    **{name: (float, default) for name, default in {**_NUMBERS, **FILTERS, "kl_loss_coef": 0.0}.items()},
    "rollout_max_response_len": (int, None),
    **dict.fromkeys(("eps_clip_high", "eps_clip_c"), (float, None)),
    **{name: (str, default) for name, default in _WORDS.items()},
    **dict.fromkeys((_REDUCER, "custom_config_path", *HOOKS.values()), (str, None)),
}
"""The host's arguments about the loss: type and default."""
_OWNED = {
    "ppo.eps_clip_low": ("eps_clip", "--eps-clip"),
    "ppo.eps_clip_high": ("eps_clip_high", "--eps-clip-high"),
    "ppo.dual_clip": ("eps_clip_c", "--eps-clip-c"),
    "terms.entropy_coef": ("entropy_coef", "--entropy-coef"),
    "terms.kl_coef": ("kl_loss_coef", "--kl-loss-coef (with --use-kl-loss)"),
    "terms.kl_type": ("kl_loss_type", "--kl-loss-type"),
}
"""Our setting → the host's argument that owns it, and its flag."""
_SHOWN = ("advantage_estimator", "use_opsm", "use_unbiased_kl")
_BEFORE_STEP = f"--{HOOKS['before_train_step'].replace('_', '-')} runs mismatch_plugin.hooks.{{host}}.before_train_step"
_LAUNCHER = "`python -m mismatch_plugin.launch`"


def value(args: Namespace, name: str) -> Any:
    """One of `ARGUMENTS`, the host's default where it is absent. Raises ValueError for a word in place of a number."""
    kind, default = ARGUMENTS[name]
    found = getattr(args, name, default)
    if kind is bool:
        return parse_bool(found, name)
    return number(found, name) if kind is float and found is not default else found


def hook_path(host: str, name: str) -> str:
    """What a path argument says to run one of our functions."""
    return f"mismatch_plugin.hooks.{host}.{name}"


def runs(args: Namespace, host: str, name: str) -> bool:
    """Whether the host's path argument names our function."""
    return value(args, HOOKS[name]) == hook_path(host, name)


# Reading --------------------------------------------------------------------------------------------------------------


def read_settings(args: Namespace, host: str) -> MismatchConfig:
    """The configuration: ours (launcher, flags or YAML) with what the host owns filled in from its arguments.

    `args.mismatch_settings` (nested settings, from the launcher) is used where it is there; else the Namespace's plain
    attributes: keys of `mis.yaml` as slime reads them, the rest as flags.
    Raises: ValueError where the two contradict each other, naming both flags. Warns: MismatchWarning as `compat`.
    """
    ours = _given(args)
    data = merge(ours, _owned_by_host(args, ours, host))
    bypass = value(args, "use_rollout_logprobs")
    if ours.get("use_rollout_log_probs") and not bypass:
        raise ValueError(
            f"use_rollout_log_probs is set, but {host}'s own use_rollout_logprobs is not, and it decides which "
            f"log-probs are computed: write --use-rollout-logprobs (use_rollout_logprobs: true in YAML), or start "
            f"through {_LAUNCHER}."
        )
    data |= {"use_rollout_log_probs": bypass, "use_tis": bool(ours.get("use_tis")) or value(args, "use_tis")}
    if data["use_tis"]:
        data["tis"] = _tis_bounds(args, data.get("tis") or {}, host)
    algorithm = bypass + 2 * data["use_tis"]
    data |= read_objective(value(args, "advantage_estimator"), ours.get("objective"), algorithm, host)
    if value(args, "use_opsm") and value(args, "loss_type") == "custom_loss":
        data = with_opsm(data, value(args, "opsm_delta"))
    if data.get("denominator") == "accepted":
        raise ValueError(
            f"--mismatch-denominator accepted cannot be had in {host}: it divides by the tokens of the original masks "
            f"itself, so that what is rejected stays in the denominator. Leave it out, or choose original."
        )
    return validate_log_prob_settings(MismatchConfig.build(data), host)


def validate_setting_names(names: Iterable[str]) -> None:
    """Raise ValueError for a misspelt key of ours in the host's YAML, every key of which becomes an argument."""
    known = (*destinations(), "tis_clip", "tis_clip_low", "mismatch_settings")  # the host's own, and the launcher's
    for name in names:
        if name not in known and name.startswith(("mismatch_", "tis_", "rs_", "rollout_log_prob")):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near or name.startswith("mismatch_"):
                raise unknown("setting", name, known if near else ())


def _given(args: Namespace) -> dict[str, Any]:
    """What was given by hand, preset or file, as nested settings."""
    settings = getattr(args, "mismatch_settings", None)
    if settings is not None:
        return dict(settings)
    names = {name: given for name, given in vars(args).items() if name != "mismatch_explain_only"}
    validate_setting_names(names)
    mis = {key: names[key] for key in MIS_KEYS if names.get(key) is not None}
    registered = all(hasattr(args, name) for name in destinations())
    if not mis or (registered and not names.get("custom_config_path")):
        return MismatchConfig.from_args(Namespace(**names)).model_dump(exclude_unset=True)
    read = _with_mis(names, mis)
    if registered and "criteria" in read.get("rs", {}):
        # Nobody can tell here which of them the host's file has set, and which were typed as our flags.
        as_flags = {"rs": {"criteria": given_flags(Namespace(**names)).get("rs", {}).get("criteria", ())}}
        if MismatchConfig.build(merge(read, as_flags)).criteria != MismatchConfig.build(read).criteria:
            raise ValueError(
                "the bounds that --use-rs leaves out mean one thing in mis.yaml (those of TIS) and another as flags "
                "(1/hi), and both may have set them here: give rs_lower_bound and rs_upper_bound."
            )
    return read


def _with_mis(names: Mapping[str, Any], mis: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of mis.yaml as slime reads them, whatever is next to them: preset < mis.yaml < our other settings."""
    preset = names.get("mismatch_preset")
    base = MismatchConfig.from_args(Namespace(mismatch_preset=preset, mismatch_config=names.get("mismatch_config")))
    typed = given_flags(Namespace(**{name: given for name, given in names.items() if name not in MIS_KEYS}))
    typed = {name: given for name, given in typed.items() if name not in ("preset", "config")}
    switches = {
        "use_tis": base.use_tis or parse_bool(names.get("use_tis"), "use_tis"),
        "use_rollout_logprobs": base.use_rollout_log_probs or typed.get("use_rollout_log_probs", False),
    }
    theirs = from_slime({**mis, **switches}).model_dump(exclude_unset=True, include={"use_tis", "tis", "rs"})
    if "tis_batch_normalize" not in mis:
        theirs["tis"].pop("batch_normalize")
    criteria = [*typed.get("rs", {}).pop("criteria", ()), *theirs.get("rs", {}).get("criteria", ())]
    if criteria:
        theirs = merge(theirs, {"rs": {"criteria": criteria}})
    by_hand = dotted_fields_set(typed)
    config = MismatchConfig.build(merge(merge(base.model_dump(exclude_unset=True), theirs), typed), by_hand, by_hand)
    if preset is not None:
        warn_of_another_algorithm(preset, base, config, by_hand)
    return config.model_dump(exclude_unset=True)


def _owned_by_host(args: Namespace, ours: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Clip, entropy, KL and aggregation as the host has them. Raises ValueError where ours say otherwise."""
    found = {path: value(args, name) for path, (name, _) in _OWNED.items()}
    if found["ppo.eps_clip_high"] is None:
        found["ppo.eps_clip_high"] = found["ppo.eps_clip_low"]
    found["ppo.eps_clip_low"] = lower_epsilon(found["ppo.eps_clip_low"], "eps_clip")
    if not value(args, "use_kl_loss"):
        found["terms.kl_coef"] = 0.0
    if not found["terms.kl_coef"]:
        found["terms.kl_type"] = None
    data: dict[str, Any] = {"ppo": {}, "terms": {}}
    for path, owned in found.items():
        section, name = path.split(".")
        mine, theirs = (ours.get(section) or {}).get(name), _OWNED[path][1]
        if mine is not None and mine != owned:
            flag, shown = flag_names(MismatchConfig)[path], "off" if owned is None else owned
            raise ValueError(
                f"{flag} {mine} contradicts {host}'s {theirs}, which is {shown}: leave {flag} out, and set {theirs}."
            )
        if owned is not None:
            data[section][name] = owned
    per_token = value(args, "calculate_per_token_loss")
    data["aggregation"] = "token-mean" if per_token else "seq-mean-token-mean"
    if ours.get("aggregation") not in (None, data["aggregation"]):
        raise ValueError(
            f"--mismatch-aggregation {ours['aggregation']} contradicts {host}, which aggregates itself "
            f"({data['aggregation']} {'with' if per_token else 'without'} --calculate-per-token-loss): leave it out, "
            f"and choose by --calculate-per-token-loss."
        )
    return data


def _tis_bounds(args: Namespace, tis: Mapping[str, Any], host: str) -> dict[str, Any]:
    """The weights' settings, with the host's --tis-clip and --tis-clip-low: at its defaults nobody asked for them."""
    bounds: dict[str, Any] = {}
    for name, argument in (("upper_bound", "tis_clip"), ("lower_bound", "tis_clip_low")):
        theirs, mine = value(args, argument), tis.get(name)
        if theirs == ARGUMENTS[argument][1] or tis.get("level") == "none":
            continue
        flag = f"--{argument.replace('_', '-')}"
        if mine is not None and number(mine, name) != theirs:
            raise ValueError(
                f"--tis-{name.replace('_', '-')} {mine} contradicts {host}'s {flag} {theirs:g}: leave one of them out."
            )
        if name == "lower_bound" and tis.get("mode") == "truncate":
            raise ValueError(
                f"{host}'s {flag} {theirs:g} bounds no weight under --tis-mode truncate: choose clip or mask, or "
                f"leave it out."
            )
        bounds[name] = theirs
    return ({"mode": "clip"} if "lower_bound" in bounds else {}) | {**tis, **bounds}


# Checking -------------------------------------------------------------------------------------------------------------


def our_reason(args: Namespace, config: MismatchConfig, host: str, *, hooked: bool = False) -> str:
    """`why_our_loss` with the host's arguments."""
    return why_our_loss(config, host, value(args, "advantage_estimator"), hooked=hooked)


def check_loss(args: Namespace, config: MismatchConfig, host: str, *, whole: bool, hooked: bool = True) -> None:
    """Refuse what a loss cannot mean. whole: our whole loss; else our weights (hooked) in the host's loss.

    Raises ValueError with what to change. It depends on the arguments alone, so every rank raises or none does.
    """
    check_groups(args, config, host)
    if not whole and (reason := our_reason(args, config, host, hooked=hooked)):
        raise ValueError(
            f"--loss-type policy_loss cannot run {reason}. Start through {_LAUNCHER}, or set --loss-type custom_loss "
            f"--custom-loss-function-path {hook_path(host, 'policy_loss')}."
        )
    if whole and value(args, "use_unbiased_kl") and config.terms.kl_importance_weighted:
        raise ValueError(
            "--use-unbiased-kl and --mismatch-kl-importance-weighted both weigh the KL: leave one of them out."
        )
    other = value(args, HOOKS["tis_function"])
    if whole and other is not None and not runs(args, host, "tis_function"):
        raise ValueError(
            f"--custom-tis-function-path {other} is another correction, which {host} does not call next to the "
            f"plugin's loss: leave it out, or leave the plugin's flags out."
        )


def needs_steps(what: str, host: str) -> str:
    """Why a setting about whole steps cannot be had without the step's hooks."""
    needs = _BEFORE_STEP.format(host=host)
    return f"{what} a whole step, known only where {needs}: set it, or start through {_LAUNCHER}."


def check_arguments(args: Namespace, host: str) -> MismatchConfig | None:
    """The configuration once the whole argument list is consistent; None where neither of our losses will run.

    Raises ValueError with one sentence that says what to change.
    """
    loss_type = value(args, "loss_type")
    if loss_type not in ("policy_loss", "custom_loss"):
        return None
    config = read_settings(args, host)
    check_groups(args, config, host)
    steps = runs(args, host, "before_train_step")
    if config.gate_kl is not None and not steps:
        raise ValueError(needs_steps("--mismatch-gate-kl judges", host))
    if config.normalizes_step and config.tis.batch_normalize_scope != "auto" and not steps:
        scope = f"--tis-batch-normalize-scope {config.tis.batch_normalize_scope}"
        raise ValueError(needs_steps(f"{scope} needs the mean weight of", host))
    if config.rs.max_staleness is not None and not runs(args, host, "init"):
        raise ValueError(f"--rs-max-staleness needs the weight versions of {host}'s samples: {needs_init(host)}")
    if loss_type == "custom_loss":
        if runs(args, host, "policy_loss"):
            check_loss(args, config, host, whole=True)
        return config
    hooked = runs(args, host, "tis_function")
    called = hooked and (value(args, "get_mismatch_metrics") or value(args, "use_tis"))
    check_loss(args, config, host, whole=False, hooked=called)
    if value(args, HOOKS["tis_function"]) is None and (config.use_tis or config.compares):
        raise ValueError(
            f"weights, rejection or the gate are asked for, but no hook of the plugin would run (use_tis alone is "
            f"{host}'s built-in): set --custom-tis-function-path {hook_path(host, 'tis_function')}, or start through "
            f"{_LAUNCHER}."
        )
    if hooked and not called and config.compares:
        raise ValueError(
            f"rejection or the gate is asked for, but {host} calls --custom-tis-function-path only with --use-tis or "
            f"--get-mismatch-metrics: add --get-mismatch-metrics."
        )
    return config


# The start-up block ---------------------------------------------------------------------------------------------------


def describe_settings(config: MismatchConfig, args: Namespace, host: str) -> list[str]:
    """Lines of the start-up block: what will run, whose normaliser divides, which passes are skipped."""
    custom = value(args, "loss_type") == "custom_loss"
    hook, reducer = None if custom else value(args, HOOKS["tis_function"]), value(args, _REDUCER)
    through = hook_path(host, "policy_loss") if custom else f"{host}'s policy_loss" + (f" with {hook}" if hook else "")
    if reducer:
        divided = f"by {reducer}, which gets the masks{' without rejected tokens' if config.rejects else ''}"
    else:
        whole = "by the step's tokens" if config.aggregation == "token-mean" else "per rollout, then over rollouts"
        divided = f"as in {host}: {whole}; rejected tokens still count"
    lines = [line for line in config.describe().splitlines() if not line.startswith("loss:")]  # the host's
    lines += [f"through: {through}", f"divided {divided}"]
    lines += switch_lines(config, host, {name: value(args, name) for name in _SHOWN}, whole=custom)
    # The host's own loss knows one set of masks.
    fewer = reducer and config.rejects and not custom
    lines.append(f"entropy and KL terms: over {'accepted' if fewer else 'all response'} tokens")
    if config.normalizes:
        lines.append(f"batch normalisation over: {_scope(args, config, host)}")
    lines.append(f"second forward pass: {_second_pass(args, config, custom, host)}")
    lines += filter_lines({name: value(args, name) for name in FILTERS}, host)
    if not runs(args, host, "before_train_step"):
        lines.append(
            f"! no step metrics, and an invalid rollout log-prob makes the loss NaN instead of an error, unless "
            f"{_BEFORE_STEP.format(host=host)}"
        )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", MismatchWarning)
        read_settings(args, host)
    notes = dict.fromkeys(str(note.message) for note in found if issubclass(note.category, MismatchWarning))
    notes |= dict.fromkeys(bound_warnings(config, value(args, "rollout_max_response_len")))
    return lines + [f"! {note}" for note in notes]


def _scope(args: Namespace, config: MismatchConfig, host: str) -> str:
    scope = config.tis.batch_normalize_scope
    if scope == "micro_batch":
        return "each micro-batch"
    if not runs(args, host, "before_train_step"):
        return f"each micro-batch, unless {_BEFORE_STEP.format(host=host)}"
    if not config.use_rollout_log_probs and host == "slime" and runs(args, host, "rollout_data_postprocess"):
        return "the optimizer step (its mean weight is known before it)"
    return "the optimizer step (gradients are divided by the mean weight at its end, the logged loss is not)"


def _second_pass(args: Namespace, config: MismatchConfig, custom: bool, host: str) -> str:
    metrics = value(args, "get_mismatch_metrics")
    if value(args, "skip_actor_forward_only"):
        return "no (--skip-actor-forward-only)"
    if config.use_rollout_log_probs:
        return "yes, for --get-mismatch-metrics alone (leave that out to skip it)" if metrics else "no"
    return "yes" if custom or metrics else f"yes ({host} skips it when a rollout is one step)"
