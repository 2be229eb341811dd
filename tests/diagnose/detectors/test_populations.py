"""One server or worker further from the trainer than the rest: named where it is so, silent where another cause is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch, make_batch
from mismatch_plugin.diagnose.detectors.weights import find_split, find_stale_server, mann_whitney
from mismatch_plugin.diagnose.findings import Finding

Sizes = Callable[[int, int], Any]


def _batch(size: Sizes, who: Callable[[int], dict[str, Any]], samples: int = 48, length: int = 40) -> Batch:
    """size(sample, position): standard deviation of the logits' change. who: fields of the record, and `trainer`."""
    generator = np.random.default_rng(3)
    made = []
    for index in range(samples):
        p = generator.uniform(0.02, 0.95, length) ** (1 + index % 3)  # some responses are surer than others
        sizes = np.array([size(index, at) for at in range(length)])
        gap = (1 - p) * sizes * generator.standard_normal(length)
        rollout = np.minimum(np.log(p), -1e-3)
        told = dict(who(index))
        trainer = told.pop("trainer", None)
        made.append(
            Sample(
                response_ids=np.arange(length),
                rollout_log_probs=rollout,
                train_log_probs=np.minimum(rollout + gap, 0),
                trainer_version=trainer,
                **told,
            )
        )
    return make_batch(made)


def _found(batch: Batch) -> Finding | None:
    items, after = find_stale_server(batch)
    assert after is batch
    (finding,) = items or [None]
    assert finding is None or isinstance(finding, Finding)
    return finding


def _of_two(index: int) -> dict[str, Any]:
    return {"server": f"http://{'ab'[index % 2]}:1"}


def test_the_server_that_is_further_off_is_named():
    finding = _found(_batch(lambda sample, _: (0.03, 0.2)[sample % 2], _of_two))
    assert finding is not None and finding.confidence == "likely" and finding.samples == 24
    assert (
        finding.evidence.startswith("Responses of http://b:1 (24 samples)")
        and "those of http://a:1" in finding.evidence
    )
    assert finding.statistics["ratio"] == pytest.approx(0.2 / 0.03, rel=0.25)
    assert finding.first is not None and finding.first.sample == 1 and "http://b:1" in finding.fix


def test_a_small_difference_is_possible_only_and_a_smaller_one_is_nothing():
    finding = _found(_batch(lambda sample, _: (0.02, 0.035)[sample % 2], _of_two))
    assert finding is not None and finding.confidence == "possible" and "another precision" in finding.evidence
    assert _found(_batch(lambda sample, _: (0.02, 0.0215)[sample % 2], _of_two)) is None


def test_one_worker_of_eight_is_named():
    def who(index: int) -> dict[str, Any]:
        return {"server": f"http://{'ab'[index // 4 % 2]}:1", "dp_rank": index % 4}

    finding = _found(_batch(lambda sample, _: 0.2 if sample % 8 == 6 else 0.03, who, samples=128))
    assert finding is not None and finding.evidence.startswith("Responses of http://b:1 dp_rank 2 (16 samples)")
    assert _found(_batch(lambda *_: 0.03, who, samples=128)) is None
    assert _found(_batch(lambda sample, _: 0.2 if sample % 8 == 6 else 0.03, who, samples=40)) is None  # 5 samples each


def test_a_server_is_named_where_it_has_too_few_samples_a_worker():
    def who(index: int) -> dict[str, Any]:
        return {"server": f"http://{'ab'[index % 2]}:1", "dp_rank": index % 16}

    finding = _found(_batch(lambda sample, _: (0.03, 0.2)[sample % 2], who))
    assert finding is not None and finding.evidence.startswith("Responses of http://b:1 (24 samples)")


def test_what_labels_tell_is_no_surprise():
    def who(index: int) -> dict[str, Any]:
        span = WeightSpan(version=("step-4", "step-3")[index % 2], start=0, end=40)
        return {**_of_two(index), "weight_versions": [span], "trainer": "step-4"}

    assert _found(_batch(lambda sample, _: (0.03, 0.2)[sample % 2], who)) is None


def test_sure_and_unsure_responses_are_one_population():
    def size(sample: int, _: int) -> float:
        return 0.05

    def who(index: int) -> dict[str, Any]:
        return {"server": f"http://{'abc'[index % 3]}:1"}  # as the surer responses go

    batch = _batch(size, who, samples=60)
    assert _found(batch) is None and find_split(batch)[0] == []


@pytest.mark.parametrize("named", [True, False])
def test_a_gap_that_begins_in_the_middle_is_another_fault(named: bool):
    batch = _batch(lambda sample, at: 1.5 if sample % 2 and at >= 20 else 0.03, _of_two if named else lambda _: {})
    assert _found(batch) is None and find_split(batch)[0] == []


def test_two_populations_without_names_are_possible_and_ask_for_records():
    batch = _batch(lambda sample, _: 0.3 if sample % 3 == 0 else 0.03, lambda _: {})
    assert _found(batch) is None
    (finding,) = find_split(batch)[0]
    assert isinstance(finding, Finding) and finding.confidence == "possible" and finding.samples == 16
    assert "`dp_rank`" in finding.fix and "16 of 48" in finding.evidence


@pytest.mark.parametrize(
    "size",
    [
        lambda sample, _: 0.05,  # one population
        lambda sample, _: 0.03 * 10 ** (sample / 48),  # a wide one without a gap
        lambda sample, _: 0.03 if sample % 2 else 1e-6,  # bf16 and float32 servers: precision explains both
        lambda sample, _: 0.3 if sample == 0 else 0.03,  # one sample
    ],
)
def test_no_two_populations(size: Sizes):
    assert find_split(_batch(size, lambda _: {}))[0] == []


def test_two_populations_are_left_to_the_workers_where_they_are_named():
    def size(sample: int, _: int) -> float:
        return 0.3 if sample % 3 == 0 else 0.03

    assert _found(_batch(size, _of_two)) is None
    assert find_split(_batch(size, lambda index: {**_of_two(index), "dp_rank": 0}))[0] == []
    assert find_split(_batch(size, _of_two))[0]  # a worker of each server, perhaps


def test_samples_with_other_values_are_no_stale_server():
    batch = _batch(lambda sample, _: 0.03, lambda _: {})
    other = {at: {"train_log_probs": np.roll(batch.samples[at + 1].train_log_probs, 7)} for at in range(0, 48, 6)}
    assert find_split(batch.with_values(other))[0] == []


def test_mann_whitney_counts_pairs_and_is_close_to_the_exact_test():
    a, b = np.array([3.0, 5.0, 6.0, 7.0]), np.array([1.0, 2.0, 4.0, 5.0])
    area, p = mann_whitney(a, b)
    pairs = [(x > y) + (x == y) / 2 for x in a for y in b]
    assert area == np.mean(pairs)
    together = np.concatenate([a, b])
    orders = {tuple(sorted(order[:4])) for order in permutations(range(8))}
    split = [(together[list(one)], np.delete(together, list(one))) for one in orders]
    exact = np.mean([np.mean([(x > y) + (x == y) / 2 for x in one for y in two]) >= area for one, two in split])
    assert p == pytest.approx(exact, abs=0.03)
    assert mann_whitney(np.ones(9), np.ones(9)) == (0.5, 0.5)
