"""`mismatch-plugin patch`: the small patches of the hosts, for those who rather patch than launch.

`patches/manifest.json` has one entry a file of a host: why, and its edits, each a text that is there once and
what takes its place. All files of a host are checked before the first is changed; nothing in the checkout is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mismatch_plugin.files import replacing
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
    OTHER = "another version"
    MISSING = "not there"


@dataclass(frozen=True)
class Patch:
    """One entry of the manifest. optional: applied only when asked for. edits: (text that is there once, what takes its
    place)."""

    host: str
    file: str
    optional: bool
    why: str
    edits: Sequence[tuple[str, str]]

    def changed(self, text: str, back: bool = False) -> str | None:
        """The file's text with the edits made, or taken back; None where it is not the text for that."""
        for edit in self.edits:
            find, replace = reversed(edit) if back else edit
            # What takes a text's place may hold it.
            if text.count(find) != 1 or (not back and text.count(replace)):
                return None
            text = text.replace(find, replace)
        return text


def manifest() -> list[Patch]:
    """All patches: inside the installed package, or next to it in a checkout."""
    here = Path(__file__).parent
    path = next(folder / "patches" / "manifest.json" for folder in (here, here.parent) if (folder / "patches").is_dir())
    return [Patch(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def patches_of(host: str, files: Collection[str] = (), optional: bool = False) -> list[Patch]:
    """The patches of a host: those that are not optional, or with `optional` all, or those of the files named.

    Raises: PatchError for a host or file without a patch.
    """
    every, given = manifest(), host
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
    """What the file is now."""
    if not (root / patch.file).is_file():
        return State.MISSING
    text = _read(root / patch.file)
    if patch.changed(text, back=True) is not None:
        return State.APPLIED
    return State.OTHER if patch.changed(text) is None else State.RELEASED


def apply(patches: Sequence[Patch], root: Path) -> list[str]:
    """Apply what is not applied, and say what was done. Raises PatchError before any file is changed."""
    return _change(patches, root, State.APPLIED, "applied to")


def revert(patches: Sequence[Patch], root: Path) -> list[str]:
    """Take back what is applied, and say what was done. Raises PatchError before any file is changed."""
    return _change(patches, root, State.RELEASED, "reverted in")


def _change(patches: Sequence[Patch], root: Path, end: State, done: str) -> list[str]:
    if not root.is_dir():
        raise PatchError(f"{root} is no folder: give the root of the host's checkout.")
    changed: dict[Path, str] = {}
    said = []
    for patch in patches:
        state, path = state_of(patch, root), (root / patch.file).resolve()
        if state is end:
            said.append(f"nothing to do: {patch.file} ({end.value})")
        elif state in (State.OTHER, State.MISSING):
            raise PatchError(_refusal(patch, state, root))
        else:
            changed[path] = patch.changed(_read(path), back=end is State.RELEASED) or ""
            said.append(f"{done} {patch.file}")
    for path, text in changed.items():
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8", newline="")
            shutil.copymode(path, new)
    return said


def _refusal(patch: Patch, state: State, root: Path) -> str:
    host = HOSTS.get(patch.host)
    where = f"{host.repository} at {(host.commit or host.version)[:10]}" if host else patch.host
    if state is State.MISSING:
        return f"{root} has no {patch.file}: is it a checkout of {where}?"
    return (
        f"{patch.file} is not the file that the patch was made for, and it does not apply: use {where}, or launch "
        f"through `python -m mismatch_plugin.launch`, which needs no patch."
    )


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


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
