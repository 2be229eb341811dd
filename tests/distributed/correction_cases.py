"""Batches, layouts and settings for the tests of the correction over several processes; all processes make them alike.

A batch is whole here. `micro_batches` cuts it for a rank; `one_process` is what all ranks together must equal.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.parallel.context import ContextLayout, shard

FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy", "weight_versions")
LEVELS, MODES = ("token", "turn", "sequence", "geometric", "prefix"), ("truncate", "clip", "mask")
DENOMINATORS = ("accepted", "original")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum/norm")
BOUNDS = {"token": (0.7, 1.5), "turn": (0.6, 1.6), "sequence": (0.2, 4.0)}
BOUNDS |= {"geometric": (0.8, 1.055), "prefix": (0.4, 2.5)}
GROWN = {"turn": (0.8, 1.25), "sequence": (0.75, 1.2), "prefix": (0.8, 1.2)}
"""Bounds of one token, for the settings whose bounds grow as √n."""
CRITERIA = (
    ("token:ratio:0.5:1.7", "sequence_max:k2:0.21", "sequence_mean:k3:0.08", "sequence_max:ratio:0.3:1.5@negative"),
    ("token:tv:0.4", "sequence_max:ratio:0.85:1.65", "sequence_sum:ratio:0.05:15", "sequence_mean:binary_kl:0.08",
     "token:binary_kl:0.1@away"),
    ("token:binary_kl_reverse:0.5", "sequence_sum:tv:5", "sequence_mean:ratio:0.7:1.06", "token:ratio:0.8:1.9@negative",
     "sequence_mean:k3:0.03@negative"),  # nothing for the MAX
)  # fmt: skip
POSITIVE = 0.85
"""Of the upper bound: that where A ≥ 0, in the settings whose bounds differ by its sign."""
STALENESS, TRAINER_VERSION = 3, 99
VETO = 0.05
OBJECTIVES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce")


@dataclass(frozen=True)
class Layout:
    """Ranks are numbered as Megatron numbers them: those of one context-parallel group are neighbours."""

    name: str
    context: ContextLayout
    cp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.cp * self.dp

    def __str__(self) -> str:
        return self.name


LAYOUTS = (
    Layout("cp2-zigzag", "zigzag", 2, 1),
    Layout("cp2-contiguous", "contiguous", 2, 1),
    Layout("dp2", "none", 1, 2),
    Layout("cp2-zigzag-dp2", "zigzag", 2, 2),
    Layout("cp2-contiguous-dp2", "contiguous", 2, 2),
    Layout("cp4-zigzag", "zigzag", 4, 1),
    Layout("cp4-contiguous", "contiguous", 4, 1),
)


@dataclass(frozen=True)
class Settings:
    """One point of the product, and the configuration that means it."""

    algorithm: int
    level: str
    mode: str
    rejects: bool
    normalizes: bool
    denominator: str
    aggregation: str
    rotation: int = field(compare=False)

    @property
    def criteria(self) -> tuple[str, ...]:
        return CRITERIA[self.rotation % 3] if self.rejects else ()

    @property
    def weighted(self) -> bool:
        return self.algorithm in (2, 3) and self.level != "none"

    @property
    def objective(self) -> str:
        return "reinforce" if self.algorithm == 3 else OBJECTIVES[self.rotation * 3 // 8 % 6]

    @property
    def rejects_on_current_policy(self) -> bool:
        return self.rejects and self.algorithm in (0, 2) and self.rotation // 3 % 2 == 1

    @property
    def limits_staleness(self) -> bool:
        return self.rejects and self.rotation // 2 % 3 == 1

    @property
    def grows(self) -> bool:
        return self.level in GROWN and self.rotation % 4 == 3

    @property
    def by_sign(self) -> bool:
        return self.weighted and not self.grows and self.rotation % 5 == 1

    @property
    def gamma(self) -> bool:
        """In place of truncate."""
        return self.algorithm == 3 and (self.level, self.mode) == ("sequence", "truncate") and self.rotation % 4 < 2

    def config(self, scope: str = "", **changes: Any) -> mp.MismatchConfig:
        """scope: of batch normalisation, where there is one."""
        aggregation, _, norm = self.aggregation.partition("/")
        values: dict[str, Any] = {
            "use_rollout_log_probs": self.algorithm in (1, 3),
            "use_tis": self.algorithm in (2, 3),
            "denominator": self.denominator,
            "aggregation": aggregation,
            "length_norm": 50.0 if norm else None,
            "metrics": "full",
        }
        if self.rejects:
            values["rs"] = {"criteria": self.criteria, "veto_threshold": VETO}
            values["rs"] |= {"policy": "current"} if self.rejects_on_current_policy else {}
            values["rs"] |= {"max_staleness": STALENESS} if self.limits_staleness else {}
        tis: dict[str, Any] = {}
        if self.weighted:
            lower, upper = GROWN[self.level] if self.grows else BOUNDS[self.level]
            tis = {"level": self.level, "mode": self.mode, "upper_bound": upper}
            tis |= {} if self.mode == "truncate" else {"lower_bound": lower}
            tis |= {"bound_growth": 0.5} if self.grows else {}
            tis |= {"upper_bound_positive": POSITIVE * upper} if self.by_sign else {}
            tis = {"level": "sequence", "mode": "gamma"} if self.gamma else tis
            tis |= {"batch_normalize": True} if self.normalizes else {}
            tis |= {"batch_normalize_scope": scope} if self.normalizes and scope else {}
        elif self.level == "none":
            tis = {"level": "none"}
        values["tis"] = tis
        if self.algorithm != 3:
            values["objective"] = self.objective
            low, high = (0.03, 0.02) if self.objective == "gspo" else (0.2, 0.28)
            clips = self.objective not in ("sapo", "reinforce")
            values["ppo"] = {"eps_clip_low": low, "eps_clip_high": high} if clips else {}
            dual = self.rotation // 2 % 2 and self.objective in ("ppo", "gspo")
            values["ppo"] |= {"dual_clip": 3.0} if dual else {}
        values["terms"] = {}
        if self.rotation % 3 == 0 and not (self.algorithm == 3 and self.normalizes):
            values["terms"] |= {"entropy_coef": 0.01, "kl_coef": 0.1}
        if self.rotation % 3 != 1 and not (self.algorithm == 3 and self.normalizes):
            values["terms"] |= {"rollout_kl_coef": 0.2, "rollout_kl_type": ("k2", "k3")[self.rotation // 3 % 2]}
            values["terms"] |= {"rollout_kl_on": "accepted"} if self.rejects and self.rotation // 6 % 2 else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.MismatchWarning)
            return mp.MismatchConfig.model_validate(values | changes)


def product() -> list[Settings]:
    """Algorithms × levels × modes × rejection × batch normalisation × denominators; aggregations take turns there.

    Without weights there is little to combine, so every aggregation meets everything.
    """
    points = []
    both = (False, True)
    for algorithm, level in ((0, "-"), (1, "-"), (3, "none")):
        for rejects, denominator, aggregation in itertools.product(both, DENOMINATORS, AGGREGATIONS):
            points.append(Settings(algorithm, level, "-", rejects, False, denominator, aggregation, len(points)))
    weighted = itertools.product((2, 3), LEVELS, MODES, both, both, DENOMINATORS)
    for number, (algorithm, level, mode, rejects, normalizes, denominator) in enumerate(weighted):
        turn = AGGREGATIONS[(number + number // 8) % 4]
        points.append(Settings(algorithm, level, mode, rejects, normalizes, denominator, turn, len(points)))
    return points


PRODUCT = product()


@dataclass(frozen=True, eq=False)
class Whole:
    """A whole step. `rows` holds one tensor a sequence under each field's name, and `log_probs`, `loss_mask`."""

    rows: dict[str, list[Tensor]]
    fields: tuple[str, ...] = FIELDS
    skips_odd: bool = False  # only the first replica has something in the first micro-batch

    @property
    def lengths(self) -> list[int]:
        return [row.numel() for row in self.rows["loss_mask"]]

    @property
    def log_probs(self) -> Tensor:
        return _cat(self.rows["log_probs"])

    def packed(self, ids: list[int] | None = None) -> mp.PackedSequences:
        """Some of the sequences, built directly: invalid log-probs are found in the loss, as on a device."""
        ids = list(range(len(self.lengths))) if ids is None else ids
        values: dict[str, Any] = {name: _cat([self.rows[name][i] for i in ids], name) for name in self.fields}
        mask = _cat([self.rows["loss_mask"][i] for i in ids], "loss_mask")
        return mp.PackedSequences(
            loss_mask=mask,
            lengths=tuple(self.lengths[i] for i in ids),
            sequence_ids=tuple(ids),
            trainer_version=TRAINER_VERSION,
            **values,
        )

    def ids(self, layout: Layout, count: int, replica: int) -> list[list[int]]:
        """Which sequences each of a replica's micro-batches has."""
        parts: list[list[int]] = [[] for _ in range(count)]
        for number in range(len(self.lengths)):
            owner, part = number % layout.dp, number // layout.dp % count
            if self.skips_odd and part == 0:
                owner = 0
                part = 1 if layout.dp == 1 else 0
            if owner == replica:
                parts[part].append(number)
        return parts

    def micro_batches(self, layout: Layout, count: int, rank: int) -> list[tuple[mp.PackedSequences, Tensor]]:
        """A rank's micro-batches, each with the places of its tokens in the whole, found by position alone."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        replica, cp_rank = divmod(rank, layout.cp)
        parts = []
        for ids in self.ids(layout, count, replica):
            local = shard(self.packed(ids), layout.context, layout.cp, cp_rank).prepared()
            assert local.positions is not None
            first = starts[torch.tensor(ids, dtype=torch.int64)]
            parts.append((local, first[local.sequence_index.long()] + local.positions))
        return parts


def _cat(rows: list[Tensor], name: str = "") -> Tensor:
    dtype = {"loss_mask": torch.bool, "weight_versions": torch.int64}.get(name, torch.float64)
    return torch.cat([*rows, torch.zeros(0, dtype=dtype)])


LENGTHS = (1, 340, 7, 70, 2, 33, 0, 130, 16, 5, 90, 3, 24, 12, 51)


@cache
def make(name: str) -> Whole:
    """ "product": something of everything. The others are odd in the way that their name says."""
    lengths = {"product": LENGTHS, "single": (1,) * 5, "nothing": ()}.get(name, (16, 9, 32, 5, 21, 12))
    generator = torch.Generator().manual_seed(70)
    rows: dict[str, list[Tensor]] = {row: [] for row in ("log_probs", "loss_mask", *FIELDS)}
    for number, length in enumerate(lengths):
        row = _sequence(length, generator, drift=0.0 if length > 100 else 0.15, noise=0.15 if length > 20 else 0.3)
        at = torch.arange(length)
        if name in ("product", "on_policy"):
            row["loss_mask"] = torch.rand(length, generator=generator) < (1.0 if length < 4 else 0.9)
            row["loss_mask"] &= (at >= length // 4) | (length > 200) | (length < 4)
            row["loss_mask"] &= torch.tensor(length != 24)  # a sequence that does not train
        elif name == "first_chunk":  # of every layout: the other ranks have tokens but none that trains
            row["loss_mask"] = at < max(1, length // 8)
        elif name == "untrained_replica":
            row["loss_mask"] = torch.full((length,), number % 2 == 0)
        elif name == "rejected":
            row["rollout_log_probs"] -= 6.1
        elif name == "bad_tokens":
            place, value = {0: (13, math.nan), 2: (13, -math.inf), 4: (20, 0.7), 5: (5, 0.0)}.get(number, (0, -1.0))
            row["rollout_log_probs"][place] = value
            row["old_log_probs"][place] = row["log_probs"][place] = -5.0 if value == 0.0 else -0.9
        for key, value in row.items():
            if value.is_floating_point():  # what is not trained on is garbage
                value = torch.where(row["loss_mask"], value, math.nan)
            rows[key].append(value)
    held = tuple(field for field in FIELDS if name != "on_policy" or field != "old_log_probs")
    return Whole(rows, held, skips_odd=name == "empty")


def _sequence(length: int, generator: torch.Generator, drift: float, noise: float) -> dict[str, Tensor]:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    top = -0.005 - normal(length).abs()
    log_ratio = drift * normal(1) + noise * normal(length)
    if length == 12:
        log_ratio[length // 2] = -4.0  # for the veto
    old = top + log_ratio.clamp(max=0.0)
    step = 0.17 * normal(length)
    log_probs = torch.where(old + step < -1e-3, old + step, old - step.abs())
    advantages = normal(1).expand(length) + 0.1 * normal(length)
    return {
        "loss_mask": torch.ones(length, dtype=torch.bool),
        "rollout_log_probs": top + log_ratio.neg().clamp(max=0.0),
        "old_log_probs": old,
        "log_probs": log_probs,
        "ref_log_probs": old + 0.3 * normal(length),
        "advantages": advantages * (length != 33),
        "entropy": normal(length).abs(),
        "weight_versions": torch.randint(95, 101, (length,), generator=generator),
    }


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a whole step gives: numbers, and one a token of the batch in its order."""

    loss: float
    denominators: tuple[int, int]
    gradient: Tensor
    weights: Tensor
    keep: Tensor
    metrics: dict[str, float]


def one_process(whole: Whole, config: mp.MismatchConfig) -> Outcome:
    log_probs = whole.log_probs.requires_grad_()
    result = mp.policy_loss(log_probs, whole.packed(), config)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    return Outcome(
        float(result.loss.detach()),
        (int(result.denominator), int(result.terms_denominator)),
        gradient,
        result.correction.weights,
        result.correction.keep,
        result.statistics.metrics(),
    )
