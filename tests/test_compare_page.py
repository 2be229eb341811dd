"""What README and docs say of the comparison is what its run gave: examples/compare/summary.json."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from ci.compare import FOLDER, summary
from mismatch_plugin.inspect.rules import RULES
from mismatch_plugin.lab import experiments
from mismatch_plugin.lab.chosen import choose


def of(setting: str, variant: str) -> dict[str, Any]:
    return summary()["settings"][setting]["variants"][variant]


def test_it_is_a_whole_run_of_the_default_comparison() -> None:
    chosen = choose()
    assert summary()["complete"] and summary()["seeds"] == list(chosen.seeds)
    assert not set(summary()["seeds"]) & set(experiments.CHOSEN_ON)
    found = {name: set(entry["variants"]) for name, entry in summary()["settings"].items()}
    assert found == {name: set(labels) for name, labels in chosen.variants.items()}
    for name, entry in summary()["settings"].items():
        assert (entry["title"], entry["what"]) == (chosen.settings[name].title, chosen.settings[name].what)
        assert all(variant["seeds"] == variant["runs"] == len(chosen.seeds) for variant in entry["variants"].values())


def test_the_picture_is_of_the_same_run() -> None:
    assert hashlib.sha256((FOLDER / "collapse.png").read_bytes()).hexdigest() == summary()["picture"]
    assert sorted(path.name for path in FOLDER.iterdir()) == ["collapse.png", "summary.json"]


def test_uncorrected_ppo_collapses_and_corrections_hold() -> None:
    """At p < .01 after Holm's correction for at least two corrections, on seeds that chose nothing."""
    base = of("stale32", "0")
    assert base["collapsed"] >= 10 and base["mean"] < 0.25
    assert [v for v in experiments.VARIANTS[1:] if of("stale32", v)["p_holm"] < 0.01] == [
        "1",
        "token_icepop",
        "2:geo_rs",
    ]
    better = [v for v in experiments.VARIANTS[1:] if of("stale32", v)["verdict"] == "better"]
    assert set(experiments.VARIANTS) - {"0", *better} == {"0:dual_clip", "2:token:truncate"}  # said to be unresolved
    assert of("stale24", "2:token:truncate")["p_holm"] < 0.01


def test_the_mechanism_s_numbers() -> None:
    """What docs/compare.md says of gradient norm, KL and impossible tokens, in its words."""
    page = " ".join((FOLDER.parents[1] / "docs" / "compare.md").read_text(encoding="utf-8").split())
    labels = ("0", "2:token:truncate", "0:dual_clip", "1")
    zero, token, clipped, bypass = (of("stale32", label)["mechanism"] for label in labels)
    for said in (
        f"a run is {zero['grad_norm']:.0f}, median over seeds; with token weights {token['grad_norm']:.1f})",
        f"less than 1e-4 to {100 * zero['impossible']:.1f} % of the tokens, and KL is {zero['kl']:.2f} nat a token; "
        f"with token weights {100 * token['impossible']:.1f} % and {token['kl']:.2f}.",
        f"(largest norm {clipped['grad_norm']:.1f}), yet KL ends at {clipped['kl']:.2f} and "
        f"{of('stale32', '0:dual_clip')['collapsed']} of 12 runs collapse",
        f"largest norm of bypass is {bypass['grad_norm']:.0f} and its KL {bypass['kl']:.2f}, and no run collapses",
    ):
        assert said in page, said
    assert of("stale32", "1")["collapsed"] == 0


def test_nothing_differs_in_sync() -> None:
    verdicts = {v["verdict"] for v in summary()["settings"]["control"]["variants"].values() if "verdict" in v}
    assert verdicts <= {"same", "not significant"}


@pytest.mark.parametrize("setting", ["int2", "int2_stale8"])
def test_bypass_and_geometric_rejection_are_lost_under_a_persistent_mismatch(setting: str) -> None:
    for variant in ("1", "2:geo_rs"):
        assert of(setting, variant)["verdict"] == "worse" and of(setting, variant)["mean"] < 0.2
    assert of(setting, "2:token:truncate")["verdict"] != "worse"


@pytest.mark.parametrize("setting", ["stale24", "stale32"])
def test_bypass_has_the_highest_mean_under_pure_staleness(setting: str) -> None:
    variants = summary()["settings"][setting]["variants"]
    assert max(variants, key=lambda label: variants[label]["mean"]) == "1"
    assert variants["1"]["verdict"] == "better"


def test_token_weights_gain_in_three_settings_and_lose_in_none() -> None:
    verdicts = {name: of(name, "2:token:truncate")["verdict"] for name in summary()["settings"]}
    assert [name for name, verdict in verdicts.items() if verdict == "better"] == [
        "stale24",
        "int2_stale8",
        "moe_flips",
    ]
    assert "worse" not in verdicts.values()
    assert of("stale32", "2:token:truncate")["collapsed"] == 3
    edge = of("int2_stale8", "2:token:truncate")
    assert (round(edge["p_holm"], 3), [round(end, 2) for end in edge["interval"]]) == (0.025, [-0.01, 0.26])


def test_experts_chosen_differently_collapse_ppo_unless_something_bounds_the_gradient() -> None:
    assert of("moe_flips", "0")["collapsed"] >= 6
    for variant in ("0:dual_clip", "1", "2:token:truncate"):
        assert of("moe_flips", variant)["verdict"] == "better"
    gains = [round(of("moe_flips", variant)["difference"], 2) for variant in ("0:dual_clip", "2:token:truncate")]
    assert gains == [0.62, 0.63]


def test_the_number_of_runs() -> None:
    runs = sum(variant["runs"] for entry in summary()["settings"].values() for variant in entry["variants"].values())
    checked = sum(v["runs"] for entry in summary()["cross_check"].values() for v in entry["variants"].values())
    assert (runs, checked) == (312, 6)
    for page in ("README.md", "docs/compare.md"):
        assert "312 small RL runs" in (FOLDER.parent.parent / page).read_text(encoding="utf-8")


def test_the_cross_check_agrees() -> None:
    """Through megatron-core algorithm 0 collapses, and token weights end higher by a like difference."""
    checked = summary()["cross_check"]["stale32"]["variants"]
    assert checked["0"]["collapsed"] == checked["0"]["runs"]
    assert checked["2:token:truncate"]["collapsed"] < checked["0"]["collapsed"]
    gain = checked["2:token:truncate"]["mean"] - checked["0"]["mean"]
    assert gain > 0.2
    assert abs(gain - of("stale32", "2:token:truncate")["difference"]) < 0.35


def test_which_setting_to_choose_says_what_it_showed() -> None:
    reasons = {rule.name: rule.reason for rule in RULES}
    assert "gained at 24 steps and was not resolved at 32, where bypass held" in reasons["stale"]
    assert of("stale24", "2:token:truncate")["verdict"] == "better"
    assert of("stale32", "2:token:truncate")["verdict"] == "not significant"
    assert of("stale32", "1")["verdict"] == "better" and of("stale32", "1")["collapsed"] == 0
    assert "is lost where the engines differ" in reasons["stale"] and "lost at two bits" in reasons["saved pass"]
    assert of("int2", "1")["verdict"] == "worse" and of("int2", "1")["mean"] < 0.01
