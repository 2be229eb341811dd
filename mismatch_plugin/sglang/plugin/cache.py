"""Which weights computed the keys and values that a response was computed with.

Each slot of SGLang's KV pool has the number of the epoch in which it was written; an epoch ends with each change of the
weights. So it does not matter how a cache keeps, splits or shares its entries. While no slot of an earlier epoch can be
in use (before the first update, and after a flush) nothing is written or read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("mismatch_plugin")
_KV = "mismatch_plugin_kv"
"""Attribute of SGLang's requests: epoch that has ended → (how many tokens it uses keys and values of, how many of these
came from the cache after the epoch's end)."""


class KVEpochs:
    """Of one scheduler process. Known are slots that batches of the target model write, and nothing else does."""

    def __init__(self, scheduler: Any, speculative: str | None) -> None:
        others = ("enable_hierarchical_cache", "enable_lmcache", "enable_hisparse")
        transfers = getattr(getattr(scheduler, "disaggregation_mode", None), "value", "null") != "null"
        self._known = not (speculative or transfers or any(getattr(scheduler, name, False) for name in others))
        self._scheduler = scheduler
        self._ended: list[str | None] = []  # the fingerprint of each epoch that ended; the current one is the next
        self._slots: Tensor | None = None  # [slots] int32: the epoch in which each was written
        self._computed = False  # a batch wrote some in this epoch
        self._old = False  # some of an earlier epoch may be in use

    def end(self, fingerprint: str | None, running: Iterable[Any]) -> None:
        """The weights of this fingerprint are no longer those that compute. running: requests that keep their slots."""
        now = len(self._ended)
        self._ended.append(fingerprint)
        if not self._known or not self._computed:
            return
        self._computed = False
        if not self._old:
            pool = self._scheduler.token_to_kv_pool_allocator
            size = getattr(pool, "size_full", pool.size) + pool.page_size
            if self._slots is None:
                self._slots = torch.empty(size, dtype=torch.int32, device=pool.device)
            self._slots.fill_(now)
            self._old = True
        for req in running:
            held = dict(getattr(req, _KV, {}))
            known = sum(tokens for tokens, _ in held.values())
            if (own := len(req.origin_input_ids) + len(req.output_ids) - 1 - known) > 0:
                held[now] = own, 0
            setattr(req, _KV, held)

    def flushed(self) -> None:
        """The cache is empty; requests that wait compute all of theirs again."""
        self._old = self._computed = False
        for req in self._scheduler.waiting_queue:
            setattr(req, _KV, {})

    def before_batch(self, batch: Any) -> None:
        """Before a batch writes its slots. While old ones may be in use: one fill, and one host sync for a batch of
        prompts."""
        self._computed = True
        if not self._old or self._slots is None or batch.out_cache_loc is None:
            return
        try:
            self._slots.index_fill_(0, batch.out_cache_loc, len(self._ended))
            if batch.forward_mode.is_extend():
                rows = self._scheduler.req_to_token_pool.req_to_token
                prompts = len(batch.reqs) - len(getattr(batch, "decoding_reqs", None) or ())  # others are behind them
                places = batch.req_pool_indices[:prompts].tolist()
                for req, place, prefix in zip(batch.reqs, places, batch.prefix_lens, strict=False):
                    counts = self._slots[rows[place, :prefix].long()].bincount().tolist()
                    setattr(req, _KV, {epoch: (n, n) for epoch, n in enumerate(counts[: len(self._ended)]) if n})
        except Exception:
            self._known = self._old = False
            logger.exception("mismatch_plugin: which weights computed keys and values is not told any more")

    def of(self, req: Any, now: str | None) -> list[dict[str, Any]] | None:
        """The tokens of the request with keys and values of weights other than `now`, as `data.served.ServedKV`."""
        if not self._known:
            return None
        found: dict[str | None, dict[str, Any]] = {}
        for epoch, (tokens, cached) in getattr(req, _KV, {}).items():
            if (told := self._ended[epoch]) is None or told != now:
                of = found.setdefault(told, {"fingerprint": told, "tokens": 0, "cached": 0})
                of["tokens"] += tokens
                of["cached"] += cached
        return [*found.values()]
