"""The worked example: every cell by hand, away from every bound."""

from __future__ import annotations

import math

import pytest
import torch

from mismatch_plugin.config.units import LEVELS
from mismatch_plugin.explain.example import (
    KEPT,
    MODES,
    PADDING,
    REJECTED,
    current_log_probs,
    example_batch,
    explain_table,
    loss_table,
    rejection_table,
)
from mismatch_plugin.report.table import Table


def by_label(table: Table) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in table.rows}


WEIGHTS, REJECTIONS, LOSS = map(by_label, (explain_table(), rejection_table(), loss_table()))


def test_weights_by_hand():
    # A: 0.5/0.4, (masked), 0.6/0.5, 1 · B: 0.6/0.2, 0.6/0.4 · C: 0.2/0.5, 0.4/0.5; bounds 0.5 and 2.
    assert WEIGHTS["token: ratio"] == ("1.25", PADDING, "1.2", "1", "3", "1.5", "0.4", "0.8")
    assert WEIGHTS["token: truncate"] == ("1.25", PADDING, "1.2", "1", "2", "1.5", "0.4", "0.8")
    assert WEIGHTS["token: clip"] == ("1.25", PADDING, "1.2", "1", "2", "1.5", "0.5", "0.8")
    assert WEIGHTS["token: mask"] == ("1.25", PADDING, "1.2", "1", "0 ✗", "1.5", "0 ✗", "0.8")
    # Products 1.5, 4.5, 0.32.
    assert WEIGHTS["sequence: ratio"] == ("1.5", PADDING, "1.5", "1.5", "4.5", "4.5", "0.32", "0.32")
    assert WEIGHTS["sequence: clip"][4:] == ("2", "2", "0.5", "0.5")
    # 1.5^(1/3) = 1.14, 4.5^(1/2) = 2.12, 0.32^(1/2) = 0.566.
    assert WEIGHTS["geometric: mask"] == ("1.14", PADDING, "1.14", "1.14", "0 ✗", "0 ✗", "0.566", "0.566")
    # A's turns have 1.25 and 1.2.
    assert WEIGHTS["turn: ratio"] == ("1.25", PADDING, "1.2", "1.2", "4.5", "4.5", "0.32", "0.32")
    assert WEIGHTS["prefix: ratio"] == ("1.25", PADDING, "1.5", "1.5", "3", "4.5", "0.4", "0.32")
    # Two tokens: 2^√2 = 2.67 and its reciprocal 0.375.
    assert WEIGHTS["prefix: bounds grow"][4:] == ("2", "2.67", "0.5", "0.375")
    # Turn weights 1.25, 1.2, 2, 0.32 have mean 1.1925.
    assert WEIGHTS["turn: normalised"][::2] == ("1.05", "1.01", "1.68", "0.268")
    # Sequence weights 1.5, 2, 0.32 have mean 1.2733.
    assert WEIGHTS["sequence: normalised"][3:] == ("1.18", "1.57", "1.57", "0.251", "0.251")


def test_rejections_by_hand():
    def kept(label: str) -> str:
        assert set(REJECTIONS[label]) <= {KEPT, REJECTED, PADDING}
        return "".join({KEPT: "1", REJECTED: "0", PADDING: "·"}[cell] for cell in REJECTIONS[label])

    # Geometric means 1.14, 2.12, 0.566; A has a negative advantage.
    assert kept("sequence_mean:ratio:2") == "1·110011"
    assert kept("sequence_mean:ratio:1.1") == "0·000000"
    assert kept("… @negative") == "0·001111"
    assert kept("veto 0.45") == "1·111100"  # C1: 0.4
    # |Δp| to π_train: 0.1, 0.1, 0, 0.4, 0.2, 0.3, 0.1; C1 fell, and its advantage is positive.
    assert kept("token:tv:0.25") == "1·110101"
    assert kept("… @away") == "1·110111"
    # |Δp| to π_θ: 0.15, 0.05, 0.3, 0.43, 0.38, 0.05, 0.1
    assert kept("… policy current") == "1·100011"
    assert kept("max_staleness 1") == "0·111111"  # versions 3, 5, 5, 4, 4, 5, 5 of 5


def test_gradients_by_hand():
    # r: 1.1, 0.75, 0.667 with A = −1; 1.05, 1.3 and 2.25, 1 with A = 1.
    assert LOSS["ppo: gradient"] == ("1.1", PADDING, "0", "0", "−1.05", "0", "0", "−1")
    # Geometric means 0.55^(1/3) = 0.819, 1.365^(1/2) = 1.17, 1.5, of which the last is clipped.
    assert LOSS["gspo: gradient"] == ("0.819", PADDING, "0.819", "0.819", "−1.17", "−1.17", "0", "0")
    assert LOSS["cispo: gradient"] == ("1.1", PADDING, "0.75", "0.667", "−1.05", "−1.2", "−1.2", "−1")
    # 4 σ(1.05 (r − 1)) (1 − σ) r; τ 1 where A = 1.
    assert LOSS["sapo: gradient"] == ("1.1", PADDING, "0.737", "0.647", "−1.05", "−1.27", "−1.56", "−1")
    # (1.1 · 0.75 · e^−0.4)^(1/3), (1.05 · 1.3)^(1/2), e^(0.4/2): 0.667 is below e^−0.4 and 2.25 above e^0.4.
    assert LOSS["gmpo: gradient"] == ("0.821", PADDING, "0.821", "0", "−1.17", "−1.17", "0", "−1.22")
    assert LOSS["reinforce: gradient"] == ("1", PADDING, "1", "1", "−1", "−1", "−1", "−1")
    ratios = (0.55 / 0.4, 0.45 / 0.5, 0.6 / 0.9, 0.63 / 0.2, 0.78 / 0.4, 0.45 / 0.5, 0.4 / 0.5)
    told = [float(cell.replace("−", "-")) for cell in LOSS["penalty: gradient"] if cell != PADDING]
    assert told == pytest.approx([0.1 * math.log(ratio) for ratio in ratios], rel=5e-3)  # k2: l


def test_advantages_of_a_group_by_hand():
    # Rewards 1, 0, 0: mean 1/3, deviation 0.577. Without B: mean 0.5, deviation 0.707.
    parts = (0, 4, 6)
    assert [LOSS["advantage, group keep"][at] for at in parts] == ["1.15", "−0.577", "−0.577"]
    assert [LOSS["advantage, group exclude"][at] for at in parts] == ["0.707", "0", "−0.707"]


def test_it_covers_every_mode_level_and_objective():
    assert {f"{level}: {mode}" for level in LEVELS for mode in MODES} <= set(WEIGHTS)
    assert {f"{name}: gradient" for name in ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce")} <= set(LOSS)


def test_it_stays_away_from_its_bounds():
    # A ratio on a bound would be judged by rounding.
    packed, current = example_batch(), current_log_probs().detach()
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    log_ratio = torch.where(packed.loss_mask, packed.old_log_probs - packed.rollout_log_probs, 0.0)
    for row, mask in zip(packed.unpack(log_ratio), packed.unpack(packed.loss_mask), strict=True):
        for value in (*row, row.sum(), row.sum() / mask.sum()):
            assert all(abs(value.exp() - bound) > 0.01 for bound in (0.5, 2.0, 0.45, 1.1, 1 / 1.1))
    for policy in (packed.old_log_probs, current):
        distance = (policy.exp() - packed.rollout_log_probs.exp()).abs()[packed.loss_mask]
        assert ((distance - 0.25).abs() > 0.01).all()
    ratio = (current - packed.old_log_probs).exp()[packed.loss_mask]
    assert ((ratio - 0.8).abs() > 0.01).all() and ((ratio - 1.2).abs() > 0.01).all()


def test_it_can_be_narrowed():
    table = explain_table(["mask"], ["sequence"])
    assert [row[0] for row in table.rows] == ["π_rollout", "π_train", "sequence: ratio", "sequence: mask"]
    assert any(REJECTED in note for note in table.notes)
    assert not any("clip" in note or "geometric" in note for note in table.notes)
