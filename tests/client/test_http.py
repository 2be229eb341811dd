"""Addresses and credentials: what is no address is refused, and nothing that is shown holds a secret."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import SGLangClient
from mismatch_plugin.sglang.http import shown
from tests.fixtures.faulty_server import FaultyServer, honest

ONE = SamplingParameters(max_new_tokens=1)
PASSWORD = "hunter-2-hunter"


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:30000", "localhost", "ftp://host:1", "", "http://", None, "http://host:0", "http://host:1?x"),
        *(f"http://user:{PASSWORD}@host:99999999", f"http://user:{PASSWORD}@host:1?q", f"user:{PASSWORD}@host:1"),
        *(f"http://user:a/{PASSWORD}@host:1", f"http://user:a?{PASSWORD}@host:1", f"http://user:a#{PASSWORD}@host:1"),
        *(f"http://user:{PASSWORD}@", f"http://user:{PASSWORD}@[::1"),
    ],
)
def test_what_is_no_address_is_refused_without_its_credentials(url: Any) -> None:
    with pytest.raises(ValueError, match="is not a server's address: give it as http://host:port") as caught:
        SGLangClient(url)
    assert repr(shown(str(url))) in str(caught.value)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


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
    assert SGLangClient(url).url == base


def test_credentials_reach_the_server_and_not_the_samples() -> None:
    async def run(server: FaultyServer) -> str:
        async with SGLangClient(server.url.replace("http://", "http://user:p%40ss@")) as client:
            (sample,) = await client.generate([[1]], ONE)
            return repr(sample)

    with FaultyServer(honest) as server:
        told = asyncio.run(run(server))
        # base64 of user:p@ss
        assert {request.headers["authorization"] for request in server.requests} == {"Basic dXNlcjpwQHNz"}
        assert server.url in told and "p@ss" not in told and "p%40ss" not in told
