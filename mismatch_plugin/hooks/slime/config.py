"""What slime's own arguments and ours say together, which combinations are refused, the start-up block, the launcher:
there path arguments go on the command line, and our settings ride on the Namespace.

miles is a fork with the same arguments, so it reads them here too. Their own switches of the policy loss:

| switch | in our loss | in the host's own (`tis_function`) |
| --- | --- | --- |
| `--advantage-estimator gspo`, `cispo` | that objective, ε from `--eps-clip`, `--eps-clip-high` | the host's own |
| `--use-opsm` | a criterion that judges π_θ against π_rollout | the host's own: π_θ against its anchor |
| `--use-unbiased-kl` | the KL times π_θ/anchor, with its gradient | the host's own |
| `--custom-pg-loss-reducer-function-path` | called with the original masks | as in our loss |
"""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from base64 import b64decode
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.compat.slime import MIS_KEYS, from_slime, host_objective, with_opsm
from mismatch_plugin.config.documents import parse_yaml, read_mapping
from mismatch_plugin.config.flags import destinations, given_flags
from mismatch_plugin.config.model import warn_of_another_algorithm
from mismatch_plugin.config.values import (
    dotted_fields_set,
    ignore_mismatch_warnings,
    lower_epsilon,
    merge,
    number,
    parse_bool,
    present,
    unknown,
)
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import (
    Given,
    Host,
    Plan,
    block_lines,
    peek,
    resolve,
    settled,
    whole_step_needs,
    wrap_once,
)
from mismatch_plugin.hooks.slime.samples import wrap_data_source

HOOKS = {
    "policy_loss": "custom_loss_function_path",
    "tis_function": "custom_tis_function_path",
    "rollout_data_postprocess": "rollout_data_postprocess_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
    "init": "custom_megatron_init_path",
    "group_advantages": "custom_advantage_function_path",
}
"""Our function → the host's argument that names it."""
REDUCER = "custom_pg_loss_reducer_function_path"
REWARDS = "custom_reward_post_process_path"
_SWITCHES = (
    *("use_rollout_logprobs", "use_tis", "get_mismatch_metrics", "calculate_per_token_loss", "use_kl_loss"),
    *("use_opsm", "use_unbiased_kl", "skip_actor_forward_only"),
)
_NUMBERS = {
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "eps_clip": 0.2,
    "opsm_delta": 1e-4,
    "entropy_coef": 0.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1.0,
    "kl_loss_coef": 0.0,
}
_WORDS = {"kl_loss_type": "k1", "loss_type": "policy_loss", "advantage_estimator": "grpo"}
ARGUMENTS: dict[str, tuple[type, Any]] = {
    **dict.fromkeys(_SWITCHES, (bool, False)),
    **{name: (float, default) for name, default in _NUMBERS.items()},
    "rollout_max_response_len": (int, None),
    **dict.fromkeys(("eps_clip_high", "eps_clip_c"), (float, None)),
    **{name: (str, default) for name, default in _WORDS.items()},
    **dict.fromkeys((REDUCER, REWARDS, "custom_config_path", *HOOKS.values()), (str, None)),
}
"""The host's arguments about the loss: type and default."""
POLICY_LOSSES = ("policy_loss", "custom_loss")
VERSIONS_PATCH = "mismatch-plugin patch apply --host slime --file slime/ray/rollout.py --root DIR"
_LAUNCHER = "`python -m mismatch_plugin.launch`"
_ESTIMATORS = ("grpo", "gspo", "cispo")
"""Those whose rewards slime centres within a group, and divides by its deviation."""


def value(args: Namespace, name: str) -> Any:
    """One of `ARGUMENTS`, the host's default where it is absent. Raises ValueError for a word in place of a number."""
    kind, default = ARGUMENTS[name]
    found = getattr(args, name, default)
    if kind is bool:
        return parse_bool(found, name)
    return number(found, name) if kind is float and found is not default else found


def flag(name: str) -> str:
    """The host's flag for an argument."""
    return f"--{name.replace('_', '-')}"


def hook_path(host: str, name: str) -> str:
    """What a path argument says to run one of our functions."""
    return f"mismatch_plugin.hooks.{host}.{name}"


def runs(args: Namespace, host: str, name: str) -> bool:
    """Whether the host's path argument names our function."""
    return value(args, HOOKS[name]) == hook_path(host, name)


def set_hook(host: str, name: str) -> str:
    """What to do for our function to run: its path argument, or the launcher."""
    return f"set {flag(HOOKS[name])} {hook_path(host, name)}, or start through {_LAUNCHER}"


# Reading --------------------------------------------------------------------------------------------------------------


def read_settings(args: Namespace, host: Host) -> MismatchConfig:
    """The configuration: ours (launcher, flags or YAML) with what the host owns filled in from its arguments.

    `args.mismatch_settings` (nested settings, from the launcher) is used where it is there; else the Namespace's plain
    attributes: keys of `mis.yaml` as slime reads them, the rest as flags.
    Raises: ValueError where the two contradict each other, naming both flags. Warns: MismatchWarning as `compat`.
    """
    ours = _given(args)
    bypass, weighs = value(args, "use_rollout_logprobs"), value(args, "use_tis")
    if ours.pop("use_rollout_log_probs", False) and not bypass:
        raise ValueError(
            f"use_rollout_log_probs is set, but {host.name}'s own use_rollout_logprobs is not, and it decides which "
            f"log-probs are computed: write --use-rollout-logprobs (use_rollout_logprobs: true in YAML), or start "
            f"through {_LAUNCHER}."
        )
    weighs = ours.pop("use_tis", False) or weighs
    algorithm = bypass + 2 * weighs
    low, high = value(args, "eps_clip"), value(args, "eps_clip_high")
    kl_coef = value(args, "kl_loss_coef") if value(args, "use_kl_loss") else 0.0
    clip = {"eps_clip_low": lower_epsilon(low, "eps_clip"), "eps_clip_high": low if high is None else high}
    terms = {"entropy_coef": value(args, "entropy_coef"), "kl_coef": kl_coef}
    theirs: dict[str, Any] = {
        "use_rollout_log_probs": bypass,
        "use_tis": weighs,
        "ppo": clip | present(dual_clip=value(args, "eps_clip_c")),
        "terms": terms | present(kl_type=value(args, "kl_loss_type") if kl_coef else None),
        "aggregation": "token-mean" if value(args, "calculate_per_token_loss") else "seq-mean-token-mean",
    }
    estimator = value(args, "advantage_estimator")
    if (objective := host_objective(estimator)) != "ppo":
        theirs["objective"] = objective
        if algorithm == 3:
            raise ValueError(
                f"--advantage-estimator {estimator} clips π_θ/π_old, and algorithm 3 is REINFORCE, which has no such "
                f"ratio: choose grpo, whose advantages are the same, or leave --use-tis out (algorithm 1)."
            )
    if weighs:
        theirs["tis"] = _tis_bounds(args, ours.get("tis") or {}, host)
    if value(args, "use_opsm") and value(args, "loss_type") == "custom_loss":
        ours = with_opsm({**ours, "use_rollout_log_probs": bypass}, value(args, "opsm_delta"))
    return resolve(host, ours, theirs, by_hand=())


def _tis_bounds(args: Namespace, tis: Mapping[str, Any], host: Host) -> dict[str, Any]:
    """The weights' bounds of the host's --tis-clip and --tis-clip-low: at its defaults nobody asked for them."""
    names = {"tis_clip": "upper_bound", "tis_clip_low": "lower_bound"}
    asked = {ours: value(args, name) for name, ours in names.items() if value(args, name) != ARGUMENTS[name][1]}
    if tis.get("level") == "none":
        return {}
    if "lower_bound" in asked and tis.get("mode") == "truncate":
        raise ValueError(
            f"{host.name}'s --tis-clip-low {asked['lower_bound']:g} bounds no weight under --tis-mode truncate: choose "
            f"clip or mask, or leave it out."
        )
    return ({"mode": "clip"} if "lower_bound" in asked else {}) | asked


def validate_setting_names(names: Iterable[str]) -> None:
    """Raise ValueError for a misspelt key of ours in the host's YAML, every key of which becomes an argument."""
    known = (*destinations(), "tis_clip", "tis_clip_low", "mismatch_settings")  # the host's own, and the launcher's
    for name in names:
        if name not in known and name.startswith(("mismatch_", "tis_", "rs_", "rollout_log_prob")):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near or name.startswith("mismatch_"):
                raise unknown("setting", name, known if near else ())


def _given(args: Namespace) -> dict[str, Any]:
    """What was given by hand, preset or file, as nested settings; keys of mis.yaml as slime reads them, whatever is
    next to them: preset < mis.yaml < our other settings."""
    settings = getattr(args, "mismatch_settings", None)
    if settings is not None:
        return dict(settings)
    names = {name: given for name, given in vars(args).items() if name != "mismatch_explain_only"}
    validate_setting_names(names)
    mis = {key: names[key] for key in MIS_KEYS if names.get(key) is not None}
    if not mis:
        return MismatchConfig.from_args(Namespace(**names)).model_dump(exclude_unset=True)
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


# Checking -------------------------------------------------------------------------------------------------------------


def why_our_loss(args: Namespace, config: MismatchConfig, host: Host, *, hooked: bool = False) -> str:
    """What of these settings the host's own policy loss cannot run, and why; "" where it can run them all.

    hooked: our `tis_function` is called in it. It gets old and rollout log-probs and the policy loss, nothing else.
    """
    loss, theirs = f"{host.name}'s policy_loss", host_objective(value(args, "advantage_estimator"))
    if config.algorithm == 3:
        return (
            f"algorithm 3 (--use-rollout-log-probs with --use-tis): {loss} clips π_θ/π_rollout already, so that the "
            f"importance weight would count twice"
        )
    if config.algorithm == 1 and (hooked or config.compares):
        compares = f"rejection and metrics compare π_θ with π_rollout, which {loss} does not pass on"
        return f"algorithm 1 (--use-rollout-log-probs): {compares}"
    reasons = {
        f"--mismatch-objective {config.objective}: {loss} computes {theirs} (--advantage-estimator)": config.objective
        != theirs,
        f"--rs-policy current: {loss} does not pass π_θ on": config.rejects_on_current_policy,
        f"{', '.join(config.advantage_readers)}: {loss} does not pass advantages on": bool(config.advantage_readers),
        f"--mismatch-rollout-kl-coef: {loss} adds no such term": config.terms.rollout_kl_coef,
        f"--mismatch-kl-importance-weighted: {loss} weighs its KL by nothing of ours": (
            config.terms.kl_importance_weighted
        ),
    }
    return next((reason for reason, there in reasons.items() if there), "")


def validate_groups(args: Namespace, config: MismatchConfig, host: str) -> None:
    """Raise ValueError where slime would not form advantages by `--rs-group`, with what to change."""
    path, ours = value(args, HOOKS["group_advantages"]), hook_path(host, "group_advantages")
    given, argument = f"--rs-group {config.rs.group}", flag(HOOKS["group_advantages"])
    if config.rs.group == "keep":
        if path == ours:
            raise ValueError(f"{argument} {ours} needs --rs-group exclude or drop: add it, or leave the path out.")
        return
    if path is None:
        raise ValueError(f"{given} has no effect unless {ours} runs: {set_hook(host, 'group_advantages')}.")
    estimator = value(args, "advantage_estimator")
    instead = {
        f"{argument} {path}": path != ours,
        f"--advantage-estimator {estimator}": estimator not in _ESTIMATORS,
        "--disable-rewards-normalization": not getattr(args, "rewards_normalization", True),
        flag(REWARDS): value(args, REWARDS),
        "--disable-compute-advantages-and-returns": not getattr(args, "compute_advantages_and_returns", True),
    }
    if other := next((other for other, there in instead.items() if there), ""):
        raise ValueError(
            f"{given} takes the place of slime's advantages within a group (--advantage-estimator "
            f"{', '.join(_ESTIMATORS)}), and {other} makes others: leave one of the two out."
        )
    if value(args, "loss_type") == "policy_loss" and not value(args, "get_mismatch_metrics"):
        raise ValueError(
            f"{given} needs old log-probs before advantages, and slime skips their pass where a rollout is one step: "
            f"add --get-mismatch-metrics."
        )


def check_arguments(args: Namespace, host: Host) -> MismatchConfig | None:
    """The configuration once the whole argument list is consistent; None where neither of our losses will run.

    Raises ValueError with one sentence that says what to change. It depends on the arguments alone, so every rank
    raises or none does.
    """
    loss_type, name = value(args, "loss_type"), host.name
    if loss_type not in POLICY_LOSSES:
        return None
    config = read_settings(args, host)
    validate_groups(args, config, name)
    needed = [(given, "before_train_step") for given in whole_step_needs(config)]
    needed += [("--rs-max-staleness", "init")] * (config.rs.max_staleness is not None)
    for given, hook in needed:
        if not runs(args, name, hook):
            raise ValueError(f"{given} needs the plugin's {hook}: {set_hook(name, hook)}.")
    path, hooked = value(args, HOOKS["tis_function"]), runs(args, name, "tis_function")
    if loss_type == "custom_loss":
        if runs(args, name, "policy_loss"):
            if value(args, "use_unbiased_kl") and config.terms.kl_importance_weighted:
                raise ValueError(
                    "--use-unbiased-kl and --mismatch-kl-importance-weighted both weigh the KL: leave one of them out."
                )
            if path is not None and not hooked:
                raise ValueError(
                    f"--custom-tis-function-path {path} is another correction, which {name} does not call next to the "
                    f"plugin's loss: leave it out, or leave the plugin's flags out."
                )
        return config
    called = hooked and (value(args, "get_mismatch_metrics") or value(args, "use_tis"))
    if reason := why_our_loss(args, config, host, hooked=called):
        raise ValueError(
            f"--loss-type policy_loss cannot run {reason}. Leave it out and start through {_LAUNCHER}, or set "
            f"--loss-type custom_loss --custom-loss-function-path {hook_path(name, 'policy_loss')}."
        )
    if path is None and (config.use_tis or config.compares):
        raise ValueError(
            f"weights, rejection or the gate are asked for, but no hook of the plugin would run (use_tis alone is "
            f"{name}'s built-in): {set_hook(name, 'tis_function')}."
        )
    if hooked and not called and config.compares:
        raise ValueError(
            f"rejection or the gate is asked for, but {name} calls --custom-tis-function-path only with --use-tis or "
            f"--get-mismatch-metrics: add --get-mismatch-metrics."
        )
    return config


# The start-up block ---------------------------------------------------------------------------------------------------


def describe_settings(config: MismatchConfig, args: Namespace, host: Host) -> list[str]:
    """Lines of the start-up block: what will run, whose normaliser divides, which passes are skipped."""
    name, custom = host.name, value(args, "loss_type") == "custom_loss"
    steps = runs(args, name, "before_train_step")
    hook = None if custom else value(args, HOOKS["tis_function"])
    through = hook_path(name, "policy_loss") if custom else f"{name}'s policy_loss" + (f" with {hook}" if hook else "")
    lines = [f"through: {through}"]
    if config.normalizes:
        by_micro_batch = config.tis.batch_normalize_scope == "micro_batch"
        scope = "the optimizer step" if steps and not by_micro_batch else "each micro-batch"
        more = "" if steps or by_micro_batch else f"; for the optimizer step {set_hook(name, 'before_train_step')}"
        lines.append(f"batch normalisation over: {scope}{more}")
    bias, top_p, top_k = "", value(args, "rollout_top_p"), int(value(args, "rollout_top_k"))
    if name == "slime" and top_p != 1.0:  # its patched SGLang keeps the ids of every filter, but only under top-p
        lines.append(
            f"sampling filter: top_p {top_p:g}; every log-prob of slime's, old and ours, is over the ids that SGLang "
            f"(with slime's patch) kept: for equal engines the mean ratio is 1"
        )
    elif bias := filter_bias(top_p=top_p, top_k=top_k, renormalised=False):
        bias += f". {name} passes no mask on: sample with top_p 1 and top_k -1"
    metrics, second = value(args, "get_mismatch_metrics"), "yes"
    if value(args, "skip_actor_forward_only"):
        second = "no (--skip-actor-forward-only)"
    elif config.use_rollout_log_probs:
        second = "yes, for --get-mismatch-metrics alone (leave that out to skip it)" if metrics else "no"
    elif not (custom or metrics):
        second += f" ({name} skips it when a rollout is one step)"
    bare = "no step metrics, and an invalid rollout log-prob makes the loss NaN instead of an error"
    whole = "by the step's tokens" if config.aggregation == "token-mean" else "per rollout, then over rollouts"
    reducer = value(args, REDUCER)
    return block_lines(
        config,
        lines,
        divided=f"by {reducer}" if reducer else f"as in {name}: {whole}; rejected tokens still count",
        second_pass=second,
        filtered=bias,
        length=value(args, "rollout_max_response_len"),
        notes=[] if steps else [f"{bare}: {set_hook(name, 'before_train_step')}"],
    )


# The launcher ---------------------------------------------------------------------------------------------------------

TABLE: dict[str, dict[str, Any]] = {
    flag(name): {"default": default} | ({"action": "store_true"} if kind is bool else {"type": kind})
    for name, (kind, default) in ARGUMENTS.items()
} | {
    f"--disable-{name.replace('_', '-')}": {"action": "store_false", "dest": name, "default": True}
    for name in ("rewards_normalization", "compute_advantages_and_returns")
}
"""The host's flags about the loss, as options of `add_argument`."""
FLAGS = frozenset({"--use-rollout-entropy", "--use-rollout-routing-replay", "--use-rollout-indexer-replay", *TABLE})
_CONFIG_PATH = "--custom-config-path"
_VERIFIED = "verified where servers have the SGLang plugin; a difference is "
_UPDATES = {"error": f"{_VERIFIED}an error", "warn": f"{_VERIFIED}a warning", "off": "not verified"}
_INLINE = "base64:"  # miles takes the file itself as a value


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run under slime or miles: which path arguments, and the settings for its Namespace. Raises: ValueError where
    the host's own arguments and ours contradict each other, or name another loss."""
    args, typed = peek(given.host_argv, TABLE)
    path, file = args.custom_config_path, {}
    if path is not None and path.startswith(_INLINE):
        file = parse_yaml(b64decode(path[len(_INLINE) :], validate=True).decode()) or {}
        if not isinstance(file, dict):
            raise ValueError(f"{_CONFIG_PATH} holds a {type(file).__name__}, not a mapping of arguments.")
    elif path is not None:
        file = read_mapping(path)
    file = {str(name): given for name, given in file.items()}
    validate_setting_names(file)
    vars(args).update(file)
    flags = set(destinations()) - ARGUMENTS.keys()
    ours = [name for name in sorted(file) if name in flags or name.startswith("mismatch_")]
    if not (given.flags or ours or args.use_tis or args.use_rollout_logprobs):
        return Plan.untouched(host, given)
    config = _settings(host, given, args, ours)
    if config.rs.max_staleness is not None:
        validate_versions_kept(host.name, script)
    added = _arguments(host, config, args, typed | file.keys())
    settings = args.mismatch_settings
    config = check_arguments(args, host) or config
    lines = describe_settings(config, args, host)
    lines.append(f"weight updates: {_UPDATES[config.verify_weights]}")
    if config.algorithm == 3:
        lines.append(f"{host.name}'s use_tis is cleared: its parser forbids the pair, and the loss above does both")

    def settle(namespace: Namespace) -> None:
        namespace.mismatch_settings = settings
        namespace.use_rollout_logprobs = config.use_rollout_log_probs
        namespace.use_tis = config.algorithm == 2  # 3 is ours alone; a file may have set both after the host's check
        with ignore_mismatch_warnings():  # the block has said them
            check_arguments(namespace, host)
        wrap_data_source(host.name, namespace)

    install = partial(wrap_once, *host.reads[0], settled(settle))
    return Plan((*given.host_argv, *added), tuple(added), tuple(lines), install, config, settle)


def _settings(host: Host, given: Given, args: Namespace, in_file: list[str]) -> MismatchConfig:
    """The configuration, and `mismatch_settings` and the two switches on `args` as the host will see them. in_file:
    settings of ours in the host's --custom-config-path."""
    typed = [flag for flag in given.flags if flag not in ("--use-tis", "--use-rollout-log-probs")]
    if in_file and typed:
        raise ValueError(
            f"settings are in {_CONFIG_PATH} {args.custom_config_path} ({', '.join(in_file)}) and on the command "
            f"line ({', '.join(typed)}), and {host.name} lets the file win: keep them in one place."
        )
    args.use_tis = bool(args.use_tis) or given.config.use_tis
    bypass = bool(args.use_rollout_logprobs) or bool(getattr(args, "use_rollout_log_probs", False))
    args.use_rollout_logprobs = bypass or given.config.use_rollout_log_probs
    if not in_file:
        # Of our flags alone; without one of our own, use_tis is the host's built-in: clip between --tis-clip-low and
        # --tis-clip.
        args.mismatch_settings = given.settings
    config = read_settings(args, host)
    if in_file:
        args.mismatch_settings = config.model_dump(mode="json", exclude_unset=True)
    switches = {"use_tis": config.use_tis, "use_rollout_log_probs": config.use_rollout_log_probs}
    args.mismatch_settings = {**args.mismatch_settings, **switches}
    return config


def _arguments(host: Host, config: MismatchConfig, args: Namespace, typed: set[str]) -> list[str]:
    """The host's arguments to add, set on `args` as well. typed: destinations that the command line or the host's file
    gives. Raises ValueError where they are taken by something else."""
    added: list[str] = []

    def give(name: str, value: str | bool = True) -> None:
        setattr(args, name, value)
        added.extend([flag(name)] if value is True else [flag(name), str(value)])

    def give_hook(name: str) -> None:
        if getattr(args, HOOKS[name]) is None:
            give(HOOKS[name], hook_path(host.name, name))

    if config.use_rollout_log_probs:
        give("use_rollout_logprobs")
    loss, ours = args.loss_type, hook_path(host.name, "policy_loss")
    if loss not in POLICY_LOSSES or (loss == "custom_loss" and not runs(args, host.name, "policy_loss")):
        path = f" with --custom-loss-function-path {args.custom_loss_function_path}" if loss == "custom_loss" else ""
        raise ValueError(
            f"--loss-type {loss}{path} is another loss, in which nothing would be corrected: leave it out, or leave "
            f"the plugin's flags out."
        )
    custom, reason = loss == "custom_loss", why_our_loss(args, config, host)
    if not custom and (config.use_rollout_log_probs or reason) and "loss_type" not in typed:
        give("loss_type", "custom_loss")
        give(HOOKS["policy_loss"], ours)
    elif config.use_rollout_log_probs and not (custom or reason):
        return added  # the host's own loss is algorithm 1
    elif not custom:
        if args.custom_tis_function_path is not None and not runs(args, host.name, "tis_function"):
            raise ValueError(
                f"--custom-tis-function-path {args.custom_tis_function_path} is another correction, and {host.name} "
                f"calls one only: leave it out, or leave the plugin's flags out."
            )
        give_hook("tis_function")
        if config.use_tis:
            give("use_tis")
        elif not args.get_mismatch_metrics:
            give("get_mismatch_metrics")  # without --use-tis the host calls the function for metrics only
    args.use_tis = config.algorithm == 2
    for name in ("rollout_data_postprocess", "before_train_step", "init"):
        give_hook(name)
    if config.rs.group != "keep":
        give_hook("group_advantages")
        if not custom and not args.get_mismatch_metrics:
            give("get_mismatch_metrics")  # the pass for old log-probs runs where a rollout is one step, too
    return added


def validate_versions_kept(host: str, script: Path | None) -> None:
    """Raise ValueError where slime's tree, that of the script or one on sys.path, drops the versions of its samples."""
    roots = [*([] if script is None else [script.parent]), *map(Path, sys.path)]
    path = next((path for root in roots if (path := root / "slime/ray/rollout.py").is_file()), None)
    if host == "slime" and path is not None and '"weight_versions"' not in path.read_text(encoding="utf-8"):
        raise ValueError(
            f"--rs-max-staleness needs the weight versions of samples, which slime drops on the way to the trainer: "
            f"apply the patch ({VERSIONS_PATCH}), or leave it out."
        )
