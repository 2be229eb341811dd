"""The terminal's summary: one screen, the verdict first, of every verdict."""

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
from mismatch_plugin.diagnose.detectors.run import NO_TRAINING
from mismatch_plugin.diagnose.findings import Place
from mismatch_plugin.diagnose.result import Diagnosis, Gate, Verdict
from mismatch_plugin.diagnose.screen import show
from tests.diagnose.diagnoses import FLAGS, diagnosis

VERDICTS: tuple[Verdict, ...] = ("fault", "large", "normal", "undecided")
REPORT = Path("runs/report.html")
BASE = diagnosis("undecided")


def shown(
    of: Diagnosis, width: int = 80, height: int = 24, encoding: str = "utf-8", terminal: bool = True, **more: Any
) -> list[str]:
    """The lines that a terminal of this size and encoding gets, or a file."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=stream, width=width, height=height, highlight=False, markup=False, force_terminal=terminal,
        color_system=None,
    )  # fmt: skip
    show(of, console, report=REPORT, **more)
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 35), (120, 50), (80, 10)])
def test_one_screen_with_the_verdict_first(verdict: Verdict, width: int, height: int):
    lines = shown(diagnosis(verdict), width, height)
    assert len(lines) <= min(max(height, 24), 35) - 1
    assert lines[0].startswith(words.VERDICTS[verdict].upper() + ": ")
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert text.index("Is this normal?") < text.index("size") and lines[-1] == f"Report: {REPORT}"
    assert ("Recommended: algorithm 2" in text) == (verdict in ("large", "normal"))
    assert ("fix the fault first" in text) == (verdict == "fault")
    assert ("Inspect a larger dump" in text) == (verdict == "undecided")


def test_the_cause_tells_evidence_place_and_fix():
    lines = shown(diagnosis("fault"), 100, 35)
    text = " ".join(line.strip() for line in lines)
    for part in (
        "Cause: weights_not_updated (certain). all 12 000 tokens",
        "first: sample 0 (prompt-17/3), position 0: rollout -1.204, training -3.417",
        "fix: send the weights after every optimizer step",
        "also moe_routing (possible): 0.2 % of tokens",
        "Gate FAILED: k3 0.181 nats a token against a bar of 0.01",
    ):
        assert part in text
    assert "Cause" not in "\n".join(shown(diagnosis("normal")))


@pytest.mark.parametrize("host", list(FLAGS))
def test_flags_stay_whole_and_other_hosts_are_named(host: str):
    long = {**FLAGS, "slime": FLAGS["slime"] + " --rs-criterion sequence_max:k2:0.5" * 3}
    base = diagnosis("normal")
    assert base.recommendation is not None
    of = base.model_copy(update={"recommendation": base.recommendation.model_copy(update={"flags": long})})
    lines = shown(of, host=host)
    assert all(line in lines for line in long[host].splitlines())
    named = next(line for line in lines if "for the others" in line)
    assert all(other in named for other in FLAGS if other != host)
    with pytest.raises(ValueError, match="no flags for host 'skyrl': choose slime, miles"):
        shown(of, host="skyrl")


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_terminal_of_letters_and_digits_alone(verdict: Verdict):
    lines = shown(diagnosis(verdict), encoding="ascii")
    assert max(map(len, lines)) <= 80 and "mean |d log p|" in "\n".join(lines)


def test_terminal_commands_and_wide_letters_in_names_are_harmless():
    place = Place(sample=0, sample_id="\x1b[2J\x1b]0;owned\x07\u202e" + "漢字" * 60, position=3)
    base = diagnosis("fault")
    cause = base.findings[0].model_copy(update={"first": place})
    lines = shown(base.model_copy(update={"findings": (cause,), "source": "a\x1b[31mb\nc.pt"}))
    assert all(line.isprintable() for line in lines) and "?[2J" in "\n".join(lines)
    assert max(map(cell_len, lines)) <= 80


def test_is_this_normal():
    def of(verdict: Verdict, normality: str) -> str:
        return words.is_it_normal(BASE.model_copy(update={"verdict": verdict, "normality": normality}))

    assert of("normal", "normal, as published.") == "Is this normal? Yes, as published."
    said = "not normal for dense bf16, 3 times."
    assert of("fault", said) == "Is this normal? By its size no: for dense bf16, 3 times."
    assert of("undecided", "normal.") == "Is this normal? Not decided; so far normal."
    assert of("normal", "").startswith("Is this normal? Unknown, since")


def test_published_ranges_are_of_the_nearest_pair():
    first, other, k3 = BASE.normal
    wider = first.model_copy(update={"low": 0.001, "high": 0.01})
    of = BASE.model_copy(update={"normal": (first, other, k3, wider)})
    assert words.published(of) == {"mean |Δ log p|": "0.001 to 0.02: dense bf16"}
    assert words.published(BASE.model_copy(update={"normal": ()})) == {}


@pytest.mark.parametrize(("passed", "said"), [(True, "PASSED"), (False, "FAILED"), (None, "NOT DECIDED, TOO FEW")])
def test_the_gate_is_told(passed: bool | None, said: str):
    gate = Gate(value=0.5, bar=0.01, passed=passed, source="by hand")
    text = "\n".join(shown(BASE.model_copy(update={"gate": gate}), 120))
    assert f"Gate {said}" in text and "k3 0.5 nats a token against a bar of 0.01 (by hand)" in text


def test_the_verdict_is_not_said_twice():
    for headline in ("Normal: as bf16.", "normal. as bf16.", "as bf16."):
        of = BASE.model_copy(update={"verdict": "normal", "headline": headline})
        assert words.headline(of) == ("Normal", "as bf16.")


def test_chosen_predictions_are_of_every_algorithm():
    of = diagnosis("large")
    chosen = words.chosen_predictions(of)
    assert [mark for mark, _ in chosen] == ["recommended", "yours", "", "", ""]
    assert {item.algorithm for _, item in chosen} == {0, 1, 2, 3}
    assert len({item.setting for _, item in chosen}) == 5
    own = of.predictions[0].model_copy(update={"own": True})
    rest = tuple(item.model_copy(update={"own": False}) for item in of.predictions[1:])
    marks = [mark for mark, _ in words.chosen_predictions(of.model_copy(update={"predictions": (own, *rest)}))]
    assert marks[0] == "recommended, yours" and len(marks) == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "100 %"), (0.0, "0 %"), (0.5, "50.0 %"), (0.99999, "99.999 %"), (1 - 1e-9, "> 99.9999 %")],
)
def test_a_share_is_100_percent_only_where_nothing_is_missing(value: float, text: str):
    assert words.share(value) == text


def test_json_holds_numbers_and_no_histograms():
    of = diagnosis("normal", metrics={"rollout_corr/kl": math.inf, "rollout_corr/k3_kl": math.nan})
    body = json.loads(of.model_dump_json(indent=2), parse_constant=lambda name: pytest.fail(name))
    assert {"verdict", "findings", "metrics", "predictions", "recommendation"} <= body.keys()
    assert body["metrics"] == {"rollout_corr/kl": "Infinity", "rollout_corr/k3_kl": "NaN"}
    assert "histograms" not in body and Diagnosis.model_validate(body).headline == of.headline
    assert len(shown(of)) <= 23


LONG = "x".join(f"word{i} " for i in range(90))


def one_line(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("terminal", [True, False])
def test_cause_and_fix_are_never_cut(terminal: bool):
    base = diagnosis("fault")
    cause = base.findings[0].model_copy(update={"evidence": f"{LONG}ends here", "fix": f"{LONG}and `here`"})
    lines = shown(base.model_copy(update={"findings": (cause,)}), terminal=terminal)
    assert f"{LONG}ends here" in one_line(lines) and f"{LONG}and here" in one_line(lines)
    assert ("χ² of tokens" in one_line(lines)) != terminal  # sizes go first


def test_chi_squared_goes_first_and_predictions_last():
    of = diagnosis("normal")
    texts = ["\n".join(shown(of, height=height)) for height in range(24, 36)]
    for text in texts:
        assert "Watch in the first ten steps: rollout_corr/k3_kl stays below 0.01." in text
        assert "KL, k1" in text or "χ²" not in text
        assert "kept %" in text
    assert "χ²" not in texts[0]


def test_a_file_gets_every_line_whole():
    text = "\n".join(shown(diagnosis("fault"), width=60, terminal=False))
    assert "…" not in text and "also moe_routing (possible): 0.2 % of tokens" in text
    assert all(title in text for title, *_ in words.size_rows(diagnosis("fault")))
    assert "13,663 tokens of runs/debug/rollout_fault.pt (slime debug dump)." in one_line([text])


def test_a_note_is_called_one():
    base = diagnosis("large")
    note = base.findings[0].model_copy(update={"severity": "note"})
    for cause, name in ((note, "Note: quantised (likely)."), (base.findings[0], "Cause: quantised (likely).")):
        assert name in "\n".join(shown(base.model_copy(update={"findings": (cause,)})))


def test_without_a_training_side_that_is_said_once():
    missing = f"zero_fill, boundary, shift_by_one: {NO_TRAINING}"
    fields: dict[str, Any] = {"verdict": "undecided", "headline": "Not decided: only the rollout side was given.",
                              "source": "a.jsonl", "format": "records", "samples": 128, "tokens": 7045,
                              "undecided": (missing,)}  # fmt: skip
    said = "There is no training side: add TRAINING."
    text = one_line(shown(Diagnosis(**fields, one_sided=True, next_step=said)))
    assert f"No setting is recommended. {said}" in text
    assert text.lower().count("not decided") == 1 and "zero_fill" not in text and "Is this normal" not in text
    assert "zero_fill" in one_line(shown(Diagnosis(**fields)))


def test_bounds_stay_whole_and_long_names_are_wrapped():
    base = diagnosis("normal")
    name = "algorithm 2, geometric, clip 0.9991234 to 1.001234 (keeps 99%)"
    own = base.predictions[0].model_copy(update={"setting": name, "own": True, "noise": 1.234, "bias": 8.342e13})
    text = one_line(shown(base.model_copy(update={"predictions": (own,)})))
    assert "0.9991234 to 1.001234 (keeps 99%)" in text and "alg: docs/algorithms.md" in text
    assert "×1.23" in text and "8e13" in text and "8.342e+13" not in text
    assert "bounds' bias" in page.HEADERS and "bounds'" in text, "the level's own is not in it"


@pytest.mark.parametrize(("value", "text"), [(-0.25, "–"), (0.25, "0.25"), (15_234.0, "15,200"), (8.342e13, "8e13")])
def test_chi_squared_below_0_is_none(value: float, text: str):
    of = BASE.model_copy(update={"metrics": {"rollout_corr/chi2_token": value}})
    assert ("χ² of tokens", text, "") in words.size_rows(of)


def test_the_gap_s_parts_are_told_in_words_where_there_is_no_fault():
    given: list[tuple[Verdict, bool]] = [("normal", True), ("fault", False)]
    for verdict, told in given:
        base = diagnosis(verdict)
        assert base.size is not None
        size = base.size.model_copy(update={"separated": {"engine_k3": 0.01, "staleness_k3": 0.0}})
        said = "Of the gap, nats a token: k3 of the engines alone 0.01, k3 that fresh weights would save 0."
        assert words.separated(base.model_copy(update={"size": size})) == (said if told else "")
