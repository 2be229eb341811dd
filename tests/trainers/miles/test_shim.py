"""What miles itself trains with is its own: no function of its loss, data, arguments or trainer is replaced."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.miles.trainer import Sources
from tests.trainers.untouched import replaced

MODULES = (
    *(f"miles.backends.training_utils.{name}" for name in ("loss", "data", "cp_utils", "log_utils")),
    *(f"miles.backends.megatron_utils.{name}" for name in ("actor", "model", "arguments", "initialize")),
    *(f"miles.utils.{name}" for name in ("arguments", "data", "types", "misc", "mask_utils", "dp_schedule")),
    *(f"miles.ray.rollout.{name}" for name in ("rollout_manager", "train_data_conversion", "rollout_data_conversion")),
    "miles.rollout.sglang_rollout",
    *(f"megatron.training.{name}" for name in ("training", "arguments")),
    *(f"megatron.core.{name}" for name in ("pipeline_parallel.schedules", "optimizer", "models.gpt.gpt_model")),
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.fusions.fused_cross_entropy",
)


def test_nothing_of_its_own_is_replaced(sources: Sources) -> None:
    env = sources.environment(Path("/tmp"))
    assert replaced(sources.python, MODULES, env, sources.miles) == set()
    assert replaced(sources.python, ["megatron.training.utils"], env, sources.miles)  # what is shimmed is seen
