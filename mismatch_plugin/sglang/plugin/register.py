"""The entry point: which functions of SGLang are hooked, and what is done where one of them is not as expected.

Each hook is called after (or before) SGLang's own function and adds to what it returns. One that raises is reported
and, unless ranks wait for each other in it, switched off; the server goes on as it would without it.
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

from mismatch_plugin.sglang.plugin import hooks

logger = logging.getLogger("mismatch_plugin")
SWITCH = "MISMATCH_PLUGIN_SGLANG"
_SWITCH = {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}
_SCHEDULER, _PARTS = "sglang.srt.managers.scheduler", "sglang.srt.managers.scheduler_components"
_UPDATER = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = f"{_PARTS}.output_streamer.SchedulerOutputStreamer"
_STATE = f"{_PARTS}.internal_state.SchedulerInternalStateController"
_OLD_STATE = f"{_SCHEDULER}.Scheduler.get_internal_state"


class Target(NamedTuple):
    """A function of SGLang's. path: or several, of which the first that exists counts: versions differ. parameters: the
    first ones of its signature. optional: an SGLang without it is one that the plugin knows."""

    paths: tuple[str, ...]
    parameters: tuple[str, ...]
    hook: Callable[..., Any]
    when: str = "AFTER"
    optional: bool = False


TARGETS = (
    Target((f"{_SCHEDULER}.Scheduler.__init__",), ("self", "server_args"), hooks.loaded),
    Target((f"{_SCHEDULER}.Scheduler.run_batch",), ("self", "batch"), hooks.before_batch, "BEFORE"),
    Target((f"{_SCHEDULER}.Scheduler.run_batch",), ("self", "batch"), hooks.watch_batch, "BEFORE"),
    Target((f"{_SCHEDULER}.Scheduler.run_batch",), ("self", "batch"), hooks.watched_batch),
    Target((f"{_SCHEDULER}.Scheduler.flush_cache",), ("self",), hooks.flushed),
    Target((f"{_UPDATER}.update_weights_from_disk",), ("self", "recv_req"), hooks.updated),
    Target((f"{_UPDATER}.update_weights_from_ipc",), ("self", "recv_req"), hooks.updated),
    Target((f"{_UPDATER}.begin_weight_update",), ("self", "recv_req"), hooks.session_begun),
    Target((f"{_UPDATER}.end_weight_update",), ("self", "recv_req"), hooks.session_ended),
    Target((f"{_UPDATER}.resume_memory_occupation",), ("self", "recv_req"), hooks.resumed, optional=True),
    Target((f"{_UPDATER}.check_weights",), ("self", "recv_req"), hooks.checked, optional=True),
    Target((f"{_STREAMER}.__post_init__",), ("self",), hooks.streamer_made),
    Target((f"{_STREAMER}.build_additional_customized_info",), ("self", "reqs"), hooks.add_to_replies),
    Target((f"{_STATE}.get_internal_state", _OLD_STATE), ("self", "recv_req"), hooks.add_to_server_info),
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
    hooks.required_change()
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

    Those in which ranks wait for each other (`hooks.TOGETHER`) are called again: a rank that stays away would stop all.
    """
    broken = False

    @wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        nonlocal broken
        try:
            return None if broken else hook(*args, **kwargs)
        except Exception:
            broken = hook not in hooks.TOGETHER
            logger.exception("mismatch_plugin: its hook %s failed%s", hook.__name__, " and is off" if broken else "")
            return None

    return guarded
