"""Padding that no mask and no length tells from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mismatch_plugin.rollout.dumps.part import Part
from mismatch_plugin.rollout.responses import Floats, Ints, Response, Scored

_TELLING = 2
"""Tokens with log-prob 0 at the end of a row that are no accident: one is often a certain end token."""


def without_padding(part: Part, *, columns: bool) -> None:
    """Cut padding off rows of one width that come without mask and length, and say so in a note.

    Padding is a tail of one and the same id with log-prob 0.0, of several lengths, the longest of at least 2 tokens; a
    row whose tokens in front of it end in that id twice repeats itself, which a sampler does too. columns: rows are of
    a padded array, so that a single one may be padded too.

    Raises ValueError where such tails may be padding or tokens.
    """
    ids = [response.response_ids for response in part.responses]
    sides = [[response.rollout_log_probs for response in part.responses]] if ids else []
    if part.scored is not None:
        ids = ids or [scored.token_ids for scored in part.scored if scored.token_ids is not None]
        sides.append([scored.log_probs for scored in part.scored])
    one_width = len({len(row) for rows in (ids, *sides) for row in rows}) == 1
    if not one_width or (len(ids) < 2 and not columns):
        return
    of_first = [_zeros(row) for row in sides[0]]
    of_all = [min(row) for row in zip(of_first, *([*map(_zeros, rows)] for rows in sides[1:]), strict=True)]
    for zeros in (of_all, of_first):  # a trainer may give log-probs at padding, a sampler cannot
        if max(zeros) >= _TELLING and (tails := _tails(ids, zeros)) is not None:
            if part.responses:
                part.responses = [_response(row, tail) for row, tail in zip(part.responses, tails, strict=True)]
            if part.scored is not None:
                part.scored = [_scored(row, tail) for row, tail in zip(part.scored, tails, strict=True)]
            padding, row = sum(tails), ids[int(np.argmax(tails))]
            part.notes.append(
                f"without a mask: {padding} positions at the ends of {sum(map(bool, tails))} rows, with id {row[-1]} "
                f"and log-prob 0.0, are taken as padding and left out; add response_mask to be sure"
            )
            return
    if max(of_all) >= _TELLING:
        raise ValueError(
            f"sample {int(np.argmax(of_all))} ends in {max(of_all)} tokens with log-prob 0.0, padding or tokens: "
            f"nothing tells. Add "
            f'"response_mask" (1 at tokens of the response, 0 at padding) or "response_length" to the dump.'
        )
    if single := sum(map(bool, of_all)):
        part.notes.append(f"the last token of {single} rows has log-prob 0.0 and is kept: add response_mask if it pads")


def _zeros(log_probs: Floats) -> int:
    """How many log-probs at the end are 0."""
    others = np.flatnonzero(log_probs != 0)
    return len(log_probs) - (int(others[-1]) + 1 if len(others) else 0)


def _tails(ids: Sequence[Ints], zeros: Sequence[int]) -> list[int] | None:
    """How much of each row is padding; None where it may be tokens."""
    pad, tails = ids[int(np.argmax(zeros))][-1], list[int]()
    for row, most in zip(ids, zeros, strict=True):
        others = np.flatnonzero(row[len(row) - most :] != pad)
        tail = most - (int(others[-1]) + 1 if len(others) else 0)
        front = row[: len(row) - tail]
        if (most >= _TELLING and not tail) or (tail and len(front) > 1 and (front[-2:] == pad).all()):
            return None
        tails.append(tail)
    return tails if len({*tails}) > 1 and max(tails) >= _TELLING else None


def _response(row: Response, tail: int) -> Response:
    end = len(row.response_ids) - tail
    spans = [span.model_copy(update={"end": min(span.end, end)}) for span in row.weight_versions if span.start < end]
    return replace(
        row,
        response_ids=row.response_ids[:end],
        rollout_log_probs=row.rollout_log_probs[:end],
        loss_mask=row.loss_mask[:end],
        nulls=None if row.nulls is None else row.nulls[:end],
        weight_versions=tuple(spans),
        advantages=None if row.advantages is None else row.advantages[:end],
    )


def _scored(row: Scored, tail: int) -> Scored:
    end = len(row.log_probs) - tail
    cut = {
        name: value[:end]
        for name in ("log_probs", "nulls", "token_ids", "loss_mask", "advantages", "entropy")
        if (value := getattr(row, name)) is not None
    }
    return replace(row, **cut)
