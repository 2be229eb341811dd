"""The two sides: an SGLang server with our plugin, and the trainer's model in this process."""

from __future__ import annotations

import asyncio
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.fingerprints import states_of
from mismatch_plugin.sglang.http import RequestError, Server, shown
from mismatch_plugin.sglang.modules import TAPS_KEY, Capture, Recorder, Tap, Visit, describe, unpack, watched
from mismatch_plugin.sglang.replies import parse_prompt_log_probs

_TOKENS = 1024
"""Of all modules in one reply: of a width of 16,384 in bfloat16 these are 64 MB with what base64 adds."""


class Trainer(NamedTuple):
    """A causal language model in this process. call: [1, T] ids to [1, T, V] logits."""

    model: nn.Module
    call: Callable[[Tensor], Tensor]

    def log_probs(self, ids: list[int], visit: Visit) -> Tensor:
        """[T - 1] float64 log-probs of all tokens but the first. visit: as `sglang.modules.watched` calls it."""
        with torch.no_grad(), watched(self.model, len(ids), visit):
            logits = self.call(torch.tensor([ids]))[0, :-1].float().cpu()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].double()

    def capture(self, ids: list[int], dtype: torch.dtype) -> Capture:
        """All values of one forward pass. dtype: of the digests of the weights."""
        recorder = Recorder()
        log_probs = self.log_probs(ids, recorder)
        return Capture(ids, describe(self.model, dtype), recorder.values(), log_probs)


def from_checkpoint(folder: Path, dtype: torch.dtype) -> Trainer:
    """A transformers model. Its weights are rounded to `dtype`, in which it computes; buffers stay float32, as
    transformers leaves them when it loads a model in that dtype. Raises InputError."""
    from mismatch_plugin.diagnose.scorers import Checkpoint

    model: Any = _rounded(Checkpoint(folder).model, dtype)
    return Trainer(model, lambda ids: model(ids, use_cache=False).logits)


def from_megatron(spec: str, folder: Path, dtype: torch.dtype, vocab: int) -> Trainer:
    """megatron-core's GPTModel that the function `spec` returns for a checkpoint's folder, rounded in the same way.
    vocab: how many logits are used; the rest pads. Raises InputError."""
    found = _built(spec, folder)
    model: Any = found[0] if isinstance(found, list) and len(found) == 1 else found
    while isinstance(getattr(model, "module", None), nn.Module):  # of DDP and of Float16Module
        model = model.module
    config = getattr(model, "config", None)
    if not hasattr(config, "num_query_groups"):
        raise InputError(f"--megatron {spec} returned {type(found).__name__}, and no GPTModel of megatron-core.")
    for kind in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(config, f"{kind}_model_parallel_size", 1)) != 1:
            raise InputError(f"--megatron {spec}: {kind} parallelism of {size} spreads a module over ranks; take 1.")
    head = model.output_layer
    if head.weight is None:  # it is given the embedding's
        head.weight = model.shared_embedding_or_output_weight()

    def call(ids: Tensor) -> Tensor:
        ids = ids.to(head.weight.device)
        return model(ids, torch.arange(ids.shape[1], device=ids.device)[None], None)[..., :vocab]

    return Trainer(_rounded(model.eval().requires_grad_(False), dtype), call)


def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _built(spec: str, folder: Path) -> Any:
    """What "file.py:function" or "package.module:function" returns for this folder."""
    name, _, function = spec.rpartition(":")
    sys.path.insert(0, "")  # the current folder, as for `python -m`
    try:
        found = runpy.run_path(name) if name.endswith(".py") else vars(importlib.import_module(name))
        return found[function](str(folder))
    except Exception as error:  # whatever it is, it is the user's
        told = f"{type(error).__name__}: {error}"
        raise InputError(f"--megatron {spec} is no FILE.py:FUNCTION or MODULE:FUNCTION that works: {told}") from error


class Engine:
    """A server at `url`. Only `update` changes it. Every method raises InputError where it does not answer, or where
    its modules cannot be watched."""

    def __init__(self, url: str) -> None:
        self.url, self._name = url, f"the server at {shown(url)}"

    def facts(self) -> dict[str, Any]:
        """What the plugin tells, with `vocab`, and `chunk`: how many tokens are prefilled at once, None for all.

        Refuses a server without the plugin, and one whose modules are spread over several ranks.
        """
        told = self._ask("GET", "/server_info", None)
        states = states_of(told)
        if not states:
            raise InputError(
                f"{self._name} runs without this plugin: pip install --no-deps mismatch-plugin in its environment, "
                "and start it again."
            )
        if quantization := states[0].get("quantization"):
            raise InputError(f"{self._name} serves with quantization {quantization}: start one without.")
        for key, what in (("tp_size", "tensor"), ("pp_size", "pipeline"), ("ep_size", "expert")):
            if states[0].get(key, 1) != 1:
                raise InputError(
                    f"{self._name} runs with {key} {states[0][key]}: under {what} parallelism each rank holds a part "
                    f"of a module's output; start one with {key} 1."
                )
        chunk = told.get("chunked_prefill_size")
        ((_, first),) = self.generate([[0, 1]], {"modules": ""})
        return {**states[0], "vocab": first["vocab"], "chunk": chunk if chunk and chunk > 0 else None}

    def capture(self, ids: list[int]) -> Capture:
        """All values of one prefill, in as many requests as their size needs."""
        ((answer, first),) = self.generate([ids], {})
        names = list(dict.fromkeys(name for name, _ in first["taps"]))
        several = max(1, _TOKENS // len(ids))
        values: dict[Tap, Tensor] = {}
        for start in range(0, len(names), several):
            ((_, told),) = self.generate([ids], {"modules": " ".join(names[start : start + several])})
            values |= unpack(told["values"])
        in_order = {(name, which): values[name, which] for name, which in first["taps"]}
        log_probs = torch.from_numpy(parse_prompt_log_probs(answer, ids)[1:].copy())
        return Capture(ids, unpack(first["modules"]), in_order, log_probs)

    def generate(
        self, sequences: Sequence[list[int]], taps: dict[str, str], new_tokens: int = 0
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """One request with these sequences, greedy: of each the reply, and what the plugin says of its modules.

        taps: what is asked for (`sglang.plugin.taps`).
        """
        sampling = {"temperature": 1.0, "top_k": 1, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {
            "input_ids": sequences,
            "sampling_params": {**sampling, "custom_params": {TAPS_KEY: {"form": "values", **taps}}},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        found = []
        for answer in self._ask("POST", "/generate", body):
            told = (answer.get("meta_info") or {}).get(TAPS_KEY)
            if not told:
                raise InputError(f"{self._name} tells nothing of its modules: the plugin there is too old, or off.")
            if "error" in told[0]:
                raise InputError(f"{self._name} cannot be watched: {told[0]['error']}.")
            found.append((answer, told[0]))
        return found

    def update(self, folder: str) -> None:
        """Load the checkpoint that the server finds at `folder`."""
        told = self._ask("POST", "/update_weights_from_disk", {"model_path": folder})
        if not told.get("success"):
            raise InputError(f"{self._name} did not load {folder}: {told.get('message')}.")

    def _ask(self, method: str, path: str, body: Any) -> Any:
        async def ask() -> Any:
            server = Server(self.url)
            try:
                return (await server.call(method, path, body)).json
            finally:
                await server.close()

        try:
            return asyncio.run(ask())
        except (RequestError, ValueError) as error:
            raise InputError(f"{self._name} does not answer: {error}") from None
