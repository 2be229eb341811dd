"""The whole check: detectors in the order in which one fault would hide another, each fixed before the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mismatch_plugin.check.alignment import find_lengths, find_shift, find_swapped
from mismatch_plugin.check.batch import Batch
from mismatch_plugin.check.distribution import find_penalty, find_temperature, find_unrelated
from mismatch_plugin.check.eos import find_null_eos, find_zero_eos
from mismatch_plugin.check.filters import find_truncation
from mismatch_plugin.check.findings import CheckResult, FaultName, Finding, Mismatch, Undecided
from mismatch_plugin.check.identity import find_ids
from mismatch_plugin.check.level import mismatch
from mismatch_plugin.check.numbers import find_fills, find_numbers
from mismatch_plugin.check.precision import find_precision
from mismatch_plugin.check.scale import find_scale
from mismatch_plugin.check.versions import DEFAULT_MAX_STALENESS, find_versions

Step = Callable[[Batch], tuple[Sequence[Finding | Undecided], Batch]]

STRUCTURE: tuple[Step, ...] = (
    find_ids,
    find_null_eos,
    find_scale,
    find_numbers,
    find_swapped,
    find_lengths,
    find_shift,
    find_zero_eos,
    find_fills,
)
"""Broken pairs and numbers: found first, and undone, so that what follows sees sound pairs."""
DISTRIBUTION: tuple[Step, ...] = (find_temperature, find_penalty, find_truncation)
"""Two distributions that differ by what one side left out."""
WITHOUT_TRAINING: tuple[Step, ...] = (find_null_eos, find_scale, find_numbers, find_truncation)
NEEDS_TRAINING: tuple[FaultName, ...] = (
    "zero_fill",
    "token_ids",
    "prompt_ids",
    "boundary",
    "shift_by_one",
    "swapped_samples",
    "log_base",
    "temperature",
    "penalty",
    "staleness",
    "unrelated",
)


def check_batch(
    batch: Batch,
    *,
    vocabulary: Step | None = None,
    trainer_version: str | None = None,
    max_staleness: int = DEFAULT_MAX_STALENESS,
    accept: Collection[str] = (),
    notes: Sequence[str] = (),
) -> CheckResult:
    """Look for every fault.

    Args:
        vocabulary: what sees temperature, filters and penalties in whole distributions (`vocabulary.Examination`); what
            it names is not looked for again in the sampled tokens alone.
        trainer_version: weights of the training side, where its file does not tell.
        max_staleness: steps that rollouts may be behind.
        accept: faults that are meant: reported, but they do not make the batch faulty.
    """
    given = batch
    found: list[Finding | Undecided] = []
    for step in STRUCTURE if batch.has_training else WITHOUT_TRAINING:
        items, batch = step(batch)
        found += items
    if batch.has_training:
        items, batch = _distributions(batch, vocabulary)
        found += items
    else:
        reason = "there is no training side: give its log-probs, a checkpoint or a server"
        found.append(Undecided(faults=NEEDS_TRAINING, reason=reason))
    found += find_precision(given)
    found += find_versions(batch, trainer_version, max_staleness)
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
        fixed=after if after is not None and after != before else None,
        notes=tuple(notes),
    )


def _distributions(batch: Batch, vocabulary: Step | None) -> tuple[list[Finding | Undecided], Batch]:
    """What whole distributions tell, if there are any; then the sampled tokens alone, for what is still open."""
    found: list[Finding | Undecided] = []
    if vocabulary is not None:
        items, batch = vocabulary(batch)
        found += items
    seen = {item.fault for item in found if isinstance(item, Finding)}
    if "shift_by_one" in seen:
        return found, batch
    items, batch = find_unrelated(batch)
    found += items
    if items:
        return found, batch
    for step in DISTRIBUTION:
        items, batch = step(batch)
        found += [item for item in items if isinstance(item, Undecided) or item.fault not in seen]
    return found, batch


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
    return f"No fault in {looked}: k3 {level.k3_kl:.3g}, 99 % of gaps below {level.abs_p99:.3g} nats.{accepted}{caveat}"
