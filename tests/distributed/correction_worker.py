"""What each rank does for the tests of the correction over several processes: its part of a step, as a hook would."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.counting import OperationCounter
from mismatch_plugin.core import segments
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step
from tests.distributed.agreement_worker import Grid
from tests.distributed.agreement_worker import groups_of as grid_groups
from tests.distributed.correction_cases import Layout, Settings, make


@dataclass(frozen=True)
class Case:
    """A batch under a layout and a number of micro-batches, with the settings to run it under."""

    batch: str
    layout: Layout
    micro_batches: int
    settings: tuple[Settings, ...]
    changes: tuple[tuple[str, Any], ...] = ()  # of every configuration
    always_prepares: bool = True  # else where a hook must, and in every third other step

    def prepares(self, settings: Settings) -> bool:
        needed = settings.normalizes and settings.algorithm == 2
        return needed or self.always_prepares or settings.rotation % 3 == 0

    def __repr__(self) -> str:
        return f"{self.batch}, {self.layout}, {self.micro_batches} micro-batches"


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's share of a step. tokens [4, T]: weights, keep, gradient of the policy term and of the other terms.

    sums: loss sum, sum of terms, denominator, terms_denominator.
    totals: of `Step.prepare`, None where not known yet; [] without it.
    """

    settings: Settings
    places: Tensor
    tokens: Tensor
    sums: list[float]
    totals: list[float | None]
    factor: float
    invalid: float
    digest: str
    metrics: dict[str, float] | None


def groups_of(layout: Layout) -> ParallelGroups:
    """Those of the layout's ranks."""
    return grid_groups(Grid(cp=layout.cp, dp=layout.dp))


def run(case: Case) -> list[Part]:
    """One rank's part of the step under each of the settings."""
    whole, groups = make(case.batch), groups_of(case.layout)
    local = whole.micro_batches(case.layout, case.micro_batches, dist.get_rank())
    log_probs = [whole.log_probs[places] for _, places in local]
    places = torch.cat([places for _, places in local])
    parts = []
    for number, settings in enumerate(case.settings):
        segments.HOST_WAYS = number % 2 == 0  # every other one goes the way of a device
        config = settings.config(**dict(case.changes))
        step = Step(config, groups)
        step.start([packed for packed, _ in local])
        known: list[float | None] = []
        if case.prepares(settings):
            totals = step.prepare(packed for packed, _ in local)
            values = (totals.tokens, totals.original, totals.accepted, totals.batch_factor)
            known = [None if value is None else float(value) for value in values]
        results = [_forward_backward(step, x, packed) for x, (packed, _) in zip(log_probs, local, strict=True)]
        statistics, verdict = step.finish()
        assert statistics is not None
        factor, invalid, _ = verdict.tolist()
        parts.append(
            Part(
                settings,
                places,
                torch.cat([tokens for tokens, _ in results], 1),
                torch.stack([sums for _, sums in results]).sum(0).tolist(),
                known,
                factor,
                invalid,
                hashlib.sha1(statistics.sums.numpy().tobytes() + statistics.maxima.numpy().tobytes()).hexdigest(),
                statistics.metrics() if dist.get_rank() == 0 else None,
            )
        )
    segments.HOST_WAYS = True
    return parts


def _forward_backward(step: Step, log_probs: Tensor, packed: mp.PackedSequences) -> tuple[Tensor, Tensor]:
    """One micro-batch: tokens [4, T] and sums [4] of a `Part`."""
    leaf = log_probs.clone().requires_grad_()
    result = step.loss(leaf, packed)
    terms = torch.stack([*result.terms.values(), torch.zeros((), dtype=torch.float64)]).sum()
    (gradient,) = torch.autograd.grad(result.loss_sum, leaf, retain_graph=True)
    terms_gradient = torch.autograd.grad(terms, leaf)[0] if result.terms else torch.zeros_like(gradient)
    correction = result.correction
    tokens = torch.stack([correction.weights, correction.keep, gradient, terms_gradient])
    sums = torch.stack([result.loss_sum.detach(), terms.detach(), result.denominator, result.terms_denominator])
    return tokens, sums


@dataclass(frozen=True)
class Call:
    """One all-reduce: reduction, ranks it runs over, shape and type of its tensor."""

    operation: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CallRecorder(OperationCounter):
    """Records every `dist.all_reduce`, and shows that no collective came another way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __enter__(self) -> CallRecorder:
        self._all_reduce = dist.all_reduce

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.calls.append(Call(op_name(op), ranks, tuple(tensor.shape), tensor.dtype))
            return self._all_reduce(tensor, op=op, group=group, **options)

        dist.all_reduce = all_reduce
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        dist.all_reduce = self._all_reduce
        super().__exit__(*error)
        found = [("allreduce", call.bytes) for call in self.calls]
        assert error[0] is not None or self.sent == found, f"{self.sent} instead of {found}"


def op_name(op: Any) -> str:
    return {dist.ReduceOp.SUM: "SUM", dist.ReduceOp.MAX: "MAX"}[op]


def run_counted(case: Case) -> list[dict[str, Any]]:
    """Per settings: the collectives of `start`, `prepare`, each micro-batch's loss and backward, and `finish`; of the
    loss without `prepare`, and (`again`) after it."""
    whole, groups = make(case.batch), groups_of(case.layout)
    local = whole.micro_batches(case.layout, case.micro_batches, dist.get_rank())
    counts = []
    for settings in case.settings:
        step = Step(settings.config(**dict(case.changes)), groups)
        with CallRecorder() as start:
            step.start([packed for packed, _ in local])
        with CallRecorder() as prepare:
            step.prepare(packed for packed, _ in local)
        losses, again, backward = [], [], []
        for packed, places in local:
            leaf = whole.log_probs[places].requires_grad_()
            with CallRecorder() as forward:
                Step(step.config, groups).loss(leaf, packed)
            losses.append(forward.calls)
            with CallRecorder() as forward:
                result = step.loss(leaf, packed)
            again.append(forward.calls)
            with CallRecorder() as recorder:
                (result.loss_sum + sum(result.terms.values())).backward()
            backward += recorder.calls
        with CallRecorder() as finish:
            statistics, _ = step.finish()
        assert statistics is not None
        counted = {"start": start.calls, "prepare": prepare.calls, "losses": losses, "again": again}
        counted |= {"backward": backward, "finish": finish.calls}
        counted["sequences"] = [len(packed.lengths) for packed, _ in local]
        counts.append(counted | {"state": (statistics.sums.numel(), statistics.maxima.numel())})
    return counts
