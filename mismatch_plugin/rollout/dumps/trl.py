"""What TRL's GRPOTrainer makes of a batch (`_generate_and_score_completions`), saved as a dict or as Parquet rows.

prompt_ids, prompt_mask (left-padded), completion_ids, completion_mask, sampling_per_token_logps, old_per_token_logps,
advantages [B], tool_mask. TRL asks vLLM for logprobs_mode processed_logprobs: after temperature and filters.
"""

from __future__ import annotations

from mismatch_plugin.rollout.dumps.columns import read_columns
from mismatch_plugin.rollout.dumps.part import Format

TRL = Format(
    "trl",
    "TRL's batch: completion_ids, completion_mask, sampling_per_token_logps, old_per_token_logps, advantages",
    lambda source: {"completion_ids", "sampling_per_token_logps"} <= {*source.keys},
    lambda source, options: read_columns(
        source, source.content, options, padded=["response_ids"], log_probs_of="filtered"
    ),
)
