"""Do both sides speak of the same tokens? Prompt and response ids, as far as the training side tells its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mismatch_plugin.check.batch import Batch, Sample
from mismatch_plugin.check.findings import Finding

MAX_LAG = 8
"""Boundaries are looked for up to so many tokens off."""
SHIFT_FIX = (
    "Pair the log-prob of token t with the logits that precede it: targets are tokens[1:] for logits[:-1]; cut the "
    "response from both with the same start."
)
SWAP_FIX = (
    "Keep each response's log-probs with its sample: match by request or sample id after sorting, grouping, "
    "length-balancing and retries, never by order of arrival."
)


def find_ids(batch: Batch) -> tuple[list[Finding], Batch]:
    """Compare prompt and response ids; what differs cannot be compared afterwards.

    Ids that are another sample's, or the response's own some positions off, are named for what they are.
    """
    findings = _prompts(batch)
    swapped: list[tuple[Sample, Sample]] = []
    lagged: list[tuple[Sample, int]] = []
    differing: list[tuple[Sample, list[int]]] = []
    changed: dict[int, dict[str, Any]] = {}
    owners = {tuple(sample.record.response_ids): sample for sample in reversed(batch.samples) if sample.tokens > 1}
    compared = 0
    for sample in batch:
        theirs = None if sample.training is None else sample.training.token_ids
        if theirs is None or sample.train is None:
            continue
        compared += 1
        ours = sample.record.response_ids
        shared = min(len(ours), len(theirs))
        positions = [position for position in range(shared) if ours[position] != theirs[position]]
        if not positions:
            continue  # what is left is a question of length
        owner = owners.get(tuple(theirs))
        lag = _lag(ours, theirs)
        if owner is not None and len(theirs) == len(sample.train):
            swapped.append((sample, owner))
        elif lag is not None:
            lagged.append((sample, lag))
            train = shifted(sample.train, lag, sample.tokens)
            changed[sample.index] = {"train": train, "mask": sample.mask & ~np.isnan(train)}
        else:
            differing.append((sample, positions))
            mask = sample.mask.copy()
            mask[positions] = False
            changed[sample.index] = {"mask": mask}
    if swapped:
        taken = {owner.index: sample.train for sample, owner in swapped}
        for sample, _ in swapped:
            changed[sample.index] = incomparable(sample)  # unless its own is found
        changed.update({index: {"train": train} for index, train in taken.items()})
        findings.append(swap_finding(batch, swapped, compared, "their token ids are those of another sample"))
    if lagged:
        findings += lag_findings(batch, lagged, compared, "the training side's token ids are the response's, ")
    if differing:
        findings.append(_ids_finding(batch, differing, compared))
    return findings, batch.with_values(changed)


def incomparable(sample: Sample) -> dict[str, Any]:
    """Fields that take the sample out of every comparison that follows."""
    return {"train": np.full(sample.tokens, np.nan), "mask": np.zeros(sample.tokens, dtype=bool)}


def shifted(values: Any, lag: int, length: int) -> Any:
    """`values[lag : lag + length]`, with NaN where that reaches over an end."""
    moved = np.full(length, np.nan)
    start, stop = max(0, -lag), min(length, len(values) - lag)
    if stop > start:
        moved[start:stop] = values[start + lag : stop + lag]
    return moved


def _lag(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The k with ours[t] = theirs[t + k] for nearly all t, if there is one besides 0."""
    for distance in range(1, min(MAX_LAG, len(ours) - 2) + 1):
        for lag in (distance, -distance):
            pairs = [(ours[t], theirs[t + lag]) for t in range(len(ours)) if 0 <= t + lag < len(theirs)]
            if len(pairs) >= max(4, len(ours) - MAX_LAG) and all(a == b for a, b in pairs):
                return lag
    return None


def _prompts(batch: Batch) -> list[Finding]:
    compared = [sample for sample in batch if sample.training is not None and sample.training.prompt_ids is not None]
    differing = []
    for sample in compared:
        ours, theirs = sample.record.prompt_ids, sample.training.prompt_ids if sample.training else None
        if theirs is not None and ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            position = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            differing.append((sample, position, len(ours), len(theirs)))
    if not differing:
        return []
    sample, position, ours, theirs = differing[0]
    values = [
        ids[position] if ids is not None and position < len(ids) else "none"
        for ids in (sample.record.prompt_ids, sample.training.prompt_ids if sample.training else None)
    ]
    return [
        Finding(
            fault="prompt_ids",
            side="both",
            evidence=f"The prompts of {len(differing)} of {len(compared)} samples differ; sample {sample.index}: "
            f"{ours} ids on the rollout side and {theirs} on the training side, from prompt position {position} on "
            f"({values[0]} and {values[1]}).",
            statistics={"fraction": len(differing) / len(compared)},
            samples=len(differing),
            of_samples=len(compared),
            tokens=0,
            of_tokens=batch.token_count,
            first=sample.place(),
            fix="Send the server token ids (input_ids), made once with one tokenizer and chat template, and train on "
            "those ids; never tokenize a prompt twice.",
        )
    ]


def _ids_finding(batch: Batch, differing: list[tuple[Sample, list[int]]], compared: int) -> Finding:
    sample, positions = differing[0]
    theirs = sample.training.token_ids if sample.training is not None else None
    count = sum(len(found) for _, found in differing)
    return Finding(
        fault="token_ids",
        side="both",
        evidence=f"{count} response ids in {len(differing)} of {compared} samples are others on the training side.",
        statistics={"fraction": count / max(batch.token_count, 1)},
        samples=len(differing),
        of_samples=compared,
        tokens=count,
        of_tokens=batch.token_count,
        first=sample.place(
            positions[0],
            rollout=sample.record.response_ids[positions[0]],
            training=theirs[positions[0]] if theirs else None,
        ),
        fix="Train on the ids that the server returned (output_ids): text decoded and encoded again, or another "
        "tokenizer, gives other ids.",
    )


def swap_finding(batch: Batch, swapped: list[tuple[Sample, Sample]], of_samples: int, why: str) -> Finding:
    """`swapped`: (sample, the sample whose log-probs the training side gave it)."""
    pairs = ", ".join(f"{sample.index}→{owner.index}" for sample, owner in swapped[:6])
    more = f" and {len(swapped) - 6} more" if len(swapped) > 6 else ""
    first = swapped[0][0]
    return Finding(
        fault="swapped_samples",
        side="both",
        evidence=f"The training side's log-probs of {len(swapped)} of {of_samples} samples belong to other samples "
        f"({pairs}{more}): {why}.",
        statistics={"fraction": len(swapped) / max(of_samples, 1)},
        samples=len(swapped),
        of_samples=of_samples,
        tokens=sum(sample.tokens for sample, _ in swapped),
        of_tokens=batch.token_count,
        first=first.place(0) if first.tokens else first.place(),
        fix=SWAP_FIX,
    )


def lag_findings(
    batch: Batch,
    lagged: list[tuple[Sample, int]],
    of_samples: int,
    why: str,
    statistics: dict[int, dict[str, float]] | None = None,
) -> list[Finding]:
    """One finding for a shift by one, one for larger ones. `lagged`: (sample, k), rollout[t] fits train[t + k]."""
    findings = []
    for single in (True, False):
        chosen = [(sample, lag) for sample, lag in lagged if (abs(lag) == 1) == single]
        if not chosen:
            continue
        lags = sorted({lag for _, lag in chosen})
        main = max(lags, key=[lag for _, lag in chosen].count)
        direction = "too early" if main > 0 else "too late"
        amounts = ", ".join(f"{lag:+d}" for lag in lags[:6])
        first = chosen[0][0]
        findings.append(
            Finding(
                fault="shift_by_one" if single else "boundary",
                side="both",
                evidence=f"In {len(chosen)} of {of_samples} samples the training side's list starts {abs(main)} "
                f"token{'' if single else 's'} {direction} (rollout[t] belongs to training[t + k], k = {amounts}): "
                f"{why}{'one position' if single else 'some positions'} off.",
                statistics={"lag": float(main), **(statistics or {}).get(main, {})},
                samples=len(chosen),
                of_samples=of_samples,
                tokens=sum(sample.tokens for sample, _ in chosen),
                of_tokens=batch.token_count,
                first=first.place(0) if first.tokens else first.place(),
                fix=SHIFT_FIX
                if single
                else "Cut the training side's log-probs at the first response token: start = number of prompt ids "
                "that the server saw (template tokens included), minus one for the shift of logits to targets.",
            )
        )
    return findings
