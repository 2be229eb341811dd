"""HTTP to one server: bounded attempts with backoff on what may pass, none on what will not."""

from __future__ import annotations

import asyncio
import json as jsonlib
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from mismatch_plugin.rollout.address import Redactor, check_headers, parse_address, shown
from mismatch_plugin.rollout.bodies import ACCEPT_ENCODING, read_body
from mismatch_plugin.rollout.outcomes import RequestError

_KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is not used again: less than the server's 5, or the two would race."""
MAX_REPLY_BYTES = 2**28
"""Far more than a sensible reply (128k tokens with log-probs are 8 MB), far less than a machine's memory."""
_MOST_BREAKS = 3
"""A request is sent so often at most if its connection breaks each time before an answer: it may be what brings the
server down, and every server behind a router in turn."""
_PASSING = ("connection", "timeout", "server_error")


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
        return min(self.longest, self.first * 2.0 ** min(attempt, 99)) * chance.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Answer:
    """A JSON answer (None for an empty body) and after how many attempts it came."""

    json: Any
    attempts: int


class Transport:
    """HTTP to one base URL; it follows no redirect and reads no proxy from the environment.

    Requests that generate each hold one of `concurrency` slots. Control requests need none: a pause must not wait for
    what it is to pause. No message holds credentials, neither those of URL and headers nor a server's echo of them.

    httpx's pool looks through all of its connections for each request, and a request that is cancelled between
    connecting and sending leaves a connection there that is neither used nor freed. So a connection is an httpx client
    of its own, in the hands of one request at a time, and closed with whatever ends one but an answer.

    Raises ValueError for an address or headers that HTTP has no use for.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        timeout: float,
        connect_timeout: float,
        headers: Mapping[str, str],
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        address = parse_address(url)
        if max_reply_bytes < 1:
            raise ValueError(f"max_reply_bytes={max_reply_bytes} must be at least 1.")
        self.url, self.timeout, self.connect_timeout = address.url, timeout, connect_timeout
        self._auth, self._headers, self._limit = address.auth, check_headers(headers), max_reply_bytes
        self.redacted = Redactor(self._auth, self._headers)
        self._chance = random.Random()
        self._certificates = httpx.create_ssl_context()
        self._slots = asyncio.Semaphore(concurrency)
        self._idle: list[httpx.AsyncClient] = []
        self._busy: set[httpx.AsyncClient] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Close all connections; a peer that does not answer to that is waited for `connect_timeout` at most."""
        self._closed = True
        for client in (*self._idle, *self._busy):
            self._close_soon(client)
        self._idle.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=self.connect_timeout)

    @asynccontextmanager
    async def slot(self, deadline: float | None) -> AsyncIterator[None]:
        """One of the slots, once one is free. Raises RequestError if none is before `deadline` (time.monotonic)."""
        try:
            with anyio.fail_after(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._slots.acquire()
        except TimeoutError:
            raise RequestError("deadline", "the deadline passed before a lane was free") from None
        try:
            yield
        finally:
            self._slots.release()

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
        error: RequestError | None = None
        attempts = breaks = 0
        while attempts < retries.attempts:
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            attempts += 1
            if request_id is not None:
                json = {**json, "rid": f"{request_id}-{attempts}"}
            try:
                with anyio.fail_after(min(limit, left)):
                    return Answer(await self._once(method, path, json), attempts)
            except TimeoutError:
                if left <= limit:
                    break
                error = RequestError("timeout", f"no answer to {where} within {limit:g} s", attempts)
            except RequestError as failed:
                breaks += isinstance(failed, _Broken)
                message = f"{where}: {failed.message}{_broke(breaks) if failed.kind == 'connection' else ''}"
                error = RequestError(failed.kind, message, attempts - (failed.kind == "closed"), failed.status)
                if failed.kind not in _PASSING or breaks == _MOST_BREAKS:
                    raise error from None
            if attempts < retries.attempts:
                wait = retries.delay(attempts - 1, self._chance)
                left = wait if deadline is None else max(0.0, deadline - time.monotonic())
                await asyncio.sleep(min(wait, left))
        else:
            assert error is not None
            raise error
        before, status = ("", None) if error is None else (f"; before that: {error.message}", error.status)
        raise RequestError("deadline", f"{where}: the deadline passed{before}", attempts, status)

    async def _once(self, method: str, path: str, json: Any) -> Any:
        """One attempt: the answer's JSON. Raises RequestError without number of attempts."""
        async with self._connection() as client:
            try:
                response = await client.send(client.build_request(method, path, json=json), stream=True)
            except httpx.TimeoutException:
                message = f"no connection to {self.url} within {self.connect_timeout:g} s"
                raise RequestError("timeout", message) from None
            except httpx.ConnectError as lost:  # nothing was sent
                raise RequestError("connection", self._reason(lost)) from None
            except httpx.TransportError as lost:
                raise _Broken("connection", self._reason(lost)) from None
            try:
                body = await read_body(response, self._limit)
            except httpx.TransportError as lost:
                raise RequestError("connection", self._reason(lost)) from None
            finally:
                await response.aclose()
        return self._json(response, body)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """A connection of one's own; it is used again only if the block ends without an exception or cancellation."""
        if self._closed:
            raise RequestError("closed", "this client is closed: open another one for further requests")
        client = self._idle.pop() if self._idle else self._new_client()
        self._busy.add(client)
        try:
            yield client
            self._idle.append(client)
        except BaseException:
            self._close_soon(client)
            raise
        finally:
            self._busy.discard(client)

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            auth=self._auth,
            headers={**self._headers, "Accept-Encoding": ACCEPT_ENCODING},
            # `call` times whole attempts; a wait for a client's only connection would be a bug, and must end.
            timeout=httpx.Timeout(None, connect=self.connect_timeout, pool=self.connect_timeout),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE),
            verify=self._certificates,
            follow_redirects=False,
            trust_env=False,
        )

    def _close_soon(self, client: httpx.AsyncClient) -> None:
        """Close a connection, whatever is under way on it, in a task of its own, which no cancellation stops."""
        task = asyncio.get_running_loop().create_task(_close(client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _json(self, response: httpx.Response, body: bytes) -> Any:
        status = response.status_code
        if status >= 400:
            kind = "server_error" if status >= 500 else "refused"
            raise RequestError(kind, f"status {status}, {self._told(body)}", status=status)
        if status >= 300:
            target = self.redacted(shown(response.headers.get("location", "nowhere")))
            message = f"status {status}, a redirect to {target}; give the server's own address"
            raise RequestError("content", message, status=status)
        if not body:
            return None
        media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media and media != "application/json":
            message = f"content type {media} instead of JSON, {self._begin(body, 80)}: is this an SGLang server?"
            raise RequestError("content", message, status=status)
        try:
            return jsonlib.loads(body)
        except RecursionError:
            fault = "JSON nested too deeply"
        except UnicodeDecodeError as error:
            cut = error.reason == "unexpected end of data"
            fault = None if cut else f"JSON that is not {error.encoding}, from byte {error.start} on"
        except jsonlib.JSONDecodeError:
            fault = None
        except ValueError as error:
            fault = f"JSON that cannot be read ({error})"
        if fault is None:
            raise RequestError("connection", f"JSON cut off after {len(body)} bytes", status=status)
        raise RequestError("content", fault, status=status)

    def _told(self, body: bytes) -> str:
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

    def _reason(self, lost: httpx.TransportError) -> str:
        return f"{self.url}: {self.redacted(str(lost)) or type(lost).__name__}"


class _Broken(RequestError):
    """The connection was lost after the request was sent, or while it was, and before any answer."""


def _broke(times: int) -> str:
    if not times:
        return ""
    often = f" {times} times" if times > 1 else ""
    last = times == _MOST_BREAKS
    return f"; the connection broke{often} with this request under way" + last * (
        ". It is not sent again: it may be what brings the server down, as a token id outside its vocabulary does "
        "(vocab_size of SGLangClient refuses those)"
    )


async def _close(client: httpx.AsyncClient) -> None:
    # It was given up, so nobody needs to know.
    with suppress(OSError, RuntimeError, httpx.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        await client.aclose()
