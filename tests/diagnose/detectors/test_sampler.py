"""Old keys and values, weights of the launch, and cloned groups: each named from what one sample or group shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import ServedKV
from tests.diagnose.detectors.test_served import Weights, checked, faults, record, update

OLD = [ServedKV(fingerprint="f4", tokens=48)]


def test_keys_and_values_of_older_weights_are_named_from_one_reply():
    clean = [record(last=update(4), kv=[], seed=seed) for seed in range(8)]
    result = checked(*clean, record(last=update(4), kv=OLD, server="b:1"))
    (finding,) = result.findings
    assert (finding.fault, finding.confidence, finding.samples) == ("stale_cache", "certain", 1)
    assert "48 tokens of f4, under responses of f5" in finding.evidence and "b:1" in finding.evidence
    half = record(last=update(4), kv=[ServedKV(fingerprint=None, tokens=3)])
    assert "3 tokens of a half done update" in checked(half).findings[0].evidence


def test_keys_and_values_that_are_the_responses_own_are_no_fault():
    both: list[Weights] = [("f4", "4", 0, 3), ("f5", "5", 3, 8)]
    in_place = record([("4", 0, 3), ("5", 3, 8)], both, last=update(4), kv=OLD)
    assert "stale_cache" not in faults(in_place)
    assert faults(record(last=update(4), kv=OLD, mask=[0] * 8)) == []
    assert faults(record(last=update(4), kv=None)) == []


@pytest.mark.parametrize(
    ("label", "since", "last", "trainer", "named"),
    [
        ("default", "default", None, {"trainer_version": "21"}, True),
        ("default", "default", None, {"trainer_version": "21", "trainer_fingerprint": "f9"}, True),
        ("default", "default", None, {"trainer_version": "21", "trainer_fingerprint": "f5"}, False),  # resumed from 21
        ("default", "default", None, {"trainer_version": "1"}, False),  # one step ahead, or the first sync's number
        ("default", "default", None, {}, False),
        ("default", "default", update(21), {"trainer_version": "21"}, False),  # a trainer that names no version
        ("21", "21", update(21), {"trainer_version": "21"}, False),
    ],
)
def test_a_server_that_started_again_is_named_from_one_reply(
    label: str, since: str, last: Any, trainer: dict[str, Any], named: bool
):
    found = checked(record(label, "f5", since, last=last), training=[trainer]).findings
    launched = [item for item in found if "launched with (fingerprint f5)" in item.evidence]
    assert [(item.fault, item.confidence) for item in launched] == [("weights_not_updated", "certain")] * named


def group(ids: list[list[int]], log_prob: float = -1.0, **asked: Any) -> list[Sample]:
    return [
        Sample(
            prompt_ids=[1, 2],
            response_ids=response,
            rollout_log_probs=[log_prob] * len(response),
            group="g",
            sampling=SamplingParameters(**asked),
        )
        for response in ids
    ]


CLONE = [5 + place % 7 for place in range(30)]
OTHERS = [np.random.default_rng(seed).integers(5, 90, 30).tolist() for seed in range(6)]


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        (group([*OTHERS, CLONE, CLONE]), True),
        (group([CLONE] * 8, temperature=0.7), True),
        (group(OTHERS), False),
        (group([CLONE] * 8, log_prob=-0.5), False),  # a chance of e^-15: an answer that is nearly always the same
        (group([CLONE] * 8, temperature=0.0), False),
        (group([CLONE] * 8, top_k=1), False),
        (group([CLONE] * 8, top_p=0.9), False),  # what was cut is not known
        ([one.with_fields(prompt_ids=np.array([1, number])) for number, one in enumerate(group([CLONE] * 4))], False),
        ([one.with_fields(step=number) for number, one in enumerate(group([CLONE] * 4))], False),
    ],
)
def test_responses_that_sampling_does_not_repeat(samples: list[Sample], named: bool):
    found = [item for item in checked(*samples).findings if item.fault == "cloned_group"]
    assert [(item.fault, item.confidence) for item in found] == [("cloned_group", "certain")] * named
    if named:
        assert f"up to {sum(one.response_ids.tolist() == CLONE for one in samples)} times" in found[0].evidence
