"""What docs/rollouts.md says about a server, run on one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import mismatch_plugin as mp
from examples.sglang_server import CpuServer
from mismatch_plugin.data.files import row_of
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch

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
    record = Sample.model_validate(_names(1)["record"]([1, 2, 3], reply, sampling))
    assert record.served is not None and record.served.temperature == record.sampling.temperature == 0.7
    assert len(record.response_ids) == 4 and record.served.weights[0].end == 4 and record.weight_versions
    assert check_batch(make_batch([record])).findings == ()


def test_the_example_of_the_client(float32_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _names(0)
    monkeypatch.chdir(tmp_path)  # it writes rollouts.jsonl
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    samples = asyncio.run(names["rollouts"](float32_server.url, prompts))
    assert [sample.prompt_ids.tolist() for sample in samples] == [prompt for prompt in prompts for _ in range(4)]
    read_again = read(tmp_path / "rollouts.jsonl").samples
    assert [row_of(sample) for sample in read_again] == [row_of(sample) for sample in samples]
    both = [sample.replace(train_log_probs=sample.rollout_log_probs, advantages=1.0) for sample in samples]
    packed = names["pack"](both)
    assert float(names["loss"](both, packed.old_log_probs, mp.MismatchConfig())) == -1.0
    assert packed.lengths == tuple(map(len, samples))
