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
from mismatch_plugin.diagnose.detectors.numbers import (
    find_fills,
    find_null_eos,
    find_numbers,
    find_precision,
    find_scale,
    find_zero_eos,
)
from mismatch_plugin.diagnose.detectors.routing import find_replay
from mismatch_plugin.diagnose.detectors.sampler import (
    find_cached_further,
    find_cloned_groups,
    find_rounded_updates,
    find_stale_cache,
)
from mismatch_plugin.diagnose.detectors.served import find_settings, note
from mismatch_plugin.diagnose.detectors.served_weights import find_served_weights
from mismatch_plugin.diagnose.detectors.size import equal_sides, find_size, mismatch
from mismatch_plugin.diagnose.detectors.tokens import find_retokenised, find_wrong_prompt
from mismatch_plugin.diagnose.detectors.vocabulary import find_in_distributions
from mismatch_plugin.diagnose.detectors.weights import find_not_updated, find_split, find_stale_server, find_versions
from mismatch_plugin.diagnose.findings import FAULTS, CheckResult, FaultName, Finding, Item, Status, Undecided
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS


class Detector(NamedTuple):
    """find: names faults in a batch, and returns it with what they explain undone, as far as that is possible.

    compares: faults of it that show only next to a training side. alone: it finds others in the records alone.
    unless: these explain what it would find: where one was named before, it is left out. ends: after these nothing that
    follows in its stage can be told.
    """

    find: Callable[[Batch], Outcome]
    compares: tuple[FaultName, ...] = ()
    alone: bool = False
    unless: tuple[FaultName, ...] = ()
    ends: tuple[FaultName, ...] = ()


_OTHER_DISTRIBUTION: tuple[FaultName, ...] = ("unrelated", "wrong_prompt", "temperature", "truncation", "penalty")
_OLD_WEIGHTS: tuple[FaultName, ...] = (
    "weights_not_updated", "weights_partly_updated", "stale_server", "other_weights",
)  # fmt: skip
_OTHER_TEXT: tuple[FaultName, ...] = (
    "unrelated", "temperature", "penalty", "wrong_prompt", "retokenised", "shift_by_one", "boundary",
)  # fmt: skip
_LEFT_OUT: tuple[FaultName, ...] = (
    "missing", "infinite", "nan", "positive", "floor", "zero_fill", "eos_appended", "token_offset",
)  # fmt: skip
"""Once undone, tokens are missing by what they are: those that are left were not drawn as the log-probs tell."""

TOLD = (find_served_weights, find_stale_cache, find_rounded_updates, find_settings)
"""What servers tell of themselves is no statistics: it is named before all else."""
STAGES: tuple[tuple[Detector, ...], ...] = (
    (  # Broken pairs and numbers: found first, and undone, so that what follows sees sound pairs.
        Detector(find_ids, ("token_ids", "prompt_ids", "swapped_samples", "shift_by_one", "boundary")),
        Detector(find_cloned_groups, alone=True),
        Detector(find_replay, ("replay_off",)),
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
        Detector(find_sampling, unless=(*_OTHER_TEXT, "stale_server", *_LEFT_OUT)),
    ),
    (  # Other weights: by labels, one server's, or all of them.
        Detector(find_versions, ("staleness",), alone=True),
        Detector(find_cached_further, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS)),
        Detector(find_stale_server, ("stale_server",), unless=(*_OLD_WEIGHTS, "server_differs")),
        Detector(
            find_not_updated,
            ("weights_not_updated", "weights_partly_updated"),
            unless=(*_OTHER_TEXT, *_OLD_WEIGHTS),
        ),
        Detector(find_split, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS, "stale_cache")),
    ),
    (  # What is left: the size of the gap, where nothing above explains it.
        Detector(
            find_size,
            ("moe_routing", "quantised", "unexplained"),
            unless=("prompt_ids", "retokenised", "staleness", "server_differs", *_OTHER_DISTRIBUTION, *_OLD_WEIGHTS),
        ),
    ),
)
"""A fault that was named is not named again by a later detector."""

NO_TRAINING = "there is no training side: give its log-probs, a checkpoint or a server"


def check_batch(
    batch: Batch, *, accept: Collection[str] = (), notes: Sequence[str] = (), found: Sequence[Item] = ()
) -> CheckResult:
    """Look for every fault. accept: faults that are meant: reported, but they do not make the batch faulty.

    found: what is known already, told first but for what the servers of the records told of themselves.
    """
    given = batch
    items = [item for find in TOLD for item in find(batch)[0]]
    told = _faults(items)
    items += found
    if not given.has_training:
        needed = {fault for stage in STAGES for detector in stage for fault in detector.compares}
        items.append(Undecided(faults=tuple(fault for fault in FAULTS if fault in needed), reason=NO_TRAINING))
    for stage in STAGES:
        for detector in stage:
            known = _faults(items)
            if not (detector.alone or given.has_training) or known & {*detector.unless}:
                continue
            said, batch = detector.find(batch)
            items += [item for item in said if isinstance(item, Undecided) or item.fault not in known]
            if _faults(said) & {*detector.ends}:
                break
    items += find_precision(given)[0]  # digits, before anything was undone
    findings = [
        item.model_copy(update={"accepted": item.fault in accept}) for item in items if isinstance(item, Finding)
    ]
    undecided = [
        item.model_copy(update={"faults": left})
        for item in items
        if isinstance(item, Undecided) and (left := tuple(fault for fault in item.faults if fault not in told))
    ]
    before = mismatch(given)
    after = before if batch is given else mismatch(batch)
    few = given.has_training and len(batch.tokens) < ENOUGH_TOKENS
    status: Status = "faults" if any(item.counts for item in findings) else "undecided" if few else "clean"
    remarks = (note(given), equal_sides(batch))
    return CheckResult(
        status=status,
        samples=len(given),
        tokens=given.token_count,
        findings=tuple(findings),
        undecided=tuple(undecided),
        mismatch=before,
        fixed=after if after != before else None,
        notes=(*notes, *(remark for remark in remarks if remark)),
    )


def _faults(items: Sequence[Item]) -> set[FaultName]:
    return {item.fault for item in items if isinstance(item, Finding) and item.severity == "fault"}
