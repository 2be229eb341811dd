"""The typed configuration: every setting of the correction, validated once, frozen afterwards.

A setting's metadata (flag, unit, source, the peers' names for it) is next to its definition; the argparse group
(`flags.py`) and the table of docs/settings.md are generated from it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from mismatch_plugin.criteria import Criterion, Rejection
from mismatch_plugin.documents import read_file
from mismatch_plugin.fields import (
    Section,
    described,
    dotted_fields_set,
    flag_names,
    merge,
    notes_on,
    plain_error,
    spell,
)

if TYPE_CHECKING:
    from argparse import Namespace

Level = Literal["token", "sequence", "geometric", "none"]
Mode = Literal["truncate", "clip", "mask"]
Scope = Literal["auto", "step", "rollout_batch", "micro_batch"]
Denominator = Literal["auto", "accepted", "original"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
InvalidPolicy = Literal["error", "neutral", "drop-token", "drop-sequence"]
MetricsLevel = Literal["off", "basic", "full"]

SAFETY_BOUND = 20.0
"""Ratios are computed within e^±20."""

ALGORITHM_NAMES = ("PPO", "bypass PPO", "decoupled PPO", "REINFORCE + IS")


class MismatchWarning(UserWarning):
    """A setting that is legal but has no effect, or is outside the range in which it is known to work."""


class ImportanceSampling(Section):
    """How importance weights are made from the ratio ρ = π_train / π_rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

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

    model_config = ConfigDict(frozen=True, extra="forbid")

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

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class MismatchConfig(Section):
    """Everything the correction does, in one frozen value.

    Two flags choose the algorithm (`.algorithm`): 0 PPO, 1 bypass PPO, 2 decoupled PPO, 3 REINFORCE + IS.
    Build it directly, or with `from_file`, `from_args`, `mismatch_plugin.preset`, `mismatch_plugin.compat`.

    Raises: ValueError naming the field (or flag), the value and the fix, pydantic.ValidationError where it is built
    directly; also where a setting given by hand would have no effect. Warns (MismatchWarning) where a setting is legal
    but outside its known range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    report_dir: Annotated[str | None, BeforeValidator(lambda v: str(v) if isinstance(v, Path) else v)] = described(
        None,
        "folder for the run's metrics, one line a step: mismatch-plugin inspect judges them",
        flag="--mismatch-report-dir",
    )

    _by_hand: frozenset[str] | None = PrivateAttr(default=None)
    """Dotted paths of the settings that a person asked for; None: all that differ from their defaults."""

    def __eq__(self, other: object) -> bool:
        """Equal settings, however they were given."""
        return isinstance(other, MismatchConfig) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

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

    def describe(self) -> str:
        """The block that is shown at the start of a run: algorithm, weights, rejection, denominator."""
        tis, lines = self.tis, [f"algorithm {self.algorithm}: {ALGORITHM_NAMES[self.algorithm]}"]
        if self.weighted:
            bounds = f"[{tis.lower:g}, {tis.upper:g}]" if tis.mode != "truncate" else f"at most {tis.upper:g}"
            scope = f", normalised over {tis.batch_normalize_scope}" if tis.batch_normalize else ""
            lines.append(f"weights: {tis.level} level, {tis.mode}, {bounds}{scope}")
        else:
            lines.append("weights: none")
        rejections = [f"{c.name} in [{c.lower_bound or 0:g}, {c.upper_bound:g}]" for c in self.criteria]
        if self.rs.veto_threshold is not None:
            rejections.append(f"veto below {self.rs.veto_threshold:g}")
        lines.append(
            f"rejection: {', '.join(rejections) or 'none'}{' (dry run: none applied)' if self.dry_run else ''}"
        )
        if self.algorithm == 0 and self.rejects:  # the guide's geo_rs is "3 policies"
            lines.append("policies: three, for rejection compares π_old with π_rollout; no weight multiplies the loss")
        lines.append(f"loss: {self.aggregation}, denominator {self.denominator}")
        invalid = self.rollout_log_prob_policy
        if self.leaves_out_invalid:
            invalid = "counted and left out of the metrics (nothing else reads them)"
        report = "" if self.report_dir is None else f", written to {self.report_dir}"
        lines.append(f"invalid rollout log-probs: {invalid}; metrics: {self.metrics}{report}")
        return "\n".join(lines)

    @model_validator(mode="after")
    def _means_something(self, info: ValidationInfo) -> MismatchConfig:
        if self.tis.level == "none" and self.algorithm != 3:
            template = (
                "<tis.level> none is REINFORCE with rejection only: it needs <use_rollout_log_probs> and <use_tis>: "
                "set both, or choose token, sequence or geometric."
            )
            raise ValueError(spell(template, info, "tis.level"))
        names = [criterion.name for criterion in self.criteria]  # raises where a bound is missing
        if len(set(names)) < len(names):
            raise ValueError(f"rs.criteria names the same criterion twice ({', '.join(names)}): give each one once.")
        for note in notes_on(self, info):  # raises where a setting given by hand has no effect
            warnings.warn(note, MismatchWarning, stacklevel=2)
        return self

    @classmethod
    def build(
        cls, data: Mapping[str, Any], by_hand: Collection[str] | None = (), flags: Collection[str] = ()
    ) -> MismatchConfig:
        """Build from nested settings, of which only the dotted paths in `by_hand` were asked for by a person.

        What has no effect is refused where it is in `by_hand`; elsewhere (a preset, another system's settings) it is
        a MismatchWarning. by_hand None: whatever differs from its default was.
        flags: those paths of `by_hand` that errors are to name as flags.
        Raises: ValueError, one sentence a fault.
        """
        context = {"by_hand": by_hand, "typed": flags, "flags": flag_names(cls)}
        try:
            config = cls.model_validate(data, context=context)
        except ValidationError as error:
            raise plain_error(error, cls, flags) from None
        config._by_hand = None if by_hand is None else frozenset(by_hand)
        return config

    def replace(self, **changes: Any) -> MismatchConfig:
        """This configuration with some settings changed, validated anew: `config.replace(tis={"upper_bound": 5.0})`.

        A dict changes the settings it names and leaves the others of its section; a section (`ImportanceSampling(…)`)
        or a list takes the place of the old one. What is changed counts as given by hand, what was given by hand before
        still does, and what a preset or another system's settings brought does not.
        Raises: ValueError naming the setting, the value and what to do, also where a setting given by hand would have
        no effect. Warns (MismatchWarning): as building the configuration does.
        """
        base = self.model_dump(exclude_unset=True)
        for name, value in changes.items():
            if isinstance(value, BaseModel):
                if name in type(self).model_fields and not isinstance(value, type(getattr(self, name))):
                    wanted = type(getattr(self, name)).__name__
                    raise ValueError(f"{name} is a {type(value).__name__}: give {wanted}, or a dict of settings.")
                base.pop(name, None)
                changes[name] = value.model_dump(exclude_unset=True)
        by_hand = None if self._by_hand is None else self._by_hand | dotted_fields_set(changes)
        return type(self).build(merge(base, changes), by_hand)

    @classmethod
    def from_file(cls, path: str | Path) -> MismatchConfig:
        """Read a YAML or JSON file with this model's fields, and optionally `preset: NAME` to start from."""
        return cls._layered(None, read_file(path), {})

    @classmethod
    def from_args(cls, namespace: Namespace) -> MismatchConfig:
        """Build from a parsed argparse namespace (see `add_arguments`): flag over file over preset.

        With --mismatch-explain-only the first rank prints `describe()`, and every rank exits with status 0.
        """
        from mismatch_plugin.flags import given_flags

        if not hasattr(namespace, "__dict__"):  # every flag would count as not given
            raise TypeError(
                f"from_args takes what parse_args() returned, not a {type(namespace).__name__}: pass the Namespace "
                f"itself."
            )
        flags = given_flags(namespace)
        file, name = flags.pop("config", None), flags.pop("preset", None)
        for flag, value in (("--mismatch-config", file), ("--mismatch-preset", name)):
            if value == "":
                raise ValueError(f"{flag} is empty: give it a value, or leave it out (is a shell variable unset?).")
        config = cls._layered(name, read_file(file) if file else {}, flags)
        if getattr(namespace, "mismatch_explain_only", None):
            if os.environ.get("RANK", "0") == "0":  # under torchrun every rank comes here
                print(config.describe())
            raise SystemExit(0)
        return config

    @classmethod
    def _layered(cls, preset: str | None, file: dict[str, Any], flags: dict[str, Any]) -> MismatchConfig:
        from mismatch_plugin.presets import preset as build_preset

        in_file = file.pop("preset", None)
        name = in_file if preset is None else preset
        base = cls()
        if name is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MismatchWarning)  # the merged configuration says what still holds
                base = build_preset(name)
        typed = dotted_fields_set(flags)
        data = merge(merge(base.model_dump(exclude_unset=True), file), flags)
        config = cls.build(data, dotted_fields_set(file) | typed, typed)
        if name is not None:
            warn_of_another_algorithm(name, base, config, typed)
        return config


def warn_of_another_algorithm(
    name: str, preset: MismatchConfig, config: MismatchConfig, typed: Collection[str] = ()
) -> None:
    """Warn (MismatchWarning) where a switch next to preset `name` makes it another algorithm. typed: given as flags."""
    if config.algorithm == preset.algorithm:
        return
    flags = flag_names(MismatchConfig)
    changed = [path for path in ("use_rollout_log_probs", "use_tis") if getattr(config, path) != getattr(preset, path)]
    switches = " and ".join(flags[path] if path in typed else path for path in changed)
    warnings.warn(
        f"preset {name} is algorithm {preset.algorithm} ({ALGORITHM_NAMES[preset.algorithm]}), and {switches} makes it "
        f"{config.algorithm} ({ALGORITHM_NAMES[config.algorithm]}): leave {switches} out to run the preset as it is.",
        MismatchWarning,
        stacklevel=4,
    )
