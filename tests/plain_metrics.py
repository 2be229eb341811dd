"""The metrics a second time, each from the list of tokens or sequences that its declaration names.

Left out: the place of a quantile inside its histogram bin (`Quantile`: the order statistic, to be met within one bin).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mismatch_plugin as mp
from tests.plain import (
    TRAINER_VERSION,
    Near,
    Response,
    Token,
    Verdict,
    aggregate,
    bounded_exp,
    clamp,
    criterion_bounds,
    criterion_name,
    is_ratio,
    log_bounds,
    summed,
    tis_bounds,
    units_of,
    weighs_by_sign,
    weighted,
)
from tests.plain_loss import Answer, objective_of

DEFECTS = ("floor", "positive", "zero_fill", "nan", "train_not_finite", "train_positive")
QUANTILES = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "p99_9": 0.999}


@dataclass
class Quantile:
    """log ρ of the token that a quantile falls on; the histogram knows it to a bin."""

    log_ratio: float


def mean(values: Iterable[float], empty: float = 0.0) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else empty


def population_std(values: Iterable[float]) -> float:
    values = list(values)
    middle = mean(values)
    return math.sqrt(mean((value - middle) ** 2 for value in values))


def sample_std(values: Sequence[float]) -> float:
    n = len(values)
    return population_std(values) * math.sqrt(n / (n - 1)) if n > 1 else 0.0


def effective_share(values: Sequence[float], empty: float) -> float:
    """(Σ x)² / (n Σ x²)."""
    square = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * square) if square else empty


def exp_at_most(log_value: float) -> float:
    return math.exp(min(log_value, 20.0))


Metrics = dict[str, float | Quantile]


def plain_metrics(batch: list[Response], answer: Answer, config: mp.MismatchConfig, near: Near) -> Metrics:
    """Every metric that the configuration declares, without the prefix.

    Where all that trains is left out, of the mismatch there is none: a mean of nothing would be read as agreement.
    """
    if config.metrics == "off":
        return {}
    trained = [token for tokens in answer.judged.trained for token in tokens]
    responses = [tokens for tokens in answer.judged.responses if tokens]
    tokens = [token for response in responses for token in response]
    found = the_loss(trained, answer, config, batch)
    found |= {"tokens": float(len(trained)), "sequences": float(sum(map(bool, answer.judged.trained)))}
    given = all(response.rollout is not None for response in batch)
    if given:
        found |= {f"invalid_{kind}": float(sum(token.kind == kind for token in trained)) for kind in DEFECTS}
    if trained and not tokens:
        return found
    found |= rejection(responses, tokens, answer, config)
    if weighted(config):
        found |= weights(responses, tokens, answer, config)
    if given:
        found |= ratios(responses, tokens, config) | outside(responses, config, near) | distance(responses, tokens)
        if config.metrics == "full":
            found |= criteria(answer, config) | full(responses, tokens, batch, near)
    return found


def ratios(responses: list[list[Token]], tokens: list[Token], config: mp.MismatchConfig) -> Metrics:
    """The ratio before bounding; std and ESS of ρ clamped to [1/hi, hi] for comparison, of plain ρ to be judged."""
    level = config.tis.level
    whole = level in ("sequence", "geometric")
    rho = [bounded_exp(token.log_ratio) for token in tokens]
    logs = [aggregate(level, unit) for unit in summed(level, responses)]
    by_unit = [bounded_exp(value) for value in logs]
    by_token, by_sequence = unit_ratios(level, responses)
    upper = tis_bounds(config)[1]
    low, high = sorted((1.0 / upper, upper))
    bounded = [clamp(ratio, low, high) for ratio in by_token]
    square, bounded_square = (mean(ratio * ratio for ratio in each) for each in (rho, bounded))
    found: Metrics = {
        "rollout_is_mean": mean(by_token, 1.0),
        "rollout_is_ratio_mean": mean(rho, 1.0),
        "rollout_is_ratio_std": population_std(rho),
        "rollout_is_ratio_eff_sample_size": 0.0 if tokens and square <= 1e-6 else effective_share(rho, 1.0),
        "rollout_is_std": population_std(bounded) if len(tokens) > 1 else 0.0,
        "rollout_is_min": exp_at_most(min(logs, default=0.0)),
        "rollout_is_max": exp_at_most(max(logs, default=0.0)),
        "rollout_is_eff_sample_size": 0.0 if tokens and bounded_square <= 1e-6 else effective_share(bounded, 1.0),
        "rollout_is_seq_mean": mean(by_sequence, 1.0),
        "rollout_is_seq_std": sample_std(by_sequence),
        "chi2_token": square - 1.0 if tokens else 0.0,
        "chi2_seq": mean((bounded_exp(aggregate("sequence", unit)) ** 2 for unit in responses), 1.0) - 1.0,
        "seq_log_ratio_mean": mean(aggregate("sequence", unit) for unit in responses),
    }
    extremes = [exp_at_most(value) for value in logs] if whole else by_sequence
    largest, smallest = max(extremes, default=1.0), min(extremes, default=1.0)
    found |= {"rollout_is_seq_max": largest, "rollout_is_seq_min": smallest}
    found["rollout_is_seq_max_deviation"] = max(largest - 1.0, 1.0 - smallest)
    if level not in ("token", "none"):
        found["rollout_is_ratio_unit_mean"] = mean(by_unit, 1.0)
        found["rollout_is_ratio_unit_std"] = population_std(by_unit)
        found["rollout_is_ratio_unit_eff_sample_size"] = effective_share(by_unit, 1.0)
    return found


def unit_ratios(level: str, responses: list[list[Token]]) -> tuple[list[float], list[float]]:
    """Of each token its unit's ratio; of each sequence the mean of that over its tokens."""
    of_token = {}
    for unit, over in zip(units_of(level, responses), summed(level, responses), strict=True):
        of_token |= dict.fromkeys(map(id, unit), bounded_exp(aggregate(level, over)))
    rows = [[of_token[id(token)] for token in tokens] for tokens in responses]
    return [value for row in rows for value in row], [mean(row) for row in rows]


def outside(responses: list[list[Token]], config: mp.MismatchConfig, near: Near) -> Metrics:
    """Shares outside the bounds that act: the weights', else the first ratio criterion's at its level, else a TIS bound
    that was given; none where there is none."""
    levels = {"token": "token", "sequence_sum": "sequence", "sequence_mean": "geometric"}
    plainly = [c for c in config.rs.criteria if c.condition == "any" and config.rs.policy == "auto"]
    ratio_criteria = [c for c in plainly if is_ratio(c) and c.aggregate in levels]
    if weighted(config) and not weighs_by_sign(config):
        level, (lower, upper) = config.tis.level, tis_bounds(config)
    elif ratio_criteria:
        level, (lower, upper) = levels[ratio_criteria[0].aggregate], criterion_bounds(ratio_criteria[0], config)
    elif not weighted(config) and {"upper_bound", "lower_bound"} & config.tis.model_fields_set:
        level, (lower, upper) = "token", tis_bounds(config)
    else:
        return {}

    def shares(values: list[float], compare: Callable[[float], float]) -> tuple[float, float]:
        high, low = compare(upper), compare(lower) if lower > 0 else -math.inf
        for value in values:
            near(value, high)
            near(value, low)
        return mean(value > high for value in values), mean(value < low for value in values)

    units = summed(level, responses)
    high, low = shares([aggregate(level, unit) for unit in units], math.log)
    if weighted(config) and not weighs_by_sign(config):  # of each unit its own
        pairs = [(aggregate(level, unit), *log_bounds(config, len(unit))) for unit in units]
        high, low = mean(value > above for value, _, above in pairs), mean(value < below for value, below, _ in pairs)
    seq_high, seq_low = high, low
    if level in ("token", "turn", "prefix"):
        seq_high, seq_low = shares(unit_ratios(level, responses)[1], lambda bound: bound)
    return {
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        "rollout_is_seq_fraction_high": seq_high,
        "rollout_is_seq_fraction_low": seq_low,
    }


def weights(responses: list[list[Token]], tokens: list[Token], answer: Answer, config: mp.MismatchConfig) -> Metrics:
    """The weights really used; what is rejected counts as 0 in effective sample sizes."""
    used = [token.weight for token in tokens if token.keep]
    by_token = [token.weight * token.keep for token in tokens]
    by_sequence = [mean(token.weight * token.keep for token in unit) for unit in responses]
    found: Metrics = {
        "rollout_is_weight_after_mean": mean(used),
        "rollout_is_weight_after_std": population_std(used),
        "rollout_is_weight_after_max": max(used, default=0.0),
        "rollout_is_weight_after_eff_sample_size": effective_share(by_token, 0.0),
        "rollout_is_weight_after_seq_eff_sample_size": effective_share(by_sequence, 0.0),
    }
    if config.tis.level == "turn":
        units = units_of("turn", responses)
        by_turn = [mean(token.weight * token.keep for token in unit) for unit in units]
        found["rollout_is_weight_after_unit_eff_sample_size"] = effective_share(by_turn, 0.0)
    if config.tis.batch_normalize:
        found["rollout_is_batch_norm_factor"] = answer.factor
    return found


def rejection(responses: list[list[Token]], tokens: list[Token], answer: Answer, config: mp.MismatchConfig) -> Metrics:
    masked = mean(token.masked for token in tokens)
    some = mean(any(token.masked for token in unit) for unit in responses)
    veto = config.rs.veto_threshold
    found: Metrics = {
        "rollout_is_masked_fraction": masked,
        "rollout_rs_masked_fraction": masked,
        "rollout_is_seq_masked_fraction": some,
        "rollout_rs_seq_masked_fraction": some,
        "rollout_is_veto_fraction": len(answer.judged.vetoed) / max(len(responses), 1),
        "rollout_is_catastrophic_token_fraction": mean(
            veto is not None and token.judged_log_ratio < math.log(veto) for token in tokens
        ),
        "accepted_token_fraction": mean(token.keep for token in tokens),
        "accepted_seq_fraction": mean(any(token.keep for token in unit) for unit in responses),
        "all_rejected": float(bool(tokens) and not any(token.keep for token in tokens)),
    }
    if config.rs.max_staleness is not None:
        found["rollout_rs_staleness_masked_fraction"] = mean(token.stale for token in tokens)
    for criterion in config.rs.criteria:
        name = criterion_name(criterion)
        verdicts = answer.judged.verdicts[name]
        gone = sum(len(verdict.tokens) for verdict in verdicts if verdict.high or verdict.low)
        found[f"rollout_rs_{name}_masked_fraction"] = gone / max(len(tokens), 1)
        if criterion.aggregate != "token":
            share = mean(verdict.high or verdict.low for verdict in verdicts)
            found[f"rollout_rs_{name}_seq_masked_fraction"] = share
    return found


def criteria(answer: Answer, config: mp.MismatchConfig) -> Metrics:
    """What each criterion compared, over its own units; a ratio as ρ."""
    found: Metrics = {}
    for criterion in config.rs.criteria:
        name = criterion_name(criterion)
        verdicts: list[Verdict] = answer.judged.verdicts[name]
        values = [verdict.value for verdict in verdicts]
        largest, smallest = max(values, default=0.0), min(values, default=0.0)
        ratio = is_ratio(criterion)
        found |= {
            f"rollout_rs_{name}_fraction_high": mean(verdict.high for verdict in verdicts),
            f"rollout_rs_{name}_fraction_low": mean(verdict.low for verdict in verdicts),
            f"rollout_rs_{name}_mean": mean(map(bounded_exp, values), 1.0) if ratio else mean(values),
            f"rollout_rs_{name}_max": exp_at_most(largest) if ratio else largest,
            f"rollout_rs_{name}_min": exp_at_most(smallest) if ratio else smallest,
        }
    return found


def distance(responses: list[list[Token]], tokens: list[Token]) -> Metrics:
    """How far apart the two policies are. A perplexity is at most e^20."""
    train = [-mean(token.train for token in unit) for unit in responses]
    rollout = [-mean(token.rollout for token in unit) for unit in responses]
    difference = [-mean(token.log_ratio for token in unit) for unit in responses]
    bounded = [clamp(token.log_ratio, -20.0, 20.0) for token in tokens]
    return {
        "kl": -mean(token.log_ratio for token in tokens),
        "k3_kl": mean(math.expm1(value) - value for value in bounded),
        "training_ppl": mean(exp_at_most(value) for value in train),
        "training_log_ppl": mean(train),
        "rollout_ppl": mean(exp_at_most(value) for value in rollout),
        "rollout_log_ppl": mean(rollout),
        "ppl_ratio": exp_at_most(mean(difference)),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(map(abs, difference)),
        "log_ppl_diff_max": max(difference, default=0.0),
        "log_ppl_diff_min": min(difference, default=0.0),
    }


def the_loss(tokens: list[Token], answer: Answer, config: mp.MismatchConfig, batch: list[Response]) -> Metrics:
    found: Metrics = {"pg_loss": answer.loss_sum / max(answer.denominator, 1)}
    if objective_of(config) != "reinforce":
        sides = {side: mean(side in token.clipped for token in tokens) for side in ("high", "low", "dual")}
        found |= {
            "pg_clipfrac": sides["high"] + sides["low"],
            "pg_clipfrac_lower": sides["dual"],
            "pg_clipfrac_high_side": sides["high"],
            "pg_clipfrac_low_side": sides["low"],
            "ppo_kl": mean(-clamp(token.log_r, -20.0, 20.0) for token in tokens),
        }
    if all(response.entropy is not None for response in batch):
        found["entropy"] = mean((token.entropy or 0.0) * token.enters for token in tokens)
    if all(response.ref is not None for response in batch):
        found["ref_kl"] = mean(token.kl for token in tokens)
    if config.terms.rollout_kl_coef:
        found["rollout_kl"] = mean(token.distance for token in tokens)
    return found


# Full: quantiles, drift and acceptance by bucket ----------------------------------------------------------------------


def bucket(value: float, edges: Sequence[float], near: Near) -> str:
    for edge in edges:
        if isinstance(value, float):
            near(value, edge)
    if value < edges[0]:
        return f"below_{edges[0]:g}"
    for low, high in pairwise(edges):
        if low <= value < high:
            return f"{low:g}_to_{high:g}"
    return f"from_{edges[-1]:g}"


def full(responses: list[list[Token]], tokens: list[Token], batch: list[Response], near: Near) -> Metrics:
    gaps = [abs(math.exp(token.train) - math.exp(token.rollout)) for token in tokens]
    found: Metrics = {"probability_difference_mean": mean(gaps), "probability_difference_max": max(gaps, default=0.0)}
    ordered = sorted(token.log_ratio for token in tokens)
    for name, share in QUANTILES.items():
        index = max(math.ceil(share * len(ordered) - 1e-9), 1) - 1
        found[f"rollout_is_ratio_{name}"] = Quantile(clamp(ordered[index], -20.0, 20.0)) if ordered else 1.0

    def drift(kind: str, label: Callable[[Token], str], absolute: bool = True) -> None:
        groups: dict[str, list[Token]] = {}
        for token in tokens:
            groups.setdefault(label(token), []).append(token)
        for place, group in groups.items():
            found[f"log_ratio_by_{kind}_{place}"] = mean(token.log_ratio for token in group)
            if absolute:
                found[f"log_ratio_abs_by_{kind}_{place}"] = mean(abs(token.log_ratio) for token in group)

    drift("position", lambda token: bucket(token.position, (64, 256, 1024, 4096, 16384), near))
    drift("probability", lambda token: bucket(math.exp(token.rollout), (0.01, 0.1, 0.5, 0.9, 0.99), near))
    if all(response.versions is not None for response in batch):
        drift("version", lambda token: f"lag_{max(TRAINER_VERSION - (token.version or 0), 0)}", absolute=False)

    signs: dict[str, list[bool]] = {}
    for token in tokens:
        sign = "zero" if token.advantage == 0 else "positive" if token.advantage > 0 else "negative"
        signs.setdefault(sign, []).append(token.keep)
    found |= {f"accepted_by_advantage_{sign}": mean(kept) for sign, kept in signs.items()}
    lengths: dict[str, list[bool]] = {}
    for unit in responses:
        place = bucket(len(unit), (256, 1024, 4096, 16384), near)
        lengths.setdefault(place, []).append(any(token.keep for token in unit))
    found |= {f"accepted_by_length_{place}": mean(kept) for place, kept in lengths.items()}
    return found
