"""What one file of a dump gives, and how files become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch_plugin.rollout.dumps.source import Source
from mismatch_plugin.rollout.records import LogProbsOf
from mismatch_plugin.rollout.responses import Response, Scored


@dataclass
class Part:
    """Both sides of some samples: `responses`, `scored`, or both, one each a sample.

    sample_ids, indexes: of `scored`, what a sample of a file of its own is matched by; empty: by order.
    An index is the place in the rollout, or (step, place). missing: why a dump of the training side has no responses.
    """

    responses: list[Response] = field(default_factory=list)
    scored: list[Scored] | None = None
    sample_ids: list[str | None] = field(default_factory=list)
    indexes: list[int | tuple[int, int] | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: str = ""


@dataclass(frozen=True)
class Options:
    """What a reader is told next to the file. log_probs_of, temperature: None where the file or its format tells."""

    log_probs_of: LogProbsOf | None = None
    temperature: float | None = None


def joined(files: Iterable[tuple[Path, Part]]) -> Part:
    """Files in order, one after the other. Raises ValueError where two hold one sample, or sides differ."""
    parts = list(files)
    if len(parts) == 1:
        return parts[0][1]
    with_responses = {bool(part.responses) for _, part in parts}
    with_scored = {part.scored is not None for _, part in parts}
    if len(with_responses) > 1 or len(with_scored) > 1:
        lacking = next(path for path, part in parts if not part.responses or part.scored is None)
        raise ValueError(
            f"{lacking} lacks a side that other files of the folder have: give files of one sort. Where they are both "
            f"sides of a run, put each into a folder of its own: mismatch-plugin inspect ROLLOUTS TRAINING."
        )
    _refuse_repeats(parts)
    whole = Part(scored=[] if True in with_scored else None, missing=parts[0][1].missing)
    for path, part in parts:
        whole.responses += part.responses
        if whole.scored is not None:
            whole.scored += part.scored or []
        whole.sample_ids += part.sample_ids
        whole.indexes += part.indexes
        whole.notes += [f"{path.name}: {note}" if len(parts) < 4 else note for note in part.notes]
        part.responses.clear()
    whole.notes = list(dict.fromkeys(whole.notes))
    return whole


def _refuse_repeats(parts: Sequence[tuple[Path, Part]]) -> None:
    """A file of another rank or a copy: its samples would count twice."""
    seen: dict[Any, Path] = {}
    for path, part in parts:
        own: dict[Any, Path] = {}
        for response in part.responses:
            drawn = response.response_ids.tobytes() + response.rollout_log_probs.tobytes()
            if len(response.response_ids) >= _TELLING:
                own[hash(drawn)] = path
            if response.sample_id is not None:
                own[response.step, response.sample_id] = path
        twice = next((key for key in own if key in seen), None)
        if twice is not None:
            what = f"sample {twice[1]}" if isinstance(twice, tuple) else "the same response with the same log-probs"
            raise ValueError(f"{path} and {seen[twice]} both hold {what}: give each sample once.")
        seen |= own


_TELLING = 8
"""Tokens from which two equal responses with equal log-probs are one and the same."""


@dataclass(frozen=True)
class Format:
    """One adapter. name: for --format. holds: what its files are, for messages. recognises: by content, cheaply.

    read: one file → what `join` takes. join: of all files in order → one Part.
    """

    name: str
    holds: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source, Options], Any]
    join: Callable[[Iterable[tuple[Path, Any]]], Part] = joined
