"""Objectives, conditions, growing bounds, groups, staleness, distance to the sampler: what goes together."""

from __future__ import annotations

import argparse
import math
import re
import warnings
from typing import Any

import pytest

import mismatch_plugin as mp


def _config(text: str) -> mp.MismatchConfig:
    """The configuration of a line of flags."""
    parser = mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return mp.MismatchConfig.from_args(parser.parse_args(text.split()))


@pytest.mark.parametrize(
    ("flags", "clip"),
    [
        ("", (0.2, 0.2)),
        ("--mismatch-objective gspo", (3e-4, 4e-4)),
        ("--mismatch-objective cispo", (1.0, 0.2)),
        ("--mismatch-objective gmpo", (0.4, 0.4)),
        ("--mismatch-objective reinforce", (0.2, 0.2)),
        ("--mismatch-objective gspo --mismatch-eps-clip-low 0.2", (0.2, 4e-4)),
        ("--mismatch-objective cispo --mismatch-eps-clip-high 5", (1.0, 5.0)),
    ],
)
def test_an_epsilon_that_is_not_given_is_the_objectives_own(flags: str, clip: tuple[float, float]) -> None:
    config = _config(flags)
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high) == clip
    assert mp.MismatchConfig.build(config.model_dump()) == config


def test_another_objective_brings_its_own_epsilon() -> None:
    config = mp.MismatchConfig(objective="gspo", aggregation="seq-mean-token-mean")
    assert config.replace(objective="cispo").ppo.eps_clip_low == 1.0
    assert config.replace(objective="ppo") == mp.MismatchConfig(aggregation="seq-mean-token-mean")
    given = mp.MismatchConfig(objective="cispo", ppo={"eps_clip_low": 0.5})  # type: ignore[arg-type]
    assert given.replace(objective="ppo").ppo.eps_clip_low == 0.5


def test_which_objective_acts() -> None:
    assert _config("--mismatch-objective cispo").policy_objective == "cispo"
    assert _config("--use-tis --mismatch-objective reinforce").policy_objective == "reinforce"
    assert _config("--use-tis --use-rollout-log-probs --tis-level sequence").policy_objective == "reinforce"


_CRITERION = "--rs-criterion token:tv:0.2"
_GAMMA = "--use-tis --use-rollout-log-probs --tis-level sequence --tis-mode gamma"
_NO_EFFECT = [
    ("--use-tis --use-rollout-log-probs --mismatch-objective ppo", "--mismatch-objective ppo changes nothing in"),
    ("--mismatch-objective reinforce --mismatch-eps-clip-low 0.1", "--mismatch-eps-clip-low 0.1 changes nothing under"),
    ("--mismatch-objective cispo --mismatch-dual-clip 3", "--mismatch-dual-clip 3 changes nothing under"),
    ("--use-tis --tis-mode gamma", "--tis-mode gamma weighs responses by π_θ/π_rollout: it needs"),
    (f"{_GAMMA} --tis-upper-bound 3", "--tis-upper-bound 3 bounds no weight under --tis-mode gamma"),
    (f"{_GAMMA} --tis-upper-bound-positive 3", "--tis-upper-bound-positive 3 bounds no weight under --tis-mode gamma"),
    ("--tis-upper-bound-positive 3", "--tis-upper-bound-positive 3 changes no weight without --use-tis"),
    ("--use-tis --tis-lower-bound-positive 1", "--tis-lower-bound-positive 1 bounds no weight under --tis-mode trunc"),
    ("--use-tis --tis-mode clip --tis-lower-bound-positive 5", "is 5 to 2, which holds no ratio"),
    (
        "--use-tis --tis-level turn --tis-upper-bound 2 --tis-bound-growth 0.5 --tis-upper-bound-positive 3",
        "--tis-bound-growth grows one pair of bounds",
    ),
    (f"--rs-group exclude {_CRITERION} --use-tis --tis-upper-bound-positive 3", "and bounds for A ≥ 0 needs these"),
    ("--mismatch-objective gmpo --mismatch-dual-clip 3", "--mismatch-dual-clip 3 changes nothing under"),
    ("--mismatch-objective sapo --mismatch-eps-clip-low 0.1", "--mismatch-eps-clip-low 0.1 changes nothing under"),
    ("--mismatch-tau-negative 2", "--mismatch-tau-negative 2 changes nothing without --mismatch-objective sapo"),
    ("--mismatch-objective sapo --mismatch-tau-positive 0", "tau-positive is 0.0: it should be greater than"),
    ("--use-tis --tis-upper-bound 1.05 --tis-bound-growth 0.5", "--tis-bound-growth 0.5 needs a --tis-level whose"),
    ("--tis-bound-growth 0.5 --tis-upper-bound 1.05", "--tis-upper-bound 1.05 changes no weight without --use-tis"),
    ("--use-tis --tis-level turn --tis-bound-growth 0.5", "--tis-bound-growth 0.5 needs bounds around 1"),
    ("--use-tis --tis-level turn --tis-bound-growth 0.5 --tis-upper-bound 0.9", "--tis-bound-growth 0.5 needs bounds"),
    ("--rs-policy current", "--rs-policy current needs a criterion or a veto"),
    (f"--use-rollout-log-probs --rs-policy current {_CRITERION}", "--rs-policy current changes nothing in algorithm 1"),
    ("--rs-group exclude", "--rs-group exclude needs something that rejects"),
    (f"--rs-group drop {_CRITERION}", "--rs-group drop needs --rs-min-group"),
    (f"--rs-group exclude --rs-min-group 3 {_CRITERION}", "--rs-min-group 3 changes nothing without --rs-group drop"),
    (f"--rs-group exclude {_CRITERION}@negative", "and criterion token_tv_negative needs these"),
    (f"--rs-group exclude --rs-policy current {_CRITERION}", "--rs-policy current judges π_θ: choose keep"),
    (f"--rs-group exclude --use-rollout-log-probs {_CRITERION}", "and algorithm 1 judges π_θ: choose keep"),
    (
        "--mismatch-rollout-kl-type k3",
        "--mismatch-rollout-kl-type k3 changes nothing without",
    ),
    ("--mismatch-rollout-kl-coef 0.1 --mismatch-rollout-kl-on accepted", "on accepted needs something that rejects"),
    ("--rs-criterion sequence_mean:tv:0.1@away", "away is for aggregate token"),
    ("--rs-criterion token:tv:0.1@towards", "'towards' is unknown: there is any, negative, away."),
    ("--rs-max-staleness 1.5", "invalid int value"),
    ("--rs-max-staleness -1", "--rs-max-staleness is -1: it should be greater than or equal to 0"),
]


@pytest.mark.parametrize(("flags", "message"), _NO_EFFECT, ids=[flags for flags, _ in _NO_EFFECT])
def test_what_has_no_effect_or_contradicts_is_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, SystemExit)) as error:
        _config(flags)
    said = capsys.readouterr().err if isinstance(error.value, SystemExit) else str(error.value)
    assert re.search(re.escape(message), said), said


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--mismatch-objective cispo", ""),
        ("--mismatch-objective cispo --mismatch-eps-clip-low 0.2", "also clips small ratios"),
        ("--mismatch-objective sapo", "the paper's loss is seq-mean-token-mean"),
        ("--mismatch-objective gmpo --mismatch-aggregation seq-mean-token-mean", ""),
        ("--use-tis --mismatch-objective reinforce", ""),
        ("--use-rollout-log-probs --mismatch-objective reinforce", "nothing corrects the mismatch but rejection"),
    ],
)
def test_objectives_outside_their_known_range_are_noted(flags: str, noted: str) -> None:
    parser = mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mp.MismatchConfig.from_args(parser.parse_args(flags.split()))
    assert [noted in str(warning.message) for warning in caught] == [True] * bool(noted)


_FITS = [
    "--use-tis --tis-level prefix --tis-bound-growth 0.5 --tis-upper-bound 1.05",
    "--use-tis --tis-level turn",
    f"--rs-policy current {_CRITERION}@away",
    f"--rs-group drop --rs-min-group 3 {_CRITERION}",
    "--rs-group exclude --rs-max-staleness 2",
    "--mismatch-rollout-kl-coef 0.1 --mismatch-rollout-kl-on accepted --rs-max-staleness 0",
    "--mismatch-objective gspo --mismatch-dual-clip 3 --mismatch-aggregation seq-mean-token-mean",
]


@pytest.mark.parametrize("flags", _FITS)
def test_what_fits_is_taken_and_shown(flags: str) -> None:
    config = _config(flags)
    block = config.describe()
    shown = {
        "prefix": "level prefix",
        "turn": "level turn",
        "judged by π_θ": "policy current",
        "accepted responses only": "rs-group",
        "weight versions": "stale",
        "penalty": "kl-coef",
        "gspo": "gspo",
    }
    assert {word for word in shown if word in block} == {word for word, flag in shown.items() if flag in flags}


def test_a_condition_is_part_of_the_name_and_of_the_spelling() -> None:
    config = _config(
        "--rs-criterion token:tv:0.15@away --rs-criterion token:tv:0.3 --rs-criterion sequence_mean:k1:0.9:inf@negative"
    )
    assert [criterion.name for criterion in config.criteria] == [
        "token_tv_away",
        "token_tv",
        "sequence_mean_ratio_negative",
    ]
    assert config.criteria[2].log_bounds == (math.log(0.9), None)
    assert _config("--rs-criterion token:tv:0.15@any") == _config("--rs-criterion token:tv:0.15")
    assert config.needs_advantages and not _config("--rs-criterion token:tv:0.15").needs_advantages


@pytest.mark.parametrize(
    ("flags", "needs", "uses"),
    [
        ("--rs-max-staleness 1", False, False),  # versions alone decide
        ("--mismatch-rollout-kl-coef 0.1", True, True),
        ("--rs-criterion token:tv:0.1", True, True),
        ("--mismatch-dry-run --rs-criterion token:tv:0.1", True, False),
        ("", False, False),
    ],
)
def test_what_needs_rollout_log_probs(flags: str, needs: bool, uses: bool) -> None:
    config = _config(flags)
    assert (config.needs_rollout_log_probs, config.uses_rollout_values) == (needs, uses)


def _properties(flags: str) -> dict[str, Any]:
    config = _config(flags)
    return {
        name: getattr(config, name)
        for name in ("rejects_on_current_policy", "keep_known_before_step", "three_policies")
    }


def test_which_policy_is_judged() -> None:
    old = {"rejects_on_current_policy": False, "keep_known_before_step": True, "three_policies": True}
    assert _properties(_CRITERION) == old
    current = {"rejects_on_current_policy": True, "keep_known_before_step": False, "three_policies": False}
    assert _properties(f"{_CRITERION} --rs-policy current") == current
    bypass = {"rejects_on_current_policy": False, "keep_known_before_step": False, "three_policies": False}
    assert _properties(f"{_CRITERION} --use-rollout-log-probs") == bypass


def test_what_rejects_nothing_and_what_bounds_a_ratio_is_said():
    for flags in ("token:tv:1", "sequence_mean:k1:inf", "token:k2:inf"):
        with pytest.warns(mp.MismatchWarning, match="rejects nothing"):
            mp.MismatchConfig.build({"rs": {"criteria": [flags]}})
    with pytest.raises(ValueError, match=re.escape("has upper bound 0.1 alone, and its reciprocal")):
        _config("--rs-criterion sequence_mean:k1:0.1@negative")


def test_the_weights_of_dppo_are_not_called_biased():
    with warnings.catch_warnings():
        warnings.simplefilter("error", mp.MismatchWarning)
        mp.preset("dppo_tv")
    with pytest.warns(mp.MismatchWarning, match="biased"):
        mp.preset("bypass_pg_geo_rs_token_tis")
