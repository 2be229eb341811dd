"""Log-probs and entropy of the trained tokens, from logits sharded over the vocabulary: one function, its backends.

The torch reference is in `log_prob_torch`, its Triton twin for CUDA in `log_prob_triton`, the adapters to other
libraries in `log_prob_backends`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config.settings import LogProbBackend as Backend
from mismatch_plugin.parallel.log_prob_backends import megatron_log_probs, transformer_engine_log_probs
from mismatch_plugin.parallel.log_prob_torch import (
    Layout,
    RaggedSamplingMask,
    VocabParallelLogProbs,
    default_block_rows,
)

Entropy = Literal["none", "detached", "grad"]
BORROWED = {"megatron": megatron_log_probs, "transformer-engine": transformer_engine_log_probs}
"""Backends that are another library's cross entropy: log-probs alone, out of place, over even and unpadded shards."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LogProbs(NamedTuple):
    """Each [R], float32 (float64 for float64 logits), the same on every rank of the tensor-parallel group."""

    log_probs: Tensor
    entropy: Tensor | None


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    sampling_mask: Tensor | RaggedSamplingMask | None = None,
    rows: Tensor | None = None,
    inplace_gradient: bool = False,
    block_rows: int | None = None,
    backend: Backend = "auto",
) -> LogProbs:
    """log p(target) and the entropy of p = softmax(logits / temperature) over the vocabulary [0, vocab_size).

        log_probs_i = x_y − ln Σ_j e^{x_j}      entropy_i = − Σ_j p_j ln p_j
        with x = logits[rows_i] / temperature_i and y = targets_i

    With a sampling mask both sums run over the kept ids only: the distribution the token was really drawn from.

    Args:
        logits: [T, V] this rank's columns; bf16, fp16, fp32 or fp64, any strides. Never changed without
            `inplace_gradient`.
        targets: [R] int64 or int32, global ids on the device of the logits. Negative (such as −100) means ignored:
            result 0, gradient exactly 0, and NaN logits there do no harm; but they are computed. An id that is not in
            the vocabulary has log-prob −inf.
        tp_group: the tensor-parallel group over which the vocabulary is sharded, in rank order. None: not sharded.
        temperature: what the sampler divided the logits by; a float, or one per target: [R]. It gets no gradient.
        entropy: "none"; "detached", as a metric; "grad", as a loss term. It takes no second pass over the logits.
        vocab_size: the real vocabulary. Columns beyond it are excluded and get gradient 0: Megatron pads, the rollout
            engine does not, and padding in the sum is a mismatch. None: every column counts.
        vocab_start: global id of the first column. None: shards are even, rank · V. Needed where they are not.
        sampling_mask: kept ids per target as `RaggedSamplingMask`, or bool [R, V] of this rank's columns. The gradient
            outside is 0. The target always counts as kept. A target with no ragged ids is unfiltered; a boolean row of
            False keeps the target only.
        rows: [R] int64 on the device of the logits: targets[i] is predicted by logits[rows[i]]. Made on the host with
            the batch (from the loss mask), it makes prompt and tool rows free: they are not read, and their gradient is
            exactly 0. Each row at most once. None: R = T, row i predicts target i.
        inplace_gradient: the backward writes the gradient into the storage of the logits. That saves its memory, but
            nobody may read the logits afterwards, and a second backward raises.
        block_rows: rows per block of backend "torch"; None: about 4 MiB of float32 on CPU, 64 MiB elsewhere. With the
            gradient and a few floats a target, two blocks are all the memory taken (one more with rows, one more with a
            mask). Backend "triton" has no blocks and takes no such memory.
        backend: "auto" is "triton" where Triton can be imported and the logits are on CUDA and not float64, else
            "torch". "megatron" (megatron-core's `vocab_parallel_cross_entropy`) and "transformer-engine" (its
            `parallel_cross_entropy`) give log-probs only. Each refuses what it cannot do. `--mismatch-log-prob-backend`
            has the same names.

    Sums, results and everything per row are float32 (float64 for float64 logits); the gradient has the logits' dtype.
    Collectives: one all-gather of 4 floats a target in the forward, none in the backward. Host syncs: none.
    Raises: ValueError if an argument does not fit (contents on a device are not looked at); RuntimeError if a backend
        is missing.
    Source: the online softmax of Milakov & Gimelshein 2018 (https://arxiv.org/abs/1805.02867), sharded as in
        Megatron-LM.
    """
    tp_rank, tp_size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    _check_choice("entropy", entropy, get_args(Entropy))
    backend = checked_backend(backend)
    _check_tensors(logits, targets, rows)
    temperature = _checked_temperature(temperature, targets)
    ids = sampling_mask.token_ids if isinstance(sampling_mask, RaggedSamplingMask) else sampling_mask
    for name, tensor in {"targets": targets, "rows": rows, "temperature": temperature, "sampling_mask": ids}.items():
        if isinstance(tensor, Tensor) and tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}: move it there.")
    start, columns = _shard(logits.shape[1], vocab_size, vocab_start, tp_rank, tp_size)
    _check_sampling_mask(sampling_mask, logits, targets)
    if inplace_gradient and any(n > 1 and step == 0 for n, step in zip(logits.shape, logits.stride(), strict=True)):
        raise ValueError("logits is expanded: rows share their storage, which inplace_gradient=True would overwrite.")
    if block_rows is not None and block_rows < 1:
        raise ValueError(f"block_rows={block_rows} must be at least 1: leave it out for the default.")

    if backend in BORROWED:
        refused = {
            f"entropy={entropy!r}": entropy != "none",
            "a sampling_mask": sampling_mask is not None,
            "inplace_gradient=True": inplace_gradient,
            f"padding (vocab_size={vocab_size})": vocab_size not in (None, logits.shape[1] * tp_size),
            f"uneven shards (vocab_start={vocab_start})": start != tp_rank * logits.shape[1],
            f"{logits.dtype} logits": logits.dtype == torch.float64,
        }
        for what, asked in refused.items():
            if asked:
                raise ValueError(f"backend={backend!r} cannot do {what}: use backend='torch'.")
        return LogProbs(BORROWED[backend](logits, targets, rows, temperature, tp_group), None)

    function = choose_function(logits, backend)
    layout = Layout(
        tp_group=tp_group,
        vocab_start=start,
        columns=columns,
        entropy=entropy,
        inplace_gradient=inplace_gradient,
        block_rows=block_rows or default_block_rows(logits),
    )
    return LogProbs(*function.apply(logits, targets, rows, temperature, sampling_mask, layout))


def checked_backend(backend: str) -> Backend:
    """One of `Backend`, of which `transformer_engine` is an older spelling. Raises ValueError for any other."""
    name = str(backend).replace("_", "-")
    _check_choice("backend", name, get_args(Backend))
    return cast(Backend, name)


def choose_function(logits: Tensor, backend: str) -> type[torch.autograd.Function]:
    """The torch Function or its Triton twin; ValueError or RuntimeError if the backend asked for cannot be had."""
    if backend == "torch" or (backend == "auto" and (not logits.is_cuda or logits.dtype == torch.float64)):
        return VocabParallelLogProbs
    if logits.dtype == torch.float64:
        raise ValueError("backend='triton' cannot do torch.float64 logits: use backend='torch'.")
    try:
        from mismatch_plugin.parallel.log_prob_triton import INTERPRETED, TritonLogProbs
    except ImportError as error:
        if backend == "auto":
            return VocabParallelLogProbs
        raise RuntimeError(f"backend='triton' needs Triton ({error}): install it or use backend='torch'.") from error
    if not logits.is_cuda and not INTERPRETED:
        raise RuntimeError(
            f"backend='triton' needs logits on CUDA, not on {logits.device}: use backend='torch', or set "
            "TRITON_INTERPRET=1 before the start for Triton's slow interpreter."
        )
    return TritonLogProbs


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")


def _check_tensors(logits: Tensor, targets: Tensor, rows: Tensor | None) -> None:
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}, [T, V] is needed: flatten batch and sequence.")
    if logits.dtype not in _DTYPES:
        raise ValueError(f"logits is {logits.dtype}: hand in bfloat16, float16, float32 or float64.")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets is {targets.dtype}: hand in int64 or int32 token ids.")
    if targets.ndim != 1:
        raise ValueError(f"targets has shape {list(targets.shape)}, one dimension is needed: flatten it as the logits.")
    if rows is None and len(targets) != len(logits):
        raise ValueError(
            f"targets has {len(targets)} ids for {len(logits)} rows of logits: give one for each, or pass rows."
        )
    if rows is not None and (rows.dtype != torch.int64 or rows.shape != targets.shape):
        raise ValueError(
            f"rows is {rows.dtype} {list(rows.shape)}: one int64 index for each of the {len(targets)} targets is "
            "needed."
        )


def _checked_temperature(temperature: float | Tensor, targets: Tensor) -> float | Tensor:
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


def _shard(width: int, vocab_size: int | None, vocab_start: int | None, tp_rank: int, tp_size: int) -> tuple[int, int]:
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


def _check_sampling_mask(mask: Tensor | RaggedSamplingMask | None, logits: Tensor, targets: Tensor) -> None:
    if mask is None:
        return
    if isinstance(mask, Tensor):
        shape = [len(targets), logits.shape[1]]
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
