"""Write the patch files and the checksums of `manifest.json` again, from the edits in it and checkouts of the hosts.

    python patches/generate.py HOSTS      # HOSTS/slime, HOSTS/miles, HOSTS/Megatron-LM, HOSTS/NeMo-RL

For another commit of a host: check it out, change it in `mismatch_plugin/hooks/hosts.py`, and run this. An edit whose
text is not there exactly once stops it, and that is where the host has moved.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mismatch_plugin.hooks.hosts import HOSTS

HERE = Path(__file__).parent


def edited(text: str, edits: list[dict[str, str]], name: str) -> str:
    """The text with each edit made. Raises ValueError where an edit's text is not there exactly once."""
    for edit in edits:
        count = text.count(edit["find"])
        if count != 1:
            raise ValueError(f"{name} holds the text of an edit {count} times, not once:\n{edit['find']}")
        text = text.replace(edit["find"], edit["replace"])
    return text


def unified(name: str, before: str, after: str) -> str:
    """A patch with one line of context, as `git apply` takes it, with git's own index line."""
    with tempfile.TemporaryDirectory() as folder:
        for side, text in (("a", before), ("b", after)):
            path = Path(folder, side, name)
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
        command = ["git", "diff", "--no-index", "--no-prefix", "--unified=1", "--full-index", f"a/{name}", f"b/{name}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout


def digests(text: str) -> dict[str, str]:
    """SHA-256 of the file, and git's name for it."""
    data = text.encode()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data)
    return {"sha256": hashlib.sha256(data).hexdigest(), "blob": blob.hexdigest()}


def main(hosts: Path) -> None:
    """Write every patch and the manifest."""
    path = HERE / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for entry in manifest["patches"]:
        host = HOSTS[entry["host"]]
        entry["repository"], entry["commit"] = host.repository, host.commit
        before = (hosts / host.title / entry["file"]).read_text(encoding="utf-8")
        after = edited(before, entry["edits"], entry["file"])
        patch = HERE / entry["patch"]
        patch.parent.mkdir(exist_ok=True)
        patch.write_text(unified(entry["file"], before, after), encoding="utf-8")
        entry["before"], entry["after"] = digests(before), digests(after)
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
