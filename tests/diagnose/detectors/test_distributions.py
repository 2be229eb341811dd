"""Detectors of distributions, digits, versions and level on numbers made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.versions import WeightSpan, version_number
from mismatch_plugin.diagnose.detectors.distribution import find_penalty, find_temperature, find_unrelated
from mismatch_plugin.diagnose.detectors.filters import find_truncation
from mismatch_plugin.diagnose.detectors.precision import find_precision, fits_bf16, fits_decimals, fits_fp16
from mismatch_plugin.diagnose.detectors.size import mismatch
from mismatch_plugin.diagnose.detectors.vocabulary import penalise
from mismatch_plugin.diagnose.detectors.weights import find_versions
from mismatch_plugin.diagnose.findings import Undecided
from tests.fixtures.sglang_check.by_hand import batch_of, found, wave

# Distributions. Tokens of p = (1/2, 1/4, 1/8, 1/8), as often as they are expected.

_P = [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125] * 20


def test_a_temperature_is_the_slope_of_centred_log_probs():
    rollout = np.log(_P)
    half = np.sqrt(_P) / (math.sqrt(0.5) + math.sqrt(0.25) + 2 * math.sqrt(0.125))
    items, _ = find_temperature(batch_of([rollout.tolist()], [np.log(half).tolist()]))
    (finding,) = found(items)
    assert finding.fault == "temperature"
    assert finding.statistics["slope"] == pytest.approx(0.5)
    assert finding.statistics["temperature_ratio_low"] == pytest.approx(2.0)
    assert finding.statistics["temperature_ratio_high"] == pytest.approx(2.0)


@pytest.mark.parametrize(("recorded", "side"), [(0.5, "training"), (2.0, "rollout")])
def test_the_recorded_temperature_tells_the_side(recorded: float, side: str):
    half = np.sqrt(_P) / (math.sqrt(0.5) + math.sqrt(0.25) + 2 * math.sqrt(0.125))
    records = {"sampling": SamplingParameters(temperature=recorded)}
    items, _ = find_temperature(batch_of([np.log(_P).tolist()], [np.log(half).tolist()], records=records))
    assert [item.side for item in found(items)] == [side]


def test_a_temperature_that_the_training_side_tells():
    batch = batch_of([[-1.0]], [[-1.0]], training=[{"trainer_temperature": 0.7}])
    assert [item.fault for item in found(find_temperature(batch)[0])] == ["temperature"]


@pytest.mark.parametrize(("trainer_at", "side"), [(0.7, "rollout"), (1.0, "both")])
@pytest.mark.parametrize("told", [True, False])
def test_raw_log_probs_of_tokens_drawn_at_a_temperature(trainer_at: float, side: str, told: bool):
    """Two equally likely logits below one: q of temperature .7 is p to the power 1/.7, normalised."""
    raw = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    sharp = raw / trainer_at - np.log(np.exp(raw / trainer_at).sum())
    drawn = np.random.default_rng(0).choice(4, 400, p=np.exp(raw / 0.7) / np.exp(raw / 0.7).sum())
    records = {"sampling": SamplingParameters(temperature=0.7), "log_probs_of": "raw"}
    training = [{"trainer_temperature": trainer_at}] if told else None
    batch = batch_of([raw[drawn].tolist()], [sharp[drawn].tolist()], records=records, training=training)
    (finding,) = found(find_temperature(batch)[0])
    assert (finding.fault, finding.side, finding.confidence) == ("temperature", side, "certain")
    assert "processed_logprobs" in finding.fix and ("Divide the trainer" in finding.fix) == (side == "both")
    at_one = {**records, "sampling": SamplingParameters(temperature=1.0)}
    same = batch_of([raw[drawn].tolist()], [raw[drawn].tolist()], records=at_one)
    assert found(find_temperature(same)[0]) == []


def test_log_probs_after_filters_need_a_trainer_that_replays_them():
    full = np.log([p for p in _P if p > 0.2])  # top-k 2 keeps 3/4 of the mass
    cut = (full - math.log(0.75)).tolist()
    records = {"sampling": SamplingParameters(top_k=2), "log_probs_of": "filtered"}
    (finding,) = found(find_truncation(batch_of([cut], [full.tolist()], records=records))[0])
    assert (finding.side, finding.confidence) == ("rollout", "certain") and "does not replay" in finding.evidence
    assert found(find_truncation(batch_of([cut], [cut], records=records))[0]) == []  # it does
    items, _ = find_truncation(batch_of([cut[:50]], [cut[:50]], records=records))
    assert [item.faults for item in items if isinstance(item, Undecided)] == [("truncation",)]


def test_few_tokens_tell_no_temperature_filter_or_penalty():
    batch = batch_of([np.log(_P[:64]).tolist()], [np.log(_P[:64]).tolist()])
    detectors = {"temperature": find_temperature, "penalty": find_penalty, "truncation": find_truncation}
    for fault, detector in detectors.items():
        items, _ = detector(batch)
        assert [item.faults for item in items if isinstance(item, Undecided)] == [(fault,)]
        assert found(items) == []


def test_a_renormalised_side_leaves_mass_outside():
    full = np.log([p for p in _P if p > 0.2])  # top-k 2 keeps 3/4 of the mass
    for rollout, train, side in ((full - math.log(0.75), full, "rollout"), (full, full - math.log(0.75), "training")):
        items, _ = find_truncation(batch_of([rollout.tolist()], [train.tolist()]))
        (finding,) = found(items)
        assert (finding.fault, finding.side) == ("truncation", side)
        assert finding.statistics["missing_mass"] == pytest.approx(0.25)


def test_a_recorded_filter_without_kept_ids_is_a_fault_and_with_a_replayed_mask_none():
    full = np.log([p for p in _P if p > 0.2])
    cut = (full - math.log(0.75)).tolist()
    sampling = SamplingParameters(top_k=2)
    items, _ = find_truncation(batch_of([full.tolist()], [full.tolist()], records={"sampling": sampling}))
    assert "top_k=2" in found(items)[0].evidence
    with_mask = {"sampling": sampling, "behaviour_log_probs": cut}
    items, _ = find_truncation(batch_of([full.tolist()], [full.tolist()], records=with_mask))
    assert [item.side for item in found(items)] == ["training"]
    items, fixed = find_truncation(batch_of([full.tolist()], [cut], records=with_mask))
    assert items == [] and np.all(fixed.tokens.gap == 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_penalty_is_an_offset_on_repeated_tokens(sign: int):
    ids = [at % 40 for at in range(120)]  # the first 40 are new, 80 are repeated
    noise = np.tile([0.01, -0.01], 60)
    rollout = np.array(wave(120, 0))
    train = rollout + np.where(np.arange(120) >= 40, 0.3 * sign, -0.1 * sign) + noise
    items, _ = find_penalty(batch_of([rollout.tolist()], [train.tolist()], ids=[ids]))
    (finding,) = found(items)
    assert (finding.fault, finding.side) == ("penalty", "rollout" if sign > 0 else "training")
    assert finding.statistics["offset"] == pytest.approx(0.4 * sign, abs=0.01)
    assert (finding.tokens, finding.first.position if finding.first else None) == (80, 40)


def test_no_repeats_tell_no_penalty():
    values = np.log(_P).tolist()
    items, _ = find_penalty(batch_of([values], [values]))
    assert isinstance(items[0], Undecided) and "0 of 160 occurred before" in items[0].reason


def test_penalties_are_sglangs():
    """Repetition divides positive and multiplies negative logits; frequency counts, presence does not."""
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    assert penalise(logits, np.array([0, 1, 1]), SamplingParameters(repetition_penalty=1.25)).tolist() == pytest.approx(
        [1.6, -2.5, 1.0, 0.5]
    )
    changed = penalise(logits, np.array([0, 1, 1]), SamplingParameters(frequency_penalty=0.5, presence_penalty=0.25))
    assert changed.tolist() == [1.25, -3.25, 1.0, 0.5]


def test_unrelated_sides():
    generator = np.random.default_rng(3)
    rollout, train = -generator.exponential(2.0, 80), -generator.exponential(2.0, 80)
    assert [item.fault for item in found(find_unrelated(batch_of([rollout.tolist()], [train.tolist()]))[0])] == [
        "unrelated"
    ]


# Digits, versions, level


def test_which_values_a_narrow_format_can_hold():
    values = np.array([-1.5, -1.0078125, -1.0009765625, -0.1, -1.2345])
    assert fits_bf16(values).tolist() == [True, True, False, False, False]
    assert fits_fp16(values).tolist() == [True, True, True, False, False]
    assert fits_decimals(values).tolist() == [True, False, False, True, True]


@pytest.mark.parametrize(("dtype", "fault"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_narrow_formats_by_sample(dtype: torch.dtype, fault: str):
    true = [torch.tensor(wave(20, phase)).tolist() for phase in range(4)]
    narrow = [true[0], torch.tensor(true[1]).to(dtype).float().tolist(), true[2], true[3]]
    items = found(find_precision(batch_of(narrow, true))[0])
    assert [(item.fault, item.side, item.samples) for item in items] == [(fault, "rollout", 1)]
    assert items[0].first is not None and items[0].first.sample == 1


def test_versions_mixed_inside_and_between_responses():
    inside = [WeightSpan(version="4", start=0, end=2), WeightSpan(version="5", start=2, end=3)]
    (finding,) = found(find_versions(batch_of([[-1.0] * 3], [[-1.1] * 3], records={"weight_versions": inside}))[0])
    assert finding.fault == "mixed_versions"
    assert finding.first is not None and finding.first.position == 2
    assert "'4' 2, '5' 1 tokens" in finding.evidence and "0.1" in finding.evidence


@pytest.mark.parametrize(("trainer", "largest"), [("7", None), ("8", None), ("9", 2.0), ("23", 16.0), ("6", -1.0)])
def test_staleness_in_steps(trainer: str, largest: float | None):
    spans = [WeightSpan(version="step-7", start=0, end=2)]
    training = [{"trainer_version": trainer}]
    batch = batch_of([[-1.0, -1.0]], [[-1.0, -1.0]], records={"weight_versions": spans}, training=training)
    items = found(find_versions(batch)[0])
    assert [item.statistics["largest"] for item in items] == ([] if largest is None else [largest])


def _labelled(version: str, trainer: str) -> list[Any]:
    spans = [WeightSpan(version=version, start=0, end=1)]
    training = [{"trainer_version": trainer}]
    return find_versions(batch_of([[-1.0]], [[-1.0]], records={"weight_versions": spans}, training=training))[0]


def test_versions_without_numbers_cannot_be_counted():
    (item,) = _labelled("main-abc", "12")
    assert isinstance(item, Undecided) and item.faults == ("staleness",)
    assert "'main-abc'" in item.reason and "12" not in item.reason
    assert [version_number(name) for name in ("v12", 3, "a-1-20", "x")] == [12, 3, 20, None]


def test_the_name_of_the_first_weights_is_a_server_that_was_never_updated_or_restarted():
    (item,) = _labelled("default", "21")
    assert item.fault == "weights_not_updated" and "never updated, or restarted" in item.evidence
    for trainer in ("1", "0", "default"):  # one step is allowed
        assert _labelled("default", trainer) == []


def test_level_by_hand():
    level = mismatch(batch_of([[-1.0, -2.0]], [[-1.0 + math.log(2), -2.0 - math.log(2)]]))
    assert level is not None
    assert level.kl == pytest.approx(0.0)
    assert level.k3_kl == pytest.approx((2 + 0.5) / 2 - 1)  # mean of e^d − 1 − d
    assert level.abs_max == pytest.approx(math.log(2))
    assert level.effective_sample_size == pytest.approx(2.5**2 / (2 * 4.25))
    assert mismatch(batch_of([[None]], [[-1.0]])) is None
