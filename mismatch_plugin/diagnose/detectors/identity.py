"""Do both sides speak of the same tokens? Prompt and response ids, as far as the training side tells its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.pairing import LAGS, MAX_LAG, incomparable, lag_findings, shifted, swap_finding
from mismatch_plugin.diagnose.findings import Item, place_of

PROMPT_FIX = (
    "Send the server token ids (input_ids), made once with one tokenizer and chat template, and train on those ids; "
    "never tokenize a prompt twice."
)
IDS_FIX = (
    "Train on the ids that the server returned (output_ids): text decoded and encoded again, or another tokenizer, "
    "gives other ids."
)


def find_ids(batch: Batch) -> Outcome:
    """Compare prompt and response ids; what differs cannot be compared afterwards.

    Ids that are another sample's, or the response's own some positions off, are named for what they are.
    """
    found = _prompts(batch)
    swapped: list[tuple[Sample, Sample]] = []
    lagged: list[tuple[Sample, int]] = []
    differing: list[tuple[Sample, Ints]] = []
    changed: dict[int, dict[str, Any]] = {}
    owners: dict[bytes, Sample] = {}
    compared = 0
    for sample in batch:
        ours, theirs = sample.response_ids, sample.trained_ids
        if theirs is None:
            continue
        compared += 1
        shared = min(len(ours), len(theirs))
        positions = np.flatnonzero(ours[:shared] != theirs[:shared])
        if not len(positions):
            continue  # what is left is a question of length
        if not owners:
            owners = {_key(one.response_ids): one for one in reversed(batch.samples) if len(one) > 1}
        owner = owners.get(_key(theirs))
        lag = _lag(ours, theirs)
        if owner is not None and len(theirs) == len(sample.train_log_probs):
            swapped.append((sample, owner))
        elif lag is not None:
            lagged.append((sample, lag))
            moved = shifted(sample.train_log_probs, lag, len(sample))
            changed[sample.index] = {"train_log_probs": moved, "loss_mask": sample.mask & ~np.isnan(moved)}
        else:
            differing.append((sample, positions))
            mask = sample.mask.copy()
            mask[positions] = False
            changed[sample.index] = {"loss_mask": mask}
    if swapped:
        changed |= {sample.index: incomparable(sample) for sample, _ in swapped}  # unless its own is found
        changed |= {owner.index: {"train_log_probs": sample.train_log_probs} for sample, owner in swapped}
        found.append(swap_finding(batch, swapped, compared, "their token ids are those of another sample"))
    found += lag_findings(batch, lagged, compared, "the training side's token ids are the response's, ")
    if differing:
        sample, positions = differing[0]
        count = sum(len(at) for _, at in differing)
        values = {
            side: int(ids[positions[0]])
            for side, ids in (("rollout", sample.response_ids), ("training", sample.trained_ids))
            if ids is not None
        }
        finding = batch.finding(
            "token_ids",
            "both",
            f"{count} response ids in {len(differing)} of {compared} samples are others on the training side.",
            IDS_FIX,
            [sample for sample, _ in differing],
            tokens=count,
            of_samples=compared,
            first=place_of(sample, int(positions[0]), **values),
            statistics={"fraction": count / max(batch.token_count, 1)},
        )
        found.append(finding)
    return found, batch.with_values(changed)


def _key(ids: Ints) -> bytes:
    return ids.astype(np.int64).tobytes()


def _lag(ours: Ints, theirs: Ints) -> int | None:
    """The k with ours[t] = theirs[t + k] for all t that both have, if there is one other than 0."""
    for lag in LAGS:
        start, stop = max(0, -lag), min(len(ours), len(theirs) - lag)
        enough = abs(lag) <= len(ours) - 2 and stop - start >= max(4, len(ours) - MAX_LAG)
        if enough and np.array_equal(ours[start:stop], theirs[start + lag : stop + lag]):
            return lag
    return None


def _prompts(batch: Batch) -> list[Item]:
    pairs = [(sample, sample.prompt_ids, sample.trained_prompt_ids) for sample in batch]
    compared = [(sample, ours, theirs) for sample, ours, theirs in pairs if theirs is not None]
    differing = [pair for pair in compared if not np.array_equal(pair[1], pair[2])]
    if not differing:
        return []
    sample, ours, theirs = differing[0]
    unequal = (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    position = next(unequal, min(len(ours), len(theirs)))
    values = [int(ids[position]) if position < len(ids) else "none" for ids in (ours, theirs)]
    finding = batch.finding(
        "prompt_ids",
        "both",
        f"The prompts of {len(differing)} of {len(compared)} samples differ; sample {sample.index}: {len(ours)} ids on "
        f"the rollout side and {len(theirs)} on the training side, from prompt position {position} on ({values[0]} and "
        f"{values[1]}).",
        PROMPT_FIX,
        [sample for sample, _, _ in differing],
        tokens=0,
        of_samples=len(compared),
        first=place_of(sample),
        statistics={"fraction": len(differing) / len(compared)},
    )
    return [finding]
