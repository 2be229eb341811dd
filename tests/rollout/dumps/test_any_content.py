"""Whatever a dump holds: read as it was written, or refused with a ValueError that names the file."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatch_plugin.rollout.dumps.registry import read_dump

N = 3
STRANGE: list[Any] = [
    None,
    "text",
    -1,
    1e308,
    True,
    [],
    {},
    [[]],
    [None],
    ["a", {}],
    {"a": 1},
    torch.tensor(3),
    torch.zeros(0),
    torch.zeros(N, 2, 2),
    torch.ones(N, dtype=torch.bfloat16),
    np.zeros(N),
    np.array(["a", "b", "c"], dtype=object),
    [torch.zeros(2, 2)] * N,
    [1, 2, 3],
    (1.5, 2.5, 3.5),
    {1: 2},
    float("nan"),
]


def _slime() -> dict[str, Any]:
    sample = {
        "index": 1,
        "group_index": 0,
        "tokens": [1, 2, 3, 4],
        "response_length": 3,
        "loss_mask": [1, 1, 0],
        "rollout_log_probs": [-1.0, -2.0, -3.0],
        "weight_versions": ["1"],
        "status": "completed",
        "reward": 1.0,
        "remove_sample": False,
        "temperature": 1.0,
        "advantages": [1.0, 1.0, 1.0],
        "log_probs": [-1.0, -2.0, -3.0],
        "rollout_position": 0,
    }
    return {"rollout_id": 1, "samples": [dict(sample) for _ in range(N)]}


def _miles() -> dict[str, Any]:
    columns = {
        "tokens": [torch.arange(5)] * N,
        "response_lengths": [3] * N,
        "loss_masks": [torch.ones(3)] * N,
        "sample_indices": [*range(N)],
        "rollout_log_probs": [torch.zeros(3) - 1] * N,
        "log_probs": [torch.zeros(3) - 1] * N,
        "max_seq_lens": [5] * N,
    }
    return {"rollout_id": 1, "rank": 0, "cp_rank": 0, "cp_size": 1, "qkv_format": "thd", "rollout_data": columns}


def _columns() -> dict[str, Any]:
    return {
        "prompts": torch.ones(N, 2, dtype=torch.long),
        "responses": torch.ones(N, 4, dtype=torch.long),
        "attention_mask": torch.ones(N, 6),
        "response_mask": torch.ones(N, 4),
        "rollout_log_probs": -torch.ones(N, 4),
        "old_log_probs": -torch.ones(N, 4),
        "advantages": torch.ones(N),
        "uid": ["a"] * N,
        "step": 3,
        "weight_version": [1] * N,
        "response_length": [4] * N,
    }


def _sequences() -> dict[str, Any]:
    return {
        "input_ids": torch.ones(N, 6, dtype=torch.long),
        "token_mask": torch.tensor([[0, 0, 1, 1, 1, 0]] * N),
        "generation_logprobs": -torch.ones(N, 6),
        "prev_logprobs": -torch.ones(N, 6),
        "sample_mask": torch.ones(N),
        "input_lengths": [5] * N,
        "prompt_length": [2] * N,
        "entropy": torch.ones(N, 6),
    }


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested dicts and lists of dicts."""
    found = [path] if path else []
    items = content.items() if isinstance(content, dict) else []
    if isinstance(content, list) and content and isinstance(content[0], dict):
        items = [*enumerate(content)]
    for key, value in items:
        found += _places(value, (*path, key))
    return found


def _read_or_refused(path: Path) -> None:
    said = str(path)
    try:
        read_dump(path)
    except ValueError as error:
        said = str(error)
    assert str(path) in said


@pytest.mark.parametrize("made", [_slime, _miles, _columns, _sequences])
def test_strange_values_are_read_or_refused(tmp_path: Path, made: Any):
    path = tmp_path / "a.pt"
    torch.save(made(), path)
    read_dump(path)
    draw = random.Random(0)
    places = _places(made())
    for _ in range(300):
        content = made()
        for place in draw.sample(places, draw.choice([1, 1, 2, 3])):
            holder = content
            try:
                for key in place[:-1]:
                    holder = holder[key]
                if draw.random() < 0.2:
                    del holder[place[-1]]
                else:
                    holder[place[-1]] = copy.deepcopy(draw.choice(STRANGE))
            except (KeyError, TypeError, IndexError, ValueError):
                continue  # what holds it was replaced
        torch.save(content, path)
        _read_or_refused(path)


_CHOICE = {
    "index": 0,
    "text": "t",
    "token_ids": [1, 2],
    "prompt_token_ids": [1],
    "finish_reason": "stop",
    "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]},
}


@pytest.mark.parametrize(
    "made",
    [
        {"id": "a", "choices": [_CHOICE]},
        {"id": "a", "choices": [{**_CHOICE, "logprobs": {"content": [{"token": "a", "logprob": -1.0}] * 2}}]},
        {"custom_id": "b", "response": {"body": {"choices": [_CHOICE]}}, "request": {"temperature": 0.5}},
        {"prompt_token_ids": [1], "outputs": [{"token_ids": [1], "logprobs": [{"1": {"logprob": -1.0}}]}]},
        {
            "token_ids": [[1, 2]],
            "token_loss_mask": [[0, 1]],
            "generation_logprobs": [[0, -1]],
            "prev_logprobs": [[0, -1]],
        },
        {"prompt_ids": [1], "response_ids": [2], "rollout_log_probs": [-1.0], "sampling": {"temperature": 1.0}},
        {"response_ids": [2], "rollout_log_probs": [-1.0], "train_log_probs": [-1.0], "weight_versions": ["1"]},
    ],
)
def test_strange_json_is_read_or_refused(tmp_path: Path, made: dict[str, Any]):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(made) + "\n")
    read_dump(path)
    draw = random.Random(0)
    strange = [value for value in STRANGE if isinstance(value, (str, int, float, list, dict, type(None)))]
    strange = [value for value in strange if "tensor" not in repr(value)]
    for _ in range(300):
        content = copy.deepcopy(made)
        place = draw.choice(_places(content))
        holder: Any = content
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = draw.choice(strange)
        path.write_text(json.dumps(content) + "\n" + json.dumps(made) + "\n")
        _read_or_refused(path)


_log_probs = st.floats(-50, 0, width=32)
_samples = st.lists(
    st.lists(st.tuples(st.integers(0, 2**40), _log_probs, _log_probs, st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_samples)
def test_what_is_written_is_read(tmp_path: Path, samples: list[list[tuple[int, float, float, bool]]]):
    """Ragged rows in every kind of file, and padded ones as tensors and arrays, are the same numbers."""
    columns: dict[str, list[list[Any]]] = {
        name: [[token[at] for token in sample] for sample in samples]
        for at, name in enumerate(("response_ids", "rollout_log_probs", "old_log_probs", "loss_mask"))
    }
    width = max(map(len, samples))
    padded: dict[str, Any] = {
        name: np.array([row + [0] * (width - len(row)) for row in rows]) for name, rows in columns.items()
    }
    padded["response_length"] = np.array([len(sample) for sample in samples])
    rows = [{name: values[at] for name, values in columns.items()} for at in range(len(samples))]
    torch.save(columns, tmp_path / "a.pt")
    torch.save({name: torch.from_numpy(value) for name, value in padded.items()}, tmp_path / "b.pt")
    np.savez(tmp_path / "a.npz", **padded)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(columns))
    for name in ("a.pt", "b.pt", "a.npz", "a.jsonl", "a.json"):
        dump = read_dump(tmp_path / name)
        computed = any(any(row) for row in columns["old_log_probs"])
        assert (dump.scored is not None) == computed
        for at, response in enumerate(dump.responses):
            assert response.response_ids.tolist() == columns["response_ids"][at]
            assert response.rollout_log_probs.tolist() == columns["rollout_log_probs"][at]
            assert response.loss_mask.tolist() == columns["loss_mask"][at]
            if dump.scored is not None:
                assert dump.scored[at].log_probs.tolist() == columns["old_log_probs"][at]
