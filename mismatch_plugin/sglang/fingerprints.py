"""Fingerprints of weights that a trainer and a server compute alike, however each of them fuses and shards them.

The digest of a tensor is the sum over its elements of h(bits), modulo 2^64, with h(0) = 0:

    x = the element's bits as a signed integer, y = A·x, h = B·(y xor (y >> 32)), A and B odd constants

So it does not depend on order or shape: the digest of qkv_proj is the sum of those of q_proj, k_proj and v_proj, that
of a tensor is the sum of its shards', and zero padding adds nothing. It depends on the dtype, and on every bit of every
element. A fingerprint is a hash of a model's digests by place (`place_of`: layer and role), as 16 hex digits: equal for
equal weights, unequal but for one chance in 2^64. Names of Hugging Face, megatron-core and SGLang give the same places.

What it cannot see: elements that change places within a place, as where K and V, gate and up, or experts of a layer are
exchanged, or a matrix is transposed.
What it does not survive: quantisation, another dtype, key and value heads that tensor parallelism repeats on several
ranks. Ranks with equal digests of a tensor count once: they hold copies.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.data.served import META_KEY

_A, _B = -7046029254386353131, -4417276706812531889  # odd: a change of any one element always shows
_SHIFT, MODULUS = 32, 1 << 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 15}  # elements: three temporaries of 8 bytes each, in a core's cache
_CHUNK_ELSEWHERE = 1 << 22  # 100 MB of temporaries on a GPU, and few launches
_SHOWN = 4


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
        name: (value % MODULUS, str(kind).removeprefix("torch."), tensor.dim())
        for (name, tensor), value, kind in zip(named, values, kinds, strict=True)
    }


def combined(ranks: Sequence[Mapping[str, Digest]]) -> dict[str, Digest]:
    """Digests of whole tensors out of each rank's: the sum over ranks, where ranks that hold the same count once."""
    found: dict[str, Digest] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [rank[name] for rank in ranks if name in rank]
        found[name] = (sum({value for value, _, _ in parts}) % MODULUS, *parts[0][1:])
    return found


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ROLES = {
    name: role
    for role, names in {
        "qkv": "q_proj k_proj v_proj qkv_proj linear_qkv query_key_value c_attn",
        "qkv_a": "q_a_proj kv_a_proj_with_mqa fused_qkv_a_proj_with_mqa linear_q_down_proj linear_kv_down_proj",
        "q_b": "q_b_proj linear_q_up_proj",
        "kv_b": "kv_b_proj linear_kv_up_proj",
        "q_norm": "q_norm q_layernorm",
        "k_norm": "k_norm k_layernorm",
        "attention_out": "o_proj linear_proj",
        "mlp_in": "gate_proj up_proj gate_up_proj linear_fc1 w1 w3 w13_weight",
        "mlp_out": "down_proj linear_fc2 w2 w2_weight",
        "router": "gate router",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm pre_mlp_layernorm",
        "embedding": "embed_tokens word_embeddings wte",
        "head": "lm_head output_layer",
        "final_norm": "norm final_layernorm final_norm",
    }.items()
    for name in names.split()
}
_WRAPPERS = re.compile(r"^(?:(?:module|model|language_model|decoder|transformer|embedding)\.)+")
_FUSED_NORMS = {"linear_qkv.layer_norm": "input_layernorm", "linear_fc1.layer_norm": "post_attention_layernorm"}


def place_of(name: str) -> str:
    """Where in a model a parameter is, whoever names it: its layer (counted over the whole model, over all pipeline
    stages) and its role. What is fused somewhere has one place. A name of no known role is its own place.

    >>> place_of("model.layers.3.self_attn.k_proj.bias"), place_of("decoder.layers.3.self_attention.linear_qkv.bias")
    ('layers.3.qkv.bias', 'layers.3.qkv.bias')
    """
    for fused, norm in _FUSED_NORMS.items():  # Transformer Engine keeps a norm in the matrix behind it
        name = name.replace(f"{fused}_", f"{norm}.")
    found = _LAYER.search(name)
    tower, number, rest = (name[: found.start()], found[1], name[found.end() :]) if found else ("", "", name)
    tower = _WRAPPERS.sub("", f"{tower}.").lstrip(".")  # "" but for a vision tower and the like
    layer = f"{tower}layers.{number}." if found else ""
    for part in reversed(rest.split(".")):
        if (role := _ROLES.get(part)) is not None:
            shared = "shared_" if "shared_expert" in rest else ""
            return f"{layer}{shared}{role}" + (".bias" if re.search(r"bias\d*$", rest) else "")
    return layer + (rest if found else _WRAPPERS.sub("", rest))


def fingerprint(tensors: Mapping[str, Digest]) -> str:
    """Of a whole model: 16 hex digits. A head that is the embedding counts as none, whoever keeps a copy of it."""
    places: dict[str, int] = defaultdict(int)
    for name, (value, _, _) in tensors.items():
        places[place_of(name)] += value
    if places.get("head") == places.get("embedding"):
        places.pop("head", None)
    told = [f"{place} {value % MODULUS:x}" for place, value in sorted(places.items()) if value % MODULUS]
    return hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest()


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


def states_of(server_info: Any) -> list[Mapping[str, Any]]:
    """What our plugin tells in an answer of /server_info, one of each data-parallel worker; [] without it."""
    states = server_info.get("internal_states") if isinstance(server_info, Mapping) else None
    listed = states if isinstance(states, list) else []
    found = [state.get(META_KEY) for state in listed if isinstance(state, Mapping)]
    return [told for told in found if isinstance(told, Mapping)]


def settled(states: Iterable[Mapping[str, Any]]) -> bool:
    """No server waits for a pipeline stage."""
    return all(state.get("fingerprint") or state.get("pp_size", 1) == 1 for state in states)


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class Comparison(NamedTuple):
    """What was sent next to what serves. differ: tensors that are not what was sent. problems: sentences on these and
    on names that the server lacks. notes: why others were not compared. complete: all that serves is what was sent."""

    differ: list[str]
    problems: list[str]
    notes: list[str]
    complete: bool


class SentWeights(dict[str, Digest]):
    """Digests of the tensors of one update, by name. A name that is sent again replaces the first."""

    def add(self, named: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Some of the update's tensors. dtypes: what the server rounds them to, by name. One host sync a dtype."""
        by_dtype: dict[torch.dtype | None, list[tuple[str, Tensor]]] = {}
        for name, tensor in named:
            by_dtype.setdefault((dtypes or {}).get(name), []).append((name, tensor))
        for dtype, pairs in by_dtype.items():
            self.update(digests(pairs, dtype))

    def compare(self, state: Mapping[str, Any]) -> Comparison:
        """With what serves. state: one of `states_of`, after the update.

        Tensors of the server are compared in groups that are made of the same sent tensors; those that go by no sent
        name as a whole with the names that the server lacks, which a loader may have renamed. What nothing was sent for
        is left alone. Raises ValueError where `state` holds no fingerprints.
        """
        served = read_tensors(state)
        if not served:
            return Comparison([], [], ["the server could not take fingerprints: see its log."], False)
        sources, unknown = sources_of(self, served)
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in served:
            groups.setdefault(tuple(sources[name]), []).append(name)
        nameless = groups.pop((), [])
        compared: list[str] = []
        differ: list[str] = []
        left_out: dict[str, list[str]] = {
            "are served in another dtype than they were sent in, and not compared": (other_dtype := []),
            "hold key and value heads that tensor parallelism repeats, and were not compared": (repeated := []),
            "are loaded from other names, perhaps as other values, and were not compared": (renamed := []),
        }
        for parts, names in groups.items():
            if len({self[part][1] for part in parts} | {served[name][1] for name in names}) > 1:
                other_dtype += names
            elif state.get("kv_heads_repeated") and any(".k_proj." in part or ".v_proj." in part for part in parts):
                repeated += names
            elif _total(self, parts) == _total(served, names):
                compared += names
            elif _renamed(parts, names):
                renamed += names
            else:
                compared += names
                differ += names
        tied = {value for value, _, _ in served.values()}  # a head that shares the embedding goes by one name there
        lacked = [name for name in unknown if self[name][0] not in tied]
        named = {served[name][0] for names in groups.values() for name in names}
        lacking = {self[name][0]: name for name in unknown}  # a shared head once, or not at all
        lacking = {value: name for value, name in lacking.items() if value not in named}
        if nameless and _total(served, nameless) == _total(self, lacking.values()):
            compared += nameless
            lacked = []
        notes = [f"{len(names)} tensors {told}: {some(names)}." for told, names in left_out.items() if names]
        complete = len(compared) == len(served) and not differ
        if complete and lacked:  # layers for prediction of several tokens, a vision tower
            notes.append(f"{len(lacked)} names that were sent are no part of what serves: {some(lacked)}.")
            lacked = []
        problems = []
        if differ:
            problems.append(f"{len(differ)} of {len(compared)} tensors are not what was sent: {some(differ)}.")
        if lacked:
            skipped = "names that were sent belong to no tensor of the server and were skipped"
            problems.append(f"{len(lacked)} of {len(self)} {skipped}: {some(lacked)}.")
        return Comparison(differ, problems, notes, complete)


def sources_of(sent: Iterable[str], served: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Which of the sent tensors a tensor of the server is made of, without knowledge of the model.

    Names are the same, or the server fuses: q_proj, k_proj and v_proj are qkv_proj, experts.0.up_proj is in w13_weight.
    So what goes by no name of the server's belongs to the fused tensors of the module that it lies in.

    Returns (the server's name → the sent names that it is made of, [] if that is unknown or nothing was sent for it;
    sent names that belong to no tensor of the server).
    """
    given, own = dict.fromkeys(sent), set(served)
    within: dict[str, list[str]] = defaultdict(list)  # module → sent names anywhere in it
    siblings: dict[str, list[str]] = defaultdict(list)  # module and leaf → sent parameters of direct submodules
    for name in given:
        if name in own:
            continue
        *modules, leaf = name.split(".")
        for length in range(1, len(modules) + 1):
            within[".".join(modules[:length])].append(name)
        siblings[".".join([*modules[:-1], leaf])].append(name)
    found: dict[str, list[str]] = {}
    for name in served:
        module, _, leaf = name.rpartition(".")
        nearby = ".".join([*module.split(".")[:-1], leaf])
        found[name] = [name] if name in given else within.get(module) or siblings.get(nearby) or []
    used = {source for sources in found.values() for source in sources}
    return found, [name for name in given if name not in used]


def served_dtypes(named: Iterable[tuple[str, Tensor]], state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Sent name → the floating-point dtype that the server rounds it to. What it quantises to 8 bits is left out."""
    served = read_tensors(state)
    sources, unknown = sources_of([name for name, _ in named], served)
    kinds = {part: kind for name, (_, kind, _) in served.items() for part in sources[name]}
    # What goes by no name there (a head that shares the embedding) is held in the model's dtype.
    kinds |= dict.fromkeys(unknown, str(state.get("dtype")))
    found = {name: getattr(torch, kind, None) for name, kind in kinds.items()}
    wide = {name: dtype for name, dtype in found.items() if isinstance(dtype, torch.dtype) and dtype.itemsize > 1}
    return {name: dtype for name, dtype in wide.items() if dtype.is_floating_point}


def _total(tensors: Mapping[str, Digest], names: Iterable[str]) -> int:
    return sum(tensors[name][0] for name in names) % MODULUS


def _renamed(parts: Sequence[str], names: Sequence[str]) -> bool:
    """A tensor of the server's goes by another name in the checkpoint (A_log, of which A = −exp(A_log) is kept)."""
    if len(parts) != 1 or len(names) != 1:
        return False
    return parts[0] != names[0] and parts[0].rpartition(".")[0] == names[0].rpartition(".")[0]
