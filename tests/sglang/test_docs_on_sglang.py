"""What docs/rollouts.md says about a server, run on one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.rollout.files import read_records
from mismatch_plugin.rollout.server import CpuServer

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def test_the_example_of_the_client(float32_server: CpuServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    monkeypatch.chdir(tmp_path)  # it writes rollouts.jsonl
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    records = asyncio.run(names["rollouts"](float32_server.url, prompts))
    assert [record.prompt_ids for record in records] == [prompt for prompt in prompts for _ in range(4)]
    assert read_records(tmp_path / "rollouts.jsonl") == records
    packed = names["to_packed"](records, [record.rollout_log_probs for record in records])
    assert packed.lengths == tuple(len(record.response_ids) for record in records)
