"""The patches: small, as the manifest records them, applied and taken back, refused on a tree they are not for."""

from __future__ import annotations

import ast
import compileall
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mismatch_plugin import patching
from mismatch_plugin.hooks import version
from mismatch_plugin.patching import Patch, PatchError, State, apply, patches_of, revert, state_of

MANIFEST: list[dict[str, Any]] = version.manifest()
FOLDERS = {"slime": "slime", "miles": "miles", "megatron-lm": "Megatron-LM", "nemo-rl": "NeMo-RL"}


def _git(root: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def _commit(root: Path) -> None:
    _git(root, "init", "--quiet")
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "--message", "x")


# What the manifest records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["patch"])
def test_a_patch_changes_its_one_file_and_little_of_it(entry: dict[str, Any]) -> None:
    text = (version.folder() / entry["patch"]).read_text()
    assert re.findall(r"^diff --git a/(\S+) b/(\S+)$", text, re.M) == [(entry["file"], entry["file"])]
    assert f"index {entry['before']['blob']}..{entry['after']['blob']}" in text
    added = [line for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]
    context = [line for line in text.splitlines() if line.startswith(" ")]
    hunks = text.count("\n@@")
    assert len(added) <= 8
    assert hunks <= 4 and len(context) <= 4 * hunks
    assert entry["why"]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["patch"])
def test_a_patch_is_made_of_the_manifest_s_edits(entry: dict[str, Any]) -> None:
    """Removed and added lines of the patch are those of the edits."""
    text = (version.folder() / entry["patch"]).read_text()
    for sign, key in (("-", "find"), ("+", "replace")):
        changed = [line[1:] for line in text.splitlines() if re.match(rf"\{sign}(?!{re.escape(sign * 2)} )", line)]
        allowed = {line for edit in entry["edits"] for line in edit[key].splitlines()}
        assert set(changed) <= allowed


def test_every_patched_name_exists() -> None:
    """What the patches import is there to be imported."""
    for entry in MANIFEST:
        text = (version.folder() / entry["patch"]).read_text()
        for module, names in re.findall(r"^\+from (mismatch_plugin\S*) import (.+)$", text, re.M):
            imported = __import__(module, fromlist=["x"])
            for name in names.split(","):
                assert hasattr(imported, name.split(" as ")[0].strip()) or __import__(f"{module}.{name.split()[0]}")


# A tree of our own ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with two files, and patches for both, one of them optional."""
    root, made = tmp_path / "host", tmp_path / "patches"
    (root / "pkg").mkdir(parents=True)
    made.mkdir()
    entries = []
    for name, optional in (("pkg/a.py", False), ("pkg/b.py", True)):
        before = "".join(f"line_{index} = {index}\n" for index in range(9))
        after = before.replace("line_4 = 4\n", "line_4 = 4\nours = True\n")
        (root / name).write_text(before)
        patch = f"--- a/{name}\n+++ b/{name}\n@@ -5,2 +5,3 @@\n line_4 = 4\n+ours = True\n line_5 = 5\n"
        (made / f"{optional}.patch").write_text(patch)
        old, new = ({"sha256": hashlib.sha256(text.encode()).hexdigest()} for text in (before, after))
        entry = Patch("own", "some/host", "0" * 40, name, f"{optional}.patch", "to test", optional, old, new)
        entries.append(asdict(entry))
    (made / "manifest.json").write_text(json.dumps({"patches": entries}))
    _commit(root)
    monkeypatch.setattr(version, "folder", lambda: made)
    return root


def _text(root: Path, name: str = "pkg/a.py") -> str:
    return (root / name).read_text()


def test_apply_and_revert_are_idempotent(tree: Path) -> None:
    before, patches = _text(tree), patches_of("own")
    (tree / "pkg" / "a.py").chmod(0o755)
    assert apply(patches, tree) == ["applied to pkg/a.py"]
    assert "ours = True" in _text(tree)
    assert "ours" not in _text(tree, "pkg/b.py")  # optional
    assert apply(patches, tree) == ["nothing to do: pkg/a.py (applied)"]
    assert revert(patches, tree) == ["reverted in pkg/a.py"]
    assert revert(patches, tree) == ["nothing to do: pkg/a.py (not applied)"]
    assert _text(tree) == before
    assert (tree / "pkg" / "a.py").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in (tree / "pkg").iterdir()) == ["a.py", "b.py"]


def test_optional_patches_and_single_files(tree: Path) -> None:
    assert [patch.file for patch in patches_of("own", optional=True)] == ["pkg/a.py", "pkg/b.py"]
    assert [patch.file for patch in patches_of("own", ["pkg/b.py"])] == ["pkg/b.py"]
    with pytest.raises(PatchError, match=r"own has no patch for pkg/c\.py: there are those of pkg/a\.py, pkg/b\.py"):
        patches_of("own", ["pkg/c.py"])


def test_a_dirty_file_is_refused_and_nothing_is_changed(tree: Path) -> None:
    (tree / "pkg" / "b.py").write_text("mine = 1\n" + _text(tree, "pkg/b.py"))
    with pytest.raises(PatchError, match=r"pkg/b\.py has changes of its own that are not committed"):
        apply(patches_of("own", optional=True), tree)
    assert "ours" not in _text(tree)  # the first file was fine, and still is as it was
    _commit(tree)
    assert apply(patches_of("own", optional=True), tree)[1] == "applied to pkg/b.py"


def test_a_patched_file_may_be_committed_and_reverted(tree: Path) -> None:
    apply(patches_of("own"), tree)
    (tree / "pkg" / "a.py").write_text("above = 0\n" + _text(tree))
    _commit(tree)
    assert state_of(patches_of("own")[0], tree) is State.APPLIED
    revert(patches_of("own"), tree)
    assert "ours" not in _text(tree)


def test_another_version_is_refused(tree: Path) -> None:
    (tree / "pkg" / "a.py").write_text(_text(tree).replace("line_4", "row_4"))
    _commit(tree)
    with pytest.raises(PatchError, match=r"not the file that the patch was made for.* use some/host at 0{10}, or lau"):
        apply(patches_of("own"), tree)


def test_another_tree_is_refused(tmp_path: Path, tree: Path) -> None:
    with pytest.raises(PatchError, match=r"has no pkg/a\.py: is it a checkout of some/host"):
        apply(patches_of("own"), tmp_path)
    with pytest.raises(PatchError, match="is no folder"):
        apply(patches_of("own"), tmp_path / "nowhere")


def test_a_tree_without_git_must_be_the_recorded_one(tree: Path) -> None:
    shutil.rmtree(tree / ".git")
    apply(patches_of("own"), tree)
    revert(patches_of("own"), tree)
    (tree / "pkg" / "a.py").write_text("mine = 1\n" + _text(tree))
    with pytest.raises(PatchError, match="or is no file of a git checkout"):
        apply(patches_of("own"), tree)


def test_nothing_that_the_checkout_s_git_configuration_names_is_run(tree: Path, tmp_path: Path) -> None:
    """A downloaded checkout brings its own .git/config, filters and hooks; the file's own attributes ask for them."""
    mark, program = tmp_path / "ran", tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 $@ >> {mark}\ncat\n")
    program.chmod(0o755)
    (tree / ".gitattributes").write_text("*.py filter=own diff=own merge=own\n")
    (tree / "pkg" / "a.py").write_text("above = 0\n" + _text(tree))
    _commit(tree)
    keys = ("core.fsmonitor", "filter.own.clean", "filter.own.smudge", "filter.own.process", "diff.own.textconv")
    for key in (*keys, "diff.own.command", "diff.external", "core.pager", "core.sshCommand", "core.editor"):
        _git(tree, "config", key, str(program))
    _git(tree, "config", "core.hooksPath", str(tmp_path))
    shutil.copy(program, tmp_path / "post-index-change")
    patches = patches_of("own", optional=True)
    assert [state_of(patch, tree) for patch in patches] == [State.RELEASED, State.RELEASED]
    apply(patches, tree)
    assert "ours = True" in _text(tree)
    revert(patches, tree)
    assert not mark.exists(), mark.read_text()


def test_a_checkout_inside_another_repository(tree: Path, tmp_path: Path) -> None:
    """git apply in a subfolder of a repository would skip the file without a word."""
    shutil.rmtree(tree / ".git")
    _git(tmp_path, "init", "--quiet")
    assert apply(patches_of("own"), tree) == ["applied to pkg/a.py"]
    assert "ours" in _text(tree)


def test_a_checkout_behind_a_link_is_patched(tree: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("host")
    apply(patches_of("own"), link)
    assert "ours" in _text(tree)
    assert state_of(patches_of("own")[0], link) is State.APPLIED


@pytest.mark.parametrize("linked", ["pkg/b.py", "pkg"])
@pytest.mark.parametrize("applied", [False, True])
def test_a_file_behind_a_link_is_refused_and_nothing_is_changed(
    tree: Path, tmp_path: Path, linked: str, applied: bool
) -> None:
    patches = patches_of("own", optional=True)
    if applied:
        apply(patches, tree)
    before = _text(tree), _text(tree, "pkg/b.py")
    (tree / linked).rename(tmp_path / "elsewhere")
    (tree / linked).symlink_to(tmp_path / "elsewhere")
    assert state_of(patches[1], tree) is State.LINKED
    with pytest.raises(PatchError, match=r"pkg/.\.py is reached by a symbolic link to .*elsewhere"):
        (revert if applied else apply)(patches, tree)
    assert (_text(tree), _text(tree, "pkg/b.py")) == before


def test_the_command(tree: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(patching.app, [*arguments, "--host", "own", "--root", str(tree)])
        return result.exit_code, result.output

    other = "pkg/b.py (optional): not applied\n  to test\n"
    assert run("check") == (0, f"pkg/a.py: not applied\n  to test\n{other}")
    assert run("apply") == (0, "applied to pkg/a.py\n")
    assert run("check") == (0, f"pkg/a.py: applied\n  to test\n{other}")
    (tree / "pkg" / "b.py").write_text("another file\n")
    status, output = run("check")
    assert status == 0  # what nobody asked for is shown, and fails nothing
    assert "pkg/b.py (optional): another version" in output
    assert (run("check", "--optional")[0], run("check", "--file", "pkg/b.py")[0]) == (1, 1)
    assert run("revert") == (0, "reverted in pkg/a.py\n")
    (tree / "pkg" / "a.py").unlink()
    status, output = run("apply")
    assert status == 2
    assert output.startswith("mismatch-plugin patch:") and "has no pkg/a.py" in output
    assert run("check")[0] == 1  # a patch that can neither be applied nor is


def test_verl_needs_no_patch() -> None:
    with pytest.raises(PatchError, match=r"no patch for host 'verl'.*verl needs none: set actor_rollout_ref"):
        patches_of("verl")


# The hosts' own files -------------------------------------------------------------------------------------------------


def _checkout(host: str, patches: list[Patch], folder: Path) -> Path:
    """The touched files as they are at the recorded commit, in a repository of their own."""
    root = os.environ.get("MISMATCH_HOST_SRC")
    for patch in patches:
        source = Path(root or "", FOLDERS[host], patch.file)
        if root is None or not source.is_file():
            pytest.skip("NOT RUN (host source absent)")
        target = folder / patch.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    _commit(folder)
    return folder


@pytest.mark.parametrize("host", FOLDERS)
def test_patches_apply_compile_and_revert_on_the_host_s_files(host: str, tmp_path: Path) -> None:
    patches = patches_of(host, optional=True)
    root = _checkout(host, patches, tmp_path / "tree")
    before = {patch.file: (root / patch.file).read_bytes() for patch in patches}
    for patch in patches:
        digest = hashlib.sha256(before[patch.file]).hexdigest()
        assert digest == patch.before["sha256"], (
            f"{host}'s {patch.file} is not that of {patch.commit}: check that commit out"
        )
    assert apply(patches, root) == [f"applied to {patch.file}" for patch in patches]
    for patch in patches:
        assert hashlib.sha256((root / patch.file).read_bytes()).hexdigest() == patch.after["sha256"]
    assert compileall.compile_dir(root, quiet=1, force=True)
    assert apply(patches, root) == [f"nothing to do: {patch.file} (applied)" for patch in patches]
    revert(patches, root)
    assert before == {patch.file: (root / patch.file).read_bytes() for patch in patches}


def test_a_patched_megatron_returns_float32_log_probs(tmp_path: Path) -> None:
    """selective_log_softmax of bf16 logits, taken out of the patched file: the rounding of 2⁻⁹ |log p| is gone."""
    patches = patches_of("megatron-lm", ["megatron/rl/rl_utils.py"])
    root = _checkout("megatron-lm", patches, tmp_path / "tree")
    logits = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16() * 4
    index = torch.zeros(2, 5, dtype=torch.int64)
    exact = logits.double().log_softmax(-1)[..., 0]
    released = _log_softmax(root)(logits, index)
    apply(patches, root)
    patched = _log_softmax(root)(logits, index)
    assert (released.dtype, patched.dtype) == (torch.bfloat16, torch.float32)
    assert float((released - exact).abs().max()) > 1e-3
    assert float((patched - exact).abs().max()) < 1e-5


def _log_softmax(root: Path) -> Any:
    tree = ast.parse((root / "megatron" / "rl" / "rl_utils.py").read_text())
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "selective_log_softmax")
    names: dict[str, Any] = {"torch": torch, "is_batch_invariant_mode_enabled": lambda: False}
    exec(compile(ast.Module(body=[node], type_ignores=[]), "rl_utils.py", "exec"), names)
    return names["selective_log_softmax"]


def test_a_host_may_be_spelled_as_it_is_elsewhere() -> None:
    for name, spelled in {"megatron-lm": ("megatron_lm", "megatron_rl"), "nemo-rl": ("nemo_rl", "NeMo-RL")}.items():
        for other in spelled:
            assert patches_of(other) == patches_of(name)
    with pytest.raises(PatchError, match="there is no patch for host 'nemo'"):
        patches_of("nemo")
