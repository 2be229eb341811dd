"""The page of a diagnosis: self-contained, escaped, and as a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from tests.diagnose.browser import Browser, start
from tests.diagnose.door import samples_of, told
from tests.diagnose.test_screen import FIRST, of_verdict

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"


class Tags(HTMLParser):
    """Every tag with its attributes; what is open at the end."""

    VOID = ("meta", "img", "br", "link", "input", "line", "rect")

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


def write(
    samples: list[Sample], folder: Path, *options: object, name: str = "dump"
) -> tuple[dict[str, Any], str, Tags]:
    """(the diagnosis, its page, the page's tags)."""
    write_samples(folder / f"{name}.jsonl", samples)
    found = told(folder / f"{name}.jsonl", "--out", folder, "--host", "slime", *options)
    html = (folder / "report.html").read_text(encoding="utf-8")
    return found, html, Tags(html)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = start(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.mark.parametrize("verdict", FIRST)
def test_a_page_of_every_verdict_needs_nothing_else(verdict: str, tmp_path: Path) -> None:
    _, html, tags = write(of_verdict(verdict), tmp_path)
    ids = tags.values("id")
    assert tags.open == [] and len(ids) == len(set(ids))
    assert all(target.startswith("#") and target[1:] in ids for target in tags.values("href"))
    assert tags.values("src") == [] and not re.search(r"@import|url\(", html)
    assert not any(tag in ("iframe", "link", "object", "img") for tag, _ in tags.tags)
    for name in ("aria-controls", "aria-labelledby", "aria-describedby", "for"):
        assert set(tags.values(name)) <= set(ids)
    first = html[: html.index("<nav")]
    assert "Is this normal?" in first and "<svg" in first and ".." not in first and "`" not in first
    assert ("Set this" in first) == ('id="host"' in first) == (verdict in ("large", "normal"))
    assert ("Fix this first" in first) == (verdict == "fault")
    assert ("Inspect a larger dump" in first) == (verdict == "undecided")
    settings = [section for section in ("bounds", "predictions") if section in ids]
    assert settings == (["bounds", "predictions"] if verdict in ("large", "normal") else []), "none under a fault"
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.replace("&#39;", "'")


def hostile() -> list[Sample]:
    """Every text that a dump may hold is a script."""
    fields = {"server": HOSTILE, "group": HOSTILE, "trainer_version": HOSTILE}
    samples = []
    for at, one in enumerate(of_verdict("large")):
        span = WeightSpan(version=HOSTILE, start=0, end=len(one))
        samples.append(one.with_fields(sample_id=f"{HOSTILE}{at}", weight_versions=(span,), **fields))
    return samples


def test_what_a_file_holds_is_text(tmp_path: Path) -> None:
    for options in ((), ("--accept", "mixed_versions")):
        found, html, tags = write(hostile(), tmp_path, *options, name="<img src=x>{{ 7 * 7 }}")
        assert tags.open == [] and [tag for tag, _ in tags.tags].count("script") == 2, found["headline"]
        assert "<img" not in html and "{{ 7 * 7 }}" in html
    late = [one.with_fields(train_log_probs=one.train_log_probs[::-1].copy()) for one in hostile()]
    found, html, tags = write(late, tmp_path)
    assert found["findings"][0]["first"] and "<img" not in html and tags.open == []
    _, html, tags = write(samples_of([[-1.0]]), tmp_path)  # a page of almost nothing
    assert tags.open == [] and "<svg" not in html and 'id="try"' not in html


@pytest.mark.parametrize("verdict", FIRST)
def test_a_browser_shows_it_on_a_phone_and_on_a_desk(verdict: str, tmp_path: Path, browser: Browser) -> None:
    write(of_verdict(verdict), tmp_path)
    path = tmp_path / "report.html"
    for width in (360, 1280):
        browser.open(path, width)
        assert browser.problems == [] and browser.requests == [path.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert browser.evaluate("[...document.querySelectorAll('table')].every(t => t.closest('.scroll, .bars, #try'))")
        top = "document.querySelector('{}').getBoundingClientRect().top"  # flags and fix come first on a phone
        assert browser.evaluate(f"{top.format('.act')} < {top.format('svg')}") == (width == 360)
    for part in (".act", "svg"):
        assert browser.evaluate(f"document.querySelector('{part}').getBoundingClientRect().bottom < innerHeight")
    assert browser.evaluate("document.querySelectorAll('#distribution .bar-of').length") == 90
    write(hostile(), tmp_path)
    browser.open(path)
    assert browser.problems == [] and len(browser.requests) == 1


NOW = "[...document.querySelectorAll('[data-now]')].map(e => e.textContent)"
FORM = "document.getElementById('try').elements"
NAMES = "[...document.querySelectorAll('#from option')].map(o => o.textContent)"
CHANGE = "dispatchEvent(new Event('change', {bubbles: true}))"


def test_the_script_computes_what_the_core_computes(tmp_path: Path, browser: Browser) -> None:
    """Every setting that the page offers has the figures of its prediction."""
    found, _, _ = write(of_verdict("large"), tmp_path)
    browser.open(tmp_path / "report.html")
    names = browser.evaluate(NAMES)
    by_name = {item["setting"]: item for item in found["predictions"]}
    for at, name in enumerate(names):
        item = by_name.get(name.removesuffix(" (recommended)"))
        if item is None or not item["kept"]:
            continue
        browser.evaluate(f"{FORM}.from.value = '{at}'; {FORM}.from.{CHANGE}")
        assert float(browser.evaluate(NOW)[-1]) == pytest.approx(item["mean_weight"], rel=1e-2), name
