"""Which module of the server is which of the trainer, by the digests of their weights: no names of any model.

The digest of a fused matrix is the sum of those of its parts. So a module of one side is paired with the run of modules
of the other side, in the order of registration, whose digests sum to its own: qkv_proj with q_proj, k_proj and v_proj.
Modules with the same digest (norms of ones, a head that is the embedding) are told apart by their place and order. What
is left has other weights; it is paired by its place alone, and that is the first thing to say of it.

Digests of rows then tell which output channel is which, however the engines interleave heads or pad a vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.bisect.taps import Capture, Module, Tap
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import place_of

_MODULUS = 1 << 64


class Pair(NamedTuple):
    """Modules that hold the same weights, or should. why: in which way they do not; "" where they do."""

    server: tuple[str, ...]
    trainer: tuple[str, ...]
    why: str = ""


def pair(server: Capture, trainer: Capture) -> list[Pair]:
    """All pairs of modules, and one of each attention, in the trainer's order of execution.

    Raises InputError where most weights differ: what comes out then says nothing of the modules.
    """
    found = _same_digest(server, trainer, [])
    found += [
        Pair(one.trainer, one.server)
        for one in _same_digest(trainer, server, [(one.trainer, one.server) for one in found])
    ]
    other = _same_place(server, trainer, found)
    if len(other) > len(found):
        raise InputError(
            f"{len(other)} of {len(other) + len(found)} modules have other weights at the trainer than on the server, "
            f"{other[0].trainer[0]} among them: send the server these weights first."
        )
    found += other
    attentions = zip(_attentions(server), _attentions(trainer), strict=False)
    found += [Pair((theirs,), (ours,)) for theirs, ours in attentions]
    order = _execution(trainer)
    return sorted(found, key=lambda one: min(order.get(name, len(order)) for name in one.trainer))


def _execution(capture: Capture) -> dict[str, int]:
    """Name → when it runs."""
    return {name: index for index, name in enumerate(dict.fromkeys(name for name, _ in capture.values))}


def _attentions(capture: Capture) -> list[str]:
    """In the order of execution."""
    weightless = (name for name in _execution(capture) if name not in capture.modules or not capture.modules[name][1])
    return [name for name in weightless if (name, "output") in capture.values]


def _place(name: str) -> str:
    return place_of(f"{name}.weight")


def _same_digest(
    whole: Capture, parts: Capture, paired: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
) -> list[Pair]:
    """Pairs of one module of `whole` with one or several of `parts`. paired: what is so already, as names of each."""
    modules = [*parts.modules.values()]
    used = {name for _, names in paired for name in names}
    done = {name for names, _ in paired for name in names}
    order, sums = _execution(parts), [0]
    for module in modules:
        sums.append((sums[-1] + module.digest) % _MODULUS)
    starts: dict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(sums[:-1]):
        starts[value].append(index)
    found = []
    for name in _execution(whole):
        module = whole.modules.get(name)
        if module is None or not module.parameters or name in done:
            continue
        runs = [
            tuple(one.name for one in modules[start:end])
            for end in range(1, len(sums))
            for start in starts[(sums[end] - module.digest) % _MODULUS]
            if start < end and not any(one.name in used for one in modules[start:end])
        ]
        if runs:  # ones of norms are alike: the same place, else the first that runs
            place = _place(name)
            run = min(runs, key=lambda run: (_place(run[0]) != place, len(run), order.get(run[0], len(order))))
            used.update(run)
            rows, theirs = _rows(parts, run), module.rows
            other = len(run) > 1 and rows != theirs and sorted(rows) == sorted(theirs)
            found.append(Pair((name,), run, "its rows are those of another part" if other else ""))
    return found


def _same_place(server: Capture, trainer: Capture, found: Sequence[Pair]) -> list[Pair]:
    """Pairs of what runs, has weights, and has no pair of the same ones."""
    sides: list[dict[str, list[Module]]] = []
    for capture, used in (
        (server, {n for p in found for n in p.server}),
        (trainer, {n for p in found for n in p.trainer}),
    ):
        places: dict[str, list[Module]] = defaultdict(list)
        for name in _execution(capture):
            if name not in used and name in capture.modules and capture.modules[name].parameters:
                places[_place(name)].append(capture.modules[name])
        sides.append(places)
    theirs, ours = sides
    return [
        Pair(
            tuple(one.name for one in theirs[place]),
            tuple(one.name for one in ours[place]),
            _why(theirs[place], ours[place]),
        )
        for place in theirs
        if place in ours
    ]


def _why(theirs: Sequence[Module], ours: Sequence[Module]) -> str:
    """In which way the weights differ."""
    totals: list[dict[str, int]] = []
    leaves = {leaf for one in (*theirs, *ours) for leaf in one.parameters}
    for side, modules in (("server's", theirs), ("trainer's", ours)):
        total: dict[str, int] = defaultdict(int)
        for module in modules:
            if lacking := sorted(leaves - module.parameters.keys()):
                return f"the {side} {module.name} has no {', '.join(lacking)}"
            for leaf, value in module.parameters.items():
                total[leaf] += value
        totals.append(total)
    served, own = totals
    differing = [leaf for leaf in served if served[leaf] % _MODULUS != own[leaf] % _MODULUS]
    return f"its {' and '.join(differing)} differ{'s' if len(differing) == 1 else ''}"


def reference(pairs: Sequence[Pair], server: Capture, trainer: Capture) -> dict[Tap, Tensor]:
    """What the server computed, under the trainer's names and in the trainer's order of channels: {tap: [T, features]}.

    What only one side has, or what has another width there, is left out.
    """
    found: dict[Tap, Tensor] = {}
    for one in pairs:
        names, own = one.server, one.trainer
        for which in ("input", "routing"):
            value = server.values.get((names[0], which))
            for name in own:
                mine = trainer.values.get((name, which))
                if value is not None and mine is not None and mine.shape == value.shape:
                    found[name, which] = value
        outputs = [server.values.get((name, "output")) for name in names]
        mine = [trainer.values.get((name, "output")) for name in own]
        if any(value is None for value in (*outputs, *mine)):
            continue
        whole = torch.cat([value for value in outputs if value is not None], -1)
        widths = [value.shape[-1] for value in mine if value is not None]
        if len(names) == len(own) == 1:  # both fuse, and one of them may interleave heads
            whole = whole[:, _order(_rows(server, names), _rows(trainer, own), whole.shape[-1])]
        if whole.shape[-1] > sum(widths) and len(own) == 1:  # a vocabulary that is padded
            whole = whole[:, : widths[0]]
        if whole.shape[-1] == sum(widths):
            found |= {(name, "output"): value for name, value in zip(own, whole.split(widths, -1), strict=True)}
    return found


def _rows(capture: Capture, names: Sequence[str]) -> list[int]:
    return [row for name in names if name in capture.modules for row in capture.modules[name].rows]


def _order(theirs: list[int], ours: list[int], width: int) -> list[int]:
    """For each of our output channels, which of theirs has the same row of weights; as they stand if rows differ."""
    if len(theirs) != width or theirs == ours or sorted(theirs) != sorted(ours):
        return [*range(width)]
    order = [0] * width
    by_row = zip(sorted(range(width), key=ours.__getitem__), sorted(range(width), key=theirs.__getitem__), strict=True)
    for mine, other in by_row:
        order[mine] = other
    return order
