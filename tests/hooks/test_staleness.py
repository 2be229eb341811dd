"""`rs.max_staleness` where a host's loss is told no weight versions: refused, with what the host has instead."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

import pytest

from mismatch_plugin.hooks import megatron_rl
from mismatch_plugin.hooks.nemo_rl import config as nemo_rl
from mismatch_plugin.hooks.verl import config as verl


def of_verl(rs: dict[str, Any]) -> Any:
    return verl.settings({"rollout_is": "token", "mismatch": {"rs": rs}})


def of_nemo_rl(rs: dict[str, Any]) -> Any:
    return nemo_rl.settings({"mismatch": {"use_tis": True, "rs": rs}})


def of_megatron_rl(rs: dict[str, Any]) -> Any:
    settings = {"use_tis": True, "rs": rs}
    return megatron_rl.settings(Namespace(rl_inference_logprobs_is_correction=True, mismatch_settings=settings))


@pytest.mark.parametrize(
    ("host", "instead"),
    [
        (of_verl, "max_off_policy_threshold, or async_training.staleness_threshold"),
        (of_nemo_rl, "set grpo.async_grpo.max_trajectory_age_steps"),
        (of_megatron_rl, "set --rl-generation-lag"),
    ],
)
def test_hosts_that_know_no_versions_refuse_it(host: Any, instead: str) -> None:
    assert host({"veto_threshold": 1e-4}).rs.veto_threshold == 1e-4
    with pytest.raises(ValueError, match=f"(?s)max.staleness.*{re.escape(instead)}"):
        host({"max_staleness": 2})
