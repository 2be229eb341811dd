"""The sections of the settings: importance weights, the clip of the objectives, losses next to the policy term."""

from __future__ import annotations

import math
from typing import Literal

from mismatch_plugin.config.fields import Section, described
from mismatch_plugin.config.units import LEVELS, UNITS, Level, Unit
from mismatch_plugin.limits import GAMMA_NEGATIVE, GAMMA_POSITIVE, SAFETY_BOUND, UPPER_BOUNDS

GAMMA_WORDS = " where A ≥ 0, else ".join(f"({power:g}, {decay:g})" for power, decay in (GAMMA_POSITIVE, GAMMA_NEGATIVE))


class ImportanceSampling(Section):
    """How importance weights are made from the ratio ρ = π_train / π_rollout."""

    mode: Literal["truncate", "clip", "mask", "gamma"] = described(
        "truncate",
        "what happens to an aggregated ratio outside its bounds: truncate = min(ρ, hi), clip = min(max(ρ, lo), hi), "
        "mask = rejected (weight 0, out of the loss), gamma = e^λ ρ^k e^(−λρ), which needs no bounds: (k, λ) is "
        f"{GAMMA_WORDS}",
    )
    level: Level = described(
        "token",
        f"the ratio that weighs a token: {', '.join(f'{level} = {UNITS[level].ratio}' for level in LEVELS)}; none = "
        "weight 1, REINFORCE with rejection only",
    )
    lower_bound: float | None = described(
        None, "lower bound lo of the aggregated ratio; 1/hi if absent, 0 turns it off", unit="ratio", ge=0.0
    )
    upper_bound: float = described(2.0, "upper bound hi of the aggregated ratio; inf means e^20", unit="ratio", gt=0.0)
    lower_bound_positive: float | None = described(
        None, "lo where A ≥ 0, of several tokens their sum; absent = as elsewhere", unit="ratio", ge=0.0
    )
    upper_bound_positive: float | None = described(
        None, "hi where A ≥ 0, of several tokens their sum; absent = as elsewhere", unit="ratio", gt=0.0
    )
    bound_growth: float = described(
        0.0,
        "g: log lo and log hi grow as n^g with the n tokens that a product is over (turn, sequence, prefix), at most "
        "to ±20; 0.5 keeps the share outside nearly independent of the length",
        ge=0.0,
        le=1.0,
    )
    batch_normalize: bool = described(
        False, "divide the bounded weights by their mean, so that it is 1 (self-normalised importance sampling)"
    )
    batch_normalize_scope: Literal["auto", "step", "rollout_batch", "micro_batch"] = described(
        "auto",
        "what the mean runs over: the optimizer step, the rollout batch, or one micro-batch; auto = the widest the "
        "host gives",
    )

    @property
    def unit(self) -> Unit:
        """Of the weights; tokens where there are none (level none), for the metrics."""
        return UNITS.get(self.level, UNITS["token"])

    @property
    def growth(self) -> float:
        """g: log lo and log hi are those of one token, and grow as n^g with the n tokens of a product; 0 elsewhere."""
        return self.bound_growth if self.unit.multiplies else 0.0

    @property
    def lower(self) -> float:
        """lo with its default filled in: 1/hi, clamped to e^-20; under truncate at most hi."""
        return min(1.0 / self.upper, self.upper) if self.lower_bound is None else self.lower_bound

    @property
    def upper(self) -> float:
        """hi, with inf replaced by the safety bound e^20."""
        return min(self.upper_bound, math.exp(SAFETY_BOUND))

    @property
    def differs_by_sign(self) -> bool:
        """True where bounds are others for A ≥ 0."""
        return self.lower_bound_positive is not None or self.upper_bound_positive is not None

    @property
    def positive(self) -> tuple[float, float]:
        """(lo, hi) where A ≥ 0; hi at most e^20."""
        lower, upper = self.lower_bound_positive, self.upper_bound_positive
        upper = self.upper if upper is None else min(upper, math.exp(SAFETY_BOUND))
        return (min(self.lower, upper) if lower is None else lower), upper

    @property
    def upper_bound_fault(self) -> str:
        """What is wrong with hi as a bound of weights; "" where it is between 1 and 100."""
        lowest, highest = UPPER_BOUNDS
        if self.upper_bound < lowest:
            return "no weight reaches 1, which hides a smaller step"
        return f"one weight can outweigh {highest:g} others" if self.upper_bound > highest else ""


class PPOClip(Section):
    """The clip of the objective in algorithms 0, 1 and 2. What is not given is the objective's own: see `EPS_CLIP`."""

    eps_clip_low: float = described(
        0.2,
        "ε of the lower clip bound 1 − ε; absent: 0.2, under gspo 3e-4, under cispo 1 (no lower bound), under gmpo 0.4 "
        "(of the log-ratio)",
        ge=0.0,
        le=1.0,
    )
    eps_clip_high: float = described(
        0.2, "ε of the upper clip bound 1 + ε; absent: 0.2, under gspo 4e-4, under gmpo 0.4 (of the log-ratio)", ge=0.0
    )
    dual_clip: float | None = described(
        None, "dual-clip constant c: for negative advantages the loss is at most −c·A; absent = off", gt=1.0
    )
    tau_positive: float = described(
        1.0,
        "τ of objective sapo's gate where A > 0: the larger, the sooner a far ratio loses its gradient",
        gt=0.0,
        allow_inf_nan=False,
    )
    tau_negative: float = described(1.05, "τ where A ≤ 0", gt=0.0, allow_inf_nan=False)


Objective = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce"]
EPS_CLIP: dict[str, tuple[float, float]] = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 0.2), "gmpo": (0.4, 0.4)}
"""(low, high) ε of the objectives that have their own: arXiv 2507.18071, 5.1; arXiv 2506.13585 (no lower bound);
arXiv 2507.20673."""


class Terms(Section):
    """Losses added to the policy term. The correction does not scale them: they run over the original `loss_mask`."""

    entropy_coef: float = described(
        0.0, "entropy bonus: −coef · entropy is added to the loss", unit="1/nat", allow_inf_nan=False
    )
    kl_coef: float = described(0.0, "KL penalty to the reference policy", unit="1/nat", ge=0.0, allow_inf_nan=False)
    kl_type: Literal["k1", "k2", "k3", "low_var_kl"] = described(
        "low_var_kl",
        "estimator of KL(π_θ‖π_ref): k1 = d, k2 = d²/2, k3 = e^−d − 1 + d with d = log π_θ − log π_ref; low_var_kl = "
        "k3 bounded to ±10",
    )
    kl_importance_weighted: bool = described(
        False,
        "multiply the KL penalty by the importance weight, detached. With unbounded prefix or sequence weights the "
        "mean gradient is that of each state's KL(π_θ‖π_ref) for k2, KL(π_ref‖π_θ) for k3. In algorithm 2 only while "
        "π_θ is π_old. The mean value is then KL(π_θ‖π_ref) for k1 and k3 alone",
    )
    rollout_kl_coef: float = described(
        0.0,
        "penalty on the distance of π_θ to the sampler, never scaled by weights",
        unit="1/nat",
        ge=0.0,
        allow_inf_nan=False,
    )
    rollout_kl_type: Literal["k2", "k3"] = described(
        "k2",
        "k2 = l²/2 or k3 = e^l − 1 − l, an estimator of KL(π_rollout‖π_θ), with l = log π_θ − log π_rollout; the "
        "gradient of a far token stays",
    )
    rollout_kl_on: Literal["all", "accepted"] = described(
        "all", "which tokens it runs over: all, or the accepted ones (divided by the number of all)"
    )
