"""examples/megatron_core on real servers: log-probs agree, weights arrive, it trains; and what spans say in flight.

It leaves other weights in the servers that all tests share, and so runs behind those that need the first ones.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from examples.megatron_core import train as example
from examples.sglang_server import CpuServer
from mismatch_plugin.data.pack import pack
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import PauseMode, SGLangClient
from tests.fixtures.faulty_server import call

EXACT = 1e-4
VISIBLE = 1e-3
LONG = 400


@pytest.fixture(scope="module")
def trainers() -> list[example.Trainer]:
    """Two, with different weights."""
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


def test_log_probs_under_top_p_are_those_of_what_was_kept(
    float32_server: CpuServer, trainers: list[example.Trainer]
) -> None:
    example.Server(float32_server.url).update(trainers[1].weights(), "top-p")
    narrow = SamplingParameters(top_p=0.7, top_k=example.VOCAB, max_new_tokens=7, stop_token_ids=(example.EOS,))

    async def sample(client: SGLangClient) -> list[Sample]:
        return await client.generate(example.questions(64, 0), narrow, return_sampling_mask=True)

    records = call(float32_server, sample)
    assert distance(trainers[1], records) < EXACT  # of the full vocabulary, as without top-p
    for record in records:
        assert record.kept_ids is not None and record.behaviour_log_probs is not None
        rows = zip(
            record.response_ids, record.kept_ids, record.rollout_log_probs, record.behaviour_log_probs, strict=True
        )
        for token, kept, full, behaviour in rows:
            assert token in kept
            # At least 0.7 of the probability is kept, and dividing by it is all that happens.
            assert full - 1e-6 <= behaviour <= full - math.log(0.7) + 1e-5
    assert any(len(kept) < example.VOCAB for record in records for kept in record.kept_ids or ())


def updated_in_flight(
    server: CpuServer, before: Mapping[str, Tensor], after: Mapping[str, Tensor], mode: PauseMode
) -> tuple[list[Sample], list[Sample]]:
    """Responses in whose middle the weights change, once all of them run; and later ones."""
    prompts = example.questions(8, 0)
    long = SamplingParameters(max_new_tokens=LONG, ignore_eos=True)

    async def job(client: SGLangClient) -> tuple[list[Sample], list[Sample]]:
        await client.update_weights_from_tensors(before, "run-1")
        running = asyncio.create_task(client.generate(prompts, long))
        await client.generate(prompts[:1], SamplingParameters(max_new_tokens=8, ignore_eos=True))
        async with client.paused(mode):  # the others came first, and are running
            assert not running.done()
            await client.update_weights_from_tensors(after, "run-2")
        later = await client.generate(prompts, SamplingParameters(max_new_tokens=8, ignore_eos=True))
        return await running, later

    return call(server, job)


def test_in_place_without_a_radix_cache_later_requests_are_of_the_new_weights(
    float32_server: CpuServer, trainers: list[example.Trainer]
) -> None:
    before, after = (trainer.weights() for trainer in trainers)
    records, later = updated_in_flight(float32_server, before, after, "in_place")
    assert {span.version for record in later for span in record.weight_versions} == {"run-2"}
    assert distance(trainers[1], later) < EXACT
    assert all([span.version for span in record.weight_versions] == ["run-1", "run-2"] for record in records)


def test_update_in_flight_shows_in_spans_and_metrics(
    float32_server: CpuServer, trainers: list[example.Trainer]
) -> None:
    before, after = (trainer.weights() for trainer in trainers)
    records, _ = updated_in_flight(float32_server, before, after, "retract")
    for record in records:
        first, second = record.weight_versions
        assert (first.version, second.version) == ("run-1", "run-2")
        assert (first.start, second.start, second.end) == (0, first.end, LONG)

    # Each token was sampled from the weights that its span names, and from no others.
    old, new = (scored(trainer, records) for trainer in trainers)
    for index, record in enumerate(records):
        cut = record.weight_versions[0].end
        sampled = record.rollout_log_probs
        assert sampled[:cut] == pytest.approx(old[index][:cut], abs=EXACT)
        assert sampled[cut:] == pytest.approx(new[index][cut:], abs=EXACT)
        assert sampled[cut:] != pytest.approx(old[index][cut:], abs=0.01)

    rows = zip(records, new, strict=True)
    trained = [record.with_fields(train_log_probs=np.array(row)) for record, row in rows]
    config = mp.MismatchConfig.model_validate({"metrics": "full"})
    metrics = mp.correct(pack(trained), config).statistics.metrics()
    drift = {lag: metrics[f"rollout_corr/log_ratio_by_version_lag_{lag}"] for lag in (0, 1)}
    rows = zip(new, old, (record.weight_versions[0].end for record in records), strict=True)
    stale = [a - b for newest, before, cut in rows for a, b in zip(newest[:cut], before[:cut], strict=True)]
    assert abs(drift[0]) < EXACT
    assert drift[1] == pytest.approx(math.fsum(stale) / len(stale), abs=EXACT)
    assert abs(drift[1]) > 10 * EXACT


def test_it_trains_and_staleness_shows(
    float32_server: CpuServer, bfloat16_server: CpuServer, trainers: list[example.Trainer]
) -> None:
    """The first step of each rollout batch: in sync the server's precision is all, later its old weights are."""
    config = mp.preset("token_is")
    start = trainers[0].model[0].module.state_dict()
    drift = {}
    for server in (float32_server, bfloat16_server):
        trainer = example.Trainer(config, lr=2e-3, state=start)
        history = example.train(trainer, example.Server(server.url), 3, 2, f"train {server.url}")
        assert all(0 < step["reward"] < 1 and step["grad_norm"] > 0 for step in history)
        ends = [[step[f"rollout_corr/rollout_is_{end}"] for end in ("min", "max")] for step in history]
        drift[server.url] = [max(abs(math.log(end)) for end in pair) for pair in ends]
    exact, rounded = drift.values()
    assert max(exact[0], exact[2]) < EXACT < VISIBLE < exact[1]
    assert all(VISIBLE < value < 0.5 for value in (rounded[0], rounded[2])) and rounded[1] > VISIBLE


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
    command = [sys.executable, "-m", "examples.inspect.make_dump", str(tmp_path / "dump.parquet")]
    done = subprocess.run([*command, "--tokens", "40000", "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = read(tmp_path / "dump.parquet").samples
    tokens = sum(map(len, samples))
    assert tokens >= 40000 and f"{len(samples)} responses, {tokens} response tokens, " in done.stdout
    for sample in samples:
        (span,) = sample.weight_versions
        assert span.version == sample.trainer_version and sample.reward is not None and sample.server
        assert sample.rollout_log_probs == pytest.approx(sample.train_log_probs, abs=EXACT)
    assert len({sample.trainer_version for sample in samples}) > 1
