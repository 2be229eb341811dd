"""The real server behind `python -m examples.sglang_server`: it serves text, and never outlives its owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from ci.sglang_cpu.tiny_model import write_tiny_model

DEADLINE_S = 300


def _members(group: int) -> dict[int, str]:
    """The processes of a group: id -> command line."""
    lines = subprocess.run(["ps", "-eo", "pid=,pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=3) for line in lines.splitlines()]
    return {int(pid): args for pid, its_group, state, args in rows if int(its_group) == group and state[0] != "Z"}


def test_text_in_and_out_and_no_process_left_after_its_owner_is_killed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "qwen3", seed=4)
    command = [sys.executable, "-m", "examples.sglang_server", str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    url = owner.stdout.readline().split()[0]
    children = subprocess.run(["pgrep", "-P", str(owner.pid)], capture_output=True, text=True, check=True).stdout
    (group,) = map(int, children.split())
    assert any("sglang::scheduler" in line for line in _members(group).values())

    sampling = {"temperature": 1.0, "max_new_tokens": 8}
    request = {"text": "mismatch", "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    reply = httpx.post(url + "/generate", json=request, timeout=60.0).raise_for_status().json()
    prompt = [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]]
    response = reply["output_ids"]
    assert len(prompt) == len("mismatch") and isinstance(reply["text"], str)
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    assert [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=1e-4)

    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    deadline = time.monotonic() + DEADLINE_S
    while (left := _members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
