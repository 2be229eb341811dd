"""HTTP to one server: bounded attempts with backoff on what may pass, none on what will not."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
from pydantic_core import from_json

_KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is not used again: less than the server's 5, or the two would race."""
_PASSING = ("connection", "timeout", "server_error")
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds. After attempt k (from 1): a random time between half and all of min(longest, first · 2^(k − 1))."""

FailureKind = Literal[
    "connection",  # refused, reset, or closed in the middle
    "timeout",  # no whole answer within the time of one attempt
    "closed",  # the client was closed before an answer came
    "server_error",  # status 5xx
    "refused",  # status 4xx: asking again would not help
    "content",  # a 2xx or 3xx that is no JSON reply
    "reply",  # JSON that does not fit the request: log-probs lost, length changed, …
    "weights",  # sampled from others than this client's last update brought
]


class RequestError(RuntimeError):
    """One request that failed for good. attempts: how often it was sent; status: of the last answer, if any."""

    def __init__(self, kind: FailureKind, message: str, attempts: int = 0, status: int | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message, self.attempts, self.status = message, attempts, status


@dataclass(frozen=True)
class Answer:
    """A JSON answer (None for an empty body) and after how many attempts it came."""

    json: Any
    attempts: int


class Server:
    """HTTP to one base URL; parameters and what they raise: see `SGLangClient`."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = _parse_address(url)
        self.timeout, self.connect_timeout, self._headers = timeout, connect_timeout, headers
        self._session: aiohttp.ClientSession | None = None  # made where an event loop runs
        self._closed = False

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        attempts: int = 1,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request until it is answered.

        Tried again: no connection, a connection lost, no whole answer within `timeout`, status 5xx. Not tried again:
        4xx, redirects, an answer that is not JSON, and any request once the client is closed.

        Args:
            attempts: how often it is sent at most.
            request_id: sent as `rid` with the number of the attempt (from 1) behind it: the server may still be busy
                with a request that was given up, and refuses an id that it is busy with.
            timeout: seconds for one attempt, from sending to the last byte.

        Raises:
            RequestError: with the last reason, once no attempt is left.
        """
        where, limit = f"{method} {path}", self.timeout if timeout is None else timeout
        attempt = 0
        while True:
            attempt += 1
            if request_id is not None:
                json = {**json, "rid": f"{request_id}-{attempt}"}
            try:
                return Answer(await self._once(method, path, json, limit), attempt)
            except asyncio.TimeoutError:
                error = RequestError("timeout", f"no answer to {where} within {limit:g} s", attempt)
            except RequestError as failed:
                sent = attempt - (failed.kind == "closed")
                error = RequestError(failed.kind, f"{where}: {failed.message}", sent, failed.status)
            if error.kind not in _PASSING or attempt >= attempts:
                raise error from None
            longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (attempt - 1))
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # many requests must not come back at once

    async def _once(self, method: str, path: str, json: Any, seconds: float) -> Any:
        """One attempt: the answer's JSON. Raises RequestError without number of attempts, or asyncio.TimeoutError."""
        if self._closed:
            raise RequestError("closed", "this client is closed: open another one for further requests")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        wait = aiohttp.ClientTimeout(total=seconds, sock_connect=self.connect_timeout)
        sending = self._session.request(method, self.url + path, json=json, timeout=wait, allow_redirects=False)
        try:
            async with sending as response:
                return _json(response, await response.read())
        except aiohttp.ServerTimeoutError:
            message = f"no connection to {self.url} within {self.connect_timeout:g} s"
            raise RequestError("timeout", message) from None
        except aiohttp.ClientError as lost:
            raise RequestError("connection", f"{self.url}: {lost or type(lost).__name__}") from None


def _json(response: aiohttp.ClientResponse, body: bytes) -> Any:
    """What a server answered; None for an empty body."""
    status, begin = response.status, repr(body[:200].decode(errors="replace"))
    told, problem = None, ""
    try:
        told = from_json(body) if body else None
    except ValueError as error:
        problem = f"no JSON ({error}) but {begin}: is this an SGLang server?"
    if status >= 400:
        kind = "server_error" if status >= 500 else "refused"
        raise RequestError(kind, f"status {status}, {_error_message(told) or begin}", status=status)
    if status >= 300:
        target = shown(response.headers.get("Location", "nowhere"))
        problem = f"status {status}, a redirect to {target}; give the server's own address"
    if problem:
        raise RequestError("content", problem, status=status)
    return told


def _error_message(told: Any) -> str:
    """The server's message in an error answer; "" if there is none."""
    if isinstance(told, dict):
        told = told.get("error", told.get("message", told))
    if isinstance(told, dict):
        told = told.get("message", told)
    return str(told or "")[:500]


def _parse_address(url: str) -> str:
    """Without a slash at its end. Raises an error of ours: those of others may quote a password."""
    with suppress(ValueError, TypeError, AttributeError):
        parts = urlsplit(url)
        odd = parts.query or parts.fragment or parts.port == 0 or re.search(r"[\s@]", url)
        if parts.hostname and not odd and parts.scheme in ("http", "https"):
            return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    raise ValueError(
        f"url {shown(str(url))!r} is not a server's address: give it as http://host:port, without a query or password; "
        f"tokens go into headers."
    )


def shown(url: str) -> str:
    """The address for a message: without query, fragment and what may be a password."""
    return "***" if "@" in url else re.split(r"[?#]", url)[0][:200]
