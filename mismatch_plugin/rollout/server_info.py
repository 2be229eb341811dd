"""What a server says about itself, as far as it matters for the mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class ServerInfo(BaseModel):
    """Version, model, and the settings that move log-probs away from the training side's. None: not told.

    `SGLANG_RETURN_ORIGINAL_LOGPROB` (log-probs before temperature) is an environment variable that no server reports.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    version: str | None = None
    model_path: str | None = None
    vocab_size: int | None = None
    tokenizer_path: str | None = None
    weight_version: str | None = None
    load_format: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    enable_fp32_lm_head: bool | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    sampling_backend: str | None = None
    moe_runner_backend: str | None = None
    enable_deterministic_inference: bool | None = None
    rl_on_policy_target: str | None = None
    speculative_algorithm: str | None = None
    disable_radix_cache: bool | None = None
    disable_cuda_graph: bool | None = None
    chunked_prefill_size: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    random_seed: int | None = None
    context_length: int | None = None
    allow_auto_truncate: bool | None = None
    sampling_mask_max_tokens: int | None = None
    sampling_defaults: str | None = None
    preferred_sampling_params: dict[str, Any] | None = None
    skip_tokenizer_init: bool | None = None

    @classmethod
    def from_replies(cls, server: Mapping[str, Any], model: Mapping[str, Any]) -> ServerInfo:
        """Out of `/server_info` (as started) and `/model_info` (as weight updates left it), which wins."""
        return cls.model_validate({**server, **{key: value for key, value in model.items() if value is not None}})

    def risks(self) -> list[str]:
        """Settings known to widen the mismatch, one sentence each with its fix."""
        rounds_head = self.dtype in ("bfloat16", "float16", "half") and not self.enable_fp32_lm_head
        rounds_cache = self.kv_cache_dtype not in (None, "auto", self.dtype)
        preferred = f"preferred_sampling_params {self.preferred_sampling_params}"
        quantized = f"quantization {self.quantization}"
        speculative = f"speculative decoding {self.speculative_algorithm}"
        found = [
            (self.quantization, f"{quantized}: weights or activations are rounded; serve unquantised."),
            (rounds_cache, f"kv_cache_dtype {self.kv_cache_dtype}: keys and values are rounded; use auto."),
            (rounds_head, f"logits are computed in {self.dtype}; start with --enable-fp32-lm-head."),
            (self.speculative_algorithm, f"{speculative}: check whether log-probs are the target's."),
            (self.preferred_sampling_params, f"{preferred} stand in where a request is silent."),
            (self.allow_auto_truncate, "allow_auto_truncate: long prompts are cut without a word; start without it."),
        ]
        return [risk for holds, risk in found if holds]
