"""What goes into a model's modules and comes out of them, in one form for SGLang, transformers and megatron-core.

Every value is [T, features], a row a token, whatever the engine's own layout. Modules with weights of their own are
watched, and the attention, which has none: of it queries, keys and values behind the rotary embedding. A fused norm's
input is the residual stream that it has added to. The choice of experts is [T, experts]: each one's share, 0 where it
was not chosen, so that the order of choice does not matter.

Nothing here imports an engine: the same code runs inside a server and at the trainer.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mismatch_plugin.sglang.fingerprints import Digest, digests, row_digests, written

Which = Literal["input", "routing", "output"]
Tap = tuple[str, Which]
HEAD = "lm_head"
"""The name of what makes logits inside SGLang, where no module's forward does."""
ATTENTION = ".attention"
"""What is put behind the name of a module whose attention is a function."""


class View(NamedTuple):
    """Tensors of a module call. parts: each a view with the tokens before its features; their rows are joined."""

    parts: tuple[Tensor, ...]
    tokens: int

    def like(self) -> Tensor:
        """Of the shape and dtype of what `read` returns, without its numbers."""
        features = sum(part.numel() for part in self.parts) // self.tokens
        return torch.empty(self.tokens, features, dtype=self.parts[0].dtype, device="meta")

    def read(self) -> Tensor:
        """[T, features], a copy."""
        return torch.cat([part.detach().reshape(self.tokens, -1) for part in self.parts], -1)

    def write(self, values: Tensor) -> None:
        """Put [T, features] into the tensors themselves, so that all who hold them see it."""
        widths = [part.numel() // self.tokens for part in self.parts]
        for part, value in zip(self.parts, values.split(widths, -1), strict=True):
            part.copy_(value.reshape(part.shape))


class Routing(NamedTuple):
    """Which experts each token goes to. ids, shares: [T, k]."""

    ids: Tensor
    shares: Tensor
    experts: int

    def like(self) -> Tensor:
        """Of the shape and dtype of what `read` returns, without its numbers."""
        return torch.empty(len(self.ids), self.experts, dtype=self.shares.dtype, device="meta")

    def read(self) -> Tensor:
        """[T, experts]."""
        dense = self.shares.new_zeros(len(self.ids), self.experts)
        return dense.scatter_add_(1, self.ids.long(), self.shares)

    def write(self, values: Tensor) -> None:
        """Choose those with the largest shares."""
        shares, ids = values.topk(self.ids.shape[1], -1)
        self.ids.copy_(ids)
        self.shares.copy_(shares)


Visit = Callable[[str, Which, "View | Routing"], None]
"""Called with a module's name in the order of execution, before it runs for what goes in."""


class Module(NamedTuple):
    """A watched module. parameters: its own ones. rows: of its matrix, the digest of each output channel."""

    name: str
    parameters: dict[str, Digest]
    rows: list[int]

    @property
    def digest(self) -> int:
        """Of all its weights together."""
        return sum(value for value, _, _ in self.parameters.values()) % (1 << 64)


@dataclass
class Capture:
    """One forward pass over `ids`. modules: in the order of registration. values: [T, features] by name, in the order
    of execution. log_probs: [T - 1] of each token but the first, as the engine tells them."""

    ids: list[int]
    modules: dict[str, Module]
    values: dict[Tap, Tensor] = field(default_factory=dict)
    log_probs: Tensor | None = None


def is_attention(name: str, module: nn.Module) -> bool:
    """SGLang's, or megatron-core's. Where it is a function, as in transformers, `_attention_function` watches it."""
    return type(module).__name__ == "RadixAttention" or name.endswith(".core_attention")


def describe(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Module]:
    """Every module with weights of its own, and what makes logits. dtype: weights are rounded to it first."""
    found = {}
    for name, module in watched_modules(model):
        own = dict(module.named_parameters(recurse=False))
        matrix = [weight for weight in own.values() if weight.dim() == 2]
        rows = row_digests(matrix[0], dtype) if len(matrix) == 1 else []
        found[name] = Module(name, digests(own.items(), dtype), rows)
    return found


def watched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Also the head of a model whose head is its embedding."""
    for name, module in model.named_modules():
        if is_attention(name, module) or next(module.parameters(recurse=False), None) is not None:
            yield name, module
    head = getattr(model, HEAD, None)
    if head is not None and HEAD not in dict(model.named_modules()):
        yield HEAD, head


@contextmanager
def watched(model: nn.Module, tokens: int, visit: Visit) -> Iterator[None]:
    """While it holds, each call of a watched module of a batch of so many tokens is told to `visit`."""
    names = {module: name for name, module in model.named_modules()}
    with ExitStack() as stack:
        for name, module in watched_modules(model):
            if names.get(module) == name:
                calls = _watching(name, module, tokens, visit)
                stack.enter_context(_replaced(module, "forward", calls))
        processor: Any = getattr(model, "logits_processor", None)
        if hasattr(processor, "_get_logits"):
            calls = _watching_logits(processor._get_logits, visit)
            stack.enter_context(_replaced(processor, "_get_logits", calls))
        stack.enter_context(_attention_function(model, names, tokens, visit))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _watching(name: str, module: nn.Module, tokens: int, visit: Visit) -> Callable[..., Any]:
    """The module's forward, which tells what goes in and comes out."""
    call = module.forward
    own, attention = [*module.parameters(recurse=False)], is_attention(name, module)
    norm = bool(own) and all(weight.dim() == 1 for weight in own)
    experts = next((weight.shape[0] for weight in own if weight.dim() == 3), 0)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [*_tensors([*args, *kwargs.values()])]
        rows = [tensor for tensor in given if _is_rows(tensor, tokens)]
        fused = norm and len(rows) > 1 and rows[0].shape == rows[1].shape
        if attention:
            if len(rows) > 2:
                visit(name, "input", View(tuple(rows[:3]), tokens))
        elif rows and not fused:
            visit(name, "input", View((rows[0],), tokens))
        if experts and (chosen := _routing(given, experts)):
            visit(name, "routing", chosen)
        result = call(*args, **kwargs)
        out = [tensor for tensor in _tensors([result]) if _is_rows(tensor, tokens)]
        if fused and len(out) > 1:  # the sum is known behind the call alone
            visit(name, "input", View((out[1],), tokens))
        if out:
            visit(name, "output", View((out[0],), tokens))
        return result

    return forward


def _watching_logits(call: Callable[..., Any], visit: Visit) -> Callable[..., Any]:
    """SGLang's function from hidden states to logits: of some tokens at a time, all in all of each."""

    def get_logits(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        visit(HEAD, "input", View((hidden_states,), len(hidden_states)))
        logits = call(hidden_states, *args, **kwargs)
        visit(HEAD, "output", View((logits,), len(logits)))
        return logits

    return get_logits


@contextmanager
def _attention_function(model: nn.Module, names: Mapping[Any, str], tokens: int, visit: Visit) -> Iterator[None]:
    """Watch the function that a model of transformers computes its attention with."""
    transformers = sys.modules.get("transformers.modeling_utils")
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    functions = getattr(transformers, "ALL_ATTENTION_FUNCTIONS", {})
    if chosen not in functions:
        yield
        return
    call = functions[chosen]

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = names.get(module)
        length = query.shape[2]  # keys and values of a cache are before it
        heads = tuple(part[:, :, -length:].transpose(1, 2) for part in (query, key, value))
        seen = name is not None and all(_is_rows(part, tokens) for part in heads)
        if seen:
            visit(f"{name}{ATTENTION}", "input", View(heads, tokens))
        result = call(module, query, key, value, *args, **kwargs)
        if seen:
            visit(f"{name}{ATTENTION}", "output", View((result[0],), tokens))
        return result

    functions[chosen] = attention
    try:
        yield
    finally:
        functions[chosen] = call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those in arguments and results, also in tuples, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _is_rows(tensor: Tensor, tokens: int) -> bool:
    """Floating-point numbers, one row or more of each token."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel():
        return False
    return (tensor.numel() // tensor.shape[-1]) % tokens == 0


def _routing(given: list[Tensor], experts: int) -> Routing | None:
    """The choice among the arguments: [T, k] ids, and shares of their shape."""
    ids = next((tensor for tensor in given if tensor.dim() == 2 and not tensor.is_floating_point()), None)
    if ids is None or ids.dtype == torch.bool:
        return None
    shares = [tensor for tensor in given if tensor.shape == ids.shape and tensor.is_floating_point()]
    return Routing(ids, shares[0], experts) if shares else None


class Recorder:
    """Keeps what `watched` tells of one forward pass. A module that is called twice in it is left out."""

    def __init__(self, keep: Callable[[str], bool] = lambda name: True) -> None:
        self._keep = keep
        self._seen: dict[Tap, list[Tensor]] = {}

    def __call__(self, name: str, which: Which, view: View | Routing) -> None:
        self._seen.setdefault((name, which), []).append(view.read() if self._keep(name) else view.like())

    def values(self) -> dict[Tap, Tensor]:
        """In the order of execution; meta tensors of names that are not kept."""
        return {tap: torch.cat(parts) for tap, parts in self._seen.items() if tap[0] == HEAD or len(parts) == 1}


def record(model: nn.Module, ids: list[int], call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Capture:
    """One forward pass of a model in this process. call: [1, T] ids to [1, T, V] logits. dtype: of the digests."""
    recorder = Recorder()
    with torch.no_grad(), watched(model, len(ids), recorder):
        logits = call(torch.tensor([ids]))[0]
    return Capture(ids, describe(model, dtype), recorder.values(), log_probs_of(logits, ids))


def log_probs_of(logits: Tensor, ids: list[int]) -> Tensor:
    """[T - 1] float64 log-probs of ids[1:] under [T, V] logits."""
    wanted = torch.tensor(ids[1:], device=logits.device)[:, None]
    return logits[:-1].float().log_softmax(-1).gather(1, wanted)[:, 0].double().cpu()


def row_hashes(values: Tensor) -> list[str]:
    """12 hex digits of each row's bits."""
    rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=6).hexdigest() for row in rows]


def to_json(modules: Mapping[str, Module]) -> list[list[Any]]:
    """Rows as one base64 text of int64."""
    return [[m.name, written(m.parameters), pack(torch.tensor(m.rows, dtype=torch.int64))] for m in modules.values()]


def from_json(told: Iterable[list[Any]]) -> dict[str, Module]:
    """Of `to_json`. Raises ValueError for another form."""
    found = {}
    for name, parameters, rows in told:
        own = {key: (int(value, 16), kind, dim) for key, (value, kind, dim) in parameters.items()}
        found[name] = Module(name, own, unpack(rows).tolist())
    return found


def pack(tensor: Tensor) -> list[Any]:
    """[dtype, shape, base64 of its bytes], exact."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode("ascii")
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def unpack(told: list[Any]) -> Tensor:
    """Of `pack`."""
    kind, shape, data = told
    raw = bytearray(base64.b64decode(data))
    dtype = getattr(torch, kind)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
