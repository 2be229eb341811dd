"""What the log-probs from logits and from hidden states share: result, sampling mask, and the checks of a call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config.settings import LogProbBackend as Backend

Entropy = Literal["none", "detached", "grad"]


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

    def on_shard(self, call: Call, elsewhere: int) -> tuple[Tensor, Tensor, Tensor]:
        """(offsets [R + 1], target [K] and column [K] of each id), on the device; the column is `elsewhere` where
        another shard has it."""
        offsets_R1 = self.offsets.to(self.token_ids.device, non_blocking=True)
        target_R = torch.arange(len(self.offsets) - 1, device=self.token_ids.device)
        target_K = torch.repeat_interleave(target_R, offsets_R1.diff(), output_size=len(self.token_ids))
        column_K = self.token_ids.to(torch.int64) - call.vocab_start
        return offsets_R1, target_K, torch.where((column_K >= 0) & (column_K < call.columns), column_K, elsewhere)


@dataclass(frozen=True, eq=False)
class Call:
    """What a call says next to its logits or hidden states. None of it gets a gradient."""

    targets_R: Tensor
    """int64, contiguous."""
    columns: int
    """W: the leading columns of this shard that are inside the vocabulary; the rest is padding."""
    vocab_start: int = 0
    """Global id of this shard's first column."""
    rows_R: Tensor | None = None
    temperature: float = 1.0
    sampling_mask: RaggedSamplingMask | None = None
    tp_group: dist.ProcessGroup | None = None
    entropy: str = "none"
    inplace_gradient: bool = False
    block_rows: int = 1

    @property
    def unit(self) -> float:
        """What a logit is multiplied with to be an exponent of 2."""
        return math.log2(math.e) / self.temperature

    def part(self, chunk: slice) -> Call:
        """That of some of the targets, whose logits follow each other."""
        mask = self.sampling_mask
        if mask is not None:
            offsets = mask.offsets[chunk.start : chunk.stop + 1]
            ends = offsets.tolist()
            mask = RaggedSamplingMask(mask.token_ids[ends[0] : ends[-1]], offsets - ends[0])
        return replace(self, targets_R=self.targets_R[chunk], rows_R=None, sampling_mask=mask)

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
        ids = None if self.sampling_mask is None else self.sampling_mask.token_ids
        kept_entropy_R = entropy_R if self.entropy == "grad" else None
        ctx.save_for_backward(*tensors, kept_entropy_R, self.targets_R, self.rows_R, ids)
        ctx.call = self
        ctx.set_materialize_grads(False)
        if entropy_R is not None and self.entropy == "detached":
            ctx.mark_non_differentiable(entropy_R)


def checked_call(
    inputs: Tensor,
    targets: Tensor,
    *,
    name: str,
    tokens: int,
    width: int,
    backend: str,
    rows: Tensor | None,
    temperature: float,
    sampling_mask: RaggedSamplingMask | None,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    entropy: str,
    inplace_gradient: bool,
    block_rows: int,
) -> Call:
    """The arguments of `vocab_parallel_log_probs`, or with the name "hidden" of `vocab_parallel_linear_log_probs`.

    tokens: T, over all ranks. width: V, of this shard. Raises ValueError for what does not fit.
    """
    for what, value, choices in (("entropy", entropy, get_args(Entropy)), ("backend", backend, get_args(Backend))):
        if value not in choices:
            raise ValueError(f"{what}={value!r} is unknown: choose one of {', '.join(choices)}.")
    if inputs.ndim != 2 or targets.ndim != 1:
        raise ValueError(
            f"{name} has shape {list(inputs.shape)} and targets {list(targets.shape)}: two dimensions and one are "
            "needed, flatten batch and sequence."
        )
    if rows is None and len(targets) != tokens:
        raise ValueError(
            f"targets has {len(targets)} ids for {tokens} rows of {name}: give one for each, or pass rows."
        )
    if rows is not None and (rows.dtype != torch.int64 or rows.shape != targets.shape):
        raise ValueError(
            f"rows is {rows.dtype} {list(rows.shape)}: one int64 index for each of the {len(targets)} targets is "
            "needed."
        )
    check_rows(rows, tokens, distinct=name == "logits")  # gradients of hidden states are added
    if not isinstance(temperature, (int, float)) or not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite: pass 1.0 for greedy sampling.")
    tp_rank, tp_size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    vocab_size = width * tp_size if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= width * tp_size:
        raise ValueError(
            f"vocab_size={vocab_size} is not within the {width * tp_size} columns there are: pass the unpadded size."
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets have dtype {targets.dtype}: pass token ids, such as int64.")
    if sampling_mask is not None:
        _check_mask(sampling_mask, len(targets))
    start = tp_rank * width
    return Call(
        targets.to(torch.int64).contiguous(), min(max(vocab_size - start, 0), width), start,
        None if rows is None else rows.contiguous(), temperature, sampling_mask, tp_group, entropy, inplace_gradient,
        block_rows,
    )  # fmt: skip


def check_rows(rows: Tensor | None, tokens: int, distinct: bool = True) -> None:
    """Raises ValueError for a row outside [0, tokens), or if `distinct` one that is there twice: where gradients are
    written, not added, it would be wrong.

    Rows on a device are asserted there, as reading them would be a host sync: CUDA prints the message and ends.
    """
    if rows is None:
        return
    position_R = torch.arange(len(rows), device=rows.device)
    inside_R = (rows >= 0) & (rows < tokens)
    last_T = torch.full((max(1, tokens),), -1, device=rows.device)
    safe_R = rows.clamp(0, len(last_T) - 1)
    once_R = last_T.index_copy_(0, safe_R, position_R).index_select(0, safe_R) == position_R
    once_R |= not distinct
    right_R = inside_R & once_R
    must = "must lie in [0, T), each at most once" if distinct else "must lie in [0, T)"
    if rows.device.type != "cpu":
        torch._assert_async(right_R.all(), f"rows {must}")  # pyright: ignore[reportPrivateImportUsage]
    elif not all(right_R.tolist()):
        i = int((~right_R).nonzero()[0])
        raise ValueError(f"rows[{i}]={int(rows[i])}: rows {must} (T={tokens}).")


def _check_mask(mask: RaggedSamplingMask, targets: int) -> None:
    """Reads host memory only."""
    if not isinstance(mask, RaggedSamplingMask):
        raise ValueError(f"sampling_mask is a {type(mask).__name__}: pass a RaggedSamplingMask of the kept ids.")
    ids, offsets = mask.token_ids, mask.offsets
    if offsets.device.type != "cpu":
        raise ValueError(
            f"sampling_mask.offsets is on {offsets.device}: keep it on the CPU, to read it without a sync."
        )
    ends = [*offsets[:1].tolist(), *offsets[-1:].tolist()]
    falls = offsets.diff().clamp(max=0).sum(0, keepdim=True).tolist() != [0]
    if offsets.shape != (targets + 1,) or ends != [0, len(ids)] or falls:
        raise ValueError(
            f"sampling_mask.offsets has shape {list(offsets.shape)} and ends {ends}: [{targets + 1}] is needed, one "
            f"more than there are targets, ascending from 0 to the {len(ids)} token_ids."
        )


def ragged_mask(kept: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> RaggedSamplingMask:
    """The kept ids of each target, in order; an empty list for one that was sampled unfiltered."""
    rows = list(kept)
    ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64, device=device)
    return RaggedSamplingMask(ids, torch.tensor([0, *accumulate(map(len, rows))]))


def check_kept_ids(
    kept_ids: Sequence[Sequence[int]], response_ids: Sequence[int], loss_mask: Sequence[int], sample: object
) -> None:
    """Raise ValueError, naming sample and position, where kept ids are not one list a response token, or lack the id
    that was sampled for a token that trains: every log-prob is over the kept ids, so they belong to other tokens."""
    if len(kept_ids) != len(response_ids):
        raise ValueError(
            f"kept_ids of sample {sample} has {len(kept_ids)} entries for {len(response_ids)} response tokens: give "
            f"one list a token, empty where it was sampled unfiltered."
        )
    for position, (kept, token, trained) in enumerate(zip(kept_ids, response_ids, loss_mask, strict=True)):
        if trained and len(kept) and token not in kept:
            raise ValueError(
                f"kept_ids of sample {sample}, position {position}: the sampled id {token} is not among the "
                f"{len(kept)} kept. Check that the mask is of this response, with nothing dropped or joined before it."
            )
