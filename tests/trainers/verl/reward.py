"""The task: answer with printable ASCII. verl calls it by custom_reward_function.path."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of the answer's characters that are letters, digits or punctuation."""
    return sum("!" <= letter <= "~" for letter in solution_str) / max(len(solution_str), 1)
