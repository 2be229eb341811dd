"""Which column of a dump is what: one set of names, and the spellings that files have for them."""

from __future__ import annotations

from collections.abc import Sequence

NAMES: dict[str, tuple[str, ...]] = {
    "response_ids": ("response_ids", "responses", "completion_ids", "response_token_ids", "output_ids"),
    "sequence": ("input_ids", "tokens", "token_ids", "sequences"),
    "prompt_ids": ("prompt_ids", "prompts", "prompt_token_ids"),
    "prompt_mask": ("prompt_mask",),
    "attention_mask": ("attention_mask",),
    "loss_mask": (
        "loss_mask",
        "loss_masks",
        "response_mask",
        "completion_mask",
        "token_loss_mask",
        "token_mask",
        "action_mask",
    ),
    "turn_mask": ("tool_mask", "env_mask"),
    "sample_mask": ("sample_mask", "sample_loss_mask", "loss_multiplier"),
    "remove_sample": ("remove_sample",),
    "response_length": ("response_length", "response_lengths", "completion_length", "completion_lengths"),
    "prompt_length": ("prompt_length", "prompt_lengths"),
    "total_length": ("total_length", "total_lengths", "input_lengths", "input_length"),
    "rollout_log_probs": (
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "generation_logprobs",
        "inference_logprobs",
        "sampling_logprobs",
    ),
    "log_probs": (
        "old_log_probs",
        "train_log_probs",
        "old_per_token_logps",
        "prev_logprobs",
        "old_logprobs",
        "log_probs",
    ),
    "advantages": ("advantages", "advantage"),
    "entropy": ("entropy", "entropys", "entropies"),
    "reward": ("reward", "rewards", "score", "scores", "token_level_scores", "rm_scores"),
    "group": ("group_index", "group", "group_id", "uid"),
    "sample_id": ("sample_id", "index", "sample_index", "sample_indices", "idx"),
    "weight_versions": ("weight_versions", "weight_version"),
    "temperature": ("temperature",),
    "finish_reason": ("finish_reason", "status"),
    "step": ("step", "global_step", "rollout_id"),
}
"""What a column is → its spellings; where a dump has several, the first."""


def understood() -> str:
    """The names, for messages."""
    return "; ".join(f"{name}: {', '.join(spellings)}" for name, spellings in NAMES.items())


class Columns:
    """Which name of a dump is what. Raises ValueError, with the names found and understood, where ids, boundaries or
    log-probs are missing. ignored: names that are nothing known, or a second spelling."""

    def __init__(self, keys: Sequence[str], place: str, *, leave: Sequence[str] = ()) -> None:
        self.found = {
            what: name
            for what, spellings in NAMES.items()
            if what not in leave and (name := next((name for name in spellings if name in keys), None))
        }
        self.ignored = sorted({*keys} - {*self.found.values()})
        self.absent = {name for names in NAMES.values() for name in names} - {*keys}
        lacking = None
        if not {"response_ids", "sequence"} & {*self.found}:
            lacking = "token ids of the responses"
        elif not {"rollout_log_probs", "log_probs"} & {*self.found}:
            lacking = "log-probs"
        elif "response_ids" not in self.found and not {"response_length", "prompt_length", "loss_mask"} & {*self.found}:
            lacking = "what tells a response from its prompt (response_length, prompt_length or loss_mask)"
        if lacking:
            raise ValueError(
                f"{place} holds no {lacking}. It has {', '.join(map(str, keys)) or 'nothing'}. Understood are "
                f"{understood()}."
            )

    def __contains__(self, what: str) -> bool:
        return what in self.found
