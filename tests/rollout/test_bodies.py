"""Replies that are too large, compressed or not: an error that names the limit, and memory that stays below it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tracemalloc
from collections.abc import AsyncIterator

import httpx
import pytest

from mismatch_plugin.rollout.bodies import read_body
from mismatch_plugin.rollout.client import RequestError
from mismatch_plugin.rollout.records import SamplingParameters
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, call, honest

LIMIT = 1_000_000
BOMB = 64_000_000
GZIP = {"Content-Encoding": "gzip"}
THREE = SamplingParameters(max_new_tokens=3)
TWO = b"".join(gzip.compress(part, mtime=0) for part in (b"a" * 30, b"", b"b" * 20))
"""Members of gzip one after another, as RFC 1952 allows."""


def content(request: Request) -> bytes:
    return json.dumps(honest(request).json).encode()


WHOLE = content(Request("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}, 0, 0))
TOO_LARGE = f"more than {LIMIT} bytes after decompression: raise max_reply_bytes"


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (Reply(body=b'"' + b"x" * LIMIT + b'"'), "content", TOO_LARGE),
        (Reply(body=gzip.compress(b"0" * BOMB), headers=GZIP), "content", TOO_LARGE),
        (Reply(body=b"x" * (LIMIT + 1), status=500), "content", TOO_LARGE),
        (Reply(body=WHOLE, headers=GZIP), "content", "cannot be decoded"),
        (
            Reply(body=gzip.compress(WHOLE), headers={"Content-Encoding": "gzip, gzip"}),
            "content",
            "'gzip, gzip' was not",
        ),
        (Reply(body=WHOLE, headers={"Content-Encoding": "br"}), "content", "'br' was not asked for"),
        (Reply(body=b'{"text": "", "n": ' + b"7" * 6000 + b"}"), "content", "JSON that cannot be read .*digits"),
        (Reply(body=b'{"text": "\xff\xfe!"}'), "content", "JSON that is not utf-8, from byte 10 on"),
        (Reply(body='{"text": "\u00e9'.encode()[:-1]), "connection", "JSON cut off after 11 bytes"),
        (Reply(body=json.dumps({"padding": "x" * (LIMIT - 20)}).encode()), "reply", "no meta_info"),  # read and judged
    ],
)
def test_a_reply_that_cannot_be_read_fails_its_sample(reply: Reply, kind: str, says: str) -> None:
    def respond(request: Request) -> Reply:
        return reply if request.json["input_ids"] == [1] else honest(request)

    with FaultyServer(respond) as server:
        first, found, last = call(
            server, lambda client: client.generate_outcomes([[0], [1], [2]], THREE), retries=2, max_reply_bytes=LIMIT
        )
    assert first.failure is None and last.failure is None
    # What was cut off is asked for again, and nothing else.
    assert found.failure is not None and (found.failure.kind, found.attempts) == (
        kind,
        3 if kind == "connection" else 1,
    )
    assert re.search(says, found.failure.message), found.failure.message


def test_a_compressed_reply_is_read_and_one_that_is_cut_off_tried_again() -> None:
    def respond(request: Request) -> Reply:
        body = gzip.compress(content(request))
        return Reply(body=body if request.seen else body[:-20], headers=GZIP)

    with FaultyServer(respond) as server:
        (found,) = call(server, lambda client: client.generate_outcomes([[5]], THREE))
        assert found.value is not None and found.attempts == 2
        assert {request.headers["accept-encoding"] for request in server.requests} == {"gzip"}


class Pieces(httpx.AsyncByteStream):
    """A body that comes piece by piece, for ever if `count` is None, and what of it was taken."""

    def __init__(self, piece: bytes, count: int | None) -> None:
        self.piece, self.count, self.taken = piece, count, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.count is None or self.taken < self.count:
            self.taken += 1
            yield self.piece


def read(stream: Pieces, limit: int, headers: dict[str, str] = GZIP) -> bytes:
    return asyncio.run(read_body(httpx.Response(200, headers=headers, stream=stream), limit))


def test_a_body_without_an_end_is_read_up_to_the_limit() -> None:
    stream = Pieces(b"x" * 1000, None)
    with pytest.raises(RequestError, match="more than 10500 bytes"):
        read(stream, 10_500, {})
    assert stream.taken == 11
    assert read(Pieces(b"x" * 1000, 10), 10_000, {}) == b"x" * 10_000  # the limit itself is allowed
    with pytest.raises(RequestError, match="more than 49 bytes"):
        read(Pieces(gzip.compress(b"a"), None), 49)
    with pytest.raises(RequestError, match="more than 50 bytes"):  # by its own word, before anything is read
        read(stream, 50, {"Content-Length": "51"})
    assert stream.taken == 11


def test_a_bomb_takes_no_more_memory_than_the_limit() -> None:
    bomb = gzip.compress(b"0" * BOMB)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="more than"):
            read(Pieces(bomb, 1), LIMIT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * LIMIT < BOMB / 10


@pytest.mark.parametrize(
    "body", [TWO, TWO + b"\0" * 9, gzip.compress(b"a" * 30 + b"b" * 20, mtime=0)], ids=["members", "padded", "one"]
)
def test_compressed_bodies_are_judged_by_what_they_hold(body: bytes) -> None:
    assert read(Pieces(body, 1), 50) == b"a" * 30 + b"b" * 20
    with pytest.raises(RequestError, match="more than 49 bytes"):
        read(Pieces(body, 1), 49)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (TWO[:-5], "cut off"),
        (TWO + TWO[:5], "cut off"),
        (TWO[:3], "cut off"),
        (TWO + b"hello", "cannot be decoded"),
        (b"hello", "cannot be decoded"),
    ],
)
def test_compressed_bodies_that_are_damaged_are_refused(body: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read(Pieces(body, 1), 1000)
