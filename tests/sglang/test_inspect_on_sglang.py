"""`mismatch-plugin inspect` on real servers: by statistics, without what the plugin tells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ci.sglang_cpu.tiny_model import tiny_model
from examples.sglang_server import CpuServer
from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from tests.sglang import tiny
from tests.sglang.tiny import PREFIX, State, moved, run, send

SIZES = {"mild": 0.002, "strong": 0.01}
"""Of each of the trainer's four steps."""
STEPS = 4
NOW = f"step-{STEPS}"
MEDIUM = SamplingParameters(max_new_tokens=24, ignore_eos=True)
APART = [[300 + row, *[5 + (7 * row + 3 * place) % 240 for place in range(48)]] for row in range(32)]
"""Prompts without a common beginning, so that none is in the cache of another."""
SHARED = [[*PREFIX, 210 + row] for row in range(32)]


def inspect(*arguments: object) -> dict[str, Any]:
    """What the command prints; its exit status says the same."""
    given = [str(argument) for argument in arguments]
    done = CliRunner().invoke(app, ["inspect", *given, "--json", "--no-report"])
    found = json.loads(done.stdout)
    assert done.exit_code == {"fault": 1, "undecided": 3}.get(found["verdict"], 0), done.output
    return found


def faults(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["fault"], item["confidence"]) for item in found["findings"] if item["severity"] == "fault"]


def rollouts(server: CpuServer, state: State, version: str, prompts: Sequence[list[int]] = APART) -> list[Sample]:
    """From a server that has these weights under this name. What its plugin tells, if it has one, is dropped."""
    send(server, state, version)
    records = run(server, lambda client: client.generate(prompts, MEDIUM))
    return [record.with_fields(served=None, sample_id=None) for record in records]


def scored(records: Sequence[Sample], state: State, version: str = NOW) -> list[Sample]:
    """With what a trainer of these weights computes."""
    return [
        record.with_fields(train_log_probs=np.array(tiny.log_probs(state, record)), trainer_version=version)
        for record in records
    ]


def saved(folder: Path, state: State) -> Path:
    model = tiny_model("llama", 0)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_what_was_done_to_the_servers_is_named_first(
    bare: CpuServer, one: CpuServer, tmp_path: Path, size: str
) -> None:
    states = [moved(step, SIZES[size]) for step in range(STEPS + 1)]
    start, now = states[0], states[-1]
    layer = {name: (now if ".layers.1." in name else start)[name] for name in now}
    reference = ("--reference-checkpoint", saved(tmp_path / "start", start))
    both = (*reference, "--checkpoint", saved(tmp_path / "now", now))
    by_step = [scored(rollouts(bare, start, f"step-{n}"), state, f"step-{n}") for n, state in enumerate(states)]
    behind = states[STEPS - 2 if size == "mild" else 0]
    two_servers = [*rollouts(bare, now, NOW), *rollouts(one, behind, NOW)]
    for name, records, options, fault in (
        ("one step", scored(rollouts(bare, start, NOW), now), reference, "weights_not_updated"),
        ("all steps", [record for part in by_step for record in part], (), "weights_not_updated"),
        ("one layer", scored(rollouts(bare, layer, NOW), now), both, "weights_partly_updated"),
        ("one server", scored(two_servers, now), (), "stale_server"),
    ):
        write_samples(tmp_path / f"{name}.jsonl", records)
        found = inspect(tmp_path / f"{name}.jsonl", *options)
        assert faults(found)[0][0] == fault, (name, found["findings"])
        assert found["recommendation"] is None  # the fault first


@pytest.mark.parametrize("behind", [0, 1])
def test_sound_servers_are_normal_also_a_step_behind(bare: CpuServer, tmp_path: Path, behind: int) -> None:
    now, then = moved(STEPS, SIZES["mild"]), moved(STEPS - behind, SIZES["mild"])
    write_samples(tmp_path / "sound.jsonl", scored(rollouts(bare, then, f"step-{STEPS - behind}"), now))
    found = inspect(tmp_path / "sound.jsonl", "--reference-checkpoint", saved(tmp_path / "start", moved(0, 0.0)))
    assert found["findings"] == [] and found["verdict"] in ("normal", "large")[: 1 + behind], found["headline"]


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("size", [0.005, 0.02])
def test_stale_caches_show_without_the_plugin(bare: CpuServer, tmp_path: Path, size: float, flushed: bool) -> None:
    """Updates in place; half of the prompts share a prefix, which the cache has from before the update."""
    prompts = [prompt for pair in zip(SHARED, APART, strict=True) for prompt in pair]
    for step in range(1, STEPS + 1):
        state, version = moved(step, size), f"step-{step}"
        send(bare, moved(step - 1, size), f"step-{step - 1}")
        run(bare, lambda client: client.generate(SHARED[:1], MEDIUM))
        tiny.session(bare, state, weight_version=version, flush_cache=flushed)
        records = scored(run(bare, lambda client: client.generate(prompts, MEDIUM)), state, version)
        assert all(record.served is None for record in records)
        assert len(PREFIX) in {record.cached_tokens for record in records[::2]}
        assert {record.cached_tokens for record in records[1::2]} == {0}
        for replies in (len(records), 20):
            write_samples(tmp_path / "records.jsonl", records[:replies])
            if flushed:
                assert inspect(tmp_path / "records.jsonl")["findings"] == []
            else:
                found = inspect(tmp_path / "records.jsonl")
                assert faults(found)[0] == ("stale_cache", "possible"), found["findings"]
                assert f"{replies // 2} samples with most of the prompt cached" in found["findings"][0]["evidence"]
