"""The real megatron-core GPTModel, DDP, schedule and optimizer behind a few functions, for any tp × pp × cp × dp.

Weights depend on the seed and the parameter's global name only, and `parameters.gather_gradients` puts the parts of all
ranks together again, so that any parallel layout can be compared with one process, tensor by tensor. Runs on CPU by the
shim.
Importing this imports megatron-core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from mismatch_plugin.lab import cpu_shim
from mismatch_plugin.lab.cpu_spec import block_spec, mtp_spec
from mismatch_plugin.lab.model_settings import ModelSettings
from mismatch_plugin.lab.parameters import draw_parameters

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]
"""megatron's contract: (data iterator, model) -> (output, loss_func); loss_func(output) runs on the last stage only."""


def initialize_parallel(tp: int = 1, pp: int = 1, cp: int = 1, virtual_stages: int = 1) -> None:
    """Install the CPU shim, start torch.distributed if nobody did, and (re-)build megatron's process groups.

    The data-parallel size is what remains of the world. Without torchrun's environment variables the world is this
    process. Called again, it destroys the groups of the call before: models and optimizers built on them must not be
    used any more. Collective over the world.
    """
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


def build_model(settings: ModelSettings, *, distributed_optimizer: bool = False) -> list[Any]:
    """This rank's part of the model, as megatron's list of model chunks, each wrapped in megatron's DDP.

    Needs `initialize_parallel`. `finalize_model_grads` is set on the config, where a hook may wrap it.
    `distributed_optimizer` shards gradients and optimizer state over DP × CP. Collectives: those of megatron's set-up.

    Raises:
        ValueError: a parallel size does not divide what it splits, or float64 with the distributed optimizer.
    """
    if distributed_optimizer and settings.dtype != "float32":
        raise ValueError(f"megatron's distributed optimizer casts gradients to float32, and dtype is {settings.dtype}.")
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    if any(size % tp for size in (settings.kv_groups, settings.ffn, settings.padded_vocab)) or (
        settings.layers % (pp * settings.virtual_stages)
    ):
        raise ValueError(
            f"tp={tp} must divide kv_groups, ffn and the padded vocabulary, and pp={pp} the layers: "
            f"{settings.layers} layers in {settings.virtual_stages} chunks a stage."
        )
    config = _transformer_config(settings)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    chunks = []
    for chunk in range(settings.virtual_stages):
        model = _build_chunk(config, settings, chunk if settings.virtual_stages > 1 else None)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=chunk > 0))
    draw_parameters(chunks, settings)
    return chunks


def _build_chunk(config: TransformerConfig, settings: ModelSettings, vp_stage: int | None) -> GPTModel:
    spec = block_spec(config, settings.cp_layout, vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = GPTModel(
        config,
        spec,  # type: ignore[arg-type]
        vocab_size=settings.padded_vocab,
        max_sequence_length=settings.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=last,
        position_embedding_type=settings.position,
        share_embeddings_and_output_weights=settings.tied_embeddings,
        mtp_block_spec=mtp_spec(config, spec, vp_stage) if settings.mtp_layers and last else None,
        vp_stage=vp_stage,
    )
    # Position embeddings ignore params_dtype; the attributes of parameters survive a change of type.
    model.to(device=torch.cuda.current_device(), dtype=config.params_dtype)
    model.unpadded_vocab = settings.vocab  # type: ignore[assignment]
    return model


def _transformer_config(settings: ModelSettings) -> TransformerConfig:
    dtype = getattr(torch, settings.dtype)
    gated = settings.activation == "swiglu"
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
        normalization=settings.norm,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
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


def build_optimizer(
    model: list[Any],
    kind: Literal["adam", "sgd"] = "adam",
    *,
    lr: float = 1e-3,
    clip_grad: float = 0.0,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> Any:
    """megatron's `MegatronOptimizer` for `model`; distributed if the model was built for it.

    `step()` returns (success, grad norm, None). With `clip_grad` 0 megatron computes no norm, and it is None.
    """
    config = OptimizerConfig(
        optimizer=kind,
        lr=lr,
        clip_grad=clip_grad,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        sgd_momentum=0.0,
        params_dtype=next(model[0].parameters()).dtype,
        use_distributed_optimizer=model[0].ddp_config.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def run_step(
    model: list[Any],
    forward_step: ForwardStep,
    data_iterator: Iterator[Any],
    num_microbatches: int,
    *,
    forward_only: bool = False,
) -> list[Any]:
    """One step of megatron's schedule: zero gradients, forward and backward of all micro-batches, finalise gradients.

    Afterwards gradients are reduced over DP × CP and divided as megatron does; the optimizer is not stepped.
    Collectives: megatron's own.

    Returns:
        What loss_func returned last, per micro-batch, on the last pipeline stage; an empty list elsewhere.
    """
    if not forward_only:
        for chunk in model:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                # The float32 optimizer leaves main_grad here; DDP would add it to itself in the next backward pass.
                parameter.grad = None
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=1,  # both are unused with variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
