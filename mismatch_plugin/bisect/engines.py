"""The two sides: an SGLang server with our plugin, and the trainer's model in this process."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mismatch_plugin.bisect.taps import Capture, Tap, from_json, log_probs_of, unpack, watched
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import states_of
from mismatch_plugin.sglang.http import RequestError, Retries, Server, shown
from mismatch_plugin.sglang.replies import parse_prompt_log_probs

KEY = "mismatch_taps"
_BUCKET = 1 << 26
"""Bytes of tensors in one reply, which base64 and JSON make a third larger."""


class Trainer(NamedTuple):
    """A causal language model in this process. call: [1, T] ids to [1, T, V] logits."""

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    name: str

    def log_probs(self, ids: list[int], visit: Any = None) -> Tensor:
        """[T - 1] float64 log-probs of all tokens but the first. visit: as `taps.watched` calls it."""
        with torch.no_grad(), watched(self.model, len(ids), visit or (lambda *_: None)):
            return log_probs_of(self.call(torch.tensor([ids]))[0], ids)


def from_checkpoint(folder: Path, dtype: torch.dtype) -> Trainer:
    """A transformers model. Its weights are rounded to `dtype`, in which it computes; buffers stay float32, as
    transformers leaves them when it loads a model in that dtype. Raises InputError."""
    from mismatch_plugin.diagnose.scorers import Checkpoint

    model: Any = Checkpoint(folder).model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Trainer(model, lambda ids: model(ids, use_cache=False).logits, str(folder))


def from_function(spec: str, folder: Path, dtype: torch.dtype) -> Trainer:
    """`package.module:function`, which is called with the folder and the dtype and returns a megatron-core GPTModel
    that has its weights, on one rank. Raises InputError."""
    module, _, name = spec.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--megatron {spec}: {error}; give package.module:function.") from None
    model = make(folder, dtype).eval()

    def call(ids: Tensor) -> Tensor:
        return model(ids, torch.arange(ids.shape[1])[None], None)

    return Trainer(model, call, spec)


class Facts(NamedTuple):
    """What a server tells of itself. info: our plugin's part."""

    vocab: int
    chunk: int | None
    info: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return getattr(torch, str(self.info.get("dtype")), torch.float32)


class Engine:
    """A server at `url`. Each method is one request or a few; none changes it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def facts(self) -> Facts:
        """Raises InputError where its modules cannot be watched."""
        told = self._ask("GET", "/server_info", None)
        vocab = self._ask("GET", "/model_info", None).get("vocab_size") or told.get("vocab_size") or 0
        states = states_of(told)
        if not states:
            raise InputError(
                f"the server at {shown(self.url)} runs without this plugin: pip install --no-deps mismatch-plugin "
                "where it runs, and start it again."
            )
        info = dict(states[0])
        for name, what in (("tp_size", "tensor"), ("pp_size", "pipeline"), ("ep_size", "expert")):
            if info.get(name, 1) != 1:
                raise InputError(
                    f"the server at {shown(self.url)} runs with {name} {info[name]}, and of {what} parallelism one "
                    f"rank's modules hold a part: start one with {name} 1."
                )
        chunk = told.get("chunked_prefill_size")
        return Facts(int(vocab), chunk if isinstance(chunk, int) and chunk > 0 else None, info)

    def capture(self, ids: list[int]) -> Capture:
        """All values of one prefill, in as many requests as their size needs. Raises InputError."""
        first, log_probs = self.tapped(ids)
        sizes: dict[str, int] = {}
        for (name, _), size in zip(first["taps"], first["bytes"], strict=True):
            sizes[name] = sizes.get(name, 0) + size
        buckets: list[list[str]] = [[]]
        for name, size in sizes.items():
            if buckets[-1] and sum(sizes[other] for other in buckets[-1]) + size > _BUCKET:
                buckets.append([])
            buckets[-1].append(name)
        values: dict[Tap, Tensor] = {}
        for names in buckets:
            told, _ = self.tapped(ids, modules=" ".join(names))
            pairs = zip(told["taps"], told["values"], strict=True)
            values |= {(name, which): unpack(value) for (name, which), value in pairs if value is not None}
        order = [(name, which) for name, which in first["taps"]]
        return Capture(ids, from_json(first["modules"]), {tap: values[tap] for tap in order}, log_probs)

    def tapped(self, ids: list[int], form: str = "values", **asked: str) -> tuple[dict[str, Any], Tensor]:
        """What the plugin says of one prefill (`sglang.plugin.taps`), and the log-probs of ids[1:]. Raises InputError."""
        (answer,) = self.generate([ids], {"form": form, **asked})
        told = (answer.get("meta_info") or {}).get(KEY) or [None]
        if not isinstance(told[0], dict):
            raise InputError(f"the server at {shown(self.url)} tells nothing of its modules: its plugin is too old.")
        if "error" in told[0]:
            raise InputError(f"the server at {shown(self.url)} cannot be watched: {told[0]['error']}.")
        return told[0], torch.from_numpy(parse_prompt_log_probs(answer, ids)[1:].copy())

    def generate(
        self, sequences: Sequence[list[int]], taps: dict[str, str], max_new_tokens: int = 0
    ) -> list[dict[str, Any]]:
        """The answers to one request with these sequences, greedy, with the log-probs of what is in them."""
        sampling = {"temperature": 1.0, "top_k": 1, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {
            "input_ids": sequences,
            "sampling_params": {**sampling, "custom_params": {KEY: taps}},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return self._ask("POST", "/generate", body)

    def _ask(self, method: str, path: str, body: Any) -> Any:
        async def ask() -> Any:
            server = Server(self.url)
            try:
                return (await server.call(method, path, body, retries=Retries(attempts=1))).json
            finally:
                await server.close()

        try:
            return asyncio.run(ask())
        except (RequestError, ValueError) as error:
            raise InputError(f"the server at {shown(self.url)} does not answer: {error}") from None
