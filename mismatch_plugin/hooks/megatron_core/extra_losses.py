"""Losses that megatron's model adds itself: MoE load balancing, router z-loss, multi-token prediction (MTP).

Their gradients enter along with the policy loss, multiplied in advance by token counts that megatron divides out again.
With `calculate_per_token_loss` the router multiplies by the tokens that one rank feeds it, prompts and padding too, and
its losses are summed over CP and (under sequence parallelism) TP; MTP adds a plain sum over its mask. Counting each
micro-batch once, by the tokens of one rank, gives the weight that they have in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.hooks.megatron_core.batch import MegatronBatch


def extra_losses(model_config: Any) -> list[str]:
    """Names of those that a TransformerConfig switches on."""
    experts = getattr(model_config, "num_moe_experts", None)
    names = {"moe_aux_loss_coeff": "MoE aux loss", "moe_z_loss_coeff": "MoE z-loss"} if experts else {}
    values = {name: getattr(model_config, field, None) for field, name in (names | {"mtp_num_layers": "MTP"}).items()}
    return [name for name, value in values.items() if (any(value) if isinstance(value, (list, tuple)) else value)]


def mtp_arguments(batch: MegatronBatch, scale: Tensor) -> dict[str, Tensor]:
    """`labels` [b, s] int64 and `loss_mask` [b, s] for megatron's MTP: the trained tokens, each counting `scale`."""
    shape = batch.tokens.shape
    labels = torch.zeros_like(batch.tokens).flatten().index_copy(0, batch.rows, batch.targets)
    trained = torch.zeros(batch.tokens.numel(), device=batch.tokens.device)
    trained = trained.index_copy(0, batch.rows, batch.packed.loss_mask.float() * scale.float().to(trained.device))
    return {"labels": labels.view(shape), "loss_mask": trained.view(shape)}


@contextmanager
def logits_with_labels(model: Any, mtp_layers: int) -> Iterator[None]:
    """Within it the model returns logits [b, s, V/tp] although it is given labels, which MTP's loss needs.

    megatron calls the model's `compute_language_model_loss` once for each MTP layer, then for the main head, and
    returns what that gives: the last call is answered with the logits.
    Raises RuntimeError where megatron made another number of calls.
    """
    while hasattr(model, "module"):
        model = model.module
    if not getattr(model, "post_process", True):
        yield
        return
    cross_entropy = model.compute_language_model_loss
    calls = 0

    def answer(labels: Tensor, logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(labels, logits) if calls <= mtp_layers else logits.transpose(0, 1).contiguous()

    model.compute_language_model_loss = answer
    try:
        yield
    finally:
        del model.compute_language_model_loss
    if calls != mtp_layers + 1:
        raise RuntimeError(
            f"megatron computed {calls} losses for {mtp_layers} MTP layers and one head: this megatron-core handles "
            f"MTP in another way than 0.16, so switch MTP off (mtp_num_layers) or pin megatron-core 0.16."
        )
