"""The Triton log-probs on a CUDA machine: are they right, and how fast are they? One command tells both.

    python -m examples.benchmarks.log_probs_cuda_check              # at the root of the repository

Checks: every case of `triton_cases.py`, emulated tensor parallelism, rows beyond 2^31 elements, CUDA graphs, rows that
are there twice, torch.compile, equal bits on a second run. Then the benchmark's contenders in one table. Ends with 1 if
a check failed, with 2 without CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks.bench import table
from examples.benchmarks.log_prob_contenders import from_logits
from examples.benchmarks.measuring import copy_bandwidth, measure
from examples.benchmarks.triton_cases import CASES, SHARDED, check, check_shards, compare, results
from mismatch_plugin.log_probs import Backend, vocab_parallel_linear_log_probs, vocab_parallel_log_probs

CUDA = torch.device("cuda")


def main() -> None:
    """Checks, then figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was checked and nothing was measured.", file=sys.stderr)
        sys.exit(2)
    checks: dict[str, Callable[[], None]] = {str(case): partial(check, case, "cuda") for case in CASES}
    for what, dtype in itertools.product(SHARDED, ("fp32", "bf16")):
        checks[f"shards {what} {dtype}"] = partial(check_shards, what, dtype, "cuda")
    others = (check_beyond_int32, check_cuda_graph, check_linear_cuda_graph, check_rows_are_asserted, check_compile)
    checks |= {function.__name__: function for function in (*others, check_same_bits)}
    failed = sum(not passes(name, function) for name, function in checks.items())
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    figures(arguments.tokens, arguments.vocab)
    sys.exit(1 if failed else 0)


def passes(name: str, function: Callable[[], None]) -> bool:
    """Whether the check does, whatever it raises: the others are worth running all the same."""
    try:
        function()
    except Exception as error:
        print(f"FAILED {name}: {error!r}")
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
    warm = {"temperature": torch.rand(64, device="cuda") + 0.5, "vocab_size": 8197}
    rows, mask = torch.randperm(64, device="cuda"), torch.rand(64, 8208, device="cuda") < 0.3
    chosen: dict[str, Any]
    for chosen in ({}, warm, {"rows": rows}, {"sampling_mask": mask}, {"inplace_gradient": True}):
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


def figures(tokens: int, vocab: int) -> None:
    """This package next to what else there is; of ours the share of a copy's bandwidth."""
    bandwidth = copy_bandwidth(CUDA, tokens * vocab * 2 // 2**20, 20)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {tokens} tokens, vocabulary {vocab}, bfloat16")
    for entropy in (True, False):
        case = "with entropy" if entropy else "without"
        rows = measure(case, from_logits(tokens, vocab, "bfloat16", entropy, CUDA), CUDA, 20, memory=True)
        print(table({"rows": rows}).to_markdown())
        speed = 3 * 2 * tokens * vocab / rows[0]["ms"] / 1e6  # read forward, read and written backward
        print(f"{rows[0]['contender']}: {speed:.0f} GB/s of {bandwidth:.0f} that a copy reads and writes")


if __name__ == "__main__":
    main()
