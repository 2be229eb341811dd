"""Beginning and end of a step in slime's adapter: on every rank of every pipeline stage, whatever that rank holds."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from mismatch_plugin.core.gate import GateError
from mismatch_plugin.hooks import slime
from tests.distributed.launch import launch
from tests.full import FULL
from tests.hooks.contracts.slime_cases import custom, ours, weights
from tests.hooks.contracts.slime_data import arguments, owned, samples
from tests.hooks.contracts.slime_worker import Model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


@dataclass(frozen=True)
class Odd:
    """What `rank` of a layout does unlike the others (−1: none does). hooked: slime calls the rollout's hook."""

    pp: int
    cp: int
    rank: int
    plant: str = ""
    algorithm: int = 2
    hooked: bool = True
    gate_kl: float | None = None


def run(case: Odd) -> dict[str, Any]:
    """A step of one sample on each data-parallel rank; with a pipeline the loss runs on the last stage alone.

    error: what the rollout's hook, the step's beginning or its end raise.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp, context_parallel_size=case.cp)
    slime.ADAPTER.__init__()
    slime.ADAPTER.log = lambda args, metrics: None
    plant = case.plant if torch.distributed.get_rank() == case.rank else ""
    last = parallel_state.is_pipeline_last_stage()
    tis = weights("sequence", "truncate", batch_normalize=True) if case.algorithm else None
    if plant == "other configuration":
        tis = {**(tis or {}), "upper_bound": 9.0}
    args = arguments(**custom("slime"), **ours(case.algorithm, tis, gate_kl=case.gate_kl))
    sample, model, count = samples()[1], Model(), 2 if plant == "more samples" else 1
    at = owned(sample.total, sample.prompt, case.cp, parallel_state.get_context_parallel_rank())
    rollout = sample.rows["rollout_log_probs"][at].clone()
    if plant == "a NaN" and last:
        rollout[int(sample.rows["loss_masks"][at].nonzero()[0])] = math.nan
    data: dict[str, Any] = {
        "loss_masks": [sample.rows["loss_masks"]] * count,
        "total_lengths": [sample.total] * count,
        "response_lengths": [sample.response] * count,
        "rollout_log_probs": [rollout] * count,
        "log_probs": [sample.rows["log_probs"][at]] * count if last else None,
        "micro_batch_indices": [list(range(count))],
        "num_microbatches": [1],
    }
    data |= {
        "no rollout log-probs": {"rollout_log_probs": None},
        "no old log-probs": {"log_probs": None},
        "a mask too short": {"loss_masks": [sample.rows["loss_masks"][1:]]},
        "more micro-batches": {"num_microbatches": [2], "micro_batch_indices": [[0], [0]]},
        "more steps": {"num_microbatches": [1, 1], "micro_batch_indices": [[0], [0]]},
    }.get(plant, {})
    error, logged, handler = "", list[str](), logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("mismatch_plugin").addHandler(handler)
    try:
        if case.hooked:
            slime.rollout_data_postprocess(args, 0, data)
        slime.before_train_step(args, 0, 0, [model], None, None)
        if last:
            batch = {**data, "advantages": [sample.rows["advantages"][at]] * count}
            slime.ADAPTER.loss(args, batch, [sample.log_probs[at]] * count, None, lambda x: x.sum())
        model.config.finalize_model_grads_func([model])
    except (ValueError, GateError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    finally:
        logging.getLogger("mismatch_plugin").removeHandler(handler)
    return {"error": error, "logged": logged, "scale": model.scale, "metrics": slime.ADAPTER.run.metrics}


EVERY = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 4)]  # pipeline, context, processes
LAYOUTS = EVERY if FULL else [(1, 1, 2), (2, 2, 4)]
PLANTS = {
    "other configuration": "tis.upper_bound",
    "no rollout log-probs": "the rollout batch has no rollout_log_probs",
    "no old log-probs": "old_log_probs",
    "more samples": "sequences in micro-batch 0",
    "more micro-batches": "numbers of micro-batches",
    "more steps": "optimizer_steps",
    "a mask too short": "the mask must cover the whole response",
}
Results = list[dict[str, Any]]


@cache
def found(pp: int, cp: int, processes: int) -> dict[Odd, Results]:
    """Every case of a layout, in one launch.

    Replicas may hold other samples and, in their own steps, other numbers of micro-batches. Without the rollout's hook
    (miles has no data in it) the step's beginning compares configurations.
    """
    last = processes - 1
    allowed = {
        "no old log-probs": processes == pp,  # the last stage is one rank: it has none to differ from
        "more samples": cp == 1,
        "more micro-batches": pp * cp == 1,
    }
    cases = [Odd(pp, cp, -1), Odd(pp, cp, -1, algorithm=3, hooked=False)]
    cases += [Odd(pp, cp, -1, algorithm=3, hooked=False, gate_kl=bar) for bar in (1e-9, 1e3)]
    cases.append(Odd(pp, cp, last, "a NaN", algorithm=3, hooked=False))
    if processes > 1:
        cases.append(Odd(pp, cp, last, "other configuration", hooked=False))
        cases += [Odd(pp, cp, last, plant) for plant in PLANTS if not allowed.get(plant)]
    if (pp, cp, processes) == (1, 1, 2):
        cases.append(Odd(1, 1, 1, "no rollout log-probs", algorithm=0, hooked=False))
    return dict(zip(cases, launch(run, cases, processes, timeout=20.0), strict=True))


def scale_of(case: Odd) -> float:
    """Of the gradients: 1 over the mean weight, which with one sequence is its weight."""
    sample = samples()[1]
    mask = sample.rows["loss_masks"].bool()
    log_ratio = (sample.log_probs - sample.rows["rollout_log_probs"])[mask].sum()
    weight = min(math.exp(float(log_ratio)), 2.5)
    assert weight != pytest.approx(1.0, abs=1e-2)
    return 1.0 / weight if case.algorithm == 3 else 1.0


@pytest.mark.parametrize(("pp", "cp", "processes"), LAYOUTS)
def test_every_rank_of_every_stage_ends_a_step_alike(pp: int, cp: int, processes: int) -> None:
    for case, results in found(pp, cp, processes).items():
        if case.plant:
            continue
        for rank, result in enumerate(results):
            if case.gate_kl == 1e-9:
                assert result["error"].startswith("GateError: step 0: k3_kl") and result["scale"] == 1.0
                continue
            assert result["error"] == "", case
            assert result["scale"] == pytest.approx(scale_of(case), rel=1e-5), case
            assert bool(result["metrics"]) == (rank >= processes - processes // pp)


@pytest.mark.parametrize(("pp", "cp", "processes"), LAYOUTS)
def test_a_bad_log_prob_anywhere_fails_the_step_everywhere(pp: int, cp: int, processes: int) -> None:
    """Ray shows one rank's error: the rank that knows the place has it in its log."""
    (results,) = [results for case, results in found(pp, cp, processes).items() if case.plant == "a NaN"]
    placed = ["sequence 0, position" in result["error"] for result in results]
    assert any(placed) and all("rollout-log-prob-policy" in result["error"] for result in results)
    for result, here in zip(results, placed, strict=True):
        starts = [message.startswith("step 0: rollout log-prob of sequence 0") for message in result["logged"]]
        assert starts == [True] * here


@pytest.mark.parametrize(("pp", "cp", "processes"), [layout for layout in LAYOUTS if layout[2] > 1])
def test_ranks_that_differ_are_named_before_the_rollout_s_steps(pp: int, cp: int, processes: int) -> None:
    odd = {case: results for case, results in found(pp, cp, processes).items() if case.plant in PLANTS}
    assert len(odd) >= 5
    for case, results in odd.items():
        (sentence,) = {result["error"] for result in results}
        if case.algorithm == 0:  # measures ratios where a rank has rollout log-probs, and rank 1 has none
            assert "rank 0 has " in sentence and "rank 1 has no " in sentence
            assert "All micro-batches of a step" in sentence
            continue
        assert sentence.startswith("ValueError: ") and PLANTS[case.plant] in sentence, case
        assert f"rank {case.rank}" in sentence
