"""Padding without a mask: left out where nothing else is possible, refused where it may be tokens, else kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_plugin.rollout.dumps.registry import read_dump
from mismatch_plugin.rollout.responses import Dump

LENGTHS = [6, 4, 3]
WIDTH = 6


def _batch(lengths: list[int] = LENGTHS, pad: int = 0) -> dict[str, Any]:
    mask = torch.arange(WIDTH)[None] < torch.tensor(lengths)[:, None]
    ids = 10 + torch.arange(len(lengths) * WIDTH).reshape(-1, WIDTH)
    log_probs = -(1 + torch.arange(len(lengths) * WIDTH).reshape(-1, WIDTH) / 8)
    return {
        "response_ids": torch.where(mask, ids, pad),
        "rollout_log_probs": log_probs * mask,
        "train_log_probs": (log_probs - 0.25) * mask,
        "advantages": torch.ones(len(lengths), WIDTH),
    }


def _read(path: Path, batch: Any) -> Dump:
    torch.save(batch, path / "a.pt")
    return read_dump(path / "a.pt")


def _lengths(dump: Dump) -> list[int]:
    assert dump.scored is not None
    for response, scored in zip(dump.responses, dump.scored, strict=True):
        assert response.advantages is not None and scored.token_ids is not None and scored.loss_mask is not None
        sizes = {len(response.rollout_log_probs), len(response.loss_mask), len(response.advantages)}
        assert sizes | {len(scored.log_probs), len(scored.token_ids)} == {len(response.response_ids)}
    return [len(response.response_ids) for response in dump.responses]


def _said(dump: Dump, words: str) -> bool:
    return any(words in note for note in dump.notes)


def test_padding_is_left_out_and_said(tmp_path: Path):
    dump = _read(tmp_path, _batch())
    assert _lengths(dump) == LENGTHS and _said(dump, "5 positions at the ends of 2 rows, with id 0 and log-prob 0.0")
    assert _lengths(_read(tmp_path, [{name: row[at] for name, row in _batch().items()} for at in range(3)])) == LENGTHS
    lists = {name: value.tolist() for name, value in _batch().items()}
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({name: value[at] for name, value in lists.items()}) + "\n" for at in range(3))
    )
    assert _lengths(read_dump(tmp_path / "a.jsonl")) == LENGTHS


def test_padding_that_the_trainer_scored_is_left_out(tmp_path: Path):
    batch = _batch()
    batch["train_log_probs"] = batch["train_log_probs"] - 3.0
    assert _lengths(_read(tmp_path, batch)) == LENGTHS


def test_each_side_in_a_file_of_its_own_is_cut(tmp_path: Path):
    batch = _batch()
    torch.save({name: batch[name] for name in ("response_ids", "train_log_probs")}, tmp_path / "t.pt")
    torch.save({name: batch[name] for name in ("response_ids", "rollout_log_probs", "advantages")}, tmp_path / "r.pt")
    assert _lengths(read_dump(tmp_path / "r.pt", training=tmp_path / "t.pt")) == LENGTHS


def test_a_mask_or_a_length_is_believed(tmp_path: Path):
    batch = _batch()
    for told in ({"response_mask": torch.ones(3, WIDTH)}, {"response_length": [6, 6, 6]}):
        dump = _read(tmp_path, {**batch, **told})
        assert _lengths(dump) == [6, 6, 6] and not _said(dump, "padding")


def test_a_certain_last_token_is_kept(tmp_path: Path):
    batch = _batch([6, 6, 6])
    for name in ("rollout_log_probs", "train_log_probs"):
        batch[name][1, -1] = 0.0
    dump = _read(tmp_path, batch)
    assert _lengths(dump) == [6, 6, 6] and _said(dump, "the last token of 1 rows has log-prob 0.0 and is kept")
    dump = _read(tmp_path, _batch([6, 6, 6]))
    assert _lengths(dump) == [6, 6, 6] and not _said(dump, "0.0")
    # In front of padding too, and in a row that is full.
    batch = _batch()
    for name in ("rollout_log_probs", "train_log_probs"):
        batch[name][0, -1] = batch[name][1, 3] = 0.0
    assert _lengths(_read(tmp_path, batch)) == LENGTHS


def test_rows_of_several_lengths_are_not_padded(tmp_path: Path):
    ragged = {"response_ids": [[1, 2, 0, 0], [3, 4]], "rollout_log_probs": [[-1.0, -1.0, 0.0, 0.0], [-1.0, -2.0]]}
    assert [len(response.response_ids) for response in _read(tmp_path, ragged).responses] == [4, 2]


@pytest.mark.parametrize("why", ["other ids", "repeats itself", "one length", "a single row"])
def test_what_may_be_tokens_is_refused(tmp_path: Path, why: str):
    batch = _batch([4, 4, 4] if why == "one length" else [3] if why == "a single row" else LENGTHS)
    if why == "other ids":
        batch["response_ids"][2, 3:] = torch.tensor([7, 8, 9])
    if why == "repeats itself":
        batch["response_ids"][2, 1:3] = 0
    with pytest.raises(ValueError, match=r'ends in \d tokens with log-prob 0.0.*"response_mask".*"response_length"'):
        _read(tmp_path, batch)


def test_zeros_of_the_sampler_alone_at_other_ids_are_left_to_the_checks(tmp_path: Path):
    batch = _batch([6, 6, 6])
    batch["rollout_log_probs"][1, 3:] = 0.0
    assert _lengths(_read(tmp_path, batch)) == [6, 6, 6]
