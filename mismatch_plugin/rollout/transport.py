"""HTTP to one server: bounded attempts with backoff on what may pass, none on what will not."""

from __future__ import annotations

import asyncio
import json as jsonlib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from mismatch_plugin.rollout.address import Redactor, check_headers, parse_address, shown
from mismatch_plugin.rollout.bodies import ACCEPT_ENCODING, BodyCutOff, BodyGarbled, BodyTooLarge, read_body
from mismatch_plugin.rollout.lanes import Lane, Lanes
from mismatch_plugin.rollout.outcomes import FailureKind, RequestError

_KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is not used again: less than the server's 5, or the two would race."""
MAX_REPLY_BYTES = 2**28
"""Far more than a sensible reply (128k tokens with log-probs are 8 MB), far less than a machine's memory."""
_MOST_BREAKS = 3
"""A request is sent so often at most if its connection breaks each time before an answer: it may be what brings the
server down, and every server behind a router in turn."""


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

    Requests that generate share `lanes` lanes. Control requests have lanes of their own: a pause must not wait for what
    it is to pause. No message holds credentials, neither those of URL and headers nor a server's echo of them.

    Raises ValueError for an address or headers that HTTP has no use for.
    """

    def __init__(
        self,
        url: str,
        *,
        lanes: int,
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
        self.lanes, self._control = Lanes(self._client, lanes), Lanes(self._client, None)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            auth=self._auth,
            headers={**self._headers, "Accept-Encoding": ACCEPT_ENCODING},
            # `call` times whole attempts; a wait for a lane's own connection would be a bug, and must end.
            timeout=httpx.Timeout(None, connect=self.connect_timeout, pool=self.connect_timeout),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE),
            verify=self._certificates,
            follow_redirects=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(lanes.close(self.connect_timeout) for lanes in (self.lanes, self._control)))

    async def call(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        request_id: str | None = None,
        lane: Lane | None = None,
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
            lane: the connection to use; None: one for control.
            deadline: point of `time.monotonic()` after which nothing is sent and nothing awaited.
            timeout: seconds for one attempt, from sending to the last byte.

        Raises:
            RequestError: with the last reason, once no attempt is left.
        """
        if lane is None:
            async with self._control.take() as own:
                return await self.call(
                    method, path, json, request_id=request_id, lane=own, retries=retries, deadline=deadline,
                    timeout=timeout,
                )  # fmt: skip
        where, limit = f"{method} {self.url}{path}", self.timeout if timeout is None else timeout
        error: RequestError | None = None
        breaks = 0
        for attempt in range(retries.attempts):
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            if request_id is not None:
                json = {**json, "rid": f"{request_id}-{attempt + 1}"}
            try:
                with anyio.fail_after(min(limit, left)):
                    response, body = await self._once(lane, method, path, json)
                return Answer(self._json(response, body, attempt + 1), attempt + 1)
            except RequestError as failed:
                if failed.kind == "closed":
                    raise RequestError("closed", failed.message, attempt) from error
                if failed.kind not in ("server_error", "connection"):
                    raise
                error = failed
            except TimeoutError:
                if left <= limit:
                    raise _too_late(method, path, attempt + 1, error) from None
                error = RequestError("timeout", f"no answer to {method} {path} within {limit:g} s", attempt + 1)
            except httpx.TimeoutException:
                message = f"{where}: no connection within {self.connect_timeout:g} s"
                error = RequestError("timeout", message, attempt + 1)
            except BodyTooLarge:
                raise RequestError("content", f"{where}: {self._too_large()}", attempt + 1) from None
            except BodyGarbled as garbled:
                message = f"{where}: an answer that cannot be decoded ({garbled})"
                raise RequestError("content", message, attempt + 1) from None
            except BodyCutOff:
                error = RequestError("connection", f"{where}: compressed answer cut off", attempt + 1)
            except _Broken as broken:
                breaks += 1
                error = RequestError("connection", f"{where}: {_broke(breaks)} ({broken})", attempt + 1)
                if breaks == _MOST_BREAKS:
                    raise error from None
            except httpx.TransportError as lost:
                reason = self.redacted(str(lost)) or type(lost).__name__
                before = f"; {_broke(breaks)}" if breaks else ""
                error = RequestError("connection", f"{where}: {reason}{before}", attempt + 1)
            if attempt + 1 < retries.attempts:
                wait = retries.delay(attempt, self._chance)
                if deadline is not None:
                    wait = min(wait, max(0.0, deadline - time.monotonic()))
                await asyncio.sleep(wait)
        else:
            assert error is not None
            raise error
        raise _too_late(method, path, 0 if error is None else error.attempts, error)

    async def _once(self, lane: Lane, method: str, path: str, json: Any) -> tuple[httpx.Response, bytes]:
        """One attempt. Whatever ends it but an answer, a cancellation too, ends the lane's connection."""
        client = lane.client
        try:
            try:
                response = await client.send(client.build_request(method, path, json=json), stream=True)
            except (httpx.TimeoutException, httpx.ConnectError):
                raise  # nothing was sent
            except httpx.TransportError as lost:
                raise _Broken(self.redacted(str(lost)) or type(lost).__name__) from None
            try:
                return response, await read_body(response, self._limit)
            finally:
                await response.aclose()
        except BaseException:
            lane.drop()
            raise

    def _too_large(self) -> str:
        return (
            f"an answer of more than {self._limit} bytes after decompression: raise max_reply_bytes of SGLangClient if "
            f"it is meant to be so large, or ask for less (top_log_probs, return_sampling_mask, max_new_tokens)"
        )

    def _json(self, response: httpx.Response, body: bytes, attempts: int) -> Any:
        status = response.status_code
        where = f"{response.request.method} {response.request.url.path}"
        if status >= 400:
            kind: FailureKind = "server_error" if status >= 500 else "refused"
            raise RequestError(kind, f"{where}: status {status}, {self._told(body)}", attempts, status)
        if status >= 300:
            target = self.redacted(shown(response.headers.get("location", "nowhere")))
            message = f"{where}: status {status}, a redirect to {target}; give the server's own address"
            raise RequestError("content", message, attempts, status)
        if not body:
            return None
        media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media and media != "application/json":
            begins = self.redacted(_text(body))[:80]
            message = f"{where}: content type {media} instead of JSON, {begins!r}: is this an SGLang server?"
            raise RequestError("content", message, attempts, status)
        try:
            return jsonlib.loads(body)
        except RecursionError:
            raise RequestError("content", f"{where}: JSON nested too deeply", attempts, status) from None
        except ValueError as error:
            text = isinstance(error, UnicodeDecodeError)
            if isinstance(error, jsonlib.JSONDecodeError) or (text and error.reason == "unexpected end of data"):
                message = f"{where}: JSON cut off after {len(body)} bytes"
                raise RequestError("connection", message, attempts, status) from None
            fault = f"is not {error.encoding}, from byte {error.start} on" if text else f"cannot be read ({error})"
            raise RequestError("content", f"{where}: JSON that {fault}", attempts, status) from None

    def _told(self, body: bytes) -> str:
        """The server's message in an error answer, or the beginning of whatever it is."""
        try:
            told = jsonlib.loads(body)
        except (ValueError, RecursionError):
            return repr(self.redacted(_text(body))[:200])
        if isinstance(told, dict):
            error = told.get("error", told.get("message", told))
            told = error.get("message", error) if isinstance(error, dict) else error
        return self.redacted(str(told))[:500]


class _Broken(Exception):
    """The connection was lost after the request was sent, or while it was, and before any answer."""


def _broke(times: int) -> str:
    if times < _MOST_BREAKS:
        return f"the connection broke with this request under way{f' {times} times' if times > 1 else ''}"
    return (
        f"the connection broke {times} times with this request under way. It is not sent again: it may be what brings "
        f"the server down, as a token id outside its vocabulary does (vocab_size of SGLangClient refuses those)"
    )


def _too_late(method: str, path: str, attempts: int, before: RequestError | None) -> RequestError:
    reason = "" if before is None else f"; before that: {before.message}"
    status = None if before is None else before.status
    return RequestError("deadline", f"{method} {path}: the deadline passed{reason}", attempts, status)


def _text(body: bytes) -> str:
    return body[:10_000].decode("utf-8", errors="replace")
