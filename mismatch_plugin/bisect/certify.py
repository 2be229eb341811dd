"""A certificate that an engine gives the same next-token distributions however it computes them, and a check of it.

Of each token and each tap the bits of the whole row are hashed: of the logits too, so that whole distributions are
compared and not the sampled tokens. Conditions: each sequence alone; again; all in one batch; with its prompt in parts
(chunked prefill); decoded token by token; after an update with the same weights. Each is compared with the same tokens
alone. The certificate is JSON that holds the ids and hashes, so that another machine can compute all of it again.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel

from mismatch_plugin.bisect.engines import Engine, Trainer
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import digests, fingerprint
from mismatch_plugin.sglang.modules import HEAD, Recorder, row_hashes, watched

Condition = Literal["alone", "again", "batch", "chunked", "decode", "update"]
Hashes = dict[str, list[str]]
"""Tap as "module which", in the order of execution → hash of each token's row."""
LOGITS = f"{HEAD} output"


class Run(NamedTuple):
    """One sequence as an engine computed it. forwards: of each pass (tokens of this sequence, sequences in it)."""

    ids: list[int]
    hashes: Hashes
    forwards: list[tuple[int, int]]


class Place(BaseModel, frozen=True, extra="forbid"):
    """Where two runs of the same tokens differ first: the tap that is computed first, and there the first token (of a
    check, the first token whose distribution differs; None if none does). logits: whether distributions differ."""

    sequence: int | None
    token: int | None
    tap: str
    logits: bool


class Result(BaseModel, frozen=True, extra="forbid"):
    """Of one condition. not_run: why it was not. differs: from the same tokens alone. ids: as they were computed.
    taps: a hash of all rows of each. tokens: of the logits, of each sequence the hash of each token's distribution."""

    condition: Condition
    not_run: str = ""
    differs: Place | None = None
    ids: list[list[int]] = []
    taps: dict[str, str] = {}
    tokens: list[list[str]] = []


class Certificate(BaseModel, frozen=True, extra="forbid"):
    """zero: every condition that was run gives the bits of each sequence alone. fingerprint: of the weights."""

    format: Literal[1] = 1
    engine: str
    made_on: str
    fingerprint: str
    prompts: list[list[int]]
    results: list[Result]

    @property
    def zero(self) -> bool:
        """At least one comparison was made, and none differs."""
        compared = [one for one in self.results if one.condition != "alone" and not one.not_run]
        return bool(compared) and not any(one.differs for one in compared)


def certify(engine: Served | InProcess, prompts: list[list[int]]) -> Certificate:
    """Run every condition that the engine allows. prompts: of one length. Raises InputError where it cannot answer."""
    alone: dict[tuple[int, ...], Run] = {}
    results = []
    for condition in get_args(Condition):
        runs = engine.run(condition, prompts)
        if isinstance(runs, str):
            results.append(Result(condition=condition, not_run=runs))
            continue
        for run in runs:
            if (ids := tuple(run.ids)) not in alone:
                alone[ids] = run if condition == "alone" else engine.alone([run.ids])[0]
        taps = {tap: "".join(one for run in runs for one in run.hashes[tap]).encode() for tap in runs[0].hashes}
        results.append(
            Result(
                condition=condition,
                differs=_first(runs, [alone[tuple(run.ids)] for run in runs]),
                ids=[run.ids for run in runs],
                taps={tap: hashlib.blake2b(rows, digest_size=8).hexdigest() for tap, rows in taps.items()},
                tokens=[run.hashes[LOGITS] for run in runs],
            )
        )
    made_on = f"{platform.machine()}, torch {torch.__version__}, mismatch-plugin {version('mismatch-plugin')}"
    weights = engine.weights()
    return Certificate(engine=engine.name, made_on=made_on, fingerprint=weights, prompts=prompts, results=results)


def read_certificate(path: Path) -> Certificate:
    """Raises InputError for a file of another form."""
    try:
        return Certificate.model_validate_json(path.read_text())
    except (OSError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise InputError(f"--check {path} is no certificate of `mismatch-plugin certify`: {said}.") from None


def check(certificate: Certificate, engine: Served | InProcess) -> list[tuple[Condition, Place | str]]:
    """Run all of it again: the conditions that do not give the bits of the certificate, with the place or the reason.
    Taps of names that only one engine has are left out; logits all have.

    Raises InputError where the engine has other weights, or an id is none of its.
    """
    rows = certificate.prompts
    if (
        not rows
        or len({len(row) for row in rows}) > 1
        or any(not 0 <= one < engine.vocab for row in rows for one in row)
    ):
        raise InputError(f"the certificate's prompts are not of one length with ids from 0 to {engine.vocab - 1}.")
    if (weights := engine.weights()) != certificate.fingerprint:
        raise InputError(
            f"the certificate is of weights {certificate.fingerprint}, and {engine.name} has {weights}: send it those."
        )
    again = {one.condition: one for one in certify(engine, certificate.prompts).results}
    found: list[tuple[Condition, Place | str]] = []
    for told in certificate.results:
        now = again[told.condition]
        if told.not_run:
            continue
        if now.not_run:
            found.append((told.condition, f"was not run: {now.not_run}"))
        elif place := _changed(told, now):
            found.append((told.condition, place))
    return found


def _changed(told: Result, now: Result) -> Place | str | None:
    if told.ids != now.ids:
        return "other tokens were decoded, or other sequences came into one batch"
    taps = [tap for tap in told.taps if tap in now.taps and told.taps[tap] != now.taps[tap]]
    pairs = [zip(mine, theirs, strict=False) for mine, theirs in zip(now.tokens, told.tokens, strict=False)]
    rows = [
        (number, token) for number, row in enumerate(pairs) for token, (one, other) in enumerate(row) if one != other
    ]
    if not taps and not rows:
        return None
    sequence, token = rows[0] if rows else (None, None)
    return Place(sequence=sequence, token=token, tap=taps[0] if taps else LOGITS, logits=bool(rows))


def _first(runs: Sequence[Run], alone: Sequence[Run]) -> Place | None:
    """Where they differ first; a tap that is computed first, whichever sequence it is of."""
    for tap in alone[0].hashes:
        for number, (run, base) in enumerate(zip(runs, alone, strict=True)):
            pairs = zip(run.hashes.get(tap, ()), base.hashes[tap], strict=True)
            for token, (one, other) in enumerate(pairs):
                if one != other:
                    logits = any(r.hashes[LOGITS] != b.hashes[LOGITS] for r, b in zip(runs, alone, strict=True))
                    return Place(sequence=number, token=token, tap=tap, logits=logits)
    return None


class Served:
    """An SGLang server. folder: of the checkpoint that serves, where the server can read it, for `update`."""

    def __init__(self, engine: Engine, folder: str | None = None) -> None:
        self._engine, self._folder, facts = engine, folder, engine.facts()
        self.vocab, self._chunk = facts["vocab"], facts["chunk"]
        self.name = f"sglang {facts['sglang']} in {facts['dtype']}"

    def weights(self) -> str:
        """The fingerprint of those that serve now."""
        return str(self._engine.facts()["fingerprint"])

    def run(self, condition: Condition, sequences: Sequence[list[int]]) -> list[Run] | str:
        """Of those sequences that are computed under this condition; or why none is."""
        if condition == "update":
            if self._folder is None:
                return "give --update FOLDER"
            self._engine.update(self._folder)
        if condition in ("batch", "chunked"):
            runs = self._runs(sequences)
            if condition == "chunked":
                total = sum(map(len, sequences))
                few = f"the server prefills {self._chunk or 'any number of'} tokens at once, and {total} were sent"
                return [run for run in runs if len(run.forwards) > 1] or few
            return [run for run in runs if len(run.forwards) == 1 < run.forwards[0][1]] or "no two came into one batch"
        if condition == "decode":
            half = len(sequences[0]) // 2
            return [run for ids in sequences for run in self._runs([ids[:half]], half)]
        return self.alone(sequences)

    def alone(self, sequences: Sequence[list[int]]) -> list[Run]:
        """Each in a request of its own."""
        runs = [run for ids in sequences for run in self._runs([ids])]
        if any(len(run.forwards) > 1 for run in runs):
            raise InputError(
                f"the server prefills {self._chunk} tokens at once, fewer than a sequence: lower --tokens."
            )
        return runs

    def _runs(self, sequences: Sequence[list[int]], tokens: int = 0) -> list[Run]:
        """One request with all of them. tokens: that are decoded; the last one goes through no module."""
        runs = []
        answers = self._engine.generate(sequences, {"form": "hashes"}, tokens)
        for given, (answer, told) in zip(sequences, answers, strict=True):
            ids = [*given, *(answer["output_ids"][: tokens - 1] if tokens else [])]
            taps = (f"{name} {which}" for name, which in told["taps"])
            hashes = {tap: rows for tap, rows in zip(taps, told["hashes"], strict=True) if len(rows) == len(ids)}
            runs.append(Run(ids, hashes, [(rows, requests) for rows, requests in told["forwards"]]))
        return runs


class InProcess:
    """A transformers model in this process."""

    def __init__(self, trainer: Trainer, dtype: torch.dtype) -> None:
        self._model: Any = trainer.model
        self._dtype, self.vocab = dtype, int(self._model.config.vocab_size)
        self.name = f"transformers {version('transformers')} in {str(dtype).removeprefix('torch.')}"

    def weights(self) -> str:
        """The fingerprint, as a server tells it of the same weights."""
        return fingerprint(digests(self._model.named_parameters(), self._dtype))

    def run(self, condition: Condition, sequences: Sequence[list[int]]) -> list[Run] | str:
        """Of each sequence; or why it cannot be."""
        length = len(sequences[0])
        if condition == "update":
            return "only a server's weights are updated"
        if condition == "batch":
            return self._runs(sequences, [length])
        if condition == "decode":
            parts = [length // 2, *[1] * (length // 2 - 1)]
            return [run for ids in sequences for run in self._runs([ids[: length // 2]], parts)]
        if condition == "chunked":
            return [run for ids in sequences for run in self._runs([ids], [length // 3, length - length // 3])]
        return self.alone(sequences)

    def alone(self, sequences: Sequence[list[int]]) -> list[Run]:
        """Each in a pass of its own."""
        return [run for ids in sequences for run in self._runs([ids], [len(ids)])]

    def _runs(self, sequences: Sequence[list[int]], parts: list[int]) -> list[Run]:
        """All at once, a part behind the other; greedy tokens where the sequences end before the parts do."""
        from transformers import DynamicCache

        cache, ids, start = DynamicCache(), torch.tensor([*sequences]), 0
        hashes: list[Hashes] = [{} for _ in sequences]
        logits = torch.empty(0)
        for size in parts:
            if start == ids.shape[1]:
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            recorder = Recorder()
            with torch.no_grad(), watched(self._model, size * len(ids), recorder):
                logits = self._model(ids[:, start : start + size], past_key_values=cache, use_cache=True).logits
            for (name, which), value in recorder.values().items():
                rows = row_hashes(value)
                for index, own in enumerate(hashes):
                    own.setdefault(f"{name} {which}", []).extend(rows[index * size : (index + 1) * size])
            start += size
        return [Run(row.tolist(), own, [(n, len(ids)) for n in parts]) for row, own in zip(ids, hashes, strict=True)]
