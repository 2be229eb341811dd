"""Rollout log-probs that are no log-probs: found, named, and treated as the policy says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf
KINDS = {  # value as an engine may return it: kind
    "None": (None, "nan"),
    "NaN": (NAN, "nan"),
    "+inf": (INF, "positive"),
    "clearly positive": (0.5, "positive"),
    "-inf": (-INF, "floor"),
    "-9999": (-9999.0, "floor"),
    "fill": (0.0, "zero_fill"),
}
POLICIES = ("neutral", "drop-token", "drop-sequence")
ALGORITHMS = [(False, False), (True, False), (False, True), (True, True)]

# Sequence a is sound; b has the defect at its second token; the third is masked and must not be found.
TRAIN = [[-1.0, -0.5], [-2.0, -4.0, -3.0]]
MASKS = [[1, 1], [1, 1, 0]]


def rollout(bad: Any) -> list[list[Any]]:
    return [[-1.0, -1.0], [-2.5, bad, NAN]]


def from_lists(bad: Any, **fields: Any) -> mp.PackedSequences:
    return mp.PackedSequences.from_lists(
        old_log_probs=TRAIN,
        rollout_log_probs=rollout(bad),
        loss_masks=MASKS,
        advantages=[1.0, 2.0],
        sequence_ids=["a", "b"],
        **fields,
    )


def directly(bad: Any) -> mp.PackedSequences:
    """As a hook builds it on the device: nothing is checked when it is packed."""
    flat = [NAN if value is None else value for row in rollout(bad) for value in row]
    return mp.PackedSequences(
        torch.tensor([*MASKS[0], *MASKS[1]]) == 1,
        (2, 3),
        torch.tensor(flat),
        torch.tensor([*TRAIN[0], *TRAIN[1]]),
        advantages=torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0]),
        sequence_ids=("a", "b"),
    )


def config(policy: str = "error", **settings: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate({"rollout_log_prob_policy": policy, **settings})


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_is_found_with_its_place_and_value(case: str) -> None:
    bad, kind = KINDS[case]
    (found,) = from_lists(bad).invalid
    assert (found.kind, found.sequence, found.position) == (kind, "b", 1)
    value = NAN if bad is None else bad
    assert found.value == value or (math.isnan(found.value) and math.isnan(value))
    with pytest.raises(mp.InvalidLogProbError, match=rf"sequence b, position 1 .*kind {kind}") as error:
        mp.correct(from_lists(bad), config())
    assert "rollout-log-prob-policy" in str(error.value) and f"value {value:g}" in str(error.value)
    with pytest.raises(mp.InvalidLogProbError, match="position 1"):
        mp.policy_loss(torch.zeros(5), from_lists(bad), config())


@pytest.mark.parametrize("case", KINDS)
def test_data_packed_directly_are_reported_by_metrics(case: str) -> None:
    """No sync and no error in the hook: the error waits for `metrics()`, on merged statistics too."""
    bad, kind = KINDS[case]
    corrected = mp.correct(directly(bad), config())
    assert bool(corrected.weights.isfinite().all())
    clean = mp.correct(directly(-4.0), config()).statistics
    for statistics in (corrected.statistics, clean.merge(corrected.statistics)):
        with pytest.raises(mp.InvalidLogProbError, match=rf"sequence b, position 1 .*kind {kind}"):
            statistics.metrics()
    # Reduced over ranks, the place is on another one: its kind and count must still be said.
    elsewhere = clean.replace(corrected.statistics.sums, corrected.statistics.maxima)
    with pytest.raises(mp.InvalidLogProbError, match=f"1 of kind {kind}"):
        elsewhere.metrics()


@pytest.mark.parametrize("level", ["off", "basic", "full"])
def test_the_error_does_not_depend_on_the_metrics_level(level: str) -> None:
    with pytest.raises(mp.InvalidLogProbError):
        mp.correct(directly(NAN), config(metrics=level)).statistics.metrics()


def test_several_defects_are_all_counted_and_the_first_are_named() -> None:
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-1.0] * 5], rollout_log_probs=[[None, NAN, 0.5, -9999.0, -INF]], loss_masks=[[1] * 5]
    )
    assert [item.position for item in packed.invalid] == [0, 1, 2, 3, 4]
    with pytest.raises(mp.InvalidLogProbError, match=r"position 0 .*position 1 .*position 2 .*and 2 more"):
        mp.correct(packed, config())
    metrics = mp.correct(packed, config("neutral")).statistics.metrics()
    assert [metrics[f"rollout_corr/invalid_{kind}"] for kind in ("nan", "positive", "floor")] == [2, 1, 2]


SOUND = [
    (-1.0, 0.0),  # a certain token is honestly 0.0 where the training side nearly agrees
    (-1e-4, 1e-3),  # rounding above 0 is not "clearly"
    (-1.0, -1000.0),  # unlikely, but a log-prob
    (-1000.0, -1.0),
]


@pytest.mark.parametrize(("train", "value"), SOUND)
def test_sound_log_probs_are_left_alone(train: float, value: float) -> None:
    packed = mp.PackedSequences.from_lists(old_log_probs=[[train]], rollout_log_probs=[[value]], loss_masks=[[1]])
    assert packed.invalid == ()
    metrics = mp.correct(packed, config()).statistics.metrics()
    assert {name: count for name, count in metrics.items() if "invalid" in name and count} == {}
    assert metrics["rollout_corr/kl"] == pytest.approx(value - train, rel=1e-5)


@pytest.mark.parametrize("bad", [value for value, _ in KINDS.values()], ids=list(KINDS))
def test_defects_under_the_mask_are_none(bad: Any) -> None:
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-1.0, -9.0]], rollout_log_probs=[[-1.0, bad]], loss_masks=[[1, 0]]
    )
    assert packed.invalid == ()
    assert mp.correct(packed, config()).statistics.metrics()["rollout_corr/invalid_nan"] == 0


KEPT = {"neutral": [1, 1, 1, 1, 0], "drop-token": [1, 1, 1, 0, 0], "drop-sequence": [1, 1, 0, 0, 0]}


@pytest.mark.parametrize("build", [from_lists, directly])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", KINDS)
def test_policies(case: str, policy: str, build: Any) -> None:
    """The defect has ratio 1; what is dropped leaves `keep`; each occurrence is counted by its kind."""
    bad, kind = KINDS[case]
    found = mp.correct(build(bad), config(policy, use_tis=True, tis={"upper_bound": 5.0}))
    assert found.keep.tolist() == KEPT[policy]
    # ρ: 1, e^.5 | e^.5, 1 (the defect), masked
    assert found.weights.tolist() == pytest.approx([1, math.exp(0.5), math.exp(0.5), 1, 0])
    metrics = found.statistics.metrics()
    counts = {name.rsplit("invalid_")[1]: value for name, value in metrics.items() if "invalid_" in name}
    assert counts[kind] == 1 and sum(counts.values()) == 1
    assert metrics["rollout_corr/kl"] == pytest.approx(-(0.5 + 0.5) / 4)  # ratio 1, counted
    assert metrics["rollout_corr/accepted_token_fraction"] == sum(KEPT[policy]) / 4
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_under_bypass_the_anchor_of_a_defect_is_the_current_policy(policy: str) -> None:
    # π_θ/π_rollout of the sound ones: 1, e^.1 | e^.1; of the defect 1, with the gradient of r = 1: −A.
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, -1.0], [-2.5, NAN, NAN]], loss_masks=MASKS, advantages=[1.0, 2.0]
    )
    log_probs = torch.tensor([-1.0, -0.9, -2.4, -4.0, NAN], requires_grad=True)
    result = mp.policy_loss(log_probs, packed, config(policy, use_rollout_log_probs=True))
    r = [1, math.exp(0.1), math.exp(0.1), 1, 0]
    expected = [-a * x * k for a, x, k in zip([1, 1, 2, 2, 2], r, KEPT[policy], strict=True)]
    assert float(result.loss_sum.detach()) == pytest.approx(sum(expected), rel=1e-6)
    result.loss_sum.backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert int(result.denominator) == sum(KEPT[policy])
    # The defect has log r = 0 in the metric, whatever π_θ says there.
    assert result.statistics.metrics()["rollout_corr/ppo_kl"] == pytest.approx(-(0.1 + 0.1) / 4, rel=1e-5)


def test_a_defect_vetoes_and_rejects_nothing_by_itself() -> None:
    settings = {"rs": {"criteria": ["sequence_sum:ratio:0.1:10"], "veto_threshold": 0.01}}
    for bad, _ in KINDS.values():
        assert mp.correct(from_lists(bad), config("neutral", **settings)).keep.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", KINDS)
def test_what_is_dropped_keeps_its_entropy_and_kl(case: str, policy: str) -> None:
    """These terms run over the original mask and know nothing of the rollout; the metrics beside them neither."""
    bad, _ = KINDS[case]
    packed = from_lists(bad, entropy=[[0.5, 0.5], [1.0, 2.0, NAN]], ref_log_probs=[[-1.0, -0.5], [-3.0, -6.0, NAN]])
    current = torch.tensor([value for row in TRAIN for value in row], requires_grad=True)
    terms = {"entropy_coef": 1.0, "kl_coef": 1.0, "kl_type": "k1"}
    result = mp.policy_loss(current, packed, config(policy, terms=terms))
    assert result.terms["entropy"].item() == pytest.approx(-4.0)  # .5 + .5 + 1 + 2
    assert result.terms["kl"].item() == pytest.approx(3.0)  # 0 + 0 + 1 + 2
    assert int(result.terms_denominator) == 4
    metrics = result.statistics.metrics()
    assert metrics["rollout_corr/entropy"] == pytest.approx(1.0)
    assert metrics["rollout_corr/ref_kl"] == pytest.approx(0.75)


@pytest.mark.parametrize("bad", [NAN, -INF, INF])
@pytest.mark.parametrize("policy", ["drop-token", "drop-sequence"])
@pytest.mark.parametrize(("bypass", "tis"), ALGORITHMS)
def test_a_training_side_that_is_not_finite_is_dropped_too(bypass: bool, tis: bool, policy: str, bad: float) -> None:
    """It counts as a defect; 0 · NaN must not bring it back into the loss, the gradient or a metric."""
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, -1.0], [-1.0]],
        loss_masks=[[1, 1], [1]],
        old_log_probs=[[-1.0, bad], [-1.0]],
        advantages=[1.0, 1.0],
    )
    current = torch.tensor([-1.0, bad if bypass else -1.0, -1.0], requires_grad=True)
    result = mp.policy_loss(current, packed, config(policy, use_rollout_log_probs=bypass, use_tis=tis))
    assert result.correction.keep.tolist() == ([1, 0, 1] if policy == "drop-token" else [0, 0, 1])
    assert math.isfinite(result.loss_sum.detach())
    result.loss_sum.backward()
    assert current.grad is not None
    assert current.grad.tolist() == [-1.0 if policy == "drop-token" else 0.0, 0.0, -1.0]
    metrics = result.statistics.metrics()
    assert metrics["rollout_corr/invalid_train_not_finite"] == 1
    assert {name: value for name, value in metrics.items() if not math.isfinite(value)} == {}
