"""Beginning and end of a step in slime's adapter: on every rank of every pipeline stage, whatever that rank holds."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mismatch_plugin.hooks import slime
from tests.distributed.launch import launch
from tests.hooks.contracts import slime as contract
from tests.hooks.contracts.slime_cases import custom, ours, weights
from tests.hooks.contracts.slime_data import arguments, owned, samples
from tests.hooks.contracts.slime_worker import Model

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


# Ranks that do not bring the same to a rollout ------------------------------------------------------------------------

PLANTS = {
    "other configuration": "tis.upper_bound",
    "no rollout log-probs": "the rollout batch has no rollout_log_probs",
    "no old log-probs": "old_log_probs",
    "more samples": "sequences in micro-batch 0",
    "more micro-batches": "numbers of micro-batches",
    "more steps": "optimizer_steps",
    "a mask too short": "the mask must cover the whole response",
}
LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 4)]
_TWO = {**custom("slime"), **ours(2, weights("sequence", "truncate", batch_normalize=True))}


@dataclass(frozen=True)
class Odd:
    """What `rank` of a layout does unlike the others. hooked: slime calls the rollout's hook."""

    pp: int
    cp: int
    rank: int
    plant: str
    hooked: bool = True


def begin(case: Odd) -> str:
    """What the rollout's hook, the step's beginning or its end raise."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp, context_parallel_size=case.cp)
    slime.ADAPTER.run.log = lambda args, metrics: None
    odd, last = torch.distributed.get_rank() == case.rank, parallel_state.is_pipeline_last_stage()
    changes = _TWO
    if odd and case.plant == "other configuration":
        changes = {**custom("slime"), **ours(2, weights("sequence", "truncate", batch_normalize=True, upper_bound=9.0))}
    args, model, sample = arguments(contract.namespace(), **changes), Model(), samples()[1]
    at = owned(sample.total, sample.prompt, case.cp, parallel_state.get_context_parallel_rank())
    count = 2 if odd and case.plant == "more samples" else 1
    data: dict[str, Any] = {
        "loss_masks": [sample.rows["loss_masks"]] * count,
        "total_lengths": [sample.total] * count,
        "response_lengths": [sample.response] * count,
        "rollout_log_probs": [sample.rows["rollout_log_probs"][at]] * count,
        "log_probs": [sample.rows["log_probs"][at]] * count if last else None,
        "micro_batch_indices": [list(range(count))],
        "num_microbatches": [1],
    }
    if odd:
        data |= {
            "no rollout log-probs": {"rollout_log_probs": None},
            "no old log-probs": {"log_probs": None},
            "a mask too short": {"loss_masks": [sample.rows["loss_masks"][1:]]},
            "more micro-batches": {"num_microbatches": [2], "micro_batch_indices": [[0], [0]]},
            "more steps": {"num_microbatches": [1, 1], "micro_batch_indices": [[0], [0]]},
        }.get(case.plant, {})
    try:
        if case.hooked:
            slime.rollout_data_postprocess(args, 0, data)
        slime.before_train_step(args, 0, 0, [model], None, None)
        batch = {**data, "advantages": [sample.rows["advantages"][at]] * count}
        if last:
            slime.ADAPTER.loss(args, batch, [sample.log_probs[at]] * count, None, lambda x: x.sum())
        model.config.finalize_model_grads_func([model])
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def planted(pp: int, cp: int, processes: int) -> dict[Odd, str]:
    """Replicas may hold other samples and, in their own steps, other numbers of micro-batches."""
    words = dict(PLANTS)
    if processes == pp:  # the last stage is one rank: it has none to differ from
        del words["no old log-probs"]
    if cp == 1:
        del words["more samples"]
    if pp * cp == 1:
        del words["more micro-batches"]
    return {Odd(pp, cp, processes - 1, plant): word for plant, word in words.items()}


@pytest.mark.parametrize(("pp", "cp", "processes"), LAYOUTS)
def test_ranks_that_differ_are_named_before_the_rollout_s_steps(pp: int, cp: int, processes: int):
    """Without the rollout's hook (miles has no data in it) the step's beginning compares configurations."""
    late = {Odd(pp, cp, processes - 1, "other configuration", False): PLANTS["other configuration"]}
    cases = {**late, **planted(pp, cp, processes), Odd(pp, cp, -1, "nothing"): ""}
    for (case, word), said in zip(cases.items(), launch(begin, list(cases), processes, timeout=20.0), strict=True):
        (sentence,) = set(said)
        if not word:
            assert sentence == "nothing"
        else:
            assert sentence.startswith("ValueError: ") and word in sentence and f"rank {case.rank}" in sentence, case


def test_without_the_rollout_s_hook_other_fields_are_named_at_the_step_s_end():
    ranks = launch(begin_without_ratios, [0], 2, timeout=20.0)[0]
    (sentence,) = set(ranks)
    assert "rank 0 has " in sentence and "rank 1 does not" in sentence and "All micro-batches of a step" in sentence


def begin_without_ratios(_: int) -> str:
    """Algorithm 0 measures ratios where a rank has rollout log-probs, and rank 1 has none."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    slime.ADAPTER.run.log = lambda args, metrics: None
    args, model = arguments(contract.namespace(), **custom("slime"), **ours(0)), Model()
    sample = samples()[1]
    batch: dict[str, Any] = {
        "loss_masks": [sample.rows["loss_masks"]],
        "total_lengths": [sample.total],
        "response_lengths": [sample.response],
        "advantages": [sample.rows["advantages"]],
        "rollout_log_probs": [sample.rows["rollout_log_probs"]] if torch.distributed.get_rank() == 0 else None,
    }
    try:
        slime.before_train_step(args, 0, 0, [model], None, None)
        slime.ADAPTER.loss(args, batch, [sample.log_probs], None, lambda x: x.sum())
        model.config.finalize_model_grads_func([model])
    except ValueError as error:
        return str(error)
    return "nothing"
