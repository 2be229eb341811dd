"""Gates on the correction stage: kernels, host syncs, memory. Counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from examples.benchmarks.counting import OperationCounter, count

SEQUENCE_TRUNCATE = {"use_tis": True, "tis": {"level": "sequence"}}
GEOMETRIC = "sequence_mean:ratio:0.99:1.01"
FURTHER = (
    "sequence_sum:ratio:0.2:5", "sequence_max:ratio:0.2:5", "sequence_max:k2:0.5", "sequence_mean:k3:0.1",
    "sequence_mean:tv:0.2", "sequence_max:binary_kl:0.1", "sequence_mean:binary_kl_reverse:0.1", "token:ratio:0.2:5",
    "token:k3:0.5", "token:tv:0.5", "token:binary_kl:0.5",
)  # fmt: skip
NEW = {"policy": "current", "max_staleness": 1}
TOKENS = [criterion for criterion in FURTHER if criterion.startswith("token")]

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


def batch(sequences: int, longest: int = 40) -> mp.PackedSequences:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(1, longest, (sequences,), generator=generator).tolist())
    tokens = sum(lengths)
    rollout = -3 * torch.rand(tokens, generator=generator)
    packed = mp.PackedSequences(
        loss_mask=torch.rand(tokens, generator=generator) < 0.8,
        lengths=lengths,
        rollout_log_probs=rollout,
        old_log_probs=rollout + 0.1 * torch.randn(tokens, generator=generator),
        advantages=torch.randn(tokens, generator=generator),
        weight_versions=torch.randint(0, 3, (tokens,), generator=generator),
        trainer_version=2,
    )
    # Made once a batch at data preparation, outside the hook.
    assert packed.offsets is not None and packed.sequence_index is not None and packed.response_positions is not None
    assert packed.units and packed.chunks
    return packed


def correction(sequences: int, **fields: Any) -> OperationCounter:
    config, packed = mp.MismatchConfig(**fields), batch(sequences)
    return count(lambda: mp.correct(packed, config, log_probs=packed.old_log_probs))


def rejecting(*criteria: str, **settings: Any) -> dict[str, Any]:
    return {**SEQUENCE_TRUNCATE, "rs": {"criteria": [GEOMETRIC, *criteria], "veto_threshold": 1e-4, **settings}}


def test_kernels_at_basic() -> None:
    assert correction(64, **rejecting()).total <= 94
    assert correction(64, **mp.preset("token_is").model_dump(exclude_unset=True)).total <= 94


def test_deterministic_mode_runs_nothing_that_it_refuses_on_cuda() -> None:
    """Megatron's --deterministic-mode: torch's list has histc, bincount with weights, kthvalue and median."""
    settings = {**rejecting("token:k2:0.02:mean=0.02"), "metrics": "full", "rollout_log_prob_policy": "neutral"}
    usual = mp.correct(batch(8), mp.MismatchConfig(**settings)).statistics
    torch.use_deterministic_algorithms(True)
    try:
        found = correction(8, **settings)
        same = mp.correct(batch(8), mp.MismatchConfig(**settings)).statistics
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [name for name in found.kernels if name.startswith(("histc", "bincount", "kthvalue", "median"))]
    assert same.metrics() == usual.metrics() and same.thresholds() == usual.thresholds()


@pytest.mark.parametrize("criterion", FURTHER)
def test_kernels_for_a_further_criterion(criterion: str) -> None:
    assert correction(64, **rejecting(criterion)).total <= 110


def test_kernels_for_all_criteria_together() -> None:
    assert correction(64, **rejecting(*FURTHER)).total <= 100 + 10 * len(FURTHER)


@pytest.mark.parametrize(
    "criterion", [f"{criterion}@negative" for criterion in FURTHER] + [f"{c}@away" for c in TOKENS]
)
def test_kernels_for_a_condition(criterion: str) -> None:
    """Over the same criterion without one: its comparison, once for all of them the selection of the advantages and,
    for sequences, their sum."""
    found = correction(64, **rejecting(criterion), metrics="full")
    assert found.total <= correction(64, **rejecting(criterion.partition("@")[0]), metrics="full").total + 6
    assert not found.syncs


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_kernels_to_judge_the_current_policy(metrics: str) -> None:
    """Eight select its tokens, two sum its log-ratio; k3, whose sum the metrics have of π_train, costs five more."""
    for criteria, limit in (((), 12), (("sequence_mean:k3:0.1",), 17), (FURTHER, 20)):
        auto, current = rejecting(*criteria), rejecting(*criteria, policy="current")
        found = correction(64, **current, metrics=metrics)
        assert found.total <= correction(64, **auto, metrics=metrics).total + limit
        assert not found.syncs


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_kernels_for_staleness(metrics: str) -> None:
    found = correction(64, **rejecting(max_staleness=1), metrics=metrics)
    assert found.total <= correction(64, **rejecting(), metrics=metrics).total + 8
    assert not found.syncs


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_kernels_for_a_budget(metrics: str) -> None:
    """The histogram in every micro-batch, with the values of tokens again, and once a step the bound; no sync."""
    packed = batch(64)
    for criterion, limit in (("sequence_mean:k3:0.1", 9), ("token:binary_kl:0.5", 15)):
        plain = correction(64, **rejecting(criterion), metrics=metrics)
        settings = {**rejecting(f"{criterion}:share=0.1"), "metrics": metrics}
        config = mp.MismatchConfig(**settings)
        statistics = mp.correct(packed, config).statistics
        bound = count(statistics.thresholds)
        thresholds = statistics.thresholds()
        found = count(lambda c=config, t=thresholds: mp.correct(packed, c, thresholds=t))
        assert found.total <= plain.total + limit and bound.total <= 16, (criterion, found.total - plain.total)
        assert not found.syncs and not bound.syncs


@pytest.mark.parametrize("criteria", [(), ("token:k3:0.5",)])
def test_kernels_at_full(criteria: tuple[str, ...]) -> None:
    assert correction(64, **rejecting(*criteria), metrics="full").total <= 200


def test_metrics_off_costs_less() -> None:
    """No work for what is off."""
    assert correction(64, **rejecting(), metrics="off").total <= 60
    assert correction(64, metrics="off").total <= 41


@pytest.mark.parametrize(
    ("level", "mode", "metrics", "limit"),
    [
        ("turn", "truncate", "off", 75),
        ("turn", "truncate", "basic", 140),
        ("turn", "mask", "full", 235),
        ("prefix", "truncate", "off", 75),
        ("prefix", "truncate", "basic", 155),
        ("prefix", "mask", "full", 245),
    ],
)
def test_kernels_of_turns_and_prefixes(level: str, mode: str, metrics: str, limit: int) -> None:
    """Next to the sums per sequence those of every turn or chunk; of prefixes a second set of columns."""
    fields = {**rejecting(), "metrics": metrics, "tis": {"level": level, "mode": mode}}
    assert correction(64, **fields).total <= limit


@pytest.mark.parametrize(("level", "more"), [("sequence", 10), ("turn", 10), ("prefix", 20)])
def test_kernels_of_bounds_that_grow(level: str, more: int) -> None:
    """None where they do not."""
    totals = []
    for growth in ({}, {"bound_growth": 0.0}, {"bound_growth": 0.5}):
        tis = {"level": level, "upper_bound": 2.0, **growth}
        totals.append(correction(64, **{**rejecting(), "tis": tis}).total)
    assert totals[0] == totals[1] < totals[2] <= totals[0] + more


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric", "prefix"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_kernels_do_not_depend_on_the_number_of_sequences(metrics: str, level: str, mode: str) -> None:
    criteria = ("token:k3:0.5@away", "sequence_max:k2:1@negative")
    fields = {**rejecting(*criteria, **NEW), "metrics": metrics}
    fields["tis"] = {"level": level, "mode": mode, "batch_normalize": True}
    few, many = correction(8, **fields), correction(512, **fields)
    assert few.kernels == many.kernels
    assert not few.syncs and not many.syncs


@pytest.mark.parametrize("tis", [{"mode": "clip", "upper_bound_positive": 3.0}, {"mode": "gamma"}], ids=str)
def test_kernels_of_weights_by_sign(tis: dict[str, Any]) -> None:
    """Of the advantages and of a second pair of bounds; as many for any number of sequences, and no sync."""
    plain, few, many = (
        loss(number, 3, tis={"level": "sequence", **each}) for number, each in ((64, {}), (8, tis), (64, tis))
    )
    assert few.kernels == many.kernels and not many.syncs
    assert many.total <= plain.total + 12


@pytest.mark.parametrize("algorithm", [0, 1, 2, 3])
def test_policy_loss_has_no_host_sync(algorithm: int) -> None:
    config = mp.MismatchConfig(
        use_rollout_log_probs=bool(algorithm & 1),
        use_tis=bool(algorithm & 2),
        metrics="full",
        aggregation="seq-mean-token-mean",
        rs={"criteria": ["token:k3:0.5", "sequence_mean:ratio:0.9:1.1"], "veto_threshold": 1e-4},  # pyright: ignore[reportArgumentType]
    )
    packed = batch(64)
    assert packed.old_log_probs is not None
    log_probs = packed.old_log_probs.clone().requires_grad_()
    with OperationCounter() as counter:
        mp.policy_loss(log_probs, packed, config).loss_sum.backward()
    assert not counter.syncs


def loss(sequences: int, algorithm: int, **fields: Any) -> OperationCounter:
    """Of `policy_loss` and its backward pass."""
    config = mp.MismatchConfig(use_rollout_log_probs=bool(algorithm & 1), use_tis=bool(algorithm & 2), **fields)
    packed = batch(sequences)
    assert packed.old_log_probs is not None
    log_probs = packed.old_log_probs.clone().requires_grad_()
    with OperationCounter() as counter:
        mp.policy_loss(log_probs, packed, config).loss.backward()
    return counter


PENALTY = {"terms": {"rollout_kl_coef": 0.1, "rollout_kl_type": "k3"}}
LOSSES: dict[str, tuple[dict[str, Any], int]] = {  # settings, kernels more than PPO-clip takes
    "ppo": ({}, 0),
    "gspo": ({"objective": "gspo"}, 14),
    "cispo": ({"objective": "cispo"}, -25),
    "sapo": ({"objective": "sapo"}, 0),
    "gmpo": ({"objective": "gmpo"}, 20),
    "reinforce": ({"objective": "reinforce"}, -32),
    "distance to the sampler": (PENALTY, 32),
}
PPO_KERNELS = {"off": (96, 96, 100), "basic": (160, 150, 178)}
"""Of algorithms 0 to 2, forward and backward."""


@pytest.mark.parametrize("algorithm", [0, 1, 2])
@pytest.mark.parametrize("metrics", PPO_KERNELS)
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_of_the_loss(name: str, metrics: str, algorithm: int) -> None:
    fields, more = LOSSES[name]
    few, many = (loss(number, algorithm, metrics=metrics, **fields) for number in (8, 64))
    assert few.kernels == many.kernels and not many.syncs
    assert many.total <= PPO_KERNELS[metrics][algorithm] + more


def test_the_counter_sees_syncs() -> None:
    """The gate itself must be able to fail."""
    values = torch.ones(4)
    with OperationCounter() as counter:
        values[values > 0]
        values.sum().item()
        bool(values.any())
        values.nonzero()
    assert len(counter.syncs) >= 4


@pytest.mark.parametrize("level", ["turn", "prefix"])
def test_nothing_of_a_device_is_read(level: str) -> None:
    """Tensors without data: whoever reads one raises. The mask's turns are as many as there could be."""
    packed = batch(64).to("meta")
    config = mp.MismatchConfig(**{**rejecting("token:k3:0.5"), "tis": {"level": level, "mode": "mask"}})
    assert mp.correct(packed, config).weights.shape == packed.loss_mask.shape
    assert len(packed.units.sequence) == sum((length + 1) // 2 for length in packed.lengths)


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
@pytest.mark.parametrize(("level", "more"), [("token", 0), ("sequence", 0), ("turn", 4), ("prefix", 14)])
@pytest.mark.parametrize(
    ("condition", "rs", "floats"), [("", {}, 30), ("@away", NEW, 34)], ids=["old", "all that is new"]
)
def test_memory_is_at_most_thirty_floats_a_token(
    metrics: str, level: str, more: int, condition: str, rs: dict[str, Any], floats: int
) -> None:
    """Of many tokens, whose columns are summed one by one. π_θ apart from π_old takes ten more, every token's own
    product in float64 fourteen."""
    packed = batch(64, longest=4000)
    criteria = rejecting(f"token:binary_kl:0.5{condition}", **rs)
    config = mp.MismatchConfig(**{**criteria, "metrics": metrics, "tis": {"level": level, "mode": "mask"}})
    results = []
    counter = count(lambda: results.append(mp.correct(packed, config, log_probs=packed.old_log_probs)))
    assert results[0].keep.numel() == packed.loss_mask.numel()
    assert 4 <= counter.peak / packed.loss_mask.numel() / 4 <= floats + more
