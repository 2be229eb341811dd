"""Which module of the server is which of the trainer, by the digests of their weights: no names of any model.

The digest of a fused matrix is the sum of those of its parts. So a module of the server is paired with the run of the
trainer's modules, in the order of registration, whose digests sum to its own: qkv_proj with q_proj, k_proj and v_proj.
Modules with the same digest (norms of ones, a head that is the embedding) are told apart by their place and order. What
is left has other weights; it is paired by its place alone, and that is the first thing to say of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import MODULUS, place_of
from mismatch_plugin.sglang.modules import Capture, Tap, Weights


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
    attentions = zip(_attentions(server), _attentions(trainer), strict=False)
    return [*found, *other, *(Pair(theirs, (ours,)) for theirs, ours in attentions)]


def _running(capture: Capture) -> list[str]:
    """Names in the order of execution."""
    return list(dict.fromkeys(name for name, _ in capture.values))


def _attentions(capture: Capture) -> list[str]:
    return [name for name in _running(capture) if name not in capture.modules]


def _place(name: str) -> str:
    return place_of(f"{name}.weight")


def _same_digest(server: Capture, trainer: Capture) -> list[Pair]:
    names, order = [*trainer.modules], _running(trainer)
    sums, starts = [0], defaultdict[int, list[int]](list)
    for index, name in enumerate(names):
        starts[sums[-1]].append(index)
        sums.append((sums[-1] + _digest(trainer.modules[name])) % MODULUS)
    found, used = list[Pair](), set[str]()
    for whole in _running(server):
        if whole not in server.modules:
            continue
        runs = [
            tuple(names[start:end])
            for end in range(1, len(sums))
            for start in starts[(sums[end] - _digest(server.modules[whole])) % MODULUS]
            if start < end and used.isdisjoint(names[start:end])
        ]
        if runs:  # ones of norms are alike: the same place, else the first that runs
            rank = {name: order.index(name) if name in order else len(order) for name, *_ in runs}
            run = min(runs, key=lambda run: (_place(run[0]) != _place(whole), len(run), rank[run[0]]))
            found.append(Pair(whole, run))
            used.update(run)
    return found


def _digest(weights: Weights) -> int:
    return sum(weights.values()) % MODULUS


def _same_place(server: Capture, trainer: Capture, found: Sequence[Pair]) -> list[Pair]:
    """Pairs of what runs and has no pair of the same weights."""
    done, used = {one.server for one in found}, {name for one in found for name in one.trainer}
    ours = defaultdict[str, list[str]](list)
    for name in _running(trainer):
        if name in trainer.modules and name not in used:
            ours[_place(name)].append(name)
    theirs = (name for name in _running(server) if name in server.modules and name not in done)
    pairs = ((whole, ours[_place(whole)]) for whole in theirs if _place(whole) in ours)
    return [
        Pair(whole, tuple(parts), _why(whole, server.modules[whole], {name: trainer.modules[name] for name in parts}))
        for whole, parts in pairs
    ]


def _why(name: str, whole: Weights, parts: Mapping[str, Weights]) -> str:
    """In which way the weights differ."""
    for part, own in parts.items():
        if lacking := sorted(whole.keys() - own.keys()):
            return f"the trainer's {part} has no {' and no '.join(lacking)}"
    if more := sorted({leaf for own in parts.values() for leaf in own} - whole.keys()):
        return f"the server's {name} has no {' and no '.join(more)}"
    sums = {leaf: sum(own[leaf] for own in parts.values()) % MODULUS for leaf in whole}
    return f"other values in its {' and '.join(leaf for leaf, value in whole.items() if sums[leaf] != value)}"


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
