"""The end of a step in slime's adapter: on every rank of every pipeline stage, whatever that rank holds."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mismatch_plugin.hooks import slime
from tests.distributed.launch import launch
from tests.hosts.contracts import slime as contract
from tests.hosts.contracts.slime_cases import custom, ours, weights
from tests.hosts.contracts.slime_data import arguments, samples
from tests.hosts.contracts.slime_worker import Model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


@dataclass(frozen=True)
class Bad:
    """A layout, and which rank's rollout log-probs hold a NaN (−1: none)."""

    pp: int
    cp: int
    rank: int
    changes: dict[str, Any]


def run(case: Bad) -> dict[str, Any]:
    """One step of one sample on each data-parallel rank; with a pipeline the loss runs on the last stage alone."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp, context_parallel_size=case.cp)
    slime.ADAPTER.run.log = lambda args, metrics: None
    rank = torch.distributed.get_rank()
    args, model = arguments(contract.namespace(), **case.changes), Model()
    sample = samples()[1]
    slime.before_train_step(args, 0, 0, [model], None, None)
    if parallel_state.is_pipeline_last_stage():
        from tests.hosts.contracts.slime_data import owned

        at = owned(sample.total, sample.prompt, case.cp, parallel_state.get_context_parallel_rank())
        rollout = sample.rows["rollout_log_probs"][at].clone()
        if rank == case.rank:
            rollout[int(sample.rows["loss_masks"][at].nonzero()[0])] = math.nan
        batch = {
            "loss_masks": [sample.rows["loss_masks"]],
            "total_lengths": [sample.total],
            "response_lengths": [sample.response],
            "rollout_log_probs": [rollout],
            "advantages": [sample.rows["advantages"][at]],
        }
        log_probs = [sample.log_probs[at].requires_grad_()]
        slime.ADAPTER.loss(args, batch, log_probs, None, lambda x: x.sum())
    error = ""
    try:
        model.config.finalize_model_grads_func([model])
    except ValueError as fault:
        error = str(fault)
    return {"error": error, "scale": model.scale, "metrics": slime.ADAPTER.run.metrics if not error else {}}


_THREE = {**custom("slime"), **ours(3, weights("sequence", "truncate", batch_normalize=True))}


@pytest.mark.parametrize(("pp", "cp", "processes"), [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 4)])
def test_a_bad_log_prob_anywhere_fails_the_step_everywhere(pp: int, cp: int, processes: int):
    (results,) = launch(run, [Bad(pp, cp, processes - 1, _THREE)], processes)
    for result in results:
        assert "rollout-log-prob-policy" in result["error"]
    assert any("sequence 0, position" in result["error"] for result in results)


@pytest.mark.parametrize(("pp", "cp", "processes"), [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 4)])
def test_the_mean_weight_reaches_every_stage(pp: int, cp: int, processes: int):
    (results,) = launch(run, [Bad(pp, cp, -1, _THREE)], processes)
    sample = samples()[1]
    mask = sample.rows["loss_masks"].bool()
    log_ratio = (sample.log_probs - sample.rows["rollout_log_probs"])[mask].sum()
    weight = min(math.exp(float(log_ratio)), 2.5)  # one sequence: the mean is its weight
    assert weight != pytest.approx(1.0, abs=1e-2)
    for rank, result in enumerate(results):
        assert result["error"] == ""
        assert result["scale"] == pytest.approx(1.0 / weight, rel=1e-5)
        assert bool(result["metrics"]) == (rank >= processes - processes // pp)
