"""The page of a diagnosis: self-contained, escaped, and as a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mismatch_plugin.diagnose.findings import Place, Undecided
from mismatch_plugin.diagnose.page import write_page
from mismatch_plugin.diagnose.result import VERDICTS, Diagnosis, Group, Size, Verdict
from tests.diagnose.browser import Browser, start
from tests.diagnose.diagnoses import advised, cause, diagnosis

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


def write(of: Diagnosis, folder: Path, host: str = "slime") -> tuple[str, Tags]:
    html = write_page(of, folder / "report.html", host=host).read_text(encoding="utf-8")
    return html, Tags(html)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = start(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_page_of_every_verdict(verdict: Verdict, tmp_path: Path, browser: Browser):
    html, tags = write(diagnosis(verdict), tmp_path)
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


def test_what_a_file_holds_is_text(tmp_path: Path, browser: Browser):
    """Everywhere that it is quoted, next to numbers that are none; and a page of almost nothing."""
    base = diagnosis("large")
    found = cause("quantised", confidence="likely", evidence=HOSTILE, fix=HOSTILE,
                  first=Place(sample=0, sample_id=HOSTILE, rollout=math.nan))  # fmt: skip
    group = Group(name=HOSTILE, tokens=1, abs_mean=math.nan, kl=-math.inf, k3_kl=0.0, ess=math.nan)
    first = base.predictions[0].model_copy(update={"setting": HOSTILE, "ess": math.nan, "bias": math.inf})
    advice = advised().model_copy(update={"flags": {HOSTILE: HOSTILE}, "setting": HOSTILE, "watch": (HOSTILE,)})
    of = diagnosis(
        "large", source=HOSTILE, format=HOSTILE, findings=(found,), notes=(HOSTILE,), headline=HOSTILE,
        size=Size(quantiles={"p1": 0.1}, breakdowns={HOSTILE: (group,)}), predictions=(first, *base.predictions[1:]),
        metrics={HOSTILE: math.inf}, undecided=(Undecided(faults=("zero_fill",), reason=HOSTILE),),
        recommendation=advice,
    )  # fmt: skip
    html, tags = write(of, tmp_path)
    assert tags.open == [] and [tag for tag, _ in tags.tags].count("script") == 2
    assert "<img" not in html and "{{ 7 * 7 }}" in html
    browser.open(tmp_path / "report.html")
    assert browser.problems == [] and len(browser.requests) == 1
    of = Diagnosis(verdict="undecided", headline="nothing to compare", source="a.pt", format="x", samples=0, tokens=0)
    for almost in (of, diagnosis("normal", histograms=None)):
        html, tags = write(almost, tmp_path)
        assert tags.open == [] and "<svg" not in html and 'id="try"' not in html
        browser.open(tmp_path / "report.html")
        assert browser.problems == []


def test_sliders_hosts_sorting_and_keys(tmp_path: Path, browser: Browser):
    of, flags = diagnosis("large"), advised().flags
    write(of, tmp_path)
    browser.open(tmp_path / "report.html")
    now = "[...document.querySelectorAll('[data-now]')].map(e => e.textContent)"
    by_name = {item.setting: item for item in of.predictions}
    best, mask = by_name[advised().setting], by_name["algorithm 2, token, mask 0.5 to 2"]
    assert browser.evaluate(now)[0] == "100 %" and float(browser.evaluate(now)[-1]) == pytest.approx(
        best.mean_weight, rel=1e-3
    )
    form = "document.getElementById('try').elements"
    change = "dispatchEvent(new Event('change', {bubbles: true}))"
    browser.evaluate(f"{form}.upper_value.value = '1.01'; {form}.upper_value.{change}")
    assert float(browser.evaluate(now)[-1]) < best.mean_weight and browser.evaluate(f"{form}.lower.disabled")
    names = browser.evaluate("[...document.querySelectorAll('#from option')].map(o => o.textContent)")
    assert names[0].endswith(" (recommended)")
    browser.evaluate(f"{form}.from.value = '{names.index(mask.setting)}'; {form}.from.{change}")
    assert browser.evaluate(f"{form}.mode.value") == "mask" and browser.evaluate(f"{form}.lower_value.value") == "0.5"
    labels = "[...document.querySelectorAll('#tried .bound')].length"
    assert browser.evaluate(now)[0] == "100 %" and browser.evaluate(labels) == 2
    # A slider at its outer end is no bound; the level changes picture and figures.
    browser.evaluate(f"{form}.upper.value = {form}.upper.max; {form}.upper.dispatchEvent(new Event('input'))")
    assert browser.evaluate(f"{form}.upper_value.value") == "" and browser.evaluate(labels) == 1
    browser.evaluate(f"{form}.level[1].click()")
    assert "responses (sum" in browser.evaluate("document.getElementById('tried').getAttribute('aria-label')")
    # Rejection alone is a criterion, and none judges prefixes.
    browser.evaluate(f"{form}.mode[3].click()")
    assert browser.evaluate(f"{form}.mode.value") == "reject"
    browser.evaluate(f"{form}.level[3].click()")
    assert browser.evaluate(f"{form}.mode[3].disabled") and browser.evaluate(f"{form}.mode.value") == "mask"
    # The chosen host's flags alone are seen.
    seen = "[...document.querySelectorAll('.panel:not(.off) pre')].map(e => e.textContent)"
    assert browser.evaluate(seen) == [flags["slime"]]
    browser.evaluate(f"var host = document.getElementById('host'); host.value = 'nemo-rl'; host.{change}")
    assert browser.evaluate(seen) == [flags["nemo-rl"]]
    # Sorting, twice.
    kept = "[...document.querySelectorAll('.sortable tbody tr')].map(r => Number(r.cells[2].dataset.value))"
    for order in (-1, 1):
        browser.evaluate("document.querySelectorAll('.sortable thead button')[2].click()")
        assert browser.evaluate(kept) == sorted(browser.evaluate(kept), key=lambda value: order * value)
    # Reading a picture by keys and by the pointer.
    browser.evaluate("document.querySelector('svg').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
    said = "document.getElementById('said-distribution').textContent"
    assert (by_key := re.search(r"log-ratio .* to .*, ratio .*: (none|about \d+ of \d+)", browser.evaluate(said)))
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.evaluate("var b = document.querySelectorAll('#distribution .bar-of')[45].getBoundingClientRect();"
                     "document.querySelector('svg').dispatchEvent(new PointerEvent('pointermove',"
                     "{clientX: b.left + b.width / 2}))")  # fmt: skip
    assert browser.evaluate(said).startswith(by_key[0]) and browser.problems == []
    # On paper everything is open.
    browser.call("Emulation.setEmulatedMedia", media="print")
    display = "getComputedStyle(document.querySelector('{}')).display"
    assert browser.evaluate(display.format("#try")) == "none" == browser.evaluate(display.format(".choose"))
    assert browser.evaluate(display.format("[data-host=verl]")) == "block"
    folded = "document.querySelector('details table').checkVisibility({contentVisibilityAuto: true})"
    assert browser.evaluate(folded)
    browser.call("Emulation.setEmulatedMedia", media="")
    assert not browser.evaluate(folded)


def test_bounds_outside_the_picture_are_named(tmp_path: Path, browser: Browser):
    for bound, drawn in ((1.1, 1), (1e6, 0)):
        settings = {"use_tis": True, "tis": {"upper_bound": bound}}
        advice = advised().model_copy(update={"settings": settings})
        html, _ = write(diagnosis("large", recommendation=advice), tmp_path, host="verl")
        assert re.findall(r"selected>([^<]*)", html) == ["verl"]
        browser.open(tmp_path / "report.html")
        assert browser.evaluate("document.querySelectorAll('#distribution .bound').length") == drawn
        beyond = browser.evaluate("document.querySelector('.beyond').textContent")
        assert ("upper 1000000 of the bounds" in beyond) != bool(drawn)
