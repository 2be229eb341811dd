"""The patches: small, applied and taken back, refused on a file they are not for."""

from __future__ import annotations

import ast
import compileall
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mismatch_plugin import patching
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.patching import Patch, PatchError, apply, manifest, patches_of, state_of
from tests.host_source import host_source


def test_patches_are_small_and_import_what_is_there() -> None:
    for patch in manifest():
        assert patch.host in HOSTS and patch.why and len(patch.edits) <= 4, patch.file
        assert sum(after.count("\n") - before.count("\n") for before, after in patch.edits) <= 8, patch.file
        for line in "\n".join(after for _, after in patch.edits).splitlines():
            if line.startswith("from mismatch_plugin"):
                exec(line, {})
    assert patches_of("megatron_rl") == patches_of("Megatron-LM") == patches_of("megatron-lm") != []


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with two files, and patches for both, one of them optional."""
    (tmp_path / "pkg").mkdir()
    edits = [("line_4 = 4\n", "line_4 = 4\nours = True\n"), ("line_7", "row_7")]
    entries = []
    for name, optional in (("pkg/a.py", False), ("pkg/b.py", True)):
        (tmp_path / name).write_bytes(b"".join(b"line_%d = %d\n" % (i, i) for i in range(9)) + b"last\r\n")
        entries.append(Patch("own", name, optional, "to test", edits))
    monkeypatch.setattr(patching, "manifest", lambda: entries)
    return tmp_path


def test_apply_and_revert_are_idempotent(tree: Path) -> None:
    path, patches = tree / "pkg" / "a.py", patches_of("own")
    before = path.read_bytes()
    path.chmod(0o755)
    assert apply(patches, tree) == ["applied to pkg/a.py"]
    assert b"ours = True\n" in path.read_bytes() and b"row_7 = 7" in path.read_bytes()
    assert b"ours" not in (tree / "pkg" / "b.py").read_bytes()  # optional
    assert apply(patches, tree) == ["nothing to do: pkg/a.py (applied)"]
    path.write_bytes(b"above = 0\n" + path.read_bytes())  # what else is in the file stays
    assert state_of(patches[0], tree) == "applied"
    assert apply(patches, tree, back=True) == ["reverted in pkg/a.py"]
    assert apply(patches, tree, back=True) == ["nothing to do: pkg/a.py (not applied)"]
    assert path.read_bytes() == b"above = 0\n" + before and path.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in (tree / "pkg").iterdir()) == ["a.py", "b.py"]


def test_another_file_is_refused_and_nothing_is_changed(tree: Path) -> None:
    before = (tree / "pkg" / "a.py").read_bytes()
    for text in ("line_4 = 5", "line_4 = 4\nline_4 = 4\nline_7", "line_4 = 4\nours = True\nline_7"):
        (tree / "pkg" / "b.py").write_text(f"{text}\n")
        for back in (False, True):
            with pytest.raises(PatchError, match=r"pkg/b\.py is another version: the patch is for own"):
                apply(patches_of("own", optional=True), tree, back)
            assert (tree / "pkg" / "a.py").read_bytes() == before
    with pytest.raises(PatchError, match=r"pkg/a\.py is not there: give the folder of a checkout of own as --root"):
        apply(patches_of("own"), tree / "pkg")


def test_the_command(tree: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        wide = {"COLUMNS": "400", "TERM": "dumb"}
        result = CliRunner().invoke(patching.app, [*arguments, "--root", str(tree)], env=wide)
        return result.exit_code, result.output

    own = ("--host", "own")
    assert run("check", *own)[1].startswith("pkg/a.py: not applied\n  to test\npkg/b.py (optional): not applied\n")
    assert run("apply", *own, "--file", "pkg/b.py") == (0, "applied to pkg/b.py\n")
    assert run("apply", *own, "--optional") == (0, "applied to pkg/a.py\nnothing to do: pkg/b.py (applied)\n")
    (tree / "pkg" / "b.py").write_text("another file\n")
    status, output = run("check", *own)
    assert status == 0 and "pkg/b.py (optional): another version" in output  # nobody asked for it, so it fails nothing
    assert run("revert", *own) == (0, "reverted in pkg/a.py\n")
    (tree / "pkg" / "a.py").unlink()
    assert run("check", *own)[0] == 1  # a patch that can neither be applied nor is
    for arguments, says in (
        ((*own, "--file", "pkg/c.py"), "own has no patch for pkg/c.py: there are those of pkg/a.py, pkg/b.py."),
        (("--host", "verl"), "there is no patch for host 'verl': there are those of own. verl needs none: set actor_"),
    ):
        status, output = run("apply", *arguments)
        assert status == 2 and says in output, output


# The hosts' own files -------------------------------------------------------------------------------------------------


def checkout(patches: list[Patch], folder: Path) -> Path:
    """The touched files as they are at the tested commit."""
    for patch in patches:
        source = host_source(HOSTS[patch.host].title, patch.file)
        (folder / patch.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / patch.file)
    return folder


@pytest.mark.parametrize("host", dict.fromkeys(patch.host for patch in manifest()))
def test_patches_apply_compile_and_revert_on_the_host_s_files(host: str, tmp_path: Path) -> None:
    patches = patches_of(host, optional=True)
    root = checkout(patches, tmp_path)
    before = {patch.file: (root / patch.file).read_bytes() for patch in patches}
    assert apply(patches, root) == [f"applied to {patch.file}" for patch in patches]
    assert compileall.compile_dir(root, quiet=1, force=True)
    apply(patches, root, back=True)
    assert before == {patch.file: (root / patch.file).read_bytes() for patch in patches}


def test_a_patched_megatron_returns_float32_log_probs(tmp_path: Path) -> None:
    """selective_log_softmax of bf16 logits, taken out of the patched file: the rounding of 2⁻⁹ |log p| is gone."""
    patches = patches_of("megatron-lm", ["megatron/rl/rl_utils.py"])
    root = checkout(patches, tmp_path)

    def log_softmax() -> Any:
        tree = ast.parse((root / "megatron" / "rl" / "rl_utils.py").read_text())
        node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "selective_log_softmax")
        names: dict[str, Any] = {"torch": torch, "is_batch_invariant_mode_enabled": lambda: False}
        exec(compile(ast.Module(body=[node], type_ignores=[]), "rl_utils.py", "exec"), names)
        return names["selective_log_softmax"](logits, torch.zeros(2, 5, dtype=torch.int64))

    logits = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16() * 4
    exact, released = logits.double().log_softmax(-1)[..., 0], log_softmax()
    apply(patches, root)
    patched = log_softmax()
    assert (released.dtype, patched.dtype) == (torch.bfloat16, torch.float32)
    assert float((released - exact).abs().max()) > 1e-3 and float((patched - exact).abs().max()) < 1e-5
