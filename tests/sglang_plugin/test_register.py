"""What the entry point refuses, and which functions of SGLang's it may do without."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mismatch_plugin.sglang_plugin import hooks, register


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


module: Any = sys.modules["mismatch_plugin.sglang_plugin.register"]


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
    assert {hooks.session_begun, hooks.session_ended, hooks.updated, hooks.loaded} <= {*hooks.TOGETHER}
