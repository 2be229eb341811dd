"""The report of `compare`: arithmetic worked by hand, the page whole and partial, the seed-free tables."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mismatch_plugin.report import exact, statistics
from mismatch_plugin.report.data import align, describe, read_run_folder, short

SETTINGS = ("control", "stale16")
VARIANTS = ("0", "1", "2:token:truncate")
SEEDS = 4
STEPS = 12
PICTURES_A_SETTING = 16
METRICS = (
    *("kl", "k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "rollout_is_veto_fraction", "ppl_ratio"),
    *("chi2_token", "chi2_seq", "accepted_token_fraction"),
    *("rollout_is_weight_after_mean", "rollout_is_weight_after_max", "rollout_is_weight_after_eff_sample_size"),
    *(f"rollout_is_ratio_{q}" for q in ("p1", "p50", "p99", "p99_9")),
)


def level(setting: str, variant: str, seed: int) -> float:
    """Exact match that a synthetic run ends at: stale16 costs 0 and 1 dearly, and every seed a little else."""
    if setting == "control":
        return 0.9 + 0.01 * seed
    return {"0": 0.4, "1": 0.41 - 0.03 * (seed % 2)}.get(variant, 0.7 + 0.01 * (seed % 2)) + 0.02 * seed


def write_run(root: Path, setting: str, variant: str, seed: int, steps: int = STEPS, tail: str = "") -> None:
    folder = root / setting / variant.replace(":", "_") / f"seed{seed}"
    folder.mkdir(parents=True)
    config = {"variant": variant, "mismatch": {"use_tis": variant[0] == "2"}, "stale": 16 * (setting == "stale16")}
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for step in range(steps):
        exact = level(setting, variant, seed) * min(1.0, (step + 1) / 6)
        old = 0.0 if variant == "1" else 0.25
        record = {
            "step": step,
            "reward": exact / 2,
            "exact": exact / 3,
            "held_out_reward": exact if step % 2 == 0 else None,
            "held_out_exact": exact if step % 2 == 0 else None,
            "grad_norm": 1.0 + step,
            "seconds": {"rollout": 0.5, "old_log_probs": old, "train": 0.25},
            "metrics": {f"rollout_corr/{name}": 0.5 + 0.01 * step for name in METRICS},
        }
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)
    if steps == STEPS and not tail:
        (folder / "done.json").write_text("{}")


def write_folder(root: Path, settings: tuple[str, ...] = SETTINGS) -> Path:
    for setting in settings:
        for variant in VARIANTS:
            for seed in range(SEEDS):
                write_run(root, setting, variant, seed)
    lab = {"task": "reverse <digits>", "data": "/somewhere/private/file.txt"}
    info = {"settings": settings, "variants": VARIANTS, "seeds": SEEDS, "lab": lab, "versions": {"torch": "2.x"}}
    (root / "run.json").write_text(json.dumps(info))
    return root


# Arithmetic, worked by hand.


def test_paired_difference_is_taken_seed_by_seed():
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, error 0.1/√3. Seed 9 has no partner.
    pair = statistics.paired_difference({0: 0.6, 1: 0.3, 2: 0.9, 9: 5.0}, {0: 0.5, 1: 0.1, 2: 0.6})
    assert pair.n == 3
    assert pair.mean == pytest.approx(0.2)
    assert pair.error == pytest.approx(0.1 / math.sqrt(3))
    assert (pair.low, pair.high) == pytest.approx((0.2 - 4.302653 * pair.error, 0.2 + 4.302653 * pair.error))
    # t = 2√3 with 2 degrees of freedom: p = 1 − t/√(2 + t²) = 1 − √(12/14).
    assert pair.p == pytest.approx(1 - math.sqrt(12 / 14))


@pytest.mark.parametrize(("df", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_t_quantiles_are_those_of_the_tables(df: int, quantile: float):
    assert statistics.t_quantile(0.975, df) == pytest.approx(quantile, abs=6e-5)
    assert statistics.t_two_sided_p(quantile, df) == pytest.approx(0.05, abs=1e-5)
    assert statistics.t_two_sided_p(0.0, df) == pytest.approx(1.0)


def test_holm_steps_down():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.6]) == [1.0, 1.0]
    assert statistics.holm([]) == []


AREA, DRAWDOWN, FINAL = statistics.area_under_curve, statistics.worst_drawdown, statistics.final_value


@pytest.mark.parametrize(
    ("figure", "curve", "value"),
    [
        (AREA, ([0.0, 2.0, 4.0], [0.0, 1.0, 2.0]), 1.0),  # trapezoids 2·0.5 + 2·1.5 over 4 steps
        (AREA, ([0.0, 1.0, 4.0], [0.0, 1.0, 0.0]), 0.5),
        (AREA, ([3.0], [0.7]), 0.7),
        (AREA, ([], []), math.nan),
        (DRAWDOWN, ([0.2, 0.8, 0.5, 0.9, 0.4],), 0.5),  # the largest fall from an earlier value
        (DRAWDOWN, ([0.1, 0.2, 0.3],), 0.0),
        (FINAL, (np.arange(20.0),), 18.5),  # the mean of the last tenth
        (FINAL, (np.arange(5.0),), 4.0),
        (FINAL, (np.arange(11.0),), 9.5),
    ],
)
def test_figures_of_a_curve(figure: Callable[..., float], curve: tuple[list[float], ...], value: float):
    assert figure(*map(np.array, curve)) == pytest.approx(value, nan_ok=True)


def test_mean_and_error_leave_out_what_is_no_number():
    m = statistics.mean_and_error([1.0, 3.0, math.nan])
    assert (m.n, m.mean, m.error) == (2, 2.0, pytest.approx(1.0))
    assert math.isnan(statistics.mean_and_error([1.0]).error) and math.isnan(statistics.mean_and_error([]).mean)


def test_verdicts():
    assert statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).verdict == "same"
    assert statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.5}).verdict == "too few seeds"
    assert statistics.Paired(5, 0.2, 0.1, -0.1, 0.5, 0.03, 0.09).verdict == "not significant"
    assert statistics.Paired(5, 0.2, 0.1, 0.1, 0.3, 0.01, 0.03).verdict == "significant"


def test_the_highest_mean_is_judged_among_all_pairs():
    """It was found by looking at all of them: p = .03 against algorithm 0 is .06 among three pairs."""
    values = {
        "2": dict(enumerate((0.80, 0.80, 0.80, 0.80))),
        "0": dict(enumerate((0.70, 0.55, 0.75, 0.62))),
        "1": dict(enumerate((0.65, 0.66, 0.65, 0.66))),
    }
    none = statistics.Mean(4, 0.0, 0.0)
    summaries = [statistics.VariantSummary(name, 4, {}, none, none, values=of) for name, of in values.items()]
    assert 0.025 < statistics.paired_difference(values["2"], values["0"]).p < 0.05
    (finding,) = statistics._highest(summaries, "exact match")
    assert "not significantly different from it: 0 PPO" in finding.text, finding.text


def test_seeds_are_aligned_at_the_steps_they_share():
    first = (np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    second = (np.array([2.0, 4.0, 6.0]), np.array([5.0, 6.0, 7.0]))
    steps, values = align([first, second])
    assert (steps.tolist(), values.tolist()) == ([2.0, 4.0], [[2.0, 3.0], [5.0, 6.0]])
    assert align([])[1].shape == (0, 0)


def test_words():
    assert describe("2:sequence:mask") == "2 decoupled PPO, sequence mask"
    assert (describe("0"), describe("geo_rs"), short("3:token:truncate")) == ("0 PPO", "geo_rs", "3 token truncate")
    assert (
        statistics.signed(0.25),
        statistics.signed(-0.25),
        statistics.signed(-0.0001),
        statistics.p_value(1e-5),
    ) == ("+0.250", "−0.250", "0.000", "< 0.001")


# Reading.


def test_summary_of_a_whole_folder(tmp_path: Path):
    folder = read_run_folder(write_folder(tmp_path))
    assert folder.complete and folder.seeds == tuple(range(SEEDS)) and folder.variants == VARIANTS
    assert folder.source("exact") == "held_out_exact"
    control, stale = statistics.summarise(folder)
    zero, bypass, token = stale.variants
    assert zero.final["exact"].mean == pytest.approx(0.43)  # 0.4 + 0.02 · mean of 0 to 3
    assert token.difference is not None and token.difference.mean == pytest.approx(0.305)
    assert token.difference.error == pytest.approx(math.sqrt(1e-4 / 3) / 2)
    assert token.difference.p_holm == pytest.approx(2 * token.difference.p)
    assert token.drawdown.mean == 0.0
    assert bypass.difference is not None and bypass.difference.verdict == "not significant"
    assert [finding.kind for finding in stale.findings][:2] == ["significant", "not significant"]
    assert "2 decoupled PPO, token truncate ended higher than algorithm 0 by 0.305" in stale.findings[0].text
    assert "1 bypass PPO" in stale.findings[1].text
    assert control.findings[0].kind == "same"


def damage(root: Path) -> Path:
    """A folder as an interrupt leaves it: unfinished, cut, empty and absent runs, and no whole configuration."""
    write_folder(root, settings=("stale16",))
    runs = root / "stale16"
    shutil.rmtree(runs / "2_token_truncate")
    write_run(root, "stale16", "2:token:truncate", 0, steps=5, tail='{"step": 5, "rew')
    shutil.rmtree(runs / "1" / "seed3")
    shutil.rmtree(runs / "0" / "seed2")
    (runs / "0" / "seed2").mkdir()
    path = runs / "1" / "seed0" / "metrics.jsonl"
    good = path.read_text().splitlines()
    nan = json.dumps({**json.loads(good[3]), "grad_norm": math.nan, "metrics": None})
    path.write_text("\n".join(["[]", good[0], "{broken", *good[1:3], nan, *good[4:], good[-1]]))
    (runs / "1" / "seed0" / "config.json").write_text('{"vari')
    return root


def test_what_is_missing_is_skipped_and_said(tmp_path: Path):
    folder = read_run_folder(damage(tmp_path))
    text = "\n".join(folder.missing)
    assert not folder.complete
    for part in (
        "stale16, 2 decoupled PPO, token truncate, seed 0: 1 damaged line skipped.",
        "stale16, 2 decoupled PPO, token truncate, seed 0: unfinished, 5 steps",
        "stale16, 2 decoupled PPO, token truncate: seeds 1, 2, 3 not started.",
        "stale16, 1 bypass PPO: seed 3 not started.",
        "stale16, 0 PPO, seed 2: started, but holds no step.",
        "stale16, 1 bypass PPO, seed 0: 2 damaged lines skipped.",
        "stale16, 1 bypass PPO, seed 0: grad_norm is no finite number at 1 step.",
    ):
        assert part in text
    assert len(folder.runs["stale16", "1", 0].steps) == STEPS
    (summary,) = statistics.summarise(folder)
    assert summary.variants[1].difference is not None and summary.variants[1].difference.n == 2
    assert summary.variants[2].seeds == 0
    assert [finding.kind for finding in summary.findings] == ["too few seeds"]


def test_a_hostile_folder_is_read(tmp_path: Path):
    """Numbers that no float holds, nesting without end, lines that are no text, and what is no file at all."""
    write_folder(tmp_path, settings=("control",))
    runs = tmp_path / "control"
    path = runs / "0" / "seed0" / "metrics.jsonl"
    bad = [
        '{"step": 1e400}',
        '{"step": NaN}',
        '{"step": "1"}',
        '{"step": 1.5}',
        '{"step": ' + "[" * 100_000,
        "[]",
        "\\",
    ]
    huge = '{"step": 12, "grad_norm": 1' + "0" * 400 + ', "exact": 0.5, "reward": 1e400}'
    path.write_bytes(path.read_bytes() + "\n".join([*bad, huge]).encode() + b"\n\xff\xfe\n\n" + b'{"step": 13}\n')
    (runs / "0" / "seed1" / "metrics.jsonl").unlink()
    os.mkfifo(runs / "0" / "seed1" / "metrics.jsonl")
    (runs / "1" / "seed0" / "config.json").write_text("{" * 100_000)
    info = json.loads((tmp_path / "run.json").read_text())
    for seeds in (10**9, 1e9, -1, "4", [0, "1"], {}):
        (tmp_path / "run.json").write_text(json.dumps({**info, "seeds": seeds}))
        folder = read_run_folder(tmp_path)
        assert folder.seeds == tuple(range(SEEDS)), seeds
        assert any("which is not a number of seeds: taken are those found" in text for text in folder.missing), seeds
    text = "\n".join(folder.missing)
    assert "control, 0 PPO, seed 0: 8 damaged lines skipped." in text
    assert "control, 0 PPO, seed 1: started, but holds no step." in text
    run = folder.runs["control", "0", 0]
    assert run.steps[-2:].tolist() == [12, 13] and math.isnan(run.column("grad_norm")[-2])
    (tmp_path / "run.json").write_text('{"settings": ' + "[" * 100_000)
    assert "run.json is missing or damaged" in read_run_folder(tmp_path).missing[0]


def test_a_run_folder_may_list_its_seeds(tmp_path: Path):
    write_run(tmp_path, "control", "0", 3)
    (tmp_path / "run.json").write_text(json.dumps({"settings": ["control"], "variants": ["0"], "seeds": [3]}))
    assert read_run_folder(tmp_path).complete


def test_u2028_is_no_end_of_a_line(tmp_path: Path):
    write_run(tmp_path, "control", "0", 0, tail='{"step": 12, "note": "a\u2028b\u0085c", "exact": 0.25}\n')
    run = read_run_folder(tmp_path).runs["control", "0", 0]
    assert run.steps[-1] == 12 and run.column("exact")[-1] == 0.25


def test_an_empty_folder_is_read_and_a_missing_one_refused(tmp_path: Path):
    assert statistics.summarise(read_run_folder(tmp_path)) == []
    with pytest.raises(FileNotFoundError, match="is no folder"):
        read_run_folder(tmp_path / "nowhere")


# The page.


class Page(HTMLParser):
    """Tags that must close, images, section ids and everything that could load something."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.targets += [value for name, value in values.items() if name in ("src", "href", "srcset", "data")]
        if tag == "img":
            assert values["alt"]
            self.images.append(values["src"])
        assert tag not in ("script", "iframe", "link", "object")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def build(root: Path) -> Page:
    pytest.importorskip("matplotlib", reason="the report needs matplotlib (extra lab)")
    pytest.importorskip("jinja2", reason="the report needs jinja2 (extra lab)")
    from mismatch_plugin.report import page as page_module
    from mismatch_plugin.report import plots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 60)
        assert page_module.build_report(root, exact=False) == root / "report.html"
    html = (root / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", html)
    page = Page(html)
    assert page.open == []
    assert all(target.startswith(("data:image/png;base64,", "#")) for target in page.targets)
    assert {target[1:] for target in page.targets if target.startswith("#")} <= set(page.ids)
    assert {"about", "findings", "summary", "quantiles", "time", "exact", "settings", "missing"} <= set(page.ids)
    return page


def test_whole_page(tmp_path: Path):
    page = build(write_folder(tmp_path))
    assert {"setting-1", "setting-2"} <= set(page.ids)
    assert len(page.images) == PICTURES_A_SETTING * len(SETTINGS) + 1  # and the overview
    assert len(list((tmp_path / "plots").glob("*.png"))) == PICTURES_A_SETTING * len(SETTINGS) + 1
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "partial report" not in html
    assert "reverse &lt;digits&gt;" in html
    assert "/somewhere" not in html and "file.txt" in html
    assert "old-log-prob pass takes 25 % of a step of algorithm 0; 1 bypass PPO skips it." in html
    assert "Not significantly different from algorithm 0" in html


def test_partial_page_then_chromium_shows_it(tmp_path: Path):
    page = build(damage(tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "This is a partial report." in html and "seeds 1, 2, 3 not started" in html
    assert len(page.images) == PICTURES_A_SETTING + 1
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not browser:
        pytest.skip("no Chromium here: the page was parsed, but not rendered")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-pdf-header-footer"]
    data, pdf = tmp_path / "browser", tmp_path / "page.pdf"
    command = [browser, *flags, f"--user-data-dir={data}", f"--print-to-pdf={pdf}", (tmp_path / "report.html").as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_size > 50_000


def test_names_between_dollar_signs_are_no_mathematics(tmp_path: Path):
    r"""`$\\frac$` would end in a parse error of matplotlib, `$a$` would be set in italics."""
    variants = ("0", "$\\frac$ a_b^", "$x")
    for variant in variants:
        for seed in range(3):
            write_run(tmp_path, "price $5$ <b>", variant, seed)
    info = {"settings": ["price $5$ <b>"], "variants": variants, "seeds": 3}
    (tmp_path / "run.json").write_text(json.dumps(info))
    page = build(tmp_path)
    assert len(page.images) == PICTURES_A_SETTING + 1
    assert "$\\frac$ a_b^" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_page_without_rewards_says_so(tmp_path: Path):
    """What hosts write: metrics of the mismatch alone."""
    folder = tmp_path / "cluster" / "0" / "seed0"
    folder.mkdir(parents=True)
    (folder / "done.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"rollout_corr/kl": 0.1}\n{"rollout_corr/kl": 0.2}\n')
    info = {"settings": ["cluster"], "variants": ["0"], "seeds": [0], "about": ["Of <mine>."], "title": "A & B"}
    (tmp_path / "run.json").write_text(json.dumps(info))
    assert len(build(tmp_path).images) == 2  # KL, and the guide's KL
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Of &lt;mine&gt;." in html and "<h1>A &amp; B</h1>" in html and "Complete ·" in html
    assert "No run recorded a reward or an exact match" in html
    for untrue in ("small task", "paired", "Results, ", "Final reward", "need no second forward pass"):
        assert untrue not in html, untrue


def test_page_of_an_empty_folder(tmp_path: Path):
    assert build(tmp_path).images == []
    assert "run.json is missing" in (tmp_path / "report.html").read_text(encoding="utf-8")


# Without seeds.


def test_exact_bias_of_the_settings():
    gaps = {"mild": exact.Mismatch(0.05), "strong": exact.Mismatch(1.0), "moved": exact.Mismatch(1.0, 0.5)}
    labels = ("0", "1", "2:sequence:untruncated", "2:sequence:truncate", "3:sequence:untruncated", "3:token:truncate")
    result = exact.exact_bias(gaps, labels, problems=6, length=3)
    bias = result.bias
    assert max(bias["3:sequence:untruncated"].values()) < 1e-10
    assert max(bias["2:sequence:untruncated"][name] for name in ("mild", "strong")) < 1e-10
    assert bias["2:sequence:untruncated"]["moved"] > 0.05
    assert bias["0"]["mild"] < 0.2 < 0.5 < bias["0"]["strong"]
    assert bias["2:sequence:truncate"]["strong"] < bias["0"]["strong"]
    spread = result.deviation
    assert spread["3:sequence:untruncated"]["strong"] > 1.5 * spread["2:sequence:truncate"]["strong"]
    assert result.kl["mild"] < result.kl["strong"] and result.ess["mild"] > result.ess["strong"]
    table = exact.exact_bias_table(result)
    assert len(table.rows) == len(labels) and "1e-" not in table.rows[0][1]


def test_exact_dynamics_of_the_settings():
    engines = {"in sync": exact.Engine(), "rounded": exact.Engine(rounding=4.0)}
    labels = ("true gradient", "0", "1", "3:sequence:untruncated")
    result = exact.exact_dynamics(engines, labels, problems=3, steps=80, length=3)
    end = result.final
    assert end["true gradient"]["in sync"] == end["true gradient"]["rounded"] > 1.9
    assert all(abs(end[label]["in sync"] - end["true gradient"]["in sync"]) < 0.02 for label in labels)
    assert end["3:sequence:untruncated"]["rounded"] == pytest.approx(end["true gradient"]["rounded"], abs=1e-3)
    assert end["1"]["rounded"] < end["0"]["rounded"] - 0.2
    assert len(exact.exact_dynamics_table(result).rows) == len(labels)


def test_exact_tables_are_kept_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def few_problems() -> exact.ExactBias:
        calls.append(1)
        return exact.exact_bias({"mild": exact.Mismatch(0.05)}, ("0",), problems=1, length=2)

    path = tmp_path / "exact.json"
    first = exact._cached(path, few_problems, exact.ExactBias)
    assert exact._cached(path, few_problems, exact.ExactBias) == first
    assert len(calls) == 1
    path.write_text(path.read_text()[:20])
    assert exact._cached(path, few_problems, exact.ExactBias) == first
    assert len(calls) == 2
