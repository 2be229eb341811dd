"""The plugin inside real servers: nothing changes but what replies tell, and what they tell is so."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

import mismatch_plugin
from ci.sglang_cpu.tiny_model import write_tiny_model
from examples.sglang_server import CpuServer, ServerError, find_python
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.client import SGLangClient
from tests.sglang import tiny
from tests.sglang.conftest import start_tiny
from tests.sglang.tiny import LONG, PREFIX, PROMPTS, SHORT, findings, info, kv, post, print_of, run, send, served

GREEDY = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}


def test_tokens_and_log_probs_are_those_of_a_server_without_it(one: CpuServer, bare: CpuServer) -> None:
    """Greedy and, since SGLang ignores seeds on CPU, prompts that are rescored; each bit for bit."""
    for server in (one, bare):
        send(server, tiny.weights(0), "same")
    for prompt in PROMPTS:
        asked = {"input_ids": prompt, "sampling_params": GREEDY, "logprob_start_len": 0}
        ours, plain = (post(server, **asked) for server in (one, bare))
        assert META_KEY in ours["meta_info"] and META_KEY not in plain["meta_info"]
        assert tiny.without_its_own(ours) == tiny.without_its_own(plain)
    assert "mismatch_plugin: " not in bare.log.read_text()


def test_a_stream_carries_it_once_at_its_end(one: CpuServer, bare: CpuServer) -> None:
    def stream(server: CpuServer) -> list[dict[str, Any]]:
        send(server, tiny.weights(0), "stream")
        body = {"input_ids": PROMPTS[1], "return_logprob": True, "stream": True, "sampling_params": GREEDY}
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=600) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    ours, plain = stream(one), stream(bare)
    assert ours[-1]["output_ids"] == plain[-1]["output_ids"]
    assert ours[-1]["meta_info"]["output_token_logprobs"] == plain[-1]["meta_info"]["output_token_logprobs"]
    assert not any(chunk["meta_info"].get(META_KEY) for chunk in ours[:-1])
    (told,) = ours[-1]["meta_info"][META_KEY]
    assert [(span["start"], span["end"]) for span in told["weights"]] == [(0, 20)]


SHIFTED = {"repetition_penalty": 1.1, "logit_bias": {"7": 1.0}, "min_new_tokens": 2}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"temperature": 0.7}, {"temperature": 0.7, "filters": [], "shifts": [], "log_probs_of": "tempered"}),
        ({}, {"dtype": "float32", "head_dtype": "float32", "quantization": None, "speculative": None}),
        ({}, {"deterministic": False, "tp_rank": 0, "tp_size": 1}),
        ({"temperature": 0.0}, {"temperature": 1.0}),
        ({"temperature": 0.5, "top_k": 1}, {"temperature": None}),  # 1 where the batch is all greedy
        ({"top_p": 0.9, "top_k": 40, "min_p": 0.01}, {"filters": ["top_p", "top_k", "min_p"]}),
        (SHIFTED, {"shifts": ["repetition_penalty", "min_new_tokens", "logit_bias"]}),
    ],
)
def test_what_the_log_probs_are_of(one: CpuServer, asked: dict[str, Any], expected: dict[str, Any]) -> None:
    body = post(one, sampling_params={"max_new_tokens": 6, "ignore_eos": True, **asked})
    (told,) = body["meta_info"][META_KEY]
    assert {name: told[name] for name in expected} == expected


# Weights --------------------------------------------------------------------------------------------------------------


def test_tokens_of_a_response_have_the_weights_that_made_them(one: CpuServer) -> None:
    """Paused in place after some tokens, and once more with the label kept: they keep their keys and values."""
    states = [tiny.weights(seed) for seed in (3, 4, 5)]

    async def job(client: SGLangClient) -> list[Sample]:
        await client.update_weights_from_tensors(states[0], "x0")
        running = asyncio.create_task(client.generate(PROMPTS, LONG))
        for state, version in zip(states[1:], ("x1", "x1"), strict=True):
            await client.generate(PROMPTS[:1], SHORT)  # by its end the others, which came first, are running
            assert not running.done()
            await asyncio.to_thread(tiny.in_place, one, state, version)
        return await running

    for record in run(one, job, verify_updates=False):  # it does not know of the later ones
        spans, labels = served(record).weights, record.weight_versions
        assert [span.fingerprint for span in spans] == [print_of(state) for state in states]
        assert spans[0].start == 0 and spans[-1].end == 300
        assert [span.version for span in labels] == ["x0", "x1"]
        assert spans[0].end == labels[0].end == spans[1].start
        assert abs(sum(kv(record)) - (len(PROMPTS[0]) + spans[1].end)) <= 1
        assert "stale_cache" not in tiny.faults([record])


def test_requests_that_are_retracted_lose_their_old_keys_and_values(one: CpuServer) -> None:
    """So each token has the log-prob of the weights that its span names."""
    states = {print_of(state): state for state in (tiny.weights(6), tiny.weights(7))}
    old, new = states.values()

    async def job(client: SGLangClient) -> list[Sample]:
        await client.update_weights_from_tensors(old, "r0")
        running = asyncio.create_task(client.generate(PROMPTS, LONG))
        await client.generate(PROMPTS[:1], SHORT)
        async with client.paused("retract"):
            assert not running.done()
            await client.update_weights_from_tensors(new, "r1")
        return await running

    records = run(one, job)
    assert [kv(record) for record in records] == [[]] * len(records)
    assert any(len(served(record).weights) == 2 for record in records)  # those that had begun
    for record in records:
        for span in served(record).weights:
            expected = tiny.log_probs(states[span.fingerprint], record)[span.start : span.end]
            assert record.rollout_log_probs[span.start : span.end] == pytest.approx(expected, abs=1e-3)


def test_one_update_in_several_sessions_is_one_update(one: CpuServer) -> None:
    """The version comes with the last part."""
    send(one, tiny.weights(30), "m0")
    before = served(tiny.sample(one, count=1)[0]).update.number
    state = tiny.weights(31)
    names = [*state]
    tiny.session(one, {name: state[name] for name in names[::2]})
    tiny.session(one, {name: state[name] for name in names[1::2]}, weight_version="m1")
    (record,) = tiny.sample(one, count=1)
    update, (span,) = served(record).update, served(record).weights
    assert (update.number, update.changed, update.changed_matrices) == (before + 1, 15, 10)
    assert (span.fingerprint, span.since) == (print_of(state), "m1") and findings([record]) == []


def test_two_ranks_have_one_fingerprint_and_show_when_they_part(tp2: CpuServer) -> None:
    state = tiny.weights(1)
    send(tp2, state, "v1")
    record = tiny.sample(tp2, count=1)[0]
    assert served(record).weights[0].fingerprint == info(tp2)["fingerprint"] == print_of(state)
    assert served(record).update.changed_matrices == served(record).update.matrices == 10
    # One rank takes new weights and the other one's stay as they were, of which SGLang says nothing.
    tiny.session(tp2, tiny.weights(2), state, weight_version="v2")
    update = served(tiny.sample(tp2, count=1)[0]).update
    assert (update.changed, update.changed_matrices, update.matrices) == (15, 0, 10)
    assert f"WARNING: update {update.number} changed 15 of 15 tensors, not " in tp2.log.read_text()


def test_pipeline_stages_have_one_fingerprint(tiny_folder: Path, tmp_path: Path) -> None:
    loaded, other = (dict(write_tiny_model(tmp_path / str(seed), "llama", seed).state_dict()) for seed in (0, 1))
    with start_tiny(tiny_folder, "pp2", "--pp-size", "2", set={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as server:
        for version, state in (("default", loaded), ("v1", other)):
            if version == "v1":
                run(server, lambda client: client.update_weights_from_disk(str(tmp_path / "1"), "v1"))
            record = tiny.sample(server, count=1)[0]
            assert served(record).weights[0].fingerprint == info(server)["fingerprint"] == print_of(state)
        assert served(record).update.changed_matrices == served(record).update.matrices == 10


# Faults, each found in the first replies after a sound step, by what the servers tell alone ---------------------------


def test_planted_faults_of_weights_are_found_at_the_first_batch_and_named_first(one: CpuServer, two: CpuServer) -> None:
    def both(*states: tiny.State, version: str) -> list[Sample]:
        """A trainer that does not look at what serves."""
        for server, state in zip((one, two), states, strict=True):
            send(server, state, version, verify=False)
        return [record for server in (one, two) for record in tiny.sample(server)]

    old, new, next_ = (tiny.weights(seed) for seed in (20, 21, 22))
    both(old, old, version="p0")
    label = both(old, old, version="p1")
    both(next_, next_, version="p2")
    wrong = {f"wrong.{name}": tensor for name, tensor in new.items()}
    names = both(wrong, wrong, version="p3")
    part = {name: tensor for name, tensor in new.items() if ".layers.0." in name}
    layer = both(part, part, version="p4")
    both(old, old, version="p5")
    server = both(new, old, version="p6")
    for records, fault, confidence in (
        (label, "weights_not_updated", "certain"),
        (names, "weights_not_updated", "certain"),
        (layer, "weights_partly_updated", "likely"),  # frozen layers look the same
        (server, "stale_server", "certain"),
    ):
        first = findings(records)[0]
        assert (first.fault, first.confidence) == (fault, confidence), first
        assert served(records[-1]).server in first.evidence


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_updates_without_a_flush_show_at_the_first_hit(name: str, request: pytest.FixtureRequest) -> None:
    """Seventeen, with prompts that share a prefix."""
    server = request.getfixturevalue(name)
    hits: list[list[int]] = []
    for step in range(18):
        ranks = 2 if name == "tp2" else 1
        tiny.session(server, *[tiny.weights(step)] * ranks, weight_version=f"s{step}", flush_cache=step == 0)
        (record,) = run(server, lambda client, at=step % 8: client.generate([PROMPTS[at]], SHORT))
        found = findings([record])
        assert [(item.fault, item.confidence) for item in found] == ([("stale_cache", "certain")] if step else [])
        hits.append(kv(record))
    assert hits[0] == [] and [sum(of) for of in hits[1:8]] == [len(PREFIX)] * 7 and all(hits[8:])


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_a_thousand_replies_after_updates_with_a_flush_show_nothing(name: str, request: pytest.FixtureRequest) -> None:
    async def job(client: SGLangClient) -> None:
        for step in range(16 if name == "one" else 4):
            await client.update_weights_from_tensors(tiny.weights(step), f"f{step}")
            records = await client.generate(PROMPTS, SHORT, samples_per_prompt=8)
            assert not any(kv(record) for record in records) and findings(records) == []

    run(request.getfixturevalue(name), job)


# A server that cannot use it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "register.py",
            ".run_batch",
            ".run_no_batch",
            "it has no sglang.srt.managers.scheduler.Scheduler.run_no",
        ),
        ("state.py", "        params = req.sampling_params", "        params = req.planted", "failed and is off"),
    ],
)
def test_a_server_with_a_broken_plugin_serves_on(
    tiny_folder: Path, tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    """Its Python finds a copy of this package with one line changed."""
    shutil.copytree(Path(mismatch_plugin.__file__).parent, tmp_path / "changed" / "mismatch_plugin")
    path = tmp_path / "changed" / "mismatch_plugin" / "sglang" / "plugin" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/changed exec {os.path.abspath(find_python())} "$@"\n')
    python.chmod(0o755)
    with start_tiny(tiny_folder, f"broken-{file}", python=python) as server:
        send(server, tiny.weights(1), "v1")
        assert [record.served for record in tiny.sample(server)] == [None] * 8
        assert server.log.read_text().count(said) == 1


def test_a_setting_that_is_none_is_refused_at_the_start(tiny_folder: Path) -> None:
    with (
        pytest.raises(ServerError, match="MISMATCH_REQUIRE_CHANGE='all' must be a number"),
        start_tiny(tiny_folder, "refused", set={"MISMATCH_REQUIRE_CHANGE": "all"}),
    ):
        pass
