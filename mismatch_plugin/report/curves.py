"""What the report's curves show: columns, labels, lines of meaning, captions. How they are drawn is in `plots`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mismatch_plugin.core import health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.data import Array


@dataclass(frozen=True)
class Line:
    """A horizontal line at a value that means something; its label is above it, or under it."""

    value: float
    label: str
    under: bool = False


@dataclass(frozen=True)
class Part:
    """One axis of a panel: its label, the column it shows (or the `older` one, where no run recorded it), scale, lines.

    floor: the smallest range that the axis spans, so that rounding is not drawn as if it were a course.
    span: what the axis shows at least. largest: the largest value of a window and the median run, in place of means.
    """

    column: str
    label: str
    scale: str = "linear"
    lines: tuple[Line, ...] = ()
    floor: float = 0.02
    span: tuple[float, float] | None = None
    shown: Callable[[Array], Array] = lambda values: values
    older: str = ""
    largest: bool = False


@dataclass(frozen=True)
class Panel:
    """A picture of one or two axes over the steps."""

    name: str
    title: str
    caption: str
    parts: tuple[Part, ...]


_ESS_LINES = (Line(0.5, "good above 0.5"), Line(health.MIN_EFFECTIVE_SAMPLE_SIZE, "warning below 0.3", under=True))
_ONE = (Line(1.0, "ideal 1"),)
_CHI2 = (Line(health.MAX_CHI2, "warning above 1"),)


def _rejected(accepted: Array) -> Array:
    return 1.0 - accepted


def _seen(norms: Array) -> Array:
    """A step without a gradient, as where everything is rejected, is at the lower end of the axis."""
    return np.maximum(norms, 0.01)


GRADIENT = Part("grad_norm", "norm", "log", largest=True, shown=_seen)
IMPOSSIBLE = Part("impossible_tokens", "share of tokens", floor=0.001)
CURVES = (
    Panel("kl", "KL(rollout‖train)", "How far apart the two policies are: mean of log π_rollout − log π_train over "
          "tokens. The guide warns beyond 0.1.", (Part(f"{PREFIX}kl", "nat a token", "symlog",
          (Line(health.MAX_KL, "warning above 0.1"),), floor=1e-5),)),
    Panel("weights", "Weights used", "Mean of the weights that multiply the loss, and the largest of each step. "
          "Algorithms 0 and 1 have none.", (Part(f"{PREFIX}rollout_is_weight_after_mean", "mean", lines=_ONE),
          Part(f"{PREFIX}rollout_is_weight_after_max", "largest", "log"))),
    Panel("ess", "ESS of the weights used", "Effective sample size, as a share of all tokens; a rejected token "
          "counts as weight 0. Algorithms 0 and 1 have no weights.",
          (Part(f"{PREFIX}rollout_is_weight_after_eff_sample_size", "share", lines=_ESS_LINES, span=(0, 1)),)),
    Panel("rejection", "Rejected tokens", "Share of response tokens that rejection, mask mode or the veto took out of "
          "the loss.", (Part(f"{PREFIX}accepted_token_fraction", "share of tokens", shown=_rejected),)),
    Panel("grad_norm", "Largest gradient norm", "Before clipping, the largest of neighbouring steps; median over "
          "seeds. What is below 0.01 is drawn there.", (GRADIENT,)),
    Panel("impossible_tokens", "All but impossible tokens", "Share of sampled tokens to which the trainer gives a "
          "probability below 1e-4.", (IMPOSSIBLE,)),
)  # fmt: skip
GUIDE = (
    Panel("guide_mean_weight", "Mean IS weight", "Mean ratio π_train/π_rollout over tokens, before bounding.",
          (Part(f"{PREFIX}rollout_is_ratio_mean", "mean ratio", lines=_ONE, older=f"{PREFIX}rollout_is_mean"),)),
    Panel("guide_ess", "Effective sample size", "Of the ratio of the tokens, with the guide's lines at 0.5 and 0.3 "
          "(runs before 0.2: of the ratio clamped to its bounds, which stays above 0.6).",
          (Part(f"{PREFIX}rollout_is_ratio_eff_sample_size", "share", lines=_ESS_LINES, span=(0, 1),
          older=f"{PREFIX}rollout_is_eff_sample_size"),)),
    Panel("guide_veto", "Veto fraction", "Share of sequences that hold a token below the veto threshold; 0 without a "
          "veto.", (Part(f"{PREFIX}rollout_is_veto_fraction", "share of sequences",
          lines=(Line(health.MAX_VETO_FRACTION, "warning above 0.1"),), span=(0, 0.12)),)),
    Panel("guide_kl", "KL and k3", "KL divergence of rollout from training policy: the direct estimate above, the k3 "
          "estimate (never negative) below.", (Part(f"{PREFIX}kl", "KL", "symlog", (Line(0.0, ""),), floor=1e-5),
          Part(f"{PREFIX}k3_kl", "k3", "symlog", floor=1e-5))),
    Panel("guide_ppl_ratio", "PPL ratio (training/rollout)", "Perplexity of a response under "
          "the training policy over that under the rollout engine.",
          (Part(f"{PREFIX}ppl_ratio", "ratio", lines=_ONE, floor=1e-3),)),
    Panel("guide_chi2", "χ² divergence", "Second moment of the ratio minus 1: of tokens above, of whole sequences "
          "below. Above 1 the mean ratio is unreliable.",
          (Part(f"{PREFIX}chi2_token", "tokens", "symlog", _CHI2, floor=1e-4),
          Part(f"{PREFIX}chi2_seq", "sequences", "symlog", _CHI2, floor=1e-4))),
)  # fmt: skip
