"""slime and miles under the launcher: path arguments go on the command line, our settings ride on the Namespace."""

from __future__ import annotations

from argparse import Namespace
from base64 import b64decode
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.documents import parse_yaml
from mismatch_plugin.config.flags import destinations
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.hooks.base import Given, Host, Plan, peek, settled, wrap_once
from mismatch_plugin.hooks.slime.config import (
    ARGUMENTS,
    HOOKS,
    POLICY_LOSSES,
    check_arguments,
    describe_settings,
    flag,
    hook_path,
    read_settings,
    runs,
    validate_setting_names,
    why_our_loss,
)
from mismatch_plugin.hooks.slime.samples import wrap_data_source
from mismatch_plugin.hooks.slime.versions import validate_versions_kept

TABLE: dict[str, dict[str, Any]] = {
    flag(name): {"default": default} | ({"action": "store_true"} if kind is bool else {"type": kind})
    for name, (kind, default) in ARGUMENTS.items()
} | {
    "--disable-rewards-normalization": {"action": "store_false", "dest": "rewards_normalization"},
    "--disable-compute-advantages-and-returns": {"action": "store_false", "dest": "compute_advantages_and_returns"},
}
"""The host's flags about the loss, as options of `add_argument`."""
FLAGS = frozenset({"--use-rollout-entropy", "--use-rollout-routing-replay", "--use-rollout-indexer-replay", *TABLE})
_CONFIG_PATH = "--custom-config-path"
_VERIFIED = "verified where servers have the SGLang plugin; a difference is "
_UPDATES = {"error": f"{_VERIFIED}an error", "warn": f"{_VERIFIED}a warning", "off": "not verified"}
_INLINE = "base64:"  # miles takes the file itself as a value


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run under slime or miles: which path arguments, and the settings for its Namespace.

    Raises: ValueError where the host's own arguments and ours contradict each other, or name another loss.
    """
    args, typed = peek(given.host_argv, TABLE)
    file = _read_config(args)
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
    """The configuration, and `mismatch_settings` and the two switches on `args` as the host will see them.

    in_file: settings of ours in the host's --custom-config-path.
    """
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
    """The host's arguments to add, set on `args` as well. Raises ValueError where they are taken by something else.

    typed: destinations that the command line or the host's file gives.
    """
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
    if not custom and (config.use_rollout_log_probs or reason):
        if "loss_type" in typed and not reason:
            return added  # the host's own loss is algorithm 1
        if "loss_type" in typed:
            raise ValueError(
                f"--loss-type {loss} contradicts {reason}. Leave --loss-type out: the launcher sets {ours}."
            )
        give("loss_type", "custom_loss")
        give(HOOKS["policy_loss"], ours)
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


def _read_config(args: Namespace) -> dict[str, Any]:
    """What the host's --custom-config-path will set on its Namespace, after its own checks."""
    path = args.custom_config_path
    if path is None:
        return {}
    if str(path).startswith(_INLINE):
        text = b64decode(path[len(_INLINE) :], validate=True).decode()
    elif Path(path).is_file():
        text = Path(path).read_text(encoding="utf-8")
    else:
        raise ValueError(f"{_CONFIG_PATH} {path} does not exist: check the path.")
    try:
        data = parse_yaml(text) or {}
    except ValueError as error:
        raise ValueError(f"{_CONFIG_PATH} {path} is not valid YAML: {error}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"{_CONFIG_PATH} {path} holds a {type(data).__name__}, not a mapping of arguments.")
    return {str(name): value for name, value in data.items()}
