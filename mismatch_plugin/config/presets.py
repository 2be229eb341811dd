"""Named starting points: the presets of the rollout-correction pages and of verl, under the names users know them by.

Bounds of a preset are bounds on ρ = π_train / π_rollout itself, as everywhere here. verl's newer presets bound 1/ρ; by
their own, nearly reciprocal defaults both accept the same ratios to one in 10^6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from mismatch_plugin.config.settings import Settings as Fields
from mismatch_plugin.config.values import bounds, merge, number, unknown

Settings = dict[str, Any]

THREE_POLICIES = (
    "Rejection without weights (geo_rs, k3_rs) is algorithm 0, PPO, because no weight multiplies the loss, and has "
    "three policies, as the guide says, because it compares π_old with π_rollout and the clip π_θ with π_old."
)
"""How both are right: the number is that of the two switches, and the guide counts the policies."""

_GEOMETRIC = "0.999_1.001"
_K3 = 0.01


@dataclass(frozen=True)
class Preset:
    """One preset: what the table of presets shows, and how its parameters become settings."""

    name: str
    algorithm: int
    parameters: Mapping[str, Any]  # name → default
    summary: str
    when: str
    parts: Callable[..., tuple[Settings, ...]] = field(repr=False)
    aliases: tuple[str, ...] = ()

    def settings(self, **overrides: Any) -> Settings:
        """Nested settings for `MismatchConfig.build`. Raises ValueError for a parameter that the preset lacks."""
        for name in overrides:
            if name not in self.parameters:
                if name in Fields.model_fields:
                    raise ValueError(
                        f"{name} is a setting, no parameter of preset {self.name}. To change it: "
                        f"preset(…).replace({name}=…)."
                    )
                if not self.parameters:
                    raise ValueError(f"preset {self.name} has no parameter {name!r}: leave it out, it takes none.")
                raise unknown(f"parameter of preset {self.name}", name, self.parameters)
        flags: Settings = {}
        if self.algorithm in (1, 3):
            flags["use_rollout_log_probs"] = True
        if self.algorithm in (2, 3):
            flags["use_tis"] = True
        return reduce(merge, self.parts(**{**self.parameters, **overrides}), flags)


def find_preset(name: str) -> Preset:
    """The record of a preset by name or alias. Raises ValueError for a name that is neither."""
    for record in PRESETS:
        if name == record.name or name in record.aliases:
            return record
    raise unknown("preset", name, preset_names())


def preset_names() -> tuple[str, ...]:
    """Every name that `preset` knows, aliases behind the name that they mean."""
    return tuple(name for record in PRESETS for name in (record.name, *record.aliases))


def _weights(level: str, threshold: Any, name: str = "threshold", lower: Any = None) -> Settings:
    """Importance weights truncated at `threshold`; with two bounds, IcePop: masked, the rejected still counted."""
    low, upper = bounds(threshold, name)
    if lower is not None:
        low = number(lower, f"{name}_lower")
    if low is None:
        return {"tis": {"level": level, "upper_bound": upper}}
    mask = {"level": level, "mode": "mask", "lower_bound": low, "upper_bound": upper}
    return {"tis": mask, "denominator": "original"}


def _icepop(threshold: Any, threshold_lower: Any) -> Settings:
    return _weights("token", number(threshold, "threshold"), lower=number(threshold_lower, "threshold_lower"))


def _reject(aggregate: str, threshold: Any, lower: Any = None, name: str = "rs_threshold") -> Settings:
    """Rejection of sequences whose ratio is outside [lower, threshold]; lower is the reciprocal if it is None."""
    low, upper = bounds(threshold, name)
    if low is not None and lower is not None:
        raise ValueError(f"{name} {threshold!r} has a lower bound already: leave {name}_lower {lower!r} out.")
    criterion: Settings = {"statistic": "ratio", "aggregate": aggregate, "upper_bound": upper}
    if low is not None or lower is not None:
        criterion["lower_bound"] = low if lower is None else number(lower, f"{name}_lower")
    return {"rs": {"criteria": (criterion,)}}


def _geometric(rs_threshold: Any, rs_threshold_lower: Any = None) -> Settings:
    return _reject("sequence_mean", rs_threshold, rs_threshold_lower)


def _k3(rs_threshold: Any) -> Settings:
    upper = number(rs_threshold, "rs_threshold")
    return {"rs": {"criteria": ({"statistic": "k3", "aggregate": "sequence_mean", "upper_bound": upper},)}}


def _veto(veto_threshold: Any) -> Settings:
    return {} if veto_threshold is None else {"rs": {"veto_threshold": number(veto_threshold, "veto_threshold")}}


_UNWEIGHTED: Settings = {"tis": {"level": "none"}}

PRESETS: tuple[Preset, ...] = (
    Preset(
        "decoupled_token_is",
        2,
        {"threshold": 2.0},
        "decoupled PPO, token weights truncated above",
        "moderate mismatch or slight staleness; the usual first choice",
        lambda threshold: (_weights("token", threshold),),
        aliases=("token_is",),
    ),
    Preset(
        "decoupled_seq_is",
        2,
        {"threshold": 2.0},
        "decoupled PPO, sequence weights truncated above",
        "rewards of whole responses and responses short enough for a product of ratios; unbiased up to the bound only "
        "while π_θ is π_old, on the first mini-batch",
        lambda threshold: (_weights("sequence", threshold),),
        aliases=("seq_is",),
    ),
    Preset(
        "decoupled_seq_is_rs",
        2,
        {"is_threshold": 2.0, "rs_threshold": 2.0, "rs_threshold_lower": None},
        "decoupled PPO, truncated sequence weights, sequences outside the bounds rejected",
        "strong mismatch with outliers: old data, replay buffers",
        lambda is_threshold, rs_threshold, rs_threshold_lower: (
            _weights("sequence", is_threshold, "is_threshold"),
            _reject("sequence_sum", rs_threshold, rs_threshold_lower),
        ),
        aliases=("seq_is_rs",),
    ),
    Preset(
        "seq_mis",
        2,
        {"threshold": 2.0},
        "decoupled PPO, truncated sequence weights, sequences above the bound rejected (no lower bound)",
        "as decoupled_seq_is_rs, where sequences that the trainer finds unlikely should stay",
        lambda threshold: (
            _weights("sequence", number(threshold, "threshold")),
            _reject("sequence_sum", number(threshold, "threshold"), 0.0),
        ),
    ),
    Preset(
        "decoupled_geo_rs",
        0,
        {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4},
        "PPO without weights, rejection by geometric mean, one-token veto",
        "nearly equal policies, and every sequence that drifts is to go",
        lambda rs_threshold, rs_threshold_lower, veto_threshold: (
            _geometric(rs_threshold, rs_threshold_lower),
            _veto(veto_threshold),
        ),
        aliases=("geo_rs",),
    ),
    Preset(
        "ppo_is_bypass",
        1,
        {"threshold": 2.0},
        "PPO clipped against the rollout policy; the threshold sets metrics only",
        "small mismatch, and one forward pass to be saved",
        lambda threshold: ({"tis": {"upper_bound": number(threshold, "threshold")}},),
    ),
    Preset(
        "pg_is",
        3,
        {"threshold": 2.0},
        "REINFORCE, sequence weights truncated above, no PPO clip",
        "one optimizer step per rollout, unbiased up to the bound (the weight is that of π_θ), one forward pass saved",
        lambda threshold: (_weights("sequence", threshold),),
        aliases=("pure_is", "bypass_pg_is"),
    ),
    Preset(
        "pg_rs",
        3,
        {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4},
        "REINFORCE without weights, rejection by geometric mean, one-token veto",
        "as pg_is, where outliers are to be dropped rather than weighted",
        lambda rs_threshold, rs_threshold_lower, veto_threshold: (
            _UNWEIGHTED,
            _geometric(rs_threshold, rs_threshold_lower),
            _veto(veto_threshold),
        ),
    ),
    Preset(
        "disabled",
        0,
        {},
        "PPO uncorrected; metrics only",
        "to measure the mismatch before choosing a correction",
        lambda: (),
    ),
    Preset(
        "decoupled_token_icepop",
        2,
        {"threshold": 5.0, "threshold_lower": 0.5},
        "decoupled PPO, token weights outside the bounds set to zero (IcePop)",
        "mixture-of-experts models, where single tokens drift far",
        lambda threshold, threshold_lower: (_icepop(threshold, threshold_lower),),
        aliases=("token_icepop",),
    ),
    Preset(
        "decoupled_geo_rs_token_tis",
        2,
        {"is_threshold": 2.0, "rs_threshold": _GEOMETRIC},
        "decoupled PPO, truncated token weights, rejection by geometric mean",
        "long responses with moderate mismatch and some that drift as a whole",
        lambda is_threshold, rs_threshold: (
            _weights("token", is_threshold, "is_threshold"),
            _geometric(rs_threshold),
        ),
        aliases=("geo_rs_token_tis",),
    ),
    Preset(
        "decoupled_geo_rs_seq_tis",
        2,
        {"is_threshold": 2.0, "rs_threshold": _GEOMETRIC},
        "decoupled PPO, truncated sequence weights, rejection by geometric mean",
        "as decoupled_seq_is, with a filter that does not depend on length",
        lambda is_threshold, rs_threshold: (
            _weights("sequence", is_threshold, "is_threshold"),
            _geometric(rs_threshold),
        ),
        aliases=("geo_rs_seq_tis",),
    ),
    Preset(
        "decoupled_k3_rs",
        0,
        {"rs_threshold": _K3},
        "PPO without weights, rejection by the mean k3 divergence",
        "as decoupled_geo_rs, where drifts of both signs must not cancel",
        lambda rs_threshold: (_k3(rs_threshold),),
        aliases=("k3_rs",),
    ),
    Preset(
        "decoupled_k3_rs_token_tis",
        2,
        {"is_threshold": 2.0, "rs_threshold": _K3},
        "decoupled PPO, truncated token weights, rejection by the mean k3 divergence",
        "long responses with moderate mismatch and outliers of either sign",
        lambda is_threshold, rs_threshold: (_weights("token", is_threshold, "is_threshold"), _k3(rs_threshold)),
        aliases=("k3_rs_token_tis",),
    ),
    Preset(
        "decoupled_k3_rs_seq_tis",
        2,
        {"is_threshold": 2.0, "rs_threshold": _K3},
        "decoupled PPO, truncated sequence weights, rejection by the mean k3 divergence",
        "as decoupled_seq_is, with outliers of either sign rejected",
        lambda is_threshold, rs_threshold: (_weights("sequence", is_threshold, "is_threshold"), _k3(rs_threshold)),
        aliases=("k3_rs_seq_tis",),
    ),
    Preset(
        "bypass_ppo_clip",
        1,
        {},
        "PPO clipped against the rollout policy",
        "as ppo_is_bypass",
        lambda: (),
    ),
    Preset(
        "bypass_ppo_clip_geo_rs",
        1,
        {"rs_threshold": _GEOMETRIC},
        "PPO clipped against the rollout policy, rejection by geometric mean",
        "small mismatch with some sequences that drift",
        lambda rs_threshold: (_geometric(rs_threshold),),
    ),
    Preset(
        "bypass_ppo_clip_k3_rs",
        1,
        {"rs_threshold": _K3},
        "PPO clipped against the rollout policy, rejection by the mean k3 divergence",
        "small mismatch with outliers of either sign",
        lambda rs_threshold: (_k3(rs_threshold),),
    ),
    Preset(
        "bypass_pg_token_icepop",
        3,
        {"threshold": 5.0, "threshold_lower": 0.5},
        "REINFORCE, token weights outside the bounds set to zero (IcePop)",
        "as decoupled_token_icepop, with one step per rollout and one forward pass saved",
        lambda threshold, threshold_lower: (_icepop(threshold, threshold_lower),),
    ),
    Preset(
        "bypass_pg_geo_rs",
        3,
        {"rs_threshold": _GEOMETRIC},
        "REINFORCE without weights, rejection by geometric mean",
        "as pg_rs, without the veto",
        lambda rs_threshold: (_UNWEIGHTED, _geometric(rs_threshold)),
    ),
    Preset(
        "bypass_pg_geo_rs_seq_tis",
        3,
        {"is_threshold": 2.0, "rs_threshold": _GEOMETRIC},
        "REINFORCE, truncated sequence weights, rejection by geometric mean",
        "as pg_is, with a filter that does not depend on length",
        lambda is_threshold, rs_threshold: (
            _weights("sequence", is_threshold, "is_threshold"),
            _geometric(rs_threshold),
        ),
    ),
    Preset(
        "bypass_pg_geo_rs_token_tis",
        3,
        {"is_threshold": 2.0, "rs_threshold": _GEOMETRIC},
        "REINFORCE, truncated token weights, rejection by geometric mean",
        "as pg_is on long responses, less variance for some bias",
        lambda is_threshold, rs_threshold: (
            _weights("token", is_threshold, "is_threshold"),
            _geometric(rs_threshold),
        ),
    ),
)
"""All presets, in the order of the pages; the table of the command line and of docs/presets.md is generated from it."""
