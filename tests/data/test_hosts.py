"""Dumps that slime's and miles' own functions write, in a process of their own with their source on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mismatch_plugin.data.read import read
from tests.host_source import host_source

COMMON = """
import sys, types
from argparse import Namespace
import numpy as np, torch
out = sys.argv[1]
torch.manual_seed(0)
LENGTHS = [(3, 5), (1, 8), (6, 2), (2, 13)]
def samples(Sample):
    made = []
    for at, (prompt, length) in enumerate(LENGTHS):
        sample = Sample(index=40 + at, group_index=at // 2, tokens=list(range(at * 100, at * 100 + prompt + length)))
        sample.response_length, sample.reward = length, float(at)
        sample.loss_mask = [1] * (length - 1) + [0]
        sample.rollout_log_probs = [-(at + 1) - token / 8 for token in range(length)]
        sample.weight_versions, sample.status = ["7"], Sample.Status.TRUNCATED
        sample.metadata = {"routed": np.zeros((2, 3), dtype=np.int32)}
        made.append(sample)
    return made
def full(sample, shift):
    return torch.tensor(sample.rollout_log_probs) - shift
"""
SLIME = """
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.observability.train_data_utils import _build_dump_payload
from slime.utils.types import Sample
made = samples(Sample)
save_debug_rollout_data(out + "/rollout_{rollout_id}.pt", made, rollout_id=3, evaluation=False)
def shard(rank, chosen):
    own = [made[at] for at in chosen]
    return {"rank": rank, "data_parallel_rank": rank, "rollout_data": {
        "partition": list(chosen), "sample_indices": [sample.index for sample in own],
        "tokens": [torch.tensor(sample.tokens) for sample in own],
        "response_lengths": [sample.response_length for sample in own],
        "total_lengths": [len(sample.tokens) for sample in own],
        "loss_masks": [torch.tensor(sample.loss_mask) for sample in own],
        "rollout_log_probs": [full(sample, 0) for sample in own],
        "log_probs": [full(sample, 0.25) for sample in own],
        "advantages": [torch.ones(sample.response_length) for sample in own],
        "micro_batch_indices": [[0]], "raw_reward": [sample.reward for sample in made]}}
torch.save(_build_dump_payload([shard(0, [3, 0]), shard(1, [1, 2])], rollout_id=3, writer_rank=0), out + "/train_3.pt")
"""
MILES = """
from miles.ray.rollout.debug_data import save_debug_rollout_data
from miles.utils.train_dump_utils import save_debug_train_data_for_rank
from miles.utils.types import AdapterRef, Sample
from miles.backends.training_utils import cp_utils
made = samples(Sample)
made[0].adapter = AdapterRef(name="a", slot=1)
args = Namespace(save_debug_rollout_data=out + "/rollout_data/{rollout_id}.pt", save_debug_trajectory_data=None,
    save_debug_train_data=out + "/train_data/{rollout_id}_{rank}.pt", qkv_format=sys.argv[2])
save_debug_rollout_data(args, made, 3, evaluation=False)
save_debug_rollout_data(args, {"math": {"samples": made}}, 3, evaluation=True)
longest = 24
rank = 0
for dp, chosen in enumerate(([3, 0], [1, 2])):
    for cp in range(2):
        state = types.SimpleNamespace(cp=types.SimpleNamespace(rank=cp, size=2))
        cp_utils.get_parallel_state = lambda state=state: state
        for tp in range(2):
            own = [made[at] for at in chosen]
            def cut(sample, shift):
                return cp_utils.slice_log_prob_with_cp(full(sample, shift), len(sample.tokens), sample.response_length,
                    args.qkv_format, longest)
            data = {"sample_indices": [sample.index for sample in own],
                "tokens": [torch.tensor(sample.tokens) for sample in own],
                "response_lengths": [sample.response_length for sample in own],
                "total_lengths": [len(sample.tokens) for sample in own],
                "loss_masks": [torch.tensor(sample.loss_mask, dtype=torch.int) for sample in own],
                "rewards": [0.5] * 2, "max_seq_lens": [longest] * 2,
                "rollout_log_probs": [cut(sample, 0) for sample in own],
                "log_probs": [cut(sample, 0.25) for sample in own]}
            save_debug_train_data_for_rank(args, rollout_id=3, rollout_data=data, rank=rank, cp_rank=cp, cp_size=2)
            rank += 1
"""


def write_in_host(host: str, code: str, folder: Path, *more: str) -> None:
    root = host_source(host)
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, str(folder), *more],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _right(dump_of: Path, training: Path | None = None) -> None:
    dump = read(dump_of, training)
    assert [sample.sample_id for sample in dump.samples] == ["40", "41", "42", "43"]
    for at, ((prompt, length), sample) in enumerate(zip(LENGTHS, dump.samples, strict=True)):
        assert sample.prompt_ids.tolist() == [at * 100 + token for token in range(prompt)]
        assert sample.response_ids.tolist() == [at * 100 + prompt + token for token in range(length)]
        rollout = [-(at + 1) - token / 8 for token in range(length)]
        assert sample.rollout_log_probs.tolist() == rollout and sample.step == 3
        assert sample.loss_mask.tolist() == [True] * (length - 1) + [False]
        np.testing.assert_array_equal(sample.train_log_probs, np.array(rollout) - 0.25)


LENGTHS = [(3, 5), (1, 8), (6, 2), (2, 13)]


def test_slime(tmp_path: Path):
    write_in_host("slime", SLIME, tmp_path)
    _right(tmp_path / "train_3.pt")
    _right(tmp_path / "rollout_3.pt", tmp_path / "train_3.pt")
    dump = read(tmp_path / "rollout_3.pt")
    assert not dump.has_training and [sample.reward for sample in dump.samples] == [0.0, 1.0, 2.0, 3.0]
    assert {sample.finish_reason for sample in dump.samples} == {"length"}
    assert [(span.version, span.start, span.end) for span in dump.samples[3].weight_versions] == [("7", 0, 13)]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_miles_over_context_parallel_ranks(tmp_path: Path, layout: str):
    write_in_host("miles", MILES, tmp_path, layout)
    _right(tmp_path)
    _right(tmp_path / "train_data")
    _right(tmp_path / "rollout_data", tmp_path / "train_data")
    assert "1 files of evaluation were left out" in read(tmp_path).notes
    with pytest.raises(ValueError, match="the slice of context parallel rank 1 of 2 is not there"):
        read(tmp_path / "train_data" / "3_0.pt")
