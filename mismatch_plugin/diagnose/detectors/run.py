"""The whole check: detectors in the order in which one fault would hide another, each fixed before the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors import (
    alignment,
    distribution,
    numbers,
    routing,
    served,
    size,
    tokens,
    vocabulary,
    weights,
)
from mismatch_plugin.diagnose.findings import CheckResult, FaultName, Finding, Item, Status, Undecided
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS


class Fault(NamedTuple):
    """A row of docs/inspect.md. compared: it shows only next to a training side."""

    name: FaultName
    happened: str
    shown_by: str
    compared: bool = False


class Detector(NamedTuple):
    """find: names faults in a batch, and returns it with what they explain undone, as far as that is possible.

    faults: those that it finds first or best. alone: it looks at records without a training side, too. unless: these
    explain what it would find: where one was named before, it is left out. ends: after these nothing that follows in
    its stage can be told.
    """

    find: Callable[[Batch], Outcome]
    faults: tuple[Fault, ...] = ()
    alone: bool = False
    unless: tuple[FaultName, ...] = ()
    ends: tuple[FaultName, ...] = ()


_OTHER_DISTRIBUTION = ("unrelated", "wrong_prompt", "temperature", "truncation", "penalty")
_OLD_WEIGHTS = ("weights_not_updated", "weights_partly_updated", "stale_server", "other_weights")
_OTHER_TEXT = ("unrelated", "temperature", "penalty", "wrong_prompt", "retokenised", "shift_by_one", "boundary")
_LEFT_OUT = ("missing", "infinite", "nan", "positive", "floor", "zero_fill", "eos_appended", "token_offset")
"""Once undone, tokens are missing by what they are: those that are left were not drawn as the log-probs tell."""

PLUGIN = "the server's plugin"
TOLD = (  # What servers tell of themselves is no statistics: it is named before all else.
    Detector(served.find_served_weights, (
        Fault("label_reused", "weights changed under one and the same version", PLUGIN),
        Fault("other_weights", "a server serves other weights than the trainer sent",
              f"{PLUGIN}, next to the trainer's `weight_fingerprint`"),
    )),
    Detector(served.find_stale_cache, (
        Fault("stale_cache",
              "keys and values of older weights were reused under a new version: the cache was not flushed",
              f"{PLUGIN}; else samples with a cached prompt are further off than others"),
    )),
    Detector(served.find_rounded_updates, (
        Fault("update_lost_in_precision",
              "an update changed few elements, since bfloat16 rounds small steps away",
              f"{PLUGIN}; else both checkpoints"),
    )),
    Detector(served.find_settings, (
        Fault("server_differs", "a running server has other weights, precision or version",
              f"{PLUGIN}; rescoring, against `--checkpoint` and other `--url`"),
    )),
)  # fmt: skip
STAGES: tuple[tuple[Detector, ...], ...] = (
    (  # Broken pairs and numbers: found first, and undone, so that what follows sees sound pairs.
        Detector(alignment.find_ids, (
            Fault("token_ids", "the trainer sees other response ids", "ids", True),
            Fault("prompt_ids", "the trainer sees another prompt", "ids", True),
        )),
        Detector(served.find_cloned_groups, (
            Fault("cloned_group", "responses of one group that are the same, at a temperature above 0",
                  "ids, and how unlikely"),
        ), alone=True),
        Detector(routing.find_replay, (
            Fault("replay_off", "experts that the trainer replays are not those of the rollout: shifted by one, filled "
                  "in, of another run", "`routed_experts` and `trained_experts` of the records, or the routers of "
                  "`--checkpoint`", True),
        )),
        Detector(numbers.find_null_eos, (
            Fault("eos_appended", "the trainer appended an end token that nobody sampled",
                  "null, 0.0 or one token more at the end"),
        ), alone=True),
        Detector(numbers.find_scale, (
            Fault("sign", "losses in place of log-probs", "positive values"),
            Fault("probabilities", "probabilities in place of log-probs", "values in (0, 1]"),
            Fault("log_base", "logs of base 2 or 10, or log-probs times a factor",
                  "one factor between the sides, at every size", True),
        ), alone=True),
        Detector(numbers.find_numbers, (
            Fault("missing", "null in place of a log-prob", "the value"),
            Fault("nan", "NaN", "the value"),
            Fault("infinite", "+inf", "the value"),
            Fault("positive", "a log-prob above 0", "the value"),
            Fault("floor", "−inf or a clamp at a floor", "the value, and its repetition"),
        ), alone=True),
        Detector(tokens.find_retokenised, (
            Fault("retokenised", "text decoded and encoded again", "sides agree up to a position, and not behind it",
                  True),
        )),
        Detector(alignment.find_swapped, (
            Fault("swapped_samples", "log-probs of another sample", "another sample's fit better", True),
        )),
        Detector(alignment.find_lengths, (Fault("length", "a list that is not as long as the response", "lengths"),)),
        Detector(alignment.find_shift, (
            Fault("boundary", "the response is cut at another place", "a shift by 2 to 8 tokens fits better", True),
            Fault("shift_by_one", "log-probs of the next or previous token", "a shift by one fits better", True),
        )),
        Detector(numbers.find_zero_eos),
        Detector(numbers.find_fills, (
            Fault("zero_fill", "0.0 filled in where nothing came", "0.0 next to a far log-prob", True),
        )),
    ),
    (  # Two distributions that differ by what one side left out: whole ones if there are any, then sampled tokens.
        Detector(vocabulary.find_in_distributions, ends=("shift_by_one",)),
        Detector(tokens.find_wrong_prompt, (
            Fault("wrong_prompt", "another prompt, template or BOS",
                  "the gap decays along responses, or with prompts' lengths", True),
        ), unless=("prompt_ids", "temperature", "penalty")),
        Detector(tokens.find_unrelated, (
            Fault("unrelated", "the sides have nothing in common", "no rank correlation", True),
        ), ends=("unrelated",), unless=("wrong_prompt",)),
        Detector(tokens.find_token_offset, (
            Fault("token_offset", "few ids with a bias, a ban or other embedding rows on one side",
                  "their gap in every sample", True),
        ), unless=("wrong_prompt", "prompt_ids", "retokenised")),
        Detector(distribution.find_temperature, (
            Fault("temperature", "only one side divides by the temperature",
                  f"{PLUGIN}; slope of the gap over the log-prob; entropies; logits", True),
        ), unless=("wrong_prompt",)),
        Detector(distribution.find_penalty, (
            Fault("penalty", "a repetition penalty on one side", "an offset on tokens that occurred before; logits",
                  True),
        ), unless=("wrong_prompt",)),
        Detector(distribution.find_truncation, (
            Fault("truncation", "top-p, top-k or min-p on one side",
                  "what is recorded; gaps of one sign; entropies; logits"),
        ), alone=True, unless=("token_offset",)),  # it moves all other ids one way
        Detector(distribution.find_sampling, unless=(*_OTHER_TEXT, "stale_server", *_LEFT_OUT)),
    ),
    (  # Other weights: by labels, one server's, or all of them.
        Detector(weights.find_versions, (
            Fault("mixed_versions", "weights changed inside a response, or servers differ", "recorded versions"),
            Fault("staleness", "sampled by weights too many steps behind", "recorded versions", True),
        ), alone=True),
        Detector(weights.find_cached_further, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS)),
        Detector(weights.find_stale_server, (
            Fault("stale_server", "one server or worker is behind",
                  f"{PLUGIN}; its samples lie further off than others'", True),
        ), unless=(*_OLD_WEIGHTS, "server_differs")),
        Detector(weights.find_not_updated, (
            Fault("weights_not_updated", "updates never reached the sampler, whatever its label says",
                  f"{PLUGIN}; SGLang's label `default`; the sampler fits the start weights "
                  "(`--reference-checkpoint`); the gap grows with the version", True),
            Fault("weights_partly_updated", "only some layers arrived",
                  f"{PLUGIN}; a mix of both checkpoints' layers fits best", True),
        ), unless=(*_OTHER_TEXT, *_OLD_WEIGHTS)),
        Detector(weights.find_split, unless=(*_OTHER_TEXT, *_OLD_WEIGHTS, "stale_cache")),
    ),
    (  # What is left: the size of the gap, where nothing above explains it.
        Detector(size.find_size, (
            Fault("quantised", "sides in different precision",
                  "even noise above that of bf16, of a size that such pairs have", True),
            Fault("moe_routing", "a router chose other experts", "few tokens far off, in any place, sample and id",
                  True),
            Fault("unexplained", "nothing known explains so large a gap",
                  "its size, and which samples or tokens hold it", True),
        ), unless=("prompt_ids", "retokenised", "staleness", "server_differs", *_OTHER_DISTRIBUTION, *_OLD_WEIGHTS)),
    ),
)  # fmt: skip
"""A fault that was named is not named again by a later detector."""
PRECISION = Detector(numbers.find_precision, (
    Fault("bf16", "log-probs were rounded to bf16", "their digits"),
    Fault("fp16", "log-probs were rounded to fp16", "their digits"),
    Fault("rounded", "log-probs were rounded to few decimals", "their digits"),
), alone=True)  # fmt: skip
"""Looks at the batch as it was given, before anything was undone."""
FAULTS = {
    fault.name: fault for stage in (TOLD, *STAGES, (PRECISION,)) for detector in stage for fault in detector.faults
}

NO_TRAINING = "there is no training side: give its log-probs, a checkpoint or a server"


def check_batch(
    batch: Batch, *, accept: Collection[str] = (), notes: Sequence[str] = (), found: Sequence[Item] = ()
) -> CheckResult:
    """Look for every fault. accept: faults that are meant: reported, but they do not make the batch faulty.

    found: what is known already, told first but for what the servers of the records told of themselves.
    """
    given = batch
    items = [item for detector in TOLD for item in detector.find(batch)[0]]
    told = _faults(items)
    items += found
    if not given.has_training:
        needed = tuple(name for name, fault in FAULTS.items() if fault.compared)
        items.append(Undecided(faults=needed, reason=NO_TRAINING))
    for stage in STAGES:
        for detector in stage:
            known = _faults(items)
            if not (detector.alone or given.has_training) or known & {*detector.unless}:
                continue
            said, batch = detector.find(batch)
            items += [item for item in said if isinstance(item, Undecided) or item.fault not in known]
            if _faults(said) & {*detector.ends}:
                break
    items += PRECISION.find(given)[0]
    findings = [
        item.model_copy(update={"accepted": item.fault in accept}) for item in items if isinstance(item, Finding)
    ]
    undecided = [
        item.model_copy(update={"faults": left})
        for item in items
        if isinstance(item, Undecided) and (left := tuple(fault for fault in item.faults if fault not in told))
    ]
    before = size.mismatch(given)
    after = before if batch is given else size.mismatch(batch)
    few = given.has_training and len(batch.tokens) < ENOUGH_TOKENS
    status: Status = "faults" if any(item.counts for item in findings) else "undecided" if few else "clean"
    remarks = (served.note(given), size.equal_sides(batch))
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
