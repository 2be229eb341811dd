"""Comparing what the ranks of a layout got with one process, and two ways of running the host with each other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from tests.hosts.contracts import miles as miles_contract
from tests.hosts.contracts import slime as slime_contract
from tests.hosts.contracts.slime_data import STEPS, arguments, expected
from tests.hosts.contracts.slime_worker import Case, Outcome

HAND_LAYOUTS = {"one": (1, 1, 1), "cp2": (1, 2, 2), "cp2 dp2": (1, 2, 4), "cp4": (1, 4, 4)}  # tp, cp, processes
HOST_LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 1, 2), "cp2": (1, 2, 2), "tp2 cp2": (2, 2, 4), "cp2 dp2": (1, 2, 4)}

GRADIENT_TOLERANCE = {"slime": (2e-5, 2e-6), "miles": (8e-3, 2e-5)}
"""Relative, absolute. miles takes megatron's fused cross entropy, whose gradient by logits is rounded to bfloat16."""


def compare(outcomes: list[list[Outcome]], case: Case, adapter: Any, by_logits: bool) -> None:
    """All ranks' outcomes of one case against one process, step by step: loss, gradient, every metric of the step."""
    contract = slime_contract if case.host == "slime" else miles_contract
    args = arguments(contract.namespace(), **case.changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        config = adapter.settings(args)
    normalizes = config.weighted and config.tis.batch_normalize
    # The loss is reported before its gradients are divided by the mean weight.
    deferred = normalizes and (config.use_rollout_log_probs or not case.old or case.host == "miles")
    for step in range(STEPS):
        wanted = expected(args, config, step, case.old, case.shared)
        gradient = wanted.by_logits if by_logits else wanted.by_log_probs
        for rank in outcomes:
            outcome = rank[step]
            assert outcome.error == ""
            relative, absolute = GRADIENT_TOLERANCE[case.host]
            torch.testing.assert_close(outcome.gradient, gradient, rtol=relative, atol=absolute)
            if not deferred:
                assert outcome.loss == pytest.approx(wanted.loss, rel=2e-5, abs=1e-6)
            if case.hooks:
                shared = wanted.metrics.keys() & outcome.metrics.keys()
                assert len(shared) > 30
                for name in shared:
                    assert outcome.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-5), name


def same(ours: list[list[Outcome]], theirs: list[list[Outcome]], host: str = "slime") -> None:
    """Two runs of the host: the same loss and gradients in every step, on every rank."""
    for mine, other in zip(ours, theirs, strict=True):
        for step in range(STEPS):
            assert mine[step].error == other[step].error == ""
            assert float(other[step].gradient.abs().max()) > 0
            relative, absolute = GRADIENT_TOLERANCE[host]
            torch.testing.assert_close(mine[step].gradient, other[step].gradient, rtol=relative, atol=absolute / 10)
            assert mine[step].loss == pytest.approx(other[step].loss, rel=1e-5, abs=1e-7)
