"""NeMo-RL's advantages over the accepted responses of a prompt: its own estimator and baseline, from its source.

`grpo` stands for NeMo-RL's module: the two functions that are wrapped, called as its trainers call them.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks.nemo_rl import with_mismatch_loss
from tests.hooks.contracts import nemo_rl as contract
from tests.host_source import host_source

RS = {"criteria": ["sequence_mean:k3:0.05"]}
PROMPTS = torch.tensor([[5, 5], [5, 6], [5, 5], [5, 5], [5, 6], [5, 6]])
REWARDS = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.5])  # NeMo-RL's function takes float32 only
FAR = (2, 5)  # rejected: one of the first prompt, one of the second


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NeMo-RL's modules with what is wrapped and called; a second module has imported both by name."""
    estimator, baseline = contract.own_grpo(host_source("NeMo-RL"))
    module, sync, utilities = (ModuleType(f"nemo_rl.algorithms.{name}") for name in ("grpo", "grpo_sync", "utils"))
    settings_of = SimpleNamespace(normalize_rewards=True, use_leave_one_out_baseline=True)
    vars(module).update(
        compute_and_apply_seq_logprob_error_masking=lambda train_data, rewards, seq_logprob_error_threshold: {"own": 1},
        _create_advantage_estimator=lambda master_config: estimator(settings_of, None),
        settings=settings_of,
    )
    vars(sync).update(vars(module))
    vars(utilities)["calculate_baseline_and_std_per_prompt"] = baseline
    for parent in ("nemo_rl", "nemo_rl.algorithms"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for item in (module, sync, utilities):
        monkeypatch.setitem(sys.modules, item.__name__, item)
    return sync


def train_data(far: tuple[int, ...] = FAR) -> dict[str, torch.Tensor]:
    generation = torch.full((6, 4), -1.0, dtype=torch.float64)
    previous = generation.clone()
    previous[list(far)] -= 0.5
    mask = torch.tensor([[0, 1, 1, 0]]).expand(6, 4)
    data = {"token_mask": mask, "sample_mask": torch.ones(6)}
    return {**data, "prev_logprobs": previous, "generation_logprobs": generation}


def start(block: dict[str, Any]) -> None:
    """What the script does first."""
    made = ("policy", SimpleNamespace(input_type="logprob", loss_type="token_level"))
    config = {"loss_fn": {"reference_policy_kl_penalty": 0.0, "mismatch": block}}
    with_mismatch_loss(lambda master_config: made)(config)


def advantages(grpo: Any, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """A step as NeMo-RL's trainers have it: (advantages [6, 4], what they log of it)."""
    estimator = grpo._create_advantage_estimator(None)
    logged = grpo.compute_and_apply_seq_logprob_error_masking(
        train_data=data, rewards=REWARDS, seq_logprob_error_threshold=None
    )
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    found = estimator.compute_advantage(
        prompt_ids=PROMPTS, rewards=REWARDS, mask=mask, repeated_batch={}, logprobs_policy=data["prev_logprobs"],
    )  # fmt: skip
    return found, logged


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_baselines_are_those_of_the_accepted(grpo: Any, leave_one_out: bool, scaled: bool) -> None:
    grpo.settings.use_leave_one_out_baseline, grpo.settings.normalize_rewards = leave_one_out, scaled
    start({"rs": {**RS, "group": "exclude"}})
    found, logged = advantages(grpo, train_data())
    kept = [i for i in range(6) if i not in FAR]
    own = contract.own_grpo(host_source("NeMo-RL"))[0](grpo.settings, None)
    alone = own.compute_advantage(PROMPTS[kept], REWARDS[kept], torch.ones(4, 4))
    torch.testing.assert_close(found[kept], alone, rtol=1e-12, atol=1e-12)
    assert not found[list(FAR)].any()
    assert logged["own"] == 1 and logged["rollout_corr/rollout_rs_group_changed_fraction"] > 0
    everything, logged = advantages(grpo, train_data(far=()))
    assert torch.equal(everything, own.compute_advantage(PROMPTS, REWARDS, torch.ones(6, 4)))
    assert logged["rollout_corr/rollout_rs_group_changed_fraction"] == 0


def test_small_groups_have_no_gradient_and_what_nemo_rl_masks_does_not_count(grpo: Any) -> None:
    """Its own masking by sequence log-prob error, and truncated responses, change sample_mask."""
    start({"rs": {**RS, "group": "drop", "min_group": 3}})
    found, logged = advantages(grpo, train_data(far=(5,)))
    assert (found.abs().sum(1) > 0).tolist() == [True, False, True, True, False, False]
    assert logged["rollout_corr/rollout_rs_group_dropped_fraction"] == 0.5
    start({"rs": {**RS, "group": "exclude"}})
    data = train_data(far=())
    data["sample_mask"][0] = 0
    grpo.settings.use_leave_one_out_baseline = grpo.settings.normalize_rewards = False
    assert advantages(grpo, data)[0][:, 0].tolist() == [0, 0.5, 0.5, -0.5, -0.5, 0]


def test_wrapped_once_and_not_without_the_setting(grpo: Any) -> None:
    own = grpo._create_advantage_estimator
    start({"rs": RS})
    assert grpo._create_advantage_estimator is own
    start({"rs": {**RS, "group": "exclude"}})
    start({"rs": {**RS, "group": "drop", "min_group": 4}})  # a second run in the process has its own settings
    assert grpo._create_advantage_estimator.mismatch_plugin_wraps[1] is own
    assert not advantages(grpo, train_data())[0].any()
    estimator = grpo._create_advantage_estimator(None)
    with pytest.raises(ValueError, match="NeMo-RL skipped their pass"):
        estimator.compute_advantage(prompt_ids=PROMPTS, rewards=REWARDS, mask=torch.ones(6, 4))


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
    baseline_of = contract.own_grpo(host_source("NeMo-RL"))[1]
    torch.set_default_dtype(torch.float64)  # that of its masks
    try:
        compare(baseline_of, leave_one_out, scaled)
    finally:
        torch.set_default_dtype(torch.float32)
