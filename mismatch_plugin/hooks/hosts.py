"""The trainers: one description each, which launcher, refusals, start-up block, `inspect`, docs and tests read."""

from __future__ import annotations

from dataclasses import replace

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.compat.verl import SPELLED
from mismatch_plugin.config.values import unknown
from mismatch_plugin.hooks.base import Host, Lack

_APPLY = "mismatch-plugin patch apply --host {} --root DIR"
_OWN_LOG_PROBS = Lack("it computes log-probs itself")
_OWN_COUNT = Lack("it counts tokens before anything is rejected", "Choose auto or original.")
_LOSS_ALONE = {
    "log_probs": _OWN_LOG_PROBS,
    "budgets": Lack("nothing of ours passes from step to step there", "Leave the budget out; the bound stays."),
    "updates": Lack("its weight updates are not watched"),
}
"""What cannot be had where our loss is called and nothing else of ours runs."""
_MIS = (
    *("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "training_ppl", "training_log_ppl"),
    *("rollout_ppl", "rollout_log_ppl", "chi2_token", "chi2_seq"),
)
"""Metrics of mis.py, of slime and miles, that have our names."""


SLIME = Host(
    name="slime",
    title="slime",
    packages=("slime",),
    repository="THUDM/slime",
    version="0.3.1",
    commit="624b824a898ab0ec1fcb4d373004c7f3852bf515",
    inside="slime/utils",
    owns={
        "ppo.eps_clip_low": "--eps-clip",
        "ppo.eps_clip_high": "--eps-clip-high",
        "ppo.dual_clip": "--eps-clip-c",
        "terms.entropy_coef": "--entropy-coef",
        "terms.kl_coef": "--kl-loss-coef (with --use-kl-loss)",
        "terms.kl_type": "--kl-loss-type",
        "aggregation": "--calculate-per-token-loss",
        "length_norm": "",
    },
    shares={"objective": "--advantage-estimator", "tis.upper_bound": "--tis-clip", "tis.lower_bound": "--tis-clip-low"},
    lacks={"log_probs": _OWN_LOG_PROBS, "accepted": Lack("it divides by the tokens of the original masks")},
    denominator="the host's, over the original masks",
    launch="mismatch_plugin.hooks.slime.config",
    door="name the functions of mismatch_plugin.hooks.slime by slime's path arguments",
    paste="ray job submit … -- python3 -m mismatch_plugin.launch train.py … {flags}",
    reads=(("slime.utils.arguments", "parse_args"),),
    starters=("slime.utils.external_utils.command_utils",),
    needs_patch=lambda config: "rs.max_staleness" if config.rs.max_staleness is not None else "",
    dumps=("slime", "slime_train"),
    metrics={
        "train_rollout_logprob_abs_diff": "log_ratio_abs_mean",
        "train_rollout_kl": "k3_kl",
        "tis": "rollout_is_ratio_mean",
        **{f"mis_{name}": name for name in _MIS},
        "mis_tis_weight_before_bound": "rollout_is_mean",
        "mis_tis_weight_after_bound": "rollout_is_weight_after_mean",
        "mis_rs_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    },
)

MILES = replace(
    SLIME,
    name="miles",
    title="miles",
    packages=("miles",),
    repository="radixark/miles",
    version="0.1.0",
    commit="31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    inside="miles/utils",
    lacks={**SLIME.lacks, "groups": Lack("it computes advantages itself and takes no function for them")},
    door="name the functions of mismatch_plugin.hooks.miles by miles's path arguments",
    reads=(("miles.utils.arguments", "parse_args"),),
    starters=("miles.utils.external_utils.command_utils",),
    needs_patch=lambda config: "",
    dumps=("miles_train",),
)


MEGATRON_LM = Host(
    name="megatron-lm",
    title="Megatron-LM",
    spellings=("megatron-rl",),
    packages=("megatron.rl",),
    repository="NVIDIA/Megatron-LM",
    version="0.20.0",
    commit="d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    inside="megatron/rl",
    distribution="megatron-core",
    owns={
        "ppo.eps_clip_low": "--grpo-clamp-eps-lower",
        "ppo.eps_clip_high": "--grpo-clamp-eps-upper",
        "terms.kl_coef": "--grpo-kl-beta",
        "terms.kl_type": "",
        "terms.entropy_coef": "--grpo-entropy-term-weight",
        "aggregation": "",
        "length_norm": "",
    },
    shares={"tis.upper_bound": "--rl-importance-sampling-truncation-coef"},
    lacks={
        "log_probs": _OWN_LOG_PROBS,
        "accepted": Lack("its loss_func divides by the trained tokens"),
        "groups": Lack("it computes advantages before any log-prob of the training side"),
        "versions": Lack("its loss is not told which weights sampled a token", "Set --rl-generation-lag."),
        "updates": Lack("its rollouts are of its own engine"),
    },
    denominator="Megatron's token count",
    launch="mismatch_plugin.hooks.megatron_rl",
    door=f"`{_APPLY.format('megatron-lm')}`",
    paste="torchrun … -m mismatch_plugin.launch train_rl.py … {flags}",
    trainer="train_rl.py",
    reads=(("megatron.inference.utils", "add_inference_args"),),
)

RC, ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
_BYPASS = f"{RC}.bypass_mode"


def _on_driver(config: MismatchConfig) -> bool:
    return not config.use_rollout_log_probs


VERL = Host(
    name="verl",
    title="verl",
    packages=("verl",),
    repository="volcengine/verl",
    version="0.9.1",
    inside="verl/trainer",
    owns={
        "ppo.": f"{ACTOR}.clip_ratio_low, clip_ratio_high and clip_ratio_c",
        "terms.entropy_coef": f"{ACTOR}.entropy_coeff",
        "terms.kl": f"{ACTOR}.use_kl_loss, kl_loss_coef and kl_loss_type",
        "aggregation": f"{ACTOR}.loss_agg_mode",
        "length_norm": f"{ACTOR}.loss_scale_factor",
    },
    shares={
        "objective": f"{ACTOR}.policy_loss.loss_mode",
        "use_rollout_log_probs": _BYPASS,
        **{path: f"{RC}.{key}" for path, key in SPELLED.items()},
        "use_tis": f"{RC}.rollout_is (in bypass mode loss_type)",
    },
    lacks={
        "current_policy": Lack("its driver rejects before π_θ is there", "Choose auto.", _on_driver, _BYPASS),
        "conditions": Lack(
            "its driver rejects before advantages", "Take the condition away, or set it.", _on_driver, _BYPASS
        ),
        "penalty": Lack("its loss gets no rollout log-probs", "Set it, or leave it out.", _on_driver, _BYPASS),
        "accepted": Lack("its trainers count, most of them before anything is rejected", "Choose auto or original."),
        "versions": Lack(
            "its rollout correction is not told which weights train",
            "Set trainer.v1's max_off_policy_threshold, or async_training.staleness_threshold.",
        ),
        **_LOSS_ALONE,
    },
    scope=lambda config: "rollout_batch" if _on_driver(config) else "micro_batch",
    block="mismatch",
    denominator="verl's `loss_agg_mode`",
    launch="mismatch_plugin.hooks.verl.config",
    door=f"set {ACTOR}.policy_loss.loss_mode=mismatch and +{ACTOR}.policy_loss.rollout_correction='${{{RC}}}'",
    paste="python -m mismatch_plugin.launch -m verl.trainer.main_ppo … {flags}",
    trainer="-m verl.trainer.main_ppo",
    reads=(("hydra", "main"), ("hydra", "compose")),
    dumps=("verl",),
    metrics={
        "training/rollout_probs_diff_mean": "probability_difference_mean",
        "training/rollout_probs_diff_max": "probability_difference_max",
        "training/rollout_actor_probs_pearson_corr": "rollout_actor_probs_pearson_corr",
    },
)


NEMO_RL = Host(
    name="nemo-rl",
    title="NeMo-RL",
    packages=("nemo_rl",),
    repository="NVIDIA-NeMo/RL",
    version="0.6.0",
    commit="7ea279abfbeb698b092856d0dab61e7cf39bc909",
    inside="nemo_rl/algorithms",
    owns={
        "ppo.": "loss_fn.ratio_clip_min, ratio_clip_max and ratio_clip_c",
        "terms.entropy_coef": "",
        "terms.kl": "loss_fn.reference_policy_kl_penalty and reference_policy_kl_type",
        "aggregation": "loss_fn.token_level_loss",
        "length_norm": "",
    },
    shares={
        "objective": "loss_fn.disable_ppo_ratio, use_cispo or sequence_level_importance_ratios",
        "use_tis": "loss_fn.use_importance_sampling_correction",
        "tis.": "loss_fn.truncated_importance_sampling_…",
        "rs.": "loss_fn.truncated_importance_sampling_…",
    },
    lacks={
        "accepted": _OWN_COUNT,
        "groups": Lack("its GRPO counts every response in its group's baseline, and takes no function for that"),
        "versions": Lack("its loss is told no weight versions", "Set grpo.async_grpo.max_trajectory_age_steps."),
        **_LOSS_ALONE,
    },
    scope=lambda config: "micro_batch",
    block="mismatch",
    denominator="NeMo-RL's",
    launch="mismatch_plugin.hooks.nemo_rl",
    door="set loss_fn.mismatch in its YAML, and call mismatch_plugin.hooks.nemo_rl.install() in the script",
    paste="python -m mismatch_plugin.launch examples/run_grpo.py … {flags}",
    trainer="run_grpo.py",
    reads=(("nemo_rl.algorithms.grpo", "setup"),),
    dumps=("nemo_rl",),
    metrics={
        "gen_kl_error": "k3_kl",
        "token_mult_prob_error": "token_mult_prob_error",
        "sampling_importance_ratio": "rollout_is_weight_after_mean",
    },
)

# By their own doors alone: an import path, a subclass, a registry.


TRL = Host(
    name="trl",
    title="TRL",
    packages=("trl",),
    repository="huggingface/trl",
    version="1.16.0",
    inside="trl/trainer",
    owns={
        "ppo.": "epsilon, epsilon_high and delta",
        "objective": "loss_type and importance_sampling_level",
        "aggregation": "loss_type",
        "length_norm": "",
        "terms.entropy_coef": "entropy_coef",
        "terms.kl": "beta",
    },
    lacks={
        "bypass": Lack(
            "the weights of 3 change with π_θ, which only its loss has (1 is had)",
            "Leave one of <use_tis> and <use_rollout_log_probs> out.",
            lambda config: config.algorithm == 3,
        ),
        "current_policy": Lack("it is corrected once a generation, before there is a π_θ", "Choose auto."),
        "penalty": Lack("it is corrected before there is a π_θ, which only its loss has"),
        "groups": Lack("it makes advantages in the call that samples, before anything can be judged"),
        "versions": Lack("its batch holds no weight versions"),
        "normalisation": Lack("its weights are made once a generation, by each process for its own samples"),
        "accepted": Lack("it divides by the original masks", "Choose auto or original."),
        "report": Lack("its trackers get the metrics (report_to)"),
        **_LOSS_ALONE,
    },
    denominator="TRL's `loss_type`",
    door="put mismatch_plugin.hooks.trl.CorrectionMixin before GRPOTrainer in a class of yours",
    paste="CorrectedGRPOTrainer(mismatch={python}, …)",
    dumps=("trl",),
    metrics={
        "sampling/sampling_logp_difference/mean": "log_ratio_abs_mean",
        "sampling/sampling_logp_difference/max": "log_ratio_abs_max",
        "sampling/importance_sampling_ratio/mean": "rollout_is_weight_after_mean",
        "sampling/importance_sampling_ratio/max": "rollout_is_weight_after_max",
    },
)

_ALGORITHM = "trainer.algorithm"
_NO_GROUPS = Lack("its loss comes after the advantages and knows no groups")
SKYRL = Host(
    name="skyrl",
    title="SkyRL",
    packages=("skyrl",),
    repository="NovaSky-AI/SkyRL",
    version="0.3.0",
    commit="a9564572eb8e91076be43c1bd5e4615e3de17265",
    inside="skyrl/backends/skyrl_train",
    owns={
        "ppo.eps_clip": f"{_ALGORITHM}.eps_clip_low and eps_clip_high (cispo.* for cispo)",
        "aggregation": f"{_ALGORITHM}.loss_reduction",
        "length_norm": f"{_ALGORITHM}.loss_reduction and max_seq_len",
        "terms.entropy_coef": f"{_ALGORITHM}.use_entropy_loss and entropy_loss_coef",
        "terms.kl": f"{_ALGORITHM}.use_kl_loss, kl_loss_coef and kl_estimator_type",
    },
    lacks={
        "penalty": Lack("its advantages carry the divisor, which a penalty without advantage would lack"),
        "groups": _NO_GROUPS,
        "versions": Lack("its loss gets no weight versions", "Set trainer.fully_async.max_staleness_steps."),
        "normalisation": Lack("its loss sees one micro-batch at a time"),
        "accepted": Lack(
            "its advantages arrive divided by all tokens or sequences of the mini-batch", "Choose auto or original."
        ),
        "report": Lack("its tracker gets the metrics"),
        **_LOSS_ALONE,
    },
    denominator="SkyRL's `loss_reduction`",
    door="call mismatch_plugin.hooks.skyrl.register in an entry script, and set "
    f"{_ALGORITHM}.policy_loss_type=mismatch",
    paste=f"python main_mismatch.py {_ALGORITHM}.policy_loss_type=mismatch … {{flags}}",
    dumps=("skyrl",),
    metrics={
        "rollout_train_logprobs_abs_diff_mean": "log_ratio_abs_mean",
        "rollout_train_logprobs_abs_diff_max": "log_ratio_abs_max",
    },
)

PRIME_RL = Host(
    name="prime-rl",
    title="prime-rl",
    packages=("prime_rl",),
    repository="PrimeIntellect-ai/prime-rl",
    version="0.8.0",
    commit="559b44772e471d1538537b8805cc77f3824a5e64",
    inside="prime_rl/trainer/rl",
    owns={"aggregation": "", "length_norm": "", "terms.entropy_coef": ""},
    lacks={
        "old_log_probs": Lack(
            "it makes one optimizer step a batch and no log-probs of π_old",
            "Set <use_rollout_log_probs> (algorithm 1, and with <use_tis> 3).",
        ),
        "groups": _NO_GROUPS,
        "versions": Lack("its loss gets no weight versions", "Set orchestrator.max_off_policy_steps."),
        "normalisation": Lack("its loss sees one sequence at a time"),
        "gate": Lack("its loss sees one sequence at a time"),
        "accepted": _OWN_COUNT,
        "report": Lack("its monitors get the metrics"),
        **_LOSS_ALONE,
    },
    denominator="the step's tokens, counted by prime-rl",
    door='set trainer.loss.type = "custom" and its import_path = "mismatch_plugin.hooks.prime_rl.policy_loss"',
    paste='trainer.loss = {type = "custom", import_path = "mismatch_plugin.hooks.prime_rl.policy_loss", '
    'kwargs = {flags = "{flags}"}}',
    dumps=("prime_rl",),
    metrics={"mismatch_kl/all/mean": "k3_kl", "mismatch_kl/mean": "k3_kl"},
)

HOSTS: dict[str, Host] = {host.name: host for host in (SLIME, MILES, MEGATRON_LM, VERL, NEMO_RL, TRL, SKYRL, PRIME_RL)}
"""Name → host, in the order in which they are shown."""


def host_name(given: str) -> str:
    """A host's name in its one spelling: megatron-lm for megatron_lm, Megatron-LM, and its folder megatron_rl. Of what
    is no host's the same text, with dashes and without capitals."""
    plain = given.lower().replace("_", "-")
    return next((host.name for host in HOSTS.values() if plain in host.spellings), plain)


def find_host(name: str) -> Host:
    """The host of that name, in whatever spelling. Raises ValueError for an unknown one."""
    if (host := HOSTS.get(host_name(name))) is None:
        raise unknown("host", name, HOSTS)
    return host
