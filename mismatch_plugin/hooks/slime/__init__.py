"""slime: the functions that its argument paths name. Nothing of slime is imported before one of them runs.

| path argument | function | needed for |
| --- | --- | --- |
| `--custom-tis-function-path` | `tis_function` | algorithms 0 and 2, inside slime's own policy loss |
| `--loss-type custom_loss --custom-loss-function-path` | `policy_loss` | all four; alone 3, and what `switches` names |
| `--rollout-data-postprocess-path` | `rollout_data_postprocess` | algorithm 2's mean weight before each step |
| `--custom-megatron-before-train-step-hook-path` | `before_train_step` | step metrics, errors on all ranks together |
| `--custom-megatron-init-path` | `init` | refusing wrong arguments before training starts; verified weight updates |
| `--custom-advantage-function-path` | `group_advantages` | `--rs-group exclude` and `drop` |
| `--data-source-path` | `data_source` | samples and dumps that keep what servers with our SGLang plugin tell |

slime divides the loss by the tokens of the original masks (of a rollout, or of the step with
`--calculate-per-token-loss`), whatever is rejected. Written for slime at commit 624b824.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.hooks.slime import samples
from mismatch_plugin.hooks.slime.adapter import RayAdapter
from mismatch_plugin.hooks.slime.config import validate_groups
from mismatch_plugin.hooks.slime.groups import rollout_advantages
from mismatch_plugin.hooks.slime.samples import keep_served as keep_served
from mismatch_plugin.parallel.groups import ParallelGroups


class SlimeAdapter(RayAdapter):
    """slime's log-probs, process groups (Megatron's own) and tracker."""

    name = "slime"

    def find_groups(self) -> ParallelGroups:
        from megatron.core import parallel_state

        return ParallelGroups.from_megatron() if parallel_state.model_parallel_is_initialized() else ParallelGroups()

    def log_probs(
        self, args: Namespace, batch: Mapping[str, Any], logits: Tensor
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        from slime.backends.megatron_utils.loss import (  # pyright: ignore[reportMissingImports]
            get_log_probs_and_entropy,
            get_rollout_top_p_logprob_kwargs,
        )

        _, found = get_log_probs_and_entropy(
            logits,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=True,
            **get_rollout_top_p_logprob_kwargs(args, batch),
        )
        return found["log_probs"], found["entropy"]

    def group_advantages(self, args: Namespace, rollout_data: dict[str, Any]) -> None:
        """slime's custom advantage function under `--rs-group`: sets advantages and returns, [this rank's tokens] a
        sample, each sample's own over all of its tokens; 0 where it is not accepted.

        Collectives, host syncs, errors: those of `rollout_advantages`.
        """
        config = self.config(args)
        validate_groups(args, config, self.name)
        found, metrics = rollout_advantages(args, rollout_data, config, self.groups, self.versions)
        self.run.rollout_metrics.update(metrics)
        shapes = rollout_data["kl"]
        rollout_data["advantages"] = [
            torch.full_like(like, value) for like, value in zip(shapes, found.tolist(), strict=True)
        ]
        rollout_data["returns"] = list(rollout_data["advantages"])

    def log(self, args: Namespace, metrics: dict[str, float]) -> None:
        from slime.observability import logging_utils  # pyright: ignore[reportMissingImports]

        logging_utils.log(args, metrics, step_key="train/step")


ADAPTER = SlimeAdapter()
settings, check, describe = ADAPTER.settings, ADAPTER.check, ADAPTER.describe
tis_function, policy_loss = ADAPTER.tis_function, ADAPTER.policy_loss
rollout_data_postprocess, before_train_step = ADAPTER.rollout_data_postprocess, ADAPTER.before_train_step
init, group_advantages = ADAPTER.init, ADAPTER.group_advantages
data_source = partial(samples.data_source, ADAPTER.name)
