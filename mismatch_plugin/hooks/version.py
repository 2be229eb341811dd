"""Which version of a host is here, and whether it is the tested one: for the start-up block and for patches.

Nothing of a host is imported: versions are read from its files, and the commit is asked of git.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mismatch_plugin.hooks.base import Host


@dataclass(frozen=True)
class HostVersion:
    """version: as the host declares it. commit: 40 hex digits. Each None where it cannot be read."""

    version: str | None
    commit: str | None

    def __str__(self) -> str:
        at = "" if self.commit is None else f" at {self.commit[:10]}"
        return f"{self.version or 'of unknown version'}{at}"


def version_line(host: Host, folders: Sequence[Path] = ()) -> str:
    """One line for the start-up block: the host's version, and whether it is the tested one.

    folders: looked at before what is installed, as sys.path will have them.
    """
    tested, root = HostVersion(host.version, host.commit), _holder(host.inside, folders)
    if root is None:
        return (
            f"! host: {host.name} is not found here: install it in this Python, or put its checkout on PYTHONPATH. The "
            f"plugin was tested with {tested}"
        )
    found = read_version(host, root)
    by_commit = found.commit is not None and tested.commit is not None
    if found.commit == tested.commit if by_commit else found.version == tested.version:
        return f"host: {host.name} {found}, the tested version"
    return (
        f"! host: {host.name} {found} is not the tested version, {tested}. Use that one, or look at the loss and the "
        f"metrics of the first steps before a long run"
    )


def read_version(host: Host, root: Path) -> HostVersion:
    """What the tree at `root` is: a checkout, or the folder in which the host is installed."""
    return HostVersion(_declared(root / host.version_file) or _installed(host, root), _checked_out(root))


def _holder(inside: str, folders: Sequence[Path]) -> Path | None:
    """The first folder, of `folders` or of where the package is installed, that has `inside` below it."""
    try:
        spec = find_spec(inside.split("/")[0])
    except (ImportError, ValueError):
        spec = None
    found = [] if spec is None else [Path(place).parent for place in spec.submodule_search_locations or ()]
    return next((root for root in [*folders, *found] if (root / inside).is_dir()), None)


def _declared(path: Path) -> str | None:
    """The version in a package_info.py, setup.py, pyproject.toml or __init__.py, or in a file of nothing else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*[\"']?([\w.]*)", text, re.MULTILINE))
    if {"MAJOR", "MINOR", "PATCH"} <= parts.keys():
        return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts.get('PRE_RELEASE', '')}"
    found = re.search(r"\b(?:__)?version(?:__)?\s*=\s*[\"']([^\"']+)[\"']", text) or re.fullmatch(
        r"\s*(\d[\w.+-]*)\s*", text
    )
    return None if found is None else found[1]


def _installed(host: Host, root: Path) -> str | None:
    """The version of the distribution whose files are in `root`."""
    try:
        found = metadata.distribution(host.distribution or host.name)
    except metadata.PackageNotFoundError:
        return None
    return found.version if Path(str(found.locate_file(""))).resolve() == root.resolve() else None


def _checked_out(root: Path) -> str | None:
    """The commit that a checkout is at; None for what is no checkout, also inside of one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(root.resolve().parent)
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
