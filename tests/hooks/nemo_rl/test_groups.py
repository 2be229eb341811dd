"""NeMo-RL's baseline over the valid responses of a prompt, from its source, is `group_advantages`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from tests.hooks.contracts import nemo_rl as contract
from tests.host_source import host_source


def compare(baseline_of: Any, leave_one_out: bool, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        prompts = torch.randint(0, 4, (17, 1), generator=generator)
        rewards = torch.rand(17, generator=generator, dtype=torch.float64)
        valid = (torch.rand(17, generator=generator) < 0.7).double()
        baseline, std = baseline_of(prompts, rewards, valid, leave_one_out_baseline=leave_one_out)
        theirs = torch.where(valid > 0, (rewards - baseline) / (std + 1e-6 if scaled else 1.0), 0.0)
        mine = mp.group_advantages(rewards, prompts[:, 0], valid, scaled, leave_one_out=leave_one_out)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("leave_one_out", "scaled"), [(False, True), (False, False), (True, False)])
def test_nemo_rls_valid_mask_is_group_advantages(leave_one_out: bool, scaled: bool) -> None:
    """On random groups. A difference: leave-one-out and scaled, NeMo-RL divides by the deviation of the others."""
    baseline_of = contract.own_baseline(host_source("NeMo-RL"))
    torch.set_default_dtype(torch.float64)  # that of its masks
    try:
        compare(baseline_of, leave_one_out, scaled)
    finally:
        torch.set_default_dtype(torch.float32)
