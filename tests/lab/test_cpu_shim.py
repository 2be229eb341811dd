"""The real megatron-core, on CPU, gives the same loss and gradients in every parallel layout as on one process.

This proves the harness of `mismatch_plugin.lab` that other tests build on. Each case trains three steps on the same
eight sequences of uneven length; one launch per number of processes runs all its cases.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import LaunchError, launch
from tests.distributed.megatron_worker import LENGTHS, STEPS, VOCAB, Case, Outcome, refuse, train

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

# Llama-like with zigzag CP, GPT-2-like with contiguous CP; no positions, where only the mask tells tokens apart.
_LLAMA = {"dtype": "float64", "norm_jitter": 0.1}
_GPT = {
    **_LLAMA,
    "position": "learned_absolute",
    "norm": "LayerNorm",
    "activation": "gelu",
    "tied_embeddings": True,
    "cp_layout": "contiguous",
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gpt": _GPT,
    "nopos": {**_LLAMA, "position": "none", "cp_layout": "contiguous"},
    "float32": {**_LLAMA, "dtype": "float32"},
}
# Relative to each tensor's largest entry. float64 shows mistakes that float32's rounding would hide.
_TOLERANCE = {"llama": 1e-12, "gpt": 1e-12, "nopos": 1e-12, "float32": 1e-5}


def _case(layout: str, model: str, microbatches: int, **options: Any) -> Case:
    """`layout` such as "tp2+sp-cp2"; "+zero" is the distributed optimizer. The float32 model also clips gradients."""
    sizes = {part[:2]: int(part[2]) for part in layout.replace("+sp", "").replace("+zero", "").split("-")}
    sizes.pop("dp", None)
    return Case(
        name=" ".join([model, layout, f"{microbatches}mb", *(f"{k}={v}" for k, v in options.items())]),
        microbatches=microbatches,
        distributed_optimizer="+zero" in layout,
        settings={**_MODELS[model], "sequence_parallel": "+sp" in layout},
        optimizer={"clip_grad": 0.5} if model == "float32" else {},
        **sizes,
        **options,
    )


_ONE = [_case("dp1", model, 1) for model in _MODELS] + [_case("dp1", model, 4) for model in ("llama", "float32")]
_TWO = [
    *[_case(layout, "llama", n) for layout in ("tp2", "tp2+sp", "pp2", "cp2", "dp2") for n in (1, 4)],
    *[_case(layout, "gpt", 4) for layout in ("tp2+sp", "pp2", "cp2")],
    *[_case(layout, "float32", 4) for layout in ("tp2+sp", "pp2", "cp2", "dp2", "dp2+zero")],
    _case("cp2", "nopos", 1),
    _case("cp2", "llama", len(LENGTHS), packed=False),
]
_FOUR = [
    *[_case(x, "llama", 4) for x in ("tp2+sp-pp2", "tp2+sp-cp2", "tp2-dp2", "pp2-cp2", "cp2-dp2")],
    *[_case(x, "llama", 1) for x in ("pp2-cp2", "cp4")],
    *[_case(x, "gpt", 4) for x in ("tp2+sp-pp2", "tp2+sp-cp2", "pp2-cp2")],
    _case("cp4", "gpt", 1),
    *[_case(x, "float32", 4) for x in ("tp2+sp-pp2", "tp2+sp-cp2", "tp2+sp-dp2+zero", "pp2-cp2", "cp2-dp2+zero")],
]
_WRONG = _case("cp2", "nopos", 1, cut_layout="zigzag")
_CASES = {1: _ONE, 2: [*_TWO, _WRONG], 4: _FOUR}


class _Runs:
    """What every rank returned for a case. A world size is launched when the first of its cases is asked for."""

    def __init__(self) -> None:
        self.launched: dict[int, list[list[Outcome]] | None] = {}

    def __getitem__(self, case: Case) -> list[Outcome]:
        world_size, cases = next(item for item in _CASES.items() if case in item[1])
        if world_size not in self.launched:
            self.launched[world_size] = None
            self.launched[world_size] = launch(train, cases, world_size)
        outcomes = self.launched[world_size]
        if outcomes is None:
            pytest.fail(f"the launch of {world_size} processes failed, as an earlier test reports", pytrace=False)
        return outcomes[cases.index(case)]


@pytest.fixture(scope="module")
def runs() -> _Runs:
    return _Runs()


def _largest_difference(outcome: Outcome, reference: Outcome) -> float:
    """Over all steps and tensors, relative to the tensor's largest entry."""
    worst = 0.0
    pairs = [*zip(outcome.gradients, reference.gradients, strict=True), (outcome.parameters, reference.parameters)]
    for tensors, expected in pairs:
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.shape == expected[name].shape, name
            worst = max(worst, float((tensor - expected[name]).abs().max() / expected[name].abs().max()))
    return worst


@needs_megatron
@pytest.mark.parametrize("case", [*_ONE[len(_MODELS) :], *_TWO, *_FOUR], ids=lambda case: case.name)
def test_same_as_one_process(case: Case, runs: _Runs) -> None:
    model = case.name.split()[0]
    ranks, reference = runs[case], runs[_case("dp1", model, 1)][0]
    losses = [outcome.losses for outcome in ranks if outcome.losses]

    assert len(losses) == len(ranks) // case.pp
    for each in losses:
        assert each == pytest.approx(reference.losses, rel=1e-6 if model == "float32" else 1e-12)
    assert _largest_difference(ranks[0], reference) < _TOLERANCE[model]
    assert ranks[0].norms == pytest.approx(reference.norms, rel=1e-6)  # megatron computes it in float32
    assert len({outcome.checksum for outcome in ranks}) == 1  # every rank gathered the same, bit by bit


@needs_megatron
def test_reference_is_no_trivial_run(runs: _Runs) -> None:
    for model in _MODELS:
        reference = runs[_case("dp1", model, 1)][0]
        assert len(reference.losses) == STEPS + 1
        assert reference.losses == sorted(reference.losses, reverse=True)
        assert reference.losses[0] > math.log(VOCAB)
        assert all(bool(gradient.any()) for step in reference.gradients for gradient in step.values())
        assert max(reference.norms) > 0.5  # so that the float32 model's gradients are clipped


@needs_megatron
def test_wrong_context_parallel_layout_is_seen(runs: _Runs) -> None:
    assert _largest_difference(runs[_WRONG][0], runs[_case("dp1", "nopos", 1)][0]) > 1e-2


@needs_megatron
def test_refusals() -> None:
    cases = {
        "zigzag layout only": Case("", settings={"cp_layout": "contiguous"}),
        "hidden must be a multiple of heads": Case("", settings={"hidden": 30}),
        "casts gradients to float32": Case("", settings={"dtype": "float64"}, distributed_optimizer=True),
        "tp=2 must divide kv_groups": Case("", tp=2, settings={"kv_groups": 1}),
        "pp=1 the layers": Case("", tp=2, settings={"ffn": 33}),
        "built": Case("", pp=2),
    }
    for said, ranks in zip(cases, launch(refuse, list(cases.values()), 2), strict=True):
        assert all(said in error for error in ranks), ranks


def _misbehave(case: str) -> float:
    if dist.get_rank() == 1:
        if case == "raise":
            raise ValueError("as told")
        if case == "die":
            os._exit(7)
        if case == "hang":
            time.sleep(60)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise", ["rank 1, in case 1, 'raise'", "ValueError: as told", "rank 0, in case 1"]),
        ("die", ["exit code 7"]),
        ("hang", ["no progress for 2 s", "rank 0, in case 1, 'hang'", "all_reduce", "in _misbehave"]),
    ],
)
def test_launch_tells_what_every_rank_did(last: str, said: list[str]) -> None:
    assert launch(_misbehave, ["work", "work"], 2) == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(LaunchError) as error:
        launch(_misbehave, ["work", last], 2, timeout=2.0)
    for words in said:
        assert words in str(error.value)
