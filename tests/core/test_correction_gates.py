"""Gates on the correction stage: kernels, host syncs, memory. Counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from examples.benchmarks.counting import OperationCounter, count
from mismatch_plugin.core.segments import histogram

FURTHER = (
    "sequence_sum:ratio:0.2:5", "sequence_max:ratio:0.2:5", "sequence_max:k2:0.5", "sequence_mean:k3:0.1",
    "sequence_mean:tv:0.2", "sequence_max:binary_kl:0.1", "sequence_mean:binary_kl_reverse:0.1", "token:ratio:0.2:5",
    "token:k3:0.5", "token:tv:0.5", "token:binary_kl:0.5",
)  # fmt: skip
LEVELS = ("token", "turn", "sequence", "geometric", "prefix")

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


def correction(sequences: int = 64, **fields: Any) -> OperationCounter:
    config, packed = mp.MismatchConfig(**fields), batch(sequences)
    return count(lambda: mp.correct(packed, config, log_probs=packed.old_log_probs))


def loss(sequences: int, algorithm: int = 3, **fields: Any) -> OperationCounter:
    """Of `policy_loss` and its backward pass."""
    config = mp.MismatchConfig(use_rollout_log_probs=bool(algorithm & 1), use_tis=bool(algorithm & 2), **fields)
    packed = batch(sequences)
    assert packed.old_log_probs is not None
    log_probs = packed.old_log_probs.clone().requires_grad_()
    with OperationCounter() as counter:
        mp.policy_loss(log_probs, packed, config).loss.backward()
    return counter


def rejecting(*criteria: str, tis: dict[str, Any] | None = None, metrics: str = "basic", **rs: Any) -> dict[str, Any]:
    chosen = {"criteria": ["sequence_mean:ratio:0.99:1.01", *criteria], "veto_threshold": 1e-4, **rs}
    return {"use_tis": True, "tis": tis or {"level": "sequence"}, "rs": chosen, "metrics": metrics}


LIMITS: list[tuple[dict[str, Any], int]] = [
    (rejecting(), 94),
    *((rejecting(criterion), 110) for criterion in FURTHER),
    (rejecting(*FURTHER), 100 + 10 * len(FURTHER)),
    # a condition its comparison and the advantages; the current policy's tokens, log-ratio and k3; staleness; growth
    (rejecting("token:k3:0.5@away"), 116),
    (rejecting("sequence_max:k2:0.5@negative"), 116),
    (rejecting("sequence_mean:k3:0.1", policy="current"), 127),
    (rejecting(max_staleness=1), 108),
    (rejecting(tis={"level": "sequence", "upper_bound": 2.0, "bound_growth": 0.5}), 110),
    (rejecting(tis={"mode": "gamma", "level": "sequence"}) | {"use_rollout_log_probs": True}, 112),
    (rejecting(metrics="full"), 200),
    (rejecting(metrics="off"), 60),  # no work for what is off
    ({"metrics": "off"}, 41),
    # next to the sums per sequence those of every turn or chunk; of prefixes a second set of columns
    (rejecting(tis={"level": "turn"}, metrics="off"), 75),
    (rejecting(tis={"level": "turn", "mode": "mask"}, metrics="full"), 235),
    (rejecting(tis={"level": "prefix"}, metrics="off"), 75),
    (rejecting(tis={"level": "prefix", "mode": "mask"}, metrics="full"), 245),
]


@pytest.mark.parametrize(("settings", "limit"), LIMITS, ids=str)
def test_kernels_at_most(settings: dict[str, Any], limit: int) -> None:
    found = correction(**settings)
    assert found.total <= limit and not found.syncs


def test_of_very_many_tokens_columns_are_summed_one_by_one() -> None:
    packed = batch(8, longest=80_000)
    assert len(packed.loss_mask) > 2**18
    found = count(lambda: mp.correct(packed, mp.MismatchConfig(**rejecting())))
    assert found.total <= 110 and not found.syncs


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_do_not_depend_on_the_number_of_sequences(metrics: str, level: str) -> None:
    criteria = ("token:k3:0.5@away", "sequence_max:k2:1@negative")
    for mode in ("truncate", "clip", "mask"):
        tis = {"level": level, "mode": mode, "batch_normalize": True}
        fields = rejecting(*criteria, tis=tis, metrics=metrics, policy="current", max_staleness=1)
        few, many = correction(8, **fields), correction(512, **fields)
        assert few.kernels == many.kernels
        assert not few.syncs and not many.syncs


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


def test_deterministic_mode_runs_nothing_that_it_refuses_on_cuda() -> None:
    """Megatron's --deterministic-mode: torch's list has histc, bincount with weights, kthvalue and median."""
    settings = rejecting("token:k2:0.02:mean=0.02", metrics="full")
    settings["rollout_log_prob_policy"] = "neutral"
    usual = mp.correct(batch(8), mp.MismatchConfig(**settings)).statistics
    torch.use_deterministic_algorithms(True)
    try:
        found = correction(8, **settings)
        same = mp.correct(batch(8), mp.MismatchConfig(**settings)).statistics
        counts = histogram(torch.tensor([-1.0, 0.0, 0.4, 0.9, 1.0, 2.0]), 4, 0.0, 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [name for name in found.kernels if name.startswith(("histc", "bincount", "kthvalue", "median"))]
    assert counts.tolist() == [1, 1, 0, 2], "as torch.histc: both edges are inside"
    assert same.metrics() == usual.metrics() and same.thresholds() == usual.thresholds()


@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
@pytest.mark.parametrize(("level", "more"), [("token", 0), ("sequence", 0), ("turn", 4), ("prefix", 14)])
def test_memory_is_at_most_thirty_floats_a_token(metrics: str, level: str, more: int) -> None:
    """Of so many tokens that columns are summed one by one. π_θ apart from π_old takes four more, turns of five tokens
    four, and every token's own product in float64 fourteen."""
    packed, tis = batch(64, longest=4000), {"level": level, "mode": "mask"}
    new = rejecting("token:binary_kl:0.5@away", tis=tis, metrics=metrics, policy="current", max_staleness=1)
    for settings, floats in ((rejecting("token:binary_kl:0.5", tis=tis, metrics=metrics), 30), (new, 34)):
        config, results = mp.MismatchConfig(**settings), []
        counter = count(lambda: results.append(mp.correct(packed, config, log_probs=packed.old_log_probs)))  # noqa: B023
        assert results[0].keep.numel() == packed.loss_mask.numel()
        assert 4 <= counter.peak / packed.loss_mask.numel() / 4 <= floats + more
