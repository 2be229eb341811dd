"""`MismatchConfig`: defaults, the four algorithms, bounds, criteria, files, layers, and every error by its message."""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from pydantic import BaseModel, ValidationError

import mismatch_plugin as mp
from mismatch_plugin.config import ImportanceSampling, PPOClip, bound_warnings
from mismatch_plugin.config.criteria import Criterion
from mismatch_plugin.config.fields import leaf_fields
from mismatch_plugin.config.rules import truncated_product
from mismatch_plugin.config.values import bounds, number, parse_bool


def _config(**settings: Any) -> mp.MismatchConfig:
    """A configuration built directly, which gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return mp.MismatchConfig(**settings)


def _file(folder: Path, text: str, name: str = "mismatch.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# Defaults and algorithms ----------------------------------------------------------------------------------------------


def test_defaults() -> None:
    config = _config()
    assert (config.tis.mode, config.tis.level, config.tis.upper, config.tis.lower) == ("truncate", "token", 2.0, 0.5)
    assert not config.tis.batch_normalize
    assert (config.rs.criteria, config.rs.veto_threshold) == ((), None)
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.ppo.dual_clip) == (0.2, 0.2, None)
    assert (config.aggregation, config.metrics, config.denominator) == ("token-mean", "basic", "auto")
    assert config.rollout_log_prob_policy == "error"


@pytest.mark.parametrize(
    ("bypass", "tis", "level", "algorithm", "weighted"),
    [
        (False, False, "token", 0, False),
        (True, False, "token", 1, False),
        (False, True, "token", 2, True),
        (True, True, "sequence", 3, True),
        (True, True, "none", 3, False),
    ],
)
def test_two_switches_choose_the_algorithm(bypass: bool, tis: bool, level: Any, algorithm: int, weighted: bool) -> None:
    rejection = {"veto_threshold": 1e-4} if level == "none" else {}  # without one it is plain REINFORCE, which is said
    config = _config(use_rollout_log_probs=bypass, use_tis=tis, tis={"level": level}, rs=rejection)
    assert (config.algorithm, config.weighted) == (algorithm, weighted)


@pytest.mark.parametrize(
    ("settings", "rejects"),
    [
        ({}, False),
        ({"use_tis": True}, False),
        ({"use_tis": True, "tis": {"mode": "mask"}}, True),
        ({"rs": {"criteria": ["token:ratio:2"]}}, True),
        ({"rs": {"veto_threshold": 1e-4}}, True),
        ({"rollout_log_prob_policy": "drop-token"}, True),
        ({"rollout_log_prob_policy": "neutral"}, False),
    ],
)
def test_rejects(settings: dict[str, Any], rejects: bool) -> None:
    assert _config(**settings).rejects is rejects


def test_a_configuration_is_frozen() -> None:
    config = _config(rs={"criteria": ["token:ratio:2"]})
    parts: list[tuple[BaseModel, str]] = [(config, "use_tis"), (config.tis, "mode"), (config.criteria[0], "statistic")]
    for part, name in parts:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, getattr(part, name))


def test_every_setting_is_described() -> None:
    for leaf in leaf_fields(mp.MismatchConfig):
        assert leaf.description, leaf.path
        assert leaf.meta["flag"], leaf.path


# Bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("infinity", [math.inf, "inf"])
def test_an_infinite_bound_is_the_safety_bound(infinity: Any) -> None:
    tis = _config(use_tis=True, tis={"upper_bound": infinity}).tis
    assert tis.upper == math.exp(20)
    assert tis.lower == math.exp(-20)


@pytest.mark.parametrize(("lower", "found"), [(None, 0.25), (0.0, 0.0), (0.7, 0.7), (4.0, 4.0)])
def test_lower_bound_is_the_reciprocal_unless_given(lower: float | None, found: float) -> None:
    tis = _config(use_tis=True, tis={"mode": "clip", "upper_bound": 4.0, "lower_bound": lower}).tis
    assert tis.lower == found


@pytest.mark.parametrize("where", ["mask", "criterion"])
def test_a_geometric_bound_of_2_warns_with_the_range_that_works(where: str) -> None:
    rejection: dict[str, Any] = {"rs": {"criteria": ["sequence_mean:ratio:2.0"]}}
    mask: dict[str, Any] = {"use_tis": True, "tis": {"level": "geometric", "mode": "mask"}}
    with pytest.warns(mp.MismatchWarning, match=r"hardly anything.*within 0\.01 to 0\.1 % of 1 is usual"):
        mp.MismatchConfig(**(mask if where == "mask" else rejection))


def test_a_tight_geometric_bound_does_not_warn() -> None:
    _config(use_tis=True, tis={"level": "geometric", "mode": "mask", "upper_bound": 1.001})
    _config(rs={"criteria": ["sequence_mean:ratio:1.001", "sequence_mean:k2:2.0"]})


@pytest.mark.parametrize(
    ("high", "notes"), [(None, []), (0.01, []), (0.2, ["objective gspo with ε 0.0003 and 0.2 clips"])]
)
def test_a_clip_of_gspo_as_wide_as_ppo_s_warns(high: float | None, notes: list[str]) -> None:
    """Its ratio is a geometric mean: ε of its own, which is not the hosts' default."""
    clip = mp.PPOClip() if high is None else mp.PPOClip(eps_clip_high=high)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mp.MismatchConfig(objective="gspo", aggregation="seq-mean-token-mean", ppo=clip)
    assert [str(warning.message)[:42] for warning in caught] == notes


@pytest.mark.parametrize(("low", "notes"), [(0.4, []), (0.2, ["objective gmpo with ε 0.2 and 0.4 clips earl"])])
def test_a_clip_of_gmpo_as_narrow_as_ppo_s_warns(low: float, notes: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip = mp.PPOClip(eps_clip_low=low, eps_clip_high=0.4)
        mp.MismatchConfig(objective="gmpo", aggregation="seq-mean-token-mean", ppo=clip)
    assert [str(warning.message)[:44] for warning in caught] == notes


@pytest.mark.parametrize("objective", ["gspo", "ppo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_aggregation_that_is_not_gspo_s_warns(objective: str, aggregation: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mp.MismatchConfig.model_validate({"objective": objective, "aggregation": aggregation})
    said = [f"objective gspo with aggregation {aggregation} " in str(w.message)
            for w in caught]  # fmt: skip
    assert said == [True] * (objective == "gspo" and aggregation != "seq-mean-token-mean")


def test_reinforce_at_token_level_warns() -> None:
    with pytest.warns(mp.MismatchWarning, match="algorithm 3 at token level is biased: the rollout-correction guide"):
        mp.MismatchConfig(use_rollout_log_probs=True, use_tis=True)


# Criteria -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sequence_max:k2:0.5", ("sequence_max", "k2", None, 0.5)),
        ("token:ratio:0.2:3", ("token", "ratio", 0.2, 3.0)),
        ("token:ratio:4", ("token", "ratio", 0.25, 4.0)),
        ("sequence_sum:k1:0:5", ("sequence_sum", "k1", 0.0, 5.0)),
        ("sequence_mean:ratio", ("sequence_mean", "ratio", 1 / 1.05, 1.05)),
        ("token:tv:1e-2", ("token", "tv", None, 0.01)),
        ("token:ratio:0.5:inf", ("token", "ratio", 0.5, math.inf)),
        ({"aggregate": "token", "statistic": "binary_kl", "upper_bound": "0.1"}, ("token", "binary_kl", None, 0.1)),
        (Criterion(upper_bound=2.0), ("token", "ratio", 0.5, 2.0)),
    ],
)
def test_criteria(spec: Any, expected: tuple[Any, ...]) -> None:
    config = _config(use_tis=True, tis={"upper_bound": 1.05}, rs={"criteria": [spec]})
    (c,) = config.criteria
    assert (c.aggregate, c.statistic, c.lower_bound, c.upper_bound) == expected


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        ("token:ratio:0.5:4", (math.log(0.5), math.log(4))),
        ("token:k1:0:4", (None, math.log(4))),
        ("token:ratio:0.5:inf", (math.log(0.5), None)),
        ("token:k3:0.1", (None, 0.1)),
        ("token:k3:0.01:0.1", (0.01, 0.1)),
    ],
)
def test_bounds_are_compared_in_their_own_space(spec: str, limits: tuple[float | None, float | None]) -> None:
    assert _config(rs={"criteria": [spec]}).criteria[0].log_bounds == limits


# Errors ---------------------------------------------------------------------------------------------------------------

_NO_WEIGHT = "changes no weight without use_tis: add use_tis, or leave it out."
_BOTH = "use_tis: true, use_rollout_log_probs: true"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tis: {mode: clip}", f"tis.mode clip {_NO_WEIGHT}"),
        ("tis: {level: sequence}", f"tis.level sequence {_NO_WEIGHT}"),
        ("tis: {upper_bound: 3}", f"tis.upper_bound 3 {_NO_WEIGHT}"),
        ("tis: {batch_normalize: true}", f"tis.batch_normalize {_NO_WEIGHT}"),
        ("use_tis: true, tis: {lower_bound: 0.1}", "tis.lower_bound 0.1 bounds no weight under tis.mode truncate"),
        ("use_tis: true, tis: {batch_normalize_scope: step}", "changes nothing without tis.batch_normalize: add it"),
        (f"{_BOTH}, tis: {{level: none, mode: mask}}", "tis.mode mask changes nothing at tis.level none (every weight"),
        ("use_tis: true, tis: {level: none}", "tis.level none is REINFORCE with rejection only: it needs"),
        (f"{_BOTH}, ppo: {{eps_clip_high: 0.3}}", "ppo.eps_clip_high 0.3 changes nothing in algorithm 3"),
        ("length_norm: 100", "length_norm 100 needs aggregation seq-mean-token-sum: choose it"),
        ("terms: {kl_type: k2}", "terms.kl_type k2 changes nothing without terms.kl_coef: set it"),
        ("terms: {kl_importance_weighted: true}", "terms.kl_importance_weighted changes nothing without terms.kl_coef"),
        ("terms: {kl_coef: 0.1, kl_importance_weighted: true}", "needs importance weights: add use_tis"),
        ("dry_run: true", "dry_run has nothing to try: add use_tis, a criterion or a veto"),
        ("use_tis: true, tis: {mode: clip, lower_bound: 3}", "tis.lower_bound 3 is above tis.upper_bound 2: lower it,"),
        (
            "use_tis: true, tis: {mode: mask, upper_bound: 0.5}",
            "tis.upper_bound 0.5 is below the lower bound that tis.mo",
        ),
        (
            "use_tis: true, tis: {mode: clip, upper_bound: 0.5}",
            "1/hi = 2: give tis.lower_bound, or raise the upper one",
        ),
        ("rs: {criteria: ['token:ratio']}", "rs criterion token_ratio has no upper bound and there is no TIS bound"),
        (f"{_BOTH}, tis: {{level: none}}, rs: {{criteria: ['token:ratio']}}", "there is no TIS bound to inherit"),
        ("use_tis: true, rs: {criteria: ['token:k2']}", "rs criterion token_k2 has no upper bound: give one"),
        ("rs: {criteria: ['token:ratio:3:2']}", "rs criterion token_ratio has lower bound 3 above upper bound 2: swap"),
        ("use_tis: true, rs: {criteria: [{lower_bound: 3}]}", "has lower bound 3 above upper bound 2: swap them."),
        ("rs: {criteria: ['token:ratio:2', 'token:k1:3']}", "rs.criteria names the same criterion twice (token_ratio,"),
        ("rs: {criteria: [ratio]}", "rs criterion 'ratio' cannot be read: write AGGREGATE:STATISTIC[:LOWER]:UPPER"),
        ("rs: {criteria: ['tokn:ratio:2']}", "rs criterion 'tokn:ratio:2', 'tokn' is unknown: did you mean token?"),
        ("rs: {criteria: ['token:k4:2']}", "rs criterion 'token:k4:2', 'k4' is unknown: there is ratio"),
        ("rs: {criteria: ['token:ratio:1_2']}", "a bound of rs criterion 'token:ratio:1_2' is '1_2', which is not a"),
    ],
)
def test_errors_of_combinations(settings: str, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        mp.MismatchConfig(**yaml.safe_load(f"{{{settings}}}"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tis": {"mode": "cap"}}, "tis.mode is 'cap': it should be 'truncate', 'clip', 'mask' or 'gamma'."),
        ({"tis": {"upper_bound": 0}}, "tis.upper_bound is 0: it should be greater than 0."),
        ({"tis": {"upper_bound": math.nan}}, "tis.upper_bound is nan: it should be greater than 0."),
        ({"tis": {"lower_bound": -1}}, "tis.lower_bound is -1: it should be greater than or equal to 0."),
        ({"rs": {"veto_threshold": 1}}, "rs.veto_threshold is 1: it should be less than 1."),
        ({"rs": {"veto_threshold": "low"}}, "rs.veto_threshold is 'low': it should be a valid number"),
        ({"rs": {"criteria": [{"upper_bound": 0}]}}, "rs.criteria.0.upper_bound is 0: it should be greater than 0."),
        ({"ppo": {"eps_clip_low": 1.5}}, "ppo.eps_clip_low is 1.5: it should be less than or equal to 1."),
        ({"ppo": {"dual_clip": 1}}, "ppo.dual_clip is 1: it should be greater than 1."),
        ({"terms": {"kl_coef": -1}}, "terms.kl_coef is -1: it should be greater than or equal to 0."),
        ({"length_norm": 0}, "length_norm is 0: it should be greater than or equal to 0.000001."),
        ({"tis": "clip"}, "tis is 'clip': it should be a valid dictionary"),
        ({"tis": {"mdoe": "clip"}}, "setting 'tis.mdoe' is unknown: did you mean tis.mode?"),
        ({"tis_mode": "clip"}, "setting 'tis_mode' is unknown: did you mean tis.mode?"),
        ({"rs": {"use": True}}, "setting 'rs.use' is unknown: there is rs.criteria, rs.veto_threshold, rs.policy,"),
        ({"tis": {"mode": "cap"}, "terms": {"kl_coef": -1}}, "or 'gamma'. terms.kl_coef is -1:"),
    ],
)
def test_errors_of_values_are_one_sentence_each(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        mp.MismatchConfig.build(settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError):
        mp.MismatchConfig(**settings)


def test_what_a_person_did_not_ask_for_is_warned_about_not_refused() -> None:
    settings = {"tis": {"mode": "clip"}, "dry_run": True}
    with pytest.warns(mp.MismatchWarning) as caught:
        config = mp.MismatchConfig.build(settings)
    assert config.tis.mode == "clip"
    assert [str(warning.message)[:14] for warning in caught] == ["tis.mode clip ", "dry_run has no"]
    with pytest.raises(ValueError, match="dry_run has nothing to try"):
        mp.MismatchConfig.build(settings, by_hand={"dry_run"})


@pytest.mark.parametrize("setting", ["batch_normalize: false", "lower_bound: null"])
def test_switching_off_what_is_off_is_no_mistake(setting: str, tmp_path: Path) -> None:
    assert mp.MismatchConfig.from_file(_file(tmp_path, f"tis: {{{setting}}}")) == mp.MismatchConfig()


# Files and layers -----------------------------------------------------------------------------------------------------


def test_a_yaml_file(tmp_path: Path) -> None:
    text = """
    use_tis: true
    tis: {mode: mask, level: geometric, lower_bound: 0.999, upper_bound: 1.001}
    rs: {criteria: ["sequence_max:k2:5e-1"], veto_threshold: 1e-4}   # YAML reads both numbers as strings
    terms: {entropy_coef: 1e-3}
    """
    config = mp.MismatchConfig.from_file(_file(tmp_path, text))
    assert (config.algorithm, config.tis.mode, config.tis.upper) == (2, "mask", 1.001)
    assert (config.rs.veto_threshold, config.terms.entropy_coef, config.criteria[0].upper_bound) == (1e-4, 1e-3, 0.5)


def test_a_json_file_and_a_round_trip(tmp_path: Path) -> None:
    first = _config(use_tis=True, tis={"mode": "clip", "lower_bound": 0.2}, rs={"criteria": ["token:k3:0.1"]})
    text = json.dumps(first.model_dump(exclude_defaults=True))
    assert mp.MismatchConfig.from_file(_file(tmp_path, text, "mismatch.json")) == first


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert mp.MismatchConfig.from_file(_file(tmp_path, "# nothing\n")) == mp.MismatchConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- use_tis", "holds a list, not a mapping of settings"),
        ("use_tis: [", "is not valid YAML or JSON"),
        ("tis_mode: clip", "is in slime's form: read it with mismatch_plugin.compat.from_slime"),
        ("use_rs: true", "is in slime's form"),
        ("rollout_is: token", "is in verl's form: read it with mismatch_plugin.compat.from_verl"),
        ("algorithm: {rollout_correction: {}}", "is in verl's form"),
        ("tis.mode: mask", "setting tis.mode is one key: nest it, tis: {mode: mask}."),
        ("use_tiss: true", "setting 'use_tiss' is unknown: did you mean use_tis"),
        ("preset: tokn_is", "preset 'tokn_is' is unknown"),
    ],
)
def test_errors_of_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        mp.MismatchConfig.from_file(_file(tmp_path, text))


def test_a_bare_off_of_yaml_is_off(tmp_path: Path) -> None:
    """YAML 1.1 reads it as false."""
    assert mp.MismatchConfig.from_file(_file(tmp_path, "metrics: off")).metrics == "off"
    with pytest.raises(ValueError, match="metrics is True: it should be 'off', 'basic' or 'full'"):
        mp.MismatchConfig.from_file(_file(tmp_path, "metrics: on"))


@pytest.mark.parametrize(
    ("flags", "file", "level", "upper", "mode"),
    [
        ("--mismatch-preset token_is", "", "token", 2.0, "truncate"),
        ("--mismatch-preset seq_is", "tis: {upper_bound: 5}", "sequence", 5.0, "truncate"),
        ("--mismatch-preset seq_is --tis-upper-bound 7", "tis: {upper_bound: 5, mode: clip}", "sequence", 7.0, "clip"),
        ("--tis-mode mask", "preset: seq_is\ntis: {upper_bound: 5, mode: clip}", "sequence", 5.0, "mask"),
        ("--mismatch-preset token_is", "preset: seq_is\ntis: {upper_bound: 5}", "token", 5.0, "truncate"),
        ("--use-tis --tis-level geometric", "tis: {upper_bound: 1.5}", "geometric", 1.5, "truncate"),
    ],
)
def test_flag_over_file_over_preset(flags: str, file: str, level: str, upper: float, mode: str, tmp_path: Path) -> None:
    parser = mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    namespace = parser.parse_args([*flags.split(), "--mismatch-config", str(_file(tmp_path, file))])
    tis = mp.MismatchConfig.from_args(namespace).tis
    assert (tis.level, tis.upper, tis.mode) == (level, upper, mode)


def test_a_preset_s_criteria_are_replaced_and_its_veto_stays(tmp_path: Path) -> None:
    config = mp.MismatchConfig.from_file(_file(tmp_path, "preset: geo_rs\nrs: {criteria: ['token:ratio:3']}"))
    assert [criterion.name for criterion in config.criteria] == ["token_ratio"]
    assert config.rs.veto_threshold == 1e-4


# Numbers as people write them -----------------------------------------------------------------------------------------


def test_numbers_bounds_and_switches() -> None:
    assert [number(value) for value in (2, 2.5, "1e-4", " 3 ", "inf")] == [2.0, 2.5, 1e-4, 3.0, math.inf]
    assert [bounds(value, "x") for value in (2, "2.0", "0.5_2.0", "1_2")] == [(None, 2), (None, 2), (0.5, 2), (1, 2)]
    assert [parse_bool(value, "x") for value in (None, 0, "False")] == [False] * 3
    assert [parse_bool(value, "x") for value in (1, True, "true")] == [True] * 3
    for wrong in (True, None, "1_2", "two", [2]):
        with pytest.raises(ValueError, match=r"x is .*, which is not a number: write one"):
            number(wrong, "x")


def test_an_upper_bound_below_one_needs_no_lower_bound_under_truncate() -> None:
    """1/hi would be above hi: the default lower bound, which bounds no weight there, is hi itself."""
    tis = mp.MismatchConfig.model_validate({"use_tis": True, "tis": {"upper_bound": 0.5}}).tis
    assert (tis.lower, tis.upper) == (0.5, 0.5)
    for given in ({"upper_bound": 0.5, "lower_bound": 0.1}, {"upper_bound": 0.5, "lower_bound": 0}, {"upper_bound": 1}):
        assert mp.MismatchConfig.build({"use_tis": True, "tis": {"mode": "mask", **given}}).tis.lower <= 1.0
    line = ["--use-tis", "--tis-mode", "mask", "--tis-upper-bound", "0.5"]
    typed = mp.add_arguments(argparse.ArgumentParser()).parse_args(line)
    with pytest.raises(ValueError, match=r"^--tis-upper-bound 0.5 is below .* --tis-mode mask .*: give --tis-lower"):
        mp.MismatchConfig.from_args(typed)


def test_a_preset_can_be_saved_as_a_file_and_read_again(tmp_path: Path) -> None:
    """A file that lists every setting asks for none of those at their defaults."""
    for name in ("token_is", "ppo_is_bypass", "pg_rs", "geo_rs", "token_icepop"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = mp.preset(name)
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
            assert mp.MismatchConfig.from_file(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("flag", ["--mismatch-config", "--mismatch-preset"])
def test_an_empty_preset_or_file_is_refused(flag: str) -> None:
    """`--mismatch-config "$UNSET"` must not train uncorrected."""
    parser = argparse.ArgumentParser()
    mp.add_arguments(parser)
    with pytest.raises(ValueError, match=f"{flag} is empty"):
        mp.MismatchConfig.from_args(parser.parse_args([flag, ""]))


def test_what_is_no_namespace_is_refused() -> None:
    """Nothing would be found in it, and the run would go uncorrected."""
    parser = mp.add_arguments(argparse.ArgumentParser())
    wrong: list[Any] = [vars(parser.parse_args(["--use-tis"])), ["--use-tis"], None]
    for given in wrong:
        with pytest.raises(TypeError, match=f"not a {type(given).__name__}: pass the Namespace itself"):
            mp.MismatchConfig.from_args(given)


def test_explain_only_prints_the_block_once_and_stops_every_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    mp.add_arguments(parser)
    for rank in (None, "0", "1"):
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            mp.MismatchConfig.from_args(parser.parse_args(["--use-tis", "--mismatch-explain-only"]))
        assert stop.value.code == 0
        assert ("algorithm 2: decoupled PPO" in capsys.readouterr().out) == (rank != "1")


@pytest.mark.parametrize("value", ["1_2", True, "two"])
@pytest.mark.parametrize("path", ["tis.upper_bound", "ppo.eps_clip_low", "length_norm"])
def test_what_is_no_number_is_refused(path: str, value: object) -> None:
    section, _, name = path.rpartition(".")
    data = {name: value} if not section else {section: {name: value}}
    with pytest.raises(ValueError, match="which is not a number"):
        mp.MismatchConfig.build({"use_tis": True, **data})


# Changing some settings -----------------------------------------------------------------------------------------------


def test_replace_changes_what_it_names_and_nothing_else() -> None:
    config = mp.preset("decoupled_seq_is_rs")
    changed = config.replace(tis={"upper_bound": 5.0}, metrics="full")
    assert (changed.tis.upper_bound, changed.tis.level, changed.metrics) == (5.0, "sequence", "full")
    assert changed.rs == config.rs and changed.algorithm == 2
    assert config.tis.upper_bound != 5.0, "the old one is frozen"
    assert changed.replace(tis={"upper_bound": config.tis.upper_bound}, metrics="basic") == config
    assert hash(changed.replace(metrics="full")) == hash(changed)
    whole = changed.replace(tis=ImportanceSampling(level="geometric"))
    assert (whole.tis.level, whole.tis.upper_bound) == ("geometric", 2.0)
    criteria = changed.replace(rs={"criteria": ["token:k2:0.5"]}).rs.criteria
    assert [criterion.name for criterion in criteria] == ["token_k2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tis": {"upper_bound": -1.0}}, r"tis.upper_bound is -1.0: it should be greater than 0"),
        ({"tis": {"uper_bound": 1.0}}, "setting tis.uper_bound 'uper_bound' is unknown|did you mean tis.upper_bound"),
        ({"tis": {"lower_bound": 0.5}}, "tis.lower_bound 0.5 bounds no weight under tis.mode truncate"),
        ({"tis.upper_bound": 1.0}, "nest it"),
        ({"tis": PPOClip()}, "tis is a PPOClip: give ImportanceSampling, or a dict of settings"),
    ],
)
def test_replace_validates(changes: dict[str, Any], message: str) -> None:
    for config in (mp.preset("token_is"), mp.MismatchConfig(use_tis=True)):
        with pytest.raises(ValueError, match=message):
            config.replace(**changes)


def test_what_was_given_by_hand_stays_by_hand_and_what_a_preset_brought_does_not() -> None:
    """Without weights batch normalisation means nothing: refused where a person asked for it, else a warning."""
    by_hand = mp.preset("token_is").replace(tis={"batch_normalize": True})
    for config in (by_hand, by_hand.replace(metrics="full"), mp.MismatchConfig(**by_hand.model_dump())):
        with pytest.raises(ValueError, match=r"tis.batch_normalize changes no weight without use_tis"):
            config.replace(use_tis=False)
    with pytest.warns(mp.MismatchWarning, match=r"tis.upper_bound 3 changes no weight without use_tis"):
        assert mp.preset("token_is", threshold=3.0).replace(use_tis=False).algorithm == 0


# Numbers that float32 cannot hold -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_tis": True, "tis": {"upper_bound": 1e-60}}, r"tis.upper_bound 1e-60 is below e\^-20"),
        ({"ppo": {"eps_clip_high": 1e60}}, r"ppo.eps_clip_high 1e\+60 is above e\^20"),
        ({"aggregation": "seq-mean-token-sum", "length_norm": 1e-60}, "length_norm is 1e-60: it should be"),
    ],
)
def test_bounds_that_would_fail_in_torch_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mp.MismatchConfig.build(settings)
    mp.MismatchConfig.build({"ppo": {"eps_clip_high": math.inf}, "tis": {"upper_bound": 2.1e-9}})


@pytest.mark.parametrize("name", ["tis_level", "rs_policy", "ppo_dual_clip", "terms_kl_coef"])
def test_a_setting_of_a_section_is_named_where_it_belongs(name: str) -> None:
    section, _, rest = name.partition("_")
    message = re.escape(f'setting {name} is one of a section: write {section}={{"{rest}": 1}}.')
    with pytest.raises(ValueError, match=message):
        mp.MismatchConfig.model_validate({name: 1})
    with pytest.raises(ValueError, match="Extra inputs"):
        mp.MismatchConfig.model_validate({"use_level": 1})


# Bounds of weights that do harm ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
@pytest.mark.parametrize(
    ("bound", "said"),
    [(0.5, "no weight reaches 1"), (0.99, "no weight reaches 1"), (1.0, ""), (100.0, ""), (101.0, "outweigh 100"),
     (math.inf, "outweigh 100")],
)  # fmt: skip
def test_an_upper_bound_below_1_or_above_100_is_warned_of(bound: float, said: str) -> None:
    found = bound_warnings(_config(use_tis=True, tis={"upper_bound": bound}))
    assert len(found) == bool(said) and all(said in sentence and f"bound {bound:g}:" in sentence for sentence in found)
    assert bound_warnings(mp.MismatchConfig.build({"tis": {"upper_bound": bound}})) == [], "no weight is bounded"


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
@pytest.mark.parametrize("level", ["turn", "sequence", "prefix", "geometric", "token"])
def test_a_product_whose_bound_cannot_hold_the_response_is_warned_of(level: Any) -> None:
    config = mp.MismatchConfig.build({"use_tis": True, "tis": {"level": level}})
    assert bound_warnings(config) == bound_warnings(config, 100) == []
    long = bound_warnings(config, 8192)
    if level in ("geometric", "token"):
        assert long == []
        return
    figures = "mean 0.3, ESS 23.5%" if level == "prefix" else "mean 0.06, ESS 4.5%"
    assert long == [
        f"--tis-level {level} over 8192 tokens: at KL 0.001 weights bounded by 2 have {figures}. Choose token level."
    ]
    assert bound_warnings(config, "8192") == bound_warnings(config, "${oc.env:LENGTH}") == [], "not known"
    assert bound_warnings(config.replace(tis={"mode": "clip"}), 8192) == [], "no weight is below 1/2"
    if level != "prefix":
        assert bound_warnings(config.replace(tis={"mode": "mask"}), 500), "what is outside is lost"
    assert bound_warnings(config, 10**7), "no overflow"
    grown = config.replace(tis={"upper_bound": 1.05, "bound_growth": 0.5})
    assert bound_warnings(grown, 400) == [] and "1.05^(n^0.5)" in bound_warnings(grown, 8192)[0]


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize(("level", "growth"), [("sequence", 0.0), ("prefix", 0.0), ("prefix", 0.2)])
def test_the_forecast_of_weights_is_that_of_drawn_ratios(level: Any, growth: float, mode: str) -> None:
    """Of 20,000 responses of 100 tokens at KL .006, l ~ Normal(−.006, .012); the mean's error is .004 at most."""
    tis = {"level": level, "mode": mode, "upper_bound": 1.5, "bound_growth": growth}
    drawn = numpy.random.default_rng(0).normal(-0.006, math.sqrt(0.012), (20_000, 100)).cumsum(1)
    high = math.log(1.5) * numpy.arange(1, 101) ** growth
    bounded = numpy.clip(drawn, -high if mode == "clip" else -math.inf, high)
    weights = numpy.where(abs(drawn) <= high, numpy.exp(drawn), 0.0) if mode == "mask" else numpy.exp(bounded)
    weights = weights if level == "prefix" else weights[:, -1]
    config = mp.MismatchConfig.build({"use_tis": True, "tis": tis})
    mean, ess = truncated_product(config, 100, kl=0.006)
    assert mean == pytest.approx(weights.mean(), abs=0.012)
    assert ess == pytest.approx(weights.mean() ** 2 / numpy.square(weights).mean(), abs=0.012)


def test_the_forecast_of_gamma_weights_is_that_of_drawn_ratios() -> None:
    """KL × tokens of 0.6; over 8,192 tokens at KL .001 hardly a weight is left, and that is said."""
    config = mp.preset("vespo")
    drawn = numpy.exp(numpy.random.default_rng(0).normal(-0.6, math.sqrt(1.2), 200_000))
    weights = drawn**2 * numpy.exp(3.0 * (1.0 - drawn))
    mean, ess = truncated_product(config, 100, kl=0.006)
    assert mean == pytest.approx(weights.mean(), abs=0.005)
    assert ess == pytest.approx(weights.mean() ** 2 / numpy.square(weights).mean(), abs=0.005)
    assert bound_warnings(config, 50) == []
    assert "weights of mode gamma have mean" in bound_warnings(config, 8192)[0]
