"""`mismatch-plugin patch`: the small patches of the hosts, for those who rather patch than launch.

Each patch is one file of one host, made at a recorded commit; `patches/manifest.json` holds why, and the file's
checksums before and after. All files of a host are checked before the first is changed. `git apply` works on a copy in
a folder of its own, so that nothing that the checkout's git configuration names (filters, hooks, a file system monitor)
is run.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mismatch_plugin.files import replacing
from mismatch_plugin.hooks import version
from mismatch_plugin.hooks.hosts import HOSTS, find_host

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
    """One entry of the manifest. patch: its path there. before, after: `sha256` of the file. optional: applied only
    when asked for. edits: what `patches/generate.py` makes it from."""

    host: str
    repository: str
    commit: str
    file: str
    patch: str
    why: str
    optional: bool
    before: Mapping[str, str]
    after: Mapping[str, str]
    edits: Sequence[Any] = ()


def patches_of(host: str, files: Collection[str] = (), optional: bool = False) -> list[Patch]:
    """The patches of a host: those that are not optional, or with `optional` all, or those of the files named.

    Raises: PatchError for a host or file without a patch.
    """
    every, given = [Patch(**entry) for entry in version.manifest()], host
    with suppress(ValueError):
        host = find_host(given).name
    mine = [patch for patch in every if patch.host == host]
    if not mine:
        hosts = ", ".join(dict.fromkeys(patch.host for patch in every))
        more = f" {HOSTS[host].title} needs none: {HOSTS[host].door}." if host in HOSTS else ""
        raise PatchError(f"there is no patch for host {given!r}: there are those of {hosts}.{more}")
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
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest == patch.before["sha256"]:
        return State.RELEASED
    if digest == patch.after["sha256"] or _patched(patch, content, "--reverse") is not None:
        return State.APPLIED
    if _patched(patch, content) is None:
        return State.OTHER
    return State.RELEASED if _is_committed(root, patch.file, content) else State.DIRTY


def apply(patches: Sequence[Patch], root: Path) -> list[str]:
    """Apply what is not applied, and say what was done. Raises PatchError before any file is changed."""
    return _change(patches, root, State.RELEASED, State.APPLIED, "applied to")


def revert(patches: Sequence[Patch], root: Path) -> list[str]:
    """Take back what is applied, and say what was done. Raises PatchError before any file is changed."""
    return _change(patches, root, State.APPLIED, State.RELEASED, "reverted in", "--reverse")


def _change(patches: Sequence[Patch], root: Path, start: State, end: State, done: str, *how: str) -> list[str]:
    if not root.is_dir():
        raise PatchError(f"{root} is no folder: give the root of the host's checkout.")
    changed: dict[Path, bytes] = {}
    said = []
    for patch in patches:
        state, path = state_of(patch, root), root / patch.file
        if state is end:
            said.append(f"nothing to do: {patch.file} ({end.value})")
            continue
        content = _patched(patch, path.read_bytes(), *how) if state is start else None
        if content is None:
            raise PatchError(_refusal(patch, state, root))
        changed[path] = content
        said.append(f"{done} {patch.file}")
    for path, content in changed.items():
        with replacing(path) as new:
            new.write_bytes(content)
            shutil.copymode(path, new)
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


def _patched(patch: Patch, content: bytes, *how: str) -> bytes | None:
    """The file's content after `git apply`, or None where that refuses."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, patch.file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        path = (version.folder() / patch.patch).resolve()
        done = version.git(Path(name), "apply", "--whitespace=nowarn", *how, str(path))
        if done is None:
            raise PatchError("git is not installed, and patches are applied by `git apply`: install it.")
        return copy.read_bytes() if done.returncode == 0 else None


def _is_committed(root: Path, file: str, content: bytes) -> bool:
    """Whether the last commit holds the file as it is. Compared here: git's own status would run filters."""
    done = version.git(root, "rev-parse", "--verify", "--quiet", f"HEAD:./{file}")
    found = "" if done is None else done.stdout.strip()
    blob = b"blob %d\0" % len(content) + content
    return found in (hashlib.sha1(blob, usedforsecurity=False).hexdigest(), hashlib.sha256(blob).hexdigest())


# The command ----------------------------------------------------------------------------------------------------------

Host = Annotated[str, typer.Option(help=f"{', '.join(HOSTS)}.")]
Root = Annotated[Path, typer.Option(help="Root of the host's checkout.")]
Files = Annotated[list[str] | None, typer.Option("--file", help="Only this file of the host. May be repeated.")]
Optional = Annotated[bool, typer.Option("--optional", help="The optional patches too (precision, speed).")]


@app.command("check")
def check_command(host: Host, root: Root, file: Files = None, optional: Optional = False) -> None:
    """Say for each patch, the optional ones too, what it is for and whether it is applied.

    Exits 1 where one can neither be applied nor is; an optional one counts with --optional or --file only.
    """
    failed = False
    with _told():
        asked = patches_of(host, file or (), optional)
        for patch in patches_of(host, file or (), optional=True):
            state = state_of(patch, root)
            typer.echo(f"{patch.file}{' (optional)' if patch.optional else ''}: {state.value}\n  {patch.why}")
            if state not in (State.RELEASED, State.APPLIED):
                typer.echo(f"  {_refusal(patch, state, root)}")
                failed |= patch in asked
    if failed:
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
    """A PatchError becomes one sentence on stderr and exit status 2."""
    try:
        yield
    except PatchError as error:
        typer.echo(f"mismatch-plugin patch: {error}", err=True)
        raise typer.Exit(2) from None
