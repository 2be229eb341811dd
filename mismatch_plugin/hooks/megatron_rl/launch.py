"""Megatron-LM RL: flags through its extra-args provider; without the patch two functions of rl_utils are replaced."""

from __future__ import annotations

import ast
import sys
from inspect import signature
from pathlib import Path
from typing import Any

from mismatch_plugin.hooks.base import Given, Host, Plan, peek
from mismatch_plugin.hooks.megatron_rl.adapter import calculate_grpo_loss, install
from mismatch_plugin.hooks.megatron_rl.config import COEFFICIENT, IS_CORRECTION, describe, settings, without_mask
from mismatch_plugin.hooks.version import validate_megatron_version

_NO_CORRECTION = "--no-rl-inference-logprobs-is-correction"
_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
TABLE: dict[str, dict[str, Any]] = {
    "--grpo-clamp-eps-lower": {"type": float, "default": 0.01},
    "--grpo-clamp-eps-upper": {"type": float, "default": 0.01},
    "--grpo-kl-beta": {"type": float, "default": 0.001},
    "--grpo-entropy-term-weight": {"type": float, "default": 0.0},
    COEFFICIENT: {"type": float, "default": None},
    "--rl-default-temperature": {"type": float, "default": 1.0},
    "--rl-default-top-p": {"type": float, "default": 0.0},
    "--rl-default-top-k": {"type": int, "default": -1},
    "--inference-max-seq-length": {"type": int, "default": 2560},
    "--inference-dynamic-batching-logprobs-mode": {"type": str, "default": "raw_logprobs"},
    "--rl-use-sequence-packing": _SWITCH,
    "--calculate-per-token-loss": _SWITCH,
    "--bf16": _SWITCH,
    "--fp16": _SWITCH,
    IS_CORRECTION: _SWITCH,
    _NO_CORRECTION: _SWITCH,
}
FLAGS = frozenset(TABLE)


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run of train_rl.py.

    Raises: ValueError where Megatron's own correction flags and ours disagree, where a setting needs the loss mask, or
    nothing would be corrected or measured without it, and the tree is not patched, and where this Megatron-LM has
    another `calculate_grpo_loss`.
    """
    if not given.flags:
        return Plan.untouched(host, given)
    args, _ = peek(given.host_argv, TABLE)
    if args.no_rl_inference_logprobs_is_correction:
        raise ValueError(
            f"{_NO_CORRECTION} keeps the inference log-probs from the loss: leave it out, as the launcher sets "
            f"the opposite."
        )
    corrects, coefficient = args.rl_inference_logprobs_is_correction, args.rl_importance_sampling_truncation_coef
    for flag, there in {IS_CORRECTION: corrects, COEFFICIENT: coefficient is not None}.items():
        if there and not given.config.use_tis:
            raise ValueError(
                f"{flag} weighs the loss (algorithm 2), but the plugin's flags choose algorithm "
                f"{given.config.algorithm}: add --use-tis, or leave {flag} out (the launcher adds what it needs)."
            )
    folders = [] if script is None else [script.parent]
    validate_megatron_version(folders)
    _validate_loss(folders)
    patched = script is not None and b"mismatch_plugin" in script.read_bytes()
    added = () if corrects else (IS_CORRECTION,)
    args.rl_inference_logprobs_is_correction, args.mismatch_settings = True, given.settings
    config = settings(args)
    if not patched:
        without_mask(config)
    lines = describe(config, args, masked=patched)
    return Plan((*given.host_argv, *added), added, tuple(lines), lambda: install(given.settings, patched), config)


def _validate_loss(folders: list[Path]) -> None:
    """Raises ValueError where the Megatron-LM that will run passes its loss other arguments than ours takes."""
    roots = [*folders, *(Path(entry) for entry in sys.path)]
    path = next((p for root in roots if (p := root / "megatron" / "rl" / "rl_utils.py").is_file()), None)
    if path is None:
        return
    tree = ast.parse(path.read_bytes())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    theirs = next((f for f in functions if f.name == "calculate_grpo_loss"), None)
    found = [] if theirs is None else [argument.arg for argument in theirs.args.args]
    ours = [name for name in signature(calculate_grpo_loss).parameters if name != "loss_mask"]
    if [name for name in found if name != "loss_mask"] != ours:
        odd = ", ".join(sorted(set(found) ^ set(ours))) or "their order"
        raise ValueError(
            f"this Megatron-LM's calculate_grpo_loss is not the one that the plugin replaces ({odd} differs): use "
            f"Megatron-LM at d98e8a64 (August 2026), or a plugin for yours."
        )
