"""What the host's sampling filters leave in the ratio, for the start-up block."""

from __future__ import annotations

from collections.abc import Mapping

from mismatch_plugin.data.sampling import filter_bias

FILTERS = {"rollout_top_p": 1.0, "rollout_top_k": -1.0}
"""The host's arguments, and what leaves them off."""


def filter_lines(values: Mapping[str, float], host: str) -> list[str]:
    """A line on `FILTERS` that are on; none where all are off."""
    top_p, top_k = values["rollout_top_p"], int(values["rollout_top_k"])
    if host == "slime" and top_p != 1.0:  # its patched SGLang keeps the ids of every filter, but only under top-p
        return [
            f"sampling filter: top_p {top_p:g}; every log-prob of slime's, old and ours, is over the ids that SGLang "
            f"(with slime's patch) kept: for equal engines the mean ratio is 1"
        ]
    bias = filter_bias(top_p=top_p, top_k=top_k, renormalised=False)
    return [f"! sampling filter: {bias}. {host} passes no mask on: sample with top_p 1 and top_k -1"] if bias else []
