"""The whole check: detectors in the order in which one fault would hide another, each fixed before the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mismatch_plugin.check.alignment import find_shift, find_swapped
from mismatch_plugin.check.batch import Batch, Outcome
from mismatch_plugin.check.distribution import find_penalty, find_temperature, find_unrelated
from mismatch_plugin.check.eos import find_null_eos, find_zero_eos
from mismatch_plugin.check.filters import find_truncation
from mismatch_plugin.check.findings import FAULTS, CheckResult, FaultName, Finding, Item, Mismatch, Undecided
from mismatch_plugin.check.hypotheses import find_in_distributions
from mismatch_plugin.check.identity import find_ids
from mismatch_plugin.check.lengths import find_lengths
from mismatch_plugin.check.level import mismatch
from mismatch_plugin.check.numbers import find_fills, find_numbers
from mismatch_plugin.check.populations import find_split, find_stale_server
from mismatch_plugin.check.precision import find_precision
from mismatch_plugin.check.scale import find_scale
from mismatch_plugin.check.versions import find_versions
from mismatch_plugin.check.weights import find_not_updated


class Detector(NamedTuple):
    """find: names faults in a batch, and returns it with what they explain undone, as far as that is possible.

    compares: faults of it that show only next to a training side. alone: it finds others in the records alone.
    ends: after these nothing that follows in its stage can be told. as_given: it looks at the values before any fix.
    unless: not asked where one of these was named before, which looks the same to it.
    """

    find: Callable[[Batch], Outcome]
    compares: tuple[FaultName, ...] = ()
    alone: bool = False
    ends: tuple[FaultName, ...] = ()
    as_given: bool = False
    unless: tuple[FaultName, ...] = ()


OTHER_TEXT: tuple[FaultName, ...] = (
    *("unrelated", "temperature", "penalty", "wrong_prompt", "retokenised", "shift_by_one", "boundary", "stale_server"),
)

STAGES: tuple[tuple[Detector, ...], ...] = (
    (  # Broken pairs and numbers: found first, and undone, so that what follows sees sound pairs.
        Detector(find_ids, ("token_ids", "prompt_ids", "swapped_samples", "shift_by_one", "boundary")),
        Detector(find_null_eos, alone=True),
        Detector(find_scale, ("log_base",), alone=True),
        Detector(find_numbers, alone=True),
        Detector(find_swapped, ("swapped_samples",)),
        Detector(find_lengths, ("boundary",)),
        Detector(find_shift, ("shift_by_one", "boundary")),
        Detector(find_zero_eos),
        Detector(find_fills, ("zero_fill",)),
    ),
    (  # Two distributions that differ by what one side left out: whole ones if there are any, then sampled tokens.
        Detector(find_in_distributions, ends=("shift_by_one",)),
        Detector(find_unrelated, ("unrelated",), ends=("unrelated",)),
        Detector(find_temperature, ("temperature",)),
        Detector(find_penalty, ("penalty",)),
        Detector(find_truncation, alone=True),
    ),
    (  # Other weights: one server's, or all of them.
        Detector(find_stale_server, ("stale_server",)),
        Detector(find_not_updated, ("weights_not_updated", "weights_partly_updated"), unless=OTHER_TEXT),
        Detector(find_split, unless=(*OTHER_TEXT, "weights_not_updated", "weights_partly_updated")),
    ),
    (
        Detector(find_precision, alone=True, as_given=True),
        Detector(find_versions, ("staleness",), alone=True),
    ),
)
"""A fault that one detector of a later stage than the first named is not looked for again by the next ones there."""


def check_batch(
    batch: Batch, *, accept: Collection[str] = (), notes: Sequence[str] = (), found: Sequence[Item] = ()
) -> CheckResult:
    """Look for every fault. accept: faults that are meant: reported, but they do not make the batch faulty.

    found: what is known already, told first.
    """
    given = batch
    found = list(found)
    if not given.has_training:
        needed = {fault for stage in STAGES for detector in stage for fault in detector.compares}
        reason = "there is no training side: give its log-probs, a checkpoint or a server"
        found.append(Undecided(faults=tuple(fault for fault in FAULTS if fault in needed), reason=reason))
    for number, stage in enumerate(STAGES):
        named: set[FaultName] = set()
        for detector in stage:
            before = {item.fault for item in found if isinstance(item, Finding)}
            if not (detector.alone or given.has_training) or before & {*detector.unless}:
                continue
            items, after = detector.find(given if detector.as_given else batch)
            batch = batch if detector.as_given else after
            found += [item for item in items if isinstance(item, Undecided) or not (number and item.fault in named)]
            named |= {item.fault for item in items if isinstance(item, Finding)}
            if named & {*detector.ends}:
                break
    findings = [item for item in found if isinstance(item, Finding)]
    findings = [item.model_copy(update={"accepted": item.fault in accept}) for item in findings]
    undecided = [item for item in found if isinstance(item, Undecided)]
    before, after = mismatch(given), mismatch(batch)
    return CheckResult(
        status="faults" if any(not item.accepted for item in findings) else "clean",
        verdict=_verdict(findings, undecided, before, given),
        samples=len(given),
        tokens=given.token_count,
        findings=tuple(findings),
        undecided=tuple(undecided),
        mismatch=before,
        fixed=after if after != before else None,
        notes=tuple(notes),
    )


def _verdict(findings: Sequence[Finding], undecided: Sequence[Undecided], level: Mismatch | None, batch: Batch) -> str:
    """One line."""
    faults = [item for item in findings if not item.accepted]
    looked = f"{len(batch)} samples, {batch.token_count} tokens"
    if faults:
        names = ", ".join(dict.fromkeys(item.fault for item in faults))
        return f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in {looked}: {names}."
    open_faults = dict.fromkeys(name for item in undecided for name in item.faults)
    caveat = f" Not decided: {', '.join(open_faults)}." if open_faults else ""
    accepted = f" Accepted: {', '.join(dict.fromkeys(item.fault for item in findings))}." if findings else ""
    if level is None:
        return f"No fault in {looked}, without a comparison of the two sides.{accepted}{caveat}"
    return f"No fault in {looked}: {level}.{accepted}{caveat}"
