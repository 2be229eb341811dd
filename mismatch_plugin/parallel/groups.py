"""The process groups of a training job, handed in explicitly. Nothing else in the package reads global state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.parallel.agreement import StepKind, difference


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """Handles of the groups; None stands for a group of one.

    tp: vocabulary shards. cp: ranks that hold parts of the same sequences. dp: replicas with other sequences.
    dp_cp: both together, over which a step's statistics are reduced. pp: pipeline stages.
    A `SequenceGroups` for ring 1: `sum` and `max` run over cp.
    """

    tp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """The groups of `megatron.core.parallel_state`, which must be initialised."""
        from megatron.core import parallel_state as state

        parallel_state: Any = state  # its return types leave room for what it never returns
        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            dp=parallel_state.get_data_parallel_group(),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            pp=parallel_state.get_pipeline_model_parallel_group(),
        )

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return _size(self.cp)

    @property
    def cp_rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.cp is None else self.cp.rank()

    @property
    def dp_size(self) -> int:
        """Replicas with other sequences."""
        return _size(self.dp)

    @property
    def is_last_stage(self) -> bool:
        """True where the loss lives."""
        return self.pp is None or self.pp.rank() == self.pp.size() - 1

    @property
    def is_first_of_stage(self) -> bool:
        """True on one rank of a pipeline stage: the one that writes what all of them know."""
        return all(group is None or group.rank() == 0 for group in (self.tp, self.dp_cp))

    @property
    def counts_sequences(self) -> bool:
        """Each sequence is counted by the first rank of its context-parallel group."""
        return self.cp_rank == 0

    def sum(self, partials: Tensor) -> Tensor:
        """Sum over cp, in place. One all-reduce, here and below; none where the group is one rank."""
        return _all_reduce(partials, self.cp, dist.ReduceOp.SUM)

    def max(self, partials: Tensor) -> Tensor:
        """Maximum over cp, in place."""
        return _all_reduce(partials, self.cp, dist.ReduceOp.MAX)

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum over DP × CP, in place."""
        return _all_reduce(values, self.dp_cp, dist.ReduceOp.SUM)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Sum over DP, in place."""
        return _all_reduce(values, self.dp, dist.ReduceOp.SUM)

    def agree(self, kind: StepKind, *, stages: bool = True) -> None:
        """Raise the same ValueError on every rank, naming ranks, where what they bring to a step cannot go together.

        Called on every rank of every pipeline stage, before any collective of the step whose shape depends on it.
        stages=False compares over DP × CP alone, on the last stage: for the end of a step whose data nobody saw before.
        Collectives: one MAX of nine floats over each of TP, PP, CP and DP × CP that has several ranks (not over DP × CP
        where that is CP). Host syncs: one; none for a rank alone. Where they differ, also gathers of what they hold.
        """
        replica = [group for group in (self.tp, self.pp, self.cp) if stages and group and group.size() > 1]
        seen = _size(self.cp) if stages else 1
        data = [group for group in (self.dp_cp,) if group and group.size() > seen]
        differ = bool(kind.failure)
        if replica or data:
            values = torch.tensor(kind.digests(), dtype=torch.float64)
            if "nccl" in dist.get_backend((replica or data)[0]):
                values = values.cuda()
            for group in replica:
                dist.all_reduce(values, dist.ReduceOp.MAX, group)
            # The largest d plus the largest −d is 0 where all are equal. The last two pairs count in a replica only.
            values[0] += (values[5::2] + values[6::2] > 0).sum()
            for group in data:
                dist.all_reduce(values, dist.ReduceOp.MAX, group)
            failed, *pairs = values.tolist()
            differ = bool(failed) or pairs[0] + pairs[1] > 0 or pairs[2] + pairs[3] > 0
        if not differ:
            return
        held = {dist.get_rank() if replica or data else 0: kind}
        for group in replica:
            held = _gathered(held, group)
        replicas = {min(held): held}
        for group in data:
            replicas = _gathered(replicas, group)
        raise ValueError(difference(replicas))

    def reduce_step(self, statistics: Statistics) -> Statistics:
        """A step's statistics over DP × CP, whatever this rank holds. Last stage only, once the ranks agree.

        Collectives, none where this rank is alone: one SUM, one MAX. Host syncs: none.
        """
        sums = _all_reduce(statistics.sums.clone(), self.dp_cp, dist.ReduceOp.SUM)
        maxima = _all_reduce(statistics.maxima.clone(), self.dp_cp, dist.ReduceOp.MAX)
        return replace(statistics, sums=sums, maxima=maxima)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """The last pipeline stage's values on every stage, in place. One broadcast; none without a pipeline."""
        if self.pp is not None and self.pp.size() > 1:
            dist.broadcast(values, self._last_stage(self.pp), group=self.pp)
        return values

    def raise_with_last_stage(self, refusal: str) -> None:
        """Raise ValueError on every stage where the last one has a refusal (the others pass ""), with its sentence.
        With a pipeline one broadcast of an object, which waits for the host on both sides."""
        said = [refusal]
        if self.pp is not None and self.pp.size() > 1:
            dist.broadcast_object_list(said, self._last_stage(self.pp), group=self.pp)
        if said[0]:
            raise ValueError(said[0])

    def _last_stage(self, pp: dist.ProcessGroup) -> int:
        return dist.get_global_rank(pp, pp.size() - 1)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _all_reduce(values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> Tensor:
    if group is not None and group.size() > 1 and values.numel():
        dist.all_reduce(values, op=op, group=group)
    return values


def _gathered(held: dict[int, Any], group: dist.ProcessGroup) -> dict[int, Any]:
    everything: list[Any] = [None] * group.size()
    dist.all_gather_object(everything, held, group=group)
    return {rank: kind for part in everything for rank, kind in part.items()}
