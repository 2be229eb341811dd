"""Columns or rows of any dump, padded or ragged, as a dict of `Sample`'s fields a row.

Two layouts: responses alone (`response_ids`; lists per response token) and whole sequences (`sequence`; lists per
token of the prompt too, or of the response only, by their length).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mismatch_plugin.data.arrays import NULL, Bools, Floats, Ids, as_floats, as_ids, as_mask, scalar, shown, vector
from mismatch_plugin.data.sample import LogProbsOf
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY, Served
from mismatch_plugin.data.source import Row, Source, plain
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.files import encodable

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
    "log_probs",
    "advantages": "advantages advantage",
    "entropy": "entropy entropys entropies",
    "reward": "reward rewards score scores token_level_scores rm_scores",
    "group": "group_index group group_id uid",
    "sample_id": "sample_id index sample_index sample_indices idx",
    "weight_versions": "weight_versions weight_version",
    "weight_fingerprint": "weight_fingerprint",
    "trainer_weight_version": "trainer_weight_version",
    "temperature": "temperature",
    "finish_reason": "finish_reason status",
    "step": "step global_step rollout_id",
}
NAMES: dict[str, tuple[str, ...]] = {what: tuple(names.split()) for what, names in _SPELLINGS.items()}
"""What a column is → its spellings; where a dump has several, the first."""
_ALL = {name for names in NAMES.values() for name in names}
_SURE = ("train_log_probs", "train_logprobs")
"""Next to one of them, `logprobs` are the sampler's; next to other names they may be any policy's."""
TRAINER = (
    *("train_log_probs", "trained_ids", "trained_prompt_ids", "trained_mask", "trainer_version"),
    *("trainer_fingerprint", "trainer_temperature", "entropy"),
)
"""Fields of a sample that only a training side tells; `advantages` belong to both."""
_PER_TOKEN = (
    *("response_ids", "loss_mask", "rollout_log_probs", "train_log_probs", "trained_ids", "trained_mask"),
    *("advantages", "entropy"),
)
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_FINISH |= {name: name for name in ("stop", "length", "abort")}
_NO_TEMPERATURE = "the dump tells no sampling temperature or filter: temperature 1 without filters is assumed"
_NO_IDS = np.zeros(0, dtype=np.int32)
_TELLING = 2
"""Tokens with log-prob 0 at the end of a row that are no accident: one is often a certain end token."""


@dataclass(frozen=True)
class Options:
    """What a reader is told next to the file. None where the file or its format tells."""

    log_probs_of: LogProbsOf | None = None
    temperature: float | None = None


@dataclass
class Table:
    """rows: fields of `Sample`, and `place`, how errors call the row; of a training side that can be a file of its own
    also `index`, its place in the rollout, or (step, place). missing: why the rows have no rollout side."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: str = ""


class Columns:
    """Which name of a dump is what. Raises ValueError, with what is there, what to add and near names, where ids,
    boundaries or log-probs are missing. ignored: names that are nothing known, or a second spelling."""

    def __init__(self, keys: Sequence[str], place: str, *, leave: Collection[str] = ()) -> None:
        self.found = {
            what: name
            for what, spellings in NAMES.items()
            if what not in leave and (name := next((name for name in spellings if name in keys), None))
        }
        # Names that say too little by themselves.
        if "rollout_log_probs" not in self.found and "logprobs" in keys and self.found.get("log_probs") in _SURE:
            self.found["rollout_log_probs"] = "logprobs"
        if "loss_mask" not in self.found and "mask" in keys and "response_ids" in self.found:
            self.found["loss_mask"] = "mask"  # next to whole sequences it may be the attention's
        self.ignored = sorted({*keys} - {*self.found.values()})
        self.absent = _ALL - {*keys}
        if lacking := self._lacking():
            listed = ", ".join([*keys][:12]) + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")
            near = "".join(f" {hint}" for hint in self._near())
            raise ValueError(
                f"{place} lacks {lacking[0]}. It has {listed or 'nothing'}.{near} Add {lacking[1]}. "
                f"docs/inspect.md#what-is-read lists all names."
            )

    def _lacking(self) -> tuple[str, str] | None:
        """(what is not there, what to add)."""
        found = self.found.keys()
        if not {"response_ids", "sequence"} & found:
            return "token ids of the responses", 'the line "response_ids": response_ids, one sampled id a log-prob'
        if not {"rollout_log_probs", "log_probs"} & found:
            return "log-probs", '"rollout_log_probs" (of the sampler) and "old_log_probs" (of the trainer)'
        if not {"response_ids", "response_length", "prompt_length", "loss_mask"} & found:
            rename = " (rename mask where it is that, not the attention's)" if "mask" in self.ignored else ""
            return "what tells a response from its prompt", f'"response_length", "prompt_length" or "loss_mask"{rename}'
        return None

    def _near(self) -> list[str]:
        """Names that look like one that is known and not there."""
        known = [name for what, names in NAMES.items() if what not in self.found for name in names]
        near = {name: get_close_matches(name.lower(), known, 1, 0.75) for name in self.ignored}
        return [f"{name}: did you mean {like[0]}?" for name, like in near.items() if like]

    def notes(self) -> list[str]:
        """What a reader must know of the names."""
        notes = [f"not read: {', '.join(self.ignored)}"] if self.ignored else []
        if self.found.get("rollout_log_probs") == "logprobs":
            notes.append(f"logprobs are taken as the sampler's, {self.found['log_probs']} as the trainer's")
        return notes + self._near()


def read_columns(source: Source, content: Any, options: Options, *, padded: Collection[str] = (), **more: Any) -> Table:
    """A dict of columns, or rows. padded: columns whose lists are padded; columns of two dimensions always are.
    more: as of `read_rows`."""
    wide: list[str] = []
    if isinstance(content, Mapping) and (source.kind in ("torch", "npz") or _is_table(source, content)):
        if source.kind == "jsonl" and sum(1 for _ in source.rows()) > 1:
            raise ValueError(f"{source.path}: its lines hold lists of lists: give one sample a line.")
        columns = Columns([*map(str, content)], str(source.path))
        read = {what: plain(content[name]) for what, name in columns.found.items()}
        wide = [what for what, value in read.items() if getattr(value, "ndim", 1) == 2]
        rows = _rows_of(read, columns.found, source.path)
    else:
        columns, rows = Columns(source.keys, str(source.path)), source.rows()
    table = read_rows(columns, rows, options, padded={*padded, *wide}, **more)
    if "response_ids" in columns.found and not columns.found.keys() & {
        "loss_mask",
        "attention_mask",
        "response_length",
    }:
        _cut_padding(table, columns="response_ids" in wide)
    table.notes += columns.notes()
    return table


def _is_table(source: Source, content: Mapping[str, Any]) -> bool:
    """A JSON object of columns, as opposed to one sample: its ids are lists of lists."""
    names = (*NAMES["response_ids"], *NAMES["sequence"])
    ids = next((content[name] for name in names if name in content), None)
    return source.kind in ("json", "jsonl") and isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def _rows_of(read: dict[str, Any], names: Mapping[str, str], path: object) -> Iterator[Row]:
    """The rows of columns: tensors or arrays [B, ...] or lists of B. A single value holds for every row.

    Raises ValueError where columns, or the widths of padded ones, do not fit together.
    """
    arrays = (torch.Tensor, np.ndarray)
    many = {
        what: value
        for what, value in read.items()
        if isinstance(value, (list, tuple)) or (isinstance(value, arrays) and value.ndim > 0)
    }
    first = "response_ids" if "response_ids" in many else "sequence"
    if first not in many:
        raise ValueError(f"{path}: {names.get(first, first)} is a {type(read.get(first)).__name__}: give [B, n].")
    total = len(many[first])
    for what, value in many.items():
        if len(value) != total:
            raise ValueError(f"{path}: {names[what]} has {len(value)} rows, {names[first]} {total}.")
    widths = {what: value.shape[1] for what, value in many.items() if getattr(value, "ndim", 1) == 2}
    if width := widths.get(first):
        fits = {width, width + widths.get("prompt_ids", 0)} if first == "response_ids" else {width, width - 1}
        for what in ("loss_mask", "rollout_log_probs", "log_probs", "advantages", "entropy"):
            allowed = fits if what == "loss_mask" or first == "sequence" else {width}
            if widths.get(what, width) not in allowed:
                raise ValueError(
                    f"{path}: {names[what]} is [{total}, {widths[what]}], {names[first]} [{total}, {width}]: their "
                    f"tokens cannot be matched."
                )
    for at in range(total):
        yield f"{path}, sample {at}", {names[w]: value[at] if w in many else value for w, value in read.items()}
        for value in many.values():
            if isinstance(value, list):
                value[at] = None  # lists are larger than the arrays made of them


def read_rows(
    columns: Columns,
    rows: Iterable[Row],
    options: Options,
    *,
    log_probs_of: LogProbsOf = "tempered",
    padded: Collection[str] = (),
    step: int | None = None,
) -> Table:
    """All rows. padded: what has padding at its end. step: where the rows tell none.

    Raises ValueError naming the row that cannot be read.
    """
    names, counts = columns.found, Counter[str]()
    own: dict[str, Any] = {"log_probs_of": options.log_probs_of or log_probs_of}
    own |= {} if step is None else {"step": step}
    reader = _Rows(columns, options.temperature, {*padded}, counts)
    table = Table([{**own, **reader.fields(place, row)} for place, row in rows])
    if "rollout_log_probs" not in names:
        table.missing = (
            "it holds the training side's log-probs, but none of the rollout: give the rollout's dump first and this "
            "file as TRAINING"
        )
    if "log_probs" in names and table.rows and not any(row["train_log_probs"].any() for row in table.rows):
        counts[f"{names['log_probs']} is 0 everywhere: not computed, so no training side"] += 1
        table.rows = [{name: value for name, value in row.items() if name not in TRAINER} for row in table.rows]
    table.notes = [note.format(count=count) for note, count in counts.items()]
    return table


class Cell:
    """One row as the columns name it; errors name row and column."""

    def __init__(self, place: str, row: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.place, self.row, self.names = place, row, names

    def get(self, what: str) -> Any:
        name = self.names.get(what)
        return None if name is None else plain(self.row.get(name))

    def read(self, what: str, convert: Callable[[Any], Any]) -> Any:
        """The value converted; None where there is none."""
        value = self.get(what)
        return None if value is None else named(f"{self.place}: {self.names[what]}", convert, value)

    def ids(self, what: str, value: Any) -> Ids:
        """Token ids of a part of the row."""
        return named(f"{self.place}: {self.names[what]}", as_ids, value).copy()

    def fault(self, what: str, says: str) -> ValueError:
        return ValueError(f"{self.place}: {self.names[what]} {says}.")


def named(called: str, convert: Callable[[Any], Any], value: Any) -> Any:
    """The value converted, with its name in front of what is wrong with it."""
    try:
        return convert(value)
    except ValueError as error:
        comma, dot = ", " if str(error).startswith("position") else " ", "" if str(error).endswith("?") else "."
        raise ValueError(f"{called}{comma}{error}{dot}") from None


def _ints(value: Any) -> Any:
    return vector(value, integers=True)


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


def one_or_many(value: Any, n: int) -> Floats:
    """[n] of one number, or one each as they are."""
    found = scalar(value)
    return np.full(n, float(found)) if isinstance(found, (int, float)) else as_floats(value)


class _Rows:
    def __init__(self, columns: Columns, temperature: float | None, padded: set[str], counts: Counter[str]) -> None:
        self.columns, self.names, self.padded, self.counts = columns, columns.found, padded, counts
        self.temperature = temperature
        self.sampling: dict[float, SamplingParameters] = {}

    def fields(self, place: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Of one row; without what it does not tell."""
        if late := self.columns.absent & row.keys():
            raise ValueError(
                f"{place} has {min(late)}, which the first sample lacks: give every sample the same names."
            )
        cell = Cell(place, row, self.names)
        extent = self._of_response if cell.get("response_ids") is not None else self._of_sequence
        prompt, response, cut = extent(cell)
        n = len(response)

        def per_token(what: str) -> Floats | None:
            if what not in self.names:
                return None
            found = cell.read(what, as_floats)
            if found is None:
                self.counts[f"{{count}} samples have no {self.names[what]}"] += 1
                return np.full(n, NULL)
            return cut(found).copy()

        def full(what: str, convert: Callable[[Any], Any]) -> Any:
            found = cell.read(what, convert)
            if found is not None and len(found := cut(found)) != n:
                raise cell.fault(what, f"has {len(found)} entries, the response {n} tokens")
            return None if found is None else found.copy()

        trained = np.ones(n, dtype=bool)
        for what in ("loss_mask", "turn_mask"):
            if (mask := full(what, as_mask)) is not None:
                trained &= mask
        if cell.get("remove_sample") or cell.read("sample_mask", number) == 0:
            self.counts["{count} samples are taken out by the trainer: no token of them trains"] += 1
            trained[:] = False
        sample_id, group, step = (scalar(cell.get(what)) for what in ("sample_id", "group", "step"))
        served = self._served(row.get("metadata"), n)
        found = {
            "place": place,
            "response_ids": response,
            "prompt_ids": prompt if len(prompt) else None,
            "rollout_log_probs": per_token("rollout_log_probs"),
            "loss_mask": trained,
            "sampling": self._sampling(cell, served),
            "weight_versions": self._versions(cell.get("weight_versions"), trained),
            "advantages": full("advantages", lambda value: one_or_many(value, n)),
            "sample_id": None if sample_id is None else encodable(str(sample_id)),
            "group": encodable(group) if isinstance(group, str) else group if isinstance(group, int) else None,
            "step": step if isinstance(step, int) else None,
            "reward": _reward(cell.get("reward")),
            "finish_reason": _FINISH.get(str(cell.get("finish_reason"))),
            "served": served,
        }
        if "log_probs" in self.names:
            version, fingerprint = cell.get("trainer_weight_version"), cell.get("weight_fingerprint")
            found |= {
                "train_log_probs": per_token("log_probs"),
                "trained_ids": response,
                "trained_prompt_ids": found["prompt_ids"],
                "trained_mask": trained,
                "trainer_version": version if isinstance(version, str) else None,
                "trainer_fingerprint": fingerprint if isinstance(fingerprint, str) else None,
                "entropy": full("entropy", lambda value: one_or_many(value, n)),
            }
        return {name: value for name, value in found.items() if value is not None}

    def _of_response(self, cell: Cell) -> tuple[Ids, Ids, Callable[[Any], Any]]:
        """(prompt ids, response ids, what cuts a list to the response) where responses have a column of their own."""
        raw, prompt = cell.read("response_ids", _ints), cell.read("prompt_ids", _ints)
        attention, mask = cell.read("attention_mask", as_mask), cell.read("loss_mask", as_mask)
        width, before = len(raw), 0 if prompt is None else len(prompt)
        if attention is not None and len(attention) not in (width, before + width):
            raise cell.fault(
                "attention_mask", f"has {len(attention)} entries, prompt and response {before} and {width}"
            )
        if prompt is not None:
            keep = cell.read("prompt_mask", as_mask)
            if keep is None and attention is not None and len(attention) == before + width:
                keep = attention[:before]
            if keep is not None and len(keep) != before:
                raise cell.fault("prompt_mask", f"has {len(keep)} entries, the prompt {before}")
            if keep is None and "prompt_ids" in self.padded:
                self.counts["prompt ids are left out: no mask tells them from their padding"] += 1
                prompt = None
            else:
                prompt = cell.ids("prompt_ids", prompt if keep is None else prompt[keep])
        whole = mask is not None and len(mask) == before + width
        length = cell.read("response_length", count)
        if length is None and attention is not None:
            seen = attention[len(attention) - width :]
            length = int(seen.sum())
            if not seen[:length].all():
                raise cell.fault("attention_mask", "has a 0 inside the response: padding belongs at its end")
        elif length is None and mask is not None and "response_ids" in self.padded:
            length = _end(mask[before if whole else 0 :])
        elif length is None:
            length = width
        if length > width:
            raise cell.fault("response_ids", f"has {width} tokens, its response_length is {length}")

        def cut(value: Any) -> Any:
            if whole and len(value) == before + width:
                value = value[before:]
            return value[:length] if len(value) == width else value

        return _NO_IDS if prompt is None else prompt, cell.ids("response_ids", raw[:length]), cut

    def _of_sequence(self, cell: Cell) -> tuple[Ids, Ids, Callable[[Any], Any]]:
        """The same where prompt and response are one row."""
        raw, mask, seen = cell.read("sequence", _ints), cell.read("loss_mask", as_mask), None
        if raw is None:
            raise ValueError(f"{cell.place} has no token ids.")
        seen, end = cell.read("attention_mask", as_mask), cell.read("total_length", count)
        width, start = len(raw), 0
        if seen is not None:
            start, end = (int(seen.argmax()), _end(seen)) if seen.any() else (0, 0)
            if end - start != seen.sum() or len(seen) != width:
                says = f"has a 0 inside the sequence, or another length than {width}"
                raise cell.fault("attention_mask", says)
        elif end is None:
            end = _end(mask) if mask is not None and "sequence" in self.padded and len(mask) == width else width
        of_response, of_prompt = cell.read("response_length", count), cell.read("prompt_length", count)
        if of_response is not None:
            begin = end - of_response
        elif of_prompt is not None:
            begin = start + of_prompt
        elif mask is None:
            raise ValueError(f"{cell.place} has no loss_mask: nothing tells its response from its prompt.")
        elif len(mask) == width:
            begin = start + int(mask[start:end].argmax()) if mask[start:end].any() else end
        else:
            begin = end - len(mask)
        if not start <= begin <= end <= width:
            raise ValueError(
                f"{cell.place}: the response is told to be tokens {begin} to {end} of a sequence of {width}: lengths "
                f"that contradict each other."
            )

        def cut(value: Any) -> Any:
            if len(value) == width != end - begin:
                return value[begin:end]
            if len(value) == width - 1 != end - begin and begin:  # of tokens 1 to width − 1, as logits[:-1] give them
                return value[begin - 1 : end - 1]
            return value

        return cell.ids("sequence", raw[start:begin]), cell.ids("sequence", raw[begin:end]), cut

    def _sampling(self, cell: Cell, served: Served | None) -> SamplingParameters | None:
        """What the dump tells of the temperature. None: nothing, or the server does."""
        value = self.temperature if self.temperature is not None else cell.read("temperature", number)
        if value is None:
            if "temperature" not in self.names and (served is None or served.temperature is None):
                self.counts[_NO_TEMPERATURE] += 1
            return None
        if value not in self.sampling:
            try:
                self.sampling[value] = SamplingParameters(temperature=value)
            except ValueError:
                raise ValueError(f"the temperature {value:g} is none: give a number from 0.") from None
        return self.sampling[value]

    def _served(self, metadata: Any, length: int) -> Served | None:
        """What slime and miles keep with our hooks. The response may have lost its last tokens since."""
        told = metadata.get(META_KEY) if isinstance(metadata, Mapping) else None
        if told is None:
            return None
        try:
            served = Served.model_validate(told)
        except ValidationError:
            self.counts[f"{{count}} samples have metadata {META_KEY} that cannot be read"] += 1
            return None
        return served.model_copy(update={"weights": _until(length, served.weights)})

    def _versions(self, told: Any, trained: Bools) -> tuple[WeightSpan, ...] | None:
        """One version: of the whole response. As many as turns: one a turn. Else it is not told which is whose."""
        if told is None or not len(trained):
            return None
        versions = list(told) if isinstance(told, (list, tuple)) else [scalar(told)]
        if not all(isinstance(version, (str, int)) for version in versions):
            self.counts[f"{self.names['weight_versions']} is not read: give text or a number"] += 1
            return None
        if len({*map(str, versions)}) == 1:
            return (WeightSpan(version=str(versions[0]), start=0, end=len(trained)),)
        edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        if len(edges) == len(versions):
            spans = zip(versions, edges.tolist(), strict=True)
            return tuple(WeightSpan(version=str(version), start=start, end=end) for version, (start, end) in spans)
        if versions:
            self.counts["{count} samples have several weight versions and it is not told which token is whose"] += 1
        return None


def _end(mask: Bools) -> int:
    """Behind the last 1."""
    ones = np.flatnonzero(mask)
    return int(ones[-1]) + 1 if len(ones) else 0


def _until(end: int, spans: Iterable[Any]) -> list[Any]:
    """What the spans say of the tokens before `end`."""
    return [span.model_copy(update={"end": min(span.end, end)}) for span in spans if span.start < min(span.end, end)]


def _reward(value: Any) -> float | None:
    """A number; the sum of scores per token; None for what is neither, such as a dict of rewards."""
    value = scalar(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return float(value.sum())
    return float(value) if isinstance(value, (int, float)) else None


def _cut_padding(table: Table, *, columns: bool) -> None:
    """Cut padding off rows of one width that come without mask and length, and say so in a note.

    Padding is a tail of one and the same id with log-prob 0.0, of several lengths, the longest of at least 2 tokens; a
    row whose tokens in front of it end in that id twice repeats itself, which a sampler does too. columns: rows are of
    a padded array, so that a single one may be padded too.

    Raises ValueError where such tails may be padding or tokens.
    """
    ids = [row["response_ids"] for row in table.rows]
    names = [name for name in ("rollout_log_probs", "train_log_probs") if table.rows and name in table.rows[0]]
    sides = [[row[name] for row in table.rows] for name in names]
    if len({len(row) for rows in (ids, *sides) for row in rows}) != 1 or (len(ids) < 2 and not columns):
        return
    zeros = [[len(row) - _end(row != 0) for row in rows] for rows in sides]
    of_all = [min(row) for row in zip(*zeros, strict=True)]
    for most in (of_all, zeros[0]):  # a trainer may give log-probs at padding, a sampler cannot
        if max(most) >= _TELLING and (tails := _tails(ids, most)) is not None:
            pad = ids[int(np.argmax(tails))][-1]
            for row, tail in zip(table.rows, tails, strict=True):
                end = len(row["response_ids"]) - tail
                row.update({name: row[name][:end] for name in _PER_TOKEN if name in row})
                if "weight_versions" in row:
                    row["weight_versions"] = _until(end, row["weight_versions"])
            table.notes.append(
                f"without a mask: {sum(tails)} positions at the ends of {sum(map(bool, tails))} rows, with id {pad} "
                f"and log-prob 0.0, are taken as padding and left out; add response_mask to be sure"
            )
            return
    if max(of_all) >= _TELLING:
        raise ValueError(
            f"sample {int(np.argmax(of_all))} ends in {max(of_all)} tokens with log-prob 0.0, padding or tokens: "
            f'nothing tells. Add "response_mask" (1 at tokens of the response, 0 at padding) or "response_length" to '
            f"the dump."
        )
    if single := sum(map(bool, of_all)):
        table.notes.append(
            f"the last token of {single} rows has log-prob 0.0 and is kept: add response_mask if it pads"
        )


def _tails(ids: Sequence[Ids], zeros: Sequence[int]) -> list[int] | None:
    """How much of each row is padding; None where it may be tokens."""
    pad, tails = ids[int(np.argmax(zeros))][-1], list[int]()
    for row, most in zip(ids, zeros, strict=True):
        tail = most - _end(row[len(row) - most :] != pad)
        front = row[: len(row) - tail]
        if (most >= _TELLING and not tail) or (tail and len(front) > 1 and (front[-2:] == pad).all()):
            return None
        tails.append(tail)
    return tails if len({*tails}) > 1 and max(tails) >= _TELLING else None
