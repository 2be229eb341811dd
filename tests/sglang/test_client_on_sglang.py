"""The client, docs/rollouts.md and examples/sglang_server against real servers that have ways of their own."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import mismatch_plugin as mp
from ci.sglang_cpu.tiny_model import write_tiny_model
from examples.megatron_core.train import VOCAB
from examples.sglang_server import CpuServer
from mismatch_plugin.data.arrays import is_null
from mismatch_plugin.data.files import row_of
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.sglang.client import SGLangClient
from tests.fixtures.faulty_server import call

LAST = VOCAB - 1
SAME = 1e-4
"""Prefill and decoding of a float32 server agree to this."""


@pytest.mark.parametrize("vocab_size", [None, VOCAB])
def test_the_last_id_of_the_vocabulary_is_rescored(float32_server: CpuServer, vocab_size: int | None) -> None:
    sequence = [1, LAST, 2, LAST, 0, 3]
    scored = call(float32_server, lambda client: client.rescore([sequence]), vocab_size=vocab_size)[0]
    assert is_null(scored).tolist() == [True, *[False] * 5] and (scored[1:] < 0).all()
    # It is among the top ones after its prefix.
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": [1], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": VOCAB}
    reply = httpx.post(float32_server.url + "/generate", json=body, timeout=60).raise_for_status().json()
    top = {token: value for value, token, _ in reply["meta_info"]["output_top_logprobs"][0]}
    assert scored[1] == pytest.approx(top[LAST], abs=SAME)


@pytest.mark.parametrize(
    "asked", [{"temperature": 1e-7}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "temperature": 0.5}]
)
def test_greedy_log_probs_are_those_of_temperature_1(float32_server: CpuServer, asked: dict[str, float]) -> None:
    sampling = SamplingParameters.model_validate({**asked, "max_new_tokens": 6, "ignore_eos": True})

    async def both(client: SGLangClient) -> None:
        (record,) = await client.generate([[1, 2, 3]], sampling)
        assert record.sampling.greedy and record.sampling.log_prob_temperature == 1.0
        (scored,) = await client.rescore([[*record.prompt_ids, *record.response_ids]])
        assert record.rollout_log_probs == pytest.approx(scored[3:], abs=SAME)

    call(float32_server, both)


# What docs/rollouts.md says about a server ----------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def _names(example: int) -> dict[str, Any]:
    """What the page's Python example defines."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(found[example], str(PAGE), "exec"), names)
    return names


def test_the_record_of_a_loop_of_one_s_own(float32_server: CpuServer) -> None:
    sampling = {"temperature": 0.7, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
    reply = httpx.post(float32_server.url + "/generate", json=body, timeout=60).raise_for_status().json()
    record = Sample.model_validate(_names(1)["record"]([1, 2, 3], reply, sampling))
    assert record.served is not None and record.served.temperature == record.sampling.temperature == 0.7
    assert len(record.response_ids) == 4 and record.served.weights[0].end == 4 and record.weight_versions
    assert check_batch(make_batch([record]))[0] == []


def test_the_example_of_the_client(float32_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _names(0)
    monkeypatch.chdir(tmp_path)  # it writes rollouts.jsonl
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    samples = asyncio.run(names["rollouts"](float32_server.url, prompts))
    assert [sample.prompt_ids.tolist() for sample in samples] == [prompt for prompt in prompts for _ in range(4)]
    read_again = read(tmp_path / "rollouts.jsonl").samples
    assert [row_of(sample) for sample in read_again] == [row_of(sample) for sample in samples]
    both = [sample.replace(train_log_probs=sample.rollout_log_probs, advantages=1.0) for sample in samples]
    packed = names["pack"](both)
    assert float(names["loss"](both, packed.old_log_probs, mp.MismatchConfig())) == -1.0
    assert packed.lengths == tuple(map(len, samples))


# The server itself ----------------------------------------------------------------------------------------------------


def test_the_command_serves_text(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3", seed=4)
    command = [sys.executable, "-m", "examples.sglang_server", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            url = owner.stdout.readline().split()[0]
            request = {"text": "mismatch", "sampling_params": {"max_new_tokens": 8}}
            reply = httpx.post(url + "/generate", json=request, timeout=60.0).raise_for_status().json()
        finally:
            owner.kill()
    assert reply["meta_info"]["prompt_tokens"] == len("mismatch") and isinstance(reply["text"], str)
