"""Invalid log-probs: found and named. What stops, and what a policy makes of them: `test_loss_differential`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.validity import select_tokens
from tests.core.worked import config, metrics_of

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf
TIS: dict[str, Any] = {"use_tis": True}
# (rollout log-prob as an engine may return it, training log-prob): kind, None where it is sound
KINDS: list[tuple[float | None, float, str | None]] = [
    (None, -4.0, "nan"),
    (INF, -4.0, "positive"),
    (0.5, -4.0, "positive"),
    (-9999.0, -4.0, "floor"),
    (0.0, -4.0, "zero_fill"),
    (-1.0, 0.125, "train_positive"),
    (-1.0, NAN, "train_not_finite"),
    (0.0, -1.0, None),  # a certain token is honestly 0.0 where the training side nearly agrees
    (1e-3, -1e-4, None),  # rounding above 0 is not "clearly"
    (-0.1, 0.1, None),
    (-1000.0, -1.0, None),  # unlikely, but a log-prob
]


def lists(bad: Any, train: float) -> mp.PackedSequences:
    """Sequence a is sound; b has the defect at its second token; the third is masked and must not be found."""
    return mp.PackedSequences.from_lists(
        old_log_probs=[[-1.0, -0.5], [-2.0, train, -3.0]],
        rollout_log_probs=[[-1.0, -1.0], [-2.5, bad, NAN]],
        loss_masks=[[1, 1], [1, 1, 0]],
        advantages=[1.0, 2.0],
        sequence_ids=["a", "b"],
    )


@pytest.mark.parametrize(("bad", "train", "kind"), KINDS)
def test_every_kind_is_found_with_its_place_and_value(bad: float | None, train: float, kind: str | None) -> None:
    packed, log_probs = lists(bad, train), torch.full((5,), -1.0)
    directly = packed.replace(invalid=())  # as a hook builds it on the device: nothing is checked when it is packed
    if kind is None:
        assert packed.invalid == ()
        assert not [name for name, count in metrics_of(directly, **TIS).items() if "invalid" in name and count]
        return
    (found,) = packed.invalid
    value = train if kind.startswith("train") else NAN if bad is None else bad
    assert (found.kind, found.sequence, found.position) == (kind, "b", 1)
    assert found.value == value or (math.isnan(found.value) and math.isnan(value))
    side = "training log-prob" if kind.startswith("train") else "rollout log-prob"
    message = rf"{side} of sequence b, position 1 .*value {value:g}, kind {kind}\)".replace("+", r"\+")
    with pytest.raises(mp.InvalidLogProbError, match=message) as error:
        mp.correct(packed, config(**TIS))
    check = "training side's log-probs are finite" if side.startswith("training") else "returns a log-prob for every"
    assert check in str(error.value) and "--rollout-log-prob-policy" in str(error.value)
    with pytest.raises(mp.InvalidLogProbError, match=message):
        mp.policy_loss(log_probs, packed, config(**TIS))
    # No sync and no error in the hook: the error waits for `metrics()`, without metrics and on merged statistics too.
    clean = mp.correct(lists(-4.0, -4.0), config(**TIS)).statistics
    without = mp.correct(directly, config(**TIS, metrics="off"))
    assert bool(without.weights.isfinite().all())
    with pytest.raises(mp.InvalidLogProbError, match=message):
        without.statistics.metrics()
    corrected = mp.correct(directly, config(**TIS))
    with pytest.raises(mp.InvalidLogProbError, match=message):
        clean.merge(corrected.statistics).metrics()
    # Reduced over ranks, the place is on another one: its kind and count must still be said.
    elsewhere = replace(clean, sums=corrected.statistics.sums, maxima=corrected.statistics.maxima)
    with pytest.raises(mp.InvalidLogProbError, match=f"1 of kind {kind}"):
        elsewhere.metrics()


def test_an_invalid_log_prob_that_is_an_error_shows_in_the_loss() -> None:
    """Until the step's reduction raises, nothing may look sound."""
    packed = mp.PackedSequences.from_lists(loss_masks=[[1, 1]], rollout_log_probs=[[-1.0, -1.0]], advantages=[1.0])
    theta = torch.tensor([-0.9, NAN], requires_grad=True)
    settings = config(use_rollout_log_probs=True, use_tis=True, tis={"level": "sequence"})
    result = mp.policy_loss(theta, packed, settings)
    assert result.loss.isnan()
    with pytest.raises(mp.InvalidLogProbError):
        result.statistics.metrics()
    assert mp.policy_loss(theta, packed, settings.replace(rollout_log_prob_policy="drop-token")).loss.isfinite()


def test_what_is_only_measured_does_not_mark_tokens_that_stop() -> None:
    """What hosts without the end of a step guard their loss with: in plain PPO the training side alone."""
    packed = mp.PackedSequences.from_lists(rollout_log_probs=[[None, -1.0, -1.0]], loss_masks=[[1, 1, 1]])
    train = torch.tensor([-1.0, -1.0, NAN])
    for settings, marked in ((config(), [False, False, True]), (mp.preset("token_is"), [True, False, True])):
        stopping = select_tokens(train, packed.loss_mask, packed.rollout_log_probs).stopping(settings)
        assert stopping is not None and stopping.tolist() == marked
