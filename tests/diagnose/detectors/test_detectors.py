"""Each detector on numbers made by hand: what it names, with which figures and place, and when it stays silent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.detectors.alignment import find_ids, find_lengths, find_shift, find_swapped
from mismatch_plugin.diagnose.detectors.distribution import find_temperature
from mismatch_plugin.diagnose.detectors.numbers import (
    find_fills,
    find_null_eos,
    find_numbers,
    find_precision,
    find_scale,
    find_zero_eos,
)
from mismatch_plugin.diagnose.detectors.run import FAULTS, STAGES, check_batch
from mismatch_plugin.diagnose.detectors.tokens import find_unrelated
from mismatch_plugin.diagnose.findings import Undecided
from tests.fixtures.sglang_check.by_hand import batch_of, found, wave

NAN, INF = float("nan"), float("inf")


# Numbers


@pytest.mark.parametrize(
    ("value", "fault"),
    [(None, "missing"), (NAN, "nan"), (INF, "infinite"), (0.2, "positive"), (-9999.0, "floor"), (-INF, "floor")],
)
@pytest.mark.parametrize("side", ["rollout", "training"])
def test_a_number_that_is_no_log_prob(value: float | None, fault: str, side: str):
    sound, broken = [[-1.0, -2.0], [-1.0, -0.5, -3.0]], [[-1.0, -2.0], [-1.0, value, -3.0]]
    rollout, train = (broken, sound) if side == "rollout" else (sound, broken)
    found_items, fixed = find_numbers(batch_of(rollout, train))
    findings = found(found_items)
    assert [(item.fault, item.side, item.tokens, item.samples) for item in findings] == [(fault, side, 1, 1)]
    assert findings[0].first is not None and (findings[0].first.sample, findings[0].first.position) == (1, 1)
    assert len(fixed.tokens) == 4


def test_masked_tokens_may_hold_anything():
    batch = batch_of([[None, -1.0, 5.0]], [[NAN, -1.0, 0.0]], records={"loss_mask": [0, 1, 0]})
    assert find_numbers(batch)[0] == []
    assert batch.token_count == 1


def test_zeros_far_from_the_other_side_are_fills_unless_nearly_certain_tokens_are_too():
    items, fixed = find_fills(batch_of([[0.0, -1.0, -2.0]], [[-3.5, -1.0, -2.0]]))
    assert [(item.fault, item.side, item.tokens) for item in found(items)] == [("zero_fill", "rollout", 1)]
    assert len(fixed.tokens) == 2
    rollout = [0.0] * 100 + [-0.001] * 100
    assert find_fills(batch_of([rollout], [([-4.0] + [-0.01] * 99) * 2]))[0] == []
    assert len(find_fills(batch_of([rollout], [[-4.0] + [-0.01] * 199]))[0]) == 1


def test_a_clamp_is_named_and_repeated_contexts_are_not():
    true = [-0.5, -6.0, -7.5, -5.2, -9.0, -1.0] + [-1.5, -2.5] * 6
    items, _ = find_fills(batch_of([[max(value, -5.0) for value in true]], [true]))
    assert [(item.fault, item.tokens) for item in found(items)] == [("floor", 4)]
    assert find_fills(batch_of([[-0.5, -5.0, -5.0, -5.0]], [[-0.5, -5.1, -5.1, -5.1]]))[0] == []


# Which token, which sample


def test_ids_that_differ_are_named_with_the_first_place():
    values, ids = [[-1.0] * 4] * 2, [[7, 8, 9, 10], [4, 5, 6, 7]]
    training = [{"trained_ids": ids[0]}, {"trained_ids": [4, 5, 99, 7], "trained_prompt_ids": [0, 1, 2, 3]}]
    items, fixed = find_ids(batch_of(values, values, ids=ids, training=training))
    prompt, tokens = found(items)
    assert (prompt.fault, prompt.samples) == ("prompt_ids", 1) and "prompt position 0" in prompt.evidence
    assert (tokens.fault, tokens.tokens) == ("token_ids", 1)
    first = tokens.first
    assert first is not None and (first.sample, first.position, first.rollout, first.training) == (1, 2, 6, 99)
    assert fixed.token_count == 7


def test_ids_of_another_sample_and_shifted_ids_are_named_for_what_they_are():
    ids = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]
    values = [[-1.0] * 6, [-2.0] * 6]
    swapped = [{"trained_ids": ids[1]}, {"trained_ids": ids[0]}]
    items, fixed = find_ids(batch_of(values, [values[1], values[0]], ids=ids, training=swapped))
    assert [item.fault for item in found(items)] == ["swapped_samples"]
    assert np.all(fixed.tokens.gap == 0)
    late = [{"trained_ids": [0, 1, 2, 3, 4, 5]}, {"trained_ids": ids[1]}]
    items, _ = find_ids(batch_of(values, values, ids=ids, training=late))
    assert [(item.fault, item.statistics["lag"]) for item in found(items)] == [("shift_by_one", 1.0)]


@pytest.mark.parametrize(
    ("lag", "fault"), [(1, "shift_by_one"), (-1, "shift_by_one"), (3, "boundary"), (-8, "boundary")]
)
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4], [1, 2, 3, 5, 6, 7]])
def test_a_shift_is_found_undone_and_told_in_its_direction(lag: int, fault: str, chosen: list[int]):
    rollout = [wave(30, phase) for phase in range(8)]
    train = [
        (([-1.0] * lag + values) if lag > 0 else values[-lag:] + [-1.0] * -lag)[:30] if index in chosen else values
        for index, values in enumerate(rollout)
    ]
    findings, fixed = find_shift(batch_of(rollout, train))
    assert [(item.fault, item.samples) for item in found(findings)] == [(fault, len(chosen))]
    assert found(findings)[0].statistics["lag"] == lag
    assert np.all(fixed.tokens.gap == 0)
    (few,), _ = find_shift(batch_of([wave(20, 0)], [wave(20, 0)]))
    assert isinstance(few, Undecided) and "20, 40 needed" in few.reason


def test_swapped_samples_are_found_even_if_their_lengths_differ():
    rollout = [wave(20, 0), wave(20, 1), wave(26, 2), wave(31, 3)]
    ids = [list(range(len(values))) for values in rollout]
    findings, fixed = find_swapped(batch_of(rollout, [rollout[at] for at in (1, 0, 3, 2)], ids=ids))
    assert [item.fault for item in found(findings)] == ["swapped_samples"]
    assert "0→1, 1→0, 2→3, 3→2" in found(findings)[0].evidence
    assert len(fixed.tokens) == 97 and np.all(fixed.tokens.gap == 0)


def test_lengths():
    values = wave(20, 0)

    def names(train: list[float]) -> list[tuple[str, float | None]]:
        batch = batch_of([values], [train], ids=[list(range(20))])
        findings, fixed = find_lengths(batch)
        assert np.all(fixed.tokens.gap == 0) and len(fixed.tokens) >= 17
        return [(item.fault, item.statistics.get("lag")) for item in found(findings)]

    assert names(values) == []
    assert names([*values, -4.0]) == [("eos_appended", None)]
    assert names(values[:-1]) == [("length", None)]
    assert names([*values, -4.0, -4.0, -4.0]) == [("length", None)]
    assert names([-1.0, -2.0, -0.5, *values]) == [("boundary", 3.0)]
    findings, _ = find_lengths(batch_of([[-1.0, -2.0]], [[-1.0, -2.0, -3.0]], ids=[[5, 6, 2]]))
    assert [item.fault for item in found(findings)] == ["eos_appended"]
    assert "id 2" in found(findings)[0].evidence


@pytest.mark.parametrize("fill", [0.0, None])
def test_a_filled_last_token_is_an_appended_eos(fill: float | None):
    detector = find_zero_eos if fill == 0.0 else find_null_eos
    ids = [[5, 6, 2], [7, 2], [8, 9, 10]]
    rollout, train = (
        [[-1.0, -2.0, fill], [-1.5, fill], [-1.0, -1.0, -1.0]],
        [[-1.0, -2.0, -6.0], [-1.5, -4.0], [-1.0] * 3],
    )
    items, fixed = detector(batch_of(rollout, train, ids=ids))
    findings = found(items)
    assert [(item.fault, item.samples) for item in findings] == [("eos_appended", 2)]
    assert fixed.token_count == 6
    other = [[5, 6, 2], [7, 3], [8, 9, 10]]
    assert detector(batch_of(rollout, train, ids=other))[0] == []  # two ids, neither known to end a response
    assert len(detector(batch_of(rollout, train, ids=other, eos_ids=[2, 3]))[0]) == 1


# Units


def test_negated_log_probs_and_probabilities():
    true = [wave(10, phase) for phase in range(3)]
    negated: list[list[float | None]] = [[-value for value in values] for values in true]
    negated[0][1] = None
    findings, fixed = find_scale(batch_of(negated, true))
    assert [item.fault for item in found(find_numbers(fixed)[0])] == ["missing"]  # a null stays one
    assert [(item.fault, item.side) for item in found(findings)] == [("sign", "rollout")]
    assert np.all(fixed.tokens.gap == 0)
    findings, fixed = find_scale(batch_of(true, [np.exp(values).tolist() for values in true]))
    assert [(item.fault, item.side) for item in found(findings)] == [("probabilities", "training")]
    assert np.abs(fixed.tokens.gap).max() < 1e-12


@pytest.mark.parametrize("base", [2.0, 10.0])
@pytest.mark.parametrize("side", ["rollout", "training"])
def test_logs_of_another_base(base: float, side: str):
    true = np.array([wave(20, phase) for phase in range(3)])
    sides = {"rollout": true, "training": true} | {side: true / math.log(base)}
    findings, fixed = find_scale(batch_of(sides["rollout"].tolist(), sides["training"].tolist()))
    assert [(item.fault, item.side, item.statistics["base"]) for item in found(findings)] == [("log_base", side, base)]
    assert np.abs(fixed.tokens.gap).max() < 1e-12


def _unlikely_at(temperature: float, noise: float, tokens: int = 300) -> list[list[float]]:
    """[rollout, training] of tokens that are all unlikely next to one likely one, log p = −log(1 + e^x): where such
    tokens alone are told, a temperature is nearly proportional."""
    generator = np.random.default_rng(5)
    x = generator.uniform(3.0, 9.0, tokens)
    rollout, train = -np.log1p(np.exp(x)), -np.log1p(np.exp(x / temperature))
    return [rollout.tolist(), (train * (1 + generator.normal(0, noise, tokens))).tolist()]


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("temperature", [0.72, 0.67, 1.39, 1.5])
def test_temperatures_near_the_log_of_a_base_are_no_base(temperature: float, noise: float):
    """ln 2 = .693: factors of 1.39 or 1.49 in place of 1.443."""
    rollout, train = _unlikely_at(temperature, noise)
    assert found(find_scale(batch_of([rollout], [train]))[0]) == []
    as_base_2 = [value / math.log(2) for value in rollout]
    noisy = [two * b / a for two, a, b in zip(as_base_2, *_unlikely_at(1.0, noise), strict=True)]
    assert [item.fault for item in found(find_scale(batch_of([rollout], [noisy]))[0])] == ["log_base"]


# What is none of it: (detector, rollout, training)

_GENERATOR = np.random.default_rng(0)
_FAR = -_GENERATOR.exponential(2.0, (2, 12, 24))
_NOISE = _GENERATOR.normal(0, 0.3, 160)
_LOGITS = np.concatenate([np.linspace(0.5, 12, 60), -np.linspace(0.5, 12, 60)])
_P = np.log([0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125] * 20)
_TINY = [[-(2.0**-24) * count for count in range(1, 40)]]
SOUND = {
    "rounding above zero and unlikely tokens": (find_numbers, [[0.05, -60.0, 0.0]], [[-0.1, -58.0, 0.0]]),
    "certain tokens": (find_fills, [[0.0, 0.0, -1.0]], [[-0.2, -1e-6, -1.0]]),
    "two sides far apart are no swap": (find_swapped, *_FAR.tolist()),
    "constant log-probs tell no shift": (find_shift, [[-0.5] * 50], [[-0.9] * 50]),
    # At temperature ln 2 unlikely tokens are proportional by the factor of base 2; likely ones are not.
    "a temperature is no base": (
        *(find_scale, [(-np.log1p(np.exp(-_LOGITS))).tolist()]),
        [(-np.log1p(np.exp(-_LOGITS * math.log(2)))).tolist()],
    ),
    "noise alone is no temperature": (find_temperature, [_P.tolist()], [(_P + _NOISE).tolist()]),
    "noise leaves the sides related": (find_unrelated, [_P.tolist()], [(_P + 2 * _NOISE).tolist()]),
    "values near 0 are not narrow": (find_precision, _TINY, _TINY),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_is_sound_is_not_named(case: str):
    detector, rollout, train = SOUND[case]
    assert found(detector(batch_of(rollout, train))[0]) == []


# The whole


def test_detectors_speak_of_known_faults_alone():
    """Every name that they say is one too: the planted tables and `test_served` compare them with FAULTS."""
    rows = [row for stage in STAGES for row in stage]
    assert {name for row in rows for name in (*row.unless, *row.ends)} <= {*FAULTS}
    assert len({row.find for row in rows}) == len(rows) and all(fault.shown_by for fault in FAULTS.values())


def test_an_accepted_fault_is_reported_but_does_not_count():
    spans = [WeightSpan(version="4", start=0, end=2), WeightSpan(version="5", start=2, end=3)]
    batch = batch_of([[-1.01, -1.2, -0.3]], [[-1.01, -1.2, -0.3]], records={"weight_versions": spans})
    assert check_batch(batch).status == "faults"
    result = check_batch(batch, accept=["mixed_versions"])
    assert result.status == "undecided"  # three tokens
    assert [item.accepted for item in result.findings] == [True]


@pytest.mark.parametrize(("tokens", "status"), [(99, "undecided"), (100, "clean")])
def test_too_few_tokens_decide_nothing(tokens: int, status: str):
    values = wave(tokens, 0)
    result = check_batch(batch_of([values], [[value + 0.001 for value in values]]))
    assert result.status == status
    assert check_batch(batch_of([values], None)).status == "clean"  # without a training side that is meant
    assert check_batch(batch_of([values], [[None] * tokens])).status == "faults"


def test_two_faults_at_once_are_both_named():
    true = [wave(30, phase) for phase in range(8)]
    rollout = [[*values[:5], None, *values[6:]] for values in true]
    train = [[-1.0, *values[:-1]] for values in true]
    result = check_batch(batch_of(rollout, train))
    assert sorted(item.fault for item in result.findings) == ["missing", "shift_by_one"]
    assert result.fixed is not None and result.fixed.abs_max == 0.0


def test_records_alone_are_checked_as_far_as_they_go():
    result = check_batch(batch_of([[-1.0, NAN]], None))
    assert [item.fault for item in result.findings] == ["nan"]
    assert "temperature" in result.undecided[0].faults and result.mismatch is None
