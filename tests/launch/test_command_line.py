"""Which tokens of a command line are ours, and which are refused as misspelt."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.fields import leaf_fields
from mismatch_plugin.hooks.base import Given, peek
from mismatch_plugin.launch.command_line import help_text, named_host, read_command_line, script_position


def _read(line: str, host_flags: tuple[str, ...] = ()) -> Given:
    return read_command_line(line.split(), host_flags)


def test_our_flags_are_taken_and_the_rest_stays_as_it_is() -> None:
    line = "--lr 1e-6 --use-tis --tis-level=geometric --n -1 --mismatch-entropy-coef -0.1 a=b --x --use-tis"
    given = _read(line)
    assert given.host_argv == ("--lr", "1e-6", "--n", "-1", "a=b", "--x")
    assert given.settings == {"use_tis": True, "tis": {"level": "geometric"}, "terms": {"entropy_coef": -0.1}}
    assert given.flags == ("--use-tis", "--tis-level", "--mismatch-entropy-coef")


def test_underscores_are_dashes_in_every_flag() -> None:
    """Also in those of the launcher itself; what the host gets keeps its spelling."""
    line = "--mismatch_host slime --use_tis --tis_level=sequence --tis_upper_bound 3 --mismatch_explain_only --num_x 1"
    given = _read(line)
    assert (given.host, given.explain_only, given.host_argv) == ("slime", True, ("--num_x", "1"))
    assert given.settings == {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 3.0}}
    assert given.flags == ("--use-tis", "--tis-level", "--tis-upper-bound")
    assert named_host(line.split()) == "slime"
    assert script_position(["--use_tis", "--tis_level", "token", "train.py"]) == 3
    assert "--use_tis" not in help_text("usage", "description")


@pytest.mark.parametrize(
    "line",
    [
        *("--use-tis false", "--mismatch-dry-run True --lr 1", "--tis-batch-normalize off"),
        *("--use-tis 0", "--mismatch-dry-run 0", "--mismatch_dry_run 1 --lr 1"),
    ],
)
def test_a_switch_with_a_value_is_refused(line: str) -> None:
    """The value would go to the host, which may pass over it, and the switch would be on."""
    with pytest.raises(ValueError, match="is a switch and takes no value"):
        _read(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr 1 -- --use-tis", "--use-tis stands behind --, where it would not be read"),
        ("--use-tis -- --tis-level geometric", "--tis-level stands behind --"),
        ("--use-tis -- x --tis_level=geometric", "--tis_level=geometric stands behind --"),
        ("-- --mismatch-host slime", "--mismatch-host stands behind --"),
        ("--use-tis -- --tis-levle token", "--tis-levle is unknown: did you mean --tis-level?"),
    ],
)
def test_our_flags_behind_two_dashes_are_refused(line: str, message: str) -> None:
    """No host's parser would read them there, and the run would go uncorrected."""
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        _read(line, ("--use-tis",))


def test_what_else_follows_two_dashes_is_the_host_s() -> None:
    given = _read("--use-tis -- --lr 1 -x -- use-tis")
    assert given.host_argv == ("--", "--lr", "1", "-x", "--", "use-tis")
    assert given.settings == {"use_tis": True}


_NUMBERS = [
    field.meta["flag"]
    for field in leaf_fields(MismatchConfig)
    if field.meta.get("flag") and float in (field.annotation, *get_args(field.annotation))
]


@pytest.mark.parametrize("flag", [*_NUMBERS, "--rs-lower-bound", "--rs-upper-bound"])
def test_nan_is_refused_as_such(flag: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag} is nan: it should be"):
        _read(f"--use-tis --use-rs {flag} nan")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tis-levle token", "--tis-levle is unknown: did you mean --tis-level?"),
        ("--use_tiss", "--use_tiss is unknown: did you mean --use-tis?"),
        ("--tis_levle token", "--tis_levle is unknown: did you mean --tis-level?"),
        ("--tis-level token --tis_level sequence", "--tis_level sequence contradicts --tis-level token"),
        ("--use-tls", "--use-tls is unknown: did you mean --use-tis?"),
        ("--tis-upper=3", "--tis-upper is unknown: did you mean --tis-upper-bound?"),
        ("--mismatch-colour red", "--mismatch-colour is unknown"),
        ("--use-rollout-logprob", "--use-rollout-logprob is unknown: did you mean --use-rollout-log"),
        ("--use-tis --tis-level token --tis-level sequence", "--tis-level sequence contradicts --tis-level token"),
        ("--use-tis --tis-mode", "Argument --tis-mode: expected one argument."),
        ("--use-tis --tis-mode cap", "Argument --tis-mode: invalid choice: 'cap'"),
        ("--tis-mode clip", "--tis-mode clip changes no weight without --use-tis"),
        # With other dashes the host would pass over it, and the run would go uncorrected.
        *((f"--lr 1 {flag}", f"^{flag} is unknown: did you mean --use-tis?") for flag in ("-use-tis", "-use_tis")),
        *((f"{dash}use-tis", f"{dash}use-tis is unknown: did you mean --use-tis?") for dash in "\u2013\u2014"),
        ("--use\u2011tis", "did you mean --use-tis?"),
        ("\u2014tis-levle=token", "did you mean --tis-level?"),
        # What is meant may be the host's.
        ("--tis_clip=3", "^--tis_clip is unknown: did you mean --tis-clip?"),
        ("--tis-clp 3", "^--tis-clp is unknown: did you mean --tis-clip?"),
    ],
)
def test_misspelt_and_contradictory_flags_are_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        _read(line, ("--tis-clip", "--tis-clip-low", "--use-tis"))


@pytest.mark.parametrize(
    "token",
    [
        *("--tensor-model-parallel-size", "--rollout-top-p", "--use-rl", "--lr", "--test-mode", "--tis-clip"),
        *("-1", "-u", "\u22121e-3", "\u2014", "-rs-7b", "-tis-clip", "-Duse=1", "-np"),
    ],
)
def test_other_tokens_are_the_host_s(token: str) -> None:
    assert _read(f"{token} 1", ("--tis-clip",)).host_argv == (token, "1")


def test_criteria_may_be_given_more_than_once() -> None:
    given = _read("--rs-criterion token:k2:0.5 --rs-criterion sequence_max:k3:0.5")
    assert [criterion["statistic"] for criterion in given.settings["rs"]["criteria"]] == ["k2", "k3"]


def test_peek_sees_defaults_and_what_was_typed() -> None:
    table: dict[str, dict[str, Any]] = {
        "--loss-type": {"default": "policy_loss"},
        "--eps-clip": {"type": float, "default": 0.2},
    }
    values, typed = peek(["--eps-clip=0.3", "--other", "1", "--eps", "9"], table)
    assert (values.loss_type, values.eps_clip, typed) == ("policy_loss", 0.3, {"eps_clip"})


@pytest.mark.parametrize(
    ("line", "position"),
    [("train.py --use-tis", 0), ("--use-tis --tis-level token train.py", 3), ("--mismatch-host=slime -m a.b c", 1)],
)
def test_the_script_is_the_first_token_that_is_not_ours(line: str, position: int) -> None:
    assert script_position(line.split()) == position
