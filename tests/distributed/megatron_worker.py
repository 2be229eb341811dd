"""What `tests/lab/test_cpu_shim.py` runs on every rank: three training steps of a small GPT in one parallel layout.

Importing this module imports no megatron-core; running `train` does.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

STEPS = 3
VOCAB = 61
# One step's data. With context parallelism the shortest leave ranks without a token. One has no trained token.
LENGTHS = (5, 17, 1, 12, 8, 3, 23, 6)
UNTRAINED = 5


@dataclass(frozen=True)
class Case:
    """One layout; dp is what remains of the world. `microbatches` counts those of one data-parallel rank."""

    name: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    microbatches: int = 1
    distributed_optimizer: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    """False: micro-batches of one sequence, in megatron's dense format [1, s]."""
    cut_layout: str | None = None
    """How tokens are cut over CP, if not as the model expects."""


@dataclass
class Outcome:
    """Per step: masked mean of the loss, the optimizer's grad norm, full gradients. And what the last step left.

    Losses are on the last pipeline stage only, and end with one of a forward-only pass. Tensors are on rank 0 only.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    checksum: int = 0
    """Of gradients and parameters as gathered on this rank."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences one after the other: lengths, and per token its id, the next one, and whether that is trained."""

    lengths: list[int]
    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor


def split(count: int) -> list[MicroBatch]:
    """The step's sequences, the same for every layout, in `count` micro-batches."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for i, n in enumerate(LENGTHS):
        text = torch.randint(0, VOCAB, (n + 1,), generator=generator)
        mask = torch.rand(n, generator=generator) < (0.0 if i == UNTRAINED else 0.7)
        sequences.append((text[:-1], text[1:], mask))
    each = len(LENGTHS) // count
    batches = []
    for start in range(0, len(LENGTHS), each):
        columns = zip(*sequences[start : start + each], strict=True)
        tokens, targets, loss_mask = (torch.cat(column) for column in columns)
        batches.append(MicroBatch(list(LENGTHS[start : start + each]), tokens, targets, loss_mask))
    return batches


def train(case: Case) -> Outcome:
    """Build the model, train it for `STEPS` steps of the same data, and return what must not depend on the layout."""
    from megatron.core import parallel_state, tensor_parallel

    from mismatch_plugin.hooks.megatron_core.batch import packed_seq_params
    from mismatch_plugin.lab import model as lab
    from mismatch_plugin.lab import parameters
    from mismatch_plugin.parallel.context import split_tokens

    lab.initialize_parallel(tp=case.tp, pp=case.pp, cp=case.cp)
    settings = lab.ModelSettings.model_validate({"vocab": VOCAB, "hidden": 32, "ffn": 48, **case.settings})
    model = lab.build_model(settings, distributed_optimizer=case.distributed_optimizer)
    optimizer = lab.build_optimizer(model, **{"clip_grad": 1e9, **case.optimizer})
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    cut: Any = case.cut_layout or settings.cp_layout
    align = case.tp if settings.sequence_parallel else 1

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        if logits.dtype == torch.float32:
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), targets.T)
            return loss.transpose(0, 1)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)  # megatron's own is float32 inside
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def forward_step(data: Iterator[MicroBatch], gpt: Any) -> tuple[Tensor, Any]:
        batch = next(data)
        local = split_tokens(batch.lengths, layout=cut, size=case.cp, rank=cp_rank, align=align)
        targets, mask = local.take(batch.targets), local.take(batch.loss_mask).bool()
        tokens = local.take(batch.tokens, VOCAB - 1)  # which id padding has must not matter
        params = packed_seq_params(local) if case.packed else None
        output = gpt(tokens, local.position_T[None], None, packed_seq_params=params)

        def loss_func(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = torch.where(mask, cross_entropy(logits, targets), 0).sum()
            count = mask.sum().to(torch.int)
            return loss, count, {"loss": loss.detach().clone(), "count": count.clone()}

        return output, loss_func

    outcome = Outcome()
    for step in range(STEPS + 1):
        mine = split(dp_size * case.microbatches)[dp_rank::dp_size]
        stored = lab.run_step(model, forward_step, iter(mine), len(mine), forward_only=step == STEPS)
        if step < STEPS:
            outcome.gradients.append(parameters.gather_gradients(model))
            _, norm, _ = optimizer.step()
            outcome.norms.append(float(norm or 0.0))
        if stored:
            totals = torch.tensor([[float(s["loss"]), float(s["count"])] for s in stored], dtype=torch.float64).sum(0)
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            outcome.losses.append(float(totals[0] / totals[1]))
    outcome.parameters = parameters.gather_parameters(model)
    for tensors in (*outcome.gradients, outcome.parameters):
        for name in sorted(tensors):
            outcome.checksum = zlib.crc32(tensors[name].numpy().tobytes(), outcome.checksum)
    if dist.get_rank() > 0:
        outcome.gradients, outcome.parameters = [], {}
    return outcome


def refuse(case: Case) -> str:
    """What `ModelSettings` or `build_model` says to a case that cannot be."""
    from mismatch_plugin.lab import model as lab

    lab.initialize_parallel(tp=case.tp, pp=case.pp, cp=case.cp)
    try:
        lab.build_model(lab.ModelSettings(**case.settings), distributed_optimizer=case.distributed_optimizer)
    except ValueError as error:
        return str(error)
    return "built"
