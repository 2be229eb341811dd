"""Invalid log-probs: found and named. What a policy makes of them: `test_loss_differential`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.tokens import select_tokens

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
        loss_mask=torch.tensor([*MASKS[0], *MASKS[1]]) == 1,
        lengths=(2, 3),
        rollout_log_probs=torch.tensor(flat),
        old_log_probs=torch.tensor([*TRAIN[0], *TRAIN[1]]),
        advantages=torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0]),
        sequence_ids=("a", "b"),
    )


def config(policy: str = "error", **settings: Any) -> mp.MismatchConfig:
    """With weights, so that every rollout log-prob is used, unless the settings say otherwise."""
    return mp.MismatchConfig.model_validate({"rollout_log_prob_policy": policy, **(settings or {"use_tis": True})})


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
        mp.correct(directly(NAN), config(metrics=level, use_tis=True)).statistics.metrics()


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


# What is only measured ------------------------------------------------------------------------------------------------


def test_a_batch_without_one_valid_log_prob_has_no_metric_of_the_mismatch() -> None:
    """A mean of nothing, 0, would be read as perfect agreement."""
    packed = mp.PackedSequences.from_lists(old_log_probs=[[-1.0]], rollout_log_probs=[[None]], loss_masks=[[1]])
    metrics = mp.correct(packed, mp.MismatchConfig()).statistics.metrics()
    assert metrics["rollout_corr/invalid_nan"] == metrics["rollout_corr/tokens"] == 1
    assert "rollout_corr/kl" not in metrics and "rollout_corr/rollout_is_mean" not in metrics
    assert [warning.metric for warning in mp.check_health(metrics, mp.MismatchConfig())]


# The training side ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"), [(1.5, "train_positive"), (1000.0, "train_positive"), (NAN, "train_not_finite")]
)
@pytest.mark.parametrize("settings", [{}, {"use_tis": True}, {"use_tis": True, "dry_run": True}])
def test_an_invalid_training_log_prob_stops_whatever_uses_it(settings: Any, value: float, kind: str) -> None:
    """The sign flipped, or absurd: π_old is in every loss of algorithms 0 and 2."""
    chosen = mp.MismatchConfig.model_validate(settings)
    lists: dict[str, Any] = {"old_log_probs": [[-1.0, value]], "rollout_log_probs": [[-1.0, -1.5]]}
    packed = mp.PackedSequences.from_lists(**lists, loss_masks=[[1, 1]], advantages=[1.0])
    message = rf"training log-prob of sequence 0, position 1 .*value {value:g}, kind {kind}.*training side's log-probs"
    with pytest.raises(mp.InvalidLogProbError, match=message):
        mp.policy_loss(torch.tensor([-1.0, -1.0]), packed, chosen)
    with pytest.raises(mp.InvalidLogProbError, match=message):
        mp.correct(packed.replace(invalid=()), chosen).statistics.metrics()


def test_a_million_defects_are_counted_and_a_few_named() -> None:
    """One object a defect took 22 s for a million. Sequences of different lengths, an empty one among them."""
    size = 1_000_000
    rollout = torch.full((size,), NAN)
    rollout[-1] = 3.0
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[rollout[:3], rollout[:0], rollout[3:]], loss_masks=[[1] * 3, [], torch.ones(size - 3)]
    )
    assert packed.invalid_counts == {"nan": size - 1, "positive": 1}
    places = [(item.kind, item.sequence, item.position) for item in packed.invalid]
    expected = [("nan", 0, 0), ("nan", 0, 1), ("nan", 0, 2), *(("nan", 2, place) for place in range(5))]
    assert places == [*expected, ("positive", 2, size - 4)]
    found = {"invalid": packed.invalid, "invalid_counts": packed.invalid_counts}
    packed = packed.replace(old_log_probs=torch.full((size,), -1.0), **found)
    with pytest.raises(mp.InvalidLogProbError, match=r"sequence 0, position 2 .*; and 999997 more"):
        mp.correct(packed, config())
    statistics = mp.correct(packed.replace(invalid=()), config()).statistics
    with pytest.raises(mp.InvalidLogProbError, match=r"sequence 0, position 2 .*; and 999997 more"):
        statistics.metrics()


@pytest.mark.parametrize(("value", "kinds"), [(0.05, 0), (0.1, 0), (0.15, 1)])
def test_rounding_above_zero_is_no_positive_training_log_prob(value: float, kinds: int) -> None:
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-0.1, -1.0]], old_log_probs=[[value, -1.0]], loss_masks=[[1, 1]]
    )
    assert len(packed.invalid) == kinds


def test_what_is_only_measured_does_not_mark_tokens_that_stop() -> None:
    """What hosts without the end of a step guard their loss with: in plain PPO the training side alone."""
    packed = mp.PackedSequences.from_lists(rollout_log_probs=[[None, -1.0, -1.0]], loss_masks=[[1, 1, 1]])
    train = torch.tensor([-1.0, -1.0, float("nan")])
    for config, marked in ((mp.MismatchConfig(), [False, False, True]), (mp.preset("token_is"), [True, False, True])):
        stopping = select_tokens(train, packed).stopping(config)
        assert stopping is not None and stopping.tolist() == marked
