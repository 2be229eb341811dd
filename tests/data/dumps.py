"""The same two samples as every trainer saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.read import Dump
from mismatch_plugin.data.versions import WeightSpan

PROMPTS = [[1, 2], [3]]
RESPONSES = [[10, 11, 12], [20, 21]]
ROLLOUT = [[-0.5, -1.25, -2.0], [-0.25, -4.0]]
TRAIN = [[-0.75, -1.0, -2.5], [-0.5, -3.0]]
MASKS = [[1, 0, 1], [1, 1]]
ADVANTAGES = [1.5, -0.5]
WHOLE = [prompt + row for prompt, row in zip(PROMPTS, RESPONSES, strict=True)]
ONES = [[1] * len(row) for row in RESPONSES]
EACH = [[value] * len(row) for value, row in zip(ADVANTAGES, RESPONSES, strict=True)]


def same(dump: Dump, *, prompts: bool = True, masks: bool = True, train: bool = True) -> Dump:
    """The two samples above, in order."""
    found = [[*sample.response_ids, *sample.rollout_log_probs] for sample in dump.samples]
    assert found == [[*ids, *values] for ids, values in zip(RESPONSES, ROLLOUT, strict=True)]
    assert [sample.prompt_ids.tolist() for sample in dump.samples] == (PROMPTS if prompts else [[], []])
    assert [sample.loss_mask.tolist() for sample in dump.samples] == (MASKS if masks else ONES)
    assert dump.has_training == train
    assert [sample.train_log_probs.tolist() for sample in dump.samples] == (TRAIN if train else [[], []])
    return dump


def padded(rows: list[Any], width: int, value: float = 0, left: bool = False) -> torch.Tensor:
    pad = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for row, fill in zip(rows, pad, strict=True)])


def save(path: Path, content: Any) -> Path:
    """By the suffix: a dict of columns, or a list of rows."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".pt":
        torch.save(content, path)
        return path
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in content.items()}
        np.savez_compressed(path, **arrays)
        return path
    if isinstance(content, dict):
        content = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in content.items()
        }
    rows = content
    if isinstance(content, dict):
        rows = [dict(zip(content, values, strict=True)) for values in zip(*content.values(), strict=True)]
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra [io]")
        table = pa.Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(content))
    return path


def verl() -> dict[str, torch.Tensor]:
    seen = [padded([[1] * len(row) for row in PROMPTS], 3, left=True), padded(ONES, 4)]
    return {
        "prompts": padded(PROMPTS, 3, left=True),
        "responses": padded(RESPONSES, 4),
        "attention_mask": torch.cat(seen, dim=1),
        "response_mask": padded(MASKS, 4),
        "rollout_log_probs": padded(ROLLOUT, 4),
        "old_log_probs": padded(TRAIN, 4),
        "advantages": padded(EACH, 4),
    }


def trl() -> dict[str, torch.Tensor]:
    return {
        "prompt_ids": padded(PROMPTS, 3, left=True),
        "prompt_mask": padded([[1] * len(row) for row in PROMPTS], 3, left=True),
        "completion_ids": padded(RESPONSES, 4),
        "completion_mask": padded(ONES, 4),
        "tool_mask": padded(MASKS, 4),
        "sampling_per_token_logps": padded(ROLLOUT, 4),
        "old_per_token_logps": padded(TRAIN, 4),
        "advantages": torch.tensor(ADVANTAGES),
    }


def skyrl() -> dict[str, torch.Tensor]:
    """Its TrainingInputBatch as a dict: everything ends at the right."""
    seen = [[1] * len(row) for row in WHOLE]
    return {
        "sequences": padded(WHOLE, 6, left=True),
        "attention_mask": padded(seen, 6, left=True),
        "response_mask": padded(ONES, 4, left=True),
        "loss_mask": padded(MASKS, 4, left=True),
        "rollout_logprobs": padded(ROLLOUT, 4, left=True),
        "action_log_probs": padded(TRAIN, 4, left=True),
        "advantages": padded(EACH, 4, left=True),
    }


def prime_rl() -> list[dict[str, Any]]:
    """Lines of its token export: a whole sequence each, entry t of token t."""

    def whole(rows: list[Any], fill: Any = 0.0) -> list[list[Any]]:
        return [[fill] * len(prompt) + row for prompt, row in zip(PROMPTS, rows, strict=True)]

    columns = {"token_ids": WHOLE, "loss_mask": whole([[bool(one) for one in row] for row in MASKS], False)}
    columns |= {"inference_logprobs": whole(ROLLOUT), "trainer_logprobs": whole(TRAIN), "advantages": whole(EACH)}
    return [{"step": 1, "rank": 0, **{name: values[at] for name, values in columns.items()}} for at in range(2)]


def nemo() -> dict[str, torch.Tensor]:
    def whole(rows: list[Any]) -> torch.Tensor:
        return padded([[0.0] * len(prompt) + row for prompt, row in zip(PROMPTS, rows, strict=True)], 6)

    return {
        "input_ids": padded(WHOLE, 6),
        "token_mask": whole(MASKS),
        "generation_logprobs": whole(ROLLOUT),
        "prev_logprobs": whole(TRAIN),
        "advantages": whole(EACH),
    }


def nemo_log(**changed: Any) -> list[dict[str, Any]]:
    """Lines of its logger: a batch of one each."""
    columns: dict[str, Any] = {name: value.tolist() for name, value in nemo().items()}
    columns |= {"token_ids": columns.pop("input_ids"), "token_loss_mask": columns.pop("token_mask")}
    columns |= {"input_lengths": [5, 3], "sample_loss_mask": [1.0, 1.0], "rewards": [1.0, 0.0], **changed}
    return [{name: value[at : at + 1] for name, value in columns.items()} | {"idx": at} for at in range(2)]


def slime(**changed: Any) -> dict[str, Any]:
    """Of the rollout: slime's and miles' Sample.to_dict()."""
    samples = [
        {"group_index": 4, "index": 7 + at, "prompt": "text", "tokens": WHOLE[at], "reward": float(at),
         "response_length": len(RESPONSES[at]), "loss_mask": MASKS[at], "weight_versions": ["5"],
         "rollout_log_probs": ROLLOUT[at], "status": ["completed", "truncated"][at], "remove_sample": False,
         "metadata": {"experts": np.arange(3, dtype=np.int32), "score": np.float32(1.5)}}
        for at in range(2)
    ]  # fmt: skip
    for name, values in changed.items():
        for sample, value in zip(samples, values, strict=True):
            sample[name] = value
    return {"rollout_id": 3, "samples": samples}


def slime_train(order: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    samples = [
        {"data_parallel_rank": 0, "sample_index": 7 + at, "rollout_position": at, "tokens": torch.tensor(WHOLE[at]),
         "response_lengths": len(RESPONSES[at]), "total_lengths": len(WHOLE[at]), "rewards": 0.7,
         "loss_masks": torch.tensor(MASKS[at], dtype=torch.int), "advantages": torch.tensor(EACH[at]),
         "rollout_log_probs": torch.tensor(ROLLOUT[at]), "log_probs": torch.tensor(TRAIN[at])}
        for at in order
    ]  # fmt: skip
    return {"format_version": 2, "rollout_id": 3, "rank": 0, "samples": samples, "dp_shards": []}


def rank(**changed: Any) -> dict[str, Any]:
    """One rank's train data, of older slime; miles' has cp_rank, cp_size and qkv_format too."""
    columns = {
        "tokens": [torch.tensor(row) for row in WHOLE],
        "response_lengths": [3, 2],
        "loss_masks": [torch.tensor(row) for row in MASKS],
        "rollout_log_probs": [torch.tensor(row) for row in ROLLOUT],
        "log_probs": [torch.tensor(row) for row in TRAIN],
        "sample_indices": [0, 1],
    }
    pack = {name: changed.pop(name) for name in ("cp_rank", "cp_size", "qkv_format") if name in changed}
    return {"rollout_id": 0, "rank": 0, "rollout_data": columns | changed, **pack}


def spans_of(versions: Sequence[str | int]) -> list[WeightSpan]:
    """Spans of one version a token."""
    ends = [at for at in range(1, len(versions) + 1) if versions[at : at + 1] != versions[at - 1 : at]]
    starts = zip([0, *ends], ends, strict=False)
    return [WeightSpan(version=str(versions[start]), start=start, end=end) for start, end in starts]


def loop(**changed: Any) -> dict[str, Any]:
    """Ragged columns of an own loop; None leaves one out."""
    columns = {"response_ids": RESPONSES, "rollout_log_probs": ROLLOUT, "train_logprobs": TRAIN, **changed}
    return {name: value for name, value in columns.items() if value is not None}
