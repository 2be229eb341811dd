"""verl (0.9): a DataProto or TensorDict saved with torch.save, or its tensors in a dict, .pt or .npz.

responses, response_mask, rollout_log_probs, old_log_probs, advantages [B, R], padded on the right; prompts [B, P],
padded on the left; attention_mask [B, P + R]. verl asks vLLM for processed log-probs by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mismatch_plugin.rollout.dumps.columns import read_columns
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.source import Source
from mismatch_plugin.rollout.dumps.tensors import DataProto, inner_torch, plain

SAVE = (
    "torch.save(dict(batch.batch.items()), path) after old_log_probs are computed (in verl's fit: next to its metrics)"
)


def _recognises(source: Source) -> bool:
    keys = {*source.keys}
    own = "responses" in keys and bool(keys & {"response_mask", "rollout_log_probs", "old_log_probs"})
    return own or _is_text(source) or "batch" in keys or "tensordict" in keys


def _is_text(source: Source) -> bool:
    return source.kind == "jsonl" and {"input", "output", "score", "step"} <= {*source.keys}


def _read(source: Source, options: Options) -> Part:
    if _is_text(source):
        raise ValueError(
            f"{source.path} is of trainer.rollout_data_dir: verl writes text and scores there, no token ids and no "
            f"log-probs, so nothing can be compared. Save {SAVE}."
        )
    content, step = _batch(source)
    if isinstance(content, Mapping) and "rollout_log_probs" not in content and "old_log_probs" in content:
        raise ValueError(
            f"{source.path} has no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    part = read_columns(source, content, options, padded=["response_ids", "prompt_ids"])
    if part.scored and all(
        np.array_equal(scored.log_probs, response.rollout_log_probs)
        for scored, response in zip(part.scored, part.responses, strict=True)
    ):
        part.notes.append("old_log_probs are rollout_log_probs to the last bit: verl's bypass_mode copies them")
    if step is not None:
        part.responses = [replace(response, step=step) for response in part.responses]
    return part


def _batch(source: Source) -> tuple[Any, int | None]:
    """(columns, step) of a dict, or of what wraps one."""
    content = source.content
    extra: Any = {}
    if isinstance(content, DataProto):
        state = content.state if isinstance(content.state, tuple) and len(content.state) == 3 else (None, {}, {})
        data, extra, _ = state
        if not isinstance(data, bytes):
            raise ValueError(f"{source.path} is a DataProto without a batch: save {SAVE}.")
        batch: Any = inner_torch(source.path, data)
    elif isinstance(content, Mapping) and "tensordict" in content:
        batch = content["tensordict"]
    elif isinstance(content, Mapping) and "batch" in content:
        batch, extra = content["batch"], content.get("non_tensor_batch") or {}
    else:
        return content, None
    if not isinstance(batch, Mapping):
        raise ValueError(f"{source.path} holds a {type(batch).__name__} where its tensors belong: save {SAVE}.")
    step = content.get("global_steps") if isinstance(content, Mapping) else None
    labels = {name: plain(extra[name]) for name in ("uid",) if isinstance(extra, Mapping) and name in extra}
    return {**batch, **labels}, step if isinstance(step, int) else None


VERL = Format(
    "verl", "verl's DataProto, TensorDict or tensors: responses, response_mask, rollout_log_probs", _recognises, _read
)
