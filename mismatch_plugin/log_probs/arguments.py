"""What the doors of the log-probs share: names, result, and the checks of their arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config.settings import LogProbBackend as Backend

Entropy = Literal["none", "detached", "grad"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_ROWS = "must lie in [0, T), each at most once"

OVERWRITTEN = (
    "inplace_gradient=True has overwritten the logits with their gradient in the first backward: a second backward "
    "through the same log-probs needs inplace_gradient=False."
)


class LogProbs(NamedTuple):
    """Each [R], float32 (float64 for float64 logits), the same on every rank of the tensor-parallel group."""

    log_probs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, eq=False)
class RaggedSamplingMask:
    """The token ids that the sampler's filters (top-p, top-k, min-p) left to choose from, for each target.

    token_ids: [K] int64 or int32, global ids, on the device of the logits; target i's are [offsets[i], offsets[i + 1]).
    offsets: [R + 1] int64 on the *CPU* (pin it to copy it asynchronously): the host slices by it, so reading it from a
        device would be a host sync. A target without ids was sampled unfiltered.
    """

    token_ids: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """What a call fixes next to its tensors."""

    tp_group: dist.ProcessGroup | None
    vocab_start: int
    """Global id of this shard's first column."""
    columns: int
    """W: the leading columns of this shard that are inside the vocabulary; the rest is padding."""
    entropy: str
    inplace_gradient: bool
    block_rows: int


def checked_backend(backend: str) -> Backend:
    """One of `Backend`, of which `transformer_engine` is an older spelling. Raises ValueError for any other."""
    name = str(backend).replace("_", "-")
    check_choice("backend", name, get_args(Backend))
    return cast(Backend, name)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")


def check_tensors(
    inputs: Tensor, targets: Tensor, rows: Tensor | None, tokens: int, name: str = "logits", width: str = "V"
) -> None:
    """Raises ValueError for what does not fit. inputs: [T, `width`], called `name` by the caller; tokens: T in all."""
    if inputs.ndim != 2:
        raise ValueError(f"{name} has shape {list(inputs.shape)}, [T, {width}] is needed: flatten batch and sequence.")
    if inputs.dtype not in _DTYPES:
        raise ValueError(f"{name} is {inputs.dtype}: hand in bfloat16, float16, float32 or float64.")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets is {targets.dtype}: hand in int64 or int32 token ids.")
    if targets.ndim != 1:
        raise ValueError(f"targets has shape {list(targets.shape)}, one dimension is needed: flatten it as {name}.")
    if rows is None and len(targets) != tokens:
        raise ValueError(
            f"targets has {len(targets)} ids for {tokens} rows of {name}: give one for each, or pass rows."
        )
    if rows is not None and (rows.dtype != torch.int64 or rows.shape != targets.shape):
        raise ValueError(
            f"rows is {rows.dtype} {list(rows.shape)}: one int64 index for each of the {len(targets)} targets is "
            "needed."
        )


def check_rows(rows: Tensor | None, tokens: int, distinct: bool = True) -> None:
    """Raises ValueError for a row outside [0, tokens), or if `distinct` one that is there twice: where gradients are
    written, not added, it would be wrong.

    Rows on a device are asserted there, as reading them would be a host sync: CUDA prints the message and ends.
    """
    if rows is None or len(rows) == 0:
        return
    position_R = torch.arange(len(rows), device=rows.device)
    inside_R = (rows >= 0) & (rows < tokens)
    last_T = torch.full((max(1, tokens),), -1, device=rows.device)
    safe_R = rows.clamp(0, len(last_T) - 1)
    once_R = last_T.index_copy_(0, safe_R, position_R).index_select(0, safe_R) == position_R
    once_R |= not distinct
    right = (inside_R & once_R).all()
    must = _ROWS if distinct else "must lie in [0, T)"
    if rows.device.type != "cpu":
        torch._assert_async(right, f"rows {must}")  # pyright: ignore[reportPrivateImportUsage]
    elif not right.reshape(1).tolist()[0]:
        what, wrong_R = ("there twice", ~once_R) if inside_R.all() else ("outside", ~inside_R)
        i = int(wrong_R.nonzero()[0])
        raise ValueError(f"rows[{i}]={int(rows[i])} is {what}: rows {must} (T={tokens}).")


def checked_temperature(temperature: float | Tensor, targets: Tensor) -> float | Tensor:
    """A float, or one float for each target. Raises ValueError or TypeError for anything else."""
    if not isinstance(temperature, Tensor):
        if not isinstance(temperature, (int, float)):
            raise TypeError(
                f"temperature is a {type(temperature).__name__}: pass a float, or one float for each target."
            )
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be positive and finite: pass 1.0 for greedy sampling.")
        return float(temperature)
    if temperature.shape != targets.shape or not temperature.is_floating_point():
        raise ValueError(
            f"temperature is {temperature.dtype} {list(temperature.shape)}: pass a float, or one float for each of the "
            f"{targets.shape[0]} targets."
        )
    return temperature


def shard(width: int, vocab_size: int | None, vocab_start: int | None, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """(global id of the first column, number of columns inside the vocabulary)."""
    start = tp_rank * width if vocab_start is None else vocab_start
    if start < 0:
        raise ValueError(f"vocab_start={start} is negative: pass the global id of this rank's first column.")
    if tp_size == 1 and start > 0:
        raise ValueError(f"vocab_start={start} means a shard, and there is no group to reduce over: pass tp_group.")
    if vocab_size is None:
        return start, width
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} must be at least 1: pass the size of the tokenizer's vocabulary.")
    if vocab_start is None and vocab_size > width * tp_size:
        raise ValueError(
            f"vocab_size={vocab_size} is more than the {width * tp_size} columns there are: pass the unpadded size, or "
            "vocab_start if the shards are uneven."
        )
    return start, min(max(vocab_size - start, 0), width)


def check_devices(inputs: Tensor, name: str, **tensors: Tensor | RaggedSamplingMask | float | None) -> None:
    """Raises ValueError for a tensor that is not where `inputs`, called `name` by the caller, is."""
    for other, value in tensors.items():
        tensor = value.token_ids if isinstance(value, RaggedSamplingMask) else value
        if isinstance(tensor, Tensor) and tensor.device != inputs.device:
            raise ValueError(f"{other} is on {tensor.device}, {name} on {inputs.device}: move it there.")


def check_sampling_mask(mask: Tensor | RaggedSamplingMask | None, width: int, targets: Tensor) -> None:
    """Raises ValueError for a mask that does not fit `width` columns and the targets. Reads host memory only."""
    if mask is None:
        return
    if isinstance(mask, Tensor):
        shape = [len(targets), width]
        if mask.dtype != torch.bool or list(mask.shape) != shape:
            raise ValueError(
                f"sampling_mask is {mask.dtype} {list(mask.shape)}: bool {shape} is needed, or ragged ids."
            )
        return
    ids, offsets = mask.token_ids, mask.offsets
    if ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 1:
        raise ValueError(f"sampling_mask.token_ids is {ids.dtype} {list(ids.shape)}: flat int64 or int32 is needed.")
    if offsets.device.type != "cpu" or offsets.dtype != torch.int64:
        raise ValueError(
            f"sampling_mask.offsets is {offsets.dtype} on {offsets.device}: keep it int64 on the CPU, where reading it "
            "is no host sync."
        )
    if offsets.shape != (len(targets) + 1,):
        raise ValueError(
            f"sampling_mask.offsets has shape {list(offsets.shape)}: [{len(targets) + 1}] is needed, one more than "
            "there are targets."
        )
    first, last = offsets[:1].tolist()[0], offsets[-1:].tolist()[0]
    if first != 0 or last != len(ids):
        raise ValueError(
            f"sampling_mask.offsets runs from {first} to {last}: it must run from 0 to the {len(ids)} token_ids there "
            "are."
        )
    if len(targets) and offsets.diff().amin().reshape(1).tolist()[0] < 0:
        i = int(offsets.diff().argmin())
        before, after = offsets[i : i + 2].tolist()
        raise ValueError(f"sampling_mask.offsets falls from {before} to {after} at target {i}: it must ascend.")


def gather_statistics(statistics_4R: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """[P, 4, R]: every rank's statistics, by the one all-gather of four floats a target; none without a group."""
    if tp_group is None or tp_group.size() == 1:
        return statistics_4R[None]
    gathered = statistics_4R.new_empty((tp_group.size() * 4, statistics_4R.shape[1]))
    dist.all_gather_into_tensor(gathered, statistics_4R, group=tp_group)
    return gathered.unflatten(0, (-1, 4))


def keep_arguments(
    ctx: Any, temperature: float | Tensor, sampling_mask: Tensor | RaggedSamplingMask | None
) -> tuple[Tensor | None, Tensor | None]:
    """(temperature, sampling mask) as tensors to save for the backward; what of them is none goes on ctx."""
    ragged = isinstance(sampling_mask, RaggedSamplingMask)
    ctx.offsets = sampling_mask.offsets if ragged else None
    ctx.temperature = None if isinstance(temperature, Tensor) else temperature
    return (
        temperature if isinstance(temperature, Tensor) else None,
        sampling_mask.token_ids if ragged else sampling_mask,
    )


def kept_arguments(
    ctx: Any, temperature_R: Tensor | None, mask: Tensor | None
) -> tuple[float | Tensor, Tensor | RaggedSamplingMask | None]:
    """What `keep_arguments` was given, out of ctx and the saved tensors."""
    temperature = ctx.temperature if temperature_R is None else temperature_R
    return temperature, mask if mask is None or ctx.offsets is None else RaggedSamplingMask(mask, ctx.offsets)


def declare_outputs(ctx: Any, entropy_R: Tensor | None, layout: Layout) -> None:
    """To autograd: gradients that are not asked for stay None, and a detached entropy has none."""
    ctx.set_materialize_grads(False)
    if entropy_R is not None and layout.entropy == "detached":
        ctx.mark_non_differentiable(entropy_R)
