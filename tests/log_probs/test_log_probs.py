"""Vocab-parallel log-probs in one process: values and gradients against float64, costs, other backends, refusals.

The table of cases is that of the Triton kernels, `examples/benchmarks/triton_cases.py`, here by the torch arithmetic.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from examples.benchmarks.counting import OperationCounter
from mismatch_plugin.log_probs import LogProbs, RaggedSamplingMask, vocab_parallel_log_probs
from mismatch_plugin.log_probs.arguments import check_rows

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

from examples.benchmarks.triton_cases import CASES, Case, compare, run, textbook

F64 = torch.float64


def make(rows: int = 7, columns: int = 50, dtype: torch.dtype = F64, scale: float = 2.0):
    """(logits [T, V], targets [T], upstream gradient [T]). The upstream varies and starts with 0: a gradient scaled by
    its first element, as several public kernels had it, fails everywhere here."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, columns, generator=generator, dtype=F64) * scale).to(dtype).requires_grad_()
    upstream = torch.randn(rows, generator=generator, dtype=F64)
    upstream[:1] = 0.0
    return logits, torch.randint(0, columns, (rows,), generator=generator), upstream


def dense(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> LogProbs:
    """The textbook: autograd through log_softmax, in the dtype given."""
    log_p = (logits / temperature).log_softmax(-1)
    return LogProbs(log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))


def gradient(result: LogProbs, logits: Tensor, upstream: Tensor) -> Tensor:
    loss = (result.log_probs * upstream).sum()
    if result.entropy is not None and result.entropy.requires_grad:
        loss = loss + (result.entropy * upstream.flip(0) * 0.3).sum()
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


# Values ---------------------------------------------------------------------------------------------------------------


# 7 rows in blocks of 3 leave a last block of 1; 64 is larger than all; 131 columns divide by nothing.
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("columns", [1, 50, 131])
@pytest.mark.parametrize("block_rows", [1, 3, 64, None])
def test_equals_dense_in_float64(rows: int, columns: int, block_rows: int | None) -> None:
    logits, targets, upstream = make(rows, columns)
    result = vocab_parallel_log_probs(logits, targets, entropy="grad", temperature=0.7, block_rows=block_rows)
    assert result.log_probs.shape == (rows,) and result.log_probs.dtype == F64
    expected = dense(logits, targets, 0.7)
    for one, other in zip(result, expected, strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert_close(gradient(result, logits, upstream), gradient(expected, logits, upstream), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case.columns < 5000 or case.dtype == "bf16"], ids=str)
def test_equals_float64(case: Case) -> None:
    """Every dtype × shape × entropy: padding, ignored targets, picked rows, kept ids, temperature, strides."""
    found: list[Tensor] = []
    for block_rows in (2, None) if case.columns < 5000 else (None,):
        found = run(case, "cpu", "torch", block_rows=block_rows)
        compare(found, textbook(case, "cpu"), {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11}[case.dtype])
        assert found[0].dtype == torch.float32
    if case.columns == 61:
        again = run(case, "cpu", "torch", inplace_gradient=True)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_only_one_output_is_used() -> None:
    """Autograd hands None for the other: neither may be needed. A second backward gives the same."""
    logits, targets, upstream = make()
    actual, expected = vocab_parallel_log_probs(logits, targets, entropy="grad"), dense(logits, targets)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine is not None and theirs is not None
        for _ in range(2):
            ours = torch.autograd.grad((mine * upstream).sum(), logits, retain_graph=True)[0]
            assert_close(ours, torch.autograd.grad((theirs * upstream).sum(), logits, retain_graph=True)[0])
    detached = vocab_parallel_log_probs(logits, targets.int(), entropy="detached")
    assert detached.entropy is not None and not detached.entropy.requires_grad and detached.log_probs.requires_grad


def test_what_is_impossible_or_certain_or_not_a_number() -> None:
    """A target outside the vocabulary; a filter that kept the target alone; NaN is not hidden; rounding must not come
    out as a probability above 1, nor as a negative entropy."""
    logits, targets, upstream = make()
    outside = vocab_parallel_log_probs(logits, torch.tensor([49, 3, 0, 0, 0, 0, 40]), vocab_size=40).log_probs
    assert outside.isinf().tolist() == [True, *[False] * 5, True]
    alone = RaggedSamplingMask(targets, torch.arange(8))
    result = vocab_parallel_log_probs(logits, targets, sampling_mask=alone, entropy="grad")
    assert all(value.abs().max() < 1e-15 for value in (*result, gradient(result, logits, upstream)))  # type: ignore[union-attr]
    with torch.no_grad():
        logits[2, 5] = math.nan
    for value in vocab_parallel_log_probs(logits, targets, entropy="detached"):
        assert value is not None and value.isnan().tolist() == [i == 2 for i in range(7)]
    sharp, _, _ = make(4096, 4, torch.float32, scale=20.0)
    certain = vocab_parallel_log_probs(sharp, sharp.argmax(-1), temperature=0.37, entropy="detached")
    assert certain.entropy is not None and certain.log_probs.max() <= 0 and certain.entropy.min() >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_gradient_is_the_same_and_overwrites_the_logits(dtype: torch.dtype) -> None:
    logits, targets, upstream = make(7, 50, dtype)
    targets[3] = -100
    arguments: dict[str, Any] = {"entropy": "grad", "block_rows": 2}
    expected = gradient(vocab_parallel_log_probs(logits, targets, **arguments), logits, upstream)
    result = vocab_parallel_log_probs(logits, targets, inplace_gradient=True, **arguments)
    actual = gradient(result, logits, upstream)
    assert torch.equal(actual, expected) and actual.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="second backward through the same log-probs needs inplace_gradient=False"):
        gradient(result, logits, upstream)


def test_rows_that_share_their_storage_are_copied_before_it_is_overwritten() -> None:
    logits, targets, _ = make(1, 9)
    found = []
    for inplace in (False, True):
        result = vocab_parallel_log_probs(logits.expand(4, 9), targets.expand(4), inplace_gradient=inplace)
        found.append(gradient(result, logits, torch.arange(4.0, dtype=F64)))
    assert torch.equal(*found)


# Costs ----------------------------------------------------------------------------------------------------------------

T, V, BLOCK = 40, 64, 4


class Recorder(OperationCounter):
    """Host syncs, and every tensor that is newly made (no view, not written in place) with its number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = super().__torch_dispatch__(func, types, args, kwargs), func.__name__.split(".")[0]
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.syncs.append(str(func))
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for tensor, declared in zip(outputs, func._schema.returns, strict=False):
            if isinstance(tensor, Tensor) and declared.alias_info is None:
                self.made.append((name, tensor.numel()))
        return out


def inputs(dtype: torch.dtype, what: str = "plain") -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    logits, targets = torch.randn(T, V).to(dtype).requires_grad_(), torch.randint(0, V, (T,))
    ids = RaggedSamplingMask(torch.randint(0, V, (3 * T,)), torch.arange(0, 3 * T + 1, 3))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "padded": {"vocab_size": V - 5},
        "ragged": {"sampling_mask": ids},
        "rows": {"rows": torch.arange(T).flip(0)},
    }
    return logits, targets, options[what]


@pytest.mark.parametrize("what", ["plain", "padded", "ragged", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
def test_no_host_sync_and_nothing_larger_than_a_block(what: str, dtype: torch.dtype, inplace: bool):
    logits, targets, options = inputs(dtype, what)
    saved: list[Tensor] = []
    with Recorder() as recorder, saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        log_probs, entropy = vocab_parallel_log_probs(
            logits, targets, entropy="grad", block_rows=BLOCK, inplace_gradient=inplace, **options
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()  # a reference cycle would keep the gradient and make this copy it
    assert recorder.syncs == []
    # A block of what the sampler kept is one column wider.
    large = [name for name, elements in recorder.made if elements > BLOCK * (V + 1)]
    assert large == ([] if inplace else ["empty_like"]), "the gradient, which nothing fills before it is written"
    caller = {x.data_ptr() for x in (logits, targets, *options.values()) if isinstance(x, Tensor)}
    if what == "ragged":
        caller.add(options["sampling_mask"].token_ids.data_ptr())
    kept = [x for x in saved if x.data_ptr() not in caller and x.numel() > 1]
    assert all(x.shape == (T,) for x in kept)
    assert len({x.data_ptr() for x in kept}) == 3  # maximum, sum and entropy


# Refused --------------------------------------------------------------------------------------------------------------


def ragged(ids: int, offsets: Tensor) -> RaggedSamplingMask:
    return RaggedSamplingMask(torch.zeros(ids, dtype=torch.int64), offsets)


ROWS, OFFSETS = torch.arange(T), torch.zeros(T + 1, dtype=torch.int64)
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(2, 3, 4)}, r"logits has shape \[2, 3, 4\] and targets \[40\].*flatten batch and sequence"),
    ({"targets": torch.zeros(T - 1, dtype=torch.int64)}, "targets has 39 ids for 40 rows of logits"),
    ({"rows": torch.zeros(T + 1, dtype=torch.int64)}, r"rows is torch.int64 \[41\]: one int64 index"),
    ({"rows": ROWS - 1}, r"rows\[0\]=-1: rows must lie in \[0, T\), each at most once \(T=40\)"),
    ({"rows": torch.where(ROWS == 7, 3, ROWS)}, r"rows\[3\]=3: rows must lie in \[0, T\), each at most once"),
    ({"temperature": 0.0}, "temperature=0.0 must be positive and finite"),
    ({"entropy": True}, "entropy=True is unknown: choose one of none, detached, grad"),
    ({"backend": "liger"}, "backend='liger' is unknown: choose one of auto, torch, triton, megatron, transformer-eng"),
    ({"vocab_size": V + 1}, "vocab_size=65 is not within the 64 columns there are"),
    ({"sampling_mask": ragged(0, OFFSETS[1:])}, r"offsets has shape \[40\] and ends \[0, 0\]: \[41\] is needed"),
    ({"sampling_mask": ragged(0, OFFSETS.to("meta"))}, "offsets is on meta: keep it on the CPU"),
    ({"sampling_mask": ragged(3, torch.tensor([0, 2, 1, *[3] * (T - 2)]))}, "ascending from 0 to the 3 token_ids"),
    ({"backend": "megatron", "entropy": "grad"}, "backend='megatron' cannot do entropy='grad': use backend='torch'"),
    ({"backend": "transformer-engine", "vocab_size": 60}, r"cannot do padding \(vocab_size=60\)"),
    ({"backend": "megatron", "logits": torch.zeros(T, V, dtype=torch.float64)}, "cannot do torch.float64 logits"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_what_does_not_fit_is_refused_in_one_sentence(arguments: dict[str, Any], message: str):
    logits, targets, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(**{"logits": logits, "targets": targets, **arguments})


def test_missing_transformer_engine_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    logits, targets, _ = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="install its CUDA part or use backend='torch'"):
        vocab_parallel_log_probs(logits, targets, vocab_size=V, backend="transformer-engine")


def test_rows_on_a_device_are_asserted_there(monkeypatch: pytest.MonkeyPatch):
    """A row that is there twice would be a wrong gradient without a word, and reading the rows a host sync, which a
    fake tensor refuses."""
    asserted: list[tuple[Tensor, str]] = []
    monkeypatch.setattr(torch, "_assert_async", lambda *arguments: asserted.append(arguments))
    with torch._C.DisableTorchFunction(), FakeTensorMode():  # the CPU shim of another test reads "cuda" as "cpu"
        check_rows(torch.zeros(T, dtype=torch.int64, device="cuda"), T)
    [(right, message)] = asserted
    assert right.shape == () and right.is_cuda and message == "rows must lie in [0, T), each at most once"
