"""`explain`: the worked example, every cell by hand; the account of any flags."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.config.units import LEVELS
from mismatch_plugin.explain.account import (
    MODES,
    PADDING,
    Account,
    account,
    account_tables,
    batch_for,
    current_log_probs,
    explain_table,
)

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "80", "TERM": "dumb"})


# The example ----------------------------------------------------------------------------------------------------------

GOLDEN = {
    # A: 0.5/0.4, (masked), 0.6/0.5, 1 · B: 0.6/0.2, 0.6/0.4 · C: 0.2/0.5, 0.4/0.5; bounds 0.5 and 2.
    "token: clip": "1.25 · 1.2 1 2 1.5 0.5 0.8",
    "prefix: ratio": "1.25 · 1.5 1.5 3 4.5 0.4 0.32",
    # 1.5^(1/3) = 1.14, 4.5^(1/2) = 2.12, 0.32^(1/2) = 0.566.
    "geometric: mask": "1.14 · 1.14 1.14 0✗ 0✗ 0.566 0.566",
    # Two tokens: 2^√2 = 2.67 and its reciprocal 0.375.
    "prefix: bounds grow": "1.25 · 1.5 1.5 2 2.67 0.5 0.375",
    # Turn weights 1.25, 1.2, 2, 0.32 have mean 1.1925.
    "turn: normalised": "1.05 · 1.01 1.01 1.68 1.68 0.268 0.268",
}


def test_the_example_by_hand_has_every_mode_and_level() -> None:
    rows = {label: " ".join(cell.replace(" ", "") for cell in cells) for label, *cells in explain_table().rows}
    assert {label: rows[label] for label in GOLDEN} == GOLDEN
    assert {f"{level}: {mode}" for level in LEVELS for mode in MODES} <= set(rows)


FLAGS = [
    ("--use-tis", "C1     −0.7985  2.25    1   yes   −1.2       −0.48  0"),
    ("--rs-criterion token:tv:0.25@away --rs-policy current --mismatch-dry-run", "token_tv_away"),
    ("--use-tis --use-rollout-log-probs", "note: "),  # biased at token level
    ("--use-tis --markdown", "| B2 |"),
    ("--rs-criterion token:k2:0.02:share=0.1", "A first step: the bound of a budget is the one given, from the second"),
]


@pytest.mark.parametrize(("flags", "said"), FLAGS)
def test_any_flags_have_a_worked_example(flags: str, said: str) -> None:
    result = run(*flags.split())
    assert result.exit_code == 0 and " ".join(said.split()) in " ".join(result.output.split()), result.output
    assert flags != "--use-tis" or max(map(len, result.output.splitlines())) <= 80


def test_settings_that_cannot_be_are_refused_in_one_sentence() -> None:
    for line, said in (("--tis-mode mask", "without --use-tis"), ("--no-such-flag", "--no-such-flag")):
        result = run(*line.split())
        assert result.exit_code == 2 and result.stderr.startswith("cannot explain: ") and said in result.stderr
        assert result.stdout == "" and result.stderr.count("\n") == 1


# The account ----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "train": [[-1.2, -0.3], [-0.7, -0.2, -0.1]],
    "rollout_log_probs": [[-1.0, -0.4], [-2.3, -0.1, -0.1]],
    "loss_masks": [[1, 1], [1, 0, 1]],
    "advantages": (1.0, -1.0),
}
L = (-0.2, 0.1, 1.6, 0.0)
RHO = [math.exp(value) for value in L]


def told(flags: str = "", **given: Any) -> Account:
    """Of these numbers; π_old is π_θ where it is not given, as in a first step."""
    fields: dict[str, Any] = NUMBERS | given
    train = fields.pop("train")
    fields = {"old_log_probs": train, "loss_masks": [[1] * len(row) for row in train]} | fields
    packed = mp.PackedSequences.from_lists(**fields)
    log_probs = torch.tensor([value for row in train for value in row], dtype=torch.float64).requires_grad_()
    return account(log_probs, packed, mp.MismatchConfig.from_words(flags.split()))


def column(found: Account, name: str) -> list[Any]:
    """Of the tokens that train."""
    values = found.rejected_by if name == "rejected_by" else found.columns[name].tolist()
    trained = found.result.correction.tokens.mask.tolist()
    return [value for value, trains in zip(values, trained, strict=True) if trains]


def test_every_figure_of_the_account_by_hand() -> None:
    found = told("--use-tis --tis-level sequence --rs-veto-threshold 0.1 --rs-criterion token:k2:0.3")
    weight, seq = math.exp(-0.1), [math.exp(-0.1)] * 2 + [math.exp(1.6)] * 2
    figures = {
        "log_ratio": L, "ratio": RHO, "unit_ratio": seq, "weight": [min(x, 2.0) for x in seq],
        "objective": [-1.0, -1.0, 1.0, 1.0],  # −A: r = 1 in the first step
        "loss": [-weight, -weight, 0.0, 2.0], "gradient": [-weight / 3, -weight / 3, 0.0, 2.0 / 3], "upper": [2.0] * 4,
    }  # fmt: skip
    for name, values in figures.items():
        assert column(found, name) == pytest.approx(list(values)), name
    assert column(found, "rejected_by") == [[], [], ["token_k2"], []]  # 1.6² / 2 = 1.28
    assert column(found, "kept") == [1, 1, 0, 1] and "lower" not in found.columns
    flags = "--use-tis --use-rollout-log-probs --tis-mode mask --tis-upper-bound 3 --mismatch-denominator original"
    found = told(flags, old_log_probs=[[-9, -9], [-9, -9, -9]])
    assert column(found, "rejected_by") == [[], [], ["mask mode"], []]
    assert column(found, "objective") == pytest.approx([1.2, 0.3, -0.7, -0.1])  # −A log π_θ
    assert column(found, "gradient") == pytest.approx([-RHO[0] / 4, -RHO[1] / 4, 0.0, 0.25])
    assert column(found, "lower") == pytest.approx([1 / 3] * 4)


MOVED = {
    "train": [[-1], [-1], [-3]], "rollout_log_probs": [[-2], [-2], [-1]], "old_log_probs": [[-2], [-1], [-1]],
    "loss_masks": [[1], [1], [1]], "advantages": (1, -1, -1),
}  # fmt: skip
GROWN = {
    "train": [[-1.2, -0.3, -0.5, -2], [-1]], "rollout_log_probs": [[-1, -1, -0.8, -1], [-1.01]],
    "loss_masks": [[1, 0, 1, 1], [1]],
}  # fmt: skip
ACCOUNTS: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    ("--mismatch-kl-coef 0.5 --mismatch-kl-type k2", {"ref_log_probs": [[-1.0, -0.3], [-0.7, 0, -0.1]]}, "gradient",
     [-0.25 - 0.5 * 0.2 / 4, -0.25, 0.25, 0.25]),
    # π_old: l = 0, 1, 0; π_θ: 1, 1, −2
    ("--rs-criterion token:k2:0.4@away --rs-policy current", MOVED, "kept", [0, 1, 0]),
    ("--rs-max-staleness 1", MOVED | {"weight_versions": [[3], [5], [4]], "trainer_version": 5}, "rejected_by",
     [["staleness"], [], []]),
    ("--use-tis --tis-level turn --tis-upper-bound 1.05 --tis-bound-growth 0.5", GROWN, "upper",
     [1.05**n**0.5 for n in (1, 2, 2, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "given", "name", "expected"), ACCOUNTS)
def test_the_account_of_flags(flags: str, given: dict[str, Any], name: str, expected: list[Any]) -> None:
    found = column(told(flags, **given), name)
    assert found == (expected if name == "rejected_by" else pytest.approx(expected))


def test_its_tables_have_every_part_of_the_loss_and_groups_without_the_rejected() -> None:
    flags = "--use-tis --rs-criterion sequence_mean:ratio:2 --rs-group exclude --mismatch-kl-coef 0.1"
    config = mp.MismatchConfig.from_words(flags.split())
    weights, losses, sums = account_tables(current_log_probs(), batch_for(config), config)
    assert weights.headers == ("token", "log π_old", "log π_rollout", "l", "ρ", "upper", "weight")
    assert losses.column("A") == ["0.7071", PADDING, *["0.7071"] * 2, *["0"] * 2, *["-0.7071".replace("-", "−")] * 2]
    assert losses.column("rejected by")[4:6] == ["sequence_mean_ratio"] * 2
    assert sums.column("") == ["policy", "kl", "loss"]
    assert sums.column("divided by") == ["5 accepted tokens", "7 tokens", "–"]
