"""`inspect --url` without a dump: sampled from real servers, scored with a checkpoint or by the server itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from examples.sglang_server import CpuServer
from mismatch_plugin.cli import app


def _inspect(*arguments: object) -> tuple[int, dict[str, Any]]:
    given = ["inspect", *(str(item) for item in arguments), "--json", "--no-report"]
    result = CliRunner().invoke(app, given)
    return result.exit_code, json.loads(result.stdout)


def test_a_server_is_sampled_and_scored(bfloat16_server: CpuServer, checkpoint: Path) -> None:
    status, told = _inspect("--url", bfloat16_server.url, "--checkpoint", checkpoint, "--samples", 32)
    assert status == 0 and told["format"] == "live" and told["samples"] == 32 and told["findings"] == []
    assert told["verdict"] in ("normal", "large") and told["recommendation"]["flags"]["slime"]
    assert any("sampled now" in note for note in told["notes"])


def test_two_servers_and_prompts_of_ones_own(
    bfloat16_server: CpuServer, float32_server: CpuServer, checkpoint: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[3, 4, 5, 6]\n[7, 8, 9]\n")
    urls = ("--url", bfloat16_server.url, "--url", float32_server.url)
    status, told = _inspect(*urls, "--checkpoint", checkpoint, "--prompts", prompts, "--samples", 16)
    assert told["samples"] == 32 and status in (0, 1)
    assert {group["name"] for group in told["size"]["breakdowns"]["server"]} != set()


def test_without_a_checkpoint_prompts_are_asked_for(bfloat16_server: CpuServer) -> None:
    status, told = _inspect("--url", bfloat16_server.url)
    assert status == 2 and "--prompts" in told["headline"]
