"""What docs/rollouts.md says about a server, run on one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.sglang_server import CpuServer
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.rollout.files import read_records
from mismatch_plugin.rollout.records import RolloutRecord

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def _names(example: int) -> dict[str, Any]:
    """What the page's Python example defines."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(found[example], str(PAGE), "exec"), names)
    return names


def test_the_record_of_a_loop_of_one_s_own(float32_server: CpuServer) -> None:
    sampling = {"temperature": 0.7, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
    reply = httpx.post(float32_server.url + "/generate", json=body, timeout=60).raise_for_status().json()
    record = RolloutRecord.model_validate(_names(1)["record"]([1, 2, 3], reply, sampling))
    assert record.served is not None and record.served.temperature == record.sampling.temperature == 0.7
    assert len(record.response_ids) == 4 and record.served.weights[0].end == 4 and record.weight_versions
    assert check_batch(make_batch([record])).findings == ()


def test_the_example_of_the_client(float32_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _names(0)
    monkeypatch.chdir(tmp_path)  # it writes rollouts.jsonl
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    records = asyncio.run(names["rollouts"](float32_server.url, prompts))
    assert [record.prompt_ids for record in records] == [prompt for prompt in prompts for _ in range(4)]
    assert read_records(tmp_path / "rollouts.jsonl") == records
    packed = names["to_packed"](records, [record.rollout_log_probs for record in records])
    assert packed.lengths == tuple(len(record.response_ids) for record in records)
