"""What the hosts share: wrapping a host's function once, finding it by name, settings from a door of one's own."""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.hooks.base import given_settings, wrap_once
from mismatch_plugin.hooks.hosts import HOSTS, find_host


def _doubled(own: Any, value: int) -> int:
    return 2 * own(value)


def _plus_ten(own: Any, value: int) -> int:
    return own(value) + 10


def test_a_function_is_wrapped_once_and_where_it_was_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    toy: Any = ModuleType("toy")
    user: Any = ModuleType("toy.user")
    other: Any = ModuleType("other")

    def own(value: int) -> int:
        return value

    for module in (toy, user, other):
        module.loss = own
        monkeypatch.setitem(sys.modules, module.__name__, module)
    wrap_once("toy", "loss", _doubled)
    assert (toy.loss(1), user.loss(1), other.loss is own, toy.loss.__name__) == (2, 2, True, "own")
    wrap_once("toy", "loss", _doubled)  # idempotent
    assert (toy.loss(1), user.loss is toy.loss) == (2, True)
    wrap_once("toy", "loss", _plus_ten)  # another one goes around it
    assert toy.loss(1) == 12

    ours = toy.loss

    @wraps(ours)  # the host's own decorator copies the mark of ours
    def traced(value: int) -> int:
        return -ours(value)

    toy.loss = traced
    wrap_once("toy", "loss", _plus_ten)
    assert toy.loss(1) == -12 + 10


def test_a_function_that_is_missing_may_be_wrapped() -> None:
    config = SimpleNamespace(finalize=None)
    wrap_once(config, "finalize", lambda own, model: (own, model))
    assert config.finalize("chunks") == (None, "chunks")


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_is_found_in_every_spelling(name: str) -> None:
    for spelling in (name, name.upper(), name.replace("-", "_"), *HOSTS[name].spellings):
        assert find_host(spelling).name == name
    with pytest.raises(ValueError, match=f"^host '{name}x' is unknown: did you mean {name}"):
        find_host(f"{name}x")


def test_settings_may_be_flags_a_mapping_a_file_or_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mismatch.yaml"
    path.write_text("use_tis: true\ntis: {level: sequence}\n")
    wanted = {"use_tis": True, "tis": {"level": "sequence"}}
    config = mp.MismatchConfig(**wanted)
    for given in ("--use-tis --tis-level sequence", wanted, str(path), config):
        ours, base = given_settings(given)
        assert ours == wanted and base in ({}, wanted)
    ours, base = given_settings({"preset": "token_is", "tis": {"upper_bound": 3.0}})
    assert (ours, base["use_tis"]) == ({"tis": {"upper_bound": 3.0}}, True)
    for given, message in (("--use-tsi", "--use-tsi is no flag"), ("nowhere.yaml", "nowhere.yaml does not exist")):
        with pytest.raises(ValueError, match=message):
            given_settings(given)
