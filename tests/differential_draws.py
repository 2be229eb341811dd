"""Random configurations and batches, blind enough that some configurations are refused, and their packed form."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.config.criteria import Aggregate, Statistic
from tests.plain import TRAINER_VERSION, Response, algorithm, corrects, loss_reads_rollout, runs, weighs_by_sign
from tests.plain_loss import Answer, objective_of

OPTIONAL = ("rollout", "old", "ref", "entropy", "positions", "versions", "turns")
OBJECTIVES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce")
SIDES = ("high", "low", "dual")
LEVELS = ("token", "turn", "sequence", "geometric", "prefix")
STATISTICS = get_args(Statistic)
AGGREGATES = get_args(Aggregate)
GARBAGE = (math.nan, math.inf, -math.inf, 1e30, 0.0, 7.0)
INVALID = (None, math.nan, math.inf, -math.inf, -9999.0, 5.0, 0.0)
INVALID_TRAIN = (math.nan, -math.inf, math.inf, 0.5, 1000.0)


# Configurations -------------------------------------------------------------------------------------------------------


def draw_tis(rng: Random) -> dict[str, Any]:
    tis: dict[str, Any] = {"level": rng.choice([*LEVELS, *LEVELS, "none"])}
    if tis["level"] == "none" and rng.random() < 0.9:
        return tis  # the rest would change nothing, and is refused
    tis |= {"mode": rng.choice(["truncate", "clip", "mask"]), "batch_normalize": rng.random() < 0.5}
    if rng.random() < (0.15 if tis["level"] == "sequence" else 0.005):
        return tis | {"mode": "gamma"}  # refused where bounds are given, and in algorithm 2
    if rng.random() < 0.3:
        tis["upper_bound_positive"] = rng.choice([1.0, 1.1, 3.0, math.inf])
    if rng.random() < (0.02 if tis["mode"] == "truncate" else 0.2):
        tis["lower_bound_positive"] = rng.choice([0.0, 0.9, 1.0])
    if rng.random() < 0.8:
        tis["upper_bound"] = rng.choice([2.0, 1.02, 1.3, 5.0, 0.7, 150.0, math.inf])
    if rng.random() < (0.05 if tis["mode"] == "truncate" else 0.6):
        tis["lower_bound"] = rng.choice([0.0, 0.01, 0.5, 0.98, 1.5])
    if rng.random() < (0.4 if tis["level"] in ("turn", "sequence", "prefix") else 0.02):
        tis["bound_growth"] = rng.choice([0.5, 1.0, 0.2])
    if tis["batch_normalize"] and rng.random() < 0.7:
        tis["batch_normalize_scope"] = rng.choice(["auto", "step", "rollout_batch", "micro_batch"])
    return tis


def draw_criterion(rng: Random) -> dict[str, Any]:
    """A ratio's bounds around 1; the others' from nearly nothing to a lot; either may be absent, 0 or infinite."""
    made: dict[str, Any] = {
        "statistic": rng.choice(["ratio", "ratio", "ratio", *STATISTICS]),
        "aggregate": rng.choice(AGGREGATES),
    }
    ratio = made["statistic"] in ("ratio", "k1")
    if rng.random() < (0.8 if ratio else 0.97):
        made["upper_bound"] = rng.choice(
            [0.995, 1.01, 1.5, 4.0, math.inf] if ratio else [1e-4, 0.01, 0.1, 0.6, math.inf]
        )
    if rng.random() < (0.6 if ratio else 0.3):
        made["lower_bound"] = rng.choice([0.0, 0.3, 0.9, 0.99] if ratio else [0.0, 2e-5, 5e-3])
    if rng.random() < 0.4:
        made["condition"] = rng.choice(["negative", "away"])
    return made


def draw_clip(rng: Random, objective: str) -> dict[str, Any]:
    if objective == "sapo" and rng.random() < 0.9:
        return {"tau_positive": rng.choice([1.0, 0.5]), "tau_negative": rng.choice([1.05, 2.0])}
    clip: dict[str, Any] = {
        "eps_clip_low": rng.choice([0.2, 0.2, 0.05, 0.0, 0.9]),
        "eps_clip_high": rng.choice([0.2, 0.28, 0.02, 0.0, 3.0]),
    }
    if objective in ("ppo", "gspo") or rng.random() < 0.05:
        clip["dual_clip"] = rng.choice([None, 1.1, 3.0])
    return clip


def draw_config(rng: Random) -> mp.MismatchConfig | None:
    """None where the draw means nothing and is refused."""
    given: dict[str, Any] = {
        "use_rollout_log_probs": rng.random() < 0.5,
        "use_tis": rng.random() < 0.65,
        "rs": {"criteria": [draw_criterion(rng) for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 3]))]},
        "denominator": rng.choice(["auto", "accepted", "original"]),
        "aggregation": rng.choice(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
        "rollout_log_prob_policy": rng.choice(["error", "neutral", "drop-token", "drop-sequence"]),
        "metrics": rng.choice(["off", "basic", "full", "full"]),
        "dry_run": rng.random() < 0.2,
    }
    measured = rng.random() < 0.1  # and not read by the loss
    if measured:
        given |= {"use_tis": given["use_rollout_log_probs"], "rs": {}}
        given["rollout_log_prob_policy"] = rng.choice(["error", "neutral"])
    if rng.random() < 0.3 and not measured:
        given["rs"]["veto_threshold"] = rng.choice([1e-4, 0.1, 0.6])
    if rng.random() < (0.4 if measured else 0.15):
        given["rs"]["max_staleness"] = rng.choice([0, 2, 4])
    judges = "veto_threshold" in given["rs"] or given["rs"].get("criteria")
    if rng.random() < (0.5 if judges else 0.02) * (0.05 if given["use_rollout_log_probs"] else 1.0):
        given["rs"]["policy"] = "current"
    if given["use_tis"]:
        given["tis"] = {"level": "none"} if measured else draw_tis(rng)
    elif rng.random() < 0.1:
        given["tis"] = {"upper_bound": rng.choice([2.0, 3.0])}  # 2.0 is the default and allowed
    if rng.random() < (0.5 if given["aggregation"] == "seq-mean-token-sum" else 0.03):
        given["length_norm"] = rng.choice([1.0, 7.5])
    if not (given["use_tis"] and given["use_rollout_log_probs"]) or rng.random() < 0.03:
        objective = rng.choice(["ppo", "gspo", *OBJECTIVES])
        given["objective"] = objective
        given["ppo"] = {} if objective == "reinforce" and rng.random() < 0.9 else draw_clip(rng, objective)
    terms: dict[str, Any] = {"entropy_coef": rng.choice([0.0, 0.01, -0.3])}
    if rng.random() < 0.5:
        terms |= {"kl_coef": rng.choice([0.1, 2.0]), "kl_type": rng.choice(["k1", "k2", "k3", "low_var_kl"])}
        terms["kl_importance_weighted"] = rng.random() < (0.5 if given["use_tis"] else 0.05)
    if rng.random() < 0.3 and not measured:
        terms |= {"rollout_kl_coef": rng.choice([1e-3, 0.7]), "rollout_kl_type": rng.choice(["k2", "k3"])}
        terms["rollout_kl_on"] = rng.choice(["all", "accepted"])
    try:
        return mp.MismatchConfig.model_validate(given | {"terms": terms})
    except ValidationError:
        return None


# Batches --------------------------------------------------------------------------------------------------------------


def single(value: float) -> float:
    """Rounded to float32, so that a list with a None in it, which becomes float32, keeps its digits."""
    return struct.unpack("f", struct.pack("f", value))[0]


def draw_token(rng: Random, spread: float, extreme: bool) -> dict[str, float]:
    rollout = single(-rng.choice([rng.expovariate(1.0), rng.uniform(0, 0.02), rng.uniform(0, 6)]) - 1e-5)
    old = min(rollout + rng.gauss(0.0, spread), -1e-6 * rng.random())
    current = min(old + rng.gauss(0.0, rng.choice([0.01, 0.3])), -1e-7)
    if extreme and rng.random() < 0.2:
        far = rng.choice([21.5, 25.0, 1000.0])
        low, high = -0.25 - far, -0.25 - rng.random()
        rollout, old, current = (single(rng.choice([low, high])) for _ in range(3))
    elif rng.random() < 0.05:  # a certain token is honestly 0.0, and rounding may leave it a little above
        rollout, old, current = single(rng.choice([0.0, 0.05])), -rng.random(), -rng.random()
    return {"rollout": rollout, "old": old, "current": current, "ref": min(current + rng.gauss(0, 0.5), 0.0)}


@dataclass
class Rates:
    """How often a token's log-prob is invalid: the rollout's, the one it is compared with, and a π_old nothing uses."""

    train: str  # the row it is compared with
    rollout: float
    training: float
    unused: float

    def spoil(self, rng: Random, token: dict[str, Any]) -> None:
        other = "old" if self.train == "current" else "current"
        if token["rollout"] >= 0.0 and rng.random() < 0.5:
            token[other] = -5.0 * rng.random()  # what it is not compared with makes no fill of it
        if rng.random() < self.rollout:
            token["rollout"] = rng.choice(INVALID)
            if token["rollout"] == 0.0:  # a fill only where the training side is far away
                token[self.train], token[other] = -3.5 - rng.random(), -5.0 * rng.random()
        if rng.random() < self.training:
            token[self.train] = rng.choice(INVALID_TRAIN)
        if rng.random() < self.unused:
            token["old"] = rng.choice(INVALID_TRAIN)


def draw_response(rng: Random, length: int, spread: float, extreme: bool, rates: Rates) -> Response:
    trained = rng.choice([0.0, 0.5, 0.8, 1.0, 1.0])
    rows: dict[str, list[Any]] = {field.name: [] for field in fields(Response)}
    advantage = rng.choice([rng.gauss(0, 1), rng.gauss(0, 1), 0.0, None])
    position = rng.choice([0, 0, 50, 250, 16370])
    for place in range(length):
        mask = int(rng.random() < trained)
        token: dict[str, Any] = draw_token(rng, spread, extreme)
        each = rng.choice([0.0, rng.gauss(0, 1)]) if advantage is None else advantage
        token |= {"advantages": each, "entropy": rng.expovariate(1.0)}
        rates.spoil(rng, token)
        if not mask:
            token = {name: rng.choice(GARBAGE) for name in token}
        token |= {"mask": mask, "positions": position + place, "versions": rng.randrange(90, 97) if mask else 10**6}
        for name, value in token.items():
            rows[name].append(value)
    rows["turns"] = sorted(rng.choices(range(4), k=length)) if rng.random() < 0.5 else runs(rows["mask"])
    return Response(**rows)


def draw_rates(rng: Random, config: mp.MismatchConfig, absent: Collection[str], stops: bool) -> Rates:
    """stops: also what raises. Without rollout log-probs nothing is compared, and nothing is said of the other side."""
    error, bypass = config.rollout_log_prob_policy == "error", config.use_rollout_log_probs
    rates = Rates("current" if bypass or "old" in absent else "old", 0.0, 0.0, 0.0)
    if stops or not (error and loss_reads_rollout(config)):
        rates.rollout = rng.choice([0.0, 0.1] if stops else [0.0, 0.1, 0.4, 0.4, 1.0])
    if "rollout" not in absent and (stops or not error):
        rates.training = rng.choice([0.0, 0.1] if stops else [0.0, 0.0, 0.1, 0.4])
    if bypass:
        rates.unused = rng.choice([0.0, 0.0, 0.2])
    return rates


def draw_batch(rng: Random, config: mp.MismatchConfig, stops: bool = False) -> list[Response]:
    """Ragged, with empty and fully masked responses, or none at all; optional fields absent where they may be.

    stops: with log-probs that are an error, too.
    """
    lengths = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.choice([0, 1, 2, 3, 4, 6]))]
    if lengths and rng.random() < 0.02:
        lengths[0] = 300  # another bucket of length and position
    spread, extreme = rng.choice([1e-4, 0.02, 0.3, 1.2]), rng.random() < 0.2
    may_lack = {
        "rollout": algorithm(config) == 0 and not corrects(config) and not config.terms.rollout_kl_coef,
        "old": True,
        "ref": not config.terms.kl_coef,
        "entropy": not config.terms.entropy_coef,
        "positions": True,
        "versions": config.rs.max_staleness is None,
        "turns": True,
    }
    absent = [name for name in OPTIONAL if may_lack[name] and rng.random() < (0.4 if name == "rollout" else 0.2)]
    rates = draw_rates(rng, config, absent, stops)
    batch = [draw_response(rng, length, spread, extreme, rates) for length in lengths]
    return [replace(response, **dict.fromkeys(absent)) for response in batch]


# Packed ---------------------------------------------------------------------------------------------------------------


def given_fields(batch: list[Response]) -> set[str]:
    """The optional fields of a batch: those of every response."""
    return {name for name in OPTIONAL if all(getattr(response, name) is not None for response in batch)}


def pack(batch: list[Response], given: set[str] | None = None) -> tuple[mp.PackedSequences, Tensor, Tensor]:
    """The batch, [T] log π_θ and [T] entropy, both with gradient. given: the fields of the step it is a part of."""
    given = given_fields(batch) if given is None else given

    def rows(name: str) -> list[Any]:
        return [row(getattr(response, name)) for response in batch]

    def row(values: list[Any]) -> Any:
        return values if None in values else torch.tensor(values, dtype=torch.float64)

    def leaf(name: str) -> Tensor:
        flat = [value for response in batch for value in getattr(response, name) or []]
        return torch.tensor(flat, dtype=torch.float64, requires_grad=True)

    log_probs, entropy = leaf("current"), leaf("entropy")
    named = {"rollout": "rollout_log_probs", "old": "old_log_probs", "ref": "ref_log_probs"}
    optional: dict[str, Any] = {named[name]: rows(name) for name in named if name in given}
    optional |= {"positions": [response.positions for response in batch]} if "positions" in given else {}
    if "versions" in given:
        optional |= {"weight_versions": [response.versions for response in batch], "trainer_version": TRAINER_VERSION}
    optional |= {"unit_ids": [response.turns for response in batch]} if "turns" in given else {}
    lengths = [len(response.mask) for response in batch]
    if "entropy" in given:
        optional["entropy"] = list(entropy.split(lengths)) if lengths else []
    packed = mp.PackedSequences.from_lists(
        loss_masks=[response.mask for response in batch], advantages=rows("advantages"), **optional
    )
    return packed, log_probs, entropy


# What the draws reach -------------------------------------------------------------------------------------------------


def features(config: mp.MismatchConfig, batch: list[Response], answer: Answer) -> list[str]:
    """What a case exercises, in the words of `EVERYTHING`."""
    tokens = [token for response in answer.judged.trained for token in response]
    tis, names = config.tis, [f"algorithm {algorithm(config)}", *(["dry run"] if config.dry_run else [])]
    names += [f"{c.aggregate} {c.statistic}" for c in config.rs.criteria]
    names += ["veto"] if answer.judged.vetoed else []
    names += [f"{c.condition} of {c.aggregate}" for c in config.rs.criteria if c.condition != "any"]
    names += [f"policy {config.rs.policy}"] if config.rs.policy == "current" else []
    names += [f"stale {config.metrics}"] if any(token.stale for token in tokens) else []
    if config.use_tis:
        names += [f"{tis.level} {tis.mode}" if tis.level != "none" else "none"]
        names += [f"grows, {tis.level}"] if tis.bound_growth else []
        names += [f"scope {tis.batch_normalize_scope}"] if tis.batch_normalize else []
    names += [f"by sign, {tis.level} {tis.mode}"] if weighs_by_sign(config) else []
    names += ["kl weighted"] if config.terms.kl_importance_weighted else []
    named, clipped = objective_of(config), [f"clipped {x}" for x in SIDES if any(x in t.clipped for t in tokens)]
    names += clipped + [f"{named} {side}" for side in clipped]
    names += [f"{named} {config.rollout_log_prob_policy}"] if algorithm(config) < 3 else []
    if config.terms.rollout_kl_coef:
        far = "far" if any(abs(token.current - token.rollout) > 20 for token in tokens if token.distance) else "near"
        names += [f"rollout {config.terms.rollout_kl_type} {far}", f"rollout on {config.terms.rollout_kl_on}"]
        names += ["rollout kl next to invalid"] if any(token.kind != "sound" for token in tokens) else []
    names += list({token.kind for token in tokens})
    names += [f"no {name}" for name in OPTIONAL if batch and name not in given_fields(batch)]
    left = [
        len(some) < len(tokens) for tokens, some in zip(answer.judged.trained, answer.judged.responses, strict=True)
    ]
    names += [f"left out, {config.rollout_log_prob_policy}"] if any(left) else []
    kept = {token.keep for token in tokens}
    return [*names, *(["some rejected"] if len(kept) == 2 else []), *(["all rejected"] if kept == {False} else [])]


EVERYTHING = [
    *(f"algorithm {number}" for number in range(4)),
    *("dry run", "veto", "none"),
    *(f"{aggregate} {statistic}" for aggregate in AGGREGATES for statistic in STATISTICS),
    *(f"{level} {mode}" for level in LEVELS for mode in ("truncate", "clip", "mask")),
    *(f"by sign, {level} {mode}" for level in LEVELS for mode in ("truncate", "clip", "mask")),
    "by sign, sequence gamma",
    *(f"grows, {level}" for level in ("turn", "sequence", "prefix")),
    *(f"scope {scope}" for scope in ("auto", "step", "rollout_batch", "micro_batch")),
    *("kl weighted", "clipped high", "clipped low", "clipped dual", "some rejected", "all rejected"),
    *(f"{name} clipped {side}" for name in ("ppo", "gspo", "cispo", "gmpo") for side in ("high", "low")),
    *("ppo clipped dual", "gspo clipped dual", "rollout kl next to invalid", "rollout on all", "rollout on accepted"),
    *(f"{name} {policy}" for name in OBJECTIVES for policy in ("error", "neutral", "drop-token", "drop-sequence")),
    *(f"rollout {kind} {far}" for kind in ("k2", "k3") for far in ("near", "far")),
    *("sound", "nan", "positive", "floor", "zero_fill", "train_not_finite", "train_positive"),
    *("left out, error", "left out, neutral"),
    *(f"no {name}" for name in OPTIONAL),
    *("away of token", *(f"negative of {aggregate}" for aggregate in AGGREGATES), "policy current"),
    *("stale off", "stale basic", "stale full"),
]
