"""The files that `inspect` writes of a dump: the page and the pictures."""

from __future__ import annotations

from pathlib import Path

from mismatch_plugin.inspect.result import Diagnosis


def write_report(diagnosis: Diagnosis, folder: Path) -> tuple[Path | None, str]:
    """`report.html` and PNGs in a folder; the page's path, and a sentence about what could not be written.

    The verdict does not need them: a missing library or a folder that cannot be written is a sentence, no error.
    """
    try:
        from mismatch_plugin.inspect.page import write_page
        from mismatch_plugin.inspect.pictures import pictures
    except ImportError as error:
        return None, f"no page: {error}: pip install 'mismatch-plugin[lab]'"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "report.html"
        write_page(diagnosis, page)
        for picture in pictures(diagnosis):
            (folder / picture.name).write_bytes(picture.png)
    except OSError as error:
        return None, f"no page: {folder} cannot be written ({error.strerror}); choose another with --out"
    return page, ""
