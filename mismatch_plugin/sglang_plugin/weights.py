"""The fingerprint of what one scheduler process and its fellow ranks have loaded, and what the last update changed."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import torch.distributed as dist

from mismatch_plugin.rollout.checksums import some
from mismatch_plugin.rollout.fingerprints import Digest, combined, digests, fingerprint, read_tensors, written

logger = logging.getLogger("mismatch_plugin")


def exchanged(scheduler: Any, own: Any) -> list[Any]:
    """What each rank of this pipeline stage has. Collectives: one gather of objects, if there are several."""
    group = scheduler.weight_updater.tp_cpu_group
    ranks: list[Any] = [own]
    if dist.get_world_size(group) > 1:
        ranks = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)
    return ranks


class LoadedWeights:
    """Digests of the parameters of the target model (not of a draft of speculative decoding), over all ranks.

    Ranks of one pipeline stage exchange theirs at once. Stages cannot wait for each other, since each hands an update
    on when it is done with it: they leave theirs in the store of the process group, and the first one, which answers
    requests, reads them as soon as they are there, which is before any token of the new weights is.
    """

    def __init__(self, scheduler: Any, pp_rank: int, pp_size: int, tp_rank: int) -> None:
        self._scheduler = scheduler
        self._pp_rank, self._pp_size, self._tp_rank = pp_rank, pp_size, tp_rank
        self._taken = self._number = 0
        self._stage: dict[str, Digest] = {}  # this pipeline stage's
        self._before: dict[str, Digest] = {}  # of all stages, before the last update
        self._awaits_stages = False
        self.tensors: dict[str, Digest] = {}
        self.fingerprint: str | None = None
        """None: an update is half done, or it could not be taken."""
        self.update: dict[str, int] | None = None
        self.seconds = 0.0

    def take(self) -> None:
        """The digests as they are now. One host sync; one exchange among the ranks of a stage."""
        started = time.perf_counter()
        own: dict[str, Digest] | None = None
        try:
            own = digests(self._scheduler.tp_worker.model_runner.model.named_parameters())
        except Exception:  # the other ranks wait for an answer
            logger.exception("mismatch_plugin: no fingerprint of the weights could be taken")
        ranks = exchanged(self._scheduler, own)
        whole = [rank for rank in ranks if rank is not None]
        self._stage = combined(whole) if len(whole) == len(ranks) else {}
        self.tensors, self.fingerprint = {}, None
        self._taken += 1
        self._awaits_stages = self._pp_size > 1
        if not self._awaits_stages:
            self._whole([self._stage])
        elif self._tp_rank == 0:
            store = dist.distributed_c10d._get_default_store()
            store.set(self._key(self._taken, self._pp_rank), json.dumps(written(self._stage)))
            if self._taken > 2:  # all stages have read it
                store.delete_key(self._key(self._taken - 2, self._pp_rank))
        self.seconds = time.perf_counter() - started

    def begin(self) -> None:
        """A part of an update is loaded: until its end the weights are neither the old nor the new ones."""
        self.fingerprint, self._awaits_stages = None, False

    def end(self, required: int, success: bool = True) -> str:
        """A whole update is loaded. Returns why it fails, "" if it does not.

        required: how many tensors must change; of a pipeline, of the first stage's. success: SGLang calls it one; what
        is none counts as an update if it changed something.
        """
        self._number += 1
        update, self.update = self.update, None
        before, self._before = self._stage, self.tensors
        self.take()
        if not success and self._stage == before:
            self._number, self.update, self._before = self._number - 1, update, {}
        if not required:
            return ""
        if not self._stage:
            return "MISMATCH_REQUIRE_CHANGE: whether the update changed anything is not known: see the server's log."
        same = sorted(name for name, told in self._stage.items() if before.get(name) == told)
        if (changed := len(self._stage) - len(same)) >= required:
            return ""
        return (
            f"MISMATCH_REQUIRE_CHANGE={required}: the weights were loaded, and {changed} of {len(self._stage)} tensors "
            f"changed. The same as before: {some(same)}."
        )

    def complete(self) -> None:
        """Read what the other pipeline stages left, if they all have. Nothing is done where it is known."""
        if not self._awaits_stages:
            return
        store = dist.distributed_c10d._get_default_store()
        keys = [self._key(self._taken, rank) for rank in range(self._pp_size)]
        if store.check(keys):
            self._awaits_stages = False
            self._whole([read_tensors({"tensors": json.loads(store.get(key))}) for key in keys])

    def _key(self, taken: int, pp_rank: int) -> str:
        return f"mismatch_plugin/{taken}/{pp_rank}"

    def _whole(self, stages: list[dict[str, Digest]]) -> None:
        if all(stages):
            self.tensors = combined(stages)
            self.fingerprint = fingerprint(self.tensors)
        if self._number and self.tensors and self._before:
            changed = {name for name, told in self.tensors.items() if self._before.get(name) != told}
            matrices = {name for name, (_, _, dimensions) in self.tensors.items() if dimensions > 1}
            self.update = {
                "number": self._number,
                "changed": len(changed),
                "tensors": len(self.tensors),
                "changed_matrices": len(changed & matrices),
                "matrices": len(matrices),
            }
