"""Which version of a host is here, and whether it is the tested one: for the start-up block and for patches.

Nothing of a host is imported: versions are read from its files, and the commit is asked of git.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mismatch_plugin.hooks.base import Host


def version_line(host: Host, folders: Sequence[Path] = ()) -> str:
    """One line for the start-up block: the host's version, and whether it is the tested one.

    folders: looked at before what is installed, as sys.path will have them.
    """
    tested, root = _shown(host.version, host.commit), _holder(host.inside, folders)
    if root is None:
        return (
            f"! host: {host.name} is not found here: install it in this Python, or put its checkout on PYTHONPATH. The "
            f"plugin was tested with {tested}"
        )
    version, commit = read_version(host, root)
    found = f"{host.name} {_shown(version, commit)}"
    if commit == host.commit if commit and host.commit else version == host.version:
        return f"host: {found}, the tested version"
    return (
        f"! host: {found} is not the tested version, {tested}. Use that one, or look at the loss and the metrics of "
        f"the first steps before a long run"
    )


def _shown(version: str | None, commit: str | None) -> str:
    return (version or "of unknown version") + (f" at {commit[:10]}" if commit else "")


def read_version(host: Host, root: Path) -> tuple[str | None, str | None]:
    """(version as the host declares it, commit in 40 hex digits) of a checkout or of the folder in which the host is
    installed, each None where it cannot be read."""
    return _declared(root / host.version_file) or _installed(host, root), _checked_out(root)


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
    parts = re.findall(r"^(?:MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*[\"']?([\w.]*)", text, re.MULTILINE)
    if len(parts) > 2:
        return ".".join(parts[:3]) + "".join(parts[3:])
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
