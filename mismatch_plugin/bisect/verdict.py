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
from mismatch_plugin.sglang.modules import Capture, Routing, Tap, View, Which

_ALLOWED, _ALLOWED_NARROW = 8.0, 1.5
"""Norm ratio in units of the dtype's epsilon that another order of additions explains in float32, and one more rounding
in narrower dtypes, whose sums are float32. Measured: at most 4 and 0.6."""
_MOST_PARTS, _SMALLEST = 48, 1e-300
_NEAR_TIE = 16.0
"""Two experts whose router logits are so many epsilons of the largest logit apart are equal but for rounding."""


class Step(BaseModel, frozen=True):
    """One comparison of values that were computed from equal ones. ratio: ‖trainer − server‖ / the larger norm.
    allowed: the ratio that the dtype explains. part: of the log-prob gap, None where it was not measured."""

    module: str
    which: Which
    server: str
    what: str
    dtype: str
    ratio: float
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


def bisect(trainer: Trainer, server: Capture, dtype: torch.dtype) -> Verdict:
    """Compare the trainer's model with what a server computed. dtype: in which the server holds its weights.

    Raises InputError where most weights differ.
    """
    own = trainer.capture(server.ids, dtype)
    pairs = pair(server, own)
    served = reference(pairs, server, own)
    gap = _gap(own.log_probs, server.log_probs)
    steps = _steps(trainer, pairs, served, server.ids)
    others = sorted((step for step in steps if not step.jumps), key=lambda step: -step.ratio / step.allowed)
    jumps, explained = _parts(trainer, server, served, [step for step in steps if step.jumps], gap)
    unpaired = sorted({name for name, _ in server.values} - {one.server for one in pairs})
    told = {"jumps": jumps, "explained": explained, "largest": others[:5], "unpaired": unpaired}
    return Verdict(tokens=len(server.ids), gap=gap, watched=len(steps), **told)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())


def _steps(trainer: Trainer, pairs: Sequence[Pair], served: Mapping[Tap, Tensor], ids: list[int]) -> list[Step]:
    """Each tap, computed from the server's values of those before it."""
    of = {name: one for one in pairs for name in one.trainer}
    found: list[Step] = []

    def visit(name: str, which: Which, view: View | Routing) -> None:
        theirs = served.get((name, which))
        if theirs is None:
            return
        mine = view.read()[:, : theirs.shape[-1]]
        ratio, dtype = _difference(mine, theirs)
        if which == "routing" and _near_ties(name, mine, theirs, served):
            ratio = 0.0
        step = Step(
            module=name,
            which=which,
            server=of[name].server,
            what=_what(name, which, found[-1].module if found else "the ids"),
            dtype=str(dtype).removeprefix("torch."),
            ratio=ratio,
            allowed=_allowed(dtype),
            why=of[name].why if which == "output" else "",
        )
        found.append(step)
        view.write(theirs.to(mine.dtype))

    trainer.log_probs(ids, visit)
    return found


def _allowed(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * (_ALLOWED if dtype.itemsize >= 4 else _ALLOWED_NARROW)


def _difference(mine: Tensor, theirs: Tensor) -> tuple[float, torch.dtype]:
    """Norm ratio, and the coarser dtype."""
    dtype = max((mine.dtype, theirs.dtype), key=lambda kind: torch.finfo(kind).eps)
    ours, exact = mine.double(), theirs.double()
    norm = max(float(ours.norm()), float(exact.norm()), _SMALLEST)
    return float((ours - exact).norm()) / norm, dtype


def _near_ties(name: str, mine: Tensor, theirs: Tensor, served: Mapping[Tap, Tensor]) -> bool:
    """Where others were chosen, their router's logits were equal but for rounding; the rest of the shares agree."""
    layer, other = name.rpartition(".")[0], (mine > 0) != (theirs > 0)
    rows = other.any(-1)
    for (module, which), logits in served.items():
        if module.startswith(f"{layer}.") and which == "output" and logits.shape == mine.shape and rows.any():
            exact, eps = logits.double()[rows], torch.finfo(logits.dtype).eps
            highest = exact.masked_fill(~other[rows], -torch.inf).amax(-1)
            lowest = exact.masked_fill(~other[rows], torch.inf).amin(-1)
            near = highest - lowest <= _NEAR_TIE * eps * exact.abs().amax(-1)
            ratio, dtype = _difference(mine[~rows], theirs[~rows])
            return bool(near.all()) and ratio <= _allowed(dtype)
    return False


_WORDS = {
    "attention input": "rotary embedding (RoPE), or a cache of another dtype,",
    "attention output": "attention (mask, scale, dropout, keys and values)",
    "attention_out input": "gate behind the attention",
    "attention_out output": "projection behind the attention",
    "experts output": "experts (their order, activation, shares)",
    "experts routing": "choice of experts (softmax, top-k, order)",
    "mlp_in output": "gate and up projection",
    "mlp_out input": "activation",
    "mlp_out output": "down projection",
    "norm input": "sum into the residual stream",
    "norm output": "normalisation (eps, precision)",
    "qkv output": "projection to queries, keys and values",
}
"""Of a role's outputs; of its inputs what has no weights and lies before it."""


def _what(name: str, which: Which, last: str) -> str:
    """The step in words. last: the module before it."""
    role = place_of(f"{name}.weight").removesuffix(".weight").rpartition(".")[2].removeprefix("shared_")
    kind = "norm" if "norm" in role else "attention" if role in ("attn", "core_attention") else role
    if which == "input":
        return f"{_WORDS.get(f'{kind} input', 'what has no weights')} between {last} and it"
    return _WORDS.get(f"{kind} {which}", kind)


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
        if index < _MOST_PARTS or step is jumps[-1]:
            now = _gap(trainer.log_probs(server.ids, visit), server.log_probs)
            step = step.model_copy(update={"part": (left - now) / gap})
            left = now
        found.append(step)
    return found, 1 - left / gap
