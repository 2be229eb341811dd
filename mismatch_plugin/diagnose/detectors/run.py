"""The whole check: detectors in the order in which one fault would hide another, each fixed before the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors import alignment, distribution, numbers, served, size, tokens, weights
from mismatch_plugin.diagnose.result import FaultName, Finding, Item, Undecided

FAULTS: tuple[FaultName, ...] = (
    "label_reused", "other_weights", "stale_cache", "update_lost_in_precision", "server_differs", "token_ids",
    "prompt_ids", "cloned_group", "replay_off", "eos_appended", "sign", "probabilities", "log_base",
    "missing", "nan", "infinite", "positive", "floor", "retokenised", "swapped_samples", "length", "boundary",
    "shift_by_one", "zero_fill", "wrong_prompt", "unrelated", "token_offset", "temperature", "penalty",
    "truncation", "mixed_versions", "staleness", "stale_server", "weights_not_updated",
    "weights_partly_updated", "quantised", "moe_routing", "unexplained", "bf16", "fp16", "rounded",
)  # fmt: skip
"""docs/inspect.md says of each what happened and what shows it."""
ALONE = (
    "label_reused", "other_weights", "stale_cache", "update_lost_in_precision", "server_differs",
    "cloned_group", "eos_appended", "sign", "probabilities", "missing", "nan", "infinite", "positive",
    "floor", "length", "truncation", "mixed_versions", "bf16", "fp16", "rounded",
)  # fmt: skip
"""Those that statistics decide without a training side, too."""


class Detector(NamedTuple):
    """find: names faults in a batch, and returns it with what they explain undone, as far as that is possible.

    alone: it looks at records without a training side, too. unless: these explain what it would find: where one was
    named before, it is left out.
    """

    find: Callable[[Batch], Outcome]
    alone: bool = False
    unless: tuple[FaultName, ...] = ()


_OTHER_DISTRIBUTION = ("unrelated", "wrong_prompt", "temperature", "truncation", "penalty")
_OLD_WEIGHTS = ("weights_not_updated", "weights_partly_updated", "stale_server", "other_weights")
_OTHER_TEXT = ("unrelated", "temperature", "penalty", "wrong_prompt", "retokenised", "shift_by_one", "boundary")
_LEFT_OUT = ("missing", "infinite", "nan", "positive", "floor", "zero_fill", "eos_appended", "token_offset")
"""Once undone, tokens are missing by what they are: those that are left were not drawn as the log-probs tell."""
TOLD = (served.find_served_weights, served.find_stale_cache, served.find_rounded_updates, served.find_settings)
"""What servers tell of themselves is no statistics: it is named before all else."""
DETECTORS = (
    # Broken pairs and numbers: found first, and undone, so that what follows sees sound pairs.
    Detector(alignment.find_ids),
    Detector(served.find_cloned_groups, alone=True),
    Detector(alignment.find_replay),
    Detector(numbers.find_null_eos, alone=True),
    Detector(numbers.find_scale, alone=True),
    Detector(numbers.find_numbers, alone=True),
    Detector(tokens.find_retokenised),
    Detector(alignment.find_swapped),
    Detector(alignment.find_lengths),
    Detector(alignment.find_shift),
    Detector(numbers.find_zero_eos),
    Detector(numbers.find_fills),
    # Two distributions that differ by what one side left out. Of unrelated ones nothing finer can be said.
    Detector(tokens.find_wrong_prompt, unless=("prompt_ids",)),
    Detector(tokens.find_unrelated, unless=("wrong_prompt",)),
    Detector(tokens.find_token_offset, unless=("unrelated", "wrong_prompt", "prompt_ids", "retokenised")),
    Detector(distribution.find_temperature, unless=("unrelated", "wrong_prompt")),
    Detector(distribution.find_penalty, unless=("unrelated", "wrong_prompt")),
    Detector(distribution.find_truncation, alone=True, unless=("unrelated", "token_offset")),  # it moves all others
    Detector(distribution.find_sampling, unless=(*_OTHER_TEXT, "stale_server", *_LEFT_OUT)),
    # Other weights: by labels, one server's, or all of them.
    Detector(weights.find_versions, alone=True),
    Detector(weights.find_cached_further, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS)),
    Detector(weights.find_stale_server, unless=(*_OLD_WEIGHTS, "server_differs")),
    Detector(weights.find_not_updated, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS)),
    Detector(weights.find_split, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS, "stale_cache")),
    # What is left: the size of the gap, where nothing above explains it.
    Detector(
        size.find_size,
        unless=("prompt_ids", "retokenised", "staleness", "server_differs", *_OTHER_DISTRIBUTION, *_OLD_WEIGHTS),
    ),
)
"""In the order in which one fault would hide another. A fault that was named is not named again by a later one."""

NO_TRAINING = "there is no training side: give its log-probs, a checkpoint or a server"


def check_batch(
    batch: Batch, *, accept: Collection[str] = (), found: Sequence[Item] = ()
) -> tuple[list[Finding], list[Undecided], Batch]:
    """(every fault, what could not be decided, the batch with what they explain undone).

    accept: faults that are meant: reported, but they do not make the batch faulty. found: what is known already, told
    first but for what the servers of the records told of themselves.
    """
    given = batch
    items = [item for find in TOLD for item in find(batch)[0]]
    told = _faults(items)
    items += found
    if not given.has_training:
        needed = tuple(name for name in FAULTS if name not in ALONE)
        items.append(Undecided(faults=needed, reason=NO_TRAINING))
    for detector in DETECTORS:
        known = _faults(items)
        if (detector.alone or given.has_training) and not known & {*detector.unless}:
            said, batch = detector.find(batch)
            items += [item for item in said if isinstance(item, Undecided) or item.fault not in known]
    items += numbers.find_precision(given)[0]
    findings = [one.model_copy(update={"accepted": one.fault in accept}) for one in items if isinstance(one, Finding)]
    undecided = [
        item.model_copy(update={"faults": left})
        for item in items
        if isinstance(item, Undecided) and (left := tuple(fault for fault in item.faults if fault not in told))
    ]
    return findings, undecided, batch


def _faults(items: Sequence[Item]) -> set[FaultName]:
    return {item.fault for item in items if isinstance(item, Finding) and item.severity == "fault"}
