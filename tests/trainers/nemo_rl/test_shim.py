"""What NeMo-RL itself trains with is its own: no function of its loss, data, arguments or trainer is replaced."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.nemo_rl.trainer import Sources
from tests.trainers.untouched import replaced

MODULES = (
    *(f"nemo_rl.algorithms.{name}" for name in ("grpo", "utils", "advantage_estimator", "loss.loss_functions")),
    *(f"nemo_rl.distributed.{name}" for name in ("model_utils", "batched_data_dict")),
    *(f"nemo_rl.data.{name}" for name in ("llm_message_utils", "processors")),
    *(f"nemo_rl.utils.{name}" for name in ("config", "logger")),
)


def test_nothing_of_its_own_is_replaced(sources: Sources) -> None:
    """Policy and engine, with its weight transfer, are: names that `grpo` imports (SHIMMED)."""
    env = sources.environment(Path("/tmp"), Path("/tmp"))
    names = {f"nemo_rl.algorithms.grpo.{name}" for name in ("Policy", "VllmGeneration")}
    assert replaced(sources.python, MODULES, env, sources.nemo_rl) == names
