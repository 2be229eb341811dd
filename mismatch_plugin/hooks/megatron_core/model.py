"""What of megatron's model the hook changes while it runs: the losses that it adds itself, and its head.

Those losses are MoE load balancing, router z-loss and multi-token prediction (MTP).
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


# --mismatch-fused-head: hidden states in the place of logits ----------------------------------------------------------

FLAG = "--mismatch-fused-head"
_SOFT_CAPS = ("final_logit_softcapping", "logit_softcapping", "logits_soft_cap", "output_multiplier", "logits_scaling",
              "use_mup")  # fmt: skip
"""Names under which configurations scale or cap the logits after the head."""


def validate_fused_head(model_config: Any, mtp_layers: int, backend: str) -> None:
    """Raises ValueError where the head's logits are read or changed by something else than the loss."""
    reasons = {
        f"--mismatch-log-prob-backend {backend} reads whole logits": backend in ("megatron", "transformer-engine"),
        "MTP gives the head other hidden states, too": mtp_layers,
        "defer_embedding_wgrad_compute keeps the head's inputs for itself": getattr(
            model_config, "defer_embedding_wgrad_compute", False
        ),
        **{f"{name} changes the logits after the head": getattr(model_config, name, None) for name in _SOFT_CAPS},
    }
    if reason := next((reason for reason, there in reasons.items() if there), ""):
        raise ValueError(f"{FLAG} cannot be exact here ({reason}): leave it out.")


@contextmanager
def hidden_states(model: Any, noted: list[Tensor]) -> Iterator[None]:
    """Within it the model returns hidden states [b, s, H] (this rank's s / tp under sequence parallelism) for logits.

    The head's weight is put into `noted`. Off the last pipeline stage nothing changes.
    Raises ValueError for a head that is no plain ColumnParallelLinear.
    """
    while hasattr(model, "module"):
        model = model.module
    if not getattr(model, "post_process", True):
        yield
        return
    from megatron.core.tensor_parallel import ColumnParallelLinear

    head = getattr(model, "output_layer", None)
    if type(head) is not ColumnParallelLinear or getattr(head, "bias", None) is not None:
        what = "has a bias" if getattr(head, "bias", None) is not None else f"is a {type(head).__name__}"
        raise ValueError(f"{FLAG} needs a ColumnParallelLinear as the model's output_layer, and this one {what}: "
                         f"leave it out.")  # fmt: skip

    def hand_on(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        used = head.weight if weight is None else weight
        assert used is not None  # an untied head has its own
        noted.append(used)
        return hidden, None

    head.forward = hand_on  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del head.forward
