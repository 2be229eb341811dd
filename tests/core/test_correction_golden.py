"""Peers' answers on fixed inputs (`fixtures/peers.json`): slime's mis.py, verl's rollout_corr_helper.py of two dates.

Every case runs through `compat`. Weights × accepted mask, accepted masks and the guide's metrics must agree to 1e-6,
but for these differences, each of which the contract asks for:
* verl's IcePop zeroes weights and leaves the mask alone; a rejected token is not accepted here. The denominator
  (original) and weight × mask are the same.
* verl moved `rollout_is_*` behind the bound in 2026; here they describe the ratio before it, as the guide does.
* ppl_ratio: verl and slime average the sequences' ratios; here it is the exponential of their mean log.
* Batch normalisation under mask: slime averages over rejected and unbounded weights too, verl has the rejected as 0;
  here the mean runs over the accepted units.
* slime's mean counts a sequence without response tokens as 0; here it counts nowhere.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core import validity

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "fixtures" / "peers.json").read_text())["cases"]
SOURCES = {"slime": 60, "verl-2025-11": 80, "verl-2026-08": 72}
TOLERANCE = 1e-6
AFTER_BOUNDING = {
    "rollout_is_mean", "rollout_is_std", "rollout_is_eff_sample_size", "rollout_is_max", "rollout_is_min",
    "rollout_is_seq_mean", "rollout_is_seq_std", "rollout_is_seq_max", "rollout_is_seq_min",
    "rollout_is_seq_max_deviation",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


@pytest.fixture(autouse=True)
def _positive_training_log_probs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the peers' inputs have training log-probs of up to 1.5, which we would refuse and they do not see."""
    monkeypatch.setattr(validity, "POSITIVE_TOLERANCE", 2.0)


def tensors(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("source", SOURCES)
def test_weights_masks_and_metrics(source: str) -> None:
    cases = [case for case in CASES if case["source"] == source]
    assert len(cases) == SOURCES[source]
    seen: Counter[str] = Counter()
    for case in cases:
        config = (mp.compat.from_slime if source == "slime" else mp.compat.from_verl)(case["config"])
        packed = mp.PackedSequences.from_lists(
            old_log_probs=tensors(case["train_log_probs"]),
            rollout_log_probs=tensors(case["rollout_log_probs"]),
            loss_masks=tensors(case["loss_masks"]),
        )
        correction = mp.correct(packed, config)
        same_tokens(case, config, correction)
        seen.update(same_metrics(case, correction.statistics.metrics(), packed.loss_mask.double()))
    names = {n.removeprefix("rollout_corr/") for c in cases for n in c["expect"].get("metrics", {})}
    if source == "verl-2025-11":  # no metric of the guide is silently missing
        assert {n for n in names if "rollout_rs_" not in n or n.endswith("masked_fraction")} <= set(seen)


def same_tokens(case: dict[str, Any], config: mp.MismatchConfig, correction: mp.Correction) -> None:
    accepted = torch.cat(tensors(case["expect"]["accepted_masks"]))
    inside = torch.ones_like(accepted)
    if case["expect"]["weights"] is not None:
        expected = torch.cat(tensors(case["expect"]["weights"])) * accepted
        if case["source"] != "slime" and config.tis.mode == "mask":  # IcePop
            inside = (expected != 0).double()
        if not (config.tis.mode == "mask" and config.tis.batch_normalize):
            torch.testing.assert_close(correction.weights * correction.keep, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(correction.keep, accepted * inside, rtol=0, atol=0)


def same_metrics(case: dict[str, Any], metrics: dict[str, float], mask: Tensor) -> list[str]:
    """The names that were compared. slime's are per token: the same after its reduction by tokens or by sequences."""
    expected = {name.removeprefix("rollout_corr/"): v for name, v in case["expect"].get("metrics", {}).items()}
    if case["source"] == "slime":
        by_token = {name: tensors(rows) for name, rows in case["expect"]["token_metrics"].items()}
        by_sequence = [name for name in by_token if "ppl" in name or name == "chi2_seq"]
        expected = {name: float(torch.stack([row[0] for row in by_token[name]]).mean()) for name in by_sequence}
        for name in ("kl", "k3_kl"):
            expected[name] = float((torch.cat(by_token[name]) * mask).sum() / mask.sum())
        if rows := by_token.get("rs_catastrophic_seq_fraction"):
            expected["rollout_is_veto_fraction"] = float(torch.stack([row[0] for row in rows]).mean())
    if "log_ppl_diff" in expected:
        expected["ppl_ratio"] = math.exp(expected["log_ppl_diff"])
    compared = []
    for name, value in expected.items():
        if f"rollout_corr/{name}" in metrics and not (case["source"] == "verl-2026-08" and name in AFTER_BOUNDING):
            assert metrics[f"rollout_corr/{name}"] == close(value), name
            compared.append(name)
    assert len(compared) >= (9 if case["source"] == "slime" else 15)
    return compared
