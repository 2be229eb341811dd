"""Real replies of SGLang 0.5.23 in every form it has, and what happens when one of them loses something."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_plugin.data.arrays import is_null
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.replies import ReplyError, parse_generate, parse_prompt_log_probs

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang_generate"
PROMPT = [10, 20, 30, 40]


def exchange(name: str) -> tuple[dict[str, Any], Any]:
    logged = json.loads((FIXTURES / f"{name}.json").read_text())
    return logged["request"], logged["response"]


def parsed(name: str, **options: Any) -> Sample:
    request, reply = exchange(name)
    asked = {name: value for name, value in request["sampling_params"].items() if name != "sampling_seed"}
    return parse_generate(reply, request["input_ids"], SamplingParameters(**asked), **options)


def spans(sample: Sample) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in sample.weight_versions]


def test_ids_log_probs_and_text_are_those_of_the_reply() -> None:
    _, reply = exchange("greedy")
    sample = parsed("greedy")
    assert sample.prompt_ids.tolist() == PROMPT and sample.response_ids.tolist() == reply["output_ids"]
    assert sample.rollout_log_probs.tolist() == [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert sample.request_id == reply["meta_info"]["id"] and sample.text == reply["text"]
    assert sample.loss_mask.tolist() == [True] * 8 and sample.finish_reason == "length"
    assert spans(sample) == [("default", 0, 8)] and sample.sampling.greedy


@pytest.mark.parametrize(
    ("name", "read", "expected"),
    [
        ("temperature_0_7_top_p_0_9", lambda one: (one.sampling.temperature, one.sampling.top_p), (0.7, 0.9)),
        ("stop_token", lambda one: (one.finish_reason, one.response_ids.tolist()), ("stop", [337, 433, 0])),
        ("aborted", lambda one: (one.finish_reason, len(one), len(one.rollout_log_probs)), ("abort", 118, 118)),
        ("weights_updated_in_flight", spans, [("default", 0, 163), ("v2", 163, 400)]),
    ],
)
def test_what_is_read_from_a_real_reply(name: str, read: Callable[[Sample], Any], expected: Any) -> None:
    assert read(parsed(name)) == expected


def test_an_abort_before_the_first_token_and_an_older_server() -> None:
    request, reply = exchange("aborted")
    reply["output_ids"] = []
    for name in ("output_token_logprobs", "output_token_logprobs_length", "completion_tokens", "weight_versions"):
        del reply["meta_info"][name]
    sample = parse_generate(reply, request["input_ids"])
    assert len(sample) == 0 and sample.finish_reason == "abort"
    request, reply = exchange("greedy")
    del reply["meta_info"]["weight_versions"]  # it tells one for all tokens
    reply["meta_info"]["dp_rank"] = 5
    sample = parse_generate(reply, PROMPT)
    assert spans(sample) == [("default", 0, 8)] and sample.dp_rank == 5
    del reply["meta_info"]["weight_version"]
    assert parse_generate(reply, PROMPT).weight_versions == ()


def test_kept_ids_and_both_log_probs() -> None:
    sample = parsed("sampling_mask_kept", require_kept_ids=True)
    assert sample.kept_ids is not None and sample.behaviour_log_probs is not None
    assert all(token in kept for token, kept in zip(sample.response_ids, sample.kept_ids, strict=True))
    assert (sample.behaviour_log_probs > sample.rollout_log_probs).all()  # renormalised over less than everything
    _, reply = exchange("sampling_mask_support")  # log-probs of the whole support give that of the token
    sample = parsed("sampling_mask_support")
    assert sample.kept_ids is not None and sample.behaviour_log_probs is not None
    for position, row in enumerate(reply["meta_info"]["output_token_sampling_logprobs"]):
        assert sum(map(math.exp, row)) == pytest.approx(1.0, abs=1e-5)
        place = sample.kept_ids[position].index(sample.response_ids[position])
        assert sample.behaviour_log_probs[position] == row[place]


def entries(reply: Any) -> list[list[Any]]:
    return reply["meta_info"]["output_token_logprobs"]


def change(**meta: Any) -> Callable[[Any], None]:
    return lambda reply: reply["meta_info"].update(meta)


def at(position: int, column: int, value: Any) -> Callable[[Any], None]:
    return lambda reply: entries(reply)[position].__setitem__(column, value)


LOSSES: list[tuple[Callable[[Any], Any], str, str]] = [
    (lambda reply: reply["meta_info"].pop("output_token_logprobs"), "log_probs_lost", "8 tokens and no output_token"),
    (lambda reply: entries(reply).clear(), "log_probs_lost", "8 output_ids, but 0 output_token_logprobs"),
    (lambda reply: entries(reply).pop(), "length", "8 output_ids, but 7 output_token_logprobs"),
    (at(3, 1, 99), "token_ids", "disagree .position 3: 264 against 99"),
    (at(2, 0, "x"), "form", "position 2: .'x'"),
    (change(completion_tokens=9), "length", "completion_tokens is 9, but 8 tokens came"),
    (change(output_token_logprobs_length=7), "length", "output_token_logprobs_length is 7"),
    (change(prompt_tokens=5), "prompt", "4 prompt tokens were sent, the server saw 5"),
    (lambda reply: reply.update(prompt_token_ids=[1, 20, 30, 40]), "prompt", "position 0: 10 against 1"),
    (change(output_token_sampling_mask=[], output_token_sampling_logprobs=[]), "length", "0 kept sets and 0 log-probs"),
    (
        change(output_token_sampling_mask=[[1]] * 8, output_token_sampling_logprobs=[-1.0] * 8),
        "kept_ids",
        "position 0: the sampled id 34 is not among those kept",
    ),
    (change(weight_versions=[{"version": "a", "start": 0, "end": 9}]), "form", "spans"),
    (change(finish_reason={"type": "tired"}), "form", "finish_reason: .*'tired'"),
    (lambda reply: reply.pop("meta_info"), "form", "no meta_info among"),
    (lambda reply: reply["meta_info"].pop("output_token_logprobs") and reply.pop("output_ids"), "form", "neither"),
]


@pytest.mark.parametrize(("damage", "kind", "says"), LOSSES)
def test_what_is_lost_or_changed_is_an_error(damage: Any, kind: str, says: str) -> None:
    _, reply = exchange("greedy")
    damage(reply)
    with pytest.raises(ReplyError, match=says) as caught:
        parse_generate(reply, PROMPT)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("name", "says"),
    [("sampling_mask", "requires top_k=1"), ("too_long_prompt_error", "2000 tokens. is longer than")],
)
def test_what_is_no_reply_is_an_error(name: str, says: str) -> None:
    with pytest.raises(ReplyError, match=says) as caught:
        parse_generate(exchange(name)[1], [1])
    assert caught.value.kind == "error_reply"


def test_values_are_left_to_the_policy() -> None:
    _, reply = exchange("greedy")
    entries(reply)[0][0], entries(reply)[1][0] = None, math.nan
    sample = parse_generate(reply, PROMPT)
    assert np.isnan(sample.rollout_log_probs).tolist() == [True, True, *[False] * 6]
    assert is_null(sample.rollout_log_probs).tolist() == [True, *[False] * 7]


@pytest.mark.parametrize(
    ("sent", "told", "size", "says"),
    [
        # SGLang names the vocabulary's last id 0.
        ({2: 511, 4: 511}, {2: (1, 0), 4: (1, 0)}, None, ""),
        ({2: 511}, {2: (1, 0)}, 1000, "position 2: 511 against 0"),  # there it is not the last one
        ({2: 511, 3: 600}, {2: (1, 0), 3: (1, 600)}, None, "position 2: 511 against 0"),  # nor next to a larger one
        ({2: 511, 3: 600}, {2: (1, 0), 3: (1, 0)}, None, "of another prompt"),  # one id is the last, not two
        ({}, {2: (0, None)}, None, "the log-prob of prompt position 2 is None"),
        ({}, {2: (0, 0.5)}, None, "the log-prob of prompt position 2 is 0.5: it is invalid"),
    ],
)
def test_rescoring_refuses_gaps_and_other_ids(
    sent: dict[int, int], told: dict[int, tuple[int, Any]], size: int | None, says: str
) -> None:
    request, reply = exchange("rescore_prompt_only")
    ids, scored = list(request["input_ids"]), reply["meta_info"]["input_token_logprobs"]
    for position, token in sent.items():
        ids[position] = token
    for position, (column, value) in told.items():
        scored[position][column] = value
    if says:
        with pytest.raises(ReplyError, match=says):
            parse_prompt_log_probs(reply, ids, vocab_size=size)
    else:
        assert parse_prompt_log_probs(reply, ids, vocab_size=size)[1:].tolist() == [entry[0] for entry in scored[1:]]
    scored.clear()
    with pytest.raises(ReplyError, match="send logprob_start_len 0"):
        parse_prompt_log_probs(reply, ids)


# What our plugin in the server told -----------------------------------------------------------------------------------

SERVED: dict[str, Any] = {
    "server": "10.0.0.1:30000 4711",
    "dp_rank": 1,
    "sglang": "0.5.23",
    "dtype": "bfloat16",
    "head_dtype": "float32",
    "temperature": 0.1 + 0.2,
    "filters": ["top_p=0.9"],
    "weights": [
        {"fingerprint": "00f1", "since": "4", "start": 0, "end": 1},
        {"fingerprint": None, "since": None, "start": 1, "end": 2},
    ],
    "update": {"number": 5, "changed": 20, "tensors": 20, "changed_matrices": 10, "matrices": 10},
}


def read_reply(value: Any) -> Sample:
    logged = [[-1.0, 2, None], [-2.0, 3, None]]
    meta = {"id": "r", "output_token_logprobs": logged, "completion_tokens": 2, META_KEY: value}
    return parse_generate({"output_ids": [2, 3], "text": "", "meta_info": meta}, [1])


@pytest.mark.parametrize("value", [SERVED, [SERVED], [None, SERVED], {**SERVED, "of_a_newer_plugin": 1}, None, []])
def test_what_the_plugin_told_is_read_from_a_reply(value: Any) -> None:
    sample = read_reply(value)
    assert (sample.served is None) == (not value)
    if sample.served is not None:
        assert sample.served.temperature == 0.1 + 0.2 and sample.served.weights[0].since == "4"
    assert sample.log_probs_of == "tempered"
    assert read_reply([{**SERVED, "log_probs_of": "raw"}]).log_probs_of == "raw"


def weights(*spans: tuple[int, int]) -> dict[str, Any]:
    return {**SERVED, "weights": [{"fingerprint": "a", "start": start, "end": end} for start, end in spans]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({name: value for name, value in SERVED.items() if name != "dtype"}, "served.dtype: Field required"),
        ([SERVED, SERVED], "served: "),
        ("text", "served: "),
        (weights((-1, 2)), "served.weights.0.start: "),
        (weights((0, 3)), "served.weights: 'a' spans .* half-open, in order and inside"),
        (weights((1, 2), (0, 1)), "served.weights: 'a' spans"),
    ],
)
def test_a_malformed_one_is_an_error_that_names_the_field(value: Any, says: str) -> None:
    with pytest.raises(ReplyError, match=says) as error:
        read_reply(value)
    assert error.value.kind == "form"
