"""The correction over two and four processes equals one process: the whole product of settings, in float64.

Over layouts × micro-batches × algorithms × levels × modes × rejection × batch normalisation × denominators: loss,
gradient with respect to every log-prob, weights, accepted tokens, denominators and every metric, to 1e-12 relative.
One launch per number of processes runs it all; `distributed/correction_worker.py` is what each rank does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import pytest

from tests.distributed.correction_cases import (
    AGGREGATIONS,
    DENOMINATORS,
    LAYOUTS,
    LEVELS,
    MODES,
    PRODUCT,
    Layout,
    Outcome,
    Settings,
    make,
    one_process,
)
from tests.distributed.correction_check import TOLERANCE, differences, distances, together
from tests.distributed.correction_worker import Case, Part, run
from tests.distributed.launch import launch

MICRO_BATCHES = (1, 4)


@cache
def product_of(world_size: int) -> dict[tuple[str, int], list[list[Part]]]:
    """Every rank's parts of every step, by layout and micro-batches."""
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size]
    cases = [
        Case("product", layout, count, tuple(PRODUCT), always_prepares=False)
        for layout in layouts
        for count in MICRO_BATCHES
    ]
    results = launch(run, cases, world_size, timeout=120)
    return {(case.layout.name, case.micro_batches): ranks for case, ranks in zip(cases, results, strict=True)}


@cache
def expected(settings: Settings) -> Outcome:
    return one_process(make("product"), settings.config())


def total_differences(parts: Sequence[Part], whole: Outcome) -> list[str]:
    """What `Step.prepare` knows before the step is what the step then has, and it knows what it can."""
    config = parts[0].settings.config()
    if not parts[0].totals:
        return []
    tokens, original, accepted, factor = parts[0].totals
    found = [] if len({tuple(part.totals) for part in parts}) == 1 else ["totals of the ranks"]
    known_before = not config.use_rollout_log_probs
    found += [] if tokens == whole.metrics["rollout_corr/tokens"] else ["tokens known before"]
    found += [] if original == whole.denominators[1] else ["original known before"]
    if config.denominator == "accepted":
        late = config.rejects and (config.use_rollout_log_probs or parts[0].settings.rejects_on_current_policy)
        wanted = None if late else whole.denominators[0]
        found += [] if accepted == wanted else ["accepted known before"]
    mean = whole.metrics.get("rollout_corr/rollout_is_batch_norm_factor", 1.0)
    found += [] if (factor is not None) == known_before else ["weight mean known before"]
    found += [] if factor is None or math.isclose(factor, mean, rel_tol=TOLERANCE) else ["weight mean"]
    deferred = mean if config.use_rollout_log_probs else 1.0
    found += [] if math.isclose(parts[0].factor, deferred, rel_tol=TOLERANCE) else ["deferred factor"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_equals_one_process(layout: Layout, micro_batches: int):
    """Catches: sequences counted once a CP rank, a reduction over the wrong group, statistics or weights of a part of
    a sequence, a mean over one micro-batch, a token's number at another token's place.
    """
    wrong = {}
    for parts in zip(*product_of(layout.world_size)[layout.name, micro_batches], strict=True):
        whole = expected(parts[0].settings)
        found = differences(together(parts), whole) + total_differences(parts, whole)
        if found:
            wrong[parts[0].settings] = found
    assert not wrong, "\n".join(f"{settings}: {found}" for settings, found in list(wrong.items())[:5])


def test_nothing_of_the_product_is_missing():
    """Counted in what the ranks returned, not in what was asked for."""
    both = (False, True)
    plain = itertools.product(((0, "-"), (1, "-"), (3, "none")), both, DENOMINATORS, AGGREGATIONS)
    wanted = {(algorithm, level, "-", rejects, False, *rest) for (algorithm, level), rejects, *rest in plain}
    weighted = set(itertools.product((2, 3), LEVELS, MODES, both, both, DENOMINATORS))
    assert len(LAYOUTS) == 7
    for layout, count in itertools.product(LAYOUTS, MICRO_BATCHES):
        ran = [parts[0].settings for parts in zip(*product_of(layout.world_size)[layout.name, count], strict=True)]
        points = {(s.algorithm, s.level, s.mode, s.rejects, s.normalizes, s.denominator, s.aggregation) for s in ran}
        assert {point for point in points if point[2] == "-"} == wanted
        assert {point[:-1] for point in points if point[2] != "-"} == weighted
        for chosen in itertools.product((2, 3), both, DENOMINATORS):
            met = {p[6] for p in points if (p[0], p[4], p[5]) == chosen and p[2] != "-"}
            assert met == set(AGGREGATIONS), f"{chosen} meets only {met}"


def test_every_decision_goes_both_ways():
    """Otherwise the product would show nothing about it."""
    for settings in PRODUCT:
        metrics = expected(settings).metrics
        accepted = metrics["rollout_corr/accepted_token_fraction"]
        assert 0.0 < accepted < 1.0 if settings.rejects or settings.mode == "mask" else accepted == 1.0, settings
        names = [criterion.name for criterion in settings.config().criteria]
        for name in [*names, "staleness"] if settings.limits_staleness else names:
            assert 0.0 < metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"] < 1.0, name
        if settings.algorithm in (2, 3) and settings.level != "none":
            factor = metrics.get("rollout_corr/rollout_is_batch_norm_factor", 1.0)
            assert (abs(factor - 1.0) > 1e-3) == settings.normalizes
            if not settings.config().weighs_by_sign:
                assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] > 0.0
    signed = {(settings.level, settings.config().tis.mode) for settings in PRODUCT if settings.config().weighs_by_sign}
    assert signed >= {("sequence", "gamma"), *((level, "clip") for level in LEVELS)}
    both_sides = [settings for settings in PRODUCT if settings.objective in ("ppo", "gspo", "cispo", "gmpo")]
    for settings in both_sides:
        for side in ("high", "low"):
            assert 0.0 < expected(settings).metrics[f"rollout_corr/pg_clipfrac_{side}_side"] < 1.0, settings
    for algorithm in (0, 1, 2):
        assert {s.objective for s in both_sides if s.algorithm == algorithm} == {"ppo", "gspo", "cispo", "gmpo"}
    metrics = expected(PRODUCT[0]).metrics
    for bucket in (
        "log_ratio_by_position_below_64",
        "log_ratio_by_position_256_to_1024",
        "accepted_by_length_256_to_1024",
    ):
        assert f"rollout_corr/{bucket}" in metrics


def test_data_keep_away_from_every_bound():
    """Nearer than 1e-6 to a bound or to a bin's edge, another order of summation might decide otherwise."""
    nearest = {settings: min(distances("product", settings)) for settings in PRODUCT}
    settings, distance = min(nearest.items(), key=lambda item: item[1])
    assert distance > 1e-6, f"{distance:g} under {settings}"
