"""What modules of the served model took and gave while it computed a request that asks for it.

A request asks in `sampling_params.custom_params`: {"mismatch_taps": {"form": …, "modules": …}}, and its reply has
`meta_info["mismatch_taps"]`. form: "values" (tensors, of `sglang.modules.pack`) or "hashes" (a hash of each
token's row). modules: names of those that are sent, with a blank between; of the others names alone are.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from mismatch_plugin.sglang.modules import TAPS_KEY, Recorder, describe, pack, row_hashes, watched

logger = logging.getLogger("mismatch_plugin")
_KEPT, _FORWARDS = "mismatch_plugin_taps", "mismatch_plugin_forwards"
"""Attributes of SGLang's requests: what was taken so far, or why nothing can be; of each forward pass, how many of its
tokens were computed, and of how many requests."""


def wanted(req: Any) -> dict[str, Any] | None:
    """What the request asks for; None of one that asks for nothing."""
    params = getattr(req.sampling_params, "custom_params", None)
    told = params.get(TAPS_KEY) if isinstance(params, dict) else None
    return told if isinstance(told, dict) else None


class Taps:
    """Of one scheduler process. Nothing is watched but a batch that holds a request that asks for it."""

    def __init__(self, scheduler: Any) -> None:
        self._model = scheduler.tp_worker.model_runner.model
        self._vocab = int(scheduler.model_config.vocab_size)
        self._open = ExitStack()
        self._recorder: Recorder | None = None
        self._rows: list[int] = []  # of each request of the batch
        self._problem = ""  # why the batch cannot be watched

    def before_batch(self, batch: Any) -> None:
        """Watch the batch if a request in it asks for it."""
        asked = [wanted(req) or {} for req in batch.reqs]
        if not any(asked):
            return
        names = {name for one in asked for name in str(one.get("modules", "")).split()}
        every = any(one.get("form") == "hashes" for one in asked)
        self._rows = list(batch.extend_lens) if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        self._recorder = Recorder(lambda name: every or name in names)
        self._problem = "" if all(asked) else "requests of others were computed in the same batch: ask an idle server"
        self._open.enter_context(watched(self._model, sum(self._rows), self._visit))

    def _visit(self, *call: Any) -> None:
        """Inside the model's forward pass, which must go on whatever fails here."""
        try:
            if self._recorder is not None:
                self._recorder(*call)
        except Exception as error:
            logger.exception("mismatch_plugin: module %s could not be watched", call[0])
            self._problem = f"module {call[0]} could not be watched: {error!r}"

    def after_batch(self, batch: Any) -> None:
        """Hand each request its rows."""
        if self._recorder is None:
            return
        self._open.close()
        values, self._recorder = self._recorder.values(), None
        if not values and not self._problem:
            self._problem = "no module's Python code ran: start the server with --disable-cuda-graph"
        start = 0
        for req, count in zip(batch.reqs, self._rows, strict=True):
            kept = self._problem or getattr(req, _KEPT, {})
            if not isinstance(kept, str):
                for tap, value in values.items():
                    kept.setdefault(tap, []).append(value[start : start + count])
            setattr(req, _KEPT, kept)
            setattr(req, _FORWARDS, [*getattr(req, _FORWARDS, ()), [count, len(self._rows)]])
            start += count

    def reply(self, req: Any) -> dict[str, Any] | None:
        """For a request that ended; None where it asked for nothing."""
        asked, kept = wanted(req), getattr(req, _KEPT, "it ended before it was computed")
        if asked is None:
            return None
        if isinstance(kept, str):
            return {"error": kept}
        values = {tap: torch.cat(parts) for tap, parts in kept.items()}
        taken = {"vocab": self._vocab, "forwards": getattr(req, _FORWARDS), "taps": [list(tap) for tap in values]}
        if asked.get("form") == "hashes":
            return {**taken, "hashes": [row_hashes(value) for value in values.values()]}
        if "modules" not in asked:
            return {**taken, "modules": pack(describe(self._model))}
        return {**taken, "values": pack({tap: value for tap, value in values.items() if not value.is_meta})}
