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
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mismatch_plugin.sglang.fingerprints import digests

Which = Literal["input", "routing", "output"]
Tap = tuple[str, Which]
TAPS_KEY = "mismatch_taps"
"""Where a request asks for values, and where a reply has them in `meta_info`."""
HEAD = "lm_head"
"""The name of what makes logits inside SGLang, where no module's forward does."""


class View(NamedTuple):
    """Tensors of a module call. parts: each a view with the tokens before its features; their rows are joined. bias:
    megatron-core adds it later."""

    parts: tuple[Tensor, ...]
    tokens: int
    bias: Tensor | None = None

    def read(self) -> Tensor:
        """[T, features], a copy on the CPU."""
        rows = torch.cat([part.detach().reshape(self.tokens, -1) for part in self.parts], -1)
        return (rows if self.bias is None else rows + self.bias).cpu()

    def write(self, values: Tensor) -> None:
        """Put [T, features] into the tensors themselves, so that all who hold them see it; of a padded vocabulary into
        the first features."""
        if self.bias is not None:
            values = values - self.bias.cpu()
        widths = [min(part.numel() // self.tokens, values.shape[-1]) for part in self.parts]
        for part, value in zip(self.parts, values.split(widths, -1), strict=True):
            value = value.reshape(*part.shape[:-1], -1)
            part[..., : value.shape[-1]].copy_(value)


class Routing(NamedTuple):
    """Which experts each token goes to. shares: [T, k] of the experts in `ids`; or [T, experts] next to a map of those
    that are chosen, as megatron-core has it."""

    ids: Tensor
    shares: Tensor
    experts: int

    def read(self) -> Tensor:
        """[T, experts]."""
        if self.ids.dtype == torch.bool:
            return self.shares.detach().clone().cpu()
        dense = self.shares.new_zeros(len(self.ids), self.experts)
        return dense.scatter_add_(1, self.ids.long(), self.shares).cpu()

    def write(self, values: Tensor) -> None:
        """Choose those with the largest shares."""
        shares, ids = (values, values > 0) if self.ids.dtype == torch.bool else values.topk(self.ids.shape[1], -1)
        self.ids.copy_(ids)
        self.shares.copy_(shares)


Call = Callable[..., Any]
Visit = Callable[[str, Which, "View | Routing"], None]
"""Called with a module's name in the order of execution, before it runs for what goes in."""
Weights = dict[str, int]
"""The digest of each parameter that a module holds itself."""


@dataclass
class Capture:
    """One forward pass over `ids`. modules: in the order of registration. values: [T, features] by name, in the order
    of execution. log_probs: [T - 1] of each token but the first, as the engine tells them."""

    ids: list[int]
    modules: dict[str, Weights]
    values: dict[Tap, Tensor]
    log_probs: Tensor


_OWNER = re.compile(r"(.*?\.experts|.*)\.(.*)")
"""The module of a parameter, and its name there. Experts that are modules themselves are one."""


def describe(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Weights]:
    """Every module with weights of its own, and the head even if it is the embedding. dtype: weights are rounded to it
    first. The norm that Transformer Engine keeps in the matrix behind it is a module of its own."""
    found: dict[str, Weights] = {}
    for name, (value, _, _) in digests(model.named_parameters(remove_duplicate=False), dtype).items():
        if owner := _OWNER.fullmatch(name.replace(".layer_norm_", ".layer_norm.")):
            found.setdefault(owner[1], {})[owner[2]] = value
    return found


@contextmanager
def watched(model: nn.Module, tokens: int, visit: Visit) -> Iterator[None]:
    """While it holds, each call of a module of a batch of so many tokens is told to `visit`."""
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    with ExitStack() as stack:

        def replace(owner: Any, method: str, call: Call) -> None:
            if (before := vars(owner).get(method)) is None:
                stack.callback(delattr, owner, method)
            else:
                stack.callback(setattr, owner, method, before)
            setattr(owner, method, call)

        def watch(owner: Any, method: str, name: str, tokens: int | None = tokens) -> None:
            replace(owner, method, _watching(name, owner, getattr(owner, method), tokens, visit))

        for module, name in names.items():
            kind = type(module).__name__
            if kind == "MoELayer":  # megatron-core's; in its experts a row is no token of the batch
                if not module.use_shared_expert:  # whose output is in the layer's
                    watch(module, "forward", f"{name}.experts")
            elif kind == "TopKRouter":  # it makes logits in one method, and the choice in another
                watch(module, "gating", name)
                replace(module, "routing", _watching_choice(name, module.routing, visit))
            elif ".experts." not in name and (
                next(module.parameters(recurse=False), None) is not None
                or kind == "RadixAttention"  # that of transformers is a function
                or name.endswith(".core_attention")
            ):
                watch(module, "forward", name)
        processor: Any = getattr(model, "logits_processor", None)
        if hasattr(processor, "_get_logits"):
            watch(processor, "_get_logits", HEAD, None)
        functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
        chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if chosen in functions:
            stack.callback(functions.__setitem__, chosen, functions[chosen])
            functions[chosen] = _watching_attention(names, functions[chosen], tokens, visit)
        yield


def _watching(name: str, module: Any, call: Call, tokens: int | None, visit: Visit) -> Call:
    """The module's function, which tells what goes in and comes out. tokens: None if each row of a call is one."""
    own = [*module.parameters(recurse=False)]
    norm = bool(own) and all(weight.dim() == 1 for weight in own)
    experts = next((weight.shape[0] for weight in own if weight.dim() == 3), 0)
    before = f"{name}.layer_norm" if hasattr(module, "layer_norm_weight") else name  # Transformer Engine's fused norm

    def watching(*args: Any, **kwargs: Any) -> Any:
        given = [*_tensors([*args, *kwargs.values()])]
        count = tokens or len(given[0])
        rows = [tensor for tensor in given if _is_rows(tensor, count)]
        fused = norm and len(rows) > 1 and rows[0].shape == rows[1].shape
        if rows and not fused:  # an attention takes queries, keys and values
            visit(before, "input", View(tuple(rows[: 1 if own else 3]), count))
        if experts and (chosen := _routing(given, experts)):
            visit(name, "routing", chosen)
        result = call(*args, **kwargs)
        told = [*_tensors([result])]
        out = [tensor for tensor in told if _is_rows(tensor, count)]
        if fused and len(out) > 1:  # the sum is known behind the call alone
            visit(name, "input", View((out[1],), count))
        if out:
            parts = _by_head(out[0], module.config) if name.endswith(".linear_qkv") else (out[0],)
            bias = next((tensor for tensor in told if tensor is getattr(module, "bias", None)), None)
            visit(name, "output", View(parts, count, bias))
        return result

    return watching


def _by_head(rows: Tensor, config: Any) -> tuple[Tensor, ...]:
    """All queries, keys and values; megatron-core has a group's queries, its key and its value next to each other."""
    groups = rows.unflatten(-1, (config.num_query_groups, -1, config.kv_channels))
    return groups[..., :-2, :], groups[..., -2:-1, :], groups[..., -1:, :]


def _watching_choice(router: str, call: Call, visit: Visit) -> Call:
    """megatron-core's function from a router's logits to each expert's share and whether it is chosen."""

    def routing(*args: Any, **kwargs: Any) -> Any:
        shares, chosen = call(*args, **kwargs)
        visit(f"{router.removesuffix('router')}experts", "routing", Routing(chosen, shares, shares.shape[-1]))
        return shares, chosen

    return routing


def _watching_attention(names: Mapping[Any, str], call: Call, tokens: int, visit: Visit) -> Call:
    """The function that a model of transformers computes its attention with."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = f"{names.get(module)}.attention"
        length = query.shape[2]  # keys and values of a cache are before it
        heads = tuple(part[:, :, -length:].transpose(1, 2) for part in (query, key, value))
        visit(name, "input", View(heads, tokens))
        result = call(module, query, key, value, *args, **kwargs)
        visit(name, "output", View((result[0],), tokens))
        return result

    return attention


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
    """Keeps what `watched` tells of one forward pass; of names that are not kept, meta tensors."""

    def __init__(self, keep: Callable[[str], bool] = lambda name: True) -> None:
        self._keep = keep
        self._seen: dict[Tap, list[Tensor]] = {}

    def __call__(self, name: str, which: Which, view: View | Routing) -> None:
        value = view.read()
        self._seen.setdefault((name, which), []).append(value if self._keep(name) else value.to("meta"))

    def values(self) -> dict[Tap, Tensor]:
        """In the order of execution, without modules that were called twice: only the head takes tokens in parts."""
        return {tap: torch.cat(parts) for tap, parts in self._seen.items() if tap[0] == HEAD or len(parts) == 1}


def row_hashes(values: Tensor) -> list[str]:
    """12 hex digits of each row's bits."""
    rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=6).hexdigest() for row in rows]


def pack(told: Any) -> str:
    """Tensors, numbers, texts, and lists and dicts of these, as text; exact."""
    file = io.BytesIO()
    torch.save(told, file)
    return base64.b64encode(file.getvalue()).decode("ascii")


def unpack(text: str) -> Any:
    """Of `pack`; it holds nothing but such values, whoever sent it."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True, map_location="cpu")
