"""The units by hand: running sums, parts of a sequence, empty turns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.units import chunk_parts, number_runs
from mismatch_plugin.parallel.context import shard
from tests.core.worked import config, of_log_ratios, weighted

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

CPU = torch.device("cpu")
LN2, LN3 = math.log(2.0), math.log(3.0)


def weights(packed: mp.PackedSequences, level: str, *groups: Any, **tis: Any) -> list[float]:
    return mp.correct(packed, config(**weighted(level, **tis)), *groups).weights.tolist()


def test_running_sums_keep_the_digits_of_their_own_response() -> None:
    """Whatever the batch holds before it: one scan over all would lose 1e-10 here. Empty responses between. One value
    beyond all digits leaves the other sequences theirs."""
    random = torch.Generator().manual_seed(0)
    lengths = [int(n) for n in torch.randint(0, 2000, (1000,), generator=random)]
    lengths[0] = lengths[5] = lengths[6] = lengths[-1] = 0
    rows = torch.randn(sum(lengths), generator=random, dtype=torch.float64)
    rows *= torch.rand(sum(lengths), generator=random, dtype=torch.float64)
    expected = torch.cat([row.cumsum(0) for row in rows.split(lengths)])
    found = chunk_parts([[length] for length in lengths], CPU).running(rows, rows)
    assert float((found - expected).abs().max()) < 1e-12
    packed = of_log_ratios([[-1e30, LN2], [LN2, LN3]])
    far = math.exp(-20)
    assert weights(packed, "prefix", upper_bound=math.inf) == pytest.approx([far, far, 2.0, 6.0])


class Rank:
    """One of two ranks; the second adds what the first has summed."""

    cp_size = 2

    def __init__(self, seen: list[torch.Tensor], first: bool) -> None:
        self.seen, self.counts_sequences = seen, first

    def sum(self, partials: torch.Tensor) -> torch.Tensor:
        if not self.counts_sequences:
            return partials + self.seen.pop(0)
        self.seen.append(partials.clone())
        return partials

    max = sum


def test_a_prefix_is_the_same_split_where_one_token_is_beyond_all_bounds() -> None:
    """It counts as −1e4 in every split, so that three of +4899.5 outweigh it."""
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[[-2e4, -0.5, -0.5, -0.5]], rollout_log_probs=[[-0.5, *[-4900.0] * 3]], loss_masks=[[1] * 4]
    )
    assert weights(packed, "prefix", mode="clip") == [0.5, 0.5, 0.5, 2.0]
    seen: list[torch.Tensor] = []
    parts = [shard(packed, "contiguous", 2, rank) for rank in range(2)]
    found = [weights(part, "prefix", Rank(seen, part is parts[0]), mode="clip") for part in parts]
    assert found == [[0.5, 0.5], [0.5, 2.0]]


@pytest.mark.parametrize(("level", "missing"), [("turn", "unit_ids"), ("prefix", "chunk_lengths")])
def test_a_part_that_does_not_know_the_whole_is_refused(level: str, missing: str) -> None:
    packed = of_log_ratios([[LN2, LN3]])
    with pytest.raises(ValueError, match=f"{missing} is missing: --tis-level {level}"):
        weights(packed, level, Rank([], first=True))
    whole = packed.replace(unit_ids=torch.tensor([0, 0]), unit_counts=(1,), chunk_lengths=((2, 0),))
    weights(whole, level, Rank([], first=True))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_turns_that_are_empty_count_nowhere(mode: str) -> None:
    """A mask on a device is not waited for: every second token of 3, 4 and 0 may begin a turn, and most do not."""
    mask = torch.ones(7, dtype=torch.bool, device="meta")
    assert number_runs(mask, (3, 4, 0), torch.zeros(7, dtype=torch.int64, device="meta"))[1] == (2, 2, 1)
    packed = of_log_ratios([[LN2, 9.0, LN3, LN2], [LN2]], [[1, 0, 1, 1], [1]])
    roomy = packed.replace(unit_ids=torch.tensor([0, 0, 2, 2, 1]), unit_counts=(4, 3))
    settings = weighted("turn", mode, upper_bound=3.0, batch_normalize=True, bound_growth=0.5)
    found, expected = (mp.correct(each, config(**settings, metrics="full")) for each in (roomy, packed))
    assert found.weights.tolist() == expected.weights.tolist()
    assert found.statistics.metrics() == pytest.approx(expected.statistics.metrics())


def test_turn_numbers_that_cannot_be_are_refused() -> None:
    """Neither may turn back; nor may memory be set aside for 10^12 of them."""
    for last, counts in ((0, (1, 3)), (10**12, None)):
        packed = mp.PackedSequences.from_lists(loss_masks=[[1], [1, 1, 1]], unit_ids=[[0], [0, 1, last]])
        with pytest.raises(ValueError, match=f"unit_ids of sequence 1 is {last} at position 2"):
            packed.replace(unit_counts=counts).unit_numbers()
    right = mp.PackedSequences.from_lists(loss_masks=[[1], [1, 1, 1], []], unit_ids=[[0], [0, 1, 2], []])
    assert right.unit_numbers()[1] == (1, 3, 1)
