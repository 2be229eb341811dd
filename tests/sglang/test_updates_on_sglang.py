"""Weight updates of real servers: all ways arrive, what does not arrive is an error, and no old cache is used."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from ci.sglang_cpu.tiny_model import tiny_model
from examples.sglang_server import CpuServer
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.sglang.client import GenerateError, SGLangClient, WeightUpdateError
from mismatch_plugin.sglang.fingerprints import SentWeights
from tests.sglang import tiny
from tests.sglang.conftest import start_tiny
from tests.sglang.tiny import EXACT, PROMPTS, SHORT, distance, findings, info, print_of, run, send, served, weights


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_updates_by_every_way_arrive_and_have_no_finding(one: CpuServer, tmp_path: Path) -> None:
    """By tensors, over a process group and from disk in turn."""
    records: list[Sample] = []
    group = tiny.join(one, free_port())
    for step in range(1, 13):
        version, state, way = f"c{step}", weights(100 + step), step % 3
        if way == 0:
            model = tiny_model("llama", 0)
            model.load_state_dict(state)
            model.save_pretrained(tmp_path)
            run(one, lambda client, version=version: client.update_weights_from_disk(str(tmp_path), version))
        elif way == 1:
            tiny.broadcast(one, group, state, version)
        else:
            send(one, state, version)
        (record,) = tiny.sample(one, count=1)
        (span,) = served(record).weights
        assert (span.fingerprint, span.since, span.start, span.end) == (print_of(state), version, 0, 8)
        update = served(record).update
        assert (update.changed, update.tensors, update.changed_matrices, update.matrices) == (15, 15, 10, 10)
        assert distance([record], state) < EXACT
        told = {"trainer_version": version, "trainer_fingerprint": print_of(state)}
        assert findings([record.with_fields(train_log_probs=record.rollout_log_probs, **told)]) == []
        records.append(record)
    assert tiny.order(one, "destroy_weights_update_group", tiny.GROUP)["success"] is True
    assert tiny.faults(records) == ["mixed_versions"]  # which is true of all together: twelve


LAYERS = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]  # as a wrong pipeline offset would have it
NORMS = [f"model.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")]


@pytest.mark.parametrize("names", [LAYERS, NORMS])
def test_two_tensors_of_one_shape_that_change_places_are_named(one: CpuServer, names: list[str]) -> None:
    state, (first, second) = weights(40), names
    swapped = {first: state[second], second: state[first]}
    send(one, state, "placed")
    before = info(one)["fingerprint"]
    tiny.session(one, swapped, weight_version="exchanged")
    told = info(one)
    assert before == print_of(state) != told["fingerprint"] == print_of({**state, **swapped})
    assert (told["update"]["changed"], told["update"]["tensors"]) == (2, 15)
    sent = SentWeights()
    sent.add(state.items())
    assert sorted(sent.compare(told).differ) == names


def test_a_client_notices_a_restart_and_a_server_requires_changes(tiny_folder: Path) -> None:
    port, settings = free_port(), {"MISMATCH_REQUIRE_CHANGE": "11", "MISMATCH_SERVER_ID": "rollout-7"}

    async def job() -> None:
        async with SGLangClient(f"http://127.0.0.1:{port}") as client:
            with start_tiny(tiny_folder, "before", port=port):
                await client.update_weights_from_tensors(weights(5), "v1")
                assert len(await client.generate(PROMPTS, SHORT)) == 8
            with start_tiny(tiny_folder, "after", port=port, set=settings):
                with pytest.raises(GenerateError, match="started again with the weights of its launch"):
                    await client.generate(PROMPTS[:1], SHORT)
                await client.update_weights_from_tensors(weights(5), "v2")
                (record,) = await client.generate(PROMPTS[:1], SHORT)
                assert served(record).server == "rollout-7"
                norms = {name: tensor for name, tensor in weights(5).items() if "norm" in name}
                says = r"10 of 15 tensors changed. The same as before: model\.layers\.0\.in"
                with pytest.raises(WeightUpdateError, match=says):
                    await client.update_weights_from_tensors({**weights(6), **norms}, "v3")

    asyncio.run(job())
