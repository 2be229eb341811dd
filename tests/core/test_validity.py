"""Invalid log-probs: found, named, and treated as the policy says wherever they are used."""

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
    """These terms run over the original mask and know nothing of the rollout; nor do the metrics next to them."""
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
    assert metrics["rollout_corr/invalid_" + ("train_positive" if bad == INF else "train_not_finite")] == 1
    assert {name: value for name, value in metrics.items() if not math.isfinite(value)} == {}


# What is only measured ------------------------------------------------------------------------------------------------

UNUSED: dict[str, dict[str, Any]] = {
    "PPO": {"metrics": "full"},
    "PPO, neutral": {"rollout_log_prob_policy": "neutral"},
    "dry run of weights": {"use_tis": True, "dry_run": True},
    "dry run of a criterion": {"rs": {"criteria": ["token:k2:0.5"]}, "dry_run": True},
    "REINFORCE without weights": {"use_rollout_log_probs": True, "use_tis": True, "tis": {"level": "none"}},
    "mean over sequences": {"aggregation": "seq-mean-token-mean"},
}
USED: dict[str, dict[str, Any]] = {
    "anchor": {"use_rollout_log_probs": True},
    "weight": {"use_tis": True},
    "criterion": {"rs": {"criteria": ["token:k2:0.5"]}},
    "veto": {"rs": {"veto_threshold": 1e-4}},
    "anchor in a dry run": {"use_rollout_log_probs": True, "rs": {"veto_threshold": 1e-4}, "dry_run": True},
}


@pytest.mark.parametrize("build", [from_lists, directly])
@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("settings", UNUSED.values(), ids=list(UNUSED))
def test_what_is_only_measured_stops_nothing(settings: dict[str, Any], case: str, build: Any) -> None:
    """The loss is that of the same batch with a valid log-prob; the metrics are those without the token."""
    bad, kind = KINDS[case]
    chosen = mp.MismatchConfig.model_validate(settings)
    current = torch.tensor([-1.1, -0.4, -2.1, -4.2, NAN])

    def run(value: Any) -> tuple[mp.PolicyLoss, torch.Tensor]:
        log_probs = current.clone().requires_grad_()
        result = mp.policy_loss(log_probs, build(value), chosen)
        result.loss.backward()
        assert log_probs.grad is not None
        return result, log_probs.grad

    (found, gradient), (clean, expected) = run(bad), run(-4.0)
    assert torch.equal(gradient, expected) and torch.equal(found.loss, clean.loss)
    assert found.correction.keep.tolist() == found.correction.weights.tolist() == [1, 1, 1, 1, 0]
    metrics = found.statistics.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics[f"rollout_corr/invalid_{kind}"] == 1
    assert (metrics["rollout_corr/tokens"], metrics["rollout_corr/sequences"]) == (4, 2)
    train = current if chosen.use_rollout_log_probs else torch.tensor([*TRAIN[0], *TRAIN[1]])
    measured = train[:3] - torch.tensor([-1.0, -1.0, -2.5])
    assert metrics["rollout_corr/kl"] == pytest.approx(-float(measured.mean()), abs=1e-6)
    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx(
        -(float(train[:2].mean()) + float(train[2])) / 2, abs=1e-6
    )
    assert metrics["rollout_corr/pg_loss"] == pytest.approx(clean.statistics.metrics()["rollout_corr/pg_loss"])


@pytest.mark.parametrize("settings", USED.values(), ids=list(USED))
def test_what_is_used_stops(settings: dict[str, Any]) -> None:
    chosen = mp.MismatchConfig.model_validate(settings)
    with pytest.raises(mp.InvalidLogProbError, match=r"rollout log-prob of sequence b, position 1 .*kind nan"):
        mp.policy_loss(torch.full((5,), -1.0), from_lists(NAN), chosen)
    with pytest.raises(mp.InvalidLogProbError, match=r"rollout log-prob of sequence b, position 1 .*kind nan"):
        mp.policy_loss(torch.full((5,), -1.0), directly(NAN), chosen).statistics.metrics()


@pytest.mark.parametrize(("policy", "kept"), [("drop-token", [1, 1, 1, 0, 0]), ("drop-sequence", [1, 1, 0, 0, 0])])
def test_dropping_is_a_rejection_that_plain_ppo_applies_too(policy: str, kept: list[int]) -> None:
    settings = mp.MismatchConfig.model_validate({"rollout_log_prob_policy": policy})
    assert mp.correct(from_lists(NAN), settings).keep.tolist() == kept


def test_a_batch_without_one_valid_log_prob_has_no_metric_of_the_mismatch() -> None:
    """A mean of nothing, 0, would be read as perfect agreement."""
    packed = mp.PackedSequences.from_lists(old_log_probs=[[-1.0]], rollout_log_probs=[[None]], loss_masks=[[1]])
    metrics = mp.correct(packed, mp.MismatchConfig()).statistics.metrics()
    assert metrics["rollout_corr/invalid_nan"] == metrics["rollout_corr/tokens"] == 1
    assert "rollout_corr/kl" not in metrics and "rollout_corr/rollout_is_mean" not in metrics
    assert [warning.metric for warning in mp.check_health(metrics, mp.MismatchConfig())]


@pytest.mark.parametrize("level", ["basic", "full"])
def test_without_one_valid_log_prob_extremes_quantiles_and_criteria_are_absent_too(level: str) -> None:
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-1.0]], rollout_log_probs=[[None]], loss_masks=[[1]], advantages=[1.0]
    )
    rejection = {"criteria": ["token:k2:0.5", "sequence_max:ratio:2.0"], "veto_threshold": 1e-4}
    settings = config("error", use_tis=True, dry_run=True, metrics=level, rs=rejection)
    metrics = mp.policy_loss(torch.tensor([-1.0]), packed, settings).statistics.metrics()
    names = {name.removeprefix("rollout_corr/") for name in metrics if "invalid" not in name}
    loss = {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "pg_clipfrac_high_side", "pg_clipfrac_low_side", "ppo_kl"}
    assert names == {"tokens", "sequences", *loss}


def test_a_token_that_is_left_out_is_above_no_bound() -> None:
    """ρ of the other one is e^-.5 = .61, inside [.3, .9]; the 1 of what is left out is not."""
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-1.5, -1.0]], rollout_log_probs=[[-1.0, None]], loss_masks=[[1, 1]]
    )
    criterion = {"statistic": "ratio", "aggregate": "token", "lower_bound": 0.3, "upper_bound": 0.9}
    settings = config("error", dry_run=True, metrics="full", rs={"criteria": [criterion]})
    metrics = mp.correct(packed, settings).statistics.metrics()
    assert metrics["rollout_corr/rollout_rs_token_ratio_fraction_high"] == 0
    assert metrics["rollout_corr/rollout_rs_token_ratio_mean"] == pytest.approx(math.exp(-0.5))


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


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_metric_is_infinite_under_absurd_training_log_probs(policy: str, bypass: bool) -> None:
    lists: dict[str, Any] = {"rollout_log_probs": [[-1.0, -1.5, -1.0]], "loss_masks": [[1, 1, 1]]}
    values = torch.tensor([-1.0, 1000.0, 2.0])
    packed = mp.PackedSequences.from_lists(**lists, old_log_probs=[values], advantages=[1.0])
    settings = config(policy, use_tis=True, use_rollout_log_probs=bypass, tis={"level": "sequence"}, metrics="full")
    current = (values if bypass else torch.full((3,), -1.0)).clone().requires_grad_()
    result = mp.policy_loss(current, packed, settings)
    result.loss.backward()
    assert bool(result.loss.isfinite()) and current.grad is not None and bool(current.grad.isfinite().all())
    metrics = result.statistics.metrics()
    assert metrics["rollout_corr/invalid_train_positive"] == 2
    assert {name: value for name, value in metrics.items() if not math.isfinite(value)} == {}


def test_old_log_probs_that_bypass_does_not_use_stop_nothing() -> None:
    lists: dict[str, Any] = {"old_log_probs": [[NAN, 4.0]], "rollout_log_probs": [[-1.0, -1.5]]}
    packed = mp.PackedSequences.from_lists(**lists, loss_masks=[[1, 1]], advantages=[1.0])
    settings = config(use_rollout_log_probs=True)
    result = mp.policy_loss(torch.tensor([-1.0, -1.5]), packed, settings)
    assert float(result.loss) == -1.0 and result.statistics.metrics()["rollout_corr/tokens"] == 2


def test_under_bypass_a_zero_is_a_fill_where_the_current_policy_is_far_from_0() -> None:
    """Not where π_old is, which nothing uses."""
    lists: dict[str, Any] = {"old_log_probs": [[-5.0, -1.0]], "rollout_log_probs": [[0.0, 0.0]], "loss_masks": [[1, 1]]}
    packed = mp.PackedSequences.from_lists(**lists, advantages=[1.0])
    settings = config(use_rollout_log_probs=True)
    result = mp.policy_loss(torch.tensor([-1.0, -1.0]), packed, settings)
    assert float(result.loss) == pytest.approx(-math.exp(-1.0))
    assert result.statistics.metrics()["rollout_corr/invalid_zero_fill"] == 0
    far = mp.policy_loss(torch.tensor([-1.0, -5.0]), packed, settings).statistics
    with pytest.raises(mp.InvalidLogProbError, match=r"sequence 0, position 1 .*kind zero_fill"):
        far.metrics()


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


def test_without_one_valid_pair_no_mismatch_metric_is_there() -> None:
    """Extremes, quantiles and differences of nothing would be read as perfect agreement, too."""
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[None, None]], old_log_probs=[[-1.0, -2.0]], loss_masks=[[1, 1]], advantages=[1.0]
    )
    config = mp.MismatchConfig(metrics="full")
    metrics = mp.policy_loss(torch.tensor([-1.0, -2.0]), packed, config).statistics.metrics()
    left = {name.removeprefix("rollout_corr/") for name in metrics}
    found = ("rollout_is_min", "rollout_is_max", "rollout_is_ratio_p50", "probability_difference_max", "kl",
             "log_ppl_diff_max", "ppl_ratio", "chi2_seq")  # fmt: skip
    assert not left & {*found} and {"pg_loss", "pg_clipfrac", "invalid_nan", "tokens"} <= left


def test_clip_fractions_run_over_all_trained_tokens() -> None:
    """A rollout log-prob that is left out of the mismatch does not leave the loss: one clipped token in four."""
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, None, -1.0, None]], old_log_probs=[[-1.0] * 4], loss_masks=[[1] * 4], advantages=[1.0]
    )
    log_probs = torch.tensor([-1.0 + 0.5, -1.0, -1.0, -1.0])
    metrics = mp.policy_loss(log_probs, packed, mp.MismatchConfig()).statistics.metrics()
    assert metrics["rollout_corr/pg_clipfrac"] == 0.25


def test_what_is_only_measured_does_not_mark_tokens_that_stop() -> None:
    """What hosts without the end of a step guard their loss with: in plain PPO the training side alone."""
    packed = mp.PackedSequences.from_lists(rollout_log_probs=[[None, -1.0, -1.0]], loss_masks=[[1, 1, 1]])
    train = torch.tensor([-1.0, -1.0, float("nan")])
    for config, marked in ((mp.MismatchConfig(), [False, False, True]), (mp.preset("token_is"), [True, False, True])):
        stopping = select_tokens(train, packed).stopping(config)
        assert stopping is not None and stopping.tolist() == marked
