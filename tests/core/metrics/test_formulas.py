"""Every metric of the guide against direct loops over raw lists, written from the guide's formulas."""

from __future__ import annotations

import math
import random
import statistics as stats
from itertools import accumulate, groupby, pairwise, product
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.validity import DEFECTS

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

HI = 1.5
LO = 1 / HI
VETO = 0.5
PREFIX = "rollout_corr/"
LEVELS, MODES = ("token", "turn", "sequence", "geometric", "prefix"), ("truncate", "clip", "mask")
CRITERIA = ("token:ratio:0.6:1.7", "sequence_mean:k2:0.12", "sequence_max:tv:0.15", "sequence_sum:ratio:0.2:4")
Rows = list[list[float]]


class Raw:
    """A random ragged batch as plain lists, one a sequence; `log_ratio`, `train`, `rollout`: response tokens only."""

    def __init__(self, seed: int, sequences: int = 14) -> None:
        rng = random.Random(seed)
        self.masks = [[int(rng.random() < 0.75) for _ in range(rng.randrange(8))] for _ in range(sequences)]
        self.masks[1] = [0, 0]
        all_rollout = [[rng.uniform(-3, -0.8) for _ in mask] for mask in self.masks]
        drift = [rng.gauss(0, 0.15) for _ in self.masks]
        all_train = [
            [min(r + rng.gauss(d, 0.3), -0.01) for r in row] for row, d in zip(all_rollout, drift, strict=True)
        ]
        self.packed = mp.PackedSequences.from_lists(
            old_log_probs=[torch.tensor(row, dtype=torch.float64) for row in all_train],
            rollout_log_probs=[torch.tensor(row, dtype=torch.float64) for row in all_rollout],
            loss_masks=self.masks,
        )

        def response(rows: Rows) -> Rows:
            pairs = zip(rows, self.masks, strict=True)
            chosen = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in pairs]
            return [row for row in chosen if row]

        self.train, self.rollout = response(all_train), response(all_rollout)
        self.turns = [[len(list(run)) for trains, run in groupby(mask) if trains] for mask in self.masks if any(mask)]
        self.log_ratio = [
            [t - r for t, r in zip(*pair, strict=True)] for pair in zip(self.train, self.rollout, strict=True)
        ]


def config(level: str = "token", mode: str = "truncate", **settings: Any) -> mp.MismatchConfig:
    base: dict[str, Any] = {
        "use_tis": True,
        "tis": {"level": level, "mode": mode, "upper_bound": HI},
        "rs": {"criteria": CRITERIA, "veto_threshold": VETO},
    }
    return mp.MismatchConfig.model_validate(base | settings)


def flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row]


def bounded(ratio: float, mode: str) -> float:
    if mode == "truncate":
        return min(ratio, HI)
    if mode == "clip":
        return min(max(ratio, LO), HI)
    return ratio if LO <= ratio <= HI else 0.0


def effective(values: list[float]) -> float:
    """1 / mean(v²) of weights normalised to mean 1, the guide's formula."""
    mean = stats.fmean(values)
    return 1 / stats.fmean((v / mean) ** 2 for v in values)


def reference(raw: Raw, level: str, mode: str) -> dict[str, float]:
    """The metrics of `correct`, each by its formula."""
    starts = [[*accumulate(lengths, initial=0)] for lengths in raw.turns]
    turns = [[row[a:b] for a, b in pairwise(at)] for row, at in zip(raw.log_ratio, starts, strict=True)]
    by_level = {
        "token": [[math.exp(x) for x in row] for row in raw.log_ratio],
        "turn": [[math.exp(sum(turn)) for turn in row for _ in turn] for row in turns],
        "prefix": [[math.exp(x) for x in accumulate(row)] for row in raw.log_ratio],
        "sequence": [[math.exp(sum(row))] * len(row) for row in raw.log_ratio],
        "geometric": [[math.exp(sum(row) / len(row))] * len(row) for row in raw.log_ratio],
    }
    ratio = by_level[level]
    units = flat(ratio) if level in ("token", "prefix") else [row[0] for row in ratio]
    if level == "turn":
        units = [math.exp(sum(turn)) for row in turns for turn in row]
    tokens = flat(ratio)
    clamped = [min(max(value, 1 / HI), HI) for value in tokens]
    per_sequence = [stats.fmean(row) for row in ratio]

    # Rejection, each cause on the original mask.
    by_mask = [[mode == "mask" and not LO <= value <= HI for value in row] for row in ratio]
    by_token = [[not 0.6 <= math.exp(x) <= 1.7 for x in row] for row in raw.log_ratio]
    k2 = [stats.fmean(x * x / 2 for x in row) > 0.12 for row in raw.log_ratio]
    tv = [
        max(abs(math.exp(t) - math.exp(r)) for t, r in zip(*pair, strict=True)) > 0.15
        for pair in zip(raw.train, raw.rollout, strict=True)
    ]
    total = [not 0.2 <= math.exp(sum(row)) <= 4 for row in raw.log_ratio]
    veto = [any(math.exp(x) < VETO for x in row) for row in raw.log_ratio]
    masked = [
        [a or b or k2[i] or tv[i] or total[i] for a, b in zip(by_mask[i], by_token[i], strict=True)]
        for i in range(len(raw.log_ratio))
    ]
    keep = [[not (m or veto[i]) for m in row] for i, row in enumerate(masked)]
    weights = [[bounded(value, mode) for value in row] for row in ratio]
    used = [[w * k for w, k in zip(*pair, strict=True)] for pair in zip(weights, keep, strict=True)]
    kept = [w for w, k in zip(flat(weights), flat(keep), strict=True) if k]  # type: ignore[arg-type]

    def spread(verdict: list[bool]) -> float:
        """Share of tokens, from verdicts on sequences."""
        return sum(len(row) for row, v in zip(raw.log_ratio, verdict, strict=True) if v) / len(tokens)

    def share(verdicts: Any) -> float:
        verdicts = list(verdicts)
        return sum(verdicts) / len(verdicts)

    log_ratios = flat(raw.log_ratio)
    train_ppl, rollout_ppl = ([math.exp(-stats.fmean(row)) for row in rows] for rows in (raw.train, raw.rollout))
    difference = [-stats.fmean(row) for row in raw.log_ratio]  # log_ppl_training − log_ppl_rollout
    values = {
        "rollout_is_mean": stats.fmean(tokens),
        "rollout_is_ratio_mean": stats.fmean(map(math.exp, log_ratios)),
        "rollout_is_ratio_std": stats.pstdev(map(math.exp, log_ratios)),
        "rollout_is_ratio_eff_sample_size": effective([math.exp(x) for x in log_ratios]),
        "rollout_is_std": stats.pstdev(clamped),
        "rollout_is_min": min(units),
        "rollout_is_max": max(units),
        "rollout_is_eff_sample_size": effective(clamped),
        "rollout_is_ratio_fraction_high": share(value > HI for value in units),
        "rollout_is_ratio_fraction_low": share(value < LO for value in units),
        "rollout_is_seq_mean": stats.fmean(per_sequence),
        "rollout_is_seq_std": stats.stdev(per_sequence),
        "rollout_is_seq_max": max(per_sequence),
        "rollout_is_seq_min": min(per_sequence),
        "rollout_is_seq_max_deviation": max(abs(value - 1) for value in per_sequence),
        "rollout_is_seq_fraction_high": share(value > HI for value in per_sequence),
        "rollout_is_seq_fraction_low": share(value < LO for value in per_sequence),
        "rollout_is_weight_after_mean": stats.fmean(kept),
        "rollout_is_weight_after_std": stats.pstdev(kept),
        "rollout_is_weight_after_max": max(kept),
        "rollout_is_weight_after_eff_sample_size": effective(flat(used)),
        "rollout_is_weight_after_seq_eff_sample_size": effective([stats.fmean(row) for row in used]),
        "rollout_is_masked_fraction": share(flat(masked)),  # type: ignore[arg-type]
        "rollout_is_seq_masked_fraction": share(any(row) for row in masked),
        "rollout_rs_token_ratio_masked_fraction": share(flat(by_token)),  # type: ignore[arg-type]
        "rollout_rs_sequence_mean_k2_masked_fraction": spread(k2),
        "rollout_rs_sequence_max_tv_masked_fraction": spread(tv),
        "rollout_rs_sequence_sum_ratio_masked_fraction": spread(total),
        "rollout_rs_sequence_mean_k2_seq_masked_fraction": share(k2),
        "rollout_rs_sequence_max_tv_seq_masked_fraction": share(tv),
        "rollout_rs_sequence_sum_ratio_seq_masked_fraction": share(total),
        "rollout_is_veto_fraction": share(veto),
        "rollout_is_catastrophic_token_fraction": share(math.exp(x) < VETO for x in log_ratios),
        "accepted_token_fraction": share(flat(keep)),  # type: ignore[arg-type]
        "accepted_seq_fraction": share(any(row) for row in keep),
        "all_rejected": 0.0,
        "tokens": len(tokens),
        "sequences": len(raw.log_ratio),
        "kl": stats.fmean(-x for x in log_ratios),
        "k3_kl": stats.fmean(math.exp(x) - 1 - x for x in log_ratios),
        "training_ppl": stats.fmean(train_ppl),
        "rollout_ppl": stats.fmean(rollout_ppl),
        "training_log_ppl": stats.fmean(math.log(p) for p in train_ppl),
        "rollout_log_ppl": stats.fmean(math.log(p) for p in rollout_ppl),
        "ppl_ratio": math.exp(stats.fmean(math.log(t / r) for t, r in zip(train_ppl, rollout_ppl, strict=True))),
        "log_ppl_diff": stats.fmean(difference),
        "log_ppl_abs_diff": stats.fmean(map(abs, difference)),
        "log_ppl_diff_max": max(difference),
        "log_ppl_diff_min": min(difference),
        "chi2_token": stats.fmean(math.exp(2 * x) for x in log_ratios) - 1,
        "chi2_seq": stats.fmean(math.exp(2 * sum(row)) for row in raw.log_ratio) - 1,
        "seq_log_ratio_mean": stats.fmean(sum(row) for row in raw.log_ratio),
        **{f"invalid_{kind}": 0.0 for kind in DEFECTS},
    }
    if level != "token":
        values |= {
            "rollout_is_ratio_unit_mean": stats.fmean(units),
            "rollout_is_ratio_unit_std": stats.pstdev(units),
            "rollout_is_ratio_unit_eff_sample_size": effective(units),
        }
    if level == "turn":
        parts = [row[a:b] for row, at in zip(used, starts, strict=True) for a, b in pairwise(at)]
        values["rollout_is_weight_after_unit_eff_sample_size"] = effective([stats.fmean(part) for part in parts])
    for name in ("masked_fraction", "seq_masked_fraction"):
        values[f"rollout_rs_{name}"] = values[f"rollout_is_{name}"]
    return values


def measured(raw: Raw, settings: mp.MismatchConfig) -> dict[str, float]:
    metrics = mp.correct(raw.packed, settings).statistics.metrics()
    assert all(name.startswith(PREFIX) for name in metrics)
    return {name.removeprefix(PREFIX): value for name, value in metrics.items()}


def approx(expected: dict[str, float]) -> dict[str, Any]:
    # A deviation is the root of a difference: half of the digits may go where it is nearly 0.
    return {
        name: pytest.approx(value, rel=1e-9, abs=1e-7 if name.endswith("_std") else 1e-11)
        for name, value in expected.items()
    }


@pytest.mark.parametrize(("level", "mode"), list(product(LEVELS, MODES)))
@pytest.mark.parametrize("seed", [1, 5, 6, 8])  # chosen so that every cause rejects something
def test_every_metric_by_its_formula(level: str, mode: str, seed: int) -> None:
    raw = Raw(seed)
    expected = reference(raw, level, mode)
    causes = {name: value for name, value in expected.items() if name.startswith(("rollout_rs_", "rollout_is_veto"))}
    assert 0 < expected["accepted_token_fraction"] < 1 and all(0 < value < 1 for value in causes.values()), causes
    assert measured(raw, config(level, mode)) == approx(expected)


@pytest.mark.parametrize("level", LEVELS)
def test_without_weights_the_ratio_is_still_described(level: str) -> None:
    """Metrics only: no `…_weight_after_*`; the ratio is that of the token level, rejection and veto are 0."""
    metrics = measured(Raw(0), mp.MismatchConfig())
    assert not [name for name in metrics if "weight_after" in name or "batch_norm" in name]
    assert metrics["rollout_is_mean"] == pytest.approx(reference(Raw(0), "token", "truncate")["rollout_is_mean"])
    assert metrics["rollout_is_masked_fraction"] == metrics["rollout_is_veto_fraction"] == 0.0
    assert measured(Raw(0), config(level, metrics="off")) == {}


@pytest.mark.parametrize(("level", "mode"), list(product(LEVELS, MODES)))
def test_weights_after_normalisation(level: str, mode: str) -> None:
    """`…_weight_after_*` describe what multiplies the loss: taken here from the weights themselves."""
    tis = {"level": level, "mode": mode, "upper_bound": HI, "batch_normalize": True}
    raw = Raw(1)
    found = mp.correct(raw.packed, config(tis=tis))
    after = found.weights[found.keep > 0]
    metrics = measured(raw, config(tis=tis))
    assert metrics["rollout_is_weight_after_mean"] == pytest.approx(float(after.mean()), rel=1e-9)
    assert metrics["rollout_is_weight_after_std"] == pytest.approx(float(after.std(correction=0)), rel=1e-7)
    assert metrics["rollout_is_weight_after_max"] == pytest.approx(float(after.max()), rel=1e-9)
    used = (found.weights * found.keep)[raw.packed.loss_mask]
    assert metrics["rollout_is_weight_after_eff_sample_size"] == pytest.approx(effective(used.tolist()), rel=1e-9)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(float(found.statistics.batch_factor()), rel=1e-12)
    # The ratio before bounding does not know of it.
    assert metrics["rollout_is_mean"] == pytest.approx(reference(raw, level, mode)["rollout_is_mean"])


def tokens(*log_ratios: list[float]) -> mp.PackedSequences:
    """Float64 sequences of the given log-ratios."""
    rollout = [[-1.0 - max(0.0, max(row))] * len(row) for row in log_ratios]
    train = [[r + x for r, x in zip(*pair, strict=True)] for pair in zip(rollout, log_ratios, strict=True)]
    rows = [[torch.tensor(row, dtype=torch.float64) for row in side] for side in (train, rollout)]
    masks = [[1] * len(row) for row in log_ratios]
    return mp.PackedSequences.from_lists(old_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=masks)


def test_deviation_and_sample_size_clamp_to_one_over_hi_whatever_the_lower_bound() -> None:
    # ρ = .25, 1; hi = 2: c = .5, 1: mean .75, deviation .25, size .75² / .625 = .9. With lo = 0 as clamp: .375, .735.
    packed = tokens([math.log(0.25), 0.0])
    settings = mp.MismatchConfig.model_validate({"use_tis": True, "tis": {"mode": "clip", "lower_bound": 0.0}})
    metrics = mp.correct(packed, settings).statistics.metrics()
    assert metrics[f"{PREFIX}rollout_is_std"] == pytest.approx(0.25, rel=1e-9)
    assert metrics[f"{PREFIX}rollout_is_eff_sample_size"] == pytest.approx(0.9, rel=1e-9)


@pytest.mark.parametrize("lower", [0.0, 1e-8, None])
@pytest.mark.parametrize("log_ratio", [-17.0, -18.0, -19.5, -20.0, -40.0])
@pytest.mark.parametrize("upper", [2.0, math.inf])
def test_vanishing_ratios_have_a_sample_size(log_ratio: float, lower: float | None, upper: float) -> None:
    """Equal weights have size 1 and deviation 0, however small. Catches (mean c)²/mean c² formed from ρ − 1."""
    settings = mp.MismatchConfig.model_validate(
        {"use_tis": True, "tis": {"level": "sequence", "mode": "clip", "lower_bound": lower, "upper_bound": upper}}
    )
    metrics = mp.correct(tokens(*[[log_ratio]] * 3), settings).statistics.metrics()
    assert metrics[f"{PREFIX}rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert metrics[f"{PREFIX}rollout_is_std"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_extremes_are_unclamped_below_and_e_to_the_20_above(level: str) -> None:
    """Extremes are reported as exp(min(·, 20)): what lies below e^-20 is told as it is."""
    metrics = mp.correct(tokens([-30.0], [25.0], [0.5]), config(level, rs={})).statistics.metrics()
    whole = level in ("sequence", "geometric")  # else a sequence's is a mean, of ρ within e^±20
    for head in ("rollout_is_", "rollout_is_seq_") if whole else ("rollout_is_",):
        assert metrics[f"{PREFIX}{head}min"] == pytest.approx(math.exp(-30), rel=1e-9), head
        assert metrics[f"{PREFIX}{head}max"] == pytest.approx(math.exp(20), rel=1e-9), head
    assert metrics[f"{PREFIX}log_ppl_diff_max"] == 30.0 and metrics[f"{PREFIX}log_ppl_diff_min"] == -25.0


@pytest.mark.parametrize("level", LEVELS)
def test_statistics_merge_over_micro_batches_and_ranks(level: str) -> None:
    """Merging three batches is one batch of all; so is summing and maximising the state as an all-reduce does."""
    raws = [Raw(seed) for seed in range(3)]
    settings = config(level, metrics="full")
    parts = [mp.correct(raw.packed, settings).statistics for raw in raws]
    lists: list[list[Any]] = [[], [], []]
    for raw in raws:
        assert raw.packed.old_log_probs is not None and raw.packed.rollout_log_probs is not None
        lists[0] += raw.packed.unpack(raw.packed.old_log_probs)
        lists[1] += raw.packed.unpack(raw.packed.rollout_log_probs)
        lists[2] += raw.masks
    names = ("old_log_probs", "rollout_log_probs", "loss_masks")
    packed = mp.PackedSequences.from_lists(**dict(zip(names, lists, strict=True)))
    whole = mp.correct(packed, settings).statistics.metrics()
    merged = parts[0].merge(parts[1]).merge(parts[2])
    reduced = parts[0].replace(
        sum((part.sums for part in parts[1:]), parts[0].sums), torch.stack([part.maxima for part in parts]).amax(0)
    )
    assert merged.metrics() == approx(whole)
    assert reduced.metrics() == approx(whole)


def test_statistics_of_batches_with_different_fields_do_not_merge() -> None:
    rows = {"rollout_log_probs": [[-1.0, -0.5]], "train_log_probs": [[-1.1, -0.6]], "loss_masks": [[1, 1]]}
    config = mp.MismatchConfig(metrics="full")
    more = mp.correct(mp.PackedSequences.from_lists(**rows, weight_versions=[[7, 8]]), config).statistics
    less = mp.correct(mp.PackedSequences.from_lists(**rows), config).statistics
    with pytest.raises(ValueError, match=r"one has -version, version, version_log_ratio.*, the other not"):
        more.merge(less)
    with pytest.raises(ValueError, match=r"the other has -version, .*, one not.*weight_versions"):
        less.merge(more)
    other = mp.correct(mp.PackedSequences.from_lists(**rows), mp.MismatchConfig(use_tis=True)).statistics
    with pytest.raises(ValueError, match="one has use_tis = False, the other has True"):
        less.merge(other)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_long_responses_in_float32_keep_their_digits(mode: str) -> None:
    """Equal tokens, 32768 of them: every mean is the token's own value, in one piece or in sixteen: to 1e-5.

    Catches sums accumulated in float32: their error grows with the length, and differs from split to split.
    """
    size, train, rollout = 32768, -1.1, -1.1003
    tis = {"mode": mode, "batch_normalize": True}
    settings = mp.MismatchConfig.model_validate({"use_tis": True, "tis": tis})
    ratio = math.exp(float(torch.tensor(train) - torch.tensor(rollout)))
    for pieces in (1, 16):
        rows = [[torch.full((size // pieces,), value)] * pieces for value in (train, rollout)]
        packed = mp.PackedSequences.from_lists(
            old_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=[torch.ones(size // pieces)] * pieces
        )
        found = mp.correct(packed, settings)
        metrics = {name.removeprefix(PREFIX): value for name, value in found.statistics.metrics().items()}
        assert found.weights.tolist() == pytest.approx([1.0] * size, rel=1e-5)
        assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(ratio, rel=1e-6)
        assert metrics["rollout_is_mean"] == pytest.approx(ratio, rel=1e-6)
        assert metrics["training_log_ppl"] == pytest.approx(1.1, rel=1e-5)
        assert metrics["training_ppl"] == pytest.approx(math.exp(1.1), rel=1e-5)
        assert metrics["rollout_is_weight_after_eff_sample_size"] == pytest.approx(1.0, rel=1e-5)
        assert metrics["rollout_is_weight_after_std"] == pytest.approx(0.0, abs=1e-3)
