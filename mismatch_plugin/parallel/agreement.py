"""What the ranks of a step must have in common, how it is compared in a few floats, and the sentence where they differ.

`ParallelGroups.agree` runs the collectives; nothing here communicates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import validate_fields
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.units import acting_bounds

NO_MICRO_BATCH = "no micro-batch was given to this step. Give every rank at least one: a loss_mask of 0 trains nothing."
_SAME_FIELDS = "All micro-batches of a step need the same fields, on every rank."
_SHARED = "Give ranks of one context-, tensor- or pipeline-parallel group the same samples in the same order."
_OPTIONAL = tuple(item.name for item in fields(PackedSequences) if item.default is None)


@dataclass(frozen=True)
class StepKind:
    """What one rank brings to a step, without the data.

    settings: equal on all ranks. fields: what micro-batches (or statistics) hold, equal on all ranks that know it; ()
    where none ran. micro_batches (one number a step) and sequences (N of each micro-batch, and its units where these
    are summed over): equal on the ranks of a replica that know them, for these share sequences. None: not known here.
    failure: why this rank cannot take part.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] | None = None
    micro_batches: tuple[int, ...] | None = None
    sequences: tuple[int | str, ...] | None = None
    failure: str = ""

    def digests(self) -> list[float]:
        """[9] floats whose maximum over ranks tells whether they are equal: failed, then d and −d of everything.

        d is an integer below 2^48 that differs, all but surely, where the values do; −inf where it is not known.
        """
        settings = sorted((key, repr(value)) for key, value in _leaves(self.settings))
        names = None if self.fields is None else sorted(self.fields)
        found = [float(bool(self.failure))]
        for value in (settings, names, self.micro_batches, self.sequences):
            d = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "big")
            found += [-math.inf, -math.inf] if value is None else [float(d), -float(d)]
        return found


def settings_of(config: MismatchConfig, **loop: object) -> dict[str, Any]:
    """The configuration, less what a rank may have to itself, with what the loop adds."""
    # The bounds that fractions are reported for depend on how settings were given, too, and they make columns.
    return {**config.model_dump(exclude={"report_dir"}), "reported bounds": acting_bounds(config), **loop}


def step_kind(
    config: MismatchConfig, micro_batches: Sequence[PackedSequences], has_loss: bool, **loop: object
) -> StepKind:
    """Of a step of these micro-batches. has_loss: on the last stage, whose fields and sequences count. loop: settings
    of the training loop that must be the same on all ranks."""
    settings, count = settings_of(config, **loop), (len(micro_batches),)
    if not micro_batches:
        return StepKind(settings, micro_batches=count, failure=NO_MICRO_BATCH)
    if not has_loss:
        return StepKind(settings, micro_batches=count)
    held = [[name for name in _OPTIONAL if getattr(packed, name) is not None] for packed in micro_batches]
    failure = ""
    for number, names in enumerate(held):
        if odd := sorted({*names} ^ {*held[0]}):
            has, lacks = (number, 0) if odd[0] in names else (0, number)
            failure = f"micro-batch {has} has {odd[0]}, micro-batch {lacks} does not. {_SAME_FIELDS}"
            break
    try:
        validate_fields(micro_batches[0].replace(invalid=()), config)
    except ValueError as error:
        failure = failure or str(error)
    sequences: list[int | str] = [len(packed.lengths) for packed in micro_batches]
    if "unit_counts" in config.unit.needs:  # sums of another number of units would not fit into one another
        for number, packed in enumerate(micro_batches):
            if packed.unit_counts is not None:
                sequences[number] = f"{sequences[number]} with {sum(packed.unit_counts)} units"
    return StepKind(settings, ("loss_mask", *held[0]), count, tuple(sequences), failure)


def difference(replicas: Mapping[int, Mapping[int, StepKind]]) -> str:
    """The sentence that names ranks and what they differ in; "" where nothing differs.

    replicas: what every rank holds, by replica (its first rank) and rank.
    """
    ranks = dict(sorted((rank, kind) for replica in replicas.values() for rank, kind in replica.items()))
    for rank, kind in ranks.items():
        if kind.failure:
            return kind.failure if len(ranks) == 1 else f"on rank {rank}: {kind.failure}"
    idle = [rank for rank, kind in ranks.items() if kind.fields == ()]
    if 0 < len(idle) < len(ranks):
        return f"{_names(idle)} ran no micro-batch in this step, other ranks did. Give every rank at least one."
    settings = {rank: {k: f"{k} = {v!r}" for k, v in _leaves(kind.settings)} for rank, kind in ranks.items()}
    if who := _who(settings):
        return f"the ranks of this step have different settings: {who}. Give every rank the same configuration."
    if who := _who({rank: {k: k for k in kind.fields} for rank, kind in ranks.items() if kind.fields is not None}):
        return f"the ranks of this step hold different data: {who}. {_SAME_FIELDS}"
    for _, replica in sorted(replicas.items()):
        counts = {rank: {"": " and ".join(map(str, n))} for rank, kind in replica.items() if (n := kind.micro_batches)}
        if who := _who(counts):
            return f"ranks that share sequences have different numbers of micro-batches: {who}. {_SHARED}"
        held = {rank: enumerate(kind.sequences) for rank, kind in replica.items() if kind.sequences is not None}
        if who := _who({rank: {str(at): f"{n} in micro-batch {at}" for at, n in ns} for rank, ns in held.items()}):
            return f"ranks that share sequences have different numbers of sequences: {who}. {_SHARED}"
    return ""


def _who(held: Mapping[int, Mapping[str, str]]) -> str:
    """ "rank 0 has 2, ranks 1 and 3 have 4": the first key in which ranks differ, and what each of them has there."""
    for key in dict.fromkeys(key for mine in held.values() for key in mine):
        ranks_of: dict[str, list[int]] = {}
        for rank, mine in sorted(held.items()):
            ranks_of.setdefault(mine.get(key, f"no {key}"), []).append(rank)
        if len(ranks_of) > 1:
            return ", ".join(f"{_names(r)} {'has' if len(r) == 1 else 'have'} {what}" for what, r in ranks_of.items())
    return ""


def _names(ranks: Sequence[int]) -> str:
    """Up to six ranks by number."""
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """("tis.upper_bound", 2.0), …"""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value
