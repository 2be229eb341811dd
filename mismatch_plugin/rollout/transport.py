"""HTTP to one server: bounded attempts with backoff on what may pass, none on what will not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from mismatch_plugin.rollout.outcomes import FailureKind, RequestError

_KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is not used again: less than the server's 5, or the two would race."""


@dataclass(frozen=True)
class Retries:
    """After attempt k (from 0) wait uniformly between half and all of min(longest, first · 2^k) seconds."""

    attempts: int = 5
    first: float = 0.5
    longest: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first < 0 or self.longest < self.first:
            raise ValueError(f"{self}: attempts must be at least 1, and 0 ≤ first ≤ longest.")

    def delay(self, attempt: int, chance: random.Random) -> float:
        """Seconds to wait after a failed attempt. The random part keeps many requests from coming back at once."""
        longest = self.longest if attempt >= 30 else min(self.longest, self.first * 2**attempt)
        return longest * (0.5 + 0.5 * chance.random())


@dataclass(frozen=True)
class Answer:
    """A JSON answer (None for an empty body) and after how many attempts it came."""

    json: Any
    attempts: int


class Transport:
    """HTTP to one base URL; it follows no redirect and reads no proxy from the environment.

    Requests that generate go over lanes of one connection each: httpx's own pool looks through all connections for
    each request. Control requests have connections beside them: a pause must not wait for what it is to pause.
    """

    def __init__(
        self, url: str, *, lanes: int, timeout: float, connect_timeout: float, headers: dict[str, str]
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url {url!r} is no server's address: give it as http://host:port.")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._connect_timeout, self._headers = connect_timeout, headers
        self._chance = random.Random()
        self._certificates = httpx.create_ssl_context()
        self._slots = asyncio.Semaphore(lanes)
        self._control = self._client(connections=None)
        self._lanes: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    def _client(self, connections: int | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=self._connect_timeout),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=_KEEP_ALIVE),
            verify=self._certificates,
            follow_redirects=False,
            trust_env=False,
        )

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[httpx.AsyncClient]:
        """A connection of one's own, once one is free."""
        async with self._slots:
            if not self._free:
                self._free.append(self._client(connections=1))
                self._lanes.append(self._free[-1])
            client = self._free.pop()
            try:
                yield client
            finally:
                self._free.append(client)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in (self._control, *self._lanes)))

    async def call(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        request_id: str | None = None,
        lane: httpx.AsyncClient | None = None,
        retries: Retries,
        deadline: float | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request until it is answered.

        Tried again: no connection, a connection lost, no whole answer within `timeout`, status 5xx, and JSON that is
        cut off. Not tried again: 4xx, redirects, an answer that is not JSON by its content type.

        Args:
            request_id: sent as `rid` with the number of the attempt (from 1) behind it: the server may still be busy
                with a request that was given up, and refuses an id that it is busy with.
            lane: the connection to use; None: one for control.
            deadline: point of `time.monotonic()` after which nothing is sent and nothing awaited.
            timeout: seconds for one attempt, from sending to the last byte.

        Raises:
            RequestError: with the last reason, once no attempt is left.
        """
        client = lane or self._control
        timeout = self.timeout if timeout is None else timeout
        error: RequestError | None = None
        for attempt in range(retries.attempts):
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            if request_id is not None:
                json = {**json, "rid": f"{request_id}-{attempt + 1}"}
            try:
                response = await asyncio.wait_for(client.request(method, path, json=json), min(timeout, left))
                return Answer(self._json(response, attempt + 1), attempt + 1)
            except RequestError as failed:
                if failed.kind not in ("server_error", "connection"):
                    raise
                error = failed
            except (asyncio.TimeoutError, httpx.TimeoutException) as late:
                if left <= timeout and not isinstance(late, httpx.TimeoutException):
                    raise _too_late(method, path, attempt + 1, error) from None
                error = RequestError("timeout", f"no answer to {method} {path} within {timeout:g} s", attempt + 1)
            except httpx.DecodingError as garbled:
                message = f"{method} {self.url}{path}: an answer that cannot be decoded ({garbled})"
                raise RequestError("content", message, attempt + 1) from None
            except httpx.TransportError as lost:
                reason = str(lost) or type(lost).__name__
                error = RequestError("connection", f"{method} {self.url}{path}: {reason}", attempt + 1)
            if attempt + 1 < retries.attempts:
                wait = retries.delay(attempt, self._chance)
                if deadline is not None:
                    wait = min(wait, max(0.0, deadline - time.monotonic()))
                await asyncio.sleep(wait)
        else:
            assert error is not None
            raise error
        raise _too_late(method, path, 0 if error is None else error.attempts, error)

    def _json(self, response: httpx.Response, attempts: int) -> Any:
        status = response.status_code
        where = f"{response.request.method} {response.request.url.path}"
        if status >= 400:
            kind: FailureKind = "server_error" if status >= 500 else "refused"
            raise RequestError(kind, f"{where}: status {status}, {_told(response)}", attempts, status)
        if status >= 300:
            target = response.headers.get("location", "nowhere")
            message = f"{where}: status {status}, a redirect to {target}; give the server's own address"
            raise RequestError("content", message, attempts, status)
        if not response.content:
            return None
        media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media and media != "application/json":
            message = (
                f"{where}: content type {media} instead of JSON, {response.text[:80]!r}: is this an SGLang server?"
            )
            raise RequestError("content", message, attempts, status)
        try:
            return response.json()
        except RecursionError:
            raise RequestError("content", f"{where}: JSON nested too deeply", attempts, status) from None
        except ValueError:
            message = f"{where}: JSON cut off after {len(response.content)} bytes"
            raise RequestError("connection", message, attempts, status) from None


def _too_late(method: str, path: str, attempts: int, before: RequestError | None) -> RequestError:
    reason = "" if before is None else f"; before that: {before.message}"
    status = None if before is None else before.status
    return RequestError("deadline", f"{method} {path}: the deadline passed{reason}", attempts, status)


def _told(response: httpx.Response) -> str:
    """The server's message in an error answer, or the beginning of whatever it is."""
    try:
        body = response.json()
    except ValueError:
        return repr(response.text[:200])
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body))
        body = error.get("message", error) if isinstance(error, dict) else error
    return str(body)[:500]
