"""From records to packed tensors: what the correction computes on, and the kept ids for replay on the training side."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.config.settings import InvalidPolicy
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import InvalidLogProbError
from mismatch_plugin.parallel.kept_ids import check_kept_ids, ragged_mask
from mismatch_plugin.parallel.log_prob_torch import RaggedSamplingMask
from mismatch_plugin.rollout.records import Fault, RolloutRecord
from mismatch_plugin.rollout.sampling import filter_bias, remaining_bias
from mismatch_plugin.rollout.turns import common_length

Which = Literal["auto", "full", "behaviour"]

INITIAL_VERSION = "default"
"""What SGLang calls the weights it was started with: number −1, before every update."""


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
    if policy == "error":
        _raise_faults(records, train_log_probs, trained_ids)
    trained = [record.response_ids for record in records] if trained_ids is None else trained_ids
    log_probs: list[list[float | None]] = []
    masks: list[list[int]] = []
    versions: list[list[str | None]] = []
    for record, ids in zip(records, trained, strict=True):
        given = record.behaviour_log_probs if behaviour else record.rollout_log_probs
        # In a list of another length nobody knows which token lacks its log-prob, nor behind an id that differs.
        whole = given is not None and len(given) == len(record.response_ids)
        same = common_length(record.response_ids, ids) if whole else 0
        log_probs.append([*(given or ())[:same], *[None] * (len(ids) - same)])
        masks.append([*record.loss_mask, *[1] * len(ids)][: len(ids)])
        versions.append([*record.version_of_token, *[None] * len(ids)][: len(ids)])
    for note in {_note(record, behaviour) for record in records} - {""}:
        warnings.warn(note, MismatchWarning, stacklevel=2)
    names = [index if record.sample_id is None else record.sample_id for index, record in enumerate(records)]
    if config is not None and config.rs.max_staleness is not None:
        _refuse_missing_versions(versions, masks, names, trainer_version)
    rewards = [record.reward for record in records]
    if version_numbers is None and isinstance(trainer_version, str):
        version_numbers = number_versions([v for row in versions for v in row if v is not None] + [trainer_version])
    return PackedSequences.from_lists(
        train_log_probs=train_log_probs,
        rollout_log_probs=log_probs,
        loss_masks=masks,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        advantages=advantages,
        entropy=entropy,
        weight_versions=_numbered(versions, masks, version_numbers),
        trainer_version=_trainer_number(trainer_version, version_numbers),
        rewards=rewards if rewards and None not in rewards else None,
        sequence_ids=names,
    )


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
    versions = record.version_of_token
    _refuse_missing_versions([versions], [record.loss_mask], [record.sample_id])
    told = [numbers[version] for version in versions if version is not None]
    return [numbers[version] if version is not None else told[0] if told else 0 for version in versions]


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


def _raise_faults(
    records: Sequence[RolloutRecord],
    train_log_probs: Sequence[Any] | None,
    trained_ids: Sequence[Sequence[int]] | None,
) -> None:
    found: list[Fault] = []
    for index, record in enumerate(records):
        train = None
        if train_log_probs is not None and index < len(train_log_probs):
            train = [float(value) for value in train_log_probs[index]]
            # Where the two sides have other lengths, a length fault (or from_lists) says so.
            train = train if len(train) == len(record.response_ids) else None
        ids = None if trained_ids is None else trained_ids[index]
        found += record.faults(index if record.sample_id is None else None, trained_ids=ids, train_log_probs=train)
    if found:
        shown = "; ".join(str(fault) for fault in found[:3])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise InvalidLogProbError(
            f"{shown}{more}. Check that the rollout engine returns a log-prob for every sampled token and that the "
            f"trainer sees the same ids, or choose --rollout-log-prob-policy neutral, drop-token or drop-sequence."
        )


def _refuse_missing_versions(
    versions: Sequence[Sequence[str | None]],
    masks: Sequence[Sequence[int]],
    names: Sequence[object],
    trainer_version: int | str | None = 0,
) -> None:
    if trainer_version is None:
        raise ValueError(
            "--rs-max-staleness counts weight versions back from trainer_version, which is missing: pass the version "
            "of the weights that are about to train."
        )
    for name, row, mask in zip(names, versions, masks, strict=True):
        for position, (version, trains) in enumerate(zip(row, mask, strict=True)):
            if trains and version is None:
                raise ValueError(
                    f"sample {name}, position {position} has no weight version: let the server name its weights "
                    f"(weight_version of its update requests) and keep weight_versions of its replies, or leave "
                    f"--rs-max-staleness out."
                )


def _trainer_number(version: int | str | None, numbers: Mapping[str, int] | None) -> int | None:
    if not isinstance(version, str):
        return version
    if numbers is None or version not in numbers:
        raise ValueError(f"version_numbers lacks trainer_version {version!r}.")
    return numbers[version]


def _numbered(
    versions: Sequence[Sequence[str | None]], masks: Sequence[Sequence[int]], numbers: Mapping[str, int] | None
) -> list[Tensor] | None:
    told = [version for row in versions for version in row if version is not None]
    if not told:
        return None
    pairs = (pair for row, mask in zip(versions, masks, strict=True) for pair in zip(row, mask, strict=True))
    if any(mask and version is None for version, mask in pairs):
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
    return [
        torch.tensor([numbers[told[0] if version is None else version] for version in row], dtype=torch.int64)
        for row in versions
    ]
