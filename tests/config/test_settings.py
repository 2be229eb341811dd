"""Settings: what they resolve to, what is refused and with which sentence, what is warned of.

A row's text is a line of flags, or YAML of nested settings.
"""

from __future__ import annotations

import argparse
import math
import re
from operator import attrgetter
from typing import Any

import pytest
from pydantic import ValidationError, create_model

import mismatch_plugin as mp
from mismatch_plugin.config import bound_warnings
from mismatch_plugin.config.values import bounds, number, parse_bool
from tests.config.reading import criteria, noted, read

# What settings resolve to ---------------------------------------------------------------------------------------------

BOTH = "--use-tis --use-rollout-log-probs"
CRITERION = "--rs-criterion token:tv:0.2"
SWITCHES = "algorithm weighted rejects policy_objective"
POLICIES = "rejects_on_current_policy keep_known_before_step three_policies"
CLIP = "ppo.eps_clip_low ppo.eps_clip_high"
STEPS = "normalizes normalizes_step changes_denominator"
NEEDS = "needs_rollout_log_probs uses_rollout_values excludes_invalid"

RESOLVED: list[tuple[str, str, tuple[Any, ...]]] = [
    ("", SWITCHES, (0, False, False, "ppo")),
    ("--use-rollout-log-probs", SWITCHES, (1, False, False, "ppo")),
    ("--use-tis", SWITCHES, (2, True, False, "ppo")),
    (f"{BOTH} --tis-level sequence", SWITCHES, (3, True, False, "reinforce")),
    (f"{BOTH} --tis-level none --rs-veto-threshold 1e-4", SWITCHES, (3, False, True, "reinforce")),
    ("--rs-criterion token:ratio:2 --mismatch-objective cispo", SWITCHES, (0, False, True, "cispo")),
    ("--rs-max-staleness 2", SWITCHES, (0, False, True, "ppo")),
    ("--rollout-log-prob-policy drop-token", SWITCHES, (0, False, True, "ppo")),
    # bounds
    ("--use-tis", "tis.mode tis.level tis.lower tis.upper", ("truncate", "token", 0.5, 2.0)),
    ("--use-tis --tis-upper-bound inf", "tis.lower tis.upper", (math.exp(-20), math.exp(20))),
    ("--use-tis --tis-mode clip --tis-upper-bound 4 --tis-lower-bound 4", "tis.lower", (4.0,)),
    ("--use-tis --tis-upper-bound 0.5", "tis.lower tis.upper", (0.5, 0.5)),
    ("--use-tis --tis-upper-bound-positive 3", "tis.positive tis.differs_by_sign", ((0.5, 3.0), True)),
    # ε that is not given is the objective's own
    ("", CLIP, (0.2, 0.2)),
    ("--mismatch-objective gspo", CLIP, (3e-4, 4e-4)),
    ("--mismatch-objective cispo", CLIP, (1.0, 0.2)),
    ("--mismatch-objective gmpo", CLIP, (0.4, 0.4)),
    ("--mismatch-objective reinforce", f"{CLIP} ratio_bounds", (0.2, 0.2, None)),
    ("--mismatch-objective gspo --mismatch-eps-clip-low 0.2", CLIP, (0.2, 4e-4)),
    # which policy is judged, and what a step needs
    (CRITERION, POLICIES, (False, True, True)),
    (f"{CRITERION} --rs-policy current", POLICIES, (True, False, False)),
    (f"{CRITERION} --use-rollout-log-probs", POLICIES, (False, False, False)),
    ("", POLICIES, (False, True, False)),
    ("", NEEDS, (False, False, True)),
    ("--mismatch-rollout-kl-coef 0.1", NEEDS, (True, True, False)),
    (CRITERION, NEEDS, (True, True, False)),
    (f"--mismatch-dry-run {CRITERION}", NEEDS, (True, False, True)),
    ("--use-tis --tis-batch-normalize", STEPS, (True, True, False)),
    (CRITERION, STEPS, (False, False, True)),
    (f"{CRITERION}@away", "advantage_readers", (("criterion token_tv_away",),)),
    ("tis: {batch_normalize: false, lower_bound: null}", "tis", (mp.MismatchConfig().tis,)),  # off is off
    ("metrics: off", "metrics", ("off",)),  # YAML 1.1 reads false
]


@pytest.mark.parametrize(("text", "names", "values"), RESOLVED)
def test_settings_resolve_to(text: str, names: str, values: tuple[Any, ...]) -> None:
    config, _ = noted(read, text)
    found = {name: attrgetter(name)(config) for name in names.split()}
    assert found == dict(zip(found, values, strict=True))
    assert noted(mp.MismatchConfig.build, config.model_dump(mode="json"))[0] == config, "a saved file means the same"


CRITERIA: list[tuple[Any, tuple[Any, ...], tuple[float | None, float | None]]] = [
    ("sequence_max:k2:0.5", ("sequence_max", "k2", None, 0.5), (None, 0.5)),
    ("sequence_sum:k1:0:5", ("sequence_sum", "k1", 0.0, 5.0), (None, math.log(5))),
    ("geometric:ratio", ("sequence_mean", "ratio", 1 / 1.05, 1.05), (math.log(1 / 1.05), math.log(1.05))),  # of TIS
    ("token:k2:0.02:mean=0.02", ("token", "k2", None, 0.02, "mean=0.02"), (None, 0.02)),
    ("sequence_mean:k1:0.9:inf@negative", ("sequence_mean", "k1", 0.9, math.inf, "negative"), (math.log(0.9), None)),
    ({"statistic": "binary_kl", "upper_bound": "0.1"}, ("token", "binary_kl", None, 0.1), (None, 0.1)),
]


@pytest.mark.parametrize(("spec", "expected", "limits"), CRITERIA)
def test_criteria_have_their_bounds_in_their_own_space(spec: Any, expected: Any, limits: Any) -> None:
    config, _ = noted(mp.MismatchConfig, use_tis=True, tis={"upper_bound": 1.05}, rs={"criteria": [spec]})
    assert criteria(config) == [expected]
    condition = "_negative" if "negative" in expected else ""
    assert config.criteria[0].name == f"{expected[0]}_{expected[1].replace('k1', 'ratio')}{condition}"
    assert config.criteria[0].log_bounds == limits


TO_FOUR = "--use-rs --rs-upper-bound 4"
BY_FLAGS = {
    TO_FOUR: [("token", "ratio", 0.25, 4.0)],
    f"{TO_FOUR} --rs-level geometric --rs-lower-bound 0.9": [("sequence_mean", "ratio", 0.9, 4.0)],
    "--use-tis --tis-upper-bound 5 --use-rs": [("token", "ratio", 0.2, 5.0)],
    f"--rs-criterion token:k2:0.5 {TO_FOUR}": [("token", "k2", None, 0.5), ("token", "ratio", 0.25, 4.0)],
}


@pytest.mark.parametrize("line", BY_FLAGS)
def test_rejection_flags_are_one_criterion_of_the_ratio_beside_the_others(line: str) -> None:
    assert criteria(noted(read, line)[0]) == BY_FLAGS[line]


# What is refused ------------------------------------------------------------------------------------------------------

GAMMA = f"{BOTH} --tis-level sequence --tis-mode gamma"
GROWING = "--use-tis --tis-level turn --tis-upper-bound 1.05 --tis-bound-growth 0.5"
NO_WEIGHT = "changes no weight without --use-tis: leave --tis-mode out or set --use-tis."

REFUSED = [
    # without effect, asked for
    ("--tis-mode truncate", f"--tis-mode truncate {NO_WEIGHT}"),  # the default, but typed
    ("tis: {mode: clip}", "tis.mode clip changes no weight without use_tis: leave tis.mode out or set use_tis."),
    ("--use-tis --tis-lower-bound 0.1", "--tis-lower-bound 0.1 bounds no weight under --tis-mode truncate"),
    (f"{GAMMA} --tis-upper-bound 3", "--tis-upper-bound 3 bounds no weight under --tis-mode gamma"),
    ("--use-tis --tis-batch-normalize-scope step", "changes nothing without --tis-batch-normalize"),
    ("--use-tis --tis-upper-bound 1.05 --tis-bound-growth 0.5", "--tis-bound-growth 0.5 needs a --tis-level whose"),
    (f"{BOTH} --tis-level none --tis-mode mask", "--tis-mode mask changes nothing at --tis-level none (every weight"),
    (f"{BOTH} --mismatch-objective ppo", "--mismatch-objective ppo changes nothing in algorithm 3"),
    (f"{BOTH} --mismatch-eps-clip-high 0.3", "--mismatch-eps-clip-high 0.3 changes nothing in algorithm 3"),
    ("--mismatch-objective reinforce --mismatch-eps-clip-low 0.1", "0.1 changes nothing under --mismatch-objective r"),
    ("--mismatch-objective cispo --mismatch-dual-clip 3", "--mismatch-dual-clip 3 changes nothing under"),
    ("--mismatch-objective sapo --mismatch-eps-clip-low 0.1", "--mismatch-eps-clip-low 0.1 changes nothing under"),
    ("--mismatch-tau-negative 2", "--mismatch-tau-negative 2 changes nothing without --mismatch-objective sapo"),
    ("--mismatch-length-norm 100", "length-norm 100 needs --mismatch-aggregation seq-mean-token-sum"),
    ("--mismatch-kl-type k1", "--mismatch-kl-type k1 changes nothing without --mismatch-kl-coef"),
    ("--mismatch-kl-coef 0.1 --mismatch-kl-importance-weighted", "needs importance weights (--use-tis)"),
    ("--mismatch-rollout-kl-type k3", "--mismatch-rollout-kl-type k3 changes nothing without"),
    ("--mismatch-rollout-kl-coef 0.1 --mismatch-rollout-kl-on accepted", "on accepted needs something that rejects"),
    ("--mismatch-dry-run", "--mismatch-dry-run has nothing to try: there is no --use-tis, criterion or veto"),
    ("--rs-policy current", "--rs-policy current needs --rs-criterion or --rs-veto-threshold to judge: leave"),
    (f"--use-rollout-log-probs --rs-policy current {CRITERION}", "--rs-policy current changes nothing in algorithm 1"),
    ("--rs-group exclude", "--rs-group exclude needs something that rejects"),
    (f"--rs-group exclude --rs-min-group 3 {CRITERION}", "--rs-min-group 3 changes nothing without --rs-group drop"),
    ("--mismatch-metrics off --mismatch-gate-kl 1e-3", "0.001 compares k3_kl, which --mismatch-metrics off does not"),
    ("--rs-lower-bound 0", "--rs-lower-bound 0.0 rejects nothing without --use-rs"),
    # contradictions
    ("--use-tis --tis-level none", "--tis-level none is REINFORCE with rejection only: it needs --use-rollout-log-pro"),
    ("--use-tis --tis-mode gamma", "by π_θ/π_rollout: it needs --use-rollout-log-probs and --tis-level sequence, or"),
    (f"{GROWING} --tis-upper-bound-positive 3", "--tis-bound-growth grows one pair of bounds"),
    (f"--rs-group drop {CRITERION}", "--rs-group drop needs --rs-min-group"),
    (f"--rs-group exclude {CRITERION}@negative", "and criterion token_tv_negative needs these"),
    (f"--rs-group exclude {CRITERION} --use-tis --tis-upper-bound-positive 3", "and bounds for A ≥ 0 needs these"),
    (f"--rs-group exclude --rs-policy current {CRITERION}", "--rs-policy current judges π_θ: choose keep"),
    (f"--rs-group exclude --use-rollout-log-probs {CRITERION}", "and algorithm 1 judges π_θ: choose keep"),
    (f"--rs-group exclude {CRITERION}:share=0.1", "and the budget of token_tv moves at every step: choose keep."),
    # bounds
    ("--use-tis --tis-upper-bound 0", "--tis-upper-bound is 0.0: it should be greater than 0."),
    ("--use-tis --tis-upper-bound 1e-60", "--tis-upper-bound 1e-60 is below e^-20"),
    ("--use-tis --tis-mode clip --tis-lower-bound 3", "--tis-lower-bound 3 is above --tis-upper-bound 2: lower it,"),
    ("--use-tis --tis-mode mask --tis-upper-bound 0.5", "0.5 is below the lower bound that --tis-mode mask has by de"),
    ("--use-tis --tis-mode clip --tis-lower-bound-positive 5", "is 5 to 2, which holds no ratio"),
    ("--use-tis --tis-level turn --tis-bound-growth 0.5", "--tis-bound-growth 0.5 needs bounds around 1"),
    ("--mismatch-eps-clip-high 1e60", "--mismatch-eps-clip-high 1e+60 is above e^20"),
    # criteria
    ("--rs-criterion token:ratio", "rs criterion token_ratio has no upper bound and there is no TIS bound to inherit"),
    (f"{BOTH} --tis-level none --rs-criterion token:ratio", "there is no TIS bound to inherit"),
    ("--use-tis --rs-criterion token:k2", "rs criterion token_k2 has no upper bound: give it one"),
    ("--rs-criterion token:ratio:3:2", "rs criterion token_ratio has lower bound 3 above upper bound 2: swap"),
    ("--rs-criterion sequence_mean:k1:0.1", "has upper bound 0.1 alone, and its reciprocal"),
    ("--rs-criterion token:ratio:2 --rs-criterion token:k1:3", "rs.criteria names the same criterion twice (token_r"),
    ("--rs-criterion ratio", "rs criterion 'ratio' cannot be read: write AGGREGATE:STATISTIC[:LOWER]:UPPER"),
    ("--rs-criterion tokn:ratio:2", "--rs-criterion's aggregate is 'tokn': it should be 'token', 'sequence_sum'"),
    ("--rs-criterion token:tv:0.1:shar=0.1", "the budget of rs criterion 'token:tv:0.1:shar=0.1', 'shar' is unknown"),
    ("--rs-criterion token:tv:0.1:share=25", "share is 25.0: it should be less than 1."),
    ("--rs-criterion sequence_mean:tv:0.1@away", "away is for aggregate token"),
    ("--rs-criterion token:k2:1:share=0.1:mean=1", "is one of share and mean: leave one out"),
    ("--rs-criterion token:ratio:2:share=0.1", "raises one bound, and ratio has two: choose k2 or k3"),
    ("--rs-criterion token:k2:0.1:2:share=0.1", "raises the upper bound alone: leave the lower one out"),
    ("--rs-criterion token:k2:2:share=0.1@away", "counts all units: leave the condition out"),
    # words
    ("--tis-upper-bound 1_2", "argument --tis-upper-bound: invalid number value: '1_2'"),
    ("--tis-levle token", "--tis-levle is no flag of this package, did you mean --tis-level?"),
    ("--rs-veto 1e-4", "--rs-veto is no flag of this package, did you mean --rs-veto-threshold?"),
    ("--use-tis token_is", "token_is is no flag of this package, did you mean --mismatch-preset token_is?"),
    ("--tis-level token --tis-level turn", "--tis-level turn contradicts --tis-level token, give it once"),
    ("--mismatch-explain-only", "--mismatch-explain-only is for a launch line, leave it out."),
    ("--mismatch-preset pg_rs --tis-upper-bound 3", "--tis-upper-bound 3 changes nothing at --tis-level none"),
    ("--mismatch-config nowhere.yaml", "configuration file nowhere.yaml does not exist: check the path given."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_refused_with_a_sentence_that_names_the_setting(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        noted(read, text)
    if not isinstance(caught.value, ValidationError):
        assert "\n" not in str(caught.value)


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"tis": {"mode": "cap"}, "terms": {"kl_coef": -1}}, "or 'gamma'. terms.kl_coef is -1:"),
    ({"tis": {"upper_bound": math.nan}}, "tis.upper_bound is nan: it should be greater than 0."),
    ({"tis": {"upper_bound": "1_2"}}, "upper_bound is '1_2', which is not a number"),
    ({"ppo": {"eps_clip_low": True}}, "eps_clip_low is True, which is not a number"),
    ({"length_norm": 1e-60}, "length_norm is 1e-60: it should be greater than or equal to 0.000001."),
    ({"rs": {"max_staleness": 1.5}}, "rs.max_staleness is 1.5: it should be a valid integer"),
    ({"tis": {"mdoe": "clip"}}, "setting 'tis.mdoe' is unknown: did you mean tis.mode?"),
    ({"tis_mode": "clip"}, "setting 'tis_mode' is unknown: did you mean tis.mode?"),
    ({"rs": {"use": True}}, "setting 'rs.use' is unknown: there is rs.criteria, rs.veto_threshold, rs.policy,"),
    ({"tis.mode": "mask"}, "setting tis.mode is one key: nest it, tis: {mode: …}."),
    ({"metrics": True}, "metrics is True: it should be 'off', 'basic' or 'full'"),
]


@pytest.mark.parametrize(("settings", "sentence"), VALUES)
def test_wrong_values_are_one_sentence_each(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        mp.MismatchConfig.build({"use_tis": True, **settings})
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        mp.MismatchConfig(**{"use_tis": True, **settings})
    assert not isinstance(caught.value, ValidationError)
    with pytest.raises(ValidationError, match="validation error") as nested:
        create_model("Outer", mine=mp.MismatchConfig).model_validate({"mine": {"use_tis": True, **settings}})
    assert all(error["loc"][0] == "mine" and len(error["loc"]) > 1 for error in nested.value.errors())


def test_numbers_bounds_and_switches_as_people_write_them() -> None:
    assert [number(value) for value in (2, 2.5, "1e-4", " 3 ", "inf")] == [2.0, 2.5, 1e-4, 3.0, math.inf]
    assert [bounds(value, "x") for value in (2, "2.0", "0.5_2.0", "1_2")] == [(None, 2), (None, 2), (0.5, 2), (1, 2)]
    assert [parse_bool(value, "x") for value in (None, 0, "False", 1, True, "true")] == [False] * 3 + [True] * 3
    for wrong in (True, None, "1_2", "two", [2], 10**400):
        with pytest.raises(ValueError, match=r"x is .*, which is not a number: write one"):
            number(wrong, "x")
    with pytest.raises(ValueError, match="x is 'maybe': write true or false"):
        parse_bool("maybe", "x")


# What is warned of ----------------------------------------------------------------------------------------------------

GEOMETRIC = "hardly anything: the geometric mean of a response moves by hundredths of a percent: within 0.01 to 0.1 %"
GSPO = "--mismatch-objective gspo --mismatch-aggregation seq-mean-token-mean"
GMPO = "--mismatch-objective gmpo --mismatch-aggregation seq-mean-token-mean"
PAPER_MEAN = "the paper's loss is seq-mean-token-mean"
NOTED = [
    ("--use-tis --tis-level geometric --tis-mode mask", [f"2 at geometric level masks {GEOMETRIC}"]),
    ("--use-tis --tis-level geometric --tis-mode mask --tis-upper-bound 1.1", []),
    ("--use-tis --tis-level geometric", []),
    ("--rs-criterion sequence_mean:ratio:2", [f"sequence_mean_ratio with upper bound 2 rejects {GEOMETRIC}"]),
    ("--rs-criterion sequence_mean:ratio:1.1 --rs-criterion sequence_mean:k2:2", []),
    ("--rs-criterion token:tv:1", ["criterion token_tv rejects nothing"]),
    ("--rs-criterion token:tv:0.99 --rs-criterion sequence_sum:tv:1", []),
    ("--rs-criterion token:k2:inf", ["criterion token_k2 rejects nothing"]),
    (BOTH, ["algorithm 3 at token level is biased: the rollout-correction guide"]),
    ("--mismatch-preset dppo_tv", []),  # judged by DPPO
    ("--mismatch-objective gspo", [PAPER_MEAN]),
    (GSPO, []),
    (f"{GSPO} --mismatch-eps-clip-high 0.01", []),
    (f"{GSPO} --mismatch-eps-clip-high 0.2", ["objective gspo with ε 0.0003 and 0.2 clips hardly"]),
    (f"{GMPO} --mismatch-eps-clip-low 0.2", ["objective gmpo with ε 0.2 and 0.4 clips earlier"]),
    ("--mismatch-objective cispo --mismatch-eps-clip-low 0.2", ["also clips small ratios"]),
    ("--use-tis --mismatch-objective reinforce", []),
    ("--use-rollout-log-probs --mismatch-objective reinforce", ["nothing corrects the mismatch but rejection"]),
    (f"{BOTH} --tis-level none --rs-veto-threshold 0.1", []),
    (f"{BOTH} --tis-level none", ["algorithm 3 without weights and without rejection is plain REINFORCE"]),
    (
        "--mismatch-preset token_icepop --tis-mode truncate",
        ["tis.lower_bound 0.5 bounds no weight under tis.mode truncate"],
    ),
    (
        "--use-tis --mismatch-preset geo_rs",
        ["preset geo_rs is algorithm 0 (PPO), and --use-tis makes it 2 (decoupled PPO): leave --use-tis out to run"],
    ),
]


@pytest.mark.parametrize(("line", "sentences"), NOTED)
def test_what_is_legal_but_outside_its_known_range_is_warned_of(line: str, sentences: list[str]) -> None:
    _, notes = noted(read, line or "{}")
    assert [wanted for wanted in sentences if any(wanted in note for note in notes)] == sentences, notes
    assert len(notes) == len(sentences), notes


def test_what_a_person_did_not_ask_for_is_warned_of_not_refused() -> None:
    settings = {"tis": {"mode": "clip"}, "dry_run": True}
    config, notes = noted(mp.MismatchConfig.build, settings)
    assert config.tis.mode == "clip" and [note[:14] for note in notes] == ["tis.mode clip ", "dry_run has no"]
    with pytest.raises(ValueError, match="dry_run has nothing to try"):
        noted(mp.MismatchConfig.build, settings, by_hand={"dry_run"})


SEQUENCE = "--use-tis --tis-level sequence"
BOUNDED: list[tuple[str, object, str]] = [
    ("--use-tis --tis-upper-bound 0.99", None, "--tis-upper-bound 0.99: no weight reaches 1"),
    ("--use-tis --tis-upper-bound 1", None, ""),
    ("--use-tis --tis-upper-bound 100", None, ""),
    ("--use-tis --tis-upper-bound 101", None, "--tis-upper-bound 101: one weight can outweigh 100"),
    (SEQUENCE, 100, ""),
    (SEQUENCE, "8192", ""),  # a host's reference to another key: not known
    (SEQUENCE, 8192, "over 8192 tokens: at KL 0.001 a typical product of ratios is 0.00028, so that little"),
    (f"{SEQUENCE} --tis-batch-normalize", 8192, "is 0.00028, so that few responses carry the gradient"),
    (SEQUENCE.replace("sequence", "prefix"), 8192, "product up to the middle token is 0.017"),
    (SEQUENCE.replace("sequence", "prefix"), 3999, ""),
    (SEQUENCE.replace("sequence", "geometric"), 8192, ""),
    ("--use-tis", 8192, ""),
    (f"{SEQUENCE} --tis-mode clip", 8192, ""),  # no weight is below 1/2
    (f"{SEQUENCE} --tis-mode clip --tis-lower-bound 0", 2001, "is 0.14"),
    (GAMMA, 8192, "a typical product"),
]


@pytest.mark.parametrize(("line", "length", "said"), BOUNDED)
def test_bounds_that_do_harm_are_warned_of_with_the_figures(line: str, length: object, said: str) -> None:
    found = bound_warnings(noted(read, line)[0], length)
    assert [said in sentence for sentence in found] == [True] * bool(said), found


# Changing, showing ----------------------------------------------------------------------------------------------------


def test_a_configuration_is_frozen_and_replace_changes_what_it_names_alone() -> None:
    config = mp.preset("decoupled_seq_is_rs")
    for part, name in ((config, "use_tis"), (config.tis, "mode"), (config.criteria[0], "statistic")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, getattr(part, name))
    changed = config.replace(tis={"upper_bound": 5.0}, metrics="full")
    assert (changed.tis.upper_bound, changed.tis.level, changed.metrics) == (5.0, "sequence", "full")
    assert changed.rs == config.rs and changed.algorithm == 2
    assert changed.replace(tis={"upper_bound": config.tis.upper_bound}, metrics="basic") == config
    gspo = mp.MismatchConfig(objective="gspo", aggregation="seq-mean-token-mean")
    assert gspo.replace(objective="cispo").ppo.eps_clip_low == 1.0, "another objective brings its own ε"
    assert gspo.replace(objective="ppo") == mp.MismatchConfig(aggregation="seq-mean-token-mean")
    given = read("objective: cispo, ppo: {eps_clip_low: 1.0}")
    assert given.replace(objective="ppo").ppo.eps_clip_low == 1.0, "but not in the place of one that was given"


def test_replace_validates() -> None:
    for config in (mp.preset("token_is"), mp.MismatchConfig(use_tis=True)):
        with pytest.raises(ValueError, match=r"tis.upper_bound is -1.0: it should be greater than 0"):
            config.replace(tis={"upper_bound": -1.0})
        with pytest.raises(ValueError, match=r"tis.lower_bound 0.5 bounds no weight under tis.mode truncate"):
            config.replace(tis={"lower_bound": 0.5})


def test_what_was_given_by_hand_stays_by_hand_and_what_a_preset_brought_does_not() -> None:
    by_hand = mp.preset("token_is").replace(tis={"batch_normalize": True})
    for config in (by_hand, by_hand.replace(metrics="full"), mp.MismatchConfig(**by_hand.model_dump())):
        with pytest.raises(ValueError, match=r"tis.batch_normalize changes no weight without use_tis"):
            config.replace(use_tis=False)
    config, notes = noted(mp.preset("token_is", threshold=3.0).replace, use_tis=False)
    assert config.algorithm == 0 and [note[:21] for note in notes] == ["tis.upper_bound 3 cha"]


SHOWN = [
    (GROWING, "turn level, truncate, at most 1.05 "),
    ("--use-tis --tis-mode clip --tis-upper-bound-positive 3", "token level, clip, [0.5, 2], where A ≥ 0 [0.5, 3]"),
    (GAMMA, "sequence level, gamma, ρ^k e^(λ(1 − ρ)) with (k, λ)"),
    ("--use-tis --tis-mode mask", "token level, mask, [0.5, 2]\nrejection: ratios outside the weights' bounds\n"),
    (f"{CRITERION}@away --rs-policy current", "rejection: token_tv_away in [0, 0.2], judged by π_θ"),
    (f"{CRITERION}:share=0.1", "(a budget: from the second step on the bound rises for share=0.1)\npolicies: three"),
    (f"--rs-group drop --rs-min-group 3 {CRITERION}", "accepted responses only, groups of fewer than 3 have no"),
    ("--mismatch-rollout-kl-coef 0.1", "penalty: 0.1 · k2 to π_rollout, on all tokens"),
    (GSPO, "weights: none\nrejection: none\nobjective: gspo, ratio in [0.9997, 1.0004]"),
    ("--use-tis --tis-batch-normalize --mismatch-dry-run", "normalised over auto (dry run: computed, not applied)"),
    ("--mismatch-fused-head", "log-probs from hidden states: logits are never whole\ninvalid rollout log-probs: cou"),
    ("--use-tis --mismatch-log-prob-backend torch", "log-probs from logits: torch\ninvalid rollout log-probs: error"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "phrase"), SHOWN)
def test_the_block_shows_what_is_set(line: str, phrase: str) -> None:
    assert phrase in noted(read, line)[0].describe()


def test_explain_only_prints_the_block_once_and_stops_every_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = mp.add_arguments(argparse.ArgumentParser())
    for rank in ("", "0", "1"):
        monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(SystemExit) as stop:
            mp.MismatchConfig.from_args(parser.parse_args(["--use-tis", "--mismatch-explain-only"]))
        assert stop.value.code == 0
        assert ("algorithm 2: decoupled PPO" in capsys.readouterr().out) == (rank != "1")
