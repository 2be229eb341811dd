"""The benchmark: every row is there, figures are finite, counts are exact. No test looks at a clock."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from examples.benchmarks import machine
from examples.benchmarks.bench import Part, bench
from examples.benchmarks.communication import Link, sent_bytes
from examples.benchmarks.correction import CONTENDERS
from examples.benchmarks.correction_cases import SETTING_ROWS, Batch, ours
from examples.benchmarks.counting import count
from examples.benchmarks.findings import findings
from examples.benchmarks.log_prob_cases import COMPILED, OURS, contenders, sharded
from examples.benchmarks.log_probs import Problem, extra_peaks, speed
from examples.benchmarks.machine import Case, Timing, clock, measure, memory_in_use, peak_since, version
from examples.benchmarks.results import Section, load, save
from examples.benchmarks.scaling import extrapolate
from examples.benchmarks.sources import PACKAGES
from examples.benchmarks.workers import in_processes

CPU = torch.device("cpu")
MODULE = "examples.benchmarks.bench"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one quick run of the command writes. A process of its own, since megatron-core is set up in it."""
    path = tmp_path_factory.mktemp("bench")
    arguments = ["--quick", "--device", "cpu", "--output", str(path)]
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", MODULE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture
def sections(folder: Path) -> dict[str, Section]:
    return {section.name: section for section in load(folder)}


def rows(section: Section, **values: Any) -> list[dict[str, Any]]:
    return [row for row in section.rows if all(row.get(key) == value for key, value in values.items())]


def invoke(*options: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, options)


def test_every_part_has_its_machine_and_finite_figures(sections: dict[str, Section]) -> None:
    assert set(sections) == {part.value for part in Part if find_spec(f"examples.benchmarks.{part.value}")}
    for section in sections.values():
        assert section.machine["torch"] == torch.__version__ and section.machine["threads"] == 1
        assert section.machine["clock"] == "user + system"
        assert section.rows and section.notes
        for row in section.rows:
            numbers = [value for value in row.values() if isinstance(value, (int, float))]
            assert all(math.isfinite(value) for value in numbers), row
            if row["status"] == "measured" and section.name not in ("communication", "records"):
                assert row["ms"] > 0


def test_every_contender_has_a_row(sections: dict[str, Section]) -> None:
    section = sections["log_probs"]
    whole, halves = rows(section, tp=1), rows(section, tp=2)
    assert [(row["name"], row["entropy"]) for row in whole] == [(c.name, c.entropy) for c in contenders()]
    assert [(row["name"], row["entropy"]) for row in halves] == [(c.name, c.entropy) for c in sharded(None)]
    for contender, row in zip((*contenders(), *sharded(None)), (*whole, *halves), strict=True):
        if contender.cuda_only:
            assert row["status"] == "needs CUDA"
        elif contender.package is not None and version(contender.package) is None:
            assert row["status"] == PACKAGES
        elif contender.name == COMPILED and which("g++") is None:
            assert "C++ compiler" in row["status"]
        else:
            assert row["status"] == "measured", row
    correction = sections["correction"]
    cases = {(row["setting"], row["sequences"]) for row in correction.rows}
    assert cases == {*((s.name, 32) for s in SETTING_ROWS), (SETTING_ROWS[0].name, 8)}
    for setting, sequences in cases:
        assert [row["name"] for row in rows(correction, setting=setting, sequences=sequences)] == list(CONTENDERS)
    for row in correction.rows:
        if row["name"].startswith("verl") and version("verl") is None:
            assert row["status"] == PACKAGES
        elif row["name"].startswith("slime") and row["setting"] == "geometric rejection":
            assert row["status"] == "it rejects nothing without weights"
        else:
            assert row["status"] == "measured", row


def test_all_compute_the_same(sections: dict[str, Section]) -> None:
    for row in rows(sections["log_probs"], tp=1, status="measured"):
        limit = 5e-3 if row["name"] == "megatron-core fused" else 1e-5  # it casts the gradient to bfloat16
        assert row["error"] < limit, row
    for row in sections["correction"].measured():
        assert row["deviation"] < 1e-5 and row["differing"] == 0, row


def test_counts_of_the_correction_are_exact(sections: dict[str, Section]) -> None:
    section = sections["correction"]
    for sequences in (8, 32):
        (row,) = rows(section, setting=SETTING_ROWS[0].name, sequences=sequences, name=OURS)
        counter = count(ours(Batch(sequences, 40, CPU), SETTING_ROWS[0]))
        assert (row["kernels"], row["syncs"]) == (counter.total, 0)
        assert row["kernels"] <= 115
    loop = {"setting": SETTING_ROWS[0].name, "name": "loop over the sequences"}
    few, many = (rows(section, sequences=n, **loop)[0]["kernels"] for n in (8, 32))
    assert (many - few) % 24 == 0 and (many - few) // 24 > 50  # the same kernels for each of 24 sequences more


def test_the_counter_sees_syncs_and_bytes() -> None:
    values = torch.ones(4)

    def run() -> None:
        values[values > 0]
        values.sum().item()
        values.double()

    counts = count(run)
    assert len(counts.syncs) == 2
    # gt 16 + 4, index 16 + 4 + 16, sum 16 + 4, item 4, widened 16 + 32
    assert counts.tensor_bytes == 20 + 36 + 20 + 4 + 48


def test_the_counter_sees_the_peak() -> None:
    given = torch.ones(1000)

    def run() -> None:
        first = given * 2.0  # 4000 bytes
        second = first.double()  # 8000 more
        del first
        given.add_(second.float()[:10].sum())  # 4000 while second lives; in place, and 4 bytes

    assert count(run).peak == 12000 + 4


def test_log_probs_never_sync_and_ratios_are_to_ours(sections: dict[str, Section]) -> None:
    for entropy in (True, False):
        (row,) = rows(sections["log_probs"], name=OURS, entropy=entropy, tp=1)
        assert row["syncs"] == 0 and row["time_ours"] == row["memory_ours"] == 1.0
        (in_place,) = rows(sections["log_probs"], name=f"{OURS}, gradient in place", entropy=entropy, tp=1)
        for other in rows(sections["log_probs"], entropy=entropy, tp=1, status="measured"):
            ours = in_place if other.get("overwrites") else row
            assert other["time_ours"] == other["ms"] / ours["ms"]
            assert ("memory_ours" in other) == bool(ours["extra_peak"])
            if ours["extra_peak"]:
                assert other["memory_ours"] == other["extra_peak"] / ours["extra_peak"]


def test_the_clock_counts_system_time() -> None:
    """New memory costs page faults, which are the system's time: a clock of user time would not see them."""
    assert (clock("cpu", 1), clock("cpu", 2), clock("cuda", 1)) == ("user + system", "wall time", "CUDA events")

    def touch() -> None:
        for _ in range(4):
            torch.empty(2**26, dtype=torch.uint8).fill_(1)  # 64 MiB: its pages come from the system every time

    before = time.process_time()
    timing = measure([Case("touch", touch)], CPU, repeats=3, calls=1)["touch"]
    assert 0 < timing.system_ms <= timing.ms <= 1e3 * (time.process_time() - before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can start the peak anew")
def test_extra_memory_of_log_probs_is_the_gradient() -> None:
    problem = Problem(2048, 32768)
    names = [("mismatch_plugin", True), ("torch log_softmax + gather", True)]
    ours, autograd = (
        peak / (4 * problem.tokens * problem.vocab) for peak in in_processes(extra_peaks, 1, names, problem, "cpu")[0]
    )
    assert 0.95 < ours < 1.1 and autograd > 3


def test_speed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy reads and writes; a gradient needs two reads and a write."""
    monkeypatch.setattr(machine, "measure", lambda cases, *_: {cases[0].name: Timing(0.5, 9.0)})
    assert machine.copy_bandwidth(CPU, 1, 3) == pytest.approx(2 * 2**20 / 0.5e-3 / 1e9)
    found = speed(Timing(2.0, 3.0, 0.5), nbytes=10**6, bandwidth=6.0)
    times = {"ms": 2.0, "wall_ms": 3.0, "system_ms": 0.5}
    assert found == {**times, "gb_s": pytest.approx(1.5), "copy_share": pytest.approx(0.25)}


def test_the_share_of_a_loss_is_what_it_adds(sections: dict[str, Section]) -> None:
    pytest.importorskip("megatron", reason="a train step needs megatron-core")
    times = {row["name"]: row["ms"] for row in sections["hook_share"].rows}
    shares = {row["name"]: row["share"] for row in sections["hook_share"].rows}
    hook, nothing = times["mismatch_plugin hook"], times["no loss: sum of the logits"]
    assert shares["mismatch_plugin hook"] == pytest.approx((hook - nothing) / hook)
    assert shares["correction alone"] == pytest.approx(times["correction alone"] / hook)
    assert shares["no loss: sum of the logits"] == 0.0


def test_the_formula_of_scaling_by_hand() -> None:
    job = {"R": 1000, "N": 10, "V": 8000, "tp": 4, "cp": 2, "dp": 4, "P": 10**9}
    row = extrapolate("by hand", job, kernels=100, token_bytes=50.0, statistics=(20, 5))
    assert row["us, log-probs"] == pytest.approx(3 * 2 * 1000 * 2000 / 4.08e12 * 1e6)
    assert row["us, tp all-gather"] == pytest.approx(3 * (3 + 16000 / 360e9 * 1e6))
    assert row["us, correction"] == pytest.approx(500)  # launches: 50 bytes a token take 0.01 us
    assert row["us, cp SUM"] == pytest.approx(2 * (8 + 8 * 7 * 10 / 2 / 45e9 * 1e6))
    assert row["us, step's statistics"] == pytest.approx(3 * 6 * 8 + 6 * 8 * (9 + 20 + 5) / 45e9 * 1e6)
    model = 6 * 10**9 * 1000 / 4 / 4e14 * 1e6
    assert row["share"] == pytest.approx(row["us, all"] / (row["us, all"] + model))
    many = extrapolate("by hand", {**job, "R": 10**8}, kernels=100, token_bytes=50.0, statistics=(20, 5))
    assert many["us, correction"] == pytest.approx(50 * 10**8 / 4.08e12 * 1e6)


def test_communication_counted_equals_the_formula(sections: dict[str, Section]) -> None:
    section = sections["communication"]
    assert {row["ranks"] for row in section.rows} == {2, 4, 8, 16}
    for ranks in (2, 4):
        counted = [row for row in rows(section, ranks=ranks) if row["status"] == "measured"]
        assert [row["name"] for row in counted] == [
            "tp: log-probs and entropy", "cp: correction", "dp x cp: a step's statistics",
        ]  # fmt: skip
        assert [row["counted"] for row in counted] == [row["payload"] for row in counted]
    (gathered,) = rows(section, ranks=4, name="tp: log-probs and entropy")
    assert (gathered["payload"], gathered["sent"]) == (16 * 64, 3 * 16 * 64)


def test_link_formulas_by_hand() -> None:
    link = Link("made up", latency=1.0, bandwidth=10.0)
    assert link.all_reduce(40, 4) == 2 * 3 * (1.0 + 40 / 4 / 10)
    assert link.all_gather(40, 4) == 3 * (1.0 + 4.0)
    assert link.tree(40, 1000) == 2 * 10 * (1.0 + 4.0)
    assert sent_bytes("all-gather", 40, 4) == 120
    assert sent_bytes("all-reduce", 40, 4) == 60


def test_scaling_has_fits_and_what_no_machine_here_could_measure(sections: dict[str, Section]) -> None:
    section = sections["scaling"]
    for series in (
        "log-probs, tokens",
        "log-probs, vocabulary",
        "correction, sequence length",
        "correction, sequences",
    ):
        assert len([row for row in rows(section, name=series) if row["fit"] is not None]) >= 3
    assert rows(section, name="log-probs, tp", x=2) and rows(section, name="correction, cp", x=2)
    formula = [row for row in section.rows if row["status"] == "by formula"]
    for row in formula:
        terms = [value for key, value in row.items() if key.startswith("us, ") and key != "us, all"]
        assert row["us, all"] == pytest.approx(sum(terms)) and 0 < row["share"] < 1
    gpus = {row["name"]: row["tp"] * row["cp"] * row["dp"] for row in formula}
    assert gpus["8 GPUs, 8B model"] == 8 and gpus["1M-token context, 1024 GPUs"] == 1024
    assert abs(8 * gpus["100k GPUs, 340B model in 8 stages"] - 100_000) < 1000


def test_the_page_stands_alone(folder: Path, sections: dict[str, Section]) -> None:
    pytest.importorskip("matplotlib", reason="a page of plots needs the extra lab")
    html = (folder / "bench.html").read_text(encoding="utf-8")
    for section in sections.values():
        assert f'id="{section.name}"' in html
        for sentence in findings(section):
            assert sentence.split(":")[0].replace("'", "&#39;") in html
    assert html.count("data:image/png;base64,") == 8
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert len(list((folder / "plots").glob("bench_*.png"))) == 8


def test_results_keep_the_other_sections(tmp_path: Path) -> None:
    save(Section("a", "A", [{"name": "x", "status": "measured"}]), tmp_path)
    save(Section("b", "B", []), tmp_path)
    save(Section("a", "A", [{"name": "y", "status": "measured"}]), tmp_path)
    assert {section.name: [row["name"] for row in section.rows] for section in load(tmp_path)} == {"a": ["y"], "b": []}


def test_contenders_take_turns_and_prepare_outside() -> None:
    calls: list[str] = []
    cases = [Case(name, lambda name=name: calls.append(name), lambda: calls.append("prepare")) for name in "ab"]
    measure(cases, CPU, repeats=2, calls=1)
    assert [call for call in calls if call != "prepare"] == ["a", "b"] * 3  # the first round warms up
    assert calls[::2] == ["prepare"] * 6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can start the peak anew")
def test_peak_memory_of_this_process() -> None:
    size = 64 * 2**20
    torch.ones(4 * size, dtype=torch.uint8)  # an older and larger peak
    before = memory_in_use(CPU)
    torch.ones(size, dtype=torch.uint8)
    assert 0.9 * size < peak_since(CPU) - before < 1.5 * size


def _raise() -> None:
    raise ValueError("no such thing")


def _die() -> None:
    import os

    os._exit(3)


def test_errors_of_processes_are_told() -> None:
    with pytest.raises(RuntimeError, match="rank 0 of a benchmark raised ValueError: no such thing"):
        in_processes(_raise, 1)
    with pytest.raises(RuntimeError, match="rank 0 of a benchmark died"):
        in_processes(_die, 1)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"name": "a"}]', None])
def test_a_folder_that_cannot_be_used_is_refused_before_measuring(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "bench"
    if content is None:
        folder.write_text("a file")
    else:
        folder.mkdir()
        (folder / "results.json").write_text(content)
    result = invoke("--quick", "--device", "cpu", "--output", str(folder))
    said = re.sub(r"[\s│]+", " ", result.output)
    assert result.exit_code == 2 and "Give another folder" in said and "…" not in said


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_first(function: Any, size: int, name: str, *arguments: Any, **options: Any) -> list[Any]:
        if name == "log_probs":
            raise RuntimeError("rank 0 of a benchmark died")
        return [Section(name, name, [])]

    monkeypatch.setattr("examples.benchmarks.workers.in_processes", fails_first)
    options = ("--only", "log_probs", "--only", "communication", "--no-page", "--device", "cpu")
    result = invoke(*options, "--output", str(tmp_path))
    assert result.exit_code == 1 and "log_probs failed: rank 0 of a benchmark died" in result.output
    assert [section.name for section in load(tmp_path)] == ["communication"]


def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = invoke("--quick", "--device", "cuda", "--output", str(tmp_path))
    assert result.exit_code == 2 and "no CUDA device" in re.sub(r"[\s│]+", " ", result.output)
