"""Weight updates, pauses and questions: what goes over the wire, in which order, and what a refusal does."""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.client import (
    GenerateError,
    PauseMode,
    RequestError,
    ServerInfo,
    SGLangClient,
    WeightUpdateError,
)
from mismatch_plugin.sglang.fingerprints import digests, fingerprint, written
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, call, honest

ROOT = Path(__file__).parents[2]
WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.ones(4, 4)[:, 1],  # a view with strides
}


class Trainee:
    """A server that takes weights: it keeps the version it was told, as SGLang does. `refuse`: path → its answer."""

    def __init__(self) -> None:
        self.version = "default"
        self.tp_size = 2
        self.radix_cache = True
        self.refuse: dict[str, Reply] = {}
        self.states: list[dict[str, Any]] = []

    def __call__(self, request: Request) -> Reply:
        if request.path in self.refuse:
            return self.refuse[request.path]
        if request.path == "/generate":
            return Reply(hang=True)
        if request.path == "/server_info":
            info = {"version": "0.5.23", "tp_size": self.tp_size, "dtype": "bfloat16", "weight_version": "old"}
            return Reply({**info, "disable_radix_cache": not self.radix_cache, "internal_states": self.states})
        if request.path == "/model_info":
            return Reply({"weight_version": self.version, "model_path": "m"})
        if request.path.startswith("/update_weights"):
            self.version = request.json.get("weight_version") or self.version
        return Reply({"success": True, "message": "ok"})


def orders(server: FaultyServer) -> list[str]:
    """Paths that change something, in order."""
    return [path for path in server.paths() if not path.endswith("_info")]


def unpacked(body: Any) -> dict[str, torch.Tensor]:
    payloads = {base64.b64decode(payload) for payload in body["serialized_named_tensors"]}
    (payload,) = payloads
    return dict(pickle.loads(payload))


def test_tensors_go_between_begin_and_end_to_every_worker() -> None:
    with FaultyServer(Trainee()) as server:
        call(server, lambda client: client.update_weights_from_tensors(WEIGHTS, 7))
        assert orders(server) == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
        (body,) = server.bodies("/update_weights_from_tensor")
        assert len(body["serialized_named_tensors"]) == 2  # one for each tensor-parallel worker
        assert body["weight_version"] == "7" and body["flush_cache"] is True
        sent = unpacked(body)
        assert list(sent) == ["a", "b", "c"]
        for name, tensor in WEIGHTS.items():
            assert sent[name].dtype == tensor.dtype and torch.equal(sent[name], tensor)
            assert sent[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_buckets_pause_generation_and_the_last_one_brings_the_version() -> None:
    with FaultyServer(Trainee()) as server:
        call(server, lambda client: client.update_weights_from_tensors(WEIGHTS, 8, bucket_bytes=28))
        updates = ["/update_weights_from_tensor"] * 2
        assert orders(server) == [
            "/pause_generation",
            "/begin_weight_update",
            *updates,
            "/end_weight_update",
            "/continue_generation",
        ]
        first, last = server.bodies("/update_weights_from_tensor")
        assert list(unpacked(first)) == ["a", "b"] and list(unpacked(last)) == ["c"]
        assert "weight_version" not in first and first["flush_cache"] is False
        assert last["weight_version"] == "8" and last["flush_cache"] is True


def _under(mode: PauseMode, **options: Any) -> Callable[[SGLangClient], Awaitable[None]]:
    async def update(client: SGLangClient) -> None:
        async with client.paused(mode):
            await client.update_weights_from_tensors(WEIGHTS, 9, bucket_bytes=1, **options)

    return update


def test_an_in_place_pause_flushes_the_cache_before_the_first_weight_is_sent() -> None:
    trainee = Trainee()
    trainee.refuse["/flush_cache"] = Reply(body=b"Cache flushed.\nPlease check", content_type="")
    with FaultyServer(trainee) as server:
        call(server, _under("in_place"))
        assert orders(server)[:3] == ["/pause_generation", "/flush_cache", "/begin_weight_update"]
        assert server.bodies("/pause_generation") == [{"mode": "in_place"}]  # not a second time for the buckets
        assert [body["flush_cache"] for body in server.bodies("/update_weights_from_tensor")] == [False] * 3


@pytest.mark.parametrize("flush_cache", [None, True])
def test_requests_that_hold_the_cache_in_place_refuse_the_update_before_it_is_sent(flush_cache: bool | None) -> None:
    trainee = Trainee()
    trainee.refuse["/flush_cache"] = Reply(body=b"Flush cache failed.\n", content_type="", status=400)
    with FaultyServer(trainee) as server:
        with pytest.raises(WeightUpdateError, match=r"no weights were sent: (.|\n)*failed(.|\n)*--disable-radix-cache"):
            call(server, _under("in_place", flush_cache=flush_cache))
        assert orders(server) == ["/pause_generation", "/flush_cache", "/continue_generation"]
        assert trainee.version == "default"


@pytest.mark.parametrize(
    ("mode", "radix_cache", "flush_cache", "flushed"),
    [
        ("in_place", True, False, False),  # asked for
        ("in_place", False, None, False),  # nothing is shared
        ("retract", True, None, True),
        ("abort", False, None, True),
    ],
)
def test_other_pauses_leave_the_flush_to_the_update(
    mode: PauseMode, radix_cache: bool, flush_cache: bool | None, flushed: bool
) -> None:
    trainee = Trainee()
    trainee.radix_cache = radix_cache
    with FaultyServer(trainee) as server:
        call(server, _under(mode, flush_cache=flush_cache))
        assert "/flush_cache" not in orders(server)
        sent = [body["flush_cache"] for body in server.bodies("/update_weights_from_tensor")]
        assert sent == [False, False, flushed]


@pytest.mark.parametrize(("mode", "flush_cache"), [("in_place", None), ("retract", False)])
def test_an_update_from_disk(mode: PauseMode, flush_cache: bool | None) -> None:
    async def update(client: SGLangClient) -> None:
        async with client.paused(mode):
            await client.update_weights_from_disk("somewhere", "step_3", flush_cache=flush_cache)

    with FaultyServer(Trainee()) as server:
        call(server, update)
        flushed = ["/flush_cache"] if mode == "in_place" else []
        updates = [*flushed, "/update_weights_from_disk"]
        assert orders(server) == ["/pause_generation", *updates, "/continue_generation"]
        assert server.bodies("/update_weights_from_disk") == [
            {"model_path": "somewhere", "weight_version": "step_3", "flush_cache": False}
        ]


@pytest.mark.parametrize(
    "answer",
    [
        Reply({"success": False, "message": "shape of a is wrong"}, status=400),
        Reply({"success": False, "message": "shape of a is wrong"}),
        Reply({"message": "shape of a is wrong"}),
        Reply({"error": {"message": "shape of a is wrong"}}, status=503),
    ],
)
def test_a_refused_update_is_an_error_ends_its_session_and_is_sent_once(answer: Reply) -> None:
    trainee = Trainee()
    trainee.refuse["/update_weights_from_tensor"] = answer
    with FaultyServer(trainee) as server:
        with pytest.raises(WeightUpdateError, match="shape of a is wrong"):
            call(server, lambda client: client.update_weights_from_tensors(WEIGHTS, 1, bucket_bytes=1))
        assert orders(server) == [
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/continue_generation",
        ]


def test_a_version_that_does_not_take_effect_is_an_error() -> None:
    trainee = Trainee()
    trainee.refuse["/update_weights_from_disk"] = Reply({"success": True, "message": "ok"})
    with (
        FaultyServer(trainee) as server,
        pytest.raises(WeightUpdateError, match="version 5, but the server reports 'default'"),
    ):
        call(server, lambda client: client.update_weights_from_disk("somewhere", 5))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([], "no weights were given"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' is there twice"),
        ({"a": [1.0]}, "'a' is list, not a tensor"),
        ({"module.a": torch.ones(1), "module.b": torch.ones(1)}, "begin with 'module.'"),
    ],
)
def test_weights_that_are_none_are_refused_before_anything_is_sent(weights: Any, says: str) -> None:
    with FaultyServer(Trainee()) as server:
        with pytest.raises(ValueError, match=says):
            call(server, lambda client: client.update_weights_from_tensors(weights, 1))
        assert server.requests == []


def test_a_pause_does_not_wait_for_the_requests_it_is_to_pause() -> None:
    async def pause_while_busy(client: SGLangClient) -> None:
        sampling = SamplingParameters(max_new_tokens=1)
        busy = asyncio.create_task(client.generate([[1], [2]], sampling))
        while len(server.bodies("/generate")) < 2:
            await asyncio.sleep(0.005)
        await client.pause("abort")
        await client.continue_()
        busy.cancel()

    with FaultyServer(Trainee()) as server:
        call(server, pause_while_busy, concurrency=2)
        assert orders(server)[2:] == ["/pause_generation", "/continue_generation"]
        assert server.bodies("/pause_generation") == [{"mode": "abort"}]


def test_generation_continues_after_an_error_under_a_pause() -> None:
    async def fail(client: SGLangClient) -> None:
        async with client.paused():
            raise KeyError("trainer")

    with FaultyServer(Trainee()) as server:
        with pytest.raises(KeyError, match="trainer"):
            call(server, fail)
        assert orders(server) == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_an_order_that_the_server_did_not_follow_is_an_error(path: str) -> None:
    async def order(client: SGLangClient) -> None:
        await client.pause()
        await client.continue_()

    trainee = Trainee()
    trainee.refuse[path] = Reply({"success": False, "message": "busy loading"})
    with FaultyServer(trainee) as server, pytest.raises(RequestError, match=f"did not do {path}: busy loading"):
        call(server, order)


def test_a_pause_of_another_kind_is_refused() -> None:
    with FaultyServer(Trainee()) as server:
        with pytest.raises(ValueError, match="mode='soft' is unknown"):
            call(server, lambda client: client.pause("soft"))  # pyright: ignore[reportArgumentType]
        assert server.requests == []


def test_server_info_holds_what_the_last_update_left() -> None:
    with FaultyServer(Trainee()) as server:
        info = call(server, lambda client: client.server_info())
        assert (info.version, info.tp_size, info.dtype, info.weight_version) == ("0.5.23", 2, "bfloat16", "default")


def test_server_info_asks_again_and_refuses_what_is_none() -> None:
    answers = [Reply(status=503), Reply([1])]
    with FaultyServer(lambda request: answers.pop(0) if answers else honest(request)) as server:
        with pytest.raises(RequestError):
            call(server, lambda client: client.server_info())
        assert server.paths()[:2] == ["/server_info", "/server_info"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "float32", "kv_cache_dtype": "auto"}, None),
        ({"dtype": "bfloat16", "enable_fp32_lm_head": True}, None),
        ({"dtype": "bfloat16"}, "--enable-fp32-lm-head"),
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype fp8_e4m3"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding EAGLE"),
        ({"preferred_sampling_params": {"top_k": 20}}, "preferred_sampling_params"),
        ({"allow_auto_truncate": True}, "allow_auto_truncate"),
    ],
)
def test_settings_that_widen_the_mismatch_are_named(settings: dict[str, Any], says: str | None) -> None:
    risks = ServerInfo(**settings).risks()
    assert len(risks) == (says is not None) and all(says in risk for risk in risks if says)


def _with_plugin(weights: dict[str, torch.Tensor], **more: Any) -> list[dict[str, Any]]:
    """internal_states of a server that holds these."""
    found = digests(weights.items(), torch.bfloat16)
    told = {"server": "a:1/7", "dtype": "bfloat16", "pp_size": 1, "fingerprint": fingerprint(found)}
    return [{META_KEY: {**told, "tensors": written(found), **more}}]


@pytest.mark.parametrize(
    ("states", "verified"),
    [
        (_with_plugin(WEIGHTS), True),
        (_with_plugin({**WEIGHTS, "d": torch.ones(2)}), False),  # which nobody sent
        ([], False),
    ],
)
def test_the_fingerprint_is_that_of_all_that_was_sent(states: list[dict[str, Any]], verified: bool) -> None:
    trainee = Trainee()
    trainee.states = states

    async def update(client: SGLangClient) -> None:
        await client.update_weights_from_tensors(WEIGHTS, 7)
        expected = fingerprint(digests(WEIGHTS.items(), torch.bfloat16)) if verified else None
        assert client.fingerprint == expected
        await client.update_weights_from_disk("checkpoint", 8)  # of which nothing is known
        assert client.fingerprint is None

    with FaultyServer(trainee) as server:
        call(server, update)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        (_with_plugin({**WEIGHTS, "a": torch.ones(2, 3)}), "a:1/7 serves other weights than version 7: 1 of 3 tensors"),
        (_with_plugin(WEIGHTS, tensors={"a": ["no hex", "bfloat16", 2]}), "whether the weights that were sent serve"),
    ],
)
def test_what_serves_is_not_what_was_sent(states: list[dict[str, Any]], says: str) -> None:
    trainee = Trainee()
    trainee.states = states
    with FaultyServer(trainee) as server, pytest.raises(WeightUpdateError, match=says):
        call(server, lambda client: client.update_weights_from_tensors(WEIGHTS, 7))


class Sampling(Trainee):
    """It answers /generate, with what its plugin tells of the process that does."""

    def __init__(self) -> None:
        super().__init__()
        self.states = _with_plugin(WEIGHTS, started=1.5, update={"number": 4})
        self.served = {
            "server": "a:1/7",
            "started": 1.5,
            "fingerprint": self.states[0][META_KEY]["fingerprint"],
            "number": 4,
        }
        self.delay = 0.0

    def __call__(self, request: Request) -> Reply:
        if request.path != "/generate":
            return super().__call__(request)
        reply, told = honest(request), self.served
        reply.delay = self.delay
        update = {"number": told.get("number"), "changed": 3, "tensors": 3, "changed_matrices": 2, "matrices": 2}
        meta: dict[str, Any] = reply.json["meta_info"]
        meta["weight_versions"][0]["version"] = self.version
        if told:
            weights = [{"fingerprint": told["fingerprint"], "since": self.version, "start": 0, "end": 4}]
            fixed = {"sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "bfloat16"}
            meta[META_KEY] = [{**fixed, **told, "weights": weights, "update": update}]
        return reply


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"started": 9.5}, "a:1/7 is none of the processes that took version '7' .*started again"),
        ({"server": "a:1/8"}, "a:1/8 is none of the processes that took version '7' \\(a:1/7\\)"),
        ({"fingerprint": "ff", "number": 5}, "somebody else updated it since \\(5 updates, this client's was number 4"),
        ({"fingerprint": None}, "an update of somebody else is under way, or its memory was released"),
        ({"version": "default"}, "samples as version 'default', and this client's last update was '7': it started"),
    ],
)
@pytest.mark.parametrize("way", ["tensors", "disk"])
def test_samples_of_other_weights_than_the_last_update_fail(change: dict[str, Any], says: str | None, way: str) -> None:
    trainee = Sampling()

    async def run(client: SGLangClient) -> list[Any]:
        sampling = SamplingParameters(max_new_tokens=4)
        before = await client.generate([[1]], sampling)  # of a client that has updated nothing
        if way == "tensors":
            await client.update_weights_from_tensors(WEIGHTS, 7)
        else:
            await client.update_weights_from_disk("checkpoint", 7)
        first = await client.generate([[1]], sampling)
        trainee.version = change.get("version", trainee.version)
        trainee.served |= {name: value for name, value in change.items() if name != "version"}
        if says is None:
            return [*before, *first, *(await client.generate([[1], [2]], sampling))]
        with pytest.raises(GenerateError, match=says) as failed:
            await client.generate([[1], [2]], sampling)
        assert failed.value.came == [None, None] and failed.value.failures[0].kind == "weights"
        return []

    assert len(call(trainee, run)) == (0 if says else 4)


@pytest.mark.parametrize("verified", [True, False])
def test_a_server_without_the_plugin_is_known_by_its_version(verified: bool) -> None:
    trainee = Sampling()
    trainee.states, trainee.served = [], {}

    async def run(client: SGLangClient) -> list[Any]:
        await client.update_weights_from_tensors(WEIGHTS, 7)
        await client.generate([[1]], SamplingParameters(max_new_tokens=4))
        trainee.version = "default"
        return await client.generate([[1]], SamplingParameters(max_new_tokens=4))

    if verified:
        with pytest.raises(GenerateError, match="started again, or somebody else"):
            call(trainee, run)
    else:
        assert len(call(trainee, run, verify_updates=False)) == 1


def test_a_sample_in_flight_over_an_update_is_not_judged_by_it() -> None:
    trainee = Sampling()

    async def run(client: SGLangClient) -> list[Any]:
        await client.update_weights_from_tensors(WEIGHTS, 7)
        trainee.delay = 0.5
        running = asyncio.create_task(client.generate([[1]], SamplingParameters(max_new_tokens=4)))
        while not server.bodies("/generate"):
            await asyncio.sleep(0.01)
        await client.update_weights_from_tensors(WEIGHTS, 8)
        return await running

    with FaultyServer(trainee) as server:
        (sample,) = call(server, run)
    assert sample.weight_versions[-1].version == "7"


WORKER = """
import sys, torch, torch.distributed as dist
from mismatch_plugin.sglang.control import join_weights_update_group
group = join_weights_update_group(
    "127.0.0.1", int(sys.argv[1]), world_size=2, backend="gloo", timeout=60, rank=1
)
received = []
for shape, dtype in (([2, 3], "float32"), ([2], "bfloat16"), ([4], "float32")):
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    dist.broadcast(tensor, src=0, group=group)
    received.append(tensor.flatten().tolist())
print(received)
"""


def test_tensors_arrive_over_a_group(free_port: int) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(free_port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    trainee = Trainee()
    trainee.tp_size = 1

    async def update(client: SGLangClient) -> tuple[str, str]:
        group = await client.init_weights_update_group("127.0.0.1", free_port)
        await client.update_weights_from_group(WEIGHTS, 4, group, bucket_bytes=28)
        # A real server answers once its workers have everything; this one cannot know.
        printed = await asyncio.to_thread(worker.communicate, timeout=60)
        await client.destroy_weights_update_group(group)
        return printed

    try:
        with FaultyServer(trainee) as server:
            output, errors = call(server, update)
            assert output.strip() == str([tensor.flatten().tolist() for tensor in WEIGHTS.values()]), errors
            (init,) = server.bodies("/init_weights_update_group")
            assert (init["rank_offset"], init["world_size"], init["backend"]) == (1, 2, "gloo")
            first, last = server.bodies("/update_weights_from_distributed")
            assert (first["names"], first["dtypes"]) == (["a", "b"], ["float32", "bfloat16"])
            assert first["shapes"] == [[2, 3], [2]] and "weight_version" not in first
            assert last["weight_version"] == "4"
    finally:
        worker.kill()
        worker.communicate()


def test_a_server_that_refuses_the_group_says_so_without_a_wait(free_port: int) -> None:
    trainee = Trainee()
    trainee.refuse["/init_weights_update_group"] = Reply({"success": False, "message": "no such backend"}, status=400)
    with FaultyServer(trainee) as server, pytest.raises(WeightUpdateError, match="no such backend"):
        call(server, lambda client: client.init_weights_update_group("127.0.0.1", free_port, timeout=1.0))


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
