"""Which version of a host is here: read from its files, the commit from git, and compared with the tested one."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_plugin.hooks import megatron_rl
from mismatch_plugin.hooks.hosts import HOSTS, SLIME, VERL
from mismatch_plugin.hooks.version import read_version, validate_megatron_version, version_line
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.launch_trees import megatron_tree, ray_tree

_OTHER = "fedcba9876543210fedcba9876543210fedcba98"
# Name of the file that declares a host's version → what stands in it.
_DECLARED = {
    "setup.py": 'from setuptools import setup\n\nsetup(\n    name="slime",\n    version="0.3.0",\n)\n',
    "package_info.py": "MAJOR = 0\nMINOR = 3\nPATCH = 0\nPRE_RELEASE = ''\n",
    "version": "0.3.0\n",
    "pyproject.toml": '[project]\nname = "x"\nversion = "0.3.0"\n',
    "__init__.py": '__version__ = "0.3.0"\n',
    "VERSION": "0.3.0\n",
}


def _tree(root: Path, name: str) -> Path:
    host = HOSTS[name]
    (root / host.inside).mkdir(parents=True)
    (root / host.version_file).parent.mkdir(parents=True, exist_ok=True)
    (root / host.version_file).write_text(_DECLARED[Path(host.version_file).name])
    return root


def _git(root: Path, *arguments: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
    return subprocess.run(["git", *name, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def _commit(root: Path) -> str:
    _git(root, "init", "-q")
    _git(root, "add", ".")
    _git(root, "commit", "-qm", "one")
    return _git(root, "rev-parse", "HEAD").strip()


@pytest.mark.parametrize("name", HOSTS)
def test_the_version_that_a_tree_declares(name: str, tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", name)
    found = read_version(HOSTS[name], root)
    assert (found.version, found.commit) == ("0.3.0", None)


@pytest.mark.parametrize("text", ["", "no version", "version = 3\n", "\x00"])
def test_a_version_that_cannot_be_read_is_unknown(text: str, tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "slime")
    (root / "setup.py").write_text(text)
    _git(root, "init", "-q")  # no commit yet
    assert str(read_version(SLIME, root)) == "of unknown version"


def test_the_line_says_whether_it_is_the_tested_version(tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "verl")
    tested = replace(VERL, version="0.3.0")  # a release: the number is enough
    assert version_line(tested, [tmp_path, root]) == "host: verl 0.3.0, the tested version"
    wanted = "! host: verl 0.3.0 is not the tested version, 0.9.1. Use that one, or look at"
    assert version_line(VERL, [root]).startswith(wanted)
    commit = _commit(root)
    at = f"0.3.0 at {commit[:10]}"
    assert version_line(replace(VERL, version="x", commit=commit), [root]) == f"host: verl {at}, the tested version"
    other = replace(VERL, version="0.3.0", commit=_OTHER)  # the same number by name only
    assert version_line(other, [root]).startswith(f"! host: verl {at} is not the tested version, 0.3.0 at fedcba9876. ")
    nowhere = replace(SLIME, inside="no_such_package/utils")
    assert version_line(nowhere).startswith("! host: slime is not found here; the plugin was tested with 0.3.1 at 624b")


@pytest.mark.parametrize("host", ["slime", "megatron-lm"])
def test_the_launcher_s_block_says_it(host: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    script = megatron_tree(tree) if host == "megatron-lm" else ray_tree(tree, host)
    commit = _commit(tree)
    lines = prepare([str(script), "--use-tis"])[3].lines
    version = "0.20.0" if host == "megatron-lm" else "of unknown version"
    assert lines[-2].startswith(f"! host: {host} {version} at {commit[:10]} is not the tested version, ")
    assert not any("host: " in line[:8] for line in prepare([str(script)])[3].lines)


def test_the_block_of_a_patched_megatron_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    megatron_rl.start(Namespace(use_tis=True, rl_inference_logprobs_is_correction=True))
    assert "host: megatron-lm " in capsys.readouterr().out


def test_no_host_is_imported(tmp_path: Path) -> None:
    root = _tree(tmp_path / "tree", "slime")
    (root / "slime" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    code = (
        "from mismatch_plugin.hooks.hosts import SLIME; from mismatch_plugin.hooks.version import version_line; "
        "print(version_line(SLIME))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("! host: slime 0.3.0 is not the tested version"), done.stderr


@pytest.mark.parametrize("name", [name for name, host in HOSTS.items() if host.commit])
def test_the_checkouts_that_the_tests_run_with_are_the_tested_ones(name: str) -> None:
    host = HOSTS[name]
    root = Path(os.environ.get("MISMATCH_HOST_SRC") or "", host.title)
    if "MISMATCH_HOST_SRC" not in os.environ or not (root / ".git").exists():
        pytest.skip("NOT RUN (host source absent)")
    found = read_version(host, root)
    assert (found.version, found.commit) == (host.version, host.commit)


@pytest.mark.parametrize("version", [(0, 12), (0, 15)])
def test_an_old_megatron_is_refused_before_the_script_runs(version: tuple[int, int], tmp_path: Path) -> None:
    validate_megatron_version()  # the tests run with a megatron-core that is new enough, or with none
    script = ray_tree(tmp_path / "tree", "slime", megatron=version)
    with pytest.raises(ValueError, match=rf"megatron-core {version[0]}\.{version[1]}\.0 is too old: .* 0\.16 or newer"):
        prepare([str(script), "--use-tis"])
    assert prepare([str(script)])[3].added == ()  # nothing of ours, nothing to refuse
