"""Weights and gradients of the lab's model by global name: whole from any parallel layout, and back into any.

Importing this imports megatron-core.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import functional as F

from mismatch_plugin.lab.model_settings import ModelSettings

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def gather_parameters(model: list[Any]) -> dict[str, Tensor]:
    """Global parameter name -> full weight, on every rank. Collective over TP and PP."""
    return _gather(model, lambda parameter: parameter.detach())


def gather_gradients(model: list[Any]) -> dict[str, Tensor]:
    """Global parameter name -> full gradient as finalised by `run_step`, on every rank.

    Names, shapes and order of rows do not depend on the layout: vocabulary padding is cut, and tied embeddings appear
    once, with their whole gradient. Collective over TP and PP, with the distributed optimizer also over DP × CP.

    Raises:
        RuntimeError: the first and the last pipeline stage disagree on the tied embeddings.
    """
    for chunk in model:
        if chunk.ddp_config.use_distributed_optimizer:
            # The reduce-scatter left each rank its shard; the other shards of the buffer are scratch, so fill them.
            group = chunk.intra_dp_cp_group
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    shards = list(bucket.grad_data.chunk(group.size()))
                    dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    return _gather(model, lambda parameter: parameter.main_grad)


def _gather(model: list[Any], value: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    tp_group: Any = parallel_state.get_tensor_model_parallel_group()
    pp_group: Any = parallel_state.get_pipeline_model_parallel_group()
    stage: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model):
        local = value(parameter).contiguous()
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(local) for _ in range(tp_group.size())]
            dist.all_gather(parts, local, group=tp_group)
            local = _unshard(parts, parameter)
        if name in (EMBEDDING, OUTPUT):
            local = local[: model[0].module.unpadded_vocab]
        stage[name] = local.detach().cpu().clone()
    stages: list[Any] = [None] * pp_group.size()
    dist.all_gather_object(stages, stage, group=pp_group)
    full = {name: tensor for stage in stages for name, tensor in stage.items()}
    tied = full.pop(OUTPUT, None) if model[0].module.share_embeddings_and_output_weights else None
    if tied is not None and not torch.equal(tied, full[EMBEDDING]):
        raise RuntimeError("the first and the last pipeline stage disagree on the tied embeddings.")
    return full


def named_parameters(model: list[Any]) -> Iterator[tuple[str, Any]]:
    """(global name, parameter): layers are counted over all pipeline stages."""
    for chunk in model:
        gpt = getattr(chunk, "module", chunk)
        offset = get_transformer_layer_offset(gpt.config, getattr(gpt, "vp_stage", None))
        for name, parameter in gpt.named_parameters():
            if layer := re.match(r"decoder\.layers\.(\d+)(.*)", name):
                name = f"decoder.layers.{int(layer[1]) + offset}{layer[2]}"
            yield name, parameter


def shard(full: Tensor, parameter: Any, size: int, rank: int) -> Tensor:
    """This rank's part of a parameter. Gated MLPs have stride 2: a part of the gate, then a part of the up matrix."""
    pieces = full.chunk(size * parameter.partition_stride, dim=parameter.partition_dim)
    return torch.cat(pieces[rank::size], dim=parameter.partition_dim)


def _unshard(parts: list[Tensor], parameter: Any) -> Tensor:
    """Inverse of `shard`."""
    dim, stride = parameter.partition_dim, parameter.partition_stride
    pieces = [part.chunk(stride, dim=dim) for part in parts]
    return torch.cat([piece[i] for i in range(stride) for piece in pieces], dim=dim)


def draw_parameters(model: list[Any], settings: ModelSettings) -> None:
    """Draw every full weight in float64 from a generator seeded by its global name, and keep this rank's part."""

    def drawn(name: str, shape: list[int]) -> Tensor:
        if settings.tied_embeddings and name == OUTPUT:
            name = EMBEDDING
        generator = torch.Generator().manual_seed(zlib.crc32(f"{settings.seed}.{name}".encode()))
        full = torch.randn(shape, generator=generator, dtype=torch.float64)
        if full.dim() == 1:
            return full * settings.norm_jitter + (1.0 if name.endswith("weight") else 0.0)
        return full * settings.init_std

    _fill(model, drawn)


def load_parameters(model: list[Any], weights: Mapping[str, Tensor]) -> None:
    """Inverse of `gather_parameters`: each rank keeps its part of the full weights; padding of the vocabulary is 0.

    Call it before an optimizer is built, which may keep copies. No collective.
    """

    def given(name: str, shape: list[int]) -> Tensor:
        full = weights[EMBEDDING if name == OUTPUT and OUTPUT not in weights else name]
        return F.pad(full, (0, 0, 0, shape[0] - len(full))) if name in (EMBEDDING, OUTPUT) else full

    _fill(model, given)


@torch.no_grad()
def _fill(model: list[Any], whole: Callable[[str, list[int]], Tensor]) -> None:
    """Copy this rank's part of `whole(global name, full shape)` into every parameter."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named_parameters(model):
        split, shape = getattr(parameter, "tensor_model_parallel", False), list(parameter.shape)
        if split:
            shape[parameter.partition_dim] *= size
        full = whole(name, shape)
        parameter.copy_(shard(full, parameter, size, rank) if split else full)
