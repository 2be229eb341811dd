"""Advantages after the driver's rejection, by verl's own `compute_advantage` and by ours in its place.

verl's trainer module needs packages that its tests on CPU do without: the function is taken out of its source.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from batches import MASK, ROWS, batch, correction
from verl import DataProto  # pyright: ignore[reportAttributeAccessIssue]
from verl.trainer.ppo import core_algos, rollout_corr_helper

import mismatch_plugin as mp

TRAINER = "verl.trainer.ppo.ray_trainer"


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """verl's trainer module with `compute_advantage` alone, and a module that has imported it by name."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "trainer/ppo/ray_trainer.py").read_text(encoding="utf-8"))
    body = [node for node in tree.body if getattr(node, "name", "") == "compute_advantage"]
    future = ast.parse("from __future__ import annotations").body
    module, user = ModuleType(TRAINER), ModuleType("verl.trainer.ppo.v1.utils")
    vars(module).update(core_algos=core_algos, AdvantageEstimator=core_algos.AdvantageEstimator)
    exec(compile(ast.Module([*future, *body], []), "ray_trainer.py", "exec"), vars(module))
    user.compute_advantage = module.compute_advantage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, TRAINER, module)
    monkeypatch.setitem(sys.modules, user.__name__, user)
    return module


def step(
    data: dict[str, torch.Tensor], rewards: torch.Tensor, uids: list[str], settings: dict[str, Any], scaled: bool
) -> tuple[DataProto, dict[str, float]]:
    """The driver between π_old and the actor, as `fit` has it: rejection, then advantages by the module's function."""
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    proto = DataProto.from_dict(
        {**{name: data[name].clone() for name in names}, "token_level_rewards": rewards.clone()}
    )
    proto.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    proto, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(proto, settings)
    user = sys.modules["verl.trainer.ppo.v1.utils"]
    found = user.compute_advantage(
        proto, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=scaled, config={}
    )
    return found, metrics


def rewards_of(scores: list[float]) -> torch.Tensor:
    """Each response's reward at its last place."""
    return torch.nn.functional.pad(torch.tensor(scores)[:, None], (MASK.shape[1] - 1, 0))


UIDS = ["a", "b", "a", "a", "b"]
REJECTING = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}


@pytest.mark.parametrize("denominator", ["auto", "original"])
@pytest.mark.parametrize("scaled", [True, False])
def test_advantages_are_those_of_the_accepted_alone(scaled: bool, denominator: str, trainer: ModuleType) -> None:
    """verl's own function on the accepted responses, the others left out of its batch."""
    rejected = 0
    for seed in range(6):
        data, scores = batch(seed, spread=0.4), torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)).tolist()
        rewards = rewards_of(scores)
        block = {"rs": {"group": "exclude"}, "denominator": denominator}
        mine, metrics = step(data, rewards, UIDS, correction(**REJECTING, mismatch=block), scaled)
        columns: dict[str, Any] = {name: data[name] for name in ("old_log_probs", "rollout_log_probs")}
        packed = mp.PackedSequences.from_padded(loss_masks=data["response_mask"], **columns)
        config = mp.preset("disabled").replace(rs={"criteria": ["sequence_mean:k3:0.05"]})
        kept = [i for i, count in enumerate(mp.correct(packed, config).kept_N) if count > 0]
        alone = core_algos.compute_grpo_outcome_advantage(
            rewards[kept], data["response_mask"][kept], np.array([UIDS[i] for i in kept]), 1e-6, scaled
        )[0]
        expected = torch.zeros(ROWS, 9)
        for row, i in zip(alone, kept, strict=True):
            single = sum(UIDS[j] == UIDS[i] for j in kept) == 1
            expected[i] = 0.0 if single else row
        torch.testing.assert_close(mine.batch["advantages"].float(), expected, rtol=1e-5, atol=1e-6)
        assert mine.batch.get("mismatch_accepted", None) is None
        assert len([name for name in metrics if "_rs_group_" in name or "_rs_advantage_" in name]) == 3
        rejected += ROWS - len(kept)
    assert 3 < rejected < 6 * ROWS - 6
    assert sys.modules["verl.trainer.ppo.v1.utils"].compute_advantage is trainer.compute_advantage
