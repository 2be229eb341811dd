"""Whether a weight update arrived: the server's checksums before and after it, judged by what was sent.

SGLang reports success, and moves the weight version, whatever became of the tensors: most of its models skip names that
they do not have, and some end the server. `POST /weights_checker` tells a checksum of every tensor that it computes
with, which costs one pass over the weights. Checksums say that a tensor changed, not that it is right: compare
`rescore` with a recomputation for that.

The rule, for `expect_changed`:

"all" (default)
    A tensor of the server may stay the same where nothing else was asked for: what was sent for it is, rounded to the
    server's dtype, what was sent before and is known to have arrived. It is known of a verified update, and of an
    unverified one where the checksums before it and before the next one show that the tensor changed. Where nothing is
    known (the first update, after one from disk or one with "any", tensors that were not sent), vectors and constants
    may stay and matrices may not: after a step of RL a bfloat16 norm is often the same bit for bit, while a matrix has
    small entries that move. Any other tensor that stays the same is an error, and so is an update that changes nothing
    at all, unless exactly the tensors of the update before were sent, and those had arrived (a warning).
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
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor

from mismatch_plugin.rollout.checksums import Checksums, Sent, Sources, lost, read_checksums, some, unchanged
from mismatch_plugin.rollout.outcomes import RequestError, WeightUpdateError
from mismatch_plugin.rollout.transport import Retries, Transport
from mismatch_plugin.rollout.weights import digests

ExpectWord = Literal["all", "some", "any"]
ExpectChanged = ExpectWord | Collection[str]
logger = logging.getLogger("mismatch_plugin")
_WRAPPERS = 3  # how many of a trainer's wrappers are looked through: `module.module.model.…`
_VECTOR_NAMES = ("norm", "bias", "scale", "sink", "A_log", "position_ids", "expert_map", "mask")
"""Parts of the names of vectors and of constants that a server keeps next to its weights. A reply has no shapes."""


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
    are the cost of each; it is logged at level INFO of the logger `mismatch_plugin`. From n = 3 on the update before
    a verified one costs a digest and one checksum, too: they tell whether it arrived.
    """

    def __init__(self, transport: Transport, retries: Retries, every: int = 1) -> None:
        if every < 0:
            raise ValueError(f"verify_updates_every={every} must be at least 0 (0: no update is verified).")
        self._transport, self._retries, self._every = transport, retries, every
        self._number = 0
        self._sent: dict[str, int] = {}  # name -> digest of what was sent last, arrived or not
        self._arrived: set[str] = set()  # names of those that the server is known to have taken
        self._after: Checksums | None = None  # after the last update, if that was verified
        self._unseen: Checksums | None = None  # before the last update, if that was not verified
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
        due = expect != "any" and self._due(number)
        eve = expect != "any" and not due and self._due(number + 1)  # the next one is compared with this one
        previous, arrived, last, unseen = self._sent, self._arrived, self._after, self._unseen
        self._forget()  # an update that fails leaves the server with nobody knows what
        started = time.perf_counter()
        new: dict[str, int] = {}
        if pairs is not None and (self._due(number) or self._due(number + 1)):
            new = await asyncio.to_thread(digests, pairs, dtype)
        before = await self._checksums() if due else (last or await self._checksums()) if eve else None
        if due and before is not None and unseen is not None:
            arrived = arrived | _taken(unseen, before, previous, "some")
        sent = _compared(pairs or (), new, previous, arrived)
        if due and before is not None:
            _check_names(before, sent, expect)
        taken = time.perf_counter() - started
        yield
        self._sent = {**previous, **new} if new else {}
        self._arrived = {name for name in arrived if name in self._sent and self._sent[name] == previous.get(name)}
        if expect == "any":
            self._arrived = set()  # a re-sync: the server may be another one than before
        elif eve:
            self._unseen = before
        elif before is not None:
            started = time.perf_counter()
            try:
                self._after = after = await self._checksums(sure=True)
                assert after is not None
                taken += time.perf_counter() - started
                if found := fault(before, after, sent, expect):
                    raise WeightUpdateError(f"the server took the update to version {version}, but {found}")
            except BaseException:
                self._forget()
                raise
            if _again(sent, Sources(sent, after)):
                logger.warning("version %s has the same weights as the update before it: no step in between?", version)
            total = len({name for rank in after for name in rank})
            told = f"{total - len(unchanged(before, after))} of {total} tensors changed; {taken:.3f} s"
            logger.info("version %s verified on the server: %s", version, told)
            self._arrived |= _taken(before, after, new, expect)
        self._number += expect != "any"  # neither a failed update nor one that nobody looked at takes a turn

    @property
    def due(self) -> bool:
        """Whether the next update is one of those that are verified."""
        return self._has_turn(self._number)

    def _forget(self) -> None:
        self._sent, self._arrived, self._after, self._unseen = {}, set(), None, None

    def _due(self, number: int) -> bool:
        return self._supported and self._has_turn(number)

    def _has_turn(self, number: int) -> bool:
        return self._every > 0 and number % self._every == 0

    async def _checksums(self, sure: bool = False) -> Checksums | None:
        """None where the server has none to tell, which is said once. sure: it told them before; raises."""
        body = {"action": "checksum", "selector": "target"}  # drafts of speculative decoding are not updated
        try:
            answer = await self._transport.call("POST", "/weights_checker", body, retries=self._retries)
            return read_checksums(answer.json)
        except RequestError as error:
            if sure or error.kind in ("connection", "timeout", "deadline", "closed"):
                then = "whether the weights arrived cannot be told" if sure else "no weights were sent"
                raise WeightUpdateError(f"{then}: {error}") from error
            self._supported = False
            logger.warning("weight updates are not verified: the server has no checksums of its weights (%s).", error)
            return None


def fault(before: Checksums, after: Checksums, sent: Mapping[str, Sent], expect: ExpectChanged) -> str | None:
    """What is wrong with an update, by the rule at the top of this file; None if nothing is. sent: {} if unknown.

    A matrix must change on every rank that holds a part of it, a vector on one: a shard of a small one may stay.
    """
    if gone := lost(before, after):
        return gone
    sources = Sources(sent, after)
    if _again(sent, sources):
        return None
    held = Counter(name for rank in after for name in rank if _expected(name, sources.of(name), expect))
    same = {name: ranks for name, ranks in unchanged(before, after).items() if name in held}
    if sum(map(len, same.values())) == held.total():
        named = "" if isinstance(expect, str) else " of those named"
        return f"no tensor changed{named} ({len(held)} compared). {sources.explanation()}"
    if expect == "some":
        return None
    stuck = []
    for name, ranks in same.items():
        elsewhere = len(ranks) < held[name]
        if not _may_stay(name, [sent[source] for source in sources.of(name)], elsewhere):
            stuck.append(f"{name} (rank {', '.join(map(str, ranks))})" if elsewhere else name)
    if not stuck:
        return None
    changed = [name for name in held if name not in same]
    return (
        f"{len(stuck)} of {len(held)} tensors should have changed and did not: {some(stuck)}. "
        f"{len(changed)} changed{': ' + some(changed) if changed else ''}. {sources.foreign()}"
        "If only a part was to change (LoRA, frozen layers), say so: expect_changed='some', or the names."
    )


def _compared(
    pairs: Sequence[tuple[str, Tensor]], new: Mapping[str, int], previous: Mapping[str, int], arrived: Collection[str]
) -> dict[str, Sent]:
    """What is sent next to what was. A vector that is sent again next to matrices needs no proof: it may stay anyway,
    and one that rounds to the same bits never shows that it arrived."""
    matrices = any(tensor.dim() > 1 for _, tensor in pairs)
    found: dict[str, Sent] = {}
    for name, tensor in pairs:
        changed = new[name] != previous[name] if name in new and name in previous else None
        if changed is False and name not in arrived and (tensor.dim() > 1 or not matrices):
            changed = None
        found[name] = Sent(tensor.dim() > 1, changed)
    return found


def _again(sent: Mapping[str, Sent], sources: Sources) -> bool:
    """Whether what was sent is what the server is known to have had. Names that it does not have do not count."""
    unknown = set(sources.unknown)
    counted = {tensor.changed for name, tensor in sent.items() if name not in unknown}
    return counted == {False}


def _taken(before: Checksums, after: Checksums, names: Collection[str], expect: ExpectChanged) -> set[str]:
    """Which of the sent names an update without fault brought: what was expected to change, and what else changed."""
    if lost(before, after):
        return set()
    sources = Sources(dict.fromkeys(names, Sent(True, None)), after)
    missed: set[str] = set()
    for name in unchanged(before, after):
        parts = sources.of(name)
        if expect == "some" or not _expected(name, parts, expect):
            missed.update(parts)
    return set(names) - missed


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
    sources = Sources(sent, ranks)
    names = sources.names
    if sent and expect != "some" and len(sources.unknown) == len(sent):
        for depth in range(1, 1 + _WRAPPERS):
            prefixes = {".".join(name.split(".")[:depth]) + "." for name in sent}
            if len(prefixes) == 1 and any(name.split(".", depth)[-1] in names for name in sent):
                raise WeightUpdateError(
                    f"no weights were sent: all {len(sent)} names begin with {prefixes.pop()!r}, and without it they "
                    f"are the server's ({some(names)}). Send the names of the checkpoint; if the server drops the "
                    "prefix by itself, say expect_changed='some'."
                )
    for pattern in () if isinstance(expect, str) else expect:
        if not any(_expected(name, sources.of(name), (pattern,)) for name in names):
            raise ValueError(f"expect_changed: {pattern!r} is no tensor of the server, which has {some(names)}.")
