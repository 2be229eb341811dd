"""HTTP to one server: bounded attempts with backoff on what may pass, none on what will not."""

from __future__ import annotations

import asyncio
import base64
import json as jsonlib
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import aiohttp
from pydantic_core import from_json

_KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is not used again: less than the server's 5, or the two would race."""
_PASSING = ("connection", "timeout", "server_error")
_SHORTEST_SECRET = 4
_HIDDEN = "***"

FailureKind = Literal[
    "connection",  # refused, reset, or closed in the middle
    "timeout",  # no whole answer within the time of one attempt
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
    ) -> None:
        if not timeout > 0 or not connect_timeout > 0:
            raise ValueError(f"timeout={timeout} and connect_timeout={connect_timeout} must be positive seconds.")
        self.url, user, password = _parse_address(url)
        self.timeout, self.connect_timeout = timeout, connect_timeout
        self._headers, secrets = dict(headers or {}), {password or user}
        for value in self._headers.values():
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
        retries: Retries,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request until it is answered.

        Tried again: no connection, a connection lost, no whole answer within `timeout`, status 5xx. Not tried again:
        4xx, redirects, an answer that is not JSON, and any request once the client is closed.

        Args:
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
            if error.kind not in _PASSING or attempt == retries.attempts:
                raise error from None
            await asyncio.sleep(retries.delay(attempt - 1))

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
                return self._json(response, await response.read())
        except aiohttp.ServerTimeoutError:
            message = f"no connection to {self.url} within {self.connect_timeout:g} s"
            raise RequestError("timeout", message) from None
        except aiohttp.ClientError as lost:
            raise RequestError("connection", f"{self.url}: {self.redacted(str(lost)) or type(lost).__name__}") from None

    def _json(self, response: aiohttp.ClientResponse, body: bytes) -> Any:
        status = response.status
        begin = repr(self.redacted(body[:10_000].decode("utf-8", errors="replace"))[:200])
        if status >= 400:
            kind = "server_error" if status >= 500 else "refused"
            raise RequestError(kind, f"status {status}, {self._error_message(body) or begin}", status=status)
        if status >= 300:
            target = self.redacted(shown(response.headers.get("Location", "nowhere")))
            message = f"status {status}, a redirect to {target}; give the server's own address"
            raise RequestError("content", message, status=status)
        if not body:
            return None
        with suppress(ValueError):  # a third of the time; what it does not take, Python's may
            return from_json(body)
        try:
            return jsonlib.loads(body)
        except ValueError as error:
            message = f"no JSON ({error}) but {begin}: is this an SGLang server?"
            raise RequestError("content", message, status=status) from None

    def _error_message(self, body: bytes) -> str:
        """The server's message in an error answer; "" if it has no form that is known."""
        try:
            told = jsonlib.loads(body)
        except ValueError:
            return ""
        if isinstance(told, dict):
            error = told.get("error", told.get("message", told))
            told = error.get("message", error) if isinstance(error, dict) else error
        return self.redacted(str(told))[:500]


def _parse_address(url: str) -> tuple[str, str, str]:
    """The address without credentials; user and password, empty without. No error of others, which may quote them."""
    with suppress(ValueError, TypeError, AttributeError):
        parts = urlsplit(url)
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        odd = parts.query or parts.fragment or parts.port == 0 or re.search(r"\s", url)
        if parts.hostname and not odd and parts.scheme in ("http", "https"):
            return bare, unquote(parts.username or ""), unquote(parts.password or "")
    raise ValueError(
        f"url {shown(str(url))!r} is not a server's address: give it as http://host:port, without a query; tokens go "
        f"into headers."
    )


def shown(url: str) -> str:
    """The address for a message: without user, password, query and fragment, whatever else is wrong with it."""
    if "@" in url and re.search(r"[?#]", url):
        return _HIDDEN  # a password with a question mark, or a query with an @: nobody can tell
    return re.sub(r"^(\w+://)?.*@", r"\1", re.split(r"[?#]", url)[0])[:200]
