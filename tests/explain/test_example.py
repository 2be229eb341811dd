"""`explain`: the worked example, every cell by hand; the account of any flags; numbers of one's own, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.config.units import LEVELS
from mismatch_plugin.explain.account import Account, account
from mismatch_plugin.explain.example import (
    KEPT,
    MODES,
    PADDING,
    REJECTED,
    explain_table,
    loss_table,
    rejection_table,
)
from mismatch_plugin.explain.numbers import read_numbers

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

ROWS = {row[0]: row[1:] for table in (explain_table(), rejection_table(), loss_table()) for row in table.rows}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "80", "TERM": "dumb"})


# The example ----------------------------------------------------------------------------------------------------------

GOLDEN = {
    # A: 0.5/0.4, (masked), 0.6/0.5, 1 · B: 0.6/0.2, 0.6/0.4 · C: 0.2/0.5, 0.4/0.5; bounds 0.5 and 2.
    "token: clip": "1.25 · 1.2 1 2 1.5 0.5 0.8",
    "token: mask": "1.25 · 1.2 1 0✗ 1.5 0✗ 0.8",
    "prefix: ratio": "1.25 · 1.5 1.5 3 4.5 0.4 0.32",
    # 1.5^(1/3) = 1.14, 4.5^(1/2) = 2.12, 0.32^(1/2) = 0.566.
    "geometric: mask": "1.14 · 1.14 1.14 0✗ 0✗ 0.566 0.566",
    # Two tokens: 2^√2 = 2.67 and its reciprocal 0.375.
    "prefix: bounds grow": "1.25 · 1.5 1.5 2 2.67 0.5 0.375",
    # Turn weights 1.25, 1.2, 2, 0.32 have mean 1.1925; sequence weights 1.5, 2, 0.32 have mean 1.2733.
    "turn: normalised": "1.05 · 1.01 1.01 1.68 1.68 0.268 0.268",
    "sequence: normalised": "1.18 · 1.18 1.18 1.57 1.57 0.251 0.251",
    # Geometric means 1.14, 2.12, 0.566; A has a negative advantage.
    "sequence_mean:ratio:2": "✓ · ✓ ✓ ✗ ✗ ✓ ✓",
    "sequence_mean:ratio:1.1": "✗ · ✗ ✗ ✗ ✗ ✗ ✗",
    "… @negative": "✗ · ✗ ✗ ✓ ✓ ✓ ✓",
    "veto 0.45": "✓ · ✓ ✓ ✓ ✓ ✗ ✗",  # C1: 0.4
    # |Δp| to π_train: 0.1, 0.1, 0, 0.4, 0.2, 0.3, 0.1; C1 fell, and its advantage is positive.
    "token:tv:0.25": "✓ · ✓ ✓ ✗ ✓ ✗ ✓",
    "… @away": "✓ · ✓ ✓ ✗ ✓ ✓ ✓",
    # |Δp| to π_θ: 0.15, 0.05, 0.3, 0.43, 0.38, 0.05, 0.1
    "… policy current": "✓ · ✓ ✗ ✗ ✗ ✓ ✓",
    "max_staleness 1": "✗ · ✓ ✓ ✓ ✓ ✓ ✓",  # versions 3, 5, 5, 4, 4, 5, 5 of 5
    # r: 1.1, 0.75, 0.667 with A = −1; 1.05, 1.3 and 2.25, 1 with A = 1.
    "ppo: gradient": "1.1 · 0 0 −1.05 0 0 −1",
    # Geometric means 0.55^(1/3) = 0.819, 1.365^(1/2) = 1.17, 1.5, of which the last is clipped.
    "gspo: gradient": "0.819 · 0.819 0.819 −1.17 −1.17 0 0",
    "cispo: gradient": "1.1 · 0.75 0.667 −1.05 −1.2 −1.2 −1",
    # 4 σ(1.05 (r − 1)) (1 − σ) r; τ 1 where A = 1.
    "sapo: gradient": "1.1 · 0.737 0.647 −1.05 −1.27 −1.56 −1",
    # (1.1 · 0.75 · e^−0.4)^(1/3), (1.05 · 1.3)^(1/2), e^(0.4/2): 0.667 is below e^−0.4 and 2.25 above e^0.4.
    "gmpo: gradient": "0.821 · 0.821 0 −1.17 −1.17 0 −1.22",
    "reinforce: gradient": "1 · 1 1 −1 −1 −1 −1",
    # Rewards 1, 0, 0: mean 1/3, deviation 0.577. Without B: mean 0.5, deviation 0.707.
    "advantage, group keep": "1.15 · 1.15 1.15 −0.577 −0.577 −0.577 −0.577",
    "advantage, group exclude": "0.707 · 0.707 0.707 0 0 −0.707 −0.707",
}


@pytest.mark.parametrize("label", GOLDEN)
def test_the_example_by_hand(label: str) -> None:
    marks = {KEPT: "✓", REJECTED: "✗", PADDING: "·"}
    assert " ".join(marks.get(cell, cell.replace(" ", "")) for cell in ROWS[label]) == GOLDEN[label]


def test_it_covers_every_mode_level_and_objective_and_can_be_narrowed() -> None:
    assert {f"{level}: {mode}" for level in LEVELS for mode in MODES} <= set(ROWS)
    table = explain_table(["mask"], ["sequence"])
    assert [row[0] for row in table.rows] == ["π_rollout", "π_train", "sequence: ratio", "sequence: mask"]
    assert any(REJECTED in note for note in table.notes)
    assert not any("clip" in note or "geometric" in note for note in table.notes)
    assert "sequence: mask" in run("--mode", "mask", "--level", "sequence").output
    assert "did you mean mask" in run("--mode", "msk").stderr


FLAGS = [
    ("--use-tis", "C1     −0.7985  2.25    1   yes   −1.2       −0.48  0"),
    ("--rs-criterion token:tv:0.25@away --rs-policy current --mismatch-dry-run", "token_tv_away"),
    ("--use-tis --mismatch-gate-kl 0.01", "training stops here"),
    ("--mismatch-objective gspo", "0.9997 to 1.0004"),
    ("--mismatch-objective cispo", "−clip(r) A log π_θ"),
    ("--use-tis --use-rollout-log-probs", "note: "),  # biased at token level
    ("--use-tis --markdown", "| B2 |"),
]


@pytest.mark.parametrize(("flags", "said"), FLAGS)
def test_any_flags_have_a_worked_example(flags: str, said: str) -> None:
    result = run(*flags.split())
    assert result.exit_code == 0 and " ".join(said.split()) in " ".join(result.output.split()), result.output
    assert flags != "--use-tis" or max(map(len, result.output.splitlines())) <= 80


# Numbers of one's own -------------------------------------------------------------------------------------------------

NUMBERS = {
    "train": "-1.2,-0.3; -0.7,-0.2,-0.1",
    "rollout": "-1.0,-0.4; -2.3,-0.1,-0.1",
    "mask": "1,1;1,0,1",
    "advantages": "1; -1",
}
L = (-0.2, 0.1, 1.6, 0.0)
RHO = [math.exp(value) for value in L]


def told(flags: str = "", trainer_version: int | None = None, **given: str) -> Account:
    texts = {name: [text] for name, text in (NUMBERS | given).items()}
    return account(read_numbers(texts, trainer_version), mp.MismatchConfig.from_words(flags.split()))


def column(found: Account, name: str) -> list[Any]:
    return [getattr(token, name) for token in found.tokens if token.trains]


def test_every_figure_of_the_account_by_hand() -> None:
    found = told("--use-tis --tis-level sequence --rs-veto-threshold 0.1 --rs-criterion token:k2:0.3")
    assert [token.name for token in found.tokens] == ["A1", "A2", "B1", "B2", "B3"]
    weight, seq = math.exp(-0.1), [math.exp(-0.1)] * 2 + [math.exp(1.6)] * 2
    figures = {
        "log_ratio": L, "ratio": RHO, "unit_ratio": seq, "weight": [min(x, 2.0) for x in seq],
        "objective": [-1.0, -1.0, 1.0, 1.0],  # −A: r = 1 in the first step
        "loss": [-weight, -weight, 0.0, 2.0], "gradient": [-weight / 3, -weight / 3, 0.0, 2.0 / 3], "upper": [2.0] * 4,
    }  # fmt: skip
    for name, values in figures.items():
        assert column(found, name) == pytest.approx(list(values)), name
    assert column(found, "rejected_by") == [(), (), ("token_k2",), ()]  # 1.6² / 2 = 1.28
    assert column(found, "kept") == [True, True, False, True] and column(found, "lower") == [None] * 4
    assert found.sums.policy == pytest.approx(2.0 - 2 * weight) and found.sums.denominator == 3
    assert found.sums.counted == "accepted tokens" and found.sums.loss == pytest.approx((2.0 - 2 * weight) / 3)
    flags = "--use-tis --use-rollout-log-probs --tis-mode mask --tis-upper-bound 3 --mismatch-denominator original"
    found = told(flags, old="-9,-9;-9,-9,-9")
    assert (found.algorithm, found.level, found.sums.counted, found.sums.denominator) == (3, "token", "tokens", 4)
    assert column(found, "rejected_by") == [(), (), ("mask mode",), ()]
    assert column(found, "objective") == pytest.approx([1.2, 0.3, -0.7, -0.1])  # −A log π_θ
    assert column(found, "gradient") == pytest.approx([-RHO[0] / 4, -RHO[1] / 4, 0.0, 0.25])
    assert column(found, "lower") == pytest.approx([1 / 3] * 4)


MOVED = {"train": "-1;-1;-3", "rollout": "-2;-2;-1", "old": "-2;-1;-1", "mask": "1", "advantages": "1;-1;-1"}
ACCOUNTS: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    # r = e^−0.7 and e^1.6 lie outside 1 ± 0.2 on the side that is clipped where A < 0, and A > 0
    ("", MOVED | {"train": "-1.2;-0.7;-1", "old": "-0.5;-2.3;-1", "advantages": "-1;1;1"}, "gradient", [0, 0, -1 / 3]),
    ("--mismatch-objective gspo", {"old": "-1.1,-0.5;-0.7,-0.2,-0.1"}, "objective_ratio",
     [math.exp(0.05)] * 2 + [1, 1]),
    ("--mismatch-kl-coef 0.5 --mismatch-kl-type k2", {"ref": "-1.0,-0.3;-0.7,0,-0.1"}, "gradient",
     [-0.25 - 0.5 * 0.2 / 4, -0.25, 0.25, 0.25]),
    ("--use-tis --tis-batch-normalize", {}, "weight", [x * 4 / (sum(RHO) - RHO[2] + 2) for x in (*RHO[:2], 2.0, 1.0)]),
    ("--use-tis --rs-criterion token:k2:0.3 --mismatch-dry-run", {}, "rejected_by", [(), (), ("token_k2",), ()]),
    ("--use-tis --rollout-log-prob-policy drop-token", {"rollout": "-1.0,None;-2.3,-0.1,-0.1"}, "rejected_by",
     [(), ("invalid log-prob",), (), ()]),
    # π_old: l = 0, 1, 0; π_θ: 1, 1, −2
    ("--rs-criterion token:k2:0.4", MOVED, "kept", [True, False, True]),
    ("--rs-criterion token:k2:0.4@away --rs-policy current", MOVED, "kept", [False, True, False]),
    ("--rs-criterion token:k2:0.4@negative --rs-policy current", MOVED, "kept", [True, False, False]),
    ("--rs-max-staleness 1", MOVED | {"versions": "3;5;4", "trainer_version": 5}, "rejected_by",
     [("staleness",), (), ()]),
    *((f"--use-tis --tis-level {level} --tis-upper-bound 1.05 --tis-bound-growth 0.5",
       {"train": "-1.2,-0.3,-0.5,-2;-1", "rollout": "-1,-1,-0.8,-1;-1.01", "mask": "1,0,1,1;1", "advantages": "1"},
       "upper", [1.05**n**0.5 for n in tokens])
      for level, tokens in (("turn", (1, 2, 2, 1)), ("sequence", (3, 3, 3, 1)), ("prefix", (1, 2, 3, 1)))),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "given", "name", "expected"), ACCOUNTS)
def test_the_account_of_flags(flags: str, given: dict[str, Any], name: str, expected: list[Any]) -> None:
    found = column(told(flags, **given), name)
    assert found == (expected if isinstance(expected[0], (bool, tuple)) else pytest.approx(expected))


OWN = [word for name, text in NUMBERS.items() for word in (f"--{name}", text)]
REFUSED: list[tuple[list[str], str]] = [
    *(([*OWN, f"--{name}", text], said) for name, text, said in (
        ("rollout", "-1.0,-0.4", "--rollout has 3 sequences and --train 2 sequences"),
        ("mask", "1", "--mask has 3 sequences and --train 2"),
        ("versions", "1,1.5;1,1,1", "--versions holds a number that is not whole"),
        ("ref", "1,-1;-1,-1,-1", "--ref is 1, above 0"),
        ("mismatch-kl-coef", "0.1", "ref_log_probs is missing"),
        ("rewards", "1,0", "--rewards and --advantages"),
        ("groups", "1,0", "--groups is for --rewards"),
        ("rs-max-staleness", "1", "--versions with --trainer-version: give --versions"),
        ("trainer-version", "1", "--trainer-version is for --rs-max-staleness: give it, or leave"),
        ("versions", "1,1;1,1,1", "--versions is for --rs-max-staleness"),
        ("ref", "-1,-1;-1,-1,-1", "--ref is for --mismatch-kl-coef"),
        ("entropy", "1,1;1,1,1", "--entropy is for --mismatch-entropy-coef"),
        ("tis-level", "tokens", "--tis-level"),
        ("tis-mode", "mask", "without --use-tis"),
        ("mode", "mask", "--tis-mode"),
    )),
    *(([word for key, text in (NUMBERS | given).items() for word in (f"--{key}", text)], said) for given, said in (
        ({"rollout": "-1.0,-0.4,-3;-1,-1,-1"}, "--rollout has 3 numbers in sequence A and --train 2: give one a token"),
        ({"train": "0.5,-1;-1,-1,-1"}, "token 1 of sequence A in --train is 0.5, above 0"),
        ({"train": "-1,nan;-1,-1,-1"}, "token 2 of sequence A in --train is nan"),
        ({"train": "-1,two;-1,-1,-1"}, "token 2 of sequence A in --train is 'two', which is not a number"),
        ({"train": "-1,-1;"}, "--train has no number in sequence B"),
        ({"mask": "1,2;1,1,1"}, "loss_masks holds 2"),
        ({"mask": "0"}, "--mask has no 1"),
        ({"advantages": "inf"}, "advantages of sequence A is inf"),
    )),
    (["--train", "-1"], "--rollout is missing"),
    ([*OWN, "--no-such-flag"], "--no-such-flag is no flag of this package"),
    ([*OWN, "--mismatch-explain-only"], "leave it out"),
    ([*OWN, "--use-tis", "--rollout", "-1.0,None;-2.3,-0.1,-0.1"], "--rollout has 4 sequences"),
    (["--train", "-1;-1", "--rollout", "-1;-1", "--rewards", "1"], "--rewards has 1 number for 2 sequences"),
    (["--use-tis", "--trainer-version", "3"], "--train is missing"),
    (["--json"], "--json is for one setting"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[f"{n}" for n in range(len(REFUSED))])
def test_what_does_not_fit_is_refused_in_one_sentence(line: list[str], said: str) -> None:
    result = run(*line)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.startswith("cannot explain: ")
    assert result.stdout == "" and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
