"""What one scheduler process knows of its weights and settings, and what it says of a response."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import socket
import time
from functools import cache
from typing import Any

from mismatch_plugin.sglang.fingerprints import some, written
from mismatch_plugin.sglang.plugin.cache import KVEpochs
from mismatch_plugin.sglang.plugin.weights import LoadedWeights

logger = logging.getLogger("mismatch_plugin")
_TOP_K_OFF = 1 << 30
_EVENTS = "mismatch_plugin_events"
"""Attribute of SGLang's requests: (fingerprint, since, tokens) of the weights that made tokens up to there."""
_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
_CONSTRAINTS = ("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "watermark")


class ServerState:
    """Fingerprints, updates and settings of the scheduler's target model (not of a draft of speculative decoding)."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._facts = facts(scheduler)
        self.weights = LoadedWeights(scheduler, *(self._facts[name] for name in ("pp_rank", "pp_size", "tp_rank")))
        self.cache = KVEpochs(scheduler, self._facts["speculative"])
        self._since: dict[str, str] = {}  # fingerprint → the label under which it was first sampled from
        self._last: str | None = None  # the fingerprint that serves; None: an update changed the weights since
        self._ended = False  # an update ended, and what serves since is not known yet
        self._label: str | None = None  # as it was last seen
        self._unnamed = False  # the weights came, and the label has not moved yet
        self._led = False  # the label moved, and the weights have not come yet
        self._fresh = True  # no batch was computed with these weights yet
        self._raw = bool(_module("sglang.srt.layers.sampler").SGLANG_RETURN_ORIGINAL_LOGPROB)
        self._label_before: str | None = None  # of the update that ended last, if nothing was sampled since
        self._label_at_begin = ""  # of the session under way
        self.under_way = False
        """Some tensors of an update are loaded, and the rest may not be."""

    def loaded(self) -> None:
        """After the model was loaded."""
        self.weights.take()
        self._settle()
        self._log("loaded")

    def begin(self) -> None:
        """A part of an update is loaded."""
        if not self.under_way:
            self.under_way = True  # first: all ranks must know it, whatever fails on one of them
            self._label_at_begin = label()
            self._mark_requests()
            self.weights.begin()

    def changed(self, what: str) -> None:
        """Something else than an update may have changed the weights."""
        if not self.under_way:
            self._mark_requests()
            self.weights.take()
            self._fresh, self._label_before = True, None
            self._log(what)

    def end(self, required: int, success: bool = True) -> str:
        """A whole update is loaded. Returns why it fails, "" if it does not (`LoadedWeights.end`)."""
        self._mark_requests()
        before = self.weights.number
        # Sessions that follow each other without a batch are one update, unless each moved the version.
        goes_on = self.under_way and self._label_before is not None
        goes_on = goes_on and not self._label_before != self._label_at_begin != label()
        if not goes_on:
            self._label_before = self._label_at_begin if self.under_way else None
        try:
            failure = self.weights.end(required, success, goes_on)
        finally:  # the same on all ranks, whatever fails on one of them
            self.under_way, self._fresh = False, True
        counted = self.weights.number > before or (goes_on and success)
        self._ended = self._ended or counted
        self._settle()
        self._log_update(failed=not success, counted=counted)
        return failure

    def _settle(self) -> None:
        """Name the weights that serve now, once they are known: of a pipeline when all stages have told."""
        self.weights.complete()
        if (current := self.weights.fingerprint) is None:
            return
        self._fresh, name, told = False, label(), self.weights.update
        updated, self._ended = self._ended, False
        if updated and (told is None or told["changed"]):
            self._last = None  # weights that come back are named anew
        if current != self._last:
            self._since[current], self._last = name, current
            self._unnamed = name == self._label and not self._led
            self._led, self._label = False, name
        elif updated and name != self._label:
            self._unnamed, self._label = False, name

    def _log_update(self, failed: bool, counted: bool) -> None:
        told, what = self.weights.update, f"update {self.weights.number}{', which failed,' if failed else ''}"
        if not counted:
            what = "WARNING: an update failed and changed nothing"
        elif told is not None:  # else other pipeline stages or ranks are not done
            what += f" changed {told['changed']} of {told['tensors']} tensors"
            if told["changed_matrices"] < told["matrices"]:
                what = f"WARNING: {what}" + (f", not {some(self.weights.unchanged)}" if told["changed"] else "")
        self._log(what)

    def _mark_requests(self) -> None:
        """Note on each request under way which weights made its tokens so far."""
        try:
            self.weights.complete()
            scheduler, told = self._scheduler, self.weights.fingerprint
            running = scheduler.collect_inflight_reqs()
            self.cache.end(told, running - {*scheduler.waiting_queue})
            for req in {*running, *scheduler.waiting_queue, scheduler.chunked_req} - {None}:
                if req.output_ids:
                    event = (told, self._since.get(told or ""), len(req.output_ids))
                    setattr(req, _EVENTS, [*getattr(req, _EVENTS, ()), event])
        except Exception:  # the other ranks wait for this one
            logger.exception(
                "mismatch_plugin: requests under way could not be marked: their spans are not to be trusted"
            )

    def _log(self, what: str) -> None:
        told = f"{self._facts['server']}, {what}: {self.weights.fingerprint} as version {label()!r}"
        level = logging.WARNING if what.startswith("WARNING") else logging.INFO
        logger.log(level, "mismatch_plugin: weights of %s; %.3f s", told, self.weights.seconds)

    def before_batch(self, batch: Any) -> None:
        """What is to be known of a batch before it is computed. Costs some comparisons."""
        self._label_before = None
        self.cache.before_batch(batch)
        if self._fresh:
            self._settle()
        if not (self._fresh or self.under_way) and (name := label()) != self._label:
            if self._unnamed and self._last is not None:  # a trainer that names its update after it
                self._since[self._last] = name
            self._led, self._unnamed, self._label = not self._unnamed, False, name

    def reply(self, req: Any) -> dict[str, Any]:
        """The object of `data.served.Served` for a request that ended."""
        params = req.sampling_params
        filters = {"top_p": params.top_p < 1.0, "top_k": 1 < params.top_k < _TOP_K_OFF, "min_p": params.min_p > 0.0}
        shifts = [name for name, off in _PENALTIES.items() if getattr(params, name) != off]
        shifts += [name for name in _CONSTRAINTS if getattr(params, name, None)]
        if getattr(req, "custom_logit_processor", None):
            shifts.append("custom_logit_processor")
        # The sampler leaves every temperature out of a batch that is all greedy.
        applied = None if params.top_k == 1 and params.temperature != 1.0 else params.temperature
        return {
            **self._facts,
            "temperature": 1.0 if self._raw else applied,
            "log_probs_of": "raw" if self._raw else "tempered",
            "filters": [name for name, on in filters.items() if on],
            "shifts": shifts,
            "weights": self._spans(req),
            "kv": self.cache.of(req, self.weights.fingerprint),
            "update": self.weights.update,
        }

    def _spans(self, req: Any) -> list[dict[str, Any]]:
        """[start, end) and the fingerprint of the weights that made these tokens, over the whole response."""
        self.weights.complete()
        # Without those that were computed behind the response's end.
        length = len(req.output_ids) if req.finished_len is None else req.finished_len
        again = req.input_embeds is not None and req.retraction_count  # then SGLang samples all its tokens again
        events = () if again else getattr(req, _EVENTS, ())
        spans: list[dict[str, Any]] = []
        now = self.weights.fingerprint
        for told, since, until in [*events, (now, self._since.get(now or ""), length)]:
            start, end = spans[-1]["end"] if spans else 0, min(until, length)
            if spans and spans[-1]["fingerprint"] == told:
                spans[-1]["end"] = max(end, start)
            elif end > start:
                spans.append({"fingerprint": told, "since": since, "start": start, "end": end})
        return spans

    def info(self) -> dict[str, Any]:
        """For /server_info: settings, fingerprint, last update, and the digest of every tensor."""
        self.weights.complete()
        return {
            **self._facts,
            "fingerprint": self.weights.fingerprint,
            "label": label(),
            "update": self.weights.update,
            "seconds": self.weights.seconds,
            "tensors": written(self.weights.tensors),
        }


def facts(scheduler: Any) -> dict[str, Any]:
    """What holds for all replies of this process."""
    runner = scheduler.tp_worker.model_runner
    context = _module("sglang.srt.runtime_context")
    parallel = context.get_parallel()
    settings = {**vars(scheduler.server_args), **context.get_context().resolved_server_args_dict()}
    name = os.environ.get("MISMATCH_SERVER_ID") or f"{socket.gethostname()}:{settings['port']}/{os.getppid()}"
    processor, model = getattr(runner.model, "logits_processor", None), scheduler.model_config
    dtype, cache_dtype = (str(kind).removeprefix("torch.") for kind in (model.dtype, runner.kv_cache_dtype))
    return {
        "server": name,
        "started": round(time.time(), 3),
        "dp_rank": parallel.dp_rank,
        "tp_rank": parallel.tp_rank,
        "tp_size": parallel.tp_size,
        "pp_rank": parallel.pp_rank,
        "pp_size": parallel.pp_size,
        "ep_size": settings.get("ep_size") or 1,
        "kv_heads_repeated": model.get_total_num_kv_heads() < parallel.tp_size,  # more ranks than there are heads
        "sglang": importlib.metadata.version("sglang"),
        "dtype": dtype,
        "head_dtype": "float32" if getattr(processor, "use_fp32_lm_head", False) else dtype,
        "kv_cache_dtype": cache_dtype,
        "quantization": model.quantization,
        "speculative": settings.get("speculative_algorithm"),
        "deterministic": bool(settings.get("enable_deterministic_inference")),
        "on_policy_target": settings.get("rl_on_policy_target"),
    }


def label() -> str:
    """The weight version that SGLang would name now."""
    return str(_module("sglang.srt.runtime_context").get_serving().weight_version)


@cache
def _module(name: str) -> Any:
    return importlib.import_module(name)
