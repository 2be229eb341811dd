"""What the host's sampling filters leave in the ratio, for the start-up block."""

from __future__ import annotations

from mismatch_plugin.rollout.sampling import filter_bias


def sampling_filter(top_p: float, top_k: float, host: str) -> str:
    """A line on --rollout-top-p and --rollout-top-k; empty where they are off."""
    if host == "slime" and top_p != 1.0:  # its patched SGLang keeps the ids of every filter, but only under top-p
        return (
            f"sampling filter: top_p {top_p:g}; every log-prob of slime's, old and ours, is over the ids that SGLang "
            f"(with slime's patch) kept: for equal engines the mean ratio is 1"
        )
    bias = filter_bias(top_p=top_p, top_k=int(top_k), renormalised=False)
    return bias and f"sampling filter: {bias}. {host} passes no mask on: sample with top_p 1 and top_k -1"
