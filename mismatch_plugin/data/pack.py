"""From samples to packed tensors: what the correction computes on, and the kept ids for replay on the training side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import InvalidLogProbError, find_invalid, invalid_error
from mismatch_plugin.data.arrays import NULL, Bools, Floats, Ids
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import remaining_bias
from mismatch_plugin.data.versions import number_versions, version_of_tokens
from mismatch_plugin.log_probs.arguments import RaggedSamplingMask, check_kept_ids, ragged_mask

_SHOWN = 3
"""Misfits that an error names; the others are counted."""


def pack(
    samples: Sequence[Sample],
    config: MismatchConfig | None = None,
    *,
    trainer_version: int | str | None = None,
    dtype: torch.dtype = torch.float32,
    checked: bool = True,
) -> PackedSequences:
    """The samples as `PackedSequences`, one sequence each: log-probs of both sides, and what else all of them have.

    Where samples have log-probs renormalised over kept ids, these are used: training log-probs must be over them too.
    A sample is as long as the trainer sees it: `trained_ids` may be longer or shorter than what was sampled (an end
    token appended by the trainer, which trains unless `trained_mask` says otherwise).

    Args:
        config: its `rollout_log_prob_policy` says what happens to invalid log-probs. With `error`, the default, they
            are raised here. Otherwise the values go on as they are, and `correct` counts and handles them by kind;
            where lengths or ids disagree, everything from the first disagreement on is "not returned".
        trainer_version: of the weights that are about to train, by number or name (`number_versions`);
            `rs.max_staleness` counts back from it.
        dtype: of log-probs and advantages.
        checked: False leaves invalid log-probs to the step, whatever the config.

    Raises:
        InvalidLogProbError: under the policy `error`, naming sample, position, kind and value.
        ValueError: if entries do not fit; where `rs.max_staleness` is set and a token that trains has no version, or
            trainer_version is missing, naming sample and position.
    Warns:
        MismatchWarning: naming the bias that the sampling leaves (`sampling.remaining_bias`).
    """
    names = [index if sample.sample_id is None else sample.sample_id for index, sample in enumerate(samples)]
    stops = checked and (config is None or (config.rollout_log_prob_policy == "error" and config.uses_rollout_values))
    behaviour = {sample.behaviour_log_probs is not None for sample in samples}
    if len(behaviour) > 1:
        raise ValueError("some samples have behaviour_log_probs and others not: request the sampling mask for all.")
    masks: list[Tensor] = []
    rollout: list[Tensor] = []
    misfits: list[str] = []
    for sample, name in zip(samples, names, strict=True):
        values = sample.rollout_log_probs if sample.behaviour_log_probs is None else sample.behaviour_log_probs
        mask = _trained_mask(sample)
        known, misfit = _fit(sample, name, values)
        if mask[known:].any():  # what does not train may be anything
            misfits += misfit
        masks.append(torch.from_numpy(mask))
        rollout.append(torch.from_numpy(_resized(values, known, len(mask), NULL)).to(dtype))
    if stops and misfits:
        more = f"; and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
        raise InvalidLogProbError(
            f"{'; '.join(misfits[:_SHOWN])}{more}. Check that the rollout engine returns a log-prob for every sampled "
            f"token and that the trainer sees the same ids, or choose --rollout-log-prob-policy neutral, drop-token or "
            f"drop-sequence."
        )
    biases = {
        remaining_bias(sample.sampling, renormalised=True in behaviour, replayed=sample.kept_ids is not None)
        for sample in samples
    }
    for bias in biases - {""}:
        warnings.warn(bias, MismatchWarning, stacklevel=2)
    versions, trained_at = _versions(samples, names, masks, config, trainer_version)
    rewards = [sample.reward for sample in samples]
    packed = PackedSequences.from_lists(
        loss_masks=masks,
        rollout_log_probs=rollout if any(len(sample.rollout_log_probs) for sample in samples) else None,
        train_log_probs=_column("train_log_probs", samples, names, dtype),
        ref_log_probs=_column("ref_log_probs", samples, names, dtype),
        advantages=_column("advantages", samples, names, dtype),
        entropy=_column("entropy", samples, names, dtype),
        weight_versions=versions,
        trainer_version=trained_at,
        rewards=rewards if rewards and None not in rewards else None,
        sequence_ids=names,
    )
    if stops and packed.rollout_log_probs is not None:
        ours = packed.rollout_log_probs
        train = torch.zeros_like(ours) if packed.old_log_probs is None else packed.old_log_probs
        found, counts = find_invalid(train, ours, packed.loss_mask, packed.lengths, names)
        if found:
            raise invalid_error(found, sum(counts.values()))
    return packed


def sampling_mask(samples: Sequence[Sample]) -> RaggedSamplingMask | None:
    """The kept ids of all packed tokens, sample after sample, as `vocab_parallel_log_probs` takes them.

    A sample without kept ids, or a token without, is unfiltered; None where no sample has any. Raises ValueError where
    a filtered sample lacks what others have, and for a mask without the sampled id of a token that trains, naming
    sample and position.
    """
    rows = kept_rows(samples)
    return None if rows is None else ragged_mask(rows, "cpu")


def kept_rows(samples: Sequence[Sample]) -> list[Sequence[int]] | None:
    """The kept ids of each packed token, as in `sampling_mask`."""
    if all(sample.kept_ids is None for sample in samples):
        return None
    found: list[Sequence[int]] = []
    for index, sample in enumerate(samples):
        name = index if sample.sample_id is None else sample.sample_id
        if sample.kept_ids is None and sample.sampling.filtered:
            raise ValueError(
                f"sample {name} was sampled with filters, and its kept ids are missing while other samples have "
                f"theirs: request return_sampling_mask for all."
            )
        mask, ids = _trained_mask(sample).tolist(), _trained_ids(sample).tolist()
        kept = [*(sample.kept_ids or ()), *[()] * len(ids)][: len(ids)]
        check_kept_ids(kept, ids, mask, name)
        found += kept
    return found


def _trained_ids(sample: Sample) -> Ids:
    return sample.response_ids if sample.trained_ids is None else sample.trained_ids


def _trained_mask(sample: Sample) -> Bools:
    """[tokens that the trainer sees] whether they train."""
    length = len(_trained_ids(sample))
    mask = _resized(sample.loss_mask, len(sample), length, True)
    if sample.trained_mask is None:
        return mask
    if len(sample.trained_mask) != length:
        raise ValueError(f"trained_mask has {len(sample.trained_mask)} entries, the trainer sees {length} tokens")
    return mask & sample.trained_mask


def _fit(sample: Sample, name: object, values: Floats) -> tuple[int, list[str]]:
    """(tokens from the first on whose log-prob is known to be theirs, what does not fit)."""
    length = len(sample)
    if len(values) != length:
        # In a list of another length nobody knows which token lacks its log-prob.
        what = f"{len(values)} for {length} response tokens (kind length)"
        return 0, [f"rollout log-probs of sample {name}: {what}"] if length else []
    trained = _trained_ids(sample)
    shared = min(length, len(trained))
    other = np.flatnonzero(sample.response_ids[:shared] != trained[:shared])
    if len(other):
        at = int(other[0])
        says = f"position {at}: {sample.response_ids[at]} was sampled, {trained[at]} is trained on"
        return at, [f"token id of sample {name}, {says} (kind token_ids)"]
    if length != len(trained):
        says = f"{length} tokens were sampled, {len(trained)} are trained on (kind length)"
        return shared, [f"response of sample {name}: {says}"]
    return length, []


def _resized(values: Any, known: int, length: int, fill: Any) -> Any:
    """The first `known` values, filled up to `length`."""
    if known == length == len(values):
        return values
    found = np.full(length, fill, dtype=values.dtype)
    known = min(known, length)
    found[:known] = values[:known]
    return found


def _column(name: str, samples: Sequence[Sample], names: Sequence[object], dtype: torch.dtype) -> list[Tensor] | None:
    """A field of every sample; None where none has it."""
    rows: list[Floats | None] = [getattr(sample, name) for sample in samples]
    has = [row is not None and (len(row) > 0 or not len(sample)) for row, sample in zip(rows, samples, strict=True)]
    if not any(has) or all(row is None or not len(row) for row in rows):
        return None
    if not all(has):
        raise ValueError(
            f"{name} is missing in sample {names[has.index(False)]} and present in others: give it in all or none."
        )
    return [torch.from_numpy(row).to(dtype) for row in rows if row is not None]


def _versions(
    samples: Sequence[Sample],
    names: Sequence[object],
    masks: Sequence[Tensor],
    config: MismatchConfig | None,
    trainer: int | str | None,
) -> tuple[list[Tensor] | None, int | None]:
    """(number of each token's weight version, of the trainer's)."""
    needed = config is not None and config.rs.max_staleness is not None
    if needed and trainer is None:
        raise ValueError(
            "--rs-max-staleness counts weight versions back from trainer_version, which is missing: pass the version "
            "of the weights that are about to train."
        )
    known = dict.fromkeys(span.version for sample in samples for span in sample.weight_versions)
    codes = {version: code for code, version in enumerate(known)}
    rows = [version_of_tokens(s.weight_versions, codes, len(mask)) for s, mask in zip(samples, masks, strict=True)]
    lacking = [np.flatnonzero(mask.numpy() & (row < 0)) for row, mask in zip(rows, masks, strict=True)]
    name, missing = next(((name, at) for name, at in zip(names, lacking, strict=True) if len(at)), (None, None))
    if needed and missing is not None:
        raise ValueError(
            f"sample {name}, position {missing[0]} has no weight version: let the server name its weights "
            f"(weight_version of its update requests) and keep weight_versions of its replies, or leave "
            f"--rs-max-staleness out."
        )
    told = [version for version, code in codes.items() if any((row == code).any() for row in rows)]
    if isinstance(trainer, str):
        trainer = number_versions([*told, trainer])[trainer]
    if not told:
        return None, trainer
    if missing is not None:
        warnings.warn(
            "some training tokens have no weight version and others do: no metric by version for this batch.",
            MismatchWarning,
            stacklevel=3,
        )
        return None, trainer
    numbers = number_versions(told)
    # Tokens under the mask (tool results) were sampled from no weights: their code is -1, and any number will do.
    table = torch.tensor([numbers.get(version, numbers[told[0]]) for version in codes])
    return [table[torch.from_numpy(row)] for row in rows], trainer
