"""Records: what is refused, every kind of fault by sample, position and kind, sampling parameters, joined turns."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mismatch_plugin.core.validity import KINDS, classify
from mismatch_plugin.rollout.records import (
    Fault,
    RolloutRecord,
    SamplingParameters,
    WeightSpan,
    check_record,
    check_records,
)
from mismatch_plugin.data.sampling import SGLANG_TOP_K_OFF, remaining_bias


def record(log_probs: list[float | None], **fields: Any) -> RolloutRecord:
    ids = fields.pop("response_ids", list(range(10, 10 + len(log_probs))))
    return RolloutRecord(prompt_ids=[1, 2], response_ids=ids, rollout_log_probs=log_probs, **fields)


def span(version: str, start: int, end: int) -> WeightSpan:
    return WeightSpan(version=version, start=start, end=end)


def places(faults: list[Fault]) -> list[tuple[object, int, str]]:
    return [(fault.sample, fault.position, fault.kind) for fault in faults]


def test_every_kind_of_bad_log_prob_is_found_where_it_is() -> None:
    bad = [-1.0, None, math.nan, math.inf, 0.2, -math.inf, -9999.0, 0.0, 0.05, -4000.0]
    train = [-1.0] * 7 + [-3.5, -1.0, -1.0]
    expected = ["missing", "nan", "positive_infinite", "positive", "floor", "floor", "zero_fill"]
    faults = record(bad).faults(4, train_log_probs=train)
    assert places(faults) == [(4, position, kind) for position, kind in enumerate(expected, 1)]
    for fault in faults:
        assert f"sample 4, position {fault.position}" in str(fault) and f"kind {fault.kind}" in str(fault)


def test_a_certain_token_is_no_fill() -> None:
    certain = record([0.0, 0.0])
    assert certain.faults(0) == []  # without the training side nobody can tell
    assert certain.faults(0, train_log_probs=[-0.1, -2.9]) == []
    assert places(certain.faults(0, train_log_probs=[-0.1, -3.1])) == [(0, 1, "zero_fill")]
    masked = record([math.nan, None, 0.0, -1.0], loss_mask=[0, 0, 0, 1])  # of which nothing is said
    assert masked.faults(0, train_log_probs=[-9.0] * 4) == []


def test_the_behaviour_log_probs_are_checked_too() -> None:
    both = record([-1.0, -2.0], behaviour_log_probs=[-0.5, None], kept_ids=[[10], [11, 12]])
    (fault,) = check_record(both, 7)
    assert (fault.sample, fault.position, fault.kind) == (7, 1, "missing") and "behaviour" in fault.message


@pytest.mark.parametrize(("given", "position"), [([-1.0, -2.0], 2), ([-1.0] * 5, 3)])
def test_a_list_of_another_length_is_a_fault_at_the_first_token_without_a_partner(
    given: list[float | None], position: int
) -> None:
    wrong = record(given, response_ids=[5, 6, 7])
    assert places(wrong.faults(2)) == [(2, position, "length")]
    assert f"{len(given)} for 3 response tokens" in str(wrong.faults(2)[0])


def test_the_ids_trained_on_are_compared() -> None:
    ours = record([-1.0, -1.0, -1.0], response_ids=[5, 6, 7])
    assert ours.faults(0, trained_ids=[5, 6, 7]) == []
    (fault,) = ours.faults(0, trained_ids=[5, 9, 7])
    assert (fault.position, fault.kind, fault.value) == (1, "token_ids", 9) and "6 was sampled" in fault.message
    assert places(ours.faults(0, trained_ids=[5, 6, 7, 2])) == [(0, 3, "length")]
    assert places(ours.faults(0, trained_ids=[5, 6])) == [(0, 2, "length")]


def test_a_batch_names_its_samples_by_place() -> None:
    batch = [record([-1.0]), record([None]), record([-1.0, math.nan])]
    assert places(check_records(batch)) == [(1, 0, "missing"), (2, 1, "nan")]
    with pytest.raises(ValueError, match="2 entries for 3 records"):
        check_records(batch, [[-1.0], [-1.0]])


def test_records_and_the_core_agree_on_what_is_a_log_prob() -> None:
    values = [-1e-3, 0.0, 0.1, 0.1001, 1.0, math.inf, -4999.0, -5000.0, -math.inf, math.nan, -12.5]
    train = [-5.0] * len(values)
    codes = classify(torch.tensor(train), torch.tensor(values), torch.zeros(len(values), dtype=torch.bool))
    kinds = {fault.position: fault.kind for fault in record(list(values)).faults(0, train_log_probs=train)}
    finer = {"positive_infinite": "positive", "missing": "nan"}
    ours = [finer.get(kinds.get(i, "sound"), kinds.get(i, "sound")) for i in range(len(values))]
    assert ours == [KINDS[int(code)] for code in codes]


def test_versions_follow_their_spans() -> None:
    spans = [span("a", 0, 2), span("b", 3, 4)]
    assert record([-1.0] * 5, weight_versions=spans).version_of_token == ["a", "a", None, "b", None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "loss_mask has 1 entries, response_ids 2 .sample s7."),
        ({"loss_mask": [1, 2]}, "loss_mask holds 2 at position 1"),
        ({"kept_ids": [[1]]}, "kept_ids has 1 entries"),
        ({"prompt_log_probs": [None]}, "prompt_log_probs has 1 entries, prompt_ids 2"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 3}]}, r"'a' spans \[0, 3\)"),
        (
            {
                "weight_versions": [
                    {"version": "a", "start": 0, "end": 2},
                    {"version": "b", "start": 1, "end": 2},
                ]
            },
            r"'b' spans \[1, 2\) after token 2",
        ),
        ({"surprise": 1}, "surprise"),
        ({"finish_reason": "tired"}, "finish_reason"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        record([-1.0, -1.0], sample_id="s7", **fields)


def test_json_keeps_what_is_no_number() -> None:
    given = record([None, math.nan, math.inf, -math.inf, -0.1])
    text = given.model_dump_json()
    json.loads(text, parse_constant=pytest.fail)  # strict JSON has no NaN
    back = RolloutRecord.model_validate_json(text)
    assert repr(back.rollout_log_probs) == repr(given.rollout_log_probs)


def test_sampling_goes_to_sglang_in_full_and_comes_back() -> None:
    sampling = SamplingParameters(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=8, stop_token_ids=(3,), seed=5)
    sent = sampling.to_sglang()
    assert sent["sampling_seed"] == 5 and sent["stop_token_ids"] == [3] and sent["min_p"] == 0.0
    assert SamplingParameters.from_sglang(sent) == sampling
    # null would lift the bound that absence leaves at the server's default
    assert "max_new_tokens" not in SamplingParameters().to_sglang()


def test_sglangs_spellings_of_off() -> None:
    assert SamplingParameters(top_k=SGLANG_TOP_K_OFF).top_k == -1
    assert SamplingParameters.from_sglang(None) == SamplingParameters()


SLIME = {
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 8192,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
"""The sampling parameters of a slime rollout, as it builds them."""


def test_slimes_own_dict_is_taken_and_sent_as_it_is() -> None:
    for read in (SamplingParameters.from_sglang(SLIME), SamplingParameters.model_validate(SLIME)):
        sent = read.to_sglang()
        assert {name: sent.get(name) for name in SLIME} == SLIME
        assert SamplingParameters.from_sglang(sent) == read
        assert remaining_bias(read, has_kept_ids=False) == ""


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"stop": "</s>"}, {"stop": ["</s>"]}),
        ({"stop": ["a", "b"], "stop_regex": "x+"}, {"stop": ["a", "b"], "stop_regex": ["x+"]}),
        ({"stop_token_ids": [7], "ignore_eos": True}, {"stop_token_ids": [7], "ignore_eos": True}),
        ({"stream_interval": 4}, {"stream_interval": 4}),
        ({"temperature": None, "top_k": None, "min_p": None}, {"temperature": 1.0, "top_k": -1, "min_p": 0.0}),
        ({"regex": "", "logit_bias": {}, "custom_params": None, "beam_width": 1}, {"temperature": 1.0}),
    ],
)
def test_what_does_not_change_the_distribution_passes_through(given: dict[str, Any], sent: dict[str, Any]) -> None:
    sampling = SamplingParameters.from_sglang(given)
    assert sampling.to_sglang().items() >= sent.items()
    assert sampling.distribution == SamplingParameters().distribution
    # What is not given is not sent as an empty list or null.
    assert all(value not in ((), [], None) for value in sampling.to_sglang().values())


UNSEEN = "is .*neither the returned log-probs nor the training side know"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("regex", "[0-9]+", UNSEEN),
        ("json_schema", "{}", UNSEEN),
        ("ebnf", "root ::= x", UNSEEN),
        ("structural_tag", "{}", UNSEEN),
        ("logit_bias", {"3": 1.0}, UNSEEN),
        ("custom_params", {"thinking_budget": 1}, UNSEEN),
        ("watermark", True, UNSEEN),
        ("beam_width", 4, UNSEEN),
        ("temprature", 0.7, "Extra inputs"),
        ("top_k", 0, "=0 must be at least 1"),
    ],
)
def test_what_changes_the_distribution_unseen_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?s){name}.*{says}"):
        SamplingParameters.from_sglang({name: value})


@pytest.mark.parametrize(
    ("given", "greedy", "temperature"),
    [
        ({"temperature": 0.0}, True, 1.0),
        ({"temperature": 1e-7}, True, 1.0),
        ({"temperature": 9.99e-7}, True, 1.0),
        ({"temperature": 1e-6}, False, 1e-6),  # SGLang's bound is exclusive
        ({"temperature": 0.7, "top_k": 1}, True, 1.0),
        ({"temperature": 0.7, "top_k": 2}, False, 0.7),
    ],
)
def test_greedy_is_what_sglang_takes_for_it(given: dict[str, Any], greedy: bool, temperature: float) -> None:
    sampling = SamplingParameters(**given)
    assert (sampling.greedy, sampling.log_prob_temperature) == (greedy, temperature)
    note = remaining_bias(sampling, has_kept_ids=True)
    assert ("at temperature 1, whatever temperature was asked for" in note) == greedy


@pytest.mark.parametrize(
    ("sampling", "has_kept_ids", "says"),
    [
        (SamplingParameters(temperature=0.6), False, ""),
        (SamplingParameters(top_p=0.9), False, "top_p=0.9 without the sampling mask"),
        (SamplingParameters(top_p=0.9, top_k=5, min_p=0.1), False, "top_p=0.9, top_k=5, min_p=0.1 without"),
        (SamplingParameters(top_p=0.9, top_k=5), True, ""),
        (SamplingParameters(repetition_penalty=1.1), True, "penalties are part"),
        (SamplingParameters(min_new_tokens=4), False, "min_new_tokens=4 forbids"),
        (SamplingParameters(temperature=0.0), False, "greedy"),
        (SamplingParameters(temperature=1e-7), False, "greedy"),
        (SamplingParameters(top_k=1), True, "greedy"),
    ],
)
def test_the_bias_that_remains_is_said(sampling: SamplingParameters, has_kept_ids: bool, says: str) -> None:
    note = remaining_bias(sampling, has_kept_ids=has_kept_ids)
    assert note.startswith(says) and bool(note) == bool(says)
