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

from mismatch_plugin.core.health import GateError
from mismatch_plugin.hooks import slime
from tests.distributed.launch import launch
from tests.full import FULL
from tests.hooks.contracts.slime_data import (
    Model,
    arguments,
    batch_of,
    custom,
    initialize,
    ours,
    samples,
    stepped,
    weights,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


@dataclass(frozen=True)
class Odd:
    """What the last rank of a layout does unlike the others ("": nothing). hooked: slime calls the rollout's hook."""

    pp: int
    cp: int
    plant: str = ""
    algorithm: int = 2
    hooked: bool = True
    gate_kl: float | None = None


def run(case: Odd) -> dict[str, Any]:
    """A step of one sample on each data-parallel rank; with a pipeline the loss runs on the last stage alone.

    error: what the rollout's hook, the step's beginning or its end raise.
    """
    state = initialize(case.cp, 1, case.pp)
    slime.ADAPTER.__init__()
    slime.ADAPTER.log = lambda args, metrics: None
    plant = case.plant if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 else ""
    last = state.is_pipeline_last_stage()
    tis = weights("sequence", "truncate", batch_normalize=True) if case.algorithm else None
    if plant == "other configuration":
        tis = {**(tis or {}), "upper_bound": 9.0}
    args = arguments(**custom("slime"), **stepped("slime"), **ours(case.algorithm, tis, gate_kl=case.gate_kl))
    data = batch_of([1], case.cp, state.get_context_parallel_rank())
    data |= {"micro_batch_indices": [[0]], "num_microbatches": [1]}
    if plant == "a NaN":
        rollout = data["rollout_log_probs"][0]
        data["rollout_log_probs"] = [torch.full_like(rollout, math.nan)]
    data |= {
        "no rollout log-probs": {"rollout_log_probs": None},
        "a mask too short": {"loss_masks": [samples()[1].rows["loss_masks"][1:]]},
        "more steps": {"num_microbatches": [1, 1], "micro_batch_indices": [[0], [0]]},
    }.get(plant, {})
    if not last:
        data["log_probs"] = None
    error, logged, model, handler = "", list[str](), Model(), logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("mismatch_plugin").addHandler(handler)
    try:
        if case.hooked:
            slime.rollout_data_postprocess(args, 0, data)
        slime.before_train_step(args, 0, 0, [model], None, None)
        if last:
            theta = batch_of([1], case.cp, state.get_context_parallel_rank())["ref_log_probs"]
            slime.ADAPTER.loss(args, data, theta, None, lambda values: values.sum())
        model.config.finalize_model_grads_func([model])
    except (ValueError, GateError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    finally:
        logging.getLogger("mismatch_plugin").removeHandler(handler)
    return {"error": error, "logged": logged, "scale": model.scale, "metrics": slime.ADAPTER.run.metrics}


EVERY = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 4)]  # pipeline, context, processes
PLANTS = {
    "other configuration": "tis.upper_bound",
    "no rollout log-probs": "the rollout batch has no rollout_log_probs",
    "more steps": "optimizer_steps",
    "a mask too short": "the mask must cover the whole response",
}


@cache
def found(pp: int, cp: int, processes: int) -> dict[Odd, list[dict[str, Any]]]:
    """Every case of a layout, in one launch.

    Without the rollout's hook (miles has no data in it) the step's beginning compares configurations. What else ranks
    may not differ in is in tests/parallel/test_agreement.
    """
    cases = [Odd(pp, cp), Odd(pp, cp, algorithm=3, hooked=False), Odd(pp, cp, "a NaN", algorithm=3, hooked=False)]
    cases += [Odd(pp, cp, algorithm=3, hooked=False, gate_kl=bar) for bar in (1e-9, 1e3)]
    if processes > 1:
        cases.append(Odd(pp, cp, "other configuration", hooked=False))
        cases += [Odd(pp, cp, plant) for plant in PLANTS]
    if (pp, cp, processes) == (1, 1, 2):
        cases.append(Odd(1, 1, "no rollout log-probs", algorithm=0, hooked=False))
    return dict(zip(cases, launch(run, cases, processes, timeout=20.0), strict=True))


def scale_of(case: Odd) -> float:
    """Of the gradients: 1 over the mean weight, which with one sequence is its weight."""
    rows = samples()[1].rows
    log_ratio = (rows["ref_log_probs"] - rows["rollout_log_probs"])[rows["loss_masks"].bool()].sum()
    weight = min(math.exp(float(log_ratio)), 2.5)
    assert weight != pytest.approx(1.0, abs=1e-2)
    return 1.0 / weight if case.algorithm == 3 else 1.0


@pytest.mark.parametrize(("pp", "cp", "processes"), EVERY if FULL else [(1, 1, 2), (2, 2, 4)])
def test_every_rank_of_every_stage_ends_a_step_alike(pp: int, cp: int, processes: int) -> None:
    for case, results in found(pp, cp, processes).items():
        errors = [result["error"] for result in results]
        if case.plant == "a NaN":  # Ray shows one rank's error: the rank that knows the place has it in its log
            placed = ["sequence 0, position" in error for error in errors]
            assert any(placed) and all("rollout-log-prob-policy" in error for error in errors)
            for result, here in zip(results, placed, strict=True):
                starts = [message.startswith("step 0: rollout log-prob of sequence 0") for message in result["logged"]]
                assert starts == [True] * here
        elif case.plant:
            (sentence,) = {*errors}
            if case.algorithm == 0:  # measures ratios where a rank has rollout log-probs, and rank 1 has none
                assert "rank 0 has " in sentence and "rank 1 has no " in sentence
            else:
                assert sentence.startswith("ValueError: ") and PLANTS[case.plant] in sentence, case
                assert f"rank {processes - 1}" in sentence
        elif case.gate_kl == 1e-9:
            assert all(error.startswith("GateError: step 0: k3_kl") for error in errors), errors
        else:
            assert {*errors} == {""}, case
            assert [result["scale"] for result in results] == [pytest.approx(scale_of(case), rel=1e-5)] * processes
            assert [bool(result["metrics"]) for result in results] == [
                rank >= processes - processes // pp for rank in range(processes)
            ]
