"""What a Triton kernel of `triton_kernels` becomes for a GPU that need not be there: PTX, and the machine's own
instructions with the registers they take, by the tools that lie in Triton's wheel."""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mismatch_plugin.log_probs import triton_arithmetic, triton_kernels

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

ARGUMENTS: dict[str, Any] = {
    "logits": "*bf16", "stride_t": "i32", "stride_v": "i32", "gradient": "*bf16", "gradient_stride_t": "i32",
    "gradient_stride_v": "i32", "rows": None, "target_of_row": None, "targets": "*i64", "unit": "fp32", "units": None,
    "mask": None, "mask_stride_r": 0, "mask_stride_v": "i32", "kept": None, "offsets": None, "statistics": "*fp32",
    "coefficients": "*fp32", "values": "*bf16", "target_values": "*bf16", "log_probs": "*fp32", "entropy": "*fp32",
    "shift": "*fp32", "sums": "*fp32", "g": "*fp32", "g_stride": "i32", "h": "*fp32", "h_stride": "i32",
    "targets_count": "i32", "vocab_start": "i32", "columns": "i32", "width": "i32", "BLOCKS": 32, "FILTER": 0,
    "ENTROPY": True, "SLOPE": True, "CONTIGUOUS": True, "LINES": 1024, "LINE": 8, "BLOCK": 4096, "RANKS": 8,
}  # fmt: skip
"""Types, and values of what is constant: a large vocabulary, whose size within the padding is odd."""

BOOLEAN = {"mask": "*u8", "mask_stride_r": "i32", "FILTER": 1}
RAGGED = {"kept": "*i32", "offsets": "*i64", "FILTER": 2}
FLOAT32 = {"logits": "*fp32", "gradient": "*fp32", "LINE": 4, "LINES": 2048}


def compiled(kernel: str, changes: dict[str, Any], capability: int = 90, aligned: bool = True) -> Any:
    """The kernel of 8 warps with the alignment that Triton finds at a launch, but `aligned`: of rows and widths."""
    function = getattr(triton_kernels, kernel)
    parameters = {parameter.name: parameter for parameter in function.params}
    arguments = {name: (ARGUMENTS | changes)[name] for name in function.arg_names}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
    constants = {(i,): arguments[name] for i, name in enumerate(arguments) if types[name] == "constexpr"}
    odd = {"columns"} if aligned else {"columns", "width", "stride_t", "gradient_stride_t", "mask_stride_r"}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(arguments)
        if types[name] not in ("constexpr", "fp32") and name not in odd and not parameters[name].do_not_specialize
        and not parameters[name].do_not_specialize_on_alignment
    }  # fmt: skip
    options = {"num_warps": 8, "enable_fp_fusion": triton_arithmetic.FUSION}
    source = ASTSource(function, types, constants, divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@dataclass(frozen=True)
class Machine:
    """The machine's instructions, with the places that `labels` name, and the registers of a thread."""

    instructions: list[str]
    labels: dict[str, int]
    registers: int
    stack: int

    def count(self, *names: str) -> int:
        """Instructions whose name begins so."""
        return sum(_name(line).startswith(names) for line in self.instructions)

    def loop(self) -> list[str]:
        """The one loop that computes exponentials."""
        for i, line in enumerate(self.instructions):
            begin = self.labels.get(_goal(line), i)
            body = self.instructions[begin : i + 1]
            if begin < i and any("MUFU.EX2" in each for each in body):
                return body
        raise AssertionError("no loop over a row")

    def path(self, exponentials: int) -> int:
        """Instructions from the start to the end, on the shortest way that computes so many exponentials."""
        heap, seen = [(0, 0, 0)], set[tuple[int, int]]()
        while heap:
            steps, computed, i = heapq.heappop(heap)
            if (computed, i) in seen:
                continue
            seen.add((computed, i))
            line, conditional = self.instructions[i], self.instructions[i].startswith("@")
            steps, computed = steps + 1, min(exponentials, computed + ("MUFU.EX2" in line))
            ends, goal = _name(line) == "EXIT", _goal(line)
            if ends and computed == exponentials:
                return steps
            if goal:
                heapq.heappush(heap, (steps, computed, self.labels[goal]))
            if conditional or not (ends or goal):
                heapq.heappush(heap, (steps, computed, i + 1))
        raise AssertionError("no way computes them")


def machine(kernel: str, changes: dict[str, Any], capability: int, aligned: bool = True) -> Machine:
    """What runs there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(kernel, changes, capability, aligned).asm["cubin"])
        file.flush()
        text = _tool("nvdisasm", "-c", file.name)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", file.name))
    assert usage, "cuobjdump tells no registers"
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+([^;]+?)\s*;", line):
            instructions.append(instruction[1])
    return Machine(instructions, labels, int(usage[1]), int(usage[2]))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def _name(line: str) -> str:
    return re.sub(r"^@!?\w+\s+", "", line).split()[0]


def _goal(line: str) -> str:
    found = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
    return found[1] if found else ""
