"""Everything a trainer tells a server next to "generate": weights, pauses, aborts, and questions about itself."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.rollout.fingerprints import STAGES_S, SentWeights, served_dtypes, settled
from mismatch_plugin.rollout.outcomes import RequestError, WeightUpdateError
from mismatch_plugin.rollout.served import META_KEY
from mismatch_plugin.rollout.server_info import ServerInfo
from mismatch_plugin.rollout.transport import Answer, Retries, Transport
from mismatch_plugin.rollout.verification import ExpectChanged, UpdateVerifier, check_expectation
from mismatch_plugin.rollout.weights import (
    Bucket,
    NamedTensors,
    broadcast,
    buckets,
    join_weights_update_group,
    named_pairs,
    serialised,
    torch_dtype,
)

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")
GROUP_NAME = "weight_update_group"
logger = logging.getLogger("mismatch_plugin")

_ONCE = Retries(attempts=1)
_OK = 200


class ServerControl:
    """The control half of `SGLangClient`. Nothing here is sent twice: an update may have worked though its answer was
    lost. Questions (health, server_info) are asked again.

    Every weight update is verified by the server's checksums, as far as it has them: see `verification.py` for the
    rule behind each method's `expect_changed`. Where the server has our plugin, what was sent is compared with what
    serves then (`fingerprints.py`). verify_updates_every: only the first and every n-th; 0: none.
    """

    def __init__(self, transport: Transport, retries: Retries, verify_updates_every: int = 1) -> None:
        self._transport, self._retries = transport, retries
        self._verifier = UpdateVerifier(transport, retries, verify_updates_every)
        self._paused: PauseMode | None = None
        self._info: ServerInfo | None = None
        self._warned: set[str] = set()
        self.fingerprint: str | None = None
        """Of the weights that the last update sent, if the server has our plugin and they were compared with what
        serves: a trainer writes it next to its log-probs (`weight_fingerprint`) for `check`."""

    async def health(self, timeout: float = 30.0) -> bool:
        """Whether the server answers and can generate (SGLang generates one token to find out)."""
        try:
            await self._transport.call("GET", "/health", retries=_ONCE, timeout=timeout)
        except RequestError:
            return False
        return True

    async def server_info(self) -> ServerInfo:
        """Version and settings, with the model and weight version that the last update left. Warns of the server's
        risks (`ServerInfo.risks`), of each once."""
        return await self._ask_server(retries=self._retries)

    async def _ask_server(self, **options: Any) -> ServerInfo:
        server, model = [await self._transport.call("GET", path, **options) for path in ("/server_info", "/model_info")]
        if not isinstance(server.json, dict) or not isinstance(model.json, dict):
            raise RequestError("content", "/server_info did not answer with a JSON object", server.attempts)
        self._info = ServerInfo.from_replies(server.json, model.json)
        for risk in self._info.risks():
            if risk not in self._warned:
                self._warned.add(risk)
                warnings.warn(f"{self._transport.url}: {risk}", MismatchWarning, stacklevel=3)
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
        expect_changed: ExpectChanged = "all",
    ) -> None:
        """Load a checkpoint that the server can read at `path`. Raises WeightUpdateError.

        flush_cache: drop the KV cache of the old weights. None: yes, or later requests would reuse it under the new
            version; under an in-place pause before the update, which is refused if requests hold the cache. A server
            without a radix cache shares none: there an in-place pause leaves it alone. False: keep it all the same.
        expect_changed: which tensors must change on the server: "all", "some" (LoRA, frozen layers), names, or "any"
            (a re-sync, which may change nothing). Anything else is a WeightUpdateError that names tensors; the server
            has the new version's name by then.
        """
        check_expectation(expect_changed)
        flush = await self._flush(flush_cache)
        self.fingerprint = None
        async with self._verifier.around(version, expect_changed):
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
        expect_changed: ExpectChanged = "all",
    ) -> None:
        """Send weights under the checkpoint's names, inside the request. Raises WeightUpdateError.

        bucket_bytes: at most so many bytes a request. More than one request means a time in which the server has half
            of the new weights, so generation is paused (retract) meanwhile unless it is already.
        flush_cache, expect_changed: as in `update_weights_from_disk`. A tensor that is sent as it was sent before may
            stay the same.
        """

        async def send(bucket: Bucket, last: dict[str, Any], info: ServerInfo) -> None:
            body = {"serialized_named_tensors": [serialised(bucket)] * info.tp_size, **last}
            await self._update("/update_weights_from_tensor", body)

        await self._send(send, named_tensors, version, bucket_bytes, flush_cache, expect_changed)

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
        expect_changed: ExpectChanged = "all",
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

        await self._send(send, named_tensors, version, bucket_bytes, flush_cache, expect_changed)

    async def _send(
        self,
        send: Callable[[Bucket, dict[str, Any], ServerInfo], Awaitable[None]],
        named_tensors: NamedTensors,
        version: str | int,
        bucket_bytes: int | None,
        flush_cache: bool | None,
        expect_changed: ExpectChanged,
    ) -> None:
        """`send` each bucket, between begin and end, which SGLang needs around tensors; end also where it failed."""
        check_expectation(expect_changed)
        pairs = named_pairs(named_tensors)
        *first, final = buckets(pairs, bucket_bytes)
        info = await self._known()
        flush = await self._flush(flush_cache)
        compare = self._verifier.due
        self.fingerprint = None
        async with self._verifier.around(version, expect_changed, pairs, torch_dtype(info.dtype)):
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
        if compare:
            try:
                await self._compare(version, pairs, whole=expect_changed == "all")
            except ValueError as error:
                message = f"whether the weights that were sent serve cannot be told: {error}"
                raise WeightUpdateError(message) from error

    async def _compare(self, version: str | int, pairs: Bucket, whole: bool) -> None:
        """What was sent with what serves, where the server has our plugin. whole: it must have all names."""
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
            if found.differ or (whole and found.unknown):
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
            answer = await self._transport.call("GET", "/server_info", retries=self._retries)
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
            await self._transport.call("POST", "/flush_cache", retries=_ONCE)
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
            model = await self._transport.call("GET", "/model_info", retries=self._retries)
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
        answer = await self._transport.call("POST", path, body, retries=_ONCE)
        if isinstance(answer.json, dict) and answer.json.get("success") is False:
            said = answer.json.get("message") or answer.json
            raise RequestError("refused", f"the server did not do {path}: {said}", answer.attempts)
        return answer
