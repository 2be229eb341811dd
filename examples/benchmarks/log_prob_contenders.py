"""Log-probs and entropy, forward and backward, from logits and from hidden states: this package and what else there is.

Each contender gets a random gradient for every token and returns log-probs, entropy where it has one, and gradients.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from examples.benchmarks.measuring import Contender, checkout, file_of, megatron_groups
from mismatch_plugin.log_probs import vocab_parallel_linear_log_probs, vocab_parallel_log_probs

OURS = "mismatch_plugin"
IN_PLACE = f"{OURS}, gradient over the logits"
COMPILED = "torch.compile of these lines"
FUSED = "megatron-core fused"
CROSS_ENTROPIES = ("megatron-core unfused", FUSED, "liger-kernel", "transformer-engine")
NEMO_CHUNK = 1024
"""Rows of a chunk, as in NeMo-RL's examples (logprob_chunk_size)."""

Group = dist.ProcessGroup | None
Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(logits [T, V] with gradient, targets [T]) → log-probs and entropy, [T]."""


def plain(entropy: bool, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """log_softmax and gather, and − Σ p ln p, by autograd in float32."""
    log_p = F.log_softmax(logits.float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) if entropy else None


def ours(entropy: bool, inplace: bool = False, group: Group = None) -> Compute:
    """This package."""
    options: Any = {"entropy": "grad" if entropy else "none", "inplace_gradient": inplace, "tp_group": group}
    return partial(vocab_parallel_log_probs, **options)


def compiled(entropy: bool) -> Compute:
    """The plain lines under torch.compile."""
    torch._dynamo.config.recompile_limit = 64  # one for each size, not one for all sizes
    return torch.compile(partial(plain, entropy), dynamic=False)


def trl(entropy: bool) -> Compute:
    """TRL's functions."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # pyright: ignore

    return lambda x, targets: (selective_log_softmax(x, targets), entropy_from_logits(x) if entropy else None)


def slime(entropy: bool, group: Group) -> Compute:
    """slime's `_VocabParallelLogProbEntropy`, which asserts float32 logits."""
    function = file_of(checkout("SLIME_SRC") / "slime/utils/ppo_utils.py")._VocabParallelLogProbEntropy

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        log_probs, entropies = function.apply(logits.float(), targets, None, group, entropy, entropy)
        return log_probs[:, 0], entropies if entropy else None

    return compute


def verl() -> Compute:
    """As its Megatron engine: the logits cloned, vocab_parallel_entropy of them, and of the clone the cross entropy."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'verl'")
    megatron_groups()
    verls = file_of(Path(spec.origin).parent / "utils/megatron/tensor_parallel.py")

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = logits.float()
        copy = logits.clone()
        entropies = verls.vocab_parallel_entropy(logits)
        return verls.vocab_parallel_log_probs_from_logits(copy[:, None], targets[:, None])[:, 0], entropies

    return compute


def nemo_rl(entropy: bool, group: Group) -> Compute:
    """NeMo-RL's ChunkedDistributedLogprob, and next to it ChunkedDistributedEntropy (which gives Σ p ln p)."""
    folder = checkout("NEMO_RL_SRC")
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.distributed"):  # bare: the real ones load a trainer
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules.setdefault(name, package)
    from nemo_rl.distributed import model_utils  # pyright: ignore

    megatron_groups()  # it reduces over a group, of one rank too

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        first = logits.shape[-1] * dist.get_rank(group)
        shard = (first, first + logits.shape[-1], NEMO_CHUNK, group, False)
        log_probs = model_utils.ChunkedDistributedLogprob.apply(logits[None], targets[None], *shard)[0]
        if not entropy:
            return log_probs, None
        return log_probs, -model_utils.ChunkedDistributedEntropy.apply(logits[None], NEMO_CHUNK, group, False)[0]

    return compute


def cross_entropy_of(package: str) -> Compute:
    """Cross entropies of [T, 1, V] and [T, 1] that overwrite the logits; the fused one's gradient is bfloat16."""
    if package in ("liger-kernel", "transformer-engine") and not torch.cuda.is_available():
        raise ImportError("needs CUDA")
    if package == "liger-kernel":
        from liger_kernel.transformers import vocab_parallel_cross_entropy  # pyright: ignore

        function: Any = vocab_parallel_cross_entropy.LigerVocabParallelCrossEntropy()
    elif package == "transformer-engine":
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy  # pyright: ignore

        function = partial(parallel_cross_entropy, overwrite_input=True)
    else:
        megatron_groups()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        group: Any = parallel_state.get_tensor_model_parallel_group()
        fused = partial(fused_vocab_parallel_cross_entropy, tp_group=group)
        function = fused if package == FUSED else tensor_parallel.vocab_parallel_cross_entropy
    return lambda logits, targets: (-function(logits[:, None], targets[:, None]).reshape(-1), None)


def draw_logits(tokens: int, vocab: int, dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, V] of deviation 3, targets [T], and the gradients of log-probs and entropies [2, T]."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(tokens, vocab, dtype=getattr(torch, dtype), device=device).normal_(0, 3, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    return logits, targets, torch.randn(2, tokens, generator=generator, device=device)


def step(compute: Compute, logits: Tensor, targets: Tensor, grads: Tensor) -> list[Tensor]:
    """One forward and backward."""
    outputs = [value for value in compute(logits, targets) if value is not None]
    torch.autograd.backward(outputs, [grad.to(value.dtype) for value, grad in zip(outputs, grads, strict=False)])
    gradient, logits.grad = logits.grad, None
    assert gradient is not None
    return [*(value.detach() for value in outputs), gradient]


def from_logits(
    tokens: int, vocab: int, dtype: str, entropy: bool, device: torch.device, group: Group = None
) -> list[Contender]:
    """All that compute the entropy too, or all that compute log-probs alone.

    group: `vocab` columns are this rank's, and those that need the whole vocabulary on one rank are left out. Who
    overwrites the logits gets fresh ones before every call, and is compared with ours that does so too.
    """
    source, targets, grads = draw_logits(tokens, vocab, dtype, device)
    if group is not None:
        targets = draw_logits(tokens, vocab * dist.get_world_size(group), dtype, device)[1]
    scratch = source.clone()
    makes: dict[str, Callable[[], Compute]] = {
        OURS: lambda: ours(entropy, group=group),
        IN_PLACE: lambda: ours(entropy, inplace=True, group=group),
        "slime's Function": lambda: slime(entropy, group),
        "NeMo-RL's chunks": lambda: nemo_rl(entropy, group),
    }
    if group is None:
        makes["torch: log_softmax, gather"] = lambda: partial(plain, entropy)
        makes[COMPILED] = lambda: compiled(entropy)
        makes["TRL's functions"] = lambda: trl(entropy)
    if entropy:
        makes["verl's entropy + megatron-core"] = verl
    else:
        makes |= {package: partial(cross_entropy_of, package) for package in CROSS_ENTROPIES}
    contenders = []
    for name, make in makes.items():
        overwrites, counted = name in (IN_PLACE, *CROSS_ENTROPIES), name not in (COMPILED, FUSED)
        logits = (scratch if overwrites else source).detach().requires_grad_()
        prepare = partial(scratch.copy_, source) if overwrites else lambda: None
        run = lambda make=make, logits=logits: partial(step, make(), logits, targets, grads)  # noqa: E731
        contenders.append(Contender(name, run, prepare, over=IN_PLACE if overwrites else None, counted=counted))
    return contenders


def from_hidden(tokens: int, vocab: int, width: int, entropy: bool, device: torch.device) -> list[Contender]:
    """From hidden states [T, H] and the head's weight [V, H], to the gradients of both."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden = torch.empty(tokens, width, dtype=dtype, device=device).normal_(generator=generator).requires_grad_()
    weight = torch.empty(vocab, width, dtype=dtype, device=device).normal_(0, 3 / width**0.5, generator=generator)
    weight.requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    grads = torch.randn(2, tokens, generator=generator, device=device)

    def run(compute: Callable[[], Any]) -> list[Tensor]:
        outputs = [value for value in compute() if value is not None]
        upstream = [g.to(value.dtype) for value, g in zip(outputs, grads, strict=False)]
        gradients = torch.autograd.grad(outputs, [hidden, weight], upstream)
        return [*(value.detach() for value in outputs), *gradients]

    kind = "grad" if entropy else "none"
    found: dict[str, Callable[[], Any]] = {
        f"{OURS}, from hidden states": partial(vocab_parallel_linear_log_probs, hidden, weight, targets, entropy=kind),
        "hidden @ weight.T, then ours": lambda: ours(entropy)(hidden @ weight.T, targets),
        "the same, gradient over the logits": lambda: ours(entropy, inplace=True)(hidden @ weight.T, targets),
    }
    if not entropy:
        found["torch's F.linear_cross_entropy"] = lambda: [
            -F.linear_cross_entropy(hidden, weight, targets, reduction="none")
        ]
    return [Contender(name, lambda compute=compute: partial(run, compute)) for name, compute in found.items()]
