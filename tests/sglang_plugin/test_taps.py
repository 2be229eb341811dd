"""What a request that asks for it is told of the model's modules; a model of transformers stands for SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mismatch_plugin.sglang.modules import HEAD, TAPS_KEY, describe, row_hashes, unpack
from mismatch_plugin.sglang.plugin.taps import Taps
from tests.bisect.plants import IDS, tiny

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
