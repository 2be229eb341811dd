"""Everything a trainer tells a server next to "generate": weights, pauses, and questions about itself."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.sglang.fingerprints import (
    STAGES_S,
    SentWeights,
    WeightUpdateError,
    served_dtypes,
    settled,
    states_of,
)
from mismatch_plugin.sglang.http import RequestError, Retries, Server

PauseMode = Literal["abort", "retract", "in_place"]
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Bucket = list[tuple[str, Tensor]]
logger = logging.getLogger("mismatch_plugin")

_ONCE = Retries(attempts=1)
_OK = 200


class ServerInfo(BaseModel):
    """What the client needs of a server's settings, and those that move log-probs away from the training side's.
    None: not told. `SGLANG_RETURN_ORIGINAL_LOGPROB` (log-probs before temperature) no server reports."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str | None = None
    weight_version: str | None = None
    vocab_size: int | None = None
    tp_size: int = 1
    disable_radix_cache: bool | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    enable_fp32_lm_head: bool | None = None
    speculative_algorithm: str | None = None
    preferred_sampling_params: dict[str, Any] | None = None
    allow_auto_truncate: bool | None = None

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


class Serving(NamedTuple):
    """What the last update of this client left. workers: of each process (`Served.identity`) how many updates it had,
    and the fingerprint; none where the server has no plugin."""

    version: str
    workers: dict[tuple[Any, Any, Any], tuple[int, str | None]]

    def problem(self, sample: Sample) -> str | None:
        """Why the sample is of other weights than these; None if it is not known to be."""
        served, spans = sample.served, sample.weight_versions
        if served is not None and served.weights and self.workers:
            if served.identity not in self.workers:
                known = ", ".join(str(server) for server, _, _ in self.workers)
                return (
                    f"{served.server} is none of the processes that took version {self.version!r} ({known}): it "
                    "started again with the weights of its launch, or is another server. Send the weights again."
                )
            number, fingerprint = self.workers[served.identity]
            if (now := served.weights[-1].fingerprint) != fingerprint and fingerprint is not None:
                updates = served.update.number if served.update else number
                return (
                    f"{served.server} samples from {now}, version {self.version!r} is {fingerprint}: somebody else "
                    f"updated it since ({updates} updates, this client's was number {number}), is updating it, or its "
                    "memory was released or reset."
                )
        if spans and spans[-1].version != self.version:
            return (
                f"the server samples as version {spans[-1].version!r}, and this client's last update was "
                f"{self.version!r}: it started again, or somebody else updated it."
            )
        return None


class ServerControl:
    """The control half of `SGLangClient`. Nothing here is sent twice: an update may have worked though its answer was
    lost. Questions are asked again.

    After an update the server must report its version. Where it has our plugin, the weights that were sent are compared
    with those that serve then (`fingerprints.py`), and later samples are checked to be of them (`Serving`), unless
    verify_updates is False.
    """

    def __init__(self, server: Server, retries: Retries, verify_updates: bool = True) -> None:
        self._server, self._retries, self._verifies = server, retries, verify_updates
        self._paused: PauseMode | None = None
        self._info: ServerInfo | None = None
        self._warned: set[str] = set()
        self.fingerprint: str | None = None
        """Of the weights that the last update sent, if the server has our plugin and they were compared with what
        serves: a trainer writes it next to its log-probs (`weight_fingerprint`) for `inspect`."""
        self._serving: Serving | None = None
        """None: before the first update, while one is under way, and after one that failed."""

    async def server_info(self) -> ServerInfo:
        """Version and settings, with the weight version that the last update left. Warns of the server's risks
        (`ServerInfo.risks`), of each once."""
        return await self._ask_server(retries=self._retries)

    async def _ask_server(self, **options: Any) -> ServerInfo:
        told: dict[str, Any] = {}
        for path in ("/server_info", "/model_info"):  # as it was started, and as weight updates left it, which wins
            answer = await self._server.call("GET", path, **options)
            if not isinstance(answer.json, dict):
                raise RequestError("content", f"{path} did not answer with a JSON object", answer.attempts)
            told |= {key: value for key, value in answer.json.items() if value is not None}
        self._info = ServerInfo.model_validate(told)
        for risk in self._info.risks():
            if risk not in self._warned:
                self._warned.add(risk)
                warnings.warn(f"{self._server.url}: {risk}", MismatchWarning, stacklevel=3)
        return self._info

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. Running requests return what they have (abort), wait to be computed again (retract), or keep
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

    async def update_weights_from_disk(self, path: str, version: str | int, *, flush_cache: bool | None = None) -> None:
        """Load a checkpoint that the server can read at `path`. Raises WeightUpdateError.

        flush_cache: drop the KV cache of the old weights. None: yes, or later requests would reuse it under the new
            version; under an in-place pause before the update, which is refused if requests hold the cache. A server
            without a radix cache shares none: there an in-place pause leaves it alone. False: keep it all the same.
        """
        async with self._updating(version, flush_cache) as flush:
            body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush}
            await self._post("/update_weights_from_disk", body, confirmed=True)
        await self._verify(version, [])

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
        pairs = _checked(named_tensors)
        *first, final = _buckets(pairs, bucket_bytes)
        pausing = self.paused("retract") if first and self._paused is None else nullcontext()
        async with self._updating(version, flush_cache) as flush, pausing:
            workers = (self._info or await self.server_info()).tp_size
            await self._post("/begin_weight_update", {}, confirmed=True)
            try:
                for bucket in [*first, final]:
                    # The version takes effect with the last bucket.
                    last = {"weight_version": str(version), "flush_cache": flush}
                    body = {"serialized_named_tensors": [serialised(bucket)] * workers}
                    body |= last if bucket is final else {"flush_cache": False}
                    await self._post("/update_weights_from_tensor", body, confirmed=True)
            except BaseException:
                with suppress(RequestError):  # the first error says what went wrong
                    await self._post("/end_weight_update", {}, confirmed=True)
                raise
            await self._post("/end_weight_update", {}, confirmed=True)
        await self._verify(version, pairs)

    async def _verify(self, version: str | int, pairs: Bucket) -> None:
        """Compare what was sent with what serves, and keep what serves now. pairs: [] where it is not known."""
        if not self._verifies:
            return
        try:
            states = await self._compare(version, pairs)
        except (RequestError, ValueError) as error:
            raise WeightUpdateError(f"whether the weights that were sent serve cannot be told: {error}") from error
        workers = {
            (state.get("server"), state.get("started"), state.get("dp_rank")): (
                (state.get("update") or {}).get("number", 0),
                state.get("fingerprint"),
            )
            for state in states
        }
        self._serving = Serving(str(version), workers)

    async def _compare(self, version: str | int, pairs: Bucket) -> list[Mapping[str, Any]]:
        """What was sent with what serves, where the server has our plugin, whose states are returned. It must have all
        names."""
        states: list[Mapping[str, Any]] = []
        for attempt in range(1 + STAGES_S * 10):
            await asyncio.sleep(0.1 if attempt else 0)
            states = states_of((await self._server.call("GET", "/server_info", retries=self._retries)).json)
            if settled(states):
                break
        if not pairs:
            return states
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
        return states

    async def _flush(self, wanted: bool | None) -> bool:
        """Whether the update itself is to flush the cache. Under an in-place pause it is flushed here, or refused."""
        if self._paused != "in_place":
            return wanted is not False
        info = self._info or await self.server_info()
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

    @asynccontextmanager
    async def _updating(self, version: str | int, flush_cache: bool | None) -> AsyncIterator[bool]:
        """An update, told whether it is to flush the cache. What the server refuses in it is a WeightUpdateError.

        At its end the server must report the version: a silent refusal would go on sampling from old weights.
        """
        try:
            flush = await self._flush(flush_cache)
            self.fingerprint = self._serving = None
            yield flush
            model = (await self._server.call("GET", "/model_info", retries=self._retries)).json
        except RequestError as error:
            raise WeightUpdateError(f"the update to version {version} failed: {error}") from error
        told = model.get("weight_version") if isinstance(model, dict) else None
        if told is not None and str(told) != str(version):
            raise WeightUpdateError(f"the weights were sent as version {version}, but the server reports {told!r}.")

    async def _post(self, path: str, body: dict[str, Any], *, confirmed: bool = False) -> None:
        """An order, sent once, of which the server must not say that it failed. confirmed: it must say it succeeded."""
        answer = await self._server.call("POST", path, body, retries=_ONCE)
        said = answer.json if isinstance(answer.json, dict) else {}
        if said.get("success", not confirmed) is not True:
            message = said.get("message") or f"no success was reported, but {answer.json!r}"
            raise RequestError("refused", f"the server did not do {path}: {message}", answer.attempts)


def _checked(named_tensors: NamedTensors) -> Bucket:
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


def _buckets(pairs: Bucket, limit: int | None) -> Iterator[Bucket]:
    """The pairs in order, in lists of at most `limit` bytes each; a larger tensor is alone. None: all at once."""
    bucket: Bucket = []
    size = 0
    for name, tensor in pairs:
        if bucket and limit is not None and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def serialised(bucket: Bucket) -> str:
    """Tensors as SGLang reads them from JSON: base64 of a pickled list of (name, CPU tensor).

    By value: the torch reductions that share file descriptors or CUDA handles need both ends on one machine.
    """
    # A view would drag its whole storage along, so each tensor is copied into one of its own.
    own = [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(own)).decode("ascii")
