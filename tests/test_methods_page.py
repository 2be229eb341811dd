"""docs/methods.md: its flags are taken, and give what the page says."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import pytest

import mismatch_plugin as mp
from ci.methods import EQUALITIES, METHODS, Equality, Method


def _config(flags: str) -> mp.MismatchConfig:
    parser = mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return mp.MismatchConfig.from_args(parser.parse_args(flags.split()))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_flags_of_a_method_are_taken(method: Method) -> None:
    assert (_config(method.flags) == mp.MismatchConfig()) == (method.flags == "")


def test_no_two_methods_are_the_same_setting() -> None:
    configs = [_config(method.flags) for method in METHODS if method.flags]
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("equality", EQUALITIES, ids=lambda equality: f"{equality.method}, {equality.equals}")
def test_the_test_of_an_equality_is_there(equality: Equality) -> None:
    file, name = equality.test.split("::")
    assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
