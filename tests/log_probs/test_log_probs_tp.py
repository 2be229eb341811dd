"""Log-probs from logits and from hidden states over two and four gloo processes equal one process; their collectives;
megatron-core agrees. `log_probs_worker.py` is what each rank does, in one launch per number of processes.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mismatch_plugin.log_probs import vocab_parallel_log_probs
from tests.distributed.launch import launch
from tests.distributed.log_probs_worker import (
    FROM_HIDDEN,
    FROM_LOGITS,
    HIDDEN,
    TOKENS,
    from_logits,
    make,
    outcome,
    run,
    run_megatron,
)

CASES = [("logits", name) for name in FROM_LOGITS] + [("hidden", name) for name in FROM_HIDDEN]


@cache
def launched(size: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return dict(zip(CASES, launch(run, CASES, size), strict=True))


def in_one_process(kind: str, name: str) -> dict[str, Any]:
    """From logits too where the ranks have hidden states."""
    inputs = make(name)
    if kind == "logits":
        return from_logits(inputs)
    rows = inputs.options.pop("rows", torch.arange(TOKENS))

    def compute(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return vocab_parallel_log_probs(hidden[rows] @ weight.t(), inputs.targets, **inputs.options)

    return outcome(compute, [inputs.hidden, inputs.weight], inputs.upstream)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equals_one_process(size: int, kind: str, name: str) -> None:
    ranks, expected = launched(size)[kind, name], in_one_process(kind, name)
    single = name in ("float32", "bfloat16")
    tolerance = 2e-6 if single else 1e-12  # values are float32 for half precision too
    for key in ("log_probs", "entropy"):
        assert_close(ranks[0][key], expected[key], rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks), "the losses of the ranks would drift apart"
    *hidden, split = zip(*(rank["gradients"] for rank in ranks), strict=True)
    found = [torch.cat(split, 1 if kind == "logits" else 0)]
    for parts in hidden:
        found.insert(0, torch.cat(parts) if name.startswith("sequence") else parts[-1])
    tolerance = 2**-8 if name == "bfloat16" else tolerance
    for gradient, other in zip(found, expected["gradients"], strict=True):
        assert_close(gradient, other, rtol=tolerance, atol=tolerance)
        assert kind == "hidden" or torch.equal(gradient == 0, other == 0) or name == "apart" or single
    # One all-gather of four floats a target, and one sum of d hidden, whatever the number of chunks.
    inputs = make(name)
    item, whole = 4 if single else 8, TOKENS * HIDDEN * inputs.hidden.element_size()
    targets = len(inputs.targets)
    sent: tuple[list[Any], list[Any]] = ([("allgather_base", 4 * targets * item)], [])
    if kind == "hidden":
        sent[1].append(("allreduce", targets * HIDDEN * item))
    if name.startswith("sequence"):
        sent = (
            [("allgather_base", whole // size), *sent[0]],
            [("allgather_base", whole // size), ("reduce_scatter_base", whole)],
        )
    for rank in ranks:
        assert (rank["forward"], rank["backward"]) == sent
        assert rank["unchanged"] == (name != "inplace")


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_backend_agrees():
    cases = [(name, tp_size) for tp_size in (1, 2) for name in ("float32", "bfloat16", "prepared")]
    for (name, tp_size), ranks in zip(cases, launch(run_megatron, cases, 2), strict=True):
        for rank in ranks:
            ours, theirs = rank["torch"], rank["megatron"]
            assert theirs["unchanged"], "megatron-core overwrites float32 logits: it must get a copy"
            assert_close(theirs["log_probs"], ours["log_probs"], rtol=1e-6, atol=1e-6)
            tolerance = 2**-8 if name == "bfloat16" else 1e-6
            assert_close(theirs["gradients"], ours["gradients"], rtol=tolerance, atol=tolerance)
            assert len(theirs["forward"]) == 3 and len(ours["forward"]) == tp_size - 1
            assert "tp_group is another: pass that one" in rank["refused"]
