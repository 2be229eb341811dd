"""From a checked batch to packed tensors: what is trained and has a sound log-prob on both sides, with advantages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import KINDS, SOUND, classify
from mismatch_plugin.data.arrays import Ints
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number, version_of_tokens
from mismatch_plugin.diagnose.batch import Batch

OF_PREDICTIONS = "predictions take 1, without settings whose criteria depend on the advantage"
MAX_TOKENS = 500_000
"""Tokens on which settings are predicted; of more, a random part is taken."""


def packed_of(batch: Batch) -> tuple[PackedSequences, list[str]]:
    """(the batch in the form that training corrects, what a reader must know).

    Float64. A sequence is a response, its tokens are those that train and that training could use: a number on both
    sides that `core.validity` finds sound. `positions` are those in the response, `sequence_ids` the samples' indices.
    advantages: those of the samples, else the rewards, centred and divided by the sample deviation within their group
    (the same `group`, else the same prompt), as GRPO has it; None where there are neither. entropy, weight_versions:
    where every token has one. trainer_version: where all samples have the same one. unit_ids: of whole responses, so
    that what is left out splits no turn.
    Raises InputError where no token is left.
    """
    tokens, notes = batch.tokens, list[str]()
    if lost := batch.token_count - len(tokens):
        notes.append(f"{lost} of {batch.token_count} tokens that train have no number on one side: they are left out")
    everywhere = torch.ones(len(tokens), dtype=torch.bool)
    codes = classify(torch.from_numpy(tokens.training), torch.from_numpy(tokens.rollout), ~everywhere)
    if (codes != SOUND).any():
        counts = zip(KINDS, torch.bincount(codes, minlength=len(KINDS)).tolist(), strict=True)
        shown = ", ".join(f"{count} {kind}" for kind, count in counts if count and kind != "sound")
        notes.append(
            f"tokens with an invalid log-prob ({shown}) are left out, where training stops at them unless "
            f"--rollout-log-prob-policy says otherwise"
        )
        tokens = tokens.where((codes == SOUND).numpy())
    if not len(tokens):
        raise InputError("no token that trains has a sound log-prob on both sides: there is nothing to measure.")
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    packed = PackedSequences(
        loss_mask=everywhere[: len(tokens)],
        lengths=tuple(np.diff(starts, append=len(tokens)).tolist()),
        rollout_log_probs=torch.from_numpy(tokens.rollout),
        old_log_probs=torch.from_numpy(tokens.training),
        positions=torch.from_numpy(tokens.position),
        sequence_ids=tuple(tokens.sample[starts].tolist()),
    )
    samples = samples_of(batch, packed)
    versions = at_tokens(numbered_versions, samples, packed)
    trained_at = {version_number(sample.trainer_version) for sample in samples}
    advantages, note = _advantages(batch, samples, packed)
    packed = packed.replace(
        advantages=advantages,
        entropy=_given("entropy", samples, packed),
        weight_versions=None if versions.min() < 0 else torch.from_numpy(versions),
        trainer_version=trained_at.pop() if len(trained_at) == 1 else None,
        unit_ids=torch.from_numpy(at_tokens(_turns, samples, packed)),
    )
    return packed, [*notes, note] if note else notes


def samples_of(batch: Batch, packed: PackedSequences) -> list[Sample]:
    """The sample of each packed sequence."""
    return [batch.samples[index] for index in packed.sequence_ids if isinstance(index, int)]


def at_tokens(values: Callable[[Sample], np.ndarray], samples: Sequence[Sample], packed: PackedSequences) -> np.ndarray:
    """[T] of the values [n] of each sample those at its packed tokens."""
    assert packed.positions is not None
    places = np.split(packed.positions.numpy(), np.cumsum(packed.lengths)[:-1])
    return np.concatenate([values(sample)[place] for sample, place in zip(samples, places, strict=True)])


def numbered_versions(sample: Sample) -> Ints:
    """[n] number at the end of each token's weight version; −1 where there is none."""
    told = {span.version: version_number(span.version) for span in sample.weight_versions}
    numbers = {version: -1 if number is None else number for version, number in told.items()}
    return version_of_tokens(sample.weight_versions, numbers, len(sample))


def _turns(sample: Sample) -> Ints:
    """[n] number of each token's turn: runs of tokens that train, those between two with the first of them."""
    begins = np.diff(sample.mask.astype(np.int8), prepend=0) == 1
    return np.maximum(np.cumsum(begins) - 1, 0)


def _given(name: str, samples: Sequence[Sample], packed: PackedSequences) -> Tensor | None:
    """[T] this field, or None where a token has no finite value."""
    if any(getattr(sample, name) is None or len(getattr(sample, name)) != len(sample) for sample in samples):
        return None
    found = at_tokens(lambda sample: getattr(sample, name), samples, packed)
    return torch.from_numpy(found) if np.isfinite(found).all() else None


def _advantages(batch: Batch, samples: Sequence[Sample], packed: PackedSequences) -> tuple[Tensor | None, str]:
    """([T] advantages, a note)."""
    found = _given("advantages", samples, packed)
    if found is not None:
        return (found, "") if found.any() else (None, f"all advantages are 0, which trains nothing: {OF_PREDICTIONS}")
    if not all(map(_rewarded, samples)):
        return None, f"there are no advantages of all tokens, and no reward of every response: {OF_PREDICTIONS}"
    rewarded = [sample for sample in batch if _rewarded(sample)]
    groups, how = _groups(rewarded)
    if len(set(groups.ids)) == len(groups.ids):
        groups, how = Groups(groups.rewards, [0] * len(groups.ids)), "over the batch, since no two share a group"
    values = group_advantages(groups.rewards, groups.ids)
    if not values.any():
        return None, f"rewards are the same {how}: {OF_PREDICTIONS}"
    of_sample = dict(zip([sample.index for sample in rewarded], values.tolist(), strict=True))
    by_sample = torch.tensor([of_sample[sample.index] for sample in samples], dtype=torch.float64)
    note = f"advantages are made of the rewards, centred and divided by their deviation {how}"
    return by_sample.repeat_interleave(torch.tensor(packed.lengths)), note


def _rewarded(sample: Sample) -> bool:
    return sample.reward is not None and bool(np.isfinite(sample.reward))


class Groups(NamedTuple):
    """rewards: [N] float64. ids: the group of each response, N of them."""

    rewards: Tensor
    ids: Sequence[Hashable]


def _groups(samples: Sequence[Sample]) -> tuple[Groups, str]:
    """(by the record's group, else by the prompt; within what)."""
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    if all(sample.group is not None for sample in samples):
        return Groups(rewards, [sample.group for sample in samples]), "within each group"
    return Groups(rewards, [sample.prompt_ids.tobytes() for sample in samples]), "within each prompt"


def groups_of(batch: Batch, packed: PackedSequences) -> Groups | None:
    """Rewards and groups of the packed responses; None where one has no finite reward, or no two share a group."""
    samples = samples_of(batch, packed)
    if not all(map(_rewarded, samples)):
        return None
    groups, _ = _groups(samples)
    return None if len(set(groups.ids)) == len(groups.ids) else groups


def subset(packed: PackedSequences) -> tuple[PackedSequences, list[str]]:
    """(whole responses drawn at random, in their order, of at most MAX_TOKENS; a note): all where they fit."""
    total = sum(packed.lengths)
    if total <= MAX_TOKENS:
        return packed, []
    lengths = np.array(packed.lengths)
    order = np.random.default_rng(0).permutation(len(lengths))
    count = max(int(np.searchsorted(np.cumsum(lengths[order]), MAX_TOKENS, side="right")), 1)
    part = _responses(packed, np.sort(order[:count]))
    return part, [f"settings are predicted on {sum(part.lengths)} of {total} tokens: {count} responses drawn at random"]


def pieces(packed: PackedSequences) -> Iterator[PackedSequences]:
    """Whole responses one after the other, about a million tokens at a time: memory hardly grows with the batch."""
    lengths = np.array(packed.lengths)
    piece = (np.cumsum(lengths) - lengths) // 2**20
    for number in np.unique(piece):
        yield packed if number == piece[-1] == 0 else _responses(packed, np.flatnonzero(piece == number))


def _responses(packed: PackedSequences, rows: Ints) -> PackedSequences:
    """These alone; rows ascend."""
    where = torch.from_numpy(np.repeat(np.isin(np.arange(len(packed.lengths)), rows), packed.lengths))
    tensors = {item.name: getattr(packed, item.name) for item in fields(packed)}
    changed: dict[str, Any] = {name: value[where] for name, value in tensors.items() if isinstance(value, Tensor)}
    kept = {name: tuple(np.array(getattr(packed, name))[rows].tolist()) for name in ("lengths", "sequence_ids")}
    return packed.replace(**changed, **kept)
