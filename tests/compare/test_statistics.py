"""Tests, intervals and outcomes of runs against scipy and by hand; and folders that are cut, damaged or diverged."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the comparison's statistics need scipy (extra lab)")

from scipy import integrate, stats

from mismatch_plugin.compare.statistics import (
    EXACT_SEEDS,
    LEVEL,
    Variant,
    area_under_curve,
    final_value,
    has_collapsed,
    holm,
    judged,
    paired_difference,
    read_folder,
    sign_flip_p,
    summarise,
)
from tests.compare.synthetic import ENDS, SEEDS, write_comparison, write_run


def by_seed(values: np.ndarray) -> dict[int, float]:
    return dict(enumerate(values.tolist()))


@pytest.mark.parametrize("n", [1, 9])
def test_sign_flips_are_those_of_enumeration(n: int) -> None:
    random = np.random.default_rng(n)
    for d in (random.normal(0.5, 1.0, n), random.integers(-2, 3, n).astype(float), np.zeros(n), np.full(n, 0.1)):
        sums = np.array([np.dot(signs, d) for signs in itertools.product((1, -1), repeat=n)])
        assert sign_flip_p(d) == pytest.approx(np.mean(np.abs(sums) >= abs(d.sum()) - 1e-12), abs=1e-12)


@pytest.mark.parametrize("n", [2, 12, EXACT_SEEDS, EXACT_SEEDS + 1])
def test_interval_effect_and_p_are_those_of_scipy(n: int) -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(0.3, 1.0, n), random.normal(0.0, 1.0, n)
    found = paired_difference(by_seed(a), {**by_seed(b), 999: 5.0})  # a seed that only one has is left out
    peer = stats.ttest_rel(a, b)
    interval = peer.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert found.n == n and found.mean == pytest.approx((a - b).mean())
    assert found.effect_size == pytest.approx((a - b).mean() / (a - b).std(ddof=1))
    if n > 2:  # up to EXACT_SEEDS another test of the same
        assert found.p == pytest.approx(peer.pvalue, abs=0.05 if n <= EXACT_SEEDS else 1e-12)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def planted(shifts: dict[str, float], seed: int, n: int = 12) -> dict[str, Variant]:
    """Variants whose final values are PPO's plus noise and a shift."""
    random = np.random.default_rng(seed)
    base = random.normal(0.0, 1.0, n)
    found = [Variant("PPO", by_seed(base + random.normal(0.0, 1.0, n)), {})]
    return judged([*found, *(Variant(v, by_seed(base + random.normal(s, 1.0, n)), {}) for v, s in shifts.items())])


def test_planted_nulls_are_rarely_significant_and_planted_effects_mostly() -> None:
    """Family-wise: of 400 settings with seven variants that do not differ, at most 5 % (and 3 deviations) show one."""
    null = [planted(dict.fromkeys("abcdefg", 0.0), seed) for seed in range(400)]
    false = np.mean([any(v.verdict in ("better", "worse") for v in of.values()) for of in null])
    assert false <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / 400)
    effect = [planted({"a": 3.0, "b": -3.0, **dict.fromkeys("cdefg", 0.0)}, seed) for seed in range(100)]
    assert np.mean([of["a"].verdict == "better" and of["b"].verdict == "worse" for of in effect]) > 0.9
    few = planted({"a": 30.0}, 0, n=2)["a"]
    assert few.verdict == "too few seeds" and planted({"a": 30.0}, 0, n=4)["a"].verdict == "not significant"


def test_the_same_values_are_neither_judged_nor_counted() -> None:
    base = dict.fromkeys(range(12), 0.5)
    higher = {seed: 0.6 + seed / 100 for seed in base}
    found = judged([Variant(name, values, {}) for name, values in (("PPO", base), ("a", base), ("b", higher))])
    assert found["a"].verdict == "same" and found["b"].verdict == "better"
    assert found["b"].difference is not None and found["b"].difference.p_holm == 2 / 2**12  # a family of one
    assert found["PPO"].difference is None and found["PPO"].verdict == ""
    assert all(v.difference is None for v in judged([Variant("a", base, {})]).values())  # no PPO, no comparison


def test_outcomes_of_a_curve_by_hand() -> None:
    values = np.array([0.0, 0.3, 0.9, 0.9, 0.9, 0.2, 0.5, 0.2])
    assert final_value(values) == pytest.approx(0.3) and math.isnan(final_value(values[:0]))
    assert final_value(np.arange(40.0)) == pytest.approx(37.5)  # a tenth is four
    assert has_collapsed(values) and not has_collapsed(values[:5])
    assert not has_collapsed(np.array([0.9, 0.1])) and not has_collapsed(np.zeros(8))
    steps = np.array([0.0, 20, 40, 60, 80, 100, 110, 400])
    assert area_under_curve(steps, values) == pytest.approx(integrate.trapezoid(values, steps) / 400)
    assert area_under_curve(steps[:1], values[:1] + 0.4) == 0.4


def test_a_whole_folder_is_read_and_its_verdicts_are_what_was_planted(tmp_path: Path) -> None:
    folder = read_folder(write_comparison(tmp_path / "run"))
    assert folder.missing == () and folder.seeds == SEEDS and folder.measure() == "held_out_exact"
    results = summarise(folder)
    assert {s: [*of] for s, of in results.items()} == {s: [*of] for s, of in ENDS.items()}
    verdicts = {name: variant.verdict for name, variant in results["stale32"].items() if name != "PPO"}
    gained = dict.fromkeys(("bypass", "token_is", "token_icepop"), "better")
    assert verdicts == {"dual_clip": "same", "seq_is": "worse", **gained}
    fewer = results["stale32"]["token_is"].collapse_difference
    assert fewer is not None and fewer.p == 2 / 2**12 and fewer.verdict == "better"
    assert {v.verdict for name, v in results["control"].items() if name != "PPO"} <= {"not significant", "same"}


def test_a_diverged_run_is_zero_and_collapsed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "stale32", "bypass", 100)
    (tmp_path / "run.json").write_text('{"settings": ["stale32"], "seeds": [100]}')
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[8]["grad_norm"] = "nan"
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "done.json").write_text('{"status": "diverged"}')
    read = read_folder(tmp_path)
    (run,) = read.runs.values()
    steps, values = run.curve("held_out_exact")
    assert run.finished and run.diverged and len(steps) == 21 and values[7] > 0 and not values[8:].any()
    found = summarise(read)["stale32"]["bypass"]
    assert found.finals == {100: 0.0} and found.collapsed == {100: True}


LINE = '{"step": 400, "held_out_exact": 0.5}\n'
ODD = ['{"step": 1.5}', '{"step": "7"}', '{"step": 1e400}', "[1]", '{"step": 20, "reward": ' + "9" * 400 + "}"]


@pytest.mark.parametrize(
    ("done", "before", "kept", "after", "note", "counts"),
    [
        (None, "", 21, "", "unfinished, 21 steps; left out of every comparison.", False),
        ('{"step": 400}', "", 10, "", "ended at step 400, and its metrics stop at step 180; left out of every", False),
        ("{}", "", 21, LINE[:20], "1 damaged line skipped.", True),
        ("{}", "\n".join(ODD) + "\n", 21, "", "4 damaged lines skipped.", True),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_compared(
    tmp_path: Path, done: str | None, before: str, kept: int, after: str, note: str, counts: bool
) -> None:
    root = write_comparison(tmp_path / "run", settings=["int2"], plan={"int2": [*ENDS["int2"]]})
    run = root / "int2" / "bypass" / "seed103"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:kept]
    (run / "metrics.jsonl").write_text(before + "".join(lines) + after)
    (run / "done.json").unlink()
    if done is not None:
        (run / "done.json").write_text(done)
    folder = read_folder(root)
    assert folder.missing[0].startswith(f"int2, bypass, seed 103: {note}")
    bypass = summarise(folder)["int2"]["bypass"]
    assert (103 in bypass.finals) == counts and bypass.verdict == "worse"
    assert bypass.difference is not None and bypass.difference.n == 11 + counts


def test_what_was_not_started_is_named_and_a_folder_without_its_description_is_refused(tmp_path: Path) -> None:
    plan = {"int2": ["PPO", "bypass", "token_icepop"]}
    root = write_comparison(tmp_path / "run", settings=["int2"], plan=plan, seeds=[100])
    (root / "run.json").write_text((root / "run.json").read_text().replace("[100]", "[100, 101]"))
    missing = {"PPO": "seed 101", "bypass": "seed 101", "token_icepop": "seeds 100, 101"}
    assert read_folder(root).missing == tuple(f"int2, {name}: {what} not started." for name, what in missing.items())
    (root / "run.json").write_text('{"plan":')
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        read_folder(root)
