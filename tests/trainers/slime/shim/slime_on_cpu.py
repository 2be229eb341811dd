"""What sitecustomize does to modules of slime; the accelerator also switches megatron-core to CPU."""
# pyright: basic, reportMissingParameterType=false, reportMissingModuleSource=false

import contextlib
import dataclasses
import os
import threading
import types

import psutil
import torch

_local = threading.local()


def _megatron_to_cpu():
    import cpu_shim  # pyright: ignore[reportMissingImports]

    first = cpu_shim._installed is None
    cpu_shim.install()
    # A checkpoint holds CUDA's random state in any case: the CPU's, which it holds as well.
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    if first:  # entered in this thread by install()
        _local.entered = True
    elif not getattr(_local, "entered", False):
        _local.entered = True
        cpu_shim.CudaLiteralsToCpu().__enter__()


def cpu_accelerator(module):
    cpu = torch.device("cpu")

    def memory(self, device=None):
        return psutil.virtual_memory().available, psutil.virtual_memory().total

    def resident(self, device=None):
        return psutil.Process().memory_info().rss

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def always(value):
        return lambda self, *args, **kwargs: value

    own = {
        "name": "cpu",
        "device_type": "cpu",
        "communication_backend_name": "gloo",
        "is_available": always(True),
        "device": always(cpu),
        "device_name": always("cpu"),
        "current_device": always("cpu"),
        "device_count": always(1),
        "set_device": lambda self, index: _megatron_to_cpu(),
        **dict.fromkeys(("synchronize", "current_stream", "empty_cache", "distributed_device_id"), always(None)),
        "stream": lambda self, stream: contextlib.nullcontext(),
        "mem_get_info": memory,
        **dict.fromkeys(("memory_allocated", "memory_reserved"), resident),
        "autocast": lambda self, *args, **kwargs: torch.autocast("cpu", *args, **kwargs),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), manual_seed),
        "resolve_visible_device_id": lambda self, physical_device_id: int(float(physical_device_id)),
    }
    accelerator = type("CPUAccelerator", (module.Accelerator,), own)
    module.register_accelerator(
        "cpu", accelerator, lambda: True, priority=-1, communication_backends=("gloo-accelerator",)
    )


def struct_is_dataclass(module):
    def fields(record):
        names = getattr(record, "__struct_fields__", None)
        return dataclasses.fields(record) if names is None else [types.SimpleNamespace(name=name) for name in names]

    module.dataclasses = types.SimpleNamespace(**{**vars(dataclasses), "fields": fields})


def newer_sglang(module):
    """What sglang 0.5.23 has changed since slime's 0.5.15.

    ServerArgs is a msgspec Struct; slime asks for its fields as of a dataclass (sglang_engine.py:575). Weights over a
    process group are taken only between begin_weight_update and end_weight_update.
    """

    struct_is_dataclass(module)
    update = module.SGLangEngine.update_weights_from_distributed

    def update_in_a_session(self, *args, **kwargs):
        self._make_request("begin_weight_update")
        try:
            return update(self, *args, **kwargs)
        finally:
            self._make_request("end_weight_update")

    module.SGLangEngine.update_weights_from_distributed = update_in_a_session
    if os.environ.get("SLIME_FAULT") == "no_flush":
        module.SGLangEngine.flush_cache = lambda self: None


def no_device_architecture(module):
    """With TP or CP Megatron-LM asks the GPU for its architecture, to judge CUDA_DEVICE_MAX_CONNECTIONS."""
    if not torch.cuda.is_available():
        module.get_device_arch_version = lambda: 10


def collectives_of_newer_torch(module):
    """torch 2.13 calls other methods of a process group than slime's wrapper forwards (reloadable_process_group.py)."""

    def forwarder(name):
        return lambda self, *args, **kwargs: self._fwd(name, *args, **kwargs)

    for name in ("all_gather_single", "reduce_scatter_single"):
        for method in (name, f"{name}_coalesced"):
            if hasattr(torch.distributed.ProcessGroup, method) and method not in vars(module.ReloadableProcessGroup):
                setattr(module.ReloadableProcessGroup, method, forwarder(method))
