"""Comparing what the ranks of a layout got with one process, and two ways of running the host with each other."""

from __future__ import annotations

import warnings
from argparse import Namespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from tests.hooks.contracts.slime_data import STEPS, arguments, expected, mask_sums, samples, step_samples
from tests.hooks.contracts.slime_worker import Case, Outcome

HAND_LAYOUTS = {"one": (1, 1, 1), "cp2": (1, 2, 2), "cp2 dp2": (1, 2, 4), "cp4": (1, 4, 4)}  # tp, cp, processes
HOST_LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 1, 2), "cp2": (1, 2, 2), "tp2 cp2": (2, 2, 4), "cp2 dp2": (1, 2, 4)}

GRADIENT_TOLERANCE = {"slime": (2e-5, 2e-6), "miles": (8e-3, 2e-5)}
"""Relative, absolute. miles takes megatron's fused cross entropy, whose gradient by logits is rounded to bfloat16."""


def compare(outcomes: list[list[Outcome]], case: Case, adapter: Any, by_logits: bool) -> None:
    """All ranks' outcomes of one case against one process, step by step: loss, gradient, every metric."""
    args = arguments(case.host, **case.changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        config = adapter.settings(args)
    normalizes = config.weighted and config.tis.batch_normalize
    # The loss is reported before its gradients are divided by the mean weight.
    deferred = normalizes and (config.use_rollout_log_probs or not case.old or case.host == "miles")
    for step in range(STEPS):
        wanted = expected(args, config, step, case.old, case.shared)
        gradient = wanted.by_logits if by_logits else wanted.by_log_probs
        for rank in outcomes:
            outcome = rank[step]
            assert outcome.error == ""
            relative, absolute = GRADIENT_TOLERANCE[case.host]
            torch.testing.assert_close(outcome.gradient, gradient, rtol=relative, atol=absolute)
            if not deferred:
                assert outcome.loss == pytest.approx(wanted.loss, rel=2e-5, abs=1e-6)
            compare_report(outcome.report, report_of(case, args, config, step, not deferred), case, args)
            if case.hooks:
                shared = wanted.metrics.keys() & outcome.metrics.keys()
                assert len(shared) > 30
                for name in shared:
                    assert outcome.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-5), name


def compare_report(report: dict[str, float], wanted: dict[str, float], case: Case, args: Namespace) -> None:
    """Every metric that is handed to the host; the host's own loss reports more, or by hand less, than ours."""
    if case.host == "miles" and not args.entropy_coef:
        del wanted["entropy_loss"]  # miles computes it only where it is used
    if args.loss_type == "custom_loss":
        assert report.keys() == wanted.keys()
    else:
        assert {"loss", *(name for name in wanted if name.startswith("tis"))} <= report.keys()
    for name in report.keys() & wanted.keys():
        assert report[name] == pytest.approx(wanted[name], rel=5e-5, abs=5e-6), name


def report_of(case: Case, args: Namespace, config: mp.MismatchConfig, step: int, normalized: bool) -> dict[str, float]:
    """The step's metrics under the host's names, from whole samples: sums of the samples' sums over the host's
    denominators. What slime's own policy_loss_function means by them is held in `test_slime_s_own_loss_means_the_same`.
    """
    chosen = [samples()[number] for number in step_samples(step)]
    rows: dict[str, Any] = {name: [sample.rows[name] for sample in chosen] for name in chosen[0].rows}
    old, entropy = rows.pop("log_probs"), [sample.entropy for sample in chosen]
    packed = mp.PackedSequences.from_lists(**rows, old_log_probs=old if case.old else None, entropy=entropy)
    theta = torch.cat([sample.log_probs for sample in chosen])
    token = token_loss(theta, packed, config, batch_factor=None if normalized else 1.0)
    divisors = [1.0 if args.calculate_per_token_loss else max(1.0, float(x)) for x in mask_sums(case.shared)]
    divisor_T = torch.cat(
        [torch.full((s.response,), divisors[i]) for i, s in zip(step_samples(step), chosen, strict=True)]
    )

    def total(values: torch.Tensor) -> float:
        return float((torch.where(packed.loss_mask, values, 0.0) / divisor_T).sum())

    correction, log_ratio = token.correction, token.correction.tokens.log_ratio
    report = {"pg_loss": total(token.policy), "entropy_loss": total(torch.cat(entropy))}
    report["loss"] = report["pg_loss"]
    for term in (term for term in token.terms() if term.coefficient):
        report[f"{term.name}_loss"] = total(term.added)
        report["loss"] += term.coefficient * report[f"{term.name}_loss"]
    report["train_rollout_logprob_abs_diff"] = total(log_ratio.abs())
    if clipped := dict(token.clip_columns()):
        report["pg_clipfrac"] = total((clipped["clip_high"] | clipped["clip_low"]).float())
        report["ppo_kl"] = total(clipped["ppo_kl"])
    if config.metrics != "off":
        report |= {"tis": total(log_ratio.exp()), "tis_abs": total((log_ratio.exp() - 1.0).abs())}
        if config.weighted:
            report["tis_weight"] = total(correction.applied)
        if config.rejects:
            report["tis_rejected"] = total(1.0 - correction.keep)
    return report


def same(ours: list[list[Outcome]], theirs: list[list[Outcome]], other_metrics: str = "", host: str = "slime") -> None:
    """Two runs of the host: the same loss and gradients in every step, on every rank, and metrics of the same name.

    other_metrics: names, or "all" but the losses, that mean something else there.
    """
    for mine, other in zip(ours, theirs, strict=True):
        for step in range(STEPS):
            assert mine[step].error == other[step].error == ""
            assert float(other[step].gradient.abs().max()) > 0
            relative, absolute = GRADIENT_TOLERANCE[host]
            torch.testing.assert_close(mine[step].gradient, other[step].gradient, rtol=relative, atol=absolute / 10)
            assert mine[step].loss == pytest.approx(other[step].loss, rel=1e-5, abs=1e-7)
            shared = mine[step].report.keys() & other[step].report.keys()
            assert {"loss", "pg_loss", "pg_clipfrac", "ppo_kl"} <= shared
            for name in {"loss", "pg_loss"} if other_metrics == "all" else shared - {other_metrics}:
                assert mine[step].report[name] == pytest.approx(other[step].report[name], rel=1e-5, abs=1e-6), name


def they_bite(name: str, ours: list[list[Outcome]], theirs: list[list[Outcome]]) -> None:
    """In a pair of `own_switches` something is clipped, and masked, on every rank of either side."""
    reported = [(ours, "pg_clipfrac")] * ("gspo" in name or "cispo" in name)
    reported += [(theirs, "opsm_clipfrac"), (ours, "tis_rejected")] * ("masking" in name)
    for side, metric in reported:
        assert all(sum(step.report[metric] for step in rank) > 0 for rank in side), metric
