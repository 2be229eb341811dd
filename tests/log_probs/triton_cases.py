"""The Triton log-probs in Triton's interpreter: run by `test_log_prob_triton.py`, in a process that has it switched on.

The cases themselves, which a GPU runs too, stand in `examples/benchmarks/triton_cases.py`.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from examples.benchmarks.counting import OperationCounter
from examples.benchmarks.triton_cases import CASES, SHARDED, Case, check, check_shards, make, results
from mismatch_plugin.log_probs import triton_arithmetic, vocab_parallel_log_probs
from mismatch_plugin.log_probs.arguments import Call
from mismatch_plugin.log_probs.torch_arithmetic import Blocks, local_statistics
from tests.distributed.launch import launch
from tests.distributed.log_probs_worker import NAMES, forward_backward, in_float32, run_triton
from tests.distributed.log_probs_worker import make as make_sharded
from tests.log_probs.test_log_probs_limits import Recorder, T, inputs

# numpy says so where a GPU is silent: rows of −inf and of NaN are among the cases.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_the_interpreter_is_on():
    assert os.environ["TRITON_INTERPRET"] == "1" and triton_arithmetic.INTERPRETED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_and_float64(case: Case):
    check(case, "cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("what", SHARDED)
def test_uneven_shards_equal_one(what: str, dtype: str):
    """Among them a shard of one column and one of none."""
    check_shards(what, dtype, "cpu")


@pytest.fixture(scope="module")
def tensor_parallel() -> dict[str, list[dict[str, Any]]]:
    return dict(zip(NAMES, launch(run_triton, NAMES, 2), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(tensor_parallel: dict[str, list[dict[str, Any]]], name: str):
    """Over gloo, with the collectives of the torch Function: one all-gather of four floats a target, none backward."""
    inputs, ranks = in_float32(make_sharded(name)), tensor_parallel[name]
    expected = forward_backward(inputs, backend="torch")
    for key in ("log_probs", "entropy"):
        assert_close(ranks[0][key], expected[key], rtol=1e-6, atol=1e-6)
        assert torch.equal(ranks[0][key], ranks[1][key]), "the losses of the ranks would drift apart"
    gradient = torch.cat([rank["gradient"] for rank in ranks], 1)
    rounding = 2**-7 if name == "bfloat16" else 1e-6  # the interpreter truncates to bfloat16
    assert_close(gradient, expected["gradient"], rtol=rounding, atol=2e-6)
    for rank in ranks:
        assert [size for _, size in rank["forward"]] == [2 * 4 * len(inputs.targets) * 4]
        assert "allgather" in rank["forward"][0][0] and rank["backward"] == []
        assert rank["unchanged"] == (name != "inplace")


@pytest.mark.parametrize("columns", [61, 8197])
def test_statistics_are_those_of_the_torch_function(columns: int):
    """The maximum to the bit; sums up to their order. Ranks with and without Triton understand each other."""
    logits, targets, _, _ = make(Case("plain", columns), "cpu")
    call = Call(targets, columns, temperature=0.7, entropy="grad", block_rows=4)
    ours = triton_arithmetic.local_statistics(triton_arithmetic.prepare(logits, call))
    theirs = local_statistics(Blocks(logits, call))
    assert torch.equal(ours[0], theirs[0])
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_huge_logits_lose_nothing():
    """Without a fused multiply-add an exponent of 1e4 · log2(e) would be off by 1e-3."""
    logits = (torch.randn(4, 61, generator=torch.Generator().manual_seed(0)) + 1e4).requires_grad_()
    targets, upstream = torch.tensor([3, 60, 0, 17]), torch.tensor([[0.0, 1.0, -2.0, 0.5], [1.0, 0.3, 0.0, -1.0]])
    exact = logits.detach().double().requires_grad_()
    ours = results(vocab_parallel_log_probs(logits, targets, entropy="grad", backend="triton"), logits, upstream)
    expected = results(vocab_parallel_log_probs(exact, targets, entropy="grad"), exact, upstream.double())
    for value, other in zip(ours, expected, strict=True):
        assert_close(value.double(), other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
def test_rows_beyond_the_reach_of_int32(inplace: bool):
    """Row 2 begins at element 2^31 of the storage. Its pages are never touched, but for the rows themselves."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    logits = storage.as_strided((3, 64), (2**30, 1)).copy_(torch.randn(3, 64))
    small, targets = logits.clone().requires_grad_(), torch.tensor([5, 6, 7])
    upstream = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.5, -1.0]])
    options: dict[str, Any] = {"entropy": "grad", "backend": "triton"}
    expected = results(vocab_parallel_log_probs(small, targets, **options), small, upstream)
    result = vocab_parallel_log_probs(logits.requires_grad_(), targets, inplace_gradient=inplace, **options)
    for value, other in zip(results(result, logits, upstream), expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("columns", [61, 8197])
@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("bad", ["nan", "inf", "a row of -inf"])
def test_what_is_not_finite_is_not_hidden(columns: int, entropy: str, bad: str):
    """NaN in the rows where the torch Function has NaN, but for padding, and no harm to their neighbours."""
    logits, targets, upstream, _ = make(Case("plain", columns), "cpu")
    with torch.no_grad():
        logits[2, columns // 2] = math.nan if bad == "nan" else math.inf
        if bad == "a row of -inf":
            logits[2] = -math.inf
    found = []
    for backend in ("triton", "torch"):
        x = logits.clone().requires_grad_()
        arguments: Any = {"entropy": entropy, "backend": backend, "vocab_size": columns - 3}
        found.append(results(vocab_parallel_log_probs(x, targets % (columns - 3), **arguments), x, upstream))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()) and ours[2].isnan().any()
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_target_outside_the_vocabulary_is_impossible():
    logits, _, upstream, _ = make(Case("plain", 61), "cpu")
    targets = torch.tensor([60, 50, 3, 4, 5, 10**6])
    found = []
    for backend in ("triton", "torch"):
        x, arguments = logits.clone().requires_grad_(), {"vocab_size": 50, "backend": backend}
        found.append(results(vocab_parallel_log_probs(x, targets, **arguments), x, upstream))
    assert found[0][0].isinf().tolist() == [True, True, False, False, False, True]
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_log_probs_are_never_above_zero():
    logits = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)) * 20
    result = vocab_parallel_log_probs(logits, logits.argmax(-1), temperature=0.37, entropy="detached", backend="triton")
    assert result.entropy is not None and result.log_probs.max() <= 0 and result.entropy.min() >= 0


@pytest.mark.parametrize("output", [0, 1])
def test_one_output_with_an_expanded_upstream(output: int):
    """Autograd hands None for the other, and a gradient of stride 0 for a sum."""
    gradients = []
    for backend in ("triton", "torch"):
        logits, targets, _, _ = make(Case("plain", 61), "cpu")
        result = vocab_parallel_log_probs(logits.requires_grad_(), targets.int(), entropy="grad", backend=backend)
        value = result[output]
        assert value is not None
        gradients.append(torch.autograd.grad(value.sum(), logits)[0])
    assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_no_targets():
    """A micro-batch whose every row is a prompt still has a gradient: zero."""
    logits = torch.randn(3, 61, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    result = vocab_parallel_log_probs(logits, nothing, rows=nothing, entropy="grad", backend="triton")
    assert result.log_probs.shape == (0,)
    assert torch.count_nonzero(torch.autograd.grad(result.log_probs.sum(), logits)[0]) == 0


def test_inplace_gradient_lies_in_the_logits_and_allows_one_backward():
    logits, targets, _, _ = make(Case("plain", 61), "cpu")
    result = vocab_parallel_log_probs(logits.requires_grad_(), targets, inplace_gradient=True, backend="triton")
    loss = result.log_probs.sum()
    gradient = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="second backward through the same log-probs needs inplace_gradient=False"):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_who_else_saved_the_logits_learns_that_they_were_overwritten(backend: Any):
    leaf, targets, _, _ = make(Case("plain", 61), "cpu")
    logits = leaf.requires_grad_() * 1.0
    squares = logits.pow(2).sum()  # its gradient is 2 · logits
    result = vocab_parallel_log_probs(logits, targets, inplace_gradient=True, backend=backend)
    torch.autograd.grad(result.log_probs.sum(), logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(squares, leaf)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("what", ["plain", "padded", "temperature", "ragged", "mask", "rows"])
def test_no_host_sync_and_nothing_as_large_as_the_logits(what: str, inplace: bool):
    """Five floats a target, or a few a ragged id, next to the gradient; three floats a target kept for the backward."""
    logits, targets, options = inputs(torch.bfloat16, what)
    saved: list[Tensor] = []
    with Recorder() as recorder, saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        log_probs, entropy = vocab_parallel_log_probs(
            logits, targets, entropy="grad", inplace_gradient=inplace, backend="triton", **options
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert recorder.syncs == []
    large = [name for name, elements in recorder.made if elements > 5 * T]
    assert large == ([] if inplace else ["empty_like"]), recorder.made
    given = [getattr(x, "token_ids", x) for x in (logits, targets, *options.values())]
    caller = {x.data_ptr() for x in given if isinstance(x, Tensor)}
    kept = [x.shape[0] for x in saved if x.data_ptr() not in caller]
    assert kept == [T] * 3


class Launches:
    """Writes down the names of the kernels that are launched, and launches them."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.kernels, name)
        if not name.endswith("_kernel"):
            return kernel
        self.names.append(name)
        return kernel


@pytest.mark.parametrize("tokens", [4, 20])
def test_launches(monkeypatch: pytest.MonkeyPatch, tokens: int):
    """Two kernels forward and two backward, whatever the size, and no torch kernel between them."""
    launches = Launches(triton_arithmetic.kernels)
    monkeypatch.setattr(triton_arithmetic, "kernels", launches)
    logits, targets = torch.randn(tokens, 61, requires_grad=True), torch.zeros(tokens, dtype=torch.int64)
    upstream = (torch.ones(tokens), torch.ones(tokens))
    with OperationCounter() as counter:
        result = vocab_parallel_log_probs(logits, targets, entropy="grad", backend="triton")
        torch.autograd.grad([value for value in result if value is not None], logits, upstream)
    assert launches.names == ["statistics_kernel", "finish_kernel", "coefficients_kernel", "gradient_kernel"]
    # The interpreter's own, of the arguments it takes to the CPU and back.
    assert counter.syncs == [] and set(counter.kernels) <= {"set_", "copy_"}
