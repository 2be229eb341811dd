"""Put on PYTHONPATH, next to ../shim: changes what needs a GPU in Megatron-LM, and nothing else."""
# pyright: reportMissingImports=false

import os
import typing

import typing_extensions
from import_hooks import Shim

if not hasattr(typing, "override"):  # Python 3.11; Megatron-LM asks for 3.12
    setattr(typing, "override", typing_extensions.override)  # noqa: B010

# What is replaced, and why.
SHIMMED = [
    ("typing.override", "Megatron-LM asks for Python 3.12"),
    ("torch.cuda (examples/megatron_core/cpu_shim.py)", "no GPU: its device, streams and literals are the CPU's"),
    ("initialize_megatron(allow_no_cuda=True)", "no GPU: its own argument, which pretrain does not pass"),
    ("arguments.get_device_arch_version", "no GPU: asked for with tensor or context parallelism"),
    ("transformer_engine_torch.thd_get_partitioned_indices", "no Transformer Engine: which tokens a CP rank has"),
    ("--spec megatron_cpu_spec layer_spec", "no Transformer Engine: attention over packed sequences by torch's SDPA"),
    ("datasets.utils.compile_helpers", "pybind11 and write access to the checkout, for data that RL does not read"),
    ("GPTModel.forward(fp32_output=)", "without --bf16: get_logprobs passes it, and only Float16Module takes it"),
    ("registry.AGENT_REGISTRY['TinyAgent']", "an environment that needs no data set from a hub"),
    ("rl.inference.megatron.MegatronLocal", "Megatron's engine needs CUDA kernels: one of its own abstract type"),
]
HOOKS = {
    "megatron.core.utils": "to_cpu",
    "megatron.core.datasets.utils": "no_compiler",
    "megatron.core.models.gpt.gpt_model": "full_precision",
    "megatron.training.training": "no_cuda_asked_for",
    "megatron.training.arguments": "no_device_architecture",
    "megatron.rl.agent.registry": "own_environment",
    "megatron.rl.inference.megatron": "own_engine",
}

if "MEGATRON_ON_CPU" in os.environ:
    Shim("megatron_rl", "megatron_on_cpu", SHIMMED, HOOKS, {}).install()
