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
from typing import Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel

from mismatch_plugin.bisect.engines import Engine
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.modules import HEAD

Condition = Literal["alone", "again", "batch", "chunked", "decode", "update"]
LOGITS = f"{HEAD} output"


class Run(NamedTuple):
    """One sequence as an engine computed it. hashes: tap as "module which", in the order of execution → hash of each
    token's row. forwards: of each pass (tokens of this sequence, sequences in it)."""

    ids: list[int]
    hashes: dict[str, list[str]]
    forwards: list[tuple[int, int]]


class Place(BaseModel, frozen=True, extra="forbid"):
    """Where two computations of the same tokens differ: the first tap in the order of execution, and the first token
    whose distribution differs; None if none does."""

    tap: str
    sequence: int | None
    token: int | None


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


def certify(engine: Served, prompts: list[list[int]]) -> Certificate:
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
        result = _result(condition, runs)
        base = _result("alone", [alone[tuple(run.ids)] for run in runs])
        results.append(result.model_copy(update={"differs": _apart(result, base)}))
    made_on = f"{platform.machine()}, torch {torch.__version__}, mismatch-plugin {version('mismatch-plugin')}"
    weights = engine.weights()
    return Certificate(engine=engine.name, made_on=made_on, fingerprint=weights, prompts=prompts, results=results)


def _result(condition: Condition, runs: Sequence[Run]) -> Result:
    rows = {tap: "".join(one for run in runs for one in run.hashes[tap]).encode() for tap in runs[0].hashes}
    return Result(
        condition=condition,
        ids=[run.ids for run in runs],
        taps={tap: hashlib.blake2b(hashes, digest_size=8).hexdigest() for tap, hashes in rows.items()},
        tokens=[run.hashes[LOGITS] for run in runs],
    )


def _apart(mine: Result, theirs: Result) -> Place | None:
    """Where they differ first, of the same ids. Taps of names that only one of them has are left out."""
    taps = [tap for tap, rows in theirs.taps.items() if mine.taps.get(tap, rows) != rows]
    pairs = [zip(*rows, strict=True) for rows in zip(mine.tokens, theirs.tokens, strict=True)]
    places = [(number, token) for number, row in enumerate(pairs) for token, (a, b) in enumerate(row) if a != b]
    if not taps and not places:
        return None
    sequence, token = places[0] if places else (None, None)
    return Place(tap=taps[0] if taps else LOGITS, sequence=sequence, token=token)


def read_certificate(path: Path) -> Certificate:
    """Raises InputError for a file of another form."""
    try:
        return Certificate.model_validate_json(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--check {path} is no certificate of `mismatch-plugin certify`: {error}") from None


def check(certificate: Certificate, engine: Served) -> list[tuple[Condition, Place | str]]:
    """Run all of it again: the conditions that do not give the bits of the certificate, with the place or the reason.

    Raises InputError where the engine has other weights.
    """
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
        elif told.ids != now.ids:
            found.append((told.condition, "other tokens were decoded, or other sequences came into one batch"))
        elif place := _apart(now, told):
            found.append((told.condition, place))
    return found


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
        if condition == "decode":
            half = len(sequences[0]) // 2
            return [run for ids in sequences for run in self._runs([ids[:half]], half)]
        if condition not in ("batch", "chunked"):
            return self.alone(sequences)
        runs = self._runs(sequences)
        if condition == "batch":
            return [run for run in runs if len(run.forwards) == 1 < run.forwards[0][1]] or "no two came into one batch"
        few = f"all of them are fewer tokens than the {self._chunk or 'any number'} that the server prefills at once"
        return [run for run in runs if len(run.forwards) > 1] or few

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
