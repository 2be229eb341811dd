"""Which weights sampled a response and which train: from the host's rollout data to the loss, for `rs.max_staleness`.

Both hosts keep the version that SGLang names at the end of each call (`Sample.weight_versions`), and not which tokens
it gave: a response is as old as the oldest of them. The trainer's version is the number of its last weight update
(`weight_updater.weight_version`), by which the engines know these weights. miles hands the versions to its training
processes; slime does with the patch of `slime/ray/rollout.py`. A batch holds none, so that they are found by its loss
masks, which are the rollout's own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.data.versions import INITIAL_VERSION
from mismatch_plugin.hooks.base import wrap_once
from mismatch_plugin.hooks.slime.config import VERSIONS_PATCH, set_hook

_KEY = "weight_versions"


@dataclass(eq=False)
class Versions:
    """Of the rollout that one training process works on.

    host: its name. trainer: the version that trains; None before the first rollout. failure: why a version is not
    known, for all ranks to raise together; "" where all are.
    """

    host: str
    trainer: int | None = None
    failure: str = ""
    _held: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _told: bool = False

    def watch(self, actor: Any) -> None:
        """Let `train_actor` of the host's training class tell this of every rollout. Idempotent.

        Ray's actors are of a subclass of it, which has each of its methods again, wrapped for tracing: the methods of
        subclasses tell as well.
        """
        if "train_actor" in vars(actor):
            wrap_once(actor, "train_actor", self._tell)
        for below in actor.__subclasses__():
            self.watch(below)

    def _tell(self, own: Any, trainer: Any, rollout_id: int, rollout_data: Any, *args: Any, **kwargs: Any) -> Any:
        if self._told:  # a subclass's has told
            return own(trainer, rollout_id, rollout_data, *args, **kwargs)
        self.read(rollout_data, getattr(getattr(trainer, "weight_updater", None), "weight_version", None))
        self._told = True
        try:
            return own(trainer, rollout_id, rollout_data, *args, **kwargs)
        finally:
            self._told = False

    def read(self, rollout_data: dict[str, Any], trainer: int | None) -> None:
        """A rollout's loss masks and versions, one a sample. slime's own logging cannot read them: they are taken out.

        Host syncs: one for a sample without versions, to know whether it trains.
        """
        masks = rollout_data["loss_masks"]
        told = rollout_data.pop(_KEY, None) if self.host == "slime" else rollout_data.get(_KEY)
        self.trainer, self.failure, self._held = trainer, "", {}
        if trainer is None:
            self.failure = (
                f"--rs-max-staleness counts back from the number of the last weight update, and {self.host}'s training "
                f"process has none: leave it out."
            )
            return
        names = rollout_data.get("sample_indices") or range(len(masks))
        for name, mask, versions in zip(names, masks, told or [()] * len(masks), strict=True):
            try:
                oldest = min(map(_number, versions)) if versions else None
            except ValueError as error:
                self.failure = f"sample {name}: {error}"
                return
            if oldest is None and bool((mask != 0).any()):
                patch = f"apply the patch ({VERSIONS_PATCH}), and " if self.host == "slime" else ""
                self.failure = (
                    f"sample {name} has no weight version (Sample.weight_versions): {patch}let a custom generate "
                    f"function call Sample.update_from_meta_info with SGLang's meta_info, or leave --rs-max-staleness "
                    f"out."
                )
                return
            self._held[id(mask)] = mask, trainer if oldest is None else oldest

    def on(self, packed: PackedSequences, config: MismatchConfig, loss_masks: Sequence[Tensor]) -> PackedSequences:
        """The packed batch with the versions of the samples whose masks these are, where the settings need them.

        Host syncs: none. Raises ValueError where a version is missing or the rollout was not read.
        """
        if config.rs.max_staleness is None:
            return packed
        if self.failure:
            raise ValueError(self.failure)
        held = [self._held.get(id(mask)) for mask in loss_masks]
        if self.trainer is None or None in held:
            raise ValueError(
                f"--rs-max-staleness needs the versions of {self.host}'s rollout, and the loss masks are not those of "
                f"one that was read: {set_hook(self.host, 'init')}."
            )
        versions = torch.tensor([version for _, version in filter(None, held)], dtype=torch.int64)
        tokens = torch.repeat_interleave(versions, torch.tensor(packed.lengths, dtype=torch.int64))
        return packed.replace(weight_versions=tokens.to(packed.loss_mask.device), trainer_version=self.trainer)


def _number(version: Any) -> int:
    """The hosts name their versions by the number of the update, from 1; SGLang's own name is that before the first."""
    if str(version) == INITIAL_VERSION:
        return 0
    if not str(version).isdecimal():
        raise ValueError(f"weight version {version!r} is not the number of an update: leave --rs-max-staleness out.")
    return int(version)
