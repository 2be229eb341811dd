"""Which module of the server is which of the trainer, by the digests of their weights: no names of any model.

The digest of a fused matrix is the sum of those of its parts. So a module of the server is paired with the run of the
trainer's modules, in the order of registration, whose digests sum to its own: qkv_proj with q_proj, k_proj and v_proj.
Modules with the same digest (norms of ones, a head that is the embedding) are told apart by their place and order. What
is left has other weights; it is paired by its place alone, and that is the first thing to say of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import MODULUS, place_of
from mismatch_plugin.sglang.modules import Capture, Tap

_MOST_FUSED = 4
"""Modules of a trainer that an engine makes one of: at most a projection to q, k, v and a gate."""


class Pair(NamedTuple):
    """Modules that hold the same weights, or should. why: in which way they do not; "" where they do."""

    server: str
    trainer: tuple[str, ...]
    why: str = ""


def pair(server: Capture, trainer: Capture) -> list[Pair]:
    """All pairs of modules that run, and of attentions. Raises InputError where most weights differ: then modules of
    one model say nothing of the other's."""
    found = _same_digest(server, trainer)
    other = _same_place(server, trainer, found)
    if len(other) > len(found):
        raise InputError(
            f"{len(other)} of {len(other) + len(found)} modules have other weights at the trainer than on the server, "
            f"{other[0].trainer[0]} among them: send the server these weights first."
        )
    attentions = zip(_running(server, weights=False), _running(trainer, weights=False), strict=False)
    return [*found, *other, *(Pair(theirs, (ours,)) for theirs, ours in attentions)]


def _running(capture: Capture, weights: bool = True) -> list[str]:
    """Names of modules, or of what has no weights, in the order of execution."""
    return [name for name in dict.fromkeys(name for name, _ in capture.values) if (name in capture.modules) == weights]


def _place(name: str) -> str:
    return place_of(f"{name}.weight")


def _same_digest(server: Capture, trainer: Capture) -> list[Pair]:
    names, order = [*trainer.modules], _running(trainer)
    runs = defaultdict[int, list[tuple[str, ...]]](list)
    for length in range(1, _MOST_FUSED + 1):
        for start in range(len(names) - length + 1):
            run = tuple(names[start : start + length])
            runs[_digest(trainer, run)].append(run)
    found, used = list[Pair](), set[str]()
    for whole in _running(server):
        left = [run for run in runs[_digest(server, [whole])] if used.isdisjoint(run)]
        if left:  # ones of norms are alike: the same place, else the first that runs
            rank = {run: order.index(run[0]) if run[0] in order else len(order) for run in left}
            best = min(left, key=lambda run: (_place(run[0]) != _place(whole), len(run), rank[run]))
            found.append(Pair(whole, best))
            used.update(best)
    return found


def _digest(capture: Capture, names: Sequence[str]) -> int:
    return sum(value for name in names for value in capture.modules[name].values()) % MODULUS


def _same_place(server: Capture, trainer: Capture, found: Sequence[Pair]) -> list[Pair]:
    """Pairs of what runs and has no pair of the same weights."""
    done, used = {one.server for one in found}, {name for one in found for name in one.trainer}
    ours = defaultdict[str, list[str]](list)
    for name in _running(trainer):
        if name not in used:
            ours[_place(name)].append(name)
    pairs = ((whole, ours[_place(whole)]) for whole in _running(server) if whole not in done and _place(whole) in ours)
    return [Pair(whole, tuple(parts), _why(server, whole, trainer, parts)) for whole, parts in pairs]


def _why(server: Capture, whole: str, trainer: Capture, parts: Sequence[str]) -> str:
    """In which way the weights differ."""
    biased = "bias" in server.modules[whole]
    other = [part for part in parts if ("bias" in trainer.modules[part]) != biased]
    if not other:
        return "other values in its weights"
    return f"the trainer's {other[0]} has no bias" if biased else f"the server's {whole} has no bias"


def reference(pairs: Sequence[Pair], server: Capture, trainer: Capture) -> dict[Tap, Tensor]:
    """What the server computed, under the trainer's names: {tap: [T, features]}. What only one side has, or has in
    another width, is left out."""
    found: dict[Tap, Tensor] = {}
    for whole, parts, _ in pairs:
        for name in parts:
            for which in ("input", "routing"):
                theirs, mine = server.values.get((whole, which)), trainer.values.get((name, which))
                if theirs is not None and mine is not None and mine.shape == theirs.shape:
                    found[name, which] = theirs
        outputs = [trainer.values.get((name, "output")) for name in parts]
        widths = [0 if value is None else value.shape[-1] for value in outputs]
        theirs = server.values.get((whole, "output"))
        if theirs is None or 0 in widths or theirs.shape[-1] < sum(widths):
            continue
        if theirs.shape[-1] == sum(widths) or len(parts) == 1:  # a vocabulary may be padded
            split = theirs[:, : sum(widths)].split(widths, -1)
            found |= {(name, "output"): value for name, value in zip(parts, split, strict=True)}
    return found
