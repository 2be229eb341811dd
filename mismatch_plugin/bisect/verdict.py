"""Where two engines differ first, by how much, and what of the log-prob gap it makes.

The trainer's model runs once more over the same ids. At each tap its own value is compared with the server's, and then
replaced by it, so that what follows computes from what the server computed: each comparison is of one step alone, and
no rounding adds up. A step that differs by more than its dtype explains is a jump.

Then the jumps are undone one after the other, in the order of execution: the server's value of each is put into the
trainer's model, and the sequence scored again. What the gap shrinks by is that jump's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import BaseModel
from torch import Tensor

from mismatch_plugin.bisect.engines import Trainer
from mismatch_plugin.bisect.pairing import Pair, pair, reference
from mismatch_plugin.sglang.fingerprints import place_of
from mismatch_plugin.sglang.modules import Capture, Routing, Tap, View, Which, record

_ALLOWED, _ALLOWED_NARROW = 8.0, 1.5
"""Norm ratio in units of the dtype's epsilon that another order of additions explains in float32, and one more rounding
in narrower dtypes, whose sums are float32. Measured: at most 4 and 0.6."""
_MOST_PARTS, _SMALLEST = 48, 1e-300
_NEAR_TIE = 16.0
"""Two experts whose router logits are so many epsilons of the largest logit apart are equal but for rounding."""


class Step(BaseModel, frozen=True):
    """One comparison of values that were computed from equal ones. ratio: ‖trainer − server‖ / the larger norm. ulp:
    the largest difference of an element, in units in the last place of it or of its row's root mean square. allowed:
    the ratio that the dtype explains. part: of the log-prob gap, None where it was not measured."""

    module: str
    which: Which
    server: str
    what: str
    dtype: str
    ratio: float
    ulp: float
    allowed: float
    part: float | None = None
    why: str = ""

    @property
    def jumps(self) -> bool:
        """It differs by more than the dtype explains."""
        return not self.ratio <= self.allowed  # NaN too


class Verdict(BaseModel, frozen=True):
    """gap: mean |log-prob of the trainer − of the server| over tokens, nats. jumps: in the order of execution.
    explained: the sum of their parts. largest: of the steps that do not jump, by ratio over what is allowed. watched:
    steps that were compared. unpaired: modules of the server that have none at the trainer."""

    tokens: int
    gap: float
    jumps: list[Step]
    explained: float
    largest: list[Step]
    watched: int
    unpaired: list[str]

    @property
    def first(self) -> Step | None:
        """Where the engines differ first."""
        return self.jumps[0] if self.jumps else None


def bisect(trainer: Trainer, server: Capture, dtype: torch.dtype) -> Verdict:
    """Compare the trainer's model with what a server computed. dtype: in which the server holds its weights.

    Raises InputError where most weights differ.
    """
    own = record(trainer.model, server.ids, trainer.call, dtype)
    pairs = pair(server, own)
    served = reference(pairs, server, own)
    gap = _gap(own.log_probs, server.log_probs)
    steps = _steps(trainer, pairs, served, server.ids)
    jumps, explained = _parts(trainer, server, served, [step for step in steps if step.jumps], gap)
    quiet = sorted((step for step in steps if not step.jumps), key=lambda step: -step.ratio / step.allowed)
    paired = {one.server for one in pairs}
    unpaired = [name for name in dict.fromkeys(name for name, _ in server.values) if name not in paired]
    return Verdict(
        tokens=len(server.ids),
        gap=gap,
        jumps=jumps,
        explained=explained,
        largest=quiet[:5],
        watched=len(steps),
        unpaired=unpaired,
    )


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())


def _steps(trainer: Trainer, pairs: Sequence[Pair], served: Mapping[Tap, Tensor], ids: list[int]) -> list[Step]:
    """Each tap, computed from the server's values of those before it."""
    of = {name: one for one in pairs for name in one.trainer}
    found: list[Step] = []
    last = ""

    def visit(name: str, which: Which, view: View | Routing) -> None:
        nonlocal last
        theirs = served.get((name, which))
        if theirs is None:
            return
        mine, one = view.read(), of[name]
        ratio, ulp, dtype = _difference(mine, theirs)
        if which == "routing" and _near_ties(mine, theirs, _router(name, served)):
            ratio = ulp = 0.0
        found.append(
            Step(
                module=name,
                which=which,
                server=one.server,
                what=_what(name, which, last),
                dtype=str(dtype).removeprefix("torch."),
                ratio=ratio,
                ulp=ulp,
                allowed=_allowed(dtype),
                why=one.why if which == "output" else "",
            )
        )
        view.write(theirs.to(mine.dtype))
        last = name

    trainer.log_probs(ids, visit)
    return found


def _allowed(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return eps * (_ALLOWED if dtype.itemsize >= 4 else _ALLOWED_NARROW)


def _difference(mine: Tensor, theirs: Tensor) -> tuple[float, float, torch.dtype]:
    """Norm ratio, largest difference in ulp, and the coarser dtype."""
    dtype = max((mine.dtype, theirs.dtype), key=lambda kind: torch.finfo(kind).eps)
    ours, exact = mine.double(), theirs.double()
    apart = (ours - exact).abs()
    size = torch.maximum(ours.abs(), exact.abs())
    scale = torch.maximum(size, size.square().mean(-1, keepdim=True).sqrt()).clamp_min(_SMALLEST)
    ulp = torch.exp2(scale.log2().floor()) * torch.finfo(dtype).eps
    norm = max(float(ours.norm()), float(exact.norm()), _SMALLEST)
    return float(apart.norm()) / norm, float((apart / ulp).max()), dtype


def _router(name: str, served: Mapping[Tap, Tensor]) -> Tensor | None:
    """The router's logits of the layer of these experts."""
    layer = name.rpartition(".")[0]
    found = (value for (other, which), value in served.items() if which == "output" and other.startswith(f"{layer}."))
    return next((value for value in found if value.shape[-1] == served[name, "routing"].shape[-1]), None)


def _near_ties(mine: Tensor, theirs: Tensor, logits: Tensor | None) -> bool:
    """Where other experts were chosen, they were equal but for rounding, and the rest of the shares agree."""
    other = (mine > 0) != (theirs > 0)
    rows = other.any(-1)
    if logits is None or not rows.any():
        return False
    chosen = torch.where(other, logits.double(), torch.nan)
    spread = chosen.nan_to_num(nan=-torch.inf).amax(-1) - chosen.nan_to_num(nan=torch.inf).amin(-1)
    near = spread[rows] <= _NEAR_TIE * torch.finfo(logits.dtype).eps * logits.double().abs().amax(-1)[rows]
    ratio, _, dtype = _difference(mine[~rows], theirs[~rows])
    return bool(near.all()) and ratio <= _allowed(dtype)


_OUTPUTS = {
    "attention": "attention (mask, scale, dropout, keys and values)",
    "attention_out": "projection behind the attention",
    "embedding": "embedding",
    "experts": "experts (their order, activation, shares)",
    "head": "head",
    "mlp_in": "gate and up projection",
    "mlp_out": "down projection",
    "norm": "normalisation (eps, precision)",
    "qkv": "projection to queries, keys and values",
    "router": "router",
}
_INPUTS = {
    "attention": "rotary embedding (RoPE)",
    "attention_out": "gate behind the attention",
    "mlp_out": "activation",
    "norm": "sum into the residual stream",
}
"""What has no weights and lies before such a module."""


def _what(name: str, which: Which, last: str) -> str:
    """The step in words. last: the tap before it."""
    if which == "routing":
        return "choice of experts (softmax, top-k, order)"
    role = place_of(f"{name}.weight").removesuffix(".weight").rpartition(".")[2].removeprefix("shared_")
    kind = "norm" if "norm" in role else "attention" if role in ("attn", "core_attention") else role
    if which == "output":
        return _OUTPUTS.get(kind, "module")
    return f"{_INPUTS.get(kind, 'what has no weights')} between {last} and it"


def _parts(
    trainer: Trainer, server: Capture, served: Mapping[Tap, Tensor], jumps: list[Step], gap: float
) -> tuple[list[Step], float]:
    """The jumps with their parts, and their sum. Behind the most that are undone one by one, the rest is at once."""
    if not jumps or not gap:
        return jumps, 0.0
    undone: set[Tap] = set()

    def visit(name: str, which: Which, view: View | Routing) -> None:
        if (name, which) in undone:
            view.write(served[name, which])

    left, found = gap, []
    for index, step in enumerate(jumps):
        undone.add((step.module, step.which))
        if index >= _MOST_PARTS and index < len(jumps) - 1:
            found.append(step)
            continue
        now = _gap(trainer.log_probs(server.ids, visit), server.log_probs)
        found.append(step.model_copy(update={"part": (left - now) / gap}))
        left = now
    return found, 1 - left / gap
