"""Benchmark: peak memory and time of a whole megatron-core train step, over whole logits and from hidden states."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import mismatch_plugin as mp
from examples.benchmarks import machine
from examples.benchmarks.correction_cases import SETTINGS
from examples.benchmarks.hook_share import megatron_loss, other_step, samples
from examples.benchmarks.machine import Case, measure
from examples.benchmarks.results import Row, Section, noted
from examples.benchmarks.workers import in_processes
from mismatch_plugin.parallel.linear_log_probs import CPU_CHUNK, DEVICE_CHUNK

NEW, IN_PLACE, FUSED = "logits, gradient in new memory", "logits, gradient in place", "fused head"
MEGATRON = "megatron-core cross entropy"
FLAGS: dict[str, dict[str, Any]] = {
    NEW: {"inplace_logits": "off"},
    IN_PLACE: {},
    FUSED: {"fused_head": True},
}
"""Settings of our hook: --mismatch-inplace-logits off, the default, --mismatch-fused-head."""
CHUNK = {"cpu": CPU_CHUNK, "cuda": DEVICE_CHUNK}
"""Logits of a chunk that `vocab_parallel_linear_log_probs` chooses."""
COMPUTED = "computed, not measured"
NOTES = [
    "One step of megatron's schedule on one process, on one packed micro-batch of T tokens: forward, backward, "
    "gradients finalised; the optimizer is not stepped. Each row in a process of its own. Flags: logits in new memory: "
    "--mismatch-inplace-logits off; in place: the default; fused head: --mismatch-fused-head.",
    "Peak: the most memory beyond what is held before the step (weights, gradient buffers). Logits, by formula: what "
    "logits and their gradient are of it: 2 T V b in new memory, T V b in place, C V b + 16 T with the fused head, for "
    "b bytes a logit and the C rows of a chunk (C V = 2^22 on CPU, 2^27 on CUDA).",
    "/ in place: a row's figure divided by that of the default at the same T; below 1 it takes less. megatron-core's "
    "own cross entropy is a loss without any correction, for comparison.",
    "Fourth product: 2 T H V operations for logits again in the backward, as a share of the step's 6 P T for P "
    "parameters (attention left out). Rows that are computed are the formulas alone, in bfloat16: no such step was "
    "run.",
]


def sizes(kind: str, quick: bool) -> list[tuple[int, dict[str, int]]]:
    """Tokens and model of each step: growing T, and one of a wider model, where the products take more of the step."""
    if quick:
        return [(32, {"layers": 1, "hidden": 32, "heads": 2, "kv_groups": 2, "ffn": 64, "vocab": 512})]
    layers, vocab, counts = (
        (2, 32768, (512, 1024, 2048, 4096, 8192)) if kind == "cpu" else (4, 131072, (2048, 8192, 16384))
    )
    thin, wide = (
        {"layers": layers, "hidden": hidden, "heads": hidden // 64, "kv_groups": hidden // 64, "ffn": 3 * hidden}
        for hidden in ((256, 1024) if kind == "cpu" else (1024, 4096))
    )
    cases = [*((tokens, thin) for tokens in counts), (counts[1], wide)]
    return [(tokens, {**model, "vocab": vocab}) for tokens, model in cases]


def section(device: torch.device, quick: bool, repeats: int, tell: Callable[[str], object]) -> Section:
    """All settings at growing T, then what the formula says of a size that fits into no memory here."""
    title = "A whole train step: memory and time"
    if importlib.util.find_spec("megatron") is None:
        row: Row = {"name": FUSED, "status": "megatron-core is not installed"}
        return Section("whole_step", title, [row], {}, NOTES)
    rows: list[Row] = []
    for tokens, model in sizes(device.type, quick):
        tell(f"{tokens} tokens, hidden size {model['hidden']}")
        rows += _rows(tokens, model, max(2, repeats // 2), device)
    rows += computed()
    return Section("whole_step", title, rows, {"dtype": "float32"}, NOTES)


def _rows(tokens: int, model: dict[str, int], repeats: int, device: torch.device) -> list[Row]:
    here: dict[str, Row] = {}
    for name in (NEW, IN_PLACE, FUSED, MEGATRON):
        row = here[name] = {"name": name, "T": tokens, "V": model["vocab"], "H": model["hidden"]}
        if name in FLAGS:
            row["formula_mib"] = formula_bytes(name, tokens, model["vocab"], 4, device.type) / 2**20
        with noted(row):
            row |= in_processes(step_figures, 1, name, tokens, model, repeats, str(device))[0]
    for row in here.values():
        for key, figure in (("time_default", "ms"), ("memory_default", "peak_mib")):
            if figure in row and here[IN_PLACE].get(figure):
                row[key] = row[figure] / here[IN_PLACE][figure]
    return list(here.values())


def computed() -> list[Row]:
    """What the formulas say of an 8B model's head, whose logits of so many tokens fit into no memory here."""
    tokens, vocab, hidden = 32768, 151936, 4096
    parameters = 8_200_000_000 - hidden * vocab  # the embedding's multiply nothing
    rows: list[Row] = []
    for tp in (1, 8):
        for name in FLAGS:
            mib = formula_bytes(name, tokens, vocab // tp, 2, "cuda") / 2**20
            row: Row = {"name": name, "T": tokens, "V": vocab // tp, "H": hidden, "where": f"8B model, tp {tp}"}
            row |= {"formula_mib": mib, "status": COMPUTED}
            if name == FUSED:
                row["fourth_share"] = 2 * hidden * vocab / (6 * parameters)
            rows.append(row)
    return rows


def formula_bytes(name: str, tokens: int, width: int, element: int, kind: str) -> int:
    """Bytes of logits and their gradient at their peak; `width`: columns of one rank."""
    if name == FUSED:
        return min(tokens * width, max(width, CHUNK[kind] // width * width)) * element + 16 * tokens
    return (2 if name == NEW else 1) * tokens * width * element


def step_figures(name: str, tokens: int, model_size: dict[str, int], repeats: int, device_name: str) -> Row:
    """Time and peak memory of one step. For a process of its own."""
    from examples.benchmarks.workers import megatron_groups
    from mismatch_plugin.hooks.megatron_core import MegatronLoss
    from mismatch_plugin.hooks.megatron_core.batch import make_batch
    from mismatch_plugin.lab.model import ModelSettings, build_model, run_step
    from mismatch_plugin.parallel.groups import ParallelGroups

    device = torch.device(device_name)
    megatron_groups()
    settings = ModelSettings(**model_size)  # type: ignore[arg-type]
    model = build_model(settings)
    length = min(tokens, 512)  # of a prompt and its response, which is four times as long
    batch = make_batch(samples(settings.vocab, tokens // length, length * 4 // 5), device=device)
    step = other_step(model, batch, megatron_loss(batch))
    if name != MEGATRON:
        config = mp.MismatchConfig(**SETTINGS, **FLAGS[name])
        hook = MegatronLoss(config, model[0].config, ParallelGroups.from_megatron())

        def hook_step() -> None:
            hook.start([batch])
            run_step(model, hook.forward_step, iter([batch]), 1)

        step = hook_step

    step()  # what is loaded or made at the first call is not meant
    before = machine.memory_in_use(device)
    timing = measure([Case(name, step)], device, repeats, calls=1, warm=True)[name]
    peak = machine.peak_since(device) - before
    parameters = sum(parameter.numel() for parameter in model[0].parameters())
    parameters -= settings.hidden * settings.vocab  # the embedding's multiply nothing
    fourth = {"fourth_share": settings.hidden * settings.vocab / (3 * parameters)} if name == FUSED else {}
    return {
        **fourth,
        "fed": batch.tokens.numel(),
        "ms": timing.ms,
        "wall_ms": timing.wall_ms,
        "system_ms": timing.system_ms,
        "peak_mib": peak / 2**20,
    }
