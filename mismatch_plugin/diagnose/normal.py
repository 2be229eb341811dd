"""What is normal: every bar and word of size, the gaps known of sound pairs, and the gate. Other files import these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mismatch_plugin.core.health import DEFAULT_GATE_KL, MAX_KL
from mismatch_plugin.diagnose.result import FaultName, Gate, Mismatch
from mismatch_plugin.limits import USUAL_KL
from mismatch_plugin.report.table import figure

# Bars and words of size ----------------------------------------------------------------------------------------------

ENOUGH_TOKENS = 100
"""Comparable tokens without which slopes, offsets, the size itself and the gate are not judged: nothing is decided."""
SMALL_K3, MODERATE_K3, FAR_K3 = USUAL_KL, 1e-2, MAX_KL
SMALL_ABS_MEAN, MODERATE_ABS_MEAN, FAR_ABS_MEAN = 0.036, 0.11, 0.35
"""Upper ends of small, moderate and large, nats per token: of k3 (of |KL|, the same), and of the mean |Δ log p| that
Gaussian noise of such a k3 has, √(4 k3/π).

small: dense bf16 pairs (our tiny model, SGLang bf16 against a float32 trainer: 8e-4). moderate: KL of the literature
(.0004 to .01), fp8 whose export was quantised otherwise (xtuner #2044: 8.7e-3), int8. large: MoE without routing replay
(effective sample size .94 to .95, so k3 of about .03; mean |Δ log p| .34), weights some optimizer steps apart (here: up
to .085). Far is above what any sound pair has that is published; a mean of .2 to .4 was found broken (OpenClaw #69).
"""
LOGIT_GAPS = {"float32": 0.003, "16 bits": 0.07, "quantised": 0.2}
"""Median logit gap to float32 that a side's precision explains. Measured with a tiny model: float32 1e-6; bf16 .013 to
.038, p90 .065; int8 weights .06 to .1."""
BF16_NOISE = 0.06
"""Logit noise in nats that bf16 explains. Measured on a tiny model: bf16 .015 to .055, int8 .04 to .1, int6 .14 to .4,
int4 .8 to 2."""
SizeClass = Literal["exact", "small", "moderate", "large", "far"]
UNEXPLAINED: FaultName = "unexplained"
"""What a far gap is called that no known fault explains."""


def size_class(level: Mismatch) -> SizeClass:
    """exact: no token differs. far: above what any sound pair known has, by k3 or by the mean |gap|."""
    if level.abs_max == 0.0:
        return "exact"
    if level.k3_kl > FAR_K3 or level.abs_mean > FAR_ABS_MEAN:
        return "far"
    return "small" if level.k3_kl <= SMALL_K3 else "moderate" if level.k3_kl <= MODERATE_K3 else "large"


# Gaps of sound pairs -------------------------------------------------------------------------------------------------

LOOSE = 2.0
"""Most figures are of one run: up to so many times the largest of a kind is still its size."""


@dataclass(frozen=True)
class Known:
    """A gap of one kind of pair: `figure` from low to high, nats per token.

    pair: engine and trainer, by what sets the size of the gap. figure: mean |Δ log p|, k3 or KL.
    what: model and engines. noted: how the figure was obtained from another, or what is uncertain about it.
    """

    pair: str
    figure: str
    low: float
    high: float
    what: str
    source: str
    noted: str = ""

    @property
    def ours(self) -> bool:
        """Measured on this project's own tiny models, not published."""
        return self.source.startswith(_OURS)


_ABS = "mean |Δ log p|"
_RMS = "from the RMS of Δ log p: k3 ≈ RMS²/2"
_FAST_LLM = "https://github.com/ServiceNow/Fast-LLM/pull/525"
_VIME = "https://github.com/vllm-project/vime/issues/64"
_MILES = "https://github.com/radixark/miles/issues"
_XTUNER = "https://github.com/InternLM/xtuner/pull/2044"
_NEMO = "https://github.com/NVIDIA-NeMo/RL"
_VERL = "https://github.com/verl-project/verl/pull"
_SKYRL = "https://github.com/NovaSky-AI/SkyRL/pull/1862"
_REPLAY = f"{_NEMO}/tree/main/tests/test_suites/llm (comment of a routing-replay recipe)"
_OURS = "this project"
_LAB = f"{_OURS}, its small comparison"
_SGLANG = f"{_OURS}, SGLang's CPU server and megatron-core"

# fmt: off
KNOWN = (
    Known("aligned kernels", "k3", 0.0, 0.0, "DeepSeek-V4, vLLM and Megatron with batch-invariant kernels",
        f"{_VERL}/7688"),
    Known("fp16", "k3", 1.3e-5, 2.8e-5, "Qwen2.5-0.5B, two trainers and vLLM, each against its own fp32", _FAST_LLM,
        noted="from relative errors of 0.10 to 0.146 % at a mean |log p| of 3.61, √2 for two sides: k3 ≈ RMS²/2"),
    Known("dense bf16", _ABS, 0.0049, 0.0049, "a 4B model, SGLang and FSDP",
        "https://github.com/Tencent-Hunyuan/UniRL/pull/310", noted="mean |ρ − 1|"),
    Known("dense bf16", _ABS, 0.011, 0.011, "Qwen3-4B, Megatron with vLLM (30 steps) and SGLang (step 0)", _VIME),
    Known("dense bf16", "k3", 2.5e-4, 8.3e-4, "Qwen2.5-7B and 0.5B, Fast-LLM and DeepSpeed against vLLM", _FAST_LLM,
        noted=_RMS),
    Known("bf16 engine, fp32 trainer", _ABS, 0.03, 0.03, "tiny model, SGLang on CPU, megatron-core", _SGLANG),
    Known("bf16 engine, fp32 trainer", "k3", 8e-4, 8e-4, "tiny model, SGLang on CPU, megatron-core", _SGLANG),
    Known("MoE bf16", _ABS, 0.013, 0.014, "Qwen3.5-35B-A3B, SGLang and Megatron, step 0", f"{_MILES}/1186"),
    Known("MoE bf16", "k3", 8.6e-4, 8.7e-4, "an MoE recipe of NeMo-RL, vLLM", _REPLAY),
    Known("MoE bf16", "k3", 1.59e-3, 1.65e-3, "Qwen3.8-Flash-Next with LoRA, vLLM and FSDP", f"{_VERL}/7749"),
    Known("MoE bf16", "k3", 5.2e-3, 5.2e-3, "DeepSeek-V4, vLLM and VeOmni, no routing replay", f"{_VERL}/7242"),
    Known("MoE bf16, routing replayed", _ABS, 0.007, 0.007, "Qwen3.5-35B-A3B, SGLang and Megatron, step 0",
        f"{_MILES}/1186"),
    Known("MoE bf16, routing replayed", "k3", 3.7e-4, 3.7e-4, "an MoE recipe of NeMo-RL, vLLM", _REPLAY),
    Known("fp8, both sides alike", "k3", 3.3e-4, 3.8e-4, "Qwen3.5-35B-A3B, quantised from the same bf16 weights",
        _XTUNER),
    Known("fp8, both sides alike", "KL", 1.4e-3, 1.8e-3, "Qwen3.5-9B, blockwise fp8, vLLM and Megatron",
        f"{_NEMO}/pull/2744"),
    Known("fp8, both sides alike", "KL", 2.4e-3, 5e-3, "Qwen3.5-35B-A3B, blockwise fp8, vLLM and Megatron",
        f"{_NEMO}/pull/2744"),
    Known("fp8 or fp4 engine, bf16 trainer", _ABS, 0.041, 0.067, "DeepSeek-V4-Flash, routing replayed, SGLang and "
        "Megatron", f"{_MILES}/2722"),
    Known("int8 engine", "k3", 1e-4, 1e-4, "tiny model, weights rounded to int8, fp32 trainer", _LAB,
        noted="no figure of a large model was found"),
    Known("int4 engine", _ABS, 0.026, 0.032, "Qwen3.6-35B-A3B, int4 weights in vLLM, bf16 in Megatron", _SKYRL),
    Known("int4 engine", "k3", 0.018, 0.018, "tiny model, weights rounded to int4, fp32 trainer", _LAB,
        noted="a tiny model feels four bits more"),
    Known("int4, both sides alike", _ABS, 0.0118, 0.0141, "Qwen3.6-35B-A3B, the same grid in training", _SKYRL),
    Known("stale rollouts", "k3", 1.7e-3, 5.4e-3, "Qwen3-0.6B, about one update behind",
        "https://github.com/marin-community/marin/issues/8955",
        noted="from a run's smallest ESS, 0.989 to 0.997: k3 ≈ (1/ESS − 1)/2"),
    Known("stale rollouts", "k3", 0.03, 0.23, "tiny model, large learning rate, 4 and 16 updates behind", _LAB),
)
# fmt: on


@dataclass(frozen=True)
class Hints:
    """What the records or their user tell of the pair; None: unknown. engine, trainer: names of `command.Precision`.
    stale: versions that the rollouts are behind."""

    engine: str | None = None
    trainer: str | None = None
    moe: bool | None = None
    stale: float = 0.0


def pairs_like(hints: Hints) -> tuple[str, ...]:
    """The kinds of pair that the hints allow, the likeliest first: without any, dense bf16 and its neighbours."""
    alike, found = hints.trainer == hints.engine, ("dense bf16",)
    if hints.engine in ("fp8", "fp4"):
        found = ("fp8, both sides alike",) if alike else ("fp8 or fp4 engine, bf16 trainer", "fp8, both sides alike")
    elif hints.engine == "int4":
        found = ("int4, both sides alike",) if alike else ("int4 engine",)
    elif hints.engine == "int8":
        found = ("int8 engine",)
    elif hints.engine == "fp16" and hints.trainer in ("fp16", None):
        found = ("fp16",)
    elif hints.moe:
        found = ("MoE bf16",)
    elif hints.trainer == "fp32":
        found = ("bf16 engine, fp32 trainer", "dense bf16")
    elif hints.engine is None and hints.trainer is None and hints.moe is None:
        found = ("dense bf16", "bf16 engine, fp32 trainer", "MoE bf16")
    return ("stale rollouts", *found) if hints.stale else found


def normality(level: Mismatch, hints: Hints) -> tuple[bool, str]:
    """Whether the gap is of a known size: at most LOOSE times the largest figure of its kind, for every figure known of
    the kind; and what to say of it after "Is this normal?"."""
    if level.abs_max == 0.0:
        return True, "yes, an exact zero: both sides have the same log-probs, as aligned kernels give."
    pairs = pairs_like(hints)
    for pair in pairs:
        if (most := _times_largest(level, pair)) <= LOOSE:
            size = "within twice the largest" if most > 1.0 else "as"
            return True, f"yes, {size} known for {pair}: {_shown(level, pair)}."
    most = figure(_times_largest(level, pairs[0]), 2)
    return False, f"no: for {pairs[0]}, {most} times the largest known: {_shown(level, pairs[0])}."


def largest_published(quantised: bool) -> tuple[float, float]:
    """(mean |Δ log p|, k3) of the furthest sound pairs of one version of the weights, with or without a quantised
    side."""
    pairs = {row.pair for row in KNOWN if row.pair.startswith(("fp8", "int")) == quantised}
    kinds = [_known(pair) for pair in pairs - {"stale rollouts"}]
    mean, k3 = (max(rows[name][-1].high for rows in kinds if name in rows) for name in (_ABS, "k3"))
    return mean, k3


def span(low: float, high: float) -> str:
    """`0.005 to 0.006`."""
    return figure(low) if low == high else f"{figure(low)} to {figure(high)}"


def _sizes(level: Mismatch, pair: str) -> Iterator[tuple[str, float, list[Known]]]:
    """Figures that are known of a kind: what it is here, and the rows."""
    for name, rows in _known(pair).items():
        # Published KL is estimated by k3 (NeMo-RL's gen_kl_error), which the sampling error of −mean Δ does not drown.
        yield name, level.abs_mean if name == _ABS else level.k3_kl, rows


def _times_largest(level: Mismatch, pair: str) -> float:
    return max(value / rows[-1].high for _, value, rows in _sizes(level, pair))


def _known(pair: str) -> dict[str, list[Known]]:
    """Figure → the sound rows of a kind, the largest last; k3 and KL are one."""
    found: dict[str, list[Known]] = {}
    for row in KNOWN:
        if row.pair == pair:
            found.setdefault("k3" if row.figure == "KL" else row.figure, []).append(row)
    return {name: sorted(rows, key=lambda row: row.high) for name, rows in found.items()}


def _shown(level: Mismatch, pair: str) -> str:
    """`k3 0.0013 (published 0.0017 to 0.0054, ours 0.03 to 0.23)`."""
    parts: list[str] = []
    for name, value, rows in _sizes(level, pair):
        by = {who: [row for row in rows if row.ours == ours] for who, ours in (("published", False), ("ours", True))}
        ranges = [f"{who} {span(min(r.low for r in of), of[-1].high)}" for who, of in by.items() if of]
        parts.append(f"{name} {figure(value, 2)} ({', '.join(ranges)})")
    return ", ".join(parts)


# The gate of `inspect --gate` ----------------------------------------------------------------------------------------

GATE_TOKENS = 10_000
"""Below so many tokens the gate decides only where the standard error leaves no doubt; below ENOUGH_TOKENS never: one
token in some thousands can hold most of k3."""
K3_SPREAD = 10.0
"""Assumed deviation of the tokens' k3 over its mean: √2 for Gaussian noise, more with tails."""
GATE_SOURCE = (
    "the default: dense engines of one precision on one set of weights are below, fp8 with unlike "
    "quantisation is above (8.7e-3, InternLM/xtuner#2044). slime's CI bounds the mean |Δ log p| by 0.1, which Gaussian "
    "noise reaches at k3 0.008"
)


def gate(k3_kl: float, tokens: int, bar: float) -> Gate:
    """Whether k3_kl ≤ bar, both in nats per token.

    `passed` is None (not decided, exit status 3) with fewer than GATE_TOKENS tokens unless k3_kl is two standard errors
    (K3_SPREAD · k3_kl / √tokens) away from the bar; with fewer than ENOUGH_TOKENS, or where k3_kl is NaN, always.
    Raises: ValueError for a bar that is not above 0.
    """
    if not bar > 0 or math.isinf(bar):
        raise ValueError(f"the bar of the gate is {bar:g}: give nats of k3 per token, a number above 0 such as 1e-3.")
    error = K3_SPREAD * k3_kl / math.sqrt(max(tokens, 1))
    clear = tokens >= ENOUGH_TOKENS and (tokens >= GATE_TOKENS or abs(k3_kl - bar) > 2 * error)
    passed = k3_kl <= bar if clear and not math.isnan(k3_kl) else None
    return Gate(value=k3_kl, bar=bar, passed=passed, source=GATE_SOURCE if bar == DEFAULT_GATE_KL else "given by hand")
