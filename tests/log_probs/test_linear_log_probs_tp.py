"""Log-probs from hidden states over two and four gloo processes equal whole logits in one; their collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mismatch_plugin.log_probs import vocab_parallel_log_probs
from tests.distributed.launch import launch
from tests.distributed.linear_log_probs_worker import HIDDEN, NAMES, TOKENS, make, run

Results = tuple[int, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["tp1", "tp2", "tp4"])
def parallel(request: pytest.FixtureRequest) -> Results:
    return request.param, dict(zip(NAMES, launch(run, NAMES, request.param), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_equals_whole_logits_in_one_process(parallel: Results, name: str):
    ranks = parallel[1][name]
    hidden, weight, targets, upstream, options = make(name)
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
    if name.startswith("sequence"):
        assert_close(torch.cat([rank["hidden"] for rank in ranks]), grad_hidden, rtol=tolerance, atol=tolerance)
    else:
        for rank in ranks:
            assert_close(rank["hidden"], grad_hidden, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_one_all_gather_and_one_sum(parallel: Results, name: str):
    """Whatever the number of chunks; (kind, bytes) of each."""
    size, results = parallel
    targets, item = len(make(name)[2]), 4 if name == "float32" else 8
    statistics, whole = ("allgather", size * 4 * targets * item), TOKENS * HIDDEN * item
    for rank in results[name]:
        found = [[(kind.split(".")[0].replace("_", ""), n) for kind, n in rank[way]] for way in ("forward", "backward")]
        if size == 1:
            assert found == [[], []]
        elif name.startswith("sequence"):
            kinds = [[(kind[:9], n) for kind, n in way] for way in found]
            assert kinds[0] == [("allgather", whole), statistics]
            assert [n for _, n in kinds[1]] == [whole, whole] and kinds[1][0][0] == "allgather"
            assert "reduce" in found[1][1][0] and "scatter" in found[1][1][0]
        else:
            assert [(kind[:9], n) for kind, n in found[0]] == [statistics]
            assert [(kind[:9], n) for kind, n in found[1]] == [("allreduce", targets * HIDDEN * item)]
