"""The tiny Llama of most live tests: its weights, prompts, what is sent to its servers and what they tell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from ci.sglang_cpu.tiny_model import tiny_model
from examples.sglang_server import CpuServer
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.result import Finding
from mismatch_plugin.sglang.client import SGLangClient
from mismatch_plugin.sglang.control import serialised
from mismatch_plugin.sglang.fingerprints import digests, fingerprint

State = dict[str, Tensor]
EXACT = 1e-4
"""A float32 server and transformers agree to this."""
PREFIX = [5 + 3 * place % 200 for place in range(48)]
PROMPTS = [[*PREFIX, 210 + row] for row in range(8)]
SHORT = SamplingParameters(max_new_tokens=8, ignore_eos=True)
LONG = SamplingParameters(max_new_tokens=300, ignore_eos=True)


def weights(seed: int) -> State:
    """Of the model with this seed, each tensor (norms too) moved by noise."""
    draw = torch.Generator().manual_seed(seed)
    state = tiny_model("llama", seed).state_dict()
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}


def print_of(state: State) -> str:
    return fingerprint(digests(state.items()))


def log_probs(state: State, record: Sample, temperature: float = 1.0) -> list[float]:
    """The trainer's, of each response token."""
    model = tiny_model("llama", 0)
    model.load_state_dict(state)
    ids = torch.tensor([[*record.prompt_ids, *record.response_ids]])
    logits = model(input_ids=ids).logits[0, len(record.prompt_ids) - 1 : -1]
    chosen = torch.from_numpy(record.response_ids).long()[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def distance(records: Sequence[Sample], state: State) -> float:
    """Largest |log π_train − log π_rollout| of any token, were the trainer's weights these."""
    rows = [torch.tensor(log_probs(state, record)) - torch.from_numpy(record.rollout_log_probs) for record in records]
    return float(torch.cat(rows).abs().max())


def run(server: CpuServer, job: Any, **options: Any) -> Any:
    async def call() -> Any:
        async with SGLangClient(server.url, **options) as client:
            return await job(client)

    return asyncio.run(call())


def sample(server: CpuServer, count: int = 8) -> list[Sample]:
    return run(server, lambda client: client.generate(PROMPTS[:count], SHORT))


def send(server: CpuServer, state: State, version: str, verify: bool = True) -> None:
    run(server, lambda client: client.update_weights_from_tensors(state, version), verify_updates=verify)


def served(record: Sample) -> Any:
    assert record.served is not None
    return record.served


def kv(record: Sample) -> list[int]:
    """Tokens with keys and values of other weights."""
    return [span.tokens for span in served(record).kv]


def info(server: CpuServer) -> dict[str, Any]:
    """What the plugin tells of the server."""
    (state,) = httpx.get(server.url + "/server_info", timeout=600).json()["internal_states"]
    return state[META_KEY]


def order(server: CpuServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return httpx.post(f"{server.url}/{path}", json=body, timeout=600).raise_for_status().json()


def session(server: CpuServer, *ranks: State, **options: Any) -> None:
    """Tensors for each rank between begin and end, which is done by hand."""
    body = {"serialized_named_tensors": [serialised([*state.items()]) for state in ranks], "flush_cache": True}
    for path, told in (("begin", {}), ("update_weights_from_tensor", {**body, **options}), ("end", {})):
        path = path if told else f"{path}_weight_update"
        assert order(server, path, told)["success"] is True


def in_place(server: CpuServer, state: State, version: str) -> None:
    """An update under requests that keep their keys and values."""
    order(server, "pause_generation", {"mode": "in_place"})
    session(server, state, weight_version=version, flush_cache=False)
    order(server, "continue_generation", {})


GROUP = {"group_name": "weight_update_group"}


def join(server: CpuServer, port: int) -> dist.ProcessGroup:
    """A process group of this process (rank 0) and the server's worker, next to the default one, as slime makes it."""
    host: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(order, server, "init_weights_update_group", {**host, "backend": "gloo", **GROUP})
        c10d: Any = dist.distributed_c10d
        wait = timedelta(seconds=60)
        store, *_ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
        prefixed = c10d.PrefixStore(GROUP["group_name"], store)
        group, _ = c10d._new_process_group_helper(2, 0, [], c10d.Backend("gloo"), prefixed, timeout=wait, **GROUP)
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        assert joined.result()["success"] is True
    return group


def broadcast(server: CpuServer, group: dist.ProcessGroup, state: State, version: str) -> None:
    """An update over the group, as slime sends one."""
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()]
    shapes = [list(tensor.shape) for tensor in state.values()]
    body = {"names": [*state], "dtypes": kinds, "shapes": shapes, "weight_version": version, "flush_cache": True}
    order(server, "begin_weight_update", {})
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(order, server, "update_weights_from_distributed", {**body, **GROUP})
        for tensor in state.values():
            dist.broadcast(tensor.contiguous(), src=0, group=group)
        assert told.result()["success"] is True
    order(server, "end_weight_update", {})


def post(server: CpuServer, **body: Any) -> dict[str, Any]:
    return order(server, "generate", {"input_ids": PROMPTS[0], "return_logprob": True, **body})


def without_its_own(body: dict[str, Any]) -> dict[str, Any]:
    """A reply without times, its id and what the plugin adds."""
    for name in ("id", "e2e_latency", "response_sent_to_client_ts", META_KEY):
        body["meta_info"].pop(name, None)
    return body


def findings(records: Sequence[Sample]) -> list[Finding]:
    """What counts as a fault."""
    return [item for item in check_batch(make_batch(records))[0] if item.counts]


def faults(records: Sequence[Sample]) -> list[str]:
    return [item.fault for item in findings(records)]


def moved(step: int, scale: float) -> State:
    """The weights of seed 0 after so many steps of a trainer, each of random changes of this size."""
    draw = torch.Generator().manual_seed(0)
    state = dict(tiny_model("llama", 0).state_dict())
    for _ in range(step):
        state = {name: tensor + scale * torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}
    return state
