"""Everything a trainer tells a server next to "generate": weights, pauses, and questions about itself."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
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
from mismatch_plugin.sglang.http import RequestError, Server

PauseMode = Literal["abort", "retract"]
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Bucket = list[tuple[str, Tensor]]
logger = logging.getLogger("mismatch_plugin")


class ServerInfo(BaseModel):
    """What the client needs of a server's settings, and those that move log-probs away from the training side's.
    None: not told. `SGLANG_RETURN_ORIGINAL_LOGPROB` (log-probs before temperature) no server reports."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str | None = None
    weight_version: str | None = None
    vocab_size: int | None = None
    tp_size: int = 1
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
        cache = {"bf16": "bfloat16"}.get(str(self.kv_cache_dtype), self.kv_cache_dtype)
        rounds_cache = cache not in (None, "auto", self.dtype)
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

    def __init__(self, server: Server, retries: int, verify_updates: bool) -> None:
        self._server, self._attempts, self._verifies = server, 1 + retries, verify_updates
        self.info: ServerInfo | None = None  # what `server_info` told last
        self._warned: set[str] = set()
        self.fingerprint: str | None = None
        """Of the weights that the last update sent, if the server has our plugin and they were compared with what
        serves: a trainer writes it next to its log-probs (`weight_fingerprint`) for `inspect`."""
        self._serving: Serving | None = None
        """None: before the first update, while one is under way, and after one that failed."""

    async def server_info(self, **options: Any) -> ServerInfo:
        """Version and settings, with the weight version that the last update left. Warns of the server's risks
        (`ServerInfo.risks`), of each once. options: of the requests, see `http.Server.call`."""
        options = {"attempts": self._attempts, **options}
        told: dict[str, Any] = {}
        for path in ("/server_info", "/model_info"):  # as it was started, and as weight updates left it, which wins
            answer = await self._server.call("GET", path, **options)
            if not isinstance(answer.json, dict):
                raise RequestError("content", f"{path} did not answer with a JSON object", answer.attempts)
            told |= {key: value for key, value in answer.json.items() if value is not None}
        self.info = ServerInfo.model_validate(told)
        for risk in self.info.risks():
            if risk not in self._warned:
                self._warned.add(risk)
                warnings.warn(f"{self._server.url}: {risk}", MismatchWarning, stacklevel=2)
        return self.info

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. Running requests return what they have (abort), or wait to be computed again (retract)."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r} is unknown: choose one of {', '.join(get_args(PauseMode))}.")
        await self._post("/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        """Generate again after `pause`."""
        await self._post("/continue_generation", {})

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "retract") -> AsyncIterator[None]:
        """`async with client.paused(): …`; generation continues afterwards, whatever happened inside."""
        await self.pause(mode)
        try:
            yield
        finally:
            await self.continue_()

    async def update_weights_from_disk(self, path: str, version: str | int) -> None:
        """Load a checkpoint that the server can read at `path`; no cache of the old weights stays. Raises
        WeightUpdateError."""
        async with self._updating(version, []):
            body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
            await self._post("/update_weights_from_disk", body, confirmed=True)

    async def update_weights_from_tensors(self, named_tensors: NamedTensors, version: str | int) -> None:
        """Send weights under the checkpoint's names, all inside one request; no cache of the old ones stays. Raises
        WeightUpdateError."""
        pairs = _checked(named_tensors)
        async with self._updating(version, pairs):
            workers = (self.info or await self.server_info()).tp_size
            body = {"serialized_named_tensors": [serialised(pairs)] * workers}
            body |= {"weight_version": str(version), "flush_cache": True}
            await self._post("/begin_weight_update", {}, confirmed=True)
            try:
                await self._post("/update_weights_from_tensor", body, confirmed=True)
            except BaseException:
                with suppress(RequestError):  # the first error says what went wrong
                    await self._post("/end_weight_update", {}, confirmed=True)
                raise
            await self._post("/end_weight_update", {}, confirmed=True)

    @asynccontextmanager
    async def _updating(self, version: str | int, pairs: Bucket) -> AsyncIterator[None]:
        """An update to this version. pairs: what is sent; [] where it is not known.

        At its end the server must report the version, and serve what was sent: else it would go on sampling from old
        weights without a word. What serves is kept for later samples. Raises WeightUpdateError.
        """
        self.fingerprint = self._serving = None
        try:
            yield
            model = (await self._server.call("GET", "/model_info", attempts=self._attempts)).json
            told = model.get("weight_version") if isinstance(model, dict) else None
            if told is not None and str(told) != str(version):
                raise WeightUpdateError(f"the weights were sent as version {version}, but the server reports {told!r}.")
            if self._verifies:
                states = await self._compare(version, pairs)
                self._serving = Serving(str(version), dict(map(_worker, states)))
        except (RequestError, ValueError) as error:
            raise WeightUpdateError(
                f"the update to version {version} failed, or cannot be confirmed: {error}"
            ) from error

    async def _compare(self, version: str | int, pairs: Bucket) -> list[Mapping[str, Any]]:
        """What was sent with what serves, where the server has our plugin, whose states are returned. It must have all
        names."""
        states: list[Mapping[str, Any]] = []
        for attempt in range(1 + STAGES_S * 10):
            await asyncio.sleep(0.1 if attempt else 0)
            states = states_of((await self._server.call("GET", "/server_info", attempts=self._attempts)).json)
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

    async def _post(self, path: str, body: dict[str, Any], *, confirmed: bool = False) -> None:
        """An order, sent once, of which the server must not say that it failed. confirmed: it must say it succeeded."""
        answer = await self._server.call("POST", path, body)
        said = answer.json if isinstance(answer.json, dict) else {}
        if said.get("success", not confirmed) is not True:
            message = said.get("message") or f"no success was reported, but {answer.json!r}"
            raise RequestError("refused", f"the server did not do {path}: {message}", answer.attempts)


def _worker(state: Mapping[str, Any]) -> tuple[tuple[Any, Any, Any], tuple[int, str | None]]:
    """(process, (how many updates it had, fingerprint)), as `Serving` keeps them."""
    update = state.get("update") or {}
    process = state.get("server"), state.get("started"), state.get("dp_rank")
    return process, (update.get("number", 0), state.get("fingerprint"))


def _checked(named_tensors: NamedTensors) -> Bucket:
    """(name, tensor) pairs. Raises ValueError for none, a name twice, and names that are no checkpoint's."""
    given: Any = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    pairs: Bucket = list(given)
    if not pairs:
        raise ValueError("no weights were given: an update without tensors would only change the version's name.")
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"weight {twice[0]!r} is there twice.")
    if all(name.startswith("module.") for name, _ in pairs):  # a server may end at a name that it does not know
        raise ValueError("all names of the weights begin with 'module.', a wrapper's prefix: send the checkpoint's.")
    return pairs


def serialised(bucket: Bucket) -> str:
    """Tensors as SGLang reads them from JSON: base64 of a pickled list of (name, CPU tensor).

    By value: the torch reductions that share file descriptors or CUDA handles need both ends on one machine.
    """
    # A view would drag its whole storage along, so each tensor is copied into one of its own.
    own = [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(own)).decode("ascii")
