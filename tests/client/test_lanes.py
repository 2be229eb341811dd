"""Lanes after requests that were cancelled, late or broken: whatever ends a request, its lane answers the next one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import GenerateError, Retries, SGLangClient
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, honest

ONE = SamplingParameters(max_new_tokens=1)
LANES = 64
TOTAL = 10_000
GUARD_S = 240
"""Ends a test that hangs; nothing is judged by it."""


def moody(chance: random.Random) -> Any:
    """Some requests hang, some are cut off, some connections close; the rest is answered at once."""

    def respond(request: Request) -> Reply:
        if request.method == "GET" or request.json["input_ids"][0] >= TOTAL:
            return honest(request)
        draw = chance.random()
        if draw < 0.01:
            return Reply(hang=True)
        if draw < 0.02:
            return Reply(body=b"x" * 10, cut=chance.randrange(10))
        return honest(request)

    return respond


async def storm(client: SGLangClient, chance: random.Random) -> Counter[str]:
    """Requests whose calls are cancelled, or have a deadline, or run against a time limit of an attempt."""
    seen: Counter[str] = Counter()

    async def one_call(first: int, count: int) -> None:
        way = chance.choice(["cancel", "cancel", "deadline", "timeout"])
        asked = [[number] for number in range(first, first + count)]
        deadline = chance.random() * 0.02 * count / 8 if way == "deadline" else None
        task = asyncio.create_task(client.generate(asked, ONE, deadline=deadline))
        if way == "cancel":
            for _ in range(chance.randrange(200)):
                await asyncio.sleep(0)
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, GenerateError):
            seen.update(failure.kind for failure in result.failures.values())
        elif isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError), result
            seen["cancelled"] += 1
        else:
            seen["done"] += 1

    size, together = 20, 10
    for first in range(0, TOTAL, size * together):
        await asyncio.gather(*(one_call(first + size * index, size) for index in range(together)))
    return seen


def test_every_lane_answers_after_ten_thousand_requests_cancelled_late_and_broken() -> None:
    chance = random.Random(12)

    async def run(server: FaultyServer) -> Counter[str]:
        options: dict[str, Any] = {"timeout": 0.5, "retries": Retries(2, 0.0, 0.0), "concurrency": LANES}
        async with SGLangClient(server.url, **options) as client:
            seen = await storm(client, chance)
            server.respond = together
            server.most_in_flight = 0
            client._server.timeout = GUARD_S
            # All lanes at once: no reply before 64 requests are under way.
            records = await client.generate([[TOTAL + number] for number in range(LANES)], ONE)
            assert [int(record.prompt_ids[0]) for record in records] == [TOTAL + number for number in range(LANES)]
            return seen

    def together(request: Request) -> Reply:
        reply = honest(request)
        reply.together = LANES
        return reply

    with FaultyServer(moody(random.Random(5))) as server:
        seen = asyncio.run(asyncio.wait_for(run(server), GUARD_S))
    assert {"cancelled", "done", "deadline"} <= set(seen), seen


@pytest.mark.parametrize("ends", ["cancelled", "deadline"])
def test_a_request_given_up_at_any_step_leaves_its_lane_usable(ends: str) -> None:
    async def run(server: FaultyServer) -> None:
        async with SGLangClient(server.url, concurrency=1, timeout=GUARD_S, retries=0) as client:
            for steps in range(1, 100):
                task = asyncio.create_task(
                    client.generate([[1]], ONE, deadline=None if ends == "cancelled" else 1e-4 * steps)
                )
                if ends == "cancelled":
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert len(await client.generate([[2]], ONE)) == 1, steps

    with FaultyServer() as server:
        asyncio.run(asyncio.wait_for(run(server), 20))


def test_a_closed_client_sends_nothing_more() -> None:
    async def run(server: FaultyServer) -> None:
        client = SGLangClient(server.url, retries=Retries(100, 0.01, 0.01))
        pending = asyncio.create_task(client.generate([[1]], ONE))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        await client.close()
        for late in (pending, client.generate([[2]], ONE), client.server_info()):
            with pytest.raises(RuntimeError, match="this client is closed"):
                await late
        assert [body["input_ids"] for body in server.bodies("/generate")] == [[1]]
        await client.close()

    with FaultyServer(lambda request: honest(request) if request.json is None else Reply(hang=True)) as server:
        asyncio.run(asyncio.wait_for(run(server), GUARD_S))


@pytest.mark.parametrize("attempts", [1, 100])
def test_closing_loses_nothing_that_had_come(attempts: int) -> None:
    def respond(request: Request) -> Reply:
        return Reply(hang=True) if request.json is not None and request.json["input_ids"] == [2] else honest(request)

    async def run(server: FaultyServer) -> None:
        client = SGLangClient(server.url, concurrency=1, retries=Retries(attempts, 0.01, 0.01))
        pending = asyncio.create_task(client.generate([[1], [2], [3]], ONE))
        while [2] not in [body["input_ids"] for body in server.bodies("/generate")]:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(GenerateError, match="this client is closed: open another one") as caught:
            await pending
        first, *others = caught.value.came
        assert first.prompt_ids.tolist() == [1] and others == [None, None]
        told = {at: (failure.kind, failure.attempts) for at, failure in caught.value.failures.items()}
        assert told == {1: ("connection" if attempts == 1 else "closed", 1), 2: ("closed", 0)}

    with FaultyServer(respond) as server:
        asyncio.run(asyncio.wait_for(run(server), GUARD_S))
