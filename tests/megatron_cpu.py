"""The real megatron-core GPTModel, DDP, schedule and optimizer on CPU, for any tp × pp × cp × dp.

Weights depend on the parameter's global name only, and `gather_gradients` puts the parts of all ranks together again,
so that any parallel layout can be compared with one process, tensor by tensor. Importing this imports megatron-core.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from examples.megatron_core import cpu_shim
from tests.trainers.shim.cpu_spec import CoreAttention, CpLayout, RMSNorm

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]
"""megatron's contract: (data iterator, model) -> (output, loss_func); loss_func(output) runs on the last stage only."""
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class ModelSettings:
    """A small Llama-like GPT. experts 0: a dense model. init_std: of matrices; norm_jitter: of norms about 1."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_groups: int = 2
    ffn: int = 128
    vocab: int = 64
    max_length: int = 128
    position: Literal["rope", "learned_absolute", "none"] = "rope"
    tied_embeddings: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    sequence_parallel: bool = False
    cp_layout: CpLayout = "zigzag"
    calculate_per_token_loss: bool = True
    experts: int = 0
    experts_per_token: int = 2
    moe_aux_loss: float = 0.0
    moe_z_loss: float = 0.0
    mtp_layers: int = 0
    mtp_scale: float = 0.1
    virtual_stages: int = 1
    init_std: float = 0.05
    norm_jitter: float = 0.0

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // 8) * 8  # the same for every layout


def initialize_parallel(tp: int = 1, pp: int = 1, cp: int = 1, virtual_stages: int = 1) -> None:
    """Install the CPU shim, start torch.distributed if nobody did (without torchrun's variables alone), and (re-)build
    megatron's process groups: models and optimizers of the groups before must not be used any more."""
    cpu_shim.install()
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        alone = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **alone)
    if parallel_state.is_initialized():
        dist.barrier()  # a rank that is done must not close connections that a slower one still reads from
        for group in filter(None, getattr(parallel_state, "_global_process_group_list", None) or ()):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        context_parallel_size=cp,
        create_gloo_process_groups=False,
    )
    # The inference tracker's forks do nothing, which is what there is without CUDA. Dropout is 0, so nothing is drawn.
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def build_model(settings: ModelSettings) -> list[Any]:
    """This rank's part of the model, as megatron's list of model chunks in DDP. `finalize_model_grads` is set on the
    config, where a hook may wrap it."""
    config = _transformer_config(settings)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, overlap_grad_reduce=False)
    chunks = []
    for chunk in range(settings.virtual_stages):
        model = _build_chunk(config, settings, chunk if settings.virtual_stages > 1 else None)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=chunk > 0))

    def drawn(name: str, shape: list[int]) -> Tensor:
        if settings.tied_embeddings and name == OUTPUT:
            name = EMBEDDING
        generator = torch.Generator().manual_seed(zlib.crc32(f"0.{name}".encode()))
        full = torch.randn(shape, generator=generator, dtype=torch.float64)
        if full.dim() == 1:
            return full * settings.norm_jitter + (1.0 if name.endswith("weight") else 0.0)
        return full * settings.init_std

    _fill(chunks, drawn)
    return chunks


def _build_chunk(config: TransformerConfig, settings: ModelSettings, vp_stage: int | None) -> GPTModel:
    if not hasattr(moe_utils, "te_general_gemm"):
        # The router asks whether this is None, and without Transformer Engine it is not even defined.
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 - not among the names that the module declares
    norm: Any = RMSNorm
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    submodules: Any = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = norm
    attention = ModuleSpec(module=CoreAttention, params={"cp_layout": settings.cp_layout})
    submodules.self_attention.submodules.core_attention = attention
    spec: Any = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), layer_norm=norm)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp: Any = None
    if settings.mtp_layers and last:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        for block in mtp.layer_specs:
            block.submodules.enorm = block.submodules.hnorm = block.submodules.layer_norm = norm
    model = GPTModel(
        config,
        spec,
        vocab_size=settings.padded_vocab,
        max_sequence_length=settings.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=last,
        position_embedding_type=settings.position,
        share_embeddings_and_output_weights=settings.tied_embeddings,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    # Position embeddings ignore params_dtype; the attributes of parameters survive a change of type.
    model.to(device=torch.cuda.current_device(), dtype=config.params_dtype)
    model.unpadded_vocab = settings.vocab  # type: ignore[assignment]
    return model


def _transformer_config(settings: ModelSettings) -> TransformerConfig:
    dtype = getattr(torch, settings.dtype)
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        num_query_groups=settings.kv_groups,
        ffn_hidden_size=settings.ffn,
        num_moe_experts=settings.experts or None,
        moe_router_topk=settings.experts_per_token,
        # Else the softmax over one expert is 1, and the router never learns.
        moe_router_pre_softmax=settings.experts_per_token == 1,
        moe_aux_loss_coeff=settings.moe_aux_loss,
        moe_z_loss_coeff=settings.moe_z_loss or None,
        moe_router_dtype="fp64" if settings.dtype == "float64" else "fp32",
        mtp_num_layers=settings.mtp_layers or None,
        mtp_loss_scaling_factor=settings.mtp_scale,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=settings.sequence_parallel,
        calculate_per_token_loss=settings.calculate_per_token_loss,
        # Micro-batches differ in length, so pipeline stages send shapes; megatron ties that to this dispatcher.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # With two stages, sends and receives of an interleaved schedule between the same two ranks need their order.
        overlap_p2p_comm=settings.virtual_stages > 1,
        batch_p2p_comm=settings.virtual_stages == 1,
        # Fused kernels are CUDA only.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def build_optimizer(model: list[Any], *, lr: float, betas: tuple[float, float], clip_grad: float) -> Any:
    """megatron's AdamW for `model`; `step()` returns (success, grad norm before clipping, None)."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        clip_grad=clip_grad,
        weight_decay=0.0,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        params_dtype=next(model[0].parameters()).dtype,
    )
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def run_step(
    model: list[Any], forward_step: ForwardStep, data: Any, num_microbatches: int, *, forward_only: bool = False
) -> list[Any]:
    """One step of megatron's schedule, to gradients that are reduced over DP × CP; the optimizer is not stepped.

    Returns what loss_func returned last, per micro-batch, on the last pipeline stage; an empty list elsewhere.
    """
    if not forward_only:
        for chunk in model:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                # The float32 optimizer leaves main_grad here; DDP would add it to itself in the next backward pass.
                parameter.grad = None
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=1,  # both are unused with variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )


def gather_parameters(model: list[Any]) -> dict[str, Tensor]:
    """Global parameter name -> full weight, on every rank. Collective over TP and PP."""
    return _gather(model, lambda parameter: parameter.detach())


def gather_gradients(model: list[Any]) -> dict[str, Tensor]:
    """Global parameter name -> full gradient as finalised by `run_step`, on every rank, the same in every layout.

    Vocabulary padding is cut, and tied embeddings appear once. Collective over TP and PP.
    """
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
            # Gated MLPs have stride 2: a part of the gate, then a part of the up matrix.
            dim, stride = parameter.partition_dim, parameter.partition_stride
            pieces = [part.chunk(stride, dim=dim) for part in parts]
            local = torch.cat([piece[i] for i in range(stride) for piece in pieces], dim=dim)
        if name in (EMBEDDING, OUTPUT):
            local = local[: model[0].module.unpadded_vocab]
        stage[name] = local.detach().cpu().clone()
    stages: list[Any] = [None] * pp_group.size()
    dist.all_gather_object(stages, stage, group=pp_group)
    full = {name: tensor for stage in stages for name, tensor in stage.items()}
    tied = full.pop(OUTPUT, None) if model[0].module.share_embeddings_and_output_weights else None
    assert tied is None or torch.equal(tied, full[EMBEDDING]), "stages disagree on tied embeddings"
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


def load_parameters(model: list[Any], weights: Mapping[str, Tensor]) -> None:
    """Inverse of `gather_parameters`, before an optimizer is built, which may keep copies; vocabulary padding is 0."""

    def given(name: str, shape: list[int]) -> Tensor:
        full = weights[name]
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
        if split:
            pieces = full.chunk(size * parameter.partition_stride, dim=parameter.partition_dim)
            full = torch.cat(pieces[rank::size], dim=parameter.partition_dim)
        parameter.copy_(full)
