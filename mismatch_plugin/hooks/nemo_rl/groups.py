"""NeMo-RL's advantages over the accepted responses of a prompt, for `rs.group`, in the process that runs GRPO.

NeMo-RL's baseline takes a mask of responses that count, and its GRPO passes all ones. Between the pass for
prev_logprobs and the advantages all of its trainers call one function with the batch: there acceptance is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import EPSILON, group_metrics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.hooks.base import wrap_once

_GRPO, _UTILITIES = "nemo_rl.algorithms.grpo", "nemo_rl.algorithms.utils"


class GroupAdvantages:
    """`rs.group` of one run: what is accepted, from the batch to the estimator."""

    def __init__(self, config: MismatchConfig) -> None:
        self.config = config
        self._accepted: Tensor | None = None
        self._logged: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap NeMo-RL's function between log-probs and advantages, and what makes its estimator. Once a run."""
        wrap_once(_GRPO, "compute_and_apply_seq_logprob_error_masking", self.between)
        wrap_once(_GRPO, "_create_advantage_estimator", self.create)

    def between(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """NeMo-RL's own, which may mask samples; then who of the rest keeps a token. Its metrics are logged."""
        self._logged = own(*args, **kwargs)
        data = kwargs["train_data"] if "train_data" in kwargs else args[0]
        self._accepted = accepted(data, self.config)
        return self._logged

    def create(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """NeMo-RL's estimator, whose `compute_advantage` is ours."""
        estimator = own(*args, **kwargs)
        estimator.compute_advantage = partial(self.compute_advantage, estimator)
        return estimator

    def compute_advantage(
        self, estimator: Any, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **rest: Any
    ) -> Tensor:
        """[B, S] as NeMo-RL's GRPO estimator has it, with baseline and deviation of the accepted ones; 0 for others.

        prompt_ids [B, L], rewards [B], mask [B, S]. Leave-one-out baseline and division by the deviation are as the
        estimator is set. Raises ValueError where nobody has found what is accepted.
        """
        if self._accepted is None:
            raise ValueError(
                f"rs.group {self.config.rs.group} needs prev_logprobs before advantages, and NeMo-RL skipped their "
                f"pass: set loss_fn.force_on_policy_ratio=false."
            )
        kept, self._accepted = self._accepted.to(rewards.device), None
        _, group = prompt_ids.unique(dim=0, return_inverse=True)
        least = self.config.rs.least_accepted
        if self.config.metrics != "off":
            self._logged |= group_metrics(rewards, group, kept, least)
        counts = torch.zeros_like(rewards).index_add_(0, group, kept.to(rewards))[group]
        kept = kept & (counts >= least)
        baseline, std = import_module(_UTILITIES).calculate_baseline_and_std_per_prompt(
            prompt_ids, rewards, kept.to(rewards), leave_one_out_baseline=estimator.use_leave_one_out_baseline
        )
        advantages = torch.where(kept, rewards - baseline, 0.0)
        if estimator.normalize_rewards:  # NeMo-RL leaves rewards without a spread as they are
            advantages = torch.where(std > 0, advantages / (std + EPSILON), advantages)
        return advantages.unsqueeze(-1).expand(mask.shape)


def accepted(data: Mapping[str, Any], config: MismatchConfig) -> Tensor:
    """[B] bool: which responses keep a token. data: token_mask, prev_logprobs, generation_logprobs [B, S], sample_mask.

    The same decision as the loss makes in the workers. Raises InvalidLogProbError.
    """
    mask = (data["token_mask"] * data["sample_mask"].unsqueeze(-1))[:, 1:]
    packed = PackedSequences(
        loss_mask=mask.bool().flatten(),
        lengths=(mask.shape[1],) * mask.shape[0],
        rollout_log_probs=data["generation_logprobs"][:, 1:].flatten(),
        old_log_probs=data["prev_logprobs"][:, 1:].flatten(),
    )
    return correct(packed, config).kept_N > 0
