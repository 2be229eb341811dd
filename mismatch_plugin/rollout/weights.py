"""The trainer's side of a weight update: tensors as bytes, buckets of them, and the group to broadcast over."""

from __future__ import annotations

import base64
import importlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 20
_NEXT = 6364136223846793005  # odd, as are the keys: what a chunk adds is never lost in the chunks after it
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Bucket = list[tuple[str, Tensor]]


def named_pairs(named_tensors: NamedTensors) -> Bucket:
    """(name, tensor) pairs, each name once. Raises ValueError for none, for a repeated name, for what is no tensor."""
    given: Any = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    pairs: Bucket = list(given)
    if not pairs:
        raise ValueError("no weights were given: an update without tensors would only change the version's name.")
    seen: set[str] = set()
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"weight {name!r} is {type(tensor).__name__}, not a tensor.")
        if name in seen:
            raise ValueError(f"weight {name!r} is there twice.")
        seen.add(name)
    return pairs


def buckets(pairs: Bucket, limit: int | None) -> Iterator[Bucket]:
    """The pairs in order, in lists of at most `limit` bytes each; a larger tensor is alone. None: all at once."""
    bucket: Bucket = []
    size = 0
    for name, tensor in pairs:
        grown = size + tensor.numel() * tensor.element_size()
        if bucket and limit is not None and grown > limit:
            yield bucket
            bucket, grown = [], grown - size
        bucket.append((name, tensor))
        size = grown
    yield bucket


def serialised(bucket: Bucket) -> str:
    """Tensors as SGLang reads them from JSON: base64 of a pickled list of (name, CPU tensor).

    By value: the torch reductions that share file descriptors or CUDA handles need both ends on one machine.
    """
    # A view would drag its whole storage along, so each tensor is copied into one of its own.
    own = [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(own)).decode("ascii")


def digests(pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> dict[str, int]:
    """Name -> 64-bit digest of the bytes that a server in `dtype` gets from each tensor; None: it is not known.

    Unequal digests mean unequal tensors; equal ones mean equal tensors but for one chance in 2^64. Floating-point
    tensors are rounded to `dtype` first; where it is unknown, those wider than 2 bytes are to bfloat16. Computed where
    the tensors are; one host sync.
    """
    pairs = list(pairs)
    if not pairs:
        return {}
    random = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=random) | 1  # so that a change of one word shows
    keys = {device: odd.to(device) for device in {tensor.device for _, tensor in pairs}}
    found = [_digest(tensor.detach(), dtype, keys[tensor.device]) for _, tensor in pairs]
    together = torch.stack([digest.to(found[0].device) for digest in found]).tolist()
    return {name: digest for (name, _), digest in zip(pairs, together, strict=True)}


def _digest(tensor: Tensor, dtype: torch.dtype | None, keys: Tensor) -> Tensor:
    """Σ keys · words of 8 bytes, modulo 2^64, chunk by chunk: no copy of the whole is made of a contiguous tensor."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.reshape(-1).split(_CHUNK):
        if chunk.is_floating_point() and (dtype is not None or chunk.element_size() > 2):
            chunk = chunk.to(dtype or torch.bfloat16)
        raw = chunk.contiguous().view(torch.uint8)
        words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
        total = total * _NEXT + (words * keys[: words.numel()]).sum()
    return total


def join_weights_update_group(
    master_address: str,
    master_port: int,
    *,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: float,
    rank: int = 0,
) -> dist.ProcessGroup:
    """Join a process group next to the default one, as the server's workers do; blocks until all have joined.

    Rank 0, the trainer, listens at master_address:master_port; the workers are ranks 1 and up. The store's keys must be
    those that SGLang uses, and those torch makes only inside `_new_process_group_helper`: no public call of torch makes
    a group with processes outside the default one.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    wait = timedelta(seconds=timeout)
    host = f"[{master_address}]" if ":" in master_address else master_address
    store, rank, world_size = next(c10d.rendezvous(f"tcp://{host}:{master_port}", rank, world_size, timeout=wait))
    store.set_timeout(wait)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=wait,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def broadcast(pairs: Bucket, group: dist.ProcessGroup) -> None:
    """Send each tensor from rank 0 to the group, in order."""
    for _, tensor in pairs:
        dist.broadcast(tensor.detach().contiguous(), src=0, group=group)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """torch.bfloat16 for "bfloat16"; None for a name that is no dtype ("auto") or unknown."""
    dtype = getattr(torch, name or "", None)
    return dtype if isinstance(dtype, torch.dtype) else None
