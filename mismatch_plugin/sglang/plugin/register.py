"""The entry point: which functions of SGLang are hooked, and what is done where one of them is not as expected.

AFTER hooks are called with SGLang's result and then its arguments and return a new result or None, BEFORE hooks return
new (args, kwargs) or None. One that raises is reported and, unless ranks wait for each other in it, switched off; the
server goes on as it would without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pkgutil import resolve_name
from typing import Any, NamedTuple

from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.sglang.modules import TAPS_KEY
from mismatch_plugin.sglang.plugin.state import ServerState
from mismatch_plugin.sglang.plugin.taps import Taps
from mismatch_plugin.sglang.plugin.weights import REQUIRE, all_ready

logger = logging.getLogger("mismatch_plugin")
SWITCH = "MISMATCH_PLUGIN_SGLANG"
_SWITCH = {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}
_SCHEDULER, _PARTS = "sglang.srt.managers.scheduler", "sglang.srt.managers.scheduler_components"
_UPDATER = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = f"{_PARTS}.output_streamer.SchedulerOutputStreamer"
_STATE = f"{_PARTS}.internal_state.SchedulerInternalStateController"
_OLD_STATE = f"{_SCHEDULER}.Scheduler.get_internal_state"
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
    """Before a batch is computed: whose weights it is of."""
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


class Target(NamedTuple):
    """A function of SGLang's. path: or several, of which the first that exists counts: versions differ. parameters: the
    first ones of its signature. optional: an SGLang without it is one that the plugin knows."""

    paths: tuple[str, ...]
    parameters: tuple[str, ...]
    hook: Callable[..., Any]
    when: str = "AFTER"
    optional: bool = False


TARGETS = (
    Target((f"{_SCHEDULER}.Scheduler.__init__",), ("self", "server_args"), loaded),
    Target((f"{_SCHEDULER}.Scheduler.run_batch",), ("self", "batch"), before_batch, "BEFORE"),
    Target((f"{_SCHEDULER}.Scheduler.run_batch",), ("self", "batch"), watch_batch, "BEFORE"),
    Target((f"{_SCHEDULER}.Scheduler.run_batch",), ("self", "batch"), watched_batch),
    Target((f"{_SCHEDULER}.Scheduler.flush_cache",), ("self",), flushed),
    Target((f"{_UPDATER}.update_weights_from_disk",), ("self", "recv_req"), updated),
    Target((f"{_UPDATER}.update_weights_from_ipc",), ("self", "recv_req"), updated),
    Target((f"{_UPDATER}.begin_weight_update",), ("self", "recv_req"), session_begun),
    Target((f"{_UPDATER}.end_weight_update",), ("self", "recv_req"), session_ended),
    Target((f"{_UPDATER}.resume_memory_occupation",), ("self", "recv_req"), resumed, optional=True),
    Target((f"{_UPDATER}.check_weights",), ("self", "recv_req"), checked, optional=True),
    Target((f"{_STREAMER}.__post_init__",), ("self",), streamer_made),
    Target((f"{_STREAMER}.build_additional_customized_info",), ("self", "reqs"), add_to_replies),
    Target((f"{_STATE}.get_internal_state", _OLD_STATE), ("self", "recv_req"), add_to_server_info),
)


def register() -> None:
    """Register the hooks with SGLang's HookRegistry in a scheduler process, all of them or none.

    Environment: MISMATCH_PLUGIN_SGLANG=off registers none; MISMATCH_REQUIRE_CHANGE=N fails an update that changed fewer
    tensors; MISMATCH_SERVER_ID names the server in replies.

    Raises:
        SystemExit: a variable has another value. The server does not start: SGLang would report another exception, and
            serve without what was asked for.
    """
    switch = os.environ.get(SWITCH, "on").lower()
    if switch not in _SWITCH:
        raise SystemExit(f"{SWITCH}={switch!r} is unknown: say on or off.")
    required_change()
    # Importing the scheduler in other processes would cost them time and memory.
    if not _SWITCH[switch] or _SCHEDULER not in sys.modules:
        return
    missing = dict.fromkeys(reason for target in TARGETS if (reason := _missing(target)))  # several hooks may share one
    if missing:
        if re.search(r"(MainProcess|[-:]1)$", multiprocessing.current_process().name):  # one process says it for all
            logger.warning(
                "mismatch_plugin adds nothing: this SGLang (%s) is none that it knows: %s. The server serves as it "
                "would without the plugin; docs/sglang_plugin.md has the versions that were tried.",
                importlib.metadata.version("sglang"),
                "; ".join(missing),
            )
        return
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target in TARGETS:
        if (path := _path(target)) is not None:
            registry.HookRegistry.register(path, harmless(target.hook), registry.HookType[target.when])


def _path(target: Target) -> str | None:
    """The first of the target's paths that exists."""
    for path in target.paths:
        with suppress(ImportError, AttributeError):
            resolve_name(path)
            return path
    return None


def _missing(target: Target) -> str:
    """Why a target cannot be hooked; "" if it can."""
    path = _path(target)
    if path is None:
        return "" if target.optional else f"it has no {target.paths[0]}"
    found = tuple(inspect.signature(resolve_name(path)).parameters)
    if found[: len(target.parameters)] == target.parameters:
        return ""
    return f"{path} takes ({', '.join(found)}), not ({', '.join(target.parameters)})"


def harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which returns None (nothing is changed) from its first exception on.

    Those in which ranks wait for each other (`TOGETHER`) are called again: a rank that stays away would stop all.
    """
    broken = False

    @wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        nonlocal broken
        try:
            return None if broken else hook(*args, **kwargs)
        except Exception:
            broken = hook not in TOGETHER
            logger.exception("mismatch_plugin: its hook %s failed%s", hook.__name__, " and is off" if broken else "")
            return None

    return guarded
