"""The presets as tables of the command line, and any configuration as the launch flags that give it."""

from __future__ import annotations

import math
import warnings
from statistics import NormalDist
from typing import Any

from mismatch_plugin.config import ALGORITHM_NAMES, Criterion, MismatchConfig, MismatchWarning, preset
from mismatch_plugin.config.fields import leaf_fields, value_and_default
from mismatch_plugin.config.presets import PRESETS, THREE_POLICIES, Preset, find_preset
from mismatch_plugin.config.units import UNITS, Unit
from mismatch_plugin.core.units import ActingBounds
from mismatch_plugin.report.table import NOTHING, Table

LENGTHS = (100, 1000, 10_000)
"""Trained tokens of a response at which the table of presets says to which KL it keeps SHARE."""
SHARE = 0.9
LARGEST_KL = 0.1
"""Above it something other than noise is at work, whatever is kept."""
_GRID = [float(f"{digits}e{power}") for power in range(-10, -2) for digits in range(10, 100)] + [LARGEST_KL]
_NORMAL = NormalDist()
PRESET_NAMES = "preset, other names"
"""Header of the column that holds a preset's name and aliases."""
KEEPS = f"keeps {SHARE:.0%} of the tokens"
_KEEPS_NOTE = (
    f"{KEEPS[0].upper()}{KEEPS[1:]}: at its defaults, for log-ratios l ~ N(−KL, 2 KL), independent from token to "
    f"token, KL in nats a token, by the trained tokens of a response. Real gaps have heavier tails: mismatch-plugin "
    f"inspect says what it keeps of yours."
)


def presets_table() -> Table:
    """Every preset: its names, what it does, when to use it, its parameters, and its settings as launch flags."""
    rows = []
    for entry in PRESETS:
        config = quiet_preset(entry.name)
        names = ", ".join(entry.names.split())
        flags = " ".join(as_flags(config))
        about = (entry.summary, entry.when, keeps(config), _parameters(entry) or NOTHING, flags or NOTHING)
        rows.append((names, str(config.algorithm), *about))
    headers = (PRESET_NAMES, "#", "what it does", "when to use it", KEEPS, "parameters", "the same as flags")
    code = frozenset({PRESET_NAMES, "parameters", "the same as flags"})
    notes = ("The column # has the number of the algorithm.", THREE_POLICIES, _KEEPS_NOTE)
    return Table("Presets", headers, tuple(rows), code, notes)


def preset_table(name: str) -> Table:
    """One preset's full settings, each with its flag; those that are not at their default are marked.

    Raises ValueError for a name that is no preset.
    """
    config = quiet_preset(name)
    rows = []
    for field in leaf_fields(MismatchConfig):
        value, default = value_and_default(config, field.path)
        mark = "" if value == default else " *"
        rows.append((field.path, show(value) + mark, field.meta.get("flag") or NOTHING))
    algorithm = f"algorithm {config.algorithm}, {ALGORITHM_NAMES[config.algorithm]}"
    policies = (THREE_POLICIES,) if config.three_policies else ()
    flags = f"As flags: {' '.join(as_flags(config)) or 'none'}"
    entry = find_preset(name)
    in_python = f"Parameters, for mismatch_plugin.preset: {_parameters(entry) or 'none'}"
    if entry.required:
        in_python += " as an example; --mismatch-preset takes none: paste the flags, and change their bounds"
    notes = ("An asterisk marks what is not at its default.", *policies, in_python, flags)
    headers = ("field", "value", "flag")
    return Table(f"{name}: {algorithm}", headers, tuple(rows), frozenset({"field", "flag"}), notes)


def _parameters(entry: Preset) -> str:
    """A preset's parameters with their defaults, or an example each where there is none."""
    given = [f"{name}={_short(value)}" for name, value in entry.parameters.items()]
    return ", ".join(given + [f"{name}={value} (required)" for name, value in entry.required.items()])


def as_flags(config: MismatchConfig) -> list[str]:
    """The launch flags that give this configuration: those of every setting that is not at its default."""
    words: list[str] = []
    for field in leaf_fields(MismatchConfig):
        (value, default), flag = value_and_default(config, field.path), field.meta.get("flag")
        if value == default or flag is None:
            continue
        if field.path == "rs.criteria":
            for criterion in value:
                words += [flag, criterion_spec(criterion)]
        elif isinstance(value, bool):
            words.append(flag)
        else:
            words += [flag, show(value)]
    return words


def criterion_spec(criterion: Criterion) -> str:
    """A criterion as `--rs-criterion` takes it: aggregate:statistic[[:lower]:upper][:budget][@condition]."""
    bounds = [bound for bound in (criterion.lower_bound, criterion.upper_bound) if bound is not None]
    if criterion.lower_bound is not None and criterion.upper_bound is None:
        bounds.append(math.inf)
    spec = ":".join((criterion.aggregate, criterion.statistic, *(show(bound) for bound in bounds)))
    spec += f":{criterion.budget}" if criterion.budget else ""
    return spec if criterion.condition == "any" else f"{spec}@{criterion.condition}"


def show(value: Any) -> str:
    """A setting's value as one types it; – where there is none."""
    if value is None or value == ():
        return NOTHING
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(criterion_spec(criterion) for criterion in value)
    if isinstance(value, float):
        short = f"{value:.10g}"
        return short if float(short) == value else repr(value)
    return str(value)


def _short(value: Any) -> str:
    """A default in six digits; 2.0 stays 2.0."""
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)


def quiet_preset(name: str) -> MismatchConfig:
    """A preset without its warnings: a table is no use of it. What has no default gets its example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)
        return preset(name, **find_preset(name).required)


# Which share of the tokens a setting keeps, in closed form, where every token's log-ratio is l ~ N(−KL, 2 KL): Gaussian
# noise with E ρ = 1, independent from token to token, the mildest that has this KL.


def expected_kept(config: MismatchConfig, kl: float, length: int) -> float | None:
    """Share of the tokens that rejection, veto and mask mode leave in the loss.

    kl: nats a token. length: trained tokens of every response. Criteria count as independent of each other. None where
    one is of a statistic whose distribution is not computed here, or hangs on the advantage.
    """
    share, bounds = 1.0, list[tuple[Unit, float, float]]()
    if config.weighted and config.tis.mode == "mask":
        own = ActingBounds(config.unit, config.tis.lower, config.tis.upper)
        bounds.append((own.unit, own.log_lower, own.log_upper))
    for criterion in config.criteria:
        lower, upper = criterion.log_bounds
        low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
        if criterion.condition != "any" or criterion.budget:
            return None
        if criterion.in_log_space:
            bounds.append((criterion.unit, low, high))
        elif (criterion.aggregate, criterion.statistic, lower) == ("sequence_mean", "k3", None):
            # E k3 = KL and E k3² = e^2KL − 1 − 2 KL + KL² exactly; the mean of many is close to a gamma variable.
            share *= _gamma(high, kl, (math.expm1(2 * kl) - 2 * kl) / length)
        elif (criterion.aggregate, criterion.statistic, lower) == ("sequence_max", "k2", None):
            share *= _within(-math.sqrt(2 * high), math.sqrt(2 * high), kl, 1.0) ** length
        else:
            return None
    tokens = {UNITS["token"]: 1.0, UNITS["sequence"]: length, UNITS["geometric"]: 1 / length}
    for unit, low, high in bounds:
        if unit not in tokens:
            return None
        share *= _within(low, high, kl, tokens[unit])
    if config.rs.veto_threshold is not None:
        share *= _within(math.log(config.rs.veto_threshold), math.inf, kl, 1.0) ** length
    return share


def largest_kl(config: MismatchConfig, length: int) -> float | None:
    """The KL of two digits, at most LARGEST_KL, up to which `expected_kept` is at least SHARE. None as there."""
    largest = 0.0
    for kl in _GRID:
        kept = expected_kept(config, kl, length)
        if kept is None:
            return None
        if kept < SHARE:  # not monotone: one bound above alone lets the longest responses through
            break
        largest = kl
    return largest


def keeps(config: MismatchConfig) -> str:
    """`all`, or to which KL SHARE of the tokens is kept, by length."""
    if not config.rejects:
        return "all"
    found = [largest_kl(config, length) for length in LENGTHS]
    if any(kl is None for kl in found):
        return "not computed"
    shown = ["0.1 and more" if kl == LARGEST_KL else f"{kl:g}" for kl in found]
    if len(set(shown)) == 1:
        return f"KL to {shown[0]}"
    return "KL to " + ", ".join(f"{kl} at {length:,}" for kl, length in zip(shown, LENGTHS, strict=True)) + " tokens"


def _within(low: float, high: float, kl: float, tokens: float) -> float:
    """P(low ≤ x ≤ high) of x ~ N(−KL, 2 KL) summed over `tokens`; a mean over n tokens has n KL · (1/n) and 1/n of the
    variance: tokens = 1/n, and the mean stays −KL."""
    mean = -kl * max(tokens, 1.0)
    deviation = math.sqrt(2 * kl * tokens)
    return _NORMAL.cdf((high - mean) / deviation) - _NORMAL.cdf((low - mean) / deviation)


def _gamma(x: float, mean: float, variance: float) -> float:
    """P(gamma variable ≤ x), by Wilson and Hilferty's cube root."""
    c = variance / mean**2 / 9
    return _NORMAL.cdf(((x / mean) ** (1 / 3) - (1 - c)) / math.sqrt(c))
