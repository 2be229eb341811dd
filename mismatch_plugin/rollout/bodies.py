"""Bodies of replies, read in pieces and never further than a limit, whatever a server or a proxy sends."""

from __future__ import annotations

import zlib

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
    inflate = zlib.decompressobj(16 + zlib.MAX_WBITS) if encoding.endswith("gzip") else None
    declared = response.headers.get("content-length", "")
    if inflate is None and declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge
    body = bytearray()
    async for chunk in response.aiter_raw():
        try:
            # At least 1: zlib takes 0 for "no limit".
            body += chunk if inflate is None else inflate.decompress(chunk, limit - len(body) + 1)
        except zlib.error as error:
            raise BodyGarbled(str(error)) from None
        if len(body) > limit:
            raise BodyTooLarge
    if inflate is not None and not inflate.eof and body:
        raise BodyCutOff
    return bytes(body)
