"""What Megatron-LM itself trains with is its own: no function of its loss, data, arguments or trainer is replaced."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.megatron_rl.trainer import Sources
from tests.trainers.untouched import replaced

MODULES = (
    "train_rl",
    *(f"megatron.rl.{name}" for name in ("rl_utils", "sequence_packing_utils", "agent.reward_only_agent")),
    *(f"megatron.training.{name}" for name in ("training", "arguments")),
    *(f"megatron.core.{name}" for name in ("pipeline_parallel.schedules", "optimizer", "models.gpt.gpt_model")),
    "megatron.core.distributed.finalize_model_grads",
)


def test_nothing_of_its_own_is_replaced(sources: Sources) -> None:
    env = sources.environment(Path("/tmp"))
    env["PYTHONPATH"] += f":{sources.megatron}"
    # SHIMMED: what asks for a GPU, and an argument that only Float16Module knows.
    assert replaced(sources.python, MODULES, env, sources.megatron) == {
        "megatron.training.training.initialize_megatron",
        "megatron.training.arguments.get_device_arch_version",
        "megatron.core.models.gpt.gpt_model.GPTModel.forward",
    }
