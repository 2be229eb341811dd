"""Rejection's conditions, the policy it judges, and staleness, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.parallel.context import shard

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf
PREFIX = "rollout_corr/"

#           ρ = 2, 2, 2, ½, ½, ½; the third and sixth have A = 0; the last is a tool's token
ROLLOUT = [[0.2, 0.2, 0.2, 0.4, 0.4, 0.4, NAN]]
TRAIN = [[0.4, 0.4, 0.4, 0.2, 0.2, 0.2, INF]]
ADVANTAGES = [[1.0, -1.0, 0.0, 1.0, -1.0, 0.0, NAN]]
MASKS = [[1, 1, 1, 1, 1, 1, 0]]


def logs(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64).log() for row in rows]


def doubles(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


BATCH = mp.PackedSequences.from_lists(
    old_log_probs=logs(TRAIN), rollout_log_probs=logs(ROLLOUT), loss_masks=MASKS, advantages=doubles(ADVANTAGES)
)


def rejecting(*criteria: str, **settings: Any) -> mp.MismatchConfig:
    rs = {"criteria": criteria, **settings.pop("rs", {})}
    return mp.MismatchConfig.model_validate({"rs": rs, "metrics": "full", **settings})


def kept(packed: mp.PackedSequences, config: mp.MismatchConfig, **arguments: Any) -> list[float]:
    return mp.correct(packed, config, **arguments).keep.tolist()


# Conditions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        ("token:ratio:0.9:1.1", [0, 0, 0, 0, 0, 0, 0]),
        ("token:ratio:0.9:1.1@negative", [1, 0, 1, 1, 0, 1, 0]),
        ("token:ratio:0.9:1.1@away", [0, 1, 1, 1, 0, 0, 0]),  # A = 0 is not above 0: only down is away
        ("token:ratio:0:1.1@away", [0, 1, 1, 1, 1, 1, 0]),
        ("token:ratio:0.9:inf@away", [1, 1, 1, 1, 0, 0, 0]),
        ("token:tv:0.1@away", [0, 1, 1, 1, 0, 0, 0]),
        ("token:tv:0.3@away", [1, 1, 1, 1, 1, 1, 0]),
        ("token:ratio:0.9:1.9@negative", [1, 0, 1, 1, 0, 1, 0]),
    ],
)
def test_tokens_under_a_condition(criterion: str, expected: list[int]) -> None:
    """What is not judged stays; NaN under the mask, of advantages too, is nothing."""
    config = rejecting(criterion)
    assert kept(BATCH, config) == expected
    metrics = mp.correct(BATCH, config).statistics.metrics()
    name = f"{PREFIX}rollout_rs_{config.criteria[0].name}"
    rejected = 6 - sum(expected)
    assert metrics[f"{name}_masked_fraction"] == pytest.approx(rejected / 6)
    high = sum(1 - keep for keep in expected[:3]) / 6  # ρ = 2
    assert metrics[f"{name}_fraction_high"] == pytest.approx(high if config.criteria[0].in_log_space else rejected / 6)
    assert metrics[f"{name}_fraction_low"] == pytest.approx(rejected / 6 - metrics[f"{name}_fraction_high"])
    mean = 1.25 if config.criteria[0].in_log_space else 0.2
    assert metrics[f"{name}_mean"] == pytest.approx(mean)  # of all tokens, judged or not
    assert all(math.isfinite(value) for value in metrics.values())


def sequences(aggregate: str) -> tuple[mp.PackedSequences, mp.MismatchConfig]:
    """Six responses of ρ = 2, 1 and a masked token; means of the advantages −½, +½, 0, 0, −1 and nothing trained."""
    advantages = [[-2.0, 1.0, NAN], [2.0, -1.0, NAN], [1.0, -1.0, NAN], [0.0, 0.0, NAN], [-1.0, -1.0, INF]]
    packed = mp.PackedSequences.from_lists(
        old_log_probs=logs([[0.4, 0.3, NAN]] * 6),
        rollout_log_probs=logs([[0.2, 0.3, INF]] * 6),
        loss_masks=[[1, 1, 0]] * 5 + [[0, 0, 0]],
        advantages=doubles([*advantages, [NAN] * 3]),
    )
    return packed, rejecting(f"{aggregate}:ratio:0.9:1.2@negative")


@pytest.mark.parametrize("aggregate", ["sequence_sum", "sequence_mean", "sequence_max"])
def test_sequences_whose_mean_advantage_is_negative(aggregate: str) -> None:
    """Exactly 0 is not negative. Shares are of all five sequences."""
    packed, config = sequences(aggregate)
    expected = [0, 1, 1, 1, 0]
    rows = [row.tolist() for row in packed.unpack(mp.correct(packed, config).keep)]
    assert rows == [[keep, keep, 0] for keep in expected] + [[0, 0, 0]]
    metrics = mp.correct(packed, config).statistics.metrics()
    name = f"{PREFIX}rollout_rs_{aggregate}_ratio_negative"
    for share in ("masked_fraction", "seq_masked_fraction", "fraction_high"):
        assert metrics[f"{name}_{share}"] == pytest.approx(0.4)
    assert metrics[f"{name}_fraction_low"] == 0.0
    each = 2.0 ** (0.5 if aggregate == "sequence_mean" else 1.0)
    assert [metrics[f"{name}_{figure}"] for figure in ("mean", "min", "max")] == pytest.approx([each] * 3)
    assert metrics[f"{PREFIX}accepted_by_advantage_negative"] == pytest.approx(2 / 5)  # of single tokens' advantages


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_value_at_its_bound_stays(advantage: float) -> None:
    """Strictly outside goes, under a condition too. 0.25 and ρ = 2 are exact."""
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[torch.tensor([0.5]).log()], rollout_log_probs=[torch.tensor([0.25]).log()],
        loss_masks=[[1]], advantages=[advantage],
    )  # fmt: skip
    condition = "away" if advantage > 0 else "negative"
    for bound, keep in (("0.25", 1.0), (f"{math.nextafter(0.2499999, 0)}", 0.0)):
        assert kept(packed, rejecting(f"token:tv:{bound}@{condition}")) == [keep]


def test_all_rejected_is_a_zero_loss() -> None:
    packed = BATCH.replace(advantages=torch.full((7,), -1.0, dtype=torch.float64))
    log_probs = packed.old_log_probs
    assert log_probs is not None
    log_probs = log_probs.clone().requires_grad_()
    result = mp.policy_loss(log_probs, packed, rejecting("sequence_max:ratio:0.9:1.1@negative"))
    assert float(result.loss.detach()) == 0.0 and int(result.denominator) == 0
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert gradient.tolist() == [0.0] * 7
    assert result.statistics.metrics()[f"{PREFIX}all_rejected"] == 1.0


def test_without_advantages_a_condition_is_an_error() -> None:
    config = rejecting("sequence_mean:ratio:0.9:inf@negative", "token:tv:0.1")
    with pytest.raises(ValueError, match="advantages is missing: criterion sequence_mean_ratio_negative hangs on it"):
        mp.correct(BATCH.replace(advantages=None), config)
    assert len(kept(BATCH.replace(advantages=None), rejecting("token:tv:0.1"))) == 7
    with pytest.raises(ValueError, match="advantages is missing"):
        mp.policy_loss(BATCH.old_log_probs, BATCH.replace(advantages=None), config)  # pyright: ignore[reportArgumentType]


def test_a_criterion_that_acts_on_some_units_bounds_no_ratio_for_the_fractions() -> None:
    """`rollout_is_ratio_fraction_high` is of bounds on every unit of π_train's ratio."""
    fraction = f"{PREFIX}rollout_is_ratio_fraction_high"
    assert mp.correct(BATCH, rejecting("token:ratio:0.9:1.1")).statistics.metrics()[fraction] == 0.5
    assert fraction not in mp.correct(BATCH, rejecting("token:ratio:0.9:1.1@away")).statistics.metrics()
    both = rejecting("token:ratio:0.9:1.1@away", "token:ratio:0.9:2.5")
    assert mp.correct(BATCH, both).statistics.metrics()[fraction] == 0.0
    current = rejecting("token:ratio:0.9:1.1", rs={"policy": "current"})
    assert fraction not in mp.correct(BATCH, current, log_probs=BATCH.old_log_probs).statistics.metrics()


# The policy that is judged --------------------------------------------------------------------------------------------


CURRENT = mp.PackedSequences.from_lists(
    old_log_probs=logs([[0.25, 0.25], [0.5, NAN]]),
    rollout_log_probs=logs([[0.5, 0.5], [0.5, NAN]]),
    loss_masks=[[1, 1], [1, 0]],
    advantages=[1.0, 1.0],
)
THETA = torch.tensor([0.5, 0.5, 0.05, NAN], dtype=torch.float64).log()  # back at π_rollout; gone from it; padding


@pytest.mark.parametrize(
    ("settings", "auto", "current"),
    [
        ({"criteria": ["token:ratio:0.9:1.1"]}, [0, 0, 1, 0], [1, 1, 0, 0]),
        ({"criteria": ["token:k3:0.1"]}, [0, 0, 1, 0], [1, 1, 0, 0]),
        ({"criteria": ["sequence_sum:ratio:0.5:2"]}, [0, 0, 1, 0], [1, 1, 0, 0]),
        ({"criteria": ["sequence_mean:ratio:0.9:1.1"]}, [0, 0, 1, 0], [1, 1, 0, 0]),
        ({"criteria": ["sequence_mean:k3:0.1"]}, [0, 0, 1, 0], [1, 1, 0, 0]),
        ({"criteria": ["sequence_max:k2:0.1"]}, [0, 0, 1, 0], [1, 1, 0, 0]),
        ({"veto_threshold": 0.6}, [0, 0, 1, 0], [1, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_criteria_and_veto_judge_the_current_policy(
    settings: dict[str, Any], auto: list[int], current: list[int], metrics: str
) -> None:
    """Weights, and what describes the mismatch, stay with π_old: those of no rejection at all."""
    base = mp.MismatchConfig.model_validate({"use_tis": True, "metrics": metrics})
    of_old, of_theta = base.replace(rs=settings), base.replace(rs={**settings, "policy": "current"})
    assert kept(CURRENT, of_old) == kept(CURRENT, of_old, log_probs=THETA) == auto
    bare, judged = mp.correct(CURRENT, base), mp.correct(CURRENT, of_theta, log_probs=THETA)
    assert judged.keep.tolist() == current
    assert torch.equal(judged.weights, bare.weights)
    assert token_loss(THETA, CURRENT, of_theta).correction.keep.tolist() == current
    assert kept(CURRENT, of_theta, log_probs=CURRENT.old_log_probs) == auto  # anew at every mini-batch
    if metrics == "off":
        return
    mine, theirs = judged.statistics.metrics(), bare.statistics.metrics()
    for name in ("kl", "k3_kl", "rollout_is_mean", "rollout_is_ratio_std", "training_ppl", "chi2_seq"):
        assert mine[PREFIX + name] == theirs[PREFIX + name], name
    if "veto_threshold" in settings:
        assert mine[f"{PREFIX}rollout_is_veto_fraction"] == 0.5
        assert mine[f"{PREFIX}rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 3)
    elif metrics == "full":
        name = f"{PREFIX}rollout_rs_{of_theta.criteria[0].name}_mean"
        assert mine[name] != pytest.approx(mp.correct(CURRENT, of_old).statistics.metrics()[name])


def test_mask_mode_belongs_to_the_weights() -> None:
    """π_old is outside the weights' bounds in the first response, π_θ nowhere outside the criterion's."""
    config = mp.MismatchConfig.model_validate(
        {
            "use_tis": True,
            "tis": {"mode": "mask"},
            "rs": {"criteria": ["token:ratio:0.05:2"], "policy": "current"},
        }
    ).replace(tis={"lower_bound": 0.9})
    assert kept(CURRENT, config, log_probs=THETA) == [0, 0, 1, 0]


def test_away_is_judged_by_the_current_policy() -> None:
    """A > 0: up is away. π_θ went down from π_rollout, π_old up."""
    packed = mp.PackedSequences.from_lists(
        old_log_probs=logs([[0.9]]), rollout_log_probs=logs([[0.5]]), loss_masks=[[1]], advantages=[1.0]
    )
    config = rejecting("token:tv:0.1@away", rs={"policy": "current"})
    assert kept(packed, config, log_probs=logs([[0.1]])[0]) == [1.0]
    assert kept(packed, config, log_probs=logs([[0.9]])[0]) == [0.0]


def test_without_log_probs_the_current_policy_cannot_be_judged() -> None:
    config = rejecting("token:ratio:0.9:1.1", rs={"policy": "current"})
    with pytest.raises(ValueError, match=r"log_probs is missing: under rs.policy current .* choose rs.policy auto"):
        mp.correct(CURRENT, config)


def test_log_probs_of_the_current_policy_may_be_padded() -> None:
    rows: dict[str, Any] = {
        "old_log_probs": [[-1.0, -1.0], [-2.0, NAN]],
        "rollout_log_probs": [[-1.0, -1.0], [-2.0, NAN]],
    }
    given: dict[str, Any] = {name: torch.tensor(values) for name, values in rows.items()}
    packed = mp.PackedSequences.from_padded(loss_masks=torch.tensor([[1, 1], [1, 0]]), lengths=[2, 1], **given)
    config, theta = rejecting("token:k2:0.1", rs={"policy": "current"}), torch.tensor([[-1.0, -3.0], [-2.0, NAN]])
    assert kept(packed, config, log_probs=theta) == [1, 0, 1]


@pytest.mark.parametrize("bad", [NAN, 3.0])
def test_an_invalid_current_log_prob_is_not_judged_and_shows_in_the_loss(bad: float) -> None:
    config = rejecting("token:k2:0.1", "sequence_sum:k2:0.5", rs={"policy": "current"})
    theta = THETA.clone()
    theta[0] = bad
    result = mp.policy_loss(theta, CURRENT, config)
    assert result.correction.keep.tolist() == [1, 1, 0, 0]
    assert bool(result.loss.isnan()) == math.isnan(bad)


# Forms of a batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset", [("opsm", {"delta": 0.05}), ("dppo_tv", {}), ("dppo_kl", {}), ("kpop", {"threshold": 0.05})]
)
@pytest.mark.parametrize("limit", [None, 1])
def test_packed_one_by_one_and_padded_are_the_same(preset: tuple[str, dict[str, float]], limit: int | None) -> None:
    """Keep, loss and gradient; the batch is cut after a reduction over all, so the sums of the parts add up."""
    generator, lengths, width = torch.Generator().manual_seed(8), [5, 1, 9, 3, 7, 9], 9
    name, parameters = preset
    config = mp.preset(name, **parameters).replace(rs={} if limit is None else {"max_staleness": limit})

    def normal() -> Tensor:
        return torch.randn(len(lengths), width, generator=generator, dtype=torch.float64)

    rollout = -normal().abs() - 0.05
    old, theta = rollout + 0.3 * normal(), rollout + 0.3 * normal()
    rows: dict[str, Any] = {"rollout_log_probs": rollout, "old_log_probs": old.clamp(max=-1e-3), "advantages": normal()}
    rows["weight_versions"] = torch.randint(4, 8, (len(lengths), width), generator=generator)
    mask = (torch.rand(len(lengths), width, generator=generator) < 0.8) & (
        torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    )
    theta = theta.clamp(max=-1e-3)

    def run(packed: mp.PackedSequences, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = log_probs.clone().requires_grad_()
        result = mp.policy_loss(leaf, packed, config)
        return result.correction.keep, result.loss_sum.detach(), torch.autograd.grad(result.loss_sum, leaf)[0]

    def cut(values: Tensor, ids: list[int]) -> list[Tensor]:
        return [values[i, : lengths[i]] for i in ids]

    def lists(ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        fields = {name: cut(values, ids) for name, values in rows.items()}
        packed = mp.PackedSequences.from_lists(loss_masks=cut(mask.double(), ids), trainer_version=6, **fields)
        return run(packed, torch.cat(cut(theta, ids)))

    keep, loss, gradient = lists(list(range(len(lengths))))
    assert 0 < keep.sum() < mask.sum()
    alone = [lists([i]) for i in range(len(lengths))]
    assert torch.equal(torch.cat([each[0] for each in alone]), keep)
    torch.testing.assert_close(sum(each[1] for each in alone), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([each[2] for each in alone]), gradient, rtol=1e-12, atol=0)
    padded = mp.PackedSequences.from_padded(loss_masks=mask.double(), trainer_version=6, **rows)
    square, summed, slopes = run(padded, theta)
    assert torch.equal(torch.cat(cut(square.view(mask.shape), list(range(len(lengths))))), keep)
    torch.testing.assert_close(summed, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(cut(slopes, list(range(len(lengths))))), gradient, rtol=1e-12, atol=0)


# Staleness ------------------------------------------------------------------------------------------------------------


def versions(**fields: Any) -> mp.PackedSequences:
    """Versions 7 to 11 under a trainer at 10, the last a server ahead of it; then a tool's token."""
    given: dict[str, Any] = {
        "old_log_probs": [[-1.0] * 6],
        "rollout_log_probs": [[-1.5] * 6],
        "weight_versions": [[7, 8, 9, 10, 11, -(2**40)]],
        "trainer_version": 10,
        "advantages": [1.0],
        "loss_masks": [[1, 1, 1, 1, 1, 0]],
    }
    return mp.PackedSequences.from_lists(
        **{name: value for name, value in (given | fields).items() if value is not None}
    )


@pytest.mark.parametrize(("limit", "expected"), [(0, [0, 0, 0, 1, 1, 0]), (2, [0, 1, 1, 1, 1, 0]), (3, [1] * 5 + [0])])
@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_tokens_of_older_weights_leave_the_loss(limit: int, expected: list[int], metrics: str) -> None:
    """They still count in ratios."""
    config = mp.MismatchConfig.model_validate(
        {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 50.0}, "metrics": metrics}
    )
    correction = mp.correct(versions(), config.replace(rs={"max_staleness": limit}))
    assert correction.keep.tolist() == expected
    assert torch.equal(correction.weights, mp.correct(versions(), config).weights)
    found = correction.statistics.metrics()
    if metrics == "off":
        return
    share = 1 - sum(expected) / 5
    for name in ("rollout_rs_staleness_masked_fraction", "rollout_rs_masked_fraction"):
        assert found[PREFIX + name] == pytest.approx(share)
    assert found[f"{PREFIX}kl"] == pytest.approx(-0.5)


def test_staleness_is_one_criterion_of_several() -> None:
    config = rejecting("token:k2:0.1", rs={"max_staleness": 2})
    metrics = mp.correct(versions(), config).statistics.metrics()
    assert metrics[f"{PREFIX}rollout_rs_staleness_masked_fraction"] == pytest.approx(0.2)
    assert (
        metrics[f"{PREFIX}rollout_rs_token_k2_masked_fraction"] == metrics[f"{PREFIX}rollout_rs_masked_fraction"] == 1
    )


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_staleness_needs_no_rollout_log_probs(metrics: str) -> None:
    """Neither absent nor invalid ones stop it: PPO only measures them."""
    config = mp.MismatchConfig.model_validate({"rs": {"max_staleness": 2}, "metrics": metrics})
    for rollout in (None, [[NAN, NAN, -1.5, 0.7, -INF, NAN]]):
        packed = versions(rollout_log_probs=rollout)
        result = mp.policy_loss(torch.full((6,), -1.0), packed, config)
        assert result.correction.keep.tolist() == [0, 1, 1, 1, 1, 0]
        assert int(result.denominator) == 4
        assert result.correction.tokens_N.tolist() == [5] and result.correction.kept_N.tolist() == [4]
        result.statistics.metrics()


def test_a_dry_run_only_reports_staleness() -> None:
    config = mp.MismatchConfig.model_validate({"rs": {"max_staleness": 0}, "dry_run": True})
    correction = mp.correct(versions(), config)
    assert correction.keep.tolist() == [1, 1, 1, 1, 1, 0]
    assert correction.statistics.metrics()[f"{PREFIX}rollout_rs_staleness_masked_fraction"] == pytest.approx(0.6)


@pytest.mark.parametrize("name", ["weight_versions", "trainer_version"])
def test_missing_versions_are_an_error(name: str) -> None:
    config = mp.MismatchConfig.model_validate({"rs": {"max_staleness": 2}})
    with pytest.raises(ValueError, match=f"{name} is missing: rs.max_staleness needs the version"):
        mp.correct(versions(**{name: None}), config)


@pytest.mark.parametrize("version", [1.5, "7", True, torch.tensor(7)])
def test_a_trainer_version_is_a_whole_number_on_the_host(version: Any) -> None:
    with pytest.raises(ValueError, match=r"trainer_version is .*: pass the number of the weights that train"):
        versions(trainer_version=version)


def test_a_trainer_version_fits_64_bits() -> None:
    with pytest.raises(ValueError, match="trainer_version is 9223372036854775808: no number of versions is that large"):
        versions(trainer_version=2**63)


def test_the_trainer_version_goes_with_the_batch() -> None:
    packed = versions()
    assert packed.replace(advantages=None).trainer_version == 10
    assert packed.replace(trainer_version=12).trainer_version == 12
    assert packed.to("meta").trainer_version == 10
    assert [shard(packed, "zigzag", 2, rank).trainer_version for rank in range(2)] == [10, 10]
    padded = mp.PackedSequences.from_padded(loss_masks=torch.ones(1, 2), trainer_version=4)
    assert padded.trainer_version == 4
