"""Log-probs and entropy from logits, forward and backward, by this package and by what else there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import log_softmax

from examples.benchmarks.machine import version
from examples.benchmarks.results import NotHereError, first_line
from mismatch_plugin.parallel.log_probs import vocab_parallel_log_probs

Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(logits [T, V] with gradient, targets [T]) → log-probs and entropy, [T]."""


@dataclass(frozen=True)
class Contender:
    """name: as shown. package: on PyPI, None for torch and us. entropy: whether it is computed, with gradient.

    destroys: it overwrites the logits, and gets fresh ones before every call, outside the clock. make: imports what it
    needs and returns the function.
    """

    name: str
    entropy: bool
    make: Callable[[], Compute]
    package: str | None = None
    destroys: bool = False
    cuda_only: bool = False

    def compute(self, device: torch.device) -> Compute:
        """The function. Raises NotHereError where it cannot be had."""
        if self.package is not None and version(self.package) is None:
            raise NotHereError("not installed")
        if self.cuda_only and device.type != "cuda":
            raise NotHereError("needs CUDA")
        try:
            return self.make()
        except Exception as error:  # what a package raises at import without its CUDA part is anything
            raise NotHereError(f"cannot be imported: {first_line(error)}") from error


def ours(entropy: bool, inplace: bool = False, group: dist.ProcessGroup | None = None) -> Contender:
    """This package."""

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        kind = "grad" if entropy else "none"
        return vocab_parallel_log_probs(logits, targets, tp_group=group, entropy=kind, inplace_gradient=inplace)

    name = "mismatch_plugin, gradient in place" if inplace else "mismatch_plugin"
    return Contender(name, entropy, lambda: compute, destroys=inplace)


def plain(entropy: bool, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """log_softmax, and − Σ p ln p, by autograd, in float32 or the logits' float64."""
    log_p = log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) if entropy else None


def _torch(entropy: bool) -> Contender:
    return Contender("torch log_softmax + gather", entropy, lambda: partial(plain, entropy))


def _megatron(entropy: bool, fused: bool) -> Contender:
    def make() -> Compute:
        from examples.benchmarks.workers import megatron_groups

        megatron_groups()
        from megatron.core import parallel_state
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        group: Any = parallel_state.get_tensor_model_parallel_group()
        with_group = partial(fused_vocab_parallel_cross_entropy, tp_group=group)
        return _next_to_entropy(with_group if fused else vocab_parallel_cross_entropy, entropy)

    name = f"megatron-core {'fused' if fused else 'unfused'}"
    return Contender(name, entropy, make, "megatron-core", destroys=True)


def _next_to_entropy(cross_entropy: Callable[..., Tensor], entropy: bool) -> Compute:
    """A cross entropy of [T, 1, V] and [T, 1], and where asked the entropy by autograd, before the logits change."""

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        second = plain(True, logits, targets)[1] if entropy else None
        return -cross_entropy(logits[:, None], targets[:, None]).reshape(-1), second

    return compute


def _liger() -> Contender:
    def make() -> Compute:
        from liger_kernel.transformers.vocab_parallel_cross_entropy import (  # pyright: ignore
            LigerVocabParallelCrossEntropy,
        )

        return _next_to_entropy(LigerVocabParallelCrossEntropy(), entropy=False)

    return Contender("liger-kernel vocab-parallel", False, make, "liger-kernel", destroys=True, cuda_only=True)


def _transformer_engine() -> Contender:
    def make() -> Compute:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy  # pyright: ignore

        return _next_to_entropy(lambda x, y: parallel_cross_entropy(x, y, 0.0, False, None, -100), entropy=False)

    return Contender("transformer-engine", False, make, "transformer-engine", destroys=True, cuda_only=True)


def _trl(entropy: bool) -> Contender:
    def make() -> Compute:
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # pyright: ignore

        def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            chosen = selective_log_softmax(logits, targets)
            return chosen, entropy_from_logits(logits) if entropy else None

        return compute

    return Contender("TRL selective_log_softmax", entropy, make, "trl")


def sharded(group: dist.ProcessGroup | None) -> tuple[Contender, ...]:
    """Those that work on a shard of the vocabulary on CPU. megatron-core has no entropy of one."""
    return (
        ours(True, group=group),
        ours(False, group=group),
        _megatron(False, fused=False),
        _megatron(False, fused=True),
    )


def contenders() -> tuple[Contender, ...]:
    """All of them, this package first; the baseline of ratios is torch with the same entropy."""
    return (
        ours(True),
        ours(True, inplace=True),
        _torch(True),
        _megatron(True, fused=False),
        _megatron(True, fused=True),
        _trl(True),
        ours(False),
        _torch(False),
        _megatron(False, fused=False),
        _megatron(False, fused=True),
        _trl(False),
        _liger(),
        _transformer_engine(),
    )
