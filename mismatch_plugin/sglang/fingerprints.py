"""Fingerprints of weights that a trainer and a server compute alike, however each of them fuses and shards them.

The digest of a tensor is the sum over its elements of h(bits), modulo 2^64, with h(0) = 0:

    x = the element's bits as a signed integer, y = A·x, h = B·(y xor (y >> 32)), A and B odd constants

So it does not depend on order or shape: the digest of qkv_proj is the sum of those of q_proj, k_proj and v_proj, that
of a tensor is the sum of its shards', and zero padding adds nothing. It depends on the dtype, and on every bit of every
element. A fingerprint is the sum over a model's tensors, as 16 hex digits: equal for equal weights, unequal but for one
chance in 2^64.

What it cannot see: elements that change places within a tensor that serves, as where K and V, or gate and up, are fused
in the wrong order, or a matrix is transposed (those that change places between tensors show in the tensors' digests).
What it does not survive: quantisation, another dtype, key and value heads that tensor parallelism repeats on several
ranks. Ranks with equal digests of a tensor count once: they hold copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

_A, _B = -7046029254386353131, -4417276706812531889  # odd: a change of any one element always shows
_SHIFT, _MODULUS = 32, 1 << 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 15}  # elements: three temporaries of 8 bytes each, in a core's cache
_SHOWN = 4
_CHUNK_ELSEWHERE = 1 << 22  # 100 MB of temporaries on a GPU, and few launches


class WeightUpdateError(RuntimeError):
    """The server did not take the weights, or not all of them: what it samples from now is not to be trusted."""


Digest = tuple[int, str, int]
"""Of one tensor: digest in [0, 2^64), dtype as "bfloat16", number of dimensions."""


def digest(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Σ h(bits) over the elements of `tensor`, modulo 2^64: 0-d int64 on its device. No host sync.

    dtype: floating-point elements are rounded to it first.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():  # order does not matter, so that a transposed tensor is read as it lies in memory
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.reshape(-1).split(_CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE)):
        if dtype is not None and chunk.is_floating_point():
            chunk = chunk.to(dtype)
        mixed = chunk.view(_INTEGERS[min(8, chunk.element_size())]).to(torch.int64, copy=True).mul_(_A)
        total += mixed.bitwise_xor_(mixed >> _SHIFT).mul_(_B).sum()
    return total


def digests(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, Digest]:
    """The digest of each tensor, rounded to `dtype` first if that is given. One host sync."""
    named = list(named)
    if not named:
        return {}
    found = [digest(tensor, dtype) for _, tensor in named]
    values: list[int] = torch.stack([value.to(found[0].device) for value in found]).tolist()
    kinds = [dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype for _, tensor in named]
    return {
        name: (value % _MODULUS, str(kind).removeprefix("torch."), tensor.dim())
        for (name, tensor), value, kind in zip(named, values, kinds, strict=True)
    }


def combined(ranks: Sequence[Mapping[str, Digest]]) -> dict[str, Digest]:
    """Digests of whole tensors out of each rank's: the sum over ranks, where ranks that hold the same count once."""
    found: dict[str, Digest] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [rank[name] for rank in ranks if name in rank]
        found[name] = (sum({value for value, _, _ in parts}) % _MODULUS, *parts[0][1:])
    return found


def fingerprint(tensors: Mapping[str, Digest]) -> str:
    """Of a whole model: 16 hex digits."""
    return f"{_total(tensors, tensors):016x}"


def written(tensors: Mapping[str, Digest]) -> dict[str, list[str | int]]:
    """As JSON: name → [16 hex digits, dtype, number of dimensions]."""
    return {name: [f"{value:016x}", kind, dimensions] for name, (value, kind, dimensions) in tensors.items()}


def read_tensors(info: Mapping[str, Any]) -> dict[str, Digest]:
    """`tensors` of what a server with our plugin tells of itself, as `written`. Raises ValueError for another form."""
    try:
        return {
            str(name): (int(value, 16), str(kind), int(dim)) for name, (value, kind, dim) in info["tensors"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the server's weight fingerprints have another form ({error!r}).") from None


STAGES_S = 5
"""How long the stages of a pipeline may take to tell theirs, one after the other."""


def settled(infos: Iterable[Mapping[str, Any]]) -> bool:
    """No server waits for a pipeline stage. infos: as in `SentWeights.compare`."""
    return all(info.get("fingerprint") or info.get("pp_size", 1) == 1 for info in infos)


@dataclass(frozen=True)
class Comparison:
    """What was sent next to what serves. sent: how many names. compared: how many of the server's tensors could be.
    differ: those that are not what was sent. unknown: sent names that it lacks. notes: why others were not compared.
    complete: all that serves is what was sent."""

    sent: int
    compared: int
    differ: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def problems(self) -> list[str]:
        """Sentences on those that differ and on those unknown."""
        told = [f"{len(self.differ)} of {self.compared} tensors are not what was sent: {some(self.differ)}."]
        skipped = "belong to no tensor of the server and were skipped"
        told.append(f"{len(self.unknown)} of {self.sent} names that were sent {skipped}: {some(self.unknown)}.")
        return [sentence for names, sentence in zip((self.differ, self.unknown), told, strict=True) if names]


class Sources:
    """Which of the sent tensors a tensor of the server is made of, without knowledge of the model.

    Names are the same, or the server fuses: q_proj, k_proj and v_proj are qkv_proj, experts.0.up_proj is in w13_weight.
    So what goes by no name of the server's belongs to the fused tensors of the module that it lies in.

    of: the server's name → the sent names that it is made of; [] if that is unknown, or nothing was sent for it.
    unknown: sent names that belong to no tensor of the server.
    """

    def __init__(self, sent: Iterable[str], served: Iterable[str]) -> None:
        sent, own = list(sent), set(served)
        given = set(sent)
        within: dict[str, list[str]] = defaultdict(list)  # module → sent names anywhere in it
        siblings: dict[str, list[str]] = defaultdict(list)  # module and leaf → sent parameters of direct submodules
        for name in sent:
            if name in own:
                continue
            *modules, leaf = name.split(".")
            for length in range(1, len(modules) + 1):
                within[".".join(modules[:length])].append(name)
            siblings[".".join([*modules[:-1], leaf])].append(name)
        self.of: dict[str, list[str]] = {}
        for name in served:
            module, _, leaf = name.rpartition(".")
            nearby = ".".join([*module.split(".")[:-1], leaf])
            self.of[name] = [name] if name in given else within.get(module) or siblings.get(nearby) or []
        used = {source for sources in self.of.values() for source in sources}
        self.unknown = [name for name in sent if name not in used]


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class SentWeights:
    """Digests of the tensors of one update, by name. A name that is sent again replaces the first."""

    def __init__(self) -> None:
        self._found: dict[str, Digest] = {}

    def add(self, named: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Some of the update's tensors. dtypes: what the server rounds them to, by name. One host sync a dtype."""
        by_dtype: dict[torch.dtype | None, list[tuple[str, Tensor]]] = {}
        for name, tensor in named:
            by_dtype.setdefault((dtypes or {}).get(name), []).append((name, tensor))
        for dtype, pairs in by_dtype.items():
            self._found.update(digests(pairs, dtype))

    def update(self, found: Mapping[str, Digest]) -> None:
        """What another rank sent: its `tensors`."""
        self._found.update(found)

    @property
    def tensors(self) -> dict[str, Digest]:
        """The digest of each name."""
        return dict(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def compare(self, info: Mapping[str, Any]) -> Comparison:
        """With what serves. info: `internal_states[i]["mismatch_plugin"]` of /server_info, after the update.

        Tensors of the server are compared in groups that are made of the same sent tensors; those that go by no sent
        name as a whole with the names that the server lacks, which a loader may have renamed. What nothing was sent for
        is left alone. Raises ValueError where `info` holds no fingerprints.
        """
        served = read_tensors(info)
        if not served:
            return Comparison(len(self._found), 0, notes=["the server could not take fingerprints: see its log."])
        sources = Sources(self._found, served)
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in served:
            groups.setdefault(tuple(sources.of[name]), []).append(name)
        nameless = groups.pop((), [])
        found = Comparison(len(self._found), 0)
        compared: list[str] = []
        other_dtype: list[str] = []
        repeated: list[str] = []
        renamed: list[str] = []
        for parts, names in groups.items():
            ours, theirs = [self._found[part] for part in parts], [served[name] for name in names]
            if len({kind for _, kind, _ in ours + theirs}) > 1:
                other_dtype += names
            elif info.get("kv_heads_repeated") and any(".k_proj." in part or ".v_proj." in part for part in parts):
                repeated += names
            elif _total(self._found, parts) == _total(served, names):
                compared += names
            elif _renamed(parts, names):
                renamed += names
            else:
                compared += names
                found.differ.extend(names)
        tied = {value for value, _, _ in served.values()}  # a head that shares the embedding goes by one name there
        found.unknown.extend(name for name in sources.unknown if self._found[name][0] not in tied)
        named = {served[name][0] for names in groups.values() for name in names}
        lacking = {self._found[name][0]: name for name in sources.unknown}  # a shared head once, or not at all
        lacking = {value: name for value, name in lacking.items() if value not in named}
        if nameless and _total(served, nameless) == _total(self._found, lacking.values()):
            compared += nameless
            found.unknown.clear()
        if other_dtype:
            told = "are served in another dtype than they were sent in, and not compared"
            found.notes.append(f"{len(other_dtype)} tensors {told}: {some(other_dtype)}.")
        if repeated:
            told = "hold key and value heads that tensor parallelism repeats, and were not compared"
            found.notes.append(f"{len(repeated)} tensors {told}: {some(repeated)}.")
        if renamed:
            told = "are loaded from other names, perhaps as other values, and were not compared"
            found.notes.append(f"{len(renamed)} tensors {told}: {some(renamed)}.")
        complete = len(compared) == len(served) and not found.differ
        if complete and found.unknown:  # layers for prediction of several tokens, a vision tower
            told = "that were sent are no part of what serves"
            found.notes.append(f"{len(found.unknown)} names {told}: {some(found.unknown)}.")
            found.unknown.clear()
        return replace(found, compared=len(compared), complete=complete)


def _total(tensors: Mapping[str, Digest], names: Iterable[str]) -> int:
    return sum(tensors[name][0] for name in names) % _MODULUS


def _renamed(parts: Sequence[str], names: Sequence[str]) -> bool:
    """A tensor of the server's goes by another name in the checkpoint (A_log, of which A = −exp(A_log) is kept)."""
    return (
        len(parts) == len(names) == 1
        and parts[0] != names[0]
        and parts[0].rpartition(".")[0] == names[0].rpartition(".")[0]
    )


def served_dtypes(named: Iterable[tuple[str, Tensor]], info: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Sent name → the floating-point dtype that the server rounds it to. What it quantises to 8 bits is left out."""
    served = read_tensors(info)
    sources = Sources([name for name, _ in named], served)
    found = {part: getattr(torch, kind, None) for name, (_, kind, _) in served.items() for part in sources.of[name]}
    # What goes by no name there (a head that shares the embedding) is held in the model's dtype.
    found |= {name: getattr(torch, str(info.get("dtype")), None) for name in sources.unknown}
    wide = {name: dtype for name, dtype in found.items() if isinstance(dtype, torch.dtype) and dtype.itemsize > 1}
    return {name: dtype for name, dtype in wide.items() if dtype.is_floating_point}
