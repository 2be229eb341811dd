"""What the page, the summary and the terminal say of planted comparisons, and that no sentence outlives its data."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="the report needs scipy (extra lab)")
pytest.importorskip("matplotlib", reason="the report needs matplotlib (extra lab)")
pytest.importorskip("jinja2", reason="the report needs jinja2 (extra lab)")

from mismatch_plugin.compare.report import cell, conclusion, focus, write_report
from tests.compare.synthetic import outcome, write_comparison


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_comparison(tmp_path_factory.mktemp("page") / "run")
    write_report(root)
    return root


def page_of(root: Path) -> str:
    return (root / "report.html").read_text(encoding="utf-8")


def text_of(html: str) -> str:
    """Paragraphs and rows of tables, one a line."""
    body = re.sub(r"(?s)<style>.*?</style>|<details>.*?</details>", "", html.partition("<body>")[2])
    body = re.sub(r"</(?:p|li|tr|h\d|figcaption)>", "<br>", re.sub(r"<t[dh][^>]*>", "|", body))
    lines = [" ".join(unescape(re.sub(r"<[^>]+>", " ", line)).split()) for line in body.split("<br>")]
    return "".join(f"{line}\n" for line in lines if line)


def test_the_page_is_the_golden_one(root: Path) -> None:
    """The conclusion first, then the table, which is the legend, the pictures, and every difference."""
    golden = Path(__file__).with_name("page.txt")
    *found, end = text_of(page_of(root)).splitlines()
    assert found == golden.read_text(encoding="utf-8").splitlines()
    assert end.startswith("Complete, every run has finished and was read whole")


def test_the_page_loads_nothing_and_shows_what_it_was_given_as_text(root: Path, tmp_path: Path) -> None:
    html = page_of(root)
    assert "<link" not in html and "<script" not in html and not re.findall(r'(?:src|href)="(?!data:|#)', html)
    assert html.count("<img") == 5 and html.count("<svg") == len(set(re.findall('stroke="(#.{6})"', html))) == 6
    assert "Weights are &lt;old&gt;." in html
    write_report(write_comparison(tmp_path / "run", settings=["int2"], seeds=[1], title="<b>x</b>"))
    assert "<h1>&lt;b&gt;x&lt;/b&gt;</h1>" in page_of(tmp_path / "run")


def test_a_partial_folder_says_so_first(tmp_path: Path) -> None:
    root = write_comparison(tmp_path / "run", settings=["int2"], plan={"int2": ["PPO", "bypass"]})
    (root / "int2" / "bypass" / "seed104" / "done.json").unlink()
    write_report(root)
    said = text_of(page_of(root))
    assert said.index("This is a partial report.") < said.index("Runs of PPO without")
    assert "int2, bypass, seed 104: unfinished, 21 steps; left out of every comparison." in said
    assert json.loads((root / "summary.json").read_text())["complete"] is False


def test_the_summary_has_the_numbers_and_the_picture_s_hash(root: Path) -> None:
    summary = json.loads((root / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert summary["picture"] == hashlib.sha256((root / "collapse.png").read_bytes()).hexdigest()
    bypass = summary["settings"]["stale32"]["variants"]["bypass"]
    assert (bypass["mean"], bypass["collapsed"], bypass["runs"], bypass["verdict"]) == (0.9, 0, 12, "better")
    assert bypass["difference"] == pytest.approx(0.8) and bypass["p"] == pytest.approx(2 / 2**12, rel=1e-5)
    assert bypass["mechanism"] == {"grad_norm": 5.0, "kl": 0.5, "rejected": 0.25}
    assert summary["settings"]["int2"]["title"] == "Two bits"
    assert summary["complete"] and summary["diverged"] == [] and summary["seeds"] == [*range(100, 112)]


def test_the_terminal_gets_one_table_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = write_comparison(tmp_path / "run", settings=["int2"], plan={"int2": ["PPO", "bypass"]})
    lines = write_report(root).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    assert max(map(len, lines)) <= 80 and "(c/n)" in " ".join(lines)
    assert rows["bypass"].split() == ["bypass", "0.01", "▼", "(12/12)"]


BASE = {"a": {"PPO": 0.9, "x": 0.9}, "b": {"PPO": 0.2, "x": 0.8}, "c": {"PPO": 0.9, "x": 0.895}}
GAINED = "x gained in 1 of 3 settings (b) and was significantly worse in none."


@pytest.mark.parametrize(
    ("setting", "changed", "sentence"),
    [
        ("b", {"PPO": 0.85}, "Runs of PPO without correction collapsed in 1 of 3 settings (b 12/12)."),
        ("b", {"x": 0.2}, GAINED),
        ("c", {"x": 0.95}, GAINED),
        ("a", {"x": 0.7}, "All algorithms end within 0.02 of each other in a (0.90) and c (0.90)."),
    ],
)
def test_each_sentence_of_the_conclusion_goes_with_its_data(
    setting: str, changed: dict[str, float], sentence: str
) -> None:
    assert sentence in conclusion(outcome(BASE))
    assert sentence not in conclusion(outcome({**BASE, setting: {**BASE[setting], **changed}}))


def test_the_conclusion_claims_nothing_that_seeds_cannot_carry() -> None:
    few = conclusion(outcome(BASE, n=4))
    assert few[1:] == ["With so few seeds no difference can be significant: nothing else is concluded."]
    noisy = conclusion(outcome({"b": {"PPO": 0.2, "x": 0.4, "y": 0.3}}, spread=1.0))
    assert noisy[-1] == "x and y ran in b alone and made no significant difference there."
    lost = conclusion(outcome({"a": {"PPO": 0.9, "x": 0.6, "y": 0.6}, "b": {"PPO": 0.9, "x": 0.6, "y": 0.6}}))
    assert "x and y gained in none of 2 settings and were significantly worse in 2: a and b." in lost
    assert focus(outcome(BASE)) == "b"
    up = outcome({"a": {"PPO": 0.9, "up": 0.99}}, spread=1e-4)["a"]["up"]
    assert cell(up) == "0.99 ▲" and cell(None) == cell(replace(up, finals={})) == "–"
