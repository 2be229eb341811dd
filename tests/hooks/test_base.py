"""What the hosts share: wrapping a function once, settings from a door, versions, and the block on sampling filters."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.hooks.base import given_settings, read_version, version_line, wrap_once
from mismatch_plugin.hooks.hosts import HOSTS, SLIME, VERL
from tests.host_source import host_source


def test_a_function_is_wrapped_once_and_where_it_was_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, user, other = (ModuleType(name) for name in ("toy", "toy.user", "other"))

    def own(value: int) -> int:
        return value

    def doubled(own: Any, value: int) -> int:
        return 2 * own(value)

    for module in (toy, user, other):
        vars(module)["loss"] = own
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):  # idempotent
        wrap_once("toy", "loss", doubled)
        assert (toy.loss(1), user.loss(1), other.loss is own, toy.loss.__name__) == (2, 2, True, "own")
    ours = toy.loss

    @wraps(ours)  # the host's own decorator copies the mark of ours
    def traced(value: int) -> int:
        return -ours(value)

    vars(toy)["loss"] = traced
    wrap_once("toy", "loss", doubled)
    assert toy.loss(1) == -4
    config = SimpleNamespace(finalize=None)
    wrap_once(config, "finalize", lambda own, model: (own, model))
    assert config.finalize("chunks") == (None, "chunks")


def test_settings_may_be_flags_a_mapping_a_file_or_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mismatch.yaml"
    path.write_text("use_tis: true\ntis: {level: sequence}\n")
    wanted = {"use_tis": True, "tis": {"level": "sequence"}}
    for given in ("--use-tis --tis-level sequence", wanted, str(path), mp.MismatchConfig(**wanted)):
        ours, base = given_settings(given)
        assert ours == wanted and base in ({}, wanted)
    ours, base = given_settings({"preset": "token_is", "tis": {"upper_bound": 3.0}})
    assert (ours, base["use_tis"]) == ({"tis": {"upper_bound": 3.0}}, True)
    for given, message in (("--use-tsi", "--use-tsi is no flag"), ("nowhere.yaml", "nowhere.yaml does not exist")):
        with pytest.raises(ValueError, match=message):
            given_settings(given)


# Versions -------------------------------------------------------------------------------------------------------------


def _git(root: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
    return subprocess.run(["git", *name, *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("how", ["installed", "edited", "edited src"])
def test_the_line_says_whether_it_is_the_tested_version(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder that holds a distribution, and of checkouts that are installed to be edited."""
    checkout = tmp_path / "a tree"
    root = checkout / "src" if how == "edited src" else checkout
    (root / VERL.inside).mkdir(parents=True)
    unknown = "! host: verl of unknown version may not be the tested version, 0.9.1. Use"
    assert version_line(VERL, [root]).startswith(unknown)
    place = root if how == "installed" else tmp_path / "site"
    installed = place / "verl-0.3.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.3.0\n")
    if how != "installed":
        (installed / "direct_url.json").write_text(json.dumps({"url": checkout.as_uri()}))
    monkeypatch.syspath_prepend(str(place))
    tested = replace(VERL, version="0.3.0")  # a release: the number is enough
    assert version_line(tested, [tmp_path, root]) == "host: verl 0.3.0, the tested version"
    wanted = "! host: verl 0.3.0 is not the tested version, 0.9.1. Use that one, or look at"
    assert version_line(VERL, [root]).startswith(wanted)
    for words in (["init", "-q"], ["add", "."], ["commit", "--allow-empty", "-qm", "one"]):
        _git(checkout, *words)
    commit = _git(checkout, "rev-parse", "HEAD").strip()
    at = f"0.3.0 at {commit[:10]}"
    assert version_line(replace(VERL, version="x", commit=commit), [root]) == f"host: verl {at}, the tested version"
    other = replace(VERL, version="0.3.0", commit="fedcba9876543210")  # the same number by name only
    assert version_line(other, [root]).startswith(f"! host: verl {at} is not the tested version, 0.3.0 at fedcba9876. ")
    nowhere = replace(SLIME, inside="no_such_package/utils")
    assert version_line(nowhere).startswith("! host: slime is not found here: install it in this Python, or put its ch")


@pytest.mark.parametrize("name", [name for name, host in HOSTS.items() if host.commit])
def test_the_checkouts_that_the_tests_run_with_are_the_tested_ones(name: str) -> None:
    assert read_version(HOSTS[name], host_source(HOSTS[name].title))[1] == HOSTS[name].commit
