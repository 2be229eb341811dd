"""The argparse group, generated from the settings: every flag is there once, and what was typed is read."""

from __future__ import annotations

import argparse
from typing import Any, Literal, get_args, get_origin

import pytest

import mismatch_plugin as mp
from mismatch_plugin.config.fields import FieldInfo, leaf_fields
from mismatch_plugin.config.flags import given_flags

MORE = ("--use-rs", "--rs-level", "--rs-lower-bound", "--rs-upper-bound", "--mismatch-preset", "--mismatch-config")
EXPLAIN = "--mismatch-explain-only"
LEAVES = leaf_fields(mp.MismatchConfig)


def parser_of(**kwargs: Any) -> argparse.ArgumentParser:
    return mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False, **kwargs))


def options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def typed(leaf: FieldInfo) -> tuple[list[str], Any]:
    """Words behind the leaf's flag, and the value that they give it."""
    kinds = (leaf.annotation, *get_args(leaf.annotation))
    if leaf.path == "rs.criteria":
        return ["token:k2:1"], ["token:k2:1"]
    if leaf.annotation is bool:
        return [], True
    if int in kinds:
        return ["3"], 3
    if float in kinds:
        return ["0.5"], 0.5
    if get_origin(leaf.annotation) is Literal:
        return [get_args(leaf.annotation)[-1]], get_args(leaf.annotation)[-1]
    return ["out"], "out"


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_every_setting_has_a_flag_in_all_spellings(leaf: FieldInfo) -> None:
    """With its description in --help, listed with dashes and taken with underscores; a zero is given, too."""
    parser, (words, value) = parser_of(), typed(leaf)
    assert leaf.description
    assert leaf.meta["flag"].startswith(("--use-", "--rollout-", "--tis-", "--rs-", "--mismatch-"))
    section, _, name = leaf.path.rpartition(".")
    expected = {section: {name: value}} if section else {name: value}
    spellings = [leaf.meta["flag"], f"--{leaf.meta['flag'][2:].replace('-', '_')}", *leaf.meta["aliases"]]
    for spelling in spellings:
        assert options(parser).count(spelling) == 1
        assert given_flags(parser.parse_args([spelling, *words])) == expected
    if value == 0.5:
        zero = given_flags(parser.parse_args([spellings[0], "0"]))
        assert zero == ({section: {name: 0.0}} if section else {name: 0.0})


def test_the_flags_are_one_group_of_which_nothing_is_given_by_default() -> None:
    parser = parser_of(prog="train")
    before, text = options(parser), parser.format_help()  # would raise on a stray % in a description
    assert {*MORE, EXPLAIN} <= {*before} and len(before) == len({*before})
    assert text.count("training-inference mismatch:") == 1 and text.count("--use_") == 1, "--use_rollout_log_probs"
    (group,) = [group for group in parser._action_groups if group.title == "training-inference mismatch"]
    assert all(action.help for action in group._group_actions)
    assert before.index("--use-rs") < before.index("--rs-upper-bound") < before.index("--rs-criterion")
    assert mp.add_arguments(parser) is parser and options(parser) == before, "twice adds once"
    namespace = parser.parse_args([])
    assert set(vars(namespace).values()) == {None} and given_flags(namespace) == {}
    assert mp.MismatchConfig.from_args(namespace) == mp.MismatchConfig()
    assert given_flags(parser.parse_args([EXPLAIN])) == {}


def test_what_was_typed_is_nested_and_what_yaml_leaves_on_a_namespace_is_read() -> None:
    line = "--use-tis --rs-criterion token:k3:1 --rs_criterion token:k2:1 --mismatch-preset token_is"
    assert given_flags(parser_of().parse_args([*line.split(), "--mismatch-config", "a.yaml"])) == {
        "use_tis": True,
        "rs": {"criteria": ["token:k3:1", "token:k2:1"]},
        "preset": "token_is",
        "config": "a.yaml",
    }
    namespace = argparse.Namespace(mismatch_metrics=False, mismatch_dry_run=False, rs_criterion="token:k2:0.5")
    assert given_flags(namespace) == {"metrics": False, "rs": {"criteria": ["token:k2:0.5"]}}
    assert mp.MismatchConfig.from_args(namespace).metrics == "off"
    with pytest.raises(ValueError, match="--tis-level is False: it should be 'token', 'turn'"):
        mp.MismatchConfig.from_args(argparse.Namespace(use_tis=True, tis_level=False))


@pytest.mark.parametrize("flag", ["--mismatch-config", "--mismatch-preset"])
def test_an_empty_preset_or_file_is_refused(flag: str) -> None:
    """`--mismatch-config "$UNSET"` must not train uncorrected."""
    with pytest.raises(ValueError, match=f"{flag} is empty"):
        mp.MismatchConfig.from_args(parser_of().parse_args([flag, ""]))


# A parser that has flags already --------------------------------------------------------------------------------------


def slime_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Some of the flags that slime defines itself, with slime's defaults."""
    for flag in ("--use-rollout-logprobs", "--use-tis", "--calculate-per-token-loss"):
        parser.add_argument(flag, action="store_true", default=False)
    parser.add_argument("--tis-clip", type=float, default=2.0)
    return parser


@pytest.mark.parametrize("spelling", ["--use-rollout-log-probs", "--use_rollout_log_probs", "--use-rollout-logprobs"])
def test_a_host_s_flags_stay_the_host_s_and_every_spelling_is_one_destination(spelling: str) -> None:
    namespace = parser_of().parse_args([spelling])
    assert namespace.use_rollout_log_probs is True and not hasattr(namespace, "use_rollout_logprobs")
    parser = mp.add_arguments(slime_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    assert len(options(parser)) == len({*options(parser)})
    assert given_flags(parser.parse_args([])) == {}, "a host's False is not given, nor are its defaults ours"
    namespace = parser.parse_args([spelling, "--use_tis", "--tis-level", "sequence"])
    assert (namespace.use_rollout_logprobs, namespace.use_tis, namespace.tis_clip) == (True, True, 2.0)
    assert not hasattr(namespace, "use_rollout_log_probs")
    assert mp.MismatchConfig.from_args(namespace).algorithm == 3


def test_a_destination_that_exists_is_shared_and_one_that_nothing_reads_is_refused() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--importance-mode", dest="tis_mode", choices=["clip", "mask"])
    mp.add_arguments(parser)
    for flag in ("--importance-mode", "--tis-mode"):
        assert mp.MismatchConfig.from_args(parser.parse_args(["--use-tis", flag, "clip"])).tis.mode == "clip"
    parser = argparse.ArgumentParser()
    parser.add_argument("--tis-mode", dest="mode")
    with pytest.raises(ValueError, match="keeps --tis-mode under 'mode', where it would not be found: keep it under"):
        mp.add_arguments(parser)
