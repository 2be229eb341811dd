"""What the log-probs from logits and from hidden states share: result, sampling mask, and the checks of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config.settings import LogProbBackend as Backend

Entropy = Literal["none", "detached", "grad"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
class Call:
    """What a call says next to its logits or hidden states. None of it gets a gradient."""

    targets_R: Tensor
    columns: int
    """W: the leading columns of this shard that are inside the vocabulary; the rest is padding."""
    vocab_start: int = 0
    """Global id of this shard's first column."""
    rows_R: Tensor | None = None
    temperature: float | Tensor = 1.0
    sampling_mask: Tensor | RaggedSamplingMask | None = None
    tp_group: dist.ProcessGroup | None = None
    entropy: str = "none"
    inplace_gradient: bool = False
    block_rows: int = 1

    def part(self, chunk: slice) -> Call:
        """That of some of the targets, whose logits follow each other."""
        mask, temperature = self.sampling_mask, self.temperature
        if isinstance(mask, RaggedSamplingMask):
            offsets = mask.offsets[chunk.start : chunk.stop + 1]
            ends = offsets.tolist()
            mask = RaggedSamplingMask(mask.token_ids[ends[0] : ends[-1]], offsets - ends[0])
        elif mask is not None:
            mask = mask[chunk]
        if isinstance(temperature, Tensor):
            temperature = temperature[chunk]
        return replace(self, targets_R=self.targets_R[chunk], rows_R=None, temperature=temperature, sampling_mask=mask)

    def gather(self, statistics_4R: Tensor) -> Tensor:
        """[P, 4, R]: every rank's statistics, by the one all-gather of four floats a target; none without a group."""
        if self.tp_group is None or self.tp_group.size() == 1:
            return statistics_4R[None]
        gathered = statistics_4R.new_empty((self.tp_group.size() * 4, statistics_4R.shape[1]))
        dist.all_gather_into_tensor(gathered, statistics_4R, group=self.tp_group)
        return gathered.unflatten(0, (-1, 4))

    def save(self, ctx: Any, entropy_R: Tensor | None, *tensors: Tensor) -> None:
        """Keep what a backward needs. Its `saved_tensors` begin with `tensors` and the entropy, if that has a gradient.

        The call's own tensors are saved too, so that a backward after one was changed in place raises.
        """
        mask = self.sampling_mask
        own = (self.targets_R, self.rows_R, self.temperature, getattr(mask, "token_ids", mask))
        kept_entropy_R = entropy_R if self.entropy == "grad" else None
        ctx.save_for_backward(*tensors, kept_entropy_R, *(x for x in own if isinstance(x, Tensor)))
        ctx.call = self
        ctx.set_materialize_grads(False)
        if entropy_R is not None and self.entropy == "detached":
            ctx.mark_non_differentiable(entropy_R)


def checked_backend(backend: str) -> Backend:
    """One of `Backend`, of which `transformer_engine` is an older spelling. Raises ValueError for any other."""
    name = str(backend).replace("_", "-")
    _check_choice("backend", name, get_args(Backend))
    return cast(Backend, name)


def checked_call(
    inputs: Tensor,
    targets: Tensor,
    *,
    name: str,
    tokens: int,
    width: int,
    rows: Tensor | None,
    temperature: float | Tensor,
    sampling_mask: Tensor | RaggedSamplingMask | None,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    vocab_start: int | None,
    entropy: str,
    inplace_gradient: bool,
    block_rows: int,
) -> Call:
    """The arguments of `vocab_parallel_log_probs`, or with the name "hidden" of `vocab_parallel_linear_log_probs`.

    tokens: T, over all ranks. width: V, of this shard. Raises ValueError or TypeError for what does not fit.
    """
    _check_choice("entropy", entropy, get_args(Entropy))
    last = "H" if name == "hidden" else "V"
    if inputs.ndim != 2:
        raise ValueError(f"{name} has shape {list(inputs.shape)}, [T, {last}] is needed: flatten batch and sequence.")
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
    _check_temperature(temperature, targets)
    ids = sampling_mask.token_ids if isinstance(sampling_mask, RaggedSamplingMask) else sampling_mask
    for other, value in {"targets": targets, "rows": rows, "temperature": temperature, "sampling_mask": ids}.items():
        if isinstance(value, Tensor) and value.device != inputs.device:
            raise ValueError(f"{other} is on {value.device}, {name} on {inputs.device}: move it there.")
    check_rows(rows, tokens, distinct=name == "logits")  # gradients of hidden states are added
    start, columns = _shard(width, vocab_size, vocab_start, tp_group)
    if isinstance(sampling_mask, RaggedSamplingMask):
        _check_ragged(sampling_mask, len(targets))
    elif sampling_mask is not None:
        shape = [len(targets), width]
        if sampling_mask.dtype != torch.bool or list(sampling_mask.shape) != shape:
            raise ValueError(
                f"sampling_mask is {sampling_mask.dtype} {list(sampling_mask.shape)}: bool {shape} is needed, or "
                "ragged ids."
            )
    return Call(
        targets.contiguous(), columns, start, None if rows is None else rows.contiguous(), temperature, sampling_mask,
        tp_group, entropy, inplace_gradient, block_rows,
    )  # fmt: skip


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")


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
    must = "must lie in [0, T), each at most once" if distinct else "must lie in [0, T)"
    if rows.device.type != "cpu":
        torch._assert_async(right, f"rows {must}")  # pyright: ignore[reportPrivateImportUsage]
    elif not right.reshape(1).tolist()[0]:
        what, wrong_R = ("there twice", ~once_R) if inside_R.all() else ("outside", ~inside_R)
        i = int(wrong_R.nonzero()[0])
        raise ValueError(f"rows[{i}]={int(rows[i])} is {what}: rows {must} (T={tokens}).")


def _check_temperature(temperature: Any, targets: Tensor) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != targets.shape or not temperature.is_floating_point():
            raise ValueError(
                f"temperature is {temperature.dtype} {list(temperature.shape)}: pass a float, or one float for each of "
                f"the {targets.shape[0]} targets."
            )
    elif not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature is a {type(temperature).__name__}: pass a float, or one float for each target.")
    elif not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite: pass 1.0 for greedy sampling.")


def _shard(
    width: int, vocab_size: int | None, vocab_start: int | None, tp_group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """(global id of the first column, number of columns inside the vocabulary)."""
    tp_rank, tp_size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
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


def _check_ragged(mask: RaggedSamplingMask, targets: int) -> None:
    """Reads host memory only."""
    ids, offsets = mask.token_ids, mask.offsets
    if ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 1:
        raise ValueError(f"sampling_mask.token_ids is {ids.dtype} {list(ids.shape)}: flat int64 or int32 is needed.")
    if offsets.device.type != "cpu" or offsets.dtype != torch.int64:
        raise ValueError(
            f"sampling_mask.offsets is {offsets.dtype} on {offsets.device}: keep it int64 on the CPU, where reading it "
            "is no host sync."
        )
    if offsets.shape != (targets + 1,):
        raise ValueError(
            f"sampling_mask.offsets has shape {list(offsets.shape)}: [{targets + 1}] is needed, one more than "
            "there are targets."
        )
    first, last = offsets[:1].tolist()[0], offsets[-1:].tolist()[0]
    if first != 0 or last != len(ids):
        raise ValueError(
            f"sampling_mask.offsets runs from {first} to {last}: it must run from 0 to the {len(ids)} token_ids there "
            "are."
        )
    if targets and offsets.diff().amin().reshape(1).tolist()[0] < 0:
        i = int(offsets.diff().argmin())
        before, after = offsets[i : i + 2].tolist()
        raise ValueError(f"sampling_mask.offsets falls from {before} to {after} at target {i}: it must ascend.")
