"""What the adapter relies on in verl, recorded at one release, and the comparison with a source tree."""

from __future__ import annotations

import ast
from pathlib import Path

RELEASE = "0.9.1"  # the same at commit 1dda039b9c6311889a9c9a26040677e1254814f9

LOSSES = "verl/workers/utils/losses.py"
ALGORITHMS = "verl/trainer/ppo/core_algos.py"
HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
ACTOR = "verl/workers/config/actor.py"

# Keywords with which `ppo_loss` calls a policy loss; the order of the parameters of verl's own.
LOSS_KEYWORDS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights"),
)
PARAMETERS = {
    (ALGORITHMS, "compute_policy_loss_bypass_mode"): LOSS_KEYWORDS,
    (ALGORITHMS, "register_policy_loss"): ("name",),
    (ALGORITHMS, "get_policy_loss_fn"): ("name",),
    (ALGORITHMS, "agg_loss"): (
        *("loss_mat", "loss_mask", "loss_agg_mode"),
        *("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"),
    ),
    (HELPER, "compute_rollout_correction_and_add_to_batch"): ("batch", "rollout_corr_config"),
    ("verl/trainer/ppo/ray_trainer.py", "compute_advantage"): (
        *("data", "adv_estimator", "gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo", "config"),
    ),
    ("verl/utils/config.py", "validate_config"): ("config", "use_reference_policy", "use_critic"),
}
# What is logged once a step, and with which configuration.
TRACKING = "verl/utils/tracking.py"
TRACKED = {
    "__init__": ("self", "project_name", "experiment_name", "default_backend", "config"),
    "log": ("self", "data", "step", "backend"),
}
# Batch sizes that `ppo_loss` hands to the aggregation, through the actor's configuration.
BATCH_SIZES = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
# What the driver's function reads from and writes to the batch.
DRIVER_KEYS = ("old_log_probs", "rollout_log_probs", "response_mask")
# Fields of verl's dataclasses that are read: (file, class) → names that must be among them.
FIELDS = {
    ("verl/trainer/config/algorithm.py", "RolloutCorrectionConfig"): (
        *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
        *("rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type"),
    ),
    (ACTOR, "PolicyLossConfig"): ("loss_mode", "rollout_correction"),
    (ACTOR, "ActorConfig"): (
        *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
        *("loss_agg_mode", "policy_loss", "global_batch_info"),
    ),
}
# Who calls the function that is wrapped, by the name under which it is found at that moment.
CALLERS = (
    ("verl/trainer/ppo/ray_trainer.py", "compute_rollout_correction_and_add_to_batch"),
    ("verl/trainer/ppo/v1/trainer_base.py", "compute_rollout_correction_and_add_to_batch"),
    # After it, in the same process.
    ("verl/trainer/ppo/ray_trainer.py", "compute_advantage"),
    ("verl/trainer/ppo/v1/utils.py", "compute_advantage"),
    ("verl/trainer/main_ppo.py", "validate_config"),
)


def drift(root: Path) -> list[str]:
    """One sentence for each fact that is no longer so in the tree whose folder `verl/` lies in `root`."""
    found = []
    for (file, name), expected in PARAMETERS.items():
        function = _definition(root, file, name)
        seen = tuple(item.arg for item in function.args.args) if isinstance(function, ast.FunctionDef) else ()
        if seen != expected:
            found.append(f"{file}: {name} takes {seen}, recorded {expected}")
    tracking = _definition(root, TRACKING, "Tracking")
    methods = {node.name: node for node in getattr(tracking, "body", ()) if isinstance(node, ast.FunctionDef)}
    for name, expected in TRACKED.items():
        seen = tuple(item.arg for item in methods[name].args.args) if name in methods else ()
        if seen != expected:
            found.append(f"{TRACKING}: Tracking.{name} takes {seen}, recorded {expected}")
    loss = _definition(root, LOSSES, "ppo_loss")
    calls = [node for node in ast.walk(loss) if isinstance(node, ast.Call) and _name(node.func) == "policy_loss_fn"]
    seen = tuple(str(item.arg) for item in calls[0].keywords) if calls else ()
    if seen != LOSS_KEYWORDS:
        found.append(f"{LOSSES}: ppo_loss calls a policy loss with {seen}, recorded {LOSS_KEYWORDS}")
    sizes = {key for name, key in _subscripts(loss) if name == "global_batch_info"}
    if sizes != set(BATCH_SIZES):
        found.append(f"{LOSSES}: global_batch_info holds {sorted(sizes)}, recorded {sorted(BATCH_SIZES)}")
    keys = {key for _, key in _subscripts(_definition(root, HELPER, "compute_rollout_correction_and_add_to_batch"))}
    if not set(DRIVER_KEYS) <= keys:
        found.append(f"{HELPER}: the driver's function reads {sorted(keys)}, recorded {sorted(DRIVER_KEYS)}")
    for (file, name), expected in FIELDS.items():
        record = _definition(root, file, name)
        body = record.body if isinstance(record, ast.ClassDef) else []
        fields = {_name(node.target) for node in body if isinstance(node, ast.AnnAssign)}
        if not set(expected) <= fields:
            found.append(f"{file}: {name} has lost {sorted(set(expected) - fields)}")
    for file, name in CALLERS:
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        if not any(isinstance(node, ast.Call) and _name(node.func) == name for node in ast.walk(tree)):
            found.append(f"{file}: it no longer calls {name}")
    if '"verl.plugins"' not in (root / "verl/__init__.py").read_text(encoding="utf-8"):
        found.append("verl/__init__.py: it no longer loads the entry points verl.plugins")
    return found


def _definition(root: Path, file: str, name: str) -> ast.AST:
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    return ast.Module([], [])


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _subscripts(tree: ast.AST) -> list[tuple[str, str]]:
    """(name before the bracket, key) of every subscript with a string."""
    return [
        (_name(node.value), node.slice.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    ]
