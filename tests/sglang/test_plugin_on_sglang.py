"""The plugin inside real servers: nothing changes but what replies tell, and what they tell is so."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import mismatch_plugin
from ci.sglang_cpu.tiny_model import tiny_model, write_tiny_model
from examples.sglang_server import CpuServer, ServerError, find_python, start_cpu_server
from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.client import SGLangClient, WeightUpdateError
from mismatch_plugin.sglang.control import serialised
from mismatch_plugin.sglang.fingerprints import digests, fingerprint
from tests.sglang.load import until_running

State = dict[str, Tensor]
PROMPTS = [[5 + (7 * row + 3 * place) % 240 for place in range(6 + row % 5)] for row in range(8)]
SHORT = SamplingParameters(max_new_tokens=12, ignore_eos=True)
LONG = SamplingParameters(max_new_tokens=300, ignore_eos=True)


def weights(seed: int, scale: float = 0.0) -> State:
    """Of the tiny Llama; scale: how far all of its tensors, norms too, are from those of the seed."""
    state = {name: tensor.clone() for name, tensor in tiny_model("llama", seed).state_dict().items()}
    draw = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}


def start(stack: ExitStack, folder: Path, name: str, *arguments: str, **options: Any) -> CpuServer:
    return stack.enter_context(start_cpu_server(folder, log=folder / f"{name}.log", arguments=arguments, **options))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    write_tiny_model(folder, "llama", seed=0)
    return folder


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[list[CpuServer]]:
    """Two servers with the plugin; the second one also cuts its streams into parts."""
    with ExitStack() as stack:
        yield [start(stack, model, "one"), start(stack, model, "two", "--incremental-streaming-output")]


@pytest.fixture(scope="module")
def bare(model: Path) -> Iterator[CpuServer]:
    """The same without the plugin."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_PLUGINS", "none-of-ours")
            started = start(stack, model, "bare")
        yield started


def run(server: CpuServer, job: Any, **options: Any) -> Any:
    async def call() -> Any:
        async with SGLangClient(server.url, **options) as client:
            return await job(client)

    return asyncio.run(call())


def sample(server: CpuServer, sampling: SamplingParameters = SHORT, count: int = 8) -> list[Sample]:
    return run(server, lambda client: client.generate(PROMPTS[:count], sampling))


def send(server: CpuServer, state: State, version: str, **options: Any) -> None:
    run(server, lambda client: client.update_weights_from_tensors(state, version, **options))


def served(record: Sample) -> Any:
    assert record.served is not None
    return record.served


def info(server: CpuServer) -> dict[str, Any]:
    (state,) = httpx.get(server.url + "/server_info", timeout=60).json()["internal_states"]
    return state[META_KEY]


def post(server: CpuServer, **body: Any) -> dict[str, Any]:
    body = {"input_ids": PROMPTS[0], "return_logprob": True, **body}
    return httpx.post(server.url + "/generate", json=body, timeout=60).raise_for_status().json()


def told(server: CpuServer, **sampling: Any) -> dict[str, Any]:
    """What the reply to one request says."""
    body = post(server, sampling_params={"max_new_tokens": 6, "ignore_eos": True, **sampling})
    (found,) = body["meta_info"][META_KEY]
    return found


def test_tokens_and_log_probs_are_those_of_a_server_without_it(pair: list[CpuServer], bare: CpuServer) -> None:
    """Greedy and, since SGLang ignores seeds on CPU, prompts that are rescored; each bit for bit."""
    first = weights(0, 0.1)
    for server in (pair[0], bare):
        send(server, first, "same")
    greedy = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    for prompt in PROMPTS:
        bodies = [
            post(server, input_ids=prompt, sampling_params=greedy, logprob_start_len=0) for server in (pair[0], bare)
        ]
        for body in bodies:
            for gone in ("id", "e2e_latency", "response_sent_to_client_ts", META_KEY):
                body["meta_info"].pop(gone, None)
        assert bodies[0] == bodies[1]
    assert all(record.served is None for record in sample(bare, count=2))
    log = (bare.log).read_text()
    assert "mismatch_plugin: weights" not in log


def stream(server: CpuServer, **body: Any) -> list[dict[str, Any]]:
    body = {"input_ids": PROMPTS[1], "return_logprob": True, "stream": True, **body}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_streams_carry_it_once_at_their_end(pair: list[CpuServer], bare: CpuServer) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    for server in (*pair, bare):
        send(server, weights(0, 0.1), "stream")
    whole, parts, plain = (stream(server, sampling_params=sampling) for server in (*pair, bare))
    assert whole[-1]["output_ids"] == plain[-1]["output_ids"] == [i for part in parts for i in part["output_ids"]]
    assert whole[-1]["meta_info"]["output_token_logprobs"] == plain[-1]["meta_info"]["output_token_logprobs"]
    for chunks in (whole, parts):
        objects = [[told for told in chunk["meta_info"].get(META_KEY, []) if told] for chunk in chunks]
        assert [len(found) for found in objects] == [0] * (len(chunks) - 1) + [1]
        (span,) = objects[-1][0]["weights"]
        assert (span["start"], span["end"]) == (0, 20)


def test_the_fingerprint_is_that_of_the_weights_that_were_sent(pair: list[CpuServer]) -> None:
    async def job(client: SGLangClient) -> tuple[str | None, str | None, list[Sample]]:
        before = client.fingerprint
        await client.update_weights_from_tensors(weights(1, 0.1), "v1")
        return before, client.fingerprint, await client.generate(PROMPTS, SHORT)

    before, after, records = run(pair[0], job)
    assert before is None and after == fingerprint(digests(weights(1, 0.1).items()))
    for record in records:
        (span,) = served(record).weights
        assert (span.fingerprint, span.since, span.start, span.end) == (after, "v1", 0, 12)
        update = served(record).update
        assert (update.changed, update.tensors, update.changed_matrices, update.matrices) == (15, 15, 10, 10)
    assert info(pair[0])["fingerprint"] == after and info(pair[0])["label"] == "v1"
    assert f"changed 15 of 15 tensors: {after} as version 'v1'" in pair[0].log.read_text()


def test_a_name_that_the_server_skipped_is_told_from_what_was_sent(pair: list[CpuServer]) -> None:
    """Some tensors change; what was sent for the others does not serve."""
    send(pair[0], weights(1, 0.1), "a")
    fused = {name.replace("layers.1.self_attn", "layers.9.self_attn"): t for name, t in weights(2, 0.1).items()}
    with pytest.raises(WeightUpdateError, match=r"qkv_proj|layers\.9"):
        send(pair[0], fused, "b")


def test_tokens_of_a_response_have_the_weights_that_made_them(pair: list[CpuServer]) -> None:
    """Paused in place after some tokens, and once more with the label kept."""
    states = [weights(seed, 0.1) for seed in (3, 4, 5)]
    prints = [fingerprint(digests(state.items())) for state in states]

    async def job(client: SGLangClient) -> list[Sample]:
        await client.update_weights_from_tensors(states[0], "x0")
        running = asyncio.create_task(client.generate(PROMPTS, LONG))
        await until_running(pair[0].url, len(PROMPTS), running)
        for state, version in zip(states[1:], ("x1", "x1"), strict=True):
            await client.generate(PROMPTS[:1], SHORT)
            async with client.paused("in_place"):
                await client.update_weights_from_tensors(state, version)
        return await running

    for record in run(pair[0], job):
        spans = served(record).weights
        assert [span.fingerprint for span in spans] == prints
        assert spans[0].start == 0 and spans[-1].end == 300
        labels = record.weight_versions
        assert [span.version for span in labels] == ["x0", "x1"]
        assert spans[0].end == labels[0].end == spans[1].start


def test_what_the_log_probs_are_of(pair: list[CpuServer]) -> None:
    server = pair[0]
    plain = told(server, temperature=0.7)
    assert (plain["temperature"], plain["filters"], plain["shifts"], plain["log_probs_of"]) == (0.7, [], [], "tempered")
    facts = {name: plain[name] for name in ("dtype", "head_dtype", "quantization", "speculative", "deterministic")}
    expected = {"dtype": "float32", "head_dtype": "float32", "quantization": None, "speculative": None}
    assert facts == {**expected, "deterministic": False}
    assert plain["sglang"] and (plain["tp_rank"], plain["tp_size"]) == (0, 1)
    assert told(server, temperature=0.0)["temperature"] == 1.0
    assert told(server, temperature=0.5, top_k=1)["temperature"] == 1.0  # alone, it is a batch that is all greedy
    assert told(server, top_p=0.9, top_k=40, min_p=0.01)["filters"] == ["top_p", "top_k", "min_p"]
    shifted = told(server, repetition_penalty=1.1, logit_bias={"7": 1.0}, min_new_tokens=2)
    assert shifted["shifts"] == ["repetition_penalty", "min_new_tokens", "logit_bias"]


def test_a_greedy_request_next_to_others_is_of_two_temperatures(pair: list[CpuServer]) -> None:
    """top_k 1 at temperature 0.5: its prompt is a batch that is all greedy, where the sampler leaves temperatures out;
    its other tokens are computed next to requests that are not."""
    state = weights(12, 0.1)

    async def job(client: SGLangClient) -> tuple[list[Sample], list[Sample]]:
        await client.update_weights_from_tensors(state, "greedy")
        others = asyncio.create_task(client.generate(PROMPTS, LONG))
        await client.generate(PROMPTS[:1], SHORT)
        greedy = SamplingParameters(temperature=0.5, top_k=1, max_new_tokens=8, ignore_eos=True)
        return await client.generate(PROMPTS[:1], greedy), await others

    (record,), _ = run(pair[0], job)
    model = tiny_model("llama", 0)
    model.load_state_dict(state)
    ids = torch.tensor([[*record.prompt_ids, *record.response_ids]])
    logits = model(input_ids=ids).logits[0, len(record.prompt_ids) - 1 : -1]
    logits[1:] /= 0.5
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(record.response_ids).long()[:, None])[:, 0]
    assert record.rollout_log_probs == pytest.approx(expected.tolist(), abs=1e-3)
    assert served(record).temperature is None


def checked(folder: Path, records: Sequence[Sample], **training: Any) -> dict[str, Any]:
    """What `inspect` says of the first batch."""
    folder.mkdir(exist_ok=True)
    write_samples(folder / "rollouts.jsonl", records)
    told = [{"train_log_probs": record.rollout_log_probs.tolist(), **training} for record in records]
    (folder / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    arguments = ["inspect", "--brief", str(folder / "rollouts.jsonl"), str(folder / "training.jsonl"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 1, 3), result.output  # 3: too few tokens for statistics
    return json.loads(result.stdout)


def both(pair: list[CpuServer], states: Sequence[State], version: str) -> list[Sample]:
    """A trainer that does not look at what serves."""
    for server, state in zip(pair, states, strict=True):
        run(
            server, lambda client, state=state: client.update_weights_from_tensors(state, version), verify_updates=False
        )
    return [record for server in pair for record in sample(server)]


def test_planted_faults_are_found_at_the_first_batch_and_named_first(pair: list[CpuServer], tmp_path: Path) -> None:
    """Each after a sound step, in one batch, without a gap between the log-probs: by what the servers tell alone."""
    both(pair, [weights(6, 0.1)] * 2, "p0")
    old, new = weights(6, 0.1), weights(7, 0.1)

    label_only = both(pair, [old] * 2, "p1")
    both(pair, [weights(8, 0.1)] * 2, "p2")
    wrong_names = both(pair, [{f"wrong.{name}": tensor for name, tensor in new.items()}] * 2, "p3")
    layer = {name: tensor for name, tensor in new.items() if ".layers.0." in name}
    one_layer = both(pair, [layer] * 2, "p4")
    both(pair, [weights(9, 0.1)] * 2, "p5")
    one_server = both(pair, [new, weights(9, 0.1)], "p6")
    for name, records, fault in (
        ("label", label_only, "weights_not_updated"),
        ("names", wrong_names, "weights_not_updated"),
        ("layer", one_layer, "weights_partly_updated"),
        ("server", one_server, "stale_server"),
    ):
        found = checked(tmp_path / name, records)["findings"]
        sure = "likely" if name == "layer" else "certain"  # frozen layers look the same
        assert found[0]["fault"] == fault and found[0]["confidence"] == sure, (
            name,
            found,
        )
        server = served(one_server[-1]).server if name == "server" else served(records[0]).server
        assert server in found[0]["evidence"]


def test_fifty_clean_updates_by_every_way_have_no_finding(pair: list[CpuServer], tmp_path: Path) -> None:
    """By tensors, from disk and over a process group in turn; one record of each."""
    server = pair[0]
    records: list[Sample] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "checkpoint"
    shutil.copytree(server.log.parent, folder, ignore=shutil.ignore_patterns("*.log"))
    model = tiny_model("llama", 0)

    async def job(client: SGLangClient) -> None:
        await client.update_weights_from_tensors(weights(99, 0.1), "c-0")
        group = await client.init_weights_update_group("127.0.0.1", port)
        state = weights(99, 0.1)
        for step in range(1, 51):
            draw = torch.Generator().manual_seed(step)
            state = {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}
            if step % 3 == 0:
                model.load_state_dict(state)
                model.save_pretrained(folder)
                await client.update_weights_from_disk(str(folder), f"c-{step}")
            elif step % 3 == 1:
                await client.update_weights_from_group(state, f"c-{step}", group)
            else:
                await client.update_weights_from_tensors(state, f"c-{step}")
            (record,) = await client.generate(PROMPTS[:1], SHORT)
            assert [span.fingerprint for span in served(record).weights] == [fingerprint(digests(state.items()))]
            records.append(record)
        await client.destroy_weights_update_group(group)

    run(server, job)
    write_samples(tmp_path / "rollouts.jsonl", records)
    for record in records:  # each batch as a trainer would see it, and all of them together
        one = checked(tmp_path / "batch", [record], weight_fingerprint=served(record).weights[0].fingerprint)
        assert one["findings"] == []
    result = CliRunner().invoke(app, ["inspect", "--brief", str(tmp_path / "rollouts.jsonl"), "--json"])
    by_weights = {"weights_not_updated", "weights_partly_updated", "stale_server", "label_reused", "other_weights"}
    assert not by_weights & {item["fault"] for item in json.loads(result.stdout)["findings"]}


def test_a_required_change_fails_the_update(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_REQUIRE_CHANGE", "11")
    monkeypatch.setenv("MISMATCH_SERVER_ID", "rollout-7")
    with ExitStack() as stack:
        server = start(stack, model, "required")
        send(server, weights(1, 0.1), "v1")
        with pytest.raises(
            WeightUpdateError, match=r"10 of 15 tensors changed. The same as before: model\.layers\.0\.in"
        ):
            send(server, {**weights(2), **_norms(weights(1, 0.1))}, "v2")
        assert served(sample(server, count=1)[0]).server == "rollout-7"


def _norms(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "norm" in name}


@pytest.mark.parametrize(("sizes", "bind"), [(("--tp-size", "2"), "0|1"), (("--pp-size", "2"), "0|1")])
def test_ranks_have_one_fingerprint(
    model: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, str], bind: str
) -> None:
    from examples import sglang_server as server_module

    monkeypatch.setitem(server_module._ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND", bind)
    with ExitStack() as stack:
        server = start(stack, model, f"ranks{sizes[0]}", *sizes)
        first = served(sample(server, count=1)[0])
        assert first.weights[0].fingerprint == fingerprint(digests(weights(0).items()))
        assert info(server)["fingerprint"] == first.weights[0].fingerprint
        if sizes[0] == "--tp-size":
            send(server, weights(1, 0.1), "v1")
            expected = weights(1, 0.1)
        else:
            folder = model.parent / "other"
            write_tiny_model(folder, "llama", seed=1)
            run(server, lambda client: client.update_weights_from_disk(str(folder), "v1"))
            expected = weights(1)
        second = served(sample(server, count=1)[0])
        assert second.weights[0].fingerprint == fingerprint(digests(expected.items()))
        assert second.update.changed_matrices == second.update.matrices == 10
        if sizes[0] == "--tp-size":
            _two_ranks_that_part(server)


def _two_ranks_that_part(server: CpuServer) -> None:
    """One rank takes new weights and the other one's stay as they were, of which SGLang says nothing."""
    payloads = [serialised(list(weights(seed, 0.1).items())) for seed in (2, 1)]
    body = {"serialized_named_tensors": payloads, "weight_version": "v2", "flush_cache": True}
    for path, order in (("begin_weight_update", {}), ("update_weights_from_tensor", body), ("end_weight_update", {})):
        assert httpx.post(f"{server.url}/{path}", json=order, timeout=60).raise_for_status().json()["success"] is True
    parted = served(sample(server, count=1)[0])
    assert (parted.update.changed, parted.update.changed_matrices, parted.update.matrices) == (15, 0, 10)
    assert "WARNING: update 2 changed 15 of 15 tensors, not " in server.log.read_text()


def test_weights_that_change_outside_an_update(pair: list[CpuServer]) -> None:
    """SGLang's own check of updates: noise, an update with the weights that were there, a comparison."""
    server, state = pair[0], weights(14, 0.1)
    send(server, state, "n0")
    before = info(server)["fingerprint"]
    httpx.post(f"{server.url}/weights_checker", json={"action": "reset_tensors"}, timeout=60).raise_for_status()
    noise = info(server)
    assert noise["fingerprint"] != before and noise["label"] == "n0"
    send(server, state, "n1")
    after = info(server)
    assert after["fingerprint"] == before and after["update"]["changed_matrices"] == after["update"]["matrices"]
    (span,) = served(sample(server, count=1)[0]).weights
    assert (span.fingerprint, span.since) == (before, "n1")


def test_a_version_that_is_named_after_the_update(pair: list[CpuServer], tmp_path: Path) -> None:
    """A batch of somebody else's in between makes no fault of it; a label that moves once more is one."""
    server = pair[0]

    def name(version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        httpx.post(f"{server.url}/update_weight_version", json=body, timeout=60).raise_for_status()

    send(server, weights(15, 0.1), "late-0")
    sample(server, count=1)
    send(server, weights(16, 0.1), "late-0")
    sample(server, count=1)  # a health check, say
    name("late-1")
    records = sample(server)
    assert {span.since for record in records for span in served(record).weights} == {"late-1"}
    assert checked(tmp_path / "named", records)["findings"] == []
    name("late-2")
    found = checked(tmp_path / "moved", sample(server))["findings"]
    assert [item["fault"] for item in found] == ["weights_not_updated"]


def broken(folder: Path, file: str, old: str, new: str) -> Path:
    """A Python of the server's environment that finds a copy of this package with one line changed."""
    copy = folder / "changed"
    shutil.copytree(Path(mismatch_plugin.__file__).parent, copy / "mismatch_plugin")
    path = copy / "mismatch_plugin" / "sglang" / "plugin" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={copy} exec {os.path.abspath(find_python())} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "register.py",
            ".run_batch",
            ".run_no_batch",
            "it has no sglang.srt.managers.scheduler.Scheduler.run_no_batch",
        ),
        ("register.py", '("self", "batch")', '("self", "parcel")', "takes (self, batch"),
        (
            "state.py",
            "        self._facts = facts(scheduler)",
            "        self._facts = planted",
            "settings cannot be read",
        ),
        (
            "state.py",
            "        params = req.sampling_params",
            "        params = req.planted",
            "add_to_replies failed and is off",
        ),
    ],
)
def test_a_server_with_a_broken_plugin_serves_on(
    model: Path, tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    with ExitStack() as stack:
        server = start(stack, model, f"broken-{len(said)}", python=broken(tmp_path, file, old, new))
        send(server, weights(1, 0.1), "v1")
        records = sample(server)
        assert all(record.served is None for record in records) and len(records) == 8
        log = server.log.read_text()
        assert log.count(said) == 1


def test_a_setting_that_is_none_is_refused_at_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_REQUIRE_CHANGE", "all")
    with ExitStack() as stack, pytest.raises(ServerError, match="MISMATCH_REQUIRE_CHANGE='all' must be a number"):
        start(stack, model, "refused")


def test_it_can_be_turned_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_PLUGIN_SGLANG", "off")
    with ExitStack() as stack:
        server = start(stack, model, "off")
        assert sample(server, count=1)[0].served is None
        assert "mismatch_plugin: " not in server.log.read_text()


def test_a_fingerprint_of_the_tiny_model_takes_less_than_50_ms(pair: list[CpuServer]) -> None:
    send(pair[0], weights(11, 0.1), "fast")
    assert 0 < info(pair[0])["seconds"] < 0.05
