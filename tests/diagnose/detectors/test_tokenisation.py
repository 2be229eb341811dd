"""Where inside a response the two sides begin to disagree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.tokens import find_retokenised
from tests.fixtures.sglang_check.by_hand import batch_of, found

TOKENS, SAMPLES = 60, 12
Change = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _sides(seed: int = 0, samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """[samples, TOKENS] of log-probs, and the same with noise of .02 nats."""
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.5, (samples, TOKENS)) - 0.06
    return rollout, rollout + generator.normal(0, 0.02, rollout.shape)


def _others(seed: int = 9) -> np.ndarray:
    """[TOKENS] log-probs of other ids: unlikely ones."""
    return -np.random.default_rng(seed).exponential(4.0, TOKENS) - 0.06


def _batch(rollout: np.ndarray, train: np.ndarray, **records: object) -> Batch:
    return batch_of(rollout.tolist(), train.tolist(), records=records or None)


@pytest.mark.parametrize("start", [15, 40])
def test_ids_that_are_others_from_some_position_on(start: int):
    rollout, train = _sides()
    train[3, start:] = _others()[start:]
    items, after = find_retokenised(_batch(rollout, train))
    (finding,) = found(items)
    assert (finding.fault, finding.samples) == ("retokenised", 1)
    assert finding.first is not None and finding.first.sample == 3
    assert finding.first.position in range(start, start + 3)  # its first tokens may be unlikely on both sides
    assert finding.statistics["mean_before"] < 0.05 < 1 < finding.statistics["mean_inside"]
    assert len(after.tokens) in range(SAMPLES * TOKENS - TOKENS + start, SAMPLES * TOKENS - TOKENS + start + 3)


def test_a_token_that_became_two_is_told():
    rollout, train = _sides()
    train[0, 21:] = train[0, 20:-1]
    (finding,) = found(find_retokenised(_batch(rollout, train))[0])
    assert finding.statistics["moved"] == 1 and "fits +1 on" in finding.evidence


def test_a_stretch_in_the_middle_is_told_apart_from_the_rest_of_a_response():
    rollout, train = _sides()
    train[5, 20:36] = _others()[20:36]
    (finding,) = found(find_retokenised(_batch(rollout, train))[0])
    assert finding.statistics["to_the_end"] == 0 and "for a stretch" in finding.evidence


def test_once_one_sample_is_clear_shorter_ones_are_seen_too():
    rollout, train = _sides()
    train[3, 20:] = _others()[20:]
    train[7, -5:] = rollout[7, -5:] - 4.0
    assert [item.samples for item in found(find_retokenised(_batch(rollout, train))[0])] == [2]
    alone = train.copy()
    alone[3] = rollout[3]
    assert found(find_retokenised(_batch(rollout, alone))[0]) == []


def _shift(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full((len(train), 1), -1.0), train[:, :-1]], axis=1)


def _routers(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(1)
    return np.where(generator.random(train.shape) < 0.02, train - generator.exponential(2.0, train.shape), train)


def _far_from_the_first_token(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    changed = train.copy()
    changed[4] = _others()
    return changed


def _decaying(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    return train - 3.0 * np.exp(-np.arange(TOKENS) / 5)


@pytest.mark.parametrize("change", [_shift, _routers, _far_from_the_first_token, _decaying])
def test_other_faults_are_no_change_of_ids(change: Change):
    for seed in range(5):
        rollout, train = _sides(seed)
        assert found(find_retokenised(_batch(rollout, change(rollout, train)))[0]) == []


def test_a_penalty_on_what_was_drawn_before_is_no_change_of_ids():
    """Ever more tokens, the further a response goes."""
    rollout, train = _sides()
    ids = np.random.default_rng(2).integers(0, 25, rollout.shape)
    again = [[token in row[:at] for at, token in enumerate(row)] for row in ids.tolist()]
    batch = batch_of(rollout.tolist(), (train + 0.5 * np.array(again)).tolist(), ids=ids.tolist())
    assert found(find_retokenised(batch)[0]) == []


def test_a_change_of_weights_at_that_position_is_its_own_fault():
    rollout, train = _sides()
    train[:, 30:] = np.stack([_others(seed)[30:] for seed in range(SAMPLES)])
    spans = [WeightSpan(version="4", start=0, end=30), WeightSpan(version="5", start=30, end=TOKENS)]
    assert found(find_retokenised(_batch(rollout, train, weight_versions=spans))[0]) == []
    whole = [WeightSpan(version="4", start=0, end=TOKENS)]
    assert len(found(find_retokenised(_batch(rollout, train, weight_versions=whole))[0])) == 1
