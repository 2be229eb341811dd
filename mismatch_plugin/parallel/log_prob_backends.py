"""The cross entropies of megatron-core and transformer-engine behind the arguments of `vocab_parallel_log_probs`.

Neither is imported before it is asked for. Both know nothing of temperature, picked rows and our ignored targets, so
they get a copy of the logits with all that in it (megatron-core overwrites float32 logits, too). What they cannot do
at all is refused in `log_probs`. Results are float32; memory: a copy of the logits, and what the library keeps.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

_TE_IGNORE = -100


def megatron_log_probs(
    logits_TV: Tensor,
    targets_R: Tensor,
    rows_R: Tensor | None,
    temperature: float | Tensor,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """[R] by megatron-core's unfused `vocab_parallel_cross_entropy`: three all-reduces over its own TP group."""
    try:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    except ImportError as error:
        raise RuntimeError(
            f"backend='megatron' needs megatron-core ({error}): install it or use backend='torch'."
        ) from error
    # Typed `int | None` there.
    state_group = cast(Any, parallel_state.get_tensor_model_parallel_group(check_initialized=False))
    if state_group is None:
        raise ValueError(
            "backend='megatron' needs parallel_state: call initialize_model_parallel, or use backend='torch'."
        )
    if tp_group is not state_group and (tp_group is not None or state_group.size() > 1):
        raise ValueError(
            "backend='megatron' reduces over the group of megatron's parallel_state, and tp_group is another: pass "
            "that one, or use backend='torch'."
        )
    ignored_R = targets_R < 0
    copy_RV = _prepared_copy(logits_TV, ignored_R, rows_R, temperature)
    targets = torch.where(ignored_R, 0, targets_R).to(torch.int64)
    loss_R = vocab_parallel_cross_entropy(copy_RV[:, None], targets[:, None])[:, 0]
    return torch.where(ignored_R, 0.0, -loss_R)


def transformer_engine_log_probs(
    logits_TV: Tensor,
    targets_R: Tensor,
    rows_R: Tensor | None,
    temperature: float | Tensor,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """[R] by transformer-engine's Triton `parallel_cross_entropy` (CUDA, one all-gather).

    Its releases before #2139, #2402 and #3193 were fixed give a wrong gradient for some per-token upstream gradients.
    """
    try:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy  # pyright: ignore
    except Exception as error:  # without its CUDA part the package raises RuntimeError, OSError and others at import
        raise RuntimeError(
            f"backend='transformer-engine' cannot be imported ({error}): install its CUDA part or use backend='torch'."
        ) from error
    if logits_TV.dtype == torch.float16:
        raise ValueError("backend='transformer-engine' cannot do torch.float16 logits: use backend='torch'.")
    ignored_R = targets_R < 0
    copy_RV = _prepared_copy(logits_TV, ignored_R, rows_R, temperature)
    targets = torch.where(ignored_R, _TE_IGNORE, targets_R).to(torch.int64)
    # By position: the names differ between releases. Label smoothing 0, no reduction of the loss.
    loss_R = parallel_cross_entropy(copy_RV[:, None], targets[:, None], 0.0, False, tp_group, _TE_IGNORE)
    return torch.where(ignored_R, 0.0, -loss_R.reshape(-1).float())


def _prepared_copy(logits_TV: Tensor, ignored_R: Tensor, rows_R: Tensor | None, temperature: float | Tensor) -> Tensor:
    """[R, V]: picked, divided by the temperature (in float32), 0 at ignored targets: no NaN spreads from there."""
    x_RV = logits_TV if rows_R is None else logits_TV.index_select(0, rows_R)
    if isinstance(temperature, Tensor):
        x_RV = x_RV.float() / temperature.float()[:, None]
    elif temperature != 1.0:
        x_RV = x_RV.float() / temperature
    return x_RV.masked_fill(ignored_R[:, None], 0.0)
