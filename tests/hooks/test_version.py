"""The start-up block names the host's version, and says where it is not the one that the tests ran with."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.hooks import megatron_rl
from mismatch_plugin.hooks.base import find_host
from mismatch_plugin.hooks.version import (
    HOSTS,
    HostVersion,
    compared,
    find_root,
    manifest,
    megatron_core_version,
    read_version,
    recorded_version,
    validate_megatron_version,
    version_line,
)
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.launch_trees import megatron_core, megatron_tree, ray_tree

_FOLDERS = {"slime": "slime", "miles": "miles", "megatron-lm": "Megatron-LM", "nemo-rl": "NeMo-RL"}
_SHA, _OTHER = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"
# Name of the file that declares a host's version → what stands in it.
_DECLARED = {
    "setup.py": 'from setuptools import setup\n\nsetup(\n    name="slime",\n    version="0.3.0",\n)\n',
    "package_info.py": "MAJOR = 0\nMINOR = 3\nPATCH = 0\nPRE_RELEASE = ''\n",
    "version": "0.3.0\n",
}


def _tree(root: Path, host: str) -> Path:
    file = find_host(host).version_file
    text = _DECLARED[Path(file).name]
    (root / find_host(host).inside).mkdir(parents=True)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    return root


@pytest.mark.parametrize("host", HOSTS)
def test_the_version_that_a_tree_declares(host: str, tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", host)
    assert find_root(host, [tmp_path, root]) == root
    found = read_version(host, root)
    assert (found.version, found.commit) == ("0.3.0", None)
    assert set(found.odd_files) == ({patch["file"] for patch in _patches(host)})  # none of them is there


@pytest.mark.parametrize("text", ["", "no version", "version = 3\n", "\x00"])
def test_a_version_that_cannot_be_read_is_unknown(text: str, tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "slime")
    (root / "setup.py").write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)  # no commit yet
    assert str(read_version("slime", root)) == "of unknown version"


def test_the_commit_of_a_checkout_is_what_git_says(tmp_path: Path) -> None:
    """With the branch in a file of its own, packed, in a work tree, and with none."""
    root, side = _tree(tmp_path / "tree", "verl"), tmp_path / "side"

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
        return subprocess.run(["git", *name, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    for command in ("pack-refs --all", f"worktree add -q -b two {side}", "checkout -q --detach", "status"):
        assert str(read_version("verl", root)) == f"0.3.0 at {commit[:10]}"
        git(*command.split())
    assert read_version("verl", side).commit == commit


_TESTED = HostVersion("0.3.1", _SHA)


@pytest.mark.parametrize(
    ("found", "tested", "said"),
    [
        (HostVersion("0.3.1", _SHA), _TESTED, "0.3.1 at 0123456789, the tested version"),
        (HostVersion("0.3.1", None), _TESTED, "0.3.1, the tested version"),  # installed from a wheel, files as recorded
        (
            HostVersion("0.3.1", _SHA, ("a.py",)),
            _TESTED,
            "0.3.1 at 0123456789, the tested version, with changes of its own in a.py",
        ),
        (
            HostVersion("0.3.0", _OTHER, ("a.py", "b.py")),
            _TESTED,
            "0.3.0 at fedcba9876 is not the tested version, 0.3.1 at 0123456789; files that differ: a.py, b.py. Use",
        ),
        # The same number by name only: the commit, or the files, are others.
        (HostVersion("0.3.1", _OTHER), _TESTED, "0.3.1 at fedcba9876 is not the tested version, 0.3.1 at 0123456789. "),
        (
            HostVersion("0.3.1", None, ("a.py",)),
            _TESTED,
            "0.3.1 (commit unknown) is not the tested version, 0.3.1 at",
        ),
        (HostVersion(None, None), _TESTED, "of unknown version is not the tested version"),
        (HostVersion("0.9.1", _OTHER), HostVersion("0.9.1", None), "0.9.1 at fedcba9876, the tested version"),
        (HostVersion("1.0", None), HostVersion(None, None), "1.0; no version of it is recorded as tested"),
        (HostVersion("0.9.2", None), HostVersion("0.9.1", None), "0.9.2 is not the tested version, 0.9.1. Use that"),
    ],
)
def test_what_is_said(found: HostVersion, tested: HostVersion, said: str) -> None:
    line = compared(found, tested)
    assert line.startswith(said) and ("Use that one, or look at" in line) == ("is not the tested" in line)


def _patches(host: str) -> list[dict[str, Any]]:
    return [entry for entry in manifest()["patches"] if entry["host"] == host]


@pytest.mark.parametrize("host", HOSTS)
def test_the_tested_commit_is_that_of_the_patches(host: str) -> None:
    tested = manifest()["tested"].get(host, {})
    for patch in _patches(host):
        assert (patch["commit"], patch["repository"]) == (tested["commit"], tested["repository"])


@pytest.mark.parametrize("host", ["slime", "megatron-lm"])
def test_the_launcher_s_block_says_it(host: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    script = megatron_tree(tree) if host == "megatron-lm" else ray_tree(tree, host)
    (tree / ".git").mkdir()
    (tree / ".git" / "HEAD").write_text(f"{_SHA}\n")
    _, _, _, plan = prepare([str(script), "--use-tis"])
    tested = recorded_version(host)
    version = "0.20.0" if host == "megatron-lm" else "of unknown version"
    assert plan.lines[
        -2
    ].startswith(  # the last says what is added
        f"! host: {host} {version} at {_SHA[:10]} is not the tested version, {tested}; files"
    )
    _, _, _, untouched = prepare([str(script)])
    assert not any(line.startswith(("host: ", "! host: ")) for line in untouched.lines)


def test_the_block_of_a_patched_megatron_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    megatron_rl.start(Namespace(use_tis=True, rl_inference_logprobs_is_correction=True))
    assert "host: megatron-lm " in capsys.readouterr().out


def test_a_host_that_is_not_here(tmp_path: Path) -> None:
    if find_root("nemo-rl") is None:
        said = f"! host: nemo-rl is not found here; the plugin was tested with {recorded_version('nemo-rl')}"
        assert version_line("nemo-rl", [tmp_path]) == said


def test_no_host_is_imported(tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "slime")
    (root / "slime" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    code = "from mismatch_plugin.hooks.version import version_line; print(version_line('slime'))"
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("! host: slime 0.3.0 is not the tested version"), done.stderr


@pytest.mark.parametrize("host", _FOLDERS)
def test_the_checkouts_that_the_tests_run_with_are_the_tested_ones(host: str) -> None:
    root = Path(os.environ.get("MISMATCH_HOST_SRC") or "", _FOLDERS[host])
    if "MISMATCH_HOST_SRC" not in os.environ or not (root / ".git").exists():
        pytest.skip("NOT RUN (host source absent)")
    found, tested = read_version(host, root), recorded_version(host)
    assert (found.version, found.commit) == (tested.version, tested.commit)


# Megatron's version ---------------------------------------------------------------------------------------------------


def test_the_megatron_core_that_will_be_imported_is_that_of_the_script_s_folder(tmp_path: Path) -> None:
    megatron_core(tmp_path, (0, 12))
    assert megatron_core_version([tmp_path]) == "0.12.0"
    validate_megatron_version()  # the tests run with a megatron-core that is new enough, or with none


@pytest.mark.parametrize("version", [(0, 12), (0, 15)])
def test_an_old_megatron_is_refused_before_the_script_runs(version: tuple[int, int], tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime", megatron=version)
    with pytest.raises(ValueError, match=rf"megatron-core {version[0]}\.{version[1]}\.0 is too old: .* 0\.16 or newer"):
        prepare([str(script), "--use-tis"])
    assert prepare([str(script)])[3].added == ()  # nothing of ours, nothing to refuse
