"""What it takes to run megatron-core 0.16 on CPU over gloo: it asks CUDA for its device in a few dozen places, although
GPTModel, schedules, DDP, optimizers and `finalize_model_grads` need no GPU. Nothing of megatron itself is replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FULL_PRECISION = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.DoubleTensor": "torch.cuda.FloatTensor"}

_installed: CudaLiteralsToCpu | None = None


class CudaLiteralsToCpu(TorchFunctionMode):
    """Rewrites what megatron-core spells out as CUDA in calls of torch functions, in the thread that entered it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func is not torch.Tensor.type:
            return func(*args)  # nearly every call; this mode is on the path of all of them
        kwargs = dict(kwargs or {})
        # `torch.zeros(..., device="cuda")`: token counts of the schedules, the optimizers' scale, grad clipping.
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        # `torch.tensor(..., pin_memory=True)`: RoPE under context parallelism. Pinning needs a GPU driver.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = func(*args, **kwargs)
        # `grad.type() == "torch.cuda.FloatTensor"`: gradient clipping and the distributed optimizer want nothing else.
        if func is torch.Tensor.type and isinstance(result, str):
            result = _FULL_PRECISION.get(result, result.replace("torch.", "torch.cuda.", 1))
        return result


class _NoStream:
    """Stands for the one order of work there is on CPU; also for an event on it."""

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass


def install() -> None:
    """Make megatron-core run on CPU in this process and thread. Does nothing where CUDA is available. Idempotent."""
    global _installed
    if _installed is None and not torch.cuda.is_available():
        cuda: Any = torch.cuda
        tensor: Any = torch.Tensor
        # Device of RoPE, of the tensor and sequence parallel collectives, of pipeline receive and DDP gradient buffers.
        cuda.current_device = lambda: torch.device("cpu")
        # Pipeline communication waits for the device after batched sends and receives.
        cuda.synchronize = lambda device=None: None
        # RoPE under context parallelism and tied embeddings under pipeline parallelism move tensors with `.cuda()`.
        tensor.cuda = lambda self, *args, **kwargs: self
        # The dispatcher of experts copies token counts to the host on a stream of its own.
        cuda.Stream, cuda.stream = _NoStream, lambda stream: nullcontext()
        cuda.current_stream = lambda device=None: _NoStream()
        _installed = CudaLiteralsToCpu()
        _installed.__enter__()
