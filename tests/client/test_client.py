"""The client against a server that dies, hangs, stutters and lies: nothing lost, nothing doubled, order kept."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mismatch_plugin as mp
from mismatch_plugin.data.arrays import listed
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import GenerateError, SGLangClient
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, Respond, call, honest, response_ids
from tests.full import FULL

THREE = SamplingParameters(max_new_tokens=3)


def prompts(count: int) -> list[list[int]]:
    return [[number, number + 1] for number in range(count)]


def generate(server: FaultyServer, count: int, **options: Any) -> list[Sample]:
    return call(server, lambda client: client.generate(prompts(count), THREE), **options)


def failing(server: FaultyServer, count: int, **options: Any) -> GenerateError:
    with pytest.raises(GenerateError) as caught:
        generate(server, count, **options)
    return caught.value


def assert_right(samples: list[Any], numbers: range) -> None:
    """Sample i answers prompt i, whole."""
    assert [sample.prompt_ids.tolist() for sample in samples] == [[number, number + 1] for number in numbers]
    for sample in samples:
        ids = response_ids(sample.prompt_ids.tolist(), 3)
        assert sample.response_ids.tolist() == ids
        assert sample.rollout_log_probs.tolist() == [-1.0 - token / 1000 for token in ids]


def times_sent(server: FaultyServer) -> Counter[int]:
    return Counter(body["input_ids"][0] for body in server.bodies("/generate"))


def test_every_prompt_is_sent_once_with_64_under_way_over_all_calls() -> None:
    count = 3_000 if FULL else 300

    async def watched(client: SGLangClient) -> tuple[list[list[Sample]], int]:
        calls = asyncio.gather(*(client.generate(prompts(count), THREE) for _ in range(3)))
        most = 0
        while not calls.done():
            most = max(most, len(asyncio.all_tasks()))
            await asyncio.sleep(0.02)
        return await calls, most

    def respond(request: Request) -> Reply:
        reply = honest(request)
        reply.together = 64
        return reply

    with FaultyServer(respond) as server:
        answers, most_tasks = call(server, watched)
        for samples in answers:
            assert_right(samples, range(count))
        assert times_sent(server) == Counter(dict.fromkeys(range(count), 3))
        assert server.most_in_flight == 64
        assert server.connections <= count // 2  # kept alive; a slow machine lets some idle ones go
        assert most_tasks <= 3 * 2 * 64 + 8  # a worker and its request, however many prompts wait


def test_a_server_that_stays_dead_leaves_what_it_gave() -> None:
    def respond(request: Request) -> Reply:
        if request.json["input_ids"][0] == 10:
            server.soon(server.kill)
            return Reply(hang=True)
        return honest(request)

    with FaultyServer(respond) as server:
        error = failing(server, 15, concurrency=1, retries=2)
        assert str(error).startswith("5 of 15 requests failed: sample 10: POST") and str(error).endswith("; and 2 more")
        assert_right(error.came[:10], range(10))
        assert list(error.failures) == list(range(10, 15)) and error.came[10:] == [None] * 5
        assert {(failure.kind, failure.attempts) for failure in error.failures.values()} == {("connection", 3)}


WHOLE = json.dumps(
    honest(Request("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}, 0)).json
)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Reply({"error": {"message": "starting"}}, status=503), "server_error", "status 503, starting"),
        (Reply(body=b"oops", status=500, content_type="text/plain"), "server_error", "status 500, 'oops'"),
        (Reply(body=WHOLE.encode(), cut=50), "connection", "http://127.0.0.1"),
        (Reply(drop=True), "connection", "Server disconnected"),
        (Reply(hang=True), "timeout", "no answer to POST /generate within 1.5 s"),
    ],
)
def test_what_may_pass_is_tried_again_until_the_last_attempt(fault: Reply, kind: str, says: str) -> None:
    def respond(request: Request) -> Reply:
        number = request.json["input_ids"][0]
        return fault if (number == 1 and request.seen == 0) or number == 2 else honest(request)

    with FaultyServer(respond) as server:
        error = failing(server, 4, timeout=1.5 if fault.hang else 60.0, retries=2)
        assert times_sent(server) == {0: 1, 1: 2, 2: 3, 3: 1}
        assert len({body["rid"] for body in server.bodies("/generate")}) == 7  # each attempt has a name of its own
        assert_right([*error.came[:2]], range(2))
        (failure,) = error.failures.values()
        assert (failure.kind, failure.attempts) == (kind, 3) and says in failure.message


Change = Callable[[Any], Any]


def meta(**told: Any) -> Change:
    return lambda reply: reply["meta_info"].update(told)


def damaging(damage: Reply | Change, number: int) -> Respond:
    """The answer to this prompt is another one, or is changed."""

    def respond(request: Request) -> Reply:
        reply = honest(request)
        if request.json["input_ids"][0] == number:
            if isinstance(damage, Reply):
                return damage
            damage(reply.json)
        return reply

    return respond


def one_more(reply: Any) -> None:
    reply["output_ids"].append(5)
    reply["meta_info"]["output_token_logprobs"].append([-1.0, 5, None])
    reply["meta_info"].update(completion_tokens=4)


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (Reply({"error": {"message": "too long"}}, status=400), "refused", "status 400, too long"),
        (Reply(body=b"<html>", content_type="text/html"), "content", "but '<html>': is this an SGLang server"),
        (Reply(body=b'{"cut": [1, 2'), "content", "no JSON (EOF"),
        (Reply(status=307, headers={"Location": "http://far.invalid/"}), "content", "a redirect to http://far.invalid"),
        (Reply({"error": "no"}), "reply", "the server answered: no"),
        (one_more, "reply", "4 tokens came, at most 3"),
        (meta(id="someone-else"), "reply", "was answered as someone-else"),
    ],
)
def test_what_will_not_pass_is_not_tried_again_and_costs_one_sample(
    damage: Reply | Change, kind: str, says: str
) -> None:
    with FaultyServer(damaging(damage, 1)) as server:
        error = failing(server, 3)
        assert list(error.failures) == [1] and [sample is None for sample in error.came] == [False, True, False]
        assert (error.failures[1].kind, error.failures[1].attempts) == (kind, 1)
        assert says in error.failures[1].message
        assert times_sent(server) == Counter(range(3))


def test_a_sampling_mask_that_was_asked_for_must_come() -> None:
    with pytest.raises(GenerateError, match="the sampling mask was asked for and did not come"):
        call(honest, lambda client: client.generate(prompts(1), THREE, return_sampling_mask=True))


# What is asked and what is refused ------------------------------------------------------------------------------------


def test_samples_of_a_prompt_stand_together_with_seeds_of_their_own() -> None:
    sampling = SamplingParameters(max_new_tokens=3, seed=100)
    with FaultyServer() as server:
        records = call(server, lambda client: client.generate(prompts(3), sampling, samples_per_prompt=2))
        assert [int(record.prompt_ids[0]) for record in records] == [0, 0, 1, 1, 2, 2]
        assert [record.sampling.seed for record in records] == list(range(100, 106))
        sent = {body["sampling_params"]["sampling_seed"] for body in server.bodies("/generate")}
        assert sent == set(range(100, 106))
        assert {record.server for record in records} == {server.url}
        assert generate(server, 0) == []
        with pytest.raises(ValueError, match="samples_per_prompt=0 must be at least 1"):
            call(server, lambda client: client.generate([[1]], samples_per_prompt=0))


@pytest.mark.parametrize("size", [None, 10])
def test_rescoring_also_of_the_vocabularys_last_id(size: int | None) -> None:
    def respond(request: Request) -> Reply:
        reply = honest(request)
        for entry in reply.json["meta_info"]["input_token_logprobs"]:
            entry[1] = entry[1] if entry[1] < 9 else 0  # as SGLang reports it for a vocabulary of 10
        return reply

    with FaultyServer(respond) as server:
        scores = call(server, lambda client: client.rescore([np.array([7, 8, 9]), [4]]), vocab_size=size)
        assert [listed(row) for row in scores] == [[None, -0.08, -0.09], [None]]
        body = server.bodies("/generate")[-1]
        assert body["sampling_params"]["max_new_tokens"] == 0 and body["logprob_start_len"] == 0


INFO = {"version": "0.5.23", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "vocab_size": 10, "tp_size": 1}
OUTSIDE = "prompt 1, position 2: id 10 is outside the model's vocabulary of 10 ids"


def telling(request: Request) -> Reply:
    if request.path == "/server_info":
        return Reply(INFO)
    return Reply({"weight_version": "3"}) if request.path == "/model_info" else honest(request)


@pytest.mark.parametrize(
    ("asked", "says", "options"),
    [
        ([[1], []], "prompt 1 is \\[\\]: give a list of at least one", {}),
        ([[1, -2]], "prompt 0, position 1: -2 is not a token id", {}),
        (["text"], "prompt 0 is 'text': give a list", {}),
        ([[1], [9, 0, 10]], OUTSIDE, {}),  # which the server told
        ([[1], [9, 0, 10]], OUTSIDE, {"vocab_size": 10}),
        ([[1]], "concurrency=0 must be at least 1", {"concurrency": 0}),
        ([[1]], "retries=-1 must be at least 0", {"retries": -1}),
        ([[1]], "timeout=0 must be above 0", {"timeout": 0}),
    ],
)
@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
@pytest.mark.parametrize("action", ["generate", "rescore"])
def test_what_means_nothing_is_refused_before_anything_is_sent(
    asked: Any, says: str, options: dict[str, Any], action: str
) -> None:
    with FaultyServer(telling) as server:
        with pytest.raises(ValueError, match=says):
            call(server, lambda client: getattr(client, action)(asked), **options)
        assert server.bodies("/generate") == []
        # What is given by hand wins over what the server tells.
        assert len(call(server, lambda client: client.generate([[10]], THREE), vocab_size=11)) == 1


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FaultyServer() as server:
        assert_right(generate(server, 2), range(2))


def test_what_is_known_of_a_servers_settings_is_said_once() -> None:
    async def twice(client: SGLangClient) -> None:
        await client.generate([[1]], THREE)
        await client.rescore([[1, 2]])
        await client.server_info()

    with FaultyServer(telling) as server:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(server, twice)
        said = [str(note.message) for note in caught if issubclass(note.category, mp.MismatchWarning)]
        assert len(said) == 2 and all(note.startswith(f"{server.url}: ") for note in said)
        assert "kv_cache_dtype fp8_e5m2" in said[0] and "--enable-fp32-lm-head" in said[1]
        assert server.paths().count("/server_info") == 2  # with the first request, and when it was asked for


@pytest.mark.parametrize("answer", [Reply(status=404), Reply([1]), Reply({"tp_size": "many"}), Reply(hang=True)])
def test_a_server_that_tells_nothing_of_itself_is_taken_as_it_is(answer: Reply) -> None:
    def respond(request: Request) -> Reply:
        return answer if request.method == "GET" else honest(request)

    async def twice(client: SGLangClient) -> list[Sample]:
        await client.generate(prompts(2), THREE)
        return await client.generate(prompts(2), THREE)

    with FaultyServer(respond) as server:
        assert_right(call(server, twice, timeout=5.0), range(2))
        assert len([path for path in server.paths() if path.endswith("_info")]) <= 2  # asked once


@pytest.mark.parametrize(("attempts", "kind"), [(1, "connection"), (100, "closed")])
def test_a_closed_client_sends_nothing_more_and_loses_nothing_that_had_come(attempts: int, kind: str) -> None:
    def respond(request: Request) -> Reply:
        return Reply(hang=True) if request.json["input_ids"] == [2] else honest(request)

    async def run(client: SGLangClient) -> None:
        pending = asyncio.create_task(client.generate([[1], [2], [3]], THREE))
        while [2] not in [body["input_ids"] for body in server.bodies("/generate")]:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(GenerateError, match="this client is closed: open another one") as caught:
            await pending
        assert [sample is None for sample in caught.value.came] == [False, True, True]
        told = {at: (failure.kind, failure.attempts) for at, failure in caught.value.failures.items()}
        assert told == {1: (kind, 1), 2: ("closed", 0)}
        for late in (client.generate([[4]], THREE), client.server_info()):
            with pytest.raises(RuntimeError, match="this client is closed"):
                await late
        assert [body["input_ids"] for body in server.bodies("/generate")] == [[1], [2]]
        await client.close()

    with FaultyServer(respond) as server:
        call(server, run, concurrency=1, retries=attempts - 1)
