"""The launcher on the real verl: Hydra composes its overrides, and the plugin reads the settings back from the tree.

It imports nothing of `tests`: verl's wheel brings a package of that name.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mismatch_plugin.hooks.verl.config import check_tree

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here (make test-verl has an environment)"
)


def _composed(line: str) -> tuple[dict[str, Any], str]:
    """verl's whole tree for a line, which main_ppo prints with --cfg job; and what the launcher printed."""
    command = [sys.executable, "-m", "mismatch_plugin.launch", "-m", "verl.trainer.main_ppo"]
    command += ["--cfg", "job", "--resolve", "model_engine=megatron", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    block, _, tree = done.stdout.partition("\nmodel_engine:")
    return yaml.safe_load("model_engine:" + tree), block


def test_verl_s_configuration_holds_what_was_typed() -> None:
    line = "--use-rollout-log-probs --use-tis --tis-level geometric --rs-veto-threshold 1e-4 "
    tree, block = _composed(line + "--rs-criterion sequence_max:k2:0.5")
    config = check_tree(tree)
    assert config is not None and "algorithm 3: " in block
    assert (config.algorithm, config.tis.level, config.rs.veto_threshold) == (3, "geometric", 1e-4)
    assert [criterion.name for criterion in config.criteria] == ["sequence_max_k2"]
    assert tree["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "mismatch"
