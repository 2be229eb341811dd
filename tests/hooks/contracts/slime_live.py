"""slime's and miles's own `loss_function`, out of a checkout, in the place of what `slime_worker` builds by hand.

Only `ray` is stubbed. Each rank gets its rows and columns of the logits, cut as the host's data pipeline cuts them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from argparse import Namespace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.hooks.contracts.slime_data import STEPS, VOCAB, Sample, samples, step_samples
from tests.hooks.contracts.slime_worker import Case, arguments_of, initialize, run_steps, starts_of

PADDING = 8
"""A micro-batch is filled up to a multiple of it."""


class _Anything(types.ModuleType):
    """A module whose every attribute is a function that does nothing: what `ray` is to the loss."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@cache
def _import_host(host: str, root: str, tp: int, cp: int) -> Any:
    """The host's module with `loss_function`, its parallel state set up where it keeps one of its own."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch._dynamo

    torch._dynamo.config.disable = True
    sys.path.insert(0, root)
    for name in ("ray", "ray.actor", "ray.util"):
        sys.modules[name] = _Anything(name)
    state = initialize(tp, cp)
    if host == "slime":
        script = f"{root}/examples/train_infer_mismatch_helper/mis.py"
        spec = importlib.util.spec_from_file_location("slime_mis", script)
        assert spec is not None and spec.loader is not None
        sys.modules["slime_mis"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["slime_mis"])
        return importlib.import_module("slime.backends.megatron_utils.loss")
    parallel = importlib.import_module("miles.backends.training_utils.parallel")
    info = importlib.import_module("miles.utils.ft_utils.process_group_utils").GroupInfo
    groups = {
        "intra_dp": state.get_data_parallel_group(),
        "intra_dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "cp": state.get_context_parallel_group(),
        "tp": state.get_tensor_model_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    infos = {name: info(rank=group.rank(), size=group.size(), group=group) for name, group in groups.items()}
    alone = {name: info(rank=0, size=1, group=None) for name in ("ep", "etp", "indep_dp")}
    parallel.set_parallel_state(parallel.ParallelState(**infos, **alone))
    return importlib.import_module("miles.backends.training_utils.loss")


def run_host(case: Case) -> Any:
    """From logits: the host's own `loss_function` out of a checkout."""
    host = _import_host(case.host, case.root, case.tp, case.cp)
    state = initialize(case.tp, case.cp)
    cp_rank, tp_rank = state.get_context_parallel_rank(), state.get_tensor_model_parallel_rank()
    width = VOCAB // case.tp
    columns = torch.arange(tp_rank * width, (tp_rank + 1) * width)

    def rows(args: Namespace, step: int, ids: list[int]) -> Tensor:
        """Rows of the step's logits [Σ total] that this rank is fed, −1 for padding."""
        starts = starts_of(step, lambda sample: sample.total)
        whole = [torch.arange(samples()[i].total) + starts[i] for i in ids]
        if getattr(args, "qkv_format", "thd") == "bshd":
            return torch.cat([_zigzag(row, args.padded, case.cp, cp_rank) for row in whole])
        if args.allgather_cp:
            flat = torch.cat(whole)
            flat = torch.cat([flat, torch.full((-flat.numel() % (case.cp * PADDING),), -1)])
            return flat.chunk(case.cp)[cp_rank]
        local = torch.cat([_zigzag(row, row.numel(), case.cp, cp_rank) for row in whole])
        return torch.cat([local, torch.full((-local.numel() % PADDING,), -1)])

    args = arguments_of(case)

    def place(step: int, ids: list[int]) -> Tensor:
        at = rows(args, step, ids)
        spare = starts_of(step, lambda sample: sample.total)[-1]  # padding's gradient goes to one row more
        flat = torch.where(at >= 0, at, spare)[:, None] * VOCAB + columns
        return flat.flatten()

    def loss_of(args: Namespace, batch: dict[str, Any], ids: list[int], count: int, rollouts: int) -> Any:
        step = next(number for number in range(STEPS) if set(ids) <= set(step_samples(number)))
        table = torch.cat([samples()[i].logits for i in step_samples(step)] + [torch.zeros(1, VOCAB)])
        leaf = table[rows(args, step, ids)][:, columns].clone().requires_grad_()
        batched = getattr(args, "qkv_format", "thd") == "bshd"
        logits = leaf.view(len(ids) if batched else 1, -1, width) * 1.0
        batch |= {"unconcat_tokens": [samples()[i].tokens for i in ids]}
        if args.rollout_top_p != 1.0:
            nuclei = [_nuclei(samples()[i]) for i in ids]
            batch |= {"rollout_top_p_token_ids": [ids for ids, _ in nuclei]}
            batch |= {"rollout_top_p_token_offsets": [offsets for _, offsets in nuclei]}
        if case.host == "slime":
            loss, normalizer, log = host.loss_function(args, batch, count, rollouts, logits)
        else:
            if batch["max_seq_lens"] is None:
                del batch["max_seq_lens"]
            loss, normalizer, log = host.loss_function(
                args, batch, count, logits, apply_megatron_loss_scaling=True, num_rollouts=rollouts
            )
        values = log["values"].float()
        return loss, normalizer, {"leaf": leaf, "keys": log["keys"], "values": values, "sharded": case.tp > 1}

    def shape(step: int) -> tuple[int]:
        return ((starts_of(step, lambda sample: sample.total)[-1] + 1) * VOCAB,)

    outcomes = run_steps(case, loss_of, place, shape)
    for outcome in outcomes:
        gradient = outcome.gradient.view(-1, VOCAB)
        outcome.error += "" if float(gradient[-1].abs().max()) == 0.0 else "padding has a gradient"
        outcome.gradient = gradient[:-1]
    return outcomes


def _nuclei(sample: Sample) -> tuple[list[int], list[int]]:
    """(token ids, offsets) that a sampler with top-p would have kept at each response token: it and some more."""
    ids, offsets = [], [0]
    for token in sample.tokens[sample.prompt :].tolist():
        ids += sorted({token, *(i for i in range(VOCAB) if i % 3)})
        offsets.append(len(ids))
    return ids, offsets


def _zigzag(row: Tensor, padded: int, cp: int, rank: int) -> Tensor:
    """The two chunks of a sequence that a rank is fed, filled up with −1."""
    if cp == 1:
        return torch.cat([row, torch.full((padded - row.numel(),), -1)])
    chunk = -(-padded // (2 * cp))
    filled = torch.cat([row, torch.full((2 * cp * chunk - row.numel(),), -1)])
    last = 2 * cp - 1 - rank
    return torch.cat([filled[rank * chunk : (rank + 1) * chunk], filled[last * chunk : (last + 1) * chunk]])
