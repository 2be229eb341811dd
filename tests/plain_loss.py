"""The loss a second time: objectives, terms, denominators and aggregation over the decisions of `plain`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mismatch_plugin as mp
from tests.plain import SAFETY, Judged, Near, Response, Token, algorithm, bounded_exp, clamp, decide, ignore


@dataclass
class Answer:
    """What the package is held against; rows a response, a number a token."""

    loss: float
    loss_sum: float
    denominator: int
    terms: dict[str, float]
    terms_denominator: int
    weights: list[list[float]]
    keep: list[list[float]]
    gradient: list[list[float]]
    entropy_gradient: list[list[float]]
    factor: float
    judged: Judged


# Sections 3.1 and 3.9: the objectives -------------------------------------------------------------------------------


def objective_of(config: mp.MismatchConfig) -> str:
    return "reinforce" if algorithm(config) == 3 else config.objective


def ratios(tokens: list[Token], config: mp.MismatchConfig) -> None:
    """log r of every token of a response; for gspo their mean over those that enter, for gmpo next to it the mean of
    those clipped on the side of A's sign."""
    entering = [token for token in tokens if token.enters]
    if objective_of(config) == "reinforce" or not entering:
        return
    for token in entering:
        token.log_r = token.current - (token.rollout if config.use_rollout_log_probs else token.old)
    if objective_of(config) == "gmpo":
        low, high = config.ppo.eps_clip_low, config.ppo.eps_clip_high
        each = [min(token.log_r, high) if token.advantage > 0 else max(token.log_r, -low) for token in entering]
        for token in entering:
            token.log_mean = math.fsum(each) / len(each)
    if objective_of(config) == "gspo":
        mean = math.fsum(token.log_r for token in entering) / len(entering)
        for token in entering:
            token.log_r = mean


def objective(token: Token, config: mp.MismatchConfig, near: Near) -> None:
    """The token's loss before weight and rejection, and its derivative."""
    if not token.enters:
        return
    advantage, name = token.advantage, objective_of(config)
    if name == "reinforce":
        token.loss, token.slope = -advantage * token.current, -advantage
        return
    r = bounded_exp(token.log_r)
    if name == "gmpo":
        gmpo(token, config, near)
        return
    if name == "sapo":
        tau = config.ppo.tau_positive if advantage > 0 else config.ppo.tau_negative
        near(abs(token.log_r), SAFETY)
        gate = 1.0 / (1.0 + math.exp(-min(tau * (r - 1.0), 700.0)))
        token.loss = -advantage * gate * 4.0 / tau
        token.slope = -advantage * 4.0 * gate * (1.0 - gate) * r if abs(token.log_r) < SAFETY else 0.0
        return
    low, high, dual = 1.0 - config.ppo.eps_clip_low, 1.0 + config.ppo.eps_clip_high, config.ppo.dual_clip
    near(abs(token.log_r), SAFETY)
    if name == "cispo":
        near(r, low)
        near(r, high)
        token.clipped |= {"high"} if r > high else {"low"} if r < low else set()
        token.slope = -advantage * clamp(r, low, high)
        token.loss = token.slope * token.current
        return
    if advantage > 0:  # min(rA, clip(r)A) = min(r, 1 + ε_high) A
        near(r, high)
        free = r < high
        token.loss = -advantage * min(r, high)
        token.clipped |= set() if free else {"high"}
    else:  # max(r, 1 − ε_low) A, and with the dual clip at least c A
        near(r, low)
        free = r > low
        token.loss = -advantage * max(r, low)
        if advantage < 0 and not free:
            token.clipped.add("low")
        if advantage < 0 and dual is not None:
            near(r, dual)
            token.loss = min(token.loss, -advantage * dual)
            if r > dual:
                free = False
                token.clipped.add("dual")
    token.slope = -advantage * r if free and abs(token.log_r) < SAFETY else 0.0


def gmpo(token: Token, config: mp.MismatchConfig, near: Near) -> None:
    """−A times the geometric mean of clipped ratios; its derivative at a token that is not clipped is its own share."""
    low, high = -config.ppo.eps_clip_low, config.ppo.eps_clip_high
    near(token.log_r, low)
    near(token.log_r, high)
    near(abs(token.log_mean), SAFETY)
    token.loss = -token.advantage * bounded_exp(token.log_mean)
    if token.advantage > 0 and min(token.log_r, SAFETY) > high:
        token.clipped.add("high")
    if token.advantage < 0 and max(token.log_r, -SAFETY) < low:
        token.clipped.add("low")
    token.slope = 0.0 if token.clipped or abs(token.log_mean) >= SAFETY else token.loss


def distance(token: Token, config: mp.MismatchConfig, near: Near) -> None:
    """Section 3.10: k2 or k3 of log π_θ − log π_rollout, k3 above 20 its tangent, and its derivative."""
    if token.kind != "sound" or not config.terms.rollout_kl_coef:
        return
    gap = token.current - token.rollout
    if config.terms.rollout_kl_type == "k2":
        token.distance, token.distance_slope = gap * gap / 2.0, gap
        return
    near(gap, SAFETY)
    token.distance_slope = math.expm1(min(gap, SAFETY))
    token.distance = math.expm1(min(gap, SAFETY)) - gap + math.exp(SAFETY) * max(gap - SAFETY, 0.0)


def penalty(token: Token, config: mp.MismatchConfig, near: Near) -> None:
    """The estimator of KL(π_θ‖π_ref) and its derivative."""
    if token.ref is None or not token.enters:
        return
    gap = token.current - token.ref
    near(abs(gap), SAFETY)
    d, inside = clamp(gap, -SAFETY, SAFETY), abs(gap) < SAFETY
    if config.terms.kl_type == "k1":
        value, slope = d, 1.0
    elif config.terms.kl_type == "k2":
        value, slope = d * d / 2.0, d
    else:
        value, slope = math.expm1(-d) + d, -math.expm1(-d)
        if config.terms.kl_type == "low_var_kl":
            near(value, 10.0)
            slope = slope if value < 10.0 else 0.0
            value = min(value, 10.0)
    token.kl, token.kl_slope = value, slope if inside else 0.0


# Section 3.6: denominators and aggregation ----------------------------------------------------------------------------


def share(config: mp.MismatchConfig, tokens: int) -> float:
    """What one token counts for, given how many of its response count."""
    if config.aggregation == "seq-mean-token-mean":
        return 1.0 / max(tokens, 1)
    if config.aggregation == "seq-mean-token-sum" and config.length_norm is not None:
        return 1.0 / config.length_norm
    return 1.0


def divisor(config: mp.MismatchConfig, counts: list[int]) -> int:
    return sum(counts) if config.aggregation == "token-mean" else sum(count > 0 for count in counts)


def plain(batch: list[Response], config: mp.MismatchConfig, factor: float | None = None, near: Near = ignore) -> Answer:
    """The corrected loss of a batch. factor: the mean weight of the whole step, where the batch is a part of it."""
    judged = decide(batch, config, factor, near)
    dry = config.dry_run
    kept = [sum(token.keep or dry for token in tokens) for tokens in judged.trained]
    all_of_them = [len(tokens) for tokens in judged.trained]
    counted = all_of_them if config.denominator == "original" else kept
    denominator, original = divisor(config, counted), divisor(config, all_of_them)

    shapes = [response.mask for response in batch]
    weights, keep, gradient, entropy_gradient = ([[0.0] * len(mask) for mask in shapes] for _ in range(4))
    policy, entropy, kl, rollout_kl = [], [], [], []
    for n, tokens in enumerate(judged.trained):
        ratios(tokens, config)
        for token in tokens:
            objective(token, config, near)
            penalty(token, config, near)
            distance(token, config, near)
            weight, kept_here = (1.0, 1.0) if dry else (token.weight, float(token.keep))
            weights[n][token.place], keep[n][token.place] = weight, kept_here
            factor_of_loss = weight * kept_here * share(config, counted[n])
            policy.append(factor_of_loss * token.loss)
            slope = factor_of_loss * token.slope / max(denominator, 1)
            factor_of_terms = share(config, all_of_them[n])
            if config.terms.entropy_coef and token.entropy is not None and token.enters:
                entropy.append(-config.terms.entropy_coef * token.entropy * factor_of_terms)
                entropy_gradient[n][token.place] = -config.terms.entropy_coef * factor_of_terms / max(original, 1)
            if config.terms.kl_coef:
                scale = config.terms.kl_coef * factor_of_terms
                scale *= weight if config.terms.kl_importance_weighted else 1.0
                kl.append(scale * token.kl)
                slope += scale * token.kl_slope / max(original, 1)
            if config.terms.rollout_kl_coef:
                scale = config.terms.rollout_kl_coef * factor_of_terms
                scale *= kept_here if config.terms.rollout_kl_on == "accepted" else 1.0
                rollout_kl.append(scale * token.distance)
                slope += scale * token.distance_slope / max(original, 1)
            gradient[n][token.place] = slope
    terms = {}
    if config.terms.entropy_coef:
        terms["entropy"] = math.fsum(entropy)
    if config.terms.kl_coef:
        terms["kl"] = math.fsum(kl)
    if config.terms.rollout_kl_coef:
        terms["rollout_kl"] = math.fsum(rollout_kl)
    loss_sum = math.fsum(policy)
    loss = loss_sum / max(denominator, 1) + math.fsum(terms.values()) / max(original, 1)
    return Answer(
        loss=loss,
        loss_sum=loss_sum,
        denominator=denominator,
        terms=terms,
        terms_denominator=original,
        weights=weights,
        keep=keep,
        gradient=gradient,
        entropy_gradient=entropy_gradient,
        factor=judged.factor,
        judged=judged,
    )
