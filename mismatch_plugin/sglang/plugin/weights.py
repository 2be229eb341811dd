"""The fingerprint of what one scheduler process and its fellow ranks have loaded, and what the last update changed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin import __version__
from mismatch_plugin.sglang.fingerprints import Digest, combined, digests, fingerprint, read_tensors, some, written

logger = logging.getLogger("mismatch_plugin")
REQUIRE = "MISMATCH_REQUIRE_CHANGE"
_KEPT = 8
"""Generations of what pipeline stages tell each other: one may be some updates behind."""
_ELEMENTS = 256
"""Of each matrix that are compared one by one, at least, where it has so many."""
_PATIENCE = timedelta(seconds=60)
"""How far apart the ranks of one server may be when they have started."""


def all_ready(ready: bool) -> bool:
    """Whether every process of this server's world has the plugin and is ready for it; the same on all that have it.

    No collective: a node without the plugin would never join one. The first process that knows decides for all.
    """
    if dist.get_world_size() == 1:
        return ready
    store = dist.distributed_c10d._get_default_store()
    keys = [f"mismatch_plugin/ready/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], __version__ if ready else "no")
    verdict = "off"
    with suppress(dist.DistStoreError):
        store.wait(keys, _PATIENCE)
        if {store.get(key) for key in keys} == {__version__.encode()}:
            verdict = "on"
    return store.compare_set("mismatch_plugin/verdict", "", verdict) == b"on"


def _elements(named: Iterable[tuple[str, Tensor]]) -> Tensor | None:
    """Some elements of each matrix as float32, at equal distances that no row's length divides; None of no matrix."""
    kinds = [tensor.detach() for _, tensor in named if tensor.dim() > 1 and tensor.is_floating_point()]
    parts = [kind.view(-1)[:: kind.numel() // _ELEMENTS | 1] for kind in kinds if kind.is_contiguous()]
    return torch.cat([part.to(parts[0].device) for part in parts]).float() if parts else None


class Stage(NamedTuple):
    """Of one pipeline stage. tensors: digests of whole ones. same: those that all ranks have as they were. kept: these,
    and all tensors of a rank that has all its matrices as they were. None: not known."""

    tensors: dict[str, Digest]
    same: list[str] | None = None
    kept: list[str] | None = None


def _stage(before: Sequence[Mapping[str, Digest]] | None, after: Sequence[Mapping[str, Digest]]) -> Stage:
    """Of its ranks. One shard alone may stay: a part of the vocabulary, or an expert, of which no token was."""
    if before is None:
        return Stage(combined(after))
    whole = combined(after)
    matrices = {name for name, (_, _, dimensions) in whole.items() if dimensions > 1}
    kept = [{name for name, new in now.items() if old.get(name) == new} for old, now in zip(before, after, strict=True)]
    changed = {name for now, own in zip(after, kept, strict=True) for name in now.keys() - own}
    idle = [own for now, own in zip(after, kept, strict=True) if now.keys() & matrices and now.keys() & matrices <= own]
    same = whole.keys() - changed
    return Stage(whole, sorted(same), sorted(same.union(*idle)))


class LoadedWeights:
    """Digests of the parameters of the target model (not of a draft of speculative decoding), over all ranks.

    Ranks of one pipeline stage exchange theirs at once. Stages cannot wait for each other, since each hands an update
    on when it is done with it: they leave theirs in the store of the process group, and the first one, which answers
    requests, reads them as soon as they are there, which is before any token of the new weights is.
    """

    def __init__(self, scheduler: Any, pp_rank: int, pp_size: int, tp_rank: int) -> None:
        self._scheduler = scheduler
        self._pp_rank, self._pp_size, self._tp_rank = pp_rank, pp_size, tp_rank
        self._taken = 0
        self._ranks: list[dict[str, Digest]] | None = None
        """Of this pipeline stage; None: of one of them they could not be taken."""
        self._elements: Tensor | None = None
        self._base: tuple[list[dict[str, Digest]] | None, Tensor | None] = (None, None)
        """Both as they were before the last update."""
        self._changed_elements: float | None = None
        self._stage = Stage({})
        self._updated = self._awaits_stages = False
        self.number = 0
        """Of updates since the model was loaded."""
        self.tensors: dict[str, Digest] = {}
        self.fingerprint: str | None = None
        """None: an update is half done, or it could not be taken."""
        self.update: dict[str, Any] | None = None
        self.unchanged: list[str] = []
        """Matrices that the last update left as they were."""
        self.seconds = 0.0

    def take(self, success: bool | None = None) -> list[bool]:
        """The digests as they are now: of loaded weights, or after something else than an update changed them.

        success: of an update on this rank; it is returned of each rank. Two host syncs; one gather of objects among
        the ranks of a stage."""
        started = time.perf_counter()
        own: dict[str, Digest] | None = None
        share: float | None = None
        try:
            named = [*self._scheduler.tp_worker.model_runner.model.named_parameters()]
            own, self._elements, before = digests(named), _elements(named), self._base[1]
            if before is not None and self._elements is not None:
                share = float((before != self._elements).float().mean())
        except Exception:  # the other ranks wait for an answer
            logger.exception("mismatch_plugin: no fingerprint of the weights could be taken")
        group = self._scheduler.weight_updater.tp_cpu_group
        told: list[Any] = [(own, success, share)] * dist.get_world_size(group)
        if len(told) > 1:
            dist.all_gather_object(told, (own, success, share), group=group)
        whole = [rank for rank, _, _ in told if rank is not None]
        shares = [one for _, _, one in told if one is not None]
        self._changed_elements = round(sum(shares) / len(shares), 5) if len(shares) == len(told) else None
        self._ranks = whole if len(whole) == len(told) else None
        self._stage = Stage({}) if self._ranks is None else _stage(self._base[0], whole)
        self.tensors, self.fingerprint = {}, None
        self._updated = success is not None
        self._taken += 1
        self._awaits_stages = self._pp_size > 1
        if not self._awaits_stages:
            self._whole([self._stage])
        elif self._tp_rank == 0:
            self._leave()
        self.seconds = time.perf_counter() - started
        return [bool(done) for _, done, _ in told]

    def _leave(self) -> None:
        """This stage's, for the first one."""
        left = {**self._stage._asdict(), "tensors": written(self._stage.tensors)}
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(self._key(self._taken, self._pp_rank), json.dumps(left))
            if self._taken > _KEPT:
                store.delete_key(self._key(self._taken - _KEPT, self._pp_rank))
        except Exception:  # the other ranks go on
            logger.exception("mismatch_plugin: the other pipeline stages get no fingerprint of this one")

    def begin(self) -> None:
        """A part of an update is loaded: until its end the weights are neither the old nor the new ones."""
        self.fingerprint, self._awaits_stages = None, False

    def end(self, required: int, success: bool = True, goes_on: bool = False) -> str:
        """A whole update is loaded. Returns why it fails, "" if it does not.

        required: how many tensors must change; of a pipeline, of the first stage's. The first update may
        change none: a run begins with one that sends the loaded weights. success: SGLang calls it one on this rank;
        what is none on all of them counts as an update if it changed something. goes_on: it is a further part of the
        last update.
        """
        if not goes_on:
            self.number, self._base = self.number + 1, (self._ranks, self._elements)
        update, self.update = self.update, None
        before = self._stage.tensors
        done = self.take(success)
        tensors, _, kept = self._stage
        if not any(done) and tensors and tensors == before:
            self.number, self.update, self._updated = self.number - (not goes_on), update, False
        if not required:
            return ""
        if any(done) and not all(done):
            failed = ", ".join(str(rank) for rank, fine in enumerate(done) if not fine)
            return f"{REQUIRE}: the update failed on tensor-parallel rank {failed}, and did not on the others."
        if kept is None:
            return f"{REQUIRE}: whether the update changed anything is not known: see the server's log."
        changed = len(tensors) - len(kept)
        if changed >= required or (self.number == 1 and tensors == before):
            return ""
        return (
            f"{REQUIRE}={required}: the weights were loaded, and {changed} of {len(tensors)} tensors changed. "
            f"The same as before: {some(sorted(kept))}."
        )

    def complete(self) -> None:
        """Read what the other pipeline stages left, if they all have. Nothing is done where it is known."""
        if not self._awaits_stages:
            return
        store = dist.distributed_c10d._get_default_store()
        keys = [self._key(self._taken, rank) for rank in range(self._pp_size)]
        if store.check(keys):
            self._awaits_stages = False
            left = [json.loads(store.get(key)) for key in keys]
            self._whole([Stage(read_tensors(stage), stage["same"], stage["kept"]) for stage in left])

    def _key(self, taken: int, pp_rank: int) -> str:
        return f"mismatch_plugin/{taken}/{pp_rank}"

    def _whole(self, stages: list[Stage]) -> None:
        if not all(stage.tensors for stage in stages):
            return
        self.tensors = combined([stage.tensors for stage in stages])
        self.fingerprint = fingerprint(self.tensors)
        if self._updated and all(stage.same is not None for stage in stages):
            same = {name for stage in stages for name in stage.same or ()}
            kept = {name for stage in stages for name in stage.kept or ()}
            matrices = {name for name, (_, _, dimensions) in self.tensors.items() if dimensions > 1}
            self.unchanged = sorted(matrices & kept)
            self.update = {
                "number": self.number,
                "changed": len(self.tensors.keys() - same),
                "tensors": len(self.tensors),
                "changed_matrices": len(matrices - kept),
                "matrices": len(matrices),
                "unchanged": self.unchanged[:3],
                "changed_elements": self._changed_elements,
            }
