"""The units by hand, and that nothing but the table of the settings asks for one by its word."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.config.sections import ImportanceSampling
from mismatch_plugin.config.units import LEVELS, PRODUCTS, RS_LEVELS, UNITS, Aggregate, Level
from mismatch_plugin.core.units import acting_bounds, chunk_parts, number_runs, unit_log_ratio, unit_tokens
from mismatch_plugin.parallel.context import shard

LOG_RATIO = torch.tensor([0.1, 0.0, 0.5, -0.4])  # the second token is masked, the third sequence is empty
PACKED = mp.PackedSequences(loss_mask=torch.tensor([True, False, True, True]), lengths=(3, 1, 0))
SUMS = {"log_ratio": torch.tensor([0.6, -0.4, 0.0]), "tokens": torch.tensor([2.0, 1.0, 0.0])}
TURNS = {"log_ratio": torch.tensor([0.1, 0.5, -0.4, 0.0]), "tokens": torch.tensor([1.0, 1.0, 1.0, 0.0])}
LN2, LN3 = math.log(2.0), math.log(3.0)


@pytest.mark.parametrize(
    ("level", "sums", "aggregated", "counts"),
    [
        ("token", SUMS, [0.1, 0.0, 0.5, -0.4], None),
        ("turn", TURNS, [0.1, 0.5, -0.4, 0.0], [1, 1, 1, 0]),
        ("sequence", SUMS, [0.6, -0.4, 0.0], [2, 1, 0]),
        ("geometric", SUMS, [0.3, -0.4, 0.0], [2, 1, 0]),
        ("prefix", SUMS, [0.1, 0.1, 0.6, -0.4], [1, 1, 2, 1]),
    ],
)
def test_aggregates(
    level: str, sums: dict[str, torch.Tensor], aggregated: list[float], counts: list[int] | None
) -> None:
    unit = UNITS[level]
    parts = PACKED.parts(unit)
    assert unit_log_ratio(unit, LOG_RATIO, sums, parts).tolist() == pytest.approx(aggregated)
    if counts is not None:
        assert unit_tokens(unit, PACKED.loss_mask.double(), sums, parts).tolist() == counts


def weighted(level: str, packed: mp.PackedSequences, **tis: Any) -> list[float]:
    tis = {"upper_bound": math.inf, **tis}
    config = mp.MismatchConfig(use_tis=True, tis={"level": level, **tis})  # pyright: ignore[reportArgumentType]
    return mp.correct(packed, config).weights.tolist()


def of(log_ratios: list[list[float]], masks: list[list[int]], **fields: Any) -> mp.PackedSequences:
    rows = [torch.tensor(row, dtype=torch.float64) for row in log_ratios]
    return mp.PackedSequences.from_lists(
        old_log_probs=[row - 9.0 for row in rows],
        rollout_log_probs=[torch.full_like(row, -9.0) for row in rows],
        loss_masks=masks,
        **fields,
    )


def test_one_value_beyond_all_digits_leaves_the_other_sequences_theirs() -> None:
    packed = of([[-1e30, LN2], [LN2, LN3]], [[1, 1], [1, 1]])
    assert weighted("prefix", packed) == pytest.approx([math.exp(-20), math.exp(-20), 2.0, 6.0])


def test_a_rank_adds_the_chunks_before_its_own() -> None:
    """Rank 0 of two under zigzag has chunks 0 and 3 of A, of B none but the last; all sums are of both ranks."""
    parts = chunk_parts([[2, 0, 0, 1], [0, 0, 0, 1]], torch.device("cpu"))
    sums = {
        "log_ratio": torch.tensor([3.0, 10.0, 100.0, 7.0, 1.0, 2.0, 4.0, 9.0], dtype=torch.float64),
        "tokens": torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
    }
    values, mask = torch.tensor([1.0, 2.0, 7.0, 9.0]), torch.ones(4)
    assert unit_log_ratio(UNITS["prefix"], values, sums, parts).tolist() == [1, 3, 120, 16]
    assert unit_tokens(UNITS["prefix"], mask, sums, parts).tolist() == [1, 2, 6, 3]
    assert parts.sequence.tolist() == [0] * 4 + [1] * 4


def test_a_mask_on_a_device_is_not_waited_for() -> None:
    """Its sequences have as many turns as they could have: every second token of 3, 4 and 0."""
    device = torch.device("meta")
    mask, index = torch.ones(7, dtype=torch.bool, device=device), torch.zeros(7, dtype=torch.int64, device=device)
    assert number_runs(mask, (3, 4, 0), index)[1] == (2, 2, 1)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_turns_that_are_empty_count_nowhere(mode: str) -> None:
    """Where a mask on a device is not waited for, there is room for more of them than there are."""
    packed = of([[LN2, 9.0, LN3, LN2], [LN2]], [[1, 0, 1, 1], [1]])
    roomy = packed.replace(unit_ids=torch.tensor([0, 0, 2, 2, 1]), unit_counts=(4, 3))
    settings = {"level": "turn", "mode": mode, "upper_bound": 3.0, "batch_normalize": True, "bound_growth": 0.5}
    config = mp.MismatchConfig(use_tis=True, tis=settings, metrics="full")  # pyright: ignore[reportArgumentType]
    found, expected = mp.correct(roomy, config), mp.correct(packed, config)
    assert found.weights.tolist() == expected.weights.tolist()
    assert found.statistics.metrics() == pytest.approx(expected.statistics.metrics())


@pytest.mark.parametrize("level", ["token", "turn", "prefix"])
def test_a_ratio_at_its_bound_is_inside(level: str) -> None:
    """ρ is exactly lo, hi, and just beyond either."""
    for train, stays in ((-2 * LN2, True), (0.0, True), (-2 * LN2 - 1e-9, False), (1e-9, False)):
        values = torch.tensor([-LN2, train], dtype=torch.float64)
        packed = of([[0.0]], [[1]]).replace(rollout_log_probs=values[:1], old_log_probs=values[1:])
        assert [weight > 0 for weight in weighted(level, packed, mode="mask", upper_bound=2.0)] == [stays]


def test_bounds_grow_to_e20_at_most() -> None:
    packed = of([[1.0] * 100], [[1] * 100])
    assert weighted("sequence", packed, upper_bound=2.0, bound_growth=1.0)[0] == pytest.approx(math.exp(20))
    few = of([[25.0 / 3] * 3], [[1] * 3])
    assert weighted("sequence", few, upper_bound=math.exp(10), bound_growth=1.0)[0] == pytest.approx(math.exp(20))
    for log_ratio, stays in ((25.0, False), (19.0, True), (-25.0, False)):
        three = of([[log_ratio / 3] * 3], [[1] * 3])
        masked = weighted("sequence", three, upper_bound=math.exp(10), mode="mask", bound_growth=1.0)
        assert [weight > 0 for weight in masked] == [stays] * 3


def test_levels_and_aggregates_are_words_for_the_same_units() -> None:
    assert {*LEVELS, "none"} == {*get_args(Level)}
    assert PRODUCTS == ("turn", "sequence", "prefix") and RS_LEVELS == ("token", "sequence", "geometric")
    assert mp.preset("pg_rs").unit == UNITS["token"]  # level none: metrics of tokens
    for level, aggregate in (("token", "token"), ("sequence", "sequence_sum"), ("geometric", "sequence_mean")):
        config = mp.MismatchConfig.model_validate({"rs": {"criteria": (f"{level}:ratio:2.0",)}})
        assert config.criteria[0].unit is UNITS[aggregate] and config.criteria[0].unit == UNITS[level]
        assert config == mp.MismatchConfig.model_validate({"rs": {"criteria": (f"{aggregate}:ratio:2.0",)}})


def test_the_bounds_that_act() -> None:
    assert acting_bounds(mp.MismatchConfig()) is None
    assert acting_bounds(mp.preset("seq_is")) == (UNITS["sequence"], 0.5, 2.0, 0.0)
    assert acting_bounds(mp.preset("geo_rs")) == (UNITS["geometric"], 1 / 1.001, 1.001, 0.0)
    assert acting_bounds(mp.preset("ppo_is_bypass")) == (UNITS["token"], 0.5, 2.0, 0.0)
    assert acting_bounds(mp.preset("prefix_is")) == (UNITS["prefix"], 0.2, 5.0, 0.5)


@pytest.mark.parametrize(
    ("ids", "said"),
    [([0, 1, 0], "is 0 at position 2"), ([-1, 0, 0], "is -1 at position 0"), ([0, 1, 5], "is 5 at position 2")],
)
def test_turn_numbers_that_cannot_be_are_refused(ids: list[int], said: str) -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[[1], [1, 1, 1]], unit_ids=[[0], ids])
    packed = packed.replace(unit_counts=(1, 3))
    with pytest.raises(ValueError, match=f"unit_ids of sequence 1 {said}"):
        packed.unit_numbers()


@pytest.mark.parametrize(("level", "missing"), [("turn", "unit_ids"), ("prefix", "chunk_lengths")])
def test_a_part_that_does_not_know_the_whole_is_refused(level: str, missing: str) -> None:
    class Two:
        counts_sequences, cp_size = True, 2
        sum = max = staticmethod(lambda partials: partials)

    packed = of([[LN2, LN3]], [[1, 1]])
    config = mp.MismatchConfig(use_tis=True, tis={"level": level})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=f"{missing} is missing: --tis-level {level}"):
        mp.correct(packed, config, Two())
    mp.correct(packed.replace(unit_ids=torch.tensor([0, 0]), unit_counts=(1,), chunk_lengths=((2, 0),)), config, Two())


def test_chunks_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"chunk_lengths .* must have as many chunks for every sequence, and add up"):
        of([[LN2, LN3]], [[1, 1]]).replace(chunk_lengths=((1, 0),))
    with pytest.raises(ValueError, match="unit_counts has 2 entries for 1 sequences"):
        of([[LN2, LN3]], [[1, 1]]).replace(unit_counts=(1, 1))


def test_a_prefix_is_the_same_split_where_one_token_is_beyond_all_bounds() -> None:
    """It counts as −1e4 in every split, so that three of +4899.5 outweigh it."""
    seen: list[torch.Tensor] = []

    class Rank:
        cp_size = 2

        def __init__(self, earlier: list[torch.Tensor]) -> None:
            self.earlier, self.counts_sequences = earlier, not earlier

        def sum(self, partials: torch.Tensor) -> torch.Tensor:
            seen.append(partials.clone())
            return partials + self.earlier.pop(0) if self.earlier else partials

        max = sum

    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-2e4, -0.5, -0.5, -0.5]], rollout_log_probs=[[-0.5, *[-4900.0] * 3]], loss_masks=[[1] * 4]
    )
    config = mp.MismatchConfig(use_tis=True, tis=ImportanceSampling(level="prefix", mode="clip"))
    whole = mp.correct(packed, config).weights.tolist()
    assert whole == [0.5, 0.5, 0.5, 2.0]
    first = mp.correct(shard(packed, "contiguous", 2, 0), config, Rank([])).weights.tolist()
    assert first + mp.correct(shard(packed, "contiguous", 2, 1), config, Rank(seen.copy())).weights.tolist() == whole


def test_a_turn_number_that_is_an_id_is_refused() -> None:
    """Memory for 10^12 turns would be set aside."""
    packed = mp.PackedSequences.from_lists(loss_masks=[[1], [1, 1]], unit_ids=[[999], [0, 10**12]])
    with pytest.raises(ValueError, match=r"unit_ids of sequence 1 is 10{12} at position 1: number its units"):
        packed.unit_numbers()


def test_nothing_else_asks_which_level_it_is() -> None:
    root = Path(mp.__file__).parent
    words = "|".join((*LEVELS, *get_args(Aggregate), "none"))
    asks = re.compile(rf'(level|aggregate) (==|!=|in|not in) [("\']*({words})\b')
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] in ("core", "parallel", "hooks")]
    asking = [path.name for path in files if path.name != "units.py" and asks.search(path.read_text())]
    assert len(files) > 40 and asking == []


def test_a_product_so_far_keeps_the_digits_of_its_own_response() -> None:
    """Whatever the batch holds before it: one scan over all would lose 1e-10 here. Empty responses between."""
    random = torch.Generator().manual_seed(0)
    lengths = [int(n) for n in torch.randint(0, 2000, (1000,), generator=random)]
    lengths[0] = lengths[5] = lengths[6] = lengths[-1] = 0
    rows = torch.randn(sum(lengths), generator=random, dtype=torch.float64)
    rows *= torch.rand(sum(lengths), generator=random, dtype=torch.float64)
    expected = torch.cat([row.cumsum(0) for row in rows.split(lengths)])
    found = chunk_parts([[length] for length in lengths], torch.device("cpu")).running(rows, rows)
    assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
@pytest.mark.parametrize("level", ["sequence", "geometric", "prefix"])
@pytest.mark.parametrize("shift", [0.0, -18.0])
def test_figures_of_ratios_far_below_one_keep_their_digits(level: str, shift: float) -> None:
    """ρ of e^−18: about 1 nothing of its spread is left in float64."""
    own = torch.linspace(-0.5, 0.5, 40, dtype=torch.float64)
    statistics = mp.correct(
        of([[shift + value] for value in own.tolist()], [[1]] * 40),
        mp.MismatchConfig.build({"use_tis": True, "tis": {"level": level}}),
    ).statistics
    ratio, metrics = (shift + own).exp(), statistics.metrics()
    head = "rollout_corr/rollout_is_ratio_unit_"
    assert metrics[head + "std"] == pytest.approx(float(ratio.std(correction=0)), rel=1e-9)
    ess = float(ratio.sum() ** 2 / (40 * ratio.square().sum()))
    assert metrics[head + "eff_sample_size"] == pytest.approx(ess, rel=1e-9)
