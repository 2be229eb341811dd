"""What README, docs and rules say of the comparison is what examples/compare holds, and false of other data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the comparison's statistics need scipy (extra lab)")
pytest.importorskip("matplotlib", reason="the report needs matplotlib (extra lab)")

from ci.compare import FOLDER, band, summary, survivors
from mismatch_plugin.compare import experiments
from mismatch_plugin.compare.statistics import Results, judged, paired_difference
from mismatch_plugin.diagnose.recommend import RULES
from tests.compare.synthetic import outcome

DOCS = " ".join((FOLDER.parents[1] / "docs" / "compare.md").read_text(encoding="utf-8").split())
RULE = {rule.name: rule.reason for rule in RULES}
STALE, ROUNDED = ("stale24", "stale32"), ("int2", "int2_stale8")
Plant = tuple[str, str, float]


def planted(setting: str, name: str, value: float) -> Results:
    """The results of 24 seeds with one variant's final values moved to about `value`; below 0.4 is collapsed."""
    results = dict(band()["1"])
    finals = {seed: value + 1e-4 * (seed % 7) for seed in results[setting][name].finals}
    moved = replace(results[setting][name], finals=finals, collapsed=dict.fromkeys(finals, value < 0.4))
    results[setting] = judged({**results[setting], name: moved}.values())
    return results


def verdicts(results: Results, name: str, settings: tuple[str, ...]) -> set[str]:
    return {results[setting][name].verdict for setting in settings}


def above(results: Results, one: str, other: str, setting: str) -> bool:
    d = paired_difference(results[setting][one].finals, results[setting][other].finals)
    return d.mean > 0 and d.p < 0.05


def count_of(results: Results, name: str) -> int:
    found = [of[name].difference for of in results.values()]
    return sum(d is not None and d.mean > 0 and d.p_holm < 0.01 for d in found)


def gains(results: Results) -> bool:
    return verdicts(results, "token_is", (*STALE, "int2_stale8")) == {"better"}


def no_collapse_in_moe(results: Results) -> bool:
    both = [results["moe_flips"][name] for name in ("dual_clip", "token_is")]
    return all(variant.verdict == "better" and variant.fell == 0 for variant in both)


CLAIMS: tuple[tuple[str, str, Callable[[Results], bool], Plant], ...] = (
    (DOCS, "`bypass` won where rollouts are only stale",
     lambda r: all(max(r[s].values(), key=lambda v: v.mean).name == "bypass" for s in STALE)
     and verdicts(r, "bypass", STALE) == {"better"}, ("stale24", "bypass", 0.5)),
    (DOCS, "and failed where the engine's weights are rounded",
     lambda r: verdicts(r, "bypass", ROUNDED) == {"worse"} and all(r[s]["bypass"].mean < 0.01 for s in ROUNDED),
     ("int2_stale8", "bypass", 0.8)),
    (DOCS, "`token_is` gained wherever rollouts are stale and lost nowhere",
     lambda r: gains(r) and "worse" not in verdicts(r, "token_is", tuple(r)), ("int2", "token_is", 0.3)),
    (DOCS, "It gained in four at p < .01", lambda r: count_of(r, "token_is") == 4, ("moe_flips", "token_is", 0.3)),
    (DOCS, "and still lost some runs at 32 steps", lambda r: r["stale32"]["token_is"].fell > 2,
     ("stale32", "token_is", 0.9)),
    (DOCS, "Where nothing lies between the engines (`control`), nothing differs",
     lambda r: all(v.verdict in ("", "same", "not significant") for v in r["control"].values()),
     ("control", "token_is", 0.9)),
    (DOCS, "`geo_rs_token_tis` helps with stale rollouts and is lost there, too",
     lambda r: r["stale32"]["geo_rs_token_tis"].verdict == "better"
     and verdicts(r, "geo_rs_token_tis", ROUNDED) == {"worse"}, ("int2", "geo_rs_token_tis", 0.9)),
    (DOCS, "`dual_clip` prevents the collapse without any weight, as `token_is` does", no_collapse_in_moe,
     ("moe_flips", "dual_clip", 0.3)),
    (RULE["stale"], "it gained wherever rollouts were stale", gains, ("stale32", "token_is", 0.2)),
    (RULE["stale"], "Bypass, whose clip limits the lag itself, ended higher there",
     lambda r: all(above(r, "bypass", "token_is", s) for s in STALE), ("stale24", "token_is", 0.95)),
    (RULE["stale"], "it was lost where weights were rounded, too",
     lambda r: verdicts(r, "bypass", ROUNDED) == {"worse"}, ("int2_stale8", "bypass", 0.9)),
    (RULE["bypass"], "(lost at two bits in the comparison)",
     lambda r: r["int2"]["bypass"].verdict == "worse" and r["int2"]["bypass"].mean < 0.01, ("int2", "bypass", 0.85)),
)  # fmt: skip


@pytest.mark.parametrize(("page", "sentence", "holds", "plant"), CLAIMS, ids=[claim[1][:40] for claim in CLAIMS])
def test_a_claim_is_carried_by_24_seeds(
    page: str, sentence: str, holds: Callable[[Results], bool], plant: Plant
) -> None:
    assert sentence in page
    assert holds(band()["1"]) and not holds(planted(*plant))


def test_at_a_lower_learning_rate_others_reach_bypass() -> None:
    assert "at 0.7 of the learning rate others reach it" in DOCS
    for rate, reached in (("0.7", True), ("1", False)):
        for of in (band()[rate][setting] for setting in STALE):
            best = max(variant.mean for name, variant in of.items() if name != "bypass")
            assert (best > of["bypass"].mean - 0.02) == reached


def test_at_a_higher_learning_rate_bypass_alone_loses_no_stale_run() -> None:
    assert "At 1.4 times the rate `bypass` alone lost no run under pure staleness" in DOCS
    for rate, alone in (("1.4", True), ("0.7", False)):
        others = [v for setting in STALE for v in band()[rate][setting].values() if v.name != "bypass"]
        assert all(band()[rate][setting]["bypass"].fell == 0 for setting in STALE)
        assert all(variant.fell for variant in others) == alone


def test_the_evidence_is_of_24_seeds_and_of_three_learning_rates() -> None:
    for rate, results in band().items():
        seeds = set(range(100, 124 if rate == "1" else 106))
        for setting, variants in results.items():
            assert list(variants) == list(experiments.SETTINGS[setting].variants)
            assert all(variant.finals.keys() == seeds for variant in variants.values())
        assert list(results) == list(experiments.SETTINGS)
        assert not seeds & set(experiments.CHOSEN_ON)
    assert set(band()) == {"1", "0.7", "1.4"}


def test_the_summary_is_a_whole_run_of_the_default_comparison_and_part_of_the_evidence() -> None:
    assert summary()["complete"] and summary()["command"] == "mismatch-plugin compare" and not summary()["diverged"]
    assert summary()["seeds"] == [*range(100, 100 + experiments.SEEDS)]
    runs = 0
    for setting, entry in summary()["settings"].items():
        about = experiments.SETTINGS[setting]
        assert (entry["title"], entry["what"]) == (about.title, about.what)
        for name, variant in entry["variants"].items():
            finals = band()["1"][setting][name].finals
            mean = sum(finals[seed] for seed in summary()["seeds"]) / len(summary()["seeds"])
            assert variant["mean"] == pytest.approx(mean, abs=2e-6)
            runs += variant["runs"]
    for page in ("README.md", "docs/compare.md"):
        assert f"{runs} small RL runs" in (FOLDER.parent.parent / page).read_text(encoding="utf-8")


def test_the_picture_is_of_the_same_run() -> None:
    assert hashlib.sha256((FOLDER / "collapse.png").read_bytes()).hexdigest() == summary()["picture"]
    runs = [entry["variants"] for entry in summary()["settings"].values()]
    assert "token_is ends above PPO in all]" in DOCS and all(v["token_is"]["mean"] > v["PPO"]["mean"] for v in runs)
    assert sorted(path.name for path in FOLDER.iterdir()) == ["collapse.png", "evidence.json", "summary.json"]


def mechanism_words(variants: dict[str, Any]) -> tuple[str, ...]:
    zero, token, clipped, bypass = (variants[v]["mechanism"] for v in ("PPO", "token_is", "dual_clip", "bypass"))
    return (
        f"the largest norm of a run is {zero['grad_norm']:.0f}, median over seeds; with `token_is` "
        f"{token['grad_norm']:.1f}.",
        f"less than 1e-4 to {100 * zero['impossible']:.1f} % of the tokens, and KL is {zero['kl']:.2f} nats per token; "
        f"with `token_is` {100 * token['impossible']:.1f} % and {token['kl']:.2f}.",
        f"(largest norm {clipped['grad_norm']:.1f}), yet KL ends at {clipped['kl']:.2f}.",
        f"The largest norm of `bypass` is {bypass['grad_norm']:.0f}, and its KL {bypass['kl']:.2f}:",
    )


def test_the_mechanism_s_numbers() -> None:
    variants = summary()["settings"]["stale32"]["variants"]
    assert all(words in DOCS for words in mechanism_words(variants))
    other = {name: {"mechanism": {k: 2 * v for k, v in of["mechanism"].items()}} for name, of in variants.items()}
    assert not any(words in DOCS for words in mechanism_words(other))
    rejected = summary()["settings"]["int2"]["variants"]["geo_rs_token_tis"]["mechanism"]["rejected"]
    assert "it rejects four fifths of the tokens" in DOCS and 0.75 <= rejected <= 0.85


def test_what_survives_the_band_is_what_holds_at_every_rate() -> None:
    one = {"b": {"PPO": 0.5, "x": 0.9, "y": 0.8, "z": 0.7, "w": 0.2}}
    other = {"b": {"PPO": 0.5, "x": 0.9, "y": 0.5, "z": 0.6, "w": 0.2}}
    band = {"1": outcome(one), "0.7": outcome(one, n=6), "1.4": outcome(other, n=6)}
    said = [
        "Gains that are significant at × 1 and hold at × 0.7 and × 1.4 (same sign, p < 0.05 at each): x in b; z in b.",
        "Gains that are significant at × 1 and not at each of these: y in b.",
        "Losses that are significant at × 1 and hold at × 0.7 and × 1.4 (same sign, p < 0.05 at each): w in b.",
        "Order of the means in b at every rate: x > (y, z, PPO) > w; inside brackets it changes.",
    ]
    assert survivors(band) == said
    assert "x in b" not in survivors({**band, "1.4": outcome({"b": {**other["b"], "x": 0.2}}, n=6)})[0]
