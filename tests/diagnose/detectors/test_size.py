"""The size of a gap: classes, what it looks like, and from where on it is a fault by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.level import equal_sides, mismatch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.detectors.size import find_size, is_far
from mismatch_plugin.diagnose.findings import Finding
from mismatch_plugin.diagnose.normal import FAR_ABS_MEAN, FAR_K3, MODERATE_K3, SMALL_K3, size_class
from tests.fixtures.sglang_check.by_hand import batch_of, found

SHAPE = (32, 80)
Noise = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def _batch(noise: Noise, seed: int = 0, deep: float = 0.06) -> Batch:
    """deep: no token is likelier than e^−deep."""
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.2, SHAPE) - deep
    train = np.minimum(rollout + noise(generator, rollout), -1e-4)
    ids = generator.integers(0, 500, SHAPE).tolist()
    return batch_of(rollout.tolist(), train.tolist(), ids=ids)


def _logit_noise(scale: float) -> Noise:
    """Of independent noise on each logit: in proportion to 1 − p, and what Σ p e^noise takes away again."""
    return lambda generator, rollout: (generator.normal(0, scale, SHAPE) - scale**2 / 2) * -np.expm1(rollout)


def _flips(share: float, scale: float) -> Noise:
    def noise(generator: np.random.Generator, rollout: np.ndarray) -> np.ndarray:
        chosen = generator.random(SHAPE) < share
        return np.where(chosen, generator.normal(-scale / 2, scale, SHAPE), generator.normal(0, 0.01, SHAPE))

    return noise


def _one(batch: Batch) -> Finding:
    (finding,) = found(find_size(batch)[0])
    return finding


def test_classes_of_size():
    def of(gap: float) -> str:
        level = mismatch(batch_of([[-1.0] * 8], [[-1.0 + gap, -1.0 - gap] * 4]))
        assert level is not None
        return size_class(level)

    sizes = [0.0, 0.9 * np.sqrt(2 * SMALL_K3), 0.9 * np.sqrt(2 * MODERATE_K3), 0.3, 1.1 * FAR_ABS_MEAN]
    assert [of(float(gap)) for gap in sizes] == ["exact", "small", "moderate", "large", "far"]
    few = mismatch(batch_of([[-1.0] * 8], [[-1.0] * 7 + [1.0]]))  # few tokens, far: k3, not mean |gap|
    assert few is not None and few.abs_mean < FAR_ABS_MEAN < FAR_K3 + 0.3 < few.k3_kl and size_class(few) == "far"


def test_sides_that_are_equal_are_remarked_with_both_readings():
    same = _batch(lambda _, rollout: np.zeros(SHAPE))
    result = check_batch(same)
    assert result.status == "clean" and "exact" in result.verdict
    assert "kernels" in result.notes[-1] and "copied" in result.notes[-1]
    assert equal_sides(_batch(_logit_noise(1e-6))) is None


def test_routers_are_a_note_at_an_ordinary_size():
    finding = _one(_batch(_flips(0.01, 1.0)))
    assert (finding.fault, finding.severity, finding.confidence) == ("moe_routing", "note", "likely")
    assert finding.statistics["fraction"] < 0.02 and "routing replay" in finding.fix
    result = check_batch(_batch(_flips(0.01, 1.0)))
    assert result.status == "clean" and "Noted: moe_routing." in result.verdict


def test_routers_at_a_size_that_no_sound_pair_has_are_a_fault():
    def noise(generator: np.random.Generator, rollout: np.ndarray) -> np.ndarray:
        chosen, size = generator.random(SHAPE) < 0.045, generator.choice([-4.0, 2.5], SHAPE)
        return np.where(chosen & (rollout < -2.6 * (size > 0)), size, generator.normal(0, 0.01, SHAPE))

    batch = _batch(lambda generator, rollout: noise(generator, np.full(SHAPE, -9.0)), deep=3.0)
    finding = _one(batch)
    assert is_far(batch) and (finding.fault, finding.severity) == ("moe_routing", "fault")


def _one_id(batch: Batch) -> Batch:
    chosen = np.arange(SHAPE[1]) % 60 == 7
    changed = {
        sample.index: {
            "train_log_probs": sample.train_log_probs - 5.0 * chosen,
            "response_ids": np.where(chosen, 3, sample.response_ids),
        }
        for sample in batch
    }
    return batch.with_values(changed)


def test_few_tokens_of_one_id_are_no_routers():
    finding = _one(_one_id(_batch(_flips(0.0, 1.0))))
    assert (finding.fault, finding.severity, finding.confidence) == ("far_apart", "fault", "possible")
    assert "are id 3" in finding.evidence


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (lambda at, sample: (sample < 4) & (at % 5 == 0), "in few samples"),
        (lambda at, sample: (at > 70) & ((at + sample) % 8 == 0), "late in responses"),
    ],
)
def test_few_tokens_by_another_pattern(where: Callable[[np.ndarray, np.ndarray], np.ndarray], said: str):
    def noise(generator: np.random.Generator, rollout: np.ndarray) -> np.ndarray:
        chosen = where(np.arange(SHAPE[1])[None, :], np.arange(SHAPE[0])[:, None])
        return np.where(chosen, -4.0, generator.normal(0, 0.01, SHAPE))

    items = found(find_size(_batch(noise))[0])
    assert [item.fault for item in items if item.fault == "moe_routing"] == []
    assert all(said in item.evidence for item in items)


@pytest.mark.parametrize(("scale", "form"), [(0.12, "fp8- or int8-like"), (0.3, "int6- to int4-like")])
def test_noise_of_one_size_in_all_logits_is_low_precision(scale: float, form: str):
    finding = _one(_batch(_logit_noise(scale)))
    assert (finding.fault, finding.severity, finding.confidence) == ("quantised", "note", "possible")
    assert form in finding.evidence and finding.statistics["logit_noise"] == pytest.approx(scale, rel=0.1)


def test_bf16_and_noise_that_likely_tokens_do_not_have_are_not():
    assert found(find_size(_batch(_logit_noise(0.03)))[0]) == []
    uneven = _batch(lambda generator, rollout: generator.normal(0, 0.08, SHAPE) * -rollout)
    assert found(find_size(uneven)[0]) == []


def test_noise_that_stale_weights_explain_is_not_called_low_precision():
    batch = _batch(_logit_noise(0.12))
    span = (WeightSpan(version="4", start=0, end=SHAPE[1]),)
    for version, names in (("5", []), ("4", ["quantised"])):
        told = {sample.index: {"weight_versions": span, "trainer_version": version} for sample in batch}
        assert [item.fault for item in found(find_size(batch.with_values(told))[0])] == names


def test_a_size_that_nothing_explains():
    finding = _one(_batch(_logit_noise(0.8)))
    assert (finding.fault, finding.severity, finding.confidence) == ("far_apart", "fault", "possible")
    assert finding.statistics["k3"] > FAR_K3
    assert found(find_size(_batch(_logit_noise(0.4)))[0])[0].severity == "note"


def test_one_wild_token_is_no_size():
    def noise(generator: np.random.Generator, rollout: np.ndarray) -> np.ndarray:
        values = generator.normal(0, 0.01, SHAPE)
        values[0, 0] = -15.0
        return values

    batch = _batch(noise)
    swapped = batch.with_values(
        {s.index: {"rollout_log_probs": s.train_log_probs, "train_log_probs": s.rollout_log_probs} for s in batch}
    )
    level = mismatch(swapped)
    assert level is not None and level.k3_kl > 100 * FAR_K3
    assert not is_far(swapped) and found(find_size(swapped)[0]) == []


def test_a_fault_that_explains_the_gap_leaves_the_size_unnamed():
    batch = _batch(lambda _, rollout: rollout * 1.5)  # slope 2.5
    result = check_batch(batch)
    names = [item.fault for item in result.findings]
    assert is_far(batch) and "far_apart" not in names and names
