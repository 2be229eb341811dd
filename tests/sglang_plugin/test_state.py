"""What the plugin knows of weights, versions and caches, over the ranks of one server: SGLang is a stand-in."""

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
from mismatch_plugin.sglang.plugin import state as state_module
from mismatch_plugin.sglang.plugin import weights as weights_module
from mismatch_plugin.sglang.plugin.state import ServerState
from mismatch_plugin.sglang.plugin.weights import LoadedWeights, all_ready
from tests.calls import calls
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


# Two ranks ------------------------------------------------------------------------------------------------------------

UPDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, tuple[bool, bool], str, Any]] = {
    # What each rank gets, how many must change, whether SGLang calls it done there; what is said, what is counted.
    "both": (NAMES, NAMES, 3, (True, True), "", (1, 3, 2)),
    "one shard stays": (NAMES, ("a.weight", "norm"), 3, (True, True), "", (1, 3, 2)),  # of the vocabulary, say
    # Though it is the first update.
    "one rank gets nothing": (NAMES, (), 3, (True, True), "0 of 3 tensors changed", (1, 3, 0)),
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
    with patch.object(weights_module, "digests", side_effect=fails, wraps=digests):
        failure = found.end(required, done[rank])
    return failure, found.fingerprint, counts(found), found.unchanged


def _ready(case: str, rank: int) -> bool | None:
    store = PrefixStore(case, dist.distributed_c10d._get_default_store())
    dist.barrier()
    with (
        patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
        patch.object(weights_module, "_PATIENCE", timedelta(seconds=0.5 if case == "no plugin on one" else 60)),
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


# Versions and caches --------------------------------------------------------------------------------------------------


class Request:
    """Of three tokens so far, with what the plugin reads of SGLang's."""

    finished_len = input_embeds = None
    retraction_count = 0

    def __init__(self) -> None:
        self.origin_input_ids, self.output_ids = [5, 6, 7, 8], [1, 2, 3]


class Server:
    """What happens to a server of one process, in order."""

    def __init__(self) -> None:
        self.label = "default"
        self.model = Model()
        host = scheduler(self.model)
        host.server_args = SimpleNamespace()
        host.waiting_queue, host.chunked_req, host.running = [], None, set[Any]()
        host.collect_inflight_reqs = lambda: host.running
        host.token_to_kv_pool_allocator = SimpleNamespace(size=32, page_size=1, device="cpu")
        host.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(4, 16, dtype=torch.int32))
        self.host, self.state = host, ServerState(host)
        self.state.loaded()

    def move(self, value: float) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(value)

    def update(self, value: float, label: str | None = None, batch: bool = False) -> None:
        """A session that fills all weights; label: it comes with the last tensors. batch: one runs before its end."""
        self.state.begin()
        self.move(value)
        self.label = label or self.label
        if batch:
            self.batch()
        self.state.end(0)

    def batch(self) -> None:
        self.state.before_batch(SimpleNamespace(sampling_info=None, reqs=[], out_cache_loc=None))

    def prefill(self, slots: list[int], prefix: int) -> tuple[Request, list[Any]]:
        """A request whose first `prefix` slots the cache had, and what a reply would tell of it."""
        req, mode = Request(), SimpleNamespace(is_extend=lambda: True)
        self.host.req_to_token_pool.req_to_token[1, : len(slots)] = torch.tensor(slots)
        told = {"out_cache_loc": torch.tensor(slots[prefix:]), "req_pool_indices": torch.tensor([1])}
        self.state.before_batch(
            SimpleNamespace(sampling_info=None, reqs=[req], prefix_lens=[prefix], forward_mode=mode, **told)
        )
        return req, self.kv(req)

    def kv(self, req: Request) -> list[tuple[str | None, int, int]]:
        """What a reply of now would tell of the request."""
        told = self.state.cache.of(req, self.state.weights.fingerprint)
        assert told is not None
        return [(span["fingerprint"], span["tokens"], span["cached"]) for span in told]

    def since(self) -> str | None:
        """What a reply of now would tell of its last token."""
        self.batch()
        return self.state._spans(Request())[-1]["since"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    facts = {"server": "a:1/7", "pp_rank": 0, "pp_size": 1, "tp_rank": 0, "speculative": None}
    monkeypatch.setattr(state_module, "facts", lambda _: facts)
    monkeypatch.setattr(state_module, "_module", lambda _: SimpleNamespace(SGLANG_RETURN_ORIGINAL_LOGPROB=False))
    monkeypatch.setattr(state_module, "label", lambda: made[0].label if made else "default")
    made: list[Server] = []
    with process_group_of_one(tmp_path):
        made.append(Server())
        yield made[0]


@pytest.mark.parametrize(
    "history",
    [
        # Weights and label together; then a label alone.
        "?default 1:v1 ?v1 batch-2:v2 ?v2 3:v3 ?v3 3:v4 ?v3 5:v5 ?v5 :v6 ?v5",
        # A label that comes after its weights, with a batch in between and without; once more, and nothing came.
        "1 !v1 :v1 ?v1 2 !v2 :v2 ?v2 :v3 ?v2",
        "1 :v1 ?v1 2 :v2 ?v2 3 :v3 ?v3 :v4 ?v3",
        # A label that comes before its weights: until then these are the old ones.
        "?default :v1 !v1 1 ?v1 :v2 !v2 2 ?v2",
        "?default :v1 1 ?v1 :v2 2 ?v2",
        # Weights that come back are named anew, though no batch was of those in between.
        "1:v1 2:v2 1:v3 ?v3",
        # An idle update, and one that failed, name nothing.
        "1:v1 1:v2 ?v1",
        "1:v1 ?v1 failed :v2 ?v1",
        # Memory that comes back between an update and its name.
        "1 resumed :v1 ?v1",
    ],
)
def test_the_version_under_which_weights_were_first_sampled_from(server: Server, history: str) -> None:
    """`1:v1`: an update that fills all weights with 1 and brings v1. `?v1`: a batch of now is of v1; `!v1`: not."""
    for step in history.split():
        if step == "failed":
            server.state.end(0, success=False)
        elif step == "resumed":
            server.state.changed("resumed")
        elif step[0] in "?!":
            assert (server.since() == step[1:]) == (step[0] == "?"), step
        elif step[0] == ":":
            server.label = step[1:]
        else:
            value, _, label = step.removeprefix("batch-").partition(":")
            server.update(float(value), label or None, batch=step.startswith("batch-"))


def test_requests_under_way_keep_what_made_their_tokens(server: Server) -> None:
    server.update(1, "v1")
    server.batch()
    req = Request()
    server.host.running = {req}
    server.update(2, "v2")
    req.output_ids += [4]
    server.batch()
    server.update(1, "v3")  # the first weights again, under another name
    req.output_ids += [5, 6]
    server.batch()
    spans = [(span["since"], span["start"], span["end"]) for span in server.state._spans(req)]
    assert spans == [("v1", 0, 3), ("v2", 3, 4), ("v3", 4, 6)]


def test_a_part_of_an_update_is_neither_the_old_weights_nor_the_new(server: Server) -> None:
    server.update(1, "v1")
    server.state.begin()
    server.move(2)
    assert server.since() is None
    server.state.changed("resumed")  # nothing is told before its end
    assert server.state.weights.fingerprint is None
    server.state.end(0)
    assert server.state.weights.fingerprint is not None


def test_sessions_without_a_batch_in_between_are_one_update(server: Server) -> None:
    """A trainer that sends one part of its tensors a session, with the version in the first, the last, or each."""

    def part(name: str, value: float, label: str | None) -> None:
        server.state.begin()
        with torch.no_grad():
            dict(server.model.named_parameters())[name].fill_(value)
        server.label = label or server.label
        server.state.end(0)

    weights = server.state.weights
    for step, labels in enumerate(((None, None, "v1"), ("v2", None, None), ("v3", "v3", "v3")), start=1):
        for name, label in zip(NAMES, labels, strict=True):
            part(name, step + 1, label)
        assert counts(weights) == (step, 3, 2) and server.since() == f"v{step}"
    server.update(8, "v4")
    server.update(8, "v5")  # two updates, of which the second one brought nothing
    assert counts(weights) == (5, 0, 0) and server.since() == "v4"
    part("a.weight", 9, "v6")
    server.batch()  # tokens of a half
    part("b.weight", 9, "v6")
    assert counts(weights) == (7, 1, 1)
    part("norm", 9, "v6")  # goes on
    assert counts(weights) == (7, 2, 1)


def test_keys_and_values_of_older_weights_are_told_until_the_flush(server: Server) -> None:
    prints = [server.state.weights.fingerprint]
    server.prefill([1, 2, 3, 4], 0)
    for step in (1, 2):  # in place and without a flush
        server.update(step, f"v{step}")
        prints.append(server.state.weights.fingerprint)
        if step == 1:
            server.prefill([1, 2, 5, 6], 2)
    assert server.prefill([1, 2, 5, 7, 8], 3)[1] == [(prints[0], 2, 2), (prints[1], 1, 1)]
    assert server.prefill([7, 8, 9, 10], 2)[1] == []  # all of them are of now
    retracted, told = server.prefill([1, 2, 5, 11], 3)
    assert told
    server.host.waiting_queue = [retracted]
    server.state.cache.flushed()
    assert server.kv(retracted) == [] and server.prefill([1, 2, 3, 4], 2)[1] == []
    assert not server.state.cache._old  # so that nothing is written
    server.update(3, "v3")
    assert server.prefill([1, 2, 3, 4], 2)[1] == [(prints[2], 2, 2)]


def test_a_request_that_an_update_in_place_meets_keeps_its_keys_and_values(server: Server) -> None:
    first = server.state.weights.fingerprint
    req, _ = server.prefill([1, 2, 3, 4, 5, 6], 0)
    server.host.running = {req}
    server.state.begin()
    server.prefill([7, 8], 0)  # of a half done update
    req.output_ids += [4]
    server.move(3)
    server.state.end(0)
    assert server.kv(req) == [(first, 6, 0), (None, 1, 0)]
    assert server.prefill([7, 8, 9], 2)[1] == [(None, 2, 2)]
    server.update(3, "again")  # the same weights
    assert server.kv(req) == [(first, 6, 0), (None, 1, 0)]


def test_the_work_for_a_batch_and_a_reply_does_not_grow(server: Server) -> None:
    """Its share of a real server's CPU is in docs/sglang_plugin.md (`examples.benchmarks.server_cost`)."""
    server.update(1, "v1")
    batch = SimpleNamespace(sampling_info=None, reqs=[Request()] * 64, out_cache_loc=None)
    off = {**state_module._PENALTIES, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}

    def reply(tokens: int) -> int:
        req: Any = Request()
        req.rid, req.sampling_params, req.output_ids = "r", SimpleNamespace(**off), [1] * tokens
        return calls(lambda: server.state.reply(req))

    assert calls(lambda: server.state.before_batch(batch)) <= 6
    assert reply(8) == reply(4000) <= 45


def test_an_exception_in_the_end_leaves_no_rank_behind(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.state.begin()
    monkeypatch.setattr(server.state.weights, "end", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.state.end(0)
    assert not server.state.under_way
