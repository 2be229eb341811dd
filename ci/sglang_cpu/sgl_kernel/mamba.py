"""The same for `sgl_kernel.mamba`, which state-space models call."""

from __future__ import annotations

from sgl_kernel import absent

causal_conv1d_fn_cpu = absent("causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = absent("causal_conv1d_update_cpu")
chunk_gated_delta_rule_cpu = absent("chunk_gated_delta_rule_cpu")
