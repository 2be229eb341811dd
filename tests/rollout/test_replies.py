"""Real replies of SGLang 0.5.23 in every form it has, and what happens when one of them loses something."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.sglang.replies import ReplyError, parse_exchange, parse_generate, parse_prompt_log_probs

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang_generate"


def exchange(name: str) -> tuple[dict[str, Any], Any]:
    logged = json.loads((FIXTURES / f"{name}.json").read_text())
    return logged["request"], logged["response"]


def parsed(name: str) -> list[RolloutRecord]:
    return parse_exchange(*exchange(name))


def test_a_batch_keeps_its_order_and_its_prompts() -> None:
    request, reply = exchange("batch_temperature_1")
    records = parsed("batch_temperature_1")
    assert [record.prompt_ids for record in records] == request["input_ids"]
    for record, item in zip(records, reply, strict=True):
        assert record.response_ids == item["output_ids"]
        assert record.rollout_log_probs == [entry[0] for entry in item["meta_info"]["output_token_logprobs"]]
        assert record.request_id == item["meta_info"]["id"] and record.text == item["text"]
        assert record.loss_mask == [1] * 12 and record.finish_reason == "length"
        assert record.version_of_token == ["default"] * 12 and record.faults() == []
    assert [record.sample_id for record in records] == ["0", "1", "2", "3"]
    samples = parsed("parallel_samples")
    assert [record.prompt_ids for record in samples] == [[10, 20, 30, 40]] * 2 + [[5, 6]] * 2


def test_prompt_log_probs_text_and_top_log_probs() -> None:
    (record,) = parsed("with_prompt_logprobs_and_text")
    assert record.prompt_log_probs is not None and record.prompt_log_probs[0] is None
    assert record.prompt_log_probs[1:] == [-7.923654556274414, -4.610270977020264, -5.290630340576172]
    assert record.top_log_probs is not None and len(record.top_log_probs) == 6
    assert record.top_log_probs[0] == [(-3.229572296142578, 34), (-3.2735772132873535, 149)]
    (tail,) = parsed("prompt_log_probs_tail")
    assert tail.prompt_log_probs == [None, None, None, -5.290630340576172]


def test_rescoring() -> None:
    request, reply = exchange("rescore_prompt_only")
    log_probs = parse_prompt_log_probs(reply, request["input_ids"])
    assert log_probs[0] is None and log_probs[1] == -9.536086082458496 and len(log_probs) == 6
    (record,) = parse_exchange(request, reply)
    assert record.response_ids == [] and record.prompt_log_probs == log_probs


def test_sampling_parameters_are_those_of_the_request() -> None:
    (record,) = parsed("temperature_0_7_top_p_0_9")
    assert (record.sampling.temperature, record.sampling.top_p) == (0.7, 0.9)
    assert "without the sampling mask" in record.note
    (greedy,) = parsed("greedy")
    assert greedy.sampling.greedy and greedy.note.startswith("greedy")


def test_responses_end_in_a_stop_token_or_with_an_abort() -> None:
    (record,) = parsed("stop_token")
    assert record.finish_reason == "stop" and record.response_ids == [337, 433, 0]
    (record,) = parsed("aborted")
    assert record.finish_reason == "abort" and len(record.rollout_log_probs) == 118 == len(record.response_ids)


def test_an_abort_before_the_first_token_is_an_empty_response() -> None:
    request, reply = exchange("aborted")
    reply["output_ids"] = []
    for name in ("output_token_logprobs", "output_token_logprobs_length", "completion_tokens", "weight_versions"):
        del reply["meta_info"][name]
    (record,) = parse_exchange(request, reply)
    assert record.response_ids == [] and record.finish_reason == "abort"


def test_weights_updated_in_flight_give_spans() -> None:
    (record,) = parsed("weights_updated_in_flight")
    spans = [(span.version, span.start, span.end) for span in record.weight_versions]
    assert spans == [("default", 0, 163), ("v2", 163, 400)]
    assert record.version_of_token[162:164] == ["default", "v2"]


def test_an_older_server_tells_one_version_for_all_tokens() -> None:
    request, reply = exchange("greedy")
    del reply["meta_info"]["weight_versions"]
    (record,) = parse_exchange(request, reply)
    assert record.version_of_token == ["default"] * 8
    del reply["meta_info"]["weight_version"]
    assert parse_exchange(request, reply)[0].weight_versions == []


def test_log_probs_that_were_not_asked_for_are_none() -> None:
    (record,) = parsed("without_logprobs")
    assert record.rollout_log_probs == [None] * 6
    assert [fault.kind for fault in record.faults()] == ["missing"] * 6


def test_kept_ids_and_both_log_probs() -> None:
    (record,) = parsed("sampling_mask_kept")
    assert record.kept_ids is not None and record.behaviour_log_probs is not None
    for token, kept, full, behaviour in zip(
        record.response_ids, record.kept_ids, record.rollout_log_probs, record.behaviour_log_probs, strict=True
    ):
        assert token in kept and full is not None and behaviour is not None
        assert behaviour > full  # renormalised over less than everything
    assert record.note == ""


def test_log_probs_of_the_whole_support_give_that_of_the_token() -> None:
    _, reply = exchange("sampling_mask_support")
    (record,) = parsed("sampling_mask_support")
    assert record.kept_ids is not None and record.behaviour_log_probs is not None
    rows = reply["meta_info"]["output_token_sampling_logprobs"]
    for position, row in enumerate(rows):
        assert sum(map(math.exp, row)) == pytest.approx(1.0, abs=1e-5)
        place = record.kept_ids[position].index(record.response_ids[position])
        assert record.behaviour_log_probs[position] == row[place]


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
        parse_generate([good, reply], [[10, 20, 30, 40]] * 2, samples=["first", "second"])
    assert (caught.value.kind, caught.value.sample) == (kind, "second")


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
        parse_prompt_log_probs(holed, request["input_ids"], 5)
    holed["meta_info"]["input_token_logprobs"] = []
    with pytest.raises(ReplyError, match="send logprob_start_len 0"):
        parse_prompt_log_probs(holed, request["input_ids"], 5)


def test_values_that_are_no_log_probs_stay_for_the_policy() -> None:
    request, reply = exchange("greedy")
    entries(reply)[0][0], entries(reply)[1][0] = None, math.nan
    (record,) = parse_exchange(request, reply)
    assert [(fault.position, fault.kind) for fault in record.faults()] == [(0, "missing"), (1, "nan")]


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
