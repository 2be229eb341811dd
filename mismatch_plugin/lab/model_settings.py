"""The settings of the lab's small GPT."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mismatch_plugin.lab.cpu_spec import CpLayout


class ModelSettings(BaseModel):
    """A small GPT. Defaults make a Llama-like model that trains in milliseconds a step on one core."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(2, ge=1)
    """Transformer layers; a multiple of pp."""
    hidden: int = Field(64, ge=1)
    """Width; a multiple of `heads`."""
    heads: int = Field(4, ge=1)
    """Query heads; a multiple of `kv_groups`."""
    kv_groups: int = Field(2, ge=1)
    """Key and value heads (grouped-query attention); a multiple of tp."""
    ffn: int = Field(128, ge=1)
    """Width of the MLP; a multiple of tp."""
    vocab: int = Field(64, ge=1)
    """Tokens of the vocabulary."""
    vocab_multiple: int = Field(8, ge=1)
    """The vocabulary is padded to a multiple of this, itself a multiple of tp: the same padding for every layout."""
    max_length: int = Field(128, ge=1)
    """Longest sequence with `learned_absolute` positions."""
    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    position: Literal["rope", "learned_absolute", "none"] = "rope"
    tied_embeddings: bool = False
    """Whether the output layer shares the word embeddings' weight."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of weights, activations and gradients. megatron's own cross entropy and grad norm are float32 all the same."""
    sequence_parallel: bool = False
    """Norms and residuals split over TP along the sequence. Needs tp > 1."""
    cp_layout: CpLayout = "zigzag"
    """How context parallelism splits a sequence; megatron's RoPE knows zigzag only."""
    calculate_per_token_loss: bool = True
    """megatron's own switch: gradients are divided by the step's token count in `finalize_model_grads`."""
    experts: int = Field(0, ge=0)
    """Experts of each layer's MLP, of which a token takes `experts_per_token`; 0 is a dense model."""
    experts_per_token: int = Field(2, ge=1)
    moe_aux_loss: float = Field(0.0, ge=0)
    """Coefficient of megatron's load-balancing loss."""
    moe_z_loss: float = Field(0.0, ge=0)
    """Coefficient of megatron's router z-loss."""
    mtp_layers: int = Field(0, ge=0)
    """Layers of multi-token prediction behind the last one."""
    mtp_scale: float = Field(0.1, ge=0)
    """Weight of their loss."""
    virtual_stages: int = Field(1, ge=1)
    """Model chunks of a pipeline stage (interleaved schedule). Needs pp > 1."""
    init_std: float = Field(0.05, gt=0)
    """Standard deviation of matrices; norms start at 1, as usual."""
    norm_jitter: float = Field(0.0, ge=0)
    """Standard deviation of the norms' weights about 1 and of biases about 0; above 0, tests see that they matter."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> ModelSettings:
        if self.hidden % self.heads or self.heads % self.kv_groups:
            raise ValueError("hidden must be a multiple of heads, and heads of kv_groups.")
        if self.position == "rope" and self.cp_layout == "contiguous":
            raise ValueError("megatron's RoPE knows the zigzag layout only: set position to none or learned_absolute.")
        return self

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and columns of the logits, padding included."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple
