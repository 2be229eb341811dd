"""`--mismatch-fused-head`: the model gives hidden states, and the loss makes log-probs of them and the head's weight.

megatron's GPTModel ends in `output_layer`, a ColumnParallelLinear without bias. Within `hidden_states` that layer hands
on what it gets, so that logits [T, V/tp] never exist, and notes the weight, which is the embedding's where the two are
tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

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
    for reason, there in reasons.items():
        if there:
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
