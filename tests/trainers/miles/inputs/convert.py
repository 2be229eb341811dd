"""miles's own tools/convert_hf_to_torch_dist.py, started without a GPU: gloo in place of the NCCL that it names.

convert.py TOOL ARGUMENTS…
"""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import runpy
import sys

import miles.ray.train_actor  # noqa: F401 - the shim's hook on it makes torch.cuda mean the CPU
import torch.distributed

connect = torch.distributed.init_process_group


def without_gpu(backend, device_id, **kwargs):
    connect(backend="gloo", **kwargs)


torch.distributed.init_process_group = without_gpu
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
