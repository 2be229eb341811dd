"""Several turns with a tool or an environment between them, as one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from mismatch_plugin.rollout.records import RolloutRecord, WeightSpan

T = TypeVar("T")


def join_turns(turns: Sequence[RolloutRecord]) -> RolloutRecord:
    """One record of a conversation: the first prompt, then everything after it as the response.

    Each later prompt must begin with the prompt and response before it. What it adds (tool results, template tokens)
    has loss_mask 0, log-prob None and no weight version. Text, finish reason, names, reward and sampling parameters are
    the last turn's; of the latter max_new_tokens and seed, as well as server and dp_rank, are None where turns differ.

    Raises ValueError where turns were drawn from different distributions (other temperature, filters, penalties;
    max_new_tokens, seed and stop conditions may differ), and where a later prompt does not continue the turn before:
    its tokens were changed in between, as decoding and encoding again does, and then the log-probs belong to others.
    """
    if not turns:
        raise ValueError("join_turns needs at least one record.")
    first, last = turns[0], turns[-1]
    ids: list[int] = []
    rollout: list[float | None] = []
    mask: list[int] = []
    spans: list[WeightSpan] = []
    with_kept = _agree(turns, "kept_ids")
    with_behaviour = _agree(turns, "behaviour_log_probs")
    with_top = _agree(turns, "top_log_probs")
    kept: list[list[int]] = []
    behaviour: list[float | None] = []
    top: list[list[tuple[float, int]]] = []
    for number, turn in enumerate(turns):
        before = first.prompt_ids + ids
        if turn.prompt_ids[: len(before)] != before:
            same = _common_length(before, turn.prompt_ids)
            raise ValueError(
                f"turn {number} of sample {turn.sample_id} does not continue the turn before: its prompt differs from "
                f"position {same} on. Send the token ids that were sampled, never their text encoded again."
            )
        for name in ("rollout_log_probs", "behaviour_log_probs"):
            values = getattr(turn, name)
            if values is not None and len(values) != len(turn.response_ids):
                raise ValueError(
                    f"{name} of turn {number} of sample {turn.sample_id}: {len(values)} for {len(turn.response_ids)} "
                    f"tokens; joined, they would shift those of later turns."
                )
        _check_distribution(first, turn, number)
        added = len(turn.prompt_ids) - len(before)
        start = len(ids) + added
        ids += turn.prompt_ids[len(before) :] + turn.response_ids
        mask += [0] * added + turn.loss_mask
        for whole, own in ((rollout, turn.rollout_log_probs), (behaviour, turn.behaviour_log_probs)):
            whole.extend([None] * added)
            whole.extend(own or ())
        kept += [[] for _ in range(added)] + (turn.kept_ids or [])
        top += [[] for _ in range(added)] + (turn.top_log_probs or [])
        spans += [
            WeightSpan(version=span.version, start=span.start + start, end=span.end + start)
            for span in turn.weight_versions
        ]
    return RolloutRecord(
        prompt_ids=first.prompt_ids,
        response_ids=ids,
        rollout_log_probs=rollout,
        loss_mask=mask,
        sampling=last.sampling.model_copy(
            update={
                "max_new_tokens": _shared(turn.sampling.max_new_tokens for turn in turns),
                "seed": _shared(turn.sampling.seed for turn in turns),
            }
        ),
        finish_reason=last.finish_reason,
        weight_versions=spans,
        kept_ids=kept if with_kept else None,
        behaviour_log_probs=behaviour if with_behaviour else None,
        prompt_log_probs=first.prompt_log_probs,
        top_log_probs=top if with_top else None,
        text=last.text,
        request_id=last.request_id,
        sample_id=last.sample_id,
        server=_shared(turn.server for turn in turns),
        dp_rank=_shared(turn.dp_rank for turn in turns),
        reward=last.reward,
    )


def _check_distribution(first: RolloutRecord, turn: RolloutRecord, number: int) -> None:
    ours, theirs = first.sampling.distribution, turn.sampling.distribution
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"turn {number} of sample {turn.sample_id} was sampled with {name}={theirs.get(name)}, turn 0 with "
                f"{ours.get(name)}: one record holds one distribution. Keep such turns in records of their own."
            )


def _shared(values: Iterable[T]) -> T | None:
    """The value that all have; None where they differ."""
    first, *others = values
    return first if all(other == first for other in others) else None


def _common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    length = 0
    while length < min(len(ours), len(theirs)) and ours[length] == theirs[length]:
        length += 1
    return length


def _agree(turns: Sequence[RolloutRecord], name: str) -> bool:
    given = {getattr(turn, name) is not None for turn in turns}
    if len(given) > 1:
        raise ValueError(f"{name} is there in some turns of sample {turns[0].sample_id} and missing in others.")
    return given.pop()
