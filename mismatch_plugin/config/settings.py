"""Every setting of the correction, with what follows from it; flags and docs/settings.md are generated from these."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mismatch_plugin.config.criteria import Criterion, Rejection
from mismatch_plugin.config.fields import Section, described
from mismatch_plugin.config.sections import EPS_CLIP, ImportanceSampling, Objective, PPOClip, Terms
from mismatch_plugin.config.units import Unit
from mismatch_plugin.limits import SAFETY_BOUND

LogProbBackend = Literal["auto", "torch", "triton", "megatron", "transformer-engine"]
VerifyWeights = Literal["error", "warn", "off"]

ALGORITHM_NAMES = ("PPO", "bypass PPO", "decoupled PPO", "REINFORCE + IS")


class Settings(Section):
    """The fields of a configuration and what follows from them; `MismatchConfig` validates and loads them."""

    use_rollout_log_probs: bool = described(
        False,
        "use SGLang's log-probs as the old policy; no second forward pass",
        flag="--use-rollout-log-probs",
        aliases=("--use_rollout_log_probs", "--use-rollout-logprobs"),
    )
    use_tis: bool = described(False, "apply training-inference importance sampling", flag="--use-tis")
    objective: Objective = described(
        "ppo",
        "what becomes of π_θ, anchor and advantage in algorithms 0, 1, 2: ppo; gspo = the clip on the sequence's "
        "geometric mean; cispo = −sg(clip(r))·A·log π_θ; sapo = a smooth gate for the clip; gmpo = the geometric mean "
        "of clipped ratios; reinforce = −A·log π_θ. Algorithm 3 is reinforce",
    )
    tis: ImportanceSampling = Field(default_factory=ImportanceSampling)
    rs: Rejection = Field(default_factory=Rejection)
    ppo: PPOClip = Field(default_factory=PPOClip)
    terms: Terms = Field(default_factory=Terms)
    denominator: Literal["auto", "accepted", "original"] = described(
        "auto",
        "what the summed loss is divided by: accepted = rejected tokens leave it, original = they stay; auto = "
        "accepted wherever the plugin owns the denominator",
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = described(
        "token-mean", "how token losses become one number"
    )
    length_norm: float | None = described(
        None,
        "constant that divides each sequence's sum under seq-mean-token-sum",
        unit="tokens",
        ge=1e-6,
        allow_inf_nan=False,
    )
    rollout_log_prob_policy: Literal["error", "neutral", "drop-token", "drop-sequence"] = described(
        "error",
        "what an invalid log-prob (NaN, > 0, −inf or a floor, a 0.0 fill) does where it is used; where it is only "
        "measured it is left out of the metrics and counted",
        flag="--rollout-log-prob-policy",
    )
    metrics: Literal["off", "basic", "full"] = described("basic", "off, the guide's metrics, or everything")
    dry_run: bool = described(False, "compute weights and rejections, report them, apply none")
    gate_kl: float | None = described(
        None,
        "a step with k3_kl above this is an error on all ranks, before the optimizer steps: for CI and first steps at "
        "learning rate 0 (the bar of inspect --gate: 1e-3); absent = no gate",
        unit="nats per token",
        gt=0.0,
    )
    report_dir: Annotated[str | None, BeforeValidator(lambda v: str(v) if isinstance(v, Path) else v)] = described(
        None, "folder for the run's metrics, one line a step: mismatch-plugin inspect judges them"
    )
    verify_weights: VerifyWeights = described(
        "warn",
        "after a weight update, servers with our SGLang plugin that hold other weights than were sent are a warning, "
        "or an error on all ranks; off = not compared. slime and miles",
    )
    log_prob_backend: LogProbBackend = described(
        "auto",
        "what computes log-probs from the logits: torch, triton (CUDA), megatron or transformer-engine (these two "
        "give no entropy); auto = triton where it can run, else torch. Only where the plugin computes them "
        "(megatron-core)",
    )
    inplace_logits: Literal["auto", "off"] = described(
        "auto",
        "whether the gradient is written over the logits: auto = where nothing else reads them, which saves memory of "
        "their size; off = never. Only where the plugin computes log-probs (megatron-core)",
    )
    fused_head: bool = described(
        False,
        "log-probs from hidden states and the head's weight, a chunk of rows at a time: logits of [tokens, "
        "vocabulary] never exist, for a fourth product with the weight. Only where the plugin computes log-probs "
        "(megatron-core)",
    )

    @model_validator(mode="after")
    def _with_own_clip(self) -> Settings:
        """ε that was not given is the objective's own; it does not count as given."""
        own = {path.removeprefix("ppo."): value for path, value in self.own_defaults.items()}
        given = self.ppo.model_fields_set
        if missing := {name: value for name, value in own.items() if name not in given}:
            ppo = self.ppo.model_copy(update=missing)
            ppo.__pydantic_fields_set__ = given
            object.__setattr__(self, "ppo", ppo)
        return self

    @property
    def own_defaults(self) -> dict[str, float]:
        """Dotted path → default of the settings whose default hangs on another one."""
        names = ("ppo.eps_clip_low", "ppo.eps_clip_high")
        return dict(zip(names, EPS_CLIP.get(self.policy_objective, ()), strict=False))

    @property
    def algorithm(self) -> int:
        """0 PPO, 1 bypass PPO, 2 decoupled PPO, 3 REINFORCE + IS."""
        return int(self.use_rollout_log_probs) + 2 * int(self.use_tis)

    @property
    def policy_objective(self) -> Objective:
        """The objective that acts: algorithm 3 is REINFORCE."""
        return "reinforce" if self.algorithm == 3 else self.objective

    @property
    def ratio_bounds(self) -> tuple[float, float] | None:
        """Between which ratios the objective clips; None where it has no clip."""
        low, high = self.ppo.eps_clip_low, self.ppo.eps_clip_high
        if self.policy_objective in ("reinforce", "sapo"):
            return None
        return (math.exp(-low), math.exp(min(high, SAFETY_BOUND))) if self.objective == "gmpo" else (1 - low, 1 + high)

    @property
    def unit(self) -> Unit:
        """What shares one weight."""
        return self.tis.unit

    @property
    def weighted(self) -> bool:
        """True where importance weights multiply the loss (algorithms 2 and 3, but not level none)."""
        return self.use_tis and self.tis.level != "none"

    @property
    def judges(self) -> bool:
        """True where criteria or veto judge tokens or sequences."""
        return bool(self.rs.criteria) or self.rs.veto_threshold is not None

    @property
    def rejects_by_log_probs(self) -> bool:
        """True where some token or sequence may leave the loss for its log-probs."""
        masks = self.weighted and self.tis.mode == "mask"
        drops = self.rollout_log_prob_policy in ("drop-token", "drop-sequence")
        return masks or drops or self.judges

    @property
    def rejects(self) -> bool:
        """True where some token or sequence may leave the loss."""
        return self.rejects_by_log_probs or self.rs.max_staleness is not None

    @property
    def rejects_on_current_policy(self) -> bool:
        """True where criteria and veto judge π_θ while weights and metrics are those of π_old."""
        return self.judges and self.rs.policy == "current" and not self.use_rollout_log_probs

    @property
    def three_policies(self) -> bool:
        """True where π_old is compared with π_rollout for rejection, though no weight multiplies the loss."""
        return self.algorithm == 0 and self.rejects_by_log_probs and not self.rejects_on_current_policy

    @property
    def keep_known_before_step(self) -> bool:
        """True where it is known before the forward pass which tokens are accepted, if log-probs of π_old are there."""
        return not self.rejects_by_log_probs or not (self.use_rollout_log_probs or self.rejects_on_current_policy)

    @property
    def budgets(self) -> tuple[Criterion, ...]:
        """The criteria with a budget, whose bound hangs on the step before."""
        return tuple(criterion for criterion in self.criteria if criterion.budget)

    @property
    def weighs_by_sign(self) -> bool:
        """True where a weight hangs on the sign of the advantage."""
        return self.weighted and (self.tis.mode == "gamma" or self.tis.differs_by_sign)

    @property
    def advantage_readers(self) -> tuple[str, ...]:
        """What needs the advantage for a weight or to reject: criteria with a condition on it, weights by its sign."""
        weights = "tis.mode gamma" if self.tis.mode == "gamma" else "bounds for A ≥ 0"
        named = (f"criterion {criterion.name}" for criterion in self.rs.criteria if criterion.condition != "any")
        return (*((weights,) if self.weighs_by_sign else ()), *named)

    @property
    def compares(self) -> bool:
        """True where tokens are compared with the rollout's in any algorithm: for rejection or the gate."""
        return self.rejects_by_log_probs or self.gate_kl is not None

    @property
    def needs_rollout_log_probs(self) -> bool:
        """True where a step cannot run without them; else they are for the metrics alone."""
        return self.algorithm != 0 or self.compares or self.terms.rollout_kl_coef > 0

    @property
    def normalizes(self) -> bool:
        """True where weights are divided by a mean, of whatever scope (in a dry run: would be)."""
        return self.weighted and self.tis.batch_normalize

    @property
    def normalizes_step(self) -> bool:
        """True where weights are divided by their mean over the optimizer step, whatever its micro-batches."""
        return self.normalizes and not self.dry_run and self.tis.batch_normalize_scope != "micro_batch"

    @property
    def changes_denominator(self) -> bool:
        """True where rejection changes what the loss is divided by."""
        return self.rejects and not self.dry_run and self.denominator != "original"

    @property
    def other_terms(self) -> list[str]:
        """The sources of gradient next to the policy term, by name."""
        names = ("an entropy term", "a KL term", "a penalty on the distance to the sampler")
        coefficients = (self.terms.entropy_coef, self.terms.kl_coef, self.terms.rollout_kl_coef)
        return [name for name, coefficient in zip(names, coefficients, strict=True) if coefficient]

    @property
    def uses_rollout_values(self) -> bool:
        """True where rollout log-probs enter the loss: as anchor (algorithm 1), in a weight, in what is rejected, or in
        the penalty. Else they are only measured: an invalid one stops nothing, is left out of the metrics, and counted.
        """
        corrects = not self.dry_run and (self.weighted or self.rejects_by_log_probs)
        return self.algorithm == 1 or corrects or self.terms.rollout_kl_coef > 0

    @property
    def excludes_invalid(self) -> bool:
        """True where invalid log-probs are left out of the metrics; else (also dry) the policy says what happens."""
        previews = self.rollout_log_prob_policy != "error" and (self.weighted or self.rejects_by_log_probs)
        return not self.uses_rollout_values and not previews

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """`rs.criteria` with every bound filled in (a missing ratio bound is the TIS upper bound)."""
        inherited = self.tis.upper_bound if self.weighted else None
        return tuple(criterion.resolved(inherited) for criterion in self.rs.criteria)
