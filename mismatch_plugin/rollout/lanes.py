"""Connections to one server, each in the hands of one request at a time, and thrown away with whatever breaks one.

httpx's pool looks through all of its connections for each request, and a request that is cancelled between connecting
and sending leaves a connection there that is neither used nor freed. So each lane is a client of one connection, and
one whose request ended in an exception of any kind is closed; the lane opens another for the next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import httpx

from mismatch_plugin.rollout.outcomes import RequestError


class Lane:
    """One connection, made when it is first needed."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """The client of this lane; a new one after `drop`. Raises RequestError once the lanes are closed."""
        if self._client is None:
            if self._lanes.closed:
                raise RequestError("closed", "this client is closed: open another one for further requests", 0)
            self._client = self._lanes.make_client()
        return self._client

    def drop(self) -> None:
        """Close the connection, whatever is under way on it. It awaits nothing, so that no cancellation stops it."""
        client, self._client = self._client, None
        if client is not None:
            self._lanes.close_soon(client)


class Lanes:
    """At most `count` lanes at once; None: as many as there are requests."""

    def __init__(self, make_client: Callable[[], httpx.AsyncClient], count: int | None) -> None:
        self.make_client, self.closed = make_client, False
        self._slots = None if count is None else asyncio.Semaphore(count)
        self._free: list[Lane] = []
        self._all: set[Lane] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def take(self, deadline: float | None = None) -> AsyncIterator[Lane]:
        """A lane of one's own, once one is free. Raises RequestError if none is before `deadline` (time.monotonic)."""
        if self._slots is not None:
            try:
                with anyio.fail_after(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    await self._slots.acquire()
            except TimeoutError:
                raise RequestError("deadline", "the deadline passed before a lane was free", 0) from None
        lane = self._free.pop() if self._free else Lane(self)
        self._all.add(lane)
        try:
            yield lane
        except BaseException:
            lane.drop()
            raise
        finally:
            self._free.append(lane)
            if self._slots is not None:
                self._slots.release()

    def close_soon(self, client: httpx.AsyncClient) -> None:
        """Close a client in a task of its own."""
        task = asyncio.get_running_loop().create_task(_close(client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, wait: float) -> None:
        """Close all connections; a peer that does not answer to that is waited for `wait` seconds at most."""
        self.closed = True
        for lane in self._all:
            lane.drop()
        if self._closing:
            await asyncio.wait(self._closing, timeout=wait)


async def _close(client: httpx.AsyncClient) -> None:
    # It was given up, so nobody needs to know.
    with suppress(OSError, RuntimeError, httpx.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        await client.aclose()
