"""What only a GPU can show: `make gpu`, or python -m examples.benchmarks.gpu at the root of the repository.

Checks of the Triton log-probs: every case of `triton_cases.py` and vocabularies to 152k against float64, emulated
tensor parallelism, rows beyond 2^31 elements, CUDA graphs, rows that are there twice, torch.compile, equal bits on a
second run. Then the benchmark's rows on CUDA, and a step of megatron-core with its kernels and host syncs. All of it
goes into one JSON file, written again after every part. Ends with 1 if something failed, with 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks.bench import measure_part, table
from examples.benchmarks.counting import count, launches
from examples.benchmarks.measuring import copy_bandwidth, describe, in_processes
from examples.benchmarks.triton_cases import CASES, SHARDED, Case, check, check_shards, compare, results
from mismatch_plugin.files import write_whole
from mismatch_plugin.log_probs import Backend, vocab_parallel_linear_log_probs, vocab_parallel_log_probs

ROWS = ("log_probs", "linear", "correction", "loss")
LARGE = [
    Case(what, columns, dtype)
    for what in ("plain", "cold padded ignored", "rows ragged")
    for columns in (50304, 131072, 151936)
    for dtype in ("fp32", "bf16")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: checks, then rows, then the step. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu/gpu.json"))
    parser.add_argument("--repeats", type=int, default=5, help="that medians are taken of (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was checked and nothing was measured.", file=sys.stderr)
        return 2
    checks: dict[str, Callable[[], None]] = {str(case): partial(check, case, "cuda") for case in (*CASES, *LARGE)}
    for what, dtype in itertools.product(SHARDED, ("fp32", "bf16")):
        checks[f"shards {what} {dtype}"] = partial(check_shards, what, dtype, "cuda")
    others = (check_beyond_int32, check_cuda_graph, check_linear_cuda_graph, check_rows_are_asserted, check_compile)
    checks |= {function.__name__: function for function in (*others, check_same_bits)}
    bandwidth = copy_bandwidth(torch.device("cuda"), 2048, 20)
    found: dict[str, Any] = {"machine": describe(torch.device("cuda")), "copy_gb_per_s": bandwidth}
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def part(name: str, run: Callable[[], Any]) -> None:
        """Every part is worth running, whatever became of the others."""
        try:
            found[name] = run()
        except Exception as error:
            found.setdefault("failed", {})[name] = repr(error)
            print(f"FAILED {name}: {error!r}", flush=True)
        write_whole(options.output, json.dumps(found, indent=1, ensure_ascii=False) + "\n")

    part("checks", lambda: {name: failure(function) for name, function in checks.items()})
    wrong = {name: text for name, text in found.get("checks", {}).items() if text}
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks passed", *wrong.items(), sep="\n", flush=True)
    for name in ROWS:  # each in a process of its own, as `make bench` runs them
        part(name, lambda name=name: in_processes(measure_part, 1, name, "cuda", False, options.repeats)[0])
        if name in found:
            print(table(found[name]).to_markdown(), flush=True)
    part("megatron_step", lambda: in_processes(megatron_step, 1, "cuda")[0])
    print(f"megatron-core's step: {found.get('megatron_step')}\nResults: {options.output}")
    return int(bool(wrong) or "failed" in found)


def megatron_step(kind: str) -> dict[str, Any]:
    """Kernels and host syncs of one step of megatron-core with our loss, and of the loss alone. For a process of its
    own. The loss must have no sync; the step has those of megatron-core and of the metrics."""
    import mismatch_plugin as mp
    from examples.megatron_core.train import Trainer, answer, initialize, questions
    from mismatch_plugin.data.sample import Sample

    initialize()
    config = mp.preset("token_is")
    trainer = Trainer(config)
    samples = []
    for prompt in questions(64, "gpu"):
        logged = {"rollout_log_probs": [-1.0] * 7, "train_log_probs": [-1.01] * 7}
        samples.append(Sample(prompt_ids=prompt, response_ids=answer(prompt), advantages=1.0, **logged))
    batch = trainer.batch(samples)
    metrics = trainer.step([batch])
    assert metrics["rollout_corr/tokens"] == 64 * 7, metrics
    whole = count(lambda: trainer.step([batch]))
    current = torch.full((64 * 7,), -1.02, device=trainer.device, requires_grad=True)
    alone = count(lambda: mp.policy_loss(current, batch.packed, config).loss.backward())
    assert not alone.syncs, alone.syncs
    counted = {"step": {"kernels": whole.total, "syncs": whole.syncs}, "loss": {"kernels": alone.total, "syncs": 0}}
    if kind == "cuda":
        counted["step"]["launches"] = launches(lambda: trainer.step([batch]))
    return counted


def failure(function: Callable[[], None]) -> str:
    """What a check raised; "" where it passes."""
    try:
        function()
    except Exception as error:
        return repr(error)
    return ""


def step(logits: Tensor, targets: Tensor, upstream: Tensor, backend: Backend, **options: Any) -> tuple[Tensor, ...]:
    """(log-probs, entropy, gradient)."""
    result = vocab_parallel_log_probs(logits, targets, entropy="grad", backend=backend, **options)
    assert result.entropy is not None
    gradient = torch.autograd.grad((result.log_probs, result.entropy), logits, tuple(upstream))[0]
    return result.log_probs.detach(), result.entropy.detach(), gradient


def inputs(tokens: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 logits, targets and the upstream of both results."""
    torch.manual_seed(0)
    logits = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
    for block in logits.split(1024):  # `randn` in float32 would take twice the memory
        block.copy_(torch.randn(block.shape, device="cuda") * 3)
    targets = torch.randint(0, columns, (tokens,), device="cuda")
    return logits.requires_grad_(), targets, torch.randn(2, tokens, device="cuda")


def check_beyond_int32() -> None:
    """The last rows of more than 2^31 elements equal the same rows alone."""
    logits, targets, upstream = inputs(16640, 131072)
    whole = step(logits, targets, upstream, "triton")
    rows = slice(-8, None)
    alone = step(logits.detach()[rows].clone().requires_grad_(), targets[rows], upstream[:, rows], "torch")
    compare([value[rows] for value in whole], list(alone), torch.finfo(torch.bfloat16).eps)


def check_cuda_graph() -> None:
    """A captured step gives on new logits what an eager one gives: with all that a graph can hold, in place too."""
    logits, targets, upstream = inputs(64, 8208)
    rows = torch.randperm(64, device="cuda")
    chosen: dict[str, Any]
    for chosen in ({}, {"temperature": 0.7, "vocab_size": 8197}, {"rows": rows}, {"inplace_gradient": True}):
        check_captured(lambda chosen=chosen: step(logits, targets % 8197, upstream, "triton", **chosen), logits)


def check_linear_cuda_graph() -> None:
    """So does one from hidden states, in chunks."""
    _, targets, upstream = inputs(64, 8208)
    hidden, weight = (torch.randn(n, 128, device="cuda", dtype=torch.bfloat16) for n in (64, 8208))
    hidden.requires_grad_()
    weight.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        result = vocab_parallel_linear_log_probs(hidden, weight, targets, entropy="grad", chunk_rows=24)
        outputs = [value for value in result if value is not None]
        return *(value.detach() for value in outputs), *torch.autograd.grad(outputs, [hidden, weight], list(upstream))

    check_captured(run, hidden)


def check_captured(run: Callable[[], tuple[Tensor, ...]], changed: Tensor) -> None:
    """Replays equal eager runs, for two other contents of `changed`."""
    with torch.no_grad():
        begun = changed.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for scale in (1.0, -0.5):
        found = []
        for replayed in (True, False):
            with torch.no_grad():
                changed.copy_(begun * scale)
            graph.replay() if replayed else None
            found.append([value.clone() for value in (captured if replayed else run())])
        for value, other in zip(*found, strict=True):
            assert torch.equal(value, other)


def check_rows_are_asserted() -> None:
    """A row that is there twice ends the process, which says why."""
    code = (
        "import torch; from mismatch_plugin.log_probs import vocab_parallel_log_probs as f; x = torch.zeros("
        "4, 9, device='cuda'); i = torch.tensor([1, 1], device='cuda'); f(x, i, rows=i); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "each at most once" in done.stdout + done.stderr, done.stderr[-500:]


def check_compile() -> None:
    """Under torch.compile, with whatever graph breaks it takes, forward and backward are those of eager mode."""
    logits, targets, upstream = inputs(64, 8197)
    compiled = torch.compile(vocab_parallel_log_probs, dynamic=True)
    result = compiled(logits, targets, entropy="grad", backend="triton")
    for value, other in zip(results(result, logits, upstream), step(logits, targets, upstream, "triton"), strict=True):
        assert torch.equal(value, other)


def check_same_bits() -> None:
    """No atomics: a second run gives the same bits."""
    arguments = inputs(512, 50304)
    for value, other in zip(step(*arguments, "triton"), step(*arguments, "triton"), strict=True):
        assert torch.equal(value, other)


if __name__ == "__main__":
    sys.exit(main())
