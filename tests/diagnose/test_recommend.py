"""Each row of "which setting to choose" on data of its range: the row is taken, its setting keeps what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.diagnose.levels import bounds_for
from mismatch_plugin.diagnose.measure import Figures, figures_of
from mismatch_plugin.diagnose.normal import FAR_K3
from mismatch_plugin.diagnose.packing import Groups
from mismatch_plugin.diagnose.predict import predict_one
from mismatch_plugin.diagnose.recommend import ADDITIONS, RULES, Rule, recommend, rules_table
from mismatch_plugin.diagnose.result import Prediction, Recommendation
from mismatch_plugin.report.presets import quiet_preset
from tests.diagnose.noise import bounds_of, measured, noise

DATA: dict[str, dict[str, Any]] = {
    "moe_routing": {"tail": 0.01},
    "sequence_outliers": {"drift": 0.02, "responses": 300},
    "stale": {"stale": True},
    "turns": {"turns": 8},
    "token_advantages": {"credit": True},
}
ASKED: dict[str, dict[str, bool]] = {
    "one step": {"one_step": True, "expensive_pass": True},
    "bypass": {"expensive_pass": True},
}


def _edges(rule: Rule) -> list[tuple[float, int]]:
    """(KL, longest response) just inside the ends of the range of a row."""
    low, high = rule.kl
    kls = [1.2 * low or 1e-5, 0.85 * high if high < math.inf else 0.5]
    if rule.name == "strong":
        kls = [1.2 * FAR_K3, 0.5]
    if rule.name == "moe_routing":
        kls = [1e-5, 0.04]  # a hundredth of the tokens adds 0.045
    if rule.name == "sequence_outliers":
        kls = [1e-4, 0.01]
    if rule.name == "turns":  # too long for a product of all ratios, each eighth of it short enough
        return [(kl, round(product / kl)) for kl in kls for product in (1.5, 6.0)]
    found: list[tuple[float, int]] = []
    for kl in kls:
        longest = min(rule.length, 0.85 * rule.kl_length / kl, 800 if rule.name == "sequence_outliers" else 4000)
        shortest = 200 if rule.name == "sequence_outliers" else 2 if longest < 20 else 16
        if rule.name == "long":
            shortest = 200  # shorter ones with a small product are another row
        found += [(kl, int(longest)), (kl, shortest)]
    return found


CASES = [(rule, kl, length) for rule in RULES for kl, length in _edges(rule)]


@pytest.mark.parametrize(("rule", "kl", "length"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_the_row_is_taken_and_its_setting_keeps_what_it_says(rule: Rule, kl: float, length: int) -> None:
    packed = noise(kl, length, **DATA.get(rule.name, {}))
    figures = figures_of(packed, **ASKED.get(rule.name, {}))
    assert next(other.name for other in RULES if other.holds(figures)) == rule.name, figures
    found = recommend(
        figures, bounds=bounds_of(packed), accepted=rule.name == "strong", predict=lambda c: measured(packed, c)
    )
    assert found is not None and (found.preset == rule.preset or found.setting.startswith(rule.preset))
    with ignore_mismatch_warnings():
        result = measured(packed, mp.MismatchConfig.build(found.settings))
    assert result.kept >= (0.9 if rule.config.rejects else 1.0)
    if rule.preset in ("seq_is", "pg_is", "prefix_is"):
        assert result.ess >= 0.5, "a product of ratios leaves half of the data"


def test_the_table_has_a_row_for_each_rule_and_every_kl_has_one() -> None:
    assert len(rules_table().rows) == len(RULES) + len(ADDITIONS)
    for kl in (0.0, 1e-4, 1e-3, 3e-3, 0.05, 0.1, 1.0):
        for length in (1, 100, 5000):
            assert any(rule.holds(Figures(kl, math.exp(-2 * kl), length)) for rule in RULES)


# Additions ------------------------------------------------------------------------------------------------------------


def _advice(packed: mp.PackedSequences, groups: Groups | None = None) -> Recommendation:
    found = recommend(
        figures_of(packed),
        bounds=bounds_of(packed),
        predict=lambda config: predict_one(packed, config, "", groups),
    )
    assert found is not None
    return found


def test_tokens_that_are_few_old_and_far_off_get_a_limit_on_staleness() -> None:
    packed = noise(0.005, 400, old=0.03)
    figures, found = figures_of(packed), _advice(packed)
    assert figures.fresh == 1.0 and figures.old_kl > 10
    assert found.setting == "token_is, max_staleness 1" and found.settings["rs"]["max_staleness"] == 1
    assert "--rs-max-staleness 1" in found.flags["slime"] and "max_trajectory_age_steps" in found.flags["nemo-rl"]
    assert "--rs-max-staleness" not in found.flags["megatron-lm"]
    kept = predict_one(packed, mp.MismatchConfig.build(found.settings), "").kept
    assert kept == pytest.approx(0.97, abs=0.005)


@pytest.mark.parametrize("why", ["as far off as the others", "too many", "the trainer's version is unknown"])
def test_other_old_tokens_get_none(why: str) -> None:
    packed = noise(0.005, 400, old=0.2 if why == "too many" else 0.03)
    if why == "as far off as the others":
        even = noise(0.005, 400)
        packed = packed.replace(old_log_probs=even.old_log_probs, rollout_log_probs=even.rollout_log_probs)
    if why == "the trainer's version is unknown":
        packed = packed.replace(trainer_version=None)
    assert "max_staleness" not in _advice(packed).setting


@pytest.mark.parametrize("spread_out", [True, False])
def test_rejected_responses_in_many_groups_are_excluded_from_them(spread_out: bool) -> None:
    packed = noise(0.01, 120, tokens=10_000, drift=0.02, responses=300)
    count = len(packed.lengths)
    ids = [place % 40 if spread_out else place // 8 for place in range(count)]  # the drifting ones come first
    rewards = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(1)).double()
    found = _advice(packed, Groups(rewards, ids))
    assert found.setting.startswith("geo_rs_token_tis, bounds from your data")
    assert found.setting.endswith("group exclude") == spread_out
    assert ("--rs-group exclude" in found.flags["verl"]) == spread_out
    assert any("moves the advantages" in reason for reason in found.reasons) == spread_out
    assert "rs.group" in found.flags["miles"] or not spread_out


# The rules on figures -------------------------------------------------------------------------------------------------

LONG = Figures(k3_kl=0.01, ess=0.98, max_length=4000)


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        ({}, "token_is"),
        ({"k3_kl": 5e-4}, "disabled"),
        ({"k3_kl": 5e-4, "expensive_pass": True}, "ppo_is_bypass"),
        ({"k3_kl": 5e-4, "expensive_pass": True, "stale": 2}, "disabled"),
        ({"expensive_pass": True}, "token_is"),
        ({"max_length": 50}, "seq_is"),
        ({"max_length": 50, "k3_kl": 0.05}, "token_is"),
        ({"max_length": 50, "one_step": True, "expensive_pass": True}, "pg_is"),
        ({"max_length": 500, "one_step": True, "expensive_pass": True}, "token_is"),
        ({"max_length": 50, "one_step": True}, "seq_is"),
        ({"stale": 1, "max_length": 50}, "token_is"),
        ({"tail": 5e-5}, "token_is"),
        ({"mean_turns": 4.0, "longest_turn": 90}, "seq_is"),
        ({"mean_turns": 4.0, "longest_turn": 300}, "token_is"),
        ({"mean_turns": 4.0, "longest_turn": 90, "stale": 2}, "token_is"),
        ({"mean_turns": 4.0, "longest_turn": 90, "k3_kl": 5e-4}, "disabled"),
        ({"credit": 1.0}, "token_is"),
        ({"credit": 1.0, "max_length": 50}, "prefix_is"),
        ({"credit": 1.0, "max_length": 51}, "seq_is"),
        ({"credit": 0.2, "max_length": 50}, "seq_is"),
    ],
)
def test_figures_choose_the_setting(changes: dict[str, Any], preset: str) -> None:
    found = recommend(replace(LONG, **changes))
    assert found is not None and (found.preset or found.setting.split(",")[0]) == preset
    assert ("tis.level turn" in found.setting) == (preset == "seq_is" and "mean_turns" in changes)


@pytest.mark.parametrize("strong", [{"ess": 0.2, "max_length": 50}, {"k3_kl": 0.2, "tail": 0.01}, {"k3_kl": FAR_K3}])
def test_a_strong_mismatch_has_no_setting_unless_it_is_meant(strong: dict[str, float]) -> None:
    assert recommend(replace(LONG, **strong)) is None
    found = recommend(replace(LONG, **strong), accepted=True)
    assert found is not None and found.preset == "token_is" and "only where it is meant" in found.reasons[1]
    assert not any("find the cause" in reason for reason in found.reasons)
    below = recommend(replace(LONG, k3_kl=0.9 * FAR_K3))
    assert below is not None and below.preset == "token_is"


def _keeping(share: float, rejecting: bool = True) -> Callable[[mp.MismatchConfig], Prediction]:
    """Predictions that keep this share of the tokens; with rejecting, of settings without bounds of the data alone."""

    def predict(config: mp.MismatchConfig) -> Prediction:
        found = measured(noise(0.001, 10, tokens=100, responses=4), config)
        kept = share if config == quiet_preset("token_icepop") or (not rejecting and config.rejects) else 1.0
        return found.model_copy(update={"kept": kept})

    return predict


def test_a_setting_that_keeps_too_little_gets_bounds_from_the_data_or_gives_way() -> None:
    figures, bounds = replace(LONG, tail=0.01), {"token": {"99%": (0.123, 8.77)}}
    for predict, given, preset in (
        (_keeping(0.95), {}, "token_icepop"),
        (_keeping(0.5), {}, "token_is"),
        (None, {}, "token_is"),
        (_keeping(0.4, rejecting=False), bounds, "token_is"),
    ):
        found = recommend(figures, given, predict=predict)
        assert found is not None and found.preset == preset
    found = recommend(figures, bounds, predict=_keeping(0.5))
    assert found is not None and found.preset is None
    assert found.settings["tis"]["lower_bound"] == 0.123 and found.settings["tis"]["upper_bound"] == 8.77
    assert "the preset's own would keep 50%" in " ".join(found.reasons) and "99 %" in " ".join(found.reasons)


@pytest.mark.parametrize(
    ("data", "preset"),
    [({}, "token_is"), ({"tail": 0.01}, "token_icepop"), ({"drift": 0.02, "responses": 300}, "geo_rs_token_tis")],
)
def test_it_goes_by_the_predictions_and_bounds_of_inspect(data: dict[str, Any], preset: str) -> None:
    packed = noise(0.01, 120, tokens=10_000, **data)
    found = recommend(figures_of(packed), bounds_for(packed), predict=lambda config: measured(packed, config))
    assert found is not None and found.setting.startswith(preset)
    again = measured(packed, mp.MismatchConfig.build(found.settings))
    assert again.kept >= 0.9
    assert (found.preset is None) == ("drift" in data)
    if found.preset is not None:
        assert f"{again.kept:.1%} of the tokens kept" in " ".join(found.reasons)


def test_a_bound_without_end_is_one() -> None:
    found = recommend(replace(LONG, tail=0.01), bounds={"token": {"99%": (0.0, math.inf)}})
    assert found is not None and found.preset is None
    assert found.flags["slime"].endswith("--tis-lower-bound 0 --tis-upper-bound inf --mismatch-denominator original")


def test_it_says_why_and_what_to_watch() -> None:
    packed = noise(0.01, 2000, tail=0.01)
    found = recommend(figures_of(packed), predict=lambda config: measured(packed, config))
    assert found is not None and found.preset == "token_icepop"
    result, text = measured(packed, quiet_preset("token_icepop")), " ".join(found.reasons)
    assert f"{result.kept:.1%} of the tokens kept" in text and "single tokens far off" in text
    metrics = dict(line.split(" near ") for line in found.watch)
    with ignore_mismatch_warnings():
        reported = mp.correct(packed, quiet_preset("token_icepop")).statistics.metrics()
    for name, told in metrics.items():
        assert float(told.split(";")[0]) == pytest.approx(reported[name], rel=0.06), name
    assert set(metrics) >= {"rollout_corr/accepted_token_fraction", "rollout_corr/k3_kl"}
    for k3_kl, bar in ((0.01, "above 0.02 "), (1e-12, "above 0.0001 ")):  # rounding that doubles is no change
        found = recommend(replace(LONG, k3_kl=k3_kl))
        assert found is not None and bar in found.watch[0]


# The figures ----------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    log_ratio = torch.tensor([0.1, -0.1, 0.2, -0.05, -3.0]).double()
    packed = mp.PackedSequences(
        loss_mask=torch.ones(5, dtype=torch.bool),
        lengths=(2, 3),
        rollout_log_probs=torch.full((5,), -9.0).double(),
        old_log_probs=-9.0 + log_ratio,
        weight_versions=torch.tensor([3, 3, 4, 4, 4]),
    )
    found, ratio = figures_of(packed), log_ratio.exp()
    assert found.k3_kl == pytest.approx(float((ratio - 1 - log_ratio).mean()))
    assert found.ess == pytest.approx(float(ratio.sum() ** 2 / 5 / (ratio**2).sum()))
    assert (found.max_length, found.tail, found.stale) == (3, 0.2, 1.0)
    assert (found.fresh, found.old_kl, found.credit) == (math.inf, 0.0, 0.0)
    assert (found.mean_turns, found.longest_turn) == (1.0, 3.0)
    cut = figures_of(packed.replace(unit_ids=torch.tensor([0, 1, 0, 0, 0])))
    assert (cut.mean_turns, cut.longest_turn) == (1.5, 3.0)  # the first response has two turns
    dated = packed.replace(trainer_version=5, weight_versions=torch.tensor([5, 5, 5, 5, 1]))
    assert figures_of(dated).fresh == 4.0  # a twentieth of five tokens is none
    assert figures_of(packed.replace(advantages=torch.tensor([1.0, 2.0, 3.0, 3.0, 3.0]))).credit == 0.5


def test_gaussian_noise_has_neither_a_tail_nor_drifting_responses() -> None:
    for kl in (1e-4, 0.01, 0.09):
        found = figures_of(noise(kl, 400))
        assert found.tail == 0.0 and found.drifting == 0.0
        assert found.k3_kl == pytest.approx(kl, rel=0.05)
    assert figures_of(noise(0.001, 400, tail=0.001)).tail == pytest.approx(0.001, rel=0.3)
    assert figures_of(noise(0.001, 400, drift=0.03, responses=300)).drifting == pytest.approx(0.03, abs=0.005)
