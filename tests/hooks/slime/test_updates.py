"""After a weight update: what slime and miles sent is compared with what servers say that they hold.

Updaters are stand-ins with the hosts' names, attributes and order of calls, on real process groups; servers are real
HTTP servers that hold the tensors, fused, as SGLang does. The hosts' own classes run where there is a checkout.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from tests.hooks.contracts.slime_cases import hooked, ours
from tests.hooks.contracts.slime_data import arguments
from tests.hooks.contracts.slime_source import function, host_root, parameters

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


def told(held: Mapping[str, Tensor], server: str = "a:1/7") -> dict[str, Any]:
    found = digests(held.items())
    tensors = {name: [f"{value:016x}", kind, dims] for name, (value, kind, dims) in found.items()}
    return {"server": server, "fingerprint": fingerprint(found), "label": "3", "update": None, "tensors": tensors}


@dataclass
class Server:
    """One that answers /server_info. held: None where it has no plugin."""

    held: Weights | None = None
    name: str = "a:1/7"
    asked: int = 0
    status: int = 200

    @property
    def info(self) -> dict[str, Any]:
        return {"internal_states": [{"x": 1} if self.held is None else {META_KEY: told(self.held, self.name)}]}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked += 1
            body = json.dumps(server.info).encode()
            self.send_response(server.status if self.path == "/server_info" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def remote(answer: Any) -> Any:
    """A method of one of Ray's actors; our `ray.get` hands out what it returned."""
    return SimpleNamespace(remote=lambda *args, **kwargs: answer())


def engine(host: str, server: Server, url: str) -> Any:
    if host == "slime":
        return SimpleNamespace(get_url=remote(lambda: url))
    return SimpleNamespace(get_server_info=remote(lambda: server.info))


def modules(host: str) -> dict[str, ModuleType]:
    """The host's modules that are read, and Ray."""
    dumps = {"slime": "slime.observability.train_data_utils", "miles": "miles.utils.train_dump_utils"}[host]
    names = (f"{host}.backends.megatron_utils.actor", f"{host}.utils.distributed_utils", dumps)
    parents = {path.rsplit(".", level)[0] for path in names for level in range(1, path.count(".") + 1)}
    made = {path: ModuleType(path) for path in (*sorted(parents), *names, "ray")}
    for name, method in SENDERS[host].items():
        # Our wrapper goes on the class: a fresh one each time.
        vars(made[names[0]])[name] = type(name, (Updater,), {method: send, "sender": method})
    vars(made[names[1]])["get_gloo_group"] = lambda: dist.group.WORLD
    vars(made[dumps])["save_debug_train_data"] = lambda args, *, rollout_id, rollout_data: SAVED.append(rollout_data)
    vars(made["ray"])["get"] = lambda answers: list(answers)
    return made


SAVED: list[dict[str, Any]] = []


class Updater:
    """An updater of the host: `update_weights` sends buckets of two tensors, and a server may lose what it is sent."""

    sender: str

    def __init__(self, engines: list[Any], **fields: Any) -> None:
        self.rollout_engines, self.sent = engines, {}
        self.quantization_config = None
        vars(self).update(fields)

    def update_weights(self, new: Weights | None = None) -> str:
        pairs = list((new or {}).items())
        for at in range(0, len(pairs), 2):
            getattr(self, self.sender)(pairs[at : at + 2])
        dist.barrier()
        return "the host's"


def send(self: Updater, named_tensors: list[tuple[str, Tensor]], pbar: Any = None) -> None:
    self.sent.update(named_tensors)
    named_tensors.clear()  # as the hosts do


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    with process_group_of_one(tmp_path):
        yield


@dataclass
class Run:
    """One host with servers. updates: ours."""

    host: str
    servers: list[Server]
    engines: list[Any]
    updates: WeightUpdates
    actor: Any
    args: Namespace = field(default_factory=Namespace)

    def updater(self, name: str = "UpdateWeightFromDistributed", **fields: Any) -> Any:
        return getattr(self.actor, name)(self.engines, **fields)


@pytest.fixture(params=["slime", "miles"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, alone: None) -> Iterator[Run]:
    host, servers = request.param, [Server(name="a:1/7"), Server(name="b:1/8")]
    made = modules(host)
    for path, module in made.items():
        monkeypatch.setitem(sys.modules, path, module)
    SAVED.clear()
    with serving(servers[0]) as first, serving(servers[1]) as second:
        engines = [engine(host, server, url) for server, url in zip(servers, (first, second), strict=True)]
        yield Run(host, servers, engines, WeightUpdates(host), made[f"{host}.backends.megatron_utils.actor"])


def test_what_serves_is_what_was_sent(run: Run) -> None:
    run.updates.watch(run.args, "error")
    run.updates.watch(run.args, "error")
    for step, name in enumerate(SENDERS[run.host]):
        new = weights(step)
        for server in run.servers:
            server.held = loaded(new)
        assert run.updater(name).update_weights(new) == "the host's"
        assert run.updates.fingerprint == told(loaded(new))["fingerprint"]


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 1e-6), (torch.bfloat16, 1e-3), (torch.float32, 1e-6)])
def test_steps_report_what_an_update_delivers_of_the_masters_change(run: Run, dtype: torch.dtype, step: float) -> None:
    """Of the matrices, whether or not a server has the plugin; a model that has no masters reports nothing."""
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 300).to(dtype)
    master = model.weight.detach().float()
    setattr(model.weight, "main_param", master if dtype == torch.bfloat16 else None)  # noqa: B010
    run.updates.watch(run.args, "error")
    updater = run.updater(model=[model])
    updater.update_weights({})
    assert run.updates.metrics == {}  # nothing to compare with
    before = master.clone()
    master.add_(step * torch.randn(master.shape, generator=torch.Generator().manual_seed(0)).sign())
    updater.update_weights({})
    if dtype == torch.float32:
        assert run.updates.metrics == {}
        return
    delivered = master.bfloat16().float() - before.bfloat16().float()
    told = {name.removeprefix("rollout_corr/weight_update_"): value for name, value in run.updates.metrics.items()}
    assert told["changed"] == pytest.approx(float((delivered != 0).float().mean()), abs=0.1)
    cosine = float(torch.cosine_similarity(delivered.flatten(), (master - before).flatten(), dim=0))
    assert told["cosine"] == pytest.approx(cosine, abs=0.1)
    assert (told["cosine"] < 0.3) == (step < 1e-4)
    assert told["norm_ratio"] == pytest.approx(float(delivered.norm() / (master - before).norm()), abs=0.1)
    run.updates.metrics.clear()
    master.add_(1.0)
    run.updater(model=[model], args=Namespace(offload_train=True)).update_weights({})
    assert run.updates.metrics == {}  # its memory may be gone


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("nothing arrived", "b:1/8: 4 of 4 tensors are not what was sent"),
        ("one layer", "b:1/8: 2 of 4 tensors are not what was sent"),
        ("other names", "8 of 16 names that were sent belong to no tensor of the server"),
    ],
)
def test_a_lost_update_of_one_server_is_an_error(
    run: Run, fault: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = weights(0), weights(1)
    run.servers[0].held = loaded(new)
    run.servers[1].held, sent = loaded(old), new
    if fault == "one layer":
        run.servers[1].held = loaded({name: (old if ".0." in name else new)[name] for name in new})
    elif fault == "other names":
        sent = new | {f"visual.{name}": tensor for name, tensor in weights(2).items()}
    run.updates.watch(run.args, "error")
    with pytest.raises(WeightUpdateError) as raised:
        run.updater().update_weights(sent)
    assert sentence in str(raised.value) and "--mismatch-verify-weights warn" in str(raised.value)
    assert run.updates.fingerprint is None
    run.updates.watch(run.args, "warn")
    with caplog.at_level(logging.WARNING):
        assert run.updater().update_weights(sent) == "the host's"
    assert sentence in caplog.text and run.updates.fingerprint is None


def test_servers_without_the_plugin_are_asked_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.updates.watch(run.args, "error")
    with caplog.at_level(logging.INFO):
        for step in range(3):
            run.updater().update_weights(weights(step))
    assert caplog.text.count("2 of 2 servers tell nothing of their weights") == 1
    assert run.host == "miles" or [server.asked for server in run.servers] == [1, 1]


def test_a_server_without_the_plugin_next_to_one_with_it_is_said_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.updates.watch(run.args, "error")
    for step in range(2):
        run.servers[0].held = loaded(weights(step))
        run.updater().update_weights(weights(step))
    assert caplog.text.count("1 of 2 servers tell nothing of their weights") == 1
    with pytest.raises(WeightUpdateError, match="a:1/7: 4 of 4"):
        run.updater().update_weights(weights(2))


def test_a_server_that_does_not_answer_ends_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The next update is compared again."""
    run.updates.watch(run.args, "error")
    run.engines.append(SimpleNamespace())  # no actor that can be asked
    run.updater().update_weights(weights(0))
    assert "not all of the weight update was verified: AttributeError" in caplog.text
    run.engines.pop()
    for server in run.servers:
        server.held = loaded(weights(1))
    run.updater().update_weights(weights(1))
    assert run.updates.fingerprint is not None


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"update_weight_transport": "disk"}, "they go through files"),
        ({"update_weight_transfer_mode": "disk-delta"}, "they go through files"),
        ({"sglang_quantization": "fp8"}, "--sglang-quantization fp8"),
        ({"lora_rank": 8}, "adapters are sent"),
    ],
)
def test_what_cannot_be_compared_is_said_and_left_alone(
    run: Run, args: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.servers[0].held = loaded(weights(0))
    with caplog.at_level(logging.INFO):
        run.updates.watch(Namespace(**args), "error")
        run.updater().update_weights(weights(1))
    assert "weight updates are not verified: " in caplog.text and reason in caplog.text


def test_a_quantised_checkpoint_is_not_compared(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.servers[0].held = loaded(weights(0))
    run.updates.watch(run.args, "error")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            run.updater(quantization_config={"quant_method": "fp8"}).update_weights(weights(1))
    assert caplog.text.count("the checkpoint is quantised (fp8)") == 1


@pytest.mark.parametrize("lacks", ["the method", "the classes"])
def test_another_version_of_the_host_is_left_alone(run: Run, lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    for name, method in SENDERS[run.host].items():
        if lacks == "the classes":
            delattr(run.actor, name)
        else:
            delattr(getattr(run.actor, name), method)
    with caplog.at_level(logging.INFO):
        run.updates.watch(run.args, "error")
    assert f"this {run.host} sends them otherwise than the tested one" in caplog.text


def test_the_hook_that_starts_a_training_process_watches(run: Run) -> None:
    """By its settings, as the launcher or the host's YAML gives them."""
    adapter = {"slime": SlimeAdapter, "miles": MilesAdapter}[run.host]()
    own = run.actor.UpdateWeightFromTensor.update_weights
    adapter.init(arguments(run.host, **hooked(run.host), use_tis=True, mismatch_verify_weights="off"))
    assert run.actor.UpdateWeightFromTensor.update_weights is own
    adapter.init(arguments(run.host, **hooked(run.host), **ours(2)))
    assert run.actor.UpdateWeightFromTensor.update_weights is not own


def test_off_wraps_nothing(run: Run) -> None:
    before = run.actor.UpdateWeightFromDistributed.update_weights
    run.updates.watch(run.args, "off")
    assert run.actor.UpdateWeightFromDistributed.update_weights is before


def test_colocated_and_remote_servers_are_asked(run: Run) -> None:
    """The updater from tensors splits its servers."""
    run.updates.watch(run.args, "error")
    run.servers[0].held, run.servers[1].held = loaded(weights(1)), loaded(weights(0))
    updater = run.updater("UpdateWeightFromTensor", _ipc_gather_src=0, use_distribute=True)
    updater.rollout_engines, updater.distributed_rollout_engines = run.engines[:1], run.engines[1:]
    with pytest.raises(WeightUpdateError, match="b:1/8: 4 of 4"):
        updater.update_weights(weights(1))


def test_the_dump_of_training_has_the_fingerprint_of_the_weights_it_began_with(run: Run, tmp_path: Path) -> None:
    run.updates.watch(run.args, "error")
    for server in run.servers:
        server.held = loaded(weights(0))
    run.updater(weight_version=4).update_weights(weights(0))
    verified = run.updates.fingerprint
    module = importlib.import_module(
        {"slime": "slime.observability.train_data_utils", "miles": "miles.utils.train_dump_utils"}[run.host]
    )
    data = {"response_lengths": [2, 1]}
    for number in range(2):  # an update every other rollout: the second trains on from weights that nobody serves
        module.save_debug_train_data(run.args, rollout_id=number, rollout_data=data)
    assert [{**data, "weight_fingerprint": [verified] * 2, "trainer_weight_version": ["4"] * 2}, data] == SAVED
    columns = {"tokens": [[1, 2, 3]], "response_lengths": [2], "sample_indices": [4], "log_probs": [[-0.5, -0.25]]}
    columns |= {
        "rollout_log_probs": columns["log_probs"],
        "weight_fingerprint": [verified],
        "trainer_weight_version": ["4"],
    }
    dump: dict[str, Any] = {"rollout_id": 3, "rank": 0, "rollout_data": columns}
    torch.save(dump | {"cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}, tmp_path / "3_0.pt")
    samples = read(tmp_path / "3_0.pt").samples
    assert [(one.trainer_fingerprint, one.trainer_version) for one in samples] == [(verified, "4")]


def test_tensors_that_cannot_be_digested_stop_no_update(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.updates.watch(run.args, "error")
    new = {name: tensor.to_sparse() for name, tensor in weights(0).items()}
    updater = run.updater()
    assert updater.update_weights(new) == "the host's" and set(updater.sent) == set(new)
    assert run.updates.fingerprint is None and "not all of the weight update was verified" in caplog.text


def test_buckets_may_be_generators(run: Run) -> None:
    run.updates.watch(run.args, "error")
    for server in run.servers:
        server.held = loaded(weights(0))
    updater = run.updater()
    name = updater.sender
    own = getattr(type(updater), name)
    # A host that makes its bucket as it goes: what we read must reach it all the same.
    setattr(updater, name, lambda pairs: own(updater, (pair for pair in [*pairs])))
    updater.update_weights(weights(0))
    assert set(updater.sent) == set(weights(0)) and run.updates.fingerprint is not None


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
    server = Server(loaded({name: (old if case.fault and ".1." in name else new)[name] for name in new}))
    with serving(server) as url:
        updates, engines = WeightUpdates(case.host), [engine(case.host, server, url)]
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
        return "", updates.fingerprint


CASES = [
    Ranks(host, kind, fault)
    for host in SENDERS
    for kind in ("pipeline", "colocated", "experts")
    for fault in (False, True)
]


def test_all_ranks_learn_the_verdict_on_what_they_sent_together() -> None:
    whole = told(loaded(weights(1)))["fingerprint"]
    for case, ranks in zip(CASES, launch(update, CASES, world_size=2), strict=True):
        errors = {error for error, _ in ranks}
        assert len(errors) == 1, case
        assert ("2 of 4 tensors are not what was sent" in errors.pop()) == case.fault, case
        assert [found for _, found in ranks] == [None if case.fault else whole] * 2, case


# The hosts' own -------------------------------------------------------------------------------------------------------

_UPDATE = "backends/megatron_utils/update_weight"
_FILES = {
    "slime": {
        "UpdateWeightFromDistributed": "update_weight_from_distributed.py",
        "UpdateWeightFromTensor": "update_weight_from_tensor.py",
    },
    "miles": {
        "UpdateWeightFromDistributed": "update_weight_from_distributed/broadcast.py",
        "UpdateWeightP2P": "update_weight_from_distributed/p2p.py",
        "UpdateWeightFromTensor": "update_weight_from_tensor.py",
    },
}


@pytest.mark.parametrize("host", SENDERS)
def test_the_host_has_what_is_hooked(host: str) -> None:
    root = host_root(host) / host
    actor = ast.parse((root / "backends/megatron_utils/actor.py").read_text())
    imported = {alias.name for node in ast.walk(actor) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*SENDERS[host]} <= imported
    for name, file in _FILES[host].items():
        assert parameters(function(root / _UPDATE / file, SENDERS[host][name]))[1] in (
            "converted_named_tensors",
            "hf_named_tensors",
        )
    engine_file = root / "backends/sglang_utils/sglang_engine.py"
    assert parameters(function(engine_file, {"slime": "get_url", "miles": "get_server_info"}[host])) == ("self",)
    dumps = {"slime": "observability/train_data_utils.py", "miles": "utils/train_dump_utils.py"}[host]
    assert parameters(function(root / dumps, "save_debug_train_data")) == ("args", "rollout_id", "rollout_data")
    assert "get_gloo_group" in (root / "utils/distributed_utils.py").read_text()
    tensor = (root / _UPDATE / "update_weight_from_tensor.py").read_text()
    for name in ("_ipc_gather_src", "use_distribute", "distributed_rollout_engines", "_is_distributed_src_rank"):
        assert f"self.{name} = " in tensor


@dataclass(frozen=True)
class Real:
    """slime's own updater over a process group. lost: its second bucket does not arrive."""

    root: str
    lost: bool


def own_update(case: Real) -> tuple[str, str | None]:
    """(error, verified fingerprint) of slime's own `update_weights`, with Ray's actors and the buckets stood in."""
    sys.path.insert(0, case.root)
    ray: Any = ModuleType("ray")
    ray.get = lambda answers: list(answers) if isinstance(answers, list) else answers
    ray.ObjectRef, ray.actor = object, ModuleType("ray.actor")
    vars(ray.actor)["ActorHandle"] = object
    sys.modules |= {"ray": ray, "ray.actor": ray.actor}
    own: Any = importlib.import_module(
        "slime.backends.megatron_utils.update_weight.update_weight_from_distributed"
    ).UpdateWeightFromDistributed
    importlib.import_module("slime.utils.distributed_utils").GLOO_GROUP = dist.group.WORLD  # type: ignore[attr-defined]
    actor = ModuleType("slime.backends.megatron_utils.actor")  # imports what is not installed here
    kind = type("UpdateWeightFromDistributed", (own,), {})
    tensor = type("UpdateWeightFromTensor", (Updater,), {"_send_hf_params": send})
    vars(actor).update(UpdateWeightFromDistributed=kind, UpdateWeightFromTensor=tensor)
    sys.modules[actor.__name__] = actor
    new, arrived = weights(1), weights(0)
    buckets = [dict(list(new.items())[:4]), dict(list(new.items())[4:])]

    def receive(*, names: list[str], **_: Any) -> None:
        if not (case.lost and names == list(buckets[1])):
            arrived.update({name: new[name] for name in names})
        server.held = loaded(arrived)

    server = Server()
    with serving(server) as url:
        calls = ("pause_generation", "flush_cache", "continue_generation")
        real = SimpleNamespace(get_url=remote(lambda: url), **{name: remote(lambda: None) for name in calls})
        real.update_weights_from_distributed = SimpleNamespace(remote=receive)
        updates, args = WeightUpdates("slime"), Namespace(rank=0)
        updates.watch(args, "error")
        updater = kind(args, [], dict, model_name="qwen3", quantization_config=None)
        updater.rollout_engines, updater._is_pp_src_rank, updater._group_name = [real], True, "slime-pp_0"
        lock = SimpleNamespace(acquire=remote(lambda: True), release=remote(lambda: None))
        updater.rollout_engine_lock, updater._model_update_groups = lock, dist.group.WORLD
        updater._iter_non_expert_chunks = lambda: iter([list(bucket.items()) for bucket in buckets])
        updater._iter_expert_chunks = lambda: iter(())
        try:
            updater.update_weights()
        except WeightUpdateError as error:
            return str(error), updates.fingerprint
        assert updater.weight_version == 1
        return "", updates.fingerprint


def test_slime_s_own_updater() -> None:
    root = str(host_root("slime"))
    (arrived,), (lost,) = launch(own_update, [Real(root, False), Real(root, True)], world_size=1)
    assert arrived == ("", told(loaded(weights(1)))["fingerprint"])
    assert "2 of 4 tensors are not what was sent" in lost[0] and lost[1] is None
