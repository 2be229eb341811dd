"""`mismatch-plugin patch`: the small patches of the hosts, for those who rather patch than launch.

`patches/manifest.json` has one entry a file of a host: why, and its edits, each a text that is there once and
what takes its place. All files of a host are checked before the first is changed; nothing in the checkout is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mismatch_plugin.files import replacing
from mismatch_plugin.hooks.hosts import HOSTS, host_name

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Check, apply or revert the patches of a host's checkout.",
)
APPLIED, RELEASED, OTHER = "applied", "not applied", "another version"
"""What a file is, as seen by its patch."""


class PatchError(typer.BadParameter):
    """A tree to which a patch does not apply, or a host without one: one sentence, and the command exits 2."""


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
    """The patches of a host: those that are not optional, or with `optional` all, or those of the files named. Raises:
    PatchError for a host or file without a patch."""
    every, host = manifest(), host_name(host)
    mine = [patch for patch in every if patch.host == host]
    if not mine:
        more = f" {HOSTS[host].title} needs none: {HOSTS[host].door}." if host in HOSTS else ""
        known = ", ".join(dict.fromkeys(patch.host for patch in every))
        raise PatchError(f"there is no patch for host {host!r}: there are those of {known}.{more}")
    if unknown := sorted(set(files) - {patch.file for patch in mine}):
        known = ", ".join(patch.file for patch in mine)
        raise PatchError(f"{host} has no patch for {unknown[0]}: there are those of {known}.")
    return [patch for patch in mine if patch.file in files or (not files and (optional or not patch.optional))]


def state_of(patch: Patch, root: Path) -> str:
    """What the file is now."""
    path = root / patch.file
    text = path.read_bytes().decode() if path.is_file() else ""
    if patch.changed(text, back=True) is not None:
        return APPLIED
    return OTHER if patch.changed(text) is None else RELEASED


def apply(patches: Sequence[Patch], root: Path, back: bool = False) -> list[str]:
    """Apply what is not applied, or take `back` what is, and say what was done. PatchError before any file changes."""
    changed: dict[Path, str] = {}
    said = []
    for patch in patches:
        state, path = state_of(patch, root), (root / patch.file).resolve()
        if not path.is_file():
            raise PatchError(f"{path} is not there: give the folder of a checkout of {patch.host} as --root.")
        if state == OTHER:
            host = HOSTS.get(patch.host)
            where = f"{host.repository} at {(host.commit or host.version)[:10]}" if host else patch.host
            raise PatchError(
                f"{path} is {state}: the patch is for {where}. Use that one, or, for flags of slime and miles, launch "
                f"through `python -m mismatch_plugin.launch`, which needs no patch."
            )
        if state == (RELEASED if back else APPLIED):
            said.append(f"nothing to do: {patch.file} ({state})")
        else:
            changed[path] = patch.changed(path.read_bytes().decode(), back) or ""
            said.append(f"{'reverted in' if back else 'applied to'} {patch.file}")
    for path, text in changed.items():
        with replacing(path) as new:
            new.write_bytes(text.encode())
            shutil.copymode(path, new)
    return said


# The command ----------------------------------------------------------------------------------------------------------

HostName = Annotated[str, typer.Option(help=f"{', '.join(dict.fromkeys(patch.host for patch in manifest()))}.")]
Root = Annotated[Path, typer.Option(help="Root of the host's checkout.", exists=True, file_okay=False)]
Files = Annotated[list[str] | None, typer.Option("--file", help="Only this file of the host. May be repeated.")]
OptionalToo = Annotated[bool, typer.Option("--optional", help="The optional patches too (precision, speed).")]


@app.command("check")
def check_command(host: HostName, root: Root) -> None:
    """Say for each patch, the optional ones too, what it is for and whether it is applied.

    Exits 1 where one that is not optional can neither be applied nor is.
    """
    failed = False
    for patch in patches_of(host, optional=True):
        state = state_of(patch, root)
        typer.echo(f"{patch.file}{' (optional)' if patch.optional else ''}: {state}\n  {patch.why}")
        failed |= state == OTHER and not patch.optional
    if failed:
        raise typer.Exit(1)


@app.command("apply")
def apply_command(host: HostName, root: Root, file: Files = None, optional: OptionalToo = False) -> None:
    """Apply the patches of a host; what is applied already stays."""
    typer.echo("\n".join(apply(patches_of(host, file or (), optional), root)))


@app.command("revert")
def revert_command(host: HostName, root: Root) -> None:
    """Take the patches of a host back, the optional ones too."""
    # An optional file that was never patched must not stop the others.
    chosen = [p for p in patches_of(host, optional=True) if not p.optional or state_of(p, root) == APPLIED]
    typer.echo("\n".join(apply(chosen, root, back=True)))
