"""slime: the functions that its argument paths name. Nothing of slime is imported before one of them runs.

| path argument | function | needed for |
| --- | --- | --- |
| `--custom-tis-function-path` | `tis_function` | algorithms 0 and 2, inside slime's own policy loss |
| `--loss-type custom_loss --custom-loss-function-path` | `policy_loss` | all four; alone 3, what `why_our_loss` names |
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
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.core import groups as group_means
from mismatch_plugin.core.correction import correct
from mismatch_plugin.hooks.slime.adapter import RayAdapter
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

        rollout_data: slime's before a rollout's steps: raw_reward of the whole rollout, whose groups are
            n_samples_per_prompt neighbours, as slime's own normalisation has them; of this rank's samples their
            `partition` (places in the rollout), rewards as slime normalised them, and what `pack_local` takes. A sample
            that no rank trains on counts as rejected.
        Collectives, on the last pipeline stage: those of `correct` over CP, one SUM over DP of a float a sample.
        Host syncs: two. Raises ValueError, on every rank, where slime's groups or rewards are others.
        """
        config, data = self.config(args), rollout_data
        raw, places, size = data["raw_reward"], data["partition"], args.n_samples_per_prompt
        if len(raw) != size * args.rollout_batch_size:
            raise ValueError(
                f"the rollout has {len(raw)} samples, not --rollout-batch-size {args.rollout_batch_size} groups of "
                f"--n-samples-per-prompt {size}, so that slime itself cannot tell groups apart: leave --rs-group out."
            )
        if not data.get("log_probs"):
            raise ValueError(
                "slime skipped the pass for old log-probs, which --rs-group needs: add --get-mismatch-metrics."
            )
        failure: ValueError | None = None
        compared = {"old_log_probs": data["log_probs"], "rollout_log_probs": data.get("rollout_log_probs")}
        kept_N = torch.zeros(len(places), device=data["loss_masks"][0].device)
        try:
            kept_N = correct(self._pack(args, data, compared), config, self.groups).kept_N
        except ValueError as error:  # on all ranks together
            failure = error
        ids, at = torch.arange(len(raw)) // size, torch.tensor(places)
        rewards, scaled = torch.tensor(raw, dtype=torch.float64), args.grpo_std_normalization
        # slime's own normalisation, in its float32, where equal rewards of a group leave what rounding left.
        own = torch.tensor(raw, dtype=torch.float32).reshape(-1, size)
        own = own - own.mean(-1, keepdim=True)
        if scaled:
            own = own / (own.std(-1, keepdim=True) + group_means.EPSILON)
        others = ~torch.isclose(own.flatten()[at], torch.tensor(data["rewards"]), rtol=1e-4, atol=1e-4)
        found = torch.zeros(len(raw) + 2, device=kept_N.device)
        found[at.to(found.device)] = (kept_N > 0).float()
        found[-2:] = torch.tensor([float(others.any()), float(failure is not None)])
        *accepted, odd, failed = self.groups.sum_over_replicas(found).tolist()
        if failed:
            raise failure or ValueError("another rank cannot say which responses are accepted: its error says why.")
        if odd:
            raise ValueError(
                "slime's rewards are not its raw_reward, normalised within each group (does a sample's metadata set "
                "raw_reward?), and --rs-group works from raw rewards: leave it out."
            )
        least = config.rs.least_accepted
        if config.metrics != "off":
            self.run.rollout_metrics.update(group_means.group_metrics(rewards, ids, accepted, least))
        advantages = group_means.group_advantages(rewards, ids, accepted, scaled, min_accepted=least)[at].tolist()
        data["advantages"] = [torch.full_like(like, value) for like, value in zip(data["kl"], advantages, strict=True)]
        data["returns"] = list(data["advantages"])

    def log(self, args: Namespace, metrics: dict[str, float]) -> None:
        from slime.observability import logging_utils  # pyright: ignore[reportMissingImports]

        logging_utils.log(args, metrics, step_key="train/step")


ADAPTER = SlimeAdapter()
settings, check, describe = ADAPTER.settings, ADAPTER.check, ADAPTER.describe
tis_function, policy_loss = ADAPTER.tis_function, ADAPTER.policy_loss
rollout_data_postprocess, before_train_step = ADAPTER.rollout_data_postprocess, ADAPTER.before_train_step
init, group_advantages, data_source = ADAPTER.init, ADAPTER.group_advantages, ADAPTER.data_source
