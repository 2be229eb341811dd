"""miles: the functions that its argument paths name, under its own signatures. See `slime` for what each is for.

Only what differs from slime is here: log-probs come as a dict and may be of padded batches (`--qkv-format bshd`); the
process groups are miles's own; the rollout hook sees the arguments alone, so algorithm 2's batch normalisation over the
step divides gradients at its end, as algorithm 3's does everywhere. Written for miles at commit 31f1ca9.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from mismatch_plugin.hooks.slime.adapter import RayAdapter
from mismatch_plugin.hooks.slime.samples import keep_served as keep_served
from mismatch_plugin.parallel.groups import ParallelGroups


class MilesAdapter(RayAdapter):
    """miles's log-probs, process groups and tracker; of several replicas that train apart the first one reports."""

    name = "miles"

    def find_groups(self) -> ParallelGroups:
        state = _parallel_state()
        names = {"tp": "tp", "cp": "cp", "dp": "intra_dp", "dp_cp": "intra_dp_cp", "pp": "pp"}
        return ParallelGroups(**{ours: getattr(state, theirs).group for ours, theirs in names.items()})

    def log_probs(
        self, args: Namespace, batch: Mapping[str, Any], logits: Tensor
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        coefficient = getattr(args, "entropy_coef", 0.0)
        found = import_module("miles.backends.training_utils.loss_hub.logit_processors").get_log_probs_and_entropy(
            logits,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=coefficient != 0 or bool(getattr(args, "observe_training_entropy", False)),
            entropy_requires_grad=coefficient != 0,
            max_seq_lens=batch.get("max_seq_lens"),
        )
        return found["log_probs"], found.get("entropy")

    def log(self, args: Namespace, metrics: dict[str, float]) -> None:
        import_module("miles.utils.tracking_utils.tracking").log(args, metrics, step_key="train/step")

    def is_first(self, groups: ParallelGroups) -> bool:
        return groups.is_first_of_stage and not _parallel_state().indep_dp.rank

    def before_train_step(
        self, args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, scheduler: Any
    ) -> None:
        """As slime's. Raises ValueError for batch normalisation over a step that spans independent replicas, whose
        gradients are summed only after it ends."""
        config = self.check(args)
        if config is not None and config.normalizes_step and _parallel_state().indep_dp.size > 1:
            raise ValueError(
                "batch normalisation over the step cannot be had with independent data-parallel replicas: choose "
                "--tis-batch-normalize-scope micro_batch."
            )
        super().before_train_step(args, rollout_id, step_id, model, optimizer, scheduler)


def rollout_data_postprocess(args: Namespace) -> None:
    """Before a rollout's steps. miles hands no data over: the arguments are checked, the data in the loss."""
    check(args)


def _parallel_state() -> Any:
    return import_module("miles.backends.training_utils.parallel").get_parallel_state()


ADAPTER = MilesAdapter()
settings, check, describe = ADAPTER.settings, ADAPTER.check, ADAPTER.describe
tis_function, policy_loss = ADAPTER.tis_function, ADAPTER.policy_loss
before_train_step, init, data_source = ADAPTER.before_train_step, ADAPTER.init, ADAPTER.data_source
