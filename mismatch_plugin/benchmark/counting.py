"""Counters of what a function makes torch do: kernels, host syncs, collectives, bytes. Exact, no clock."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique_dim", "_unique2", "equal"}
_FREE = {
    "detach", "alias", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "select", "slice", "split",
    "split_with_sizes", "unbind", "t", "transpose", "permute", "as_strided", "lift_fresh", "empty", "empty_like",
    "new_empty", "_reshape_alias", "empty_strided", "promote_types",
}  # fmt: skip
_COLLECTIVES = ("allreduce_", "_allgather_base_", "allgather_", "reduce_scatter_", "broadcast_", "alltoall_")


@dataclass
class Counts:
    """kernels: operations dispatched that are no views. syncs: those that wait for a device. tensor_bytes: of all
    tensors that kernels read and write, whether they come from a cache or from memory. peak: largest sum of bytes made
    and alive at once. sent: (collective, bytes of its input on this rank), in order.
    """

    kernels: int = 0
    syncs: int = 0
    tensor_bytes: int = 0
    peak: int = 0
    sent: list[tuple[str, int]] = field(default_factory=list)


def count(run: Callable[[], object]) -> Counts:
    """What one call does, its backward passes included."""
    with _Counter() as counter:
        run()
    return counter.counts


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.live: Counter[int] = Counter()  # tensors alive by the address of their storage
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        if name in _COLLECTIVES:
            source = args[1] if name == "_allgather_base_" else args[0]
            self.counts.sent.append((name.strip("_"), sum(t.nbytes for t in _tensors(source))))
        elif name not in _FREE:
            self.counts.kernels += 1
            self.counts.tensor_bytes += sum(t.nbytes for t in (*_tensors((args, kwargs)), *_tensors(out)))
        boolean = name in ("index", "index_put", "index_put_") and any(t.dtype == torch.bool for t in _tensors(args[1]))
        copies = name == "_to_copy" and args[0].device != kwargs.get("device", args[0].device)
        self.counts.syncs += name in _SYNCS or boolean or copies
        for tensor in _tensors(out):
            self._follow(tensor, inputs)
        return out

    def _follow(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or (address in inputs and address not in self.live):  # what was there before is not counted
            return
        if not self.live[address]:
            self.bytes += size
            self.counts.peak = max(self.counts.peak, self.bytes)
        self.live[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self.live[address] -= 1
        if not self.live[address]:
            del self.live[address]
            self.bytes -= size


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
