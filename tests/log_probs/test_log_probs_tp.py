"""Log-probs from logits and from hidden states over two and four gloo processes equal one process; their collectives;
megatron-core agrees.

One launch per number of processes runs all cases; `log_probs_worker.py` and `linear_log_probs_worker.py` are what each
rank does.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mismatch_plugin.log_probs import vocab_parallel_log_probs
from tests.distributed import linear_log_probs_worker as linear
from tests.distributed.launch import launch
from tests.distributed.log_probs_worker import NAMES, forward_backward, make, run, run_megatron

# Values in float32 for half precision too; its gradient is rounded once.
VALUE_TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-6}
GRADIENT_TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8}


def work(job: tuple[str, str]) -> dict[str, Any]:
    kind, name = job
    return linear.run(name) if kind == "linear" else run(name)


@cache
def launched(size: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What every rank has of each (kind, name)."""
    jobs = [("linear", name) for name in linear.NAMES] + [("logits", name) for name in NAMES if size > 1]
    return dict(zip(jobs, launch(work, jobs, size), strict=True))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(world: int, name: str) -> None:
    ranks, expected = launched(world)["logits", name], forward_backward(make(name))
    for key in ("log_probs", "entropy"):
        tolerance = VALUE_TOLERANCE.get(name, 1e-12)
        assert_close(ranks[0][key], expected[key], rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks), "the losses of the ranks would drift apart"
    gradient = torch.cat([rank["gradient"] for rank in ranks], 1)
    tolerance = GRADIENT_TOLERANCE.get(name, 1e-12)
    assert_close(gradient, expected["gradient"], rtol=tolerance, atol=tolerance)
    assert torch.equal(gradient == 0, expected["gradient"] == 0) or name in ("apart", *GRADIENT_TOLERANCE)
    item = 4 if name in ("float32", "bfloat16") else 8
    for rank in ranks:  # one all-gather of four floats a target
        assert [size for _, size in rank["forward"]] == [world * 4 * len(make(name).targets) * item]
        assert "allgather" in rank["forward"][0][0] and rank["backward"] == []
        assert rank["unchanged"] == (name != "inplace")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", linear.NAMES)
def test_from_hidden_states_equals_whole_logits_in_one_process(size: int, name: str) -> None:
    ranks = launched(size)["linear", name]
    hidden, weight, targets, upstream, options = linear.make(name)
    rows, tolerance = options.pop("rows", None), 2e-6 if name == "float32" else 1e-12
    del options["chunk_rows"]
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    picked = hidden if rows is None else hidden[rows]
    log_probs, entropy = vocab_parallel_log_probs(picked @ weight.t(), targets, **options)
    assert entropy is not None
    loss = (log_probs * upstream[0]).sum()
    if entropy.requires_grad:
        loss = loss + (entropy * upstream[1]).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, inputs)
    for key, expected in {"log_probs": log_probs, "entropy": entropy}.items():
        assert_close(ranks[0][key], expected.detach(), rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks), "the losses of the ranks would drift apart"
    assert_close(torch.cat([rank["weight"] for rank in ranks]), grad_weight, rtol=tolerance, atol=tolerance)
    parts = [torch.cat([r["hidden"] for r in ranks])] if name.startswith("seq") else [r["hidden"] for r in ranks]
    for part in parts:
        assert_close(part, grad_hidden, rtol=tolerance, atol=tolerance)
    # One all-gather and one sum, whatever the number of chunks: (kind, bytes) of each.
    item = 4 if name == "float32" else 8
    statistics, whole = size * 4 * len(targets) * item, linear.TOKENS * linear.HIDDEN * item
    expected = [[("allgather", statistics)], [("allreduce", len(targets) * linear.HIDDEN * item)]]
    if name.startswith("sequence"):
        expected = [[("allgather", whole), ("allgather", statistics)], [("allgather", whole), ("reducesca", whole)]]
    for rank in ranks:
        ways = [[(kind.split(".")[0].replace("_", ""), n) for kind, n in rank[way]] for way in ("forward", "backward")]
        found = [[("reducesca" if "scatter" in kind else kind[:9], n) for kind, n in way] for way in ways]
        assert found == ([[], []] if size == 1 else expected)


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
