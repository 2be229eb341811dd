"""What slime's and miles's arguments and ours mean together, what the start-up block says, and what is refused."""

from __future__ import annotations

import logging
import math
from inspect import signature
from operator import attrgetter
from typing import Any

import pytest

import mismatch_plugin as mp
from mismatch_plugin.hooks import miles, slime
from tests.hooks.contracts.slime_data import REDUCER, SHIPPED, arguments, custom, hooked, ours, stepped

HOSTS: dict[str, Any] = {"slime": slime, "miles": miles}
hosts = pytest.mark.parametrize("host", HOSTS)
pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
Changes = dict[str, Any]
TWICE = {"use_rollout_logprobs": True, "use_tis": True}
HOOK, WHOLE, STEP = hooked("slime"), custom("slime"), stepped("slime")
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
GSPO = {"advantage_estimator": "gspo"}
VETO = {"rs": {"veto_threshold": 1e-4}}
NO_METRICS = {"get_mismatch_metrics": False}

# A user's mistakes ----------------------------------------------------------------------------------------------------


@hosts
@pytest.mark.parametrize("hook", [True, False])
def test_both_flags_under_policy_loss_would_count_twice(host: str, hook: bool) -> None:
    """Typed with --loss-type policy_loss, or from YAML without the launcher, which evades the host's own assertion."""
    adapter = HOSTS[host]
    args = arguments(host, **TWICE, **(hooked(host) if hook else {}))
    values: dict[str, Any] = dict.fromkeys(signature(adapter.tis_function).parameters) | {"args": args}
    calls = [lambda: adapter.init(args), lambda: adapter.check(args)]
    calls += [lambda: adapter.tis_function(**values)] if hook else []
    calls += [lambda: adapter.rollout_data_postprocess(args)] if host == "miles" else []
    sentence = rf"algorithm 3.*would count twice.*mismatch_plugin\.launch.*mismatch_plugin\.hooks\.{host}\.policy_loss"
    for call in calls:
        with pytest.raises(ValueError, match=sentence):
            call()


MISTAKES: list[tuple[Changes, Changes, str]] = [
    ({}, ours(2), r"no hook of the plugin would run.*--custom-tis-function-path mismatch_plugin\."),
    (HOOK, ours(0, **VETO) | NO_METRICS, "rejection or the gate is asked for, but .* add --get-mismatch-metrics"),
    (HOOK, ours(1, **VETO), "compare π_θ with π_rollout, which slime's policy_loss does not pass on"),
    (WHOLE, {"mismatch_settings": {"use_rollout_log_probs": True}}, "write --use-rollout-logprobs"),
    (HOOK, ours(2, {"upper_bound": 3.0}) | {"tis_clip": 5.0}, "^--tis-upper-bound 3.0 contradicts slime's --tis-clip,"),
    (WHOLE, ours(3) | GSPO, "gspo clips .*algorithm 3 is REINFORCE, .*: choose grpo, .*or leave --use-tis out"),
    (WHOLE, ours(2, objective="cispo") | GSPO, "^--mismatch-objective cispo contradicts slime's --advantage-estim.* g"),
    (HOOK, ours(2, objective="gspo"), "cannot run --mismatch-objective gspo: slime's policy_loss computes ppo"),
    (HOOK, ours(2, rs={"policy": "current", "veto_threshold": 0.1}), "--rs-policy current: .* does not pass π_θ on.* "),
    (HOOK, ours(0, rs={"criteria": ["token:tv:0.1@away"]}), "criterion token_tv_away: .* not pass advantages on"),
    (HOOK, ours(2, terms={"rollout_kl_coef": 0.1}), "--mismatch-rollout-kl-coef: slime's policy_loss adds no such"),
    (HOOK, {**ours(2, terms={"kl_importance_weighted": True}), **KL}, "--mismatch-kl-importance-weighted: slime's"),
    (WHOLE, ours(0, **VETO) | {"use_opsm": True}, "the veto π_old: give --rs-policy current"),
    (WHOLE, {**ours(2, terms={"kl_importance_weighted": True}), **KL, "use_unbiased_kl": True}, "both weigh the KL"),
    (HOOK, {"use_tis": True, "tis_clip": "high"}, "tis_clip is 'high'"),  # in YAML
    (HOOK, ours(2, gate_kl=1e-3), r"--mismatch-gate-kl needs the plugin's before_train_step: set .*\.slime"),
    (HOOK, {"use_tis": True, "mismatch_metric": 1}, "setting 'mismatch_metric' is unknown: did you mean mismatch_metr"),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "changes", "sentence"), MISTAKES)
def test_mistakes_are_refused_with_what_to_change(paths: Changes, changes: Changes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        slime.init(arguments(**{**paths, **changes}))
    assert len(str(caught.value)) < 500


# Reading --------------------------------------------------------------------------------------------------------------

EPS = "objective ppo.eps_clip_low ppo.eps_clip_high"
TERMS = mp.Terms(entropy_coef=0.02, kl_coef=0.1, kl_type="k3")
TIS = "tis.mode tis.upper_bound tis.lower_bound"
HOST: Changes = {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 3.0, "entropy_coef": 0.02, **KL}
HOST |= {"kl_loss_type": "k3", "calculate_per_token_loss": True}
MIS: Changes = {"tis_mode": "clip", "tis_level": "sequence", "tis_lower_bound": 0.3, "tis_upper_bound": 4.0}
MIS |= {"use_tis": True, "tis_batch_normalize": True, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": None}
MIS |= {"rs_upper_bound": 1.01, "rs_veto_threshold": "1e-4"}  # a string in YAML
READ: list[tuple[Changes, str, tuple[Any, ...]]] = [
    # ε that nobody typed is the host's default, which its own loss would have used, and not the objective's own
    *((WHOLE | ours(algorithm) | GSPO, EPS, ("gspo", 0.2, 0.2)) for algorithm in (0, 1, 2)),
    (WHOLE | ours(2) | GSPO | {"eps_clip": 4.0, "eps_clip_high": 0.3}, EPS, ("gspo", 1.0, 0.3)),
    (HOST, EPS, ("ppo", 0.1, 0.3)),
    (HOST, "ppo.dual_clip terms aggregation", (3.0, TERMS, "token-mean")),
    ({"kl_loss_coef": 0.05}, "terms.kl_coef aggregation", (0.0, "seq-mean-token-mean")),  # no use_kl_loss
    # the host's tis_clip is the bound unless ours is given
    (HOOK | ours(2) | {"tis_clip": 5.0}, TIS, ("truncate", 5.0, None)),
    (HOOK | ours(2) | {"tis_clip": 5.0, "tis_clip_low": 0.5}, TIS, ("clip", 5.0, 0.5)),
    (HOOK | ours(2, {"mode": "mask"}) | {"tis_clip_low": 0.5}, TIS, ("mask", 2.0, 0.5)),
    (WHOLE | ours(3, {"level": "none"}, **VETO) | {"tis_clip": 3.0}, TIS, ("truncate", 2.0, None)),
    # off-policy sequence masking is a criterion of our loss, and the host's own under its loss
    *((WHOLE | ours(a) | {"use_opsm": True}, "rs.policy", (policy,)) for a, policy in enumerate(("current", "auto"))),
    # a mis.yaml, and our own keys next to it: rejection's missing lower bound is that of TIS
    (HOOK | MIS, TIS, ("clip", 4.0, 0.3)),
    (HOOK | MIS, "tis.level tis.batch_normalize rs.veto_threshold", ("sequence", True, 1e-4)),
    (HOOK | {**TWICE, "mismatch_preset": "pg_is", "tis_mode": "clip"}, "algorithm tis.level", (3, "sequence")),
    (WHOLE | TWICE | {"tis_level": "none", "use_rs": True, "rs_upper_bound": 2.0}, "algorithm tis.level", (3, "none")),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "names", "values"), READ)
def test_the_host_s_values_are_read(changes: Changes, names: str, values: tuple[Any, ...]) -> None:
    config = slime.settings(arguments(**changes))
    found = {name: attrgetter(name)(config) for name in names.split()}
    assert found == dict(zip(found, values, strict=True))


def test_criteria_of_the_host_s_switches_and_files() -> None:
    def bounds(**changes: Any) -> list[tuple[str, float | None, float | None]]:
        rules = slime.settings(arguments(**changes)).criteria
        return [(rule.name, rule.lower_bound, rule.upper_bound) for rule in rules]

    masking = ("sequence_mean_ratio_negative", pytest.approx(math.exp(-0.1), rel=1e-15), math.inf)
    opsm = {"use_opsm": True, "opsm_delta": 0.1}
    assert bounds(**WHOLE, **ours(1), **opsm) == [masking]
    other = ours(0, rs={"criteria": ["token:k2:0.3"], "policy": "current"})
    assert bounds(**WHOLE, **other, **opsm) == [("token_k2", None, 0.3), masking]
    config = slime.settings(arguments(**WHOLE, **other, **opsm))
    again = {**other, "mismatch_settings": config.model_dump(mode="json", exclude_unset=True)}
    assert slime.settings(arguments(**WHOLE, **again, **opsm)) == config, "it is read once"
    assert bounds(**HOOK, **MIS) == [("sequence_mean_ratio", 0.3, 1.01)]
    for upper in (None, 4.0):
        keys = {**SHIPPED, "rs_upper_bound": upper, "mismatch_metrics": "full"}
        assert bounds(**HOOK, **keys) == [("token_ratio", 0.5, upper or 2.0)], "as slime reads it: the bound of TIS"


def test_arguments_are_read_once_and_others_anew() -> None:
    args, adapter = arguments(**HOOK, **ours(2)), type(slime.ADAPTER)()
    assert adapter.config(args) is adapter.config(args)
    other = arguments(**HOOK, **ours(2), eps_clip_high=0.28)
    assert adapter.config(other).ppo.eps_clip_high == 0.28 != adapter.config(args).ppo.eps_clip_high


# The start-up block ---------------------------------------------------------------------------------------------------


SEQUENCE = {"level": "sequence", "batch_normalize": True}
BLOCK: list[tuple[Changes, str]] = [
    (WHOLE | ours(3, SEQUENCE), "through: mismatch_plugin.hooks.slime.policy_loss\n"),
    (WHOLE | ours(3, SEQUENCE) | STEP, "batch normalisation over: the optimizer step\n"),
    (WHOLE | ours(3) | {"get_mismatch_metrics": True}, "second forward pass: yes, for --get-mismatch-metrics alone"),
    (HOOK | ours(2), "second forward pass: yes (slime skips it when a rollout is one step)"),
    (HOOK | ours(2) | {"skip_actor_forward_only": True}, "second forward pass: no (--skip-actor-forward-only)"),
    (HOOK | ours(2), "through: slime's policy_loss with mismatch_plugin.hooks.slime.tis_function\n"),
    (HOOK | ours(2) | {"calculate_per_token_loss": True}, "divided as in slime: by the step's tokens; rejected"),
    (HOOK | ours(2, SEQUENCE), "over: each micro-batch; for the optimizer step set --custom-megatron-before-train"),
    (HOOK | ours(2) | REDUCER, "divided by tests.hooks.contracts.slime_data.accepted_mean\n"),
    (HOOK | ours(2) | {"rollout_top_p": 0.9}, "sampling filter: top_p 0.9; every log-prob of slime's"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), BLOCK)
def test_the_block_says_what_runs_and_who_divides(changes: Changes, line: str) -> None:
    args = arguments(**changes)
    text = "\n".join(slime.describe(slime.settings(args), args))
    assert line in text
    assert ("\n! no step metrics" in text) != (STEP.items() <= changes.items())
    assert ("sampling filter" in text) == ("rollout_top_p" in changes)


def test_the_shipped_mis_yaml_runs_with_the_tis_path_alone(caplog: pytest.LogCaptureFixture) -> None:
    """No hook around the step: the mean weight is the micro-batch's, as in slime's own function, and that is said."""
    args, adapter = arguments(**HOOK, **SHIPPED), type(slime.ADAPTER)()
    with caplog.at_level(logging.WARNING, logger="mismatch_plugin"):
        assert [adapter.run.factor(adapter.config(args)) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "set --custom-megatron-before-train-step-hook-path mismatch_plugin.hooks.slime" in record.getMessage()
