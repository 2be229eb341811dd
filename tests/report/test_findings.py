"""Every sentence of a comparison: with data that make it true, and with data that make it false."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mismatch_plugin.report.findings import _highest
from mismatch_plugin.report.significance import Mean, paired_difference
from mismatch_plugin.report.statistics import VariantSummary
from tests.report.test_statistics import Runs, by_seed, summary_of

UP = [(0.95, 0.9 + 0.01 * (j % 3)) for j in range(8)]
DOWN = [(0.95, 0.1 + 0.01 * j) for j in range(8)]
AS_UP = [(0.95, end + (-1) ** j * 0.01 * (1 + j // 2)) for j, (_, end) in enumerate(UP)]
HALF = [(0.95, 0.1 if j < 3 else 0.93) for j in range(8)]
ALL_BUT_ONE = [(0.95, end + (0.1 if j else -0.01)) for j, (_, end) in enumerate(AS_UP)]
CASES: dict[str, Runs] = {
    "cure": {"0": DOWN, "1": UP},
    "harm": {"0": UP, "1": DOWN},
    "some": {"0": HALF, "1": UP},
    "nothing": {"0": UP, "1": AS_UP},
    "same": {"0": UP, "1": UP},
    "two cures": {"0": DOWN, "1": UP, "2:token:truncate": AS_UP},
    "alone": {"0": AS_UP, "1": ALL_BUT_ONE, "a": UP, "b": UP[::-1], "c": UP[1:] + UP[:1]},
    "four seeds": {"0": DOWN[:4], "1": UP[:4]},
    "five seeds": {"0": DOWN[:5], "1": UP[:5], "2:token:truncate": AS_UP[:5]},
    "two seeds": {"0": DOWN[:2], "1": UP[:2]},
    "0 alone": {"0": DOWN},
    "without 0": {"1": DOWN},
}
EVERY = frozenset(CASES)
SENTENCES = {
    # What happened.
    "Uncorrected PPO reached 0.95 and ended at 0.14, 8 of 8 runs collapsed": {*("cure", "two cures", "0 alone")},
    "ended at 0.62, 3 of 8 runs collapsed": {"some"},
    "Uncorrected PPO ended at 0.91, none of 8 runs collapsed": {*("harm", "nothing", "same", "alone")},
    "; significantly higher: 1 bypass PPO +0.77.": {"cure"},
    "; significantly higher: 1 bypass PPO +0.77, 2 token truncate +0.77.": {"two cures"},
    "; significantly lower: 1 bypass PPO −0.77.": {"harm"},
    "; no significant difference: 1 bypass PPO": {"some", "nothing", "alone", "four seeds"},
    "; no significant difference: 2 token truncate +0.79, 1 bypass PPO +0.79; with 5 seeds": {"five seeds"},
    "; the same values: 1 bypass PPO": {"same"},
    "; too few seeds to judge: 1 bypass PPO": {"two seeds"},
    "No run of algorithm 0 has finished: nothing is compared.": {"without 0"},
    # In detail.
    "This gain is significant.": {"cure", "two cures"},
    "This harm is significant.": {"harm"},
    "Not significantly different from algorithm 0 with 8 seeds: 1 bypass PPO": {"some", "nothing", "alone"},
    "By itself the difference of 1 bypass PPO would pass the 5 % level; among 4 comparisons it does not.": {"alone"},
    "would pass the 5 % level": {"alone"},
    "With 4 seeds the smallest possible p is 0.125: no difference at the end can be significant.": {"four seeds"},
    "With 5 seeds the smallest possible p is 0.062, 0.125 after Holm's correction for 2 comparisons": {"five seeds"},
    "Exactly the values of algorithm 0 on every seed: 1 bypass PPO.": {"same"},
    "Too few seeds to judge, fewer than 3: 1 bypass PPO (+0.800 on 2 seeds).": {"two seeds"},
    "No finished pair of runs with algorithm 0": {"0 alone", "without 0"},
    "The 95 % intervals (Student's t) reach": EVERY - {"same", "two seeds", "0 alone", "without 0"},
    "it differs significantly from every other one.": {"cure", "harm"},
    "not significantly different from it: 2 decoupled PPO, token truncate.": {"two cures"},
    "no other one differs significantly from it": {"some", "nothing", "same"},
    "8 seeds are too few to order them (10 pairs).": {"alone"},
    "4 seeds are too few to order them (1 pair).": {"four seeds"},
    "Area under the curve, significantly higher than with algorithm 0: 1 bypass PPO": {"cure", "two cures"},
    "Area under the curve, significantly lower than with algorithm 0: 1 bypass PPO": {"harm"},
    "Area under the curve, no significant difference to algorithm 0: 1 bypass PPO": {
        *("some", "nothing", "alone", "four seeds", "five seeds")
    },
    "Collapsed runs, significantly fewer than with algorithm 0: 1 bypass PPO (0 of 8 against 8, p = 0.008)": {"cure"},
    "Collapsed runs, significantly more than with algorithm 0: 1 bypass PPO (8 of 8 against 0, p = 0.008)": {"harm"},
    "Collapsed runs, no significant difference to algorithm 0: 1 bypass PPO (0 of 8 against 3, p = 0.250)": {"some"},
}


def test_the_highest_mean_is_judged_among_all_pairs():
    """It was found by looking at all of them: p = .031 against algorithm 0 is .062 among three pairs."""
    top = [0.8] * 8
    zero = [*[0.7] * 6, 0.81, 0.81]
    one = [0.68, 0.69, 0.72, 0.69, 0.72, 0.68, 0.78, 0.79]
    none = Mean(8, 0.0, 0.0)
    values = {"2": top, "0": zero, "1": one}
    summaries = [VariantSummary(v, 8, {}, none, none, values=by_seed(of)) for v, of in values.items()]
    assert paired_difference(by_seed(top), by_seed(zero)).p == 8 / 256
    (finding,) = _highest(summaries, "exact match")
    assert "not significantly different from it: 0 PPO." in finding.text, finding.text


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    summaries = {case: summary_of(tmp_path_factory.mktemp("runs"), runs) for case, runs in CASES.items()}
    return {case: "\n".join([s.headline, *(f.text for f in s.findings)]) for case, s in summaries.items()}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_is_said_where_it_is_true_alone(sentence: str, texts: Mapping[str, str]):
    assert {case for case, text in texts.items() if sentence in text} == set(SENTENCES[sentence])


@pytest.mark.parametrize(("variants", "said"), [("123", False), ("1234", True)])
def test_the_smallest_p_counts_the_comparisons(variants: str, said: bool, tmp_path: Path):
    """Seven seeds: 2/128 = .016 passes among three comparisons, .047, and not among four, .062."""
    summary = summary_of(tmp_path, {"0": DOWN[:7], **{f"v{name}": UP[:7] for name in variants}})
    sentence = "With 7 seeds the smallest possible p is 0.016, 0.062 after Holm's correction for 4 comparisons: no "
    assert any(finding.text.startswith(sentence) for finding in summary.findings) is said
    assert (summary.findings[0].kind == "better") is not said


def test_one_variant_with_few_seeds_does_not_blind_the_others(tmp_path: Path):
    """Eight seeds and two comparisons can be significant, four seeds cannot."""
    summary = summary_of(tmp_path, {"0": AS_UP, "1": UP, "2:token:truncate": UP[:4]})
    assert not any("smallest possible p" in text for text in (summary.headline, *(f.text for f in summary.findings)))


def test_what_is_not_resolved_by_hand(tmp_path: Path):
    """Differences 0.1, 0.2, 0.3: 4.303 · 0.1 / √3."""
    summary = summary_of(tmp_path, {"0": [(0.9, 0.5)] * 3, "1": [(0.9, 0.6), (0.9, 0.7), (0.9, 0.8)]})
    assert any("reach ±0.248 to either side" in finding.text for finding in summary.findings)
