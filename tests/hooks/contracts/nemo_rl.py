"""NeMo-RL's own loss, baseline and enums, out of a checkout."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import torch
from pydantic import BaseModel

LOSSES = "nemo_rl/algorithms/loss/loss_functions.py"
INTERFACES = "nemo_rl/algorithms/loss/interfaces.py"
UTILITIES = "nemo_rl/algorithms/utils.py"
LOSS_INPUT = "next_token_logprobs"
ENUMS = {
    "LossType": {"TOKEN_LEVEL", "SEQUENCE_LEVEL"},
    "MetricNormalizer": {"TOKENS", "SEQUENCES", "NONE"},
    "LossInputType": {"LOGIT", "LOGPROB", "DISTILLATION", "DISTILLATION_CROSS_TOKENIZER", "DRAFT"},
}
READ_METRICS = ("loss", "token_mult_prob_error", "gen_kl_error")
"""Metrics of a loss that GRPO's log reads without asking."""


def interfaces(root: Path) -> ModuleType:
    """NeMo-RL's enums, executed alone: its package wants Ray and a GPU."""
    module = ModuleType("nemo_rl.algorithms.loss.interfaces")
    names = _execute(_only(root, INTERFACES, ENUMS), {"enum": enum})
    module.__dict__.update({name: names[name] for name in ENUMS})
    return module


def own_loss(root: Path, settings: dict[str, Any]) -> Any:
    """NeMo-RL's ClippedPGLossFn from its source, with the functions that it calls and nothing else."""
    names: dict[str, Any] = {"torch": torch, "BaseModel": BaseModel, "LossFunction": object}
    names |= {name: getattr(interfaces(root), name) for name in ENUMS}
    names |= {"Any": Any, "Optional": Optional}
    _execute(_only(root, UTILITIES, ["masked_mean", "calculate_kl"]), names)
    _execute(_only(root, LOSSES, ["ClippedPGLossConfig", "ClippedPGLossFn"]), names)
    config = names["ClippedPGLossConfig"]
    config.model_rebuild(_types_namespace=names)
    return names["ClippedPGLossFn"](config(**settings))


def own_baseline(root: Path) -> Any:
    """NeMo-RL's baseline function from its source."""
    names: dict[str, Any] = {"torch": torch, "Optional": Optional}
    return _execute(_only(root, UTILITIES, ["calculate_baseline_and_std_per_prompt"]), names)[
        "calculate_baseline_and_std_per_prompt"
    ]


def _only(root: Path, file: str, names: Iterable[str]) -> list[Any]:
    """Definitions of these names at the top of a file, in the order asked for. Raises KeyError for one that is gone."""
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return [defined[name] for name in names]


def _execute(nodes: list[Any], names: dict[str, Any]) -> dict[str, Any]:
    code = compile(ast.Module(nodes, []), "<NeMo-RL>", "exec", flags=annotations.compiler_flag)
    names.setdefault("__name__", __name__)  # pydantic resolves annotations there
    exec(code, names)
    return names
