"""Names of columns that own loops have, and folders of two files that belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_plugin.rollout.dumps.registry import read_dump
from mismatch_plugin.rollout.files import write_records
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.responses import Dump

RESPONSES = [[10, 11, 12], [20, 21]]
ROLLOUT = [[-0.5, -1.25, -2.0], [-0.25, -4.0]]
TRAIN = [[-0.75, -1.0, -2.5], [-0.5, -3.0]]
MASKS = [[1, 0, 1], [1, 1]]


def _same(dump: Dump) -> None:
    assert [response.response_ids.tolist() for response in dump.responses] == RESPONSES
    assert [response.rollout_log_probs.tolist() for response in dump.responses] == ROLLOUT
    assert [response.loss_mask.astype(int).tolist() for response in dump.responses] == MASKS
    assert dump.scored is not None and [scored.log_probs.tolist() for scored in dump.scored] == TRAIN


def _own(**columns: Any) -> dict[str, Any]:
    return {"response_ids": RESPONSES, "rollout_log_probs": ROLLOUT, "train_logprobs": TRAIN, **columns}


def _notes(path: Path, columns: dict[str, Any]) -> str:
    torch.save(columns, path / "a.pt")
    return "; ".join(read_dump(path / "a.pt").notes)


def test_names_of_own_loops_are_understood_where_they_are_clear(tmp_path: Path):
    columns = _own(mask=MASKS)
    columns["logprobs"] = columns.pop("rollout_log_probs")
    assert "logprobs are taken as the sampler's, train_logprobs as the trainer's" in _notes(tmp_path, columns)
    _same(read_dump(tmp_path / "a.pt"))
    assert "taken as the sampler's" not in _notes(tmp_path, _own(logprobs=TRAIN))
    columns["old_logprobs"] = columns.pop("train_logprobs")  # then logprobs may be any policy's
    with pytest.raises(ValueError, match="none of the rollout"):
        _notes(tmp_path, columns)
    sequences = {
        "input_ids": [[1, *row] for row in RESPONSES],
        "rollout_log_probs": ROLLOUT,
        "mask": [[1] * 4, [1] * 3],
    }
    with pytest.raises(ValueError, match=r'what tells a response from its prompt.*Add "response_length".*rename mask'):
        _notes(tmp_path, sequences)


def test_a_name_that_is_nearly_known_is_asked_after(tmp_path: Path):
    assert "response_masks: did you mean response_mask?" in _notes(tmp_path, _own(response_masks=MASKS))
    assert "did you mean" not in _notes(tmp_path, _own(values=MASKS))
    assert "did you mean" not in _notes(tmp_path, _own(response_mask=MASKS, response_masks=MASKS))
    columns = _own(**{f"column_{at}": 1 for at in range(40)})
    columns["respons_ids"] = columns.pop("response_ids")
    with pytest.raises(ValueError, match=r"and 31 more\. respons_ids: did you mean") as error:
        _notes(tmp_path, columns)
    assert len(str(error.value)) < 600 + len(str(tmp_path)) and "docs/inspect.md#what-is-read" in str(error.value)


def test_a_folder_of_records_and_their_training_side_is_a_pair(tmp_path: Path):
    records = [
        RolloutRecord(prompt_ids=[1], response_ids=row, rollout_log_probs=[*values], loss_mask=mask)
        for row, values, mask in zip(RESPONSES, ROLLOUT, MASKS, strict=True)
    ]
    side = "".join(json.dumps({"train_log_probs": row}) + "\n" for row in TRAIN)
    for name in ("rollouts.jsonl", "rollouts.parquet"):
        folder = tmp_path / name[9:]
        folder.mkdir()
        write_records(folder / name, records)
        (folder / "training.jsonl").write_text(side)
        for training in (None, folder / "training.jsonl"):
            dump = read_dump(folder, training=training)
            _same(dump)
            assert not any("left out" in note for note in dump.notes)
    folder = tmp_path / "jsonl"
    (tmp_path / "other.jsonl").write_text(side)
    notes = read_dump(folder, training=tmp_path / "other.jsonl").notes
    assert any("training.jsonl was left out" in note for note in notes)
    (folder / "more.jsonl").write_text(side)
    with pytest.raises(ValueError, match=r"give files of one format.*mismatch-plugin inspect ROLLOUTS TRAINING"):
        read_dump(folder)
    for name in ("more.jsonl", "training.jsonl"):
        (folder / name).unlink()
    torch.save(_own(), folder / "a.pt")
    with pytest.raises(ValueError, match="give files of one format"):
        read_dump(folder)
