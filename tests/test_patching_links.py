"""`mismatch-plugin patch` where symbolic links lead to the checkout or to a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mismatch_plugin.patching import Patch, PatchError, State, apply, revert, state_of

BEFORE = "one\ntwo\n"
AFTER = "one\nours\ntwo\n"


@pytest.fixture
def patches(tmp_path: Path) -> list[Patch]:
    """Patches for pkg/a.py and pkg/b.py of the folder `host`."""
    made = []
    for file in ("pkg/a.py", "pkg/b.py"):
        path = tmp_path / "host" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BEFORE)
        text = f"--- a/{file}\n+++ b/{file}\n@@ -1,2 +1,3 @@\n one\n+ours\n two\n"
        patch = tmp_path / f"{path.stem}.patch"
        patch.write_text(text)
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in (BEFORE, AFTER)]
        made.append(Patch("own", "some/host", "0" * 40, file, patch, "to test", False, *digests))
    return made


def test_a_checkout_behind_a_link_is_patched(tmp_path: Path, patches: list[Patch]) -> None:
    link = tmp_path / "link"
    link.symlink_to("host")
    apply(patches, link)
    assert (tmp_path / "host" / "pkg" / "a.py").read_text() == AFTER
    assert state_of(patches[0], link) is State.APPLIED
    revert(patches, link)
    assert (tmp_path / "host" / "pkg" / "a.py").read_text() == BEFORE


@pytest.mark.parametrize("linked", ["pkg/b.py", "pkg"])
@pytest.mark.parametrize("act", [apply, revert])
def test_a_file_behind_a_link_is_refused_and_nothing_is_changed(
    tmp_path: Path, patches: list[Patch], linked: str, act: object
) -> None:
    root, text = tmp_path / "host", BEFORE if act is apply else AFTER
    for patch in patches:
        (root / patch.file).write_text(text)
    elsewhere = tmp_path / "elsewhere"
    (root / linked).rename(elsewhere)
    (root / linked).symlink_to(elsewhere)
    assert state_of(patches[1], root) is State.LINKED
    with pytest.raises(PatchError, match=r"pkg/.\.py is reached by a symbolic link to .*elsewhere"):
        act(patches, root)  # pyright: ignore[reportCallIssue]
    assert [(root / patch.file).read_text() for patch in patches] == [text] * 2
