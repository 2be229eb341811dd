"""Checksums of a server's tensors, rank by rank, and which of the tensors that were sent each of them is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_plugin.rollout.outcomes import RequestError

Checksums = Sequence[Mapping[str, str]]
"""For each rank of the server: tensor name -> checksum."""

_SHOWN = 4


@dataclass(frozen=True)
class Sent:
    """One tensor of an update. changed: True where it differs from what was sent under its name before, False where it
    is the same and that had arrived, None where nothing is known."""

    matrix: bool
    changed: bool | None


def read_checksums(reply: Any) -> Checksums:
    """The ranks of an answer. Raises RequestError for an answer without any."""
    told = isinstance(reply, dict) and reply.get("success", True) is True
    ranks = reply.get("ranks") if told else None
    listed = ranks if isinstance(ranks, list) else []
    found = [rank.get("checksums") if isinstance(rank, dict) else None for rank in listed]
    if not found or not all(isinstance(rank, dict) and rank for rank in found):
        raise RequestError("content", f"/weights_checker answered {str(reply)[:200]}", 1)
    return [{str(name): str(checksum) for name, checksum in (rank or {}).items()} for rank in found]


def lost(before: Checksums, after: Checksums) -> str | None:
    """What the second checksums lack of the first: nothing can be said about it."""
    if len(before) != len(after):
        return f"checksums came from {len(before)} ranks before it and from {len(after)} after it: look into its log."
    gone = {f"{name} (rank {rank})" for rank, old in enumerate(before) for name in old if name not in after[rank]}
    if not gone:
        return None
    return f"{len(gone)} tensors have no checksum any more: {some(sorted(gone))}. Look into the server's log."


def unchanged(before: Checksums, after: Checksums) -> dict[str, list[int]]:
    """Tensor name -> ranks on which it is what it was."""
    same: dict[str, list[int]] = defaultdict(list)
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for name, checksum in new.items():
            if old.get(name) == checksum:
                same[name].append(rank)
    return same


class Sources:
    """Which of the sent tensors a tensor of the server is made of, without knowledge of the model.

    Names are the same, or the server fuses: q_proj, k_proj and v_proj are qkv_proj, experts.0.up_proj is in w13_weight.
    So what goes by no name of the server's belongs to the fused tensors of the module that it lies in.
    """

    def __init__(self, sent: Mapping[str, Sent], ranks: Checksums) -> None:
        self.names = list(dict.fromkeys(name for rank in ranks for name in rank))
        self._sent = sent
        within: dict[str, list[str]] = defaultdict(list)  # module -> sent names anywhere in it
        siblings: dict[str, list[str]] = defaultdict(
            list
        )  # module and leaf -> sent parameters of its direct submodules
        own = set(self.names)
        for name in (name for name in sent if name not in own):
            *modules, leaf = name.split(".")
            for length in range(1, len(modules) + 1):
                within[".".join(modules[:length])].append(name)
            siblings[".".join([*modules[:-1], leaf])].append(name)
        self._of: dict[str, list[str]] = {}
        for name in self.names:
            module, _, leaf = name.rpartition(".")
            nearby = ".".join([*module.split(".")[:-1], leaf])
            self._of[name] = [name] if name in sent else within.get(module) or siblings.get(nearby) or []
        used = {source for sources in self._of.values() for source in sources}
        self.unknown = [name for name in sent if name not in used]
        """Sent names that belong to no tensor of the server."""

    def of(self, name: str) -> list[str]:
        """The sent names that the server's `name` is made of; [] if that is unknown, or nothing was sent for it."""
        return self._of[name]

    def foreign(self) -> str:
        """A sentence about sent names that belong to no tensor of the server, or nothing."""
        if not self.unknown:
            return ""
        return (
            f"{len(self.unknown)} of {len(self._sent)} names that were sent belong to no tensor of the server and were "
            f"skipped: {some(self.unknown)}; it has {some(self.names)}. "
        )

    def explanation(self) -> str:
        """Why nothing changed, as far as the names tell."""
        if not self._sent:
            why = "The checkpoint holds what the server had, or names that its model does not have. "
        else:
            why = self.foreign() or "The names fit: the server had these values already, or takes none. "
        return why + "If it may have them already (a re-sync, or a run's first update), say expect_changed='any'."


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
