"""What checkpoints tell: do the log-probs fit the weights of the run's start, which layers do, and which servers?"""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import below_16_bits
from mismatch_plugin.data.versions import version_number
from mismatch_plugin.diagnose.batch import Batch, logit_gap, make_batch, z_score
from mismatch_plugin.diagnose.detectors.size import mismatch
from mismatch_plugin.diagnose.normal import LOGIT_GAPS
from mismatch_plugin.diagnose.result import Finding
from mismatch_plugin.diagnose.scorers import Checkpoint, rescore, with_reference, with_training
from mismatch_plugin.sglang.delivered import Delivered, of_sums, sampled, sums
from mismatch_plugin.sglang.http import shown

MIN_SAMPLES, FAR_Z_SCORE = 8, 4.0
NEAR_START, BEYOND_LABELS = 0.75, 0.35
"""Share of the way back to the start that names it, and how far beyond what labels tell."""
FITS_BETTER, START_FURTHER = 0.9, 1.3
"""The start must fit better than by this (the mildest real update, mean |Δ log p| 0.012 under bf16, gave 0.6). Without
a checkpoint of the present weights the training side must be further from the start than the rollout side is by the
second: where it is not, the training side's own noise explains what is seen."""
MIX_BUDGET, MIX_FITS_BETTER, PART_Z_SCORE = 2000, 0.85, 2.0
"""Response tokens that each mix scores. Below which share of its best rival's distance a mix must fit: layers of real
servers gave 0.76 at mean |Δ log p| 0.02 under bf16; servers that are one step of four behind gave 1.02."""
SAMPLED_ELEMENTS = 1 << 16
"""Of each matrix, to tell what bfloat16 leaves of its change."""
OLD_FIX = (
    "The servers still compute with old weights. Read what each update returned, on every rank, and compare POST "
    '/weights_checker {"action": "checksum"} before and after one. Look for names that the server does not know (a '
    "`module.` prefix) and for tensors that are empty or freed when they are sent; flush the cache after the update."
)
PARTS_FIX = (
    "These tensors did not arrive: look for names that the server's loader skips (a `module.` prefix, fused qkv or "
    "gate_up, a pipeline stage's offset of the layers), for buckets that were never sent, and for failed updates."
)


class Way(NamedTuple):
    """Where the rollout side lies between the present weights (0) and those of the start (1).

    share: Σ (rollout − now)(start − now) / Σ (start − now)², of logit gaps. error: its standard error over samples.
    to_now, to_start, apart: mean |logit gap| rollout–now, rollout–start, start–now. nearer: to_now − to_start in
    standard errors over samples.
    """

    share: float
    error: float
    to_now: float
    to_start: float
    apart: float
    nearer: float


def way_back(samples: Sequence[Sample], now: Sequence[Floats]) -> Way | None:
    """now: [n] of each sample, log-probs under the present weights. None where there is too little to tell."""
    rows = []
    for sample, current in zip(samples, now, strict=True):
        ours, start = sample.rollout_log_probs, sample.ref_log_probs
        if start is None or not sample.comparable:
            continue
        gaps = np.stack([logit_gap(sample, *pair) for pair in ((ours, current), (start, current), (ours, start))])
        a, b, c = gaps[:, np.isfinite(gaps).all(axis=0)]
        if len(a):
            rows.append((a @ b, b @ b, np.abs(a).sum(), np.abs(c).sum(), np.abs(b).sum(), len(a)))
    table = np.array(rows)
    if len(rows) < MIN_SAMPLES or table[:, 1].sum() <= 0:
        return None
    along, length, to_now, to_start, apart, tokens = table.sum(axis=0).tolist()
    share = along / length
    error = float(np.sqrt(((table[:, 0] - share * table[:, 1]) ** 2).sum()) / length)
    return Way(share, error, to_now / tokens, to_start / tokens, apart / tokens, z_score(table[:, 2] - table[:, 3]))


def find_start(batch: Batch) -> list[Finding]:
    """`weights_not_updated` or `weights_partly_updated`, by the log-probs under the weights that the run began with."""
    both = batch.now is not None and batch.start is not None
    samples = _newest(batch) if both else list(batch.samples)
    if batch.now is None or batch.from_checkpoint:
        now = [sample.train_log_probs for sample in samples]
    else:
        now = batch.now.scored(samples)
    way = way_back(samples, now)
    if way is None or way.error > NEAR_START / FAR_Z_SCORE:
        return []
    told_share = _told_share(samples)
    moved = way.to_now > LOGIT_GAPS["16 bits"] or way.share - told_share > max(FAR_Z_SCORE * way.error, 0.03)
    if both and moved and (parts := _find_parts(batch, samples, now, way.share)):
        return [parts]
    sure = batch.now is not None
    nearer = way.to_start < FITS_BETTER * way.to_now and way.nearer > FAR_Z_SCORE
    near_start = nearer and way.share >= max(NEAR_START, told_share + BEYOND_LABELS)
    if not near_start or not (sure or way.apart > START_FURTHER * way.to_start):
        return []
    evidence = (
        f"The rollout log-probs fit the weights that the run began with better: mean logit gap {way.to_start:.3g} to "
        f"the start and {way.to_now:.3g} to the present weights, which are {way.apart:.3g} apart: {way.share:.0%} ± "
        f"{way.error:.0%} of the way back, where labels tell {told_share:.0%}."
    )
    fix = OLD_FIX if sure else f"{OLD_FIX} --checkpoint with the present weights decides it."
    about = {"statistics": {**way._asdict(), "told_share": told_share}, "confidence": "likely" if sure else "possible"}
    return [batch.finding("weights_not_updated", "rollout", evidence, fix, samples, **about)]


def versions_of(sample: Sample) -> tuple[int | None, int | None]:
    """Versions that the sample and its training side claim, as numbers; the newest where a response has several."""
    versions = [version_number(span.version) for span in sample.weight_versions]
    known = [version for version in versions if version is not None]
    return max(known, default=None), version_number(sample.trainer_version)


def _newest(batch: Batch) -> list[Sample]:
    """Those of the newest version, which the checkpoint is of; all where no version is told."""
    of = [ours if theirs is None else theirs for ours, theirs in map(versions_of, batch)]
    newest = max((number for number in of if number is not None), default=None)
    return [sample for sample, number in zip(batch, of, strict=True) if number == newest]


def _told_share(samples: Sequence[Sample]) -> float:
    """How far back to the start the labels say that the samples are; versions count from 0."""
    pairs = [versions_of(sample) for sample in samples]
    ours = [own for own, _ in pairs if own is not None]
    newest = max((theirs for _, theirs in pairs if theirs is not None), default=max(ours, default=None))
    if newest is None or not ours:
        return 0.0
    if newest <= 0:
        return 1.0
    behind = [max((newest if theirs is None else theirs) - own, 0) for own, theirs in pairs if own is not None]
    return min(float(np.mean(behind)) / newest, 1.0)


# Which parts of the model are from which end -------------------------------------------------------------------------

Parts = dict[str, tuple[str, ...]]
"""Name of a part → its parameters that differ."""


def _pairs(now: Checkpoint, start: Checkpoint) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameter → (its value now, at the start). Raises InputError where the two checkpoints have other parameters."""
    ours, theirs = dict(now.model.named_parameters()), dict(start.model.named_parameters())
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            raise InputError(
                f"--reference-checkpoint has another shape of {name} than --checkpoint: give two checkpoints of one "
                f"model."
            )
    return {name: (value, theirs[name]) for name, value in ours.items()}


def delivered(now: Checkpoint, start: Checkpoint) -> Delivered | None:
    """What bfloat16 leaves of the matrices' change from the start to now; None where nothing changed."""
    change = torch.zeros(5, dtype=torch.float64)
    for value, first in _pairs(now, start).values():
        if value.dim() > 1:
            before, after = sampled(first, SAMPLED_ELEMENTS), sampled(value, SAMPLED_ELEMENTS)
            change += sums(before, after, torch.bfloat16, weight=value.numel() / len(after))
    return of_sums(change)


def _divided(now: Checkpoint, start: Checkpoint) -> tuple[Parts, Parts]:
    """The parameters that differ, by layer and by kind of tensor."""
    by_layer: Parts = defaultdict(tuple)
    by_kind: Parts = defaultdict(tuple)
    for name, (value, first) in _pairs(now, start).items():
        if torch.equal(value, first):
            continue
        layer = kind = "final norm" if "norm" in name or "ln_f" in name else "embeddings"
        if re.search(r"head|output", name):
            layer = kind = "output head"
        if inside := re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.(.+)$", name):
            layer, kind = f"layer {inside[1]}", re.sub(r"\.\d+\.", ".*.", inside[2])
        by_layer[layer] += (name,)
        by_kind[kind] += (name,)
    return by_layer, by_kind


def _scored_mix(now: Checkpoint, start: Checkpoint, samples: Sequence[Sample], old: Collection[str]) -> list[Floats]:
    """[n] of each under a model with these parameters from the start and all others from now, in float32."""
    pairs = _pairs(now, start)
    ours, kept = dict(now.model.named_parameters()), {name: pairs[name][0].data for name in old}
    try:
        for name in old:
            ours[name].data = pairs[name][1].data
        return now.scored(samples)
    finally:
        for name, value in kept.items():
            ours[name].data = value


def _find_parts(batch: Batch, samples: Sequence[Sample], now: Sequence[Floats], share: float) -> Finding | None:
    """The mix that fits clearly better than either end, and than all weights moved by `share` towards the start.

    By a first-order fit from the nearer end, rollout − end = Σ x (one part from the other end − end), parts with x
    above one half come from the other end; that mix is then scored itself.
    """
    model, start = batch.now, batch.start
    assert model is not None and start is not None
    step = max(1, math.ceil(sum(len(sample) for sample in samples) / MIX_BUDGET))
    few, own = samples[::step], now[::step]  # evenly over the batch, up to the budget of tokens
    rollout = [sample.rollout_log_probs for sample in few]
    starts = [sample.ref_log_probs for sample in few if sample.ref_log_probs is not None]
    from_start = share > 0.5
    end = starts if from_start else own
    best: tuple[float, list[str], int, list[Floats]] | None = None
    for parts in _divided(model, start):

        def scored(flipped: Collection[str], parts: Parts = parts) -> list[Floats]:
            old = [name for part, names in parts.items() if (part in flipped) != from_start for name in names]
            return _scored_mix(model, start, few, old)

        effects = np.stack([np.concatenate(_gaps(few, scored([part]), end)) for part in parts], axis=1)
        flipped = _flipped(list(parts), effects, np.concatenate(_gaps(few, rollout, end)))
        if 0 < len(flipped) < len(parts):
            mixed = scored(flipped)
            distance = float(np.nanmean(np.abs(np.concatenate(_gaps(few, rollout, mixed)))))
            if best is None or distance < best[0]:
                best = distance, flipped, len(parts), mixed
    if best is None:
        return None
    distance, flipped, count, mixed = best
    between = [ours + share * (theirs - ours) for ours, theirs in zip(own, starts, strict=True)]
    means, clear = {}, math.inf
    ours = [np.abs(gap) for gap in _gaps(few, rollout, mixed)]
    for name, rival in {"now": own, "start": starts, "between": between}.items():
        theirs = [np.abs(gap) for gap in _gaps(few, rollout, rival)]
        means[name] = float(np.nanmean(np.concatenate(theirs)))
        clear = min(clear, z_score([float(np.nansum(other - mix)) for mix, other in zip(ours, theirs, strict=True)]))
    if clear < FAR_Z_SCORE or distance > MIX_FITS_BETTER * min(means.values()):
        return None
    shown = ", ".join(flipped[:8]) + (f" and {len(flipped) - 8} more" if len(flipped) > 8 else "")
    evidence = (
        f"The rollout log-probs fit a mix of both checkpoints, only this is {'new' if from_start else 'old'}: {shown} "
        f"({len(flipped)} of {count} parts). Mean logit gap {distance:.3g}, against {means['now']:.3g} to the present "
        f"weights, {means['start']:.3g} to those of the start and {means['between']:.3g} to a point between them "
        f"({clear:.0f} standard errors or more over {len(few)} samples)."
    )
    old = count - len(flipped) if from_start else len(flipped)
    told = {"mix": distance, **means, "standard_errors": clear, "parts_old": old, "parts": count}
    return batch.finding("weights_partly_updated", "rollout", evidence, PARTS_FIX, samples, statistics=told)


def _gaps(samples: Sequence[Sample], ours: Sequence[Floats], theirs: Sequence[Floats]) -> list[Floats]:
    """Logit gaps of each sample."""
    return [logit_gap(sample, a, b) for sample, a, b in zip(samples, ours, theirs, strict=True)]


def _flipped(parts: list[str], design: Floats, target: Floats) -> list[str]:
    """Parts whose share is clearly above one half; none where too few tokens are left to fit them."""
    valid = np.isfinite(design).all(axis=1) & np.isfinite(target)
    design, target = design[valid], target[valid]
    if len(target) < 10 * len(parts):
        return []
    inverse = np.linalg.pinv(design.T @ design)
    shares = inverse @ (design.T @ target)
    variance = float(((target - design @ shares) ** 2).sum()) / (len(target) - len(parts))
    errors = np.sqrt(variance * np.diag(inverse))
    return [part for part, x, error in zip(parts, shares, errors, strict=True) if x - 0.5 > PART_Z_SCORE * error]


# Servers that rescore, next to the checkpoint and to one another ------------------------------------------------------

RATIO, FLOOR = 1.5, LOGIT_GAPS["float32"]
"""Among servers: one that is so much further from the checkpoint than the nearest one is named; gaps below FLOOR count
as FLOOR. Servers of one precision differed by less than 1.1."""
ROUTER_TIMEOUT = 10.0
"""Seconds for a router to tell its workers."""
FIX = (
    "Send the checkpoint's weights to {which} again: read the return code of the update, compare POST /weights_checker "
    '{{"action": "checksum"}} before and after (our client compares where our plugin serves) and between servers, look '
    "for names that the server does not know (a `module.` prefix); or give the checkpoint that the servers hold."
)


class Rescored(NamedTuple):
    """What one server says of the responses at temperature 1. precision: a name of LOGIT_GAPS. batch: next to the
    checkpoint or the other servers. gaps: |logit gap| of each response; median: of all."""

    url: str
    precision: str
    batch: Batch
    gaps: list[Floats]
    median: float


def workers_of(url: str) -> list[str]:
    """The workers behind a router (SGLang's `/workers`, slime's and older `/list_workers`), without the `@rank` of one
    that routes to data-parallel ranks; else the URL itself."""
    from mismatch_plugin.sglang.http import RequestError, Server

    async def ask() -> list[str]:
        server = Server(url, timeout=ROUTER_TIMEOUT, connect_timeout=ROUTER_TIMEOUT)
        try:
            for path in ("/workers", "/list_workers"):
                try:
                    told = (await server.call("GET", path, timeout=ROUTER_TIMEOUT)).json
                except RequestError as error:
                    if error.kind == "connection":
                        break
                    continue
                told = told if isinstance(told, dict) else {}
                workers = [item.get("url") for item in told.get("workers") or [] if isinstance(item, dict)]
                urls = [item for item in told.get("urls") or workers if isinstance(item, str)]
                if found := [re.sub(r"@\d+$", "", item) for item in urls if item.startswith("http")]:
                    return [*dict.fromkeys(found)]
        finally:
            await server.close()
        return [url]

    try:
        return asyncio.run(ask())
    except ValueError as error:
        raise InputError(f"--url: {error}") from None


def compare_servers(
    urls: Sequence[str], records: Sequence[Sample], model: Checkpoint | None, start: Checkpoint | None = None
) -> tuple[list[str], list[Finding]]:
    """Notes and findings. At least a checkpoint and one server, or two servers.

    With a checkpoint each server is compared with it, else with the median of all servers, of two with each other.
    start: the weights that the run began with.

    Raises InputError where a server does not answer.
    """
    told = [rescore(url, records, model.vocab if model else None) for url in urls]
    neutral = [one.with_fields(sampling=SamplingParameters(), behaviour_log_probs=None) for one in records]
    median = [np.median(each, axis=0) for each in zip(*(values for values, *_ in told), strict=True)]
    sides = model.scored(neutral) if model else median if len(urls) > 2 else told[0][0]
    against = "the checkpoint" if model else "the median of all servers" if len(urls) > 2 else shown(urls[0])
    neutral = [with_training(*pair) for pair in zip(neutral, sides, strict=True)]
    if start is not None and model is not None:
        neutral = with_reference(neutral, start)
    notes: list[str] = []
    compared: list[Rescored] = []
    for url, (values, risks, info) in [*zip(urls, told, strict=True)][int(model is None and len(urls) == 2) :]:
        both = zip(neutral, values, strict=True)
        batch = make_batch([one.with_fields(rollout_log_probs=own) for one, own in both], has_training=True)
        level = mismatch(batch)
        what = f"the server at {shown(url)}, rescoring at temperature 1, against {against}: "
        notes += [*risks, what + ("no token can be compared" if level is None else str(level))]
        gaps = [np.abs(logit_gap(one, one.rollout_log_probs, one.train_log_probs)) for one in batch]
        precision = "float32" if info.dtype in ("float32", "float") else "16 bits"  # where it tells nothing, too
        if below_16_bits(info.quantization, info.kv_cache_dtype):
            precision = "quantised"
        if np.isfinite(np.concatenate(gaps)).any():
            compared.append(Rescored(url, precision, batch, gaps, float(np.nanmedian(np.concatenate(gaps)))))
    nearest = min(compared, key=lambda one: one.median, default=None)
    found = [_judge(one, nearest, against) for one in compared if nearest]
    return notes, [item for item in found if item]


def _judge(one: Rescored, nearest: Rescored, against: str) -> Finding | None:
    """By its precision, next to the nearest server, and next to the weights that the run began with."""
    gap, batch = one.median, one.batch
    bar, ratio = LOGIT_GAPS[one.precision], max(gap, FLOOR) / max(nearest.median, FLOOR)
    further = z_score([float(np.nansum(own - other)) for own, other in zip(one.gaps, nearest.gaps, strict=True)])
    odd = further > FAR_Z_SCORE and ratio > RATIO
    way = way_back(batch.samples, [sample.train_log_probs for sample in batch])
    fits = way is not None and way.share > NEAR_START and way.nearer > FAR_Z_SCORE
    why = [f"where its precision ({one.precision}) explains {bar:g}"] if gap > bar else []
    why += [f"{ratio:.2g} times the nearest server's, {further:.0f} standard errors"] if odd else []
    why += ["and they fit the weights that the run began with better"] if fits else []
    if not why:
        return None
    evidence = (
        f"The server at {shown(one.url)} does not hold the weights of {against}: rescored at temperature 1 its "
        f"log-probs have a median logit gap of {gap:.3g}, {'; '.join(why)}."
    )
    about = {
        "statistics": {"gap": gap, "bar": bar, "ratio_to_nearest": ratio, "standard_errors": further},
        "confidence": "likely" if gap > 2 * bar or fits or (odd and gap > bar) else "possible",
    }
    fix = FIX.format(which=shown(one.url))
    return batch.finding("server_differs", "rollout", evidence, fix, batch.samples, **about)
