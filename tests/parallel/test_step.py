"""A step over two and four processes equals one process, in float64: loss, gradient with respect to every log-prob,
weights, accepted tokens, denominators and every metric, to 1e-12 relative; and the collectives that it makes.

A third of the product (algorithms × levels × modes × rejection × batch normalisation × denominators) runs, each setting
in one layout; all of it in every layout with MISMATCH_FULL=1. One launch per number of processes runs all of it;
`distributed/correction_worker.py` is what each rank does. Nothing may hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from tests.distributed.correction_cases import LAYOUTS, PRODUCT, Layout, Outcome, Settings, make, one_process
from tests.distributed.correction_worker import Call, Case, Part, run, run_counted
from tests.distributed.launch import launch
from tests.full import FULL

THIN = 1 if FULL else 3
ODD = (
    "first_chunk",  # no response token on most ranks of a context-parallel group
    "untrained_replica",  # no response token on a whole replica
    "rejected",  # everything everywhere
    "single",  # sequences of one token: the other ranks have none of it
    "empty",  # a micro-batch without sequences, on one replica or on all
    "nothing",  # all of them
)
SOME = tuple(PRODUCT[::11])  # 11 meets every value of every setting
COUNTED = ("product", "single", "untrained_replica", "rejected", "empty", "nothing")


def dealt(settings: Sequence[Settings], batch: str, count: int = 2, *changes: Any, **more: Any) -> Iterator[Case]:
    """Each of the settings in one layout, or in all of them."""
    for number, layout in enumerate(LAYOUTS):
        mine = tuple(settings) if FULL else tuple(settings[(number + count) % len(LAYOUTS) :: len(LAYOUTS)])
        yield Case(batch, layout, count, mine, changes, **more)


def all_jobs() -> Iterator[tuple[str, Callable[[Case], Any], Case]]:
    """(name, what each rank does, case)."""
    own_mean = [settings for settings in PRODUCT if settings.normalizes][::THIN]
    known = tuple(settings for settings in PRODUCT[:: 5 * THIN] if settings.algorithm in (0, 2))
    for count in (1, 4):
        settings = PRODUCT if FULL else PRODUCT[count - 1 :: 2 * THIN]
        yield from (("product", run, case) for case in dealt(settings, "product", count, always_prepares=False))
    for number, batch in enumerate(ODD):
        yield from (("odd", run, case) for case in dealt(SOME[number % THIN :: THIN], batch))
    for number, policy in enumerate(("neutral", "drop-token", "drop-sequence")):
        change = ("rollout_log_prob_policy", policy)
        yield from (("policy", run, case) for case in dealt(SOME[number % THIN :: THIN], "bad_tokens", 2, change))
    cases = dealt(own_mean, "product", 1, ("scope", "micro_batch"))
    yield from (("own mean", run, case) for case in cases if case.layout.dp == 1)
    for number, layout in enumerate((LAYOUTS[0], LAYOUTS[3])):
        yield "absent", run, Case("on_policy", layout, 2, known[number::2])
    tried = tuple(settings for settings in SOME if settings.rejects or settings.weighted)
    yield "dry run", run, Case("product", LAYOUTS[3], 2, tried[::THIN], (("dry_run", True),))
    for batch in COUNTED:
        yield from (("counted", run_counted, case) for case in dealt(PRODUCT[::23], batch))


def work(job: tuple[str, Callable[[Case], Any], Case]) -> Any:
    return job[1](job[2])


@cache
def launched(world_size: int) -> list[tuple[str, Case, list[Any]]]:
    jobs = [job for job in all_jobs() if job[2].layout.world_size == world_size]
    results = launch(work, jobs, world_size, timeout=120)
    return [(name, case, ranks) for (name, _, case), ranks in zip(jobs, results, strict=True)]


def results(name: str) -> list[tuple[Case, list[Any]]]:
    """Every case of that name, with what each rank returned."""
    return [(case, ranks) for size in (2, 4) for found, case, ranks in launched(size) if found == name]


def steps(name: str) -> list[tuple[Case, tuple[Any, ...]]]:
    """Every step of every case: the parts of the ranks."""
    return [(case, parts) for case, ranks in results(name) for parts in zip(*ranks, strict=True)]


@cache
def expected(batch: str, settings: Settings, changes: tuple[Any, ...] = ()) -> Outcome:
    return one_process(make(batch), settings.config(**dict(changes)))


# Equal to one process -------------------------------------------------------------------------------------------------

TOLERANCE = 1e-12


def together(parts: Sequence[Part]) -> Outcome:
    """What the ranks of a step have, put back into the whole by position; each token lies on one rank."""
    places = torch.cat([part.places for part in parts])
    assert torch.equal(places.sort().values, torch.arange(places.numel())), "a token is missing, or is there twice"
    tokens = torch.empty(4, places.numel(), dtype=torch.float64)
    tokens[:, places] = torch.cat([part.tokens for part in parts], 1)
    weights, keep, gradient, terms_gradient = tokens.unbind(0)
    loss, terms, denominator, terms_denominator = (sum(values) for values in zip(*(p.sums for p in parts), strict=True))
    factor = parts[0].factor
    assert len({(part.factor, part.digest) for part in parts}) == 1, "the ranks differ in what a step shares"
    divisor, terms_divisor = max(denominator, 1.0), max(terms_denominator, 1.0)
    assert parts[0].metrics is not None
    return Outcome(
        loss / divisor / factor + terms / terms_divisor,
        (int(denominator), int(terms_denominator)),
        gradient / divisor / factor + terms_gradient / terms_divisor,
        weights / factor,
        keep,
        parts[0].metrics,
    )


def differences(actual: Outcome, whole: Outcome) -> list[str]:
    """Names of what is not equal."""
    found = [] if math.isclose(actual.loss, whole.loss, rel_tol=TOLERANCE) else ["loss"]
    found += [] if actual.denominators == whole.denominators else ["denominators"]
    for name in ("gradient", "weights", "keep"):
        one, other = getattr(actual, name), getattr(whole, name)
        rounding = 1e-15 * float(other.abs().max()) if other.numel() else 0.0  # where two terms' gradients cancel
        found += [] if torch.allclose(one, other, rtol=TOLERANCE, atol=rounding) else [name]
    assert actual.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        # A deviation is the root of a difference: its square is what has digits, of those of the mean's square.
        power = 2 if name.endswith("_std") else 1
        size = max(1.0, whole.metrics.get(name.replace("_std", "_mean"), 0.0)) if power == 2 else 1.0
        if not math.isclose(actual.metrics[name] ** power, value**power, rel_tol=TOLERANCE, abs_tol=1e-15 * size**2):
            found.append(f"{name}: {actual.metrics[name]!r} instead of {value!r}")
    return found


def total_differences(parts: Sequence[Part], whole: Outcome) -> list[str]:
    """What `Step.prepare` knows before the step is what the step then has, and it knows what it can."""
    config = parts[0].settings.config()
    if not parts[0].totals:
        return []
    tokens, original, accepted, factor = parts[0].totals
    late = config.rejects and (config.use_rollout_log_probs or parts[0].settings.rejects_on_current_policy)
    mean = whole.metrics.get("rollout_corr/rollout_is_batch_norm_factor", 1.0)
    known = {
        "totals of the ranks": len({tuple(part.totals) for part in parts}) == 1,
        "tokens": tokens == whole.metrics["rollout_corr/tokens"],
        "original": original == whole.denominators[1],
        "accepted": config.denominator != "accepted" or accepted == (None if late else whole.denominators[0]),
        "weight mean known": (factor is None) == config.use_rollout_log_probs,
        "weight mean": factor is None or math.isclose(factor, mean, rel_tol=TOLERANCE),
        "deferred": math.isclose(parts[0].factor, mean if config.use_rollout_log_probs else 1, rel_tol=TOLERANCE),
    }
    return [name for name, right in known.items() if not right]


def test_every_setting_equals_one_process() -> None:
    """Catches: sequences counted once a CP rank, a reduction over the wrong group, statistics or weights of a part of
    a sequence, a mean over one micro-batch, a token's number at another token's place.
    """
    ran = steps("product")
    assert {case.layout for case, _ in ran} == {*LAYOUTS} and len(ran) >= len(PRODUCT) // THIN
    for case, parts in ran:
        whole = expected("product", parts[0].settings)
        found = differences(together(parts), whole) + total_differences(parts, whole)
        assert not found, f"{case}, {parts[0].settings}: {found}"


def test_odd_ranks_equal_one_process() -> None:
    rejecting = 0
    for case, parts in steps("odd"):
        settings, actual = parts[0].settings, together(parts)
        found = differences(actual, expected(case.batch, settings))
        assert not found, f"{case}, {settings}: {found}"
        if case.batch == "rejected" and (settings.rejects or settings.mode == "mask"):  # a zero loss, no NaN
            rejecting += 1
            assert sum(part.sums[0] for part in parts) == 0.0 and not any(part.tokens[2].any() for part in parts)
            assert not (actual.keep * actual.weights).any() and actual.gradient.isfinite().all()
            assert actual.metrics["rollout_corr/all_rejected"] == 1.0
            assert actual.denominators[0] == (0 if settings.denominator == "accepted" else actual.denominators[1])
            assert parts[0].factor == 1.0 or settings.mode != "mask", "there is no weight to average"
    assert rejecting > 2


def test_normalisation_over_a_micro_batch() -> None:
    """The mean runs over the micro-batch's whole sequences, on all context-parallel ranks."""
    for case, parts in steps("own mean"):
        assert parts[0].factor == 1.0, "nothing is left to divide by at the end of the step"
        found = differences(together(parts), expected("product", parts[0].settings, case.changes))
        assert not found, (case, parts[0].settings, found)


def test_old_log_probs_absent_and_dry_runs() -> None:
    """The weights of algorithm 2 are known only after the step. A dry run changes neither the denominators known before
    the step nor the gradients after it."""
    for case, parts in steps("absent"):
        settings, whole = parts[0].settings, expected(case.batch, parts[0].settings)
        assert not differences(together(parts), whole), f"{case}, {settings}"
        _, original, accepted, factor = parts[0].totals
        assert original == whole.denominators[1]
        assert factor is None and (accepted is None) == (settings.rejects or settings.mode == "mask")
        assert settings.algorithm != 2 or (parts[0].factor != 1.0) == settings.normalizes
    for case, parts in steps("dry run"):
        settings, actual = parts[0].settings, together(parts)
        assert not differences(actual, expected("product", settings, case.changes)), settings
        assert parts[0].factor == 1.0 and bool((actual.weights == actual.keep).all()), settings
        tokens, original, accepted, factor = parts[0].totals
        assert (accepted, factor) in ((original, 1.0), (original, None)), settings
        assert actual.denominators == (original, original) and tokens == actual.keep.sum()


def test_invalid_log_probs_under_every_policy() -> None:
    """A sequence is dropped on every rank that has a part of it, though only one of them sees the bad token."""
    for case, parts in steps("policy"):
        actual = together(parts)
        found = differences(actual, expected("bad_tokens", parts[0].settings, case.changes))
        assert not found, f"{case}, {parts[0].settings}: {found}"
        assert {part.invalid for part in parts} == {4.0}
        for kind in ("nan", "floor", "positive", "zero_fill"):
            assert actual.metrics[f"rollout_corr/invalid_{kind}"] == 1.0
        if ("rollout_log_prob_policy", "drop-sequence") in case.changes:
            kept = [row.any().item() for row in actual.keep.split(make("bad_tokens").lengths)]
            assert not any(kept[number] for number in (0, 2, 4, 5))


# Collectives ----------------------------------------------------------------------------------------------------------


def test_exactly_these_collectives() -> None:
    """Catches a MAX nobody needs, a reduction over data inside a micro-batch, one that autograd differentiates through,
    a number of them that depends on what a rank holds, and a dtype in which counts are not exact.
    """
    for case, ranks in results("counted"):
        for rank, of_rank in enumerate(ranks):
            for settings, counts in zip(case.settings, of_rank, strict=True):
                assert_collectives(case.layout, settings, rank, counts)


def assert_collectives(layout: Layout, settings: Settings, rank: int, counts: dict[str, Any]) -> None:
    config = settings.config()
    # What is kept or weighed is known from π_old; elsewhere the masks alone are counted.
    judged = (config.normalizes_step or config.rejects_by_log_probs) and settings.algorithm in (0, 2)
    reused = judged and not settings.rejects_on_current_policy and settings.objective not in ("gspo", "gmpo")
    maxima = sum(criterion.startswith("sequence_max") for criterion in settings.criteria)
    first = rank // layout.cp * layout.cp
    sharing, everyone = tuple(range(first, first + layout.cp)), tuple(range(layout.world_size))

    def over_data(operation: str, size: int) -> Call:
        return Call(operation, everyone, (size,), torch.float64)

    def sharing_sequences(operation: str, *shape: int) -> list[Call]:
        """Over the rank's context-parallel group. No sequences, nothing to reduce: on all of its ranks alike."""
        return [Call(operation, sharing, shape, torch.float64)] if layout.cp > 1 and math.prod(shape) else []

    masks = []
    for n, calls in zip(counts["sequences"], counts["losses"], strict=True):
        masks += sharing_sequences("SUM", n * (1 + settings.limits_staleness))
        second = calls[-1].shape[0] if calls and settings.level == "prefix" else 0
        expected = calls[:1] + sharing_sequences("MAX", maxima, n) + sharing_sequences("SUM", second, n)
        assert calls == expected and len(calls[:1]) == (layout.cp > 1 and n > 0), settings
        for call in calls[:1]:  # turns and chunks are summed, too, where there are any
            assert call == Call("SUM", sharing, call.shape, torch.float64)
            assert settings.level in ("turn", "prefix") or call.shape[1:] == (n,)
    assert counts["backward"] == []
    agreement = sharing_sequences("MAX", 9) + [over_data("MAX", 9)] * (layout.dp > 1)
    assert counts["start"] == agreement, "over CP, and over DP × CP where that is more"
    sums, extremes = counts["state"]
    assert counts["finish"] == [over_data("SUM", sums), over_data("MAX", extremes)]
    losses = [call for calls in counts["losses"] for call in calls]
    assert [call for calls in counts["again"] for call in calls] == ([] if reused else losses), "reduced twice"
    *before, total = counts["prepare"]
    assert total == over_data("SUM", 6)
    if reused or not judged:
        assert before == (losses if reused else masks)
    else:  # as the loss, whose SUM has the columns of metrics and objective, too
        assert sum(call.bytes for call in before) <= sum(call.bytes for call in losses)
