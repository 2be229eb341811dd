"""The benchmark: contenders compute the same, counts are exact, the page is that of the JSON. No clock is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ci import speed
from ci.docs import block_names, render
from examples.benchmarks import bench
from examples.benchmarks.correction_contenders import SETTINGS, Batch, packed
from examples.benchmarks.counting import count
from examples.benchmarks.log_prob_contenders import OURS
from examples.benchmarks.measuring import in_processes
from tests.full import full_only

CPU = torch.device("cpu")
ABSENT = {  # contender: whether it can be had here, and what its row says where not
    "slime's": ("SLIME_SRC" in os.environ, "SLIME_SRC names no checkout"),
    "NeMo-RL's": ("NEMO_RL_SRC" in os.environ, "NEMO_RL_SRC names no checkout"),
    "verl's": (find_spec("verl") is not None, "No module named 'verl'"),
    "TRL's": (find_spec("trl") is not None, "No module named 'trl'"),
    "liger-kernel": (torch.cuda.is_available(), "needs CUDA"),
    "transformer-engine": (torch.cuda.is_available(), "needs CUDA"),
}


def quick_rows() -> dict[str, list[dict[str, Any]]]:
    """The parts at tiny sizes. For a process of its own: megatron-core's groups would stay in this one.

    torch.compile would take most of the time, so what it would compile runs as it is.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    parts = ("whole_step", "log_probs", "linear", "correction", "loss", "communication")
    return {part: bench.PARTS[part](CPU, True, 1) for part in parts}


@full_only
def test_all_contenders_are_there_and_compute_the_same_and_what_crosses_ranks_is_what_the_page_says() -> None:
    (rows,) = in_processes(quick_rows, 1)
    for row in [row for part in ("log_probs", "linear", "correction", "loss") for row in rows[part]]:
        here, why = next((found for name, found in ABSENT.items() if row["contender"].startswith(name)), (True, ""))
        if not here:
            assert row["status"] == why, row
        elif row.get("status") == "it has no such setting":
            assert row["contender"].startswith("slime's") and row["case"][:6] in ("geomet", "prefix")
        else:  # one casts its gradient to bfloat16
            limit = 5e-3 if row["contender"] == "megatron-core fused" else 1e-5
            assert "status" not in row and row["deviation"] < limit, row
    cases = {row["case"].removesuffix(", packed") for row in rows["correction"]}
    assert cases >= {setting.name for setting in SETTINGS}
    assert len({row["contender"] for row in rows["log_probs"]}) == 12
    assert len(rows["whole_step"]) == 4 and not any("status" in row for row in rows["whole_step"])
    ranks = {row["case"]: row for row in rows["communication"] if row["contender"] == OURS}
    tp = ranks["tp 2: 32 tokens, vocabulary 128, with entropy"]
    assert (tp["collectives"], tp["sent_bytes"]) == (1, 16 * 32)  # an all-gather of four float32 a target
    cp = ranks["cp 2: correction of 8 sequences"]
    assert (cp["collectives"], cp["sent_bytes"]) == (1, 7 * 8 * 8)  # a SUM of seven float64 a sequence
    assert ranks["dp 2: a step's agreement and statistics"]["collectives"] == 3


def test_kernels_do_not_grow_with_sequences_but_those_of_a_plain_loop_do() -> None:
    ours, loop = (
        [count(packed(Batch(sequences, 40, CPU), SETTINGS[3])[contender].make()) for sequences in (8, 32)]
        for contender in (0, 2)
    )
    assert ours[0].total == ours[1].total < 115 and not ours[1].syncs
    assert loop[1].total > loop[0].total and (loop[1].total - loop[0].total) % 24 == 0


def test_the_counter_sees_syncs_and_bytes() -> None:
    values = torch.ones(4)

    def syncing() -> None:
        values[values > 0]
        values.sum().item()
        values.double()

    counts = count(syncing)
    assert len(counts.syncs) == 2
    # gt 16 + 4, index 16 + 4 + 16, sum 16 + 4, item 4, widened 16 + 32
    assert counts.tensor_bytes == 20 + 36 + 20 + 4 + 48


def test_the_page_is_made_of_the_kept_results() -> None:
    page = speed.FILE.parent.parent / "docs" / "speed.md"
    text = page.read_text(encoding="utf-8")
    assert render(text) == text and sorted(block_names(text)) == sorted(speed.TABLES)
    assert set(speed.results()) <= set(bench.PARTS)
    for name, part in speed.results().items():
        assert part["machine"]["device"] and part["machine"]["threads"] == 1
        for row in part["rows"]:
            assert set(row) <= {"case", "contender", "status", *bench.COLUMNS}
            assert "status" in row or "deviation" not in row or row["deviation"] < 2e-2, (name, row)


@full_only
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is needed")
def test_what_make_gpu_counts_of_megatron_core_s_step() -> None:
    from examples.benchmarks.gpu import megatron_step  # imports Triton

    (found,) = in_processes(megatron_step, 1, "cpu")
    assert found["loss"]["syncs"] == 0 and 100 < found["loss"]["kernels"] < found["step"]["kernels"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is needed")
def test_make_gpu_claims_nothing_without_cuda() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "examples.benchmarks.gpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "nothing was checked and nothing was measured" in done.stderr
