"""What the entry point refuses, what each hook asks, and what a request is told of modules: SGLang is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mismatch_plugin.sglang.modules import HEAD, TAPS_KEY, describe, row_hashes, unpack
from mismatch_plugin.sglang.plugin import register
from mismatch_plugin.sglang.plugin.taps import Taps
from tests.bisect.plants import IDS, tiny

hooks: Any = sys.modules["mismatch_plugin.sglang.plugin.register"]
SWITCH, REQUIRE = "MISMATCH_PLUGIN_SGLANG", "MISMATCH_REQUIRE_CHANGE"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (SWITCH, "of", "MISMATCH_PLUGIN_SGLANG='of' is unknown: say on or off"),
        (REQUIRE, "all", "MISMATCH_REQUIRE_CHANGE='all' must be a number of tensors"),
        (SWITCH, "OFF", ""),
    ],
)
def test_settings_end_the_server_or_turn_the_plugin_off(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    """SGLang reports another exception of a plugin and goes on, so that the guard would be lost."""
    monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, hooks._SCHEDULER, None)
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
    ],
)
def test_functions_of_sglang_that_are_missing_or_other(paths: Any, parameters: Any, optional: bool, reason: str):
    found = hooks._missing(hooks.Target(paths, parameters, hooks.loaded, optional=optional))
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
    guarded = hooks.harmless(hook)
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


# Of a model's modules; a model of transformers stands for SGLang's ----------------------------------------------------


NORM = "model.layers.1.input_layernorm"


def request(**asked: str) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params={TAPS_KEY: asked} if asked else None))


def compute(taps: Taps, model: Any, reqs: list[Any], ids: list[int], rows: list[int] | None = None) -> None:
    mode = SimpleNamespace(is_extend=lambda: rows is not None)
    batch = SimpleNamespace(reqs=reqs, forward_mode=mode, extend_lens=rows)
    taps.before_batch(batch)
    with torch.no_grad():
        model(torch.tensor([ids]), **({} if isinstance(model, nn.Identity) else {"use_cache": False}))
    taps.after_batch(batch)


def taps_of(model: Any) -> Taps:
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return Taps(SimpleNamespace(tp_worker=runner, model_config=model.config))


def test_each_request_gets_its_rows_of_each_pass() -> None:
    model = tiny("llama", 0)
    taps, whole = taps_of(model), request(modules="", form="values")
    one, two = request(form="hashes"), request(form="hashes")
    compute(taps, model, [one, two], IDS, [30, 18])
    compute(taps, model, [two, one], IDS[:2])
    three = request(form="values", modules=NORM)
    compute(taps, model, [three], IDS, [48])
    (name,) = {tap[0] for tap in unpack(taps.reply(three)["values"])}  # type: ignore[index]
    values = unpack(taps.reply(three)["values"])[NORM, "output"]  # type: ignore[index]
    assert name == NORM and values.shape == (48, 64)
    first, second = taps.reply(one), taps.reply(two)
    assert first is not None and second is not None and first["vocab"] == 256
    assert (first["forwards"], second["forwards"]) == ([[30, 2], [1, 2]], [[18, 2], [1, 2]])
    at = first["taps"].index([NORM, "output"])
    assert first["hashes"][at][:30] + second["hashes"][at][:18] == row_hashes(values)
    assert [len(told["hashes"][at]) for told in (first, second)] == [31, 19]
    compute(taps, model, [whole], IDS, [48])
    told = taps.reply(whole)
    assert told is not None and unpack(told["values"]) == {} and [HEAD, "output"] in told["taps"]
    asked = request(form="values")
    compute(taps, model, [asked], IDS, [48])
    assert unpack((taps.reply(asked) or {})["modules"]) == describe(model)


def test_nothing_stays_on_the_model_and_nobody_else_is_told() -> None:
    model = tiny("llama", 0)
    taps, mine, other = taps_of(model), request(form="hashes"), request()
    compute(taps, model, [mine, other], IDS, [30, 18])
    assert taps.reply(other) is None and "requests of others" in (taps.reply(mine) or {})["error"]
    unseen = request(form="hashes")
    assert taps.reply(unseen) == {"error": "it ended before it was computed"}
    compute(taps, nn.Identity(), [unseen], IDS, [48])  # as a CUDA graph runs no Python
    assert "disable-cuda-graph" in (taps.reply(unseen) or {})["error"]
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_module_that_cannot_be_watched_does_not_stop_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mine = tiny("llama", 0), request(form="hashes")
    taps = taps_of(model)

    def broken(self: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("mismatch_plugin.sglang.modules.View.read", broken)
    compute(taps, model, [mine], IDS, [48])
    assert "could not be watched" in (taps.reply(mine) or {})["error"] and isinstance(model, nn.Module)
