"""Old keys and values, and cloned groups: each named from what one sample or group shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import ServedKV
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.layers import Mix
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.scorers import Checkpoint
from mismatch_plugin.sglang.delivered import of_sums, sums
from tests.diagnose.detectors.test_served import Span, Weights, checked, faults, record, update
from tests.fixtures.families import build_family

OLD = [ServedKV(fingerprint="f4", tokens=50, cached=48)]


def test_keys_and_values_of_older_weights_are_named_from_one_reply():
    clean = [record(last=update(4), kv=[], seed=seed) for seed in range(8)]
    result = checked(*clean, record(last=update(4), kv=OLD, server="b:1"))
    (finding,) = result.findings
    assert (finding.fault, finding.confidence, finding.samples) == ("stale_cache", "certain", 1)
    assert "48 tokens of f4, under responses of f5" in finding.evidence and "b:1" in finding.evidence
    half = record(last=update(4), kv=[ServedKV(fingerprint=None, tokens=3, cached=3)])
    assert "3 tokens of a half done update" in checked(half).findings[0].evidence


def test_keys_and_values_that_are_the_responses_own_are_no_fault():
    """From before an update in place; those of an earlier turn, which the cache kept over an update, are one."""
    both: list[Weights] = [("f4", "4", 0, 3), ("f5", "5", 3, 8)]
    spans: list[Span] = [("4", 0, 3), ("5", 3, 8)]
    own = [ServedKV(fingerprint="f4", tokens=48)]
    assert "stale_cache" not in faults(record(spans, both, last=update(4), kv=own))
    assert "stale_cache" in faults(record(spans, both, last=update(4), kv=OLD))
    assert faults(record(last=update(4), kv=OLD, mask=[0] * 8)) == []
    assert faults(record(last=update(4), kv=None)) == []


def test_an_update_of_which_most_rounds_away_is_noted():
    def noted(share: float | None, matrices: int = 10, **told: Any) -> list[str]:
        last = update(4, matrices=matrices).model_copy(update={"changed_elements": share})
        found = checked(record(last=last, **told)).findings
        return [item.severity for item in found if item.fault == "update_lost_in_precision"]

    assert noted(0.039) == ["note"] and noted(0.0001) == ["note"]
    assert noted(0.06) == noted(0.9) == noted(None) == []
    assert noted(0.039, dtype="float32") == noted(0.039, quantization="fp8") == []
    assert noted(0.039, matrices=3) == []  # a part that came is another fault
    (finding, *_) = checked(record(last=update(4).model_copy(update={"changed_elements": 0.039}))).findings
    assert "a:1 changed 3.90% of the elements" in finding.evidence and "cosine of about .12" in finding.evidence


@pytest.mark.parametrize(("step", "share", "cosine"), [(1e-6, 0.05, 0.12), (1e-5, 0.29, 0.37)])
def test_what_the_note_says_of_shares_and_cosines(step: float, share: float, cosine: float):
    """Of a million Gaussian weights, median .011, in bfloat16."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(1_000_000, generator=draw) * 0.011 / 0.6745
    intended = torch.randn(len(weights), generator=draw).sign() * step
    delivered = (weights + intended).bfloat16().float() - weights.bfloat16().float()
    assert float((delivered != 0).float().mean()) == pytest.approx(share, abs=0.005)
    assert float(torch.cosine_similarity(delivered, intended, dim=0)) == pytest.approx(cosine, abs=0.006)
    found = of_sums(sums(weights, weights + intended, torch.bfloat16))
    assert found is not None and found.changed == pytest.approx(share, abs=0.005)
    assert found.cosine == pytest.approx(cosine, abs=0.006)
    assert found.norm_ratio == pytest.approx(float(delivered.norm() / intended.norm()), rel=0.02)
    assert of_sums(sums(weights, weights, torch.bfloat16)) is None


@pytest.mark.parametrize(("step", "noted"), [(1e-6, True), (1e-4, False), (0.0, False)])
def test_two_checkpoints_show_what_bfloat16_delivers(tmp_path: Path, step: float, noted: bool):
    start = build_family("qwen3", 0)
    start.save_pretrained(tmp_path / "start")
    draw = torch.Generator().manual_seed(1)
    for parameter in start.parameters():
        parameter.data.mul_(1 + 30 * step * torch.randn(parameter.shape, generator=draw).sign())
    start.save_pretrained(tmp_path / "now")
    between = Mix(Checkpoint(tmp_path / "now"), Checkpoint(tmp_path / "start"))
    batch = replace(make_batch([record(last=None)]), between=between)
    found = [item for item in check_batch(batch).findings if item.fault == "update_lost_in_precision"]
    assert [item.severity for item in found] == ["note"] * noted
    if noted:
        assert "Between both checkpoints" in found[0].evidence and "cosine of 0." in found[0].evidence
    wide = replace(make_batch([record(last=None, dtype="float32")]), between=between)
    assert check_batch(wide).findings == ()


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
