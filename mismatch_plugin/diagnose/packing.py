"""From a checked batch to packed tensors: what is trained and has a sound log-prob on both sides, with advantages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import KINDS, SOUND, classify
from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number, version_of_tokens
from mismatch_plugin.diagnose.batch import Batch, Tokens

MAX_TOKENS = 1_500_000
"""Tokens on which settings are predicted; of more, a random part is taken."""
_PIECE = 1 << 20


def packed_of(batch: Batch) -> tuple[PackedSequences, tuple[str, ...]]:
    """(the batch in the form that training corrects, what a reader must know).

    Float64. A sequence is a response, its tokens are those that train and that training could use: a number on both
    sides that `core.validity` finds sound. `positions` are those in the response, `sequence_ids` the samples' indices.
    advantages: those of the samples, else the rewards, centred and divided by the sample
    deviation within their group (the same `group`, else the same prompt), as GRPO has it; None where there are neither.
    entropy, weight_versions: where every token has one. trainer_version: where all samples have the same one. turn_ids:
    of whole responses, so that what is left out splits no turn.
    Raises InputError where no token is left.
    """
    tokens, notes = _sound(batch)
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    order, lengths = tokens.sample[starts], np.diff(starts, append=len(tokens))
    samples = [batch.samples[index] for index in order]
    places = np.split(tokens.position, starts[1:])
    advantages, said = _advantages(batch, samples, places)
    trained_at = {version_number(sample.trainer_version) for sample in samples}
    packed = PackedSequences(
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        lengths=tuple(lengths.tolist()),
        rollout_log_probs=torch.from_numpy(tokens.rollout),
        old_log_probs=torch.from_numpy(tokens.training),
        advantages=None if advantages is None else torch.from_numpy(advantages),
        entropy=_tensor(_gathered([sample.entropy for sample in samples], samples, places)),
        positions=torch.from_numpy(tokens.position),
        weight_versions=_tensor(_versions(samples, places)),
        trainer_version=trained_at.pop() if len(trained_at) == 1 else None,
        turn_ids=torch.from_numpy(np.concatenate([_turns(s)[at] for s, at in zip(samples, places, strict=True)])),
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


def _tensor(values: np.ndarray | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)


def _gathered(given: Sequence[Floats | None], samples: Sequence[Sample], places: Sequence[Ints]) -> Floats | None:
    """[T], or None where a token has no finite value."""
    found, start = np.empty(sum(map(len, places))), 0
    for values, sample, place in zip(given, samples, places, strict=True):
        if values is None or len(values) != len(sample) or not np.isfinite(values[place]).all():
            return None
        found[start : (start := start + len(place))] = values[place]
    return found


def _versions(samples: Sequence[Sample], places: Sequence[Ints]) -> Ints | None:
    found, start = np.empty(sum(map(len, places)), dtype=np.int64), 0
    for sample, place in zip(samples, places, strict=True):
        numbers = numbered_versions(sample)[place]
        if not len(numbers) or numbers.min() < 0:
            return None
        found[start : (start := start + len(place))] = numbers
    return found


def _turns(sample: Sample) -> Ints:
    """[n] number of each token's turn: runs of tokens that train, those between two with the first of them."""
    begins = np.diff(sample.mask.astype(np.int8), prepend=0) == 1
    return np.maximum(np.cumsum(begins) - 1, 0)


def numbered_versions(sample: Sample) -> Ints:
    """[n] number at the end of each token's weight version; −1 where there is none."""
    told = {span.version: version_number(span.version) for span in sample.weight_versions}
    numbers = {version: -1 if number is None else number for version, number in told.items()}
    return version_of_tokens(sample.weight_versions, numbers, len(sample))


def _advantages(
    batch: Batch, samples: Sequence[Sample], places: Sequence[Ints]
) -> tuple[Floats | None, tuple[str, ...]]:
    given = [sample.advantages for sample in samples]
    found = _gathered(given, samples, places)
    if found is not None:
        if found.any():
            return found, ()
        return None, ("all advantages are 0, which trains nothing: predictions take 1",)
    partly = "some tokens have no advantage, so none is used; " if any(a is not None for a in given) else ""
    if any(sample.reward is None or not np.isfinite(sample.reward) for sample in samples):
        return None, (f"{partly}there are no advantages, and no reward of every response: predictions take 1",)
    values, how = _of_rewards(batch)
    if not values:
        return None, (f"{partly}rewards are the same {how}: there is no advantage, predictions take 1",)
    by_sample = np.array([values[sample.index] for sample in samples])
    said = f"{partly}advantages are made of the rewards, centred and divided by their deviation {how}"
    return np.repeat(by_sample, [len(place) for place in places]), (said,)


def _of_rewards(batch: Batch) -> tuple[dict[int, float], str]:
    """(`group_advantages` by sample, {} where all are 0; within what)."""
    rewarded = [s for s in batch if s.reward is not None and np.isfinite(s.reward)]
    groups, how = _group_names(rewarded)
    if len(set(groups)) == len(groups):
        groups, how = [0] * len(groups), "over the batch, for no two responses share a group or prompt"
    rewards = torch.tensor([sample.reward for sample in rewarded], dtype=torch.float64)
    values = group_advantages(rewards, groups).tolist()
    return ({s.index: value for s, value in zip(rewarded, values, strict=True)} if any(values) else {}), how


def _group_names(samples: Sequence[Sample]) -> tuple[Sequence[Hashable], str]:
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
    samples = [batch.samples[index] for index in packed.sequence_ids if isinstance(index, int)]
    rewards = [sample.reward for sample in samples]
    ids, _ = _group_names(samples)
    if len(set(ids)) == len(ids) or any(reward is None or not np.isfinite(reward) for reward in rewards):
        return None
    return Groups(torch.tensor(rewards, dtype=torch.float64), ids)


def subset(packed: PackedSequences, tokens: int = MAX_TOKENS, seed: int = 0) -> tuple[PackedSequences, tuple[str, ...]]:
    """(whole responses drawn at random, in their order, of at most so many tokens; a note): all where they fit."""
    total = sum(packed.lengths)
    if total <= tokens:
        return packed, ()
    lengths = np.array(packed.lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    count = max(int(np.searchsorted(np.cumsum(lengths[order]), tokens, side="right")), 1)
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[order[:count]] = True
    part = _part(packed, torch.from_numpy(np.repeat(chosen, lengths)), chosen)
    note = f"settings are predicted on {sum(part.lengths)} of {total} tokens: {count} responses drawn at random"
    return part, (note,)


def pieces(packed: PackedSequences, tokens: int = _PIECE) -> Iterator[tuple[slice, PackedSequences]]:
    """(its tokens, the piece): whole responses one after the other, about so many tokens at a time."""
    ends = np.cumsum(packed.lengths)
    first = start = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, start + tokens, side="right")), first + 1)
        where = slice(start, int(ends[last - 1]))
        chosen = np.zeros(len(ends), dtype=bool)
        chosen[first:last] = True
        yield where, _part(packed, where, chosen)
        first, start = last, where.stop


def _part(packed: PackedSequences, where_T: slice | Tensor, chosen_N: Bools) -> PackedSequences:
    at = np.flatnonzero(chosen_N)
    of_tokens = [item.name for item in fields(packed) if item.name != "rewards"]
    values: dict[str, Any] = {
        name: value[where_T] for name in of_tokens if isinstance(value := getattr(packed, name), Tensor)
    }
    if packed.rewards is not None:
        values["rewards"] = packed.rewards[torch.from_numpy(at)]
    lengths = tuple(packed.lengths[i] for i in at)
    ids = tuple(packed.sequence_ids[i] for i in at)
    return PackedSequences(lengths=lengths, sequence_ids=ids, trainer_version=packed.trainer_version, **values)
