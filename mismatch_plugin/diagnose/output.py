"""The file that `inspect` writes of a dump: the page."""

from __future__ import annotations

from pathlib import Path

from mismatch_plugin.diagnose.result import Diagnosis


def write_report(diagnosis: Diagnosis, folder: Path, host: str) -> tuple[Path | None, str]:
    """`report.html` in a folder; the page's path, and a sentence about what could not be written.

    The verdict does not need it: a missing library or a folder that cannot be written is a sentence, no error.
    """
    install, page = "pip install 'mismatch-plugin[lab]'", folder / "report.html"
    try:
        from mismatch_plugin.diagnose.page import write_page

        folder.mkdir(parents=True, exist_ok=True)
        write_page(diagnosis, page, host=host)
    except ImportError as error:
        return None, f"no page: {error}: {install}"
    except OSError as error:
        return None, f"no page: {folder} cannot be written ({error.strerror}); choose another with --out"
    return page, ""
