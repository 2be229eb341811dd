"""What is done at each function of SGLang's that `register.TARGETS` names, in a scheduler process.

AFTER hooks are called with SGLang's result and then its arguments and return a new result or None, BEFORE hooks return
new (args, kwargs) or None.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.modules import TAPS_KEY
from mismatch_plugin.sglang.plugin.state import ServerState
from mismatch_plugin.sglang.plugin.taps import Taps
from mismatch_plugin.sglang.plugin.weights import REQUIRE, all_ready

logger = logging.getLogger("mismatch_plugin")
_state: ServerState | None = None
"""Of this scheduler process."""
_taps: Taps | None = None


def required_change() -> int:
    """How many tensors an update must change. Raises SystemExit for what is no number."""
    given = os.environ.get(REQUIRE, "0")
    if not given.isdecimal():
        raise SystemExit(f"{REQUIRE}={given!r} must be a number of tensors: 1, or 0 for any.")
    return int(given)


def loaded(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.__init__`: the fingerprint of what was loaded. All ranks know how to take it, or none does."""
    global _state, _taps
    try:
        state = ServerState(scheduler)
    except Exception:
        state = None
        logger.exception("mismatch_plugin: this server's settings cannot be read; nothing is added to its replies")
    if not all_ready(state is not None):
        logger.warning(
            "mismatch_plugin adds nothing: some process of this server has no plugin, another version of it, or cannot "
            "use it: see its log."
        )
    elif state is not None:
        _state, _taps = state, Taps(scheduler)
        state.loaded()


def before_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before a batch is computed: whose weights it is of, and what its temperature will be."""
    if _state is not None:
        _state.before_batch(batch)


def watch_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before a batch is computed: watch the modules, if a request asks for what they take and give."""
    if _taps is not None:
        _taps.before_batch(batch)


def watched_batch(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """After a batch was computed."""
    if _taps is not None:
        _taps.after_batch(batch)


def session_begun(result: Any, updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """After a session of weight updates was opened, but for those of a draft model alone."""
    if _state is not None and result.success and recv_req.selector != "draft":
        _state.begin()


def session_ended(result: Any, updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """After a session was closed: the fingerprint, and the failure if too little changed."""
    if _state is None or not (result.success and _state.under_way):
        return None
    return _failed(result, _state.end(required_change()))


def updated(result: Any, updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """After an update from disk or by IPC. One that SGLang calls failed may have changed weights all the same, and may
    have failed on some ranks only. Inside a session the session's end tells."""
    if _state is None or _state.under_way:
        return None
    return _failed(result, _state.end(required_change(), result.success))


def resumed(_: Any, updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """After memory was taken again: weights without a backup are then anything."""
    if _state is not None and (not recv_req.tags or "weights" in recv_req.tags):
        _state.changed("resumed")


def checked(_: Any, updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """After /weights_checker, which can fill the weights with noise."""
    if _state is not None and recv_req.action == "reset_tensors" and recv_req.selector != "draft":
        _state.changed("reset")


def flushed(result: Any, *args: Any, **kwargs: Any) -> None:
    """After the KV cache was emptied, or was not since requests hold it."""
    if _state is not None and result:
        _state.cache.flushed()


def _failed(result: Any, failure: str) -> Any:
    if not failure or not result.success:
        return None
    result.success, result.message = False, failure
    return result


TOGETHER = (loaded, session_begun, session_ended, updated, resumed, checked)
"""Hooks in which ranks wait for each other."""


def streamer_made(_: None, streamer: Any, *args: Any, **kwargs: Any) -> None:
    """After the output streamer is made: let it ask for more fields, which the Rust server's cannot have."""
    if streamer.rust_server is None:
        type(streamer).has_additional_customized_info = True


def add_to_replies(result: dict[str, list[Any]], streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> Any:
    """A list with one object for each request that ends in this step."""
    if _state is None or not any(req.finished() for req in reqs):
        return None
    told = [[_state.reply(req)] if req.finished() else [] for req in reqs]
    tapped = [[taken] if req.finished() and (taken := _taps and _taps.reply(req)) else [] for req in reqs]
    return {**result, META_KEY: told, **({TAPS_KEY: tapped} if any(tapped) else {})}


def add_to_server_info(result: Any, *args: Any, **kwargs: Any) -> None:
    """Into `internal_states` of /server_info."""
    if _state is not None:
        result.internal_state[META_KEY] = _state.info()
