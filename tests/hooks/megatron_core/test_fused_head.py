"""`--mismatch-fused-head`: tied embeddings and experts in every kind of layout, no logits anywhere, what is refused.

That untied models give the same in all layouts and with all settings is in `test_adapter.py`.
"""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from examples.benchmarks.counting import OperationCounter
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.distributed.hook_worker import (
    VOCAB,
    Layout,
    Outcome,
    Run,
    initial_log_probs,
    micro_batches,
    model_settings,
    run_layout,
    run_plainly,
)
from tests.distributed.launch import launch
from tests.hooks.megatron_core.test_adapter import compare, rescored, samples

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
FLAG = "--mismatch-fused-head"
CONFIG: dict[str, Any] = {
    "fused_head": True,
    "use_tis": True,
    "tis": {"level": "sequence", "upper_bound": 1.3},
    "terms": {"entropy_coef": 0.01},
    "metrics": "full",
}
TIED, EXPERTS = {"tied_embeddings": True}, {"experts": 4}
LAYOUTS = [
    Layout("tied", settings=TIED),
    Layout("tied tp2", tp=2, settings=TIED),
    Layout("tied tp2+sp", tp=2, settings={**TIED, "sequence_parallel": True}),
    Layout("tied pp2", pp=2, settings=TIED),
    Layout("tied cp2", cp=2, settings=TIED),
    Layout("tied dp2", dp=2, settings=TIED),
    Layout("tied pp2 interleaved", pp=2, settings={**TIED, "virtual_stages": 2, "layers": 4}),
    Layout("experts tp2+sp", tp=2, settings={**EXPERTS, "sequence_parallel": True}),
]


@cache
def data(settings: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    """The samples with log-probs near those of the model with these settings."""
    layout = Layout("own", samples=samples(), settings=dict(settings))
    own = launch(initial_log_probs, [layout], 1)[0][0]
    generator = torch.Generator().manual_seed(3)

    def near(values: torch.Tensor, scale: float) -> torch.Tensor:
        return (values + scale * torch.randn(values.shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)

    return tuple(rescored(sample, values, near) for sample, values in zip(layout.samples, own, strict=True))


def alone(layout: Layout) -> Layout:
    """The same model in one process."""
    model = {k: v for k, v in layout.settings.items() if k not in ("sequence_parallel", "virtual_stages")}
    return Layout("alone", settings=model, samples=data(tuple(sorted(model.items()))))


RUNS = (Run(CONFIG, 4), Run({**CONFIG, "metrics": "basic"}, 2, "bshd"))


@cache
def outcomes(world: int) -> dict[str, list[list[Outcome]]]:
    layouts = [replace(x, samples=alone(x).samples, runs=RUNS) for x in LAYOUTS if x.world == world]
    return {x.name: ranks for x, ranks in zip(layouts, launch(run_layout, layouts, world), strict=True)}


@needs_megatron
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tied_embeddings_and_experts_give_the_same_as_whole_logits_in_one_process(layout: Layout) -> None:
    expected = launch(run_plainly, [replace(alone(layout), runs=RUNS)], 1)[0][0]
    for number, run in enumerate(RUNS):
        got = [rank[number] for rank in outcomes(layout.world)[layout.name]]
        compare(got, expected[number], 1e-7, str(run))


def largest_tensors(layout: Layout) -> dict[bool, int]:
    """Fused or not → elements of the largest tensor made in a step of the hook."""
    from tests import megatron_cpu as megatron

    megatron.initialize_parallel()
    settings = model_settings(layout)
    model = megatron.build_model(settings)
    groups, found = ParallelGroups.from_megatron(), {}
    finalize = model[0].config.finalize_model_grads_func
    for fused in (False, True):
        model[0].config.finalize_model_grads_func = finalize
        run = Run({**CONFIG, "fused_head": fused}, form="bshd")  # attention over one long row is larger yet
        batches = micro_batches(layout, run, groups, settings, 0, 1)
        hook = MegatronLoss(mp.MismatchConfig.build(run.config), model[0].config, groups, vocab_size=VOCAB)
        hook.start(batches)
        with OperationCounter() as counter:
            megatron.run_step(model, hook.forward_step, iter(batches), len(batches))
        found[fused] = counter.largest
    return found


@needs_megatron
def test_no_tensor_of_a_step_has_the_size_of_the_logits() -> None:
    """240 sequences of 12 tokens: logits of one chunk stay below them, and so does everything else."""
    vocab, settings = 4096, {"vocab": 4096, "dtype": "float32"}
    sample = samples()[0].replace(rollout_log_probs=[-1.0] * 9, train_log_probs=[-1.0] * 9, kept_ids=None)
    layout = Layout("large", settings=settings, samples=(sample,) * 240)
    tokens = 240 * len([*sample.prompt_ids, *sample.response_ids])
    (found,) = launch(largest_tensors, [layout], 1)[0]
    assert found[False] >= tokens * vocab
    assert found[True] <= 2**22 + vocab  # a chunk's logits on CPU


def hook_of(line: str, **model: Any) -> MegatronLoss:
    config = mp.MismatchConfig.from_args(mp.add_arguments(ArgumentParser()).parse_args(line.split()))
    fields = {"calculate_per_token_loss": True, "finalize_model_grads_func": None, **model}
    return MegatronLoss(config, SimpleNamespace(**fields), ParallelGroups())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"mtp_num_layers": 1}, "MTP gives the head other hidden states"),
        ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute"),
        ({"use_mup": True}, "use_mup changes the logits after the head"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping changes the logits after the head"),
    ],
)
def test_a_model_that_needs_its_logits_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"{FLAG} cannot be exact here \({message}.*: leave it out"):
        hook_of(FLAG, **model)
    hook_of("", **model)


def test_backends_that_read_logits_are_refused() -> None:
    for backend in ("megatron", "transformer-engine"):
        with pytest.raises(ValueError, match=rf"{FLAG} .*--mismatch-log-prob-backend {backend}"):
            hook_of(f"{FLAG} --mismatch-log-prob-backend {backend}")


@needs_megatron
def test_another_head_is_refused() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from mismatch_plugin.hooks.megatron_core.model import hidden_states

    class Scaled(ColumnParallelLinear):
        pass

    heads = {
        "is a Linear": torch.nn.Linear(2, 3, bias=False),
        "has a bias": torch.nn.Linear(2, 3),
        "is a Scaled": Scaled.__new__(Scaled),
        "is a NoneType": None,
    }
    for message, head in heads.items():
        model = SimpleNamespace(post_process=True, output_layer=head)
        with pytest.raises(ValueError, match=f"this one {message}: leave it out"), hidden_states(model, []):
            pass


def test_the_start_block_says_it() -> None:
    assert "log-probs from hidden states: logits are never whole" in hook_of(FLAG).config.describe()
    assert "hidden states" not in hook_of("").config.describe()
