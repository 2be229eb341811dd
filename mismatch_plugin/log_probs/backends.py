"""Which arithmetic a backend's name means: ours in torch or Triton, or the cross entropy of another library.

Those of megatron-core and transformer-engine are not imported before they are asked for. Both know nothing of
temperature, picked rows and our ignored targets, so they get a copy of the logits with all that in it (megatron-core
overwrites float32 logits, too). What they cannot do at all is refused in `logits`. Their results are float32;
memory: a copy of the logits, and what the library keeps.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from mismatch_plugin.log_probs import torch_arithmetic
from mismatch_plugin.log_probs.arguments import Call

_TE_IGNORE = -100


def megatron_log_probs(logits_TV: Tensor, call: Call) -> Tensor:
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
    if call.tp_group is not state_group and (call.tp_group is not None or state_group.size() > 1):
        raise ValueError(
            "backend='megatron' reduces over the group of megatron's parallel_state, and tp_group is another: pass "
            "that one, or use backend='torch'."
        )
    ignored_R = call.targets_R < 0
    copy_RV = _prepared_copy(logits_TV, call)
    targets = torch.where(ignored_R, 0, call.targets_R)
    loss_R = vocab_parallel_cross_entropy(copy_RV[:, None], targets[:, None])[:, 0]
    return torch.where(ignored_R, 0.0, -loss_R)


def transformer_engine_log_probs(logits_TV: Tensor, call: Call) -> Tensor:
    """[R] by transformer-engine's Triton `parallel_cross_entropy` (CUDA, one all-gather).

    Releases that cannot overwrite their input (2.18 and older) get it in float32: up to 2.16 they round p to the
    logits' dtype before they subtract 1, which leaves a confident token in bfloat16 no gradient. Those before 2.8 fail.
    """
    try:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy  # pyright: ignore
    except Exception as error:  # without its CUDA part the package raises RuntimeError, OSError and others at import
        raise RuntimeError(
            f"backend='transformer-engine' cannot be imported ({error}): install its CUDA part or use backend='torch'."
        ) from error
    if logits_TV.dtype == torch.float16:
        raise ValueError("backend='transformer-engine' cannot do torch.float16 logits: use backend='torch'.")
    ignored_R = call.targets_R < 0
    copy_RV = _prepared_copy(logits_TV, call)
    targets = torch.where(ignored_R, _TE_IGNORE, call.targets_R)
    # By position: the names differ between releases. Label smoothing 0, no reduction of the loss.
    newer = "overwrite_input" in inspect.signature(parallel_cross_entropy).parameters
    x_R1V = (copy_RV if newer else copy_RV.float())[:, None]
    options = {"overwrite_input": True} if newer else {}  # or it makes another copy
    loss_R = parallel_cross_entropy(x_R1V, targets[:, None], 0.0, False, call.tp_group, _TE_IGNORE, **options)
    return torch.where(ignored_R, 0.0, -loss_R.reshape(-1).float())


def _prepared_copy(logits_TV: Tensor, call: Call) -> Tensor:
    """[R, V]: picked, divided by the temperature (in float32), 0 at ignored targets: no NaN spreads from there."""
    x_RV = logits_TV if call.rows_R is None else logits_TV.index_select(0, call.rows_R)
    if call.temperature != 1.0:
        x_RV = x_RV.float() / call.temperature
    return x_RV.masked_fill((call.targets_R < 0)[:, None], 0.0)


def choose_arithmetic(inputs: Tensor, backend: str) -> Any:
    """The module `torch_arithmetic` or its twin `triton_arithmetic`: the same functions in both.

    inputs: the logits, or the hidden states that they are made of. Raises ValueError or RuntimeError if the backend
    asked for cannot be had.
    """
    if backend == "torch" or (backend == "auto" and (not inputs.is_cuda or inputs.dtype == torch.float64)):
        return torch_arithmetic
    if inputs.dtype == torch.float64:
        raise ValueError("backend='triton' cannot do torch.float64 logits: use backend='torch'.")
    try:
        triton_arithmetic = import_module("mismatch_plugin.log_probs.triton_arithmetic")
    except ImportError as error:
        if backend == "auto":
            return torch_arithmetic
        raise RuntimeError(f"backend='triton' needs Triton ({error}): install it or use backend='torch'.") from error
    if not inputs.is_cuda and not triton_arithmetic.INTERPRETED:
        raise RuntimeError(
            f"backend='triton' needs logits on CUDA, not on {inputs.device}: use backend='torch', or set "
            "TRITON_INTERPRET=1 before the start for Triton's slow interpreter."
        )
    return triton_arithmetic
