"""What `compare` runs by default: problems, mismatch settings, variants. Data alone; importing it imports no megatron.

The parameters of the batched problem and its settings were chosen on the seeds CHOSEN_ON and are reported on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_plugin.config import MismatchConfig, preset
from mismatch_plugin.config.presets import preset_names
from mismatch_plugin.config.values import no_notes

CHOSEN_ON = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
"""Seeds on which learning rate, staleness and precision of the batched settings were chosen."""
FIRST_SEED = 100
"""Of the seeds that are reported."""
OUTCOMES = {"primary": "final exact match", "secondary": ["area under the curve", "collapsed"]}
"""Named before any run."""


@dataclass(frozen=True)
class Setting:
    """One kind of mismatch. what: a sentence; changes: fields of LabSettings; variants: those that run by default."""

    title: str
    what: str
    changes: Mapping[str, Any]
    variants: tuple[str, ...]


PROBLEM: dict[str, Any] = {
    "task": "reverse6",
    "hidden": 32,
    "heads": 4,
    "kv_groups": 4,
    "ffn": 64,
    "position": "learned_absolute",
    "engine": "batched",
    "steps": 360,
    "prompts_per_batch": 16,
    "lr": 3e-3,
    "warm_up_target": 0.6,
    "warm_up_lr": 3e-3,
    "warm_up_steps": 1000,
    "eval_prompts": 128,
}
"""The problem of the default comparison, which both trainers run: a model that learns to reverse six digits."""
VARIANTS = (
    *("0", "0:dual_clip", "1", "2:token:truncate", "token_icepop", "2:sequence:truncate", "3:sequence:truncate"),
    "2:geo_rs",
)
"""Of the batched settings: `--full` runs them all in each."""
_THREE = ("0", "1", "2:token:truncate")
_FOUR = (*_THREE, "2:geo_rs")
SETTINGS: dict[str, Setting] = {
    "control": Setting(
        "Engines in sync",
        "The rollout engine computes in the trainer's precision with the trainer's newest weights.",
        {},
        _THREE,
    ),
    "int2": Setting(
        "A persistent engine mismatch",
        "The rollout engine always has the newest weights, rounded to integers of two bits.",
        {"rollout_dtype": "int2"},
        _FOUR,
    ),
    "stale24": Setting(
        "Stale rollouts",
        "The rollout engine's weights are 24 optimizer steps old (6 rollout batches).",
        {"staleness": 24},
        _THREE,
    ),
    "stale32": Setting(
        "Very stale rollouts",
        "The rollout engine's weights are 32 optimizer steps old (8 rollout batches).",
        {"staleness": 32},
        VARIANTS,
    ),
    "int2_stale8": Setting(
        "Both at once",
        "The rollout engine's weights are rounded to two bits and 8 optimizer steps old.",
        {"rollout_dtype": "int2", "staleness": 8},
        _FOUR,
    ),
    "moe_flips": Setting(
        "Experts chosen differently, in sync",
        "A mixture of four experts; the rollout engine, with the newest weights, gives six tokens in ten of each layer "
        "to another expert at random, and gradients are not clipped.",
        {"experts": 4, "ffn": 32, "expert_flips": 0.6, "lr": 6e-3, "clip_grad": 1e9},
        ("0", "0:dual_clip", *_THREE[1:]),
    ),
}
MORE_SETTINGS: dict[str, Setting] = {
    "int2_long": Setting(
        "Longer answers, a persistent engine mismatch",
        "Answers have four to ten tokens; the rollout engine has the newest weights, rounded to two bits.",
        {"task": "reverse3to9", "rollout_dtype": "int2"},
        ("0", "2:token:truncate", "2:sequence:truncate", "2:geometric:truncate"),
    ),
}
"""Further settings of the batched problem, which run where they are named."""
COLLAPSE = "stale32"
"""The setting that the cross-check through megatron-core runs."""
CROSS_CHECKED = ("0", "2:token:truncate")
CROSS_CHECK_SEEDS = 3
QUICK = ("control", "int2", "stale32")
"""The settings of `--quick`, with QUICK_VARIANTS and QUICK_SEEDS seeds."""
QUICK_VARIANTS = _THREE
QUICK_SEEDS = 8
SEEDS = 12

_LLAMA = (*_THREE, "3:sequence:truncate")
LLAMA_SETTINGS: dict[str, Setting] = {
    "control": Setting(
        "Engines in sync", "The rollout engine computes in float32 with the newest weights.", {}, _LLAMA
    ),
    "int4": Setting(
        "A persistent engine mismatch",
        "The rollout engine has the newest weights, rounded to integers of four bits.",
        {"rollout_dtype": "int4"},
        _LLAMA,
    ),
    "stale16": Setting(
        "Stale rollouts",
        "The rollout engine's weights are 16 optimizer steps old.",
        {"staleness": 16},
        _LLAMA,
    ),
    "bfloat16": Setting(
        "Another precision", "The rollout engine computes in bfloat16.", {"rollout_dtype": "bfloat16"}, _LLAMA
    ),
}
"""Of the engines transformers and sglang, which serve a Llama: the defaults of LabSettings are their problem."""
LLAMA_DEFAULT = {"transformers": ("control", "int4", "stale16"), "sglang": ("bfloat16",)}
"""By engine. Integers are made by transformers alone; a server in float32 differs from the trainer by rounding only."""
LLAMA_STEPS, LLAMA_SEEDS = 280, 4

_NAMED: dict[str, dict[str, Any]] = {
    "0:dual_clip": {"ppo": {"dual_clip": 3.0}},
    "2:geo_rs": {
        "use_tis": True,
        "rs": {"criteria": [{"aggregate": "sequence_mean", "lower_bound": 0.8, "upper_bound": 1.25}]},
    },
}
"""Variants with a name of their own: algorithm 0 with the dual clip of 3; token weights with rejection of responses
whose geometric mean ratio leaves [0.8, 1.25]."""
_DEFAULT_LEVEL = {2: "token", 3: "sequence"}


def variant_config(label: str) -> MismatchConfig:
    """The configuration of a label: `0`…`3`, `ALGORITHM:LEVEL[:MODE]` as `2:sequence:mask`, `0:dual_clip`, `2:geo_rs`,
    or a preset's name.

    A bare 2 is token level, a bare 3 sequence level, both truncate. Raises ValueError naming what exists.
    """
    if label in _NAMED:
        with no_notes():  # its bounds are far from 1: so are the policies
            return MismatchConfig.build({**_NAMED[label], "metrics": "full"})
    parts = label.split(":")
    if len(parts) > 3 or parts[0] not in ("0", "1", "2", "3") or (parts[0] in "01" and len(parts) > 1):
        if label in preset_names():
            return preset(label).replace(metrics="full")
        raise ValueError(
            f"algorithm {label!r} is unknown: write 0, 1, 2, 3, ALGORITHM:LEVEL:MODE as in 2:sequence:mask, "
            f"{', '.join(_NAMED)}, or a preset ({', '.join(preset_names())})."
        )
    algorithm = int(parts[0])
    data: dict[str, Any] = {"use_rollout_log_probs": bool(algorithm & 1), "use_tis": bool(algorithm & 2)}
    if algorithm > 1:
        level = parts[1] if len(parts) > 1 else _DEFAULT_LEVEL[algorithm]
        data["tis"] = {"level": level, "mode": parts[2] if len(parts) > 2 else "truncate"}
    return MismatchConfig.build({**data, "metrics": "full"})
