"""Vocab-parallel log-probs: what they cost in memory and host syncs, the other backends, what is refused."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from examples.benchmarks.counting import OperationCounter
from mismatch_plugin.log_probs import RaggedSamplingMask, vocab_parallel_log_probs
from mismatch_plugin.log_probs.arguments import check_rows

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


def inputs(dtype: torch.dtype, what: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    logits, targets = torch.randn(T, V).to(dtype).requires_grad_(), torch.randint(0, V, (T,))
    ids = RaggedSamplingMask(torch.randint(0, V, (3 * T,)), torch.arange(0, 3 * T + 1, 3))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "padded": {"vocab_size": V - 5},
        "temperature": {"temperature": torch.rand(T) + 0.5},
        "ragged": {"sampling_mask": ids},
        "mask": {"sampling_mask": torch.rand(T, V) < 0.5},
        "rows": {"rows": torch.arange(T).flip(0)},
    }
    return logits, targets, options[what]


@pytest.mark.parametrize("what", ["plain", "padded", "temperature", "ragged", "mask", "rows"])
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
    # A penalty block of the sampling mask is one column wider.
    large = [name for name, elements in recorder.made if elements > BLOCK * (V + 1)]
    assert large == ([] if inplace else ["empty_like"]), "the gradient, which nothing fills before it is written"
    caller = {x.data_ptr() for x in (logits, targets, *options.values()) if isinstance(x, Tensor)}
    if what == "ragged":
        caller.add(options["sampling_mask"].token_ids.data_ptr())
    kept = [x for x in saved if x.data_ptr() not in caller and x.numel() > 1]
    assert all(x.shape == (T,) for x in kept)
    assert len({x.data_ptr() for x in kept}) == 3  # maximum, sum and entropy


def test_the_recorder_sees_what_it_must():
    """The two gates above are worth what this says."""
    with Recorder() as recorder:
        x = torch.ones(3, 5)
        x[x > 0].sum().item()
        torch.repeat_interleave(torch.tensor([1, 2]))
    assert {"aten._local_scalar_dense.default", "aten.repeat_interleave.Tensor"} <= set(recorder.syncs)
    assert any("index" in name or "nonzero" in name for name in recorder.syncs)
    assert ("gt", 15) in recorder.made


def test_no_graph_without_gradient():
    logits, targets, _ = inputs(torch.float32, "plain")
    with torch.no_grad():
        assert not vocab_parallel_log_probs(logits, targets).log_probs.requires_grad


def test_transformer_engine_gets_a_prepared_copy(monkeypatch: pytest.MonkeyPatch):
    """It needs CUDA: a stand-in with its signature, and the habit of overwriting its input, shows what it is sent."""
    seen: dict[str, Any] = {}

    def parallel_cross_entropy(
        inp: Tensor, target: Tensor, smoothing: float, reduce_loss: bool, group: Any, ignore_idx: int
    ) -> Tensor:
        seen.update(inp=inp, target=target, smoothing=smoothing, reduce_loss=reduce_loss, group=group)
        loss = torch.nn.functional.cross_entropy(
            inp.flatten(0, 1), target.flatten(), ignore_index=ignore_idx, reduction="none"
        )
        inp.data.zero_()
        return loss.view(target.shape)

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cross_entropy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules["transformer_engine.pytorch.cross_entropy"]
    module.parallel_cross_entropy = parallel_cross_entropy

    logits, targets, _ = inputs(torch.float32, "plain")
    rows, targets = torch.tensor([5, 3, 30]), torch.tensor([1, -1, 60])
    with torch.no_grad():
        logits[3] = math.nan
    before = logits.detach().clone()
    temperature = torch.tensor([0.5, 1.0, 2.0])
    arguments: dict[str, Any] = {"rows": rows, "temperature": temperature}
    actual = vocab_parallel_log_probs(logits, targets, backend="transformer-engine", **arguments).log_probs
    assert_close(actual, vocab_parallel_log_probs(logits, targets, **arguments).log_probs)
    assert seen["inp"].shape == (3, 1, V) and seen["target"].tolist() == [[1], [-100], [60]]
    assert (seen["smoothing"], seen["reduce_loss"], seen["group"]) == (0.0, False, None)
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())


def test_missing_transformer_engine_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    logits, targets, _ = inputs(torch.float32, "plain")
    with pytest.raises(RuntimeError, match="install its CUDA part or use backend='torch'"):
        vocab_parallel_log_probs(logits, targets, backend="transformer-engine")


def ragged(ids: int = 0, offsets: Tensor | None = None, dtype: torch.dtype = torch.int64) -> RaggedSamplingMask:
    offsets = torch.zeros(T + 1, dtype=torch.int64) if offsets is None else offsets
    return RaggedSamplingMask(torch.zeros(ids, dtype=dtype), offsets)


ROWS = torch.arange(T)
META = torch.device("meta")
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(2, 3, 4)}, r"logits has shape \[2, 3, 4\].*flatten batch and sequence"),
    ({"logits": torch.zeros(T, V, dtype=torch.int64)}, "logits is torch.int64: hand in"),
    ({"targets": torch.zeros(T)}, "targets is torch.float32: hand in int64 or int32"),
    ({"targets": torch.zeros(1, T, dtype=torch.int64)}, r"targets has shape \[1, 40\], one dimension"),
    ({"targets": torch.zeros(T - 1, dtype=torch.int64)}, "targets has 39 ids for 40 rows of logits"),
    ({"targets": torch.zeros(T, dtype=torch.int64, device=META)}, "targets is on meta, logits on cpu"),
    ({"rows": torch.zeros(T, dtype=torch.int32)}, "rows is torch.int32"),
    ({"rows": torch.zeros(T + 1, dtype=torch.int64)}, r"rows is torch.int64 \[41\]: one int64 index"),
    ({"rows": torch.zeros(T, dtype=torch.int64, device=META)}, "rows is on meta, logits on cpu"),
    ({"rows": ROWS - 1}, r"rows\[0\]=-1 is outside: rows must lie in \[0, T\), each at most once \(T=40\)"),
    ({"rows": torch.where(ROWS == 7, T, ROWS)}, r"rows\[7\]=40 is outside: rows must lie in \[0, T\)"),
    (
        {"rows": torch.where(ROWS == 7, 3, ROWS)},
        r"rows\[3\]=3 is there twice: rows must lie in \[0, T\), each at most once",
    ),
    ({"temperature": 0.0}, "temperature=0.0 must be positive and finite"),
    ({"temperature": math.nan}, "temperature=nan must be positive"),
    ({"temperature": torch.ones(3)}, r"temperature is torch.float32 \[3\]: pass a float, or one"),
    ({"temperature": torch.ones(T, device=META)}, "temperature is on meta"),
    ({"entropy": True}, "entropy=True is unknown: choose one of none, detached, grad"),
    (
        {"backend": "liger"},
        "backend='liger' is unknown: choose one of auto, torch, triton, megatron, transformer-engine",
    ),
    ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    ({"vocab_size": V + 1}, "vocab_size=65 is more than the 64 columns there are"),
    ({"vocab_start": -1}, "vocab_start=-1 is negative"),
    ({"vocab_start": 8}, "vocab_start=8 means a shard.*pass tp_group"),
    ({"block_rows": 0}, "block_rows=0 must be at least 1"),
    ({"sampling_mask": torch.ones(T, V)}, r"sampling_mask is torch.float32 \[40, 64\]: bool \[40, 64\] is needed"),
    ({"sampling_mask": torch.ones(T, 3, dtype=torch.bool)}, r"sampling_mask is torch.bool \[40, 3\]"),
    ({"sampling_mask": torch.ones(T, V, dtype=torch.bool, device=META)}, "sampling_mask is on meta"),
    ({"sampling_mask": ragged(dtype=torch.float32)}, "sampling_mask.token_ids is torch.float32"),
    ({"sampling_mask": ragged(offsets=torch.arange(T))}, r"offsets has shape \[40\]: \[41\] is needed"),
    ({"sampling_mask": ragged(offsets=torch.zeros(T + 1, device=META))}, "keep it int64 on the CPU"),
    (
        {"sampling_mask": ragged(3, torch.tensor([0, 2, 1, *[3] * (T - 2)]))},
        "offsets falls from 2 to 1 at target 1: it must ascend",
    ),
    ({"sampling_mask": ragged(3)}, "offsets runs from 0 to 0: it must run from 0 to the 3 token_ids"),
    ({"backend": "megatron", "entropy": "grad"}, "backend='megatron' cannot do entropy='grad': use backend='torch'"),
    ({"backend": "megatron", "sampling_mask": ragged()}, "backend='megatron' cannot do a sampling_mask"),
    ({"backend": "transformer-engine", "vocab_size": 60}, r"cannot do padding \(vocab_size=60\)"),
    ({"backend": "transformer-engine", "inplace_gradient": True}, "cannot do inplace_gradient=True"),
    ({"backend": "megatron", "logits": torch.zeros(T, V, dtype=torch.float64)}, "cannot do torch.float64 logits"),
]


def test_rows_on_a_device_are_asserted_there(monkeypatch: pytest.MonkeyPatch):
    """A row that is there twice would be a wrong gradient without a word, and reading the rows a host sync, which a
    fake tensor refuses."""
    asserted: list[tuple[Tensor, str]] = []
    monkeypatch.setattr(torch, "_assert_async", lambda *arguments: asserted.append(arguments))
    with torch._C.DisableTorchFunction(), FakeTensorMode():  # the CPU shim of another test reads "cuda" as "cpu"
        check_rows(torch.zeros(T, dtype=torch.int64, device="cuda"), T)
    [(right, message)] = asserted
    assert right.shape == () and right.is_cuda and message == "rows must lie in [0, T), each at most once"


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_what_does_not_fit_is_refused_in_one_sentence(arguments: dict[str, Any], message: str):
    logits, targets, _ = inputs(torch.float32, "plain")
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(**{"logits": logits, "targets": targets, **arguments})
