"""What the entry point refuses, what each hook asks, and what happens where one fails: SGLang is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_plugin.sglang.plugin import hooks, register

module: Any = sys.modules["mismatch_plugin.sglang.plugin.register"]
SWITCH, REQUIRE = "MISMATCH_PLUGIN_SGLANG", "MISMATCH_REQUIRE_CHANGE"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (SWITCH, "of", "MISMATCH_PLUGIN_SGLANG='of' is unknown: say on or off"),
        (REQUIRE, "all", "MISMATCH_REQUIRE_CHANGE='all' must be a number of tensors"),
        (REQUIRE, "-1", "MISMATCH_REQUIRE_CHANGE='-1' must be a number of tensors"),
        (SWITCH, "OFF", ""),
        (SWITCH, "0", ""),
    ],
)
def test_settings_end_the_server_or_turn_the_plugin_off(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    """SGLang reports another exception of a plugin and goes on, so that the guard would be lost."""
    monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, module._SCHEDULER, None)
    if says:
        with pytest.raises(SystemExit, match=says):
            register()
    else:
        register()  # looks at nothing of SGLang's


@pytest.mark.parametrize(
    ("paths", "parameters", "optional", "reason"),
    [
        (("json.dumps",), ("obj",), False, ""),
        (("json.nothing", "json.dumps"), ("obj",), False, ""),
        (("json.nothing",), ("obj",), False, "it has no json.nothing"),
        (("json.nothing",), ("obj",), True, ""),
        (("json.dumps",), ("self",), False, "json.dumps takes (obj"),
        (("json.dumps",), ("self",), True, "json.dumps takes (obj"),
    ],
)
def test_functions_of_sglang_that_are_missing_or_other(paths: Any, parameters: Any, optional: bool, reason: str):
    found = module._missing(module.Target(paths, parameters, hooks.loaded, optional=optional))
    assert found.startswith(reason) and bool(found) == bool(reason)


class State:
    """Tells what was asked of it. broken: it raises after that."""

    def __init__(self, broken: bool = False) -> None:
        self.under_way, self.broken = False, broken
        self.asked: list[Any] = []
        self.cache = SimpleNamespace(flushed=lambda: self._note("flushed"))

    def _note(self, what: Any) -> None:
        self.asked.append(what)
        if self.broken:
            raise RuntimeError("planted")

    def begin(self) -> None:
        self._note("begin")

    def end(self, required: int, success: bool = True) -> str:
        self._note(("end", required, success))
        return "too little" if required else ""

    def changed(self, what: str) -> None:
        self._note(what)


@pytest.mark.parametrize(
    ("hook", "tried"),
    [(hooks.session_begun, 2), (hooks.updated, 2), (hooks.resumed, 2), (hooks.checked, 2), (hooks.flushed, 1)],
)
def test_a_hook_that_raises_is_off_unless_ranks_wait_in_it(monkeypatch: pytest.MonkeyPatch, hook: Any, tried: int):
    state = State(broken=True)
    monkeypatch.setattr(hooks, "_state", state)
    guarded = module.harmless(hook)
    order = SimpleNamespace(selector="all", tags=None, action="reset_tensors")
    for _ in range(2):
        assert guarded(SimpleNamespace(success=True), None, order) is None
    assert len(state.asked) == tried


DONE, FAILED = SimpleNamespace(success=True), SimpleNamespace(success=False)


@pytest.mark.parametrize(
    ("hook", "result", "order", "asked"),
    [
        (hooks.session_begun, DONE, {"selector": "draft"}, []),
        (hooks.session_begun, FAILED, {"selector": "all"}, []),
        (hooks.session_begun, DONE, {"selector": "target"}, ["begin"]),
        (hooks.session_ended, DONE, {}, []),  # none was under way
        (hooks.updated, DONE, {}, [("end", 0, True)]),
        (hooks.updated, FAILED, {}, [("end", 0, False)]),
        (hooks.resumed, None, {"tags": None}, ["resumed"]),
        (hooks.resumed, None, {"tags": ["weights", "kv_cache"]}, ["resumed"]),
        (hooks.resumed, None, {"tags": ["kv_cache"]}, []),
        (hooks.checked, None, {"action": "reset_tensors", "selector": "all"}, ["reset"]),
        (hooks.checked, None, {"action": "reset_tensors", "selector": "draft"}, []),
        (hooks.checked, None, {"action": "checksum", "selector": "all"}, []),
        (hooks.flushed, True, {}, ["flushed"]),
        (hooks.flushed, False, {}, []),
    ],
)
def test_what_each_hook_asks(monkeypatch: pytest.MonkeyPatch, hook: Any, result: Any, order: Any, asked: Any) -> None:
    monkeypatch.setattr(hooks, "_state", state := State())
    assert hook(result, None, SimpleNamespace(**order)) is None and state.asked == asked


def test_too_small_a_change_fails_an_update_that_sglang_calls_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_state", state := State())
    monkeypatch.setenv(REQUIRE, "2")
    done, failed = (SimpleNamespace(success=success, message="theirs") for success in (True, False))
    assert hooks.updated(failed, None, None) is None and failed.message == "theirs"
    told = hooks.updated(done, None, None)
    assert (told.success, told.message) == (False, "too little")
    state.under_way = True  # inside a session its end tells
    assert hooks.updated(SimpleNamespace(success=True), None, None) is None
    told = hooks.session_ended(SimpleNamespace(success=True, message=""), None, None)
    assert (told.success, told.message) == (False, "too little")
    assert state.asked == [("end", 2, False), ("end", 2, True), ("end", 2, True)]
