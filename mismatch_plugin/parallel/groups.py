"""The process groups of a training job, handed in explicitly. Nothing else in the package reads global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.core.statistics import Statistics, refuse_different


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
        """Sum over cp, in place. One all-reduce; none where cp is one rank."""
        return _all_reduce(partials, self.cp, dist.ReduceOp.SUM)

    def max(self, partials: Tensor) -> Tensor:
        """Maximum over cp, in place. One all-reduce; none where cp is one rank."""
        return _all_reduce(partials, self.cp, dist.ReduceOp.MAX)

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum over DP × CP, in place. One all-reduce."""
        return _all_reduce(values, self.dp_cp, dist.ReduceOp.SUM)

    def reduce_step(self, statistics: Statistics, failure: str | None = None) -> Statistics:
        """A step's statistics over DP × CP, whatever this rank holds. Last stage only.

        failure: why this rank's micro-batches could not be merged.
        Collectives, none where this rank is alone: one MAX of three floats, which tells whether all ranks hold the same
        names and configuration (one host sync), one SUM, one MAX. Raises the same ValueError on every rank where they
        do not, or where one failed.
        """
        self.agree(statistics, failure)
        sums = _all_reduce(statistics.sums.clone(), self.dp_cp, dist.ReduceOp.SUM)
        maxima = _all_reduce(statistics.maxima.clone(), self.dp_cp, dist.ReduceOp.MAX)
        return statistics.replace(sums, maxima)

    def agree(self, statistics: Statistics | None, failure: str | None = None) -> None:
        """The part of `reduce_step` before its sums, for a rank without statistics, too. Alone: nothing to do."""
        if self.dp_cp is None or self.dp_cp.size() == 1:
            if failure is not None:
                raise ValueError(f"on rank 0 {failure}")
            return
        digest = 0.0 if statistics is None else statistics.digest
        values = torch.tensor([digest, -digest, float(failure is not None)], dtype=torch.float64)
        if statistics is not None:
            values = values.to(statistics.sums.device)
        elif "nccl" in dist.get_backend(self.dp_cp):
            values = values.cuda()
        largest, smallest, failed = _all_reduce(values, self.dp_cp, dist.ReduceOp.MAX).tolist()
        if largest == -smallest and not failed:
            return
        held: list[Any] = [None] * self.dp_cp.size()
        dist.all_gather_object(held, (None if statistics is None else statistics.kind, failure), group=self.dp_cp)
        kinds = {}
        for rank, (kind, reason) in enumerate(held):
            if reason is not None:
                raise ValueError(f"on rank {rank} {reason}")
            if kind is None:
                raise ValueError(f"rank {rank} ran no micro-batch in this step: pass it an empty one.")
            kinds[f"rank {rank}"] = kind
        refuse_different(kinds)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """The last pipeline stage's values on every stage, in place. One broadcast; none without a pipeline."""
        if self.pp is not None and self.pp.size() > 1:
            dist.broadcast(values, dist.get_global_rank(self.pp, self.pp.size() - 1), group=self.pp)
        return values


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _all_reduce(values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> Tensor:
    if group is None or group.size() == 1:
        return values
    if values.numel():
        dist.all_reduce(values, op=op, group=group)
    return values
