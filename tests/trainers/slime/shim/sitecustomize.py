"""Put on PYTHONPATH, next to ../shim: runs slime on CPU."""
# pyright: reportMissingImports=false

from import_hooks import Shim

# What is replaced, and why. `--spec slime_cpu_spec layer_spec` is on the command line.
SHIMMED = [
    ("accelerator", "slime's registry gets a CPU backend by its own register_accelerator"),
    ("CUDA device names in torch calls of Megatron-LM", "they mean the CPU (examples/megatron_core/cpu_shim.py)"),
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

Shim("slime", "slime_on_cpu", SHIMMED, HOOKS, {}).install()
