"""Stands in for the CUDA-only wheel `sgl_kernel`, whose names sglang imports at module level on every device.

None of them is called without speculative decoding; a call raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """A function of that name which only raises."""

    def function(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA; this environment runs sglang on CPU.")

    return function


copy_all_layer_kv_cache_cpu = absent("copy_all_layer_kv_cache_cpu")
assign_req_to_token_pool_cpu = absent("assign_req_to_token_pool_cpu")
rotate_input_ids_cpu = absent("rotate_input_ids_cpu")
fill_accept_out_cache_loc_cpu = absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = absent("fill_bonus_tokens_cpu")
assign_draft_cache_locs_contiguous_cpu = absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = absent("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = absent("verify_tree_greedy_cpu")
