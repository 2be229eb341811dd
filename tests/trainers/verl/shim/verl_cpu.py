"""verl on a CPU, by its own seams. VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu: every process imports this.

Nothing of verl's data, advantages, losses or arguments is touched, nor what its weights hold: see docs/appendix.md.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout import base as rollout
from verl.workers.rollout.replica import RolloutReplicaRegistry

CPU = torch.device("cpu")
_MEMORY = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
DEVICE: Any = SimpleNamespace(
    is_available=lambda: False,  # verl then keeps no statistics of device memory
    current_device=lambda: CPU,
    device_count=lambda: 1,
    get_device_name=lambda *_: "CPU",
    mem_get_info=lambda *_: (0, 0),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect"), lambda *_, **__: None),
    **dict.fromkeys(_MEMORY, lambda *_: 0),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    manual_seed=torch.manual_seed,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Tensors stay where they are; Ray's GPUs are numbers that place one worker each."""

    device_name = vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return False

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:  # verl gives it to `Tensor.to`
        return CPU

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for a worker with a GPU

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def is_ipc_supported(self) -> bool:
        return False

    def _nothing(self, *_: Any) -> None:
        return None

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
    cudart = _nothing


def _sglang() -> Any:
    from verl_cpu_sglang import CpuReplica

    return CpuReplica


verl_distributed.initialize_global_process_group_ray = partial(
    verl_distributed.initialize_global_process_group_ray, backend="gloo"
)
rollout._ROLLOUT_REGISTRY["sglang", "async"] = "verl_cpu_sglang.FileServerAdapter"
RolloutReplicaRegistry.register("sglang", _sglang)
