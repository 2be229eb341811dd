"""NeMo-RL: a loss object with its LossFunction signature, put in the place of the one that GRPO's `setup` makes.

```python
from mismatch_plugin.hooks import nemo_rl
nemo_rl.install()             # in a copy of examples/run_grpo.py, before it calls `setup`
```

Settings are in the YAML's `loss_fn.mismatch`, which NeMo-RL keeps as it is, and without this module passes over;
clip, KL and aggregation stay its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.compat.nemo_rl import CORRECTION_TYPE, OBJECTIVES, nemo_rl_settings
from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import merge
from mismatch_plugin.core.loss import PolicyLoss, sum_tokens, token_loss
from mismatch_plugin.core.metrics.registry import PREFIX, State, means
from mismatch_plugin.core.objectives import kl_to_reference, score_function_kl
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import Given, Host, Plan, announce, block_lines, peek, resolve, wrap_once
from mismatch_plugin.hooks.hosts import NEMO_RL
from mismatch_plugin.hooks.tree import BLOCK, plain, put, read_overrides, take_block, text
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.log import report_logged, validate_same_settings


def section(host_config: Any, name: str, otherwise: Any = None) -> dict[str, Any]:
    """A section of NeMo-RL's configuration (models or mappings) as a dict, or `otherwise` where it is not there."""
    found: Any = host_config.get(name) if isinstance(host_config, Mapping) else getattr(host_config, name, None)
    found = otherwise if found is None else found
    return plain(found.model_dump() if hasattr(found, "model_dump") else found or {})


def settings(host_config: Any) -> MismatchConfig:
    """The configuration that NeMo-RL's own keys and `loss_fn.mismatch` (our settings, or `preset`) give together.

    Objective, clip bounds and aggregation are NeMo-RL's; its correction is read as `nemo_rl_settings` says, and the
    bare switch, which asynchronous GRPO insists on, asks for a correction and not for which. The denominator is
    original, because NeMo-RL counts tokens before the loss; batch normalisation runs over a micro-batch, of one
    sequence when packing.
    Raises: ValueError, one sentence, where the two contradict each other or NeMo-RL would run another loss.
    """
    host = section(host_config, "loss_fn", host_config)
    own, name = take_block(host, "loss_fn")
    if weight := host.get("positive_example_nll_weight"):
        raise ValueError(
            f"loss_fn.positive_example_nll_weight {weight} makes another loss (a likelihood term on correct samples): "
            f"switch it off."
        )
    kind, theirs = host.get(CORRECTION_TYPE), nemo_rl_settings(host)
    correction = {key: theirs.pop(key) for key in ("use_tis", "tis", "rs") if key in theirs}
    base: dict[str, Any] = {}
    if name is not None or own.get("use_rollout_log_probs"):
        if kind is not None:
            given = f"preset {name}" if name is not None else "use_rollout_log_probs"
            raise ValueError(f"loss_fn.{CORRECTION_TYPE} {kind} is next to {BLOCK}.{given}: leave one of them out.")
        base = {} if name is None else find_preset(name).settings()
    elif kind is None:
        base = correction
    else:
        theirs |= correction
    both = merge(merge(base, theirs), own)
    if both.get("use_tis") and both.get("use_rollout_log_probs"):
        theirs.pop("ppo")  # REINFORCE has no clip
        if (objective := theirs.pop("objective", "reinforce")) != "reinforce":
            switch = next(name for name, made in OBJECTIVES.items() if made == objective)
            raise ValueError(
                f"loss_fn.{switch} clips π_θ/π_old, and algorithm 3 is REINFORCE, which has no such ratio: switch it "
                f"off, or leave {BLOCK}.use_tis out (algorithm 1)."
            )
    theirs["denominator"] = "original"
    config = resolve(NEMO_RL, own, theirs, base=base)
    if host.get("use_importance_sampling_correction") and config.algorithm == 0:
        raise ValueError(
            "loss_fn.use_importance_sampling_correction asks for weights, and algorithm 0 of these settings has "
            "none: switch it off, or choose another algorithm."
        )
    return config


def describe(config: MismatchConfig, host_args: Any) -> list[str]:
    """Lines of the start-up block. host_args: as for `settings`."""
    host, bypass = section(host_args, "loss_fn", host_args), config.use_rollout_log_probs
    forced = host.get("force_on_policy_ratio")
    lines: list[str] = []
    if forced and (found := [name for name in OBJECTIVES if host.get(name)]):
        lines.append(f"{', '.join(found)}: no effect next to force_on_policy_ratio, whose ratio is 1")
    if host.get("use_importance_sampling_correction") and bypass:
        lines.append("use_importance_sampling_correction has no effect: the rollout policy is the anchor already")
    if config.gate_kl is not None:
        lines.append("the gate judges each micro-batch, in the worker that holds it")
    if config.normalizes:
        lines.append("batch normalisation over: each micro-batch (one sequence when packing)")
    lines.append("metrics: means only, exact over the step; NeMo-RL adds a loss's metrics up")
    second = "yes"
    if forced:
        anchor = "rollout log-probs" if bypass else "π_θ itself"
        second = f"no (force_on_policy_ratio); the anchor is {anchor}"
    elif bypass:
        second = "yes, unused (loss_fn.force_on_policy_ratio=true skips it when a rollout is one step)"
    count = "tokens" if host.get("token_level_loss", True) else "sequences"
    policy = section(host_args, "policy")
    generation, bias = policy.get("generation") or {}, ""
    top_p, top_k = generation.get("top_p"), generation.get("top_k")
    if filter_bias(top_p=top_p, top_k=top_k, renormalised=None):
        bias = (
            f"top_p {top_p}, top_k {top_k}; NeMo-RL cuts the trainer's logits by the same filter, but by its own "
            f"probabilities: no sampling mask is replayed. E ρ is the share that it leaves to the ids that the engine "
            f"kept, which rollout_corr/rollout_is_ratio_mean shows. Set policy.generation.top_p=1.0 and top_k=null"
        )
    return block_lines(
        config,
        lines,
        divided=f"as in NeMo-RL: by the step's {count}; rejected ones still count",
        second_pass=second,
        filtered=bias,
        length=policy.get("max_total_sequence_length"),
    )


_INTERFACES = "nemo_rl.algorithms.loss.interfaces"
_GRPO = "nemo_rl.algorithms.grpo"
_EPSILON = 1e-8  # NeMo-RL's own, in every mean


class MismatchLoss:
    """The corrected policy loss and NeMo-RL's KL penalty, from next-token log-probs.

    Algorithms 1 and 3 do not read prev_logprobs. With `force_on_policy_ratio`, where NeMo-RL fills prev_logprobs with
    zeros, π_old is π_θ detached. The loss is divided by the global counts that are handed in, so that the sum over
    micro-batches and ranks is the mean over the step; rejected tokens stay in them.

    host_config: NeMo-RL's `loss_fn` section, or the master configuration. use_fused_linear_logprobs: as of the loss
    that this one replaces. Raises: ValueError for settings that contradict NeMo-RL's (see `settings`).
    """

    def __init__(self, host_config: Any, use_fused_linear_logprobs: bool = False) -> None:
        self.config = settings(host_config)
        host = section(host_config, "loss_fn", host_config)
        self.token_level = bool(host.get("token_level_loss", True))
        self.force_on_policy_ratio = bool(host.get("force_on_policy_ratio", False))
        # NeMo-RL looks for this name, to keep unfiltered log-probs for the KL penalty under top-k or top-p.
        self.reference_policy_kl_penalty = (
            0.0 if host.get("use_kl_in_reward") else float(host.get("reference_policy_kl_penalty", 0.01) or 0.0)
        )
        self.kl_type = str(host.get("reference_policy_kl_type", "k3"))
        clamps = host.get("kl_input_clamp_value", 20.0), host.get("kl_output_clamp_value", 10.0)
        self.kl_clamps = tuple(math.inf if clamp is None else clamp for clamp in clamps)
        self.kl_importance_weighted = bool(host.get("use_on_policy_kl_approximation", False))
        self.use_fused_linear_logprobs = use_fused_linear_logprobs

    @property
    def loss_type(self) -> Any:
        """NeMo-RL's LossType: which global count divides gradients."""
        kinds = import_module(_INTERFACES).LossType
        return kinds.TOKEN_LEVEL if self.token_level else kinds.SEQUENCE_LEVEL

    @property
    def input_type(self) -> Any:
        """NeMo-RL's LossInputType.LOGPROB."""
        return import_module(_INTERFACES).LossInputType.LOGPROB

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """Every metric that may be returned → NeMo-RL's MetricNormalizer, for its trainers that divide at the end of
        the step."""
        kinds = import_module(_INTERFACES).MetricNormalizer
        whole = "TOKENS" if self.token_level else "SEQUENCES"
        names = {
            "loss": whole,
            "kl_penalty": whole,
            "num_valid_samples": "NONE",
            **dict.fromkeys(("token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio"), "TOKENS"),
            **{PREFIX + metric.name: measure.upper() for metric, _, measure in means(self.config)},
        }
        return {name: getattr(kinds, kind) for name, kind in names.items()}

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """(0-d loss with gradient, metrics that add up over micro-batches).

        next_token_logprobs: [B, S − 1]. data: [B, S] token_mask, advantages, generation_logprobs, prev_logprobs (where
        read), reference_policy_logprobs (with a KL penalty), and [B] sample_mask.
        Collectives: none. Host syncs: those of the metrics, four, as NeMo-RL's own losses have.
        Raises: InvalidLogProbError; ValueError where a key is missing.
        """
        mask = self._take(data, "token_mask") * self._take(data, "sample_mask").unsqueeze(-1)
        if next_token_logprobs.shape != mask.shape:
            raise ValueError(
                f"next_token_logprobs has shape {tuple(next_token_logprobs.shape)}, the token mask without its first "
                f"column {tuple(mask.shape)}: both must be [batch, length - 1]."
            )
        config, old = self.config, None
        if not config.use_rollout_log_probs and not self.force_on_policy_ratio:
            old = self._take(data, "prev_logprobs").flatten()
        packed = PackedSequences(
            loss_mask=mask.bool().flatten(),
            lengths=(mask.shape[1],) * mask.shape[0],
            rollout_log_probs=self._take(data, "generation_logprobs").flatten(),
            old_log_probs=old,
            advantages=self._take(data, "advantages").flatten(),
        )
        token = token_loss(next_token_logprobs.flatten(), packed, config)
        result = sum_tokens(token)
        divisor = (global_valid_toks if self.token_level else global_valid_seqs) + _EPSILON
        loss = (result.loss_sum + sum(result.terms.values())) / divisor
        kl = None
        if self.reference_policy_kl_penalty:
            kl = self._kl(next_token_logprobs, mask, token.selected.view_as(mask), data) / divisor
            loss = loss + self.reference_policy_kl_penalty * kl
        metrics = summable_metrics(result, mask, global_valid_seqs, global_valid_toks, self.kl_type)
        return loss, metrics | {
            "loss": loss.item(),
            "kl_penalty": 0.0 if kl is None else kl.item(),
            "num_valid_samples": float(data["sample_mask"].sum()),
        }

    def _kl(self, log_probs: Tensor, mask: Tensor, enters: Tensor, data: Mapping[str, Any]) -> Tensor:
        """NeMo-RL's KL penalty, summed as its loss type says. Sampled from π_θ, or from the rollout policy.

        enters: [B, S − 1] bool, `TokenLoss.selected`: without a valid log π_θ a token has no penalty.
        """

        def selected(values: Tensor) -> Tensor:
            return torch.where(enters, values, 0.0)

        unfiltered = data.get("curr_logprobs_unfiltered")
        current = selected(log_probs if unfiltered is None else unfiltered)
        sampler = selected(self._take(data, "generation_logprobs")) if self.kl_importance_weighted else current
        reference = selected(self._take(data, "reference_policy_logprobs"))
        value = score_function_kl(current, sampler, reference, self.kl_type, *self.kl_clamps) * mask
        return value.sum() if self.token_level else (value.sum(-1) / (mask.sum(-1) + _EPSILON)).sum()

    @staticmethod
    def _take(data: Mapping[str, Any], name: str) -> Tensor:
        value = data.get(name)
        if value is None:
            raise ValueError(f"{name} is missing from the batch: the loss needs it with these settings.")
        return value if value.dim() == 1 else value[:, 1:]


def summable_metrics(
    result: PolicyLoss, mask: Tensor, global_valid_seqs: Tensor, global_valid_toks: Tensor, kl_type: str
) -> dict[str, float]:
    """This micro-batch's share of every metric that is declared as a mean, and of what NeMo-RL's trainers read.

    Extremes, deviations, quantiles and sample sizes do not add up. A token without a valid log-prob is counted by
    NeMo-RL also where it is only measured and left out: it adds what the declaration says.
    token_mult_prob_error: mean of exp |log π_train − log π_rollout|. gen_kl_error: mean estimate of KL(π_rollout ‖
    π_train), of kind kl_type. sampling_importance_ratio: mean weight, the rejected ones 0. Raises InvalidLogProbError
    where a log-prob is invalid and the policy is `error`. Host syncs: one.
    """
    correction, tokens = result.correction, result.correction.tokens
    own = (
        (tokens.log_ratio.abs().clamp(max=SAFETY_BOUND).exp() * mask.flatten()).sum(),
        (kl_to_reference(-tokens.log_ratio, torch.zeros_like(tokens.log_ratio), kl_type) * mask.flatten()).sum(),
        correction.applied.sum(),
        global_valid_toks.to(tokens.mask),
        global_valid_seqs.to(tokens.mask),
    )
    names = ("_error", "_kl_error", "_weight", "_tokens", "_sequences")
    statistics = result.statistics.with_vector(names, torch.stack([value.double().reshape(()) for value in own]))
    sums, _ = statistics.on_host()
    divisors = {measure: max(sums[f"_{measure}"], 1.0) for measure in ("tokens", "sequences")}
    metrics = {
        "token_mult_prob_error": sums["_error"] / divisors["tokens"],
        "gen_kl_error": sums["_kl_error"] / divisors["tokens"],
        "sampling_importance_ratio": sums["_weight"] / divisors["tokens"],
    }
    state = State(sums, {}, statistics.config)
    for metric, mean, measure in means(statistics.config):
        if state.has(metric.needs):
            left_out = state.count(measure, trained=True) - state.count(measure)
            metrics[PREFIX + metric.name] = (metric.total(state) + mean.left_out * left_out) / divisors[measure]
    return metrics


def install() -> None:
    """Wrap `nemo_rl.algorithms.grpo.setup`, also where the script has imported it by name already. Idempotent."""
    wrap_once(_GRPO, "setup", setup_with_loss)


def setup_with_loss(
    own: Callable[..., tuple[Any, ...]], master_config: Any, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """What NeMo-RL's `setup` returns with our loss in the place of its own, the start-up block printed, and its logger
    writing each step to the report folder; its own without `loss_fn.mismatch`.

    Raises: ValueError where what `setup` returns holds no loss or no logger, or the settings contradict NeMo-RL's.
    """
    if section(master_config, "loss_fn", master_config).get("mismatch") is None:
        return own(master_config, *args, **kwargs)
    config = settings(master_config)
    lines = describe(config, master_config)  # a mistake shows before the cluster starts
    if config.report_dir is not None:
        validate_same_settings(config.report_dir, config, holds=True)
    announce(NEMO_RL, lines)
    made = own(master_config, *args, **kwargs)
    theirs = _only(made, "loss", lambda item: hasattr(item, "input_type") and hasattr(item, "loss_type"))
    loss = MismatchLoss(master_config, bool(getattr(theirs, "use_fused_linear_logprobs", False)))
    if config.report_dir is not None:
        logger = _only(made, "logger", lambda item: callable(getattr(item, "log_metrics", None)))
        wrap_once(logger, "log_metrics", partial(report_logged, config))
    return tuple(loss if item is theirs else item for item in made)


def _only(made: tuple[Any, ...], what: str, is_one: Callable[[Any], bool]) -> Any:
    """The one item of what `setup` returned that is it. Raises ValueError where there is not exactly one."""
    found = [item for item in made if is_one(item)]
    if len(found) != 1:
        raise ValueError(f"NeMo-RL's setup returned an unknown form, with {len(found)} items that may be its {what}.")
    return found[0]


# The launcher ---------------------------------------------------------------------------------------------------------

_SECTION, _BLOCK = "loss_fn", "loss_fn.mismatch"
FLAGS: frozenset[str] = frozenset()


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run of examples/run_grpo.py, or a script like it. Raises: ValueError where `loss_fn` and ours contradict."""
    default = (Path() if script is None else script.parent) / "configs" / "grpo_math_1B.yaml"
    path = peek(given.host_argv, {"--config": {"type": Path, "default": default}})[0].config
    if not path.is_file():
        raise ValueError(f"NeMo-RL's configuration {path} does not exist: give --config FILE.")
    sections = _read(path)
    for name, value in read_overrides(given.host_argv).items():
        if name.partition(".")[0] in sections:
            put(sections, name, value)
    there = sections[_SECTION].get("mismatch") is not None
    if not given.flags and not there:
        return Plan.untouched(host, given)
    code = "" if script is None else script.read_text(encoding="utf-8")
    if found := re.search(r"nemo_rl\.algorithms\.(sft|dpo|rm|\w*distillation)\b", code):
        raise ValueError(f"{script} trains by {found[1]}, which has no policy loss: the plugin is for run_grpo.py.")
    if given.flags and there:
        raise ValueError(f"{_BLOCK} is set next to the plugin's flags: give the settings in one of the two ways.")
    added: tuple[str, ...] = ()
    if given.flags:
        added, sections[_SECTION]["mismatch"] = (f"+{_BLOCK}={text(given.settings)}",), given.settings
    config = settings(sections)
    lines = tuple(describe(config, sections))
    return Plan((*given.host_argv, *added), added, lines, install, config)


def _read(path: Path) -> dict[str, Any]:
    """`loss_fn` and `policy` of a YAML file, over those of the files that its `defaults` name."""
    data = read_mapping(path)
    defaults = data.get("defaults") or []
    sections: dict[str, Any] = {_SECTION: {}, "policy": {}}
    for parent in [defaults] if isinstance(defaults, str) else defaults:
        sections = merge(sections, _read(path.parent / str(parent)))
    return merge(sections, {name: data.get(name) or {} for name in sections})
