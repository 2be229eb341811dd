"""Planted faults are named and clean pairs are not; a model of transformers stands for the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mismatch_plugin.bisect.engines import Engine, Trainer, from_megatron
from mismatch_plugin.bisect.verdict import Verdict, bisect
from mismatch_plugin.data.read import InputError
from mismatch_plugin.sglang.modules import Capture, pack, unpack
from tests.bisect.plants import DENSE, FAMILIES, FAULTS, IDS, MEGATRON_FAULTS, VOCAB, Family, tiny, trainer_of

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def served(trainer: Trainer, dtype: torch.dtype = torch.float32) -> Capture:
    """What a server with this model tells, through the form in which it is sent: it fuses."""
    own = trainer.capture(IDS, dtype)
    found = Capture(IDS, {}, {}, own.log_probs)
    for name, weights in own.modules.items():
        whole = found.modules.setdefault(fused(name), {})
        whole |= {leaf: (whole.get(leaf, 0) + value) % 2**64 for leaf, value in weights.items()}
    for name, which in own.values:
        stem = name.rpartition(".")[0]
        parts = [
            tap for leaf in PARTS if (tap := (f"{stem}.{leaf}", which)) in own.values and fused(tap[0]) == fused(name)
        ]
        joined = which == "output" and fused(name) != name
        value = torch.cat([own.values[tap] for tap in parts], -1) if joined else own.values[name, which]
        found.values.setdefault((fused(name), which), value)
    found.values = unpack(pack(found.values))
    return found


def fused(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{FUSED[leaf]}" if leaf in FUSED else name


def megatron(family: Family) -> Trainer:
    return from_megatron("tests.bisect.plants:build", Path(family), torch.float32, VOCAB)


def verdict(family: Family, change: Callable[[Any], None], seed: int = 0) -> Verdict:
    model = tiny(family, seed)
    change(model)
    return bisect(trainer_of(model), served(trainer_of(tiny(family, seed))), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_are_named_and_explain_the_gap(family: Family) -> None:
    theirs = served(trainer_of(tiny(family, 0)))
    ours = [fault for fault in FAULTS.values() if family in fault.families]
    assert len(ours) == 12
    megatrons = [fault for fault in MEGATRON_FAULTS.values() if family in fault.families]
    for fault in [*ours, *megatrons]:
        trainer = trainer_of(tiny(family, 0)) if fault in ours else megatron(family)
        fault.plant(trainer.model)
        found = bisect(trainer, theirs, torch.float32)
        first = found.jumps[0]
        assert (first.module, first.which) == (fault.module, fault.which), fault
        assert fault.says in f"{first.what} {first.why}" and first.ratio > 10 * first.allowed, fault
        assert found.explained > 0.9 and found.gap > 0, fault
        assert sum(step.part or 0 for step in found.jumps) == pytest.approx(found.explained), fault
        if fault.says not in ("RoPE", "gate and up", "choice of experts"):  # of all layers, of two modules
            assert len(found.jumps) == 1 and first.part is not None and first.part > 0.9, fault


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_megatron_pairs_are_silent(family: Family, dtype: torch.dtype) -> None:
    """Also where its vocabulary is padded."""
    theirs = served(trainer_of(tiny(family, 0), dtype), dtype)
    trainer = from_megatron("tests.bisect.plants:build", Path(family), dtype, VOCAB)
    head: Any = trainer.model.output_layer
    if family not in DENSE:
        head.weight = nn.Parameter(F.pad(head.weight, (0, 0, 0, 64)))
    found = bisect(trainer, theirs, dtype)
    assert not found.jumps and not found.unpaired and found.watched > 45
    assert 0 < found.largest[0].ratio < found.largest[0].allowed / 2
