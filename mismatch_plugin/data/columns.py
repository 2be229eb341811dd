"""Columns or rows of any dump, padded or ragged, as samples.

Two layouts: responses alone (`response_ids`; lists per response token) and whole sequences (`sequence`; lists per
token of the prompt too, or of the response only, by their length).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mismatch_plugin.data.arrays import (
    NULL,
    Bools,
    Floats,
    Ids,
    Ints,
    as_experts,
    as_floats,
    as_mask,
    one_or_many,
    scalar,
    shown,
    vector,
)
from mismatch_plugin.data.sample import LogProbsOf, Sample
from mismatch_plugin.data.served import META_KEY, Served
from mismatch_plugin.data.source import Row, Source, plain
from mismatch_plugin.data.versions import WeightSpan

_SPELLINGS = {
    "response_ids": "response_ids responses completion_ids response_token_ids output_ids",
    "sequence": "input_ids tokens token_ids sequences",
    "prompt_ids": "prompt_ids prompts prompt_token_ids",
    "prompt_mask": "prompt_mask",
    "attention_mask": "attention_mask",
    "loss_mask": "loss_mask loss_masks response_mask completion_mask token_loss_mask token_mask action_mask",
    "turn_mask": "tool_mask env_mask",
    "sample_mask": "sample_mask sample_loss_mask loss_multiplier",
    "remove_sample": "remove_sample",
    "response_length": "response_length response_lengths completion_length completion_lengths",
    "prompt_length": "prompt_length prompt_lengths",
    "total_length": "total_length total_lengths input_lengths input_length",
    "rollout_log_probs": "rollout_log_probs rollout_logprobs sampling_per_token_logps generation_logprobs "
    "inference_logprobs sampling_logprobs",
    "log_probs": "old_log_probs train_log_probs train_logprobs old_per_token_logps prev_logprobs old_logprobs "
    "trainer_logprobs action_log_probs log_probs",
    "advantages": "advantages advantage",
    "entropy": "entropy entropys entropies",
    "reward": "reward rewards score scores token_level_scores rm_scores",
    "group": "group_index group group_id uid",
    "sample_id": "sample_id index sample_index sample_indices idx",
    "weight_versions": "weight_versions weight_version",
    "weight_fingerprint": "weight_fingerprint",
    "trainer_weight_version": "trainer_weight_version",
    "temperature": "temperature",
    "routed_experts": "rollout_routed_experts routed_experts",
    "trained_experts": "trained_experts",
    "cached_tokens": "cached_tokens prefix_cache_info",
    "finish_reason": "finish_reason status",
    "step": "step global_step rollout_id",
    "place": "rollout_position",
}
NAMES: dict[str, tuple[str, ...]] = {what: tuple(names.split()) for what, names in _SPELLINGS.items()}
"""What a column is → its spellings; where a dump has several, the first."""
_ALL = {name for names in NAMES.values() for name in names}
_BOUNDS = {"response_length", "prompt_length", "loss_mask"}
_ADD_IDS = 'the line "response_ids": response_ids, one sampled id a log-prob'
_ADD_LOG_PROBS = '"rollout_log_probs" (of the sampler) and "old_log_probs" (of the trainer)'
_ADD_BOUNDS = '"response_length", "prompt_length" or "loss_mask"'
_NEEDED = (
    ({"response_ids", "sequence"}, "token ids of the responses", _ADD_IDS),
    ({"rollout_log_probs", "log_probs"}, "log-probs", _ADD_LOG_PROBS),
    ({"response_ids", *_BOUNDS}, "what tells a response from its prompt", _ADD_BOUNDS),
)
"""(one of these, what it is, what to add)."""
_ints = partial(vector, integers=True)
TRAINER = (
    *("train_log_probs", "trained_ids", "trained_prompt_ids", "trained_mask", "trainer_version"),
    *("trainer_fingerprint", "trainer_temperature", "entropy", "trained_experts"),
)
"""Fields of a sample that only a training side tells; `advantages` belong to both."""
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_FINISH |= {name: name for name in ("stop", "length", "abort")}
NO_TEMPERATURE = "the dump tells no sampling temperature or filter: temperature 1 without filters is assumed"


@dataclass
class Dump:
    """What a file or folder holds. samples: of a training side `index` is the place in the rollout (of its step, if it
    tells that). notes: what a reader must know (what was left out and why, what was assumed). missing: why there is no
    rollout side. format: what read it."""

    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: str = ""
    format: str = ""

    @property
    def has_training(self) -> bool:
        """The samples have the training side's log-probs."""
        return all("train_log_probs" in sample.model_fields_set for sample in self.samples)


def sample_at(place: str, fields: Mapping[str, Any]) -> Sample:
    """Of what is told (not None). Raises ValueError with the place in front."""
    try:
        return Sample(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant."""
    return next(iter(get_close_matches(name.lower(), known, 1, 0.75)), None)


class Columns:
    """Which name of a dump is what (`names`). Raises ValueError, with what is there, what to add and near names, where
    ids, boundaries or log-probs are missing. notes: names that are nothing known, or a second spelling."""

    def __init__(self, keys: Sequence[str], place: str, *, leave: Collection[str] = ()) -> None:
        self.names = {
            what: name
            for what, spellings in NAMES.items()
            if what not in leave and (name := next((name for name in spellings if name in keys), None))
        }
        # Names that say too little by themselves. Next to other log-probs, `logprobs` may be any policy's.
        sure = self.names.get("log_probs") in ("train_log_probs", "train_logprobs")
        if sampler := "rollout_log_probs" not in self.names and "logprobs" in keys and sure:
            self.names["rollout_log_probs"] = "logprobs"
        if "loss_mask" not in self.names and "mask" in keys and "response_ids" in self.names:
            self.names["loss_mask"] = "mask"  # next to whole sequences it may be the attention's
        self.absent = _ALL - {*keys}
        ignored = sorted({*keys} - {*self.names.values()})
        known = [name for what, names in NAMES.items() if what not in self.names for name in names]
        self.near = {name: near for name in ignored if (near := closest(name, known))}
        listed = ", ".join([*keys][:12]) + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")
        for one_of, what, add in _NEEDED:
            if not one_of & self.names.keys():
                advice = self.meant(one_of) or f"Add {add}."
                raise ValueError(
                    f"{place} lacks {what}. It has {listed or 'nothing'}. {advice} docs/inspect.md#what-is-read lists "
                    f"all names."
                )
        self.notes = [f"not read: {', '.join(ignored)}"] if ignored else []
        if sampler:
            self.notes.append(f"logprobs are taken as the sampler's, {self.names['log_probs']} as the trainer's")
        self.notes += [f"{name}: did you mean {near}?" for name, near in self.near.items()]

    def meant(self, one_of: Collection[str]) -> str:
        """Names that are nothing known and near to a spelling of one of these; "" if there is none."""
        spellings = {name for what in one_of for name in NAMES[what]}
        return " ".join(f"{name}: did you mean {near}?" for name, near in self.near.items() if near in spellings)


def read_columns(source: Source, *, padded: Collection[str] = (), **more: Any) -> Dump:
    """A dict of columns, or rows. padded: columns whose lists are padded; those of two dimensions always are."""
    wide: list[str] = []
    if isinstance(source.content, Mapping) and _is_table(source):
        if source.kind == "jsonl" and sum(1 for _ in source.rows()) > 1:
            raise ValueError("its lines hold lists of lists: give one sample a line.")
        columns = Columns(source.keys, str(source.path))
        read = {what: plain(source.content[name]) for what, name in columns.names.items()}
        wide = [what for what, value in read.items() if getattr(value, "ndim", 1) == 2]
        rows = _rows_of(read, columns.names, source.path)
    else:
        columns, rows = Columns(source.keys, str(source.path)), source.rows()
    dump = read_rows(columns, rows, padded={*padded, *wide}, **more)
    told = columns.names.keys()
    if "response_ids" in told and not told & {"loss_mask", "attention_mask", "response_length"}:
        _validate_padding(dump, columns="response_ids" in wide)
    dump.notes += columns.notes
    return dump


def _is_table(source: Source) -> bool:
    """A dict of columns, as opposed to one sample: one of JSON has lists of lists for ids."""
    if source.kind in ("torch", "npz"):
        return True
    names = (*NAMES["response_ids"], *NAMES["sequence"])
    ids = next((source.content[name] for name in names if name in source.keys), None)
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def _rows_of(read: dict[str, Any], names: Mapping[str, str], path: object) -> Iterator[Row]:
    """The rows of columns: tensors or arrays [B, ...] or lists of B. A single value holds for every row."""
    many: dict[str, Any] = {
        what: value for what, value in read.items() if isinstance(value, (list, tuple)) or np.ndim(value)
    }
    first = "response_ids" if "response_ids" in read else "sequence"
    total = len(many[first])
    for what, value in many.items():
        if len(value) != total:
            raise ValueError(f"{names[what]} has {len(value)} rows, {names[first]} {total}.")
    widths = {what: value.shape[1] for what, value in many.items() if getattr(value, "ndim", 1) == 2}
    width = widths.get(first, 0)
    fits = {width, width - 1} if first == "sequence" else {width}  # of tokens 1 to width − 1, as logits[:-1] give them
    for what in ("rollout_log_probs", "log_probs", "advantages", "entropy"):
        if width and widths.get(what, width) not in fits:
            says = f"{names[what]} is [{total}, {widths[what]}], {names[first]} [{total}, {width}]"
            raise ValueError(f"{says}: their tokens cannot be matched.")
    for at in range(total):
        yield f"{path}, sample {at}", {names[w]: value[at] if w in many else value for w, value in read.items()}
        for value in many.values():
            if isinstance(value, list):
                value[at] = None  # lists are larger than the arrays made of them


def read_rows(columns: Columns, rows: Iterable[Row], **more: Any) -> Dump:
    """All rows. more: as of `_RowReader`. Raises ValueError naming the row that cannot be read."""
    reader = _RowReader(columns, **more)
    dump = Dump([sample_at(place, reader.fields(place, row)) for place, row in rows])
    if "rollout_log_probs" not in columns.names:
        advice = columns.meant(["rollout_log_probs"]) or "give the rollout's dump first and this file as TRAINING."
        dump.missing = f"it holds the training side's log-probs, but none of the rollout: {advice}"
    name = columns.names.get("log_probs")
    if name and dump.samples and not any(sample.train_log_probs.any() for sample in dump.samples):
        reader.counts[f"{name} is 0 everywhere: not computed, so no training side"] += 1
        dump.samples = [sample.without(TRAINER) for sample in dump.samples]
    dump.notes = [note.format(count=count) for note, count in reader.counts.items()]
    return dump


def number(value: Any) -> float:
    """One number, also of a tensor with one element."""
    found = scalar(value)
    if isinstance(found, (int, float)):
        return float(found)
    raise ValueError(f"is {shown(found)}, not a number")


def count(value: Any) -> int:
    """A length."""
    found = number(value)
    if not (found.is_integer() and found >= 0):
        raise ValueError(f"is {found:g}: a length is a whole number from 0")
    return int(found)


@dataclass
class _RowReader:
    """log_probs_of: of the rollout side. padded: what has padding at its end. step: where the rows tell none."""

    columns: Columns
    log_probs_of: LogProbsOf = "tempered"
    padded: Collection[str] = ()
    step: int | None = None

    def __post_init__(self) -> None:
        self.names, self.counts = self.columns.names, Counter[str]()
        self.place, self.row = "", dict[Any, Any]()

    def get(self, what: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
        """What the row holds, converted; None where there is nothing."""
        value = plain(self.row.get(self.names.get(what)))
        try:
            return None if value is None else convert(value)
        except ValueError as error:
            comma, dot = ", " if str(error).startswith("position") else " ", "" if str(error).endswith("?") else "."
            raise ValueError(f"{self.place}: {self.names[what]}{comma}{error}{dot}") from None

    def fault(self, what: str, says: str) -> ValueError:
        return ValueError(f"{self.place}: {self.names[what]} {says}.")

    def fields(self, place: str, row: Mapping[Any, Any]) -> dict[str, Any]:
        """Of one row; None for what it does not tell."""
        self.place, self.row = place, row
        if late := self.columns.absent & row.keys():
            says = f"{place} has {min(late)}, which the first sample lacks"
            raise ValueError(f"{says}: give every sample the same names.")
        prompt, response, slices = self._responses() if self.get("response_ids") is not None else self._sequences()
        n = len(response)

        def of_response(what: str, convert: Callable[[Any], Any]) -> Any:
            found = self.get(what, convert)
            if found is None:
                return None
            if found.ndim == 0:
                return np.full(n, found)
            return found.copy() if len(found) == n else found[slices.get(len(found), slice(None))].copy()

        def one_each(what: str, convert: Callable[[Any], Any]) -> Any:
            found = of_response(what, convert)
            if found is not None and len(found) != n:
                raise self.fault(what, f"has {len(found)} entries, the response {n} tokens")
            return found

        def log_probs(what: str) -> Floats | None:
            found = of_response(what, as_floats)
            if found is None and what in self.names:
                self.counts[f"{{count}} samples have no {self.names[what]}"] += 1
                return np.full(n, NULL)
            return found

        trained = np.ones(n, dtype=bool)
        for what in ("loss_mask", "turn_mask"):
            if (mask := one_each(what, as_mask)) is not None:
                trained &= mask
        if self.get("remove_sample") or self.get("sample_mask", number) == 0:
            self.counts["{count} samples are taken out by the trainer: no token of them trains"] += 1
            trained[:] = False
        sample_id, group, step = (self.get(what, scalar) for what in ("sample_id", "group", "step"))
        served, temperature = self._served(row.get("metadata"), n), self.get("temperature", number)
        if "temperature" not in self.names and (served is None or served.temperature is None):
            self.counts[NO_TEMPERATURE] += 1
        prompt_ids = prompt if len(prompt) else None
        found = {
            "response_ids": response,
            "prompt_ids": prompt_ids,
            "rollout_log_probs": log_probs("rollout_log_probs"),
            "log_probs_of": self.log_probs_of,
            "loss_mask": trained,
            "sampling": None if temperature is None else {"temperature": temperature},
            "weight_versions": self._versions(trained),
            "advantages": one_each("advantages", one_or_many),
            "sample_id": None if sample_id is None else str(sample_id),
            "group": group if isinstance(group, (str, int)) else None,
            "step": step if isinstance(step, int) else self.step,
            "index": self.get("place", count),
            "reward": self.get("reward", _reward),
            "finish_reason": _FINISH.get(str(self.get("finish_reason"))),
            "served": served,
            "cached_tokens": self.get("cached_tokens", _cached),
            "routed_experts": self._experts("routed_experts", len(prompt) + n - 1),
        }
        if "log_probs" in self.names:
            version = self.get("trainer_weight_version")
            found |= {
                "train_log_probs": log_probs("log_probs"),
                "trained_ids": response,
                "trained_prompt_ids": prompt_ids,
                "trained_mask": trained,
                "trainer_version": version if type(version) in (str, int) else None,
                "trainer_fingerprint": self.get("weight_fingerprint"),
                "entropy": one_each("entropy", one_or_many),
                "trained_experts": self._experts("trained_experts", len(prompt) + n - 1),
            }
        return found

    def _experts(self, what: str, count: int) -> Ints | None:
        """Where they are of all tokens but the last."""
        found = self.get(what, as_experts)
        if found is not None and len(found) != count:
            self.counts[f"{{count}} samples have {self.names[what]} of another number of tokens: not read"] += 1
            return None
        return found

    def _responses(self) -> tuple[Ids, Ids, dict[int, slice]]:
        """(prompt ids, response ids, length of a list → its part of the response) where responses have a column."""
        raw, prompt, keep = self.get("response_ids", _ints), self.get("prompt_ids", _ints), None
        seen, mask = self.get("attention_mask", as_mask), self.get("loss_mask", as_mask)
        width, before = len(raw), 0 if prompt is None else len(prompt)
        whole = mask is not None and len(mask) == before + width
        if seen is not None and len(seen) not in (width, before + width):
            raise self.fault("attention_mask", f"has {len(seen)} entries, prompt and response {before} and {width}")
        if prompt is not None:
            keep = self.get("prompt_mask", as_mask)
            if keep is not None and len(keep) != before:
                raise self.fault("prompt_mask", f"has {len(keep)} entries for a prompt of {before}")
            if keep is None and seen is not None and len(seen) == before + width:
                keep = seen[:before]
            if keep is None and "prompt_ids" in self.padded:
                self.counts["prompt ids are left out: no mask tells them from their padding"] += 1
                prompt = None
        n = self.get("response_length", count)
        if n is None and seen is not None:
            n, tail = int(seen[len(seen) - width :].sum()), seen[len(seen) - width :]
            if not tail[:n].all():
                raise self.fault("attention_mask", "has a 0 inside the response: padding belongs at its end")
        elif n is None:
            n = _end(mask[before * whole :]) if mask is not None and "response_ids" in self.padded else width
        if n > width:
            raise self.fault("response_ids", f"has {width} tokens, its response_length is {n}")
        slices = {before + width: slice(before, before + n)} if whole else {}
        prompt = raw[:0] if prompt is None else prompt if keep is None else prompt[keep]
        return prompt.copy(), raw[:n].copy(), {**slices, width: slice(n)}

    def _sequences(self) -> tuple[Ids, Ids, dict[int, slice]]:
        """The same where prompt and response are one row."""
        raw, mask = self.get("sequence", _ints), self.get("loss_mask", as_mask)
        seen, end = self.get("attention_mask", as_mask), self.get("total_length", count)
        width, start = len(raw), 0
        if seen is not None:
            start, end = int(seen.argmax()) if seen.any() else 0, _end(seen)
            if end - start != seen.sum() or len(seen) != width:
                says = f"has a 0 inside the sequence, or another length than {width}"
                raise self.fault("attention_mask", says)
        elif end is None:
            end = _end(mask) if mask is not None and "sequence" in self.padded and len(mask) == width else width
        response, prompt = self.get("response_length", count), self.get("prompt_length", count)
        if response is not None:
            begin = end - response
        elif prompt is not None:
            begin = start + prompt
        elif mask is None:
            raise ValueError(f"{self.place} has no loss_mask: nothing tells its response from its prompt.")
        elif len(mask) == width:
            begin = start + int(mask[start:end].argmax()) if mask[start:end].any() else end
        else:
            begin = end - len(mask)
        if not start <= begin <= end <= width:
            told = f"a response from {begin} to {end} does not fit a sequence of tokens {start} to {width}"
            raise ValueError(f"{self.place}: {told}: check its lengths and masks.")
        # Of tokens 1 to width − 1, as logits[:-1] give them.
        slices = {width - 1: slice(begin - 1, end - 1)} if begin else {}
        return raw[start:begin].copy(), raw[begin:end].copy(), {**slices, width: slice(begin, end)}

    def _served(self, metadata: Any, n: int) -> Served | None:
        """What slime and miles keep with our hooks. The response may have lost its last tokens since."""
        told = metadata.get(META_KEY) if isinstance(metadata, Mapping) else None
        try:
            served = None if told is None else Served.model_validate(told)
        except ValidationError:
            self.counts[f"{{count}} samples have metadata {META_KEY} that cannot be read"] += 1
            return None
        if served is None:
            return None
        before = [span for span in served.weights if span.start < min(span.end, n)]
        weights = [span.model_copy(update={"end": min(span.end, n)}) for span in before]
        return served.model_copy(update={"weights": weights})

    def _versions(self, trained: Bools) -> list[WeightSpan] | None:
        """One version: of the whole response. As many as turns: one a turn. Else it is not told which is whose."""
        told = self.get("weight_versions", lambda value: value if isinstance(value, (list, tuple)) else [scalar(value)])
        if not told or not len(trained):
            return None
        if not all(isinstance(version, (str, int)) for version in told):
            self.counts[f"{self.names['weight_versions']} is not read: give text or a number"] += 1
            return None
        turns = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0)).reshape(-1, 2).tolist()
        if len({*map(str, told)}) == 1:
            told, turns = told[:1], [[0, len(trained)]]
        if len(told) != len(turns):
            self.counts["{count} samples have several weight versions and it is not told which token is whose"] += 1
            return None
        return [
            WeightSpan(version=str(name), start=start, end=end) for name, (start, end) in zip(told, turns, strict=True)
        ]


def _cached(value: Any) -> int:
    """A number, or slime's prefix_cache_info."""
    return count(value.get("cached_tokens", 0) if isinstance(value, Mapping) else value)


def _end(mask: Bools) -> int:
    """Behind the last 1."""
    ones = np.flatnonzero(mask)
    return int(ones[-1]) + 1 if len(ones) else 0


def _reward(value: Any) -> float | None:
    """A number; the sum of scores per token; None for what is neither, such as a dict of rewards."""
    value = scalar(value)
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf"):
        return float(value.sum())
    return float(value) if isinstance(value, (int, float)) else None


def _validate_padding(dump: Dump, *, columns: bool) -> None:
    """Raise ValueError where rows of one width, without mask and length, end in log-probs of 0: padding or tokens.

    columns: they are of a padded array, so that a single row may be padded too.
    """
    # A trainer may give log-probs at padding, a sampler cannot.
    sides = [sample.train_log_probs if dump.missing else sample.rollout_log_probs for sample in dump.samples]
    widths = {len(sample) for sample in dump.samples} | {*map(len, sides)}
    if len(widths) != 1 or (len(sides) < 2 and not columns):
        return
    zeros = [len(values) - _end(values != 0) for values in sides]
    if max(zeros) > 1:
        raise ValueError(
            f"sample {int(np.argmax(zeros))} ends in {max(zeros)} tokens with log-prob 0.0, padding or tokens: "
            f'nothing tells. Add "response_mask" (1 at tokens of the response, 0 at padding) or "response_length" to '
            f"the dump."
        )
    if single := sum(zeros):  # one is often a certain end token
        dump.notes.append(f"the last token of {single} rows has log-prob 0.0 and is kept: add response_mask if it pads")
