"""Everything a trainer tells a server next to "generate": weights, pauses, aborts, and questions about itself."""

from __future__ import annotations

import asyncio
import base64
import importlib
import logging
import pickle
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.fingerprints import STAGES_S, SentWeights, WeightUpdateError, served_dtypes, settled
from mismatch_plugin.sglang.http import Answer, RequestError, Retries, Server

PauseMode = Literal["abort", "retract", "in_place"]
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Bucket = list[tuple[str, Tensor]]
T = TypeVar("T")
GROUP_NAME = "weight_update_group"
logger = logging.getLogger("mismatch_plugin")

_ONCE = Retries(attempts=1)
_OK = 200


class ServerInfo(BaseModel):
    """Version, model, and the settings that move log-probs away from the training side's. None: not told.

    `SGLANG_RETURN_ORIGINAL_LOGPROB` (log-probs before temperature) is an environment variable that no server reports.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    version: str | None = None
    model_path: str | None = None
    vocab_size: int | None = None
    tokenizer_path: str | None = None
    weight_version: str | None = None
    load_format: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    enable_fp32_lm_head: bool | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    sampling_backend: str | None = None
    moe_runner_backend: str | None = None
    enable_deterministic_inference: bool | None = None
    rl_on_policy_target: str | None = None
    speculative_algorithm: str | None = None
    disable_radix_cache: bool | None = None
    disable_cuda_graph: bool | None = None
    chunked_prefill_size: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    random_seed: int | None = None
    context_length: int | None = None
    allow_auto_truncate: bool | None = None
    sampling_mask_max_tokens: int | None = None
    sampling_defaults: str | None = None
    preferred_sampling_params: dict[str, Any] | None = None
    skip_tokenizer_init: bool | None = None

    @classmethod
    def from_replies(cls, server: Mapping[str, Any], model: Mapping[str, Any]) -> ServerInfo:
        """Out of `/server_info` (as started) and `/model_info` (as weight updates left it), which wins."""
        return cls.model_validate({**server, **{key: value for key, value in model.items() if value is not None}})

    def risks(self) -> list[str]:
        """Settings known to widen the mismatch, one sentence each with its fix."""
        rounds_head = self.dtype in ("bfloat16", "float16", "half") and not self.enable_fp32_lm_head
        rounds_cache = self.kv_cache_dtype not in (None, "auto", self.dtype)
        preferred = f"preferred_sampling_params {self.preferred_sampling_params}"
        quantized = f"quantization {self.quantization}"
        speculative = f"speculative decoding {self.speculative_algorithm}"
        found = [
            (self.quantization, f"{quantized}: weights or activations are rounded; serve unquantised."),
            (rounds_cache, f"kv_cache_dtype {self.kv_cache_dtype}: keys and values are rounded; use auto."),
            (rounds_head, f"logits are computed in {self.dtype}; start with --enable-fp32-lm-head."),
            (self.speculative_algorithm, f"{speculative}: check whether log-probs are the target's."),
            (self.preferred_sampling_params, f"{preferred} stand in where a request is silent."),
            (self.allow_auto_truncate, "allow_auto_truncate: long prompts are cut without a word; start without it."),
        ]
        return [risk for holds, risk in found if holds]


class ServerControl:
    """The control half of `SGLangClient`. Nothing here is sent twice: an update may have worked though its answer was
    lost. Questions (health, server_info) are asked again.

    After an update the server must report its version. Where it has our plugin, the weights that were sent are compared
    with those that serve then (`fingerprints.py`), unless verify_updates is False.
    """

    def __init__(self, server: Server, retries: Retries, verify_updates: bool = True) -> None:
        self._server, self._retries, self._verifies = server, retries, verify_updates
        self._paused: PauseMode | None = None
        self._info: ServerInfo | None = None
        self._warned: set[str] = set()
        self.fingerprint: str | None = None
        """Of the weights that the last update sent, if the server has our plugin and they were compared with what
        serves: a trainer writes it next to its log-probs (`weight_fingerprint`) for `inspect`."""

    async def health(self, timeout: float = 30.0) -> bool:
        """Whether the server answers and can generate (SGLang generates one token to find out)."""
        try:
            await self._server.call("GET", "/health", retries=_ONCE, timeout=timeout)
        except RequestError:
            return False
        return True

    async def server_info(self) -> ServerInfo:
        """Version and settings, with the model and weight version that the last update left. Warns of the server's
        risks (`ServerInfo.risks`), of each once."""
        return await self._ask_server(retries=self._retries)

    async def _ask_server(self, **options: Any) -> ServerInfo:
        server, model = [await self._server.call("GET", path, **options) for path in ("/server_info", "/model_info")]
        if not isinstance(server.json, dict) or not isinstance(model.json, dict):
            raise RequestError("content", "/server_info did not answer with a JSON object", server.attempts)
        self._info = ServerInfo.from_replies(server.json, model.json)
        for risk in self._info.risks():
            if risk not in self._warned:
                self._warned.add(risk)
                warnings.warn(f"{self._server.url}: {risk}", MismatchWarning, stacklevel=3)
        return self._info

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. Running requests are returned cut off (abort), wait to be computed again (retract), or keep
        their KV cache of the old weights (in_place; with a radix cache weights are updated only if none is running)."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r} is unknown: choose one of {', '.join(get_args(PauseMode))}.")
        await self._post("/pause_generation", {"mode": mode})
        self._paused = mode

    async def continue_(self) -> None:
        """Generate again after `pause`."""
        await self._post("/continue_generation", {})
        self._paused = None

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """`async with client.paused(): …`; generation continues afterwards, whatever happened inside."""
        await self.pause(mode)
        try:
            yield
        finally:
            await self.continue_()

    async def abort(self, request_id: str | None = None, *, all: bool = False) -> None:
        """End one request, or all; they return what they have, with finish reason abort."""
        if (request_id is None) == (not all):
            raise ValueError("name one request_id, or say all=True.")
        await self._post("/abort_request", {"rid": request_id or "", "abort_all": all})

    async def update_weights_from_disk(
        self,
        path: str,
        version: str | int,
        *,
        flush_cache: bool | None = None,
    ) -> None:
        """Load a checkpoint that the server can read at `path`. Raises WeightUpdateError.

        flush_cache: drop the KV cache of the old weights. None: yes, or later requests would reuse it under the new
            version; under an in-place pause before the update, which is refused if requests hold the cache. A server
            without a radix cache shares none: there an in-place pause leaves it alone. False: keep it all the same.
        """
        flush = await self._flush(flush_cache)
        self.fingerprint = None
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush}
        await self._update("/update_weights_from_disk", body)
        await self._confirm(version)

    async def update_weights_from_tensors(
        self,
        named_tensors: NamedTensors,
        version: str | int,
        *,
        bucket_bytes: int | None = None,
        flush_cache: bool | None = None,
    ) -> None:
        """Send weights under the checkpoint's names, inside the request. Raises WeightUpdateError.

        bucket_bytes: at most so many bytes a request. More than one request means a time in which the server has half
            of the new weights, so generation is paused (retract) meanwhile unless it is already.
        flush_cache: as in `update_weights_from_disk`.
        """

        async def send(bucket: Bucket, last: dict[str, Any], info: ServerInfo) -> None:
            body = {"serialized_named_tensors": [serialised(bucket)] * info.tp_size, **last}
            await self._update("/update_weights_from_tensor", body)

        await self._send(send, named_tensors, version, bucket_bytes, flush_cache)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        world_size: int | None = None,
        group_name: str = GROUP_NAME,
        backend: str = "gloo",
        timeout: float = 60.0,
    ) -> dist.ProcessGroup:
        """Make a process group of this process (rank 0) and the server's workers, for `update_weights_from_group`.

        master_address, master_port: where this process listens, as the server sees it. world_size: 1 + the server's
        tensor-parallel size by default. backend: gloo or nccl. Raises WeightUpdateError.
        """
        size = 1 + (await self._known()).tp_size if world_size is None else world_size
        group: dict[str, Any] = {"world_size": size, "group_name": group_name, "backend": backend}
        body = {"master_address": master_address, "master_port": master_port, "rank_offset": 1, **group}
        joining = asyncio.to_thread(join_weights_update_group, master_address, master_port, timeout=timeout, **group)
        return await self._together(self._update("/init_weights_update_group", body), joining)

    async def destroy_weights_update_group(self, group: dist.ProcessGroup, *, group_name: str = GROUP_NAME) -> None:
        """Take the group down on both sides."""
        await self._update("/destroy_weights_update_group", {"group_name": group_name})
        dist.destroy_process_group(group)

    async def update_weights_from_group(
        self,
        named_tensors: NamedTensors,
        version: str | int,
        group: dist.ProcessGroup,
        *,
        group_name: str = GROUP_NAME,
        bucket_bytes: int | None = None,
        flush_cache: bool | None = None,
    ) -> None:
        """Broadcast weights over the group of `init_weights_update_group`; otherwise as `update_weights_from_tensors`.

        The tensors must be where the group's backend reads them (CPU for gloo, CUDA for nccl). If the server refuses
        in the middle, the broadcast hangs until the group's time limit: make a new group afterwards.
        """

        async def send(bucket: Bucket, last: dict[str, Any], info: ServerInfo) -> None:
            body = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": group_name,
                **last,
            }
            update = self._update("/update_weights_from_distributed", body)
            await self._together(update, asyncio.to_thread(broadcast, bucket, group))

        await self._send(send, named_tensors, version, bucket_bytes, flush_cache)

    async def _send(
        self,
        send: Callable[[Bucket, dict[str, Any], ServerInfo], Awaitable[None]],
        named_tensors: NamedTensors,
        version: str | int,
        bucket_bytes: int | None,
        flush_cache: bool | None,
    ) -> None:
        """`send` each bucket, between begin and end, which SGLang needs around tensors; end also where it failed."""
        pairs = named_pairs(named_tensors)
        *first, final = buckets(pairs, bucket_bytes)
        info = await self._known()
        flush = await self._flush(flush_cache)
        self.fingerprint = None
        async with self.paused("retract") if first and self._paused is None else nullcontext():
            await self._update("/begin_weight_update", {})
            try:
                for bucket in first:
                    await send(bucket, {"flush_cache": False}, info)
                # The version takes effect with the last bucket.
                await send(final, {"weight_version": str(version), "flush_cache": flush}, info)
            except BaseException:
                with suppress(WeightUpdateError):  # the first error says what went wrong
                    await self._update("/end_weight_update", {})
                raise
            await self._update("/end_weight_update", {})
        await self._confirm(version)
        if self._verifies:
            try:
                await self._compare(version, pairs)
            except ValueError as error:
                message = f"whether the weights that were sent serve cannot be told: {error}"
                raise WeightUpdateError(message) from error

    async def _compare(self, version: str | int, pairs: Bucket) -> None:
        """What was sent with what serves, where the server has our plugin. It must have all names."""
        states = await self._served()
        for _ in range(STAGES_S * 10):
            if settled(states):
                break
            await asyncio.sleep(0.1)
            states = await self._served()
        sent, prints, complete = SentWeights(), set[str | None](), True
        if able := next((state for state in states if state.get("tensors")), None):  # all workers hold the same dtypes
            await asyncio.to_thread(sent.add, pairs, served_dtypes(pairs, able))
        for state in states:
            found = sent.compare(state)
            if found.problems:
                told = " ".join(found.problems)
                raise WeightUpdateError(f"{state.get('server')} serves other weights than version {version}: {told}")
            for note in found.notes:
                logger.info("version %s on %s: %s", version, state.get("server"), note)
            prints.add(state.get("fingerprint"))
            complete = complete and found.complete
        self.fingerprint = prints.pop() if len(prints) == 1 and complete else None

    async def _served(self) -> list[dict[str, Any]]:
        """What our plugin in the server tells of each data-parallel worker; [] without one."""
        try:
            answer = await self._server.call("GET", "/server_info", retries=self._retries)
        except RequestError as error:
            raise WeightUpdateError(f"whether the weights that were sent serve cannot be told: {error}") from error
        states = answer.json.get("internal_states") if isinstance(answer.json, dict) else None
        listed = states if isinstance(states, list) else []
        return [told for state in listed if isinstance(state, dict) and isinstance(told := state.get(META_KEY), dict)]

    async def _flush(self, wanted: bool | None) -> bool:
        """Whether the update itself is to flush the cache. Under an in-place pause it is flushed here, or refused."""
        if self._paused != "in_place":
            return wanted is not False
        info = await self._known()
        if wanted is False or (wanted is None and info.disable_radix_cache):
            return False
        try:
            await self._server.call("POST", "/flush_cache", retries=_ONCE)
        except RequestError as error:
            if error.status != _OK:  # SGLang answers in plain text
                raise WeightUpdateError(
                    f"no weights were sent: {error.message} Requests that are paused in place hold keys and values of "
                    "the old weights in the radix cache, and later requests would compute with them under version "
                    "names of the new ones. Pause with 'retract' or 'abort', or start the server with "
                    "--disable-radix-cache."
                ) from error
        return False

    async def _together(self, request: Coroutine[Any, Any, None], local: Coroutine[Any, Any, T]) -> T:
        """Both at once, as a collective needs it; the first error ends it, without waiting for the other side."""
        theirs, ours = asyncio.ensure_future(request), asyncio.ensure_future(local)
        try:
            return (await asyncio.gather(theirs, ours))[1]
        except WeightUpdateError:
            raise
        except Exception as error:
            raise WeightUpdateError(str(error)) from error
        finally:
            theirs.cancel()
            ours.cancel()

    async def _known(self) -> ServerInfo:
        return self._info or await self.server_info()

    async def _confirm(self, version: str | int) -> None:
        """The server must now report the version: a silent refusal would go on sampling from old weights."""
        try:
            model = await self._server.call("GET", "/model_info", retries=self._retries)
        except RequestError as error:
            raise WeightUpdateError(f"whether version {version} is in force cannot be told: {error}") from error
        told = model.json.get("weight_version") if isinstance(model.json, dict) else None
        if told is not None and str(told) != str(version):
            raise WeightUpdateError(f"the weights were sent as version {version}, but the server reports {told!r}.")

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._post(path, body)
        except RequestError as error:
            raise WeightUpdateError(str(error)) from error
        said = answer.json if isinstance(answer.json, dict) else {}
        if said.get("success") is not True:
            raise WeightUpdateError(f"{path}: {said.get('message', f'no success was reported, but {answer.json!r}')}")

    async def _post(self, path: str, body: dict[str, Any]) -> Answer:
        answer = await self._server.call("POST", path, body, retries=_ONCE)
        if isinstance(answer.json, dict) and answer.json.get("success") is False:
            said = answer.json.get("message") or answer.json
            raise RequestError("refused", f"the server did not do {path}: {said}", answer.attempts)
        return answer


def named_pairs(named_tensors: NamedTensors) -> Bucket:
    """(name, tensor) pairs, each name once. Raises ValueError for none, for a repeated name, for what is no tensor."""
    given: Any = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    pairs: Bucket = list(given)
    if not pairs:
        raise ValueError("no weights were given: an update without tensors would only change the version's name.")
    seen: set[str] = set()
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"weight {name!r} is {type(tensor).__name__}, not a tensor.")
        if name in seen:
            raise ValueError(f"weight {name!r} is there twice.")
        seen.add(name)
    if all(name.startswith("module.") for name in seen):  # a server may end at a name that it does not know
        raise ValueError("all names of the weights begin with 'module.', a wrapper's prefix: send the checkpoint's.")
    return pairs


def buckets(pairs: Bucket, limit: int | None) -> Iterator[Bucket]:
    """The pairs in order, in lists of at most `limit` bytes each; a larger tensor is alone. None: all at once."""
    bucket: Bucket = []
    size = 0
    for name, tensor in pairs:
        grown = size + tensor.numel() * tensor.element_size()
        if bucket and limit is not None and grown > limit:
            yield bucket
            bucket, grown = [], grown - size
        bucket.append((name, tensor))
        size = grown
    yield bucket


def serialised(bucket: Bucket) -> str:
    """Tensors as SGLang reads them from JSON: base64 of a pickled list of (name, CPU tensor).

    By value: the torch reductions that share file descriptors or CUDA handles need both ends on one machine.
    """
    # A view would drag its whole storage along, so each tensor is copied into one of its own.
    own = [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(own)).decode("ascii")


def join_weights_update_group(
    master_address: str,
    master_port: int,
    *,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: float,
    rank: int = 0,
) -> dist.ProcessGroup:
    """Join a process group next to the default one, as the server's workers do; blocks until all have joined.

    Rank 0, the trainer, listens at master_address:master_port; the workers are ranks 1 and up. The store's keys must be
    those that SGLang uses, and those torch makes only inside `_new_process_group_helper`: no public call of torch makes
    a group with processes outside the default one.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    wait = timedelta(seconds=timeout)
    host = f"[{master_address}]" if ":" in master_address else master_address
    store, rank, world_size = next(c10d.rendezvous(f"tcp://{host}:{master_port}", rank, world_size, timeout=wait))
    store.set_timeout(wait)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=wait,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def broadcast(pairs: Bucket, group: dist.ProcessGroup) -> None:
    """Send each tensor from rank 0 to the group, in order."""
    for _, tensor in pairs:
        dist.broadcast(tensor.detach().contiguous(), src=0, group=group)
