"""The Triton log-probs in Triton's interpreter: run by `test_log_prob_triton.py`, in a process that has it switched on.

The cases themselves, which a GPU runs too, stand in `examples/benchmarks/triton_cases.py`: a few of them here, all with
MISMATCH_FULL=1. Upstream gradients are random and begin with 0: kernels that read the first one for all rows have been
released more than once (transformer-engine's #2139 and #2402, liger's #1298).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime.interpreter import interpreter_builder

from examples.benchmarks.triton_cases import CASES, SHARDED, Case, check, check_shards, make, results
from mismatch_plugin.log_probs import RaggedSamplingMask, vocab_parallel_linear_log_probs, vocab_parallel_log_probs
from tests import peers
from tests.full import FULL

# numpy says so where a GPU is silent: rows of −inf and of NaN are among the cases.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FEW = [c for n, c in enumerate(CASES) if (c.columns == 61 and n % 3 == 0) or (c.columns == 8208 and n % 5 == 0)]


@pytest.mark.parametrize("case", CASES if FULL else [CASES[2], CASES[3], *FEW, CASES[-2]], ids=str)
def test_equals_torch_and_float64(case: Case):
    check(case, "cpu")


@pytest.mark.parametrize(("what", "dtype"), [(what, "bf16" if n % 2 else "fp32") for n, what in enumerate(SHARDED)])
def test_uneven_shards_equal_one(what: str, dtype: str):
    """Among them a shard of one column and one of none."""
    check_shards(what, dtype, "cpu")


def both(logits: Tensor, targets: Tensor, upstream: Tensor, **arguments: Any) -> list[list[Tensor]]:
    """Outputs and gradient by Triton, and by torch."""
    found = []
    for backend in ("triton", "torch"):
        x = logits.clone().requires_grad_()
        found.append(results(vocab_parallel_log_probs(x, targets, backend=backend, **arguments), x, upstream))
    return found


@pytest.mark.parametrize("inplace", [False, True])
def test_rows_beyond_the_reach_of_int32(inplace: bool):
    """Row 2 begins at element 2^31 of the storage. Its pages are never touched, but for the rows themselves."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    logits = storage.as_strided((3, 64), (2**30, 1)).copy_(torch.randn(3, 64))
    targets, upstream = torch.tensor([5, 6, 7]), torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.5, -1.0]])
    expected, _ = both(logits, targets, upstream, entropy="grad")
    result = vocab_parallel_log_probs(
        logits.requires_grad_(), targets, entropy="grad", backend="triton", inplace_gradient=inplace
    )
    for value, other in zip(results(result, logits, upstream), expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize(("columns", "entropy"), [(61, "none"), (61, "grad"), (8197, "grad")])
@pytest.mark.parametrize("bad", ["nan", "inf", "a row of -inf", "target outside"])
def test_what_is_not_finite_is_not_hidden(columns: int, entropy: str, bad: str):
    """NaN in the rows where the torch Function has NaN, but for padding, and no harm to their neighbours."""
    logits, targets, upstream, _ = make(Case("plain", columns), "cpu")
    targets = targets % (columns - 3)
    if bad == "a row of -inf":
        logits[2] = -math.inf
    elif bad == "target outside":
        targets[2], upstream[:, 2] = columns - 1, 0.0
    else:
        logits[2, columns // 2] = math.nan if bad == "nan" else math.inf
    ours, theirs = both(logits, targets, upstream, entropy=entropy, vocab_size=columns - 3)
    assert not ours[0][2].isfinite()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("output", [0, 1])
def test_one_output_with_an_expanded_upstream(output: int):
    """Autograd hands None for the other, and a gradient of stride 0 for a sum. A micro-batch whose every row is a
    prompt still has a gradient: zero."""
    gradients = []
    for backend in ("triton", "torch"):
        logits, targets, _, _ = make(Case("plain", 61), "cpu")
        result = vocab_parallel_log_probs(logits.requires_grad_(), targets.int(), entropy="grad", backend=backend)
        value = result[output]
        assert value is not None
        gradients.append(torch.autograd.grad(value.sum(), logits)[0])
    assert_close(*gradients, rtol=1e-6, atol=1e-6)
    nothing, logits = torch.zeros(0, dtype=torch.int64), torch.randn(3, 61, requires_grad=True)
    empty = vocab_parallel_log_probs(logits, nothing, rows=nothing, entropy="grad", backend="triton")[output]
    assert empty is not None and empty.shape == (0,)
    assert torch.count_nonzero(torch.autograd.grad(empty.sum(), logits)[0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["strided targets", "cold padded", "ragged", "rows twice"])
def test_from_hidden_states(what: str, dtype: torch.dtype):
    """Chunks of four rows, the last of three, against the torch arithmetic and float64: values and both gradients."""
    torch.manual_seed(0)
    rows, columns = 11, 50
    hidden, weight = (torch.randn(rows, 6) * 2).to(dtype), torch.randn(columns, 6).to(dtype)
    targets, upstream = torch.randint(0, 41, (rows,)), torch.randn(2, rows)
    targets[2], upstream[:, 0] = -100, 0.0
    if what == "strided targets":
        targets = torch.stack([targets, torch.full_like(targets, -100)], 1)[:, 0]
    offsets = torch.tensor([0, 3, 3, 4, 9, 9, 9, 12, 20, 20, 21, 21])
    options: dict[str, Any] = {
        "cold padded": {"temperature": 0.6, "vocab_size": 41},
        "ragged": {"sampling_mask": RaggedSamplingMask(torch.randint(0, columns, (21,)), offsets), "temperature": 0.7},
        "rows twice": {"rows": torch.tensor([9, 2, 4, 3, 3, 0, 10, 10, 1, 5, 6])},
    }.get(what, {})

    def run(backend: Any, to: torch.dtype) -> list[Tensor]:
        given = [value.to(to).requires_grad_() for value in (hidden, weight)]
        result = vocab_parallel_linear_log_probs(
            given[0], given[1], targets, entropy="grad", chunk_rows=4, backend=backend, **options
        )
        assert result.entropy is not None
        outputs = [result.log_probs, result.entropy]
        found = torch.autograd.grad(outputs, given, list(upstream.to(result.log_probs.dtype)))
        return [value.detach().double() for value in (*outputs, *found)]

    ours, same = run("triton", dtype), run("torch", dtype)
    for value, other in zip(ours[:2], same[:2], strict=True):  # of logits rounded to the same dtype
        assert_close(value, other, rtol=1e-6, atol=1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 3e-2
    for expected in (same, run("torch", torch.float64)):
        for value, other in zip(ours, expected, strict=True):
            assert_close(value, other, rtol=rounding, atol=rounding * float(other.abs().max()))


@pytest.mark.parametrize("what", ["plain", "ragged", "rows"])
@pytest.mark.parametrize("columns", [61, 8208] if FULL else [61])
def test_nothing_beyond_a_row_is_read_or_written(monkeypatch: pytest.MonkeyPatch, columns: int, what: str):
    """Rows lie within a larger storage; what the vocabulary's padding has is read with its neighbours, no more."""
    torch.manual_seed(0)
    touched: list[Tensor] = []

    def following(name: str, mask_at: int) -> None:
        original = getattr(interpreter_builder, name)

        def access(pointers: Any, *others: Any) -> Any:
            touched.append(torch.from_numpy(pointers.data.astype("int64").ravel()[others[mask_at].data.ravel()]))
            return original(pointers, *others)

        monkeypatch.setattr(interpreter_builder, name, access)

    following("create_masked_load", 0)
    following("create_masked_store", 1)
    guarded = torch.randn(8, columns + 24)
    options: dict[str, Any] = {
        "plain": {},
        "rows": {"rows": torch.tensor([5, 3, 2, 0, 4, 1])},
        "ragged": {"sampling_mask": RaggedSamplingMask(torch.randint(0, columns, (30,)), torch.arange(0, 31, 5))},
    }[what]
    logits, before = guarded[1:-1, 8:-16], guarded.clone()
    result = vocab_parallel_log_probs(
        logits.requires_grad_(), torch.randint(0, columns - 5, (6,)), entropy="grad", vocab_size=columns - 5,
        inplace_gradient=True, backend="triton", **options,
    )  # fmt: skip
    torch.autograd.grad([value for value in result if value is not None], logits, [torch.ones(6)] * 2)
    row = guarded.stride(0)
    at = torch.cat(touched) - guarded.data_ptr()
    at = at[(at >= 0) & (at < guarded.nbytes)] // 4
    assert len(at) > 0
    assert not ((at // row < 1) | (at // row > 6) | (at % row < 8) | (at % row >= 8 + columns)).any()
    guarded[1:-1, 8:-16] = before[1:-1, 8:-16]
    assert torch.equal(guarded, before) and result.log_probs.isfinite().all()


# Another library's kernel ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(peers.missing(), reason=peers.ABSENT)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_engine_agrees_with_ours(dtype: torch.dtype, temperature: float):
    """Values to 1e-5 (theirs take natural exponentials), gradients to the rounding of the logits' dtype; also under one
    upstream gradient of stride 0, which a kernel may read as if each row had its own."""
    peers.transformer_engine()
    torch.manual_seed(0)
    logits, targets, upstream = (torch.randn(6, 64) * 3).to(dtype), torch.randint(0, 64, (6,)), torch.randn(6)
    targets[[1, 4]], upstream[0] = torch.tensor([-100, -1]), 0.0
    before, rounding = logits.clone(), 2e-6 if dtype == torch.float32 else 2**-6
    for each in (upstream, torch.tensor(-0.7).expand(6)):
        found: list[Tensor] = []
        for backend in ("triton", "transformer-engine"):
            x = logits.requires_grad_()
            log_probs = vocab_parallel_log_probs(x, targets, backend=backend, temperature=temperature).log_probs
            found += [log_probs.detach(), torch.autograd.grad(log_probs, x, each)[0]]
        assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)
        assert_close(found[3], found[1], rtol=rounding, atol=rounding)
        assert not found[3][[1, 4]].any(), "ignored"
    assert torch.equal(logits, before), "the caller's logits were overwritten"
