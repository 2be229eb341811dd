"""Addresses: what is none is refused, and the message holds no secret."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from mismatch_plugin.sglang.client import SGLangClient
from mismatch_plugin.sglang.http import shown

PASSWORD = "hunter-2-hunter"


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:30000", "localhost", "ftp://host:1", "", "http://", None, "http://host:0", "http://host:1?x"),
        *(f"http://user:{PASSWORD}@host:99999999", f"http://user:{PASSWORD}@host:1?q", f"user:{PASSWORD}@host:1"),
        *(f"http://user:a/{PASSWORD}@host:1", f"http://user:a?{PASSWORD}@host:1", f"http://user:a#{PASSWORD}@host:1"),
        *(f"http://user:{PASSWORD}@", f"http://user:{PASSWORD}@[::1", f"http://{PASSWORD}@host:1"),
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
        ("HTTP://host_with_underscore:1", "http://host_with_underscore:1"),
    ],
)
def test_addresses_are_kept(url: str, base: str) -> None:
    assert SGLangClient(url).url == base
