"""Keys and values that older weights computed, on real servers with a radix cache, with the plugin and without."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.sglang_cpu.tiny_model import tiny_model, write_tiny_model
from examples import sglang_server as server_module
from examples.sglang_server import CpuServer, start_cpu_server
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.sglang.client import GenerateError, SGLangClient
from mismatch_plugin.sglang.replies import parse_generate
from tests.sglang.test_plugin_on_sglang import State, post, run, send, served

PREFIX = [5 + 3 * position % 200 for position in range(48)]
PROMPTS = [[*PREFIX, 210 + number] for number in range(8)]
SHORT = SamplingParameters(max_new_tokens=8, ignore_eos=True)
UPDATES = 17


@pytest.fixture(scope="module", params=["1", "2"])
def tp_size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, tp_size: str) -> Iterator[list[CpuServer]]:
    """Float32, with a radix cache: one with the plugin and one without."""
    folder = tmp_path_factory.mktemp("cache")
    write_tiny_model(folder, "llama", seed=0)
    arguments = tuple(name for name in server_module._ARGUMENTS if name != "--disable-radix-cache")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_module, "_ARGUMENTS", (*arguments, "--tp-size", tp_size))
            if tp_size == "2":
                patch.setitem(server_module._ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND", "0|1")
            found = [stack.enter_context(start_cpu_server(folder, log=folder / "plugin.log"))]
            patch.setenv("MISMATCH_PLUGIN_SGLANG", "off")
            found.append(stack.enter_context(start_cpu_server(folder, log=folder / "bare.log")))
        yield found


def weights(step: int) -> State:
    draw = torch.Generator().manual_seed(step)
    state = tiny_model("llama", 0).state_dict()
    return {name: tensor + step * 1e-3 * torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}


def faults(records: list[Sample]) -> list[str]:
    return [item.fault for item in check_batch(make_batch(records)).findings if item.counts]


def kv(record: Sample) -> list[int]:
    assert record.served is not None and record.served.kv is not None
    return [span.tokens for span in record.served.kv]


def test_updates_in_place_without_a_flush_show_at_the_first_hit(servers: list[CpuServer]) -> None:
    """Seventeen, with prompts that share a prefix; greedy, bit for bit as without the plugin."""
    greedy = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    hits: list[list[int]] = []
    for step in range(1 + UPDATES):
        bodies: list[dict[str, Any]] = []
        for server in servers:
            send(server, weights(step), f"v{step}", flush_cache=step == 0)
            bodies.append(post(server, input_ids=PROMPTS[step % 8], sampling_params=greedy))
        (record,) = parse_generate(bodies[0], [PROMPTS[step % 8]], SamplingParameters.from_sglang(greedy))
        assert faults([record]) == (["stale_cache"] if step else [])
        hits.append(kv(record))
        del bodies[0]["meta_info"][META_KEY]
        for body in bodies:
            for name in ("id", "e2e_latency", "response_sent_to_client_ts"):
                body["meta_info"].pop(name, None)
        assert bodies[0] == bodies[1]
    assert hits[0] == [] and [sum(of) for of in hits[1:8]] == [len(PREFIX)] * 7 and all(hits[8:])


def test_a_thousand_replies_after_updates_with_a_flush_show_nothing(servers: list[CpuServer]) -> None:
    async def job(client: SGLangClient) -> list[Sample]:
        found: list[Sample] = []
        for step in range(1, 18):
            await client.update_weights_from_tensors(weights(step), f"f{step}")
            found += await client.generate(PROMPTS, SHORT, samples_per_prompt=8)
        return found

    records = run(servers[0], job)
    assert len(records) > 1000 and not any(kv(record) for record in records)
    assert faults(records) == ["mixed_versions"]  # which is true: seventeen


def test_requests_under_way_keep_theirs_in_place_and_lose_them_when_retracted(servers: list[CpuServer]) -> None:
    long = SamplingParameters(max_new_tokens=300, ignore_eos=True)

    async def job(client: SGLangClient, mode: Any) -> list[Sample]:
        await client.update_weights_from_tensors(weights(1), f"{mode}-1")
        running = asyncio.create_task(client.generate(PROMPTS, long))
        await client.generate(PROMPTS[:1], SHORT)
        async with client.paused(mode):
            assert not running.done()
            await client.update_weights_from_tensors(weights(2), f"{mode}-2", flush_cache=mode != "in_place")
        return await running

    for record in run(servers[0], lambda client: job(client, "in_place")):
        first, second = served(record).weights
        assert abs(sum(kv(record)) - (len(PROMPTS[0]) + first.end)) <= 1 and second.end == 300
        assert "stale_cache" not in faults([record])
    assert not any(kv(record) for record in run(servers[0], lambda client: job(client, "retract")))


def test_a_client_notices_an_update_of_somebody_else(servers: list[CpuServer]) -> None:
    async def job(client: SGLangClient) -> None:
        await client.update_weights_from_tensors(weights(3), "mine-3")
        assert len(await client.generate(PROMPTS, SHORT)) == 8
        await asyncio.to_thread(send, servers[0], weights(4), "mine-3")  # under the same name
        with pytest.raises(GenerateError, match=r"somebody else updated it since \(\d+ updates, this client's was"):
            await client.generate(PROMPTS, SHORT)

    run(servers[0], job)


def test_a_client_notices_a_restart(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", seed=0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def job() -> None:
        async with SGLangClient(f"http://127.0.0.1:{port}") as client:
            with start_cpu_server(tmp_path, port=port):
                await client.update_weights_from_tensors(weights(5), "kill-1")
                assert len(await client.generate(PROMPTS, SHORT)) == 8
            with start_cpu_server(tmp_path, port=port):
                with pytest.raises(GenerateError, match="started again with the weights of its launch"):
                    await client.generate(PROMPTS, SHORT)
                await client.update_weights_from_tensors(weights(5), "kill-2")
                assert len(await client.generate(PROMPTS, SHORT)) == 8

    asyncio.run(job())
