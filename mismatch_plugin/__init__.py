"""Correction of training-inference mismatch in RL post-training: importance weights, rejection, the four algorithms."""

from mismatch_plugin import compat
from mismatch_plugin.config import ImportanceSampling, MismatchConfig, MismatchWarning, PPOClip, Terms, preset
from mismatch_plugin.config.criteria import Criterion, Rejection
from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.health import GateError, HealthWarning, check_health
from mismatch_plugin.core.loss import PolicyLoss, policy_loss
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import InvalidLogProb, InvalidLogProbError
from mismatch_plugin.parallel.step import StepLoss, step_loss

__version__ = "0.3.0"

__all__ = [
    "Correction",
    "Criterion",
    "GateError",
    "HealthWarning",
    "ImportanceSampling",
    "InvalidLogProb",
    "InvalidLogProbError",
    "MismatchConfig",
    "MismatchWarning",
    "PPOClip",
    "PackedSequences",
    "PolicyLoss",
    "Rejection",
    "Statistics",
    "StepLoss",
    "Terms",
    "__version__",
    "add_arguments",
    "check_health",
    "compat",
    "correct",
    "group_advantages",
    "policy_loss",
    "preset",
    "step_loss",
]
