"""An agent loop of verl's registry (`rollout.agent.agent_loop_config_path`) that loses the log-prob of one token."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class MissingLogProbLoop(SingleTurnAgentLoop):
    """verl's own; the engine's log-prob of the second token is not a number."""

    async def run(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().run(*args, **kwargs)
        if output.response_logprobs is not None and len(output.response_logprobs) > 1:
            output.response_logprobs[1] = float("nan")
        return output
