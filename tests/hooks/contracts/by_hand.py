"""The correction by hand, one token after the other in plain floats: no tensor, and no function of the package.

Written from the definitions and the hosts' own, for comparing with every value and metric that an adapter hands to its
host. What is read from the configuration are its values, with absent bounds filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import mismatch_plugin as mp

Row = dict[str, list[float]]
"""One sequence: mask, current (log π_θ), rollout, advantages, and where there are any old, ref and entropy."""
Token = dict[str, float]


def rows_of(mask: Iterable[Any], **columns: Iterable[Any] | None) -> list[Row]:
    """Rows from tensors, [sequence] each; None leaves a column out."""
    given = {"mask": mask, **{name: values for name, values in columns.items() if values is not None}}
    lists = {name: [[float(x) for x in row] for row in values] for name, values in given.items()}
    return [{name: values[i] for name, values in lists.items()} for i in range(len(lists["mask"]))]


def correct_by_hand(rows: list[Row], config: mp.MismatchConfig, normalized: bool = True) -> list[list[Token]]:
    """Every trained token's values by name, {} under the mask. normalized: divide weights by their mean over `rows`."""
    sequences = []
    for row in rows:
        tokens = [_token(row, at, config) if row["mask"][at] else {} for at in range(len(row["mask"]))]
        turn = 0
        for token, before in zip(tokens, [{}, *tokens], strict=False):
            turn += bool(token and not before)
            if token:
                token["turn"] = float(turn)
        trained = [token for token in tokens if token]
        _judge(trained, config)
        if config.objective == "gspo":
            mean = sum(token["log_r"] for token in trained) / max(1, len(trained))
            for token in trained:
                token["log_r"] = mean
        sequences.append(tokens)
    factor = _mean_weight(sequences, config) if normalized and config.tis.batch_normalize else 1.0
    for token in (token for tokens in sequences for token in tokens if token):
        token["weight"] /= factor
        _finish(token, config)
    return sequences


def _token(row: Row, at: int, config: mp.MismatchConfig) -> Token:
    token = {name: values[at] for name, values in row.items() if name != "mask"}
    token.setdefault("old", token["current"])
    bypass = config.use_rollout_log_probs
    train, anchor = (token["current"], token["rollout"]) if bypass else (token["old"], token["old"])
    log_ratio = train - token["rollout"]
    return {**token, "log_ratio": log_ratio, "ratio": math.exp(log_ratio), "log_r": token["current"] - anchor}


def _judge(trained: list[Token], config: mp.MismatchConfig) -> None:
    """Weight and `keep` of the trained tokens of one sequence."""
    tis, logs = config.tis, [token["log_ratio"] for token in trained]
    for place, token in enumerate(trained):
        weight, inside = 1.0, True
        if config.weighted:
            product = sum(logs)
            by_level = {"token": token["log_ratio"], "sequence": product, "geometric": product / len(logs)}
            by_level["turn"] = sum(other["log_ratio"] for other in trained if other["turn"] == token["turn"])
            by_level["prefix"] = sum(logs[: place + 1])
            ratio = math.exp(by_level[tis.level])
            inside = tis.mode != "mask" or tis.lower <= ratio <= tis.upper
            weight = min(ratio, tis.upper) if tis.mode == "truncate" else min(max(ratio, tis.lower), tis.upper)
        veto, judged, own = config.rs.veto_threshold, logs, token["log_ratio"]
        if config.rejects_on_current_policy:
            judged, own = [t["current"] - t["rollout"] for t in trained], token["current"] - token["rollout"]
        vetoed = veto is not None and min(math.exp(value) for value in judged) < veto
        kept = inside and not vetoed and all(_accepts(rule, own, judged) for rule in config.criteria)
        token |= {"weight": weight if inside else 0.0, "inside": float(inside), "keep": float(kept)}
        if config.dry_run:
            token |= {"weight": 1.0, "keep": 1.0}


def _accepts(rule: mp.Criterion, own: float, logs: list[float]) -> bool:
    def value(log_ratio: float) -> float:
        if rule.statistic == "k2":
            return log_ratio**2 / 2
        return math.exp(log_ratio) - 1 - log_ratio if rule.statistic == "k3" else log_ratio

    values = [value(log_ratio) for log_ratio in logs]
    found = {
        "token": value(own),
        "sequence_sum": sum(values),
        "sequence_mean": sum(values) / len(values),
        "sequence_max": max(values),
    }[rule.aggregate]
    found = math.exp(found) if rule.statistic == "ratio" else found
    assert rule.statistic in ("ratio", "k2", "k3") and rule.upper_bound is not None
    return (rule.lower_bound or -math.inf) <= found <= rule.upper_bound


def _mean_weight(sequences: list[list[Token]], config: mp.MismatchConfig) -> float:
    """Over tokens, turns or sequences; those that mask mode rejects are not counted."""
    trained = [[token for token in tokens if token] for tokens in sequences]
    one = {"token": id, "prefix": id, "turn": lambda token: token["turn"]}.get(config.tis.level, lambda token: 0)
    units = [token for tokens in trained for token in {one(token): token for token in tokens}.values()]
    weights = [token["weight"] for token in units if token["inside"]]
    return (sum(weights) / len(weights) if weights else 0.0) or 1.0


def _finish(token: Token, config: mp.MismatchConfig) -> None:
    """The policy loss with its slope by log π_θ, what the clip did, and the KL to the reference."""
    theta, advantage, coefficient = token["current"], token["advantages"], token["weight"] * token["keep"]
    r, clip = math.exp(token["log_r"]), config.ppo
    bounded = min(max(r, 1 - clip.eps_clip_low), 1 + clip.eps_clip_high)
    loss, slope = max(-r * advantage, -bounded * advantage), -r * advantage
    clipped = -bounded * advantage > -r * advantage
    dual = clip.dual_clip is not None and advantage < 0 and loss > -clip.dual_clip * advantage
    if dual and clip.dual_clip is not None:
        loss = -clip.dual_clip * advantage
    if clipped or dual:
        slope = 0.0
    if config.objective == "cispo":
        loss, slope, clipped, dual = -bounded * advantage * theta, -bounded * advantage, r != bounded, False
    if config.algorithm == 3 or config.objective == "reinforce":
        loss, slope = -advantage * theta, -advantage
    token |= {"pg_loss": coefficient * loss, "slope": coefficient * slope, "used": coefficient}
    token |= {"r": r, "ppo_kl": -token["log_r"], "clipped": float(clipped), "dual": float(dual)}
    if "ref" in token:
        d = theta - token["ref"]
        k3 = math.exp(-d) - 1 + d
        token["kl"] = {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(max(k3, -10.0), 10.0)}[
            config.terms.kl_type
        ]
        token["weighted_kl"] = token["kl"] * (token["weight"] if config.terms.kl_importance_weighted else 1.0)
