"""Names of 0.1 that work for one more release, each with a DeprecationWarning that says what to use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import Correction, SequenceGroups, correct
from mismatch_plugin.core.loss import PolicyLoss, policy_loss


def compile_policy_loss(
    config: MismatchConfig, groups: SequenceGroups | None = None, **options: Any
) -> Callable[..., PolicyLoss]:
    """`policy_loss` of one configuration, eager: called as loss(log_probs, packed, batch_factor=None)."""
    _warn("compile_policy_loss", "policy_loss(log_probs, packed, config)", options)
    return lambda log_probs, packed, batch_factor=None: policy_loss(log_probs, packed, config, groups, batch_factor)


def compile_correct(
    config: MismatchConfig, groups: SequenceGroups | None = None, **options: Any
) -> Callable[..., Correction]:
    """`correct` of one configuration, eager: called as correct(packed, batch_factor=None)."""
    _warn("compile_correct", "correct(packed, config)", options)
    return lambda packed, batch_factor=None: correct(packed, config, groups, batch_factor)


def _warn(name: str, instead: str, options: dict[str, Any]) -> None:
    ignored = f" Ignored: {', '.join(sorted(options))}." if options else ""
    warnings.warn(
        f"{name} is eager since 0.2 and will go in 0.3: call {instead}. The correction is some hundred launches, a "
        f"thousandth of a step.{ignored}",
        DeprecationWarning,
        stacklevel=3,
    )
