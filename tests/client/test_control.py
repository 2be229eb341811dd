"""Weight updates, pauses and questions: what goes over the wire, in which order, and what a refusal does."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.client import GenerateError, RequestError, ServerInfo, SGLangClient, WeightUpdateError
from mismatch_plugin.sglang.fingerprints import digests, fingerprint, written
from tests.fixtures.faulty_server import FaultyServer, Reply, Request, call, honest

WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.ones(4, 4)[:, 1],  # a view with strides
}
FOUR = SamplingParameters(max_new_tokens=4)


def state_of(weights: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    """What the plugin of a server that holds these tells."""
    found = digests(weights.items(), torch.bfloat16)
    told = {"server": "a:1/7", "started": 1.5, "dtype": "bfloat16", "pp_size": 1, "update": {"number": 4}}
    return {**told, "fingerprint": fingerprint(found), "tensors": written(found), **more}


class Trainee:
    """A server that takes weights: it keeps the version it was told, as SGLang does.

    refuse: path → its answer. states: what its plugin tells of itself. served: what it tells in replies.
    """

    def __init__(self, *states: dict[str, Any], refuse: Mapping[str, Reply] | None = None) -> None:
        self.version, self.refuse = "default", refuse or {}
        self.states = [{META_KEY: state} for state in states]
        self.served = {name: states[0][name] for name in ("server", "started", "fingerprint")} if states else {}
        self.number, self.delay = 4, 0.0

    def __call__(self, request: Request) -> Reply:
        path = request.path.strip("/")
        if path in self.refuse:
            return self.refuse[path]
        if path == "generate":
            return self.reply(request)
        if path == "server_info":
            info = {"version": "0.5.23", "tp_size": 2, "dtype": "float32", "weight_version": "old"}
            return Reply({**info, "internal_states": self.states})
        if path == "model_info":
            return Reply({"weight_version": self.version, "model_path": "m"})
        if path.startswith("update_weights"):
            self.version = request.json.get("weight_version") or self.version
        return Reply({"success": True, "message": "ok"})

    def reply(self, request: Request) -> Reply:
        reply = honest(request)
        reply.delay = self.delay
        meta: dict[str, Any] = reply.json["meta_info"]
        meta["weight_versions"][0]["version"] = self.version
        if self.served:
            weights = [{"fingerprint": self.served["fingerprint"], "since": self.version, "start": 0, "end": 4}]
            counts = {"changed": 3, "tensors": 3, "changed_matrices": 2, "matrices": 2}
            fixed = {"sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "bfloat16"}
            update = {"number": self.number, **counts}
            meta[META_KEY] = [{**fixed, **self.served, "weights": weights, "update": update}]
        return reply


def unpacked(body: Any) -> dict[str, torch.Tensor]:
    (payload,) = {base64.b64decode(payload) for payload in body["serialized_named_tensors"]}
    return dict(pickle.loads(payload))


def orders(server: FaultyServer) -> list[str]:
    """Requests that change something, in order, in words."""
    found = []
    for request in server.requests:
        path, body = request.path.strip("/"), request.json
        if path.startswith("update_weights_from"):
            names = " ".join(unpacked(body)) if "serialized_named_tensors" in body else body["model_path"]
            version = f" as {body['weight_version']}" if "weight_version" in body else ""
            found.append(f"{names}{version}{' and flush' if body['flush_cache'] else ''}")
        elif path == "pause_generation":
            found.append(f"pause {body['mode']}")
        elif not path.endswith("_info"):
            found.append(path.removesuffix("_generation").removesuffix("_weight_update"))
    return found


def update(disk: bool = False) -> Any:
    """To version 7."""

    async def job(client: SGLangClient) -> None:
        if disk:
            await client.update_weights_from_disk("path", 7)
        else:
            await client.update_weights_from_tensors(WEIGHTS, 7)

    return job


@pytest.mark.parametrize(
    ("disk", "expected"), [(False, ["begin", "a b c as 7 and flush", "end"]), (True, ["path as 7 and flush"])]
)
def test_what_an_update_sends_in_which_order(disk: bool, expected: list[str]) -> None:
    with FaultyServer(Trainee()) as server:
        call(server, update(disk))
        assert orders(server) == expected
        for body in server.bodies("/update_weights_from_tensor"):
            assert len(body["serialized_named_tensors"]) == 2  # one for each tensor-parallel worker
            for name, tensor in unpacked(body).items():
                assert tensor.dtype == WEIGHTS[name].dtype and torch.equal(tensor, WEIGHTS[name])
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


SHAPE = {"success": False, "message": "shape of a is wrong"}
BROKEN_OFF = ["begin", "a b c as 7 and flush", "end"]


@pytest.mark.parametrize(
    ("disk", "refuse", "says", "expected"),
    [
        (False, {"update_weights_from_tensor": Reply(SHAPE, status=400)}, "shape of a is wrong", BROKEN_OFF),
        (False, {"update_weights_from_tensor": Reply([])}, "no success was reported, but", BROKEN_OFF),
        (False, {"update_weights_from_tensor": Reply(SHAPE, status=503)}, "shape of a is wrong", BROKEN_OFF),
        (
            True,
            {"update_weights_from_disk": Reply({"success": True})},
            "sent as version 7, but the server reports 'default'",
            ["path as 7 and flush"],
        ),
    ],
)
def test_a_refused_update_is_an_error_ends_its_session_and_is_sent_once(
    disk: bool, refuse: dict[str, Reply], says: str, expected: list[str]
) -> None:
    with FaultyServer(Trainee(refuse=refuse)) as server:
        with pytest.raises(WeightUpdateError, match=says):
            call(server, update(disk))
        assert orders(server) == expected


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (lambda client: client.update_weights_from_tensors([], 1), "no weights were given"),
        (lambda client: client.update_weights_from_tensors([("a", torch.ones(1))] * 2, 1), "'a' is there twice"),
        (lambda client: client.update_weights_from_tensors({"module.a": torch.ones(1)}, 1), "begin with 'module.'"),
        (lambda client: client.pause("soft"), "mode='soft' is unknown"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_sent(job: Any, says: str) -> None:
    with FaultyServer(Trainee()) as server:
        with pytest.raises(ValueError, match=says):
            call(server, job)
        assert server.requests == []


def test_a_pause_does_not_wait_for_the_requests_it_is_to_pause() -> None:
    async def pause_while_busy(client: SGLangClient) -> None:
        busy = asyncio.create_task(client.generate([[1], [2]], FOUR))
        while len(server.bodies("/generate")) < 2:
            await asyncio.sleep(0.005)
        await client.pause("abort")
        await client.continue_()
        busy.cancel()

    with FaultyServer(Trainee(refuse={"generate": Reply(hang=True)})) as server:
        call(server, pause_while_busy, concurrency=2)
        assert orders(server)[2:] == ["pause abort", "continue"]


def test_generation_continues_after_an_error_under_a_pause() -> None:
    async def fail(client: SGLangClient) -> None:
        async with client.paused():
            raise KeyError("trainer")

    with FaultyServer(Trainee()) as server:
        with pytest.raises(KeyError, match="trainer"):
            call(server, fail)
        assert orders(server) == ["pause retract", "continue"]


@pytest.mark.parametrize("path", ["pause_generation", "continue_generation"])
def test_an_order_that_the_server_did_not_follow_is_an_error(path: str) -> None:
    async def order(client: SGLangClient) -> None:
        await client.pause()
        await client.continue_()

    refused = Reply({"success": False, "message": "busy loading"})
    with pytest.raises(RequestError, match=f"did not do /{path}: busy loading"):
        call(Trainee(refuse={path: refused}), order)


def test_server_info_holds_what_the_last_update_left() -> None:
    info = call(Trainee(), lambda client: client.server_info())
    assert (info.version, info.tp_size, info.dtype, info.weight_version) == ("0.5.23", 2, "float32", "default")


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


# Whose weights serve, by what the plugin tells ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "verified"),
    [
        ([state_of(WEIGHTS)], True),
        ([state_of(WEIGHTS), state_of(WEIGHTS, server="b:1/8")], True),
        ([state_of({**WEIGHTS, "d": torch.ones(2)})], False),  # which nobody sent
        ([], False),
    ],
)
def test_the_fingerprint_is_that_of_all_that_was_sent(states: list[dict[str, Any]], verified: bool) -> None:
    async def job(client: SGLangClient) -> None:
        await client.update_weights_from_tensors(WEIGHTS, 7)
        expected = fingerprint(digests(WEIGHTS.items(), torch.bfloat16)) if verified else None
        assert client.fingerprint == expected
        await client.update_weights_from_disk("checkpoint", 8)  # of which nothing is known
        assert client.fingerprint is None

    call(Trainee(*states), job)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (state_of({**WEIGHTS, "a": torch.ones(2, 3)}), "a:1/7 serves other weights than version 7: 1 of 3 tensors"),
        (
            state_of(WEIGHTS, tensors={"a": ["no hex", "bfloat16", 2]}),
            "cannot be confirmed: .*fingerprints have another form",
        ),
    ],
)
def test_what_serves_is_not_what_was_sent(state: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightUpdateError, match=says):
        call(Trainee(state), update())


@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"started": 9.5}, "a:1/7 is none of the processes that took version '7' .*started again"),
        ({"server": "a:1/8"}, "a:1/8 is none of the processes that took version '7' \\(a:1/7\\)"),
        ({"fingerprint": "ff", "number": 5}, "somebody else updated it since \\(5 updates, this client's was number 4"),
        ({"fingerprint": None}, "is updating it, or its memory was released"),
        ({"version": "default"}, "samples as version 'default', and this client's last update was '7': it started"),
        ({"served": {}, "version": "default"}, "samples as version 'default'"),  # without the plugin
        ({"version": "default", "verify_updates": False}, None),
    ],
)
def test_samples_of_other_weights_than_the_last_update_fail(change: dict[str, Any], says: str | None, disk: bool):
    trainee = Trainee(state_of(WEIGHTS))

    async def run(client: SGLangClient) -> None:
        assert len(await client.generate([[1]], FOUR)) == 1  # of a client that has updated nothing
        await update(disk)(client)
        assert len(await client.generate([[1]], FOUR)) == 1
        for name, value in change.items():
            if name in ("version", "number", "served", "verify_updates"):
                setattr(trainee, name, value)
            else:
                trainee.served[name] = value
        if says is None:
            assert len(await client.generate([[1], [2]], FOUR)) == 2
            return
        with pytest.raises(GenerateError, match=says) as failed:
            await client.generate([[1], [2]], FOUR)
        assert failed.value.came == [None, None] and failed.value.failures[0].kind == "weights"

    call(trainee, run, verify_updates=change.get("verify_updates", True))


def test_a_sample_in_flight_over_an_update_is_not_judged_by_it() -> None:
    trainee = Trainee(state_of(WEIGHTS))

    async def run(client: SGLangClient) -> list[Any]:
        await client.update_weights_from_tensors(WEIGHTS, 6)
        trainee.delay = 0.5
        running = asyncio.create_task(client.generate([[1]], FOUR))
        while not server.bodies("/generate"):
            await asyncio.sleep(0.01)
        await update()(client)
        return await running

    with FaultyServer(trainee) as server:
        (sample,) = call(server, run)
    assert sample.weight_versions[-1].version == "6"
