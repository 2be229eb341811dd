"""What sitecustomize does to the modules in its HOOKS; the accelerator also switches megatron-core to CPU."""
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
    class CPUAccelerator(module.Accelerator):
        name = "cpu"
        device_type = "cpu"
        communication_backend_name = "gloo"

        def is_available(self):
            return True

        def device(self, index=None):
            return torch.device("cpu")

        def device_name(self, index=None):
            return "cpu"

        def set_device(self, index):
            _megatron_to_cpu()

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 1

        def synchronize(self, device=None):
            pass

        def current_stream(self, device=None):
            return None

        def stream(self, stream):
            return contextlib.nullcontext()

        def empty_cache(self):
            pass

        def mem_get_info(self, device=None):
            memory = psutil.virtual_memory()
            return memory.available, memory.total

        def memory_allocated(self, device=None):
            return psutil.Process().memory_info().rss

        memory_reserved = memory_allocated

        def autocast(self, *args, **kwargs):
            return torch.autocast("cpu", *args, **kwargs)

        def distributed_device_id(self, index=None):
            return None

        def manual_seed(self, seed):
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def resolve_visible_device_id(self, physical_device_id):
            return int(float(physical_device_id))

    module.register_accelerator(
        "cpu", CPUAccelerator, lambda: True, priority=-1, communication_backends=("gloo-accelerator",)
    )


def newer_sglang(module):
    """What sglang 0.5.23 has changed since slime's 0.5.15.

    ServerArgs is a msgspec Struct; slime asks for its fields as of a dataclass (sglang_engine.py:575). Weights over a
    process group are taken only between begin_weight_update and end_weight_update.
    """

    def fields(record):
        names = getattr(record, "__struct_fields__", None)
        return dataclasses.fields(record) if names is None else [types.SimpleNamespace(name=name) for name in names]

    module.dataclasses = types.SimpleNamespace(**{**vars(dataclasses), "fields": fields})
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
