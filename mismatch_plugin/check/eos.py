"""An end-of-sequence token that the trainer appended: nobody sampled it, so it has no rollout log-prob."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_plugin.check.batch import Batch, Sample
from mismatch_plugin.check.findings import Finding, Side
from mismatch_plugin.check.numbers import FILL_GAP
from mismatch_plugin.core.validity import ZERO_FILL_GAP


def find_null_eos(batch: Batch) -> tuple[list[Finding], Batch]:
    """Responses that have null on the last token and nowhere else."""
    chosen, elsewhere = [], 0
    for sample in batch:
        if len(sample.rollout) != sample.tokens or sample.tokens < 2:
            continue
        nulls = sample.null_rollout & sample.mask
        if nulls[-1] and nulls.sum() == 1:
            chosen.append(sample)
        elsewhere += bool(nulls.any() and not nulls[-1])
    if elsewhere >= len(chosen):
        return [], batch  # nulls everywhere are no EOS
    return _filled(batch, chosen, "stands a token with null for a log-prob")


def find_zero_eos(batch: Batch) -> tuple[list[Finding], Batch]:
    """Responses that have 0.0 on the last token, where the training side is far from it; sides must be aligned."""
    chosen, gaps = [], []
    for sample in batch:
        if sample.train is None or sample.tokens < 2 or not sample.usable[-1]:
            continue
        gap = float(sample.train[-1])
        if sample.rollout[-1] == 0.0 and gap < -FILL_GAP:
            chosen.append(sample)
            gaps.append(gap)
    if not chosen or (len(chosen) < 2 and min(gaps) > -ZERO_FILL_GAP):
        return [], batch
    return _filled(batch, chosen, f"stands a token with exactly 0.0, which the trainer gives {np.mean(gaps):.3g}")


def _filled(batch: Batch, chosen: list[Sample], what: str) -> tuple[list[Finding], Batch]:
    """Named EOS if it is one by id, or the same id in several responses."""
    ids = {sample.record.response_ids[-1] for sample in chosen}
    if not chosen or not (ids <= batch.eos_ids or (len(ids) == 1 and len(chosen) > 1)):
        return [], batch
    changed: dict[int, dict[str, Any]] = {}
    for sample in chosen:
        rollout = sample.rollout.copy()
        rollout[-1] = np.nan
        null = sample.null_rollout.copy()
        mask = sample.mask.copy()
        null[-1] = mask[-1] = False
        changed[sample.index] = {"rollout": rollout, "null_rollout": null, "mask": mask}
    named = f" (id {ids.pop()})" if len(ids) == 1 else ""
    finding = _finding(batch, chosen, chosen[0].tokens - 1, f"{what}{named}")
    return [finding], batch.with_values(changed)


def appended_finding(batch: Batch, samples: list[Sample], side: Side, what: str) -> Finding:
    """Lists that are one token longer on the training side, or one shorter on the rollout side."""
    ids = {
        (
            sample.training.token_ids[-1]
            if side == "training" and sample.training and sample.training.token_ids
            else None
        )
        if side == "training"
        else sample.record.response_ids[-1]
        for sample in samples
    } - {None}
    named = f", id {ids.pop()} in all of them" if len(ids) == 1 else ""
    first = samples[0]
    return _finding(batch, samples, first.tokens - (side == "rollout"), f"the {side} side has {what}{named}")


def _finding(batch: Batch, samples: list[Sample], position: int, what: str) -> Finding:
    """The finding of an end-of-sequence token that was not sampled. position: of it, in the first sample."""
    return Finding(
        fault="eos_appended",
        side="training",
        evidence=f"At the end of {len(samples)} of {len(batch)} responses {what}: an end-of-sequence token that was "
        f"not sampled.",
        statistics={"fraction": len(samples) / len(batch)},
        samples=len(samples),
        of_samples=len(batch),
        tokens=len(samples),
        of_tokens=batch.token_count,
        first=samples[0].place(position),
        fix="Do not append EOS to what the server returned (finish_reason tells whether it stopped), or give the "
        "appended token loss_mask 0: nobody sampled it, so it has no rollout log-prob.",
    )
