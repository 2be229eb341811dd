"""The benchmark's sentences say of results what is in them, and other words where the results are others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.correction import IN_VERL, PADDED
from examples.benchmarks.findings import findings, standing
from examples.benchmarks.log_prob_cases import IN_PLACE, OURS
from examples.benchmarks.results import NotHereError, Section
from examples.benchmarks.sources import Checkout
from examples.benchmarks.tables import tables
from examples.benchmarks.whole_step import COMPUTED, FUSED, computed, formula_bytes
from examples.benchmarks.whole_step import IN_PLACE as STEP_IN_PLACE
from examples.benchmarks.whole_step import NEW as STEP_NEW
from mismatch_plugin.report.table import NOTHING

SIDES = {2.0: "ahead of", 1.03: "level with", 0.5: "behind"}
factors = pytest.mark.parametrize("factor", list(SIDES))


def section(name: str, rows: list[dict[str, Any]]) -> Section:
    rows = [{"status": "measured", **row} for row in rows]
    return Section(name, name, rows, machine={"clock": "user + system"})


def placed(sentence: str) -> dict[str, tuple[str, float]]:
    """name → (side, ratio) of what a sentence compares with."""
    found = {}
    for side, listed in re.findall(r"(ahead of|level with|behind) (.*?)(?=; level with|; behind| \(their)", sentence):
        for name, ratio in re.findall(r"(.+?) \(([\d.]+)\)(?:, )?", listed):
            found[name] = (side, float(ratio))
    return found


def test_every_side_is_named() -> None:
    said = standing(10.0, {"A": 20.0, "B": 30.0, "C": 10.2, "D": 5.0}, "time")
    assert said == "ahead of A (2.00), B (3.00); level with C (1.02); behind D (0.50) (their time / ours)"
    assert standing(10.0, {"A": 20.0}, "time") == "ahead of A (2.00); behind none (their time / ours)"
    assert standing(10.0, {"A": 5.0}, "memory") == "ahead of none; behind A (0.50) (their memory / ours)"
    assert standing(10.0, {}, "time") == "nothing to compare with"


@factors
def test_log_probs(factor: float) -> None:
    size = {"tokens": 8, "vocab": 16, "dtype": "float32", "tp": 1, "entropy": True}
    rows = [
        {"name": OURS, "ms": 100.0, "extra_peak": 1.0, **size},
        {"name": IN_PLACE, "ms": 80.0, "extra_peak": 0.0, "overwrites": True, **size},
        {"name": "compile", "ms": 100.0 * factor, "extra_peak": 1 / factor, **size},
        {"name": "megatron", "ms": 80.0 * factor, "extra_peak": 0.1, "overwrites": True, **size},
        {"name": "absent", **size, "status": "not installed"},
    ]
    time, memory, in_place, little = findings(section("log_probs", rows))
    assert time.startswith("8 tokens, vocabulary 16, float32, with entropy: time 100 ms user + system: ")
    assert placed(time) == {"compile": (SIDES[factor], pytest.approx(factor, abs=5e-3))}
    sides = {"ahead of": "behind", "level with": "level with", "behind": "ahead of"}
    assert "extra memory 1.00 of the gradient" in memory
    assert placed(memory) == {"compile": (sides[SIDES[factor]], pytest.approx(1 / factor, abs=5e-3))}
    # What overwrites the logits is not compared with what keeps them.
    assert "time in place 80 ms user + system" in in_place
    assert placed(in_place) == {"megatron": (SIDES[factor], pytest.approx(factor, abs=5e-3))}
    assert little.endswith("extra memory in place 0.00 of the gradient (megatron 0.10).")


@factors
def test_correction(factor: float) -> None:
    size = {"setting": "token TIS", "sequences": 8, "tokens": 20, "kernels": 98, "syncs": 0}
    rows = [
        {"name": OURS, "ms": 10.0, **size},
        {"name": PADDED, "ms": 20.0, **size},
        {"name": IN_VERL, "ms": 40.0, **size},
        {"name": "verl's helper", "ms": 10.0 * factor, **size},
        {"name": "loop", "ms": 1000.0, **size},
    ]
    packed, padded, in_verl = findings(section("correction", rows))
    verl = {"verl's helper": (SIDES[factor], pytest.approx(factor, abs=5e-3))}
    assert packed.startswith("Token TIS: 8 sequences, 20 tokens: packed 10.0 ms user + system, 98 kernels, 0 syncs: ")
    assert placed(packed) == {**verl, "loop": ("ahead of", 100.0)}
    assert "from padded tensors and back 20.0 ms user + system" in padded
    sides = {2.0: "level with", 1.03: "behind", 0.5: "behind"}
    assert placed(padded)["verl's helper"][0] == sides[factor] and "loop" not in padded
    assert "as our hook in verl's driver 40.0 ms" in in_verl and placed(in_verl)["verl's helper"][0] == "behind"
    assert findings(section("correction", rows[1:])) == []


@factors
def test_hidden_states(factor: float) -> None:
    size = {"tokens": 8, "entropy": False, "logits_mib": 64.0}
    rows = [
        {"name": OURS, "ms": 100.0, "extra_peak": 10.0, **size},
        {"name": "logits", "ms": 100.0 * factor, "extra_peak": 30.0, **size},
        {"name": "chunks", "ms": 90.0, "extra_peak": 9.0, **size},
    ]
    time, memory = findings(section("linear", rows))
    assert placed(time) == {
        "logits": (SIDES[factor], pytest.approx(factor, abs=5e-3)), "chunks": ("behind", 0.9),
    }  # fmt: skip
    assert placed(memory) == {"logits": ("ahead of", 3.0), "chunks": ("behind", 0.9)}
    assert "10 MiB extra, logits would be 64" in memory


def step_rows(tokens: int, peak: float, ms: float = 100.0) -> list[dict[str, Any]]:
    size = {"T": tokens, "V": 64, "H": 4}
    return [
        {"name": STEP_NEW, "ms": 120.0, "peak_mib": 300.0, **size},
        {"name": STEP_IN_PLACE, "ms": 100.0, "peak_mib": 200.0, **size},
        {"name": FUSED, "ms": ms, "peak_mib": peak, **size},
    ]


def test_whole_step_says_where_the_fused_head_pays() -> None:
    pays = "At hidden size 4 the fused head takes less memory than logits in place"
    cases = {
        "from T = 2 on, of those measured": (250.0, 100.0, 100.0),
        "from T = 4 on, of those measured": (100.0, 250.0, 100.0),  # and not from the first, where a larger T does not
        "from T = 1 on, of those measured": (100.0, 100.0, 100.0),
        "at no T measured": (100.0, 100.0, 199.0),
    }
    for where, peaks in cases.items():
        rows = [row for tokens, peak in zip((1, 2, 4), peaks, strict=True) for row in step_rows(tokens, peak)]
        assert f"{pays} {where}." in findings(section("whole_step", rows))
    peak, time, _ = findings(section("whole_step", step_rows(1, 100.0, ms=130.0)))
    assert placed(peak) == {STEP_IN_PLACE: ("ahead of", 2.0), STEP_NEW: ("ahead of", 3.0)}
    assert placed(time) == {STEP_IN_PLACE: ("behind", 0.77), STEP_NEW: ("behind", 0.92)}


def test_what_is_computed_is_called_computed() -> None:
    one, eight = findings(section("whole_step", computed()))
    assert one.startswith("Computed, not measured: 8B model, tp 1") and eight.startswith("Computed, not measured")
    assert {row["status"] for row in computed()} == {COMPUTED} and not any("ms" in row for row in computed())
    mib = 2**20
    assert formula_bytes(STEP_NEW, 8192, 32768, 4, "cpu") == 2048 * mib
    assert formula_bytes(STEP_IN_PLACE, 8192, 32768, 4, "cpu") == 1024 * mib
    assert formula_bytes(FUSED, 8192, 32768, 4, "cpu") == 16 * mib + 16 * 8192  # 128 rows, and four floats a row
    assert formula_bytes(FUSED, 4, 32768, 4, "cpu") == 4 * 4 * 32768 + 64
    assert 2 * 32768 * 151936 * 2 // mib == 18992 and "18992 MiB in new memory, 9496 in place, 256 with" in one


def test_sentences_of_the_small_parts() -> None:
    row = {"name": "tp", "counted": 4, "payload": 4}
    assert findings(section("communication", [row])) == [
        "The bytes counted over gloo equal the formula in all of 1 cases."
    ]
    said = findings(section("communication", [row, {**row, "counted": 5}]))
    assert said == ["The bytes counted over gloo differ from the formula in 1 of 2 cases."]
    shares = {"mismatch_plugin hook": 0.2, "megatron-core cross entropy": 0.1, "correction alone": 0.05}
    (said,) = findings(section("hook_share", [{"name": name, "share": share} for name, share in shares.items()]))
    assert "the hook adds 20 %" in said and "cross entropy 10 %" in said and "correction alone 5 %" in said
    assert findings(section("hook_share", [{"name": "mismatch_plugin hook", "status": "not installed"}])) == []


def test_a_row_without_figures_says_why() -> None:
    row = {"name": "verl's helper", "setting": "token TIS", "sequences": 8, "tokens": 20, "status": "not installed"}
    (table,) = tables(Section("correction", "Correction", [row]))
    assert table.rows[0][0] == "verl's helper" and table.rows[0][-1] == "not installed"
    assert table.rows[0][1] == NOTHING
    assert findings(Section("correction", "Correction", [row])) == []


def test_a_table_names_its_clock_and_a_part_without_columns_shows_every_figure() -> None:
    rows = [{"name": OURS, "ms": 1.0, "setting": "token TIS", "sequences": 8, "tokens": 20}]
    (table,) = tables(section("correction", rows))
    assert table.title == "Token TIS: 8 sequences, 20 tokens" and "ms, user + system" in table.headers
    (other,) = tables(section("of its own", [{"name": "a", "ns a token": 3.5}, {"name": "b", "status": "absent"}]))
    assert other.headers == ("", "ns a token", "figures")
    assert other.rows == (("a", "3.5", "measured"), ("b", "–", "absent"))


def test_a_checkout_is_read_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made_up" / "inner"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("raise SystemExit('the trainer was started')")
    (folder / "code.py").write_text("from made_up.inner.other import VALUE\n")
    (folder / "other.py").write_text("VALUE = 7\n")
    checkout = Checkout("made up", "MADE_UP_SRC", "0" * 40)
    assert not checkout.there and "MADE_UP_SRC=CHECKOUT" in checkout.source()
    monkeypatch.setenv("MADE_UP_SRC", str(tmp_path))
    assert checkout.module("made_up.inner.code").VALUE == 7
    assert checkout.file("made_up/inner/other.py").VALUE == 7
    assert checkout.source() == "checkout without a commit, not the 000000000 that this was written for"
    monkeypatch.setenv("MADE_UP_SRC", str(tmp_path / "absent"))
    with pytest.raises(NotHereError, match="absent is no folder"):
        checkout.module("made_up.code")
    for name in [name for name in sys.modules if name.startswith("made_up")]:
        del sys.modules[name]


@factors
def test_records(factor: float) -> None:
    rows = [
        {"name": OURS, "task": "read", "ns": 80.0},
        {"name": f"{OURS} (tensors)", "task": "read", "ns": 20.0},
        {"name": "orjson", "task": "read", "ns": 80.0 * factor},
        {"name": OURS, "task": "check", "ns": 900.0},
        {"name": "numpy", "task": "without ours", "ns": 1.0},
    ]
    read, check = findings(section("records", rows))
    assert read.startswith("Read: 80 ns a token, 20 ns a token (tensors), user + system: ")
    assert placed(read) == {"orjson": (SIDES[factor], factor)}
    assert check == "Check: 900 ns a token, user + system."
