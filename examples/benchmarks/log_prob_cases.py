"""Log-probs and entropy from logits, forward and backward, by this package and by what else there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import log_softmax

from examples.benchmarks import log_prob_incumbents as incumbents
from examples.benchmarks.machine import version
from examples.benchmarks.results import NotHereError, first_line
from examples.benchmarks.sources import NEMO_RL, PACKAGES, SLIME
from mismatch_plugin.parallel.log_probs import vocab_parallel_log_probs

OURS = "mismatch_plugin"
IN_PLACE = f"{OURS}, gradient in place"
TORCH = "torch log_softmax + gather"
COMPILED = "torch.compile of these two lines"
Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(logits [T, V] with gradient, targets [T]) → log-probs and entropy, [T]."""


@dataclass(frozen=True)
class Contender:
    """name: as shown. package: on PyPI, None for torch and us. entropy: whether it is computed, with gradient.

    destroys: it overwrites the logits, and gets fresh ones before every call, outside the clock. make: imports what it
    needs and returns the function. source: where its code is from, if that is no package.
    """

    name: str
    entropy: bool
    make: Callable[[], Compute]
    package: str | None = None
    destroys: bool = False
    cuda_only: bool = False
    source: str | None = None

    def compute(self, device: torch.device) -> Compute:
        """The function. Raises NotHereError where it cannot be had."""
        if self.cuda_only and device.type != "cuda":
            raise NotHereError("needs CUDA")
        if self.package is not None and version(self.package) is None:
            raise NotHereError(f"not installed: pip install {self.package}" if self.cuda_only else PACKAGES)
        try:
            return self.make()
        except NotHereError:
            raise
        except Exception as error:  # what a package raises at import without its CUDA part is anything
            raise NotHereError(f"cannot be imported: {first_line(error)}") from error


def ours(entropy: bool, inplace: bool = False, group: dist.ProcessGroup | None = None) -> Contender:
    """This package."""

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        kind = "grad" if entropy else "none"
        return vocab_parallel_log_probs(logits, targets, tp_group=group, entropy=kind, inplace_gradient=inplace)

    return Contender(IN_PLACE if inplace else OURS, entropy, lambda: compute, destroys=inplace)


def plain(entropy: bool, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """log_softmax, and − Σ p ln p, by autograd, in float32 or the logits' float64."""
    log_p = log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) if entropy else None


def _torch(entropy: bool) -> Contender:
    return Contender(TORCH, entropy, lambda: partial(plain, entropy))


def _compiled(entropy: bool) -> Contender:
    def make() -> Compute:
        if not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "g++")) is None:
            raise NotHereError("needs a C++ compiler: apt-get install g++")
        torch._dynamo.config.recompile_limit = 64  # one for each size, not one for all sizes
        return torch.compile(partial(plain, entropy), dynamic=False)

    return Contender(COMPILED, entropy, make)


def _megatron(fused: bool) -> Contender:
    def make() -> Compute:
        from examples.benchmarks.workers import megatron_groups

        megatron_groups(model=False)
        from megatron.core import parallel_state
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        group: Any = parallel_state.get_tensor_model_parallel_group()
        with_group = partial(fused_vocab_parallel_cross_entropy, tp_group=group)
        return _of_cross_entropy(with_group if fused else vocab_parallel_cross_entropy)

    name = f"megatron-core {'fused' if fused else 'unfused'}"
    return Contender(name, False, make, "megatron-core", destroys=True)


def _incumbents(group: dist.ProcessGroup | None) -> tuple[Contender, ...]:
    """What trainers run: with entropy, and without. verl's log-probs alone are megatron-core's unfused ones."""
    described = {checkout.project: "" if checkout.there else ", as described" for checkout in (SLIME, NEMO_RL)}
    found = [Contender("verl's entropy + megatron-core", True, incumbents.verl, "verl")]
    for entropy in (True, False):
        slime, nemo_rl = partial(incumbents.slime, entropy, group), partial(incumbents.nemo_rl, entropy, group)
        found.append(Contender(f"slime's Function{described['slime']}", entropy, slime, source=SLIME.source()))
        found.append(Contender(f"NeMo-RL's chunks{described['NeMo-RL']}", entropy, nemo_rl, source=NEMO_RL.source()))
    return tuple(found)


def _of_cross_entropy(cross_entropy: Callable[..., Tensor]) -> Compute:
    """A cross entropy of [T, 1, V] and [T, 1]."""

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return -cross_entropy(logits[:, None], targets[:, None]).reshape(-1), None

    return compute


def _liger() -> Contender:
    def make() -> Compute:
        from liger_kernel.transformers.vocab_parallel_cross_entropy import (  # pyright: ignore
            LigerVocabParallelCrossEntropy,
        )

        return _of_cross_entropy(LigerVocabParallelCrossEntropy())

    return Contender("liger-kernel vocab-parallel", False, make, "liger-kernel", destroys=True, cuda_only=True)


def _transformer_engine() -> Contender:
    def make() -> Compute:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy  # pyright: ignore

        newer = "overwrite_input" in signature(parallel_cross_entropy).parameters
        options = {"overwrite_input": True} if newer else {}  # older ones have no choice
        return _of_cross_entropy(lambda x, y: parallel_cross_entropy(x, y, 0.0, False, None, -100, **options))

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
    """Those that work on a shard of the vocabulary on CPU; torch's lines, compiled or not, and TRL's cannot."""
    own = [ours(entropy, inplace, group) for entropy in (True, False) for inplace in (False, True)]
    return _ordered((*own, *_incumbents(group), _megatron(fused=False), _megatron(fused=True)))


def contenders() -> tuple[Contender, ...]:
    """All of them, those with entropy first, and of these this package first."""
    own = [ours(entropy, inplace) for entropy in (True, False) for inplace in (False, True)]
    lines = [make(entropy) for entropy in (True, False) for make in (_torch, _compiled, _trl)]
    borrowed = (_megatron(fused=False), _megatron(fused=True), _liger(), _transformer_engine())
    return _ordered((*own, *lines, *_incumbents(None), *borrowed))


def _ordered(found: tuple[Contender, ...]) -> tuple[Contender, ...]:
    return tuple(sorted(found, key=lambda contender: not contender.entropy))
