"""What verl calls by path: the task, and an agent loop of its registry that loses the log-prob of one token."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of the answer's characters that are letters, digits or punctuation."""
    return sum("!" <= letter <= "~" for letter in solution_str) / max(len(solution_str), 1)


class MissingLogProbLoop(SingleTurnAgentLoop):
    """verl's own; the engine's log-prob of the second token is not a number."""

    async def run(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().run(*args, **kwargs)
        if output.response_logprobs is not None and len(output.response_logprobs) > 1:
            output.response_logprobs[1] = float("nan")
        return output
