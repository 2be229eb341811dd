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


def counts(found: LoadedWeights) -> tuple[int, int, int]:
    assert found.update is not None
    return found.update["number"], found.update["changed"], found.update["changed_matrices"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with process_group_of_one(tmp_path):
        yield


def test_an_update_is_counted_by_what_it_changed(alone: None) -> None:
    model = Model()
    found = loaded(model)
    assert found.fingerprint == fingerprint(digests(model.named_parameters())) and found.update is None
    found.begin()
    assert found.fingerprint is None  # half done
    add(model, *NAMES)
    assert found.end(0) == "" and counts(found) == (1, 3, 2) and found.unchanged == []
    assert found.fingerprint == fingerprint(digests(model.named_parameters()))
    add(model, "a.weight", "norm")
    assert found.end(0) == "" and counts(found) == (2, 2, 1) and found.unchanged == ["b.weight"]


def test_the_share_of_elements_that_an_update_changed(alone: None) -> None:
    """In bfloat16, where small steps round away; of a matrix of few elements each is looked at."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False).bfloat16()
    found = loaded(model)
    for step, share in ((1e-5, 0.2), (0.5, 1.0), (0.0, 0.0)):
        before = model.weight.detach().clone()
        add(model, "weight", value=step)
        assert found.end(0) == "" and found.update is not None
        true = float((before != model.weight).float().mean())
        assert found.update["changed_elements"] == pytest.approx(true, abs=0.06)
        assert (true < share + 0.05) if step < 0.1 else true > 0.9
    small = loaded(Model())
    add(small._scheduler.tp_worker.model_runner.model, "a.weight")
    small.end(0)
    assert small.update is not None and small.update["changed_elements"] == pytest.approx(16 / 24, abs=1e-4)


def test_what_is_required_to_change(alone: None) -> None:
    model = Model()
    found = loaded(model)
    assert found.end(1) == ""  # the first sync of a run
    says = "MISMATCH_REQUIRE_CHANGE=1: the weights were loaded, and 0 of 3 tensors changed. The same as"
    assert found.end(1).startswith(says) and found.end(1).endswith("a.weight, b.weight, norm.")
    add(model, "a.weight", "norm")
    assert "2 of 3 tensors changed. The same as before: b.weight." in found.end(3)
    add(model, *NAMES)
    assert found.end(3) == ""
    found = loaded(model)
    add(model, "a.weight")
    assert "1 of 3" in found.end(3)  # a first update that brings a part is no sync


def test_a_failed_update_counts_if_it_changed_something(alone: None) -> None:
    model = Model()
    found = loaded(model)
    add(model, *NAMES)
    found.end(0)
    before = found.update
    found.end(0, success=False)
    assert found.update == before and found.number == 1
    add(model, "a.weight")
    found.end(0, success=False)
    assert counts(found) == (2, 1, 1)


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


def _two(case: str) -> Any:
    torch.manual_seed(dist.get_rank())  # two shards of each matrix; the norm is a copy
    model, first = Model(), dist.get_rank() == 0
    found = loaded(model)
    if case == "one rank gets nothing":
        add(model, *(NAMES if first else ()))
        failure = found.end(3)
    elif case == "one rank fails":
        add(model, *(NAMES if first else ()))
        failure = found.end(1, success=first)
    elif case == "both fail":
        failure = found.end(0, success=False)
    elif case == "one digest fails":
        add(model, *NAMES)
        broken = patch.object(module, "digests", side_effect=None if first else RuntimeError("planted"), wraps=digests)
        with broken:
            failure = found.end(1)
    elif case == "a shard stays":  # of the vocabulary, of which no token was
        add(model, *(NAMES if first else ("a.weight", "norm")))
        failure = found.end(3)
    else:
        add(model, *NAMES)
        failure = found.end(3)
    return failure, found.fingerprint, found.update, found.unchanged


CASES = ("both", "one rank gets nothing", "one rank fails", "both fail", "one digest fails", "a shard stays")


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return dict(zip(CASES, launch(_two, CASES, 2), strict=True))


def test_ranks_tell_the_same(two: dict[str, Any]) -> None:
    for case, (first, second) in two.items():
        assert first == second, case
    failure, told, update, _ = two["both"][0]
    assert failure == "" and told is not None and update["changed"] == 3
    assert two["a shard stays"][0][0] == "" and two["a shard stays"][0][2]["changed_matrices"] == 2


def test_a_rank_that_got_nothing_shows(two: dict[str, Any]) -> None:
    failure, told, update, unchanged = two["one rank gets nothing"][0]
    assert "0 of 3 tensors changed" in failure  # though it is the first
    assert told is not None and update["changed"] == 3 and update["changed_matrices"] == 0  # partly updated
    assert unchanged == ["a.weight", "b.weight"]
    failure, _, update, _ = two["one rank fails"][0]
    assert "failed on tensor-parallel rank 1, and did not on the others" in failure and update["changed_matrices"] == 0


def test_an_update_that_failed_on_all_ranks_is_none(two: dict[str, Any]) -> None:
    failure, told, update, _ = two["both fail"][0]
    assert failure == "" and told is not None and update is None


def test_a_rank_without_digests_holds_up_no_other(two: dict[str, Any]) -> None:
    failure, told, update, _ = two["one digest fails"][0]
    assert "is not known" in failure and told is None and update is None


def _ready(case: str) -> bool | None:
    dist.barrier()
    with patch.object(module, "_PATIENCE", timedelta(seconds=0.5)):
        if case == "no plugin on one" and dist.get_rank() == 1:
            return None
        return all_ready(case != "one cannot" or dist.get_rank() == 0)


@pytest.mark.parametrize(
    ("case", "expected"), [("all", [True, True]), ("one cannot", [False, False]), ("no plugin on one", [False, None])]
)
def test_all_processes_have_the_plugin_or_none_uses_it(case: str, expected: list[bool | None]) -> None:
    assert launch(_ready, [case], 2) == [expected]
