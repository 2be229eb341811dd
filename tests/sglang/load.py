"""What a server is busy with: tests that change something under running requests must know that they run."""

from __future__ import annotations

import asyncio

import httpx


async def until_running(url: str, requests: int, pending: asyncio.Task[object]) -> None:
    """Return once so many requests are computed; `pending` is the task that sent them."""
    async with httpx.AsyncClient(base_url=url) as server:
        while sum(load["num_running_reqs"] for load in (await server.get("/v1/loads")).json()["loads"]) < requests:
            assert not pending.done()
            await asyncio.sleep(0.01)
