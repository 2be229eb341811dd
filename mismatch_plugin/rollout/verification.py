"""Whether a weight update arrived: the server's checksums before and after it, judged by what was sent.

SGLang reports success, and moves the weight version, whatever became of the tensors: most of its models skip names that
they do not have, and some end the server. `POST /weights_checker` tells a checksum of every tensor that it computes
with, which costs one pass over the weights. Checksums say that a tensor changed, not that it is right: compare
`rescore` with a recomputation for that.

The rule, for `expect_changed`:

"all" (default)
    A tensor of the server may stay the same where nothing else was asked for: what was sent for it is, rounded to the
    server's dtype, what was sent before. Where that is unknown (the first update, an update from disk, tensors that
    were not sent), vectors and constants may stay and matrices may not: after a step of RL a bfloat16 norm is often the
    same bit for bit, while a matrix has small entries that move. Any other tensor that stays the same is an error, and
    so is an update that changes nothing at all, unless exactly the tensors of the update before were sent (a warning).
"some"
    At least one tensor changes: LoRA, frozen layers, weights sent in several updates.
a collection of names
    As "all", for these tensors: the server's names or those that were sent, with shell wildcards
    (`model.layers.3.*`). The others may change or not.
"any"
    Nothing is verified: a re-sync with weights that the server may have already, such as the first update of a run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mismatch_plugin.rollout.outcomes import RequestError, WeightUpdateError
from mismatch_plugin.rollout.transport import Retries, Transport
from mismatch_plugin.rollout.weights import digests

ExpectWord = Literal["all", "some", "any"]
ExpectChanged = ExpectWord | Collection[str]
Checksums = Sequence[Mapping[str, str]]
"""For each rank of the server: tensor name -> checksum."""

logger = logging.getLogger("mismatch_plugin")
_SHOWN = 4
_WRAPPERS = 3  # how many of a trainer's wrappers are looked through: `module.module.model.…`
_VECTOR_NAMES = ("norm", "bias", "scale", "sink", "A_log", "position_ids", "expert_map", "mask")
"""Parts of the names of vectors and of constants that a server keeps next to its weights. A reply has no shapes."""


@dataclass(frozen=True)
class Sent:
    """One tensor of an update. changed: differs from what was sent under its name before; None: nothing is known."""

    matrix: bool
    changed: bool | None


def check_expectation(expect: ExpectChanged) -> None:
    """Raises ValueError for a word that is none of the three, or an empty collection."""
    if isinstance(expect, str):
        if expect not in get_args(ExpectWord):
            raise ValueError(
                f"expect_changed={expect!r} is unknown: choose one of {', '.join(get_args(ExpectWord))}, or give a "
                "collection of tensor names."
            )
    elif not expect:
        raise ValueError("expect_changed holds no names: to verify nothing, say 'any'.")


class UpdateVerifier:
    """Takes checksums around the first weight update and every n-th one after it.

    every: n; 0 verifies none. Two checksums of all weights on the server, and a digest of the tensors that are sent,
    are the cost of each; it is logged at level INFO of the logger `mismatch_plugin`.
    """

    def __init__(self, transport: Transport, retries: Retries, every: int = 1) -> None:
        if every < 0:
            raise ValueError(f"verify_updates_every={every} must be at least 0 (0: no update is verified).")
        self._transport, self._retries, self._every = transport, retries, every
        self._number = 0
        self._sent: dict[str, int] = {}  # name -> digest, of what the server is known to have been sent
        self._supported = True

    @asynccontextmanager
    async def around(
        self,
        version: str | int,
        expect: ExpectChanged,
        pairs: Sequence[tuple[str, Tensor]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> AsyncIterator[None]:
        """Verify the update in the block. pairs: what it sends (None: unknown), dtype: what the server rounds it to.

        Raises:
            ValueError: a name of `expect` that is no tensor of the server's, before the block.
            WeightUpdateError: the update is not what was expected; the server keeps the new version's name. Or, before
                the block: all names have a prefix in front of the server's.
        """
        number = self._number
        previous, self._sent = self._sent, {}  # an update that fails leaves the server with nobody knows what
        started = time.perf_counter()
        new: dict[str, int] = {}
        if pairs is not None and (self._due(number) or self._due(number + 1)):
            new = await asyncio.to_thread(digests, pairs, dtype)
        sent = {
            name: Sent(tensor.dim() > 1, new[name] != previous[name] if name in new and name in previous else None)
            for name, tensor in pairs or ()
        }
        before = await self._checksums() if self._due(number) and expect != "any" else None
        if before is not None:
            _check_names(before, sent, expect)
        taken = time.perf_counter() - started
        yield
        if before is not None:
            started = time.perf_counter()
            after = await self._checksums(sure=True)
            assert after is not None
            taken += time.perf_counter() - started
            if found := fault(before, after, sent, expect):
                raise WeightUpdateError(f"the server took the update to version {version}, but {found}")
            if sent and all(tensor.changed is False for tensor in sent.values()):
                logger.warning("version %s has the same weights as the update before it: no step in between?", version)
            logger.info("version %s verified on the server: %s; %.3f s", version, _counts(before, after), taken)
        self._sent = {**previous, **new} if new else {}
        self._number += expect != "any"  # neither a failed update nor one that nobody looked at takes a turn

    def _due(self, number: int) -> bool:
        return self._supported and self._every > 0 and number % self._every == 0

    async def _checksums(self, sure: bool = False) -> Checksums | None:
        """None where the server has none to tell, which is said once. sure: it told them before; raises."""
        body = {"action": "checksum", "selector": "target"}  # drafts of speculative decoding are not updated
        try:
            answer = await self._transport.call("POST", "/weights_checker", body, retries=self._retries)
            return _read(answer.json)
        except RequestError as error:
            if sure or error.kind in ("connection", "timeout", "deadline"):
                then = "whether the weights arrived cannot be told" if sure else "no weights were sent"
                raise WeightUpdateError(f"{then}: {error}") from error
            self._supported = False
            logger.warning("weight updates are not verified: the server has no checksums of its weights (%s).", error)
            return None


def fault(before: Checksums, after: Checksums, sent: Mapping[str, Sent], expect: ExpectChanged) -> str | None:
    """What is wrong with an update, by the rule at the top of this file; None if nothing is. sent: {} if unknown.

    A matrix must change on every rank that holds a part of it, a vector on one: a shard of a small one may stay.
    """
    if sent and all(tensor.changed is False for tensor in sent.values()):
        return None
    sources = _Sources(sent, after)
    held = Counter(name for rank in after for name in rank if _expected(name, sources.of(name), expect))
    same = _unchanged(before, after)
    same = {name: ranks for name, ranks in same.items() if name in held}
    stayed = sum(len(ranks) for ranks in same.values())
    if stayed == held.total():
        return f"no tensor changed{'' if isinstance(expect, str) else ' of those named'} ({len(held)} compared). " + (
            sources.explanation()
        )
    if expect == "some":
        return None
    stuck = [
        _on(name, ranks, held[name])
        for name, ranks in same.items()
        if not _may_stay(name, [sent[source] for source in sources.of(name)], len(ranks) < held[name])
    ]
    if not stuck:
        return None
    changed = [name for name in held if name not in same]
    return (
        f"{len(stuck)} of {len(held)} tensors should have changed and did not: {_some(stuck)}. "
        f"{len(changed)} changed{': ' + _some(changed) if changed else ''}. {sources.foreign()}"
        "If only a part was to change (LoRA, frozen layers), say so: expect_changed='some', or the names."
    )


class _Sources:
    """Which of the sent tensors a tensor of the server is made of, without knowledge of the model.

    Names are the same, or the server fuses: q_proj, k_proj and v_proj are qkv_proj, experts.0.up_proj is in w13_weight.
    So what goes by no name of the server's belongs to the fused tensors of the module that it lies in.
    """

    def __init__(self, sent: Mapping[str, Sent], ranks: Checksums) -> None:
        self._sent = sent
        self._names = list(dict.fromkeys(name for rank in ranks for name in rank))
        own = set(self._names)
        self._within: dict[str, list[str]] = defaultdict(list)  # module -> sent names anywhere in it
        self._siblings: dict[str, list[str]] = defaultdict(list)  # module -> sent parameters of its direct submodules
        for name in sent:
            if name in own:
                continue
            parts = name.split(".")
            for length in range(1, len(parts)):
                self._within[".".join(parts[:length])].append(name)
            self._siblings[".".join(parts[:-2])].append(name)

    def of(self, name: str) -> list[str]:
        """The sent names that `name` is made of; [] if that is unknown, or nothing was sent for it."""
        if name in self._sent:
            return [name]
        module, _, leaf = name.rpartition(".")
        if module in self._within:
            return self._within[module]
        parent = module.rpartition(".")[0]
        return [source for source in self._siblings.get(parent, ()) if source.rpartition(".")[2] == leaf]

    def unknown(self) -> list[str]:
        """Sent names that belong to no tensor of the server."""
        used = {source for name in self._names for source in self.of(name)}
        return [name for name in self._sent if name not in used]

    def foreign(self) -> str:
        """A sentence about sent names that belong to no tensor of the server, or nothing."""
        unknown = self.unknown()
        if not unknown:
            return ""
        return (
            f"{len(unknown)} of {len(self._sent)} names that were sent belong to no tensor of the server and were "
            f"skipped: {_some(unknown)}; it has {_some(self._names)}. "
        )

    def explanation(self) -> str:
        """Why nothing changed, as far as the names tell."""
        if not self._sent:
            why = "The checkpoint holds what the server had, or names that its model does not have. "
        else:
            why = self.foreign() or "The names fit: the server had these values already. "
        return why + "If it may have them already (a re-sync, or a run's first update), say expect_changed='any'."


def _may_stay(name: str, sources: Sequence[Sent], changed_elsewhere: bool) -> bool:
    """Whether the tensor `name` may be what it was before the update. changed_elsewhere: it did on another rank."""
    named = any(part in name.split(".", name.count(".") - 1)[-1] for part in _VECTOR_NAMES)
    if named and any(source.matrix for source in sources):
        sources = ()  # neighbours that the server fuses, and not what this vector is made of
    vector = named or (bool(sources) and not any(source.matrix for source in sources))
    if any(source.changed for source in sources):
        return vector and changed_elsewhere
    return vector or (bool(sources) and all(source.changed is False for source in sources))


def _expected(name: str, sources: Sequence[str], expect: ExpectChanged) -> bool:
    if isinstance(expect, str):
        return True
    return any(fnmatchcase(known, pattern) for known in (name, *sources) for pattern in expect)


def _check_names(ranks: Checksums, sent: Mapping[str, Sent], expect: ExpectChanged) -> None:
    sources = _Sources(sent, ranks)
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    if sent and expect != "some" and len(sources.unknown()) == len(sent):
        for depth in range(1, 1 + _WRAPPERS):
            prefixes = {".".join(name.split(".")[:depth]) + "." for name in sent}
            if len(prefixes) == 1 and any(name.split(".", depth)[-1] in names for name in sent):
                raise WeightUpdateError(
                    f"no weights were sent: all {len(sent)} names begin with {prefixes.pop()!r}, and without it they "
                    f"are the server's ({_some(names)}). Send the names of the checkpoint; if the server drops the "
                    "prefix by itself, say expect_changed='some'."
                )
    for pattern in () if isinstance(expect, str) else expect:
        if not any(_expected(name, sources.of(name), (pattern,)) for name in names):
            raise ValueError(f"expect_changed: {pattern!r} is no tensor of the server, which has {_some(names)}.")


def _unchanged(before: Checksums, after: Checksums) -> dict[str, list[int]]:
    """Tensor name -> ranks on which it is what it was."""
    same: dict[str, list[int]] = defaultdict(list)
    for rank, (old, new) in enumerate(zip(before, after, strict=False)):
        for name, checksum in new.items():
            if old.get(name) == checksum:
                same[name].append(rank)
    return same


def _counts(before: Checksums, after: Checksums) -> str:
    total = len({name for rank in after for name in rank})
    return f"{total - len(_unchanged(before, after))} of {total} tensors changed"


def _on(name: str, ranks: Sequence[int], held: int) -> str:
    return name if len(ranks) == held else f"{name} (rank {', '.join(map(str, ranks))})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _read(reply: Any) -> Checksums:
    """The ranks of an answer. Raises RequestError for an answer without any."""
    ranks = reply.get("ranks") if isinstance(reply, dict) else None
    found = [rank.get("checksums") if isinstance(rank, dict) else None for rank in ranks or ()]
    if not found or not all(isinstance(rank, dict) and rank for rank in found):
        raise RequestError("content", f"/weights_checker answered {str(reply)[:200]}", 1)
    return [{str(name): str(checksum) for name, checksum in (rank or {}).items()} for rank in found]
