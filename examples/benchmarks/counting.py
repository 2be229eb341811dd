"""Counters of what a function makes torch do: kernels, host syncs, collectives, bytes. Exact, no clock."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
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
_COLLECTIVES = ("allreduce_", "_allgather_base_", "allgather_", "_reduce_scatter_base_", "broadcast_", "alltoall_")


class OperationCounter(TorchDispatchMode):
    """Counts inside a `with` block, backward passes included.

    kernels: operations dispatched that are no views, by name. syncs: those that wait for a device, in order.
    tensor_bytes: of all tensors that kernels read and write, whether they come from a cache or from memory. peak:
    largest sum of bytes made and alive at once. largest: elements of the largest tensor returned. sent: (collective,
    bytes of its input on this rank), in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.syncs: list[str] = []
        self.tensor_bytes = self.peak = self.largest = 0
        self.sent: list[tuple[str, int]] = []
        self._live: Counter[int] = Counter()  # tensors alive by the address of their storage
        self._bytes = 0

    @property
    def total(self) -> int:
        """All kernels."""
        return sum(self.kernels.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        if name in _COLLECTIVES:
            source = args[1] if name.endswith("_base_") else args[0]
            self.sent.append((name.strip("_"), sum(t.nbytes for t in _tensors(source))))
        elif name not in _FREE:
            self.kernels[name] += 1
            self.tensor_bytes += sum(t.nbytes for t in (*_tensors((args, kwargs)), *_tensors(out)))
        masks = (torch.bool, torch.uint8)
        boolean = name in ("index", "index_put", "index_put_") and any(t.dtype in masks for t in _tensors(args[1]))
        copies = name == "_to_copy" and args[0].device != kwargs.get("device", args[0].device)
        if name in _SYNCS or boolean or copies:
            self.syncs.append(str(func))
        for tensor in _tensors(out):
            self.largest = max(self.largest, tensor.numel())
            self._follow(tensor, inputs)
        return out

    def _follow(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or (address in inputs and address not in self._live):  # what was there before is not counted
            return
        if not self._live[address]:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
        self._live[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._live[address] -= 1
        if not self._live[address]:
            del self._live[address]
            self._bytes -= size


def count(run: Callable[[], object]) -> OperationCounter:
    """What one call does."""
    with OperationCounter() as counter:
        run()
    return counter


def launches(run: Callable[[], object]) -> int:
    """Kernels, copies and fills of one call on a CUDA device, Triton's too, which torch's dispatcher does not see."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiler.events() or ())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
