"""HTTP to one server: bounded attempts with backoff on what may pass, none on what will not."""

from __future__ import annotations

import asyncio
import base64
import json as jsonlib
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import aiohttp
from pydantic_core import from_json
from yarl import URL

_KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is not used again: less than the server's 5, or the two would race."""
MAX_REPLY_BYTES = 2**28
"""Far more than a sensible reply (128k tokens with log-probs are 8 MB), far less than a machine's memory."""
_MOST_BREAKS = 3
"""A request is sent so often at most if its connection breaks each time before an answer: it may be what brings the
server down, and every server behind a router in turn."""
_NOT_AGAIN = (
    ". It is not sent again: it may be what brings the server down, as a token id outside its vocabulary does "
    "(vocab_size of SGLangClient refuses those)"
)
_PASSING = ("connection", "timeout", "server_error")
_SHORTEST_SECRET = 4
_HIDDEN = "***"

FailureKind = Literal[
    "connection",  # refused, reset, or closed in the middle
    "timeout",  # no whole answer within the time of one attempt
    "deadline",  # the time of the whole batch was over
    "closed",  # the client was closed before an answer came
    "server_error",  # status 5xx
    "refused",  # status 4xx: asking again would not help
    "content",  # a 2xx or 3xx that is no JSON reply
    "reply",  # JSON that does not fit the request: log-probs lost, length changed, …
    "log_probs",  # an invalid log-prob, under the policy `error`
    "weights",  # sampled from others than this client's last update brought
]


class RequestError(RuntimeError):
    """One request that failed for good. attempts: how often it was sent; status: of the last answer, if any."""

    def __init__(self, kind: FailureKind, message: str, attempts: int = 0, status: int | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message, self.attempts, self.status = message, attempts, status


class _Broken(RequestError):
    """The connection was lost after the request was sent, or while it was, and before any answer."""


@dataclass(frozen=True)
class Retries:
    """After attempt k (from 0) wait uniformly between half and all of min(longest, first · 2^k) seconds."""

    attempts: int = 5
    first: float = 0.5
    longest: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first < 0 or self.longest < self.first:
            raise ValueError(f"{self}: attempts must be at least 1, and 0 ≤ first ≤ longest.")

    def delay(self, attempt: int) -> float:
        """Seconds to wait after a failed attempt. The random part keeps many requests from coming back at once."""
        return min(self.longest, self.first * 2.0 ** min(attempt, 99)) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Answer:
    """A JSON answer (None for an empty body) and after how many attempts it came."""

    json: Any
    attempts: int


class Server:
    """HTTP to one base URL; parameters and what they raise: see `SGLangClient`.

    No message holds credentials, neither those of URL and headers nor a server's echo of them.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        headers: Mapping[str, str] | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        if not timeout > 0 or not connect_timeout > 0:
            raise ValueError(f"timeout={timeout} and connect_timeout={connect_timeout} must be positive seconds.")
        if max_reply_bytes < 1:
            raise ValueError(f"max_reply_bytes={max_reply_bytes} must be at least 1.")
        self.url, user, password = _parse_address(url)
        self.timeout, self.connect_timeout, self._limit = timeout, connect_timeout, max_reply_bytes
        self._headers, secrets = dict(headers or {}), {password or user}
        for name, value in self._headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError("headers: a name that HTTP does not allow; names are letters, digits and hyphens.")
            if not isinstance(value, str) or not re.fullmatch(r"[\x20-\x7e\t]*", value):
                raise ValueError(f"headers[{name!r}] is not one line of ASCII text: HTTP cannot send it.")
            secrets |= {value, *value.split()[1:]}  # "Bearer abc": abc alone too
        if user or password:
            basic = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {basic}"
            secrets.add(basic)
        self._secrets = sorted((value for value in secrets if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._session: aiohttp.ClientSession | None = None  # made where an event loop runs
        self._closed = False

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def redacted(self, text: str) -> str:
        """A text that others wrote, such as a server's error message, without the credentials of this client."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return text

    async def call(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        request_id: str | None = None,
        retries: Retries,
        deadline: float | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request until it is answered.

        Tried again: no connection, a connection lost, no whole answer within `timeout`, status 5xx, and JSON that is
        cut off. Not tried again: 4xx, redirects, an answer that is not JSON by its content type or larger than
        `max_reply_bytes`, a request whose connection broke three times before any answer came, and any request once
        the client is closed.

        Args:
            request_id: sent as `rid` with the number of the attempt (from 1) behind it: the server may still be busy
                with a request that was given up, and refuses an id that it is busy with.
            deadline: point of `time.monotonic()` after which nothing is sent and nothing awaited.
            timeout: seconds for one attempt, from sending to the last byte.

        Raises:
            RequestError: with the last reason, once no attempt is left.
        """
        where, limit = f"{method} {path}", self.timeout if timeout is None else timeout
        until = float("inf") if deadline is None else deadline
        attempts = breaks = 0
        error: RequestError | None = None
        while attempts < retries.attempts:
            if attempts:
                await asyncio.sleep(max(0.0, min(retries.delay(attempts - 1), until - time.monotonic())))
            if (left := until - time.monotonic()) <= 0:
                break
            attempts += 1
            if request_id is not None:
                json = {**json, "rid": f"{request_id}-{attempts}"}
            try:
                return Answer(await self._once(method, path, json, min(limit, left)), attempts)
            except asyncio.TimeoutError:
                if left <= limit:
                    break
                error = RequestError("timeout", f"no answer to {where} within {limit:g} s", attempts)
            except RequestError as failed:
                breaks += isinstance(failed, _Broken)
                message = f"{where}: {failed.message}"
                if failed.kind == "connection" and breaks:
                    often = f" {breaks} times" if breaks > 1 else ""
                    message += f"; the connection broke{often} with this request under way"
                if breaks == _MOST_BREAKS:
                    message += _NOT_AGAIN
                error = RequestError(failed.kind, message, attempts - (failed.kind == "closed"), failed.status)
                if failed.kind not in _PASSING or breaks == _MOST_BREAKS:
                    raise error from None
        else:
            assert error is not None
            raise error
        before, status = ("", None) if error is None else (f"; before that: {error.message}", error.status)
        raise RequestError("deadline", f"{where}: the deadline passed{before}", attempts, status)

    async def _once(self, method: str, path: str, json: Any, seconds: float) -> Any:
        """One attempt: the answer's JSON. Raises RequestError without number of attempts, or asyncio.TimeoutError."""
        if self._closed:
            raise RequestError("closed", "this client is closed: open another one for further requests")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Replies are read up to a limit, which nobody could count inside of a compressed one.
                headers={**self._headers, "Accept-Encoding": "identity"},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
                auto_decompress=False,
            )
        wait = aiohttp.ClientTimeout(total=seconds, sock_connect=self.connect_timeout)
        answered = False
        try:
            async with self._session.request(
                method, self.url + path, json=json, timeout=wait, allow_redirects=False
            ) as response:
                answered = True
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > self._limit:
                        raise RequestError(
                            "content",
                            f"an answer of more than {self._limit} bytes: raise max_reply_bytes of SGLangClient if it "
                            f"is meant to be so large, or ask for less (return_sampling_mask, max_new_tokens)",
                        )
                return self._json(response, bytes(body))
        except aiohttp.ServerTimeoutError:
            message = f"no connection to {self.url} within {self.connect_timeout:g} s"
            raise RequestError("timeout", message) from None
        except aiohttp.ClientError as lost:
            not_sent = isinstance(lost, aiohttp.ClientConnectorError)
            kind = RequestError if answered or not_sent else _Broken
            raise kind("connection", f"{self.url}: {self.redacted(str(lost)) or type(lost).__name__}") from None

    def _json(self, response: aiohttp.ClientResponse, body: bytes) -> Any:
        status = response.status
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        media = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if encoding not in ("", "identity"):
            raise RequestError("content", f"Content-Encoding {encoding[:40]!r} was not asked for", status=status)
        if status >= 400:
            kind = "server_error" if status >= 500 else "refused"
            raise RequestError(kind, f"status {status}, {self._error_message(body)}", status=status)
        if status >= 300:
            target = self.redacted(shown(response.headers.get("Location", "nowhere")))
            message = f"status {status}, a redirect to {target}; give the server's own address"
            raise RequestError("content", message, status=status)
        if not body:
            return None
        if media and media != "application/json":
            message = f"content type {media} instead of JSON, {self._begin(body, 80)}: is this an SGLang server?"
            raise RequestError("content", message, status=status)
        with suppress(ValueError):  # a third of the time; what it does not take, Python's names
            return from_json(body)
        try:
            return jsonlib.loads(body)
        except (ValueError, RecursionError) as error:
            kind, fault = "content", f"JSON that cannot be read ({error})"
            if isinstance(error, UnicodeDecodeError) and error.reason != "unexpected end of data":
                fault = f"JSON that is not {error.encoding}, from byte {error.start} on"
            elif isinstance(error, (UnicodeDecodeError, jsonlib.JSONDecodeError)):
                kind, fault = "connection", f"JSON cut off after {len(body)} bytes"
            raise RequestError(kind, fault, status=status) from None

    def _error_message(self, body: bytes) -> str:
        """The server's message in an error answer, or the beginning of whatever it is."""
        try:
            told = jsonlib.loads(body)
        except (ValueError, RecursionError):
            return self._begin(body, 200)
        if isinstance(told, dict):
            error = told.get("error", told.get("message", told))
            told = error.get("message", error) if isinstance(error, dict) else error
        return self.redacted(str(told))[:500]

    def _begin(self, body: bytes, length: int) -> str:
        return repr(self.redacted(body[:10_000].decode("utf-8", errors="replace"))[:length])


def _parse_address(url: str) -> tuple[str, str, str]:
    """The address without credentials; user and password, empty without. No error of others, which may quote them."""
    with suppress(ValueError, TypeError, AttributeError):
        parts = urlsplit(url)
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        host = URL(bare).raw_host and str(parts.hostname).encode("idna")  # as the resolver will
        odd = re.search(r"[\x00-\x20\x7f\\]", url) or parts.query or parts.fragment or parts.port == 0
        if host and not odd and parts.scheme in ("http", "https"):
            return bare, unquote(parts.username or ""), unquote(parts.password or "")
    raise ValueError(
        f"url {shown(str(url))!r} is not a server's address: give it as http://host:port, without a query; tokens go "
        f"into headers."
    )


def shown(url: str) -> str:
    """The address for a message: without user, password, query and fragment, whatever else is wrong with it."""
    start = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|//", url)
    scheme = start.group() if start else ""
    head, *tail = re.split(r"[?#]", url[len(scheme) :], maxsplit=1)
    if tail and "@" in tail[0]:
        return scheme + _HIDDEN  # a password with a question mark, or a query with an @: nobody can tell
    return (scheme + head.rpartition("@")[2])[:200]
