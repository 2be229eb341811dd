"""A certificate that an engine gives the same next-token distributions however it computes them, and a check of it.

Of each token and each tap the bits of the whole row are hashed: of the logits too, so that whole distributions are
compared and not the sampled tokens. Conditions: each sequence alone; again; all in one batch; with its prompt in parts
(chunked prefill); decoded token by token; after an update with the same weights. Each is compared with the same tokens
alone. The certificate is JSON that holds the ids and hashes, so that another machine can compute all of it again.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from mismatch_plugin.bisect.engines import Engine, Trainer
from mismatch_plugin.bisect.taps import HEAD, Recorder, row_hashes, watched
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import digests, fingerprint

Condition = Literal["alone", "again", "batch", "chunked", "decode", "update"]
Hashes = dict[str, list[str]]
"""Tap as "module which", in the order of execution → hash of each token's row."""
LOGITS = f"{HEAD} output"


class Run(NamedTuple):
    """One sequence as an engine computed it. forwards: of each pass (tokens of this sequence, sequences in it)."""

    ids: list[int]
    hashes: Hashes
    forwards: list[tuple[int, int]]


class Place(BaseModel):
    """Where two runs of the same tokens differ first: the tap that is computed first, and there the first token (of a
    check, the first token whose distribution differs; None if none does). logits: whether distributions differ."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence: int | None
    token: int | None
    tap: str
    logits: bool


class Result(BaseModel):
    """Of one condition. not_run: why it was not. differs: from the same tokens alone. ids: as they were computed.
    taps: a hash of all rows of each. tokens: of the logits, of each sequence the hash of each token's distribution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    condition: Condition
    not_run: str = ""
    differs: Place | None = None
    ids: list[list[int]] = []
    taps: dict[str, str] = {}
    tokens: list[list[str]] = []


class Certificate(BaseModel):
    """zero: every condition that was run gives the bits of each sequence alone. fingerprint: of the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """Run every condition that the engine allows. Raises InputError where it does not answer."""
    alone = engine.alone(prompts)
    results = [_result("alone", alone), _result("again", engine.alone(prompts), alone)]
    together = engine.together(prompts)
    whole = [(one, base) for one, base in zip(together, alone, strict=True) if len(one.forwards) == 1]
    if any(one.forwards[0][1] > 1 for one, _ in whole):
        results.append(_result("batch", *map(list, zip(*whole, strict=True))))
    else:
        results.append(Result(condition="batch", not_run="the engine computed each sequence by itself"))
    cut = [(one, base) for one, base in zip(together, alone, strict=True) if len(one.forwards) > 1]
    parts = engine.in_parts(prompts)
    if cut or not isinstance(parts, str):
        pairs = cut if isinstance(parts, str) else [*zip(parts, alone, strict=True)]
        results.append(_result("chunked", *map(list, zip(*pairs, strict=True))))
    else:
        results.append(Result(condition="chunked", not_run=parts))
    decoded = engine.decoded([ids[: len(ids) // 2] for ids in prompts], len(prompts[0]) // 2)
    results.append(_result("decode", decoded, engine.alone([one.ids for one in decoded])))
    if problem := engine.update():
        results.append(Result(condition="update", not_run=problem))
    else:
        results.append(_result("update", engine.alone(prompts), alone))
    made_on = f"{platform.machine()}, torch {torch.__version__}, mismatch-plugin {version('mismatch-plugin')}"
    return Certificate(
        engine=engine.name, made_on=made_on, fingerprint=engine.weights(), prompts=prompts, results=results
    )


def check(certificate: Certificate, engine: Served | InProcess) -> list[tuple[Condition, Place | str]]:
    """Run all of it again: the conditions that do not give the bits of the certificate, with the place or the reason.

    Taps of names that only one engine has are left out; logits all have.

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
        elif place := _changed(told, now):
            found.append((told.condition, place))
    return found


def _changed(told: Result, now: Result) -> Place | str | None:
    if told.ids != now.ids:
        return "other tokens were decoded or batched"
    taps = [tap for tap in told.taps if tap in now.taps and told.taps[tap] != now.taps[tap]]
    if not taps:
        return None
    rows = [
        (sequence, token)
        for sequence, (mine, theirs) in enumerate(zip(now.tokens, told.tokens, strict=True))
        for token, (one, other) in enumerate(zip(mine, theirs, strict=True))
        if one != other
    ]
    sequence, token = rows[0] if rows else (None, None)
    return Place(sequence=sequence, token=token, tap=taps[0], logits=bool(rows))


def _result(condition: Condition, runs: list[Run], alone: list[Run] | None = None) -> Result:
    taps = {tap: _hash(h for run in runs for h in run.hashes[tap]) for tap in runs[0].hashes}
    return Result(
        condition=condition,
        differs=None if alone is None else _first(runs, alone),
        ids=[run.ids for run in runs],
        taps=taps,
        tokens=[run.hashes[LOGITS] for run in runs],
    )


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


def _hash(parts: Iterable[str]) -> str:
    return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()


class Served:
    """An SGLang server. folder: of a checkpoint that it can read, for `update`."""

    def __init__(self, engine: Engine, folder: str | None = None) -> None:
        self._engine, self._folder, self._facts = engine, folder, engine.facts()
        info = self._facts.info
        self.name, self.vocab = f"sglang {info.get('sglang')} in {info.get('dtype')}", self._facts.vocab

    def weights(self) -> str:
        """Of those that serve now."""
        return str(self._engine.facts().info.get("fingerprint"))

    def alone(self, sequences: Sequence[list[int]]) -> list[Run]:
        """One request after the other."""
        runs = [run for ids in sequences for run in self._runs([ids], 0)]
        if any(len(run.forwards) > 1 for run in runs):
            raise InputError(
                f"{len(runs[0].ids)} tokens are prefilled in parts, since the server's chunked_prefill_size is "
                f"{self._facts.chunk}: give fewer --tokens."
            )
        return runs

    def together(self, sequences: Sequence[list[int]]) -> list[Run]:
        """One request with all of them."""
        return self._runs(sequences, 0)

    def in_parts(self, sequences: Sequence[list[int]]) -> str:
        """What a batch above the server's chunk size does by itself."""
        tokens = sum(map(len, sequences))
        return f"chunked_prefill_size is {self._facts.chunk}, and all prompts together have {tokens} tokens"

    def decoded(self, prompts: Sequence[list[int]], tokens: int) -> list[Run]:
        """One request after the other."""
        return [run for ids in prompts for run in self._runs([ids], tokens)]

    def update(self) -> str:
        """From disk, if there is a folder."""
        if self._folder is None:
            return "no --update FOLDER was given"
        self._engine.update(self._folder)
        return ""

    def _runs(self, sequences: Sequence[list[int]], tokens: int) -> list[Run]:
        runs = []
        answers = self._engine.generate(sequences, {"form": "hashes"}, tokens)
        for ids, (answer, told) in zip(sequences, answers, strict=True):
            new = list(answer.get("output_ids") or [])[: max(0, tokens - 1)] if tokens else []
            hashes = {f"{name} {which}": rows for (name, which), rows in zip(told["taps"], told["hashes"], strict=True)}
            runs.append(Run([*ids, *new], hashes, [(rows, requests) for rows, requests in told["forwards"]]))
        return runs


class InProcess:
    """A transformers model in this process."""

    def __init__(self, trainer: Trainer, dtype: torch.dtype) -> None:
        self._model: Any = trainer.model
        self._dtype, self.vocab = dtype, int(self._model.config.vocab_size)
        self.name = f"transformers {version('transformers')} in {str(dtype).removeprefix('torch.')}"

    def weights(self) -> str:
        """As a server tells of the same ones."""
        return fingerprint(digests(self._model.named_parameters(), self._dtype))

    def alone(self, sequences: Sequence[list[int]]) -> list[Run]:
        """One pass each."""
        return [run for ids in sequences for run in self._runs([ids], [len(ids)])]

    def together(self, sequences: Sequence[list[int]]) -> list[Run]:
        """One pass; they must be of one length."""
        return self._runs(sequences, [len(sequences[0])])

    def in_parts(self, sequences: Sequence[list[int]]) -> list[Run]:
        """A third, and the rest with its keys and values."""
        return [run for ids in sequences for run in self._runs([ids], [len(ids) // 3, len(ids) - len(ids) // 3])]

    def decoded(self, prompts: Sequence[list[int]], tokens: int) -> list[Run]:
        """Greedily."""
        return [run for ids in prompts for run in self._runs([ids], [len(ids)], tokens - 1)]

    def update(self) -> str:
        """Nothing to update."""
        return "only a server's weights are updated"

    def _runs(self, sequences: Sequence[list[int]], parts: list[int], decode: int = 0) -> list[Run]:
        from transformers import DynamicCache

        cache, ids, start = DynamicCache(), torch.tensor([*sequences]), 0
        hashes: list[Hashes] = [{} for _ in sequences]
        logits = torch.empty(0)
        sizes = [*parts, *[1] * decode]
        for size in sizes:
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
        forwards = [(size, len(sequences)) for size in sizes]
        return [Run(row.tolist(), own, forwards) for row, own in zip(ids, hashes, strict=True)]
