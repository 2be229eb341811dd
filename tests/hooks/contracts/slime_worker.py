"""What each rank does in the tests of slime's and miles's adapters: its part of a rollout, as the host would run it.

`run_steps` calls the adapter's hooks in the host's order around real megatron-core process groups. `run_by_hand` puts
in the host's part of the loss as its contract has it, from log-probs on; `slime_live` the host's own code.
"""

from __future__ import annotations

import importlib
import types
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.launch import launch
from tests.hooks.contracts.slime_data import (
    Sample,
    arguments,
    mask_sums,
    owned,
    rollouts_of,
    samples,
    schedule,
    step_samples,
)
from tests.host_source import host_source


@dataclass(frozen=True)
class Case:
    """Arguments of a run, in a layout. root: the checkout, for `run_host`.

    constant: every response has one advantage. sampled: the rollout's log-probs are those of π_old.
    """

    host: str
    tp: int
    cp: int
    changes: dict[str, Any]
    hooks: bool = True
    old: bool = True
    shared: bool = False
    constant: bool = False
    sampled: bool = False
    root: str = ""


@dataclass
class Outcome:
    """Of one step. gradient: summed over ranks into the whole step's places; report: the host's reduced metrics."""

    loss: float
    gradient: Tensor
    report: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Model(torch.nn.Module):
    """Stands for megatron's DDP chunk: it has the config that the hook ends the step through, and scales gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = types.SimpleNamespace(finalize_model_grads_func=lambda model, *args, **kwargs: None)
        self.scale = 1.0

    def scale_gradients(self, factor: float) -> None:
        self.scale *= factor


class Runs:
    """A host's cases by name, run in every layout (tp, cp, processes) in one launch each.

    function: `run_by_hand` or `run_host`. cases: what `Case` takes besides. drawn: the (layout, case) pairs that will
    be asked for, where not all.
    """

    def __init__(
        self,
        function: Callable[[Case], Any],
        host: str,
        cases: Mapping[Any, dict[str, Any]],
        layouts: dict[str, tuple[int, int, int]],
        drawn: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.function, self.host, self.cases, self.layouts = function, host, cases, layouts
        self.drawn = drawn
        self._found: dict[str, dict[Any, Any]] = {}

    def case(self, layout: str, name: Any) -> Case:
        root = "" if self.function is run_by_hand else str(host_source(self.host))
        tp, cp, _ = self.layouts[layout]
        return Case(self.host, tp, cp, **self.cases[name], root=root)

    def __call__(self, layout: str, name: Any) -> list[list[Outcome]]:
        """Of each rank and step."""
        wanted = [other for place, other in self.drawn or ((layout, one) for one in self.cases) if place == layout]
        if name not in wanted:
            wanted.append(name)
        if name not in self._found.setdefault(layout, {}):
            cases = [self.case(layout, other) for other in wanted]
            found = launch(self.function, cases, self.layouts[layout][2], timeout=240.0)
            self._found[layout] |= dict(zip(wanted, found, strict=True))
        return self._found[layout][name]


@cache
def initialize(tp: int, cp: int) -> Any:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    return parallel_state


def arguments_of(case: Case) -> Namespace:
    return arguments(case.host, **case.changes)


def adapter_of(case: Case) -> Any:
    return importlib.import_module(f"mismatch_plugin.hooks.{case.host}")


_LOCAL = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")


def _rollout_data(case: Case, cp_rank: int, mine: list[list[list[int]]], padded: int | None) -> dict[str, Any]:
    """This rank's rollout as the host keeps it: lists over its own samples."""
    ids = [sample for step in mine for batch in step for sample in batch]
    chosen, sums = [samples()[i] for i in ids], mask_sums(case.shared)
    places = [owned(sample.total, sample.prompt, case.cp, cp_rank, padded) for sample in chosen]
    rows = [sample.rows for sample in chosen]
    if case.constant:
        rows = [{**row, "advantages": row["advantages"][:1].expand(row["advantages"].shape)} for row in rows]
    if case.sampled:
        rows = [{**row, "rollout_log_probs": row["log_probs"]} for row in rows]
    data: dict[str, Any] = {name: [row[name][at] for row, at in zip(rows, places, strict=True)] for name in _LOCAL}
    return data | {
        "log_probs": data["log_probs"] if case.old else None,
        "loss_masks": [sample.rows["loss_masks"] for sample in chosen],
        "total_lengths": [sample.total for sample in chosen],
        "response_lengths": [sample.response for sample in chosen],
        "rollout_mask_sums": [sums[i] for i in ids],
        "max_seq_lens": None if padded is None else [padded] * len(ids),
        "micro_batch_indices": [[ids.index(i) for i in batch] for step in mine for batch in step],
        "num_microbatches": [len(step) for step in mine],
    }


def _batch(data: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    """A micro-batch as the host's iterator gives it: what is not there is None."""
    rows = {key: values for key, values in data.items() if key not in ("micro_batch_indices", "num_microbatches")}
    return {key: None if values is None else [values[i] for i in indices] for key, values in rows.items()}


LossOf = Callable[[Namespace, dict[str, Any], list[int], int, int], tuple[Tensor, Tensor, dict[str, Any]]]


def run_steps(
    case: Case, loss_of: LossOf, place: Callable[[int, list[int]], Tensor], shape: Callable[[int], Any]
) -> Any:
    """Every step of the rollout, in the host's order.

    loss_of(args, batch, ids, micro-batches, rollouts) → scaled loss, normaliser, and {"leaf", "keys", "values"};
    place(step, ids) → what of the whole step's gradient the leaf holds; shape(step) → the whole gradient's shape.
    """
    state = initialize(case.tp, case.cp)
    args, adapter = arguments_of(case), adapter_of(case)
    adapter.ADAPTER.log = lambda args, metrics: None  # no tracker in a test: the metrics themselves are compared
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    everyone = state.get_data_parallel_group(with_context_parallel=True)
    mine = schedule(dp_rank, dp)
    padded = args.padded if getattr(args, "qkv_format", "thd") == "bshd" else None
    data = _rollout_data(case, state.get_context_parallel_rank(), mine, padded)
    if case.hooks:
        adapter.rollout_data_postprocess(*((args, 0, data) if case.host == "slime" else (args,)))
    outcomes, indices = [], iter(data["micro_batch_indices"])
    for step, batches in enumerate(mine):
        model = Model()
        if case.hooks:
            adapter.before_train_step(args, 0, step, [model], None, None)
        gradient, total, sharded = torch.zeros(shape(step)), torch.zeros(()), False
        values, counted, keys = torch.zeros(()), torch.zeros(()), []
        for ids in batches:
            batch = _batch(data, next(indices))
            rollouts = len(rollouts_of(step, case.shared))
            loss, normalizer, extra = loss_of(args, batch, ids, len(batches), rollouts)
            loss.backward()
            gradient[place(step, ids)] += extra["leaf"].grad.flatten()
            total, counted = total + loss.detach(), counted + normalizer
            keys, values, sharded = extra["keys"], values + extra["values"], extra["sharded"]
        if args.calculate_per_token_loss:  # megatron divides by the integer summed over DP × CP
            dist.all_reduce(counted, group=everyone)
            scale = 1.0 / counted
        else:  # … or by the micro-batches, and takes the mean over DP × CP
            scale = torch.tensor(1.0 / (len(batches) * everyone.size()))
        error = ""
        if case.hooks:
            try:
                model.config.finalize_model_grads_func([model])
            except ValueError as fault:
                error = f"{type(fault).__name__}: {fault}"
        dist.all_reduce(values, group=everyone)
        report = {key: float(value) for key, value in zip(keys, values[1:], strict=True)}
        total = total * scale
        dist.all_reduce(total, group=everyone)
        gradient = gradient * scale * model.scale
        dist.all_reduce(gradient, group=everyone)
        if sharded:
            dist.all_reduce(gradient, group=state.get_tensor_model_parallel_group())
        metrics = dict(adapter.ADAPTER.run.metrics) if not error else {}
        outcomes.append(Outcome(float(total), gradient, report, metrics, error))
    return outcomes


def starts_of(step: int, of: Callable[[Sample], int]) -> dict[int, int]:
    starts, start = {}, 0
    for number in step_samples(step):
        starts[number] = start
        start += of(samples()[number])
    return starts | {-1: start}


# By hand --------------------------------------------------------------------------------------------------------------


def run_by_hand(case: Case) -> Any:
    """From log-probs: slime's scaling, reductions and PPO loss as its contract has them, in a few lines."""
    state = initialize(case.tp, case.cp)
    cp_rank, adapter = state.get_context_parallel_rank(), adapter_of(case)
    world = state.get_data_parallel_world_size() * case.cp

    def places(step: int, ids: list[int]) -> Tensor:
        starts = starts_of(step, lambda sample: sample.response)
        return torch.tensor(
            [starts[i] + t for i in ids for t in owned(samples()[i].total, samples()[i].prompt, case.cp, cp_rank)],
            dtype=torch.int64,
        )

    def loss_of(args: Namespace, batch: dict[str, Any], ids: list[int], count: int, rollouts: int) -> Any:
        chosen = [samples()[i] for i in ids]
        local = [owned(sample.total, sample.prompt, case.cp, cp_rank) for sample in chosen]
        leaf = torch.cat([sample.log_probs[at] for sample, at in zip(chosen, local, strict=True)]).requires_grad_()
        log_probs = list(leaf.split([len(at) for at in local]))
        entropy = [sample.entropy[at] for sample, at in zip(chosen, local, strict=True)]
        reduce = _reducer(args, batch, local)
        if args.loss_type == "custom_loss":
            loss, report = adapter.ADAPTER.loss(args, batch, log_probs, entropy, reduce)
        else:
            loss, report = _policy_loss(args, batch, leaf, entropy, reduce, adapter.tis_function, local)
        tokens = sum(mask.sum().clamp(min=1) for mask in batch["loss_masks"])
        per_token = args.calculate_per_token_loss
        scaled = loss * case.cp if per_token else loss * count / rollouts * world
        values = torch.stack([torch.zeros(()), *[torch.as_tensor(v, dtype=torch.float32) for v in report.values()]])
        return scaled, tokens if per_token else 1, {"leaf": leaf, "keys": [*report], "values": values, "sharded": False}

    return run_steps(case, loss_of, places, lambda step: (starts_of(step, lambda sample: sample.response)[-1],))


def _reducer(args: Namespace, batch: dict[str, Any], local: list[list[int]]) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        parts = x.split([len(at) for at in local])
        sums = [(part * mask[at]).sum() for part, mask, at in zip(parts, batch["loss_masks"], local, strict=True)]
        if not args.calculate_per_token_loss:
            sums = [value / denom.clamp(min=1) for value, denom in zip(sums, batch["rollout_mask_sums"], strict=True)]
        return torch.stack(sums).sum()

    return reduce


def _policy_loss(
    args: Namespace,
    batch: dict[str, Any],
    leaf: Tensor,
    entropy: list[Tensor],
    reduce: Callable[[Tensor], Tensor],
    tis: Any,
    local: list[list[int]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The host's policy loss: PPO-clip, the TIS hook (whose masks all but the metrics use), entropy, KL (k3)."""
    log_probs = list(leaf.detach().split([len(at) for at in local]))
    old, advantages = torch.cat(batch["log_probs"] or log_probs), torch.cat(batch["advantages"])
    ratio = (leaf - old).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    pg_loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    keywords = {key: batch[key] for key in ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")}
    pg_loss, masks, metrics = tis(
        args=args, pg_loss=pg_loss, train_log_probs=batch["log_probs"] or log_probs, **keywords
    )
    left = _reducer(args, {**batch, "loss_masks": masks}, local)
    path = args.custom_pg_loss_reducer_function_path
    reduce_policy = left
    if path is not None:
        module, _, name = path.rpartition(".")
        shape = (batch["total_lengths"], batch["response_lengths"])
        reduce_policy = getattr(importlib.import_module(module), name)(*shape, masks, args.calculate_per_token_loss)
    loss = reduce_policy(pg_loss) - args.entropy_coef * left(torch.cat(entropy))
    if args.use_kl_loss:
        difference = leaf - torch.cat(batch["ref_log_probs"])
        loss = loss + args.kl_loss_coef * left((-difference).exp() - 1 + difference)
    return loss, {"loss": loss.detach(), **{name: reduce(value) for name, value in metrics.items()}}
