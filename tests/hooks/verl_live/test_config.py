# pyright: reportMissingImports=false
"""From the command line of verl's trainer to the worker's loss, through verl's own Hydra files and converters."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import MASK, batch, loss_and_gradient
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from mismatch_plugin.hooks.verl import mismatch_loss, register, settings
from mismatch_plugin.hooks.verl.config import check_tree

RC = "algorithm.rollout_correction"
OURS = f"+{RC}.mismatch"
LOSS = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=mismatch",
    f"+actor_rollout_ref.actor.policy_loss.rollout_correction=${{{RC}}}",
)
REINFORCE = (
    *(f"{RC}.{setting}" for setting in ("bypass_mode=true", "loss_type=reinforce")),
    *(f"{OURS}.tis.{setting}" for setting in ("level=geometric", "mode=clip", "upper_bound=1.05")),
    *(f"{OURS}.rs.{setting}" for setting in ("veto_threshold=1e-4", "criteria=['sequence_max:k2:0.5']")),
)


def tree(*overrides: str, name: str = "ppo_trainer") -> Any:
    """verl's configuration as its command line composes it."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        # The smallest set that verl's own validation asks for.
        sizes = ("actor.ppo_micro_batch_size_per_gpu=1", "rollout.log_prob_micro_batch_size_per_gpu=1")
        return compose(name, [*overrides, *(f"actor_rollout_ref.{size}" for size in sizes)])


def worker(config: Any) -> Any:
    """The actor's configuration as verl's worker makes it: resolved by the task runner, then instantiated."""
    OmegaConf.resolve(config)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_every_setting_reaches_the_worker(name: str) -> None:
    config = tree(*REINFORCE, *LOSS, "actor_rollout_ref.actor.clip_ratio_high=0.28", name=name)
    chosen = settings(worker(config))
    assert chosen == settings(config) == check_tree(config)
    assert chosen.algorithm == 3 and chosen.tis.level == "geometric" and chosen.tis.mode == "clip"
    assert chosen.tis.upper_bound == 1.05 and chosen.rs.veto_threshold == 1e-4
    assert [criterion.name for criterion in chosen.criteria] == ["sequence_max_k2"]
    with pytest.raises(ValueError, match="the workers do not see"):  # verl's dataclass default stands there
        settings(worker(tree(*REINFORCE, LOSS[0], name=name)))


def test_verls_ppo_loss_calls_it() -> None:
    """The worker's real ppo_loss, on the nested tensors that it gets, against the loss called directly."""
    config = worker(tree(*REINFORCE, *LOSS))
    data = batch(0, spread=0.02)
    lengths = (MASK.flip(1).cumsum(1) > 0).sum(1)

    def nested(rows: torch.Tensor) -> torch.Tensor:
        parts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    prompts = torch.nested.as_nested_tensor([torch.zeros(2)] * len(lengths), layout=torch.jagged)
    fields = {"responses": "advantages", "response_mask": "response_mask", "advantages": "advantages"}
    fields |= {"old_log_probs": "rollout_log_probs"}
    rows = {theirs: nested(data[mine]) for theirs, mine in fields.items()}
    inputs = TensorDict({"prompts": prompts, **rows}, batch_size=len(lengths))
    tu.assign_non_tensor(inputs, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    # A model's log-probs: one for each token, the response's shifted by one to the left.
    padded = torch.nn.functional.pad(data["log_prob"], (1, 1))
    shifted = [torch.cat([row[: n + 1], row[-1:]]) for row, n in zip(padded, lengths, strict=True)]
    log_probs = torch.nested.as_nested_tensor(shifted, layout=torch.jagged)
    loss, metrics = ppo_loss(config, {"log_probs": log_probs}, inputs)
    expected, _, mine = loss_and_gradient(
        mismatch_loss, data, old_log_prob=data["rollout_log_probs"], loss_agg_mode="token-mean", config=config
    )
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert metrics["rollout_corr/kl"].aggregate() == pytest.approx(mine["rollout_corr/kl"])


def test_verls_bypass_loss_is_ours_with_our_block_only() -> None:
    loss, data = get_policy_loss_fn("bypass_mode"), batch(1, spread=0.02)
    arguments = {"old_log_prob": data["rollout_log_probs"], "loss_agg_mode": "token-mean", "rollout_is_weights": None}
    ours = worker(tree(*REINFORCE, *LOSS))
    assert loss_and_gradient(loss, data, config=ours, **arguments)[0] == pytest.approx(
        loss_and_gradient(mismatch_loss, data, config=ours, **arguments)[0], rel=1e-12
    )
    theirs = worker(tree(f"{RC}.bypass_mode=true", LOSS[1]))
    assert "rollout_corr/accepted_token_fraction" not in loss_and_gradient(loss, data, config=theirs, **arguments)[2]
    register()  # twice wraps once
    assert get_policy_loss_fn("bypass_mode") == loss


def test_the_entry_point_loads_on_import_verl() -> None:
    assert [point.value for point in entry_points(group="verl.plugins")] == ["mismatch_plugin.hooks.verl_plugin"]
    code = (
        "import verl, sys;"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as losses;"
        "from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as driver;"
        "from verl.utils.config import validate_config as validate;"
        "print('mismatch' in losses, *(hasattr(one, 'mismatch_plugin_wraps') for one in (driver, validate)))"
    )

    for policy, said in (("auto", "True True True"), ("none", "False False False")):
        command, env = [sys.executable, "-W", "ignore", "-c", code], {"PATH": "", "VERL_USE_EXTERNAL_PLUGINS": policy}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip().splitlines()[-1] == said
