"""slime's and miles's own switches of the policy loss as our settings, and what their own policy loss cannot run.

| switch | in our loss | in the host's own (`tis_function`) |
| --- | --- | --- |
| `--advantage-estimator gspo`, `cispo` | that objective, ε from `--eps-clip`, `--eps-clip-high` | the host's own |
| `--use-opsm` | a criterion that judges π_θ against π_rollout | the host's own: π_θ against its anchor |
| `--use-unbiased-kl` | the KL times π_θ/anchor, with its gradient | the host's own |
| `--custom-pg-loss-reducer-function-path` | called with the masks without what is rejected | as in our loss |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.compat.slime import host_objective

_BYPASS = {
    1: "rejection and metrics compare π_θ with π_rollout, which {host}'s policy_loss does not pass on",
    3: "{host}'s policy_loss clips π_θ/π_rollout already, so that the importance weight would count twice",
}


def read_objective(estimator: str, mine: str | None, algorithm: int, host: str) -> dict[str, Any]:
    """{"objective": …} as the host's estimator or our own setting has it; {} for the default and in algorithm 3.

    Raises: ValueError where the two differ, and for an estimator that algorithm 3 cannot follow.
    """
    theirs = host_objective(estimator)
    if theirs == "ppo":
        return {} if mine is None else {"objective": mine}
    if algorithm == 3:
        raise ValueError(
            f"--advantage-estimator {estimator} clips π_θ/π_old, and algorithm 3 is REINFORCE, which has no such "
            f"ratio: choose grpo, whose advantages are the same, or leave --use-tis out (algorithm 1)."
        )
    if mine not in (None, theirs):
        raise ValueError(
            f"--mismatch-objective {mine} contradicts {host}'s --advantage-estimator {estimator}: leave it out, or "
            f"choose grpo, whose advantages are the same."
        )
    return {"objective": theirs}


def why_our_loss(config: MismatchConfig, host: str, estimator: str, *, hooked: bool) -> str:
    """What of these settings the host's own policy loss cannot run, and why; "" where it can run them all.

    hooked: our `tis_function` is called in it. It gets old and rollout log-probs and the policy loss, nothing else.
    """
    if config.algorithm == 3 or (config.algorithm == 1 and (hooked or config.compares)):
        typed = "--use-rollout-log-probs with --use-tis" if config.use_tis else "--use-rollout-log-probs"
        return f"algorithm {config.algorithm} ({typed}): {_BYPASS[config.algorithm].format(host=host)}"
    return next(_not_passed_on(config, host, host_objective(estimator)), "")


def _not_passed_on(config: MismatchConfig, host: str, theirs: str) -> Iterator[str]:
    loss = f"{host}'s policy_loss"
    if config.objective != theirs:
        yield f"--mismatch-objective {config.objective}: {loss} computes {theirs} (--advantage-estimator)"
    if config.rejects_on_current_policy:
        yield f"--rs-policy current: {loss} does not pass π_θ on"
    for criterion in config.rs.criteria:
        if criterion.conditional:
            yield f"--rs-criterion with @{criterion.condition}: {loss} does not pass advantages on"
    if config.terms.rollout_kl_coef:
        yield f"--mismatch-rollout-kl-coef: {loss} adds no such term"
    if config.terms.kl_importance_weighted:
        yield f"--mismatch-kl-importance-weighted: {loss} weighs its KL by nothing of ours"


def load_reducer(path: str) -> Callable[..., Callable[[Tensor], Tensor]]:
    """The function that --custom-pg-loss-reducer-function-path names, `module.attribute`, as the host loads it."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def switch_lines(config: MismatchConfig, host: str, values: Mapping[str, Any], *, whole: bool) -> Iterator[str]:
    """Lines of the start-up block on the host's switches. values: its arguments by name; whole: our loss runs."""
    estimator = values["advantage_estimator"]
    if host_objective(estimator) != "ppo":
        whose = "the plugin's" if whole else f"{host}'s own"
        yield f"{estimator} by --advantage-estimator: {whose}, ε as --eps-clip and --eps-clip-high have it"
    if values["use_opsm"]:
        anchor = "π_rollout" if config.use_rollout_log_probs else "π_old"
        if not whole:
            yield f"--use-opsm: {host}'s own, which judges π_θ against {anchor}"
        elif config.use_rollout_log_probs:
            yield "--use-opsm: a criterion; a sequence is judged by its mean advantage"
        else:
            yield f"--use-opsm: a criterion against π_rollout, the sampler; {host}'s own policy_loss takes π_old"
    if values["use_unbiased_kl"] and config.terms.kl_coef:
        yield f"--use-unbiased-kl: the KL times π_θ/{'π_rollout' if config.use_rollout_log_probs else 'π_old'}"
