"""Addresses, credentials and bodies: what is no address is refused, nothing shown holds a secret, odd replies fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import GenerateError, Retries, SGLangClient
from mismatch_plugin.sglang.http import Server, shown
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, call, honest

ONE = SamplingParameters(max_new_tokens=1)
PASSWORD, TOKEN = "hunter-2-hunter", "tok-1234567"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "X-Run": "plain-value"}


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:30000", "localhost", "ftp://host:1", "", "http://", "http://:30000", None),
        *("http://host:99999999", "http://host:0", "http://host:-1", "http://host:http"),
        *("http://ho\0st:1", "http://host:1/\r\nX: 1", "http://ho st:1"),
        *("http://[::1", "http://a..b:1", f"http://{'a' * 64}.example:1"),
        *("http://host:1?model=x", "http://host:1#x"),
    ],
)
def test_what_is_no_address_is_refused_at_construction(url: Any) -> None:
    with pytest.raises(ValueError, match="is not a server's address: give it as http://host:port") as caught:
        SGLangClient(url)
    assert repr(shown(str(url))) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("https://host/prefix/", "https://host/prefix"),
        ("http://[::1]:30000/", "http://[::1]:30000"),
        ("http://user:p%40ss@host:1", "http://host:1"),
        ("http://token@host:1", "http://host:1"),
        ("HTTP://host_with_underscore:1", "http://host_with_underscore:1"),
    ],
)
def test_addresses_are_kept_without_credentials(url: str, base: str) -> None:
    assert SGLangClient(url).url == Server(url).url == base


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{PASSWORD}@host:99999999",
        f"http://user:{PASSWORD}@host:1?q",
        f"user:{PASSWORD}@host:1",
        f"ftp://user:{PASSWORD}@host",
        f"http://user:a/{PASSWORD}@host:1",
        f"http://user:a?{PASSWORD}@host:1",
        f"http://user:a#{PASSWORD}@host:1",
        f"http://user:{PASSWORD}@",
        f"http://user:{PASSWORD}@ho st",
        f"http://user:{PASSWORD}@[::1",
        f"http://host:1?token={PASSWORD}",
        f"http://host:1/?token=a@{PASSWORD}",
    ],
)
def test_no_refusal_of_an_address_shows_its_credentials(url: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        SGLangClient(url)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    assert PASSWORD not in shown(url)


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Authorization": f"Bearer {TOKEN}\n"}, r"headers\['Authorization'\] is not one line of ASCII"),
        ({"Authorization": f"Bearer {TOKEN}é"}, r"headers\['Authorization'\] is not one line of ASCII"),
        ({"Authorization": [TOKEN]}, r"headers\['Authorization'\] is not one line of ASCII"),
        ({f"{TOKEN}:": "x"}, "a name that HTTP does not allow"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_without_their_values(headers: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        SGLangClient("http://host:1", headers=headers)
    assert TOKEN not in str(caught.value)


def echoing(status: int, **fields: Any) -> Callable[[Request], Reply]:
    """A server or proxy that quotes the credentials it got."""
    told = f"bad key Bearer {TOKEN} or {TOKEN} or {PASSWORD}"

    def respond(request: Request) -> Reply:
        reply = Reply({"error": {"message": told}}, status=status)
        for name, value in fields.items():
            setattr(reply, name, value.replace("SAID", told) if isinstance(value, str) else value)
        return reply

    return respond


FAILING: dict[str, Callable[[Request], Reply]] = {
    "401": echoing(401),
    "503": echoing(503),
    "an error with status 200": echoing(200),
    "a page": echoing(200, body=f"{TOKEN} {PASSWORD}".encode(), content_type="text/html"),
    "no JSON": echoing(400, body=f"{TOKEN} {PASSWORD}".encode()),
    "a redirect": echoing(307, headers={"Location": f"http://user:{PASSWORD}@elsewhere:1/x?token={TOKEN}"}),
    "closed without a word": echoing(200, cut=0),
    "hanging": echoing(200, hang=True),
    "cut off": echoing(200, cut=20),
}


@pytest.mark.parametrize("name", FAILING)
def test_no_failure_and_no_log_shows_credentials(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run(server: FaultyServer) -> None:
        url = server.url.replace("http://", f"http://user:{PASSWORD}@")
        options: dict[str, Any] = {"headers": HEADERS, "timeout": 0.3, "retries": Retries(2, 0.0, 0.0)}
        async with SGLangClient(url, **options) as client:
            assert PASSWORD not in repr(client) + client.url
            await client.generate([[1]], ONE)

    with (
        caplog.at_level(logging.INFO),
        warnings.catch_warnings(record=True) as caught,
        FaultyServer(FAILING[name]) as server,
        pytest.raises(GenerateError) as failed,
    ):
        asyncio.run(run(server))
    text = "".join(traceback.format_exception(failed.value)) + caplog.text + "".join(map(str, caught))
    assert "sample 0" in text and TOKEN not in text and PASSWORD not in text


def test_credentials_reach_the_server_and_not_the_samples() -> None:
    seen: list[str] = []

    async def run(server: FaultyServer) -> None:
        async with SGLangClient(server.url.replace("http://", "http://user:p%40ss@")) as client:
            (sample,) = await client.generate([[1]], ONE)
            seen.append(repr(sample))

    with FaultyServer(honest) as server:
        asyncio.run(run(server))
        # base64 of user:p@ss
        assert {request.headers["authorization"] for request in server.requests} == {"Basic dXNlcjpwQHNz"}
        assert server.url in seen[0] and "p@ss" not in seen[0] and "p%40ss" not in seen[0]


LIMIT = 1_000_000
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

    with FaultyServer(respond) as server, pytest.raises(GenerateError, match=says) as caught:
        call(server, lambda client: client.generate([[0], [1], [2]], ONE), retries=2, max_reply_bytes=LIMIT)
    assert {request.headers["accept-encoding"] for request in server.requests} == {"identity"}
    # What was cut off is asked for again, and nothing else.
    attempts = 3 if kind == "connection" else 1
    assert [(at, e.kind, e.attempts) for at, e in caught.value.failures.items()] == [(1, kind, attempts)]
