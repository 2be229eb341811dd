"""The Triton log-probs on a CUDA machine: are they right, and how fast are they? One command tells both.

    python -m examples.benchmarks.log_probs_cuda_check              # at the root of the repository
    python -m examples.benchmarks.log_probs_cuda_check --sweep      # other block sizes and numbers of warps too

Checks: every case of `triton_cases.py`, emulated tensor parallelism, rows beyond 2^31 elements, CUDA graphs, rows that
are there twice, torch.compile, equal bits on a second run. Then, next to the torch Function: ms, GB/s, share of the
copy bandwidth measured in the same run, bytes a logit, peak memory and kernels. Ends with 1 if a check failed, with 2
without CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks import machine
from examples.benchmarks.counting import launches
from examples.benchmarks.machine import Case
from examples.benchmarks.triton_cases import CASES, SHARDED, check, check_shards, compare, results
from mismatch_plugin.parallel.log_probs import (
    Backend,
    vocab_parallel_linear_log_probs,
    vocab_parallel_log_probs,
)

CUDA = torch.device("cuda")


def main() -> None:
    """Checks, then figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--sweep", action="store_true", help="time other block sizes and numbers of warps")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was checked and nothing was measured.", file=sys.stderr)
        sys.exit(2)
    failed = run_checks()
    figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **measure(arguments)}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(1 if failed else 0)


def run_checks() -> int:
    """How many failed; each that does says why."""
    checks: dict[str, Callable[[], None]] = {str(case): partial(check, case, "cuda") for case in CASES}
    for what, dtype in itertools.product(SHARDED, ("fp32", "bf16")):
        checks[f"shards {what} {dtype}"] = partial(check_shards, what, dtype, "cuda")
    for function in (
        check_beyond_int32,
        check_cuda_graph,
        check_linear_cuda_graph,
        check_rows_are_asserted,
        check_compile,
        check_same_bits,
    ):
        checks[function.__name__] = function
    failed = sum(not passes(name, function) for name, function in checks.items())
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    return failed


def passes(name: str, function: Callable[[], None]) -> bool:
    """Whether the check does, whatever it raises: the others are worth running all the same."""
    try:
        function()
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__}: {error}")
        return False
    return True


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
    options: list[dict[str, Any]] = [
        {},
        {"temperature": torch.rand(64, device="cuda") + 0.5, "vocab_size": 8197},
        {"rows": torch.randperm(64, device="cuda")},
        {"sampling_mask": torch.rand(64, 8208, device="cuda") < 0.3},
        {"inplace_gradient": True},
    ]
    for chosen in options:
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
        "import torch; from mismatch_plugin.parallel.log_probs import vocab_parallel_log_probs as f; x = torch.zeros("
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


def milliseconds(function: Callable[[], Any]) -> float:
    """Median over twenty runs, by CUDA events, after two that are not counted."""
    return machine.measure([Case("", function)], CUDA, 20)[""].ms


def extra_bytes(function: Callable[[], Any]) -> int:
    """Peak memory that the call takes beyond what is there before."""
    before = machine.memory_in_use(CUDA)
    function()
    return machine.peak_since(CUDA) - before


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward, backward, both and both in place, with and without entropy, for the twin and for torch."""
    bandwidth = machine.copy_bandwidth(CUDA, arguments.tokens * arguments.vocab * 2 // 2**20, 20)
    print(f"{torch.cuda.get_device_name()}: T {arguments.tokens}, V {arguments.vocab}, bf16")
    print(f"copy bandwidth of this run, bytes read and written: {bandwidth:.0f} GB/s")
    print(f"{'':42}{'ms':>9}{'GB/s':>8}{'% of copy':>11}{'B/logit':>9}{'extra B/logit':>15}{'kernels':>9}")
    rows = []
    for backend, entropy in itertools.product(("triton", "torch"), ("none", "grad")):
        rows += measure_backend(backend, entropy, inputs(arguments.tokens, arguments.vocab), bandwidth)
    found: dict[str, Any] = {"copy_gb_per_s": bandwidth, "rows": rows}
    if arguments.sweep:
        found["sweep"] = sweep(*inputs(arguments.tokens, arguments.vocab))
    return found


def measure_backend(
    backend: Backend, entropy: Any, tensors: tuple[Tensor, Tensor, Tensor], bandwidth: float
) -> list[dict[str, Any]]:
    """One line each. GB/s counts what the task needs: one read forward, one read and one write backward."""
    logits, targets, upstream = tensors
    count, size = logits.numel(), logits.element_size()

    def forward(**options: Any) -> list[Tensor]:
        found = vocab_parallel_log_probs(logits, targets, entropy=entropy, backend=backend, **options)
        return [value for value in found if value is not None]

    def backward(outputs: list[Tensor], **options: Any) -> None:
        torch.autograd.grad(outputs, logits, list(upstream[: len(outputs)]), **options)

    outputs = forward()
    tasks: dict[str, tuple[int, Callable[[], Any]]] = {
        "forward": (1, forward),
        "backward": (2, lambda: backward(outputs, retain_graph=True)),
        "both": (3, lambda: backward(forward())),
        # Last, and as much work whatever has become of the logits.
        "both in place": (3, lambda: backward(forward(inplace_gradient=True))),
    }
    rows = []
    for task, (passes_over, function) in tasks.items():
        time_ms = milliseconds(function)
        speed = passes_over * size * count / time_ms / 1e6
        row = {
            "name": f"{backend}, entropy {entropy}, {task}",
            "ms": time_ms,
            "gb_per_s": speed,
            "of_copy": speed / bandwidth,
            "bytes_a_logit": time_ms * 1e6 * bandwidth / count,  # what the copy would have moved meanwhile
            "extra_bytes_a_logit": extra_bytes(function) / count,
            "kernels": launches(function),
        }
        rows.append(row)
        print(
            f"{row['name']:42}{time_ms:9.3f}{speed:8.0f}{100 * row['of_copy']:11.1f}{row['bytes_a_logit']:9.2f}"
            f"{row['extra_bytes_a_logit']:15.3f}{row['kernels']:9d}"
        )
    return rows


def sweep(logits: Tensor, targets: Tensor, upstream: Tensor) -> list[dict[str, Any]]:
    """Forward and backward with entropy for other sizes of what a program has in hand."""
    from mismatch_plugin.parallel import log_prob_triton as twin

    before = twin.FORWARD_BLOCK, twin.BACKWARD_BLOCK, twin.MOST_WARPS
    found = []
    for block, warps in itertools.product((2048, 4096, 8192, 16384), (2, 4, 8, 16)):
        if warps > block // 512:  # a program has no more of them
            continue
        twin.FORWARD_BLOCK, twin.BACKWARD_BLOCK, twin.MOST_WARPS = block, block, warps
        forward_ms = milliseconds(partial(vocab_parallel_log_probs, logits.detach(), targets, entropy="detached"))
        outputs = [value for value in vocab_parallel_log_probs(logits, targets, entropy="grad") if value is not None]
        backward_ms = milliseconds(partial(torch.autograd.grad, outputs, logits, list(upstream), retain_graph=True))
        found.append({"block": block, "most_warps": warps, "forward_ms": forward_ms, "backward_ms": backward_ms})
        print(f"block {block:6d}, at most {warps:2d} warps: forward {forward_ms:.3f} ms, backward {backward_ms:.3f} ms")
    twin.FORWARD_BLOCK, twin.BACKWARD_BLOCK, twin.MOST_WARPS = before
    return found


if __name__ == "__main__":
    main()
