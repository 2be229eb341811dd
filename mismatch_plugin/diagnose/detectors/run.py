"""The whole check: detectors in the order in which one fault would hide another, each fixed before the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors import alignment, distribution, numbers, served, size, tokens, weights
from mismatch_plugin.diagnose.result import CheckResult, FaultName, Finding, Item, Undecided


class Fault(NamedTuple):
    """A row of docs/inspect.md. compared: it shows only next to a training side."""

    happened: str
    shown_by: str
    compared: bool = False


PLUGIN = "the server's plugin"
FAULTS: dict[FaultName, Fault] = {
    "label_reused": Fault("weights changed under one and the same version", PLUGIN),
    "other_weights": Fault("a server serves other weights than the trainer sent", f"{PLUGIN}; `weight_fingerprint`"),
    "stale_cache": Fault("the cache was not flushed after an update", f"{PLUGIN}; samples with a cached prompt"),
    "update_lost_in_precision": Fault("bfloat16 rounded most of an update away", f"{PLUGIN}; both checkpoints"),
    "server_differs": Fault("a server has other weights, precision or version", f"{PLUGIN}; rescoring with `--url`"),
    "token_ids": Fault("the trainer sees other response ids", "ids", True),
    "prompt_ids": Fault("the trainer sees another prompt", "ids", True),
    "cloned_group": Fault("equal responses in one group, at a temperature above 0", "ids, and how unlikely"),
    "replay_off": Fault("experts are not replayed as they were", "routes of both sides", True),
    "eos_appended": Fault("an appended end token that nobody sampled", "null, 0.0 or one token more at the end"),
    "sign": Fault("losses in place of log-probs", "positive values"),
    "probabilities": Fault("probabilities in place of log-probs", "values in (0, 1]"),
    "log_base": Fault("logs of base 2 or 10, or log-probs times a factor", "one factor at every size", True),
    "missing": Fault("null in place of a log-prob", "the value"),
    "nan": Fault("NaN", "the value"),
    "infinite": Fault("+inf", "the value"),
    "positive": Fault("a log-prob above 0", "the value"),
    "floor": Fault("−inf or a clamp at a floor", "the value, and its repetition"),
    "retokenised": Fault("text decoded and encoded again", "sides agree up to a position, and not behind it", True),
    "swapped_samples": Fault("log-probs of another sample", "another sample's fit better", True),
    "length": Fault("a list that is not as long as the response", "lengths"),
    "boundary": Fault("the response is cut at another place", "a shift by 2 to 8 tokens fits better", True),
    "shift_by_one": Fault("log-probs of the next or previous token", "a shift by one fits better", True),
    "zero_fill": Fault("0.0 filled in where nothing came", "0.0 next to a far log-prob", True),
    "wrong_prompt": Fault("another prompt, template or BOS", "the gap decays, or is less after longer prompts", True),
    "unrelated": Fault("the sides have nothing in common", "no rank correlation", True),
    "token_offset": Fault("few ids with a bias, a ban or other embedding rows", "their gap in every sample", True),
    "temperature": Fault("only one side divides by the temperature", f"{PLUGIN}; slope of the gap; entropies", True),
    "penalty": Fault("a repetition penalty on one side", "an offset on tokens that occurred before", True),
    "truncation": Fault("top-p, top-k or min-p on one side", "what is recorded; gaps of one sign; entropies"),
    "mixed_versions": Fault("weights changed inside a response, or servers differ", "recorded versions"),
    "staleness": Fault("sampled by weights too many steps behind", "recorded versions", True),
    "stale_server": Fault("one server or worker is behind", f"{PLUGIN}; its samples lie further off", True),
    "weights_not_updated": Fault(
        "updates never reached the sampler, whatever its label says",
        f"{PLUGIN}; the label `default`; the weights of `--reference-checkpoint` fit; the gap grows with the version",
        True,
    ),
    "weights_partly_updated": Fault("only some layers arrived", f"{PLUGIN}; a mix of both checkpoints fits best", True),
    "quantised": Fault("sides in different precision", "even noise above bf16's, of a size such pairs have", True),
    "moe_routing": Fault("a router chose other experts", "few tokens far off, in any place, sample and id", True),
    "unexplained": Fault("nothing known explains so large a gap", "its size, and which samples hold it", True),
    "bf16": Fault("log-probs were rounded to bf16", "their digits"),
    "fp16": Fault("log-probs were rounded to fp16", "their digits"),
    "rounded": Fault("log-probs were rounded to few decimals", "their digits"),
}


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


def check_batch(batch: Batch, *, accept: Collection[str] = (), found: Sequence[Item] = ()) -> CheckResult:
    """Look for every fault. accept: faults that are meant: reported, but they do not make the batch faulty.

    found: what is known already, told first but for what the servers of the records told of themselves.
    """
    given = batch
    items = [item for find in TOLD for item in find(batch)[0]]
    told = _faults(items)
    items += found
    if not given.has_training:
        needed = tuple(name for name, fault in FAULTS.items() if fault.compared)
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
    before = size.mismatch(given)
    after = before if batch is given else size.mismatch(batch)
    fixed, compared = after if after != before else None, 0 if after is None else after.tokens
    return CheckResult(tuple(findings), tuple(undecided), before, fixed, compared)


def _faults(items: Sequence[Item]) -> set[FaultName]:
    return {item.fault for item in items if isinstance(item, Finding) and item.severity == "fault"}
