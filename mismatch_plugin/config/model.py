"""`MismatchConfig`: the settings, validated together, and read from a file, flags or a preset."""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, PrivateAttr, ValidationError, ValidationInfo, model_validator

from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.config.fields import plain_error
from mismatch_plugin.config.flags import add_arguments, given_flags
from mismatch_plugin.config.presets import find_preset, preset_names
from mismatch_plugin.config.rules import notes_on, spelled
from mismatch_plugin.config.sections import GAMMA_WORDS
from mismatch_plugin.config.settings import ALGORITHM_NAMES, Settings
from mismatch_plugin.config.values import MismatchWarning, dotted_fields_set, ignore_mismatch_warnings, merge


class Once(Namespace):
    """Refuses a flag with two values, of which argparse would take the last."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, name, None)
        if before is not None and before != value and not isinstance(value, list):  # those that may be repeated
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(None, f"{flag} {value} contradicts {flag} {before}, give it once")
        super().__setattr__(name, value)


class MismatchConfig(Settings):
    """Everything the correction does, in one frozen value.

    Two flags choose the algorithm (`.algorithm`): 0 PPO, 1 bypass PPO, 2 decoupled PPO, 3 REINFORCE + IS.
    Build it directly, or with `from_file`, `from_args`, `mismatch_plugin.preset`, `mismatch_plugin.compat`.

    Raises: ValueError naming the field (or flag), the value and the fix; also where a setting given by hand would have
    no effect. Warns (MismatchWarning) where a setting is legal but outside its known range.
    """

    _by_hand: frozenset[str] | None = PrivateAttr(default=None)
    """Dotted paths of the settings that a person asked for; None: all that differ from their defaults."""

    if not TYPE_CHECKING:  # editors keep the signature that pydantic gives them

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise plain_error(error, type(self)) from None

        __init__.__pydantic_base_init__ = True  # pydantic goes on validating without it, with context and places

    def __eq__(self, other: object) -> bool:
        """Equal settings, however they were given."""
        return isinstance(other, MismatchConfig) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    @model_validator(mode="after")
    def _means_something(self, info: ValidationInfo) -> MismatchConfig:
        names = [criterion.name for criterion in self.criteria]  # raises where a bound is missing
        if len(set(names)) < len(names):
            raise ValueError(f"rs.criteria names the same criterion twice ({', '.join(names)}): give each one once.")
        context = info.context or {}
        for note in notes_on(self, context.get("by_hand"), context.get("typed", ())):
            warnings.warn(note, MismatchWarning, stacklevel=2)
        return self

    @classmethod
    def build(
        cls, data: Mapping[str, Any], by_hand: Collection[str] | None = (), flags: Collection[str] = ()
    ) -> MismatchConfig:
        """Build from nested settings. by_hand: the dotted paths that a person asked for, where what has no effect is
        refused; elsewhere it is a MismatchWarning. None: whatever differs from its default. flags: those of them that
        errors are to name as flags. Raises: ValueError, one sentence a fault.
        """
        try:
            config = cls.model_validate(data, context={"by_hand": by_hand, "typed": flags})
        except ValidationError as error:
            raise plain_error(error, cls, flags) from None
        config._by_hand = None if by_hand is None else frozenset(by_hand)
        return config

    def replace(self, **changes: Any) -> MismatchConfig:
        """This configuration with some settings changed, validated anew: `config.replace(tis={"upper_bound": 5.0})`.

        A dict changes the settings it names and leaves the others of its section; a section (`ImportanceSampling(…)`)
        or a list takes the place of the old one. What is changed counts as given by hand.
        Raises and warns as building the configuration does.
        """
        base = self.model_dump(exclude_unset=True)
        for name, value in changes.items():
            if isinstance(value, BaseModel):
                base.pop(name, None)
                changes[name] = value.model_dump(exclude_unset=True)
        by_hand = None if self._by_hand is None else self._by_hand | dotted_fields_set(changes)
        return type(self).build(merge(base, changes), by_hand)

    def describe(self) -> str:
        """The block that is shown at the start of a run: algorithm, weights, rejection, denominator."""
        rs, terms, tried = self.rs, self.terms, " (dry run: computed, not applied)"
        lines = [f"algorithm {self.algorithm}: {ALGORITHM_NAMES[self.algorithm]}"]
        lines.append(f"weights: {self._weights()}{tried * (self.weighted and self.dry_run)}")
        lines.append(f"rejection: {self._rejection()}{' (dry run: none applied)' * self.dry_run}")
        if self.three_policies:
            lines.append("policies: three, for rejection compares π_old with π_rollout; no weight multiplies the loss")
        if rs.group != "keep":
            fewer = f", groups of fewer than {rs.min_group} have no gradient" * (rs.group == "drop")
            lines.append(f"advantages: of a group's accepted responses only{fewer}")
        if self.algorithm != 3:
            clip = f", ratio in [{self.ratio_bounds[0]:g}, {self.ratio_bounds[1]:g}]" if self.ratio_bounds else ""
            lines.append(f"objective: {self.objective}{clip}")
        lines.append(f"loss: {self.aggregation}, denominator {self.denominator}")
        if terms.rollout_kl_coef:
            penalty = f"{terms.rollout_kl_coef:g} · {terms.rollout_kl_type}"
            lines.append(f"penalty: {penalty} to π_rollout, on {terms.rollout_kl_on} tokens")
        if self.log_prob_backend != "auto":
            lines.append(f"log-probs from logits: {self.log_prob_backend}")
        if self.fused_head:
            lines.append("log-probs from hidden states: logits are never whole")
        invalid = self.rollout_log_prob_policy
        if self.excludes_invalid:
            invalid = "counted and left out of the metrics (nothing else reads them)"
        report = "" if self.report_dir is None else f", written to {self.report_dir}"
        lines.append(f"invalid rollout log-probs: {invalid}; metrics: {self.metrics}{report}")
        if self.gate_kl is not None:
            lines.append(f"gate: k3_kl above {self.gate_kl:g} nats per token is an error")
        return "\n".join(lines)

    def _weights(self) -> str:
        tis = self.tis
        if not self.weighted:
            return "none"
        pairs = [(tis.lower, tis.upper), *([tis.positive] if tis.differs_by_sign else [])]
        said = [f"[{low:g}, {high:g}]" if tis.mode != "truncate" else f"at most {high:g}" for low, high in pairs]
        bounds = ", where A ≥ 0 ".join(said)
        if tis.mode == "gamma":
            bounds = f"ρ^k e^(λ(1 − ρ)) with (k, λ) = {GAMMA_WORDS}"
        if tis.bound_growth:
            bounds += f" to the power n^{tis.bound_growth:g}, n = tokens of the product"
        scope = f", normalised over {tis.batch_normalize_scope}" * tis.batch_normalize
        return f"{tis.level} level, {tis.mode}, {bounds}{scope}"

    def _rejection(self) -> str:
        parts = ["ratios outside the weights' bounds"] * (self.weighted and self.tis.mode == "mask")
        for one in self.criteria:
            budget = f" (a budget: from the second step on the bound rises for {one.budget})" * bool(one.budget)
            parts.append(f"{one.name} in [{one.lower_bound or 0:g}, {one.upper_bound:g}]{budget}")
        if self.rs.veto_threshold is not None:
            parts.append(f"veto below {self.rs.veto_threshold:g}")
        if self.rejects_on_current_policy:
            parts.append("judged by π_θ")
        if self.rs.max_staleness is not None:
            parts.append(f"tokens of more than {self.rs.max_staleness} weight versions before")
        return ", ".join(parts) or "none"

    @classmethod
    def from_file(cls, path: str | Path) -> MismatchConfig:
        """Read a YAML or JSON file with this model's fields, and optionally `preset: NAME` to start from."""
        return cls._layered(None, read_mapping(path), {})

    @classmethod
    def from_args(cls, namespace: Namespace) -> MismatchConfig:
        """Build from a parsed argparse namespace (see `add_arguments`): flag over file over preset.

        With --mismatch-explain-only the first rank prints `describe()`, and every rank exits with status 0.
        """
        flags = given_flags(namespace)
        file, name = flags.pop("config", None), flags.pop("preset", None)
        for flag, value in (("--mismatch-config", file), ("--mismatch-preset", name)):
            if value == "":
                raise ValueError(f"{flag} is empty: give it a value, or leave it out (is a shell variable unset?).")
        config = cls._layered(name, read_mapping(file) if file else {}, flags)
        if getattr(namespace, "mismatch_explain_only", None):
            if os.environ.get("RANK", "0") == "0":  # under torchrun every rank comes here
                print(config.describe())
            raise SystemExit(0)
        return config

    @classmethod
    def from_words(cls, words: Sequence[str], where: str = "the settings") -> MismatchConfig:
        """Build from the words of a launch line: `from_words(["--use-tis"])`. where: what an error calls them.

        Raises ValueError for a word that is no flag of this package, a flag with two values, and as `from_args`.
        """
        parser = ArgumentParser(prog=where, add_help=False, allow_abbrev=False, exit_on_error=False)
        add_arguments(parser)
        try:
            known, words_left = parser.parse_known_args(list(words), Once())
        except (Exception, SystemExit) as error:
            raise ValueError(f"{where}: {error}.") from None
        if words_left:
            word, flags = words_left[0], [name for name in parser._option_string_actions if "_" not in name]
            near = [flag for flag in flags if flag.startswith(word)] or get_close_matches(word, flags, 1)
            near = [f"--mismatch-preset {word}"] if word in preset_names() else near
            hint = f", did you mean {near[0]}?" if near else "."
            raise ValueError(f"{where}: {word} is no flag of this package{hint}")
        if getattr(known, "mismatch_explain_only", None):
            raise ValueError(f"{where}: --mismatch-explain-only is for a launch line, leave it out.")
        return cls.from_args(known)

    @classmethod
    def _layered(cls, preset: str | None, file: dict[str, Any], flags: dict[str, Any]) -> MismatchConfig:
        in_file = file.pop("preset", None)
        name = in_file if preset is None else preset
        base = cls()
        if name is not None:
            with ignore_mismatch_warnings():  # the merged configuration says what still holds
                base = cls.build(find_preset(name).settings())
        typed = dotted_fields_set(flags)
        data = merge(merge(base.model_dump(exclude_unset=True), file), flags)
        config = cls.build(data, dotted_fields_set(file) | typed, typed)
        if name is not None:
            warn_of_another_algorithm(name, base, config, typed)
        return config


def preset(name: str, **overrides: Any) -> MismatchConfig:
    """The configuration of a named preset, with its own parameters overridden: `preset("token_is", threshold=3.0)`.

    A threshold is a number (the upper bound; the lower one is its reciprocal) or verl's "lower_upper" string.
    With other settings: `preset("token_is").replace(metrics="full", tis={"batch_normalize": True})`.
    Raises: ValueError naming an unknown preset or parameter and what there is, or an invalid value. Warns: as building.
    """
    return MismatchConfig.build(find_preset(name).settings(**overrides))


def warn_of_another_algorithm(
    name: str, preset: MismatchConfig, config: MismatchConfig, typed: Collection[str] = ()
) -> None:
    """Warn (MismatchWarning) where a switch next to preset `name` makes it another algorithm. typed: given as flags."""
    switches = ("use_rollout_log_probs", "use_tis")
    if changed := [f"<{path}>" for path in switches if getattr(config, path) != getattr(preset, path)]:
        was, now = (f"{one.algorithm} ({ALGORITHM_NAMES[one.algorithm]})" for one in (preset, config))
        given = " and ".join(changed)
        sentence = f"preset {name} is algorithm {was}, and {given} makes it {now}: leave {given} out to run the preset"
        warnings.warn(spelled(f"{sentence} as it is.", typed), MismatchWarning, stacklevel=4)
