"""TRL: a mixin for `GRPOTrainer` that corrects what a generation brings before TRL's own loss reads it.

```python
class CorrectedGRPOTrainer(CorrectionMixin, GRPOTrainer):
    pass

trainer = CorrectedGRPOTrainer(mismatch=mp.preset("token_is"), model=…, reward_funcs=…, args=GRPOConfig(…))
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import announce, block_lines, given_settings, resolve
from mismatch_plugin.hooks.hosts import TRL

_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")


class CorrectionMixin:
    """Stands before `GRPOTrainer` among the bases of a class. mismatch: our settings, as a configuration,
    a mapping, flags in a string, or the path of a file.

    Once a generation: importance weights and rejection over the process's samples, from π_old and the log-probs of
    vLLM or of a `rollout_func`. In algorithms 0 and 2 TRL's loss is multiplied by w · keep; in algorithm 1 its anchor
    is the rollout policy. Metrics are those of all processes, in `log()`.
    Raises: ValueError as `settings`; at the first generation where log-probs are missing; InvalidLogProbError;
    GateError.
    """

    accelerator: Any
    args: Any
    model: Any
    _metrics: Any
    _get_per_token_logps_and_entropies: Any

    def __init__(self, *args: Any, mismatch: MismatchConfig | Mapping[str, Any] | str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mismatch = settings(mismatch, self.args)
        if self.accelerator.is_main_process:
            announce(TRL, describe(self.mismatch, self.args))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        base: Any = super()
        output: dict[str, Any] = base._generate_and_score_completions(inputs)
        config, sampled = self.mismatch, output.get("sampling_per_token_logps")
        if sampled is None and config.needs_rollout_log_probs:
            raise ValueError(
                f"algorithm {config.algorithm} needs the sampler's log-probs, and TRL's generation with transformers "
                f"returns none: set use_vllm=True, or give a rollout_func."
            )
        if sampled is None:
            return output
        old = output.get("old_per_token_logps")
        if old is None and not config.use_rollout_log_probs:
            old = self._old_log_probs(output)
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        packed = PackedSequences.from_padded(
            loss_masks=mask,
            rollout_log_probs=sampled,
            old_log_probs=sampled if old is None else old,
            advantages=output["advantages"],
        )
        correction = correct(packed, config)
        statistics = correction.statistics
        metrics = replace(
            statistics,
            sums=self.accelerator.reduce(statistics.sums, reduction="sum"),
            maxima=self.accelerator.gather(statistics.maxima.unsqueeze(0)).amax(0),
        ).metrics()  # raises where a log-prob is invalid, on every process
        if old is not None:  # else there is nothing that the sampler was compared with
            logged = self._metrics["train" if self.model.training else "eval"]
            for name, value in metrics.items():
                logged[name].append(value)
        if config.use_rollout_log_probs:
            output["old_per_token_logps"] = packed.to_padded(correction.tokens.rollout)
        applied = packed.to_padded(correction.applied)
        if "importance_sampling_ratio" in output:
            output["importance_sampling_ratio"] = applied
        else:  # without vLLM TRL's loss multiplies by no ratio; it takes an advantage for each token
            output["advantages"] = output["advantages"].unsqueeze(1) * applied
        return output

    def _old_log_probs(self, output: dict[str, Any]) -> Tensor:
        """log π_old, [B, S], where TRL leaves its pass out because π_old is still π_θ."""
        if "pixel_values" in output:
            raise ValueError(
                "π_old is missing: TRL leaves its pass out where each generation is one step. With images use vLLM, or "
                "choose algorithm 1."
            )
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        seen = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        width, batch = output["completion_ids"].size(1), self.args.per_device_train_batch_size
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(self.model, ids, seen, width, batch)[0]


def settings(given: MismatchConfig | Mapping[str, Any] | str, args: Any) -> MismatchConfig:
    """Ours (`given_settings`) next to TRL's `GRPOConfig`. Raises: ValueError, one sentence, for what cannot be had."""
    ours, base = given_settings(given)
    config = resolve(TRL, ours, {"denominator": "original"}, base=base)
    if config.use_rollout_log_probs and config.rejects_by_log_probs:
        raise ValueError(
            "rejection in algorithm 1 cannot be had in TRL: it judges π_θ, which only its loss has. Leave "
            "use_rollout_log_probs out (algorithm 0), or the criteria."
        )
    if config.use_rollout_log_probs and config.rollout_log_prob_policy == "neutral":
        raise ValueError(
            "rollout_log_prob_policy neutral cannot be had in algorithm 1 in TRL, where π_θ would be the anchor: "
            "choose error, drop-token or drop-sequence."
        )
    if args.loss_type not in _LOSS_TYPES:
        raise ValueError(
            f"loss_type {args.loss_type} makes weights or sums of its own, which ours would contradict: choose one of "
            f"{', '.join(_LOSS_TYPES)}."
        )
    return config


def describe(config: MismatchConfig, args: Any) -> list[str]:
    """Lines of the start-up block: what will run, and what of it is TRL's."""
    lines = ["weights and rejection are made once a generation, by each process for its samples"]
    if args.use_vllm and args.vllm_importance_sampling_correction:
        lines.append(f"TRL's own vllm_importance_sampling_mode {args.vllm_importance_sampling_mode}: replaced by ours")
    return block_lines(
        config,
        lines,
        divided=f"as in TRL, {args.loss_type}, whose objective and clip hold: rejected tokens still count",
        second_pass="as in TRL, and where it has none" if not config.use_rollout_log_probs else "as in TRL",
        filtered=filter_bias(top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, renormalised=True),
        length=args.max_completion_length,
        leave_out=("objective: ",),
    )
