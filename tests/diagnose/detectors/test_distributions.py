"""Detectors of distributions, digits, versions and level on numbers made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.versions import WeightSpan, version_number
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distribution import (
    find_penalty,
    find_sampling,
    find_temperature,
    find_truncation,
)
from mismatch_plugin.diagnose.detectors.numbers import fits_bf16, fits_decimals, fits_fp16
from mismatch_plugin.diagnose.detectors.size import mismatch
from mismatch_plugin.diagnose.detectors.tokens import find_token_offset, find_unrelated
from mismatch_plugin.diagnose.detectors.vocabulary import penalise
from mismatch_plugin.diagnose.detectors.weights import find_versions
from mismatch_plugin.diagnose.findings import Finding, Undecided
from tests.fixtures.sglang_check.by_hand import batch_of, found, wave

# Distributions. Tokens of p = (1/2, 1/4, 1/8, 1/8), as often as they are expected.

_P = [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125] * 20


@pytest.mark.parametrize(("recorded", "side"), [(1.0, "both"), (0.5, "training"), (2.0, "rollout")])
def test_a_temperature_is_the_slope_of_centred_log_probs(recorded: float, side: str):
    half = np.sqrt(_P) / (math.sqrt(0.5) + math.sqrt(0.25) + 2 * math.sqrt(0.125))
    records = {"sampling": SamplingParameters(temperature=recorded)}
    batch = batch_of([np.log(_P).tolist()], [np.log(half).tolist()], records=records)
    (finding,) = found(find_temperature(batch)[0])
    assert (finding.fault, finding.side) == ("temperature", side)
    told = {**finding.statistics}
    assert told.pop("standard_errors") > 100
    assert told == pytest.approx(
        {"slope": 0.5, "temperature_ratio_low": 2.0, "temperature_ratio_high": 2.0, "explained": 1.0}
    )


@pytest.mark.parametrize(("trainer_at", "side"), [(0.7, "rollout"), (1.0, "both")])
@pytest.mark.parametrize("told", [True, False])
def test_temperatures_that_the_records_tell(trainer_at: float, side: str, told: bool):
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
    at_one = batch_of(
        [raw[drawn].tolist()], [raw[drawn].tolist()], records=records | {"sampling": SamplingParameters()}
    )
    assert found(find_temperature(at_one)[0]) == []
    (finding,) = found(find_temperature(batch_of([[-1.0]], [[-1.0]], training=[{"trainer_temperature": 0.7}]))[0])
    assert "of temperature 1, the trainer's of 0.7" in finding.evidence


_FULL = np.log([p for p in _P if p > 0.2])
_CUT = _FULL - math.log(0.75)  # top-k 2 keeps 3/4 of the mass
_TOP_K = {"sampling": SamplingParameters(top_k=2)}
_WITH_MASK = _TOP_K | {"behaviour_log_probs": _CUT}


@pytest.mark.parametrize(
    ("rollout", "training", "records", "side", "confidence"),
    [
        (_CUT, _FULL, {}, "rollout", "likely"),
        (_FULL, _CUT, {}, "training", "likely"),
        (_FULL, _FULL, {}, None, None),
        (_FULL, _FULL, _TOP_K, "rollout", "certain"),
        (_CUT, _FULL, _TOP_K | {"log_probs_of": "filtered"}, "rollout", "certain"),
        (_CUT, _CUT, _TOP_K | {"log_probs_of": "filtered"}, None, None),  # the trainer replays the filter
        (_FULL, _FULL, _WITH_MASK, "training", "likely"),
        (_FULL, _CUT, _WITH_MASK, None, None),
    ],
)
def test_filters_that_one_side_does_not_follow(rollout, training, records, side, confidence):  # type: ignore[no-untyped-def]
    items, fixed = find_truncation(batch_of([rollout.tolist()], [training.tolist()], records=records))
    assert [(item.fault, item.side, item.confidence) for item in found(items)] == (
        [("truncation", side, confidence)] if side else []
    )
    assert side or np.all(fixed.tokens.gap == 0)
    assert not items or found(items)[0].statistics.get("missing_mass", 0.25) == pytest.approx(0.25)


def test_few_tokens_and_no_repeats_tell_no_temperature_filter_or_penalty():
    batch = batch_of([np.log(_P[:64]).tolist()], [np.log(_P[:64]).tolist()])
    detectors = {"temperature": find_temperature, "penalty": find_penalty, "truncation": find_truncation}
    for fault, detector in detectors.items():
        (item,) = detector(batch)[0]
        assert isinstance(item, Undecided) and item.faults == (fault,)
    (item,) = find_penalty(batch_of([np.log(_P).tolist()], [np.log(_P).tolist()]))[0]
    assert isinstance(item, Undecided) and "0 of 160 occurred before" in item.reason


def _log_softmax(logits: Any) -> Any:
    return torch.as_tensor(logits).log_softmax(-1).numpy()


def _sampled(
    tokens: int = 40_000, temperature: float = 1.0, factor: float = 1.0, top_p: float = 1.0, at: float = 0.0
) -> Batch:
    """Of sure and unsure distributions over 8 ids, a little apart on the two sides. factor, top_p: what tokens are
    drawn with, and the log-probs do not tell. at: temperature of the entropies, that of the log-probs where 0."""
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(tokens, 8)) * generator.lognormal(1.0, 0.5, (tokens, 1))
    trained = logits + 0.05 * generator.normal(size=logits.shape)
    log_p, log_q, log_h = (
        _log_softmax(x) for x in (trained / temperature, logits / temperature, trained / (at or temperature))
    )
    drawn_from = np.exp(_log_softmax(log_q / factor))
    order = np.argsort(-drawn_from, -1)
    mass = np.take_along_axis(drawn_from, order, -1)
    mass *= mass.cumsum(-1) - mass < top_p
    place = (mass.cumsum(-1) < generator.random((tokens, 1)) * mass.sum(-1, keepdims=True)).sum(-1)
    ids = order[np.arange(tokens), place][:, None]
    rollout, train = (np.take_along_axis(values, ids, -1).reshape(-1, 200).tolist() for values in (log_q, log_p))
    entropy = -(np.exp(log_h) * log_h).sum(-1).reshape(-1, 200)
    records = {"sampling": SamplingParameters(temperature=temperature)}
    return batch_of(rollout, train, records=records, training=[{"entropy": values} for values in entropy])


@pytest.mark.parametrize(
    ("drawn", "fault", "said"),
    [
        ({}, None, ""),
        ({"temperature": 0.7}, None, ""),
        ({"top_p": 0.95}, "truncation", "narrower distribution than the log-probs tell: a filter. Where one id"),
        ({"top_p": 0.9, "tokens": 4000}, "truncation", "a filter, or a temperature of at least"),
        ({"factor": 0.8}, "temperature", "narrower distribution than the log-probs tell: a temperature of at least"),
        ({"factor": 1.25}, "temperature", "flatter distribution than the log-probs tell: a temperature of at least"),
        ({"temperature": 0.7, "at": 1.0}, "undecided", "do not belong"),
        ({"temperature": 1.3, "at": 1.0}, "undecided", "do not belong"),
    ],
)
def test_entropies_tell_what_tokens_were_drawn_from(drawn: dict[str, Any], fault: str | None, said: str):
    items, _ = find_sampling(_sampled(**drawn))
    told = [item.evidence if isinstance(item, Finding) else item.reason for item in items]
    assert [getattr(item, "fault", "undecided") for item in items] == ([fault] if fault else [])
    assert all(said in text for text in told), told
    assert all(abs(item.statistics["standard_errors"]) > 6 for item in found(items))


MOVED = np.random.default_rng(5).standard_t(3, 50) * 0.1
"""nats by which a step of the weights moves each id: heavy tails, the furthest is id 7."""
MOVED[7] = -0.9


def _half_old(ids: Any, before: Any, generator: Any) -> Any:
    """Half of the samples are from older weights, under which alone id 7 is ever drawn."""
    if generator.random() < 0.5:
        return 5 * MOVED[ids] + generator.normal(0, 0.1, 40)
    ids[ids == 7] = 8
    return 0


def _with_ids(change: Callable[[Any, Any, Any], Any], samples: int = 24, certain: float = 0.0) -> Outcome:
    """40 tokens a sample of 50 ids; change: of the gap, from ids, how often each was there before, and a generator.
    certain: the share of tokens of id 7 that are nearly certain on both sides."""
    generator = np.random.default_rng(2)
    ids = [generator.integers(50, size=40) for _ in range(samples)]
    before = [np.array([(one[:at] == token).sum() for at, token in enumerate(one)]) for one in ids]
    rollout = -generator.exponential(1.5, (samples, 40)) - 0.1
    gaps = [generator.normal(0, 0.02, 40) + change(*pair, generator) for pair in zip(ids, before, strict=True)]
    sure = (np.array(ids) == 7) & (generator.random((samples, 40)) < certain)
    rollout[sure] = -0.01
    train = (rollout + np.where(sure, 0, gaps)).tolist()
    return find_token_offset(batch_of(rollout.tolist(), train, ids=[one.tolist() for one in ids]))


def test_ids_with_a_gap_of_their_own_are_named_and_left_out():
    items, fixed = _with_ids(lambda ids, before, generator: -1.0 * (ids == 7))
    (finding,) = found(items)
    assert (finding.fault, finding.statistics["first_id"]) == (
        "token_offset",
        7,
    ) and "One number fits" in finding.evidence
    assert finding.statistics["mean_gap"] == pytest.approx(-1.0, abs=0.02) and np.abs(fixed.tokens.gap).max() < 0.1
    assert not any((sample.response_ids[sample.mask] == 7).any() for sample in fixed)
    (finding,) = found(
        _with_ids(lambda ids, before, generator: np.isin(ids, [3, 7]) * generator.uniform(0.5, 6, 40))[0]
    )
    assert "of id 3, 7 and" in finding.evidence and "Other rows of the embedding" in finding.evidence


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, before, generator: 0,
        lambda ids, before, generator: -3.0 * (generator.random(40) < 0.03),  # routers of a MoE model
        lambda ids, before, generator: 0.15 * np.sin(ids) + generator.normal(0, 0.15, 40),  # rows of low precision
        lambda ids, before, generator: -0.5 * before * (ids < 3),  # a frequency penalty
        lambda ids, before, generator: np.where(generator.random() < 0.3, -2.0 * (ids < 9), 0),  # a few bad samples
        lambda ids, before, generator: MOVED[ids],  # weights a step apart
        _half_old,
    ],
)
def test_what_does_not_belong_to_an_id_names_none(change: Callable[[Any, Any, Any], Any]):
    assert _with_ids(change)[0] == []
    assert _with_ids(lambda ids, before, generator: -1.0 * (ids == 7), samples=5)[0] == []  # too few samples
    assert (
        _with_ids(lambda ids, before, generator: -1.0 * (ids == 7), samples=60, certain=0.6)[0] == []
    )  # an offset shows in most
    assert len(_with_ids(lambda ids, before, generator: -1.0 * (ids == 7), certain=0.3)[0]) == 1


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


def test_what_explains_little_of_the_gap_is_named_neither_penalty_nor_temperature():
    generator = np.random.default_rng(1)
    rollout = -generator.exponential(1.5, 4000)
    noise = generator.choice([-1.0, 1.0], 4000)
    ids = np.arange(4000) % 1500  # most tokens are repeated
    apart = rollout + np.where(np.arange(4000) >= 1500, 1.0, -1.0) + noise
    assert found(find_penalty(batch_of([rollout.tolist()], [apart.tolist()], ids=[ids.tolist()]))[0]) == []
    sharper = 1.035 * rollout + 0.15 * noise  # a tenth of the gap: weights a step on
    setting = {"sampling": SamplingParameters(temperature=0.7)}
    assert find_temperature(batch_of([rollout.tolist()], [sharper.tolist()], records=setting))[0] == []


def test_penalties_are_sglangs():
    """Repetition divides positive and multiplies negative logits; frequency counts, presence does not."""
    logits, before = torch.tensor([2.0, -2.0, 1.0, 0.5]), np.array([0, 1, 1])
    changed = penalise(logits, before, SamplingParameters(repetition_penalty=1.25))
    assert changed.tolist() == pytest.approx([1.6, -2.5, 1.0, 0.5])
    changed = penalise(logits, before, SamplingParameters(frequency_penalty=0.5, presence_penalty=0.25))
    assert changed.tolist() == [1.25, -3.25, 1.0, 0.5]


def test_unrelated_sides():
    generator = np.random.default_rng(3)
    rollout, train = -generator.exponential(2.0, 80), -generator.exponential(2.0, 80)
    assert [item.fault for item in found(find_unrelated(batch_of([rollout.tolist()], [train.tolist()]))[0])] == [
        "unrelated"
    ]
    rollout = -generator.exponential(2.0, 400)
    train = 0.8 * rollout - generator.exponential(4.0, 400)  # something is left, but they are 4 nats apart
    for scale, faults in ((1.0, ["unrelated"]), (0.5, [])):
        batch = batch_of([(scale * rollout).tolist()], [(scale * train).tolist()])
        assert [item.fault for item in found(find_unrelated(batch)[0])] == faults


# Digits, versions, level


def test_which_values_a_narrow_format_can_hold():
    values = np.array([-1.5, -1.0078125, -1.0009765625, -0.1, -1.2345])
    assert fits_bf16(values).tolist() == [True, True, False, False, False]
    assert fits_fp16(values).tolist() == [True, True, True, False, False]
    assert fits_decimals(values).tolist() == [True, False, False, True, True]


def _labelled(version: str, trainer: str) -> list[Any]:
    spans = [WeightSpan(version=version, start=0, end=1)]
    training = [{"trainer_version": trainer}]
    return find_versions(batch_of([[-1.0]], [[-1.0]], records={"weight_versions": spans}, training=training))[0]


@pytest.mark.parametrize(
    ("version", "trainer", "largest"),
    [("step-7", "7", None), ("step-7", "8", None), ("step-7", "9", 2.0), ("step-7", "23", 16.0), ("step-7", "6", -1.0),
     ("default", "1", None), ("default", "0", None), ("default", "default", None)],  # one step is allowed
)  # fmt: skip
def test_staleness_in_steps(version: str, trainer: str, largest: float | None):
    items = found(_labelled(version, trainer))
    assert [item.statistics["largest"] for item in items] == ([] if largest is None else [largest])


def test_versions_that_cannot_be_counted_and_those_that_a_server_began_with():
    (item,) = _labelled("main-abc", "12")
    assert isinstance(item, Undecided) and item.faults == ("staleness",)
    assert "'main-abc'" in item.reason and "12" not in item.reason
    (item,) = _labelled("default", "21")
    assert item.fault == "weights_not_updated" and "never updated, or restarted" in item.evidence
    numbers = {"v12": 12, "a-1-20": 20, "x": None, 3: 3, "0" * 17 + "7": 7, "v" + "9" * 18: 10**18 - 1}
    numbers |= dict.fromkeys((10**30, "9" * 19, "9" * 5000, 10**5000))
    assert {name: version_number(name) for name in numbers} == numbers


def test_versions_mixed_inside_and_between_responses_of_one_step():
    inside = [WeightSpan(version="4", start=0, end=2), WeightSpan(version="5", start=2, end=3)]
    (finding,) = found(find_versions(batch_of([[-1.0] * 3], [[-1.1] * 3], records={"weight_versions": inside}))[0])
    assert finding.fault == "mixed_versions" and finding.first is not None and finding.first.position == 2
    assert "'4' 2, '5' 1 tokens" in finding.evidence and "0.1" in finding.evidence
    for versions, steps, samples in (("1122", [0, 0, 1, 1], 0), ("1222", [0, 0, 1, 1], 2), ("1122", [None] * 4, 4)):
        told = [
            {"weight_versions": (WeightSpan(version=version, start=0, end=1),), "step": step}
            for version, step in zip(versions, steps, strict=True)
        ]
        batch = batch_of([[-1.0]] * 4, [[-1.1]] * 4, training=told)
        assert [item.samples for item in found(find_versions(batch)[0])] == ([samples] if samples else [])


def test_level_by_hand():
    level = mismatch(batch_of([[-1.0, -2.0]], [[-1.0 + math.log(2), -2.0 - math.log(2)]]))
    assert level is not None
    assert level.kl == pytest.approx(0.0)
    assert level.k3_kl == pytest.approx((2 + 0.5) / 2 - 1)  # mean of e^d − 1 − d
    assert level.abs_max == pytest.approx(math.log(2))
    assert level.effective_sample_size == pytest.approx(2.5**2 / (2 * 4.25))
    assert mismatch(batch_of([[None]], [[-1.0]])) is None
