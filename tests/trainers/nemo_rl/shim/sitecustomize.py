"""Put on PYTHONPATH, next to ../shim: NeMo-RL's GRPO runs on CPU, under Python 3.11, without trackers not used here."""
# pyright: reportMissingImports=false

import typing

import typing_extensions
from import_hooks import Shim

# What is replaced, and why.
SHIMMED = [
    ("typing's override, TypedDict and NotRequired", "NeMo-RL asks for Python 3.13"),
    ("mlflow, swanlab, soundfile", "empty and not used: imported by its logger and its data sets"),
    ("torch.Tensor.cuda", "no GPU: what NeMo-RL moves to one stays where it is (model_utils.py, prepare_loss_input)"),
    ("grpo.Policy", "its workers need a GPU: one of its own abstract type, a transformers model in one process"),
    (
        "grpo.VllmGeneration",
        "vLLM needs a GPU: one of its own abstract type, which samples from its own copy of the model",
    ),
    ("VllmGeneration.weight_synchronizer", "CUDA IPC to vLLM: one of its own abstract type, which copies the weights"),
]
HOOKS = {"nemo_rl.algorithms.grpo": "own_policy_and_engine", "nemo_rl.distributed.model_utils": "tensors_stay"}
EMPTY = dict.fromkeys(("mlflow", "swanlab", "soundfile"), ())

for name in ("override", "TypedDict", "NotRequired"):
    setattr(typing, name, getattr(typing_extensions, name))
Shim("nemo_rl", "nemo_rl_on_cpu", SHIMMED, HOOKS, EMPTY).install()
