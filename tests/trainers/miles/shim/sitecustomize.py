"""Put on PYTHONPATH: runs miles on CPU."""
# pyright: reportMissingImports=false

from import_hooks import Shim

# What is replaced, and why. `--spec slime_cpu_spec layer_spec` is on the command line.
SHIMMED = [
    ("torch.cuda's device, memory, stream and generator", "miles asks for its device by them: they mean the CPU"),
    ("CUDA device names in torch calls of Megatron-LM", "they mean the CPU (examples/megatron_core/cpu_shim.py)"),
    ("megatron.training.utils.get_device_arch_version", "with TP or CP Megatron-LM asks the GPU for its architecture"),
    ("GPT layer", "Transformer Engine needs a GPU: torch's modules under its parameter names"),
    ("miles's ReloadableProcessGroup", "torch 2.13 calls methods of a process group that it does not forward"),
    ("NCCL from the trainer to the engines", "gloo, which SGLang on CPU needs"),
    ("miles's SGLangEngine", "SGLang 0.5.23: ServerArgs is no dataclass"),
    ("miles's 30 s for its router to start", "600 s: on a few busy cores its imports alone take longer"),
    ("DeepSeek V4's chat template", "empty and not used: only miles's SGLang has the module"),
    ("miles's weights by RDMA (p2p)", "empty and not used: it imports names of miles's SGLang, and mooncake"),
]
_WEIGHTS = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed"
HOOKS = {
    "miles.ray.train_actor": "cuda_means_cpu",
    "megatron.training.utils": "no_device_architecture",
    "miles.utils.http_utils": "patience",
    "miles.utils.reloadable_process_group": "collectives_of_newer_torch",
    f"{_WEIGHTS}.broadcast": "gloo_to_the_engines",
    "miles.backends.sglang_utils.sglang_engine": "newer_sglang",
}
EMPTY = {"sglang.srt.entrypoints.openai.encoding_dsv4": (), f"{_WEIGHTS}.p2p": ("UpdateWeightP2P",)}

Shim("miles", "miles_on_cpu", SHIMMED, HOOKS, EMPTY).install()
