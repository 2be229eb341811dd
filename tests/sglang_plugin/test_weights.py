"""What the plugin knows of loaded weights and their updates, over the ranks of one server: SGLang is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mismatch_plugin.sglang.fingerprints import digests, fingerprint
from mismatch_plugin.sglang.plugin import weights as module
from mismatch_plugin.sglang.plugin.weights import LoadedWeights, all_ready
from tests.distributed.alone import process_group_of_one
from tests.distributed.launch import launch

NAMES = ("a.weight", "b.weight", "norm")


class Model(nn.Module):
    """Two matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.norm = nn.Parameter(torch.ones(4))


def scheduler(model: nn.Module) -> Any:
    """What the plugin reads of SGLang's."""
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return SimpleNamespace(tp_worker=worker, weight_updater=SimpleNamespace(tp_cpu_group=dist.group.WORLD))


def loaded(model: nn.Module) -> LoadedWeights:
    found = LoadedWeights(scheduler(model), pp_rank=0, pp_size=1, tp_rank=dist.get_rank())
    found.take()
    return found


def add(model: nn.Module, *names: str, value: float = 0.5) -> None:
    with torch.no_grad():
        for name in names:
            dict(model.named_parameters())[name].add_(value)


def counts(found: LoadedWeights) -> tuple[int, int, int] | None:
    told = found.update
    return None if told is None else (told["number"], told["changed"], told["changed_matrices"])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with process_group_of_one(tmp_path):
        yield


SAME = "MISMATCH_REQUIRE_CHANGE=1: the weights were loaded, and 0 of 3 tensors changed. The same as before: a.weight, b"


@pytest.mark.parametrize(
    "updates",
    [
        [(NAMES, 0, True, "", (1, 3, 2)), (("a.weight", "norm"), 0, True, "", (2, 2, 1))],
        # A first update may change nothing, since a run begins by sending the weights that are loaded.
        [((), 1, True, "", (1, 0, 0)), ((), 1, True, SAME, (2, 0, 0)), (NAMES, 3, True, "", (3, 3, 2))],
        [(NAMES, 0, True, "", (1, 3, 2)), (("a.weight", "norm"), 3, True, "2 of 3 tensors changed", (2, 2, 1))],
        [(("a.weight",), 3, True, "1 of 3 tensors changed", (1, 1, 1))],  # one that brings a part is no sync
        # One that failed counts if it changed something.
        [(NAMES, 0, True, "", (1, 3, 2)), ((), 0, False, "", (1, 3, 2)), (("a.weight",), 0, False, "", (2, 1, 1))],
        [((), 0, False, "", None)],
    ],
)
def test_an_update_is_counted_by_what_it_changed(alone: None, updates: list[Any]) -> None:
    model = Model()
    found = loaded(model)
    assert found.update is None
    for names, required, success, says, expected in updates:
        assert found.fingerprint == fingerprint(digests(model.named_parameters()))
        found.begin()
        assert found.fingerprint is None  # half done
        add(model, *names)
        said = found.end(required, success)
        assert says in said and bool(says) == bool(said) and counts(found) == expected


def test_the_share_of_elements_that_an_update_changed(alone: None) -> None:
    """In bfloat16, where small steps round away; of a matrix of few elements each is looked at."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False).bfloat16()
    found = loaded(model)
    for step, least, most in ((1e-5, 0.0, 0.25), (0.5, 0.9, 1.0), (0.0, 0.0, 0.0)):
        before = model.weight.detach().clone()
        add(model, "weight", value=step)
        assert found.end(0) == "" and found.update is not None
        true = float((before != model.weight).float().mean())
        assert found.update["changed_elements"] == pytest.approx(true, abs=0.06) and least <= true <= most
    small = Model()
    found = loaded(small)
    add(small, "a.weight")
    found.end(0)
    assert found.update is not None and found.update["changed_elements"] == pytest.approx(16 / 24, abs=1e-4)


def test_what_changed_outside_an_update_is_no_part_of_the_next(alone: None) -> None:
    """SGLang's own check of updates fills the weights with noise first: then they come back."""
    model = Model()
    found = loaded(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add(model, *NAMES, value=3.0)
    found.take()
    noise = found.fingerprint
    model.load_state_dict(state)
    assert found.end(1) == "" and counts(found) == (1, 3, 2) and found.fingerprint != noise


def test_digests_that_cannot_be_taken(alone: None) -> None:
    model = Model()
    found = loaded(model)
    with patch.object(module, "digests", side_effect=RuntimeError("planted")):
        assert "is not known" in found.end(1)
    assert found.fingerprint is None and found.update is None
    assert "is not known" in found.end(1) and found.fingerprint is not None  # nothing to compare with
    add(model, *NAMES)
    assert found.end(1) == "" and counts(found) == (3, 3, 2)


# Two ranks ------------------------------------------------------------------------------------------------------------

UPDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, tuple[bool, bool], str, Any]] = {
    # What each rank gets, how many must change, whether SGLang calls it done there; what is said, what is counted.
    "both": (NAMES, NAMES, 3, (True, True), "", (1, 3, 2)),
    "one shard stays": (NAMES, ("a.weight", "norm"), 3, (True, True), "", (1, 3, 2)),  # of the vocabulary, say
    "one rank gets nothing": (
        NAMES,
        (),
        3,
        (True, True),
        "0 of 3 tensors changed",
        (1, 3, 0),
    ),  # though it is the first
    "one rank fails": (NAMES, (), 1, (True, False), "failed on tensor-parallel rank 1, and did not on", (1, 3, 0)),
    "both fail": ((), (), 0, (False, False), "", None),
    "one digest fails": (NAMES, NAMES, 1, (True, True), "is not known", None),
}
READY = {"all": [True, True], "one cannot": [False, False], "no plugin on one": [False, None]}


def _on_two(case: str) -> Any:
    rank = dist.get_rank()
    if case in READY:
        return _ready(case, rank)
    if case == "two stages":
        return _stages(rank)
    first, second, required, done, _, _ = UPDATES[case]
    torch.manual_seed(rank)  # two shards of each matrix; the norm is a copy
    model = Model()
    found = loaded(model)
    add(model, *((first, second)[rank]))
    fails = RuntimeError("planted") if case == "one digest fails" and rank == 1 else None
    with patch.object(module, "digests", side_effect=fails, wraps=digests):
        failure = found.end(required, done[rank])
    return failure, found.fingerprint, counts(found), found.unchanged


def _ready(case: str, rank: int) -> bool | None:
    store = PrefixStore(case, dist.distributed_c10d._get_default_store())
    dist.barrier()
    with (
        patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
        patch.object(module, "_PATIENCE", timedelta(seconds=0.5 if case == "no plugin on one" else 60)),
    ):
        return None if case == "no plugin on one" and rank == 1 else all_ready(case != "one cannot" or rank == 0)


def _stages(rank: int) -> Any:
    """Two pipeline stages, of which the first one answers; the second one's update comes later."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = nn.ModuleDict({f"layer{rank}": Model()})
    host = scheduler(model)
    host.weight_updater.tp_cpu_group = groups[rank]
    found = LoadedWeights(host, pp_rank=rank, pp_size=2, tp_rank=0)
    found.take()
    add(model, f"layer{rank}.a.weight")
    seen = []
    for turn in (0, 1):
        if rank == turn:
            found.end(0)
        found.complete()
        seen.append(found.fingerprint)
        dist.barrier()
    found.complete()
    return seen, found.fingerprint, counts(found), found.unchanged


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    cases = [*UPDATES, *READY, "two stages"]
    return dict(zip(cases, launch(_on_two, cases, 2), strict=True))


@pytest.mark.parametrize("case", UPDATES)
def test_ranks_tell_the_same_of_an_update(two: dict[str, Any], case: str) -> None:
    (failure, told, counted, unchanged), other = two[case]
    assert two[case][0] == other
    _, _, _, _, says, expected = UPDATES[case]
    assert says in failure and bool(says) == bool(failure) and counted == expected
    assert (told is None) == (case == "one digest fails")
    assert unchanged == ([] if counted == (1, 3, 2) or told is None else ["a.weight", "b.weight"])


@pytest.mark.parametrize("case", READY)
def test_all_processes_have_the_plugin_or_none_uses_it(two: dict[str, Any], case: str) -> None:
    assert two[case] == READY[case]


def test_the_first_stage_tells_of_an_update_when_all_stages_have_it(two: dict[str, Any]) -> None:
    (seen, told, counted, unchanged), _ = two["two stages"]
    assert seen[0] is None and told is not None  # the second stage had not told yet
    assert counted == (1, 2, 2) and unchanged == ["layer0.b.weight", "layer1.b.weight"]
