"""Signatures of two compiled operators of torchvision; ci/sglang_cpu.sh puts them before `_meta_registrations.py`.

The wheel's operators are linked against CUDA and do not load next to CPU torch, but that file needs the signatures.
"""

import torch as _torch

_signatures = _torch.library.Library("torchvision", "FRAGMENT")
_signatures.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_signatures.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
