"""Where a response begins and ends in a row, and what cuts the row's other lists to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from mismatch_plugin.rollout.dumps import values
from mismatch_plugin.rollout.responses import Ints

_Cut = Callable[[Any], Any]
_Get = Callable[[str], Any]
_Called = Callable[[str], str]


def of_response(
    get: _Get, called: _Called, place: str, padded: Collection[str], note: Callable[[str], None]
) -> tuple[Ints, Ints, _Cut]:
    """(prompt ids, response ids, what cuts a row to the response) where responses have a column of their own."""
    raw = values.vector(get("response_ids"), called("response_ids"), "q")
    width, prompt = len(raw), np.zeros(0, dtype=np.int32)
    told, rows = get("prompt_ids"), get("attention_mask")
    raw_prompt = None if told is None else values.vector(told, called("prompt_ids"), "q")
    before = 0 if raw_prompt is None else len(raw_prompt)
    attention = None if rows is None else values.mask(rows, called("attention_mask"))
    if attention is not None and len(attention) not in (width, before + width):
        raise ValueError(
            f"{called('attention_mask')} has {len(attention)} entries, prompt and response {before} and {width}."
        )
    if raw_prompt is not None:
        keep = None if get("prompt_mask") is None else values.mask(get("prompt_mask"), called("prompt_mask"))
        if keep is None and attention is not None and len(attention) == before + width:
            keep = attention[:before]
        if keep is not None and len(keep) != before:
            raise ValueError(f"{called('prompt_mask')} has {len(keep)} entries, the prompt {before}.")
        if keep is None and "prompt_ids" in padded:
            note("prompt ids are left out: no mask tells them from their padding")
        else:
            prompt = values.ids(raw_prompt if keep is None else raw_prompt[keep], called("prompt_ids"))
    mask = None if get("loss_mask") is None else values.mask(get("loss_mask"), called("loss_mask"))
    whole = mask is not None and len(mask) == before + width
    if get("response_length") is not None:
        length = values.count(get("response_length"), called("response_length"))
    elif attention is not None:
        length = int(attention[-width:].sum()) if width else 0
        if not attention[len(attention) - width :][:length].all():
            raise ValueError(f"{called('attention_mask')} has a 0 inside the response: padding belongs at its end.")
    elif mask is not None and "response_ids" in padded:
        ones = np.flatnonzero(mask[before if whole else 0 :])
        length = int(ones[-1]) + 1 if len(ones) else 0
    else:
        length = width
    if length > width:
        raise ValueError(f"{called('response_ids')} has {width} tokens, its response_length is {length}.")

    def cut(value: Any) -> Any:
        if whole and len(value) == before + width:
            value = value[before:]
        return value[:length] if len(value) == width else value

    return prompt, values.ids(raw[:length], called("response_ids")), cut


def of_sequence(
    get: _Get, called: _Called, place: str, padded: Collection[str], note: Callable[[str], None]
) -> tuple[Ints, Ints, _Cut]:
    """The same where prompt and response are one row."""
    if get("sequence") is None:
        raise ValueError(f"{place} has no token ids.")
    raw = values.vector(get("sequence"), called("sequence"), "q")
    width, start, end = len(raw), 0, len(raw)
    told, rows = get("loss_mask"), get("attention_mask")
    mask = None if told is None else values.mask(told, called("loss_mask"))
    if rows is not None:
        seen = values.mask(rows, called("attention_mask"))
        ones = np.flatnonzero(seen)
        start, end = (int(ones[0]), int(ones[-1]) + 1) if len(ones) else (0, 0)
        if end - start != len(ones) or len(seen) != width:
            raise ValueError(f"{called('attention_mask')} has a 0 inside the sequence, or another length than {width}.")
    elif get("total_length") is not None:
        end = values.count(get("total_length"), called("total_length"))
    elif mask is not None and "sequence" in padded and len(mask) == width:
        end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
    if get("response_length") is not None:
        begin = end - values.count(get("response_length"), called("response_length"))
    elif get("prompt_length") is not None:
        begin = start + values.count(get("prompt_length"), called("prompt_length"))
    elif mask is None:
        raise ValueError(f"{place} has no loss_mask: nothing tells its response from its prompt.")
    elif len(mask) == width:
        trained = np.flatnonzero(mask[start:end])
        begin = start + int(trained[0]) if len(trained) else end
    else:
        begin = end - len(mask)
    if not start <= begin <= end <= width:
        raise ValueError(
            f"{place}: the response is told to be tokens {begin} to {end} of a sequence of {width}: lengths that "
            f"contradict each other."
        )

    def cut(value: Any) -> Any:
        if len(value) == end - begin:
            return value
        if len(value) == width:
            return value[begin:end]
        if len(value) == width - 1 and begin:  # log-probs of tokens 1 to width − 1, as logits[:-1] give them
            return value[begin - 1 : end - 1]
        return value

    return values.ids(raw[start:begin], called("sequence")), values.ids(raw[begin:end], called("sequence")), cut
