"""Which settings are predicted for a batch, with bounds and parameters from these data where there is no constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.presets import PRESETS, Preset
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import ignore_mismatch_warnings, merge
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.diagnose.levels import GROWN, Bounds, bounds_for, growing, levels_of
from mismatch_plugin.limits import SAFETY_BOUND

OWN = "your settings"
CONSTANTS = {"geometric": (1.001, 1.01)}
_CONSTANTS = (2.0, 5.0)
"""Upper bounds that are tried (at levels not in `CONSTANTS` these), next to those that keep 99 % of these data. The
lower one is the reciprocal."""
_SHARE = 0.99
_KEEPS = f"{_SHARE:.0%}"
_MOST_VERSIONS = 4
_FROM_DATA: dict[str, Callable[[Bounds], float]] = {
    "max_k2": lambda bounds: bounds["sequence_max_k2"][_KEEPS][1],
    "mean_k3": lambda bounds: bounds["sequence_mean_k3"][_KEEPS][1],
    # mean(log π_rollout − log π_θ) > δ: a geometric mean below e^−δ.
    "delta": lambda bounds: -math.log(max(bounds["geometric"][_KEEPS][0], math.exp(-SAFETY_BOUND))),
}
"""A preset's parameter without a default → its value that keeps 99 % of the responses."""


class Setting(NamedTuple):
    """name: as `Prediction.setting`. settings: as in a file for --mismatch-config. config: what of them is predicted
    (`measurable`)."""

    name: str
    settings: dict[str, Any]
    config: MismatchConfig


def settings_for(
    packed: PackedSequences, own: MismatchConfig | None = None, bounds: Bounds | None = None
) -> Iterator[Setting]:
    """The user's own, every preset, and every algorithm × level × mode × bounds: two constants of the level, and what
    keeps 99 % of these data, the same for all lengths and growing with them. Without weights the bounds are those of a
    ratio criterion. Objectives of algorithm 1, whose clip acts at once. Limits on staleness, where versions are known.

    Without advantages no setting whose criteria need them."""
    if own is not None:
        yield setting_of(OWN, own)._replace(config=measurable(own, packed))
    with ignore_mismatch_warnings():
        measured = bounds_for(packed, (_SHARE,)) if bounds is None else bounds
        for preset in PRESETS:
            found = _of_preset(preset, measured)
            if found is not None and not _lacks_advantages(found.config, packed):
                yield found
        for level in levels_of(packed):
            tried = [(upper, (1.0 / upper, upper), "") for upper in CONSTANTS.get(level, _CONSTANTS)]
            low, high = measured[level][_KEEPS]
            for upper, (lower, _), note in [*tried, (high, (low, high), f" (keeps {_KEEPS})")]:
                if math.isfinite(upper):
                    yield from _of_bounds(level, lower, upper, note)
        for level, name in growing(packed).items():
            lower, upper = measured[name][_KEEPS]
            if math.isfinite(upper):
                tis = {"level": level, "lower_bound": lower, "upper_bound": upper, "bound_growth": GROWN}
                for mode in ("clip", "mask"):
                    name = f"{level}, {mode} {lower:.7g} to {upper:.7g}, growth {GROWN:g} (keeps {_KEEPS})"
                    yield _setting(2, name, {"tis": {**tis, "mode": mode}})
        upper = measured["sequence_mean_k3"][_KEEPS][1]
        criterion = {"aggregate": "sequence_mean", "statistic": "k3"}
        yield from _rejections(f"reject sequence_mean k3 above {upper:g} (keeps {_KEEPS})", criterion, None, upper)
        for objective in ("gspo", "cispo", "sapo", "gmpo"):
            yield _setting(1, f"objective {objective}", {"objective": objective})
        yield from _of_versions(packed)


def setting_of(name: str, config: MismatchConfig) -> Setting:
    """A configuration as a setting to be predicted."""
    return Setting(name, config.model_dump(mode="json", exclude_unset=True), config)


def _of_preset(preset: Preset, bounds: Bounds) -> Setting | None:
    """None where these data give no value to a parameter that has no default."""
    given = {name: _FROM_DATA[name](bounds) for name in preset.required}
    if not all(0.0 < value < math.inf for value in given.values()):
        return None
    config = MismatchConfig.build(preset.settings(**given))
    if not given:
        return Setting(preset.short, {"preset": preset.short}, config)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in given.items())
    keeps = "each keeps" if len(given) > 1 else "keeps"
    return setting_of(f"{preset.short}, {shown} ({keeps} {_KEEPS})", config)


def _of_bounds(level: str, lower: float, upper: float, note: str) -> Iterator[Setting]:
    for algorithm in (2, 3):
        for mode in ("truncate", "clip", "mask"):
            tis: dict[str, Any] = {"level": level, "mode": mode, "upper_bound": upper}
            if mode != "truncate":
                tis["lower_bound"] = lower
            shown = f"{upper:.7g}" if mode == "truncate" else f"{lower:.7g} to {upper:.7g}"
            yield _setting(algorithm, f"{level}, {mode} {shown}{note}", {"tis": tis})
    if level in RS_LEVELS:
        criterion = {"aggregate": level, "statistic": "ratio"}
        yield from _rejections(
            f"reject {level} ratio outside {lower:.7g} to {upper:.7g}{note}", criterion, lower, upper
        )


def _of_versions(packed: PackedSequences) -> Iterator[Setting]:
    """A limit between every two stalenesses that are there; the smallest ones, where there are many."""
    if packed.weight_versions is None or packed.trainer_version is None:
        return
    behind = (packed.trainer_version - packed.weight_versions[packed.loss_mask]).unique()
    for most in [int(value) for value in behind.tolist() if value >= 0][:-1][:_MOST_VERSIONS]:
        for algorithm in (0, 2):
            yield _setting(algorithm, f"max_staleness {most}", {"rs": {"max_staleness": most}})


def _rejections(name: str, criterion: dict[str, Any], lower: float | None, upper: float) -> Iterator[Setting]:
    whole = {**criterion, "upper_bound": upper} | ({} if lower is None else {"lower_bound": lower})
    for algorithm in (0, 1):
        yield _setting(algorithm, name, {"rs": {"criteria": [whole]}})


def _setting(algorithm: int, name: str, settings: dict[str, Any]) -> Setting:
    switches = {"use_rollout_log_probs": bool(algorithm & 1), "use_tis": bool(algorithm & 2)}
    given = {key: True for key, on in switches.items() if on} | settings
    return Setting(f"algorithm {algorithm}, {name}", given, MismatchConfig.build(given))


# What these data cannot tell -----------------------------------------------------------------------------------------


def _lacks_advantages(config: MismatchConfig, packed: PackedSequences) -> bool:
    return config.needs_advantages and packed.advantages is None


def _lacks_versions(config: MismatchConfig, packed: PackedSequences) -> bool:
    return config.rs.max_staleness is not None and (packed.weight_versions is None or packed.trainer_version is None)


def measurable(config: MismatchConfig, packed: PackedSequences) -> MismatchConfig:
    """The settings without what needs advantages (conditions, weights by their sign), and the limit that needs
    versions, that are not there."""
    rs: dict[str, Any] = {}
    tis: dict[str, Any] = {}
    if _lacks_advantages(config, packed):
        criteria = [each for each in config.rs.criteria if not each.conditional]
        rs["criteria"] = [each.model_dump(exclude_unset=True) for each in criteria]
        if config.weighs_by_sign:
            tis = {"lower_bound_positive": None, "upper_bound_positive": None}
            tis |= {"mode": "truncate"} if config.tis.mode == "gamma" else {}
    if _lacks_versions(config, packed):
        rs["max_staleness"] = None
    if not rs:
        return config
    with ignore_mismatch_warnings():
        return MismatchConfig.build(merge(config.model_dump(exclude_unset=True), {"rs": rs, "tis": tis}))


def left_out(packed: PackedSequences, own: MismatchConfig | None, grouped: bool) -> tuple[str, ...]:
    """Which settings are not predicted, and why. grouped: rewards and groups are there."""
    notes: list[str] = []
    if packed.advantages is None:
        with ignore_mismatch_warnings():
            built = {preset.short: MismatchConfig.build(preset.settings(**preset.required)) for preset in PRESETS}
        names = [name for name, config in built.items() if config.needs_advantages]
        what = f"criteria and weights that hang on the advantage ({', '.join(names)})"
        notes.append(f"{what} are not predicted: there are no advantages")
    own = own or MismatchConfig()
    if _lacks_versions(own, packed):
        notes.append(
            "rs.max_staleness of your settings is not predicted: it needs a version with a number of every token, and "
            "one of the trainer"
        )
    if own.rs.group != "keep" and not grouped:
        notes.append(
            f"rs.group {own.rs.group} of your settings is predicted as keep: it needs the rewards of responses that "
            f"share a group or prompt"
        )
    return tuple(notes)
