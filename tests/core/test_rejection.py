"""Rejection at its bounds, what it needs, and staleness. Conditions and the judged policy: `test_loss_differential`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
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


def test_without_advantages_a_condition_is_an_error() -> None:
    config = rejecting("sequence_mean:ratio:0.9:inf@negative", "token:tv:0.1")
    with pytest.raises(ValueError, match="advantages is missing: criterion sequence_mean_ratio_negative hangs on it"):
        mp.correct(BATCH.replace(advantages=None), config)
    assert len(kept(BATCH.replace(advantages=None), rejecting("token:tv:0.1"))) == 7
    with pytest.raises(ValueError, match="advantages is missing"):
        mp.policy_loss(BATCH.old_log_probs, BATCH.replace(advantages=None), config)  # pyright: ignore[reportArgumentType]


# The policy that is judged --------------------------------------------------------------------------------------------


CURRENT = mp.PackedSequences.from_lists(
    old_log_probs=logs([[0.25, 0.25], [0.5, NAN]]),
    rollout_log_probs=logs([[0.5, 0.5], [0.5, NAN]]),
    loss_masks=[[1, 1], [1, 0]],
    advantages=[1.0, 1.0],
)
THETA = torch.tensor([0.5, 0.5, 0.05, NAN], dtype=torch.float64).log()  # back at π_rollout; gone from it; padding


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
