"""`launch` tells what every rank did when one of them raises, dies or hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import LaunchError, launch


def _misbehave(case: str) -> float:
    if dist.get_rank() == 1:
        if case == "raise":
            raise ValueError("as told")
        if case == "die":
            os._exit(7)
        if case == "hang":
            time.sleep(60)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise", ["rank 1, in case 1, 'raise'", "ValueError: as told", "rank 0, in case 1"]),
        ("die", ["exit code 7"]),
        ("hang", ["no progress for 2 s", "rank 0, in case 1, 'hang'", "all_reduce", "in _misbehave"]),
    ],
)
def test_launch_tells_what_every_rank_did(last: str, said: list[str]) -> None:
    assert launch(_misbehave, ["work", "work"], 2) == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(LaunchError) as error:
        launch(_misbehave, ["work", last], 2, timeout=2.0)
    for words in said:
        assert words in str(error.value)
