"""The argparse group: every flag is there, none is defined twice, and what was typed becomes the configuration."""

from __future__ import annotations

import argparse
import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.config.flags import given_flags

_FLAGS = (
    "use-rollout-log-probs use-rollout-logprobs use-tis tis-mode tis-level tis-lower-bound tis-upper-bound "
    "tis-batch-normalize tis-batch-normalize-scope use-rs rs-level rs-lower-bound rs-upper-bound rs-criterion "
    "rs-veto-threshold mismatch-denominator mismatch-aggregation mismatch-metrics mismatch-dry-run mismatch-preset "
    "mismatch-config rollout-log-prob-policy mismatch-eps-clip-low mismatch-eps-clip-high mismatch-dual-clip "
    "mismatch-entropy-coef mismatch-kl-coef mismatch-kl-type mismatch-report-dir mismatch-explain-only "
    "mismatch-gate-kl"
)


def _parser(**kwargs: Any) -> argparse.ArgumentParser:
    return mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False, **kwargs))


def _config(line: str, parser: argparse.ArgumentParser | None = None) -> mp.MismatchConfig:
    return mp.MismatchConfig.from_args((parser or _parser()).parse_args(line.split()))


def _slime_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags about the loss that slime defines itself, with slime's defaults."""
    for flag in ("--use-rollout-logprobs", "--use-tis", "--use-kl-loss", "--calculate-per-token-loss"):
        parser.add_argument(flag, action="store_true", default=False)
    for flag, default in {"--tis-clip": 2.0, "--tis-clip-low": 0, "--eps-clip": 0.2, "--eps-clip-high": None}.items():
        parser.add_argument(flag, type=float, default=default)
    for flag, default in {"--eps-clip-c": None, "--entropy-coef": 0.0, "--kl-loss-coef": 0.0}.items():
        parser.add_argument(flag, type=float, default=default)
    parser.add_argument("--kl-loss-type", choices=["k1", "k2", "k3", "low_var_kl"], default="k1")


@pytest.fixture
def slime() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    _slime_arguments(parser)
    return mp.add_arguments(parser)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


# The group ------------------------------------------------------------------------------------------------------------


def test_every_flag_exists_once() -> None:
    options = _options(_parser())
    assert {f"--{name}" for name in _FLAGS.split()} <= set(options)
    assert len(options) == len(set(options))


def test_every_flag_is_taken_with_underscores_and_listed_with_dashes() -> None:
    parser = _parser()
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    listed = [option for action in shown for option in action.option_strings if option.startswith("--")]
    for flag in listed:
        assert f"--{flag[2:].replace('-', '_')}" in _options(parser)
    assert [flag for flag in listed if "_" in flag] == ["--use_rollout_log_probs"]
    dashes = "--use-tis --tis-mode mask --tis-upper-bound 3 --rs-criterion token:k2:1 --rs-criterion token:k3:1"
    assert _config(dashes.replace("-", "_").replace("__", "--")) == _config(dashes)
    both = _config("--use-tis --rs-criterion token:k2:1 --rs_criterion token:k3:1")
    assert [criterion.name for criterion in both.criteria] == ["token_k2", "token_k3"]


def test_nothing_is_given_by_default() -> None:
    namespace = _parser().parse_args([])
    assert set(vars(namespace).values()) == {None}
    assert given_flags(namespace) == {}
    assert mp.MismatchConfig.from_args(namespace) == mp.MismatchConfig()


def test_the_flags_are_one_group_with_help() -> None:
    text = _parser(prog="train").format_help()  # would raise on a stray % in a description
    assert text.count("training-inference mismatch:") == 1
    groups = [group for group in _parser()._action_groups if group.title == "training-inference mismatch"]
    assert len(groups) == 1
    assert all(action.help for action in groups[0]._group_actions)


def test_adding_twice_adds_once() -> None:
    parser = _parser()
    before = _options(parser)
    assert mp.add_arguments(parser) is parser
    assert _options(parser) == before


@pytest.mark.parametrize(
    "line", ["--tis-mode cap", "--tis-upper-bound two", "--tis-upper-bound 1_2", "--rs-level none"]
)
def test_values_that_are_none_are_refused_by_the_parser(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(line.split())
    assert f"argument {line.split()[0]}: invalid" in capsys.readouterr().err


# A parser that has flags already --------------------------------------------------------------------------------------


def test_slime_s_flags_stay_slime_s(slime: argparse.ArgumentParser) -> None:
    options = _options(slime)
    assert len(options) == len(set(options))
    assert {f"--{name}" for name in _FLAGS.split()} <= set(options)
    assert slime.parse_args(["--use_tis"]).use_tis is True
    namespace = slime.parse_args([])
    assert (namespace.use_tis, namespace.use_rollout_logprobs, namespace.tis_clip) == (False, False, 2.0)
    assert not hasattr(namespace, "use_rollout_log_probs")
    assert given_flags(namespace) == {}  # a host's False is not given, nor are its defaults ours


@pytest.mark.parametrize("spelling", ["--use-rollout-log-probs", "--use_rollout_log_probs", "--use-rollout-logprobs"])
def test_every_spelling_is_one_destination_ours_or_slime_s(spelling: str, slime: argparse.ArgumentParser) -> None:
    namespace = _parser().parse_args([spelling])
    assert namespace.use_rollout_log_probs is True
    assert not hasattr(namespace, "use_rollout_logprobs")
    assert mp.MismatchConfig.from_args(namespace).algorithm == 1
    namespace = slime.parse_args([spelling, "--use-tis", "--tis-level", "sequence"])
    assert (namespace.use_rollout_logprobs, namespace.use_tis) == (True, True)
    assert mp.MismatchConfig.from_args(namespace).algorithm == 3


def test_flags_that_a_host_will_define_later_can_be_reserved() -> None:
    """slime adds its own flags after a plugin's, with plain add_argument: a second definition would raise."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    mp.add_arguments(parser, reserved={"--use-tis": "use_tis", "--use-rollout-logprobs": "use_rollout_logprobs"})
    _slime_arguments(parser)
    assert _config("", parser).algorithm == 0
    assert _config("--use-tis", parser).algorithm == 2
    assert _config("--use-rollout-log-probs", parser).algorithm == 1
    assert _config("--use-rollout-logprobs", parser).algorithm == 1
    for words, value in (([], False), (["--use_tis", "--use_rollout_logprobs"], True)):
        namespace = parser.parse_args(words)
        assert (namespace.use_tis, namespace.use_rollout_logprobs) == (value, value)


def test_a_destination_that_exists_is_shared() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--importance-mode", dest="tis_mode", choices=["clip", "mask"])
    mp.add_arguments(parser)
    assert _config("--use-tis --importance-mode mask", parser).tis.mode == "mask"
    assert _config("--use-tis --tis-mode clip", parser).tis.mode == "clip"


def test_a_flag_kept_where_nothing_reads_it_is_refused() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tis-mode", dest="mode")
    with pytest.raises(
        ValueError, match="keeps --tis-mode under 'mode', where it would not be found: keep it under 'tis_m"
    ):
        mp.add_arguments(parser)


# What was typed -------------------------------------------------------------------------------------------------------


def test_given_flags_are_nested_and_only_what_was_typed() -> None:
    line = "--use-tis --tis-mode clip --tis-lower-bound 0.3 --rs-veto-threshold 1e-4 --mismatch-preset token_is"
    assert given_flags(_parser().parse_args([*line.split(), "--mismatch-config", "a.yaml"])) == {
        "use_tis": True,
        "tis": {"mode": "clip", "lower_bound": 0.3},
        "rs": {"veto_threshold": 1e-4},
        "preset": "token_is",
        "config": "a.yaml",
    }


def test_a_zero_is_given() -> None:
    namespace = _parser().parse_args(["--tis-lower-bound", "0", "--mismatch-eps-clip-low", "0"])
    assert given_flags(namespace) == {"tis": {"lower_bound": 0.0}, "ppo": {"eps_clip_low": 0.0}}


def test_what_yaml_leaves_on_a_namespace_is_read() -> None:
    """A bare off is false to YAML, and one criterion may be a plain string."""
    namespace = argparse.Namespace(mismatch_metrics=False, mismatch_dry_run=False, rs_criterion="token:k2:0.5")
    assert given_flags(namespace) == {"metrics": False, "rs": {"criteria": ["token:k2:0.5"]}}
    assert mp.MismatchConfig.from_args(namespace).metrics == "off"
    with pytest.raises(ValueError, match="--tis-level is False: it should be 'token', 'turn'"):
        mp.MismatchConfig.from_args(argparse.Namespace(use_tis=True, tis_level=False))


def test_explain_only_is_no_setting() -> None:
    namespace = _parser().parse_args(["--mismatch-explain-only"])
    assert namespace.mismatch_explain_only is True
    assert given_flags(namespace) == {}


def test_every_setting_makes_the_round_trip() -> None:
    config = _config(
        "--use-tis --tis-mode clip --tis-level sequence --tis-lower-bound 0.25 --tis-upper-bound 3 "
        "--tis-batch-normalize --tis-batch-normalize-scope micro_batch --rs-criterion sequence_max:k2:0.5 "
        "--rs-criterion token:ratio:0.1:9 --rs-veto-threshold 1e-4 --mismatch-eps-clip-low 0.1 "
        "--mismatch-eps-clip-high 0.3 --mismatch-dual-clip 3 --mismatch-entropy-coef 0.01 --mismatch-kl-coef 0.02 "
        "--mismatch-kl-type k1 --mismatch-kl-importance-weighted --mismatch-denominator original "
        "--mismatch-aggregation seq-mean-token-sum --mismatch-length-norm 512 --rollout-log-prob-policy neutral "
        "--mismatch-metrics full --mismatch-dry-run --mismatch-report-dir out --mismatch-gate-kl 1e-3"
    )
    tis = {"mode": "clip", "level": "sequence", "lower_bound": 0.25, "upper_bound": 3.0, "batch_normalize": True}
    assert config == mp.MismatchConfig.model_validate(
        {
            "use_tis": True,
            "tis": tis | {"batch_normalize_scope": "micro_batch"},
            "rs": {"criteria": ["sequence_max:k2:0.5", "token:ratio:0.1:9"], "veto_threshold": 1e-4},
            "ppo": {"eps_clip_low": 0.1, "eps_clip_high": 0.3, "dual_clip": 3.0},
            "terms": {"entropy_coef": 0.01, "kl_coef": 0.02, "kl_type": "k1", "kl_importance_weighted": True},
            "denominator": "original",
            "aggregation": "seq-mean-token-sum",
            "length_norm": 512,
            "rollout_log_prob_policy": "neutral",
            "metrics": "full",
            "dry_run": True,
            "report_dir": "out",
            "gate_kl": 1e-3,
        }
    )
    assert len(config.model_dump(exclude_defaults=True)) == 13  # all but use_rollout_log_probs differ from the default


@pytest.mark.parametrize(
    ("line", "aggregate", "lower", "upper"),
    [
        ("--use-rs --rs-upper-bound 4", "token", 0.25, 4.0),
        ("--use-rs --rs-level sequence --rs-upper-bound 4 --rs-lower-bound 0", "sequence_sum", 0.0, 4.0),
        ("--use-rs --rs-level geometric --rs-lower-bound 0.9 --rs-upper-bound 1.05", "sequence_mean", 0.9, 1.05),
        ("--use-tis --tis-upper-bound 5 --use-rs", "token", 0.2, 5.0),
        ("--use-tis --tis-upper-bound 5 --use-rs --rs-lower-bound 0.1", "token", 0.1, 5.0),
        ("--use-rs --rs-upper-bound inf --rs-lower-bound 0.5", "token", 0.5, math.inf),
    ],
)
def test_rejection_flags_are_one_criterion_of_the_ratio(line: str, aggregate: str, lower: float, upper: float) -> None:
    (criterion,) = _config(line).criteria
    assert (criterion.statistic, criterion.aggregate) == ("ratio", aggregate)
    assert (criterion.lower_bound, criterion.upper_bound) == (lower, upper)


def test_criteria_stand_beside_the_rejection_flags_and_alone() -> None:
    both = _config("--rs-criterion token:k2:0.5 --use-rs --rs-upper-bound 2")
    assert [criterion.name for criterion in both.criteria] == ["token_k2", "token_ratio"]
    alone = _config("--rs-criterion token:k2:0.5 --rs-veto-threshold 1e-4")
    assert (alone.algorithm, alone.criteria[0].name, alone.rs.veto_threshold) == (0, "token_k2", 1e-4)


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--mismatch-metrics off --mismatch-gate-kl 1e-3",
            "--mismatch-gate-kl 0.001 compares k3_kl, which --mismatch-metrics off does not form: choose basic, or "
            "leave the gate out.",
        ),
        ("--mismatch-gate-kl 0", "--mismatch-gate-kl is 0.0: it should be greater than 0."),
        ("--mismatch-gate-kl -1", "--mismatch-gate-kl is -1.0: it should be greater than 0."),
        ("--mismatch-gate-kl nan", "--mismatch-gate-kl is nan: it should be greater than 0."),
        ("--tis-mode clip", "--tis-mode clip changes no weight without --use-tis: add --use-tis, or leave it out."),
        ("--tis-mode truncate", "--tis-mode truncate changes no weight without --use-tis"),  # the default, but typed
        ("--mismatch-preset pg_rs --tis-upper-bound 3", "--tis-upper-bound 3 changes nothing at --tis-level none"),
        (
            "--use-tis --tis-level none",
            "--tis-level none is REINFORCE with rejection only: it needs --use-rollout-log-probs",
        ),
        ("--mismatch-kl-type k1", "--mismatch-kl-type k1 changes nothing without --mismatch-kl-coef"),
        ("--rs-level sequence", "--rs-level sequence rejects nothing without --use-rs: add --use-rs, or leave it out."),
        ("--rs-upper-bound 2", "--rs-upper-bound 2.0 rejects nothing without --use-rs"),
        ("--rs-lower-bound 0", "--rs-lower-bound 0.0 rejects nothing without --use-rs"),
        ("--use-rs", "rs criterion token_ratio has no upper bound and there is no TIS bound to inherit: give it one ("),
        ("--use-rs --rs-upper-bound 0", "--rs-upper-bound is 0.0: it should be greater than 0."),
        ("--rs-criterion token:ratio:0", "--rs-criterion's upper_bound is 0.0: it should be greater than 0."),
        ("--rs-criterion token:ratios:2", "'ratios' is unknown: did you mean ratio?"),
        ("--use-tis --tis-upper-bound 0", "--tis-upper-bound is 0.0: it should be greater than 0."),
        (
            "--use-tis --tis-mode clip --tis-lower-bound 3",
            "--tis-lower-bound 3 is above --tis-upper-bound 2: lower it, or raise the other.",
        ),
        ("--rs-veto-threshold 2", "--rs-veto-threshold is 2.0: it should be less than 1."),
        ("--mismatch-preset tokenis", "preset 'tokenis' is unknown: did you mean token_is"),
        ("--mismatch-config nowhere.yaml", "configuration file nowhere.yaml does not exist: check the path given."),
    ],
)
def test_refused_with_a_sentence_that_names_the_flag(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        _config(line)
    assert "\n" not in str(caught.value)


def test_a_setting_of_the_file_is_named_as_a_field_beside_flags(tmp_path: Any) -> None:
    path = tmp_path / "mismatch.yaml"
    path.write_text("tis: {mode: clip}", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"^tis\.mode clip changes no weight without use_tis: add use_tis, or leave it out"
    ):
        _config(f"--mismatch-config {path} --mismatch-metrics full")


def test_what_a_preset_brings_without_effect_is_warned_about() -> None:
    with pytest.warns(mp.MismatchWarning, match=r"tis\.lower_bound 0\.5 bounds no weight under tis\.mode truncate"):
        config = _config("--mismatch-preset token_icepop --tis-mode truncate")
    assert (config.tis.mode, config.tis.upper) == ("truncate", 5.0)


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*Path(mp.__file__).parent.rglob("*.py")], ids=lambda path: path.name)
def test_messages_spell_flags_with_their_dashes(path: Path) -> None:
    names = "|".join(sorted(_FLAGS.split(), key=len, reverse=True))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.search(rf"(?<![-\w.])(?:{names}|(?:tis|rs|mismatch)-$)", node.value)
            assert found is None, f"line {node.lineno}: {found[0]} is no flag, --{found[0]} is"
