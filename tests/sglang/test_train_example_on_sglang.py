"""examples/megatron_core on real servers: log-probs agree, weights arrive, it trains.

It leaves other weights in the servers that all tests share, and so runs behind those that need the first ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

import mismatch_plugin as mp
from examples.megatron_core import train as example
from examples.sglang_server import CpuServer
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample

EXACT = 1e-4
VISIBLE = 1e-3


@pytest.fixture(scope="module")
def trainers() -> list[example.Trainer]:
    """Two, with different weights."""
    if parallel_state.is_initialized():  # by what bisect compared a server with
        parallel_state.destroy_model_parallel()
    example.initialize()
    torch.manual_seed(0)
    return [example.Trainer(mp.MismatchConfig()) for _ in range(2)]


def scored(trainer: example.Trainer, records: Sequence[Sample]) -> list[list[float]]:
    """The trainer's log-probs of every response, over the whole vocabulary."""
    names = ("prompt_ids", "response_ids")
    bare = [Sample(**{name: getattr(record, name) for name in names}, advantages=0.0) for record in records]
    batch = trainer.batch(bare)
    return [row.tolist() for row in trainer.log_probs(batch).split([len(record.response_ids) for record in records])]


def distance(trainer: example.Trainer, records: Sequence[Sample]) -> float:
    """Largest |log π_train − log π_rollout| of any token; NaN where one is missing."""
    rows = zip(records, scored(trainer, records), strict=True)
    return float(np.abs(np.concatenate([record.rollout_log_probs - row for record, row in rows])).max())


def test_log_probs_follow_every_update_to_the_server_s_precision(
    float32_server: CpuServer, bfloat16_server: CpuServer, trainers: list[example.Trainer]
) -> None:
    prompts = example.questions(16, 0)
    for server, agrees in ((float32_server, EXACT), (bfloat16_server, 0.5)):
        rollouts = example.Server(server.url)
        for number in (0, 1, 0):
            name = f"{server.url}-{number}"
            rollouts.update(trainers[number].weights(), name)
            records = rollouts.sample(prompts, 4)
            assert [record.prompt_ids.tolist() for record in records] == [
                prompt for prompt in prompts for _ in range(4)
            ]
            assert {span.version for record in records for span in record.weight_versions} == {name}
            assert {record.finish_reason for record in records} == {"stop", "length"}
            found = distance(trainers[number], records)
            assert found < agrees and (found > VISIBLE) == (server is bfloat16_server)
            assert distance(trainers[1 - number], records) > 1.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_prints_its_table(float32_server: CpuServer, ranks: int) -> None:
    """On a server that it starts, and on two tensor-parallel ranks with one that is there."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    flags = ["--tp", str(ranks), "--url", float32_server.url] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "examples.megatron_core.train", *flags]
    command += ["--rollouts", "2", "--update-every", "1", "--use-tis", "--tis-level", "token"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("starting SGLang" in done.stdout) == (ranks == 1)
    row = r"^algorithm ([02])(?: with your flags)? +([\d.]+) +(-?[\d.]+) +([\d.]+)$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    values: list[Any] = [[float(value) for value in row] for row in rows]
    assert [row[0] for row in values] == [0, 2]
    assert all(0 < exact < 1 and abs(kl) < 0.01 and norm > 0 for _, exact, kl, norm in values)
    if ranks > 1:
        assert all(abs(kl) < EXACT for _, _, kl, _ in values)


def test_the_dump_is_of_a_healthy_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.inspect.make_dump", str(tmp_path / "dump.jsonl")]
    done = subprocess.run([*command, "--tokens", "40000", "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = read(tmp_path / "dump.jsonl").samples
    tokens = sum(map(len, samples))
    assert tokens >= 40000 and f"{len(samples)} responses, {tokens} response tokens, " in done.stdout
    for sample in samples:
        (span,) = sample.weight_versions
        assert span.version == sample.trainer_version and sample.reward is not None and sample.server
        assert sample.rollout_log_probs == pytest.approx(sample.train_log_probs, abs=EXACT)
    assert len({sample.trainer_version for sample in samples}) > 1
