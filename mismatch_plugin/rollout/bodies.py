"""Bodies of replies, never read further than a limit, whatever a server or a proxy sends."""

from __future__ import annotations

import gzip
import io
import zlib

import httpx

from mismatch_plugin.rollout.outcomes import RequestError

ACCEPT_ENCODING = "gzip"
"""The one encoding that is asked for: httpx's own decoders unpack a whole chunk before anybody can count it."""

_GZIP_OVERHEAD = 1024
"""Bytes by which a compressed body may be longer than what it holds."""


async def read_body(response: httpx.Response, limit: int) -> bytes:
    """All bytes of a streamed response after decompression. Memory: at most three times `limit`.

    Raises RequestError of kind `content` for more than `limit` bytes and for bytes that are not what their
    Content-Encoding says, `connection` for a compressed body without its end; and what httpx raises while it reads.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise _undecodable(f"Content-Encoding {encoding[:40]!r} was not asked for")
    zipped = encoding.endswith("gzip")
    longest = limit + _GZIP_OVERHEAD if zipped else limit
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > longest:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > longest:
            raise _too_large(limit)
    if not zipped:
        return bytes(body)
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
    except EOFError:
        raise RequestError("connection", "compressed answer cut off") from None
    except (OSError, zlib.error) as error:
        raise _undecodable(str(error)) from None
    if len(content) > limit:
        raise _too_large(limit)
    return content


def _undecodable(reason: str) -> RequestError:
    return RequestError("content", f"an answer that cannot be decoded ({reason})")


def _too_large(limit: int) -> RequestError:
    return RequestError(
        "content",
        f"an answer of more than {limit} bytes after decompression: raise max_reply_bytes of SGLangClient if it is "
        f"meant to be so large, or ask for less (top_log_probs, return_sampling_mask, max_new_tokens)",
    )
