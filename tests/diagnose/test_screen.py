"""The terminal's summary of every verdict: the verdict first, and clear on 80 columns."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from mismatch_plugin.diagnose import page, words
from mismatch_plugin.diagnose.findings import Place
from mismatch_plugin.diagnose.result import VERDICTS, Diagnosis, Gate, Verdict
from mismatch_plugin.diagnose.screen import show
from mismatch_plugin.report.table import figure
from tests.diagnose.diagnoses import advised, cause, diagnosis

REPORT = Path("runs/report.html")
BASE = diagnosis("undecided")


def shown(of: Diagnosis, width: int = 80, encoding: str = "utf-8", terminal: bool = True, **more: Any) -> list[str]:
    """The lines that a terminal of this width and encoding gets, or a file."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=stream, width=width, highlight=False, markup=False, force_terminal=terminal, color_system=None
    )
    show(of, console, **{"report": REPORT, **more})
    stream.flush()
    return [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]


def one_line(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize(("width", "encoding"), [(80, "utf-8"), (120, "utf-8"), (80, "ascii")])
def test_the_verdict_first_and_little_else(verdict: Verdict, width: int, encoding: str):
    of = diagnosis(verdict, notes=())
    lines, flags = shown(of, width, encoding, host="slime"), advised().flags["slime"].rpartition(" ")[0]
    assert len(lines) <= 44 and lines[0].startswith(VERDICTS[verdict].upper() + ": ")
    if encoding == "utf-8":
        copied = ("Report: ", "mismatch-plugin inspect", flags)
        assert max(cell_len(line) for line in lines if not line.startswith(copied)) <= width
    text = one_line(lines)
    assert text.index("Is this normal?") < text.index("size") and lines[-1] == f"Report: {REPORT}"
    assert ("Recommended: " in text) == ("kept" in text) == (verdict in ("large", "normal"))
    assert ("fix the fault first" in text) == (verdict == "fault")
    assert ("Inspect a larger dump" in text) == (verdict == "undecided")
    assert ("mean |d log p|" in text) == (encoding == "ascii")


def test_the_cause_tells_evidence_place_and_fix():
    place = Place(sample=0, sample_id="prompt-17/3", position=0, rollout=-1.204, training=-3.417)
    found = cause("weights_not_updated", confidence="certain", evidence="all 12 000 tokens", first=place, fix="send")
    fixed = diagnosis("normal").mismatch
    assert fixed is not None
    also = cause("moe_routing", confidence="possible", evidence="0.2 % of tokens", fix="replay")
    text = one_line(shown(diagnosis("fault", findings=(found, also), fixed=fixed), 100))
    for part in (
        "Cause: weights_not_updated (certain). all 12 000 tokens",
        "first: sample 0 (prompt-17/3), position 0: rollout -1.204, training -3.417",
        "fix: send",
        "also moe_routing (possible): 0.2 % of tokens",
        "Gate FAILED: k3 0.188 nats per token against a bar of 0.01",
        f"once fixed: mean |Δ log p| {figure(fixed.abs_mean)}, k3 {figure(fixed.k3_kl)}, which is small",
    ):
        assert part in text
    assert "Recommended" not in text and "noise" not in text and "--mismatch" not in text, "a fault has no settings"
    assert "Cause" not in one_line(shown(diagnosis("normal"))) and "once fixed" not in one_line(shown(BASE))
    for changes, name in (({"severity": "note"}, "Note"), ({"accepted": True}, "Accepted")):
        noted = diagnosis("normal", findings=(found.model_copy(update=changes),))
        assert f"{name}: weights_not_updated (certain)." in one_line(shown(noted))


@pytest.mark.parametrize("terminal", [True, False])
def test_cause_fix_and_commands_are_never_cut(terminal: bool):
    long = "x".join(f"word{i} " for i in range(90))
    item = cause("unrelated", evidence=f"{long}ends here", fix=f"{long}and `here`", first=None)
    command = f"mismatch-plugin inspect {'folder/' * 20}a.jsonl --checkpoint NOW"
    of = diagnosis("fault", findings=(item, item), next_step=f"Score it again: {command}")
    lines = shown(of, terminal=terminal)
    assert f"{long}ends here" in one_line(lines) and f"{long}and here" in one_line(lines)
    assert command in lines and one_line(lines).count("ends here") == (1 if terminal else 2)
    brief = one_line(shown(of, brief=True, report=None))
    assert brief.count("ends here") == brief.count("and here") == 2 and brief.endswith(command)
    assert "size measured" not in brief and "setting" not in brief and "note: the dump tells no sampling" in brief


def test_flags_are_of_the_dump_s_trainer_or_the_host_and_stay_whole():
    flags = advised().flags
    for host in flags:
        lines = shown(diagnosis("large"), host=host)
        assert all(line in lines for line in flags[host].splitlines())
        named = one_line(lines).partition(" (--host ")[2].partition(" for the others")[0]
        assert named.split(", ") == [other for other in flags if other != host]
    with pytest.raises(ValueError, match="no flags for host 'nobody': choose slime, miles"):
        shown(diagnosis("large"), host="nobody")
    for format, name in (("verl", "verl"), ("nemo_rl", "NeMo-RL"), ("miles_train", "miles"), ("slime", "slime")):
        assert f"{name} (--host " in one_line(shown(diagnosis("normal", format=format)))
    for format in ("records", "generic", "live"):  # nobody's launch line
        lines = shown(diagnosis("large", format=format))
        assert "Flags, for any trainer (--host slime, " in one_line(lines)
        assert f"--mismatch-preset {advised().preset}" in lines and "ray job" not in one_line(lines)


def test_terminal_commands_and_wide_letters_in_names_are_harmless():
    place = Place(sample=0, sample_id="\x1b[2J\x1b]0;owned\x07\u202e" + "漢字" * 60, position=3)
    item = diagnosis("fault").findings[0].model_copy(update={"first": place})
    lines = shown(diagnosis("fault", findings=(item,), source="a\x1b[31mb\nc.pt" + "漢" * 60, next_step=""))
    assert all(line.isprintable() for line in lines) and "?[2J" in "\n".join(lines)
    assert max(map(cell_len, lines)) <= 80


def test_is_this_normal_and_the_ranges_that_are_known():
    def of(verdict: Verdict, normality: str) -> str:
        return words.is_it_normal(BASE.model_copy(update={"verdict": verdict, "normality": normality}))

    assert of("normal", "normal, as published.") == "Is this normal? Yes, as published."
    said = "not normal for dense bf16, 3 times."
    assert of("fault", said) == "Is this normal? By its size no: for dense bf16, 3 times."
    assert of("undecided", "normal.") == "Is this normal? Not decided; so far normal."
    assert of("normal", "").startswith("Is this normal? Unknown, since")
    first = BASE.normal[0].model_copy(update={"low": 0.005, "high": 0.02, "ours": False})
    wider, ours = first.model_copy(update={"low": 0.001}), first.model_copy(update={"high": 9.0, "ours": True})
    other = first.model_copy(update={"pair": "MoE bf16", "high": 5.0})
    for normal, known in (((first, other, wider, ours), "0.001 to 0.02"), ((ours,), "0.005 to 9 (ours)")):
        assert words.known(diagnosis("normal", normal=normal)) == {first.figure: f"{known}: {first.pair}"}
    assert words.known(diagnosis("normal", normal=())) == {}


@pytest.mark.parametrize(
    ("verdict", "passed", "status"),
    [("normal", True, 0), ("large", True, 0), ("normal", False, 1), ("normal", None, 3), ("undecided", False, 1),
     ("fault", True, 1), ("fault", None, 1), ("undecided", True, 3), ("undecided", None, 3)],
)  # fmt: skip
def test_exit_status(verdict: Verdict, passed: bool | None, status: int) -> None:
    gate = Gate(value=1e-4, bar=1e-3, passed=passed, source="given by hand")
    assert BASE.model_copy(update={"verdict": verdict, "gate": gate}).exit_status == status
    without = BASE.model_copy(update={"verdict": verdict, "gate": None}).exit_status
    assert without == {"normal": 0, "large": 0, "fault": 1, "undecided": 3}[verdict]


def test_chosen_predictions_are_of_every_algorithm():
    of = diagnosis("large")
    chosen = words.chosen_predictions(of)
    assert [mark for mark, _ in chosen] == ["recommended", "yours", "", "", ""]
    assert {item.algorithm for _, item in chosen} == {0, 1, 2, 3} and len({item.setting for _, item in chosen}) == 5
    own = next(item for item in of.predictions if item.setting == advised().setting).model_copy(update={"own": True})
    rest = tuple(item for item in of.predictions if not item.own and item.setting != own.setting)
    marks = [mark for mark, _ in words.chosen_predictions(of.model_copy(update={"predictions": (own, *rest)}))]
    assert marks == ["recommended, yours", "", "", ""]


def test_without_a_setting_it_says_why():
    of = diagnosis("large", recommendation=None)
    assert "No setting is recommended: so strong a mismatch has a cause" in words.without_advice(of)
    assert "--accept unexplained if meant" in one_line(shown(of)) and "--use-tis" not in one_line(shown(of))
    assert of.mismatch is not None
    small = of.model_copy(update={"mismatch": of.mismatch.model_copy(update={"k3_kl": 5e-4})})
    assert "recommended: so small a mismatch needs no correction, but it is larger" in one_line(shown(small))


def test_bounds_stay_whole_and_numbers_are_short():
    name = "algorithm 2, geometric, clip 0.9991234 to 1.001234 (keeps 99%)"
    changes = {"setting": name, "own": True, "noise": 1.234, "bias": 8.342e13}
    own = diagnosis("normal").predictions[0].model_copy(update=changes)
    text = one_line(shown(diagnosis("normal", predictions=(own,)), terminal=False))
    assert "0.9991234" in text and "1.001234 (keeps" in text and "alg: docs/algorithms.md" in text
    assert "×1.23" in text and "8e13" in text and "8.342e+13" not in text
    assert "the setting's own ratios. Token weights have one of their own" in text
    assert "bounds' bias" in page.HEADERS, "the level's own is not in it"
    shares = {1.0: "100 %", 0.0: "0 %", 0.5: "50.0 %", 0.99999: "99.999 %", 1 - 1e-9: "> 99.9999 %"}
    assert {value: words.share(value) for value in shares} == shares, "100 % only where nothing is missing"
    for value, said in ((-0.25, "–"), (0.25, "0.25"), (15_234.0, "15,200"), (8.342e13, "8e13")):
        metrics = {"rollout_corr/chi2_token": value, "rollout_corr/rollout_is_ratio_unit_eff_sample_size": 0.5}
        rows = words.size_rows(diagnosis("normal", metrics=metrics, level="geometric"))
        assert ("χ² of token ratios", said, "") in rows and ("ESS of geometric ratios", "50.0 %", "") in rows


def test_json_holds_numbers_and_no_histograms():
    of = diagnosis("normal", metrics={"rollout_corr/kl": math.inf, "rollout_corr/k3_kl": math.nan})
    body = json.loads(of.model_dump_json(indent=2), parse_constant=lambda name: pytest.fail(name))
    assert {"verdict", "findings", "mismatch", "metrics", "predictions", "recommendation"} <= body.keys()
    assert body["metrics"] == {"rollout_corr/kl": "Infinity", "rollout_corr/k3_kl": "NaN"}
    assert "histograms" not in body and Diagnosis.model_validate(body).headline == of.headline
