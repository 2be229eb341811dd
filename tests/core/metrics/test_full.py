"""Quantiles, versions far apart; and what is declared is reachable and documented."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.metrics.full import HISTOGRAM_BINS, HISTOGRAM_EDGE, HISTOGRAM_SCALE
from mismatch_plugin.core.metrics.registry import METRICS, metric_rows

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

PREFIX = "rollout_corr/"
LENGTHS = [3, 300, 0, 255, 256, 1100, 40]
FULL: dict[str, Any] = {"metrics": "full", "rs": {"criteria": ["token:ratio:0.7:1.4"], "veto_threshold": 0.2}}


class Raw:
    """Long sequences of random log-probs; one flat list a quantity."""

    def __init__(self, seed: int, scale: float = 0.3) -> None:
        rng = random.Random(seed)
        total = sum(LENGTHS)
        self.mask = [int(rng.random() < 0.8) for _ in range(total)]
        chosen = [rng.choice([rng.uniform(1e-3, 0.2), rng.uniform(0.2, 0.98), 0.995]) for _ in range(total)]
        self.rollout = [math.log(p) for p in chosen]
        self.train = [min(r + rng.gauss(0.02, scale), -1e-4) for r in self.rollout]

    def packed(self, dtype: torch.dtype = torch.float64, **fields: Any) -> mp.PackedSequences:
        def rows(values: list[Any], kind: torch.dtype = dtype) -> list[torch.Tensor]:
            return list(torch.tensor(values, dtype=kind).split(LENGTHS))

        given: dict[str, Any] = {
            "old_log_probs": rows(self.train),
            "rollout_log_probs": rows(self.rollout),
            "loss_masks": rows(self.mask, torch.int64),
            "advantages": [1.0] * len(LENGTHS),
            "weight_versions": rows([7] * len(self.mask), torch.int64),
        }
        return mp.PackedSequences.from_lists(**(given | fields))


def family(metrics: dict[str, float], head: str) -> dict[str, float]:
    return {name.removeprefix(PREFIX + head): v for name, v in metrics.items() if name.startswith(PREFIX + head)}


def full(packed: mp.PackedSequences, **settings: Any) -> dict[str, float]:
    return mp.correct(packed, mp.MismatchConfig.model_validate(FULL | settings)).statistics.metrics()


def test_versions_more_than_a_slot_table_apart_are_older() -> None:
    # 16 slots: 100 and 99 lag 0 and 1; 70 lags 30: "older". Nothing may be attributed to the wrong lag.
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-1.0, -1.0, -1.0]],
        rollout_log_probs=[[-1.1, -1.2, -1.5]],
        loss_masks=[[1, 1, 1]],
        weight_versions=[[100, 99, 70]],
    )
    expected = {"lag_0": 0.1, "lag_1": 0.2, "lag_older": 0.5}
    assert family(full(packed), "log_ratio_by_version_") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.3, 5.0])
def test_quantiles(scale: float, dtype: torch.dtype) -> None:
    """Within one bin of torch.quantile, over five decades of mismatch."""
    raw = Raw(3, scale)
    raw.train = [max(value, -100.0) for value in raw.train]
    raw.rollout = [max(r, t - 15, -18.0) for t, r in zip(raw.train, raw.rollout, strict=True)]
    packed = raw.packed(dtype)
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    log_ratio = (packed.old_log_probs - packed.rollout_log_probs)[packed.loss_mask].double()
    metrics = full(packed)
    width = 2 * HISTOGRAM_EDGE / HISTOGRAM_BINS

    def place(value: float) -> float:
        return math.asinh(value / HISTOGRAM_SCALE)

    for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99), ("p99_9", 0.999)):
        below, above = (float(torch.quantile(log_ratio, share, interpolation=kind)) for kind in ("lower", "higher"))
        found = place(math.log(metrics[f"{PREFIX}rollout_is_ratio_{name}"]))
        # The k-th of n, with k between share·(n − 1) and share·n: one rank of slack at either side.
        ordered = log_ratio.sort().values
        low = place(float(ordered[max(int((ordered < below).sum()) - 1, 0)]))
        high = place(float(ordered[min(int((ordered <= above).sum()), len(ordered) - 1)]))
        assert low - 1.01 * width <= found <= high + 1.01 * width, name


def test_every_declared_metric_is_reachable_and_documented() -> None:
    """Some configuration gives each declared name, and none gives a name that is not declared."""
    raw = Raw(4)
    rows = [row.tolist() for row in raw.packed().unpack(torch.tensor(raw.train))]
    packed = raw.packed(old_log_probs=rows, ref_log_probs=rows, entropy=[[1.0] * length for length in LENGTHS])
    packed = packed.replace(trainer_version=9)
    seen: set[str] = set()
    for level in ("token", "turn", "sequence", "geometric", "prefix"):
        settings = mp.MismatchConfig.model_validate(
            FULL
            | {
                "use_tis": True,
                "tis": {"level": level, "batch_normalize": True},
                "rs": {"criteria": ["token:ratio:0.7:1.4", "sequence_max:k2:0.5:share=0.1"], "max_staleness": 2},
                "terms": {"rollout_kl_coef": 0.1},
            }
        )
        log_probs = torch.tensor(raw.train, requires_grad=True)
        seen |= set(mp.policy_loss(log_probs, packed, settings).statistics.metrics())
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    patterns = {name: re.compile(PREFIX + re.sub(r"\\\{.*\\\}", ".+", re.escape(name))) for name in names}
    assert [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, seen))] == []
    assert [name for name in seen if not any(pattern.fullmatch(name) for pattern in patterns.values())] == []
    for name, formula, unit, over, merges, level in metric_rows():
        assert name.startswith(PREFIX) and formula and over, name
        assert merges in ("sum", "max") and level in ("basic", "full"), name
        assert unit in ("", "share", "nat", "tokens", "sequences"), name


def test_the_names_of_the_contract_are_there() -> None:
    """The names that users know."""
    expected = """rollout_is_mean rollout_is_std rollout_is_min rollout_is_max rollout_is_eff_sample_size
        rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_veto_fraction
        rollout_is_catastrophic_token_fraction rollout_is_masked_fraction rollout_is_seq_masked_fraction
        rollout_is_seq_mean rollout_is_seq_std rollout_is_seq_max rollout_is_seq_min rollout_is_seq_max_deviation
        rollout_is_seq_fraction_high rollout_is_seq_fraction_low kl k3_kl training_ppl rollout_ppl ppl_ratio
        log_ppl_diff log_ppl_abs_diff log_ppl_diff_max log_ppl_diff_min chi2_token chi2_seq training_log_ppl
        rollout_log_ppl rollout_is_batch_norm_factor rollout_rs_masked_fraction rollout_rs_seq_masked_fraction"""
    settings = mp.MismatchConfig.model_validate({"use_tis": True, "tis": {"batch_normalize": True}})
    metrics = mp.correct(Raw(5).packed(), settings).statistics.metrics()
    assert {PREFIX + name for name in expected.split()} <= set(metrics)
    # `full` adds and changes nothing.
    more = mp.correct(Raw(5).packed(), settings.model_copy(update={"metrics": "full"})).statistics.metrics()
    assert {name: more[name] for name in metrics} == metrics and len(more) > len(metrics)
