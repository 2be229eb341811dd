"""Which weights sampled the tokens: by labels, by server, and by how the gap is spread over servers and versions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import INITIAL_VERSION, version_number
from mismatch_plugin.diagnose.batch import Batch, Outcome, logit_gap, mann_whitney, rank_correlation
from mismatch_plugin.diagnose.detectors.checkpoints import OLD_FIX, find_start, versions_of
from mismatch_plugin.diagnose.detectors.served import BEHIND_FIX, CACHE_FIX, few, weights_agree
from mismatch_plugin.diagnose.detectors.size import UNRELATED
from mismatch_plugin.diagnose.normal import LOGIT_GAPS
from mismatch_plugin.diagnose.result import Finding, Item, Undecided, called, place_of

FLOOR, PRECISION = LOGIT_GAPS["float32"], LOGIT_GAPS["16 bits"]
"""Logit gaps below FLOOR count as that: two servers in float32 do not differ by a ratio of rounding. PRECISION: above
it bf16 does not explain them."""
MIN_TOKENS, HALVED, MIN_SAMPLES = 6, 16, 8
"""Of one sample, to judge it, and to judge both of its halves; samples of one server or worker."""
LARGEST_P, PAIRS_FURTHER, RATIO, CLEAR_RATIO = 1e-4, 0.75, 1.25, 2.0
"""Of Mann-Whitney tests after Holm; their effect size (share of pairs in which the server's sample is further off); how
far the medians must be apart (one small update on top of bf16 noise measured 1.35), and from where on it is likely."""
SPLIT_RATIO, SEPARATION, SMALLEST_SHARE, SPLIT_GAP = 2.5, 4.5, 0.1, 0.05
"""Where no worker is recorded: ratio of the two medians, their distance in standard deviations inside (a normal
distribution cut in two has 2.7, a uniform one 3.5), the share of the smaller population, and its median logit gap (of
servers in bf16 at most .038)."""
MIN_VERSIONS, GROWTH, CLEAR_GROWTH, GROWTH_Z_SCORE = 3, 1.25, 3.0, 5.0
"""Without a reference: versions needed, ratio of the last ones' gap to the first one's, and standard errors of the rank
correlation of a sample's gap with its version. The mildest of five real updates gave 1.6 and 7."""

RECORD_FIX = (
    "Record which server and worker sampled each response (`server`, `dp_rank`), or compare "
    'POST /weights_checker {"action": "checksum"} over all of them.'
)
INSIDE_FIX = (
    "Weights were updated while responses ran: pause with mode retract, or correct token by token and drop tokens of "
    "versions that are too old; accept it if it is meant."
)
BETWEEN_FIX = "Update all servers before sampling a batch, or accept it where an asynchronous trainer means it."
LATE_FIX = "Update the servers before each rollout batch and tell them the version, or drop samples that are older."
AHEAD_FIX = "The trainer's log-probs are of older weights than the server's: recompute them after the update."
INITIAL_FIX = (
    "Send the present weights to {which}: read what the update returned, and the server's log for a restart. Where "
    "updates do arrive, send their weight_version with them."
)
Scored = list[tuple[Sample, float]]
"""Samples, each with its `sample_gap` over the median of its like: those of one temperature and one pair of weight
versions."""


def find_stale_server(batch: Batch) -> Outcome:
    """By server and worker where both are recorded, else by server."""
    scored = score(batch)
    keys: tuple[Callable[[Sample], Hashable], ...] = (lambda one: one.worker, lambda one: one.worker[0])
    for key in keys:
        groups: dict[Hashable, Scored] = defaultdict(list)
        for sample, relative in scored:
            if (name := key(sample)) not in (None, (None, None)):
                groups[name].append((sample, relative))
        judged = {name: items for name, items in groups.items() if len(items) >= MIN_SAMPLES}
        if (found := _furthest(judged)) is None:
            continue
        odd, others, told = found
        samples = sorted((sample for name in odd for sample, _ in groups[name]), key=lambda sample: sample.index)
        names, clear = ", ".join(map(called, odd)), _is_clear(told)
        evidence = (
            f"Responses of {names} ({len(samples)} samples) lie {told['ratio']:.2g} times as far from the training "
            f"side as those of {', '.join(map(called, others[:4]))} (median logit gap {told['far']:.3g} against "
            f"{told['near']:.3g}; in {told['area']:.0%} of pairs, p = {told['p']:.1g}), under the same versions and "
            f"temperature: other weights there{'' if clear else ', or another precision or kernel'}."
        )
        about = {"of_samples": sum(map(len, judged.values())), "statistics": told}
        about["confidence"] = "likely" if clear else "possible"
        fix = BEHIND_FIX.format(which=names)
        return [batch.finding("stale_server", "rollout", evidence, fix, samples, **about)], batch
    return [], batch


def _furthest(groups: Mapping[Hashable, Scored]) -> tuple[list[Hashable], list[Hashable], dict[str, float]] | None:
    """(groups that lie further off than all that are nearer by RATIO, those nearer than each of them, figures)."""
    middle = {name: float(np.median([gap for _, gap in items])) for name, items in groups.items()}

    def nearer(bar: float) -> list[Hashable]:
        return [name for name in groups if RATIO * middle[name] <= bar]

    def gaps(names: list[Hashable]) -> Floats:
        return np.array([gap for name in names for _, gap in groups[name]])

    tests = {name: mann_whitney(gaps([name]), gaps(others)) for name in groups if (others := nearer(middle[name]))}
    odd: list[Hashable] = []
    pairs = len(groups) * (len(groups) - 1) // 2  # which are nearer was known after looking
    for rank, (name, (area, p)) in enumerate(sorted(tests.items(), key=lambda test: test[1][1])):
        if p * (pairs - rank) > LARGEST_P:
            break
        if area >= PAIRS_FURTHER:
            odd.append(name)
    if not odd:
        return None
    others = nearer(min(middle[name] for name in odd))
    near, far = float(np.median(gaps(others))), float(np.median(gaps(odd)))
    area, p = min(tests[name][0] for name in odd), max(tests[name][1] for name in odd)
    return odd, others, {"ratio": far / near, "far": far, "near": near, "area": area, "p": p}


def _is_clear(told: Mapping[str, float]) -> bool:
    return told["far"] >= CLEAR_RATIO * told["near"] and told["far"] >= PRECISION


def find_cached_further(batch: Batch) -> Outcome:
    """Without the plugin's word: samples with more than half of the prompt out of the cache (a template is in all of
    them), lie clearly further off than the others of one version and temperature."""
    groups: dict[Hashable, Scored] = {True: [], False: []}
    for sample, gap in score(batch):
        if sample.cached_tokens is not None:
            groups[2 * sample.cached_tokens > len(sample.prompt_ids)].append((sample, gap))
    found = _furthest(groups) if min(map(len, groups.values())) >= MIN_SAMPLES else None
    if found is None or found[0] != [True] or not _is_clear(found[2]):
        return [], batch
    told, samples = found[2], [sample for sample, _ in groups[True]]
    evidence = (
        f"{len(samples)} samples with most of the prompt cached lie {told['ratio']:.2g} times as far from the training "
        f"side as {len(groups[False])} others, under the same versions and temperature (in {told['area']:.0%} of "
        f"pairs, p = {told['p']:.1g}): as if older weights had filled the cache."
    )
    about = {"of_samples": sum(map(len, groups.values())), "statistics": told, "confidence": "possible"}
    fix = f"{CACHE_FIX} The SGLang plugin of this package tells which weights made each cached token."
    return [batch.finding("stale_cache", "rollout", evidence, fix, samples, **about)], batch


def find_split(batch: Batch) -> Outcome:
    """Two clear populations where no record names a worker, among the responses of one version."""
    scored = [item for item in score(batch) if len({span.version for span in item[0].weight_versions}) < 2]
    scored.sort(key=lambda item: item[1])
    if len(scored) < 2 * MIN_SAMPLES or any(sample.worker[1] is not None for sample, _ in scored):
        return [], batch
    logs = np.log([gap for _, gap in scored])
    least = max(math.ceil(SMALLEST_SHARE * len(logs)), MIN_SAMPLES // 2)
    cuts = range(least, len(logs) - least + 1)
    cut = min(cuts, key=lambda cut: cut * logs[:cut].var() + (len(logs) - cut) * logs[cut:].var())
    near, far = float(np.exp(np.median(logs[:cut]))), float(np.exp(np.median(logs[cut:])))
    spread = math.sqrt((logs[:cut].var() + logs[cut:].var()) / 2)
    apart = float(logs[cut:].mean() - logs[:cut].mean()) / max(spread, 0.05)
    if far < SPLIT_GAP or far < SPLIT_RATIO * near or apart < SEPARATION:
        return [], batch
    samples = sorted((sample for sample, _ in scored[cut:]), key=lambda sample: sample.index)
    tokens = batch.tokens.where(np.isin(batch.tokens.sample, [sample.index for sample in samples]))
    if rank_correlation(tokens.rollout, tokens.training) < UNRELATED:
        return [], batch  # values of other samples or texts, not of other weights: their size is a fault by itself
    evidence = (
        f"The samples are of two kinds: {len(samples)} of {len(scored)} lie {far / near:.1f} times as far from the "
        f"training side as the rest (median logit gap {far:.3g} against {near:.3g}), {apart:.1f} standard deviations "
        f"apart: as if one of several servers or workers had other weights."
    )
    told = {"ratio": far / near, "separation": apart, "far": far, "near": near}
    about = {"of_samples": len(scored), "statistics": told, "confidence": "possible"}
    return [batch.finding("stale_server", "rollout", evidence, RECORD_FIX, samples, **about)], batch


@lru_cache(maxsize=1)  # several detectors ask for the same batch
def score(batch: Batch) -> Scored:
    """The samples with enough tokens."""
    like: dict[Hashable, Scored] = defaultdict(list)
    for sample in batch:
        if (gap := sample_gap(sample)) is not None:
            versions = frozenset(span.version for span in sample.weight_versions)
            like[sample.temperature, versions, sample.trainer_version].append((sample, gap))
    level = float(np.median([gap for members in like.values() for _, gap in members])) if like else 1.0
    scored: Scored = []
    for members in like.values():
        middle = float(np.median([gap for _, gap in members]))
        scored += [(sample, gap / middle * level) for sample, gap in members]
    return scored


def sample_gap(sample: Sample) -> float | None:
    """Median |logit gap|, of the half of the response where it is smaller: other weights show in both halves, other ids
    or another prompt in one. None for too few tokens."""
    gap = logit_gap(sample, sample.rollout_log_probs, sample.train_log_probs) if sample.comparable else np.zeros(0)
    gap = np.abs(gap[np.isfinite(gap)])
    halves: list[Floats] = np.array_split(gap, 2) if len(gap) >= HALVED else [gap]
    if len(gap) < MIN_TOKENS:
        return None
    return max(min(float(np.median(half)) for half in halves), FLOOR)


def find_not_updated(batch: Batch) -> Outcome:
    """With the start's log-probs by them, else by how the gap grows with the version. Nothing where the fingerprints of
    both sides are equal."""
    if weights_agree(batch):
        return [], batch
    growing = _growing(batch)
    if all(sample.ref_log_probs is None for sample in batch):
        return [*growing], batch
    sure = {"confidence": "likely"} if any(item.confidence == "likely" for item in growing) else {}
    return [i.model_copy(update=sure) if i.fault == "weights_not_updated" else i for i in find_start(batch)], batch


def _growing(batch: Batch) -> list[Finding]:
    """The labels move, each training side is of its own version, and the gap grows from the first version on."""
    by_lag: dict[int, list[tuple[int, float, Sample]]] = defaultdict(list)
    for sample in batch:
        ours, theirs = versions_of(sample)
        gap = sample_gap(sample)
        if ours is not None and gap is not None:
            by_lag[0 if theirs is None else theirs - ours].append((ours, gap, sample))
    if batch.from_checkpoint or not by_lag:
        return []  # one checkpoint scored all versions: older ones are further from it in a sound run
    rows = max(by_lag.values(), key=len)
    versions = sorted({version for version, _, _ in rows})
    if len(versions) < MIN_VERSIONS or len(rows) < MIN_SAMPLES * MIN_VERSIONS:
        return []
    middle = [float(np.median([gap for version, gap, _ in rows if version == one])) for one in versions]
    ranks = rank_correlation(np.array([row[0] for row in rows], float), np.array([row[1] for row in rows]))
    deviations = ranks * math.sqrt((len(rows) - 2) / max(1 - ranks**2, 1e-9))
    third = max(len(middle) // 3, 1)
    last, early = float(np.mean(middle[-third:])), float(np.mean(middle[1 : 1 + third]))
    growth = last / middle[0]
    if not deviations > GROWTH_Z_SCORE or growth < GROWTH:
        return []
    clear = growth >= CLEAR_GROWTH and middle[0] < PRECISION and early >= GROWTH * middle[0]
    evidence = (
        f"The labels move from version {versions[0]} to {versions[-1]}, and the gap to the trainer grows with the "
        f"distance from the first ({deviations:.0f} standard errors; median logit gap {middle[0]:.3g} of the first, "
        f"{last:.3g} of the last): the servers take the new name, not the new weights"
        f"{'' if clear else ', or the two engines move apart for another reason'}."
    )
    told = {"growth": growth, "standard_errors": deviations, "first": middle[0], "last": last}
    about = {"of_samples": len(rows), "statistics": told, "confidence": "likely" if clear else "possible"}
    fix = OLD_FIX + ("" if clear else " --reference-checkpoint decides it.")
    samples = [sample for version, _, sample in rows if version != versions[0]]
    return [batch.finding("weights_not_updated", "rollout", evidence, fix, samples, **about)]


def find_versions(batch: Batch) -> Outcome:
    """By the labels of tokens that train. Staleness counts the numbers at the end of their names."""
    labelled = [(sample, versions) for sample in batch if (versions := _by_version(sample))]
    return [*_initial(batch, labelled), *_mixed(batch, labelled), *_stale(batch, labelled)], batch


Labelled = Sequence[tuple[Sample, dict[str, Bools]]]
"""Samples, and version → [n] which of its tokens train."""


def _by_version(sample: Sample) -> dict[str, Bools]:
    found: dict[str, Bools] = {}
    for span in sample.weight_versions:
        inside = sample.mask.copy()
        inside[: span.start] = inside[span.end :] = False
        if inside.any():
            found[span.version] = found[span.version] | inside if span.version in found else inside
    return found


def _initial(batch: Batch, labelled: Labelled) -> list[Item]:
    """Tokens of the weights that a server started with, while the trainer is further than is allowed. Updates that
    named no version leave the label, too."""
    old: list[Sample] = []
    for sample, versions in labelled:
        ahead, update = version_number(sample.trainer_version), sample.served and sample.served.update
        updated = update is not None and update.changed
        if ahead is not None and ahead > batch.max_staleness and INITIAL_VERSION in versions and not updated:
            old.append(sample)
    if not old:
        return []
    names = few(sample.worker for sample in old if sample.worker != (None, None))
    evidence = (
        f"{len(old)} of {len(batch)} samples{f', of {names},' if names else ''} have the weight version "
        f"{INITIAL_VERSION!r}, while the trainer is at {old[0].trainer_version!r}. {INITIAL_VERSION!r} is SGLang's "
        f"name for the weights that it started with: the server was never updated, or restarted."
    )
    place = place_of(old[0], 0, rollout=INITIAL_VERSION, training=old[0].trainer_version)
    fix = INITIAL_FIX.format(which=names or "the servers")
    return [batch.finding("weights_not_updated", "rollout", evidence, fix, old, first=place)]


def _mixed(batch: Batch, labelled: Labelled) -> list[Item]:
    """Versions that differ inside a response or between responses of one training step (what the dump calls a step, and
    the trainer's version, which is another one in each); steps may differ."""
    seen: dict[Hashable, set[str]] = defaultdict(set)
    for sample, versions in labelled:
        seen[sample.step, sample.trainer_version].update(versions)
    mixed = [pair for pair in labelled if len(seen[pair[0].step, pair[0].trainer_version]) > 1]
    if not mixed:
        return []
    counts: Counter[str] = Counter()
    for _, versions in mixed:
        counts.update({version: int(where.sum()) for version, where in versions.items()})
    most = counts.most_common(5)
    inside = [(sample, versions) for sample, versions in mixed if len(versions) > 1]
    if inside:
        samples, fix, where = [sample for sample, _ in inside], INSIDE_FIX, "change version inside"
        first, versions = inside[0]
        position = sorted(int(np.argmax(tokens)) for tokens in versions.values())[1]
    else:
        samples, fix, where = [sample for sample, _ in mixed], BETWEEN_FIX, "differ, none changes version inside"
        first, position = next(sample for sample, versions in mixed if {*versions} - {most[0][0]}), 0
    evidence = (
        f"Tokens come from {len(counts)} weight versions ({', '.join(f'{name!r} {count}' for name, count in most)} "
        f"tokens): {len(samples)} of {len(batch)} responses {where}."
    )
    told = {"versions": len(counts), "responses_mixed": len(inside)}
    about = {"tokens": counts.total() - most[0][1], "first": place_of(first, position), "statistics": told}
    return [batch.finding("mixed_versions", "rollout", evidence, fix, samples, **about)]


def _stale(batch: Batch, labelled: Labelled) -> list[Item]:
    late: list[tuple[int, str, Sample, Bools]] = []  # steps behind, version, sample, which of its tokens
    unreadable: dict[str, None] = {}
    for sample, versions in labelled:
        trainer = sample.trainer_version
        for version, where in versions.items():
            if trainer is None or version in (trainer, INITIAL_VERSION):  # the latter: `_initial`
                continue
            ahead, number = version_number(trainer), version_number(version)
            if ahead is None or number is None:
                unreadable |= dict.fromkeys(name for name in (version, trainer) if version_number(name) is None)
            elif not 0 <= ahead - number <= batch.max_staleness:
                late.append((ahead - number, version, sample, where))
    if not late:
        names = ", ".join(map(repr, [*unreadable][:3]))
        reason = f"no number ends the name of weight version {names}, so that steps cannot be counted"
        return [Undecided(faults=("staleness",), reason=reason)] if unreadable else []
    steps, version, sample, where = max(late, key=lambda item: abs(item[0]))
    count = sum(int(where.sum()) for *_, where in late)
    samples = [batch.samples[index] for index in sorted({sample.index for _, _, sample, _ in late})]
    distance = f"up to {steps} steps behind" if steps > 0 else f"{-steps} steps ahead of"
    evidence = (
        f"{count} tokens of {len(samples)} of {len(batch)} samples were sampled by weights {distance} the "
        f"trainer's version {sample.trainer_version!r}; {batch.max_staleness} allowed."
    )
    mean = float(sum(behind * where.sum() for behind, *_, where in late) / count)
    about = {
        "tokens": count,
        "first": place_of(sample, int(np.argmax(where)), rollout=version, training=sample.trainer_version),
        "statistics": {"largest": steps, "mean": mean, "allowed": batch.max_staleness},
    }
    return [batch.finding("staleness", "rollout", evidence, LATE_FIX if steps > 0 else AHEAD_FIX, samples, **about)]
