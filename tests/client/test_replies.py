"""Real replies of SGLang 0.5.23 in every form it has, and what happens when one of them loses something."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.arrays import is_null, with_nulls
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.replies import ReplyError, parse_exchange, parse_generate, parse_prompt_log_probs

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang_generate"


def exchange(name: str) -> tuple[dict[str, Any], Any]:
    logged = json.loads((FIXTURES / f"{name}.json").read_text())
    return logged["request"], logged["response"]


def parsed(name: str) -> list[Sample]:
    return parse_exchange(*exchange(name))


def test_a_batch_keeps_its_order_and_its_prompts() -> None:
    request, reply = exchange("batch_temperature_1")
    samples = parsed("batch_temperature_1")
    assert [sample.prompt_ids.tolist() for sample in samples] == request["input_ids"]
    for sample, item in zip(samples, reply, strict=True):
        assert sample.response_ids.tolist() == item["output_ids"]
        assert sample.rollout_log_probs.tolist() == [entry[0] for entry in item["meta_info"]["output_token_logprobs"]]
        assert sample.request_id == item["meta_info"]["id"] and sample.text == item["text"]
        assert sample.loss_mask.tolist() == [True] * 12 and sample.finish_reason == "length"
        assert spans(sample) == [("default", 0, 12)] and sample.asked
    assert [sample.sample_id for sample in samples] == ["0", "1", "2", "3"]
    parallel = [sample.prompt_ids.tolist() for sample in parsed("parallel_samples")]
    assert parallel == [[10, 20, 30, 40]] * 2 + [[5, 6]] * 2


def spans(sample: Sample) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in sample.weight_versions]


def test_prompt_log_probs_top_log_probs_and_rescoring() -> None:
    (sample,) = parsed("with_prompt_logprobs_and_text")
    assert sample.prompt_log_probs is not None and is_null(sample.prompt_log_probs)[0]
    assert sample.prompt_log_probs[1:].tolist() == [-7.923654556274414, -4.610270977020264, -5.290630340576172]
    assert sample.top_log_probs is not None and len(sample.top_log_probs) == 6
    assert sample.top_log_probs[0] == [(-3.229572296142578, 34), (-3.2735772132873535, 149)]
    (tail,) = parsed("prompt_log_probs_tail")
    assert tail.prompt_log_probs is not None
    assert with_nulls(tail.prompt_log_probs) == [None, None, None, -5.290630340576172]
    request, reply = exchange("rescore_prompt_only")
    log_probs = parse_prompt_log_probs(reply, request["input_ids"])
    assert is_null(log_probs).tolist() == [True] + [False] * 5 and log_probs[1] == -9.536086082458496
    (scored,) = parse_exchange(request, reply)
    assert len(scored) == 0 and scored.prompt_log_probs is not None
    assert np.array_equal(scored.prompt_log_probs, log_probs, equal_nan=True)


def test_sampling_parameters_are_those_of_the_request() -> None:
    (sample,) = parsed("temperature_0_7_top_p_0_9")
    assert (sample.sampling.temperature, sample.sampling.top_p) == (0.7, 0.9)
    assert "without the sampling mask" in sample.note
    (greedy,) = parsed("greedy")
    assert greedy.sampling.greedy and greedy.note.startswith("greedy")


def test_responses_end_in_a_stop_token_or_with_an_abort() -> None:
    (sample,) = parsed("stop_token")
    assert sample.finish_reason == "stop" and sample.response_ids.tolist() == [337, 433, 0]
    request, reply = exchange("aborted")
    (sample,) = parse_exchange(request, reply)
    assert sample.finish_reason == "abort" and len(sample.rollout_log_probs) == 118 == len(sample)
    reply["output_ids"] = []  # before the first token
    for name in ("output_token_logprobs", "output_token_logprobs_length", "completion_tokens", "weight_versions"):
        del reply["meta_info"][name]
    (sample,) = parse_exchange(request, reply)
    assert len(sample) == 0 and sample.finish_reason == "abort"


def test_weight_versions_are_spans() -> None:
    (sample,) = parsed("weights_updated_in_flight")
    assert spans(sample) == [("default", 0, 163), ("v2", 163, 400)]
    request, reply = exchange("greedy")
    del reply["meta_info"]["weight_versions"]  # an older server tells one for all tokens
    assert spans(parse_exchange(request, reply)[0]) == [("default", 0, 8)]
    del reply["meta_info"]["weight_version"]
    assert parse_exchange(request, reply)[0].weight_versions == ()


def test_kept_ids_and_both_log_probs() -> None:
    (sample,) = parsed("sampling_mask_kept")
    assert sample.kept_ids is not None and sample.behaviour_log_probs is not None and sample.note == ""
    assert all(token in kept for token, kept in zip(sample.response_ids, sample.kept_ids, strict=True))
    assert (sample.behaviour_log_probs > sample.rollout_log_probs).all()  # renormalised over less than everything
    _, reply = exchange("sampling_mask_support")  # log-probs of the whole support give that of the token
    (sample,) = parsed("sampling_mask_support")
    assert sample.kept_ids is not None and sample.behaviour_log_probs is not None
    for position, row in enumerate(reply["meta_info"]["output_token_sampling_logprobs"]):
        assert sum(map(math.exp, row)) == pytest.approx(1.0, abs=1e-5)
        place = sample.kept_ids[position].index(sample.response_ids[position])
        assert sample.behaviour_log_probs[position] == row[place]


@pytest.mark.parametrize(
    ("name", "says"),
    [("sampling_mask", "requires top_k=1"), ("too_long_prompt_error", "2000 tokens. is longer than")],
)
def test_error_replies_say_what_the_server_said(name: str, says: str) -> None:
    with pytest.raises(ReplyError, match=says) as caught:
        parsed(name)
    assert caught.value.kind == "error_reply" and caught.value.sample == 0


def entries(reply: Any) -> list[list[Any]]:
    return reply["meta_info"]["output_token_logprobs"]


def change(**meta: Any) -> Callable[[Any], None]:
    return lambda reply: reply["meta_info"].update(meta)


LOSSES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "log-probs gone": (lambda reply: reply["meta_info"].pop("output_token_logprobs"), "log_probs_lost", "8 tokens"),
    "log-probs empty": (lambda reply: entries(reply).clear(), "log_probs_lost", "8 output_ids, but 0"),
    "one log-prob less": (lambda reply: entries(reply).pop(), "length", "8 output_ids, but 7"),
    "one id less": (lambda reply: reply["output_ids"].pop(), "length", "7 output_ids, but 8"),
    "another id": (lambda reply: entries(reply)[3].__setitem__(1, 99), "token_ids", "position 3: 264 against 99"),
    "no id": (lambda reply: entries(reply)[3].__setitem__(1, None), "token_ids", "position 3: None is no token id"),
    "text for a number": (lambda reply: entries(reply)[2].__setitem__(0, "x"), "form", "position 2: 'x' is no log"),
    "half an entry": (lambda reply: entries(reply)[2].clear(), "form", "position 2"),
    "other count": (change(completion_tokens=9), "length", "completion_tokens is 9"),
    "other length": (change(output_token_logprobs_length=7), "length", "output_token_logprobs_length is 7"),
    "other prompt": (change(prompt_tokens=5), "prompt", "4 prompt tokens were sent, the server saw 5"),
    "prompt ids": (lambda reply: reply.update(prompt_token_ids=[1, 20, 30, 40]), "prompt", "position 0: 10 against 1"),
    "prompt log-probs of others": (change(input_token_logprobs=[[-1.0, 41, None]]), "token_ids", "position 3"),
    "too many prompt log-probs": (change(input_token_logprobs=[[-1.0, 1, None]] * 5), "length", "5 input_token"),
    "top log-probs cut": (change(output_top_logprobs=[]), "length", "0 output_top_logprobs"),
    "mask cut": (
        change(output_token_sampling_mask=[], output_token_sampling_logprobs=[]),
        "length",
        "0 kept sets",
    ),
    "sampled outside": (
        change(output_token_sampling_mask=[[1]] * 8, output_token_sampling_logprobs=[-1.0] * 8),
        "kept_ids",
        "position 0: the sampled id 34",
    ),
    "span outside": (change(weight_versions=[{"version": "a", "start": 0, "end": 9}]), "form", "spans"),
    "unknown finish": (change(finish_reason={"type": "tired"}), "form", "'tired'"),
    "no meta_info": (lambda reply: reply.pop("meta_info"), "form", "no meta_info"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_lost_or_changed_is_an_error_that_names_the_sample(name: str) -> None:
    damage, kind, says = LOSSES[name]
    _, reply = exchange("greedy")
    good = copy.deepcopy(reply)
    damage(reply)
    with pytest.raises(ReplyError, match=says) as caught:
        parse_generate([good, reply], [[10, 20, 30, 40]] * 2)
    assert (caught.value.kind, caught.value.sample) == (kind, 1)


@pytest.mark.parametrize("reply", [None, [], "ok", {"object": "error", "message": "no"}, [{}]])
def test_what_is_no_reply_is_an_error(reply: Any) -> None:
    with pytest.raises(ReplyError):
        parse_generate(reply, [[1]])


def test_a_reply_too_few_is_an_error() -> None:
    _, reply = exchange("batch_temperature_1")
    with pytest.raises(ReplyError, match="3 responses to 4 requests") as caught:
        parse_generate(reply[:3], [[1]] * 4)
    assert caught.value.kind == "count"


def test_a_mask_that_was_asked_for_must_come() -> None:
    request, reply = exchange("greedy")
    with pytest.raises(ReplyError, match="did not come"):
        parse_exchange({**request, "return_sampling_mask": True}, reply)


def test_rescoring_refuses_gaps() -> None:
    request, reply = exchange("rescore_prompt_only")
    holed = copy.deepcopy(reply)
    holed["meta_info"]["input_token_logprobs"][2][0] = None
    with pytest.raises(ReplyError, match="position 2 is None"):
        parse_prompt_log_probs(holed, request["input_ids"])
    holed["meta_info"]["input_token_logprobs"] = []
    with pytest.raises(ReplyError, match="send logprob_start_len 0"):
        parse_prompt_log_probs(holed, request["input_ids"])


def test_values_that_are_no_log_probs_stay_for_the_policy() -> None:
    request, reply = exchange("greedy")
    entries(reply)[0][0], entries(reply)[1][0] = None, math.nan
    (sample,) = parse_exchange(request, reply)
    assert np.isnan(sample.rollout_log_probs).tolist() == [True, True, *[False] * 6]
    assert is_null(sample.rollout_log_probs).tolist() == [True, *[False] * 7]
    (sample,) = parsed("without_logprobs")
    assert is_null(sample.rollout_log_probs).tolist() == [True] * 6


def test_text_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="no input_ids"):
        parse_exchange({"text": "hello"}, {})


def test_the_last_id_of_the_vocabulary_comes_back_as_0() -> None:
    request, reply = exchange("rescore_prompt_only")
    sent = list(request["input_ids"])
    entries = reply["meta_info"]["input_token_logprobs"]
    sent[2], entries[2][1] = 511, 0  # of 512 ids
    sent[4], entries[4][1] = 511, 0
    for size in (None, 512):
        log_probs = parse_prompt_log_probs(reply, sent, vocab_size=size)
        assert log_probs[2] == entries[2][0] and log_probs[4] == entries[4][0]
    with pytest.raises(ReplyError, match="position 2: 511 against 0"):
        parse_prompt_log_probs(reply, sent, vocab_size=1000)  # there it is not the last one
    sent[3] = 600
    entries[3][1] = 600
    with pytest.raises(ReplyError, match="position 2: 511 against 0"):
        parse_prompt_log_probs(reply, sent)  # nor next to a larger one
    entries[2][1] = entries[4][1] = 0
    entries[3][1] = 0
    with pytest.raises(ReplyError, match="of another prompt"):
        parse_prompt_log_probs(reply, sent)  # one id is the last, not two


def test_the_worker_is_named() -> None:
    request, reply = exchange("greedy")
    assert parse_exchange(request, reply)[0].dp_rank is None
    reply["meta_info"]["dp_rank"] = 5
    assert parse_exchange(request, reply)[0].dp_rank == 5
    reply["meta_info"]["dp_rank"] = "first"
    with pytest.raises(ReplyError, match="dp_rank"):
        parse_exchange(request, reply)


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


def told(**changed: Any) -> Sample:
    fields: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}
    return Sample(**fields, served={**SERVED, **changed})


def telling(value: Any) -> Any:
    logged = [[-1.0, 2, None], [-2.0, 3, None]]
    meta = {"id": "r", "output_token_logprobs": logged, "completion_tokens": 2, META_KEY: value}
    return {"output_ids": [2, 3], "text": "", "meta_info": meta}


@pytest.mark.parametrize("value", [SERVED, [SERVED], [None, SERVED], {**SERVED, "of_a_newer_plugin": 1}, None, []])
def test_what_the_plugin_told_is_read_from_a_reply(value: Any) -> None:
    (sample,) = parse_generate(telling(value), [[1]])
    assert sample.served == (told().served if value else None) and sample.log_probs_of == "tempered"
    (raw,) = parse_generate(telling([{**SERVED, "log_probs_of": "raw"}]), [[1]])
    assert raw.log_probs_of == "raw"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({**SERVED, "sglang": None}, f"{META_KEY}.sglang: "),
        ([{**SERVED, "weights": [{"fingerprint": "a", "start": -1, "end": 2}]}], f"{META_KEY}.weights.0.start: "),
        ({name: value for name, value in SERVED.items() if name != "dtype"}, f"{META_KEY}.dtype: Field required"),
        ([SERVED, SERVED], f"{META_KEY}: "),
        ("text", f"{META_KEY}: "),
        ({**SERVED, "weights": [{"fingerprint": "a", "start": 0, "end": 3}]}, "served.weights: 'a' spans"),
    ],
)
def test_a_malformed_one_is_an_error_that_names_the_field(value: Any, says: str) -> None:
    with pytest.raises(ReplyError) as error:
        parse_generate(telling(value), [[1]])
    assert error.value.kind == "form" and error.value.sample == 0 and says in str(error.value)


@pytest.mark.parametrize("bad", [[(0, 3)], [(1, 0)], [(0, 2), (1, 2)], [(1, 2), (0, 1)]])
def test_spans_are_in_order_and_inside_the_response(bad: list[tuple[int, int]]) -> None:
    weights = [{"fingerprint": "a", "start": start, "end": end} for start, end in bad]
    with pytest.raises(ValueError, match=r"served\.weights: 'a' spans .* half-open, in order and inside"):
        told(weights=weights)


def test_the_worker_and_the_temperature_are_what_the_server_told() -> None:
    through_router = told().with_fields(server="http://router:1", dp_rank=0)
    assert through_router.worker == ("10.0.0.1:30000 4711", 1)
    assert through_router.log_prob_temperature == SERVED["temperature"]
    plain = through_router.with_fields(served=None)
    assert plain.worker == ("http://router:1", 0) and plain.log_prob_temperature == 1.0
    assert told(temperature=None).log_prob_temperature == 1.0


def test_a_dump_that_tells_no_temperature_takes_the_servers(tmp_path: Path) -> None:
    tokens = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
    tempered = {**SERVED, "temperature": 0.7, "filters": [], "weights": SERVED["weights"][:1]}
    rows = [{**tokens, "metadata": {META_KEY: told} if told else None} for told in (tempered, None)]
    for name, chosen in (("told.pt", rows[:1]), ("half.pt", rows)):
        torch.save({"rollout_id": 0, "samples": chosen}, tmp_path / name)
    dump = read(tmp_path / "told.pt")
    assert dump.samples[0].temperature == 0.7 and not [note for note in dump.notes if "temperature" in note]
    half = read(tmp_path / "half.pt")
    assert [sample.temperature for sample in half.samples] == [0.7, 1.0]
    assert [note for note in half.notes if "temperature 1 without filters is assumed" in note]
