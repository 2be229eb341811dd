"""Log-probs next to the wrong token or the wrong sample: lists moved and samples swapped, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.findings import Finding, Item

MAX_LAG = 8
"""Boundaries are looked for up to so many tokens off."""
LAGS = [lag for distance in range(1, MAX_LAG + 1) for lag in (distance, -distance)]
SHIFT_FIX = (
    "Pair the log-prob of token t with the logits that precede it: targets are tokens[1:] for logits[:-1]; cut the "
    "response from both with the same start."
)
BOUNDARY_FIX = (
    "Cut the training side's log-probs at the first response token: start = number of prompt ids that the server saw "
    "(template tokens included), minus one for the shift of logits to targets."
)
SWAP_FIX = (
    "Keep each response's log-probs with its sample: match by request or sample id after sorting, grouping, "
    "length-balancing and retries, never by order of arrival."
)


def shifted(values: Floats, lag: int, length: int) -> Floats:
    """`values[lag : lag + length]`, with NaN where that reaches over an end."""
    moved = np.full(length, np.nan)
    start, stop = max(0, -lag), min(length, len(values) - lag)
    if stop > start:
        moved[start:stop] = values[start + lag : stop + lag]
    return moved


def incomparable(sample: Sample) -> dict[str, Any]:
    """Fields that take the sample out of every comparison that follows."""
    return {"train_log_probs": np.full(len(sample), np.nan), "loss_mask": np.zeros(len(sample), dtype=bool)}


def swap_finding(batch: Batch, swapped: Sequence[tuple[Sample, Sample]], of_samples: int, why: str) -> Finding:
    """`swapped`: (sample, the sample whose log-probs the training side gave it)."""
    pairs = ", ".join(f"{sample.index}→{owner.index}" for sample, owner in swapped[:6])
    more = f" and {len(swapped) - 6} more" if len(swapped) > 6 else ""
    samples = [sample for sample, _ in swapped]
    return batch.finding(
        "swapped_samples",
        "both",
        f"The training side's log-probs of {len(swapped)} of {of_samples} samples belong to other samples "
        f"({pairs}{more}): {why}.",
        SWAP_FIX,
        samples,
        tokens=sum(len(sample) for sample in samples),
        of_samples=of_samples,
        statistics={"fraction": len(swapped) / max(of_samples, 1)},
    )


def lag_findings(
    batch: Batch,
    lagged: Sequence[tuple[Sample, int]],
    of_samples: int,
    why: str,
    statistics: Mapping[int, Mapping[str, float]] | None = None,
    *,
    boundary: bool = False,
) -> list[Item]:
    """One finding for a shift by one, one for larger ones. `lagged`: (sample, k), rollout[t] fits training[t + k].

    statistics: of each lag. boundary: a shift by one is a wrong boundary, too: the lists' lengths differ.
    """
    found: list[Item] = []
    for single in (True, False):
        chosen = [(sample, lag) for sample, lag in lagged if (abs(lag) == 1 and not boundary) == single]
        if not chosen:
            continue
        lags = [lag for _, lag in chosen]
        main = max(sorted(set(lags)), key=lags.count)
        direction = "too early" if main > 0 else "too late"
        amounts = ", ".join(f"{lag:+d}" for lag in sorted(set(lags))[:6])
        finding = batch.finding(
            "shift_by_one" if single else "boundary",
            "both",
            f"In {len(chosen)} of {of_samples} samples the training side's list starts {abs(main)} "
            f"token{'' if abs(main) == 1 else 's'} {direction} (rollout[t] belongs to training[t + k], k = {amounts}): "
            f"{why}{'one position' if single else 'some positions'} off.",
            SHIFT_FIX if single else BOUNDARY_FIX,
            [sample for sample, _ in chosen],
            tokens=sum(len(sample) for sample, _ in chosen),
            of_samples=of_samples,
            statistics={"lag": main, **(statistics or {}).get(main, {})},
        )
        found.append(finding)
    return found
