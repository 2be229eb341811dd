"""slime and miles: the host's own path arguments are set on its command line, our settings ride on its Namespace."""

from __future__ import annotations

from argparse import Namespace
from base64 import b64decode
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.documents import parse_yaml
from mismatch_plugin.hooks.base import Given, Host, Plan, peek, settled
from mismatch_plugin.hooks.ray_actors import check_actors
from mismatch_plugin.hooks.slime.config import MIS_KEYS, refuse_unknown_settings
from mismatch_plugin.hooks.version import refuse_old_megatron

_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_PATH: dict[str, Any] = {"type": str, "default": None}
_LOSS_PATH, _TIS_PATH = "--custom-loss-function-path", "--custom-tis-function-path"
_BEFORE_STEP = "--custom-megatron-before-train-step-hook-path"
_POSTPROCESS, _INIT = "--rollout-data-postprocess-path", "--custom-megatron-init-path"
_CONFIG_PATH = "--custom-config-path"
_STEP_HOOKS = {_POSTPROCESS: "rollout_data_postprocess", _BEFORE_STEP: "before_train_step", _INIT: "init"}
_INLINE = "base64:"  # miles takes the file itself as a value

# The host's flags about the loss, with its defaults.
TABLE: dict[str, dict[str, Any]] = {
    "--use-rollout-logprobs": _SWITCH,
    "--use-tis": _SWITCH,
    "--get-mismatch-metrics": _SWITCH,
    "--calculate-per-token-loss": _SWITCH,
    "--use-kl-loss": _SWITCH,
    "--use-opsm": _SWITCH,
    "--use-unbiased-kl": _SWITCH,
    "--skip-actor-forward-only": _SWITCH,
    "--tis-clip": {"type": float, "default": 2.0},
    "--tis-clip-low": {"type": float, "default": 0},
    "--eps-clip": {"type": float, "default": 0.2},
    "--eps-clip-high": {"type": float, "default": None},
    "--eps-clip-c": {"type": float, "default": None},
    "--entropy-coef": {"type": float, "default": 0.0},
    "--kl-loss-coef": {"type": float, "default": 0.0},
    "--kl-loss-type": {"type": str, "default": "k1"},
    "--loss-type": {"type": str, "default": "policy_loss"},
    "--advantage-estimator": {"type": str, "default": "grpo"},
    "--custom-pg-loss-reducer-function-path": _PATH,
    _LOSS_PATH: _PATH,
    _TIS_PATH: _PATH,
    _BEFORE_STEP: _PATH,
    _POSTPROCESS: _PATH,
    _INIT: _PATH,
    _CONFIG_PATH: _PATH,
}
FLAGS = frozenset(
    {
        "--use-rollout-entropy",
        *("--use-rollout-routing-replay", "--use-rollout-indexer-replay"),
        *TABLE,
    }
)
_OURS_IN_FILES = (*MIS_KEYS, "use_rollout_log_probs", "rs_criterion", "tis_batch_normalize_scope")


def plan(host: str, given: Given, script: Path | None) -> Plan:
    """The run under slime or miles: which path arguments, and the settings for its Namespace.

    Raises: ValueError where the host's own arguments and ours contradict each other, or name another loss.
    """
    args, typed = peek(given.host_argv, TABLE)
    file = _read_config(args)
    refuse_unknown_settings(file)
    for name, value in file.items():
        setattr(args, name, value)
    typed |= file.keys()
    asked = bool(given.flags) or any(_ours(name) for name in file)
    asked = asked or bool(args.use_tis or args.use_rollout_logprobs)
    if not asked:
        return Plan.untouched(host, given)
    refuse_old_megatron([] if script is None else [script.parent])
    hooks = import_module(f"mismatch_plugin.hooks.{host}")
    config = _settings(host, given, args, file)
    added = _arguments(host, config, args, typed)
    settings = args.mismatch_settings
    config = hooks.check(args) or config
    lines = hooks.describe(config, args)
    if config.algorithm == 3:
        lines.append(f"{host}'s use_tis is cleared: its parser forbids the pair, and the loss above does both")
    algorithm = config.algorithm

    def settle(namespace: Namespace) -> None:
        namespace.mismatch_settings = settings
        namespace.use_rollout_logprobs = algorithm in (1, 3)
        namespace.use_tis = algorithm == 2  # 3 is ours alone; a file may have set both after the host's own check
        hooks.check(namespace)
        check_actors()

    def install() -> None:
        arguments: Any = import_module(f"{host}.utils.arguments")
        arguments.parse_args = settled(arguments.parse_args, settle)

    return Plan((*given.host_argv, *added), tuple(added), tuple(lines), install, settle)


def declared(host: str, hands_on: str = "") -> Host:
    """slime or miles, which differ in their names. hands_on: how miles's scripts take arguments for the trainer."""
    return Host(
        name=host,
        packages=(host,),
        plan=partial(plan, host),
        reads=((f"{host}.utils.arguments", "parse_args"),),
        flags=FLAGS,
        starters=(f"{host}.utils.external_utils.command_utils",),
        hands_on=f"among the arguments that the script hands on{hands_on}",
        inside=f"{host}/utils",
        version_file="setup.py",
    )


def _settings(host: str, given: Given, args: Namespace, file: Mapping[str, Any]) -> MismatchConfig:
    """The configuration, and `mismatch_settings` and the two switches on `args` as the host will see them."""
    in_file = sorted(name for name in file if _ours(name))
    switches = {"--use-tis", "--use-rollout-log-probs"}
    others = [flag for flag in given.flags if flag not in switches]
    if in_file and others:
        raise ValueError(
            f"settings stand in {_CONFIG_PATH} {args.custom_config_path} ({', '.join(in_file)}) and on the command "
            f"line ({', '.join(others)}), and {host} lets the file win: keep them in one place."
        )
    ours = given.config
    args.use_tis = bool(args.use_tis) or ours.use_tis
    bypass = bool(args.use_rollout_logprobs) or bool(getattr(args, "use_rollout_log_probs", False))
    args.use_rollout_logprobs = bypass or ours.use_rollout_log_probs
    if not in_file:
        # Of our flags alone; without one of our own, use_tis is the host's built-in: clip between --tis-clip-low and
        # --tis-clip.
        args.mismatch_settings = given.settings
    config = import_module(f"mismatch_plugin.hooks.{host}").settings(args)
    if in_file:
        args.mismatch_settings = config.model_dump(mode="json", exclude_unset=True)
    switched = {"use_tis": config.use_tis, "use_rollout_log_probs": config.use_rollout_log_probs}
    args.mismatch_settings = {**args.mismatch_settings, **switched}
    return config


def _arguments(host: str, config: MismatchConfig, args: Namespace, typed: set[str]) -> list[str]:
    """The host's arguments to add, set on `args` as well. Raises ValueError where they are taken by something else."""
    module = f"mismatch_plugin.hooks.{host}"
    added: list[str] = []

    def give(flag: str, value: str | None = None) -> None:
        dest = flag.lstrip("-").replace("-", "_")
        setattr(args, dest, True if value is None else value)
        added.extend([flag] if value is None else [flag, value])

    if config.use_rollout_log_probs:
        give("--use-rollout-logprobs")
    ours = f"{module}.policy_loss"
    custom = args.loss_type == "custom_loss" and args.custom_loss_function_path == ours
    if not custom and args.loss_type == "custom_loss":
        raise ValueError(
            f"--loss-type custom_loss with {_LOSS_PATH} {args.custom_loss_function_path} is another loss, in which the "
            f"correction would not run: leave both out, or name {ours}."
        )
    own_loss = config.algorithm == 1 and "loss_type" in typed and not config.rejects
    if config.use_rollout_log_probs and not custom and not own_loss:
        if "loss_type" in typed:
            raise ValueError(
                f"--loss-type {args.loss_type} contradicts algorithm {config.algorithm} "
                f"({'--use-rollout-log-probs with --use-tis' if config.use_tis else '--use-rollout-log-probs'}): "
                f"{_WHY[config.use_tis].format(host=host)}. Leave --loss-type out: the launcher sets {ours}."
            )
        give("--loss-type", "custom_loss")
        give(_LOSS_PATH, ours)
        custom = True
    if not custom and not own_loss:
        hook = f"{module}.tis_function"
        if args.custom_tis_function_path not in (None, hook):
            raise ValueError(
                f"{_TIS_PATH} {args.custom_tis_function_path} is another correction, and {host} calls one only: leave "
                f"it out, or leave the plugin's flags out."
            )
        if args.custom_tis_function_path is None:
            give(_TIS_PATH, hook)
        if config.use_tis:
            give("--use-tis")
        elif not args.get_mismatch_metrics:
            give("--get-mismatch-metrics")  # without --use-tis the host calls the function for metrics only
    if own_loss:
        return added
    args.use_tis = config.algorithm == 2
    for flag, name in _STEP_HOOKS.items():
        if getattr(args, flag.lstrip("-").replace("-", "_")) is None:
            give(flag, f"{module}.{name}")
    return added


_WHY = {
    True: "{host}'s own loss clips the ratio to the rollout policy already, so the importance weight would count twice",
    False: "{host}'s own loss passes no rollout log-probs on, so that neither rejection nor metrics could run",
}


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
    if not isinstance(data, dict):
        raise ValueError(f"{_CONFIG_PATH} {path} holds a {type(data).__name__}, not a mapping of arguments.")
    return {str(name): value for name, value in data.items()}


def _ours(name: str) -> bool:
    return name in _OURS_IN_FILES or name.startswith("mismatch_") or name == "rollout_log_prob_policy"
