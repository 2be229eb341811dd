"""Several turns with a tool or an environment between them, as one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mismatch_plugin.rollout.records import RolloutRecord, WeightSpan
from mismatch_plugin.rollout.served import Served, ServedWeights

T = TypeVar("T")
_FILL = {"rollout_log_probs": None, "loss_mask": 0, "behaviour_log_probs": None, "kept_ids": [], "top_log_probs": []}
"""Lists per token, and what they hold for a token that no turn sampled."""


def join_turns(turns: Sequence[RolloutRecord]) -> RolloutRecord:
    """One record of a conversation: the first prompt, then everything after it as the response.

    Each later prompt must begin with the prompt and response before it. What it adds (tool results, template tokens)
    has loss_mask 0, log-prob None and no weight version. Text, finish reason, names, reward and sampling parameters are
    the last turn's; of the latter max_new_tokens and seed, as well as server and dp_rank, are None where turns differ,
    and `served` where they have other workers.

    Raises ValueError where turns were drawn from different distributions (other temperature, filters, penalties;
    max_new_tokens, seed and stop conditions may differ), and where a later prompt does not continue the turn before:
    its tokens were changed in between, as decoding and encoding again does, and then the log-probs belong to others.
    """
    if not turns:
        raise ValueError("join_turns needs at least one record.")
    first, last = turns[0], turns[-1]
    for name in ("kept_ids", "behaviour_log_probs", "top_log_probs"):
        if len({getattr(turn, name) is None for turn in turns}) > 1:
            raise ValueError(f"{name} is there in some turns of sample {first.sample_id} and missing in others.")
    ids: list[int] = []
    spans: list[WeightSpan] = []
    weights: list[ServedWeights] = []
    columns: dict[str, Any] = {name: [] for name in _FILL if getattr(first, name) is not None}
    for number, turn in enumerate(turns):
        called = f"turn {number} of sample {turn.sample_id}"
        before = first.prompt_ids + ids
        if turn.prompt_ids[: len(before)] != before:
            same = common_length(before, turn.prompt_ids)
            raise ValueError(
                f"{called} does not continue the turn before: its prompt differs from position {same} on. Send the "
                f"token ids that were sampled, never their text encoded again."
            )
        _check_distribution(first, turn, called)
        added = turn.prompt_ids[len(before) :]
        start = len(ids) + len(added)
        ids += added + turn.response_ids
        for name, column in columns.items():
            values = getattr(turn, name)
            if len(values) != len(turn.response_ids):
                raise ValueError(
                    f"{name} of {called}: {len(values)} for {len(turn.response_ids)} tokens; joined, they would shift "
                    f"those of later turns."
                )
            column += [_FILL[name] for _ in added] + values
        spans += [
            WeightSpan(version=span.version, start=span.start + start, end=span.end + start)
            for span in turn.weight_versions
        ]
        if turn.served is not None:
            weights += [
                span.model_copy(update={"start": span.start + start, "end": span.end + start})
                for span in turn.served.weights
            ]
    shared: dict[str, Any] = {name: _shared(getattr(turn, name) for turn in turns) for name in ("server", "dp_rank")}
    budget = {name: _shared(getattr(turn.sampling, name) for turn in turns) for name in ("max_new_tokens", "seed")}
    return RolloutRecord(
        prompt_ids=first.prompt_ids,
        response_ids=ids,
        sampling=last.sampling.model_copy(update=budget),
        log_probs_of=last.log_probs_of,
        served=_served([turn.served for turn in turns], weights),
        finish_reason=last.finish_reason,
        weight_versions=spans,
        prompt_log_probs=first.prompt_log_probs,
        text=last.text,
        request_id=last.request_id,
        sample_id=last.sample_id,
        reward=last.reward,
        **columns,
        **shared,
    )


def _served(told: Sequence[Served | None], weights: list[ServedWeights]) -> Served | None:
    """The last turn's, with all their weights; None where one tells nothing, or another worker sampled it."""
    last = told[-1]
    if last is None or any(one is None or one.worker != last.worker for one in told):
        return None
    temperature = _shared(one.temperature for one in told if one is not None)
    return last.model_copy(update={"weights": weights, "temperature": temperature})


def _check_distribution(first: RolloutRecord, turn: RolloutRecord, called: str) -> None:
    ours, theirs = first.sampling.distribution, turn.sampling.distribution
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{called} was sampled with {name}={theirs.get(name)}, turn 0 with {ours.get(name)}: one record holds "
                f"one distribution. Keep such turns in records of their own."
            )


def _shared(values: Iterable[T]) -> T | None:
    """The value that all have; None where they differ."""
    first, *others = values
    return first if all(other == first for other in others) else None


def common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many of the first ids are the same."""
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
