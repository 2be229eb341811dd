"""A worked example: eight tokens through every mode, level and kind of rejection, computed by `correct` itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.report.table import Table

MODES = ("truncate", "clip", "mask")
LEVELS = ("token", "sequence", "geometric")
UPPER = 2.0
VETO = 0.45
PADDING = "·"
REJECTED = "✗"

# Probability of each sampled token under (rollout, training), and whether it trains. A holds a tool's output.
_SEQUENCES: dict[str, list[tuple[float, float, int]]] = {
    "A": [(0.4, 0.5, 1), (0.1, 0.9, 0), (0.5, 0.6, 1), (0.9, 0.9, 1)],
    "B": [(0.2, 0.6, 1), (0.4, 0.6, 1)],
    "C": [(0.5, 0.2, 1), (0.5, 0.4, 1)],
}


def example_batch() -> PackedSequences:
    """The batch: three sequences, eight tokens, one of them under the mask."""
    tokens = list(_SEQUENCES.values())
    return PackedSequences.from_lists(
        old_log_probs=[[math.log(train) for _, train, _ in row] for row in tokens],
        rollout_log_probs=[[math.log(rollout) for rollout, _, _ in row] for row in tokens],
        loss_masks=[[mask for _, _, mask in row] for row in tokens],
        sequence_ids=tuple(_SEQUENCES),
    )


def explain_table(modes: Sequence[str] = MODES, levels: Sequence[str] = LEVELS) -> Table:
    """Input, then one row a setting: the weight of every token, and which tokens leave the loss."""
    packed = example_batch()
    policies = list(zip(*(token[:2] for row in _SEQUENCES.values() for token in row), strict=True))
    names = ("π_rollout", "π_train")
    rows = [(name, *(f"{p:g}" for p in values)) for name, values in zip(names, policies, strict=True)]
    for level in levels:
        # An upper bound of inf leaves the aggregated ratio as it is.
        rows.append((f"{level}: ratio", *_outcome(packed, _tis(level, "truncate", math.inf))))
        rows += [(f"{level}: {mode}", *_outcome(packed, _tis(level, mode))) for mode in modes]
    if tuple(modes) == MODES:
        rows += [(label, *_outcome(packed, settings)) for label, settings in _further(levels)]
    headers = ("setting", *(f"{name}{i}" for name, row in _SEQUENCES.items() for i in range(1, len(row) + 1)))
    return Table("Worked example", headers, tuple(rows), notes=notes(modes, levels))


def notes(modes: Sequence[str] = MODES, levels: Sequence[str] = LEVELS) -> tuple[str, ...]:
    """How to read the table, one sentence for each thing that is in it."""
    said = {
        "token": "token: each token has its own ratio.",
        "sequence": "sequence: all tokens of a response have the product of its ratios.",
        "geometric": "geometric: all tokens of a response have the geometric mean of its ratios.",
        "truncate": "truncate lowers a ratio to the upper bound.",
        "clip": "clip also raises one to the lower bound.",
        "mask": "mask rejects what is outside the bounds and leaves the rest as it is.",
    }
    lines = [
        f"Each column is a token; A, B and C are sequences. The bounds are {1 / UPPER:g} and {UPPER:g}.",
        f"{PADDING} is a token under the loss mask (here a tool's output): it counts nowhere, whatever its ratio is.",
        *(said[name] for name in (*levels, *modes)),
    ]
    if "mask" in modes:
        lines.append(f"{REJECTED} is a rejected token: it leaves the loss, and by default its denominator as well.")
    if tuple(modes) == MODES:
        lines += [
            "normalised: truncated, then divided by the mean weight (of tokens, or of sequences).",
            "criterion: truncated, and a sequence whose geometric mean is outside the bounds is rejected.",
            f"veto: truncated, and a sequence with a token below {VETO:g} (in practice 1e-4) is rejected.",
            "A criterion or a veto changes no weight.",
        ]
    return tuple(lines)


def _tis(level: str, mode: str, upper: float = UPPER, **more: Any) -> dict[str, Any]:
    return {"use_tis": True, "tis": {"level": level, "mode": mode, "upper_bound": upper, **more}}


def _further(levels: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, settings) of batch normalisation at each level, and of one criterion and the veto at the first."""
    for level in levels:
        yield f"{level}: normalised", _tis(level, "truncate", batch_normalize=True)
    level = levels[0]
    criterion = {"statistic": "ratio", "aggregate": "sequence_mean", "upper_bound": UPPER}
    yield f"{level}: with criterion", {**_tis(level, "truncate"), "rs": {"criteria": [criterion]}}
    yield f"{level}: with veto", {**_tis(level, "truncate"), "rs": {"veto_threshold": VETO}}


def _outcome(packed: PackedSequences, settings: dict[str, Any]) -> list[str]:
    """Weight of every token as `correct` gives it, with a mark where it is rejected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)  # bounds for show are not bounds for use
        config = MismatchConfig.model_validate(settings)
    correction = correct(packed, config)
    tokens = zip(correction.weights.tolist(), correction.keep.tolist(), packed.loss_mask.tolist(), strict=True)
    return [f"{weight:.3g}" + ("" if keep else f" {REJECTED}") if mask else PADDING for weight, keep, mask in tokens]
