"""slime's, verl's and NeMo-RL's settings become the configuration that does what they mean there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import yaml

import mismatch_plugin as mp
from mismatch_plugin.compat import from_slime as slime
from mismatch_plugin.compat import from_verl as verl
from mismatch_plugin.config.compat.nemo_rl import nemo_rl_settings
from mismatch_plugin.config.compat.slime import with_opsm
from tests.config.reading import criteria, noted

Read = Callable[[Any], mp.MismatchConfig]


def nemo(section: dict[str, Any]) -> mp.MismatchConfig:
    return mp.MismatchConfig.build(nemo_rl_settings(section))


def made(read: Read, settings: str) -> tuple[mp.MismatchConfig, list[str]]:
    """What `read` makes of settings written as YAML, and the warnings it gave."""
    return noted(read, yaml.safe_load(f"{{{settings}}}"))


TIS = "algorithm tis.mode tis.level tis.lower tis.upper"
NORMAL = "tis.mode tis.upper tis.batch_normalize denominator"
CLIP = "ppo.eps_clip_low ppo.eps_clip_high ppo.dual_clip"
MIS = (
    "use_tis: true, use_rs: true, tis_level: token, rs_level: token, tis_mode: truncate, tis_lower_bound: 0.5, "
    "tis_upper_bound: 2.0, rs_lower_bound: null, rs_upper_bound: null, rs_veto_threshold: 1e-4, "
    "tis_batch_normalize: true"
)
VERL_CLIP = "clip_ratio_low: 3.0, clip_ratio_high: 0.3, clip_ratio_c: 3.0"
TREE = (
    "data: {train_files: x}, algorithm: {gamma: 1.0, rollout_correction: {_target_: verl.Config, rollout_is: token}}, "
    "actor_rollout_ref: {actor: {clip_ratio: 0.2, clip_ratio_high: 0.28, kl_loss_coef: 0.001, use_kl_loss: false, "
    "ppo_epochs: 1}}"
)
NEMO = "use_importance_sampling_correction: true"
NEMO_TIS = f"{NEMO}, truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 3"

RESOLVED: list[tuple[Read, str, str, tuple[Any, ...]]] = [
    (slime, MIS, f"{TIS} rs.veto_threshold", (2, "truncate", "token", 0.5, 2.0, 1e-4)),
    (slime, "use_tis: true, tis_mode: clip, tis_level: geometric, tis_upper_bound: '1.02', use_rollout_logprobs: true",
     TIS, (3, "clip", "geometric", 1 / 1.02, 1.02)),
    # slime's built-in
    (slime, "use_tis: true", TIS, (2, "clip", "token", 0.0, 2.0)),
    (slime, "use_tis: true, tis_clip: '5.0', tis_clip_low: 0.2", TIS, (2, "clip", "token", 0.2, 5.0)),
    *(
        (verl, f"{bypass}: true, rollout_is: sequence, {loss}", "algorithm", (algorithm,))
        for bypass in ("bypass_mode", "bypass_old_logprob_for_rollout")
        for loss, algorithm in {
            "": 1,
            "use_policy_gradient: true": 3,
            "use_pure_rollout_correction: true, loss_type: reinforce": 3,
            "loss_type: reinforce": 3,
            "loss_type: ppo_clip": 1,
        }.items()
    ),
    (verl, TREE, f"algorithm {CLIP}", (2, 0.2, 0.28, None)),
    (verl, "rollout_is: token, rollout_is_threshold: 0.5_5.0", TIS, (2, "mask", "token", 0.5, 5.0)),
    (verl, "rollout_is: token, rollout_is_threshold: '3', rollout_is_batch_normalize: true", NORMAL,
     ("truncate", 3.0, True, "auto")),
    (verl, "rollout_is: sequence, rollout_is_threshold: 5.0, bypass_mode: true", "algorithm tis.upper", (1, 5.0)),
    (verl, "clip_ratio: 0.1, clip_ratio_low: null, clip_ratio_high: '0.28'", CLIP, (0.1, 0.28, None)),
    *(
        (verl, f"{where.format(f'policy_loss: {{loss_mode: {mode}}}, {VERL_CLIP}')}", f"objective {CLIP}", wanted)
        for where in ("{}", "actor_rollout_ref: {{actor: {{{}}}}}")
        for mode, wanted in {
            "sapo": ("sapo", 0.2, 0.2, None),  # its gate takes their place
            "geo_mean": ("gmpo", 1.0, 0.3, None),
            "vanilla": ("ppo", 1.0, 0.3, 3.0),
            "gspo": ("gspo", 1.0, 0.3, None),  # verl's has no dual clip
            "cispo": ("cispo", 1.0, 0.3, None),
            "gpg": ("reinforce", 0.2, 0.2, None),
        }.items()
    ),
    (verl, "loss_mode: sapo, tau_pos: 0.5, tau_neg: 2.0", "ppo.tau_positive ppo.tau_negative aggregation",
     (0.5, 2.0, "seq-mean-token-mean")),
    (nemo, "", f"algorithm objective aggregation {CLIP}", (0, "ppo", "token-mean", 0.2, 0.2, None)),
    (nemo, "ratio_clip_min: 3, ratio_clip_max: 0.3, ratio_clip_c: 4", CLIP, (1.0, 0.3, 4.0)),
    (nemo, "token_level_loss: false, use_cispo: true", "objective aggregation", ("cispo", "seq-mean-token-mean")),
    (nemo, "disable_ppo_ratio: true, force_on_policy_ratio: true", "objective", ("ppo",)),
    (nemo, NEMO, TIS, (2, "truncate", "token", 0.5, 2.0)),
    (nemo, f"{NEMO}, sequence_level_importance_ratios: true", "objective tis.level", ("gspo", "sequence")),
    (nemo, NEMO_TIS, TIS, (2, "clip", "token", 0.0, 3.0)),
    (nemo, f"{NEMO_TIS}, truncated_importance_sampling_ratio_min: 0.4", TIS, (2, "clip", "token", 0.4, 3.0)),
    (nemo, NEMO_TIS.replace(": tis", ": icepop"), TIS, (2, "mask", "token", 0.0, 3.0)),
    (nemo, NEMO_TIS.replace(": tis", ": seq-mask-tis"), "tis.mode tis.upper", ("truncate", math.exp(20))),
]  # fmt: skip


@pytest.mark.parametrize(("read", "settings", "names", "values"), RESOLVED)
def test_a_host_s_settings_mean(read: Read, settings: str, names: str, values: tuple[Any, ...]) -> None:
    config, _ = made(read, settings)
    found = {name: attrgetter(name)(config) for name in names.split()}
    assert found == dict(zip(found, values, strict=True))


SLIME_RS = "use_tis: true, use_rs: true, tis_mode: clip, tis_upper_bound: 3.0, rs_level: sequence"
VERL_RS = "rollout_rs: sequence"
REJECTION: list[tuple[Read, str, list[tuple[Any, ...]]]] = [
    (slime, MIS, [("token", "ratio", 0.5, 2.0)]),
    # slime's bounds come from TIS
    (slime, SLIME_RS, [("sequence_sum", "ratio", 1 / 3, 3.0)]),
    (slime, f"{SLIME_RS}, rs_lower_bound: 0", [("sequence_sum", "ratio", 0.0, 3.0)]),
    *(
        (verl, f"rollout_rs: {scope}_{kind}, rollout_rs_threshold: {limit}", [(aggregate, kind, None, 0.01)])
        for scope, aggregate in {"token": "token", "seq_sum": "sequence_sum", "seq_max": "sequence_max"}.items()
        for kind, limit in (("k2", "0.01"), ("k3", "1e-2"))
    ),
    (
        verl,
        "rollout_rs: 'token_k1, seq_max_k2,token_k1', rollout_rs_threshold: '0.5_2.0, 0.3'",
        [("token", "ratio", 0.5, 2.0), ("sequence_max", "k2", None, 0.3)],
    ),
    # verl's inherit the weights' threshold
    (verl, VERL_RS, [("sequence_sum", "ratio", 0.5, 2.0)]),
    (verl, f"rollout_is: token, {VERL_RS}, rollout_is_threshold: 4.0", [("sequence_sum", "ratio", 0.25, 4.0)]),
    (verl, f"{VERL_RS}, rollout_is_threshold: 4.0, rollout_rs_threshold_lower: 0", [("sequence_sum", "ratio", 0.0, 4)]),
    (nemo, NEMO_TIS.replace(": tis", ": seq-mask-tis"), [("sequence_mean", "ratio", 0.0, 3.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("read", "settings", "expected"), REJECTION)
def test_a_host_s_rejection_means(read: Read, settings: str, expected: list[tuple[Any, ...]]) -> None:
    assert criteria(made(read, settings)[0]) == expected


@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
@pytest.mark.parametrize("threshold", ["0.5_5.0", "0.5_2.0", "0.999_1.001", "1.7", "0.25_inf", "0.0_2.0"])
def test_verl_k1_bounds_keep_what_they_accept(option: str, threshold: str) -> None:
    """verl keeps log lo ≤ −x ≤ log hi, x the aggregated log ρ; the converted bounds on ρ keep the same x."""
    config, notes = made(verl, f"rollout_rs: {option}, rollout_rs_threshold: {threshold}")
    lower, upper = (float(part) for part in threshold.split("_")) if "_" in threshold else (1 / 1.7, 1.7)
    (criterion,) = config.criteria
    low, high = criterion.log_bounds
    for step in range(-800, 801):
        x = (step / 200) ** 3 / 20 + 1e-5  # densest around 0, away from every bound by more than rounding
        ours = (low is None or low <= x) and (high is None or x <= high)
        assert ((not lower or math.log(lower) <= -x) and -x <= math.log(upper)) == ours, x
    converted = [note for note in notes if f"{option} bounds 1/ρ in verl" in note]
    assert len(converted) == (threshold in ("0.5_5.0", "0.999_1.001", "0.25_inf", "0.0_2.0"))


PLAIN = "algorithm 3 without weights and without rejection is plain REINFORCE: nothing corrects the mismatch."
ICEPOP = "rollout_is: token, rollout_is_threshold: 0.5_5.0, rollout_is_batch_normalize"
GRADIENT = "bypass_mode: true, loss_type: reinforce"
MASKED = "tis_batch_normalize in mode mask: the mean runs over"
NOTED: list[tuple[Read, str, list[str]]] = [
    (slime, MIS, ["tis.lower_bound 0.5 bounds no weight under tis.mode truncate"]),
    (slime, "use_tis: true, tis_mode: clip, tis_clip: 3.0", ["tis_clip 3.0 changes nothing next to mis.yaml's"]),
    (slime, "tis_mode: clip", ["tis.mode clip changes no weight without use_tis"]),
    (slime, "use_tis: true, rs_level: geometric", ["rs_level geometric changes nothing without use_rs"]),
    (slime, "use_tis: true, rs_veto_threshold: 1e-4", ["rs_veto_threshold 1e-4 changes nothing without use_rs, in"]),
    (slime, "use_tis: true, use_rs: true, rs_veto_threshold: 1e-4", []),
    (slime, "use_rs: true, rs_upper_bound: 2", ["use_rs without use_tis rejects here, as slime's page says"]),
    (slime, "use_tis: true, tis_mode: mask, tis_batch_normalize: true", [MASKED]),
    (verl, "loss_type: reinforce", ["loss_type reinforce changes nothing without bypass_mode"]),
    (verl, "rollout_is_threshold: 5.0", ["rollout_is_threshold 5.0 bounds nothing where rollout_is is null"]),
    (verl, "rollout_rs_threshold: 3.0", ["rollout_rs_threshold changes nothing where rollout_rs is null"]),
    (verl, "rollout_is: sequence, bypass_mode: true", ["rollout_is sequence weights no loss", "tis.level sequence"]),
    (verl, f"rollout_is: token, rollout_is_threshold: 0.5_5.0, {VERL_RS}", ["an IcePop threshold keeps"]),
    (verl, "bypass_mode: true, loss_mode: gspo", ["loss_mode gspo changes nothing in bypass mode"]),
    (verl, GRADIENT, [PLAIN]),
    (verl, f"{GRADIENT}, rollout_token_veto_threshold: 1e-4", []),
    (verl, f"{ICEPOP}: true", ["rollout_is_batch_normalize with two thresholds (IcePop): the mean runs over the acc"]),
    (verl, "rollout_is: token, rollout_is_threshold: 5.0, rollout_is_batch_normalize: true", []),
]  # fmt: skip


@pytest.mark.parametrize(("read", "settings", "starts"), NOTED)
def test_what_has_no_effect_is_accepted_and_said(read: Read, settings: str, starts: list[str]) -> None:
    _, notes = made(read, settings)
    assert len(notes) == len(starts), notes
    assert all(note.startswith(start) for note, start in zip(notes, starts, strict=True)), notes


REFUSED: list[tuple[Read, str, str]] = [
    (slime, "tis_levl: token", "slime key 'tis_levl' is unknown: did you mean tis_level"),
    (slime, "use_tis: true, use_rs: true, rs_level: tokn", "rs_level 'tokn' is unknown: did you mean token"),
    (verl, "rollout_iss: token", "verl key 'rollout_iss' is unknown: did you mean rollout_is"),
    (verl, "algorithm: {rollout_corection: {}}", "verl's section algorithm has no block rollout_correction"),
    (verl, "rollout_is: tokens", "rollout_is 'tokens' is unknown: did you mean token"),
    (verl, "use_policy_gradient: true", "requires bypass_mode=True"),
    (verl, "bypass_mode: true, bypass_old_logprob_for_rollout: false", "two spellings of one switch"),
    (verl, "bypass_mode: true, use_policy_gradient: true, loss_type: ppo_clip", "contradicts loss_type"),
    (verl, "loss_type: vanilla", "loss_type 'vanilla' is unknown: there is ppo_clip, reinforce"),
    (verl, "rollout_rs: seq_max_k1, rollout_rs_threshold: 2", "option of rollout_rs 'seq_max_k1' is unknown"),
    (verl, "rollout_rs: seq_mean_k3", "rollout_rs seq_mean_k3 needs one number as rollout_rs_threshold"),
    (verl, "rollout_rs: token_k1, rollout_rs_threshold: '3_2'", "lower bound 0.5 above upper bound 0.333333"),
    (verl, "rollout_rs: 'token_k1,token_k2,token_k3', rollout_rs_threshold: '1,2'", "2 thresholds for 3"),
    (verl, "rollout_rs: seq_max_k2, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.5", "needs one number"),
    (verl, "loss_mode: dppo_tv", "dppo_tv is no setting here; next to it comes preset dppo_tv with by"),
    (verl, "policy_loss: {loss_mode: clip_cov}", "comes objective ppo: verl's takes tokens out at random"),
    (nemo, "use_cispo: true, disable_ppo_ratio: true", "make different losses: switch one of them off."),
    (nemo, NEMO_TIS.replace(": tis", ": ice"), "truncated_importance_sampling_type 'ice' is unknown: did you mean"),
    (nemo, f"{NEMO}, truncated_importance_sampling_type: tis", "truncated_importance_sampling_ratio is None, whi"),
]


@pytest.mark.parametrize(("read", "settings", "message"), REFUSED)
def test_a_host_s_mistakes_are_refused(read: Read, settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(read, settings)


def test_slime_s_sequence_masking_is_a_criterion_beside_the_others() -> None:
    alone = mp.MismatchConfig.build(with_opsm({"use_rollout_log_probs": False}, 0.1))
    assert alone.rs == mp.preset("opsm", delta=0.1).rs
    others: dict[str, Any] = {"use_rollout_log_probs": True, "rs": {"criteria": ["token:k2:1"]}}
    names = [each.name for each in mp.MismatchConfig.build(with_opsm(others, 0.1)).criteria]
    assert names == ["token_k2", "sequence_mean_ratio_negative"]
    with pytest.raises(ValueError, match="give --rs-policy current"):
        with_opsm({**others, "use_rollout_log_probs": False}, 0.1)
