"""Counters for the gates: kernels dispatched, host syncs, sizes of what is allocated. Exact, no clock."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique_dim", "_unique2", "equal"}
_FREE = {
    "detach", "alias", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "select", "slice", "split",
    "split_with_sizes", "unbind", "t", "transpose", "permute", "as_strided", "lift_fresh", "empty", "empty_like",
    "new_empty", "_reshape_alias", "empty_strided", "promote_types",
}  # fmt: skip


class DispatchCounter(TorchDispatchMode):
    """Counts kernels (views and empty allocations are free) and records host syncs and output sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.syncs: list[str] = []
        self.largest = 0

    @property
    def total(self) -> int:
        return sum(self.kernels.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        boolean_index = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _SYNCS or boolean_index:
            self.syncs.append(str(func))
        if name == "_to_copy" and args[0].device != (kwargs or {}).get("device", args[0].device):
            self.syncs.append(str(func))
        out = func(*args, **(kwargs or {}))
        if name not in _FREE:
            self.kernels[name] += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


class MemoryMeter(TorchDispatchMode):
    """Peak bytes of storages made inside the context and alive at once; what existed before is not counted."""

    def __init__(self, *existing: torch.Tensor | None) -> None:
        super().__init__()
        self.live: dict[int, list[int]] = {}  # data pointer -> [references, bytes]
        self.before = {tensor.untyped_storage().data_ptr() for tensor in existing if tensor is not None}
        self.bytes = self.peak = 0

    def _release(self, pointer: int) -> None:
        entry = self.live[pointer]
        entry[0] -= 1
        if entry[0] == 0:
            self.bytes -= entry[1]
            del self.live[pointer]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if pointer in self.before or size == 0:
                continue
            entry = self.live.setdefault(pointer, [0, size])
            if entry[0] == 0:
                self.bytes += size
            entry[0] += 1
            weakref.finalize(tensor, self._release, pointer)
        self.peak = max(self.peak, self.bytes)
        return out
