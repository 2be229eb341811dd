"""Rows of any dump under one set of names: which column is what, where a response begins and ends, and its arrays.

Two layouts: responses alone (`response_ids`; lists per response token) and whole sequences (`sequence`; lists per
token of the prompt too, or of the response only, by their length). Rows may be padded on the right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mismatch_plugin.rollout.dumps import values
from mismatch_plugin.rollout.dumps.part import Options, Part
from mismatch_plugin.rollout.dumps.source import Row, Source
from mismatch_plugin.rollout.dumps.tensors import plain
from mismatch_plugin.rollout.records import FinishReason, LogProbsOf, WeightSpan
from mismatch_plugin.rollout.responses import Bools, Floats, Ints, Response, Scored
from mismatch_plugin.rollout.sampling import SamplingParameters

NAMES: dict[str, tuple[str, ...]] = {
    "response_ids": ("response_ids", "responses", "completion_ids", "response_token_ids", "output_ids"),
    "sequence": ("input_ids", "tokens", "token_ids", "sequences"),
    "prompt_ids": ("prompt_ids", "prompts", "prompt_token_ids"),
    "prompt_mask": ("prompt_mask",),
    "attention_mask": ("attention_mask",),
    "loss_mask": (
        "loss_mask",
        "loss_masks",
        "response_mask",
        "completion_mask",
        "token_loss_mask",
        "token_mask",
        "action_mask",
    ),
    "turn_mask": ("tool_mask", "env_mask"),
    "sample_mask": ("sample_mask", "sample_loss_mask", "loss_multiplier"),
    "remove_sample": ("remove_sample",),
    "response_length": ("response_length", "response_lengths", "completion_length", "completion_lengths"),
    "prompt_length": ("prompt_length", "prompt_lengths"),
    "total_length": ("total_length", "total_lengths", "input_lengths", "input_length"),
    "rollout_log_probs": (
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "generation_logprobs",
        "inference_logprobs",
        "sampling_logprobs",
    ),
    "log_probs": (
        "old_log_probs",
        "train_log_probs",
        "old_per_token_logps",
        "prev_logprobs",
        "old_logprobs",
        "log_probs",
    ),
    "advantages": ("advantages", "advantage"),
    "entropy": ("entropy", "entropys", "entropies"),
    "reward": ("reward", "rewards", "score", "scores", "token_level_scores", "rm_scores"),
    "group": ("group_index", "group", "group_id", "uid"),
    "sample_id": ("sample_id", "index", "sample_index", "sample_indices", "idx"),
    "weight_versions": ("weight_versions", "weight_version"),
    "temperature": ("temperature",),
    "finish_reason": ("finish_reason", "status"),
    "step": ("step", "global_step", "rollout_id"),
}
"""What a column is → its spellings; where a dump has several, the first."""
_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "completed": "stop",
    "truncated": "length",
    "aborted": "abort",
}
_NO_TEMPERATURE = "the dump tells no sampling temperature or filter: temperature 1 without filters is assumed"


def understood() -> str:
    """The names, for messages."""
    return "; ".join(f"{name}: {', '.join(spellings)}" for name, spellings in NAMES.items())


class Columns:
    """Which name of a dump is what. Raises ValueError, with the names found and understood, where ids, boundaries or
    log-probs are missing. ignored: names that are nothing known, or a second spelling."""

    def __init__(self, keys: Sequence[str], place: str, *, leave: Sequence[str] = ()) -> None:
        self.found = {
            what: name
            for what, spellings in NAMES.items()
            if what not in leave and (name := next((name for name in spellings if name in keys), None))
        }
        self.ignored = sorted({*keys} - {*self.found.values()})
        self.absent = {name for names in NAMES.values() for name in names} - {*keys}
        lacking = None
        if not {"response_ids", "sequence"} & {*self.found}:
            lacking = "token ids of the responses"
        elif not {"rollout_log_probs", "log_probs"} & {*self.found}:
            lacking = "log-probs"
        elif "response_ids" not in self.found and not {"response_length", "prompt_length", "loss_mask"} & {*self.found}:
            lacking = "what tells a response from its prompt (response_length, prompt_length or loss_mask)"
        if lacking:
            raise ValueError(
                f"{place} holds no {lacking}. It has {', '.join(map(str, keys)) or 'nothing'}. Understood are "
                f"{understood()}."
            )

    def __contains__(self, what: str) -> bool:
        return what in self.found


def read_columns(
    source: Source,
    content: Any,
    options: Options,
    *,
    padded: Collection[str] = (),
    log_probs_of: LogProbsOf = "tempered",
) -> Part:
    """A dict of columns, or rows. padded: columns whose lists are padded; columns of two dimensions always are."""
    if isinstance(content, Mapping) and (source.kind in ("torch", "npz") or _is_table(source, content)):
        if source.kind == "jsonl" and sum(1 for _ in source.rows()) > 1:
            raise ValueError(f"{source.path}: its lines hold lists of lists: give one sample a line.")
        columns = Columns([*map(str, content)], str(source.path))
        read = {what: plain(content[name]) for what, name in columns.found.items()}
        wide = [what for what, value in read.items() if getattr(value, "ndim", 1) == 2]
        rows, padded = rows_of(read, columns, source.path), {*padded, *wide}
    else:
        columns, rows = Columns(source.keys, str(source.path)), source.rows()
    part = RowReader(columns, options, padded=padded, log_probs_of=log_probs_of).part(rows)
    if columns.ignored:
        part.notes.append(f"not read: {', '.join(columns.ignored)}")
    return part


def _is_table(source: Source, content: Mapping[str, Any]) -> bool:
    """A JSON object of columns, as opposed to one sample: its ids are lists of lists."""
    names = (*NAMES["response_ids"], *NAMES["sequence"])
    ids = next((content[name] for name in names if name in content), None)
    return source.kind in ("json", "jsonl") and isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def rows_of(read: dict[str, Any], columns: Columns, path: object) -> Iterator[Row]:
    """The rows of columns: tensors or arrays [B, ...] or lists of B. A single value holds for every row.

    Raises ValueError where columns, or the widths of padded ones, do not fit together.
    """
    many = {what: value for what, value in read.items() if _is_many(value)}
    names = columns.found
    first = "response_ids" if "response_ids" in many else "sequence"
    if first not in many:
        raise ValueError(f"{path}: {names.get(first, first)} is a {type(read.get(first)).__name__}: give [B, n].")
    total = len(many[first])
    for what, value in many.items():
        if len(value) != total:
            raise ValueError(f"{path}: {names[what]} has {len(value)} rows, {names[first]} {total}.")
    widths = {what: value.shape[1] for what, value in many.items() if getattr(value, "ndim", 1) == 2}
    if width := widths.get(first):
        prompt = widths.get("prompt_ids", 0)
        fits = {width, width + prompt} if first == "response_ids" else {width, width - 1}
        for what in ("loss_mask", "rollout_log_probs", "log_probs", "advantages", "entropy"):
            allowed = fits if what == "loss_mask" or first == "sequence" else {width}
            if widths.get(what, width) not in allowed:
                raise ValueError(
                    f"{path}: {names[what]} is [{total}, {widths[what]}], {names[first]} [{total}, {width}]: their "
                    f"tokens cannot be matched."
                )
    for at in range(total):
        row = {names[what]: value[at] if what in many else value for what, value in read.items()}
        yield f"{path}, sample {at}", row
        for value in many.values():
            if isinstance(value, list):
                value[at] = None  # lists are larger than the arrays made of them


def _is_many(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, (list, tuple))


class RowReader:
    """Rows → responses and, where they hold log π_train, the training side. notes: what was left out or assumed."""

    def __init__(
        self,
        columns: Columns,
        options: Options,
        *,
        log_probs_of: LogProbsOf = "tempered",
        padded: Collection[str] = (),
        step: int | None = None,
    ) -> None:
        self.columns, self.padded, self.step = columns, {*padded}, step
        self.log_probs_of: LogProbsOf = options.log_probs_of or log_probs_of
        self.temperature = options.temperature
        self.sampling: dict[float, SamplingParameters] = {}
        self.counts: Counter[str] = Counter()

    def part(self, rows: Iterator[Row]) -> Part:
        """All rows. Raises ValueError naming the row that cannot be read."""
        part = Part(scored=[] if "log_probs" in self.columns else None)
        has_rollout = "rollout_log_probs" in self.columns
        for place, row in rows:
            response, scored = self._sample(place, row)
            if part.scored is not None:
                assert scored is not None
                part.scored.append(scored)
                part.sample_ids.append(response.sample_id)
            if has_rollout:
                part.responses.append(response)
        if not has_rollout:
            part.missing = (
                "it holds the training side's log-probs, but none of the rollout: give the rollout's dump first and "
                "this file as TRAINING"
            )
        if part.scored and not any(scored.log_probs.any() for scored in part.scored):
            self.counts[f"{self.columns.found['log_probs']} is 0 everywhere: not computed, so no training side"] += 1
            part.scored = None
        if self.temperature is None and "temperature" not in self.columns:
            self.counts[_NO_TEMPERATURE] += 1
        part.notes = [note.format(count=count) for note, count in self.counts.items()]
        return part

    def _sample(self, place: str, row: Mapping[str, Any]) -> tuple[Response, Scored | None]:
        def get(what: str) -> Any:
            name = self.columns.found.get(what)
            return None if name is None else plain(row.get(name))

        def called(what: str) -> str:
            return f"{place}: {self.columns.found[what]}"

        if late := self.columns.absent & row.keys():
            raise ValueError(
                f"{place} has {min(late)}, which the first sample lacks: give every sample the same names."
            )
        extent = _responses if get("response_ids") is not None else _sequences
        prompt, response, cut = extent(get, called, place, self)
        length = len(response)

        def per_token(what: str) -> tuple[Floats, Bools | None]:
            value = get(what)
            if value is None:
                self.counts[f"{{count}} samples have no {self.columns.found[what]}"] += 1
                return np.full(length, np.nan), np.ones(length, dtype=bool)
            found, nulls = values.floats(value, called(what))
            return cut(found), None if nulls is None else cut(nulls)

        def full(what: str) -> Floats | None:
            value = values.scalar(get(what))
            if value is None:
                return None
            if isinstance(value, (int, float)):
                return np.full(length, float(value))
            found = cut(np.array(values.vector(value, called(what)), dtype=np.float64))
            if len(found) != length:
                raise ValueError(f"{called(what)} has {len(found)} entries, the response {length} tokens.")
            return found

        trained = np.ones(length, dtype=bool)
        for what in ("loss_mask", "turn_mask"):
            if get(what) is None:
                continue
            own = cut(values.mask(get(what), called(what)))
            if len(own) != length:
                raise ValueError(f"{called(what)} has {len(own)} entries, the response {length} tokens.")
            trained = trained & own
        if get("remove_sample") or (
            get("sample_mask") is not None and not values.number(get("sample_mask"), called("sample_mask"))
        ):
            self.counts["{count} samples are taken out by the trainer: no token of them trains"] += 1
            trained = np.zeros(length, dtype=bool)
        advantages, sample_id, group, step = full("advantages"), *map(values.scalar, map(get, _LABELS))
        rollout, nulls = per_token("rollout_log_probs") if "rollout_log_probs" in self.columns else (np.zeros(0), None)
        made = Response(
            response_ids=response,
            prompt_ids=prompt,
            rollout_log_probs=rollout,
            nulls=nulls,
            loss_mask=trained,
            sampling=self._sampling(get, called),
            log_probs_of=self.log_probs_of,
            weight_versions=self._versions(get("weight_versions"), trained),
            advantages=advantages,
            sample_id=None if sample_id is None else str(sample_id),
            group=group if isinstance(group, (str, int)) else None,
            step=step if isinstance(step, int) else self.step,
            reward=self._reward(get("reward")),
            finish_reason=_FINISH.get(str(get("finish_reason"))),
        )
        if "log_probs" not in self.columns:
            return made, None
        log_probs, nulls = per_token("log_probs")
        scored = Scored(
            log_probs=log_probs,
            nulls=nulls,
            token_ids=response,
            prompt_ids=prompt if len(prompt) else None,
            loss_mask=trained,
            advantages=advantages,
            entropy=full("entropy"),
        )
        return made, scored

    def _sampling(self, get: Callable[[str], Any], called: Callable[[str], str]) -> SamplingParameters:
        told = get("temperature")
        value = self.temperature if self.temperature is not None else 1.0
        if told is not None and self.temperature is None:
            value = values.number(told, called("temperature"))
        if value not in self.sampling:
            try:
                self.sampling[value] = SamplingParameters(temperature=value)
            except ValueError:
                raise ValueError(f"the temperature {value:g} is none: give a number from 0.") from None
        return self.sampling[value]

    def _reward(self, value: Any) -> float | None:
        """A number; the sum of scores per token; None for what is neither, such as a dict of rewards."""
        value = values.scalar(value)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return float(value.sum())
        return float(value) if isinstance(value, (int, float)) else None

    def _versions(self, told: Any, trained: Bools) -> tuple[WeightSpan, ...]:
        """One version: of the whole response. As many as turns: one a turn. Else it is not told which is whose."""
        if told is None or not len(trained):
            return ()
        versions = list(told) if isinstance(told, (list, tuple)) else [values.scalar(told)]
        if not all(isinstance(version, (str, int)) for version in versions):
            self.counts[f"{self.columns.found['weight_versions']} is not read: give text or a number"] += 1
            return ()
        versions = [str(version) for version in versions]
        if len({*versions}) == 1:
            return (WeightSpan(version=versions[0], start=0, end=len(trained)),)
        edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        if len(edges) == len(versions):
            spans = zip(versions, edges.tolist(), strict=True)
            return tuple(WeightSpan(version=version, start=start, end=end) for version, (start, end) in spans)
        if versions:
            self.counts["{count} samples have several weight versions and it is not told which token is whose"] += 1
        return ()


_LABELS = ("sample_id", "group", "step")
_Cut = Callable[[Any], Any]
_Get = Callable[[str], Any]
_Called = Callable[[str], str]


def _responses(get: _Get, called: _Called, place: str, reader: RowReader) -> tuple[Ints, Ints, _Cut]:
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
        if keep is None and "prompt_ids" in reader.padded:
            reader.counts["prompt ids are left out: no mask tells them from their padding"] += 1
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
    elif mask is not None and "response_ids" in reader.padded:
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


def _sequences(get: _Get, called: _Called, place: str, reader: RowReader) -> tuple[Ints, Ints, _Cut]:
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
    elif mask is not None and "sequence" in reader.padded and len(mask) == width:
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
