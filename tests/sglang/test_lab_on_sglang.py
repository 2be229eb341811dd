"""The lab on a real SGLang server: its log-probs against megatron-core's, weight sync, training, updates in flight."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.lab.sglang_engine import SGLangEngine
from mismatch_plugin.lab.tasks import EOS, get_task
from mismatch_plugin.rollout.packing import to_packed
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.sampling import SamplingParameters
from mismatch_plugin.rollout.server import CpuServer
from mismatch_plugin.sglang.client import SGLangClient
from tests.distributed.launch import launch
from tests.sglang.load import until_running
from tests.sglang.training_side import ServerCase, score, train_on_server

TASK = get_task("reverse")
EXACT = 1e-4
LONG = 400
VISIBLE = 1e-3


def _engine(server: CpuServer) -> SGLangEngine:
    return SGLangEngine(server.url, eos=EOS, vocab=TASK.vocab)


def _roll_out(engine: SGLangEngine, seed: int, temperature: float = 1.0, top_p: float = 1.0) -> list[RolloutRecord]:
    return engine.generate(
        TASK.prompts(16, seed),
        samples_per_prompt=4,
        max_new_tokens=TASK.max_response,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


def _distance(records: Sequence[RolloutRecord], log_probs: Sequence[Sequence[float]]) -> float:
    """Largest |log π_train − log π_rollout| of any token."""
    rows = zip(records, log_probs, strict=True)
    pairs = [pair for record, row in rows for pair in zip(record.rollout_log_probs, row, strict=True)]
    return max(math.inf if a is None else abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_server_agrees_with_megatron_and_bfloat16_does_not(
    float32_server: CpuServer, bfloat16_server: CpuServer, temperature: float
) -> None:
    state = score(11).state
    distances = {}
    for server in (float32_server, bfloat16_server):
        with _engine(server) as engine:
            engine.load_weights(state, 3)
            records = _roll_out(engine, 0, temperature)
            assert [record.prompt_ids for record in records] == [p for p in TASK.prompts(16, 0) for _ in range(4)]
            assert {record.finish_reason for record in records} == {"stop", "length"}
            assert all((r.finish_reason == "stop") == (r.response_ids[-1] == EOS) for r in records)
            distances[engine.dtype] = _distance(records, score(11, records, temperature).log_probs)
    print(distances)
    assert distances["float32"] < EXACT
    assert VISIBLE < distances["bfloat16"] < 0.5


def test_rollouts_follow_every_weight_update(float32_server: CpuServer) -> None:
    with _engine(float32_server) as engine:
        for version, seed in enumerate((21, 22, 21)):
            engine.load_weights(score(seed).state, version)
            records = _roll_out(engine, version)
            told = {name for record in records for name in record.version_of_token}
            assert len(told) == 1 and str(*told).endswith(f"-{version}")
            other = 22 if seed == 21 else 21
            assert _distance(records, score(seed, records).log_probs) < EXACT
            assert _distance(records, score(other, records).log_probs) > 0.05


def test_log_probs_under_top_p_are_those_of_what_was_kept(float32_server: CpuServer) -> None:
    with _engine(float32_server) as engine:
        engine.load_weights(score(11).state, 0)
        records = _roll_out(engine, 0, top_p=0.7)
    assert _distance(records, score(11, records).log_probs) < EXACT  # of the full vocabulary, as without top-p
    for record in records:
        assert record.kept_ids is not None and record.behaviour_log_probs is not None
        rows = zip(
            record.response_ids, record.kept_ids, record.rollout_log_probs, record.behaviour_log_probs, strict=True
        )
        for token, kept, full, behaviour in rows:
            assert token in kept and full is not None and behaviour is not None
            # At least 0.7 of the probability is kept, and dividing by it is all that happens.
            assert full - 1e-6 <= behaviour <= full - math.log(0.7) + 1e-5
    assert any(len(kept) < TASK.vocab for record in records for kept in record.kept_ids or ())


def test_weights_of_somebody_else_are_noticed(float32_server: CpuServer) -> None:
    state = score(11).state
    with _engine(float32_server) as engine, _engine(float32_server) as other:
        engine.load_weights(state, 0)
        other.load_weights(state, 0)
        with pytest.raises(RuntimeError, match="the server is in use elsewhere too"):
            _roll_out(engine, 0)


def test_another_precision_than_the_settings_is_refused(bfloat16_server: CpuServer) -> None:
    with pytest.raises(ValueError, match="computes in bfloat16, and rollout_dtype is float32"):
        SGLangEngine(bfloat16_server.url, eos=EOS, vocab=TASK.vocab, dtype="float32")


def test_twenty_steps_on_two_tensor_parallel_ranks(float32_server: CpuServer, bfloat16_server: CpuServer) -> None:
    settings = {"tp": 2, "steps": 20, "prompts_per_batch": 8, "samples_per_prompt": 4, "eval_every": 0}
    config = {"use_tis": True, "metrics": "full"}
    cases = [
        ServerCase(float32_server.url, settings, config),
        ServerCase(bfloat16_server.url, {**settings, "rollout_dtype": "bfloat16"}, config),
    ]
    outcomes = launch(train_on_server, cases, 2, timeout=300)
    drift = {}
    for case, (first, second) in zip(cases, outcomes, strict=True):
        assert second == []
        steps = [record for record in first if record["step"]]
        assert [record["step"] for record in steps] == list(range(1, 21))
        # Four optimizer steps on each rollout batch, which the newest weights sampled.
        assert [record["weight_version"] for record in steps] == [4 * (step // 4) for step in range(20)]
        assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in steps)
        metrics = [record["metrics"] for record in steps]
        largest = max(abs(math.log(m[f"rollout_corr/rollout_is_{end}"])) for m in metrics for end in ("min", "max"))
        drift[case.settings.get("rollout_dtype", "float32")] = largest
    print(drift)
    # π_old is computed with the weights that sampled: a batch from older ones would stand out by much more.
    assert drift["float32"] < EXACT
    assert VISIBLE < drift["bfloat16"] < 0.5


def test_update_in_flight_shows_in_spans_and_metrics(float32_server: CpuServer) -> None:
    before, after = score(31).state, score(32).state
    records = asyncio.run(_update_in_flight(float32_server.url, before, after))
    assert all(len(record.response_ids) == LONG for record in records)
    spans = [[(span.version, span.start, span.end) for span in record.weight_versions] for record in records]
    assert all([name for name, _, _ in row] == ["run-1", "run-2"] for row in spans), spans
    assert all(row[0][1] == 0 and row[0][2] == row[1][1] and row[1][2] == LONG for row in spans)

    # Each token was sampled from the weights that its span names, and from no others.
    old, new = score(31, records).log_probs, score(32, records).log_probs
    for index, record in enumerate(records):
        cut = record.weight_versions[0].end
        sampled = record.rollout_log_probs
        assert sampled[:cut] == pytest.approx(old[index][:cut], abs=EXACT)
        assert sampled[cut:] == pytest.approx(new[index][cut:], abs=EXACT)
        assert sampled[cut:] != pytest.approx(old[index][cut:], abs=0.01)

    packed = to_packed(records, new)
    metrics = mp.correct(packed, mp.MismatchConfig.model_validate({"metrics": "full"})).statistics.metrics()
    drift = {lag: metrics[f"rollout_corr/log_ratio_by_version_lag_{lag}"] for lag in (0, 1)}
    print(drift)
    rows = zip(new, old, (record.weight_versions[0].end for record in records), strict=True)
    stale = [a - b for newest, before, cut in rows for a, b in zip(newest[:cut], before[:cut], strict=True)]
    assert abs(drift[0]) < EXACT
    assert drift[1] == pytest.approx(math.fsum(stale) / len(stale), abs=EXACT)
    assert abs(drift[1]) > 10 * EXACT


async def _update_in_flight(url: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> list[RolloutRecord]:
    """Responses in whose middle the weights change: once all of them run."""
    async with SGLangClient(url) as client:
        await client.update_weights_from_tensors(before, "run-1")
        prompts = TASK.prompts(8, 0)
        long = SamplingParameters(max_new_tokens=LONG, ignore_eos=True)
        pending = asyncio.create_task(client.generate(prompts, long))
        await until_running(url, len(prompts), pending)
        async with client.paused("retract"):
            await client.update_weights_from_tensors(after, "run-2")
        return await pending
