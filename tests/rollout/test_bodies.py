"""Replies that are too large, compressed or not: an error that names the limit, and memory that stays below it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from mismatch_plugin.rollout.bodies import read_body
from mismatch_plugin.rollout.client import Outcome, RequestError, Retries, SGLangClient
from mismatch_plugin.rollout.records import RolloutRecord, SamplingParameters
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, honest

LIMIT = 1_000_000
BOMB = 64_000_000
GZIP = {"Content-Encoding": "gzip"}


def outcome(reply: Reply, limit: int = LIMIT) -> tuple[Outcome[RolloutRecord], FaultyServer]:
    """What becomes of the one sample that gets this reply; the others are answered honestly."""

    def respond(request: Request) -> Reply:
        return reply if request.json["input_ids"] == [1] else honest(request)

    async def run(server: FaultyServer) -> list[Outcome[RolloutRecord]]:
        retries = Retries(attempts=3, first=0.0, longest=0.0)
        async with SGLangClient(server.url, retries=retries, max_reply_bytes=limit) as client:
            return await client.generate_outcomes([[0], [1], [2]], SamplingParameters(max_new_tokens=3))

    with FaultyServer(respond) as server:
        found = asyncio.run(run(server))
    assert found[0].failure is None and found[2].failure is None
    return found[1], server


@pytest.mark.parametrize(
    "reply",
    [
        Reply(body=b'"' + b"x" * LIMIT + b'"'),
        Reply(body=gzip.compress(b'"' + b"x" * LIMIT + b'"'), headers=GZIP),
        Reply(body=gzip.compress(b"0" * BOMB), headers=GZIP),
        Reply(body=b"x" * (LIMIT + 1), status=500),
    ],
    ids=["plain", "gzip", "a bomb", "an error page"],
)
def test_a_reply_beyond_the_limit_names_it_and_the_option(reply: Reply) -> None:
    found, server = outcome(reply)
    assert found.failure is not None and (found.failure.kind, found.attempts) == ("content", 1)
    assert f"more than {LIMIT} bytes after decompression: raise max_reply_bytes" in found.failure.message
    assert len([body for body in server.bodies("/generate") if body["input_ids"] == [1]]) == 1


def whole() -> bytes:
    return json.dumps(
        honest(Request("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}, 0, 0)).json
    ).encode()


def compressed(prompt: list[int], rid: str) -> bytes:
    body = {"input_ids": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 3}}
    return gzip.compress(json.dumps(honest(Request("POST", "/generate", body, 0, 0)).json).encode())


def test_a_compressed_reply_is_read_and_one_that_is_cut_off_tried_again() -> None:
    def respond(request: Request) -> Reply:
        body = compressed(request.json["input_ids"], request.json["rid"])
        return Reply(body=body if request.seen else body[:-20], headers=GZIP)

    async def run(server: FaultyServer) -> None:
        async with SGLangClient(server.url, retries=Retries(2, 0.0, 0.0)) as client:
            (found,) = await client.generate_outcomes([[5]], SamplingParameters(max_new_tokens=3))
            assert found.value is not None and found.attempts == 2
            assert {request.headers["accept-encoding"] for request in server.requests} == {"gzip"}

    with FaultyServer(respond) as server:
        asyncio.run(run(server))


@pytest.mark.parametrize(
    ("body", "encoding", "says"),
    [
        (whole(), "gzip", "cannot be decoded"),
        (gzip.compress(gzip.compress(whole())), "gzip, gzip", "'gzip, gzip' was not asked for"),
        (whole(), "br", "'br' was not asked for"),
    ],
)
def test_encodings_that_nobody_asked_for_are_refused(body: bytes, encoding: str, says: str) -> None:
    found, _ = outcome(Reply(body=body, headers={"Content-Encoding": encoding}))
    assert found.failure is not None and found.failure.kind == "content" and says in found.failure.message


class Pieces(httpx.AsyncByteStream):
    """A body that comes piece by piece, for ever if `count` is None, and what of it was taken."""

    def __init__(self, piece: bytes, count: int | None) -> None:
        self.piece, self.count, self.taken = piece, count, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.count is None or self.taken < self.count:
            self.taken += 1
            yield self.piece


def read(stream: Pieces, limit: int, **headers: str) -> bytes:
    return asyncio.run(read_body(httpx.Response(200, headers=headers, stream=stream), limit))


def test_a_body_without_an_end_is_read_up_to_the_limit() -> None:
    stream = Pieces(b"x" * 1000, None)
    with pytest.raises(RequestError, match="an answer of more than"):
        read(stream, 10_500)
    assert stream.taken == 11
    assert read(Pieces(b"x" * 1000, 10), 10_000) == b"x" * 10_000  # the limit itself is allowed


def test_a_bomb_takes_no_more_memory_than_the_limit() -> None:
    bomb = gzip.compress(b"0" * BOMB)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="an answer of more than"):
            read(Pieces(bomb, 1), LIMIT, **{"Content-Encoding": "gzip"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * LIMIT < BOMB / 10


def test_compressed_bodies_are_judged_by_what_they_hold() -> None:
    packed = gzip.compress(b"a" * 50)
    coded: dict[str, Any] = {"Content-Encoding": "gzip"}
    assert read(Pieces(packed, 1), 50, **coded) == b"a" * 50
    assert read(Pieces(b"", 1), 50, **coded) == b""
    with pytest.raises(RequestError, match="an answer of more than"):
        read(Pieces(packed, 1), 49, **coded)
    with pytest.raises(RequestError, match="cut off"):
        read(Pieces(packed[:-5], 1), 50, **coded)
    with pytest.raises(RequestError, match="cannot be decoded"):
        read(Pieces(b"hello", 1), 50, **coded)
    with pytest.raises(RequestError, match="an answer of more than"):  # by its own word, before anything is read
        read(Pieces(b"x", None), 50, **{"Content-Length": "51"})


def test_all_members_of_a_gzip_body_are_read() -> None:
    coded: dict[str, Any] = {"Content-Encoding": "gzip"}
    two = gzip.compress(b"a" * 30) + gzip.compress(b"") + gzip.compress(b"b" * 20)
    text = b"a" * 30 + b"b" * 20
    for body in (two, two + b"\0" * 9):
        assert read(Pieces(body, 1), 50, **coded) == text
        for size in (1, 7):  # whichever way the network cuts it
            pieces = httpx.Response(200, headers=coded, content=chunks(body, size))
            assert asyncio.run(read_body(pieces, 50)) == text
    with pytest.raises(RequestError, match="an answer of more than"):
        read(Pieces(two, 1), 49, **coded)
    with pytest.raises(RequestError, match="an answer of more than"):
        read(Pieces(gzip.compress(b"a"), None), 49, **coded)
    for cut in (two[:-5], two + two[:5], two[:3]):
        with pytest.raises(RequestError, match="cut off"):
            read(Pieces(cut, 1), 50, **coded)
    with pytest.raises(RequestError, match="cannot be decoded"):
        read(Pieces(two + b"hello", 1), 50, **coded)


async def chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"text": "", "n": ' + b"7" * 6000 + b"}", "JSON that cannot be read .*digits"),
        (b'{"text": "\xff\xfe!"}', "JSON that is not utf-8, from byte 10 on"),
    ],
)
def test_json_that_is_whole_and_cannot_be_read_is_not_asked_for_again(body: bytes, says: str) -> None:
    found, _ = outcome(Reply(body=body))
    assert found.failure is not None and (found.failure.kind, found.attempts) == ("content", 1)
    assert re.search(says, found.failure.message), found.failure.message


def test_json_cut_within_a_character_is_asked_for_again() -> None:
    found, _ = outcome(Reply(body='{"text": "\u00e9'.encode()[:-1]))
    assert found.failure is not None and (found.failure.kind, found.attempts) == ("connection", 3)


def test_the_limit_is_raised_by_its_option() -> None:
    big = Reply(body=json.dumps({"padding": "x" * LIMIT}).encode())
    found, _ = outcome(big, limit=2 * LIMIT)
    assert found.failure is not None and "no meta_info" in found.failure.message  # read, and then judged
