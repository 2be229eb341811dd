"""Values made by hand: which fault is named, with which figures and place; and what is sound is not named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from tests.diagnose.door import INF, NAN, faults, findings, inspect, named, samples_of, wave

WAVES = [wave(30, phase) for phase in range(8)]
Found = list[dict[str, Any]]


def put(rows: list[list[Any]], row: int, at: int, value: Any) -> list[list[Any]]:
    """The same with one value changed."""
    changed = [[*values] for values in rows]
    changed[row][at] = value
    return changed


def moved(lag: int, chosen: list[int]) -> list[list[float]]:
    """The waves, of which the chosen ones are late by `lag`."""
    late = [([-1.0] * lag + row if lag > 0 else row[-lag:] + [-1.0] * -lag)[:30] for row in WAVES]
    return [late[at] if at in chosen else row for at, row in enumerate(WAVES)]


def says(found: Found, fault: str, **expected: Any) -> None:
    """One finding of this name has these fields; of `first` and of the statistics by their names, `said` in words."""
    item = named(found, fault)
    assert item is not None, found
    words = expected.pop("said", ())
    for part in [words] if isinstance(words, str) else words:
        assert part in item["evidence"] + item["fix"], item
    for name, value in expected.items():
        have = item["first"] if name in ("sample", "position") else item if name in item else item["statistics"]
        assert have[name] == (pytest.approx(value, abs=0.02) if isinstance(value, float) else value), (name, item)


IDS = [[*range(1000 * at + 100, 1000 * at + 130)] for at in range(8)]
LIKELY = [[0.0] * 100 + [-0.001] * 100]
FLOORED = [-0.5, -6.0, -7.5, -5.2, -9.0, -1.0] + [-1.5, -2.5] * 6
TRUE: dict[str, tuple[list[Sample], str, dict[str, Any]]] = {
    "null": (samples_of(put(WAVES, 1, 2, None), WAVES), "missing", {"side": "rollout", "sample": 1, "position": 2}),
    "-inf": (samples_of(WAVES, put(WAVES, 7, 29, -INF)), "floor", {"side": "training", "position": 29}),
    "a clamp": (samples_of([[max(x, -5.0) for x in FLOORED]], [FLOORED]), "floor", {"side": "rollout", "tokens": 4}),
    "the first dropped": (
        samples_of([row[1:] for row in WAVES], WAVES),
        "length", {"side": "rollout", "said": "fit from the end", "position": 0},
    ),
    "divided by T": (
        samples_of(WAVES, [[x / 0.8 for x in row] for row in WAVES]), "log_base", {"side": "both", "factor": 1 / 0.8},
    ),
    "another id": (
        samples_of(WAVES[:2], WAVES[:2], each=[{}, {"trained_ids": [*IDS[1][:2], 99, *IDS[1][3:]]}]),
        "token_ids", {"sample": 1, "position": 2, "tokens": 1},
    ),
    "early by eight": (samples_of(WAVES, moved(-8, [0, 4])), "boundary", {"samples": 2, "lag": -8.0}),
    "swapped, lengths differ": (
        samples_of([wave(n, p) for p, n in enumerate((20, 20, 26, 31))],
                   [wave(n, p) for p, n in ((1, 20), (0, 20), (3, 31), (2, 26))],
                   [[*range(100 * p, 100 * p + n)] for p, n in enumerate((20, 20, 26, 31))]),
        "swapped_samples", {"said": "0→1, 1→0, 2→3, 3→2"},
    ),
    "one more, and its id": (
        samples_of([[-1.0, -2.0]], [[-1.0, -2.0, -3.0]], [[5, 6, 2]]), "eos_appended", {"said": "id 2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRUE)
def test_a_fault_of_values_is_named_with_its_place(case: str) -> None:
    samples, fault, expected = TRUE[case]
    found = inspect(samples, "--brief")
    assert faults(found["findings"])[:1] == [fault]
    says(found["findings"], fault, **expected)
    if fault in ("boundary", "swapped_samples", "log_base"):
        assert found["fixed"]["abs_max"] < 1e-12


def test_two_faults_at_once_are_both_named_and_an_accepted_one_does_not_count() -> None:
    late = samples_of([put([row], 0, 5, None)[0] for row in WAVES], moved(1, [*range(8)]))
    found = inspect(late, "--brief")
    assert sorted(faults(found["findings"])) == ["missing", "shift_by_one"] and found["fixed"]["abs_max"] == 0.0
    found = inspect(late, "--brief", "--accept", "missing", "--accept", "shift_by_one")
    assert faults(found["findings"]) == [] and (found["status"], len(found["findings"])) == (0, 2)


DRAW = np.random.default_rng(0)
FAR = -DRAW.exponential(2.0, (2, 12, 24))
NOISE = DRAW.normal(0, 0.3, 160)
LOGITS = np.concatenate([np.linspace(0.5, 12, 60), -np.linspace(0.5, 12, 60)])
P = np.log([0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125] * 20)
"""Tokens of p = (1/2, 1/4, 1/8, 1/8), as often as they are expected."""
ENDS = SamplingParameters(stop_token_ids=(129,))
TINY = [[-(2.0**-24) * count for count in range(1, 40)]]


def unlikely_at(temperature: float, noise: float) -> list[float]:
    """Log-probs of unlikely tokens next to one likely one, of which a temperature is nearly a factor."""
    draw = np.random.default_rng(5)
    train = -np.log1p(np.exp(draw.uniform(3.0, 9.0, 300) / temperature))
    return (train * (1 + draw.normal(0, noise, 300))).tolist()


FALSE: dict[str, tuple[list[Sample], str]] = {
    "zeros at the end, of ids that end nothing": (
        samples_of([[-1.0, -2.0, 0.0], [-1.5, 0.0]], [[-1.0, -2.0, -6.0], [-1.5, -4.0]], [[5, 6, 2], [7, 3]]),
        "eos_appended",
    ),
    "fills, one on a sampled end": (
        samples_of(put(put(WAVES, 0, 29, 0.0), 1, 4, 0.0), WAVES, IDS, sampling=ENDS),
        "eos_appended",
    ),
    "masked tokens": (samples_of([[None, *WAVES[0][1:]]], [[NAN, *WAVES[0][1:]]], loss_mask=[0] + [1] * 29), "missing"),
    "rounding above zero": (samples_of([[0.05, -60.0, 0.0]], [[-0.1, -58.0, 0.0]]), "positive"),
    "certain tokens": (samples_of([[0.0, 0.0, -1.0]], [[-0.2, -1e-6, -1.0]]), "zero_fill"),
    "zeros among likely tokens": (samples_of(LIKELY, [([-4.0] + [-0.01] * 99) * 2]), "zero_fill"),
    "two sides far apart": (samples_of(*FAR.tolist()), "swapped_samples"),
    "constant log-probs": (samples_of([[-0.5] * 50], [[-0.9] * 50]), "shift_by_one"),
    # At temperature ln 2 unlikely tokens are proportional by the factor of base 2; likely ones are not.
    "a temperature": (
        samples_of([(-np.log1p(np.exp(-LOGITS))).tolist()], [(-np.log1p(np.exp(-LOGITS * math.log(2)))).tolist()]),
        "log_base",
    ),
    **{
        f"a temperature near a base, {at}": (samples_of([unlikely_at(1.0, 0.0)], [unlikely_at(at, noise)]), "log_base")
        for at, noise in ((0.67, 0.02), (1.39, 0.02))
    },
    "noise alone": (samples_of([P.tolist()], [(P + NOISE).tolist()]), "temperature"),
    "values near 0": (samples_of(TINY, TINY), "bf16"),
}


@pytest.mark.parametrize("case", FALSE)
def test_what_is_sound_is_not_named(case: str) -> None:
    samples, fault = FALSE[case]
    assert fault not in faults(findings(samples))


def test_what_too_few_tokens_cannot_tell_is_undecided() -> None:
    few = samples_of([P[:64].tolist()], [P[:64].tolist()])
    found = inspect(few, "--brief")
    undecided = {fault: item["reason"] for item in found["undecided"] for fault in item["faults"]}
    assert {"temperature", "penalty", "truncation"} <= {*undecided}
    found = inspect(samples_of([wave(20)], [wave(20)]), "--brief")
    assert "20, 40 needed" in {f: i["reason"] for i in found["undecided"] for f in i["faults"]}["shift_by_one"]


def at(temperature: float) -> SamplingParameters:
    return SamplingParameters(temperature=temperature)


@pytest.mark.parametrize(("recorded", "side"), [(1.0, "both"), (0.5, "training"), (2.0, "rollout")])
def test_a_temperature_is_the_slope_of_centred_log_probs(recorded: float, side: str) -> None:
    half = P / 2 - math.log(math.sqrt(0.5) + math.sqrt(0.25) + 2 * math.sqrt(0.125))
    found = findings(samples_of([P.tolist()], [half.tolist()], sampling=at(recorded)))
    ratios = {"temperature_ratio_low": 2.0, "temperature_ratio_high": 2.0}
    says(found, "temperature", side=side, slope=0.5, explained=1.0, **ratios)


WHOLE = P[math.log(0.2) < P]
CUT = WHOLE - math.log(0.75)  # top-k 2 keeps 3/4 of the mass
TOP_K = {"sampling": SamplingParameters(top_k=2)}
FILTERED = TOP_K | {"log_probs_of": "filtered"}
WITH_MASK = TOP_K | {"behaviour_log_probs": CUT}


@pytest.mark.parametrize(
    ("rollout", "train", "fields", "side", "confidence"),
    [
        (CUT, WHOLE, {}, "rollout", "likely"),
        (WHOLE, CUT, {}, "training", "likely"),
        (WHOLE, WHOLE, {}, None, None),
        (WHOLE, WHOLE, TOP_K, "rollout", "certain"),
        (CUT, WHOLE, FILTERED, "rollout", "certain"),
        (CUT, CUT, FILTERED, None, None),  # the trainer replays the filter
        (WHOLE, WHOLE, WITH_MASK, "training", "likely"),
        (WHOLE, CUT, WITH_MASK, None, None),
    ],
)
def test_filters_that_one_side_does_not_follow(
    rollout: Any, train: Any, fields: dict[str, Any], side: str | None, confidence: str | None
) -> None:
    found = findings(samples_of([rollout.tolist()], [train.tolist()], **fields))
    sides = [(item["side"], item["confidence"]) for item in found if item["fault"] == "truncation"]
    assert sides == [(side, confidence)] * bool(side)
    if side and not fields:
        says(found, "truncation", missing_mass=0.25)


SAMPLES, TOKENS = 24, 60
AT = np.arange(TOKENS)
DECAY = 1 + 9 * np.exp(-AT / 10)
LENGTHS = np.linspace(20, 120, SAMPLES).astype(int)
LACKS = (10 * 30 / (30 + LENGTHS))[:, None]
"""A system prompt of 30 tokens: the part of a context that it is decides how far it moves a token."""
PROMPTS = [{"prompt_ids": np.arange(length)} for length in LENGTHS]


def scaled(scale: Any, every: int = 1, **fields: Any) -> list[Sample]:
    """Noise that grows with −log p, times `scale` ([TOKENS] or [SAMPLES, 1]) in each `every`-th sample. First tokens
    are less certain than later ones, as they often are."""
    draw = np.random.default_rng(0)
    rollout = -draw.exponential(1.0, (SAMPLES, TOKENS)) * np.where(AT < 8, 2.0, 1.0) - 0.06
    noise = draw.normal(0, 0.04, rollout.shape) * -rollout
    noise[::every] *= scale
    return samples_of(rollout.tolist(), (rollout + noise).tolist(), **fields)


@pytest.mark.parametrize(
    ("samples", "confidence", "said"),
    [
        (scaled(DECAY), "likely", ("prompt_ids", "BOS")),
        (scaled(DECAY, trained_prompt_ids=[1, 2, 3]), "possible", "flush_cache"),
        (scaled(8 + 40 * np.exp(-AT / 10), every=3), "likely", f"{SAMPLES // 3} "),
        (scaled(LACKS, each=PROMPTS), "possible", ("after shorter prompts", "lack a system prompt")),
        (scaled(DECAY / 40), None, ""),
    ],
)
def test_another_prompt_shows_where_responses_begin(samples: list[Sample], confidence: str | None, said: Any) -> None:
    found = findings(samples)
    item = named(found, "wrong_prompt")
    assert (item and item["confidence"]) == confidence
    if confidence:
        says(found, "wrong_prompt", said=said)
