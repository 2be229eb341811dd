"""For `--spec slime_cpu_spec layer_spec`: a GPT layer that runs on CPU and has Transformer Engine's parameter names.

slime's converters between Megatron and HF know only those names (hf_to_megatron/qwen.py, megatron_to_hf/qwen2.py).
"""
# pyright: basic, reportMissingParameterType=false, reportArgumentType=false, reportAttributeAccessIssue=false

import torch
from cpu_spec import CoreAttention, RMSNorm  # pyright: ignore[reportMissingImports]
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm and column-parallel linear in one module, as TELayerNormColumnParallelLinear."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_, *args, **kwargs):
        normed = torch.nn.functional.rms_norm(input_, (input_.size(-1),), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


def layer_spec(args, config, vp_stage=None):
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=NormColumnParallelLinear,
                    core_attention=CoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm
    )
