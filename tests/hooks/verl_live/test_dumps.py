"""Dumps that verl's own code writes."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from batches import MASK, batch
from tensordict import TensorDict
from verl import DataProto

from mismatch_plugin.data.read import read


def _batch() -> dict[str, torch.Tensor]:
    made = batch(0)
    prompts = torch.tensor([[0, 5, 6]] * len(MASK))
    lengths = [int(np.flatnonzero(row)[-1]) + 1 for row in MASK.numpy()]
    tail = torch.tensor([[1] * length + [0] * (MASK.shape[1] - length) for length in lengths])
    return {
        "prompts": prompts,
        "responses": torch.arange(MASK.numel()).reshape(MASK.shape),
        "attention_mask": torch.cat([(prompts > 0).long(), tail], dim=1),
        **{name: made[name] for name in ("rollout_log_probs", "old_log_probs", "advantages", "response_mask")},
    }


def _right(path: Path, group: bool) -> None:
    dump, made = read(path), _batch()
    assert dump.format == "verl" and dump.has_training
    for at, sample in enumerate(dump.samples):
        length = int(made["attention_mask"][at, 3:].sum())
        assert sample.prompt_ids.tolist() == [5, 6]
        assert sample.response_ids.tolist() == made["responses"][at, :length].tolist()
        assert sample.rollout_log_probs.tolist() == made["rollout_log_probs"][at, :length].tolist()
        assert sample.train_log_probs.tolist() == made["old_log_probs"][at, :length].tolist()
        assert sample.loss_mask.tolist() == MASK[at, :length].bool().tolist()
        assert sample.group == ("ab"[at % 2] if group else None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["", "numpy"])
def test_a_data_proto_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    uids = np.array(["ab"[at % 2] for at in range(len(MASK))], dtype=object)
    data = DataProto.from_dict(tensors=_batch(), non_tensors={"uid": uids}, meta_info={"temperature": 1.0})
    torch.save(dict(data.batch.items()), tmp_path / "tensors.pt")
    _right(tmp_path / "tensors.pt", group=False)
    torch.save(data.batch, tmp_path / "tensordict.pt")
    _right(tmp_path / "tensordict.pt", group=False)
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", how)
    torch.save(data, tmp_path / "proto.pt")
    if how:
        with pytest.raises(ValueError, match=r"DataProto without a batch: save torch\.save"):
            read(tmp_path / "proto.pt")
    else:
        _right(tmp_path / "proto.pt", group=True)
    data.save_to_disk(tmp_path / "proto.pkl")
    with pytest.raises(ValueError, match="is a pickle, which may run code"):
        read(tmp_path / "proto.pkl")


@pytest.mark.filterwarnings("ignore")
def test_what_rollout_skip_writes_is_read(tmp_path: Path):
    data = TensorDict(_batch(), batch_size=[len(MASK)])
    torch.save({"tensordict": data, "tags": [], "keys": ["a"], "global_steps": 12}, tmp_path / "tq_batch.pt")
    _right(tmp_path / "tq_batch.pt", group=False)
    assert {sample.step for sample in read(tmp_path).samples} == {12}


def test_generations_hold_no_log_probs(tmp_path: Path):
    trainer = Path(str(verl.__file__)).parent / "trainer" / "ppo" / "ray_trainer.py"  # imports more than is installed
    tree = ast.parse(trainer.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"]
    names: dict[str, Any] = {"os": os, "json": json}
    nodes[0].decorator_list = []
    exec(compile(ast.Module([nodes[0]], []), str(trainer), "exec"), names)
    names["_write_generations"](["a"], ["b"], [None], [1.0], {}, str(tmp_path), 7)
    with pytest.raises(ValueError, match="no token ids and no log-probs"):
        read(tmp_path / "7.jsonl")
