"""An end-of-sequence token that the trainer appended: nobody sampled it, so it has no rollout log-prob."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_plugin.core.validity import ZERO_FILL_GAP
from mismatch_plugin.data.arrays import is_null
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.numbers import FILL_GAP
from mismatch_plugin.diagnose.findings import Finding, LogProbSide, place_of


def find_null_eos(batch: Batch) -> Outcome:
    """Responses that have null on the last token and nowhere else."""
    chosen, elsewhere = [], 0
    for sample in batch:
        if len(sample.rollout_log_probs) != len(sample) or len(sample) < 2:
            continue
        nulls = is_null(sample.rollout_log_probs) & sample.mask
        if nulls[-1] and nulls.sum() == 1:
            chosen.append(sample)
        elsewhere += bool(nulls.any() and not nulls[-1])
    if elsewhere >= len(chosen):
        return [], batch  # nulls everywhere are no EOS
    return _filled(batch, chosen, "stands a token with null for a log-prob")


def find_zero_eos(batch: Batch) -> Outcome:
    """Responses that have 0.0 on the last token, where the training side is far from it; sides must be aligned."""
    chosen = [
        sample
        for sample in batch
        if len(sample) > 1
        and sample.usable[-1]
        and sample.rollout_log_probs[-1] == 0.0
        and sample.train_log_probs[-1] < -FILL_GAP
    ]
    theirs = [float(sample.train_log_probs[-1]) for sample in chosen]
    if not chosen or (len(chosen) < 2 and min(theirs) > -ZERO_FILL_GAP):
        return [], batch
    return _filled(batch, chosen, f"stands a token with exactly 0.0, which the trainer gives {np.mean(theirs):.3g}")


def _filled(batch: Batch, chosen: list[Sample], what: str) -> Outcome:
    """Named EOS if it is one by id, or the same id in several responses."""
    ids = {int(sample.response_ids[-1]) for sample in chosen}
    if not chosen or not (ids <= batch.eos_ids or (len(ids) == 1 and len(chosen) > 1)):
        return [], batch
    changed: dict[int, dict[str, Any]] = {}
    for sample in chosen:
        last = np.arange(len(sample)) == len(sample) - 1
        changed[sample.index] = {
            "rollout_log_probs": np.where(last, np.nan, sample.rollout_log_probs),
            "loss_mask": sample.mask & ~last,
        }
    named = f" (id {ids.pop()})" if len(ids) == 1 else ""
    return [_finding(batch, chosen, len(chosen[0]) - 1, f"{what}{named}")], batch.with_values(changed)


def appended_finding(batch: Batch, samples: list[Sample], side: LogProbSide, what: str) -> Finding:
    """Lists that are one token longer on the training side, or one shorter on the rollout side."""
    theirs = (sample.response_ids if side == "rollout" else sample.trained_ids for sample in samples)
    ids = {int(tokens[-1]) for tokens in theirs if tokens is not None and len(tokens)}
    named = f", id {ids.pop()} in all of them" if len(ids) == 1 else ""
    return _finding(batch, samples, len(samples[0]) - (side == "rollout"), f"the {side} side has {what}{named}")


def _finding(batch: Batch, samples: list[Sample], position: int, what: str) -> Finding:
    """An end-of-sequence token that was not sampled. position: of it, in the first sample."""
    return batch.finding(
        "eos_appended",
        "training",
        f"At the end of {len(samples)} of {len(batch)} responses {what}: an end-of-sequence token that was not "
        f"sampled.",
        "Do not append EOS to what the server returned (finish_reason tells whether it stopped), or give the appended "
        "token loss_mask 0: nobody sampled it, so it has no rollout log-prob.",
        samples,
        tokens=len(samples),
        first=place_of(samples[0], position),
        statistics={"fraction": len(samples) / len(batch)},
    )
