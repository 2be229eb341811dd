"""What the adapter relies on in NeMo-RL, recorded at one commit; comparison with a checkout; its own loss as oracle."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import torch
from pydantic import BaseModel

COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"

LOSSES = "nemo_rl/algorithms/loss/loss_functions.py"
INTERFACES = "nemo_rl/algorithms/loss/interfaces.py"
PREPARATION = "nemo_rl/algorithms/loss/utils.py"
WRAPPER = "nemo_rl/algorithms/loss/wrapper.py"
UTILITIES = "nemo_rl/algorithms/utils.py"
GRPO = "nemo_rl/algorithms/grpo.py"

CALL = ("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")
# Keywords that every caller of a loss passes; the log-probs come as `**loss_input`.
CALLER_KEYWORDS = ("data", "global_valid_seqs", "global_valid_toks", None)
LOSS_INPUT = "next_token_logprobs"
DATA_KEYS = (
    *("token_mask", "sample_mask", "advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"),
)
ENUMS = {
    "LossType": {"TOKEN_LEVEL", "SEQUENCE_LEVEL"},
    "MetricNormalizer": {"TOKENS", "SEQUENCES", "NONE"},
    "LossInputType": {"LOGIT", "LOGPROB", "DISTILLATION", "DISTILLATION_CROSS_TOKENIZER", "DRAFT"},
}
# Fields of ClippedPGLossConfig. A new one may make another loss: it must be looked at.
LOSS_SETTINGS = (
    *("disable_ppo_ratio", "token_level_loss", "sequence_level_importance_ratios"),
    *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"),
    *("reference_policy_kl_penalty", "reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value"),
    *("use_kl_in_reward", "use_importance_sampling_correction", "truncated_importance_sampling_type"),
    *("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"),
    *("use_on_policy_kl_approximation", "force_on_policy_ratio", "use_cispo", "positive_example_nll_weight"),
)
# Attributes of a loss that NeMo-RL asks for by name.
ATTRIBUTES = {"use_fused_linear_logprobs": PREPARATION, "reference_policy_kl_penalty": PREPARATION}
SETUP_FIRST = "master_config"
# The logger that setup returns, and what it is called with for a training step, in grpo_train and async_grpo_train.
LOGGER = "nemo_rl/utils/logger.py"
LOG_METRICS = ("self", "metrics", "step")
STEP_LOGS = ("logger.log_metrics(metrics, total_steps + 1, prefix=", "logger.log_metrics(metrics, step + 1, prefix=")
# What GRPO calls between prev_logprobs and advantages, what makes its estimator, and what of the first one it logs.
BETWEEN = ("train_data", "rewards", "seq_logprob_error_threshold")
ESTIMATOR = ("self", "prompt_ids", "rewards", "mask")
BASELINE = ("prompts", "rewards", "valid_mask", "leave_one_out_baseline", "std_rewards")
ESTIMATORS = "nemo_rl/algorithms/advantage_estimator.py"
GROUP_CALLS = (
    "adv_estimator = _create_advantage_estimator(master_config)",
    "seq_error_result = compute_and_apply_seq_logprob_error_masking(",
    "seq_logprob_error_metrics = seq_error_result",
    "metrics.update(seq_logprob_error_metrics)",
    "adv_estimator.compute_advantage(",
)
# Metrics of a loss that GRPO's log reads without asking, and what else it reads: its own, and behind a condition.
READ_METRICS = ("loss", "token_mult_prob_error", "gen_kl_error")
OTHER_METRICS = ("global_valid_toks", "draft_loss", "baseline_reward/pct_0", "baseline_reward/pct_1")


def drift(root: Path) -> list[str]:
    """One sentence for each fact that is no longer so in the checkout."""
    found = []
    loss = _only(root, LOSSES, ["ClippedPGLossFn"])[0]
    call = next(node for node in ast.walk(loss) if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    seen = tuple(item.arg for item in call.args.args)
    if seen != CALL:
        found.append(f"{LOSSES}: a loss is called with {seen}, recorded {CALL}")
    keys = set(_keys(call, "data"))
    if not set(DATA_KEYS) <= keys:
        found.append(f"{LOSSES}: the loss reads {sorted(keys)}, recorded {sorted(DATA_KEYS)}")
    for name, members in ENUMS.items():
        body = _only(root, INTERFACES, [name])[0].body
        now = {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}
        if now != members:
            found.append(f"{INTERFACES}: {name} has {sorted(now)}, recorded {sorted(members)}")
    config = _only(root, LOSSES, ["ClippedPGLossConfig"])[0]
    fields = {ast.unparse(node.target) for node in config.body if isinstance(node, ast.AnnAssign)}
    if fields != set(LOSS_SETTINGS):
        found.append(f"{LOSSES}: loss_fn has {sorted(fields ^ set(LOSS_SETTINGS))} more or less than recorded")
    if not any(keyword.arg == "extra" and keyword.value.value == "allow" for keyword in config.keywords):
        found.append(f"{LOSSES}: loss_fn no longer keeps keys that it does not know")
    wrapper = ast.parse((root / WRAPPER).read_text(encoding="utf-8"))
    calls = [
        tuple(item.arg for item in node.keywords)
        for node in ast.walk(wrapper)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("loss_fn", "self.loss_fn") and not node.args
    ]
    if not calls or set(calls) != {CALLER_KEYWORDS}:
        found.append(f"{WRAPPER}: losses are called with {sorted(set(calls), key=str)}, recorded {CALLER_KEYWORDS}")
    if f'loss_input = {{"{LOSS_INPUT}": logprobs}}' not in (root / PREPARATION).read_text(encoding="utf-8"):
        found.append(f"{PREPARATION}: log-probs are no longer passed as {LOSS_INPUT}")
    for name, file in ATTRIBUTES.items():
        if f"loss_fn.{name}" not in (root / file).read_text(encoding="utf-8"):
            found.append(f"{file}: a loss's {name} is no longer read")
    text = (root / GRPO).read_text(encoding="utf-8")
    setup = _only(root, GRPO, ["setup"])[0]
    if setup.args.args[0].arg != SETUP_FIRST:
        found.append(f"{GRPO}: setup takes {setup.args.args[0].arg} first, recorded {SETUP_FIRST}")
    returned = [ast.unparse(node.value) for node in ast.walk(setup) if isinstance(node, ast.Return) and node.value]
    if not any("logger" in value.strip("()").split(", ") for value in returned):
        found.append(f"{GRPO}: setup no longer returns its logger")
    found += [f"{GRPO}: no longer has {call}" for call in STEP_LOGS if call not in text]
    found += [f"{GRPO}: no longer has {call}" for call in GROUP_CALLS if call not in text]
    body = _only(root, ESTIMATORS, ["GRPOAdvantageEstimator"])[0].body
    for file, node, recorded in (
        (GRPO, _only(root, GRPO, ["compute_and_apply_seq_logprob_error_masking"])[0], BETWEEN),
        (UTILITIES, _only(root, UTILITIES, ["calculate_baseline_and_std_per_prompt"])[0], BASELINE),
        (ESTIMATORS, next(node for node in body if getattr(node, "name", "") == "compute_advantage"), ESTIMATOR),
    ):
        if (seen := tuple(item.arg for item in node.args.args)) != recorded:
            found.append(f"{file}: {node.name} takes {seen}, recorded {recorded}")
    logger = next(
        node for node in _only(root, LOGGER, ["Logger"])[0].body if getattr(node, "name", "") == "log_metrics"
    )
    if tuple(item.arg for item in logger.args.args)[:3] != LOG_METRICS:
        found.append(f"{LOGGER}: log_metrics takes {ast.unparse(logger.args)}, recorded {LOG_METRICS} first")
    read = set(_keys(ast.parse(text), "metrics", ast.Load))
    if read != {*READ_METRICS, *OTHER_METRICS}:
        found.append(f"{GRPO}: metrics {sorted(read)} are read, recorded {sorted((*READ_METRICS, *OTHER_METRICS))}")
    return found


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


def own_grpo(root: Path) -> tuple[Any, Any]:
    """(NeMo-RL's GRPOAdvantageEstimator, its baseline function) from its source."""
    names: dict[str, Any] = {"torch": torch, "Optional": Optional, "AdvEstimatorConfig": Any}
    _execute(_only(root, UTILITIES, ["calculate_baseline_and_std_per_prompt"]), names)
    _execute(_only(root, ESTIMATORS, ["GRPOAdvantageEstimator"]), names)
    return names["GRPOAdvantageEstimator"], names["calculate_baseline_and_std_per_prompt"]


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


def _keys(tree: ast.AST, name: str, context: type[ast.expr_context] = ast.expr_context) -> Iterator[str]:
    """Every string in brackets behind a name: read (ast.Load), stored, or both."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, context):
            continue
        if isinstance(node.slice, ast.Constant) and ast.unparse(node.value) == name:
            yield str(node.slice.value)
