"""For `--spec megatron_cpu_spec layer_spec`: megatron's local GPT layer with attention that takes packed sequences."""

from __future__ import annotations

from typing import Any

from cpu_spec import CoreAttention  # pyright: ignore[reportMissingImports]
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

layer_spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
layer_spec.submodules.self_attention.submodules.core_attention = CoreAttention
