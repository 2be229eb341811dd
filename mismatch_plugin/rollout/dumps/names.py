"""Which column of a dump is what: one set of names, and the spellings that files have for them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

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
        "train_logprobs",
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
    "weight_fingerprint": ("weight_fingerprint",),
    "trainer_weight_version": ("trainer_weight_version",),
    "temperature": ("temperature",),
    "finish_reason": ("finish_reason", "status"),
    "step": ("step", "global_step", "rollout_id"),
}
"""What a column is → its spellings; where a dump has several, the first."""


_TRAINING = ("train_log_probs", "train_logprobs")
"""Next to one of them, `logprobs` are the sampler's; next to other names they may be any policy's."""


class Columns:
    """Which name of a dump is what. Raises ValueError, with what is there, what to add and near names, where ids,
    boundaries or log-probs are missing. ignored: names that are nothing known, or a second spelling."""

    def __init__(self, keys: Sequence[str], place: str, *, leave: Sequence[str] = ()) -> None:
        self.found = {
            what: name
            for what, spellings in NAMES.items()
            if what not in leave and (name := next((name for name in spellings if name in keys), None))
        }
        # Names that say too little by themselves.
        if "rollout_log_probs" not in self.found and "logprobs" in keys and self.found.get("log_probs") in _TRAINING:
            self.found["rollout_log_probs"] = "logprobs"
        if "loss_mask" not in self.found and "mask" in keys and "response_ids" in self.found:
            self.found["loss_mask"] = "mask"  # next to whole sequences it may be the attention's
        self.ignored = sorted({*keys} - {*self.found.values()})
        self.absent = {name for names in NAMES.values() for name in names} - {*keys}
        if lacking := self._lacking():
            shown = ", ".join([*keys][:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
            near = "".join(f" {hint}" for hint in self._near())
            what, add = lacking
            raise ValueError(
                f"{place} lacks {what}. It has {shown or 'nothing'}.{near} Add {add}. docs/inspect.md#what-is-read "
                f"lists all names."
            )

    def _lacking(self) -> tuple[str, str] | None:
        """(what is not there, what to add)."""
        if not {"response_ids", "sequence"} & {*self.found}:
            return "token ids of the responses", 'the line "response_ids": response_ids, one sampled id a log-prob'
        if not {"rollout_log_probs", "log_probs"} & {*self.found}:
            return "log-probs", '"rollout_log_probs" (of the sampler) and "old_log_probs" (of the trainer)'
        if "response_ids" not in self.found and not {"response_length", "prompt_length", "loss_mask"} & {*self.found}:
            rename = " (rename mask where it is that, not the attention's)" if "mask" in self.ignored else ""
            return "what tells a response from its prompt", f'"response_length", "prompt_length" or "loss_mask"{rename}'
        return None

    def _near(self) -> list[str]:
        """Names that look like one that is known and not there."""
        known = [name for what, names in NAMES.items() if what not in self.found for name in names]
        near = {name: get_close_matches(name.lower(), known, 1, 0.75) for name in self.ignored}
        return [f"{name}: did you mean {like[0]}?" for name, like in near.items() if like]

    def notes(self) -> list[str]:
        """What a reader must know of the names."""
        notes = [f"not read: {', '.join(self.ignored)}"] if self.ignored else []
        if self.found.get("rollout_log_probs") == "logprobs":
            notes.append(f"logprobs are taken as the sampler's, {self.found['log_probs']} as the trainer's")
        return notes + self._near()

    def __contains__(self, what: str) -> bool:
        return what in self.found


_SHOWN = 12
"""Names of a file in an error."""
