"""Rows of any dump as responses, and as the training side where they hold one.

Two layouts: responses alone (`response_ids`; lists per response token) and whole sequences (`sequence`; lists per
token of the prompt too, or of the response only, by their length). Rows may be padded on the right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY, Served
from mismatch_plugin.rollout.dumps import values
from mismatch_plugin.rollout.dumps.extents import of_response, of_sequence
from mismatch_plugin.rollout.dumps.names import Columns
from mismatch_plugin.rollout.dumps.part import Options, Part
from mismatch_plugin.rollout.dumps.source import Row
from mismatch_plugin.rollout.dumps.tensors import plain
from mismatch_plugin.rollout.records import FinishReason, LogProbsOf, WeightSpan
from mismatch_plugin.rollout.responses import Bools, Floats, Response, Scored

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "completed": "stop",
    "truncated": "length",
    "aborted": "abort",
}
_NO_TEMPERATURE = "the dump tells no sampling temperature or filter: temperature 1 without filters is assumed"
_LABELS = ("sample_id", "group", "step")


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
        extent = of_response if get("response_ids") is not None else of_sequence
        prompt, response, cut = extent(get, called, place, self.padded, lambda note: self.counts.update([note]))
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
        served = self._served(row.get("metadata"), length)
        made = Response(
            response_ids=response,
            prompt_ids=prompt,
            rollout_log_probs=rollout,
            nulls=nulls,
            loss_mask=trained,
            sampling=self._sampling(get, called, served),
            asked=self.temperature is not None or get("temperature") is not None,
            log_probs_of=self.log_probs_of,
            weight_versions=self._versions(get("weight_versions"), trained),
            advantages=advantages,
            sample_id=None if sample_id is None else str(sample_id),
            group=group if isinstance(group, (str, int)) else None,
            step=step if isinstance(step, int) else self.step,
            reward=self._reward(get("reward")),
            finish_reason=_FINISH.get(str(get("finish_reason"))),
            served=served,
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
            weight_version=version if isinstance(version := get("trainer_weight_version"), str) else None,
            weight_fingerprint=fingerprint if isinstance(fingerprint := get("weight_fingerprint"), str) else None,
            advantages=advantages,
            entropy=full("entropy"),
        )
        return made, scored

    def _sampling(
        self, get: Callable[[str], Any], called: Callable[[str], str], served: Served | None
    ) -> SamplingParameters:
        """What the dump tells of the temperature, else the server."""
        told, value = get("temperature"), self.temperature
        if value is None and told is not None:
            value = values.number(told, called("temperature"))
        if value is None and served is not None and "temperature" not in self.columns:
            value = served.temperature
        if value is None:
            value = 1.0
            if "temperature" not in self.columns:
                self.counts[_NO_TEMPERATURE] += 1
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
        spans = [span.model_copy(update={"end": min(span.end, length)}) for span in served.weights]
        return served.model_copy(update={"weights": [span for span in spans if span.start < span.end]})

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
