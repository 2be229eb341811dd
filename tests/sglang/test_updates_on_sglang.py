"""Weight updates of a real server with a radix cache: those that do not arrive are errors, and no old cache is used."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ci.sglang_cpu.tiny_model import Family, tiny_model, write_tiny_model
from examples import sglang_server as server_module
from examples.sglang_server import CpuServer, start_cpu_server
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.sglang.client import SGLangClient, WeightUpdateError
from mismatch_plugin.sglang.fingerprints import digests, fingerprint
from tests.fixtures.faulty_server import call

EXACT = 1e-4
PREFIX = [5 + 3 * position % 200 for position in range(48)]
PROMPTS = [[*PREFIX, 210 + number] for number in range(8)]
SHORT = SamplingParameters(max_new_tokens=16, ignore_eos=True)
LONG = SamplingParameters(max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    """Llama in float32, with the weights of seed 0 and a radix cache, which `start_cpu_server` otherwise turns off."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, "llama", seed=0)
    arguments = tuple(name for name in server_module._ARGUMENTS if name != "--disable-radix-cache")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_module, "_ARGUMENTS", arguments)
            started = stack.enter_context(start_cpu_server(folder, log=folder / "server.log"))
        yield started


@pytest.fixture(scope="module")
def qwen3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    """In float32, without a radix cache."""
    folder = tmp_path_factory.mktemp("qwen3")
    write_tiny_model(folder, "qwen3", seed=0)
    with start_cpu_server(folder, log=folder / "server.log") as started:
        yield started


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def weights(seed: int, family: Family = "llama") -> dict[str, Tensor]:
    return dict(tiny_model(family, seed).state_dict())


def distance(records: Sequence[RolloutRecord], seed: int, family: Family = "llama") -> float:
    """Largest |log-prob of the server − that of transformers in float32 with the weights of `seed`| of any token."""
    model = tiny_model(family, seed)
    largest = 0.0
    for record in records:
        ids = torch.tensor([[*record.prompt_ids, *record.response_ids]])
        logits = model(input_ids=ids).logits[0, len(record.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(record.response_ids)[:, None])[:, 0]
        found = torch.tensor(record.rollout_log_probs, dtype=torch.float32)
        largest = max(largest, float((expected - found).abs().max()))
    return largest


async def begin(client: SGLangClient, seed: int, family: Family = "llama") -> None:
    """The weights of `seed`, whatever the server had, and their keys and values of PREFIX in its cache."""
    await client.update_weights_from_tensors(weights(seed, family), f"seed-{seed}")
    await client.generate(PROMPTS[:1], SHORT)


def test_weights_that_do_not_serve_are_errors(server: CpuServer) -> None:
    async def run(client: SGLangClient) -> list[RolloutRecord]:
        await begin(client, 1)
        wrong = {name.replace("model.", "decoder."): tensor for name, tensor in weights(2).items()}
        with pytest.raises(
            WeightUpdateError, match=r"belong to no tensor of the server .* decoder\.embed_tokens\.weight, "
        ):
            await client.update_weights_from_tensors(wrong, "wrong")
        assert client.fingerprint is None
        await client.update_weights_from_tensors(weights(2), "whole")
        await client.update_weights_from_tensors(weights(3), "next", bucket_bytes=100_000)
        assert client.fingerprint == fingerprint(digests(weights(3).items()))
        return await client.generate(PROMPTS, SHORT)

    records = call(server, run)
    assert {name for record in records for name in record.version_of_token} == {"next"}
    assert distance(records, 3) < EXACT


def test_updates_from_disk_arrive(server: CpuServer, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", seed=5)

    async def run(client: SGLangClient) -> list[RolloutRecord]:
        await begin(client, 4)
        await client.update_weights_from_disk(str(tmp_path), "disk")
        return await client.generate(PROMPTS, SHORT)

    assert distance(call(server, run), 5) < EXACT


def test_updates_over_a_group_arrive(server: CpuServer, free_port: int) -> None:
    async def run(client: SGLangClient) -> list[RolloutRecord]:
        await begin(client, 6)
        group = await client.init_weights_update_group("127.0.0.1", free_port)
        await client.update_weights_from_group(weights(7), "group", group)
        await client.update_weights_from_group(weights(8), "whole", group)
        assert client.fingerprint == fingerprint(digests(weights(8).items()))
        await client.destroy_weights_update_group(group)
        return await client.generate(PROMPTS, SHORT)

    assert distance(call(server, run), 8) < EXACT


def test_after_an_in_place_update_a_shared_prefix_is_computed_again(server: CpuServer) -> None:
    async def run(client: SGLangClient, **options: Any) -> list[RolloutRecord]:
        await begin(client, 10)
        async with client.paused("in_place"):
            await client.update_weights_from_tensors(weights(11), "in-place", **options)
        return await client.generate(PROMPTS, SHORT)

    assert distance(call(server, run), 11) < EXACT
    # What the flush is for: keys and values of the old weights under the name of the new ones.
    stale = call(server, lambda client: run(client, flush_cache=False))
    assert {name for record in stale for name in record.version_of_token} == {"in-place"}
    assert distance(stale, 11) > 0.05


def test_an_in_place_update_under_requests_that_share_a_cache_is_refused_and_changes_nothing(server: CpuServer) -> None:
    async def run(client: SGLangClient) -> tuple[list[RolloutRecord], list[RolloutRecord]]:
        await begin(client, 12)
        running = asyncio.create_task(client.generate(PROMPTS, LONG))
        await client.generate(PROMPTS[:1], SHORT)  # by its end the others, which came first, are running
        assert not running.done()
        with pytest.raises(WeightUpdateError, match=r"(?s)no weights were sent: .*--disable-radix-cache"):
            async with client.paused("in_place"):
                await client.update_weights_from_tensors(weights(13), "refused")
        return await running, await client.generate(PROMPTS, SHORT)

    for records in call(server, run):
        assert {name for record in records for name in record.version_of_token} == {"seed-12"}
        assert distance(records, 12) < EXACT


def test_in_place_without_a_radix_cache_fresh_requests_are_of_the_new_weights(qwen3_server: CpuServer) -> None:
    async def run(client: SGLangClient) -> tuple[list[RolloutRecord], list[RolloutRecord]]:
        await begin(client, 20, "qwen3")
        running = asyncio.create_task(client.generate(PROMPTS, LONG))
        await client.generate(PROMPTS[:1], SHORT)
        async with client.paused("in_place"):
            assert not running.done()
            await client.update_weights_from_tensors(weights(21, "qwen3"), "new")
        return await client.generate(PROMPTS, SHORT), await running

    fresh, in_flight = call(qwen3_server, run)
    assert {name for record in fresh for name in record.version_of_token} == {"new"}
    assert distance(fresh, 21, "qwen3") < EXACT
    assert all([span.version for span in record.weight_versions] == ["seed-20", "new"] for record in in_flight)


def test_names_that_end_a_server_of_qwen3_are_not_sent(qwen3_server: CpuServer) -> None:
    state = weights(22, "qwen3")

    async def run(client: SGLangClient) -> None:
        with pytest.raises(ValueError, match=r"all names of the weights begin with 'module\.'"):
            await client.update_weights_from_tensors({f"module.{name}": state[name] for name in state}, "wrong")
        await client.update_weights_from_tensors(state, "right")
        assert await client.health()

    call(qwen3_server, run)
