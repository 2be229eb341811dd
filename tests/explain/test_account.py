"""Numbers of one's own: read as typed, and every figure of the account by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import LEVELS
from mismatch_plugin.explain.account import Account, account
from mismatch_plugin.explain.example import MODES, explain_table
from mismatch_plugin.explain.numbers import read_numbers, sequence_name

NUMBERS = {
    "train": ["-1.2,-0.3; -0.7,-0.2,-0.1"],
    "rollout": ["-1.0,-0.4; -2.3,-0.1,-0.1"],
    "mask": ["1,1;1,0,1"],
    "advantages": ["1; -1"],
}


def told(flags: str = "", **given: str) -> Account:
    numbers = read_numbers(NUMBERS | {name: [text] for name, text in given.items()})
    return account(numbers, MismatchConfig.from_words(flags.split()))


def column(found: Account, name: str) -> list[Any]:
    return [getattr(token, name) for token in found.tokens if token.trains]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "80", "TERM": "dumb"})


def words(**given: str) -> list[str]:
    named = {name: "; ".join(texts) for name, texts in NUMBERS.items()} | given
    return [word for name, text in named.items() for word in (f"--{name}", text)]


def test_truncated_sequence_weights_a_criterion_and_the_veto_by_hand():
    found = told("--use-tis --tis-level sequence --rs-veto-threshold 0.1 --rs-criterion token:k2:0.3")
    assert [token.name for token in found.tokens] == ["A1", "A2", "B1", "B2", "B3"]
    assert [token.trains for token in found.tokens] == [True, True, True, False, True]
    assert column(found, "log_ratio") == pytest.approx([-0.2, 0.1, 1.6, 0.0])
    assert column(found, "ratio") == pytest.approx([math.exp(value) for value in (-0.2, 0.1, 1.6, 0.0)])
    products = [math.exp(-0.1)] * 2 + [math.exp(1.6)] * 2
    assert column(found, "unit_ratio") == pytest.approx(products)
    assert column(found, "weight") == pytest.approx([min(product, 2.0) for product in products])
    assert column(found, "rejected_by") == [(), (), ("token_k2",), ()]  # 1.6² / 2 = 1.28
    assert column(found, "kept") == [True, True, False, True]
    assert column(found, "objective") == [-1.0, -1.0, 1.0, 1.0]  # −A: r = 1 in the first step
    weight = math.exp(-0.1)
    assert column(found, "loss") == pytest.approx([-weight, -weight, 0.0, 2.0])
    assert column(found, "gradient") == pytest.approx([-weight / 3, -weight / 3, 0.0, 2.0 / 3])
    assert found.sums.policy == pytest.approx(2.0 - 2 * weight) and found.sums.denominator == 3
    assert found.sums.counted == "accepted tokens" and found.sums.loss == pytest.approx((2.0 - 2 * weight) / 3)
    assert column(found, "lower") == [None] * 4 and column(found, "upper") == [2.0] * 4


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_reinforce_with_mask_mode_by_hand():
    flags = "--use-tis --use-rollout-log-probs --tis-mode mask --tis-upper-bound 3 --mismatch-denominator original"
    found = told(flags, old="-9,-9;-9,-9,-9")
    assert found.algorithm == 3 and found.level == "token"
    ratios = [math.exp(-0.2), math.exp(0.1), 0.0, 1.0]
    assert column(found, "weight") == pytest.approx(ratios)
    assert column(found, "rejected_by") == [(), (), ("mask mode",), ()]
    assert column(found, "objective") == pytest.approx([1.2, 0.3, -0.7, -0.1])  # −A log π_θ
    assert column(found, "gradient") == pytest.approx([-ratios[0] / 4, -ratios[1] / 4, 0.0, 0.25])
    assert found.sums.counted == "tokens" and found.sums.denominator == 4
    assert column(found, "lower") == pytest.approx([1 / 3] * 4)


def test_pi_old_of_its_own_clips():
    """r = e^−0.7 and e^1.6 lie outside 1 ± 0.2 on the side that is clipped where A < 0, and A > 0."""
    found = told("", train="-1.2; -0.7", rollout="-1; -1", mask="1;1", old="-0.5;-2.3", advantages="-1;1")
    assert column(found, "objective") == pytest.approx([0.8, -1.2]) and column(found, "gradient") == [0.0, 0.0]


def test_terms_are_in_the_loss_and_its_gradient():
    found = told("--mismatch-kl-coef 0.5 --mismatch-kl-type k2", ref="-1.0,-0.3;-0.7,0,-0.1")
    assert found.sums.terms == {"kl": pytest.approx(0.5 * 0.02)} and found.sums.terms_denominator == 4
    assert column(found, "gradient") == pytest.approx([-0.25 - 0.5 * 0.2 / 4, -0.25, 0.25, 0.25])


def test_normalised_weights_say_their_mean():
    found = told("--use-tis --tis-batch-normalize")
    weights = [math.exp(-0.2), math.exp(0.1), 2.0, 1.0]
    assert found.batch_factor == pytest.approx(sum(weights) / 4)
    assert column(found, "weight") == pytest.approx([weight / (sum(weights) / 4) for weight in weights])


def test_a_dry_run_says_who_would_reject():
    found = told("--use-tis --rs-criterion token:k2:0.3 --mismatch-dry-run")
    assert column(found, "rejected_by")[2] == ("token_k2",) and column(found, "kept") == [True] * 4


def test_what_an_engine_did_not_return_follows_the_policy():
    given = {"rollout": "-1.0,None;-2.3,-0.1,-0.1"}
    with pytest.raises(ValueError, match="sequence A, position 1 is missing"):
        told("--use-tis", **given)
    found = told("--use-tis --rollout-log-prob-policy drop-token", **given)
    assert column(found, "rejected_by") == [(), ("invalid log-prob",), (), ()]
    assert column(found, "kept") == [True, False, True, True]


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric", "prefix"])
def test_bounds_shown_are_those_that_act(level: str):
    growth = "" if level in ("token", "geometric") else " --tis-bound-growth 0.5"
    flags = f"--use-tis --tis-level {level} --tis-mode clip --tis-lower-bound 0.95 --tis-upper-bound 1.05{growth}"
    given = {"train": "-1.2,-0.3,-0.5,-2;-1", "rollout": "-1,-1,-0.8,-1;-1.01", "mask": "1,0,1,1;1"}
    found = told(flags, **given, advantages="1")
    rows = [token for token in found.tokens if token.trains]
    assert [token.weight for token in rows] == pytest.approx(
        [min(max(token.unit_ratio or 0, token.lower or 0), token.upper or 0) for token in rows]
    )
    tokens = {"turn": [1, 2, 2, 1], "sequence": [3, 3, 3, 1], "prefix": [1, 2, 3, 1]}.get(level, [1] * 4)
    assert column(found, "upper") == pytest.approx([1.05**n**0.5 for n in tokens])


def test_conditions_versions_and_the_policy_that_is_judged():
    moved = {"train": "-1;-1;-3", "rollout": "-2;-2;-1", "old": "-2;-1;-1", "mask": "1", "advantages": "1;-1;-1"}
    judged = {  # π_old: l = 0, 1, 0; π_θ: 1, 1, −2
        "--rs-criterion token:k2:0.4": [True, False, True],
        "--rs-criterion token:k2:0.4 --rs-policy current": [False, False, False],
        "--rs-criterion token:k2:0.4@away --rs-policy current": [False, True, False],
        "--rs-criterion token:k2:0.4@negative --rs-policy current": [True, False, False],
        "--rs-veto-threshold 0.2 --rs-policy current": [True, True, False],
    }
    for flags, kept in judged.items():
        found = told(flags, **moved)
        assert column(found, "kept") == kept and [not names for names in column(found, "rejected_by")] == kept, flags
    versions = read_numbers({name: [text] for name, text in (moved | {"versions": "3;5;4"}).items()}, 5)
    assert column(account(versions, MismatchConfig.from_words(["--rs-max-staleness", "1"])), "rejected_by") == [
        ("staleness",),
        (),
        (),
    ]


def test_advantages_of_rewards_without_the_rejected():
    given = {"train": "-1;-1;-1;-1", "rollout": "-1;-3;-1;-1"}
    read = read_numbers({name: [text] for name, text in given.items()} | {"rewards": ["1,1,0,0"]})
    kept, excluded = (
        column(account(read, MismatchConfig.from_words(["--rs-criterion", "token:k2:0.5", *words])), "advantage")
        for words in ([], ["--rs-group", "exclude"])
    )
    assert kept == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)
    assert excluded == pytest.approx([1.155, 0, -0.577, -0.577], abs=1e-3)


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_each_objective_says_its_formula_and_shows_its_ratio():
    moved = words(train="-1.2,-0.3;-0.7,-0.2,-0.1", old="-1.1,-0.5;-0.7,-0.2,-0.1")
    for objective, said in (("gspo", "0.9997 to 1.0004"), ("cispo", "−clip(r) A log π_θ"), ("reinforce", "−A log π_θ")):
        output = run(*moved, "--mismatch-objective", objective).output
        assert said in " ".join(output.split())
    found = told("--mismatch-objective gspo", train="-1.2,-0.3;-0.7,-0.2,-0.1", old="-1.1,-0.5;-0.7,-0.2,-0.1")
    assert column(found, "objective_ratio")[:2] == pytest.approx([math.exp(0.05)] * 2)


def test_the_metrics_are_those_of_training():
    numbers = read_numbers(NUMBERS)
    config = mp.preset("token_is")
    found = account(numbers, config)
    assert found.metrics == mp.policy_loss(numbers.log_probs, numbers.packed, config).statistics.metrics()


# As typed -------------------------------------------------------------------------------------------------------------


def test_sequences_by_semicolons_or_by_repeating_and_a_number_for_all():
    repeated = read_numbers({"train": ["-1.2, -0.3", "[-0.7 -0.2]"], "rollout": ["-1,-1", "-1,-1"]})
    once = read_numbers({"train": ["-1.2,-0.3;-0.7,-0.2"], "rollout": ["-1,-1;-1,-1"], "mask": ["1"]})
    assert torch.equal(repeated.log_probs, once.log_probs) and repeated.packed.lengths == once.packed.lengths == (2, 2)
    assert once.packed.loss_mask.all() and once.packed.advantages is not None and (once.packed.advantages == 1).all()
    by_sequence = read_numbers({"train": ["-1,-1;-1"], "rollout": ["-1,-1;-1"], "advantages": ["2;-3"]})
    assert by_sequence.packed.advantages is not None and by_sequence.packed.advantages.tolist() == [2.0, 2.0, -3.0]
    assert [sequence_name(index) for index in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


def test_what_the_mask_hides_may_be_anything():
    found = read_numbers({"train": ["-1,nan"], "rollout": ["-1,5"], "mask": ["1,0"]})
    assert found.packed.loss_mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout": "-1.0,-0.4"}, "--rollout has 1 sequence and --train 2 sequences"),
        ({"rollout": "-1.0,-0.4,-3;-1,-1,-1"}, "--rollout has 3 numbers in sequence A and --train 2: give one a token"),
        ({"mask": "1,1,1;1,1,1"}, "--mask has 3 numbers in sequence A and --train 2"),
        ({"train": "0.5,-1;-1,-1,-1"}, "token 1 of sequence A in --train is 0.5, above 0"),
        ({"rollout": "-1,-1;-1,-1,0.9"}, "token 3 of sequence B in --rollout is 0.9, above 0"),
        ({"train": "-1,nan;-1,-1,-1"}, "token 2 of sequence A in --train is nan"),
        ({"train": "-1,two;-1,-1,-1"}, "token 2 of sequence A in --train is 'two', which is not a number"),
        ({"train": "-1,-1;"}, "--train has no number in sequence B"),
        ({"mask": "1,2;1,1,1"}, "loss_masks holds 2"),
        ({"advantages": "inf"}, "advantages of sequence A is inf"),
        ({"versions": "1,1.5;1,1,1"}, "--versions holds a number that is not whole"),
        ({"ref": "1,-1;-1,-1,-1"}, "--ref is 1, above 0"),
    ],
)
def test_what_cannot_be_is_one_clear_sentence(given: dict[str, str], said: str):
    result = run(*words(**given))
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr and result.stderr.startswith("cannot explain: ")
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--train", "-1"], "--rollout is missing"),
        ([*words(), "--no-such-flag"], "--no-such-flag is no flag of this package"),
        ([*words(), "--tis-level", "tokens"], "--tis-level"),
        ([*words(), "--tis-mode", "mask"], "without --use-tis"),
        ([*words(), "--mode", "mask"], "--tis-mode"),
        ([*words(), "--mismatch-explain-only"], "leave it out"),
        ([*words(), "--mismatch-kl-coef", "0.1"], "ref_log_probs is missing"),
        ([*words(), "--rewards", "1,0"], "--rewards and --advantages"),
        ([*words(), "--groups", "1,0"], "--groups is for --rewards"),
        ([*words(), "--rs-group", "exclude", "--rs-veto-threshold", "0.1"], "give --rewards"),
        ([*words(), "--rs-max-staleness", "1"], "--versions with --trainer-version: give --versions"),
        ([*words(versions="1,1;1,1,1"), "--rs-max-staleness", "1"], "give --trainer-version"),
        ([*words(), "--trainer-version", "1"], "--trainer-version is for --rs-max-staleness: give it, or leave"),
        ([*words(), "--versions", "1,1;1,1,1"], "--versions is for --rs-max-staleness"),
        ([*words(), "--ref", "-1,-1;-1,-1,-1"], "--ref is for --mismatch-kl-coef"),
        ([*words(), "--entropy", "1,1;1,1,1"], "--entropy is for --mismatch-entropy-coef"),
        (words(mask="0"), "--mask has no 1"),
        (["--train", "-1;-1", "--rollout", "-1;-1", "--rewards", "1"], "--rewards has 1 number for 2 sequences"),
        (["--use-tis", "--trainer-version", "3"], "--train is missing"),
        (["--use-tis", "--tis-levle", "token"], "--tis-levle is no flag of this package"),
        (["--use-tis", "--mode", "clip"], "write --tis-mode"),
        (["--json"], "--json is for one setting"),
    ],
)
def test_what_does_not_fit_is_refused(line: list[str], said: str):
    result = run(*line)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr


def test_the_gate_is_told_behind_the_tables():
    for bar, said in (("1e-6", "training stops here"), ("100", "training goes on")):
        result = run(*words(), "--mismatch-gate-kl", bar)
        assert result.exit_code == 0 and "Sums" in result.stdout and said in result.stdout.splitlines()[-1]


def test_the_command_shows_tables_that_fit_and_json_that_is_the_account():
    flags = ["--use-tis", "--tis-level", "sequence", "--rs-criterion", "token:k2:0.3"]
    result = run(*words(), *flags)
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    for text in ("algorithm 2: decoupled PPO", "sequence ρ", "token_k2", "accepted tokens", "0.0634417", "gradient"):
        assert text in result.output
    told_as_json = json.loads(run(*words(), *flags, "--json").stdout)
    assert told_as_json == json.loads(told(" ".join(flags)).model_dump_json())
    assert "| B3 |" in run(*words(), *flags, "--markdown").output


def test_a_preset_and_its_notes():
    result = run(*words(), "--mismatch-preset", "geo_rs")
    assert result.exit_code == 0 and "sequence_mean_ratio" in result.output and "veto" in result.output
    assert "note: " in run(*words(), "--use-tis", "--use-rollout-log-probs").output  # biased at token level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_flags_alone_are_explained_on_the_worked_example(level: str, mode: str):
    """The weights are those of its table, and the sums those of the loss."""
    bounds = ["--tis-lower-bound", "0.5", "--tis-upper-bound", "2"] if mode != "truncate" else []
    result = run("--use-tis", "--tis-level", level, "--tis-mode", mode, *bounds, "--json")
    found = json.loads(result.stdout)
    rows = {row[0]: row[1:] for row in explain_table([mode], [level]).rows}
    cells = [cell.removesuffix(" ✗") for cell in rows[f"{level}: {mode}"] if cell != "·"]
    assert [f"{token['weight']:.3g}" for token in found["tokens"] if token["trains"]] == cells
    assert found["sums"]["loss"] == pytest.approx(found["sums"]["policy"] / found["sums"]["denominator"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--use-tis", "C1     −0.7985  2.25    1   yes   −1.2       −0.48  0"),
        ("--use-rollout-log-probs --rs-veto-threshold 0.7", "veto"),
        ("--mismatch-preset token_icepop", "mask mode"),
        ("--use-tis --mismatch-kl-coef 0.1 --mismatch-entropy-coef 0.01", "entropy"),
        ("--rs-criterion token:tv:0.25@away --rs-policy current --mismatch-dry-run", "token_tv_away"),
        ("--use-tis --rs-max-staleness 1 --rs-group exclude", "staleness"),
        ("--use-tis --mismatch-gate-kl 0.01", "training stops here"),
        ("--mismatch-objective gspo --mismatch-aggregation seq-mean-token-mean", "3 sequences"),
    ],
)
def test_any_flags_have_a_worked_example(flags: str, said: str):
    result = run(*flags.split())
    assert result.exit_code == 0 and said in result.output, result.output
