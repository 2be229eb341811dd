"""The client against a real server where that server has ways of its own: last ids, greedy log-probs, refusals."""

from __future__ import annotations

import pytest

from examples.megatron_core.train import VOCAB
from examples.sglang_server import CpuServer
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import GenerateError, SGLangClient
from tests.fixtures.faulty_server import call

LAST = VOCAB - 1
SAME = 1e-4
"""Prefill and decoding of a float32 server agree to this."""


@pytest.mark.parametrize("vocab_size", [None, VOCAB])
def test_the_last_id_of_the_vocabulary_is_rescored(float32_server: CpuServer, vocab_size: int | None) -> None:
    sequence = [1, LAST, 2, LAST, 0, 3]
    scored = call(float32_server, lambda client: client.rescore([sequence]), vocab_size=vocab_size)[0]
    assert scored[0] is None and all(value is not None and value < 0 for value in scored[1:])
    # The same tokens one after the other: the log-prob of each is that of the top ones after its prefix.
    one = SamplingParameters(max_new_tokens=1, ignore_eos=True)

    async def after(client: SGLangClient) -> dict[int, float]:
        (record,) = await client.generate([[1]], one, top_log_probs=VOCAB)
        assert record.top_log_probs is not None
        return {token: value for value, token in record.top_log_probs[0]}

    assert scored[1] == pytest.approx(call(float32_server, after)[LAST], abs=SAME)


def test_an_id_outside_the_vocabulary_is_refused_before_it_reaches_the_server(float32_server: CpuServer) -> None:
    with pytest.raises(ValueError, match=f"id {LAST + 1} is outside the model's vocabulary of {VOCAB}"):
        call(float32_server, lambda client: client.generate([[LAST + 1]]), vocab_size=VOCAB)
    assert call(float32_server, lambda client: client.health())


def test_the_server_decides_about_the_sampling_mask(float32_server: CpuServer) -> None:
    narrow = SamplingParameters(top_p=0.5, max_new_tokens=4)
    with pytest.raises(GenerateError, match=r"return_sampling_mask requires top_k=1 for greedy sampling or finite"):
        call(float32_server, lambda client: client.generate([[1]], narrow, return_sampling_mask=True))


@pytest.mark.parametrize(
    "asked", [{"temperature": 1e-7}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "temperature": 0.5}]
)
def test_greedy_log_probs_are_those_of_temperature_1(float32_server: CpuServer, asked: dict[str, float]) -> None:
    sampling = SamplingParameters.model_validate({**asked, "max_new_tokens": 6, "ignore_eos": True})

    async def both(client: SGLangClient) -> None:
        (record,) = await client.generate([[1, 2, 3]], sampling, top_log_probs=1)
        assert record.sampling.greedy and record.sampling.log_prob_temperature == 1.0
        assert [row[0][1] for row in record.top_log_probs or ()] == record.response_ids  # always the likeliest
        (scored,) = await client.rescore([[*record.prompt_ids, *record.response_ids]])
        assert record.rollout_log_probs == pytest.approx(scored[3:], abs=SAME)

    call(float32_server, both)


def test_slimes_parameters_are_taken(float32_server: CpuServer) -> None:
    slime = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 5, "stop": None, "stop_token_ids": None}
    slime |= {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    asked = SamplingParameters.from_sglang(slime)
    (record,) = call(float32_server, lambda client: client.generate([[1, 2]], asked))
    assert record.faults() == [] and record.server == float32_server.url


def test_a_bfloat16_server_is_named_as_a_risk(bfloat16_server: CpuServer) -> None:
    with pytest.warns(UserWarning, match="start with --enable-fp32-lm-head"):
        call(bfloat16_server, lambda client: client.generate([[1]], SamplingParameters(max_new_tokens=1)))
