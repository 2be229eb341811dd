"""Named starting points: the presets of the rollout-correction pages and of verl, under the names users know them by.

Their bounds are on ρ = π_train / π_rollout. verl's newer presets bound 1/ρ; by their own, nearly reciprocal defaults
both accept the same ratios to one in 10^6."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from mismatch_plugin.config.values import bounds, merge, number, unknown

Nested = dict[str, Any]
Parameters = Mapping[str, Any]
"""Name → value of a preset's parameters."""

THREE_POLICIES = (
    "Rejection without weights (geo_rs, k3_rs) is algorithm 0, PPO, because no weight multiplies the loss, and has "
    "three policies, as the guide says, because it compares π_old with π_rollout and the clip π_θ with π_old."
)
"""How both are right: the number is that of the two switches, and the guide counts the policies."""


@dataclass(frozen=True)
class Preset:
    """One preset: what the table of presets shows, and how its parameters become settings.

    names: its own, then its aliases. parts: some of the settings each, or what makes them of the parameters.
    parameters: with their defaults. required: those that have none, with an example each.
    """

    names: str
    algorithm: int
    parts: tuple[Nested | Callable[[Parameters], Nested], ...]
    parameters: Parameters
    summary: str
    when: str
    required: Parameters = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names.split()[0]

    @property
    def short(self) -> str:
        """The first of its names without decoupled_, where it has one: what advice and predictions say."""
        return next((name for name in self.names.split() if not name.startswith("decoupled_")), self.name)

    def settings(self, **overrides: Any) -> Nested:
        """Nested settings for `MismatchConfig.build`. Raises ValueError for a parameter that the preset lacks."""
        if missing := [name for name in self.required if name not in overrides]:
            example = ", ".join(f"{name}={value}" for name, value in self.required.items())
            raise ValueError(
                f'preset {self.name} needs {", ".join(missing)}: preset("{self.name}", {example}) is an example; '
                f"mismatch-plugin presets {self.name} shows it as flags."
            )
        for name in overrides:
            if name not in {**self.parameters, **self.required}:
                has = ", ".join([*self.parameters, *self.required]) or "none"
                raise ValueError(
                    f"{name} is no parameter of preset {self.name}, which has {has}. Settings are changed by "
                    f"preset(…).replace(…)."
                )
        switches = {"use_rollout_log_probs": self.algorithm & 1, "use_tis": self.algorithm & 2}
        given = {**self.parameters, **overrides}
        made = (part(given) if callable(part) else part for part in self.parts)
        return reduce(merge, made, {name: True for name, on in switches.items() if on})


def find_preset(name: str) -> Preset:
    """The record of a preset by name or alias. Raises ValueError for a name that is neither."""
    for record in PRESETS:
        if name in record.names.split():
            return record
    raise unknown("preset", name, preset_names())


def preset_names() -> tuple[str, ...]:
    """Every name that `preset` knows, aliases behind the name that they mean."""
    return tuple(name for record in PRESETS for name in record.names.split())


def _bounds(given: Parameters, name: str) -> Nested:
    """Bounds that the parameters `name` and `name_lower` give; lower_bound is left out where neither has one."""
    lower, upper = bounds(given[name], name)
    apart = given.get(f"{name}_lower")
    if None not in (apart, lower):
        raise ValueError(f"{name} {given[name]!r} has a lower bound already: leave {name}_lower {apart!r} out.")
    lower = lower if apart is None else number(apart, f"{name}_lower")
    return {"upper_bound": upper} | ({} if lower is None else {"lower_bound": lower})


def _weights(level: str, given: Parameters) -> Nested:
    """Importance weights truncated at the threshold; with two bounds, IcePop: masked, the rejected still counted."""
    tis = {"level": level, **_bounds(given, "is_threshold" if "is_threshold" in given else "threshold")}
    return {"tis": {**tis, "mode": "mask"}, "denominator": "original"} if "lower_bound" in tis else {"tis": tis}


def _ratio(aggregate: str, given: Parameters) -> Nested:
    """Rejection of sequences outside rs_threshold; the lower bound of a ratio is its reciprocal unless given."""
    return {"rs": {"criteria": ({"aggregate": aggregate, **_bounds(given, "rs_threshold")},)}}


def _criteria(*specs: str) -> Callable[[Parameters], Nested]:
    """Criteria as `--rs-criterion` takes them, with the names of parameters in braces."""
    return lambda given: {"rs": {"criteria": tuple(spec.format_map(given) for spec in specs)}}


def _veto(given: Parameters) -> Nested:
    return {"rs": {"veto_threshold": given["veto_threshold"]}}


def _opsm(given: Parameters) -> Nested:
    """mean(log μ − log p) > δ: the geometric mean of ρ below e^−δ."""
    if (delta := number(given["delta"], "delta")) < 0:
        raise ValueError(f"delta of preset opsm is {delta:g}: it should be greater than or equal to 0.")
    return {"rs": {"criteria": (f"sequence_mean:k1:{math.exp(-delta)}:inf@negative",), "policy": "current"}}


def _second_moment(given: Parameters) -> Nested:
    """M2PO's bound on the mean of l², which is twice k2."""
    half = number(given["second_moment"], "second_moment") / 2.0
    return {"rs": {"criteria": (f"token:k2:{half}:mean={half}",)}}


_TOKEN, _SEQUENCE, _PREFIX = (partial(_weights, level) for level in ("token", "sequence", "prefix"))
_PRODUCT, _GEO = partial(_ratio, "sequence_sum"), partial(_ratio, "sequence_mean")
_K3 = _criteria("sequence_mean:k3:{rs_threshold}")
_UNWEIGHTED: Nested = {"tis": {"level": "none"}}
_ORIGINAL: Nested = {"denominator": "original"}
_EACH_RESPONSE: Nested = {"aggregation": "seq-mean-token-mean"}
_AT_ONE = {"lower_bound": 0.0, "upper_bound": 1.0, "lower_bound_positive": 1.0, "upper_bound_positive": 1.0}

_THRESHOLD: Parameters = {"threshold": 2.0}
_TWO_BOUNDS: Parameters = {"threshold": 5.0, "threshold_lower": 0.5}
_WITH_VETO: Parameters = {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4}
_RS_RATIO: Parameters = {"rs_threshold": 2.0, "rs_threshold_lower": None}
_RS_GEO: Parameters = {"rs_threshold": "0.999_1.001"}
_RS_K3: Parameters = {"rs_threshold": 0.01}
_IS: Parameters = {"is_threshold": 2.0}
_DIVERGENCE: Parameters = {"is_threshold": 20.0}

# fmt: off
PRESETS = (
    Preset("decoupled_token_is token_is", 2, (_TOKEN,), _THRESHOLD,
        "decoupled PPO, token weights truncated above",
        "moderate mismatch or slight staleness; the usual first choice"),
    Preset("decoupled_seq_is seq_is", 2, (_SEQUENCE,), _THRESHOLD,
        "decoupled PPO, sequence weights truncated above",
        "rewards of whole responses and responses short enough for a product of ratios; unbiased up to the bound only "
        "while π_θ is π_old, on the first mini-batch"),
    Preset("decoupled_seq_is_rs seq_is_rs", 2, (_SEQUENCE, _PRODUCT), _IS | _RS_RATIO,
        "decoupled PPO, truncated sequence weights, sequences outside the bounds rejected",
        "short responses, of which some are outliers (old data, replay buffers)"),
    Preset("seq_mis", 2, (_SEQUENCE, _criteria("sequence_sum:ratio:0:{threshold}")), _THRESHOLD,
        "decoupled PPO, truncated sequence weights, sequences above the bound rejected (no lower bound)",
        "as decoupled_seq_is_rs, where sequences that the trainer finds unlikely should stay"),
    Preset("decoupled_geo_rs geo_rs", 0, (_GEO, _veto), _WITH_VETO,
        "PPO without weights, rejection by geometric mean, one-token veto",
        "nearly equal policies, and every sequence that drifts is to go"),
    Preset("ppo_is_bypass", 1, (lambda given: {"tis": {"upper_bound": given["threshold"]}},), _THRESHOLD,
        "PPO clipped against the rollout policy; the threshold sets metrics only",
        "small mismatch, and one forward pass to be saved"),
    Preset("pg_is pure_is bypass_pg_is", 3, (_SEQUENCE,), _THRESHOLD,
        "REINFORCE, sequence weights truncated above, no PPO clip",
        "one optimizer step per rollout, unbiased up to the bound (the weight is that of π_θ), one forward pass saved"),
    Preset("pg_rs", 3, (_UNWEIGHTED, _GEO, _veto), _WITH_VETO,
        "REINFORCE without weights, rejection by geometric mean, one-token veto",
        "as pg_is, where outliers are to be dropped rather than weighted"),
    Preset("disabled", 0, (), {},
        "PPO uncorrected; metrics only",
        "to measure the mismatch before choosing a correction"),
    Preset("decoupled_token_icepop token_icepop", 2, (_TOKEN,), _TWO_BOUNDS,
        "decoupled PPO, token weights outside the bounds set to zero (IcePop)",
        "mixture-of-experts models, where single tokens drift far"),
    Preset("decoupled_geo_rs_token_tis geo_rs_token_tis", 2, (_TOKEN, _GEO), _IS | _RS_GEO,
        "decoupled PPO, truncated token weights, rejection by geometric mean",
        "a few responses that drift as a whole; with bounds from inspect, unless the policies are nearly equal"),
    Preset("decoupled_geo_rs_seq_tis geo_rs_seq_tis", 2, (_SEQUENCE, _GEO), _IS | _RS_GEO,
        "decoupled PPO, truncated sequence weights, rejection by geometric mean",
        "as decoupled_seq_is, with a filter that does not depend on length"),
    Preset("decoupled_k3_rs k3_rs", 0, (_K3,), _RS_K3,
        "PPO without weights, rejection by the mean k3 divergence",
        "as decoupled_geo_rs, where drifts of both signs must not cancel"),
    Preset("decoupled_k3_rs_token_tis k3_rs_token_tis", 2, (_TOKEN, _K3), _IS | _RS_K3,
        "decoupled PPO, truncated token weights, rejection by the mean k3 divergence",
        "long responses with outliers of either sign, KL below the bound"),
    Preset("decoupled_k3_rs_seq_tis k3_rs_seq_tis", 2, (_SEQUENCE, _K3), _IS | _RS_K3,
        "decoupled PPO, truncated sequence weights, rejection by the mean k3 divergence",
        "as decoupled_seq_is, with outliers of either sign rejected"),
    Preset("bypass_ppo_clip", 1, (), {},
        "PPO clipped against the rollout policy",
        "as ppo_is_bypass"),
    Preset("bypass_ppo_clip_geo_rs", 1, (_GEO,), _RS_GEO,
        "PPO clipped against the rollout policy, rejection by geometric mean",
        "small mismatch with some sequences that drift"),
    Preset("bypass_ppo_clip_k3_rs", 1, (_K3,), _RS_K3,
        "PPO clipped against the rollout policy, rejection by the mean k3 divergence",
        "small mismatch with outliers of either sign"),
    Preset("bypass_pg_token_icepop", 3, (_TOKEN,), _TWO_BOUNDS,
        "REINFORCE, token weights outside the bounds set to zero (IcePop)",
        "as decoupled_token_icepop, with one step per rollout and one forward pass saved"),
    Preset("bypass_pg_geo_rs", 3, (_UNWEIGHTED, _GEO), _RS_GEO,
        "REINFORCE without weights, rejection by geometric mean",
        "as pg_rs, without the veto"),
    Preset("bypass_pg_geo_rs_seq_tis", 3, (_SEQUENCE, _GEO), _IS | _RS_GEO,
        "REINFORCE, truncated sequence weights, rejection by geometric mean",
        "as pg_is, with a filter that does not depend on length"),
    Preset("bypass_pg_geo_rs_token_tis", 3, (_TOKEN, _GEO), _IS | _RS_GEO,
        "REINFORCE, truncated token weights, rejection by geometric mean",
        "as pg_is on long responses, less variance for some bias"),
    Preset("kpop", 0, (_criteria("token:binary_kl:{threshold}", "token:binary_kl_reverse:{threshold}"),),
        {"threshold": 0.1},
        "PPO without weights, tokens rejected by the binary KL in either direction (KPop)",
        "single tokens that drift far; rare tokens stay, whose small probability may change by a large factor"),
    Preset("trm", 0, (_criteria("sequence_max:k2:{max_k2}", "sequence_mean:k3:{mean_k3}"),), {},
        "PPO without weights, sequences rejected for their worst token or their mean divergence (TRM)",
        "mixture-of-experts models and long responses, where one token far off spoils a sequence; with bounds from "
        "inspect",
        {"max_k2": 0.5, "mean_k3": 0.01}),
    Preset("dppo_tv", 3, (_TOKEN, _ORIGINAL, _criteria("token:tv:{threshold}@away")),
        {"threshold": 0.15} | _DIVERGENCE,
        "REINFORCE, token weights, no gradient where a step leads further than a total variation from π_rollout (DPPO)",
        "several steps a rollout without an old log-probs pass: a trust region that does not punish rare tokens"),
    Preset("dppo_kl", 3, (_TOKEN, _ORIGINAL, _criteria("token:binary_kl:{threshold}@away")),
        {"threshold": 0.05} | _DIVERGENCE,
        "as dppo_tv, by the binary KL",
        "as dppo_tv"),
    Preset("opsm", 0, (_opsm, _ORIGINAL), {},
        "PPO without weights, sequences of negative advantage rejected once π_θ has left the sampler (DeepSeek-V3.2)",
        "stale or far sequences that would only be pushed down further; δ of 0.05 to 0.2 is used",
        {"delta": 0.1}),
    Preset("prefix_is", 2, (_PREFIX, lambda given: {"tis": {"bound_growth": given["bound_growth"]}}),
        {"threshold": 5.0, "bound_growth": 0.5},
        "decoupled PPO, weights of the product up to each token, truncated above at 5^√t",
        "an advantage for each token and KL × length to 0.5: less bias than token_is; exact up to the bound for "
        "A_t = Q(s_t, a_t) or Q − V, while π_θ is π_old"),
    Preset("sapo", 0, ({"objective": "sapo", **_EACH_RESPONSE},), {},
        "PPO with a smooth gate in place of the clip: far ratios lose their gradient bit by bit (SAPO)",
        "several steps a rollout; with use_rollout_log_probs the gate sees the mismatch too, with use_tis weights do"),
    Preset("gmpo", 0, ({"objective": "gmpo", **_EACH_RESPONSE},), {},
        "PPO on the geometric mean of a response's clipped ratios (GMPO)",
        "as sapo, where single tokens of far ratios should not carry the step"),
    Preset("m2po", 0, (_second_moment,), {"second_moment": 0.04},
        "the tokens of the largest l² rejected until the mean of the rest is at most 0.04 (M2PO)",
        "stale data: rejects where and as much as the second moment needs, by the step before; the first by l² alone"),
    Preset("topr", 3, ({"tis": {"level": "sequence", "mode": "clip", **_AT_ONE}},), {},
        "REINFORCE, weight 1 where A ≥ 0, else the sequence's ratio truncated above at 1 (TOPR)",
        "old or far data: good responses are learned at full weight, bad ones only while the policy would sample them"),
    Preset("vespo", 3, ({"tis": {"level": "sequence", "mode": "gamma"}},), {},
        "REINFORCE, sequence weights that fall off smoothly on both sides of 1, by the sign of A (VESPO)",
        "as pg_is, without a bound to choose; responses short enough that their product of ratios stays near 1")
)
# fmt: on
"""All presets, in the order of the pages; the table of the command line and of docs/presets.md is generated from it."""

COMPLETE = tuple(record for record in PRESETS if not record.required)
"""Those whose parameters all have a default."""
