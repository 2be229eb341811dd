"""What slime itself trains with is its own: no function of its loss, data, arguments or trainer is replaced."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.slime.trainer import Sources
from tests.trainers.untouched import replaced

MODULES = (
    *(f"slime.backends.megatron_utils.{name}" for name in ("loss", "data", "cp_utils", "actor", "model", "arguments")),
    *(f"slime.utils.{name}" for name in ("arguments", "ppo_utils", "data", "types", "misc")),
    *(f"slime.ray.{name}" for name in ("rollout", "train_actor", "actor_group")),
    "slime.rollout.sglang_rollout",
    *(f"megatron.training.{name}" for name in ("training", "arguments")),
    *(f"megatron.core.{name}" for name in ("pipeline_parallel.schedules", "optimizer", "models.gpt.gpt_model")),
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.fusions.fused_cross_entropy",
)


def test_nothing_of_its_own_is_replaced(sources: Sources) -> None:
    env = sources.environment(Path("/tmp"))
    # Megatron-LM gives this name to another of its functions.
    alias = "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"
    assert replaced(sources.python, MODULES, env, sources.slime) == {alias}
    assert replaced(sources.python, ["megatron.training.utils"], env, sources.slime)  # what is shimmed is seen
