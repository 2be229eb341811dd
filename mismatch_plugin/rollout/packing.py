"""From records to packed tensors: what the correction computes on, and the kept ids for replay on the training side."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.config.settings import InvalidPolicy
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP, InvalidLogProbError
from mismatch_plugin.parallel.kept_ids import check_kept_ids, ragged_mask
from mismatch_plugin.parallel.log_prob_arguments import RaggedSamplingMask
from mismatch_plugin.rollout.records import Fault, RolloutRecord, WeightSpan, as_numbers
from mismatch_plugin.data.sampling import filter_bias, remaining_bias

Which = Literal["auto", "full", "behaviour"]

INITIAL_VERSION = "default"
"""What SGLang calls the weights it was started with: number −1, before every update."""
_SHOWN = 3
"""Faults that an error names; the others are counted."""


def to_packed(
    records: Sequence[RolloutRecord],
    train_log_probs: Sequence[Any] | None = None,
    config: MismatchConfig | None = None,
    *,
    old_log_probs: Sequence[Any] | None = None,
    ref_log_probs: Sequence[Any] | None = None,
    advantages: Sequence[Any] | None = None,
    entropy: Sequence[Any] | None = None,
    trained_ids: Sequence[Sequence[int]] | None = None,
    version_numbers: Mapping[str, int] | None = None,
    trainer_version: int | str | None = None,
    which: Which = "auto",
) -> PackedSequences:
    """The records as `PackedSequences`, one sequence a record, with weight versions, rewards and sample ids.

    Args:
        train_log_probs, old_log_probs, …: one 1-D tensor or list a record, over its response tokens
            (`PackedSequences.from_lists`).
        config: its `rollout_log_prob_policy` says what happens to faults. With `error`, the default, they
            are raised here. Otherwise the values go on as they are, and `correct` counts and handles them by kind;
            where lengths or ids disagree, everything from the first disagreement on is "not returned".
        trained_ids: the response ids that the training side sees, to be compared with those sampled. They may be longer
            or shorter (an end token appended by the trainer): the sequence packed is the one trained on.
        version_numbers: weight version → number; see `number_versions`.
        trainer_version: of the weights that are about to train, by number or name; `rs.max_staleness` counts back from
            it.
        which: "behaviour": log-probs renormalised over the kept ids, for training log-probs computed over them too;
            "full": over the full vocabulary; "auto": behaviour where every record has them.

    Raises:
        InvalidLogProbError: for faults under the policy `error`, naming sample, position, kind and value.
        ValueError: if entries do not fit; where `rs.max_staleness` is set and a token that trains has no version, or
            trainer_version is missing, naming sample and position.
    Warns:
        MismatchWarning: naming the bias that the sampling leaves (`sampling.remaining_bias`).
    """
    policy: InvalidPolicy = "error" if config is None else config.rollout_log_prob_policy
    if config is not None and not config.uses_rollout_values:
        policy = "neutral"  # what is only measured stops nothing
    behaviour = _use_behaviour(records, which)
    if trained_ids is not None and len(trained_ids) != len(records):
        raise ValueError(f"trained_ids has {len(trained_ids)} entries for {len(records)} records.")
    trained = [record.response_ids for record in records] if trained_ids is None else trained_ids
    same = [_same(record, ids) for record, ids in zip(records, trained, strict=True)]
    rows = [record.behaviour_log_probs if behaviour else record.rollout_log_probs for record in records]
    lists = (trained_ids, train_log_probs)
    if policy == "error":
        # What the packed batch does not show: lists of two lengths, other ids, and the list that is not used.
        beyond = [
            at
            for at, (record, ids, row, shared) in enumerate(zip(records, trained, rows, same, strict=True))
            if row is None
            or not len(row) == len(record.response_ids) == len(ids) == shared
            or record.behaviour_log_probs is not None
        ]
        _raise_faults(records, beyond, *lists)
    log_probs: list[Sequence[float | None]] = []
    masks: list[Sequence[int]] = []
    for record, ids, row, shared in zip(records, trained, rows, same, strict=True):
        # In a list of another length nobody knows which token lacks its log-prob, nor behind an id that differs.
        known = shared if row is not None and len(row) == len(record.response_ids) else 0
        log_probs.append(row if row is not None and known == len(ids) == len(row) else _filled(row, known, len(ids)))
        mask = record.loss_mask
        masks.append(mask if len(mask) == len(ids) else [*mask, *[1] * len(ids)][: len(ids)])
    versions = [_Versions(record.weight_versions, mask) for record, mask in zip(records, masks, strict=True)]
    for note in {_note(record, behaviour) for record in records} - {""}:
        warnings.warn(note, MismatchWarning, stacklevel=2)
    names = [index if record.sample_id is None else record.sample_id for index, record in enumerate(records)]
    if config is not None and config.rs.max_staleness is not None:
        _refuse_missing_versions(versions, names, trainer_version)
    rewards = [record.reward for record in records]
    if version_numbers is None and isinstance(trainer_version, str):
        version_numbers = number_versions([*(v for row in versions for v in row.told), trainer_version])
    packed = PackedSequences.from_lists(
        train_log_probs=train_log_probs,
        rollout_log_probs=log_probs,
        loss_masks=masks,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        advantages=advantages,
        entropy=entropy,
        weight_versions=_numbered(versions, version_numbers),
        trainer_version=_trainer_number(trainer_version, version_numbers),
        rewards=rewards if rewards and None not in rewards else None,
        sequence_ids=names,
    )
    if policy == "error":
        _raise_faults(records, _doubtful(packed, train_log_probs is not None), *lists)
    return packed


def sampling_mask(
    records: Sequence[RolloutRecord], *, trained_only: bool = False, device: torch.device | str = "cpu"
) -> RaggedSamplingMask | None:
    """The kept ids of all response tokens, record after record, as `vocab_parallel_log_probs` takes them.

    trained_only: rows of tokens with loss_mask 1 only. A record without kept ids, or a token without, is unfiltered;
    None if no record has any. Raises ValueError where a record was filtered and its kept ids are missing, or they lack
    the sampled id of a token that trains, naming sample and position.
    """
    if all(record.kept_ids is None for record in records):
        return None
    chosen: list[Sequence[int]] = []
    for index, record in enumerate(records):
        name = index if record.sample_id is None else record.sample_id
        if record.kept_ids is None and record.sampling.filtered:
            raise ValueError(
                f"sample {name} was sampled with filters, and its kept ids are missing while other records have "
                f"theirs: request return_sampling_mask for all."
            )
        kept = record.kept_ids or [[]] * len(record.response_ids)
        check_kept_ids(kept, record.response_ids, record.loss_mask, name)
        chosen += [row for row, mask in zip(kept, record.loss_mask, strict=True) if mask or not trained_only]
    return ragged_mask(chosen, device)


def numbered_versions(record: RolloutRecord, numbers: Mapping[str, int]) -> list[int]:
    """The number of each response token's weight version, any one where nothing trains.

    Raises ValueError, naming sample and position, where a token that trains has no version.
    """
    versions = _Versions(record.weight_versions, record.loss_mask)
    _refuse_missing_versions([versions], [record.sample_id])
    return versions.numbers(numbers, numbers[versions.told[0]] if versions.told else 0).tolist()


def number_versions(versions: Sequence[str]) -> dict[str, int]:
    """A number for each weight version, in the order of training: the integer that its name is or ends with.

    SGLang's own "default" is −1. Raises ValueError for any other name, if two names get the same number, and where what
    stands before the number is not the same in all of them: hexadecimal digests end in digits that mean nothing.
    """
    numbers: dict[str, int] = {}
    named: dict[int, str] = {}
    stems: dict[str, str] = {}
    for version in dict.fromkeys(versions):
        match = re.search(r"\d+$", version)
        if match is not None:
            stems.setdefault(version[: match.start()], version)
        elif version != INITIAL_VERSION:
            raise ValueError(
                f"weight version {version!r} does not end in a number: name versions by step, or pass version_numbers."
            )
        numbers[version] = number = -1 if match is None else int(match.group())
        if (other := named.setdefault(number, version)) != version:
            raise ValueError(f"weight versions {other!r} and {version!r} both mean {number}: pass version_numbers.")
    if len(stems) > 1:
        first, second, *_ = stems.values()
        raise ValueError(
            f"weight versions {first!r} and {second!r} are not one name with two numbers: name versions by step, or "
            f"pass version_numbers."
        )
    return numbers


def _note(record: RolloutRecord, behaviour: bool) -> str:
    """The bias that the sampling leaves in the log-probs that are used."""
    sampling = record.sampling
    note = remaining_bias(sampling, has_kept_ids=behaviour)
    if not behaviour or record.kept_ids is not None or sampling.greedy:
        return note
    bias = filter_bias(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, renormalised=True)
    return f"{bias}. {note}" if bias and note else bias or note


def _use_behaviour(records: Sequence[RolloutRecord], which: Which) -> bool:
    if which not in ("auto", "full", "behaviour"):
        raise ValueError(f"which={which!r} is unknown: choose auto, full or behaviour.")
    with_them = [record.behaviour_log_probs is not None for record in records]
    if which == "behaviour" and not all(with_them):
        index = with_them.index(False)
        raise ValueError(f"sample {records[index].sample_id or index} has no behaviour_log_probs: choose which='full'.")
    if which == "auto" and any(with_them) and not all(with_them):
        raise ValueError(
            "some records have behaviour_log_probs and others not: choose which='full', or which='behaviour' after "
            "requesting the sampling mask for all."
        )
    return which != "full" and bool(records) and all(with_them)


def _same(record: RolloutRecord, ids: Sequence[int]) -> int:
    """How many of the ids trained on are those sampled, before the first other one."""
    sampled = record.response_ids
    if isinstance(ids, list) and ids == sampled:
        return len(ids)
    differ = (at for at, (a, b) in enumerate(zip(sampled, ids, strict=False)) if a != b)
    return next(differ, min(len(sampled), len(ids)))


def _filled(row: Sequence[float | None] | None, known: int, length: int) -> list[float | None]:
    return [*(row or ())[:known], *[None] * (length - known)]


def _doubtful(packed: PackedSequences, with_train: bool) -> list[int]:
    """Records that may have a fault: the bounds of `core.validity.classify` once rounded to float32."""
    rollout, train = packed.rollout_log_probs, packed.old_log_probs
    assert rollout is not None
    wrong = ~((rollout > FLOOR) & (rollout < POSITIVE_TOLERANCE))
    if with_train and train is not None:
        wrong |= (rollout == 0.0) & (train <= -ZERO_FILL_GAP)
    wrong &= packed.loss_mask
    return packed.sequence_index[wrong].unique().tolist() if wrong.any() else []


def _raise_faults(
    records: Sequence[RolloutRecord],
    doubtful: Sequence[int],
    trained_ids: Sequence[Sequence[int]] | None,
    train_log_probs: Sequence[Any] | None,
) -> None:
    """Where one of the doubtful records has a fault: raise the first faults of all, and say how many more there are."""

    def given(index: int) -> dict[str, Any]:
        train = None
        if train_log_probs is not None and index < len(train_log_probs):
            train = as_numbers(train_log_probs[index])
            # Where the two sides have other lengths, a length fault (or from_lists) says so.
            train = train if train.shape == (len(records[index].response_ids),) else None
        return {"train_log_probs": train, "trained_ids": None if trained_ids is None else trained_ids[index]}

    if not any(records[index].count_faults(**given(index)) for index in doubtful):
        return
    found: list[Fault] = []
    count = 0
    for index, record in enumerate(records):
        count += record.count_faults(**given(index))
        if len(found) < _SHOWN:
            found += record.faults(index if record.sample_id is None else None, **given(index), limit=_SHOWN)
    shown = "; ".join(str(fault) for fault in found[:_SHOWN])
    more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
    raise InvalidLogProbError(
        f"{shown}{more}. Check that the rollout engine returns a log-prob for every sampled token and that the "
        f"trainer sees the same ids, or choose --rollout-log-prob-policy neutral, drop-token or drop-sequence."
    )


class _Versions:
    """The weight versions of one record's tokens, as far as they are packed."""

    def __init__(self, spans: Sequence[WeightSpan], mask: Sequence[int]) -> None:
        self.length = len(mask)
        self.spans = [span for span in spans if span.start < min(span.end, self.length)]
        self.told = [span.version for span in self.spans]
        self._mask = mask

    @cached_property
    def missing(self) -> int | None:
        """The first position that trains and has no version."""
        end = 0
        for span in [*self.spans, None]:  # in order, without overlap
            start = self.length if span is None else span.start
            if 1 in self._mask[end:start]:
                return end + list(self._mask[end:start]).index(1)
            end = start if span is None else span.end
        return None

    def numbers(self, numbers: Mapping[str, int], other: int) -> Tensor:
        """[n] int64, `other` where no version is told."""
        found = torch.full((self.length,), other, dtype=torch.int64)
        for span in self.spans:
            found[span.start : span.end] = numbers[span.version]
        return found


def _refuse_missing_versions(
    versions: Sequence[_Versions], names: Sequence[object], trainer_version: int | str | None = 0
) -> None:
    if trainer_version is None:
        raise ValueError(
            "--rs-max-staleness counts weight versions back from trainer_version, which is missing: pass the version "
            "of the weights that are about to train."
        )
    for name, row in zip(names, versions, strict=True):
        if row.missing is not None:
            raise ValueError(
                f"sample {name}, position {row.missing} has no weight version: let the server name its weights "
                f"(weight_version of its update requests) and keep weight_versions of its replies, or leave "
                f"--rs-max-staleness out."
            )


def _trainer_number(version: int | str | None, numbers: Mapping[str, int] | None) -> int | None:
    if not isinstance(version, str):
        return version
    if numbers is None or version not in numbers:
        raise ValueError(f"version_numbers lacks trainer_version {version!r}.")
    return numbers[version]


def _numbered(versions: Sequence[_Versions], numbers: Mapping[str, int] | None) -> list[Tensor] | None:
    told = [version for row in versions for version in row.told]
    if not told:
        return None
    if any(row.missing is not None for row in versions):
        warnings.warn(
            "some training tokens have no weight version and others do: no metric by version for this batch.",
            MismatchWarning,
            stacklevel=3,
        )
        return None
    numbers = number_versions(told) if numbers is None else numbers
    if unknown := sorted(set(told) - set(numbers)):
        raise ValueError(f"version_numbers lacks weight versions {unknown[:3]}.")
    # Tokens under the mask (tool results) were sampled from no weights; any number of the batch will do.
    return [row.numbers(numbers, numbers[told[0]]) for row in versions]
