"""Vocab-parallel log-probs over two and four gloo processes equal one process; one collective; megatron-core agrees.

One launch per number of processes runs all cases; `log_probs_worker.py` is what each rank does.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.distributed.launch import launch
from tests.distributed.log_probs_worker import NAMES, forward_backward, make, run, run_megatron

Results = tuple[int, dict[str, list[dict[str, Any]]]]

# Values in float32 for half precision too; its gradient is rounded once.
VALUE_TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-6}
GRADIENT_TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8}


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp4"])
def parallel(request: pytest.FixtureRequest) -> Results:
    return request.param, dict(zip(NAMES, launch(run, NAMES, request.param), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(parallel: Results, name: str):
    ranks, expected = parallel[1][name], forward_backward(make(name))
    for key in ("log_probs", "entropy"):
        tolerance = VALUE_TOLERANCE.get(name, 1e-12)
        assert_close(ranks[0][key], expected[key], rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks), "the losses of the ranks would drift apart"
    gradient = torch.cat([rank["gradient"] for rank in ranks], 1)
    tolerance = GRADIENT_TOLERANCE.get(name, 1e-12)
    assert_close(gradient, expected["gradient"], rtol=tolerance, atol=tolerance)
    assert torch.equal(gradient == 0, expected["gradient"] == 0) or name in ("apart", *GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_one_all_gather_of_four_floats_a_target(parallel: Results, name: str):
    world_size, results = parallel
    inputs = make(name)
    item = 4 if name in ("float32", "bfloat16") else 8
    for rank in results[name]:
        assert [size for _, size in rank["forward"]] == [world_size * 4 * len(inputs.targets) * item]
        assert "allgather" in rank["forward"][0][0]
        assert rank["backward"] == []
        assert rank["unchanged"] == (name != "inplace")


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_backend_agrees():
    cases = [(name, tp_size) for tp_size in (1, 2) for name in ("float32", "bfloat16", "prepared")]
    for (name, tp_size), ranks in zip(cases, launch(run_megatron, cases, 2), strict=True):
        for rank in ranks:
            ours, theirs = rank["torch"], rank["megatron"]
            assert theirs["unchanged"], "megatron-core overwrites float32 logits: it must get a copy"
            assert_close(theirs["log_probs"], ours["log_probs"], rtol=1e-6, atol=1e-6)
            tolerance = GRADIENT_TOLERANCE.get(name, 1e-6)
            assert_close(theirs["gradient"], ours["gradient"], rtol=tolerance, atol=tolerance)
            assert len(theirs["forward"]) == 3 and len(ours["forward"]) == tp_size - 1
            assert "tp_group is another: pass that one" in rank["refused"]
