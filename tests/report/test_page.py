"""The report of `compare`: reading a run folder, and the page whole, partial, of one setting, and without rewards."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mismatch_plugin.report import statistics
from mismatch_plugin.report.data import align, read_run_folder
from tests.report.synthetic import write_comparison

SETTINGS = ("control", "stale16")
VARIANTS = ("0", "1", "2:token:truncate")
SEEDS = 4
STEPS = 12
PICTURES = 17
"""Of one setting: the first, two of the mechanism, two of the outcome, six curves, six of the guide."""
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


# Reading.


def test_seeds_are_aligned_at_the_steps_they_share():
    first = (np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    second = (np.array([2.0, 4.0, 6.0]), np.array([5.0, 6.0, 7.0]))
    steps, values = align([first, second])
    assert (steps.tolist(), values.tolist()) == ([2.0, 4.0], [[2.0, 3.0], [5.0, 6.0]])
    assert align([])[1].shape == (0, 0)


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
    assert {"first", "exact", "time", "settings", "missing"} <= set(page.ids)
    return page


def test_whole_page(tmp_path: Path):
    page = build(write_comparison(tmp_path))
    ids = [name for name in page.ids if name not in ("first", "lower")]
    assert ids == ["mechanism", *(f"setting-{i}" for i in range(1, 6)), "exact", "check", "time", "settings", "missing"]
    assert len(list((tmp_path / "plots").glob("*.png"))) == len(page.images)
    assert (tmp_path / "plots" / "collapse.png").exists()
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "partial report" not in html and "Complete ·" in html
    text = " ".join(re.sub(r"<[^>]+>", " ", html[html.index("<body") :]).split())
    for said in (
        "Six digits are reversed. Numbers are the mean exact match over seeds; those with a sign",
        "Very stale. Uncorrected PPO reached 0.95 and ended at 0.10, 12 of 12 runs collapsed; significantly",
        "Very stale: Algorithm 0 collapses in 12 of 12 runs; 1 bypass PPO, 2 token truncate and 2 IcePop in none",
        "Outcomes named before the run: final exact match; secondary: area under the curve, collapsed.",
        "Seeds reported: 100 to 111. Parameters were chosen on seeds 0 to 9.",
        "Weights are &lt;old&gt;. Changed here: staleness = 32 . Six digits are reversed. A rollout batch is",
        "What goes with the collapse: Very stale",
        "Largest gradient norm of a run, median over seeds. Algorithm 0: 300, the highest.",
        "Lower than algorithm 0: 2 sequence truncate (−0.07)",
        "0 for every algorithm throughout, and not drawn: Rejected tokens, All but impossible tokens, Veto fraction.",
        "above 0: 1 bypass PPO 0.02.",
        "Agrees in sign: yes.",
        "The old-log-prob pass is 25 % of the CPU time of a run that needs it; 1 bypass PPO skips it.",
        "Made by mismatch-plugin compare --output RUN",
    ):
        assert said in text, said
    assert "/somewhere" not in text and "file.txt" in text
    assert html.count('<td class="n gain">0.90\u00a0▲</td>') == 1  # colour and sign go together
    assert html.count('<td class="n harm">0.01\u00a0▼ (12/12)</td>') == 2
    assert set(re.findall(r'class="[^"]*(gain|harm)">[^<]*(▲|▼)', html)) == {("gain", "▲"), ("harm", "▼")}


def test_a_page_where_nothing_collapses_or_differs(tmp_path: Path):
    build(write_comparison(tmp_path, check=False, settings=["control"]))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "In sync: Algorithm 0 collapses in none of 12 runs" in html and "Gradients and mismatch: In sync" in html
    for untrue in ("What goes with the collapse", "PPO's clip bounds", 'id="check"', 'class="n gain"', "harm"):
        assert untrue not in html[html.index("<body") :], untrue


def test_partial_page_then_chromium_shows_it(tmp_path: Path):
    page = build(damage(tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "This is a partial report." in html and "seeds 1, 2, 3 not started" in html
    assert len(page.images) == PICTURES
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
    assert len(page.images) == PICTURES
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
    for untrue in ("Algorithm 0", "paired", "Results, ", "Final reward", "skip"):
        assert untrue not in html, untrue


def test_page_of_an_empty_folder(tmp_path: Path):
    assert build(tmp_path).images == []
    assert "run.json is missing" in (tmp_path / "report.html").read_text(encoding="utf-8")
