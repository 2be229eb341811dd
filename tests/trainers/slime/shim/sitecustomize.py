"""Put on PYTHONPATH: runs slime on CPU by hooks on a few modules as they are imported.

Importing nothing heavy itself, it costs Ray's own processes nothing.
"""
# pyright: basic, reportMissingParameterType=false

import importlib.abc
import importlib.machinery
import os
import sys

# What is replaced, and why. `--spec slime_cpu_spec layer_spec` is on the command line.
SHIMMED = [
    ("accelerator", "slime's registry gets a CPU backend by its own register_accelerator"),
    ("CUDA device names in torch calls of Megatron-LM", "they mean the CPU (mismatch_plugin.lab.cpu_shim)"),
    ("torch.cuda.get_rng_state", "a checkpoint holds CUDA's random state in any case: the CPU's"),
    ("megatron.training.utils.get_device_arch_version", "with TP or CP Megatron-LM asks the GPU for its architecture"),
    ("GPT layer", "Transformer Engine needs a GPU: torch's modules under its parameter names"),
    ("slime's ReloadableProcessGroup", "torch 2.13 calls methods of a process group that it does not forward"),
    ("slime's SGLangEngine", "SGLang 0.5.23: ServerArgs is no dataclass; weight updates begin and end"),
]
HOOKS = {
    "slime.utils.accelerator": "cpu_accelerator",
    "megatron.training.utils": "no_device_architecture",
    "slime.utils.reloadable_process_group": "collectives_of_newer_torch",
    "slime.backends.sglang_utils.sglang_engine": "newer_sglang",
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, hook):
        self.loader, self.hook = loader, hook

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        if not os.environ.get("SLIME_SHIM_SHOWN"):  # once a run: its other processes inherit this
            os.environ["SLIME_SHIM_SHOWN"] = "1"
            for what, why in SHIMMED:
                print(f"shimmed: {what}: {why}", file=sys.stderr, flush=True)
        getattr(__import__("slime_on_cpu"), self.hook)(module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, HOOKS[fullname])
        return spec


sys.meta_path.insert(0, _Finder())
