"""Vocab-parallel log-probs in one process: values and gradients against dense autograd.

Contents: 1 values · 2 gradients · 3 padding, ignored targets, picked rows · 4 sampling masks · 5 extreme logits ·
6 in place. Costs and refusals: `test_log_probs_limits.py`; tensor parallelism: `distributed/test_log_probs_tp.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mismatch_plugin.log_probs import LogProbs, RaggedSamplingMask, vocab_parallel_log_probs

F64 = torch.float64


def make(rows: int = 7, columns: int = 50, dtype: torch.dtype = F64, seed: int = 0, scale: float = 2.0):
    """(logits [T, V], targets [T], upstream gradient [T]). The upstream varies and starts with 0: a gradient scaled by
    its first element, as several public kernels had it, fails everywhere here."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, columns, generator=generator, dtype=F64) * scale).to(dtype).requires_grad_()
    upstream = torch.randn(rows, generator=generator, dtype=F64)
    upstream[:1] = 0.0
    return logits, torch.randint(0, columns, (rows,), generator=generator), upstream


def dense(logits: Tensor, targets: Tensor, temperature: Any = 1.0, kept: Tensor | None = None) -> LogProbs:
    """The textbook: autograd through log_softmax over the kept columns, in the dtype given."""
    temperature = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    x = logits / temperature if kept is None else (logits / temperature).masked_fill(~kept, -math.inf)
    log_p = x.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)
    return LogProbs(log_p.gather(1, targets[:, None])[:, 0], entropy)


def gradient(result: LogProbs, logits: Tensor, upstream: Tensor, entropy_scale: float = 0.3) -> Tensor:
    loss = (result.log_probs * upstream).sum()
    if result.entropy is not None and result.entropy.requires_grad:
        loss = loss + (result.entropy * upstream.flip(0) * entropy_scale).sum()
    return torch.autograd.grad(loss, logits)[0]


def assert_same(actual: LogProbs, expected: LogProbs, logits: Tensor, upstream: Tensor) -> Tensor:
    """Values and gradient to 1e-12; returns the gradient."""
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)
    found = gradient(actual, logits, upstream)
    assert_close(found, gradient(expected, logits, upstream), rtol=0, atol=1e-12)
    return found


# 1 values ------------------------------------------------------------------------------------------------------------


def test_hand_calculation():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    result = vocab_parallel_log_probs(logits, torch.tensor([1, 0]), entropy="detached")
    # p = (1/4, 3/4): ln 3/4, and −(1/4 ln 1/4 + 3/4 ln 3/4); p = (1/2, 1/2): ln 1/2 and ln 2.
    assert_close(result.log_probs, torch.tensor([-0.2876820724, -0.6931471806]), rtol=1e-6, atol=0)
    assert_close(result.entropy, torch.tensor([0.5623351446, 0.6931471806]), rtol=1e-6, atol=0)


# 7 rows in blocks of 3 leave a last block of 1; 64 is larger than all; 131 columns divide by nothing.
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("columns", [1, 50, 131])
@pytest.mark.parametrize("block_rows", [1, 3, 64, None])
def test_equals_dense_in_float64(rows: int, columns: int, block_rows: int | None):
    logits, targets, upstream = make(rows, columns)
    result = vocab_parallel_log_probs(logits, targets, entropy="grad", temperature=0.7, block_rows=block_rows)
    assert result.log_probs.shape == (rows,) and result.log_probs.dtype == F64
    assert_same(result, dense(logits, targets, 0.7), logits, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype: torch.dtype):
    """Sums over 3001 columns in bf16 would be off by 1e-2. The gradient is rounded once, to the dtype of the logits."""
    logits, targets, upstream = make(64, 3001, dtype)
    result = vocab_parallel_log_probs(logits, targets, entropy="grad", temperature=1.3)
    exact = logits.detach().float().requires_grad_()
    expected = dense(exact, targets, 1.3)
    assert result.log_probs.dtype == torch.float32
    assert_close(result.log_probs, expected.log_probs, rtol=1e-6, atol=1e-6)
    assert_close(result.entropy, expected.entropy, rtol=1e-6, atol=2e-6)
    actual = gradient(result, logits, upstream.float())
    assert actual.dtype == dtype
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close(actual.float(), gradient(expected, exact, upstream.float()), rtol=rounding, atol=2e-6)


def test_temperature_per_token():
    logits, targets, upstream = make()
    temperature = torch.linspace(0.3, 2.0, 7, dtype=F64)
    result = vocab_parallel_log_probs(logits, targets, entropy="grad", temperature=temperature, block_rows=3)
    assert_same(result, dense(logits, targets, temperature), logits, upstream)


def test_strided_logits_and_int32_targets():
    """Megatron's logits are a transposed view; a kernel that assumes rows one after the other reads the wrong ones."""
    base, targets, upstream = make(6, 50)
    logits = base.detach().view(2, 3, 50).transpose(0, 1).contiguous().transpose(0, 1).flatten(0, 1)
    strided = torch.randn(6, 110, dtype=F64)[:, 3:103:2].copy_(base.detach()).requires_grad_()
    for x in (logits.requires_grad_(), strided):
        result = vocab_parallel_log_probs(x, targets.int(), entropy="grad", block_rows=4)
        assert_same(result, dense(x, targets), x, upstream[:6])


# 2 gradients ---------------------------------------------------------------------------------------------------------


def test_gradcheck():
    logits, targets, _ = make(4, 9)
    options: dict[str, Any] = {"temperature": 0.8, "block_rows": 3}
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_log_probs(x, targets, **options).log_probs, logits)
    assert torch.autograd.gradcheck(
        lambda x: tuple(vocab_parallel_log_probs(x, targets, entropy="grad", **options)),  # pyright: ignore
        logits,
    )


def test_detached_entropy_contributes_no_gradient():
    logits, targets, upstream = make()
    result = vocab_parallel_log_probs(logits, targets, entropy="detached")
    assert result.entropy is not None and not result.entropy.requires_grad and result.log_probs.requires_grad
    expected = dense(logits, targets)
    assert_close(result.entropy, expected.entropy)
    assert_close(gradient(result, logits, upstream), gradient(LogProbs(expected.log_probs, None), logits, upstream))
    assert vocab_parallel_log_probs(logits, targets).entropy is None


def test_only_one_output_is_used():
    """Autograd hands None for the other: neither may be needed."""
    logits, targets, upstream = make()
    actual, expected = vocab_parallel_log_probs(logits, targets, entropy="grad"), dense(logits, targets)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine is not None and theirs is not None
        ours = torch.autograd.grad((mine * upstream).sum(), logits, retain_graph=True)[0]
        assert_close(ours, torch.autograd.grad((theirs * upstream).sum(), logits, retain_graph=True)[0])


# 3 padding, ignored targets, picked rows -----------------------------------------------------------------------------


def test_padding_is_excluded_and_gets_zero_gradient():
    """Megatron pads the vocabulary with columns that the engine does not have; here they would win every softmax."""
    logits, targets, upstream = make(7, 50)
    padded = torch.cat([logits.detach(), torch.full((7, 14), 30.0, dtype=F64)], 1).requires_grad_()
    actual = vocab_parallel_log_probs(padded, targets, vocab_size=50, entropy="grad", block_rows=3)
    expected = vocab_parallel_log_probs(logits, targets, entropy="grad", block_rows=3)
    assert torch.equal(actual.log_probs, expected.log_probs)
    actual_gradient = gradient(actual, padded, upstream)
    assert torch.equal(actual_gradient[:, :50], gradient(expected, logits, upstream))
    assert torch.count_nonzero(actual_gradient[:, 50:]) == 0


def test_target_outside_the_vocabulary_is_impossible_rather_than_wrong():
    logits, _, _ = make(2, 50)
    result = vocab_parallel_log_probs(logits, torch.tensor([49, 3]), vocab_size=40)
    assert result.log_probs[0] == -math.inf and result.log_probs[1].isfinite()


@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ignored_targets_are_zero_even_if_their_logits_are_not_finite(entropy: Any, bad: float):
    logits, targets, upstream = make(dtype=torch.float32)
    upstream = upstream.float()
    targets[[1, 4]] = torch.tensor([-100, -1])
    with torch.no_grad():
        logits[1], logits[4, 7] = bad, bad
    result = vocab_parallel_log_probs(logits, targets, entropy=entropy, block_rows=3)
    upstream[1] = math.nan  # a loss that divides by zero where the mask is 0
    actual = gradient(result, logits, upstream, entropy_scale=0.0)
    for value in (result.log_probs, result.entropy, actual):
        assert value is None or torch.count_nonzero(value[[1, 4]]) == 0
    rest = [0, 2, 3, 5, 6]
    expected = dense(logits[rest].detach().requires_grad_(), targets[rest])
    assert_close(result.log_probs[rest], expected.log_probs)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_picked_rows(inplace: bool, dtype: torch.dtype):
    """The other rows are not read (they hold NaN) and get exactly zero gradient; the order of rows is the caller's."""
    logits, _, _ = make(9, 50, dtype)
    rows, targets = torch.tensor([7, 2, 3, 5, 0]), torch.tensor([11, 0, -100, 39, 4])
    with torch.no_grad():
        logits[[1, 4, 6, 8]] = math.nan
        logits[:, 40:] = math.nan  # padding
    picked = logits.detach()[rows, :40].requires_grad_()
    options: dict[str, Any] = {"temperature": torch.linspace(0.5, 2.0, 5, dtype=F64), "entropy": "grad"}
    expected = vocab_parallel_log_probs(picked, targets, **options)
    actual = vocab_parallel_log_probs(
        logits, targets, rows=rows, vocab_size=40, block_rows=2, inplace_gradient=inplace, **options
    )
    assert torch.equal(actual.log_probs, expected.log_probs)
    upstream = torch.linspace(0.0, 1.0, 5)
    expected_gradient = torch.zeros(9, 50, dtype=dtype)
    expected_gradient[rows, :40] = gradient(expected, picked, upstream)
    assert torch.equal(gradient(actual, logits, upstream), expected_gradient)


# 4 sampling masks ----------------------------------------------------------------------------------------------------


def ragged_and_dense(rows: int, columns: int) -> tuple[RaggedSamplingMask, Tensor]:
    """Row 2 is unfiltered (no ids); ids are unordered, and one is there twice."""
    generator = torch.Generator().manual_seed(5)
    kept = torch.rand(rows, columns, generator=generator) < 0.2
    ids = [row.nonzero()[:, 0].flip(0) for row in kept]
    ids[2], kept[2] = ids[2][:0], True
    ids[1] = torch.cat([ids[1], ids[1][:1]])
    offsets = torch.tensor([0] + [len(row) for row in ids]).cumsum(0)
    return RaggedSamplingMask(torch.cat(ids), offsets), kept


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2.0, 7, dtype=F64)])
def test_sampling_mask_renormalises_over_the_kept_ids(ragged: bool, temperature: Any):
    logits, targets, upstream = make(7, 50)
    ragged_mask, kept = ragged_and_dense(7, 50)
    mask = ragged_mask if ragged else kept.clone()
    kept[torch.arange(7), targets] = True  # the target always counts as kept, as documented
    result = vocab_parallel_log_probs(
        logits, targets, sampling_mask=mask, temperature=temperature, entropy="grad", block_rows=3
    )
    expected = dense(logits, targets, temperature, kept)
    assert torch.count_nonzero(assert_same(result, expected, logits, upstream)[~kept]) == 0


def test_sampling_mask_that_keeps_the_target_only():
    logits, targets, upstream = make(3, 50)
    nothing = torch.zeros(3, 50, dtype=torch.bool)
    result = vocab_parallel_log_probs(logits, targets, sampling_mask=nothing, entropy="grad")
    for value in (*result, gradient(result, logits, upstream)):
        assert value is not None and value.abs().max() < 1e-15


# 5 extreme logits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_logits_lose_nothing(offset: float):
    """exp(1e4) overflows, and Σ p·x without the shift loses the entropy: 1e4 has a float32 spacing of 1e-3."""
    logits, targets, upstream = make(7, 50, torch.float32)
    with torch.no_grad():
        logits.add_(offset)
        logits[3, ::2] *= -1.0
    result = vocab_parallel_log_probs(logits, targets, entropy="grad")
    exact = logits.detach().double().requires_grad_()
    expected = dense(exact, targets)
    assert_close(result.log_probs.double(), expected.log_probs, rtol=1e-6, atol=1e-6)
    assert result.entropy is not None
    assert_close(result.entropy.double(), expected.entropy, rtol=1e-6, atol=1e-6)
    actual = gradient(result, logits, upstream.float())
    assert_close(actual.double(), gradient(expected, exact, upstream), rtol=1e-5, atol=1e-6)


def test_minus_infinity_is_a_probability_of_zero():
    """Models that forbid tokens put −inf there; 0 · −inf in the entropy and its gradient must not become NaN."""
    logits, targets, upstream = make(7, 50)
    targets = targets % 25 * 2
    with torch.no_grad():
        logits[:, 1::2] = -math.inf
    result = vocab_parallel_log_probs(logits, targets, entropy="grad")
    half = logits.detach()[:, ::2].requires_grad_()
    expected = dense(half, targets // 2)
    assert_close(result.entropy, expected.entropy)
    actual = gradient(result, logits, upstream)
    assert_close(actual[:, ::2], gradient(expected, half, upstream))
    assert torch.count_nonzero(actual[:, 1::2]) == 0


def test_nan_logits_are_not_hidden():
    logits, targets, _ = make()
    with torch.no_grad():
        logits[2, 5] = math.nan
    result = vocab_parallel_log_probs(logits, targets, entropy="detached")
    assert result.entropy is not None
    for value in result:
        assert value is not None and value.isnan().tolist() == [i == 2 for i in range(7)]


# 6 in place ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_gradient_is_the_same_and_overwrites_the_logits(dtype: torch.dtype):
    logits, targets, upstream = make(7, 50, dtype)
    targets[3] = -100
    arguments: dict[str, Any] = {"entropy": "grad", "vocab_size": 50, "block_rows": 2}
    expected = gradient(vocab_parallel_log_probs(logits, targets, **arguments), logits, upstream)
    result = vocab_parallel_log_probs(logits, targets, inplace_gradient=True, **arguments)
    assert result.entropy is not None
    loss = (result.log_probs * upstream).sum() + (result.entropy * upstream.flip(0) * 0.3).sum()
    actual = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(actual, expected) and actual.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="second backward through the same log-probs needs inplace_gradient=False"):
        torch.autograd.grad(loss, logits)


def test_inplace_gradient_of_rows_that_share_storage_is_refused():
    logits = torch.randn(1, 9, requires_grad=True).expand(4, 9)
    with pytest.raises(ValueError, match="logits is expanded: rows share their storage"):
        vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.int64), inplace_gradient=True)


@pytest.mark.parametrize("temperature", [None, "1"])
def test_a_temperature_that_is_no_number_is_refused(temperature: Any):
    logits, targets, _ = make()
    with pytest.raises(TypeError, match=r"temperature is a (NoneType|str): pass a float"):
        vocab_parallel_log_probs(logits, targets, temperature=temperature)


def test_a_second_backward_without_inplace_gradient_is_fine():
    logits, targets, upstream = make()
    loss = (vocab_parallel_log_probs(logits, targets).log_probs * upstream).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])


def test_log_probs_are_never_above_zero():
    """A certain token: rounding must not come out as a probability above 1, nor as a negative entropy."""
    logits, _, _ = make(4096, 4, torch.float32, scale=20.0)
    result = vocab_parallel_log_probs(logits, logits.argmax(-1), temperature=0.37, entropy="detached")
    assert result.entropy is not None and result.log_probs.max() <= 0 and result.entropy.min() >= 0
