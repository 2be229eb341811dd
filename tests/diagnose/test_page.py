"""The page of a diagnosis: self-contained, escaped, without scripts, with a part for what each verdict calls for."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from tests.diagnose.door import samples_of, told
from tests.diagnose.test_screen import FIRST, of_verdict

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"
PICTURE = "<svg viewBox"


class Tags(HTMLParser):
    """Every tag with its attributes; what is open at the end."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def write(samples: list[Sample], folder: Path, name: str = "dump") -> tuple[dict[str, Any], str, Tags]:
    """(the diagnosis, its page, the page's tags)."""
    write_samples(folder / f"{name}.jsonl", samples)
    found = told(folder / f"{name}.jsonl", "--out", folder, "--host", "slime", "--accept", "mixed_versions")
    html = (folder / "report.html").read_text(encoding="utf-8")
    return found, html, Tags(html)


@pytest.mark.parametrize("verdict", FIRST)
def test_a_page_of_every_verdict_needs_nothing_else(verdict: str, tmp_path: Path) -> None:
    found, html, tags = write(of_verdict(verdict), tmp_path)
    ids = tags.values("id")
    assert tags.open == [] and len(ids) == len(set(ids))
    assert all(target.startswith("#") and target[1:] in ids for target in tags.values("href"))
    assert all(source.startswith("data:") for source in tags.values("src")) and not re.search(r"@import|url\(", html)
    assert not any(tag in ("script", "iframe", "link", "object") for tag, _ in tags.tags)
    first = html[: html.index('id="findings"')]
    assert "Is this normal?" in first and PICTURE in first and ".." not in first and "`" not in first
    is_advised = verdict in ("large", "normal")
    assert ("Set this" in first) == ("<details open><summary>Flags for slime<" in first) == is_advised
    assert ("Fix this first" in first) == (verdict == "fault")
    assert ("Inspect a larger dump" in first) == (verdict == "undecided")
    assert ("predictions" in ids) == is_advised, "none under a fault"
    rows = [item["setting"] for item in found["predictions"]]
    assert all(f'<th scope="row">{setting}</th>' in html.replace("&gt;", ">") for setting in rows)


def test_what_a_file_holds_is_text(tmp_path: Path) -> None:
    texts: dict[str, Any] = dict.fromkeys(("server", "group", "trainer_version", "sample_id"), HOSTILE)
    texts["weight_versions"] = (WeightSpan(version=HOSTILE, start=0, end=20),)
    for verdict in ("large", "fault"):
        samples = [one.with_fields(**texts) for one in of_verdict(verdict)]
        _, html, tags = write(samples, tmp_path, name="<img src=x>{{ 7 * 7 }}")
        assert tags.open == [] and "img" not in {tag for tag, _ in tags.tags} and html.count(PICTURE) == 1
        assert "<script" not in html and "{{ 7 * 7 }}" in html
    _, html, tags = write(samples_of([[-1.0]]), tmp_path)  # a page of almost nothing
    assert tags.open == [] and PICTURE not in html
