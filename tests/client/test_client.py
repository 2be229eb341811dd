"""The client against a server that dies, hangs, stutters and lies: nothing lost, nothing doubled, order kept."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mismatch_plugin as mp
from mismatch_plugin.data.arrays import is_null, with_nulls
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import GenerateError, RequestError, Retries, SGLangClient
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, call, honest, response_ids

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang_generate"
THREE = SamplingParameters(max_new_tokens=3)


def prompts(count: int) -> list[list[int]]:
    return [[number, number + 1] for number in range(count)]


def generate(server: FaultyServer, count: int, **options: Any) -> list[Sample]:
    return call(server, lambda client: client.generate(prompts(count), THREE), **options)


def came(server: FaultyServer, count: int, **options: Any) -> tuple[list[Sample | None], dict[int, RequestError]]:
    """What came, and what failed."""
    try:
        return [*generate(server, count, **options)], {}
    except GenerateError as error:
        return error.came, error.failures


def assert_right(samples: Sequence[Sample | None], count: int) -> None:
    """Sample i answers prompt i, whole."""
    whole = [sample for sample in samples if sample is not None]
    assert [sample.prompt_ids.tolist() for sample in whole] == prompts(count)
    for sample in whole:
        ids = response_ids(sample.prompt_ids.tolist(), 3)
        assert sample.response_ids.tolist() == ids
        assert sample.rollout_log_probs.tolist() == [-1.0 - token / 1000 for token in ids]


def times_sent(server: FaultyServer) -> Counter[int]:
    return Counter(body["input_ids"][0] for body in server.bodies("/generate"))


def test_ten_thousand_prompts_with_64_under_way() -> None:
    count = 10_000

    async def watched(client: SGLangClient) -> tuple[list[Sample], int]:
        running, most = asyncio.create_task(client.generate(prompts(count), THREE)), 0
        while not running.done():
            most = max(most, len(asyncio.all_tasks()))
            await asyncio.sleep(0.02)
        return await running, most

    def respond(request: Request) -> Reply:
        reply = honest(request)
        reply.together = 64
        return reply

    with FaultyServer(respond) as server:
        samples, most_tasks = call(server, watched)
        assert_right(samples, count)
        assert times_sent(server) == Counter(range(count))  # none lost, none twice
        assert server.most_in_flight == 64
        assert server.connections <= count // 10  # kept alive; a slow machine lets some idle ones go
        assert most_tasks <= 2 * 64 + 8  # a worker and its request, however many prompts wait


def test_memory_does_not_grow_with_the_number_of_prompts() -> None:
    def passing(client: SGLangClient, count: int) -> Awaitable[int]:
        async def run() -> int:
            tracemalloc.reset_peak()
            kept = await client.generate(prompts(count), THREE)
            held, peak = tracemalloc.get_traced_memory()
            assert len(kept) == count
            return peak - held

        return run()

    with FaultyServer() as server:
        server.requests = Forgetful()
        generate(server, 64, concurrency=16)  # what is made once
        tracemalloc.start()
        try:
            few = call(server, lambda client: passing(client, 100), concurrency=16)
            many = call(server, lambda client: passing(client, 800), concurrency=16)
        finally:
            tracemalloc.stop()
    # What was needed next to the records themselves may grow by some bookkeeping, not by anything a reply's size.
    assert (many - few) / 700 < 1_000  # bytes a prompt


class Forgetful(list[Request]):
    """Keeps no request: the server's memory must not be mistaken for the client's."""

    def append(self, item: Request, /) -> None:
        pass


def test_a_server_killed_in_mid_request_and_started_again() -> None:
    def respond(request: Request) -> Reply:
        if request.number == 25:
            dying(server, 0.1)
        reply = honest(request)
        reply.delay = 0.02
        return reply

    with FaultyServer(respond) as server:
        assert_right(generate(server, 60, concurrency=8, retries=Retries(attempts=12, first=0.02, longest=0.1)), 60)
        assert set(times_sent(server)) == set(range(60)) and max(times_sent(server).values()) > 1


def test_a_server_that_stays_dead_leaves_what_it_gave() -> None:
    def respond(request: Request) -> Reply:
        if request.json["input_ids"][0] == 10:
            server.soon(server.kill)
            return Reply(hang=True)
        return honest(request)

    with FaultyServer(respond) as server:
        with pytest.raises(GenerateError, match="20 of 30 requests failed: sample 10: POST") as caught:
            generate(server, 30, concurrency=1, retries=Retries(attempts=2, first=0.01, longest=0.02))
        error = caught.value
        assert_right(error.came, 10)
        assert list(error.failures) == list(range(10, 30))
        assert {(failure.kind, failure.attempts) for failure in error.failures.values()} == {("connection", 2)}


def first_time(fault: Reply, every: int = 3) -> Callable[[Request], Reply]:
    """`fault` instead of the first answer to every third prompt."""

    def respond(request: Request) -> Reply:
        return fault if request.json["input_ids"][0] % every == 0 and request.seen == 0 else honest(request)

    return respond


WHOLE = json.dumps(
    honest(Request("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}, 0, 0)).json
)
PASSING = {
    "503": Reply({"error": "busy"}, status=503),
    "500 without JSON": Reply(body=b"oops", status=500, content_type="text/plain"),
    "half a JSON, then closed": Reply(body=WHOLE.encode(), cut=50),
    "half a JSON as a whole": Reply(body=WHOLE.encode()[:50]),
    "closed without a word": Reply(body=b"x" * 10, cut=0),
    "hanging": Reply(hang=True),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_tried_again(name: str) -> None:
    with FaultyServer(first_time(PASSING[name])) as server:
        assert_right(generate(server, 30, timeout=3.0 if name == "hanging" else 20.0), 30)
        assert times_sent(server) == Counter({number: 1 + (number % 3 == 0) for number in range(30)})
        assert len({body["rid"] for body in server.bodies("/generate")}) == 40  # each attempt has a name of its own


LASTING = {
    "503": (Reply({"error": {"message": "starting"}}, status=503), "server_error", "status 503, starting"),
    "hanging": (Reply(hang=True), "timeout", "no answer to POST /generate within 1.5 s"),
    "half a JSON": (Reply(body=b'{"text": "a'), "connection", "JSON cut off after 11 bytes"),
}


@pytest.mark.parametrize("name", LASTING)
def test_what_does_not_pass_fails_after_the_last_attempt(name: str) -> None:
    fault, kind, says = LASTING[name]
    with FaultyServer(lambda request: fault if request.json["input_ids"][0] == 1 else honest(request)) as server:
        found, failures = came(server, 3, timeout=1.5, retries=Retries(attempts=3, first=0.01, longest=0.02))
        assert (failures[1].kind, failures[1].attempts) == (kind, 3) and says in failures[1].message
        assert times_sent(server) == {0: 1, 1: 3, 2: 1}
        assert [sample is not None for sample in found] == [True, False, True]


def damaged(change: Callable[[Any], Any]) -> Callable[[Request], Reply]:
    def respond(request: Request) -> Reply:
        reply = honest(request)
        if request.json["input_ids"][0] == 2:
            change(reply.json)
        return reply

    return respond


def refused(reply: Reply) -> Callable[[Request], Reply]:
    return lambda request: reply if request.json["input_ids"][0] == 2 else honest(request)


FINAL: dict[str, tuple[Callable[[Request], Reply], str, str]] = {
    "400": (refused(Reply({"error": {"message": "too long"}}, status=400)), "refused", "status 400, too long"),
    "429": (refused(Reply({"error": "slow"}, status=429)), "refused", "status 429, slow"),
    "a page": (refused(Reply(body=b"<html>", content_type="text/html")), "content", "content type text/html"),
    "a redirect": (
        refused(Reply(status=307, headers={"Location": "http://elsewhere.invalid/"})),
        "content",
        "a redirect to http://elsewhere.invalid/",
    ),
    "log-probs lost": (
        damaged(lambda reply: reply["meta_info"].pop("output_token_logprobs")),
        "reply",
        "3 tokens and no output_token_logprobs",
    ),
    "another form": (damaged(lambda reply: reply.update(output_ids=5)), "reply", "a reply of another form"),
    "too many tokens": (
        damaged(
            lambda reply: (
                reply["output_ids"].append(5),
                reply["meta_info"]["output_token_logprobs"].append([-1.0, 5, None]),
                reply["meta_info"].update(completion_tokens=4),
            )
        ),
        "reply",
        "4 tokens came, at most 3",
    ),
    "another request's reply": (
        damaged(lambda reply: reply["meta_info"].update(id="someone-else")),
        "reply",
        "was answered as someone-else",
    ),
    "an error with status 200": (damaged(lambda reply: (reply.clear(), reply.update(error="no"))), "reply", "no"),
    "NaN": (
        damaged(lambda reply: reply["meta_info"]["output_token_logprobs"][1].__setitem__(0, float("nan"))),
        "log_probs",
        "sequence 2, position 1 is missing or NaN",
    ),
    "null": (
        damaged(lambda reply: reply["meta_info"]["output_token_logprobs"][1].__setitem__(0, None)),
        "log_probs",
        "sequence 2, position 1 is missing or NaN",
    ),
}


@pytest.mark.parametrize("name", FINAL)
def test_what_will_not_pass_is_not_tried_again_and_costs_one_sample(name: str) -> None:
    respond, kind, says = FINAL[name]
    with FaultyServer(respond) as server:
        with pytest.raises(GenerateError, match="1 of 5 requests failed: sample 2: ") as caught:
            generate(server, 5)
        ((at, failure),) = caught.value.failures.items()
        assert (at, failure.kind, failure.attempts) == (2, kind, 1) and says in failure.message
        assert times_sent(server) == Counter(range(5))
        assert [sample is not None for sample in caught.value.came] == [True, True, False, True, True]


def test_another_policy_keeps_log_probs_that_are_none() -> None:
    with FaultyServer(FINAL["null"][0]) as server:
        samples = generate(server, 3, rollout_log_prob_policy="neutral")
        assert is_null(samples[2].rollout_log_probs).tolist() == [False, True, False]


def test_the_deadline_ends_everything_and_accounts_for_all() -> None:
    def respond(request: Request) -> Reply:
        return honest(request) if request.json["input_ids"][0] < 2 else Reply(hang=True)

    with FaultyServer(respond) as server:
        with pytest.raises(GenerateError) as caught:
            call(server, lambda client: client.generate(prompts(9), THREE, deadline=3.0), concurrency=3, timeout=60.0)
        failures = caught.value.failures
        assert list(failures) == list(range(2, 9)) and {failure.kind for failure in failures.values()} == {"deadline"}
        assert [failure.attempts for failure in failures.values()] == [1, 1, 1, 0, 0, 0, 0]
        assert set(times_sent(server)) == set(range(5))  # the rest was never sent


def test_the_deadline_holds_while_waiting_to_try_again() -> None:
    slow = Retries(attempts=10, first=10_000.0, longest=10_000.0)
    with pytest.raises(GenerateError, match=r"kind deadline") as caught:
        call(
            lambda _: Reply({"error": "busy"}, status=503),
            lambda client: client.generate(prompts(1), THREE, deadline=2.0),
            retries=slow,
        )
    assert "before that: POST /generate" in str(caught.value)


def test_the_bound_holds_over_all_calls_of_a_client() -> None:
    def slow(request: Request) -> Reply:
        reply = honest(request)
        reply.delay = 0.005
        return reply

    async def both(client: SGLangClient) -> list[list[Sample]]:
        return await asyncio.gather(*(client.generate(prompts(20), THREE) for _ in range(3)))

    with FaultyServer(slow) as server:
        for records in call(server, both, concurrency=4):
            assert_right(records, 20)
        assert server.most_in_flight == 4


def test_samples_of_a_prompt_stand_together_with_seeds_of_their_own() -> None:
    sampling = SamplingParameters(max_new_tokens=3, seed=100)
    with FaultyServer() as server:
        records = call(server, lambda client: client.generate(prompts(3), sampling, samples_per_prompt=2))
        assert [int(record.prompt_ids[0]) for record in records] == [0, 0, 1, 1, 2, 2]
        assert [record.sampling.seed for record in records] == list(range(100, 106))
        sent = {body["sampling_params"]["sampling_seed"] for body in server.bodies("/generate")}
        assert sent == set(range(100, 106))
        assert {record.server for record in records} == {server.url}


def test_rescoring() -> None:
    with FaultyServer() as server:
        scores = call(server, lambda client: client.rescore([np.array([7, 8, 9]), [4]]))
        assert [with_nulls(row) for row in scores] == [[None, -0.08, -0.09], [None]]
        body = server.bodies("/generate")[-1]
        assert body["sampling_params"]["max_new_tokens"] == 0 and body["logprob_start_len"] == 0


def test_the_last_id_of_the_vocabulary_is_rescored() -> None:
    def respond(request: Request) -> Reply:
        reply = honest(request)
        for entry in reply.json["meta_info"]["input_token_logprobs"]:
            entry[1] = entry[1] if entry[1] < 9 else 0  # as SGLang reports it for a vocabulary of 10
        return reply

    with FaultyServer(respond) as server:
        for size in (None, 10):
            scores = call(server, lambda client: client.rescore([[4, 9, 0, 9]]), vocab_size=size)
            assert [with_nulls(row) for row in scores] == [[None, -0.09, 0.0, -0.09]]


LOST: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "top log-probs": (lambda meta: meta, "top_log_probs were asked for and did not come", {"top_log_probs": 2}),
    "some of them": (
        lambda meta: meta.update(output_top_logprobs=[[[-0.1, 7]], [], [[-0.1, 7]]]),
        "did not come for every token",
        {"top_log_probs": 2},
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_was_asked_for_must_come(name: str) -> None:
    lose, says, options = LOST[name]

    def respond(request: Request) -> Reply:
        reply = honest(request)
        lose(reply.json["meta_info"])
        return reply

    with FaultyServer(respond) as server:
        with pytest.raises(GenerateError, match=says):
            call(server, lambda client: client.generate([[5, 6]], THREE, **options))
        assert len(call(server, lambda client: client.generate([[5, 6]], THREE))) == 1  # not asked for


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([[1], []], "prompt 1 is .*at least one"),
        ([[1, -2]], "prompt 0, position 1: -2"),
        ([["a"]], "prompt 0, position 0: 'a'"),
        (["text"], "prompt 0 is 'text'"),
    ],
)
def test_prompts_that_are_no_ids_are_refused_before_anything_is_sent(bad: Any, says: str) -> None:
    with FaultyServer() as server:
        with pytest.raises(ValueError, match=says):
            call(server, lambda client: client.generate(bad, THREE))
        assert server.requests == []


def test_the_server_decides_what_the_sampling_mask_needs() -> None:
    told = json.loads((FIXTURES / "sampling_mask.json").read_text())["response"]

    def respond(request: Request) -> Reply:
        sent = request.json["sampling_params"]
        return Reply(told, status=400) if sent["top_p"] == 1.0 and sent["top_k"] == -1 else honest(request)

    with FaultyServer(respond) as server:
        with pytest.raises(GenerateError, match="status 400, return_sampling_mask requires top_k=1 for greedy"):
            call(server, lambda client: client.generate([[1]], THREE, return_sampling_mask=True))
        # A newer server takes top-p alone; this one loses the mask, which is seen.
        narrow = SamplingParameters(max_new_tokens=3, top_p=0.9)
        with pytest.raises(GenerateError, match="the sampling mask was asked for and did not come"):
            call(server, lambda client: client.generate([[1]], narrow, return_sampling_mask=True))
        assert [body["return_sampling_mask"] for body in server.bodies("/generate")] == [True, True]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with FaultyServer() as server:
        assert_right(generate(server, 2), 2)
        assert generate(server, 0) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout": 0}, "must be positive seconds"),
        ({"max_reply_bytes": 0}, "max_reply_bytes=0 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"rollout_log_prob_policy": "errror"}, "rollout_log_prob_policy='errror' is unknown"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SGLangClient("http://127.0.0.1:1", **options)


def test_waits_grow_and_scatter() -> None:
    retries = Retries(attempts=5, first=0.5, longest=4.0)
    for attempt, longest in enumerate((0.5, 1.0, 2.0, 4.0, 4.0, 4.0)):
        waits = [retries.delay(attempt) for _ in range(200)]
        assert longest / 2 <= min(waits) < 0.55 * longest and 0.95 * longest < max(waits) <= longest
    assert retries.delay(5000) <= 4.0
    with pytest.raises(ValueError, match="attempts must be at least 1"):
        Retries(attempts=0)


def dying(server: FaultyServer, after: float) -> Reply:
    """Ends the server, which is started again after a while."""

    def die() -> None:
        server.kill()
        server.soon(server.start, after)

    server.soon(die)
    return Reply(hang=True)


def test_a_request_that_brings_the_server_down_is_not_sent_again_and_again() -> None:
    def respond(request: Request) -> Reply:
        return dying(server, 0.05) if request.json["input_ids"][0] == 2 else honest(request)

    with FaultyServer(respond) as server:
        _, failures = came(server, 4, concurrency=1, retries=Retries(attempts=30, first=0.02, longest=0.05))
        assert times_sent(server) == {0: 1, 1: 1, 2: 3, 3: 1}
        assert list(failures) == [2] and failures[2].kind == "connection"
        assert "the connection broke 3 times with this request under way. It is not sent again" in failures[2].message
        assert "vocab_size of SGLangClient" in failures[2].message


def test_a_server_that_stays_down_after_a_request_is_said() -> None:
    def respond(request: Request) -> Reply:
        if request.json["input_ids"]:
            server.soon(server.kill)
        return Reply(hang=True)

    with FaultyServer(respond) as server:
        _, failures = came(server, 1, retries=Retries(attempts=3, first=0.01, longest=0.02))
        assert failures[0].attempts == 3 and times_sent(server) == {0: 1}
        assert failures[0].message.endswith("; the connection broke with this request under way")


def test_a_connection_that_breaks_now_and_then_costs_nothing() -> None:
    def respond(request: Request) -> Reply:
        return Reply(drop=True) if request.method == "POST" and request.seen < 2 else honest(request)

    with FaultyServer(respond) as server:
        assert_right(generate(server, 5), 5)


INFO = {"version": "0.5.23", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "vocab_size": 10, "tp_size": 1}


def telling(request: Request) -> Reply:
    if request.path == "/server_info":
        return Reply(INFO)
    return Reply({"weight_version": "3"}) if request.path == "/model_info" else honest(request)


@pytest.mark.parametrize("told", [True, False])
def test_ids_outside_the_vocabulary_are_refused_before_anything_is_sent(told: bool) -> None:
    options: dict[str, Any] = {} if told else {"vocab_size": 10}
    with FaultyServer(telling if told else honest) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action in ("generate", "rescore"):
            with pytest.raises(
                ValueError, match=r"prompt 1, position 2: id 10 is outside the model's vocabulary of 10"
            ):
                call(server, lambda client: getattr(client, action)([[1], [9, 0, 10]]), **options)  # noqa: B023
        assert server.bodies("/generate") == []
        assert len(call(server, lambda client: client.generate([[9]], THREE), **options)) == 1
        # What is given by hand wins over what the server tells.
        assert len(call(server, lambda client: client.generate([[10]], THREE), vocab_size=11)) == 1


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
        assert_right(call(server, twice, connect_timeout=2.0), 2)
        assert len([path for path in server.paths() if path.endswith("_info")]) <= 2  # asked once


def test_a_call_whose_lanes_are_all_taken_ends_at_its_deadline() -> None:
    def respond(request: Request) -> Reply:
        return honest(request) if request.json["input_ids"] == [5] else Reply(hang=True)

    async def crowd(client: SGLangClient) -> None:
        other = asyncio.create_task(client.generate(prompts(1), THREE))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        with pytest.raises(GenerateError, match=r"before a slot was free \(kind deadline, attempts 0\)"):
            await client.generate([[5]], THREE, deadline=0.2)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert len(await client.generate([[5]], THREE)) == 1

    with FaultyServer(respond) as server:
        call(server, crowd, concurrency=1, timeout=200.0)
