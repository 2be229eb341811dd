"""The whole check: detectors in the order in which one fault would hide another, each fixed before the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.alignment import find_ids, find_lengths, find_shift, find_swapped
from mismatch_plugin.diagnose.detectors.distribution import (
    find_penalty,
    find_sampling,
    find_temperature,
    find_token_offset,
    find_truncation,
    find_unrelated,
)
from mismatch_plugin.diagnose.detectors.level import equal_sides, mismatch
from mismatch_plugin.diagnose.detectors.numbers import (
    find_fills,
    find_null_eos,
    find_numbers,
    find_precision,
    find_scale,
    find_zero_eos,
)
from mismatch_plugin.diagnose.detectors.populations import find_split, find_stale_server
from mismatch_plugin.diagnose.detectors.served import find_served, note, weights_agree
from mismatch_plugin.diagnose.detectors.size import find_size
from mismatch_plugin.diagnose.detectors.tokens import find_retokenised, find_wrong_prompt
from mismatch_plugin.diagnose.detectors.versions import find_versions
from mismatch_plugin.diagnose.detectors.vocabulary import find_in_distributions
from mismatch_plugin.diagnose.detectors.weights import find_not_updated
from mismatch_plugin.diagnose.findings import FAULTS, CheckResult, FaultName, Finding, Item, Mismatch, Status, Undecided
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS, size_class


class Detector(NamedTuple):
    """find: names faults in a batch, and returns it with what they explain undone, as far as that is possible.

    compares: faults of it that show only next to a training side. alone: it finds others in the records alone.
    ends: after these nothing that follows in its stage can be told. as_given: it looks at the values before any fix.
    unless: these explain what it would find; named before, in any stage, it is left out. told: what servers tell of
    themselves: it is named before all else, and nothing after it names the same fault. untold: it judges weights by
    statistics: left out where these faults were told. old: it looks for weights from before an update, which are none
    where both sides' fingerprints are equal.
    """

    find: Callable[[Batch], Outcome]
    compares: tuple[FaultName, ...] = ()
    alone: bool = False
    ends: tuple[FaultName, ...] = ()
    as_given: bool = False
    unless: tuple[FaultName, ...] = ()
    told: bool = False
    untold: tuple[FaultName, ...] = ()
    old: bool = False


_OTHER_DISTRIBUTION: tuple[FaultName, ...] = ("unrelated", "wrong_prompt", "temperature", "truncation", "penalty")
_OTHER_TEXT: tuple[FaultName, ...] = (
    "unrelated", "temperature", "penalty", "wrong_prompt", "retokenised", "shift_by_one", "boundary", "stale_server",
)  # fmt: skip
_LEFT_OUT: tuple[FaultName, ...] = (
    "missing", "infinite", "nan", "positive", "floor", "zero_fill", "eos_appended", "token_offset",
)  # fmt: skip
"""Once undone, tokens are missing by what they are: those that are left were not drawn as the log-probs tell."""
_OLD_WEIGHTS: tuple[FaultName, ...] = (
    "staleness", "weights_not_updated", "weights_partly_updated", "stale_server", "server_differs", "other_weights",
)  # fmt: skip
_TOLD: tuple[FaultName, ...] = ("weights_not_updated", "weights_partly_updated", "stale_server", "other_weights")

STAGES: tuple[tuple[Detector, ...], ...] = (
    (  # Broken pairs and numbers: found first, and undone, so that what follows sees sound pairs.
        Detector(find_served, alone=True, told=True),
        Detector(find_ids, ("token_ids", "prompt_ids", "swapped_samples", "shift_by_one", "boundary")),
        Detector(find_null_eos, alone=True),
        Detector(find_scale, ("log_base",), alone=True),
        Detector(find_numbers, alone=True),
        Detector(find_retokenised, ("retokenised",)),
        Detector(find_swapped, ("swapped_samples",)),
        Detector(find_lengths, ("boundary",)),
        Detector(find_shift, ("shift_by_one", "boundary")),
        Detector(find_zero_eos),
        Detector(find_fills, ("zero_fill",)),
    ),
    (  # Two distributions that differ by what one side left out: whole ones if there are any, then sampled tokens.
        Detector(find_in_distributions, ends=("shift_by_one",)),
        Detector(find_wrong_prompt, ("wrong_prompt",), unless=("prompt_ids", "temperature", "penalty")),
        Detector(find_unrelated, ("unrelated",), ends=("unrelated",), unless=("wrong_prompt",)),
        Detector(find_token_offset, ("token_offset",), unless=("wrong_prompt", "prompt_ids", "retokenised")),
        Detector(find_temperature, ("temperature",), unless=("wrong_prompt",)),
        Detector(find_penalty, ("penalty",), unless=("wrong_prompt",)),
        Detector(find_truncation, alone=True, unless=("token_offset",)),  # it moves all other ids one way
        Detector(find_sampling, unless=(*_OTHER_TEXT, *_LEFT_OUT)),
    ),
    (  # Other weights: one server's, or all of them.
        Detector(find_stale_server, ("stale_server",), untold=(*_TOLD, "server_differs")),
        Detector(
            find_not_updated,
            ("weights_not_updated", "weights_partly_updated"),
            unless=_OTHER_TEXT,
            untold=_TOLD,
            old=True,
        ),
        Detector(find_split, unless=(*_OTHER_TEXT, "weights_not_updated", "weights_partly_updated"), untold=_TOLD),
    ),
    (
        Detector(find_precision, alone=True, as_given=True),
        Detector(find_versions, ("staleness",), alone=True),
    ),
    (  # What is left: the size of the gap, where nothing above explains it.
        Detector(
            find_size,
            ("moe_routing", "quantised", "far_apart"),
            unless=("prompt_ids", "retokenised", *_OTHER_DISTRIBUTION, *_OLD_WEIGHTS),
        ),
    ),
)
"""A fault that one detector of a later stage than the first named is not looked for again by the next ones there."""


NO_TRAINING = "there is no training side: give its log-probs, a checkpoint or a server"


def check_batch(
    batch: Batch, *, accept: Collection[str] = (), notes: Sequence[str] = (), found: Sequence[Item] = ()
) -> CheckResult:
    """Look for every fault. accept: faults that are meant: reported, but they do not make the batch faulty.

    found: what is known already, told first but for what the servers of the records told of themselves.
    """
    given = batch
    found = list(found)
    told: set[FaultName] = set()
    agree = weights_agree(given)
    if not given.has_training:
        needed = {fault for stage in STAGES for detector in stage for fault in detector.compares}
        found.append(Undecided(faults=tuple(fault for fault in FAULTS if fault in needed), reason=NO_TRAINING))
    for number, stage in enumerate(STAGES):
        named: set[FaultName] = set()
        for detector in stage:
            known = {item.fault for item in found if isinstance(item, Finding) and item.severity == "fault"}
            if not (detector.alone or given.has_training) or known & {*detector.unless}:
                continue
            if told & {*detector.untold} or (detector.old and agree):
                continue
            items, after = detector.find(given if detector.as_given else batch)
            batch = batch if detector.as_given else after
            again = (named if number else set()) | told
            new = [item for item in items if isinstance(item, Undecided) or item.fault not in again]
            found = [*new, *found] if detector.told else [*found, *new]
            if detector.told:
                told = {item.fault for item in new if isinstance(item, Finding) and item.severity == "fault"}
            named |= {item.fault for item in items if isinstance(item, Finding)}
            if named & {*detector.ends}:
                break
    findings = [item for item in found if isinstance(item, Finding)]
    findings = [item.model_copy(update={"accepted": item.fault in accept}) for item in findings]
    undecided = [rest for item in found if isinstance(item, Undecided) and (rest := _without(item, told)) is not None]
    before = mismatch(given)
    after = before if batch is given else mismatch(batch)
    compared = len(batch.tokens)
    few = given.has_training and compared < ENOUGH_TOKENS
    status: Status = "faults" if any(item.counts for item in findings) else "undecided" if few else "clean"
    remark = equal_sides(batch)
    return CheckResult(
        status=status,
        verdict=_verdict(status, findings, undecided, after, compared, given),
        samples=len(given),
        tokens=given.token_count,
        findings=tuple(findings),
        undecided=tuple(undecided),
        mismatch=before,
        fixed=after if after != before else None,
        notes=(*notes, *(said for said in (note(given), remark) if said)),
    )


def _without(item: Undecided, told: Collection[FaultName]) -> Undecided | None:
    """What is left of it without faults that were told; None where nothing is."""
    faults = tuple(fault for fault in item.faults if fault not in told)
    return item.model_copy(update={"faults": faults}) if faults else None


def _verdict(
    status: Status,
    findings: Sequence[Finding],
    undecided: Sequence[Undecided],
    level: Mismatch | None,
    compared: int,
    batch: Batch,
) -> str:
    """One line. level: once what was found is undone."""
    looked = f"{len(batch)} samples, {batch.token_count} tokens"
    if status == "faults":
        faults: list[FaultName] = [item.fault for item in findings if item.counts]
        return f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in {looked}: {_names(faults)}."
    said: dict[str, list[FaultName]] = {
        "Accepted": [item.fault for item in findings if item.accepted],
        "Noted": [item.fault for item in findings if not item.accepted],
        "Not decided": [name for item in undecided for name in item.faults],
    }
    more = "".join(f" {what}: {_names(names)}." for what, names in said.items() if names)
    if status == "undecided":
        return (
            f"Not decided in {looked}: {compared} tokens can be compared, {ENOUGH_TOKENS} are needed; no fault so "
            f"far.{more}"
        )
    if level is None:
        return f"No fault in {looked}, without a comparison of the two sides.{more}"
    return f"No fault in {looked}: {level}, {size_class(level)}.{more}"


def _names(faults: Sequence[FaultName]) -> str:
    return ", ".join(dict.fromkeys(faults))
