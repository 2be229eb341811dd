"""Planted faults are named and clean pairs are not; a model of transformers stands for the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mismatch_plugin.bisect.engines import Engine, Trainer
from mismatch_plugin.bisect.verdict import Verdict, bisect
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.modules import Capture, pack, record, unpack
from tests.bisect.plants import FAMILIES, FAULTS, IDS, Family, tiny, trainer_of

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def fused(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{FUSED[leaf]}" if leaf in FUSED else name


def served(trainer: Trainer, dtype: torch.dtype = torch.float32) -> Capture:
    """What a server with this model tells, through the form in which it is sent: it fuses."""
    own = record(trainer.model, IDS, trainer.call, dtype)
    found = Capture(IDS, {}, {}, own.log_probs)
    parts: dict[str, list[str]] = {}
    for name in own.modules:
        parts.setdefault(fused(name), []).append(name)
    for whole, names in parts.items():
        leaves = own.modules[names[0]]
        found.modules[whole] = {leaf: sum(own.modules[name][leaf] for name in names) % 2**64 for leaf in leaves}
    by_place = sorted(
        own.values, key=lambda tap: tap[0].endswith(("k_proj", "up_proj")) + 2 * tap[0].endswith("v_proj")
    )
    outputs = {
        name: [own.values[tap] for tap in by_place if fused(tap[0]) == name and tap[1] == "output"] for name in parts
    }
    for (name, which), value in own.values.items():
        joined = which == "output" and name in own.modules
        found.values.setdefault((fused(name), which), torch.cat(outputs[fused(name)], -1) if joined else value)
    found.values = unpack(pack(found.values))
    return found


def verdict(family: Family, change: Callable[[Any], None], seed: int = 0) -> Verdict:
    model = tiny(family, seed)
    change(model)
    return bisect(trainer_of(model), served(trainer_of(tiny(family, seed))), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_are_named_and_explain_the_gap(family: Family) -> None:
    faults = {name: fault for name, fault in FAULTS.items() if family in fault.families}
    assert len(faults) == 12
    for name, fault in faults.items():
        found = verdict(family, fault.plant)
        first = found.first
        assert first is not None, name
        assert (first.module, first.which) == (fault.module, fault.which), name
        assert fault.says in f"{first.what} {first.why}", name
        assert first.ratio > 10 * first.allowed and first.ulp > 8, name
        assert found.explained > 0.9 and found.gap > 0, name
        assert sum(step.part or 0 for step in found.jumps) == pytest.approx(found.explained), name
        if name not in ("RoPE base", "gate and up"):  # of all layers, of two modules
            assert len(found.jumps) == 1 and first.part is not None and first.part > 0.9, name


def _exact(model: Any) -> None:
    """Each product of matrices is summed in float64 and rounded once, as kernels of another order might."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bias = module.bias

            def forward(input: Tensor, weight: Tensor = module.weight, bias: Tensor | None = bias) -> Tensor:
                wide = F.linear(input.double(), weight.double(), None if bias is None else bias.double())
                return wide.to(input.dtype)

            module.forward = forward


def _eager(model: Any) -> None:
    model.config._attn_implementation = "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_pairs_are_silent(family: Family, dtype: torch.dtype) -> None:
    """24 pairs: other orders of additions, another attention, and routers whose experts nearly tie."""
    differ = 0
    for seed in (1, 2):
        for kernels in (_exact, _eager):
            other = tiny(family, seed)
            kernels(other)
            theirs = served(trainer_of(other, dtype), dtype)
            found = bisect(trainer_of(tiny(family, seed), dtype), theirs, dtype)
            assert not found.jumps, (seed, kernels, found.jumps)
            assert found.watched > 50 and not (found.unpaired and kernels is _exact)
            assert found.largest[0].ratio < found.largest[0].allowed / 2
            differ += found.largest[0].ratio > 0
    assert differ


def test_other_weights_are_refused() -> None:
    with pytest.raises(InputError, match=r"14 of 21 modules have other weights .* model\.embed_tokens among them"):
        bisect(trainer_of(tiny("llama", 1)), served(trainer_of(tiny("llama", 0))), torch.float32)


def test_weights_of_one_module_that_did_not_arrive() -> None:
    def change(model: Any) -> None:
        model.model.layers[2].mlp.down_proj.weight.data[3, 5] += 0.5

    found = verdict("qwen3", change)
    assert found.first is not None and found.first.module == "model.layers.2.mlp.down_proj"
    assert found.first.why == "other values in its weight" and found.explained > 0.9


def test_other_experts_that_nearly_tie_are_no_fault_and_others_are() -> None:
    """Of two experts with the same router weights either may be chosen; the model computes something else then."""
    model = tiny("qwen3_moe", 0)
    gate = model.model.layers[1].mlp.gate
    gate.weight.data[5] = gate.weight.data[2]
    theirs = served(trainer_of(model))
    call = gate.forward

    def forward(hidden: Tensor, first: int = 2, second: int = 5) -> Any:
        logits, shares, ids = call(hidden)
        return logits, shares, torch.where(ids == first, second, torch.where(ids == second, first, ids))

    gate.forward = forward
    found = bisect(trainer_of(model), theirs, torch.float32)
    assert found.gap > 1e-3 and not found.jumps
    gate.forward = lambda hidden: forward(hidden, 2, 3)
    first = bisect(trainer_of(model), theirs, torch.float32).first
    assert first is not None and (first.module, first.which) == ("model.layers.1.mlp.experts", "routing")


def test_numbers_that_are_not_finite_are_a_difference() -> None:
    def change(model: Any) -> None:
        norm = model.model.layers[1].input_layernorm
        norm.forward = lambda hidden: hidden / 0 * 0

    found = verdict("llama", change)
    assert found.first is not None and found.first.module == "model.layers.1.input_layernorm"


class Told(Engine):
    """Says of itself what the test gives it."""

    def __init__(self, info: dict[str, Any], reply: dict[str, Any] | None = None) -> None:
        super().__init__("http://127.0.0.1:1")
        self._replies = {"/server_info": {"internal_states": [{"mismatch_plugin": info}] if info else []}}
        self._replies["/generate"] = [{"meta_info": reply or {}}]  # type: ignore[assignment]

    def _ask(self, method: str, path: str, body: Any) -> Any:
        return self._replies[path]


@pytest.mark.parametrize(
    ("info", "reply", "says"),
    [
        ({}, None, "runs without this plugin"),
        ({"tp_size": 2}, None, "tp_size 2: under tensor parallelism each rank holds a part"),
        ({"pp_size": 4}, None, "pp_size 4"),
        ({"quantization": "fp8"}, None, "serves with quantization fp8"),
        ({"tp_size": 1}, {}, "the plugin there is too old, or off"),
        ({"tp_size": 1}, {"mismatch_taps": [{"error": "requests of others"}]}, "cannot be watched: requests of others"),
    ],
)
def test_servers_that_cannot_be_watched_are_refused(info: dict[str, Any], reply: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Told(info, reply).facts()
    with pytest.raises(InputError, match="does not answer"):
        Engine("http://127.0.0.1:1").facts()
