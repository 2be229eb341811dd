"""What sitecustomize does to modules of miles. What slime needs as well is in slime's."""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import psutil  # pyright: ignore[reportMissingModuleSource]
import torch
from slime_on_cpu import _megatron_to_cpu, collectives_of_newer_torch, no_device_architecture, struct_is_dataclass

__all__ = ["collectives_of_newer_torch", "no_device_architecture"]


def cuda_means_cpu(module):
    """miles sets its device before it does anything else in a training process: from then on it is the CPU."""
    cuda = torch.cuda
    if cuda.is_available():
        return
    memory = psutil.virtual_memory
    cuda.set_device = lambda device: _megatron_to_cpu()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = cuda.ipc_collect = lambda: None
    cuda.mem_get_info = lambda device=None: (memory().available, memory().total)
    cuda.memory_allocated = cuda.memory_reserved = lambda device=None: psutil.Process().memory_info().rss
    # torch keeps what sets a generator's state for when CUDA is there.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()


def patience(module):
    wait = module.wait_for_server_ready
    module.wait_for_server_ready = lambda host, port, process=None, timeout=30: wait(host, port, process, 20 * timeout)


def gloo_to_the_engines(module):
    connect = module.init_process_group
    module.init_process_group = lambda **kwargs: connect(**{**kwargs, "backend": "gloo"})


def newer_sglang(module):
    struct_is_dataclass(module)
    engine = module.SGLangEngine
    connect = engine.init_weights_update_group
    gloo = {"backend": "gloo"}
    engine.init_weights_update_group = lambda self, *args, **kwargs: connect(self, *args, **{**kwargs, **gloo})
