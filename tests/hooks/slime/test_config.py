"""What slime's and miles's arguments and ours mean together, and which mistakes are refused before training starts."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import warnings
from inspect import signature
from typing import Any

import pytest
import yaml

import mismatch_plugin as mp
from mismatch_plugin.hooks import miles, slime
from tests.hooks.contracts.slime_cases import SHIPPED, custom, hooked, ours
from tests.hooks.contracts.slime_data import arguments
from tests.hooks.contracts.slime_source import host_root

HOSTS = {"slime": slime, "miles": miles}
TWICE = {"use_rollout_logprobs": True, "use_tis": True}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    return request.param


# A user's mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [True, False])
def test_both_flags_under_policy_loss_would_count_twice(host: str, hook: bool):
    """Typed with --loss-type policy_loss, or from YAML without the launcher, which evades the host's own assertion."""
    adapter: Any = HOSTS[host]
    args = arguments(host, **TWICE, **(hooked(host) if hook else {}))
    sentence = rf"algorithm 3.*would count twice.*mismatch_plugin\.launch.*mismatch_plugin\.hooks\.{host}\.policy_loss"
    for check in (adapter.init, adapter.check):
        with pytest.raises(ValueError, match=sentence):
            check(args)
    if hook:
        values: dict[str, Any] = dict.fromkeys(signature(adapter.tis_function).parameters)
        with pytest.raises(ValueError, match=sentence):
            adapter.tis_function(**{**values, "args": args})


HOOK, WHOLE = hooked("slime"), custom("slime")
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
GSPO = {"advantage_estimator": "gspo"}
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        ours(2, {"level": "sequence"}),
        r"no hook of the plugin would run.*--custom-tis-function-path mismatch_plugin\.",
    ),
    (HOOK, ours(0, rs={"veto_threshold": 1e-4}) | {"get_mismatch_metrics": False}, "add --get-mismatch-metrics"),
    (
        HOOK,
        ours(1, rs={"veto_threshold": 1e-4}),
        "compare π_θ with π_rollout, which slime's policy_loss does not pass on",
    ),
    (WHOLE, {"mismatch_settings": {"use_rollout_log_probs": True}}, "write --use-rollout-logprobs"),
    (HOOK, ours(2, denominator="accepted"), "^--mismatch-denominator accepted cannot"),
    (
        HOOK,
        ours(2, ppo={"eps_clip_low": 0.3}),
        "--mismatch-eps-clip-low 0.3 contradicts slime's --eps-clip, which makes it 0.2",
    ),
    (HOOK, ours(2, ppo={"dual_clip": 3.0}), "--mismatch-dual-clip 3.0 is slime's to set: .* and set --eps-clip-c"),
    (WHOLE, ours(2, terms={"entropy_coef": 0.01}), "contradicts slime's --entropy-coef, which makes it 0.0"),
    (
        WHOLE,
        {**ours(2, terms={"kl_coef": 0.1}), "kl_loss_coef": 0.1},
        r"contradicts slime's --kl-loss-coef \(with --use-kl-loss\), which makes it 0.0",
    ),
    (WHOLE, ours(2, aggregation="seq-mean-token-sum"), "^--mismatch-aggregation seq-mean-token-sum contradicts slime"),
    (
        HOOK,
        ours(2, {"upper_bound": 3.0}) | {"tis_clip": 5.0},
        "^--tis-upper-bound 3.0 contradicts slime's --tis-clip, which makes it 5",
    ),
    (HOOK, ours(2, {"mode": "truncate"}) | {"tis_clip_low": 0.5}, "bounds no weight under --tis-mode truncate"),
    (WHOLE, ours(3) | GSPO, "gspo clips .*algorithm 3 is REINFORCE, .*: choose grpo, .*or leave --use-tis out"),
    (
        WHOLE,
        ours(2, objective="cispo") | GSPO,
        "^--mismatch-objective cispo contradicts slime's --advantage-estim.* gspo",
    ),
    (HOOK, ours(2, objective="gspo"), "cannot run --mismatch-objective gspo: slime's policy_loss computes ppo"),
    (HOOK, ours(2, objective="ppo") | GSPO, "^--mismatch-objective ppo contradicts .*which makes it gspo"),
    (
        HOOK,
        ours(2, rs={"policy": "current", "veto_threshold": 0.1}),
        "cannot run --rs-policy current: .* does not pass π_θ on.* set --loss-type custom_loss",
    ),
    (HOOK, ours(0, rs={"criteria": ["token:tv:0.1@away"]}), "criterion token_tv_away: .* not pass advantages on"),
    (HOOK, ours(2, terms={"rollout_kl_coef": 0.1}), "--mismatch-rollout-kl-coef: slime's policy_loss adds no such"),
    (HOOK, {**ours(2, terms={"kl_importance_weighted": True}), **KL}, "--mismatch-kl-importance-weighted: slime's"),
    (WHOLE, ours(0, rs={"veto_threshold": 0.1}) | {"use_opsm": True}, "the veto π_old: give --rs-policy current"),
    (
        WHOLE,
        {**ours(2, terms={"kl_importance_weighted": True}), **KL, "use_unbiased_kl": True},
        "--use-unbiased-kl and --mismatch-kl-importance-weighted both weigh the KL",
    ),
    (HOOK, {"use_tis": True, "tis_clip": "high"}, "tis_clip is 'high'"),  # in YAML
]


@pytest.mark.parametrize(("paths", "changes", "sentence"), MISTAKES)
def test_mistakes_are_refused_with_what_to_change(paths: dict[str, Any], changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence) as caught:
        slime.init(arguments(**paths, **changes))
    assert len(str(caught.value)) < 500


def test_losses_that_are_not_ours_are_left_alone():
    assert slime.check(arguments(**TWICE, loss_type="sft_loss")) is None
    assert slime.check(arguments(use_rollout_logprobs=True)) == slime.settings(arguments(use_rollout_logprobs=True))


# The host's own switches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["gspo", "cispo"])
@pytest.mark.parametrize("algorithm", [0, 1, 2])
def test_the_host_s_estimator_is_the_objective_with_the_host_s_eps(estimator: str, algorithm: int):
    """ε that nobody typed is the host's default, which its own loss would have used, and not the objective's own."""
    changes = {**WHOLE, **ours(algorithm), "advantage_estimator": estimator}
    config = slime.settings(arguments(**changes))
    assert (config.objective, config.ppo.eps_clip_low, config.ppo.eps_clip_high) == (estimator, 0.2, 0.2)
    block = described(**changes)
    assert f"objective: {estimator}, ratio in [0.8, 1.2]" in block
    assert f"{estimator} by --advantage-estimator: the plugin's, ε as --eps-clip and" in block
    typed = slime.settings(arguments(**changes, eps_clip=3e-4, eps_clip_high=4e-4)).ppo
    assert (typed.eps_clip_low, typed.eps_clip_high) == (3e-4, 4e-4)
    wide = slime.settings(arguments(**changes, eps_clip=4.0, eps_clip_high=0.3)).ppo
    assert (wide.eps_clip_low, wide.eps_clip_high) == (1.0, 0.3)
    same = {**changes["mismatch_settings"], "objective": estimator}
    assert slime.settings(arguments(**{**changes, "mismatch_settings": same})).objective == estimator


@pytest.mark.parametrize(("objective", "low", "high"), [("gspo", 0.2, 0.2), ("reinforce", 0.2, 0.2)])
def test_an_objective_by_hand_is_taken_by_our_loss(objective: str, low: float, high: float):
    config = slime.check(arguments(**WHOLE, **ours(2, objective=objective)))
    assert config is not None and config.objective == objective
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high) == (low, high)  # the host's --eps-clip


def test_the_host_s_own_gspo_keeps_its_loss_under_our_weights(host: str):
    changes = {**hooked(host), **ours(2, {"level": "sequence"}), **GSPO, "use_opsm": True}
    config = HOSTS[host].check(arguments(host, **changes))
    assert (config.objective, config.criteria) == ("gspo", ())
    block = described(host, **changes)
    assert f"gspo by --advantage-estimator: {host}'s own" in block
    assert f"--use-opsm: {host}'s own, which judges π_θ against π_old" in block
    assert "rejection: none" in block


@pytest.mark.parametrize(("algorithm", "policy"), [(0, "current"), (1, "auto"), (2, "current"), (3, "auto")])
def test_off_policy_sequence_masking_is_a_criterion_of_our_loss(algorithm: int, policy: str, host: str):
    changes = {**custom(host), **ours(algorithm), "use_opsm": True, "opsm_delta": 0.1}
    config = HOSTS[host].check(arguments(host, **changes))
    (rule,) = config.criteria
    assert (rule.name, config.rs.policy) == ("sequence_mean_ratio_negative", policy)
    assert rule.lower_bound == pytest.approx(math.exp(-0.1), rel=1e-15) and rule.upper_bound == math.inf
    assert (rule.lower_bound, config.rs.policy) == (mp.preset("opsm", delta=0.1).criteria[0].lower_bound, policy)
    against = "a criterion against π_rollout, the sampler" if policy == "current" else "a criterion; a sequence is"
    assert f"--use-opsm: {against}" in described(host, **changes)


def test_off_policy_sequence_masking_is_read_once_and_next_to_other_criteria():
    other = {"rs": {"criteria": ["token:k2:0.3"], "policy": "current"}}
    config = slime.settings(arguments(**WHOLE, **ours(0, **other), use_opsm=True))
    assert [rule.name for rule in config.criteria] == ["token_k2", "sequence_mean_ratio_negative"]
    again = {**WHOLE, **ours(0), "mismatch_settings": config.model_dump(mode="json", exclude_unset=True)}
    assert slime.settings(arguments(**again, use_opsm=True)) == config


# Reading --------------------------------------------------------------------------------------------------------------


def test_the_host_s_own_values_are_read(host: str):
    changes: dict[str, Any] = {
        "eps_clip": 0.1,
        "eps_clip_high": 0.3,
        "eps_clip_c": 3.0,
        "entropy_coef": 0.02,
        "use_kl_loss": True,
    }
    changes |= {"kl_loss_coef": 0.05, "kl_loss_type": "k3", "calculate_per_token_loss": True}
    config = HOSTS[host].settings(arguments(host, **changes))
    assert config.ppo == mp.PPOClip(eps_clip_low=0.1, eps_clip_high=0.3, dual_clip=3.0)
    assert config.terms == mp.Terms(entropy_coef=0.02, kl_coef=0.05, kl_type="k3")
    assert config.aggregation == "token-mean"
    assert HOSTS[host].settings(arguments(host, eps_clip_high=None)).ppo.eps_clip_high == 0.2
    assert HOSTS[host].settings(arguments(host, kl_loss_coef=0.05)).terms.kl_coef == 0.0  # no use_kl_loss


@pytest.mark.parametrize(
    ("clip", "tis", "wanted"),
    [
        ({}, {}, ("truncate", 2.0, None)),
        ({"tis_clip": 5.0}, {}, ("truncate", 5.0, None)),
        ({"tis_clip": 5.0, "tis_clip_low": 0.5}, {}, ("clip", 5.0, 0.5)),
        ({"tis_clip_low": 0.5}, {"mode": "mask"}, ("mask", 2.0, 0.5)),
        ({}, {"upper_bound": 3.0}, ("truncate", 3.0, None)),
        ({"tis_clip": 3.0}, {"upper_bound": 3.0}, ("truncate", 3.0, None)),
        ({"tis_clip": 3.0}, {"level": "sequence", "mode": "clip"}, ("clip", 3.0, None)),
    ],
)
def test_the_host_s_tis_clip_is_the_bound_unless_ours_is_given(
    clip: dict[str, Any], tis: dict[str, Any], wanted: tuple[str, float, float | None]
):
    config = slime.settings(arguments(**hooked("slime"), **ours(2, tis), **clip))
    assert (config.tis.mode, config.tis.upper_bound, config.tis.lower_bound) == wanted


def test_a_mis_yaml_is_read_as_slime_reads_it():
    """rs bounds that are null are those of TIS, which our own flags would not do; `1e-4` is a string in YAML."""
    keys: dict[str, Any] = {"tis_mode": "clip", "tis_level": "sequence", "tis_lower_bound": 0.3, "tis_upper_bound": 4.0}
    keys |= {"tis_batch_normalize": True, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": None}
    keys |= {"rs_upper_bound": 1.01, "rs_veto_threshold": "1e-4"}
    config = slime.settings(arguments(**hooked("slime"), **keys, use_tis=True))
    wanted = mp.compat.from_slime({**keys, "use_tis": True})
    assert (config.tis, config.rs) == (wanted.tis, wanted.rs)
    assert config.criteria[0].lower_bound == 0.3
    assert config.rs.veto_threshold == 1e-4


OURS_IN_YAML: dict[str, dict[str, Any]] = {
    "metrics": {"mismatch_metrics": "full"},
    "policy": {"rollout_log_prob_policy": "neutral"},
    "scope": {"tis_batch_normalize_scope": "micro_batch"},
    "several": {"mismatch_dry_run": True, "mismatch_report_dir": "out"},
}


@pytest.mark.parametrize("more", OURS_IN_YAML)
@pytest.mark.parametrize("upper", [None, 4.0])
def test_a_mis_yaml_means_the_same_next_to_our_own_keys(more: str, upper: float | None, host: str):
    """Rejection's missing lower bound is that of TIS, 0.5; as a flag it would be 1/4."""
    keys = {**SHIPPED, "rs_upper_bound": upper}
    alone = HOSTS[host].settings(arguments(host, **hooked(host), **keys))
    both = HOSTS[host].settings(arguments(host, **hooked(host), **keys, **OURS_IN_YAML[more]))
    assert (alone.criteria[0].lower_bound, alone.criteria[0].upper_bound) == (0.5, upper or 2.0)
    assert (both.criteria, both.rs, both.tis.lower_bound) == (alone.criteria, alone.rs, 0.5)
    assert both != alone


def test_a_mis_yaml_lies_over_a_preset_and_under_our_other_settings():
    keys = {"use_tis": True, "tis_level": "sequence", "use_rs": True, "rs_upper_bound": 3.0, "rs_lower_bound": 0.25}
    more = {"mismatch_preset": "token_icepop", "rs_criterion": ["token:k2:0.5"], "rollout_log_prob_policy": "neutral"}
    config = slime.settings(arguments(**hooked("slime"), **keys, **more))
    assert (config.tis.mode, config.tis.level, config.tis.upper_bound) == ("mask", "sequence", 5.0)  # the preset's 5
    assert [criterion.name for criterion in config.criteria] == ["token_k2", "token_ratio"]
    assert config.rollout_log_prob_policy == "neutral"


@pytest.mark.parametrize("keys", [{}, {"tis_level": "sequence"}])
def test_a_preset_that_becomes_another_algorithm_in_the_yaml_is_noted(keys: dict[str, Any]):
    args = arguments(**hooked("slime"), use_tis=True, mismatch_preset="geo_rs", **keys)
    with pytest.warns(mp.MismatchWarning, match=r"preset geo_rs is algorithm 0 \(PPO\), and .*use.tis makes it 2"):
        assert slime.settings(args).algorithm == 2
    assert "! preset geo_rs is algorithm 0" in described(**vars(args))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("mismatch_metric", "setting 'mismatch_metric' is unknown: did you mean mismatch_metrics"),
        ("mismatch_colour", "setting 'mismatch_colour' is unknown"),
        ("tis_levle", "setting 'tis_levle' is unknown: did you mean tis_level"),
        ("rs_vetothreshold", "setting 'rs_vetothreshold' is unknown: did you mean rs_veto_threshold"),
    ],
)
def test_a_misspelt_key_of_the_yaml_is_refused(key: str, message: str, host: str):
    with pytest.raises(ValueError, match=message):
        HOSTS[host].settings(arguments(host, **hooked(host), use_tis=True, **{key: "full"}))


def test_the_shipped_mis_yaml_is_the_recorded_one():
    file = host_root("slime") / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
    assert yaml.safe_load(file.read_text()) == SHIPPED


def test_the_shipped_mis_yaml_runs_with_the_tis_path_alone(caplog: pytest.LogCaptureFixture, host: str):
    """No hook around the step: the mean weight is the micro-batch's, as in slime's own function, and that is said."""
    adapter: Any = HOSTS[host]
    args = arguments(host, **hooked(host), **SHIPPED)
    assert adapter.check(args) is not None
    text = described(host, **hooked(host), **SHIPPED)
    assert "batch normalisation over: each micro-batch; for the optimizer step set --custom-megatron-before" in text
    run = type(adapter.ADAPTER)().run
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        assert [run.factor(adapter.settings(args)) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert f"set --custom-megatron-before-train-step-hook-path mismatch_plugin.hooks.{host}" in record.getMessage()
    step = arguments(host, **hooked(host), **SHIPPED, tis_batch_normalize_scope="step")
    with pytest.raises(ValueError, match=r"before_train_step and --rollout-data-postprocess-path .* or choose --tis-b"):
        run.factor(adapter.settings(step))


def test_a_gate_needs_what_knows_the_step_and_a_loss_that_compares(host: str):
    adapter, module = HOSTS[host], f"mismatch_plugin.hooks.{host}"
    step = {"custom_megatron_before_train_step_hook_path": f"{module}.before_train_step"}
    gated = {**hooked(host), **ours(2, gate_kl=1e-3)}
    assert adapter.check(arguments(host, **gated, **step)).gate_kl == 1e-3
    assert "gate: k3_kl above 0.001" in described(host, **gated, **step)
    with pytest.raises(ValueError, match=f"judges a whole step, known only to its hook: .* {module}.before_"):
        adapter.check(arguments(host, **gated))
    uncalled = {**hooked(host), **ours(0, gate_kl=1e-3), "get_mismatch_metrics": False}
    with pytest.raises(ValueError, match=r"rejection or the gate is asked for, but .* add --get-mismatch-metrics"):
        adapter.check(arguments(host, **uncalled, **step))
    with pytest.raises(ValueError, match="policy_loss cannot run algorithm 1"):
        adapter.check(arguments(host, **ours(1, gate_kl=1e-3), **step))
    adapter.check(arguments(host, **ours(1), **step))


def test_arguments_are_read_once_and_others_anew():
    args = arguments(**hooked("slime"), **ours(2))
    adapter = type(slime.ADAPTER)()
    assert adapter.config(args) is adapter.config(args)
    other = arguments(**hooked("slime"), **ours(2), eps_clip_high=0.28)
    assert adapter.config(other).ppo.eps_clip_high == 0.28 != adapter.config(args).ppo.eps_clip_high


# The start-up block ---------------------------------------------------------------------------------------------------


def described(host: str = "slime", **changes: Any) -> str:
    adapter: Any = HOSTS[host]
    args = arguments(host, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return "\n".join(adapter.describe(adapter.settings(args), args))


def test_the_block_says_what_runs_and_who_divides(host: str):
    module = f"mismatch_plugin.hooks.{host}"
    tis = {"level": "sequence", "batch_normalize": True}
    hooks = {
        "custom_megatron_before_train_step_hook_path": f"{module}.before_train_step",
        "rollout_data_postprocess_path": f"{module}.rollout_data_postprocess",
    }
    text = described(host, **custom(host), **ours(3, tis), **hooks)
    assert "algorithm 3: REINFORCE + IS" in text
    assert f"through: {module}.policy_loss" in text
    assert f"divided as in {host}: per rollout, then over rollouts; rejected tokens still count" in text
    assert "gradients are divided by the mean weight at its end, the logged loss is not" in text
    assert "second forward pass: no" in text
    assert "no step metrics" not in text
    text = described(host, **hooked(host), **ours(2, tis), **hooks)
    assert ("its mean weight is known before it" in text) == (host == "slime")
    text = described(host, **hooked(host), **ours(2, tis), calculate_per_token_loss=True)
    assert f"through: {host}'s policy_loss with {module}.tis_function" in text
    assert f"divided as in {host}: by the step's tokens; rejected tokens still count" in text
    assert "over: each micro-batch; for the optimizer step set --custom-megatron-before-train-step-hook-path" in text
    assert f"second forward pass: yes ({host} skips it when a rollout is one step)" in text
    assert "\n! no step metrics" in text


def test_the_block_says_what_a_custom_reducer_gets(host: str):
    reducer = {"custom_pg_loss_reducer_function_path": "mine.reducer"}
    text = described(host, **hooked(host), **ours(0, rs={"veto_threshold": 1e-4}), **reducer)
    assert "divided by mine.reducer, which gets the masks without rejected tokens" in text
    assert "entropy and KL terms: over accepted tokens" in text
    text = described(host, **hooked(host), **ours(2), **reducer)
    assert "divided by mine.reducer, which gets the masks\n" in text
    assert "entropy and KL terms: over all response tokens" in text


def test_the_block_names_what_has_no_effect():
    assert "! ppo.eps_clip_high 0.28 changes nothing" in described(
        **custom("slime"), **ours(3, {"level": "sequence"}), eps_clip_high=0.28
    )


def test_every_process_checks_and_the_first_one_speaks(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="mismatch_plugin"):
        slime.init(arguments(**hooked("slime"), **ours(2, verify_weights="off")))
        assert "algorithm 2: decoupled PPO" in caplog.text
        caplog.clear()
        slime.init(arguments(**hooked("slime"), **ours(2, verify_weights="off"), rank=1))
    assert caplog.text == ""


@pytest.mark.parametrize("name", HOSTS)
def test_importing_an_adapter_imports_neither_its_host_nor_megatron(name: str):
    heavy = ["slime", "miles", "megatron", "ray", "sglang", "transformers", "aiohttp"]
    code = f"import sys, mismatch_plugin.hooks.{name}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
