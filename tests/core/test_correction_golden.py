"""Peers' answers on fixed inputs (`fixtures/peers.json`): slime's mis.py, verl's rollout_corr_helper.py of two dates.

Every case runs through `compat`. Weights × accepted mask, accepted masks and the guide's metrics must agree to 1e-6,
but for the differences listed here, each of which the contract asks for.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core import validity

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "fixtures" / "peers.json").read_text())["cases"]
TOLERANCE = 1e-6

AFTER_BOUNDING = {
    "rollout_is_mean", "rollout_is_std", "rollout_is_eff_sample_size", "rollout_is_max", "rollout_is_min",
    "rollout_is_seq_mean", "rollout_is_seq_std", "rollout_is_seq_max", "rollout_is_seq_min",
    "rollout_is_seq_max_deviation",
}  # fmt: skip
DIFFERENCES = {
    "icepop keep": "verl's IcePop zeroes weights and leaves the mask alone; a rejected token is not accepted here. "
    "The denominator (original) and weight × mask are the same.",
    "verl-2026 rollout_is_*": "verl moved these metrics behind the bound in 2026; here they describe the ratio before "
    "it, as the guide does, and `…_weight_after_*` describe what is used.",
    "ppl_ratio": "verl and slime average the sequences' ratios; here it is the exponential of their mean log, as in "
    "the guide's formula.",
    "slime mask + batch_normalize": "slime averages over rejected and unbounded weights too, so one outlier makes "
    "every weight vanish; the mean runs over the accepted units here.",
    "verl IcePop + batch_normalize": "verl's mean has the rejected as 0; here it runs over the accepted units, so that "
    "weights are verl's times the accepted share.",
    "slime sequence + batch_normalize": "slime's mean counts a sequence without response tokens as 0; here it counts "
    "nowhere, so that weights are slime's times the share of sequences that have any.",
}


@pytest.fixture(autouse=True)
def _positive_training_log_probs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the peers' inputs have training log-probs of up to 1.5, which we would refuse and they do not see."""
    monkeypatch.setattr(validity, "POSITIVE_TOLERANCE", 2.0)


def tensors(rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def convert(case: dict[str, Any]) -> mp.MismatchConfig:
    return (mp.compat.from_slime if case["source"] == "slime" else mp.compat.from_verl)(case["config"])


def corrected(case: dict[str, Any]) -> tuple[mp.PackedSequences, mp.MismatchConfig, mp.Correction]:
    config = convert(case)
    packed = mp.PackedSequences.from_lists(
        old_log_probs=tensors(case["train_log_probs"]),
        rollout_log_probs=tensors(case["rollout_log_probs"]),
        loss_masks=tensors(case["loss_masks"]),
    )
    return packed, config, mp.correct(packed, config)


def names(cases: list[dict[str, Any]]) -> list[str]:
    counter: Counter[str] = Counter()
    result = []
    for case in cases:
        counter[case["source"]] += 1
        result.append(f"{case['source']}-{counter[case['source']]}")
    return result


pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_weights_and_masks(case: dict[str, Any]) -> None:
    _, config, correction = corrected(case)
    accepted = torch.cat(tensors(case["expect"]["accepted_masks"]))
    icepop = case["source"] != "slime" and config.tis.mode == "mask"  # see DIFFERENCES
    inside = torch.ones_like(accepted)
    if case["expect"]["weights"] is not None:
        expected = torch.cat(tensors(case["expect"]["weights"])) * accepted
        if icepop:
            inside = (expected != 0).double()
        if config.tis.mode == "mask" and config.tis.batch_normalize:
            expected = renormalized(case, config, expected, accepted)  # see DIFFERENCES
        torch.testing.assert_close(correction.weights * correction.keep, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(correction.keep, accepted * inside, rtol=0, atol=0)


def renormalized(
    case: dict[str, Any], config: mp.MismatchConfig, weights: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """slime's weights with its own mean undone and the mean over units inside the bounds put in its place."""
    ratios, units = [], []
    for train, rollout, mask in zip(
        tensors(case["train_log_probs"]), tensors(case["rollout_log_probs"]), tensors(case["loss_masks"]), strict=True
    ):
        log_ratio = (train - rollout) * mask
        if config.tis.level == "token":
            ratio, unit = log_ratio.exp(), mask
        else:
            total = log_ratio.sum() / (mask.sum() if config.tis.level == "geometric" else 1.0)
            ratio, unit = total.exp().expand_as(mask), mask / mask.sum()
        inside = (ratio >= config.tis.lower) & (ratio <= config.tis.upper)
        ratios.append(ratio * inside)
        units.append(unit * inside)
    ratio, unit = torch.cat(ratios), torch.cat(units)
    mean = (ratio * unit).sum() / unit.sum() if unit.sum() > 0 else torch.tensor(1.0)
    return ratio / mean * accepted


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["source"] != "slime"], ids=names([c for c in CASES if c["source"] != "slime"])
)
def test_metrics_of_the_guide(case: dict[str, Any]) -> None:
    metrics = corrected(case)[2].statistics.metrics()
    compared = 0
    for name, expected in case["expect"]["metrics"].items():
        short = name.removeprefix("rollout_corr/")
        if name not in metrics or (case["source"] == "verl-2026-08" and short in AFTER_BOUNDING):
            continue
        if short == "ppl_ratio":
            expected = math.exp(case["expect"]["metrics"]["rollout_corr/log_ppl_diff"])
        assert metrics[name] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name
        compared += 1
    assert compared >= 15


def test_every_guide_metric_was_compared() -> None:
    """No metric of the November 2025 guide is silently missing from the comparison above."""
    guide = {n for c in CASES if c["source"] == "verl-2025-11" for n in c["expect"]["metrics"]}
    guide = {n for n in guide if "/rollout_rs_" not in n or n.endswith("masked_fraction")}
    ours = {n for c in CASES if c["source"] == "verl-2025-11" for n in corrected(c)[2].statistics.metrics()}
    assert guide <= ours, guide - ours


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["source"] == "slime"], ids=names([c for c in CASES if c["source"] == "slime"])
)
def test_slime_metrics(case: dict[str, Any]) -> None:
    """slime returns per-token tensors; the same figures after its reduction by tokens or by sequences."""
    packed, _, correction = corrected(case)
    metrics = correction.statistics.metrics()
    mask = packed.loss_mask.double()
    token_metrics = {k: tensors(v) for k, v in case["expect"]["token_metrics"].items()}
    by_sequence = (
        "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
        "chi2_seq",
    )  # fmt: skip
    for name in by_sequence:
        expected = float(torch.stack([row[0] for row in token_metrics[name]]).mean())
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name
    log_ratio = float(torch.stack([row[0] for row in token_metrics["log_ppl_diff"]]).mean())
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx(math.exp(log_ratio), rel=TOLERANCE)
    for name in ("kl", "k3_kl"):
        expected = float((torch.cat(token_metrics[name]) * mask).sum() / mask.sum())
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name
    if "rs_catastrophic_seq_fraction" in token_metrics:
        expected = float(torch.stack([row[0] for row in token_metrics["rs_catastrophic_seq_fraction"]]).mean())
        assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(expected, abs=TOLERANCE)


def test_the_number_of_cases_is_what_it_was() -> None:
    assert Counter(case["source"] for case in CASES) == {"slime": 60, "verl-2025-11": 80, "verl-2026-08": 72}


# ρ of three tokens. Bounds .5 and 5 keep the second alone: its weight is .8/.8 here and .8/((0 + .8 + 0)/3) in verl.
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True}


def test_icepop_with_batch_normalisation_is_verl_s_times_the_accepted_share() -> None:
    """In DIFFERENCES; no recorded case has both. verl's own code says the same in tests/hooks/verl_live."""
    rollout = torch.zeros(3, dtype=torch.float64) - 2.0
    train = rollout + torch.tensor([0.4, 0.8, 6.0], dtype=torch.float64).log()
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[train], rollout_log_probs=[rollout], loss_masks=[torch.ones(3)]
    )
    ours, theirs = mp.correct(packed, mp.compat.from_verl(_ICEPOP)).weights, torch.tensor([0.0, 3.0, 0.0])
    torch.testing.assert_close(ours, theirs.double() * (1 / 3), rtol=1e-12, atol=1e-12)


def test_a_sequence_without_response_tokens_counts_in_slime_s_mean_only() -> None:
    """In DIFFERENCES. Eight sequences of ρ = .5 and 1.5 and one under the mask: slime's mean is 8/9, ours 1."""
    ratios = torch.tensor([0.5, 1.5] * 4 + [7.0], dtype=torch.float64)
    masks = [torch.ones(1, dtype=torch.float64)] * 8 + [torch.zeros(1, dtype=torch.float64)]
    rollout = [torch.full((1,), -3.0, dtype=torch.float64)] * 9
    train = [log_prob + ratio.log() for log_prob, ratio in zip(rollout, ratios, strict=True)]
    packed = mp.PackedSequences.from_lists(old_log_probs=train, rollout_log_probs=rollout, loss_masks=masks)
    settings = {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True}
    ours = mp.correct(packed, mp.compat.from_slime(settings)).weights
    # slime: per sequence Σ w·m / max(Σ m, 1), then the mean of these.
    means = [(ratio * mask).sum() / mask.sum().clamp(min=1) for ratio, mask in zip(ratios, masks, strict=True)]
    slime = torch.stack(means).mean()
    assert float(slime) == pytest.approx(8 / 9, rel=1e-12)
    torch.testing.assert_close(ours[:8], ratios[:8] / slime * (8 / 9), rtol=1e-12, atol=0)
    assert ours[8] == 0
