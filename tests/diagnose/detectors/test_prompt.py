"""A gap that decays along responses, and gaps that do not."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.tokens import find_wrong_prompt
from tests.fixtures.sglang_check.by_hand import batch_of, found

SAMPLES, TOKENS = 24, 60
AT = np.arange(TOKENS)


def _rollout() -> np.ndarray:
    """First tokens are less certain than later ones, as they often are."""
    depth = np.random.default_rng(0).exponential(1.0, (SAMPLES, TOKENS)) * np.where(AT < 8, 2.0, 1.0)
    return -depth - 0.06


def _batch(scale: np.ndarray, every: int = 1, training: dict[str, object] | None = None) -> Batch:
    """Noise that grows with −log p, times `scale` [TOKENS] in each `every`-th sample."""
    rollout = _rollout()
    noise = np.random.default_rng(1).normal(0, 0.04, rollout.shape) * -rollout
    noise[::every] *= scale
    told = None if training is None else [training] * SAMPLES
    return batch_of(rollout.tolist(), (rollout + noise).tolist(), training=told)


def test_a_decay_is_another_prompt():
    (finding,) = found(find_wrong_prompt(_batch(1 + 9 * np.exp(-AT / 10)))[0])
    assert (finding.fault, finding.confidence, finding.samples) == ("wrong_prompt", "likely", SAMPLES)
    assert finding.statistics["decay"] > 3 and finding.statistics["early"] > 2 * finding.statistics["late"]
    assert "prompt_ids" in finding.fix and "BOS" in finding.fix


@pytest.mark.parametrize("scale", [np.ones(TOKENS), 1 + 3 * AT / TOKENS, np.full(TOKENS, 9.0)])
def test_even_and_growing_gaps_are_not(scale: np.ndarray):
    assert found(find_wrong_prompt(_batch(scale))[0]) == []


def test_a_template_that_concerns_some_samples():
    (finding,) = found(find_wrong_prompt(_batch(8 + 40 * np.exp(-AT / 10), every=3))[0])
    assert finding.samples == SAMPLES // 3 and finding.first is not None and finding.first.sample == 0
    assert found(find_wrong_prompt(_batch(np.full(TOKENS, 20.0), every=3))[0]) == []


def test_equal_prompt_ids_leave_the_servers_cache():
    (finding,) = found(
        find_wrong_prompt(_batch(1 + 9 * np.exp(-AT / 10), training={"trained_prompt_ids": [1, 2, 3]}))[0]
    )
    assert finding.confidence == "possible" and "flush_cache" in finding.fix


def test_a_decay_too_small_to_matter():
    rollout = _rollout()
    noise = np.random.default_rng(1).normal(0, 0.001, rollout.shape) * (1 + 9 * np.exp(-AT / 10))
    assert found(find_wrong_prompt(batch_of(rollout.tolist(), (rollout + noise).tolist()))[0]) == []
