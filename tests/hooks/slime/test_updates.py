"""After a weight update: what slime and miles sent is compared with what servers say that they hold.

Updaters are stand-ins with the hosts' names, attributes and order of calls, on real process groups; a server is a file
with its /server_info, in which q, k and v are fused. The hosts' own classes and HTTP are in the whole trainers' tests.
"""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.data.read import read
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.hooks.miles import MilesAdapter
from mismatch_plugin.hooks.slime import SlimeAdapter
from mismatch_plugin.hooks.slime.updates import SENDERS, WeightUpdates
from mismatch_plugin.sglang.client import WeightUpdateError
from mismatch_plugin.sglang.fingerprints import digests, fingerprint
from tests.distributed.alone import process_group_of_one
from tests.distributed.launch import launch
from tests.hooks.contracts.slime_data import arguments, hooked, ours

Weights = dict[str, Tensor]
LAYER = "model.layers.{}.self_attn.{}_proj.weight"


def weights(step: int, layers: range = range(2)) -> Weights:
    """The trainer's, by the names of Hugging Face."""
    random = torch.Generator().manual_seed(step)
    shapes = {LAYER.format(layer, kind): (8, 4) for layer in layers for kind in "qkvo"}
    return {name: torch.randn(*shape, generator=random).bfloat16() for name, shape in shapes.items()}


def loaded(sent: Mapping[str, Tensor]) -> Weights:
    """What a server makes of them: q, k and v are one tensor."""
    held = {name: tensor for name, tensor in sent.items() if ".o_proj." in name}
    for layer in {name.split(".")[2] for name in sent}:
        parts = [sent[LAYER.format(layer, kind)] for kind in "qkv"]
        held[LAYER.format(layer, "qkv")] = torch.cat(parts)
    return held


def told(held: Mapping[str, Tensor], server: str = "one") -> dict[str, Any]:
    found = digests(held.items())
    tensors = {name: [f"{value:016x}", kind, dims] for name, (value, kind, dims) in found.items()}
    return {"server": server, "fingerprint": fingerprint(found), "label": "3", "update": None, "tensors": tensors}


@dataclass
class Server:
    """held: None where it has no plugin. folder: of its answer."""

    folder: Path
    held: Weights | None = None

    @property
    def info(self) -> dict[str, Any]:
        state = {"x": 1} if self.held is None else {META_KEY: told(self.held, self.folder.name)}
        return {"internal_states": [state]}

    def url(self) -> str:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "server_info").write_text(json.dumps(self.info))
        return self.folder.as_uri()


def remote(answer: Any) -> Any:
    """A method of one of Ray's actors; our `ray.get` hands out what it returned."""
    return SimpleNamespace(remote=lambda *args, **kwargs: answer())


def engine(host: str, server: Server) -> Any:
    if host == "slime":
        return SimpleNamespace(get_url=remote(server.url))
    return SimpleNamespace(get_server_info=remote(lambda: server.info))


def modules(host: str) -> dict[str, Any]:
    """The host's modules that are read, and Ray. Our wrapper goes on the updaters' classes: fresh ones each time."""
    kinds = {name: type(name, (Updater,), {own: send, "sender": own}) for name, own in SENDERS[host].items()}
    dumps = SimpleNamespace(save_debug_train_data=lambda args, *, rollout_data, **_: SAVED.append(rollout_data))
    return {
        f"{host}.backends.megatron_utils.actor": SimpleNamespace(**kinds),
        f"{host}.utils.distributed_utils": SimpleNamespace(get_gloo_group=lambda: dist.group.WORLD),
        DUMPS[host]: dumps,
        "ray": SimpleNamespace(get=list),
    }


SAVED: list[dict[str, Any]] = []
DUMPS = {"slime": "slime.observability.train_data_utils", "miles": "miles.utils.train_dump_utils"}


class Updater:
    """An updater of the host: `update_weights` sends buckets of two tensors, the first as it is made."""

    sender: str

    def __init__(self, engines: list[Any], **fields: Any) -> None:
        self.rollout_engines, self.sent = engines, {}
        self.quantization_config = None
        vars(self).update(fields)

    def update_weights(self, new: Weights | None = None) -> str:
        pairs = list((new or {}).items())
        for at in range(0, len(pairs), 2):
            bucket = pairs[at : at + 2]
            getattr(self, self.sender)(bucket if at else iter(bucket))  # what we read must reach the host all the same
        dist.barrier()
        return "the host's"


def send(self: Updater, named_tensors: Any, pbar: Any = None) -> None:
    self.sent.update(named_tensors)
    if isinstance(named_tensors, list):
        named_tensors.clear()  # as the hosts do


@dataclass
class Run:
    """One host with servers. updates: ours."""

    host: str
    servers: list[Server]
    engines: list[Any]
    updates: WeightUpdates
    actor: Any

    def updater(self, name: str = "UpdateWeightFromDistributed", **fields: Any) -> Any:
        return getattr(self.actor, name)(self.engines, **fields)


@pytest.fixture(params=["slime", "miles"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    host, servers = request.param, [Server(tmp_path / "one"), Server(tmp_path / "two")]
    made = modules(host)
    for path, module in made.items():
        monkeypatch.setitem(sys.modules, path, module)
    SAVED.clear()
    with process_group_of_one(tmp_path):
        engines = [engine(host, server) for server in servers]
        yield Run(host, servers, engines, WeightUpdates(host, {}), made[f"{host}.backends.megatron_utils.actor"])


HELD_BY = {"nothing": weights(0), "one layer": {**weights(1), **weights(0, range(1))}, "all": weights(1)}
OTHERS = {f"visual.{name}": tensor for name, tensor in weights(2).items()}
LOST: list[tuple[tuple[str | None, str | None], Weights, str, bool]] = [
    (("all", "all"), weights(1), "", True),
    (("all", "one layer"), weights(1), "two: 2 of 4 tensors are not what was sent", False),
    (("all", "nothing"), weights(1) | OTHERS, "8 of 16 names that were sent belong to no tensor of the server", False),
    (("nothing", None), weights(1), "one: 4 of 4 tensors", False),
]
"""What two servers hold (None: no plugin), what was sent, the fault, and whether it is verified."""


@pytest.mark.parametrize("case", LOST)
def test_what_serves_is_compared_with_what_was_sent(run: Run, case: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By each of the host's updaters; a difference is an error, or under `warn` a warning."""
    held, sent, fault, verified = case
    run.updates.watch(Namespace(), "error")
    for server, name in zip(run.servers, held, strict=True):
        server.held = None if name is None else loaded(HELD_BY[name])
    for name in SENDERS[run.host]:
        if fault:
            updater = run.updater(name)
            if name == "UpdateWeightFromTensor":  # which splits its servers into colocated and remote ones
                vars(updater).update(_ipc_gather_src=0, use_distribute=True, rollout_engines=run.engines[:1])
                updater.distributed_rollout_engines = run.engines[1:]
            with pytest.raises(WeightUpdateError) as raised:
                updater.update_weights(sent)
            assert fault in str(raised.value) and "--mismatch-verify-weights warn" in str(raised.value)
        else:
            assert run.updater(name).update_weights(sent) == "the host's"
        assert run.updates.fingerprint == (told(loaded(sent))["fingerprint"] if verified else None)
    run.updates.watch(Namespace(), "warn")
    with caplog.at_level(logging.WARNING):
        assert run.updater().update_weights(sent) == "the host's"
    assert (fault in caplog.text) and bool(run.updates.fingerprint) == verified


@pytest.mark.parametrize("step", [1e-6, 1e-3])
def test_steps_report_what_an_update_delivers_of_the_masters_change(run: Run, step: float) -> None:
    """Of the matrices, whether or not a server has the plugin."""
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 300).bfloat16()
    master = model.weight.detach().float()
    vars(model.weight)["main_param"] = master
    run.updates.watch(Namespace(), "error")
    updater = run.updater(model=[model])
    updater.update_weights({})
    assert run.updates.metrics == {}  # nothing to compare with
    before = master.clone()
    master.add_(step * torch.randn(master.shape, generator=torch.Generator().manual_seed(0)).sign())
    updater.update_weights({})
    delivered, wanted = master.bfloat16().float() - before.bfloat16().float(), master - before
    found = {name.removeprefix("rollout_corr/weight_update_"): value for name, value in run.updates.metrics.items()}
    cosine = float(torch.cosine_similarity(delivered.flatten(), wanted.flatten(), dim=0))
    assert (found["cosine"] < 0.3) == (step < 1e-4)
    assert found["cosine"] == pytest.approx(cosine, abs=0.1)
    assert found["changed"] == pytest.approx(float((delivered != 0).float().mean()), abs=0.1)
    assert found["norm_ratio"] == pytest.approx(float(delivered.norm() / wanted.norm()), abs=0.1)
    run.updates.metrics.clear()
    master.add_(1.0)
    run.updater(model=[model], args=Namespace(offload_train=True)).update_weights({})
    assert run.updates.metrics == {}  # its memory may be gone


SILENT = {
    "no plugin": "2 of 2 servers tell nothing of their weights",
    "one without it": "1 of 2 servers tell nothing of their weights",
    "quantised": "the checkpoint is quantised (fp8)",
    "sparse": "not all of the weight update was verified",
}


@pytest.mark.parametrize("fault", SILENT)
def test_what_is_not_compared_stops_no_update_and_is_said_once(
    run: Run, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.updates.watch(Namespace(), "error")
    fields: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}} if fault == "quantised" else {}
    with caplog.at_level(logging.INFO):
        for step in range(2):
            new = weights(step)
            if fault != "no plugin":
                run.servers[0].held = loaded(new)
            if fault not in ("no plugin", "one without it"):
                run.servers[1].held = loaded(new)
            sent = {name: tensor.to_sparse() for name, tensor in new.items()} if fault == "sparse" else new
            updater = run.updater(**fields)
            assert updater.update_weights(sent) == "the host's" and {*updater.sent} == {*sent}
            assert bool(run.updates.fingerprint) == (fault == "one without it")
    assert caplog.text.count(SILENT[fault]) == 1
    if fault == "sparse":
        run.updater().update_weights(weights(1))
        assert run.updates.fingerprint is not None, "the next update is compared again"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"update_weight_transport": "disk"}, "they go through files"),
        ({"sglang_quantization": "fp8"}, "--sglang-quantization fp8"),
        ({"lacks": "the method"}, "sends them otherwise than the tested one"),
        ({"mode": "off"}, ""),
    ],
)
def test_what_cannot_be_compared_is_said_and_left_alone(
    run: Run, args: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = run.actor.UpdateWeightFromDistributed
    if "lacks" in args:
        delattr(kind, SENDERS[run.host]["UpdateWeightFromDistributed"])
    before = kind.update_weights
    with caplog.at_level(logging.INFO):
        run.updates.watch(Namespace(**args), args.get("mode", "error"))
    assert kind.update_weights is before
    assert not reason or ("weight updates are not verified: " in caplog.text and reason in caplog.text)


def test_the_hook_that_starts_a_training_process_watches(run: Run) -> None:
    """By its settings, as the launcher or the host's YAML gives them."""
    adapter = {"slime": SlimeAdapter, "miles": MilesAdapter}[run.host]()
    own = run.actor.UpdateWeightFromTensor.update_weights
    adapter.init(arguments(run.host, **hooked(run.host), use_tis=True, mismatch_verify_weights="off"))
    assert run.actor.UpdateWeightFromTensor.update_weights is own
    for _ in range(2):  # once is enough
        adapter.init(arguments(run.host, **hooked(run.host), **ours(2)))
    ours_now = run.actor.UpdateWeightFromTensor.update_weights
    assert vars(ours_now)["mismatch_plugin_wraps"][1] is own


def test_the_dump_of_training_has_the_fingerprint_of_the_weights_it_began_with(run: Run, tmp_path: Path) -> None:
    run.updates.watch(Namespace(), "error")
    for server in run.servers:
        server.held = loaded(weights(0))
    run.updater(weight_version=4).update_weights(weights(0))
    verified = run.updates.fingerprint
    data: dict[str, Any] = {"tokens": [[1, 2, 3]], "response_lengths": [2], "sample_indices": [4]}
    data |= {"log_probs": [[-0.5, -0.25]], "rollout_log_probs": [[-0.5, -0.25]]}
    dumps = importlib.import_module(DUMPS[run.host])
    for number in range(2):  # an update every other rollout: the second trains on from weights that nobody serves
        dumps.save_debug_train_data(Namespace(), rollout_id=number, rollout_data=data)
    first, second = SAVED
    assert first == {**data, "weight_fingerprint": [verified], "trainer_weight_version": ["4"]} and second == data
    whole = {"rollout_id": 3, "rank": 0, "rollout_data": first, "cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}
    torch.save(whole, tmp_path / "3_0.pt")
    (sample,) = read(tmp_path / "3_0.pt").samples
    assert (sample.trainer_fingerprint, sample.trainer_version) == (verified, "4")


# Several ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Two training ranks. pipeline: each sends its own layer over a process group; else each sends to its own
    colocated server; experts: the two have one server together, and each sends half. fault: the second layer is old."""

    host: str
    kind: str
    fault: bool


def update(case: Ranks) -> tuple[str, str | None]:
    """(error, verified fingerprint) of one rank."""
    made = modules(case.host)
    sys.modules.update(made)
    rank, old, new = dist.get_rank(), weights(0), weights(1)
    folder = Path(tempfile.mkdtemp())
    server = Server(folder, loaded({name: (old if case.fault and ".1." in name else new)[name] for name in new}))
    updates, engines = WeightUpdates(case.host, {}), [engine(case.host, server)]
    updates.watch(Namespace(rank=rank), "error")
    actor: Any = made[f"{case.host}.backends.megatron_utils.actor"]
    mine = {name: tensor for name, tensor in new.items() if f".{rank}." in name}
    if case.kind == "pipeline":
        updater = actor.UpdateWeightFromDistributed(engines)
    elif case.kind == "experts":
        updater = actor.UpdateWeightFromTensor(engines, _ipc_gather_src=0)
    else:  # rank 1 sends to a server that is not asked here: its tensors are not to be mixed with rank 0's
        updater, mine = actor.UpdateWeightFromTensor(engines, _ipc_gather_src=rank), old if rank else new
    try:
        updater.update_weights(mine)
    except WeightUpdateError as error:
        return str(error), updates.fingerprint
    finally:
        shutil.rmtree(folder)
    return "", updates.fingerprint


KINDS = ("pipeline", "colocated", "experts")
CASES = [Ranks(host, kind, fault) for host in SENDERS for kind in KINDS for fault in (False, True)]


def test_all_ranks_learn_the_verdict_on_what_they_sent_together() -> None:
    whole = told(loaded(weights(1)))["fingerprint"]
    for case, ranks in zip(CASES, launch(update, CASES, world_size=2), strict=True):
        errors = {error for error, _ in ranks}
        assert len(errors) == 1, case
        assert ("2 of 4 tensors are not what was sent" in errors.pop()) == case.fault, case
        assert [found for _, found in ranks] == [None if case.fault else whole] * 2, case
