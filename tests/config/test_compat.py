"""slime's and verl's settings become the configuration that does what they mean there."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import yaml

import mismatch_plugin as mp
from mismatch_plugin.compat import from_slime, from_verl

_MIS_YAML = (
    "use_tis: true, use_rs: true, tis_level: token, rs_level: token, "
    "tis_mode: truncate, tis_lower_bound: 0.5, tis_upper_bound: 2.0, "
    "rs_lower_bound: null, rs_upper_bound: null, rs_veto_threshold: 1e-4, tis_batch_normalize: true"
)


def _noted(read: Any, settings: str) -> tuple[mp.MismatchConfig, list[str]]:
    """What `read` makes of settings written as YAML, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = read(yaml.safe_load(f"{{{settings}}}"))
    assert all(issubclass(warning.category, mp.MismatchWarning) for warning in caught)
    return config, [str(warning.message) for warning in caught]


def _silent(read: Any, settings: str) -> mp.MismatchConfig:
    config, notes = _noted(read, settings)
    assert notes == []
    return config


def _criteria(config: mp.MismatchConfig) -> list[tuple[Any, ...]]:
    return [(c.aggregate, c.statistic, c.lower_bound, c.upper_bound) for c in config.criteria]


# slime ----------------------------------------------------------------------------------------------------------------


def test_mis_yaml_as_slime_ships_it() -> None:
    config, notes = _noted(from_slime, _MIS_YAML)
    assert config.algorithm == 2
    assert (config.tis.mode, config.tis.level, config.tis.lower, config.tis.upper) == ("truncate", "token", 0.5, 2.0)
    assert config.tis.batch_normalize
    assert config.rs.veto_threshold == 1e-4  # YAML reads 1e-4 as a string
    assert _criteria(config) == [("token", "ratio", 0.5, 2.0)]
    assert len(notes) == 1 and notes[0].startswith("tis.lower_bound 0.5 bounds no weight under tis.mode truncate")


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bypass", [False, True])
def test_slime_modes_and_levels(mode: str, level: str, bypass: bool) -> None:
    settings = f"use_tis: true, tis_mode: {mode}, tis_level: {level}, tis_upper_bound: '1.02'"
    config, _ = _noted(from_slime, f"{settings}, use_rollout_logprobs: {bypass}")
    assert config.algorithm == (3 if bypass else 2)
    assert (config.tis.mode, config.tis.level, config.tis.upper) == (mode, level, 1.02)
    assert config.tis.lower == 1 / 1.02


@pytest.mark.parametrize(
    ("settings", "lower", "upper"),
    [("", 0.0, 2.0), ("tis_clip: 5.0", 0.0, 5.0), ("tis_clip: '5.0', tis_clip_low: 0.2", 0.2, 5.0)],
)
def test_slime_built_in_correction(settings: str, lower: float, upper: float) -> None:
    config = _silent(from_slime, f"use_tis: true, {settings}")
    assert (config.algorithm, config.tis.mode, config.tis.level) == (2, "clip", "token")
    assert (config.tis.lower, config.tis.upper) == (lower, upper)


@pytest.mark.parametrize(
    ("settings", "lower", "upper"),
    [
        ("", 1 / 3, 3.0),
        ("tis_lower_bound: 0.4", 0.4, 3.0),
        ("rs_upper_bound: 5.0", 1 / 3, 5.0),  # slime: TIS's lower bound, not 1/5
        ("rs_lower_bound: '0.1', rs_upper_bound: '5'", 0.1, 5.0),
        ("rs_lower_bound: 0", 0.0, 3.0),
    ],
)
def test_slime_rejection_bounds_come_from_tis(settings: str, lower: float, upper: float) -> None:
    given = "use_tis: true, use_rs: true, tis_mode: clip, tis_upper_bound: 3.0, rs_level: sequence"
    assert _criteria(_silent(from_slime, f"{given}, {settings}")) == [("sequence_sum", "ratio", lower, upper)]


def test_slime_rejection_without_weights_is_honoured() -> None:
    settings = "use_tis: false, use_rs: true, rs_level: geometric, rs_upper_bound: 1.001, rs_lower_bound: 0.999"
    config, notes = _noted(from_slime, settings)
    assert config.algorithm == 0
    assert _criteria(config) == [("sequence_mean", "ratio", 0.999, 1.001)]
    assert notes == ["use_rs without use_tis rejects here, as slime's page says: slime's own code skips it."]


def test_slime_veto_needs_use_rs() -> None:
    given = "use_tis: true, tis_mode: truncate, rs_veto_threshold: 1.0e-4"
    config, notes = _noted(from_slime, given)
    assert not config.rejects
    assert [note[:59] for note in notes] == ["rs_veto_threshold 0.0001 changes nothing without use_rs, in"]
    assert _silent(from_slime, f"{given}, use_rs: true").rs.veto_threshold == 1e-4


def test_slime_loss_flags() -> None:
    clip = "eps_clip: '0.1', eps_clip_high: 0.28, eps_clip_c: 3.0, entropy_coef: 1e-3"
    kl = "use_kl_loss: true, kl_loss_coef: 0.01, kl_loss_type: k2, calculate_per_token_loss: false"
    config = _silent(from_slime, f"{clip}, {kl}")
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.ppo.dual_clip) == (0.1, 0.28, 3.0)
    assert (config.terms.entropy_coef, config.terms.kl_coef, config.terms.kl_type) == (1e-3, 0.01, "k2")
    assert config.aggregation == "seq-mean-token-mean"
    assert _silent(from_slime, "calculate_per_token_loss: true").aggregation == "token-mean"


def test_slime_loss_flags_at_slime_s_defaults() -> None:
    config = _silent(from_slime, "eps_clip: 0.3, eps_clip_high: null, eps_clip_c: null, use_kl_loss: true")
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.ppo.dual_clip) == (0.3, 0.3, None)
    assert _silent(from_slime, "use_kl_loss: true, kl_loss_coef: 0.1").terms.kl_type == "k1"


@pytest.mark.parametrize("estimator", ["gspo", "cispo"])
def test_slime_estimators_are_objectives(estimator: str) -> None:
    config, _ = _noted(from_slime, f"advantage_estimator: {estimator}, eps_clip: 4.0, eps_clip_high: 0.3")
    assert (config.objective, config.ppo.eps_clip_low, config.ppo.eps_clip_high) == (estimator, 1.0, 0.3)
    assert _silent(from_slime, "advantage_estimator: grpo") == _silent(from_slime, "use_tis: false")


def test_slime_off_policy_sequence_masking() -> None:
    bypass = _silent(from_slime, "use_rollout_logprobs: true, use_opsm: true, opsm_delta: 0.1")
    assert (bypass.algorithm, bypass.rs.policy) == (1, "auto")
    decoupled, notes = _noted(from_slime, "use_opsm: true, opsm_delta: 0.1")
    assert (decoupled.rs, len(notes)) == (mp.preset("opsm", delta=0.1).rs, 1)
    assert notes[0].startswith("use_opsm judges π_θ against π_rollout") and bypass.criteria == decoupled.criteria
    shipped, _ = _noted(from_slime, "use_opsm: true")
    assert shipped.criteria[0].lower_bound == math.exp(-1e-4)


# verl -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass", ["bypass_mode", "bypass_old_logprob_for_rollout"])
@pytest.mark.parametrize(
    ("loss", "algorithm"),
    [
        ("", 1),
        ("use_policy_gradient: true", 3),
        ("use_pure_rollout_correction: true", 3),
        ("loss_type: reinforce", 3),
        ("loss_type: ppo_clip", 1),
        ("use_policy_gradient: true, loss_type: reinforce", 3),
    ],
)
def test_verl_spellings_of_bypass_and_loss(bypass: str, loss: str, algorithm: int) -> None:
    assert _noted(from_verl, f"{bypass}: true, rollout_is: sequence, {loss}")[0].algorithm == algorithm


@pytest.mark.parametrize("place", ["{}", "rollout_correction: {{{}}}", "algorithm: {{rollout_correction: {{{}}}}}"])
def test_verl_block_wherever_it_stands(place: str) -> None:
    config = _silent(from_verl, place.format("rollout_is: sequence"))
    assert (config.algorithm, config.tis.level) == (2, "sequence")


def test_verl_whole_tree() -> None:
    block = "algorithm: {gamma: 1.0, rollout_correction: {_target_: verl.Config, rollout_is: token}}"
    actor = "{clip_ratio: 0.2, clip_ratio_high: 0.28, use_kl_loss: false, kl_loss_coef: 0.001, ppo_epochs: 1}"
    config = _silent(from_verl, f"data: {{train_files: x}}, {block}, actor_rollout_ref: {{actor: {actor}}}")
    assert (config.algorithm, config.ppo.eps_clip_high, config.terms.kl_coef) == (2, 0.28, 0.0)


@pytest.mark.parametrize(
    ("level", "threshold", "lower", "upper"),
    [("token", "0.5_5.0", 0.5, 5.0), ("sequence", "0.5_2.0", 0.5, 2.0), ("token", "1_2", 1.0, 2.0)],
)
def test_verl_two_bounds_are_icepop(level: str, threshold: str, lower: float, upper: float) -> None:
    config = _silent(from_verl, f"rollout_is: {level}, rollout_is_threshold: '{threshold}'")
    assert (config.tis.mode, config.tis.level, config.denominator) == ("mask", level, "original")
    assert (config.tis.lower, config.tis.upper) == (lower, upper)


@pytest.mark.parametrize("threshold", ["3.0", "3", "'3.0'"])
def test_verl_one_bound_truncates(threshold: str) -> None:
    config = _silent(
        from_verl, f"rollout_is: token, rollout_is_threshold: {threshold}, rollout_is_batch_normalize: true"
    )
    assert (config.tis.mode, config.tis.upper, config.tis.batch_normalize) == ("truncate", 3.0, True)
    assert config.denominator == "auto"


@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
@pytest.mark.parametrize("threshold", ["0.5_5.0", "0.5_2.0", "0.999_1.001", "0.6_1.6", "1.7", "'1.7'", "0.25_inf"])
def test_verl_k1_bounds_keep_what_they_accept(option: str, threshold: str) -> None:
    """verl keeps log lo ≤ −x ≤ log hi, x the aggregated log ρ; the converted bounds on ρ keep the same x."""
    config, notes = _noted(from_verl, f"rollout_rs: {option}, rollout_rs_threshold: {threshold}")
    lower, upper = (float(part) for part in threshold.split("_")) if "_" in threshold else (1 / 1.7, 1.7)
    (criterion,) = config.criteria
    assert criterion.in_log_space
    low, high = criterion.log_bounds
    for step in range(-800, 801):
        x = (step / 200) ** 3 / 20 + 1e-5  # densest around 0, away from every bound by more than rounding
        verl = math.log(lower) <= -x <= math.log(upper)
        ours = (low is None or low <= x) and (high is None or x <= high)
        assert verl == ours, x
    converted = [note for note in notes if f"{option} bounds 1/ρ in verl" in note]
    assert len(converted) == (threshold in ("0.5_5.0", "0.999_1.001", "0.6_1.6", "0.25_inf"))


@pytest.mark.parametrize("statistic", ["k2", "k3"])
@pytest.mark.parametrize(
    ("scope", "aggregate"),
    [("token", "token"), ("seq_sum", "sequence_sum"), ("seq_mean", "sequence_mean"), ("seq_max", "sequence_max")],
)
def test_verl_divergence_criteria(scope: str, aggregate: str, statistic: str) -> None:
    for threshold in ("0.01", "1e-2"):
        config = _silent(from_verl, f"rollout_rs: {scope}_{statistic}, rollout_rs_threshold: {threshold}")
        assert _criteria(config) == [(aggregate, statistic, None, 0.01)]


def test_verl_several_criteria() -> None:
    config = _silent(from_verl, "rollout_rs: 'token_k1, seq_max_k2,token_k1', rollout_rs_threshold: '0.5_2.0, 0.3'")
    assert _criteria(config) == [("token", "ratio", 0.5, 2.0), ("sequence_max", "k2", None, 0.3)]
    shared = _silent(from_verl, "rollout_rs: 'seq_mean_k2,seq_max_k3', rollout_rs_threshold: 0.1")
    assert _criteria(shared) == [("sequence_mean", "k2", None, 0.1), ("sequence_max", "k3", None, 0.1)]


@pytest.mark.parametrize(
    ("settings", "lower", "upper"),
    [
        ("", 0.5, 2.0),
        ("rollout_is_threshold: 4.0", 0.25, 4.0),
        ("rollout_is_threshold: 4.0, rollout_rs_threshold_lower: 0", 0.0, 4.0),
        ("rollout_is_threshold: 4.0, rollout_rs_threshold: '3.0'", 1 / 3, 3.0),
        ("rollout_rs_threshold: 0.1_3.0", 0.1, 3.0),
    ],
)
@pytest.mark.parametrize("level", ["null", "token"])
def test_verl_rejection_inherits_the_weights_threshold(settings: str, lower: float, upper: float, level: str) -> None:
    config, _ = _noted(from_verl, f"rollout_is: {level}, rollout_rs: sequence, {settings}")
    assert _criteria(config) == [("sequence_sum", "ratio", lower, upper)]


def test_verl_bypass_keeps_its_threshold_for_the_metrics() -> None:
    config, notes = _noted(from_verl, "rollout_is: sequence, rollout_is_threshold: 5.0, bypass_mode: true")
    assert (config.algorithm, config.weighted) == (1, False)
    assert (config.tis.level, config.tis.upper) == ("sequence", 5.0)
    assert any(note.startswith("tis.upper_bound 5 changes no weight") for note in notes)


def test_verl_actor_settings() -> None:
    clip = "clip_ratio: 0.1, clip_ratio_low: null, clip_ratio_high: '0.28', clip_ratio_c: 3.0"
    terms = "entropy_coeff: 1e-3, kl_loss_coef: 0.01, kl_loss_type: mse"
    config = _silent(from_verl, f"{clip}, {terms}, loss_agg_mode: seq-mean-token-sum-norm, loss_scale_factor: 1024")
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.ppo.dual_clip) == (0.1, 0.28, 3.0)
    assert (config.terms.entropy_coef, config.terms.kl_coef, config.terms.kl_type) == (1e-3, 0.01, "k2")
    assert (config.aggregation, config.length_norm) == ("seq-mean-token-sum", 1024.0)


_CLIP = "clip_ratio_low: 3.0, clip_ratio_high: 0.3, clip_ratio_c: 3.0"


@pytest.mark.parametrize(
    ("mode", "objective", "clip"),
    [
        ("sapo", "sapo", (0.2, 0.2, None)),  # its gate takes their place
        ("geo_mean", "gmpo", (1.0, 0.3, None)),
        ("vanilla", "ppo", (1.0, 0.3, 3.0)),
        ("gspo", "gspo", (1.0, 0.3, None)),  # verl's has no dual clip
        ("cispo", "cispo", (1.0, 0.3, None)),
        ("gpg", "reinforce", (0.2, 0.2, None)),
    ],
)
def test_verl_loss_modes_are_objectives(mode: str, objective: str, clip: tuple[float | None, ...]) -> None:
    config, _ = _noted(from_verl, f"policy_loss: {{loss_mode: {mode}}}, {_CLIP}")
    assert (config.objective, config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.ppo.dual_clip) == (
        objective,
        *clip,
    )
    actor = f"{{policy_loss: {{loss_mode: {mode}}}, {_CLIP}}}"
    assert _noted(from_verl, f"actor_rollout_ref: {{actor: {actor}}}")[0] == config
    bypass, notes = _noted(from_verl, f"bypass_mode: true, loss_mode: {mode}")
    assert (bypass.algorithm, bypass.objective) == (1, "ppo")
    assert [note.startswith(f"loss_mode {mode} changes nothing in bypass") for note in notes] == [True] * (
        mode != "vanilla"
    )


def test_verl_s_sapo_has_its_own_temperatures_and_mean() -> None:
    config, notes = _noted(from_verl, "loss_mode: sapo, tau_pos: 0.5, tau_neg: 2.0, loss_agg_mode: token-mean")
    assert (config.ppo.tau_positive, config.ppo.tau_negative, config.aggregation) == (0.5, 2.0, "seq-mean-token-mean")
    assert notes == ["loss_agg_mode token-mean changes nothing under loss_mode sapo, in verl as here."]
    config, notes = _noted(from_verl, "loss_mode: geo_mean, tau_pos: 0.5")
    assert (config.ppo.tau_positive, config.aggregation, notes) == (1.0, "seq-mean-token-mean", [])


@pytest.mark.parametrize("kinds", ["kl k1", "k1 k1", "mse k2", "k2 k2", "k3 low_var_kl", "low_var_kl low_var_kl"])
def test_verl_kl_estimators(kinds: str) -> None:
    """verl's k3 and low_var_kl are one and bounded to ±10, as our low_var_kl."""
    theirs, ours = kinds.split()
    assert _silent(from_verl, f"kl_loss_coef: 0.01, kl_loss_type: {theirs}").terms.kl_type == ours


@pytest.mark.parametrize(
    "bypass", ["bypass_mode: true, loss_type: reinforce", "bypass_mode: true, use_policy_gradient: true"]
)
@pytest.mark.parametrize(
    ("correction", "said"),
    [
        ("", True),
        ("rollout_is: null, rollout_rs: null", True),
        ("rollout_is: sequence", False),
        ("rollout_rs: token", False),
        ("rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.01", False),
        ("rollout_token_veto_threshold: 1e-4", False),
    ],
)
def test_verl_reinforce_without_weights_or_rejection_is_plain_reinforce(
    bypass: str, correction: str, said: bool
) -> None:
    config, notes = _noted(from_verl, f"{bypass}, {correction}")
    assert config.algorithm == 3
    plain = "algorithm 3 without weights and without rejection is plain REINFORCE: nothing corrects the mismatch."
    assert any(note.startswith(plain) for note in notes) == said


@pytest.mark.parametrize("algorithm", ["bypass_mode: false", "bypass_mode: true, loss_type: reinforce"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("rollout_is_threshold: 0.5_5.0, rollout_is_batch_normalize: true", True),
        ("rollout_is_threshold: 0.5_5.0, rollout_is_batch_normalize: false", False),
        ("rollout_is_threshold: 5.0, rollout_is_batch_normalize: true", False),
    ],
)
def test_verl_icepop_normalised_over_other_units_is_said(algorithm: str, level: str, settings: str, said: bool) -> None:
    _, notes = _noted(from_verl, f"{algorithm}, rollout_is: {level}, {settings}")
    assert any(note.startswith("rollout_is_batch_normalize with two thresholds") for note in notes) == said


@pytest.mark.parametrize(("mode", "normalize", "said"), [("mask", 1, 1), ("mask", 0, 0), ("clip", 1, 0)])
def test_slime_mask_normalised_over_other_units_is_said(mode: str, normalize: int, said: int) -> None:
    _, notes = _noted(from_slime, f"use_tis: true, tis_mode: {mode}, tis_batch_normalize: {bool(normalize)}")
    assert sum(note.startswith("tis_batch_normalize in mode mask: the mean runs over") for note in notes) == said


# both -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "settings", "note"),
    [
        (from_slime, "use_tis: true, tis_mode: clip, tis_clip: 3.0", "tis_clip 3.0 changes nothing next to mis.yaml's"),
        (from_slime, "tis_clip: 3.0", "tis_clip 3.0 changes nothing without use_tis"),
        (from_slime, "tis_clip_low: 0.5", "tis_clip_low 0.5 changes nothing without use_tis"),
        (from_slime, "tis_mode: clip", "tis.mode clip changes no weight without use_tis"),
        (from_slime, "kl_loss_coef: 0.1", "kl_loss_coef 0.1 changes nothing without use_kl_loss"),
        (from_slime, "use_tis: true, rs_level: geometric", "rs_level geometric changes nothing without use_rs"),
        (from_slime, "use_tis: true, rs_upper_bound: 3", "rs_upper_bound 3 changes nothing without use_rs"),
        (from_slime, "use_tis: true, use_rollout_logprobs: true, eps_clip: 0.3", "ppo.eps_clip_low 0.3 changes"),
        (from_verl, "loss_type: reinforce", "loss_type reinforce changes nothing without bypass_mode"),
        (from_verl, "rollout_is_threshold: 5.0", "rollout_is_threshold 5.0 bounds nothing where rollout_is is null"),
        (from_verl, "rollout_rs_threshold: 3.0", "rollout_rs_threshold 3.0 changes nothing where rollout_rs is null"),
        (from_verl, "rollout_rs_threshold_lower: 0.3", "rollout_rs_threshold_lower 0.3 changes nothing"),
        (from_verl, "rollout_is: sequence, bypass_mode: true", "rollout_is sequence weights no loss in bypass mode"),
        (from_verl, "use_kl_loss: false, kl_loss_coef: 0.1", "kl_loss_coef 0.1 changes nothing where use_kl_loss is"),
        (from_verl, "loss_scale_factor: 100", "loss_scale_factor 100 changes nothing without loss_agg_mode"),
        (from_verl, "rollout_is: token, rollout_is_threshold: 0.5_5.0, rollout_rs: token", "an IcePop threshold keeps"),
    ],
)
def test_what_has_no_effect_is_accepted_and_said(read: Any, settings: str, note: str) -> None:
    _, notes = _noted(read, settings)
    assert any(sentence.startswith(note) for sentence in notes), notes


@pytest.mark.parametrize(
    ("read", "settings", "message"),
    [
        (from_slime, "tis_levl: token", "slime key 'tis_levl' is unknown: did you mean tis_level"),
        (from_slime, "use_tis: true, tis_level: none", "tis.level none is REINFORCE with rejection only"),
        (
            from_slime,
            "use_tis: true, tis_mode: cap",
            "tis.mode is 'cap': it should be 'truncate', 'clip', 'mask' or 'gamma'",
        ),
        (from_slime, "use_tis: true, tis_upper_bound: 0.5_2.0", "tis_upper_bound is '0.5_2.0', which is not a number"),
        (from_slime, "use_tis: true, tis_upper_bound: 0, use_rs: true", "tis.upper_bound is 0.0: it should be greater"),
        (from_slime, "use_tis: true, use_rs: true, rs_level: tokn", "rs_level 'tokn' is unknown: did you mean token"),
        (from_slime, "use_tis: maybe", "use_tis is 'maybe': write true or false"),
        (from_verl, "rollout_iss: token", "verl key 'rollout_iss' is unknown: did you mean rollout_is"),
        (from_verl, "algorithm: {rollout_corection: {}}", "verl's section algorithm has no block rollout_correction"),
        (from_verl, "rollout_correction: token", "verl's rollout_correction is 'token', not a mapping"),
        (from_verl, "rollout_is: tokens", "rollout_is 'tokens' is unknown: did you mean token"),
        (from_verl, "rollout_is: token, rollout_is_threshold: a_b", "rollout_is_threshold is 'a', which is not"),
        (from_verl, "rollout_is: token, rollout_is_threshold: '3_2'", "tis.lower_bound 3 is above tis.upper_bound 2"),
        (from_verl, "rollout_is: token, rollout_is_threshold: true", "rollout_is_threshold is True, which is not"),
        (from_verl, "use_policy_gradient: true", "use_policy_gradient=True requires bypass_mode=True"),
        (from_verl, "use_pure_rollout_correction: true", "use_pure_rollout_correction=True requires bypass_mode=True"),
        (from_verl, "bypass_mode: true, bypass_old_logprob_for_rollout: false", "two spellings of one switch"),
        (from_verl, "bypass_mode: true, use_policy_gradient: true, loss_type: ppo_clip", "contradicts loss_type"),
        (from_verl, "loss_type: vanilla", "loss_type 'vanilla' is unknown: there is ppo_clip, reinforce"),
        (from_verl, "rollout_rs: seq_max_k1, rollout_rs_threshold: 2", "option of rollout_rs 'seq_max_k1' is unknown"),
        (from_verl, "rollout_rs: seq_mean_k3", "rollout_rs seq_mean_k3 needs rollout_rs_threshold"),
        (from_verl, "rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.1_0.2", "'0.1_0.2' has two bounds"),
        (from_verl, "rollout_rs: token_k1, rollout_rs_threshold: '0_2'", "has a bound that is not positive"),
        (from_verl, "rollout_rs: token_k1, rollout_rs_threshold: '3_2'", "lower bound 0.5 above upper bound 0.333333"),
        (from_verl, "rollout_rs: 'token_k1,token_k2,token_k3', rollout_rs_threshold: '1,2'", "2 thresholds for 3"),
        (
            from_verl,
            "rollout_rs: token_k1, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.5",
            "rollout_rs_threshold_lower 0.5 does not go with rollout_rs token_k1",
        ),
        (from_verl, "rollout_rs: 'token,token_k1'", "rs.criteria names the same criterion twice"),
        (from_verl, "loss_agg_mode: seq-mean-token-sum-norm", "give loss_scale_factor"),
        (from_verl, "loss_agg_mode: sample-mean", "aggregation is 'sample-mean': it should be 'token-mean'"),
        (from_verl, "kl_loss_coef: 0.1, kl_loss_type: abs", "kl_loss_type 'abs' is unknown"),
        (
            from_verl,
            "loss_mode: dppo_tv",
            "dppo_tv is no setting here; next to it comes preset dppo_tv with by",
        ),
        (from_verl, "policy_loss: {loss_mode: clip_cov}", "comes objective ppo: verl's takes tokens out at random"),
        (from_verl, "loss_mode: gsop", "loss_mode 'gsop' is unknown: did you mean gspo"),
        (from_slime, "use_opsm: true, use_rs: true", "the veto π_old: give --rs-policy current"),
        (
            from_slime,
            "use_unbiased_kl: true, use_kl_loss: true, kl_loss_coef: 0.1",
            "use_unbiased_kl is no setting here: slime's hook",
        ),
        (from_verl, "rollout_token_veto_threshold: 2.0", "rs.veto_threshold is 2.0: it should be less than 1"),
    ],
)
def test_errors(read: Any, settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _noted(read, settings)
