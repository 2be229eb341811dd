"""`mismatch-plugin patch`: the small patches of the hosts, for those who rather patch than launch.

Each patch is one file of one host, made at a recorded commit; `patches/manifest.json` holds why, and the file's
checksums before and after. Patching goes through `git apply`, and all files of a host are checked before the first
is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Check, apply or revert the patches of a host's checkout.",
)


class PatchError(ValueError):
    """A tree to which a patch does not apply."""


class State(Enum):
    """What a file is, as seen by its patch."""

    RELEASED = "not applied"
    APPLIED = "applied"
    DIRTY = "changed by something else"
    OTHER = "another version"
    MISSING = "not there"
    LINKED = "reached by a symbolic link"


@dataclass(frozen=True)
class Patch:
    """One entry of the manifest. before, after: SHA-256 of the file. optional: applied only when asked for."""

    host: str
    repository: str
    commit: str
    file: str
    path: Path
    why: str
    optional: bool
    before: str
    after: str


def folder() -> Path:
    """Where the patches are: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).parent
    inside = here / "patches"
    return inside if inside.is_dir() else here.parent / "patches"


def patches_of(host: str, files: Collection[str] = (), optional: bool = False) -> list[Patch]:
    """The patches of a host: those that are not optional, or with `optional` all, or those of the files named.

    Raises: PatchError for a host or file without a patch.
    """
    manifest: dict[str, Any] = json.loads((folder() / "manifest.json").read_text(encoding="utf-8"))
    every = [_patch(entry) for entry in manifest["patches"]]
    hosts = list(dict.fromkeys(patch.host for patch in every))
    if host not in hosts:
        more = " verl needs none: it finds the installed package by its entry point." if host == "verl" else ""
        raise PatchError(f"there is no patch for host {host!r}: there are those of {', '.join(hosts)}.{more}")
    mine = [patch for patch in every if patch.host == host]
    unknown = sorted(set(files) - {patch.file for patch in mine})
    if unknown:
        raise PatchError(
            f"{host} has no patch for {unknown[0]}: there are those of {', '.join(patch.file for patch in mine)}."
        )
    return [patch for patch in mine if patch.file in files or (not files and (optional or not patch.optional))]


def state_of(patch: Patch, root: Path) -> State:
    """What the file is now. Of a version other than the recorded one, whether the patch (or its reverse) applies."""
    path = root / patch.file
    if not path.is_file():
        return State.MISSING
    if path.resolve() != root.resolve() / patch.file:  # git apply follows no link below the root
        return State.LINKED
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest == patch.after or (digest != patch.before and _git_apply(patch, root, "--check", "--reverse")):
        return State.APPLIED
    if digest == patch.before:
        return State.RELEASED
    if not _git_apply(patch, root, "--check"):
        return State.OTHER
    return State.DIRTY if not _is_work_tree(root) or _has_changes(root, patch.file) else State.RELEASED


def apply(patches: Sequence[Patch], root: Path) -> list[str]:
    """Apply what is not applied, and say what was done. Raises PatchError before any file is changed."""
    return _change(patches, root, State.RELEASED, State.APPLIED, "applied to")


def revert(patches: Sequence[Patch], root: Path) -> list[str]:
    """Take back what is applied, and say what was done. Raises PatchError before any file is changed."""
    return _change(patches, root, State.APPLIED, State.RELEASED, "reverted in", "--reverse")


def _change(patches: Sequence[Patch], root: Path, start: State, end: State, done: str, *how: str) -> list[str]:
    if not root.is_dir():
        raise PatchError(f"{root} is no folder: give the root of the host's checkout.")
    states = {patch.file: state_of(patch, root) for patch in patches}
    for patch in patches:
        if states[patch.file] not in (start, end):
            raise PatchError(_refusal(patch, states[patch.file], root))
    said = []
    for patch in patches:
        if states[patch.file] is end:
            said.append(f"nothing to do: {patch.file} ({end.value})")
            continue
        if not _git_apply(patch, root, *how):
            raise PatchError(f"git apply refused {patch.path.name} on {root / patch.file} after its own check passed.")
        said.append(f"{done} {patch.file}")
    return said


def _refusal(patch: Patch, state: State, root: Path) -> str:
    where = f"{patch.repository} at {patch.commit[:10]}"
    if state is State.MISSING:
        return f"{root} has no {patch.file}: is it a checkout of {where}?"
    if state is State.LINKED:
        return (
            f"{patch.file} is reached by a symbolic link to {(root / patch.file).resolve()}, which git apply does not "
            f"follow: give the root of the checkout that holds the file itself."
        )
    if state is State.DIRTY:
        return (
            f"{patch.file} has changes of its own that are not committed (or is no file of a git checkout): commit or "
            f"revert them first, or check {where} out."
        )
    return (
        f"{patch.file} is not the file that the patch was made for, and it does not apply: use {where}, or launch "
        f"through `python -m mismatch_plugin.launch`, which needs no patch."
    )


def _patch(entry: dict[str, Any]) -> Patch:
    return Patch(
        entry["host"],
        entry["repository"],
        entry["commit"],
        entry["file"],
        folder() / entry["patch"],
        entry["why"],
        entry["optional"],
        entry["before"]["sha256"],
        entry["after"]["sha256"],
    )


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """git in `root`, not in a repository that merely contains it."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    try:
        return subprocess.run(
            ["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise PatchError("git is not installed, and patches are applied by `git apply`: install it.") from error


def _git_apply(patch: Patch, root: Path, *how: str) -> bool:
    # A patch made on Linux must also match a checkout with other line endings' settings: nothing is converted here.
    return _git(root, "apply", "--whitespace=nowarn", *how, str(patch.path.resolve())).returncode == 0


def _is_work_tree(root: Path) -> bool:
    return _git(root, "rev-parse", "--is-inside-work-tree").stdout.strip() == "true"


def _has_changes(root: Path, file: str) -> bool:
    return bool(_git(root, "status", "--porcelain", "--untracked-files=all", "--", file).stdout.strip())


# The command ----------------------------------------------------------------------------------------------------------

Host = Annotated[str, typer.Option(help="slime, miles, megatron-lm or nemo-rl.")]
Root = Annotated[Path, typer.Option(help="Root of the host's checkout.")]
Files = Annotated[list[str] | None, typer.Option("--file", help="Only this file of the host. May be repeated.")]
Optional = Annotated[bool, typer.Option("--optional", help="The optional patches too (precision, speed).")]


@app.command("check")
def check_command(host: Host, root: Root, file: Files = None, optional: Optional = False) -> None:
    """Say for each patch what it is for and whether it is applied.

    Exits 1 where one can neither be applied nor is.
    """
    with _told():
        chosen = patches_of(host, file or (), optional)
        states = [state_of(patch, root) for patch in chosen]
    for patch, state in zip(chosen, states, strict=True):
        typer.echo(f"{patch.file}: {state.value}\n  {patch.why}")
        if state not in (State.RELEASED, State.APPLIED):
            typer.echo(f"  {_refusal(patch, state, root)}")
    if not set(states) <= {State.RELEASED, State.APPLIED}:
        raise typer.Exit(1)


@app.command("apply")
def apply_command(host: Host, root: Root, file: Files = None, optional: Optional = False) -> None:
    """Apply the patches of a host; what is applied already stays."""
    with _told():
        typer.echo("\n".join(apply(patches_of(host, file or (), optional), root)))


@app.command("revert")
def revert_command(host: Host, root: Root, file: Files = None) -> None:
    """Take the patches of a host back, the optional ones too."""
    with _told():
        chosen = patches_of(host, file or (), optional=True)
        # An optional file that was never patched must not stop the others.
        chosen = [patch for patch in chosen if not patch.optional or state_of(patch, root) is State.APPLIED]
        typer.echo("\n".join(revert(chosen, root)))


@contextmanager
def _told() -> Iterator[None]:
    """A PatchError becomes one sentence on stderr and exit status 1."""
    try:
        yield
    except PatchError as error:
        typer.echo(f"mismatch-plugin patch: {error}", err=True)
        raise typer.Exit(1) from None
