"""The package against a second, plain implementation (`plain*.py`): random configurations × random batches, float64.

Draws that come within 1e-6 of a bound or a bucket's edge are drawn again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import pytest
import torch

import mismatch_plugin as mp
from tests.differential_draws import EVERYTHING, draw_batch, draw_config, features, given_fields, pack
from tests.plain import Response, loss_reads_rollout, stopping
from tests.plain_loss import Answer, plain
from tests.plain_metrics import Metrics, Quantile, plain_metrics

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

PREFIX = "rollout_corr/"
BIN = 2 * math.asinh(20.0 / 1e-4) / 2048
"""Width of a histogram bin in asinh(l / 1e-4)."""


@dataclass
class Case:
    """A configuration, a batch, and what the plain implementation says of them."""

    config: mp.MismatchConfig
    batch: list[Response]
    answer: Answer
    metrics: Metrics


def cases(
    seed: int,
    number: int,
    wanted: Callable[[mp.MismatchConfig], bool] = lambda config: True,
    refused: Counter[str] | None = None,
) -> Iterator[Case]:
    """As many as asked for whose configuration is accepted and wanted, and where nothing is within 1e-6 of a bound.
    refused: counts the others, by reason."""
    rng, refused = Random(seed), Counter() if refused is None else refused
    while number:
        config = draw_config(rng)
        if config is None or not wanted(config):
            refused["configuration"] += config is None
            continue
        distances = [math.inf]

        def near(value: float, bound: float, distances: list[float] = distances) -> None:
            distances.append(abs(value - bound))

        batch = draw_batch(rng, config)
        answer = plain(batch, config, near=near)
        metrics = plain_metrics(batch, answer, config, near)
        if min(distances) > 1e-6:
            number -= 1
            yield Case(config, batch, answer, metrics)
        refused["near a bound"] += min(distances) <= 1e-6


# Comparison -----------------------------------------------------------------------------------------------------------


def close(found: float, expected: float, what: object, rel: float = 1e-9, floor: float = 1e-11) -> None:
    assert math.isclose(found, expected, rel_tol=rel, abs_tol=floor), f"{what}: {found!r}, plain says {expected!r}"


def close_rows(found: torch.Tensor, expected: Sequence[Sequence[float]], what: str) -> None:
    flat = [value for row in expected for value in row]
    assert len(found) == len(flat), what
    for index, (one, other) in enumerate(zip(found.tolist(), flat, strict=True)):
        close(one, other, f"{what} of token {index}")


def close_metrics(found: dict[str, float], expected: Metrics) -> None:
    assert found.keys() == {PREFIX + name for name in expected}
    for name, value in expected.items():
        mine = found[PREFIX + name]
        assert math.isfinite(mine), name
        if isinstance(value, Quantile):
            places = [math.asinh(x / 1e-4) for x in (math.log(mine), value.log_ratio)]
            assert abs(places[0] - places[1]) <= BIN * (1 + 1e-6), name
        elif name.endswith("_std"):  # a root of what two moments leave: eight digits of the values that deviate
            size = expected[name.replace("_std", "_mean")]
            assert isinstance(size, float)
            close(mine, value, name, 1e-7, 1e-7 * max(1.0, size))
        elif name == "rollout_is_ratio_unit_eff_sample_size":  # ρ − 1 is what is summed: e^-20 keeps 8 digits of ρ
            close(mine, value, name, 1e-9 + 1e-15 / found[f"{PREFIX}rollout_is_ratio_unit_mean"])
        else:
            close(mine, value, name)


def close_factor(found: torch.Tensor, case: Case) -> None:
    """A dry run without metrics divides nothing by it and shows it nowhere."""
    if not (case.config.dry_run and case.config.metrics == "off"):
        close(float(found), case.answer.factor, "batch factor")


@dataclass
class Outcome:
    result: mp.PolicyLoss
    loss: float
    gradient: torch.Tensor
    entropy_gradient: torch.Tensor


def run(
    batch: list[Response],
    config: mp.MismatchConfig,
    given: set[str],
    factor: torch.Tensor | float | None = None,
    divisors: tuple[int, int] | None = None,
) -> Outcome:
    """factor, divisors: the step's mean weight and denominators (policy term, other terms), where this is a part."""
    packed, log_probs, entropy = pack(batch, given)
    result = mp.policy_loss(log_probs, packed, config, batch_factor=factor)
    loss = result.loss
    if divisors is not None:
        loss = result.loss_sum / max(divisors[0], 1) + sum(result.terms.values()) / max(divisors[1], 1)
    gradients = torch.autograd.grad(loss, [log_probs, entropy], allow_unused=True)
    filled = [torch.zeros_like(entropy) if gradient is None else gradient for gradient in gradients]
    return Outcome(result, float(loss.detach()), filled[0], filled[1])


def agree(case: Case) -> None:
    config, answer = case.config, case.answer
    outcome = run(case.batch, config, given_fields(case.batch))
    result = outcome.result
    close_rows(result.correction.weights, answer.weights, "weight")
    close_rows(result.correction.keep, answer.keep, "keep")
    assert int(result.denominator) == answer.denominator
    assert int(result.terms_denominator) == answer.terms_denominator
    close(float(result.loss_sum.detach()), answer.loss_sum, "loss_sum")
    assert result.terms.keys() == answer.terms.keys()
    for name, term in result.terms.items():
        close(float(term.detach()), answer.terms[name], name)
    close(outcome.loss, answer.loss, "loss")
    close_rows(outcome.gradient, answer.gradient, "gradient")
    if "entropy" in given_fields(case.batch):
        close_rows(outcome.entropy_gradient, answer.entropy_gradient, "entropy gradient")
    close_factor(result.statistics.batch_factor(), case)
    close_metrics(result.statistics.metrics(), case.metrics)


def check(
    seed: int,
    number: int,
    one: Callable[[Case, Random], None],
    wanted: Callable[[mp.MismatchConfig], bool] = lambda config: True,
) -> None:
    """One check on a number of cases; what fails is shown with its configuration and batch."""
    rng = Random(seed + 1000)
    for case in cases(seed, number, wanted):
        try:
            one(case, rng)
        except AssertionError as error:  # noqa: PERF203
            raise AssertionError(f"{error}\n{case.config!r}\n{case.batch!r}") from error


# One batch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_loss_gradient_weights_and_metrics_agree(seed: int) -> None:
    check(seed, 140, lambda case, rng: agree(case))


def test_draws_reach_everything() -> None:
    """Of 1600 accepted draws: a draw that is always refused would test nothing."""
    refused, seen = Counter[str](), Counter[str]()
    for case in cases(0, 1600, refused=refused):
        seen.update(features(case.config, case.batch, case.answer))
    assert refused["configuration"] >= 50  # blind enough to be refused at times
    assert {name: seen[name] for name in EVERYTHING if seen[name] < 5} == {}


def test_what_stops_under_the_policy_error_is_what_plain_says() -> None:
    """A training log-prob that is invalid always, one of the rollout where the loss reads it; the first are named."""
    rng, seen = Random(60), set[tuple[str, bool]]()
    for _ in range(4000):
        config = draw_config(rng)
        if config is None or config.rollout_log_prob_policy != "error":
            continue
        batch = draw_batch(rng, config, stops=True)
        expected = stopping(batch, config)
        try:
            run(batch, config, given_fields(batch)).result.statistics.metrics()
            said = ""
        except mp.InvalidLogProbError as error:
            said = str(error)
        named = re.findall(r"(rollout|training) log-prob of sequence (\d+), .*?kind (\w+)\)", said)
        assert bool(named) == bool(expected), f"{said!r}, plain says {expected}\n{config!r}\n{batch!r}"
        for side, response, kind in named:
            assert side == ("training" if kind.startswith("train") else "rollout")
            kinds = {found for (n, _), found in expected.items() if n == int(response)}
            # What was compared with a π_old that bypass does not use, or with none, may be said of another kind, or not
            # be said yet.
            elsewhere = config.use_rollout_log_probs or "old" not in given_fields(batch)
            assert kind in kinds or (kinds and elsewhere), f"{said}, plain says {expected}\n{batch!r}"
        seen.update({(kind, loss_reads_rollout(config)) for kind in expected.values()})
    training, rollout = ("train_not_finite", "train_positive"), ("nan", "positive", "floor", "zero_fill")
    assert {*seen} == {*product(training, (True, False)), *product(rollout, (True,))}


# Splits ---------------------------------------------------------------------------------------------------------------


def merged(parts: Sequence[mp.Statistics]) -> mp.Statistics:
    total = parts[0]
    for part in parts[1:]:
        total = total.merge(part)
    return total


def whole_step(config: mp.MismatchConfig) -> bool:
    """The invariant of splits excepts the scope of a single micro-batch."""
    return not (config.tis.batch_normalize and config.tis.batch_normalize_scope == "micro_batch")


def splits(case: Case, rng: Random) -> None:
    """Every response in a micro-batch and a place at random; some stay empty. The factor is of a pass before, whose
    parts are merged in another order."""
    config, given, answer = case.config, given_fields(case.batch), case.answer
    parts: list[list[int]] = [[] for _ in range(rng.randrange(1, 5))]
    for n in rng.sample(range(len(case.batch)), len(case.batch)):
        rng.choice(parts).append(n)
    micro = [[case.batch[n] for n in part] for part in parts]
    factor = merged([run(batch, config, given, 1.0).result.statistics for batch in reversed(micro)]).batch_factor()
    close_factor(factor, case)

    outcomes = [run(batch, config, given, factor, (answer.denominator, answer.terms_denominator)) for batch in micro]
    assert sum(int(outcome.result.denominator) for outcome in outcomes) == answer.denominator
    assert sum(int(outcome.result.terms_denominator) for outcome in outcomes) == answer.terms_denominator
    close(sum(outcome.loss for outcome in outcomes), answer.loss, "loss")
    for part, outcome in zip(parts, outcomes, strict=True):
        correction = outcome.result.correction
        close_rows(correction.weights, [answer.weights[n] for n in part], "weight")
        close_rows(correction.keep, [answer.keep[n] for n in part], "keep")
        close_rows(outcome.gradient, [answer.gradient[n] for n in part], "gradient")
        if "entropy" in given:
            close_rows(outcome.entropy_gradient, [answer.entropy_gradient[n] for n in part], "entropy gradient")
    close_metrics(merged([outcome.result.statistics for outcome in outcomes]).metrics(), case.metrics)


@pytest.mark.parametrize("seed", [20, 21])
def test_a_step_cut_into_micro_batches_is_the_step(seed: int) -> None:
    check(seed, 100, splits, wanted=whole_step)
