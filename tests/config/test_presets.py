"""Every preset under every name, and every configuration that the pages print, give what the pages state."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import mismatch_plugin as mp
from mismatch_plugin.config.presets import PRESETS, find_preset, preset_names
from tests.config.reading import criteria, noted, read

_SEEDS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[1] / "fixtures" / "seed_configs.yaml").read_text(encoding="utf-8")
)
_GEO_PAGE = ("sequence_mean", "ratio", 1 / 1.001, 1.001)
_GEO_VERL = ("sequence_mean", "ratio", 0.999, 1.001)
_K3 = ("sequence_mean", "k3", None, 0.01)
_ICEPOP = {"tis.mode": "mask", "tis.lower_bound": 0.5, "tis.upper_bound": 5.0, "denominator": "original"}
_SEQUENCE = {"tis.level": "sequence"}
_UNWEIGHTED = {"tis.level": "none"}
_DPPO = {"tis.upper_bound": 20.0, "denominator": "original"}
_TOPR = {"tis.mode": "clip", "tis.level": "sequence", "tis.lower_bound": 0.0, "tis.upper_bound": 1.0}
_TOPR |= {"tis.lower_bound_positive": 1.0, "tis.upper_bound_positive": 1.0}
_GMPO = {
    "objective": "gmpo", "aggregation": "seq-mean-token-mean", "ppo.eps_clip_low": 0.4, "ppo.eps_clip_high": 0.4
}  # fmt: skip
_PREFIX = {"tis.level": "prefix", "tis.upper_bound": 5.0, "tis.bound_growth": 0.5}
# names: (algorithm, what is not at its default, criteria, veto)
_EXPECTED: dict[str, tuple[int, dict[str, Any], list[tuple[Any, ...]], float | None]] = {
    "decoupled_token_is token_is": (2, {}, [], None),
    "decoupled_seq_is seq_is": (2, _SEQUENCE, [], None),
    "decoupled_seq_is_rs seq_is_rs": (2, _SEQUENCE, [("sequence_sum", "ratio", 0.5, 2.0)], None),
    "seq_mis": (2, _SEQUENCE, [("sequence_sum", "ratio", 0.0, 2.0)], None),
    "decoupled_geo_rs geo_rs": (0, {}, [_GEO_PAGE], 1e-4),
    "ppo_is_bypass": (1, {}, [], None),
    "pg_is pure_is bypass_pg_is": (3, _SEQUENCE, [], None),
    "pg_rs": (3, _UNWEIGHTED, [_GEO_PAGE], 1e-4),
    "disabled": (0, {}, [], None),
    "decoupled_token_icepop token_icepop": (2, _ICEPOP, [], None),
    "decoupled_geo_rs_token_tis geo_rs_token_tis": (2, {}, [_GEO_VERL], None),
    "decoupled_geo_rs_seq_tis geo_rs_seq_tis": (2, _SEQUENCE, [_GEO_VERL], None),
    "decoupled_k3_rs k3_rs": (0, {}, [_K3], None),
    "decoupled_k3_rs_token_tis k3_rs_token_tis": (2, {}, [_K3], None),
    "decoupled_k3_rs_seq_tis k3_rs_seq_tis": (2, _SEQUENCE, [_K3], None),
    "bypass_ppo_clip": (1, {}, [], None),
    "bypass_ppo_clip_geo_rs": (1, {}, [_GEO_VERL], None),
    "bypass_ppo_clip_k3_rs": (1, {}, [_K3], None),
    "bypass_pg_token_icepop": (3, _ICEPOP, [], None),
    "bypass_pg_geo_rs": (3, _UNWEIGHTED, [_GEO_VERL], None),
    "bypass_pg_geo_rs_seq_tis": (3, _SEQUENCE, [_GEO_VERL], None),
    "bypass_pg_geo_rs_token_tis": (3, {}, [_GEO_VERL], None),
    "kpop": (0, {}, [("token", "binary_kl", None, 0.1), ("token", "binary_kl_reverse", None, 0.1)], None),
    "trm": (0, {}, [("sequence_max", "k2", None, 0.5), ("sequence_mean", "k3", None, 0.01)], None),
    "m2po": (0, {}, [("token", "k2", None, 0.02, "mean=0.02")], None),
    "dppo_tv": (3, _DPPO, [("token", "tv", None, 0.15, "away")], None),
    "dppo_kl": (3, _DPPO, [("token", "binary_kl", None, 0.05, "away")], None),
    "opsm": (0, {"denominator": "original"}, [("sequence_mean", "k1", math.exp(-0.1), math.inf, "negative")], None),
    "prefix_is": (2, _PREFIX, [], None),
    "sapo": (0, {"objective": "sapo", "aggregation": "seq-mean-token-mean"}, [], None),
    "gmpo": (0, _GMPO, [], None),
    "topr": (3, _TOPR, [], None),
    "vespo": (3, {"tis.level": "sequence", "tis.mode": "gamma"}, [], None),
}
_REQUIRED = {"trm": {"max_k2": 0.5, "mean_k3": 0.01}, "opsm": {"delta": 0.1}}


def _leaves(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in nested.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return leaves


def _changed(config: mp.MismatchConfig) -> dict[str, Any]:
    """What is not at its default, the two algorithm switches and rejection apart."""
    leaves = _leaves(config.model_dump(exclude_defaults=True))
    return {path: value for path, value in leaves.items() if not path.startswith(("use_", "rs."))}


def _same_criteria(config: mp.MismatchConfig, expected: list[Any], rel: float = 1e-12) -> bool:
    found = criteria(config)
    return [row[:2] for row in found] == [tuple(row[:2]) for row in expected] and all(
        row[2:] == pytest.approx(tuple(wanted[2:]), rel=rel) for row, wanted in zip(found, expected, strict=True)
    )


# Presets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "expected"), _EXPECTED.items(), ids=list(_EXPECTED))
def test_every_preset_under_every_name(names: str, expected: tuple[Any, ...]) -> None:
    for name in names.split():
        config, notes = noted(mp.preset, name, **_REQUIRED.get(name, {}))
        assert config.rs.policy == ("current" if name == "opsm" else "auto")
        assert (config.algorithm, _changed(config), criteria(config), config.rs.veto_threshold) == expected
        token_reinforce = config.algorithm == 3 and config.tis.level == "token" and not name.startswith("dppo")
        assert len(notes) == token_reinforce  # nothing else about a preset at its defaults is worth a warning


def test_no_preset_is_untested_and_the_table_of_presets_is_true() -> None:
    assert sorted(preset_names()) == sorted(name for names in _EXPECTED for name in names.split())
    assert len(set(preset_names())) == len(preset_names())
    for record in PRESETS:
        assert record.required == _REQUIRED.get(record.name, {})
        config, _ = noted(mp.preset, record.name, **record.parameters, **record.required)
        assert config == noted(mp.preset, record.name, **record.required)[0]
        assert record.algorithm == config.algorithm
        assert all(find_preset(alias) is record for alias in record.names.split())


PARAMETERS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("seq_is", {"threshold": "0.5_5"}, "tis.lower_bound", 0.5),
    ("geo_rs", {"veto_threshold": "1e-5"}, "rs.veto_threshold", 1e-5),
    ("pg_rs", {"veto_threshold": None}, "rs.veto_threshold", None),
    ("token_icepop", {"threshold_lower": 0.2}, "tis.lower_bound", 0.2),
    ("m2po", {"second_moment": 0.1}, "rs.criteria", (("token", "k2", None, 0.05, "mean=0.05"),)),
    ("seq_is_rs", {"rs_threshold": 4.0, "rs_threshold_lower": 0}, "bounds", (0.0, 4.0)),
    ("seq_mis", {"threshold": 5.0}, "bounds", (0.0, 5.0)),
    ("geo_rs", {"rs_threshold": "1.0005"}, "bounds", (1 / 1.0005, 1.0005)),
    ("pg_rs", {"rs_threshold_lower": 0.998}, "bounds", (0.998, 1.001)),
]


@pytest.mark.parametrize(("name", "parameters", "path", "value"), PARAMETERS)
def test_parameters_of_presets(name: str, parameters: dict[str, Any], path: str, value: Any) -> None:
    """bounds: of the one criterion."""
    config, _ = noted(mp.preset, name, **parameters)
    if path == "bounds":
        assert [row[2:] for row in criteria(config)] == [value]
    elif path == "rs.criteria":
        assert tuple(criteria(config)) == value
    else:
        section, field = path.split(".")
        assert getattr(getattr(config, section), field) == value


def test_two_bounds_of_weights_are_icepop() -> None:
    assert noted(mp.preset, "token_is", threshold="0.5_5.0")[0] == noted(mp.preset, "token_icepop")[0]


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("token_si", {}, "preset 'token_si' is unknown: did you mean token_is"),
    ("token_is", {"treshold": 2}, "treshold is no parameter of preset decoupled_token_is, which has threshold. "),
    ("geo_rs", {"rs_threshold": "0.9_1.1", "rs_threshold_lower": 0.8}, "leave rs_threshold_lower 0.8 out"),
    ("seq_is_rs", {"rs_threshold": 2.0, "rs_threshold_lower": 3}, "lower bound 3 above upper bound 2: swap them."),
    ("trm", {"max_k2": 1}, 'preset trm needs mean_k3: preset("trm", max_k2=0.5, mean_k3=0.01) is an example'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "message"), MISTAKES)
def test_errors(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        mp.preset(name, **parameters)


def test_a_preset_with_another_setting_and_saved_in_a_file(tmp_path: Path) -> None:
    """A file that lists every setting asks for none of those at their defaults."""
    path = tmp_path / "config.yaml"
    for name in preset_names():
        base, expected = noted(mp.preset, name, **_REQUIRED.get(name, {}))
        config, notes = noted(mp.MismatchConfig.build, base.model_dump() | {"metrics": "full"})
        assert config.model_dump() == base.model_dump() | {"metrics": "full"}
        assert notes == expected
        path.write_text(yaml.safe_dump(base.model_dump(mode="json")))
        assert noted(mp.MismatchConfig.from_file, path)[0] == base


# Pages ----------------------------------------------------------------------------------------------------------------


def _built(entry: dict[str, Any]) -> tuple[mp.MismatchConfig, list[str]]:
    if "verl" in entry:
        return noted(mp.compat.from_verl, entry["verl"])
    if "slime" in entry:
        return noted(mp.compat.from_slime, entry["slime"])
    if "preset" in entry:
        return noted(mp.preset, **entry["preset"])
    return noted(read, entry["flags"])


def _label(entry: dict[str, Any]) -> str:
    return f"{entry['seed']} {entry['where']}"


@pytest.mark.parametrize("entry", _SEEDS, ids=_label)
def test_configuration_on_a_page(entry: dict[str, Any]) -> None:
    config, notes = _built(entry)
    assert config.algorithm == entry["algorithm"]
    assert _changed(config) == entry.get("settings", {})
    assert _same_criteria(config, entry.get("criteria", []))
    assert config.rs.veto_threshold == entry.get("veto")
    assert len(notes) == ("warns" in entry), notes
    assert entry.get("warns", "") in " ".join(notes)
    if "same_as" in entry:  # YAML that the page calls a preset's, with 1/1.001 rounded to 0.999
        twin, _ = noted(mp.preset, **entry["same_as"])
        assert (config.algorithm, _changed(config)) == (twin.algorithm, _changed(twin))
        assert config.rs.veto_threshold == twin.rs.veto_threshold
        assert _same_criteria(config, criteria(twin), rel=2e-6)
