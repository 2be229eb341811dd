"""Which version of a host is here, and which one the plugin was tested with: for the start-up block and for patches.

Nothing of a host is imported and no program is run in its tree: versions, commits and checksums are read from files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch_plugin.hooks import base

HOSTS = tuple(base.HOSTS)
MINIMUM_MEGATRON = (0, 16)
"""Oldest megatron-core whose finalize_model_grads and DDP.scale_gradients the hooks were run with."""
_MEGATRON = "megatron/core"
_UNTESTED = "is not the tested version"


@dataclass(frozen=True)
class HostVersion:
    """version: as the host declares it. commit: 40 hex digits. Each None where it cannot be read.

    odd_files: files that the plugin's patches are for and that are neither the recorded ones nor those patched.
    """

    version: str | None
    commit: str | None
    odd_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = "" if self.commit is None else f" at {self.commit[:10]}"
        return f"{self.version or 'of unknown version'}{at}"


def folder() -> Path:
    """Where the patches are: inside the installed package, or next to it in a checkout."""
    here = Path(__file__).parents[1]
    inside = here / "patches"
    return inside if inside.is_dir() else here.parent / "patches"


def manifest() -> dict[str, Any]:
    """`patches/manifest.json`: the tested version of every host, and the patches."""
    return json.loads((folder() / "manifest.json").read_text(encoding="utf-8"))


def version_line(host: str, folders: Sequence[Path] = ()) -> str:
    """One line for the start-up block: the host's version, and whether it is the tested one.

    folders: looked at before what is installed, as sys.path will have them.
    """
    root, tested = find_root(host, folders), recorded_version(host)
    if root is None:
        return f"! host: {host} is not found here; the plugin was tested with {tested}"
    found = compared(read_version(host, root), tested)
    return f"{'! ' if _UNTESTED in found else ''}host: {host} {found}"


def compared(found: HostVersion, tested: HostVersion) -> str:
    """What is here in words, and how it differs from what was tested, if it does."""
    if tested == HostVersion(None, None):
        return f"{found}; no version of it is recorded as tested"
    odd = ", ".join(found.odd_files)
    if found.commit is None or tested.commit is None:
        same = found.version == tested.version and not odd
    else:
        same = found.commit == tested.commit
    if same:
        return f"{found}, the tested version" + (f", with changes of its own in {odd}" if odd else "")
    unknown = " (commit unknown)" if found.version == tested.version and found.commit is None else ""
    there = f"; files that differ: {odd}" if odd else ""
    return (
        f"{found}{unknown} {_UNTESTED}, {tested}{there}. Use that one, or look at the loss and the "
        f"metrics of the first steps before a long run"
    )


def recorded_version(host: str) -> HostVersion:
    """The version that the plugin's tests were run with; an unknown one where the manifest has none."""
    entry = manifest()["tested"].get(host, {})
    return HostVersion(entry.get("version"), entry.get("commit"))


def read_version(host: str, root: Path) -> HostVersion:
    """What the tree at `root` is: a checkout, or the folder in which the host is installed. Nothing is known of a host
    that is not among ours."""
    if host not in HOSTS:
        return HostVersion(None, None)
    declared = base.find_host(host)
    version, commit = _distribution(declared.distribution or host, root)
    odd = [
        entry["file"]
        for entry in manifest()["patches"]
        if entry["host"] == host
        and _digest(root / entry["file"]) not in (entry["before"]["sha256"], entry["after"]["sha256"])
    ]
    version = _declared(root / declared.version_file) or version
    return HostVersion(version, _checked_out(root) or commit, tuple(odd))


def find_root(host: str, folders: Sequence[Path] = ()) -> Path | None:
    """The folder that holds the host's packages, in `folders` or on sys.path; None where there is none."""
    return _holder(base.find_host(host).inside, folders)


def validate_megatron_version(folders: Sequence[Path] = ()) -> None:
    """Raises ValueError where the megatron-core that will be imported is older than the hooks work with."""
    found = megatron_core_version(folders)
    if found is not None and tuple(map(int, re.findall(r"\d+", found)[:2])) < MINIMUM_MEGATRON:
        needed = ".".join(map(str, MINIMUM_MEGATRON))
        raise ValueError(
            f"megatron-core {found} is too old: the correction ends each step inside finalize_model_grads as "
            f"megatron-core {needed} has it. Put Megatron {needed} or newer first on PYTHONPATH."
        )


def megatron_core_version(folders: Sequence[Path] = ()) -> str | None:
    """The version of the megatron-core that the script will import; None where there is none, or it cannot be read.

    folders: looked at first, as sys.path will have them.
    """
    root = _holder(_MEGATRON, folders)
    return None if root is None else _declared(root / _MEGATRON / "package_info.py")


def _holder(inside: str, folders: Sequence[Path]) -> Path | None:
    """The first folder, of `folders` or of where the package is installed, that has `inside` below it."""
    try:
        spec = find_spec(inside.split("/")[0])
    except (ImportError, ValueError):
        spec = None
    found = [] if spec is None else [Path(place).parent for place in spec.submodule_search_locations or ()]
    return next((root for root in [*folders, *found] if (root / inside).is_dir()), None)


def _declared(path: Path) -> str | None:
    """The version in a package_info.py, in a setup.py, or in a file that holds nothing else."""
    text = _text(path)
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*[\"']?([\w.]*)", text, re.MULTILINE))
    if {"MAJOR", "MINOR", "PATCH"} <= parts.keys():
        return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts.get('PRE_RELEASE', '')}"
    found = re.search(r"\bversion\s*=\s*[\"']([^\"']+)[\"']", text) or re.fullmatch(r"\s*(\d[\w.+-]*)\s*", text)
    return None if found is None else found[1]


def _distribution(name: str, root: Path) -> tuple[str | None, str | None]:
    """(version, commit) of an installed distribution whose files are in `root`: pip records where it got a commit."""
    try:
        found = metadata.distribution(name)
        if Path(str(found.locate_file(""))).resolve() != root.resolve():
            return None, None
        source = json.loads(found.read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None, None
    return found.version, source.get("vcs_info", {}).get("commit_id")


def _checked_out(root: Path) -> str | None:
    """The commit that a checkout is at, as git's files say; None for what is no checkout."""
    git = root / ".git"
    if git.is_file():  # a work tree of another repository, or a submodule
        git = root / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD").strip()
    ref = head.removeprefix("ref:").strip()
    if ref != head:
        common = git / (_text(git / "commondir").strip() or ".")
        packed = re.search(rf"^([0-9a-f]+) {re.escape(ref)}$", _text(common / "packed-refs"), re.MULTILINE)
        head = (_text(git / ref) or _text(common / ref) or (packed[1] if packed else "")).strip()
    return head if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", head) else None


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _text(path: Path) -> str:
    """A file's text, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
