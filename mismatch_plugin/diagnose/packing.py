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
from mismatch_plugin.diagnose.batch import Batch, Tokens

_ONE = "predictions take 1, without settings whose criteria depend on the advantage"
MAX_TOKENS = 500_000
"""Tokens on which settings are predicted; of more, a random part is taken."""
_PIECE = 1 << 20


def packed_of(batch: Batch) -> tuple[PackedSequences, tuple[str, ...]]:
    """(the batch in the form that training corrects, what a reader must know).

    Float64. A sequence is a response, its tokens are those that train and that training could use: a number on both
    sides that `core.validity` finds sound. `positions` are those in the response, `sequence_ids` the samples' indices.
    advantages: those of the samples, else the rewards, centred and divided by the sample deviation within their group
    (the same `group`, else the same prompt), as GRPO has it; None where there are neither. entropy, weight_versions:
    where every token has one. trainer_version: where all samples have the same one. unit_ids: of whole responses, so
    that what is left out splits no turn.
    Raises InputError where no token is left.
    """
    tokens, notes = _sound(batch)
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    order, places = tokens.sample[starts], np.split(tokens.position, starts[1:])
    samples = [batch.samples[index] for index in order]
    advantages, said = _advantages(batch, samples, places)
    versions = at_places(numbered_versions, samples, places)
    trained_at = {version_number(sample.trainer_version) for sample in samples}
    packed = PackedSequences(
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        lengths=tuple(map(len, places)),
        rollout_log_probs=torch.from_numpy(tokens.rollout),
        old_log_probs=torch.from_numpy(tokens.training),
        advantages=advantages,
        entropy=_given("entropy", samples, places),
        positions=torch.from_numpy(tokens.position),
        weight_versions=None if versions.min() < 0 else torch.from_numpy(versions),
        trainer_version=trained_at.pop() if len(trained_at) == 1 else None,
        unit_ids=torch.from_numpy(at_places(_turns, samples, places)),
        sequence_ids=tuple(order.tolist()),
    )
    return packed, (*notes, *said)


def _sound(batch: Batch) -> tuple[Tokens, list[str]]:
    tokens, notes = batch.tokens, []
    if lost := batch.token_count - len(tokens):
        notes.append(f"{lost} of {batch.token_count} tokens that train have no number on one side: they are left out")
    none = torch.zeros(len(tokens), dtype=torch.bool)
    codes = classify(torch.from_numpy(tokens.training), torch.from_numpy(tokens.rollout), none)
    if (codes != SOUND).any():
        counts = torch.bincount(codes, minlength=len(KINDS)).tolist()
        shown = ", ".join(f"{n} {kind}" for kind, n in zip(KINDS, counts, strict=True) if n and kind != "sound")
        notes.append(
            f"tokens with an invalid log-prob ({shown}) are left out, where training stops at them unless "
            f"--rollout-log-prob-policy says otherwise"
        )
        tokens = tokens.where((codes == SOUND).numpy())
    if not len(tokens):
        raise InputError("no token that trains has a sound log-prob on both sides: there is nothing to measure.")
    return tokens, notes


def at_places(values: Callable[[Sample], np.ndarray], samples: Sequence[Sample], places: Sequence[Ints]) -> np.ndarray:
    """[T] the values of each sample at its places."""
    return np.concatenate([values(sample)[place] for sample, place in zip(samples, places, strict=True)])


def samples_of(batch: Batch, packed: PackedSequences) -> tuple[list[Sample], list[Ints]]:
    """(the sample of each packed sequence, the places of its packed tokens in it)."""
    assert packed.positions is not None
    places = np.split(packed.positions.numpy(), np.cumsum(packed.lengths)[:-1])
    return [batch.samples[index] for index in packed.sequence_ids if isinstance(index, int)], places


def numbered_versions(sample: Sample) -> Ints:
    """[n] number at the end of each token's weight version; −1 where there is none."""
    told = {span.version: version_number(span.version) for span in sample.weight_versions}
    numbers = {version: -1 if number is None else number for version, number in told.items()}
    return version_of_tokens(sample.weight_versions, numbers, len(sample))


def _turns(sample: Sample) -> Ints:
    """[n] number of each token's turn: runs of tokens that train, those between two with the first of them."""
    begins = np.diff(sample.mask.astype(np.int8), prepend=0) == 1
    return np.maximum(np.cumsum(begins) - 1, 0)


def _given(name: str, samples: Sequence[Sample], places: Sequence[Ints]) -> Tensor | None:
    """[T] this field, or None where a token has no finite value."""
    if any(getattr(sample, name) is None or len(getattr(sample, name)) != len(sample) for sample in samples):
        return None
    found = at_places(lambda sample: getattr(sample, name), samples, places)
    return torch.from_numpy(found) if np.isfinite(found).all() else None


def _advantages(
    batch: Batch, samples: Sequence[Sample], places: Sequence[Ints]
) -> tuple[Tensor | None, tuple[str, ...]]:
    found = _given("advantages", samples, places)
    if found is not None:
        nothing = f"all advantages are 0, which trains nothing: {_ONE}"
        return (found, ()) if found.any() else (None, (nothing,))
    partly = "some tokens have no advantage, so none is used; " * any(s.advantages is not None for s in samples)
    if not all(map(_rewarded, samples)):
        return None, (f"{partly}there are no advantages, and no reward of every response: {_ONE}",)
    rewarded = [sample for sample in batch if _rewarded(sample)]
    ids, how = _group_ids(rewarded)
    if len(set(ids)) == len(ids):
        ids, how = [0] * len(ids), "over the batch, for no two responses share a group or prompt"
    values = group_advantages(_rewards(rewarded), ids).tolist()
    if not any(values):
        return None, (f"{partly}rewards are the same {how}: {_ONE}",)
    of_sample = {sample.index: value for sample, value in zip(rewarded, values, strict=True)}
    by_sample = torch.tensor([of_sample[sample.index] for sample in samples], dtype=torch.float64)
    said = f"{partly}advantages are made of the rewards, centred and divided by their deviation {how}"
    return by_sample.repeat_interleave(torch.tensor([len(place) for place in places])), (said,)


def _rewarded(sample: Sample) -> bool:
    return sample.reward is not None and bool(np.isfinite(sample.reward))


def _rewards(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([sample.reward for sample in samples], dtype=torch.float64)


def _group_ids(samples: Sequence[Sample]) -> tuple[Sequence[Hashable], str]:
    """(the group of each, else its prompt; within what)."""
    if all(sample.group is not None for sample in samples):
        return [sample.group for sample in samples], "within each group"
    return [sample.prompt_ids.tobytes() for sample in samples], "within each prompt"


class Groups(NamedTuple):
    """rewards: [N] float64. ids: the group of each response, N of them."""

    rewards: Tensor
    ids: Sequence[Hashable]


def groups_of(batch: Batch, packed: PackedSequences) -> Groups | None:
    """Rewards and groups of the packed responses; None where one has no finite reward, or no two share a group."""
    samples, _ = samples_of(batch, packed)
    ids, _ = _group_ids(samples)
    if len(set(ids)) == len(ids) or not all(map(_rewarded, samples)):
        return None
    return Groups(_rewards(samples), ids)


def subset(packed: PackedSequences, tokens: int = MAX_TOKENS, seed: int = 0) -> tuple[PackedSequences, tuple[str, ...]]:
    """(whole responses drawn at random, in their order, of at most so many tokens; a note): all where they fit."""
    total = sum(packed.lengths)
    if total <= tokens:
        return packed, ()
    lengths = np.array(packed.lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    count = max(int(np.searchsorted(np.cumsum(lengths[order]), tokens, side="right")), 1)
    part = _responses(packed, np.sort(order[:count]))
    note = f"settings are predicted on {sum(part.lengths)} of {total} tokens: {count} responses drawn at random"
    return part, (note,)


def pieces(packed: PackedSequences, tokens: int = _PIECE) -> Iterator[PackedSequences]:
    """Whole responses one after the other, about so many tokens at a time: memory hardly grows with the batch."""
    if sum(packed.lengths) <= tokens:
        yield packed
        return
    lengths = np.array(packed.lengths)
    piece = (np.cumsum(lengths) - lengths) // tokens
    for number in np.unique(piece):
        yield _responses(packed, np.flatnonzero(piece == number))


def _responses(packed: PackedSequences, rows: Ints) -> PackedSequences:
    """These alone; rows ascend."""
    chosen = np.isin(np.arange(len(packed.lengths)), rows)
    where = torch.from_numpy(np.repeat(chosen, packed.lengths))
    tensors = {item.name: getattr(packed, item.name) for item in fields(packed)}
    changed: dict[str, Any] = {name: value[where] for name, value in tensors.items() if isinstance(value, Tensor)}
    kept = {name: tuple(np.array(getattr(packed, name))[rows].tolist()) for name in ("lengths", "sequence_ids")}
    return packed.replace(**changed, **kept)
