"""The size of a gap: what it looks like, from where on it is a fault by itself, and who holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mismatch_plugin.data.served import Served
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.detectors.size import equal_sides, find_size, mismatch
from mismatch_plugin.diagnose.findings import CheckResult, Finding
from mismatch_plugin.diagnose.normal import largest_published
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


def _tokens(chosen: Callable[[np.ndarray, np.ndarray], np.ndarray], nats: float) -> Noise:
    """Quiet but for chosen tokens, by position and sample."""
    at, sample = np.arange(SHAPE[1])[None, :], np.arange(SHAPE[0])[:, None]
    return lambda generator, _: np.where(chosen(at, sample), nats, generator.normal(0, 0.01, SHAPE))


def _flips(generator: np.random.Generator, rollout: np.ndarray) -> np.ndarray:
    chosen = generator.random(SHAPE) < 0.01
    return np.where(chosen, generator.normal(-0.5, 1.0, SHAPE), generator.normal(0, 0.01, SHAPE))


def _told(batch: Batch, **fields: object) -> Batch:
    return batch.with_values({sample.index: fields for sample in batch})


def _one(batch: Batch) -> Finding:
    (finding,) = found(find_size(batch)[0])
    return finding


def _named(result: CheckResult) -> list[tuple[str, str]]:
    return [(item.fault, item.severity) for item in result.findings]


def test_sides_that_are_equal_are_remarked_with_both_readings():
    result = check_batch(_batch(lambda _, rollout: np.zeros(SHAPE)))
    assert result.status == "clean"
    assert "kernels" in result.notes[-1] and "copied" in result.notes[-1]
    assert equal_sides(_batch(_logit_noise(1e-6))) is None


def test_routers_are_a_note_at_an_ordinary_size_and_a_fault_above():
    result = check_batch(_batch(_flips))
    assert _named(result) == [("moe_routing", "note")] and result.status == "clean"
    finding = result.findings[0]
    assert finding.confidence == "likely" and finding.statistics["fraction"] < 0.02 and "routing replay" in finding.fix

    def often(generator: np.random.Generator, _: np.ndarray) -> np.ndarray:
        chosen, size = generator.random(SHAPE) < 0.045, generator.choice([-4.0, 2.5], SHAPE)
        return np.where(chosen, size, generator.normal(0, 0.01, SHAPE))

    assert _named(check_batch(_batch(often, deep=3.0))) == [("moe_routing", "fault")]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (lambda at, _: at % 60 == 7, "are id 3"),
        (lambda at, sample: (sample < 4) & (at % 5 == 0), "in few samples"),
        (lambda at, sample: (at > 70) & ((at + sample) % 8 == 0), "late in responses"),
    ],
)
def test_few_tokens_by_a_pattern_are_no_routers(where: Callable[[np.ndarray, np.ndarray], np.ndarray], said: str):
    batch = _batch(_tokens(where, -5.0))
    if "id" in said:
        ids = np.where(np.arange(SHAPE[1]) % 60 == 7, 3, batch.samples[0].response_ids)
        batch = _told(batch, response_ids=ids)
    for finding in found(find_size(batch)[0]):
        assert finding.fault == "unexplained" and finding.confidence == "possible"
        assert said in finding.evidence or "of 32 samples hold" in finding.evidence
    assert found(find_size(batch)[0])


@pytest.mark.parametrize("scale", [0.03, 0.09, 0.25])
def test_even_noise_is_low_precision_while_its_size_is_that_of_the_pair(scale: float):
    """bf16; what quantised pairs have; what only a pair that is known to be quantised has; more than any has."""
    batch = _batch(_logit_noise(scale))
    level = mismatch(batch)
    assert level is not None
    of_16_bits = Served(server="a:1", sglang="0.5", dtype="bfloat16", head_dtype="float32")
    fp8 = of_16_bits.model_copy(update={"quantization": "fp8"})
    inside = {0.03: "", 0.09: "note", 0.25: "fault"}[scale]
    unknown = [(item.fault, item.severity) for item in found(find_size(batch)[0])]
    assert unknown == {"": [], "note": [("quantised", "note")], "fault": [("unexplained", "fault")]}[inside]
    for told in (_told(batch, served=fp8), replace(batch, known_quantised=True)):
        assert [item.fault for item in found(find_size(told)[0])] == (["quantised"] if inside else [])
    assert largest_published(True)[0] < largest_published(False)[0] * 3
    unquantised = [item.fault for item in found(find_size(_told(batch, served=of_16_bits))[0])]
    assert unquantised == (["unexplained"] if inside == "fault" else [])
    if inside == "fault":
        finding = _one(batch)
        assert "K and V" in finding.evidence and "RoPE" in finding.evidence and "LoRA" in finding.evidence
        assert "--checkpoint NOW --reference-checkpoint START" in finding.fix and "--engine fp8" in finding.fix
        assert finding.statistics["logit_noise"] == pytest.approx(scale, rel=0.1)
        assert "--reference-checkpoint START" in _one(replace(batch, logits=lambda _: None)).fix
        assert "--checkpoint NOW" not in _one(replace(batch, logits=lambda _: None)).fix


def test_noise_that_likely_tokens_do_not_have_or_that_labels_explain_is_not_named():
    uneven = _batch(lambda generator, rollout: generator.normal(0, 0.08, SHAPE) * -rollout)
    assert found(find_size(uneven)[0]) == []
    span = (WeightSpan(version="4", start=0, end=SHAPE[1]),)
    for version, names in (("5", []), ("4", ["unexplained"])):
        told = _told(_batch(_logit_noise(0.25)), weight_versions=span, trainer_version=version)
        assert [item.fault for item in found(find_size(told)[0])] == names


def test_a_size_that_nothing_explains_names_the_side_of_the_bar():
    finding = _one(_batch(_logit_noise(0.8)))
    assert (finding.fault, finding.severity, finding.confidence) == ("unexplained", "fault", "possible")
    assert "k3 0.127 is above 0.1 and mean |gap| 0.396 is above 0.35" in finding.evidence
    assert "samples: the median one has k3" in finding.evidence and finding.samples == SHAPE[0]
    assert "--checkpoint NOW --reference-checkpoint START" in finding.fix


def test_few_samples_with_other_values_are_a_fault_and_named():
    quiet = _batch(lambda generator, _: generator.normal(0, 0.01, SHAPE))
    assert check_batch(quiet).status == "clean"
    others = np.random.default_rng(9)
    wrong = {at: {"train_log_probs": -others.exponential(1.2, SHAPE[1]) - 0.06} for at in (3, 11, 30)}
    result = check_batch(quiet.with_values(wrong))
    (finding,) = result.findings
    assert (result.status, finding.fault, finding.samples) == ("faults", "unexplained", 3)
    assert "k3 5.78 is above 0.1 and mean |gap| 0.133 is within 0.35" in finding.evidence
    assert "3 of 32 samples hold 100% of k3 (sample 3, 11, 30)" in finding.evidence
    assert "another sample's values" in finding.evidence and finding.statistics["median_sample_k3"] < 1e-3
    moved = {at: {"train_log_probs": quiet.samples[at].train_log_probs - 0.9} for at in (3, 11, 30)}
    (finding,) = found(find_size(quiet.with_values(moved))[0]) or [None]
    assert finding is None  # k3 0.03 in the mean
    moved = {at: {"train_log_probs": quiet.samples[at].train_log_probs - 2.5} for at in (3, 11, 30)}
    assert "which fits other weights" in _one(quiet.with_values(moved)).evidence


def test_one_wild_token_is_named_where_k3_is_above_the_bar():
    batch = _batch(_tokens(lambda at, sample: (at == 5) & (sample == 7), -15.0))
    assert found(find_size(batch)[0]) == []  # k3 0.005
    swapped = batch.with_values(
        {s.index: {"rollout_log_probs": s.train_log_probs, "train_log_probs": s.rollout_log_probs} for s in batch}
    )
    finding = _one(swapped)
    assert finding.fault == "unexplained" and finding.samples == 1
    assert "1 of their 80 tokens make 80% of it, the first at position 5 of sample 7 (+15 nats)" in finding.evidence


def test_a_fault_that_explains_the_gap_leaves_the_size_unnamed():
    names = [item.fault for item in check_batch(_batch(lambda _, rollout: rollout * 1.5)).findings]  # slope 2.5
    assert names and "unexplained" not in names
