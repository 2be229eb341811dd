"""`rs.group` on verl, before a run: which advantages it takes the place of. `verl_live/test_groups.py` has the rest."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from mismatch_plugin.hooks.hosts import VERL
from mismatch_plugin.hooks.verl.config import check_tree
from mismatch_plugin.hooks.verl.launch import plan
from mismatch_plugin.launch.command_line import read_command_line


class Estimator(str, enum.Enum):
    """As verl has them."""

    GAE = "gae"
    GRPO = "grpo"


def tree(estimator: Any, group: str) -> dict[str, Any]:
    rs = {"criteria": ["sequence_mean:k3:0.1"], "group": group}
    algorithm = {"rollout_correction": {"mismatch": {"rs": rs}}, "adv_estimator": estimator}
    return {"algorithm": algorithm, "actor_rollout_ref": {"actor": {"policy_loss": {}}, "rollout": {}}}


def test_advantages_that_are_not_within_a_prompt_are_refused() -> None:
    for estimator in ("gae", Estimator.GAE, "rloo", "reinforce_plus_plus"):
        assert check_tree(tree(estimator, "keep")) is not None
        name = getattr(estimator, "value", estimator)
        with pytest.raises(
            ValueError, match=rf"rs\.group exclude .*, and algorithm\.adv_estimator {name} compares other"
        ):
            check_tree(tree(estimator, "exclude"))
    for estimator in ("grpo", Estimator.GRPO, "grpo_vectorized", None):
        assert check_tree(tree(estimator, "exclude")) is not None


def test_the_launcher_reads_the_estimator_of_the_line() -> None:
    def added(line: str) -> str:
        given = read_command_line(line.split(), {})
        return " ".join(plan(VERL, given, None).added)

    flags = "--use-tis --rs-criterion sequence_mean:k3:0.1 --rs-group drop --rs-min-group 2"
    assert "min_group" in added(f"algorithm.adv_estimator=grpo {flags}")
    assert "min_group" in added(flags), "it may be in a YAML file: verl's own configuration is checked when it is read"
    with pytest.raises(ValueError, match="adv_estimator gae compares other ones: choose grpo"):
        added(f"algorithm.adv_estimator=gae {flags}")
