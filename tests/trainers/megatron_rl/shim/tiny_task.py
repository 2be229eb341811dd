"""The environment: sixteen prompts of digits; the reward is the share of the answer's tokens that are digits."""

# pyright: reportMissingImports=false
from __future__ import annotations

import random
from typing import Any

from megatron.rl.agent.reward_only_agent import RewardOnlyAgent


class TinyAgent(RewardOnlyAgent):
    """One of Megatron-LM RL's own agents: prompts, and a reward."""

    env_id: str = "tiny"

    async def get_prompt(self, validation: bool) -> tuple[str, Any]:
        if not hasattr(self, "draws"):
            self.draws = random.Random(1)
        number = self.draws.randrange(16)
        return " ".join(f"{number:04b}"), {"problem_id": str(number)}

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        words = response.split()
        return sum(word.isdigit() for word in words) / max(1, len(words))
