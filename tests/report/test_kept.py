"""To which KL and length a preset keeps 90 % of the tokens: what the table says, on data."""

from __future__ import annotations

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.report.presets import KEEPS, PRESET_NAMES, expected_kept, keeps, largest_kl, presets_table


def kept(config: mp.MismatchConfig, kl: float, length: int, responses: int = 600) -> float:
    """Share of the tokens that training keeps where l ~ N(−KL, 2 KL)."""
    draw = torch.Generator().manual_seed(0)
    log_ratio = (2 * kl) ** 0.5 * torch.randn(responses * length, dtype=torch.float64, generator=draw) - kl
    rollout = torch.full_like(log_ratio, -16.0)
    packed = mp.PackedSequences(
        loss_mask=torch.ones(len(rollout), dtype=torch.bool),
        lengths=(length,) * responses,
        rollout_log_probs=rollout,
        old_log_probs=rollout + log_ratio,
    )
    return mp.correct(packed, config).statistics.metrics()["rollout_corr/accepted_token_fraction"]


CRITERIA = (
    *("token:ratio:0.9:1.1", "sequence_sum:ratio:0.7:1.4", "sequence_mean:ratio:0.99:1.005"),
    *("sequence_mean:k3:0.0021", "sequence_max:k2:0.02"),
)

LEVELS = ("token", "sequence", "geometric")
MASK = {"mode": "mask", "lower_bound": 0.97, "upper_bound": 1.05}


@pytest.mark.parametrize(
    ("settings", "kl", "length"),
    [
        *(({"rs": {"criteria": [criterion]}}, 0.002, 50) for criterion in CRITERIA),
        ({"rs": {"veto_threshold": 0.8}}, 0.004, 60),  # it takes whole sequences
        *(({"use_tis": True, "tis": {"level": level, **MASK}}, 5e-4, 20) for level in LEVELS),
    ],
)  # fmt: skip
def test_the_closed_form_is_what_the_correction_does(settings: dict[str, object], kl: float, length: int) -> None:
    config = mp.MismatchConfig.build(settings)
    expected = expected_kept(config, kl, length)
    assert expected is not None and 0.1 < expected < 1.0
    assert kept(config, kl, length, responses=3000) == pytest.approx(expected, abs=0.03)


def test_the_table_says_it_and_what_the_kl_does_not_tell_is_not_told() -> None:
    said = dict(zip(presets_table().column(PRESET_NAMES), presets_table().column(KEEPS), strict=True))
    assert said["decoupled_token_is, token_is"] == "all"
    assert said["decoupled_k3_rs, k3_rs"] == "KL to 0.0084 at 100, 0.0094 at 1,000, 0.0098 at 10,000 tokens"
    config = mp.preset("token_icepop")
    at = largest_kl(config, 100)
    assert at is not None and kept(config, at, 100) == pytest.approx(0.9, abs=0.035)
    config = mp.MismatchConfig.build({"rs": {"criteria": ["token:tv:0.1"]}})
    assert expected_kept(config, 0.01, 10) is None and largest_kl(config, 10) is None
    assert keeps(config) == "not computed"
