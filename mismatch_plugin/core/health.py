"""Health check of a step's metrics: the guide's warnings and the length trap, each with what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mismatch_plugin.core.metrics import PREFIX

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


@dataclass(frozen=True)
class HealthWarning:
    """One finding: which metric, its value, what it means and what to do."""

    metric: str
    value: float
    meaning: str
    advice: str

    def __str__(self) -> str:
        return f"{self.metric} = {self.value:.3g}: {self.meaning}. {self.advice}"


MEAN_RANGE = (0.5, 2.0)
MIN_EFFECTIVE_SAMPLE_SIZE = 0.3
MAX_VETO_FRACTION = 0.1
MAX_STD = 1.0
MAX_KL = 0.1
MAX_CHI2 = 1.0
VANISHING_LOG_WEIGHT = -2.0
MAX_INVALID_SHARE = 0.01
"""Rollout log-probs that are none, as a share of the response tokens: single ones happen, more is a fault."""
MAX_NORMALIZED_WEIGHT = 10.0
"""After batch normalisation a weight above this many times hi is a warning."""

_CHOOSE = "Choose a correction: token weights bound the ratio, or reject outliers."
"""Instead of advice on bounds where none acts."""
_SOURCES = "Check that both engines run the same weights, tokens, temperature and filters"


def check_health(metrics: Mapping[str, float], config: MismatchConfig) -> list[HealthWarning]:
    """Warnings for one step's metrics, empty where all is well. A metric that is not there is not judged.

    Thresholds: rollout-correction guide (mean weight outside [0.5, 2], effective sample size < 0.3, veto > 10 %,
    deviation > 1, |KL| > 0.1, χ² > 1), and the length trap: E[Σ l] < −2 means a product weight of e^−2 or less.
    Where weights are applied the used ones (`…_weight_after_*`) are judged, else the ratio.
    """
    found: list[HealthWarning] = []
    if metrics.get(f"{PREFIX}tokens") == 0:
        return found
    weight = "rollout_is_weight_after_" if f"{PREFIX}rollout_is_weight_after_mean" in metrics else "rollout_is_"

    corrected = config.weighted or config.rejects
    narrow = "Lower the upper bound, or go from sequence to geometric or token level." if config.weighted else _CHOOSE

    def judge(name: str, wrong: bool, meaning: str, advice: str) -> None:
        if wrong:
            found.append(HealthWarning(PREFIX + name, metrics[PREFIX + name], meaning, advice))

    def value(name: str) -> float | None:
        return metrics.get(PREFIX + name)

    mean = value(f"{weight}mean")
    if mean is not None:
        judge(
            f"{weight}mean",
            not MEAN_RANGE[0] <= mean <= MEAN_RANGE[1],
            "the mean weight is far from 1",
            f"A systematic shift, not noise: {_SOURCES.lower()}"
            + ("; until then batch_normalize keeps the step size." if config.weighted else "."),
        )
    size = value(f"{weight}eff_sample_size")
    if size is not None:
        judge(
            f"{weight}eff_sample_size",
            size < MIN_EFFECTIVE_SAMPLE_SIZE,
            "few tokens carry the gradient",
            narrow,
        )
    veto = value("rollout_is_veto_fraction")
    if veto is not None:
        judge(
            "rollout_is_veto_fraction",
            veto > MAX_VETO_FRACTION,
            "many sequences are vetoed",
            "Look at the log-probs of the vetoed tokens first (fills, filters, bf16); then lower the veto threshold.",
        )
    std = value(f"{weight}std")
    if std is not None:
        judge(
            f"{weight}std",
            std > MAX_STD,
            "weights spread widely",
            narrow,
        )
    kl = value("kl")
    if kl is not None:
        judge(
            "kl",
            abs(kl) > MAX_KL,
            "the two policies are far apart",
            f"{_SOURCES}; lower the staleness of the rollouts.",
        )
    for name in ("chi2_token", "chi2_seq") if config.tis.level == "sequence" else ("chi2_token",):
        chi2 = value(name)
        if chi2 is not None:
            judge(
                name,
                chi2 > MAX_CHI2,
                "the ratio's second moment is large, so its mean is unreliable",
                "Lower the upper bound or reject outliers (a geometric or sequence_max criterion)."
                if corrected
                else _CHOOSE,
            )
    tokens, invalid = value("tokens"), _invalid(metrics)
    if tokens and invalid and sum(invalid.values()) > MAX_INVALID_SHARE * tokens:
        worst = max(invalid, key=lambda name: invalid[name])
        judge(
            worst,
            True,
            f"{sum(invalid.values()):g} of {tokens:g} rollout log-probs are no log-probs",
            "Find out why the rollout engine does not return them: mismatch-plugin check names sample and position.",
        )
    for name in ("kl", "pg_loss"):
        if (broken := value(name)) is not None and not math.isfinite(broken):
            judge(name, True, "it is not finite", "Look for NaN in the training side's log-probs and advantages.")
    log_weight = value("seq_log_ratio_mean")
    if log_weight is not None and config.weighted and config.tis.level == "sequence":
        judge(
            "seq_log_ratio_mean",
            log_weight < VANISHING_LOG_WEIGHT,
            "the mean log-ratio times the length makes product weights vanish",
            "Long responses lose their gradient: use geometric or token level, or find the systematic shift.",
        )
    largest = value("rollout_is_weight_after_max")
    if largest is not None and config.tis.batch_normalize:
        judge(
            "rollout_is_weight_after_max",
            largest > MAX_NORMALIZED_WEIGHT * config.tis.upper,
            "normalisation blew a weight up",
            "Nearly everything else was bounded to little: raise the lower bound.",
        )
    if value("all_rejected") and not config.dry_run:
        judge("all_rejected", True, "nothing is left in the loss", "Widen the bounds; try them with dry_run first.")
    return found


def _invalid(metrics: Mapping[str, float]) -> dict[str, float]:
    """Counts of rollout log-probs that are none, by metric, without the prefix."""
    start = f"{PREFIX}invalid_"
    return {name.removeprefix(PREFIX): count for name, count in metrics.items() if name.startswith(start) and count}
