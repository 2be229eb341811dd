"""Bodies of replies, read in pieces and never further than a limit, whatever a server or a proxy sends."""

from __future__ import annotations

import zlib
from typing import Any

import httpx

ACCEPT_ENCODING = "gzip"
"""The one encoding that is asked for: httpx's own decoders unpack a whole chunk before anybody can count it."""


class BodyTooLarge(Exception):
    """More bytes than allowed, after decompression."""


class BodyGarbled(Exception):
    """Bytes that are not what their Content-Encoding says."""


class BodyCutOff(Exception):
    """A compressed body without its end."""


async def read_body(response: httpx.Response, limit: int) -> bytes:
    """All bytes of a streamed response after decompression. Memory: at most `limit` bytes and one chunk.

    Raises BodyTooLarge, BodyGarbled, BodyCutOff, and what httpx raises while it reads.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise BodyGarbled(f"Content-Encoding {encoding[:40]!r} was not asked for")
    gzip = _Gzip() if encoding.endswith("gzip") else None
    declared = response.headers.get("content-length", "")
    if gzip is None and declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge
    body = bytearray()
    async for chunk in response.aiter_raw():
        try:
            if gzip is None:
                body += chunk
            else:
                gzip.extend(body, chunk, limit)
        except zlib.error as error:
            raise BodyGarbled(str(error)) from None
        if len(body) > limit:
            raise BodyTooLarge
    if gzip is not None and not gzip.whole:
        raise BodyCutOff
    return bytes(body)


class _Gzip:
    """Members of gzip one after another, as RFC 1952 allows, and zeros behind them, as gzip itself ignores."""

    def __init__(self) -> None:
        self._member: Any = None
        self._behind = False  # a member has ended

    @property
    def whole(self) -> bool:
        """Whether all members that began have ended."""
        return self._member is None

    def extend(self, body: bytearray, data: bytes, limit: int) -> None:
        """Add to the body what the data hold, but at most 1 byte beyond the limit. Raises zlib.error."""
        while data and len(body) <= limit:
            if self._member is None:
                data = data.lstrip(b"\0") if self._behind else data
                if not data:
                    return
                self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            # At least 1: zlib takes 0 for "no limit".
            body += self._member.decompress(data, limit - len(body) + 1)
            data = self._member.unused_data
            if self._member.eof:
                self._member, self._behind = None, True
