"""Benchmark: how much of a whole megatron-core train step the loss hook takes."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.correction_cases import SETTINGS
from examples.benchmarks.machine import Case, measure
from examples.benchmarks.results import MEASURED, Row, Section

NOTES = [
    "One step of megatron's schedule on one process: forward, backward, gradients finalised; the optimizer is not "
    "stepped. The share of a loss is what it adds to the same step with the plain sum of the logits as loss.",
    "Correction alone: policy_loss, forward and backward, from log-probs that are there. The rest of the hook is "
    "log-probs from logits.",
    "The smaller the model, the larger the share: the output layer here is far from as thin as in a large model "
    "(scaling has the formula).",
]


def section(device: torch.device, quick: bool, repeats: int, _: object) -> Section:
    """The hook, megatron-core's own loss, and none."""
    title = "The hook's share of a train step"
    if importlib.util.find_spec("megatron") is None:
        row: Row = {"name": "mismatch_plugin hook", "status": "megatron-core is not installed"}
        return Section("hook_share", title, [row], {}, NOTES)
    from examples.benchmarks.workers import megatron_groups
    from mismatch_plugin.hooks.megatron_core import MegatronLoss
    from mismatch_plugin.hooks.megatron_core.batch import make_batch
    from mismatch_plugin.lab.model import ModelSettings, build_model, run_step
    from mismatch_plugin.parallel.groups import ParallelGroups

    megatron_groups()
    small = {"layers": 1, "hidden": 32, "heads": 2, "kv_groups": 1, "ffn": 64, "vocab": 128}
    large = {"layers": 4, "hidden": 512, "heads": 8, "kv_groups": 4, "ffn": 1536, "vocab": 16384}
    settings = ModelSettings(**(small if quick else large))  # type: ignore[arg-type]
    model = build_model(settings)
    config = model[0].config
    finalize = config.finalize_model_grads_func
    hook = MegatronLoss(mp.MismatchConfig(**SETTINGS), config, ParallelGroups.from_megatron())
    hooked = config.finalize_model_grads_func
    batch = make_batch(samples(settings.vocab, *((4, 12) if quick else (8, 256))), device=device)

    def hook_step() -> None:
        hook.start([batch])
        run_step(model, hook.forward_step, iter([batch]), 1)

    log_probs = (batch.packed.rollout_log_probs + 0.01).requires_grad_()  # type: ignore[operator]

    def correction() -> None:
        mp.policy_loss(log_probs, batch.packed, hook.config).loss_sum.backward()
        log_probs.grad = None

    def use(function: Any) -> Callable[[], None]:
        return partial(setattr, config, "finalize_model_grads_func", function)

    cases = [
        Case("mismatch_plugin hook", hook_step, use(hooked)),
        Case("megatron-core cross entropy", other_step(model, batch, megatron_loss(batch)), use(finalize)),
        Case("no loss: sum of the logits", other_step(model, batch, Tensor.sum), use(finalize)),
        Case("correction alone", correction),
    ]
    timings = measure(cases, device, max(2, repeats // 2), calls=1)
    nothing = timings["no loss: sum of the logits"].ms
    rows: list[Row] = []
    for case in cases:
        ms, wall_ms = timings[case.name].ms, timings[case.name].wall_ms
        adds = ms if case.name == "correction alone" else ms - nothing
        whole = timings["mismatch_plugin hook"].ms if case.name == "correction alone" else ms
        rows.append({"name": case.name, "status": MEASURED, "ms": ms, "wall_ms": wall_ms, "share": adds / whole})
    facts = {
        "parameters": sum(parameter.numel() for parameter in model[0].parameters()),
        "tokens": batch.tokens.numel(),
        "trained tokens": len(batch.targets),
        **{name: getattr(settings, name) for name in ("layers", "hidden", "vocab", "dtype")},
    }
    return Section("hook_share", title, rows, facts, NOTES)


def other_step(model: Any, batch: Any, loss_func: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """A step of the same schedule with another loss of the logits."""
    from mismatch_plugin.lab.model import run_step

    ones = torch.ones((), dtype=torch.int64, device=batch.tokens.device)

    def forward(data: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        item = next(data)
        logits = model(item.tokens, item.position_ids, None, packed_seq_params=item.packed_seq_params)
        return logits, lambda output: (loss_func(output), ones, {})

    return lambda: run_step(model, forward, iter([batch]), 1)


def megatron_loss(batch: Any) -> Callable[[Tensor], Tensor]:
    """The sum of megatron-core's own cross entropy of the batch's targets."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def loss(logits: Tensor) -> Tensor:
        chosen = logits.flatten(0, -2).index_select(0, batch.rows)
        return vocab_parallel_cross_entropy(chosen[:, None], batch.targets[:, None]).sum()

    return loss


def samples(vocab: int, count: int, length: int) -> list[Any]:
    """Responses behind prompts a fourth as long, with log-probs as of a policy that knows nothing yet."""
    from mismatch_plugin.hooks.megatron_core.batch import Sample

    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(0, vocab, (length + length // 4,), generator=generator).tolist()
        said = -math.log(vocab) + 0.1 * torch.randn(length, generator=generator)
        old = (said + 0.05 * torch.randn(length, generator=generator)).tolist()
        advantage = float(torch.randn((), generator=generator))
        prompt, response = ids[: length // 4], ids[length // 4 :]
        made.append(Sample(prompt, response, advantage, rollout_log_probs=said.tolist(), old_log_probs=old))
    return made
