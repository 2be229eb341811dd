"""The objectives: what becomes of log π_θ, its anchor and the advantage at each token; and the terms added to them.

References: Williams 1992 (REINFORCE); Schulman et al. 2017 (PPO-clip); Ye et al. 2020 (dual clip); Hilton et al. 2021,
"Batch size-invariance for policy optimization" (decoupled PPO); Zheng et al. 2025, arXiv 2507.18071 (GSPO); MiniMax
2025, arXiv 2506.13585 (CISPO); Gao et al. 2025, arXiv 2511.20347 (SAPO); Zhao et al. 2025, arXiv 2507.20673 (GMPO);
Schulman 2020 (k1, k2, k3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config.settings import PPOClip

LOW_VARIANCE_BOUND = 10.0


class ObjectiveInputs(NamedTuple):
    """What an objective sees, [T]. selected: bool, the tokens that enter. log_probs: log π_θ, 0 elsewhere, with
    gradient. anchor, detached: log π_old, or in algorithm 1 log π_rollout (where that is invalid log π_θ: ratio 1).
    advantages, detached: anything where nothing enters. mean: of `Objective.averaged` over the sequence's tokens that
    enter, 0 elsewhere; None where the objective needs none."""

    selected: Tensor
    log_probs: Tensor
    anchor: Tensor
    advantages: Tensor
    clip: PPOClip
    mean: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """log π_θ − log π_anchor, unclamped, 0 where nothing enters, with gradient."""
        return self.log_probs - torch.where(self.selected, self.anchor, 0.0)


class Objective:
    """REINFORCE: −A log π_θ. It has no ratio and no clip; the others have a ratio.

    Everything is [T]; the gradient passes through log_probs only; no host sync. Masking is the caller's.
    averages: whether it needs the mean of `averaged` over the sequence's tokens that enter, whatever rejection leaves
        of them and whatever rank has them; its sum travels in the correction's SUM.
    """

    averages: ClassVar[bool] = False

    def averaged(self, inputs: ObjectiveInputs) -> Tensor:
        """What is averaged; 0 where nothing enters."""
        raise NotImplementedError

    def log_ratio(self, inputs: ObjectiveInputs) -> Tensor | None:
        """log r, unclamped, with gradient; None without a ratio."""
        return None

    def loss(self, inputs: ObjectiveInputs, log_r: Tensor | None) -> Tensor:
        """The loss of every token, before weight and rejection. log_r: `log_ratio`."""
        return -inputs.advantages * inputs.log_probs

    def clipped(self, r: Tensor, advantages: Tensor, clip: PPOClip) -> Iterator[tuple[str, Tensor]]:
        """(name, bool) where the clip is active, by side, and the dual clip. r: within e^±20, detached."""
        yield from ()


class PPO(Objective):
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(clamp(log r, ±20)), log r = log π_θ − log π_anchor.

    With a dual-clip constant c, where A < 0 the loss is at most −c A. No gradient where the clamp or a clip is active.
    """

    def log_ratio(self, inputs: ObjectiveInputs) -> Tensor | None:
        return inputs.log_ratio()

    def loss(self, inputs: ObjectiveInputs, log_r: Tensor | None) -> Tensor:
        assert log_r is not None
        advantages, clip, r = inputs.advantages, inputs.clip, log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
        clipped = r.clamp(1.0 - clip.eps_clip_low, 1.0 + clip.eps_clip_high)
        loss = torch.maximum(-advantages * r, -advantages * clipped)
        if clip.dual_clip is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual_clip), loss)
        return loss

    def clipped(self, r: Tensor, advantages: Tensor, clip: PPOClip) -> Iterator[tuple[str, Tensor]]:
        if clip.dual_clip is not None:
            yield "clip_dual", (r > clip.dual_clip).logical_and_(advantages < 0)
        yield "clip_high", (r > 1.0 + clip.eps_clip_high).logical_and_(advantages > 0)
        yield "clip_low", (r < 1.0 - clip.eps_clip_low).logical_and_(advantages < 0)


class GSPO(PPO):
    """PPO with s_t = exp(sg(mean l) + log π_θ,t − sg(log π_θ,t)) for r, l = log π_θ − log π_anchor.

    A token whose anchor is invalid counts with l = 0. Each token carries its own gradient, so weights and advantages
    may differ inside a sequence (the paper's GSPO-token); where they do not, their sum has the gradient of exp(mean l).
    """

    averages = True

    def averaged(self, inputs: ObjectiveInputs) -> Tensor:
        return inputs.log_ratio()

    def log_ratio(self, inputs: ObjectiveInputs) -> Tensor | None:
        assert inputs.mean is not None
        return inputs.mean + (inputs.log_probs - inputs.log_probs.detach())


class CISPO(PPO):
    """−sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π_θ, r as in PPO: what is clipped keeps its gradient."""

    def loss(self, inputs: ObjectiveInputs, log_r: Tensor | None) -> Tensor:
        assert log_r is not None
        r = bounded_exp(log_r.detach()).clamp_(1.0 - inputs.clip.eps_clip_low, 1.0 + inputs.clip.eps_clip_high)
        return -(r * inputs.advantages) * inputs.log_probs

    def clipped(self, r: Tensor, advantages: Tensor, clip: PPOClip) -> Iterator[tuple[str, Tensor]]:
        yield "clip_high", r > 1.0 + clip.eps_clip_high
        yield "clip_low", r < 1.0 - clip.eps_clip_low


class SAPO(PPO):
    """−(4/τ) σ(τ (r − 1)) A, r as in PPO: a smooth gate in the place of the clip, whose slope at r = 1 is 1.

    τ is `tau_positive` where A > 0, else `tau_negative`: the larger, the sooner a far ratio loses its gradient.
    """

    def loss(self, inputs: ObjectiveInputs, log_r: Tensor | None) -> Tensor:
        assert log_r is not None
        advantages, clip, r = inputs.advantages, inputs.clip, log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
        gates = [(4.0 / tau) * torch.sigmoid(tau * (r - 1.0)) for tau in (clip.tau_positive, clip.tau_negative)]
        return -advantages * torch.where(advantages > 0, *gates)

    def clipped(self, r: Tensor, advantages: Tensor, clip: PPOClip) -> Iterator[tuple[str, Tensor]]:
        """The gate clips nothing: 0 on either side."""
        nothing = torch.zeros_like(r, dtype=torch.bool)
        yield from (("clip_high", nothing), ("clip_low", nothing))


class GMPO(PPO):
    """−exp(mean c) A, c = min(l, ε_high) where A > 0, else max(l, −ε_low), l = log π_θ − log π_anchor.

    The geometric mean of ratios that are clipped one by one, on the side of A's sign. Each token carries its own
    gradient, as in GSPO: none where it is clipped. ε is that of the log-ratio.
    """

    averages = True

    @staticmethod
    def _clip(log_r: Tensor, inputs: ObjectiveInputs) -> Tensor:
        high, low = log_r.clamp(max=inputs.clip.eps_clip_high), log_r.clamp(min=-inputs.clip.eps_clip_low)
        return torch.where(inputs.advantages > 0, high, low)

    def averaged(self, inputs: ObjectiveInputs) -> Tensor:
        return self._clip(inputs.log_ratio(), inputs)

    def loss(self, inputs: ObjectiveInputs, log_r: Tensor | None) -> Tensor:
        assert log_r is not None and inputs.mean is not None
        own = self._clip(log_r, inputs)
        return -inputs.advantages * (inputs.mean + (own - own.detach())).clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()

    def clipped(self, r: Tensor, advantages: Tensor, clip: PPOClip) -> Iterator[tuple[str, Tensor]]:
        log_r = r.log()
        yield "clip_high", (log_r > clip.eps_clip_high).logical_and_(advantages > 0)
        yield "clip_low", (log_r < -clip.eps_clip_low).logical_and_(advantages < 0)


OBJECTIVES: dict[str, Objective] = {
    "ppo": PPO(),
    "gspo": GSPO(),
    "cispo": CISPO(),
    "sapo": SAPO(),
    "gmpo": GMPO(),
    "reinforce": Objective(),
}


def kl_to_reference(log_probs_T: Tensor, ref_T: Tensor, kind: str, bound: float = SAFETY_BOUND) -> Tensor:
    """Estimator of KL(π_θ ‖ π_ref) at each token, [T], with gradient through log_probs_T.

    With d = log π_θ − log π_ref, clamped to ±bound:
    k1: d
    k2: d²/2
    k3: e^−d − 1 + d
    low_var_kl: k3 bounded to ±10
    """
    difference = (log_probs_T - ref_T).clamp(-bound, bound)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    value = torch.expm1(-difference) + difference
    if kind == "k3":
        return value
    if kind == "low_var_kl":
        return value.clamp(-LOW_VARIANCE_BOUND, LOW_VARIANCE_BOUND)
    raise ValueError(f"kl_type {kind!r} is unknown: choose k1, k2, k3 or low_var_kl.")


def kl_from_rollout(log_probs_T: Tensor, rollout_T: Tensor, kind: str) -> Tensor:
    """Penalty on the distance to the sampler at each token, [T], with gradient through log_probs_T.

    With l = log π_θ − log π_rollout; a far token keeps its gradient, for there the pull back matters:
    k2: l²/2, gradient l
    k3: e^l − 1 − l, gradient e^l − 1, which estimates KL(π_rollout ‖ π_θ); above l = 20 its tangent, so that neither
        overflows
    prime-rl's default loss has l², k2 with twice the coefficient.
    """
    log_r = log_probs_T - rollout_T
    if kind == "k2":
        return 0.5 * log_r.square()
    beyond = torch.relu(log_r - SAFETY_BOUND)
    return torch.expm1(log_r.clamp(max=SAFETY_BOUND)) - log_r + math.exp(SAFETY_BOUND) * beyond


def score_function_kl(
    log_probs_T: Tensor, sampler_T: Tensor, ref_T: Tensor, kind: str, bound: float, output_bound: float
) -> Tensor:
    """exp(log π_θ − sg(log π_sampler)) · k(d), clamped to ±output_bound: the KL penalty that NeMo-RL has.

    k(d): `kl_to_reference`, d clamped to ±bound. The factor lets the gradient pass through the sampling probability
    (arXiv 2506.09477): it is 1 for π_sampler = π_θ, an importance ratio for the rollout policy, and 0 where it is not
    finite. Where a clamp acts neither part has a gradient. All [T], finite; gradient through log_probs_T only.
    """
    factor = (log_probs_T - sampler_T.detach()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    factor = torch.where((log_probs_T - ref_T).abs() <= bound, factor, factor.detach())
    return (factor * kl_to_reference(log_probs_T, ref_T, kind, bound)).clamp(-output_bound, output_bound)
