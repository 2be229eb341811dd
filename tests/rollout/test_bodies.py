"""Replies that are too large, encoded or damaged: an error that names the limit or the damage, for one sample alone."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from mismatch_plugin.rollout.records import SamplingParameters
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, call, honest

LIMIT = 1_000_000
THREE = SamplingParameters(max_new_tokens=3)
TOO_LARGE = f"more than {LIMIT} bytes: raise max_reply_bytes"
ZIPPED = Reply(body=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (Reply(body=b'"' + b"x" * LIMIT + b'"'), "content", TOO_LARGE),
        (Reply(body=b"x" * (LIMIT + 1), status=500), "content", TOO_LARGE),
        (ZIPPED, "content", "'gzip' was not asked for"),
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
        encodings = {request.headers["accept-encoding"] for request in server.requests}
    assert first.failure is None and last.failure is None and encodings == {"identity"}
    # What was cut off is asked for again, and nothing else.
    attempts = 3 if kind == "connection" else 1
    assert found.failure is not None and (found.failure.kind, found.failure.attempts) == (kind, attempts)
    assert re.search(says, found.failure.message), found.failure.message
