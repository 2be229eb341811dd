"""The correction a second time: plain Python, one loop a formula, from the design page's semantics.

It shares no code with the package and reads nothing of a configuration but its fields. `near` is told every value that
a decision compares, and its bound, so that a test can keep away from ties, where two orders of summation may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import mismatch_plugin as mp

SAFETY = 20.0
TRAINER_VERSION = 95
"""Of the weights that train, in every batch here."""


@dataclass
class Response:
    """One sequence, a number a token; under a zero of the mask anything. None: the field is not given at all."""

    mask: list[int]
    current: list[float]
    advantages: list[float]
    rollout: list[float | None] | None
    old: list[float] | None
    ref: list[float] | None
    entropy: list[float] | None
    positions: list[int] | None
    versions: list[int] | None
    turns: list[int] | None = None


@dataclass
class Token:
    """A token that trains. train is 0 where it is invalid; rollout is train where either is, so that the ratio is 1.

    judged, against: the same for what criteria and veto judge.
    """

    place: int
    current: float
    old: float
    advantage: float
    train: float
    rollout: float
    kind: str
    ref: float | None
    entropy: float | None
    position: int
    version: int | None
    judged: float
    against: float
    stale: bool
    turn: int
    weight: float = 1.0
    keep: bool = True
    masked: bool = False  # by mask mode or a criterion
    mode_rejects: bool = False
    loss: float = 0.0
    slope: float = 0.0  # derivative of the loss with respect to log π_θ
    kl: float = 0.0
    kl_slope: float = 0.0
    log_r: float = 0.0  # log of the ratio that the objective clips
    log_mean: float = 0.0  # gmpo: the mean of those of its response, clipped
    distance: float = 0.0  # penalty on the distance to the sampler
    distance_slope: float = 0.0
    clipped: set[str] = field(default_factory=set)

    @property
    def log_ratio(self) -> float:
        return self.train - self.rollout

    @property
    def judged_log_ratio(self) -> float:
        """The log-ratio of the policy that is judged."""
        return self.judged - self.against

    @property
    def enters(self) -> bool:
        """Without a training log-prob it has no loss and no terms; what they are divided by counts it all the same."""
        return not self.kind.startswith("train")


@dataclass
class Verdict:
    """What one criterion found in one unit."""

    value: float
    high: bool
    low: bool
    tokens: list[Token]


@dataclass
class Judged:
    """All responses with their decisions: `weight` (normalised) and `keep` as they would be, also in a dry run.

    trained: what the loss runs over. responses: what is measured, the same but for tokens that are left out.
    """

    trained: list[list[Token]]
    responses: list[list[Token]]
    verdicts: dict[str, list[Verdict]]
    vetoed: list[list[Token]]
    factor: float  # the batch's own mean weight


Near = Callable[[float, float], None]


def ignore(value: float, bound: float) -> None:
    """For callers whose batches are known to be away from every bound."""


def algorithm(config: mp.MismatchConfig) -> int:
    return (1 if config.use_rollout_log_probs else 0) + (2 if config.use_tis else 0)


def weighted(config: mp.MismatchConfig) -> bool:
    return config.use_tis and config.tis.level != "none"


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def bounded_exp(log_value: float) -> float:
    return math.exp(clamp(log_value, -SAFETY, SAFETY))


# Section 3.7: which log-probs are invalid, and where that matters -----------------------------------------------------


def corrects(config: mp.MismatchConfig) -> bool:
    """A weight, or something that rejects: mask mode is a weight, and to drop is to reject."""
    drops = config.rollout_log_prob_policy.startswith("drop")
    return weighted(config) or drops or bool(config.rs.criteria) or config.rs.veto_threshold is not None


def loss_reads_rollout(config: mp.MismatchConfig) -> bool:
    """As an anchor and in the penalty always; what is corrected only where it is applied."""
    penalised = config.terms.rollout_kl_coef > 0
    return algorithm(config) == 1 or penalised or (corrects(config) and not config.dry_run)


def leaves_out(config: mp.MismatchConfig) -> bool:
    """Invalid log-probs are not measured where no loss reads them, but a dry run under another policy than error shows
    what that policy would do."""
    shows = config.dry_run and corrects(config) and config.rollout_log_prob_policy != "error"
    return not loss_reads_rollout(config) and not shows


def stopping(batch: list[Response], config: mp.MismatchConfig) -> dict[tuple[int, int], str]:
    """(response, place): kind of what is an error: no training log-prob, or none of the rollout where it is read."""
    if config.rollout_log_prob_policy != "error":
        return {}
    return {
        (n, token.place): token.kind
        for n, response in enumerate(batch)
        for token in read_tokens(response, config, ignore)
        if not token.enters or (token.kind != "sound" and loss_reads_rollout(config))
    }


def kind_of(rollout: float | None, train: float, near: Near) -> str:
    if math.isnan(train) or train == -math.inf:
        return "train_not_finite"
    if train > 0.1:
        return "train_positive"
    if rollout is None or math.isnan(rollout):
        return "nan"
    if rollout > 0.1:
        return "positive"
    if rollout <= -5000.0:
        return "floor"
    if rollout == 0.0:
        near(train, -3.0)
        if train < -3.0:
            return "zero_fill"
    return "sound"


def read_tokens(response: Response, config: mp.MismatchConfig, near: Near) -> list[Token]:
    """The training policy is π_old in algorithms 0 and 2 (π_θ where it is absent), π_θ in 1 and 3."""
    tokens = []
    turns = response.turns or runs(response.mask)
    for place, trains in enumerate(response.mask):
        if not trains:
            continue
        current = response.current[place]
        old = current if response.old is None else response.old[place]
        train = current if config.use_rollout_log_probs else old
        given = train if response.rollout is None else response.rollout[place]
        kind = "sound" if response.rollout is None else kind_of(given, train, near)
        train = 0.0 if kind.startswith("train") else train
        rollout = given if kind == "sound" and given is not None else train
        judged, against = train, rollout
        if config.rs.policy == "current":
            valid = kind == "sound" and -math.inf < current <= 0.1
            judged, against = (current, rollout) if valid else (0.0, 0.0)
        version = None if response.versions is None else response.versions[place]
        limit = config.rs.max_staleness
        tokens.append(
            Token(
                place=place,
                current=current,
                old=old,
                advantage=response.advantages[place],
                train=train,
                rollout=rollout,
                kind=kind,
                ref=None if response.ref is None else response.ref[place],
                entropy=None if response.entropy is None else response.entropy[place],
                position=place if response.positions is None else response.positions[place],
                version=version,
                judged=judged,
                against=against,
                stale=limit is not None and version is not None and TRAINER_VERSION - version > limit,
                turn=turns[place],
            )
        )
    return tokens


# Sections 3.2 and 3.3: levels, modes ----------------------------------------------------------------------------------


def runs(mask: list[int]) -> list[int]:
    """The number of the last run of tokens that train which has begun at each place."""
    begun, numbers = 0, []
    for place, trains in enumerate(mask):
        begun += bool(trains and not (place and mask[place - 1]))
        numbers.append(begun)
    return numbers


def units_of(level: str, responses: list[list[Token]]) -> list[list[Token]]:
    """Tokens that share one aggregated ratio. What has no token that trains is no unit."""
    if level in ("token", "none", "prefix"):
        return [[token] for tokens in responses for token in tokens]
    if level == "turn":
        numbers = [sorted({token.turn for token in tokens}) for tokens in responses]
        pairs = zip(responses, numbers, strict=True)
        return [[t for t in tokens if t.turn == number] for tokens, mine in pairs for number in mine]
    return [tokens for tokens in responses if tokens]


def summed(level: str, responses: list[list[Token]]) -> list[list[Token]]:
    """Over which tokens each of those units' ratios is aggregated: its own, or all up to and with it."""
    if level == "prefix":
        return [tokens[: n + 1] for tokens in responses for n in range(len(tokens))]
    return units_of(level, responses)


def aggregate(level: str, unit: list[Token]) -> float:
    """The aggregated log-ratio, unclamped."""
    total = math.fsum(token.log_ratio for token in unit)
    return total / len(unit) if level == "geometric" else total


def tis_bounds(config: mp.MismatchConfig) -> tuple[float, float]:
    """(lo, hi): hi = inf means e^20; lo is 1/hi where it is absent, and never above hi."""
    upper = min(config.tis.upper_bound, math.exp(SAFETY))
    lower = min(1.0 / upper, upper) if config.tis.lower_bound is None else config.tis.lower_bound
    return lower, upper


def log_bounds(config: mp.MismatchConfig, n: int) -> tuple[float, float]:
    """Of a product of n tokens; −inf where there is no lower one."""
    lower, upper = tis_bounds(config)
    low, high = math.log(lower) if lower > 0 else -math.inf, math.log(upper)
    if config.tis.bound_growth and config.tis.level in ("turn", "sequence", "prefix"):
        scale = n**config.tis.bound_growth
        low, high = low if low == -math.inf else max(scale * low, -SAFETY), min(scale * high, SAFETY)
    return low, high


def safe_log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def weighs_by_sign(config: mp.MismatchConfig) -> bool:
    own = (config.tis.lower_bound_positive, config.tis.upper_bound_positive)
    return weighted(config) and (config.tis.mode == "gamma" or own != (None, None))


def not_negative(unit: list[Token], near: Near) -> bool:
    """Whether the advantages of a unit add up to 0 or more."""
    total = math.fsum(token.advantage for token in unit)
    if any(token.advantage != 0 for token in unit):
        near(total, 0.0)
    return total >= 0


def give_weights(responses: list[list[Token]], config: mp.MismatchConfig, near: Near) -> list[list[Token]]:
    """Bounded weights before batch normalisation. Returns the units."""
    units, over = units_of(config.tis.level, responses), summed(config.tis.level, responses)
    for unit, tokens in zip(units, over, strict=True):
        log_ratio = aggregate(config.tis.level, tokens)
        positive = weighs_by_sign(config) and not_negative(unit, near)
        if config.tis.mode == "gamma":
            bounded, (k, scale) = clamp(log_ratio, -SAFETY, SAFETY), (2.0, 3.0) if positive else (3.0, 2.0)
            for token in unit:
                token.weight = math.exp(scale) * math.exp(k * bounded - scale * math.exp(bounded))
            continue
        log_lower, log_upper = log_bounds(config, len(tokens))
        if positive:
            of_positive = [config.tis.lower_bound_positive, config.tis.upper_bound_positive]
            log_upper = log_upper if of_positive[1] is None else min(safe_log(of_positive[1]), SAFETY)
            log_lower = min(log_lower, log_upper) if of_positive[0] is None else safe_log(of_positive[0])
        near(log_ratio, log_upper)
        near(log_ratio, log_lower)
        high, low = log_ratio > log_upper, log_ratio < log_lower
        lower, upper = math.exp(log_lower), math.exp(log_upper)
        ratio = bounded_exp(log_ratio)
        if config.tis.mode == "truncate":
            weight = min(ratio, upper)
        elif config.tis.mode == "clip":
            weight = min(max(ratio, lower), upper)
        else:
            weight = 0.0 if high or low else ratio
        for token in unit:
            token.weight = weight
            token.mode_rejects = config.tis.mode == "mask" and (high or low)
    return units


# Section 3.5: batch normalisation -------------------------------------------------------------------------------------


def mean_weight(units: list[list[Token]]) -> float:
    """Over units; under mask over those inside the bounds; 1 where there is nothing to divide by."""
    inside = [unit[0].weight for unit in units if not unit[0].mode_rejects]
    mean = math.fsum(inside) / len(inside) if inside else 0.0
    return mean if mean > 0 else 1.0


# Section 3.4: rejection -----------------------------------------------------------------------------------------------


def statistic(name: str, token: Token) -> float:
    l, p, q = token.judged_log_ratio, math.exp(token.judged), math.exp(token.against)  # noqa: E741
    if name in ("ratio", "k1"):
        return l
    if name == "k2":
        return l * l / 2.0
    if name == "k3":
        bounded = clamp(l, -SAFETY, SAFETY)
        return math.expm1(bounded) - bounded
    if name == "tv":
        return abs(p - q)
    train, rollout = clamp(p, 1e-6, 1.0 - 1e-6), clamp(q, 1e-6, 1.0 - 1e-6)
    return {"binary_kl": bernoulli_kl(rollout, train), "binary_kl_reverse": bernoulli_kl(train, rollout)}[name]


def bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1.0 - p) * math.log((1.0 - p) / (1.0 - q))


def is_ratio(criterion: mp.Criterion) -> bool:
    return criterion.statistic in ("ratio", "k1")


def criterion_name(criterion: mp.Criterion) -> str:
    condition = "" if criterion.condition == "any" else f"_{criterion.condition}"
    return f"{criterion.aggregate}_{'ratio' if is_ratio(criterion) else criterion.statistic}{condition}"


def criterion_bounds(criterion: mp.Criterion, config: mp.MismatchConfig) -> tuple[float, float]:
    """(lower, upper) as written: absent upper is the TIS bound; absent lower is 1/upper for a ratio; 0 and inf off."""
    upper = config.tis.upper_bound if criterion.upper_bound is None else criterion.upper_bound
    lower = criterion.lower_bound
    if lower is None:
        lower = 1.0 / upper if is_ratio(criterion) else 0.0
    return lower, upper


def holds(criterion: mp.Criterion, unit: list[Token], near: Near) -> bool:
    """Whether the unit is judged at all."""
    if criterion.condition == "away":
        (token,) = unit
        return token.judged_log_ratio > 0 if token.advantage > 0 else token.judged_log_ratio < 0
    total = math.fsum(token.advantage for token in unit)
    if criterion.condition == "negative" and any(token.advantage != 0 for token in unit):
        near(total, 0.0)
    return criterion.condition == "any" or total < 0


def judge(criterion: mp.Criterion, unit: list[Token], config: mp.MismatchConfig, near: Near) -> Verdict:
    values = [statistic(criterion.statistic, token) for token in unit]
    if criterion.aggregate == "sequence_max":
        value = max(values)
    else:
        value = math.fsum(values) / (len(unit) if criterion.aggregate == "sequence_mean" else 1)
    lower, upper = criterion_bounds(criterion, config)
    high = low = False
    if upper < math.inf:
        limit = math.log(upper) if is_ratio(criterion) else upper
        near(value, limit)
        high = value > limit
    if lower > 0:
        limit = math.log(lower) if is_ratio(criterion) else lower
        near(value, limit)
        low = value < limit
    judged = holds(criterion, unit, near)
    return Verdict(value, high and judged, low and judged, unit)


def budget_bounds(criterion: mp.Criterion, values: list[float]) -> tuple[float, float]:
    """Between what the bound of a budget lies after a step of these values: bins are 2.4 % wide (of 1e-8 below that),
    and the mean takes each value at its bin's upper edge."""
    wide, least, values = 1.024, 3e-10, sorted(values)
    own = criterion.upper_bound or 0.0

    def kept(mean: float) -> int:
        """How many of the smallest stay: the most whose mean is no more, at least one."""
        return max(n for n in range(1, len(values) + 1) if n == 1 or math.fsum(values[:n]) / n <= mean)

    if criterion.share is not None:
        stays = len(values) - math.floor(criterion.share * len(values) + 1e-9)
        return max(own, values[stays - 1]), max(own, values[stays - 1] * wide + least)
    assert criterion.mean is not None
    lowest, most = kept(criterion.mean / wide - least), kept(criterion.mean)
    after = values[most] if most < len(values) else math.inf
    return max(own, values[lowest - 1] / wide - least), max(own, after)


def decide(batch: list[Response], config: mp.MismatchConfig, factor: float | None, near: Near) -> Judged:
    """Every decision, each on the original mask, less what is left out; a rejection changes no weight."""
    trained = [read_tokens(response, config, near) for response in batch]
    out = leaves_out(config)
    responses = [[token for token in tokens if token.kind == "sound" or not out] for tokens in trained]
    everything = [token for tokens in responses for token in tokens]
    own = 1.0
    if weighted(config):
        units = give_weights(responses, config, near)
        if config.tis.batch_normalize:
            own = mean_weight(units)
            for token in everything:
                token.weight /= own if factor is None else factor
    verdicts: dict[str, list[Verdict]] = {}
    for criterion in config.rs.criteria:
        level = "token" if criterion.aggregate == "token" else "sequence"
        found = [judge(criterion, unit, config, near) for unit in units_of(level, responses)]
        verdicts[criterion_name(criterion)] = found
        for verdict in found:
            if verdict.high or verdict.low:
                for token in verdict.tokens:
                    token.masked = True
    vetoed = []
    if config.rs.veto_threshold is not None:
        for tokens in responses:
            for token in tokens:
                near(token.judged_log_ratio, math.log(config.rs.veto_threshold))
            if any(token.judged_log_ratio < math.log(config.rs.veto_threshold) for token in tokens):
                vetoed.append(tokens)
    for tokens in responses:
        invalid = any(token.kind != "sound" for token in tokens)
        gone = any(tokens is other for other in vetoed)
        gone = gone or (config.rollout_log_prob_policy == "drop-sequence" and invalid)
        for token in tokens:
            token.masked = token.masked or token.mode_rejects or token.stale
            dropped = config.rollout_log_prob_policy == "drop-token" and token.kind != "sound"
            token.keep = not (token.masked or dropped or gone)
    for tokens in trained:
        for token in tokens:
            token.keep = token.keep and not token.stale
    return Judged(trained, responses, verdicts, vetoed, own)
