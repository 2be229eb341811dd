"""Sampling parameters: to SGLang, what is refused, and the bias that they leave in log-probs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mismatch_plugin.data.sampling import SGLANG_TOP_K_OFF, SamplingParameters, remaining_bias

SLIME = {
    "temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8192, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
}  # fmt: skip
"""The sampling parameters of a slime rollout, as it builds them."""


def test_sampling_goes_to_sglang_in_full() -> None:
    sampling = SamplingParameters(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=8, stop_token_ids=(3,), seed=5)
    sent = sampling.to_sglang()
    assert sent["sampling_seed"] == 5 and sent["stop_token_ids"] == [3] and sent["min_p"] == 0.0
    # null would lift the bound that absence leaves at the server's default
    assert "max_new_tokens" not in SamplingParameters().to_sglang()
    assert SamplingParameters(top_k=SGLANG_TOP_K_OFF).top_k == -1
    of_slime = SamplingParameters.model_validate(SLIME)
    sent = of_slime.to_sglang()
    assert {name: sent.get(name) for name in SLIME} == SLIME
    assert remaining_bias(of_slime, renormalised=False, replayed=False) == ""


UNSEEN = "is .*neither the returned log-probs nor the training side know"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *((name, value, UNSEEN) for name, value in (
            ("regex", "[0-9]+"), ("json_schema", "{}"), ("ebnf", "root ::= x"), ("structural_tag", "{}"),
            ("logit_bias", {"3": 1.0}), ("custom_params", {"thinking_budget": 1}), ("watermark", 1), ("beam_width", 4),
        )),
        ("temprature", 0.7, "Extra inputs"),
        ("top_k", 0, "=0 must be at least 1"),
    ],
)  # fmt: skip
def test_what_changes_the_distribution_unseen_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?s){name}.*{says}"):
        SamplingParameters.model_validate({name: value})


@pytest.mark.parametrize(
    ("given", "greedy", "temperature"),
    [
        ({"temperature": 0.0}, True, 1.0),
        ({"temperature": 9.99e-7}, True, 1.0),
        ({"temperature": 1e-6}, False, 1e-6),  # SGLang's bound is exclusive
        ({"temperature": 0.7, "top_k": 1}, True, 1.0),
        ({"temperature": 0.7, "top_k": 2}, False, 0.7),
    ],
)
def test_greedy_is_what_sglang_takes_for_it(given: dict[str, Any], greedy: bool, temperature: float) -> None:
    sampling = SamplingParameters(**given)
    assert (sampling.greedy, sampling.log_prob_temperature) == (greedy, temperature)
    note = remaining_bias(sampling, renormalised=True, replayed=True)
    assert ("at temperature 1, whatever temperature was asked for" in note) == greedy


@pytest.mark.parametrize(
    ("given", "has_kept_ids", "says"),
    [
        ({"temperature": 0.6}, False, ""),
        ({"top_p": 0.9, "top_k": 5, "min_p": 0.1}, False, "top_p 0.9, top_k 5, min_p 0.1 without a sampling mask"),
        ({"top_p": 0.9, "top_k": 5}, True, ""),
        ({"repetition_penalty": 1.1}, True, "penalties are part"),
        ({"min_new_tokens": 4}, False, "min_new_tokens=4 forbids"),
    ],
)
def test_the_bias_that_remains_is_said(given: dict[str, Any], has_kept_ids: bool, says: str) -> None:
    note = remaining_bias(SamplingParameters(**given), renormalised=has_kept_ids, replayed=has_kept_ids)
    assert note.startswith(says) and bool(note) == bool(says)
