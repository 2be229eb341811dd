"""Every setting of the correction, with what follows from it; a setting's metadata is next to its definition.

The argparse group (`flags.py`) and the table of docs/settings.md are generated from these fields.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from mismatch_plugin.config.criteria import Criterion, Rejection
from mismatch_plugin.config.fields import Section, described, spell
from mismatch_plugin.limits import SAFETY_BOUND

Level = Literal["token", "sequence", "geometric", "none"]
Mode = Literal["truncate", "clip", "mask"]
Scope = Literal["auto", "step", "rollout_batch", "micro_batch"]
Denominator = Literal["auto", "accepted", "original"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
InvalidPolicy = Literal["error", "neutral", "drop-token", "drop-sequence"]
MetricsLevel = Literal["off", "basic", "full"]
LogProbBackend = Literal["auto", "torch", "triton", "megatron", "transformer-engine"]

ALGORITHM_NAMES = ("PPO", "bypass PPO", "decoupled PPO", "REINFORCE + IS")


class ImportanceSampling(Section):
    """How importance weights are made from the ratio ρ = π_train / π_rollout."""

    model_config = ConfigDict(validate_default=True)

    mode: Mode = described(
        "truncate",
        "what happens to an aggregated ratio outside its bounds: truncate = min(ρ, hi), clip = min(max(ρ, lo), hi), "
        "mask = rejected (weight 0, out of the loss)",
        flag="--tis-mode",
        slime="tis_mode",
        verl='rollout_is_threshold ("lo_hi" = mask)',
        source="Yao et al. 2025 (TIS); Liu & Li 2025 (MIS); arXiv 2510.18855 (IcePop)",
    )
    level: Level = described(
        "token",
        "how ratios are aggregated: token, sequence (product), geometric (geometric mean); none = weight 1, REINFORCE "
        "with rejection only",
        flag="--tis-level",
        slime="tis_level",
        verl="rollout_is",
        source="rollout-correction guide, 3.3",
    )
    lower_bound: float | None = described(
        None,
        "lower bound lo of the aggregated ratio; 1/hi if absent, 0 turns it off",
        flag="--tis-lower-bound",
        unit="ratio",
        slime="tis_lower_bound, tis_clip_low",
        verl='rollout_is_threshold ("lo_hi")',
        ge=0.0,
    )
    upper_bound: float = described(
        2.0,
        "upper bound hi of the aggregated ratio; inf means e^20",
        flag="--tis-upper-bound",
        unit="ratio",
        slime="tis_upper_bound, tis_clip",
        verl="rollout_is_threshold",
        gt=0.0,
    )
    batch_normalize: bool = described(
        False,
        "divide the bounded weights by their mean, so that it is 1 (self-normalised importance sampling)",
        flag="--tis-batch-normalize",
        slime="tis_batch_normalize",
        verl="rollout_is_batch_normalize",
        source="rollout-correction guide, 3.6",
    )
    batch_normalize_scope: Scope = described(
        "auto",
        "what the mean runs over: the optimizer step, the rollout batch, or one micro-batch; auto = the widest the "
        "host gives",
        flag="--tis-batch-normalize-scope",
    )

    @property
    def lower(self) -> float:
        """lo with its default filled in: 1/hi, clamped to e^-20; under truncate at most hi."""
        return min(1.0 / self.upper, self.upper) if self.lower_bound is None else self.lower_bound

    @property
    def upper(self) -> float:
        """hi, with inf replaced by the safety bound e^20."""
        return min(self.upper_bound, math.exp(SAFETY_BOUND))

    @model_validator(mode="after")
    def _ordered(self, info: ValidationInfo) -> ImportanceSampling:
        if self.upper_bound < math.exp(-SAFETY_BOUND):
            template = (
                f"<tis.upper_bound> {self.upper_bound:g} is below e^-20 = 2.1e-9, the smallest ratio that is told "
                f"apart: raise it (2.0 is usual)."
            )
            raise ValueError(spell(template, info, "tis.upper_bound"))
        if self.lower > self.upper:
            template = (
                f"<tis.lower_bound> {self.lower:g} is above <tis.upper_bound> {self.upper:g}: lower it, or raise the "
                f"other."
            )
            raise ValueError(spell(template, info, "tis.upper_bound", "tis.lower_bound"))
        if self.mode != "truncate" and self.lower_bound is None and self.upper < 1.0:
            template = (
                f"<tis.upper_bound> {self.upper:g} is below the lower bound that <tis.mode> {self.mode} has by "
                f"default, 1/hi = {1.0 / self.upper:g}: give <tis.lower_bound>, or raise the upper one."
            )
            raise ValueError(spell(template, info, "tis.upper_bound"))
        return self


class PPOClip(Section):
    """The clipped surrogate of algorithms 0, 1 and 2."""

    eps_clip_low: float = described(
        0.2,
        "ε of the lower clip bound 1 − ε",
        flag="--mismatch-eps-clip-low",
        slime="eps_clip",
        verl="clip_ratio_low",
        source="Schulman et al. 2017",
        ge=0.0,
        le=1.0,
    )
    eps_clip_high: float = described(
        0.2,
        "ε of the upper clip bound 1 + ε",
        flag="--mismatch-eps-clip-high",
        slime="eps_clip_high",
        verl="clip_ratio_high",
        source="Yu et al. 2025 (DAPO)",
        ge=0.0,
    )
    dual_clip: float | None = described(
        None,
        "dual-clip constant c: for negative advantages the loss is at most −c·A; absent = off",
        flag="--mismatch-dual-clip",
        slime="eps_clip_c",
        verl="clip_ratio_c",
        source="Ye et al. 2020",
        gt=1.0,
    )

    @model_validator(mode="after")
    def _within_ratios(self, info: ValidationInfo) -> PPOClip:
        if math.exp(SAFETY_BOUND) < self.eps_clip_high < math.inf:
            template = (
                f"<ppo.eps_clip_high> {self.eps_clip_high:g} is above e^20 = 4.9e8, the largest ratio: write inf for "
                f"no upper clip."
            )
            raise ValueError(spell(template, info, "ppo.eps_clip_high"))
        return self


class Terms(Section):
    """Losses added to the policy term. The correction does not scale them: they run over the original `loss_mask`."""

    entropy_coef: float = described(
        0.0,
        "entropy bonus: −coef · entropy is added to the loss",
        flag="--mismatch-entropy-coef",
        unit="1/nat",
        slime="entropy_coef",
        verl="entropy_coeff",
        allow_inf_nan=False,
    )
    kl_coef: float = described(
        0.0,
        "KL penalty to the reference policy",
        flag="--mismatch-kl-coef",
        unit="1/nat",
        slime="kl_loss_coef",
        verl="kl_loss_coef",
        ge=0.0,
        allow_inf_nan=False,
    )
    kl_type: KlType = described(
        "low_var_kl",
        "estimator of KL(π_θ‖π_ref): k1 = d, k2 = d²/2, k3 = e^−d − 1 + d with d = log π_θ − log π_ref; low_var_kl = "
        "k3 bounded to ±10",
        flag="--mismatch-kl-type",
        slime="kl_loss_type",
        verl="kl_loss_type",
        source="Schulman 2020, Approximating KL divergence",
    )
    kl_importance_weighted: bool = described(
        False,
        "multiply the KL penalty by the importance weight (unbiased under the rollout policy)",
        flag="--mismatch-kl-importance-weighted",
        source="DeepSeek-V3.2, arXiv 2512.02556",
    )


class Settings(Section):
    """The fields of a configuration and what follows from them; `MismatchConfig` validates and loads them."""

    use_rollout_log_probs: bool = described(
        False,
        "use SGLang's log-probs as the old policy; no second forward pass",
        flag="--use-rollout-log-probs",
        aliases=("--use_rollout_log_probs", "--use-rollout-logprobs"),
        slime="use_rollout_logprobs",
        verl="bypass_mode, bypass_old_logprob_for_rollout",
    )
    use_tis: bool = described(
        False,
        "apply training-inference importance sampling",
        flag="--use-tis",
        slime="use_tis",
        verl="rollout_is (not null)",
    )
    tis: ImportanceSampling = Field(default_factory=ImportanceSampling)
    rs: Rejection = Field(default_factory=Rejection)
    ppo: PPOClip = Field(default_factory=PPOClip)
    terms: Terms = Field(default_factory=Terms)
    denominator: Denominator = described(
        "auto",
        "what the summed loss is divided by: accepted = rejected tokens leave it, original = they stay; auto = "
        "accepted wherever the plugin owns the denominator",
        flag="--mismatch-denominator",
    )
    aggregation: Aggregation = described(
        "token-mean",
        "how token losses become one number",
        flag="--mismatch-aggregation",
        slime="calculate_per_token_loss",
        verl="loss_agg_mode",
        source="Liu et al. 2025 (Dr. GRPO) for seq-mean-token-sum with a length norm",
    )
    length_norm: float | None = described(
        None,
        "constant that divides each sequence's sum under seq-mean-token-sum",
        flag="--mismatch-length-norm",
        unit="tokens",
        verl="seq-mean-token-sum-norm",
        source="Liu et al. 2025 (Dr. GRPO)",
        ge=1e-6,
        allow_inf_nan=False,
    )
    rollout_log_prob_policy: InvalidPolicy = described(
        "error",
        "what an invalid log-prob (NaN, > 0, −inf or a floor, a 0.0 fill) does where it is used; where it is only "
        "measured it is left out of the metrics and counted",
        flag="--rollout-log-prob-policy",
    )
    # YAML 1.1 reads a bare off as false.
    metrics: Annotated[MetricsLevel, BeforeValidator(lambda v: "off" if v is False else v)] = described(
        "basic", "off, the guide's metrics, or everything", flag="--mismatch-metrics"
    )
    dry_run: bool = described(
        False, "compute weights and rejections, report them, apply none", flag="--mismatch-dry-run"
    )
    gate_kl: float | None = described(
        None,
        "a step with k3_kl above this is an error on all ranks, before the optimizer steps: for CI and first steps at "
        "learning rate 0 (the bar of inspect --gate: 1e-3); absent = no gate",
        flag="--mismatch-gate-kl",
        unit="nat a token",
        source="prime-rl #3543 (gate of its CI); xtuner #2044",
        gt=0.0,
    )
    report_dir: Annotated[str | None, BeforeValidator(lambda v: str(v) if isinstance(v, Path) else v)] = described(
        None,
        "folder for the run's metrics, one line a step: mismatch-plugin inspect judges them",
        flag="--mismatch-report-dir",
    )
    log_prob_backend: LogProbBackend = described(
        "auto",
        "what computes log-probs from the logits: torch, triton (CUDA), megatron or transformer-engine (these two give "
        "no entropy); auto = triton where it can run, else torch. Only where the plugin computes them (megatron-core)",
        flag="--mismatch-log-prob-backend",
        source="Milakov & Gimelshein 2018, arXiv 1805.02867 (online softmax)",
    )

    @property
    def algorithm(self) -> int:
        """0 PPO, 1 bypass PPO, 2 decoupled PPO, 3 REINFORCE + IS."""
        return int(self.use_rollout_log_probs) + 2 * int(self.use_tis)

    @property
    def weighted(self) -> bool:
        """True where importance weights multiply the loss (algorithms 2 and 3, but not level none)."""
        return self.use_tis and self.tis.level != "none"

    @property
    def rejects(self) -> bool:
        """True where some token or sequence may leave the loss."""
        masks = self.weighted and self.tis.mode == "mask"
        drops = self.rollout_log_prob_policy in ("drop-token", "drop-sequence")
        return masks or drops or bool(self.rs.criteria) or self.rs.veto_threshold is not None

    @property
    def compares(self) -> bool:
        """True where tokens are compared with the rollout's in any algorithm: for rejection or the gate."""
        return self.rejects or self.gate_kl is not None

    @property
    def needs_rollout_log_probs(self) -> bool:
        """True where a step cannot run without them; else they are for the metrics alone."""
        return self.algorithm != 0 or self.compares

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
        terms = {"an entropy term": self.terms.entropy_coef, "a KL term": self.terms.kl_coef}
        return [name for name, coefficient in terms.items() if coefficient]

    @property
    def uses_rollout_values(self) -> bool:
        """True where rollout log-probs enter the loss: as anchor (algorithm 1), in a weight, or in what is rejected.

        Else they are only measured: an invalid one stops nothing, is left out of the metrics, and counted.
        """
        return self.algorithm == 1 or (not self.dry_run and (self.weighted or self.rejects))

    @property
    def leaves_out_invalid(self) -> bool:
        """True where invalid log-probs are left out of the metrics; else the policy says what becomes of them.

        A dry run under neutral, drop-token or drop-sequence shows what that policy would do.
        """
        previews = self.rollout_log_prob_policy != "error" and (self.weighted or self.rejects)
        return not self.uses_rollout_values and not previews

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """`rs.criteria` with every bound filled in (a missing ratio bound is the TIS upper bound)."""
        inherited = self.tis.upper_bound if self.weighted else None
        return tuple(criterion.resolved(inherited) for criterion in self.rs.criteria)
