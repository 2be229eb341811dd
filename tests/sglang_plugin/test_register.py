"""What the entry point refuses, and which functions of SGLang's it may do without."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_plugin.sglang.plugin import hooks, register


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MISMATCH_PLUGIN_SGLANG", "of", "say on or off"),
        ("MISMATCH_REQUIRE_CHANGE", "all", "must be a number of tensors"),
        ("MISMATCH_REQUIRE_CHANGE", "-1", "must be a number of tensors"),
        ("MISMATCH_REQUIRE_CHANGE", "1e9", "must be a number of tensors"),
    ],
)
def test_a_setting_that_is_none_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    """SGLang reports an exception of a plugin and goes on, so that the guard would be lost."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=says) as ended:
        register()
    assert name in str(ended.value) and value in str(ended.value)


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false"])
def test_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MISMATCH_PLUGIN_SGLANG", value)
    monkeypatch.setitem(sys.modules, module._SCHEDULER, None)
    register()  # looks at nothing of SGLang's


module: Any = sys.modules["mismatch_plugin.sglang.plugin.register"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (module.Target(("json.dumps",), ("obj",), hooks.loaded), ""),
        (module.Target(("json.nothing", "json.dumps"), ("obj",), hooks.loaded), ""),
        (module.Target(("json.nothing",), ("obj",), hooks.loaded), "it has no json.nothing"),
        (module.Target(("json.nothing",), ("obj",), hooks.loaded, optional=True), ""),
        (module.Target(("json.dumps",), ("self",), hooks.loaded), "json.dumps takes (obj"),
        (module.Target(("json.dumps",), ("self",), hooks.loaded, optional=True), "json.dumps takes (obj"),
    ],
)
def test_what_is_missing(target: Any, reason: str) -> None:
    found = module._missing(target)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_hook_that_raises_is_off_unless_ranks_wait_in_it() -> None:
    runs: list[str] = []

    def broken(result: Any) -> None:
        runs.append("broken")
        raise RuntimeError("planted")

    guarded = module.harmless(broken)
    assert guarded(1) is None and guarded(1) is None and runs == ["broken"]


class Broken:
    """A state that fails in every hook."""

    def __init__(self) -> None:
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        self.runs += 1
        raise RuntimeError("planted")


@pytest.mark.parametrize(
    "hook", [hooks.session_begun, hooks.session_ended, hooks.updated, hooks.resumed, hooks.checked]
)
def test_a_hook_in_which_ranks_wait_is_tried_again(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    state = Broken()
    monkeypatch.setattr(hooks, "_state", state)
    guarded = module.harmless(hook)
    result = SimpleNamespace(success=True)
    order = SimpleNamespace(selector="all", tags=None, action="reset_tensors")
    for runs in (1, 2):
        assert guarded(result, None, order) is None and state.runs == runs


class Recorder:
    """A state that tells what was asked of it."""

    under_way = False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def begin(self) -> None:
        self.asked.append("begin")

    def end(self, required: int, success: bool = True) -> str:
        self.asked.append(("end", required, success))
        return "too little" if required else ""

    def changed(self, what: str) -> None:
        self.asked.append(what)


def test_what_each_hook_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Recorder()
    monkeypatch.setattr(hooks, "_state", state)
    done, failed = SimpleNamespace(success=True, message=""), SimpleNamespace(success=False, message="theirs")
    hooks.session_begun(done, None, SimpleNamespace(selector="draft"))
    hooks.session_begun(failed, None, SimpleNamespace(selector="all"))
    hooks.session_ended(done, None, None)  # of a draft alone
    assert state.asked == []
    hooks.session_begun(done, None, SimpleNamespace(selector="target"))
    state.under_way = True
    assert hooks.updated(done, None, None) is None  # inside a session, whose end tells
    assert hooks.session_ended(done, None, None) is None
    assert state.asked == ["begin", ("end", 0, True)]
    state.under_way, state.asked = False, []
    monkeypatch.setenv("MISMATCH_REQUIRE_CHANGE", "2")
    assert hooks.updated(failed, None, None) is None and failed.message == "theirs"
    told = hooks.updated(done, None, None)
    assert (told.success, told.message) == (False, "too little")
    assert state.asked == [("end", 2, False), ("end", 2, True)]
    state.asked = []
    for tags in (None, [], ["weights", "kv_cache"], ["kv_cache"]):
        hooks.resumed(None, None, SimpleNamespace(tags=tags))
    for action, selector in (("reset_tensors", "all"), ("reset_tensors", "draft"), ("checksum", "all")):
        hooks.checked(None, None, SimpleNamespace(action=action, selector=selector))
    assert state.asked == ["resumed"] * 3 + ["reset"]
