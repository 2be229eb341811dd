"""The gate: what it judges, what it lets pass, and what it says."""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.gate import DEFAULT_GATE_KL, GateError, check_gate


def packed(noise: float, mask: float = 1.0, rollout: Any = None) -> mp.PackedSequences:
    """Four sequences of 500 tokens whose log-ratio is Gaussian."""
    generator = torch.Generator().manual_seed(0)
    train = [-torch.rand(500, generator=generator, dtype=torch.float64) - 3.0 for _ in range(4)]
    return mp.PackedSequences.from_lists(
        old_log_probs=train,
        rollout_log_probs=[t - noise * torch.randn(500, generator=generator, dtype=torch.float64) for t in train]
        if rollout is None
        else [torch.full((500,), rollout, dtype=torch.float64)] * 4,
        loss_masks=[torch.full((500,), mask)] * 4,
    )


def metrics(data: mp.PackedSequences, **settings: Any) -> dict[str, float]:
    return mp.correct(data, mp.MismatchConfig(**settings)).statistics.metrics()


def test_a_step_at_the_bar_passes_and_one_above_it_fails() -> None:
    k3_kl = metrics(packed(0.05))["rollout_corr/k3_kl"]
    assert k3_kl == pytest.approx(0.05**2 / 2, rel=0.1)
    assert metrics(packed(0.05), gate_kl=k3_kl)["rollout_corr/k3_kl"] == k3_kl
    with pytest.raises(GateError, match=r"k3_kl 0.00134 nats per token is above the bar .* inspect on a dump"):
        metrics(packed(0.05), gate_kl=k3_kl * (1 - 1e-12))


@pytest.mark.parametrize(("noise", "passes"), [(0.015 * math.sqrt(math.pi / 2), True), (0.04, True), (0.132, False)])
def test_the_default_bar_tells_its_sources_apart(noise: float, passes: bool) -> None:
    """prime-rl's bar and a bf16 server (k3 8e-4) are below it, fp8 that is quantised differently (8.7e-3) above."""
    with nullcontext() if passes else pytest.raises(GateError):
        assert metrics(packed(noise), gate_kl=DEFAULT_GATE_KL)["rollout_corr/k3_kl"] <= DEFAULT_GATE_KL


def test_it_judges_the_merged_step_and_not_its_parts() -> None:
    loud, quiet = (mp.correct(packed(noise), mp.MismatchConfig(gate_kl=1e-3)).statistics for noise in (0.05, 0.01))
    with pytest.raises(GateError):
        loud.metrics()
    assert loud.merge(quiet).metrics()["rollout_corr/k3_kl"] < 1e-3 < float(loud.k3_kl())


def test_no_token_passes_and_no_valid_token_fails() -> None:
    assert metrics(packed(0.5, mask=0.0), gate_kl=1e-3)["rollout_corr/tokens"] == 0
    assert "rollout_corr/k3_kl" not in metrics(packed(0.5, rollout=-9999.0))
    with pytest.raises(GateError, match="no token has valid log-probs"):
        metrics(packed(0.5, rollout=-9999.0), gate_kl=1e-3)


def test_rejecting_everything_does_not_lower_it() -> None:
    with pytest.raises(GateError):
        metrics(packed(0.5), gate_kl=1e-3, rs={"criteria": ["token:ratio:50:60"]})


def test_without_rollout_log_probs_there_is_no_gate() -> None:
    data = packed(0.5).replace(rollout_log_probs=None)
    with pytest.raises(ValueError, match="rollout_log_probs is missing"):
        metrics(data, gate_kl=1e-3)
    metrics(data)


def test_the_error_names_the_step_and_crosses_processes() -> None:
    with pytest.raises(GateError, match=r"^step 3: k3_kl 0.02 nats per token is above") as found:
        check_gate(0.02, 0.01, 3)
    copy = pickle.loads(pickle.dumps(found.value))  # as Ray does
    assert type(copy) is GateError and str(copy) == str(found.value)
    check_gate(0.01, 0.01, 3)
    with pytest.raises(GateError, match="cannot be compared"):
        check_gate(math.nan, 0.01)
    with pytest.raises(GateError, match="k3_kl inf"):
        check_gate(math.inf, 0.01)


@pytest.mark.parametrize("policy", ["neutral", "drop-token", "drop-sequence"])
def test_a_step_without_one_valid_log_prob_fails_whatever_becomes_of_them(policy: str) -> None:
    settings: dict[str, Any] = {"use_tis": True, "rollout_log_prob_policy": policy, "gate_kl": 1e-3}
    with pytest.raises(GateError, match="no token has valid log-probs"):
        metrics(packed(0.0, rollout=-math.inf), **settings)
    metrics(packed(0.0), **settings)
