"""Do the servers hold the checkpoint's weights now, and all the same ones? Each rescores, and is compared."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.diagnose.batch import Batch, make_batch
from mismatch_plugin.diagnose.detectors.distance import logit_gap, z_score
from mismatch_plugin.diagnose.detectors.layers import FAR_Z_SCORE, NEAR_START, way_back
from mismatch_plugin.diagnose.detectors.size import mismatch
from mismatch_plugin.diagnose.normal import LOGIT_GAPS
from mismatch_plugin.diagnose.result import Finding
from mismatch_plugin.diagnose.scorers import Checkpoint, rescore, with_reference, with_training
from mismatch_plugin.sglang.http import shown

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
    """What one server says of the responses at temperature 1. batch: next to the checkpoint or the other servers. gaps:
    |logit gap| of each response; median: of all."""

    url: str
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
    median = [np.median(each, axis=0) for each in zip(*(values for values, _ in told), strict=True)]
    sides = model.scored(neutral) if model else median if len(urls) > 2 else told[0][0]
    against = "the checkpoint" if model else "the median of all servers" if len(urls) > 2 else shown(urls[0])
    neutral = [with_training(*pair) for pair in zip(neutral, sides, strict=True)]
    if start is not None and model is not None:
        neutral = with_reference(neutral, start)
    notes: list[str] = []
    compared: list[Rescored] = []
    for url, (values, risks) in [*zip(urls, told, strict=True)][int(model is None and len(urls) == 2) :]:
        both = zip(neutral, values, strict=True)
        batch = make_batch([one.with_fields(rollout_log_probs=own) for one, own in both], has_training=True)
        level = mismatch(batch)
        what = f"the server at {shown(url)}, rescoring at temperature 1, against {against}: "
        notes += [*risks, what + ("no token can be compared" if level is None else str(level))]
        gaps = [np.abs(logit_gap(one, one.rollout_log_probs, one.train_log_probs)) for one in batch]
        if np.isfinite(np.concatenate(gaps)).any():
            compared.append(Rescored(url, batch, gaps, float(np.nanmedian(np.concatenate(gaps)))))
    nearest = min(compared, key=lambda one: one.median, default=None)
    found = [_judge(one, nearest, against) for one in compared if nearest]
    return notes, [item for item in found if item]


def _judge(one: Rescored, nearest: Rescored, against: str) -> Finding | None:
    """By its precision, next to the nearest server, and next to the weights that the run began with."""
    precision, gap, batch = _precision(one.url), one.median, one.batch
    bar, ratio = LOGIT_GAPS[precision], max(gap, FLOOR) / max(nearest.median, FLOOR)
    further = z_score([float(np.nansum(own - other)) for own, other in zip(one.gaps, nearest.gaps, strict=True)])
    odd = further > FAR_Z_SCORE and ratio > RATIO
    way = way_back(batch.samples, [sample.train_log_probs for sample in batch])
    fits = way is not None and way.share > NEAR_START and way.nearer > FAR_Z_SCORE
    why = [f"where its precision ({precision}) explains {bar:g}"] if gap > bar else []
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


def _precision(url: str) -> str:
    """A name of LOGIT_GAPS, by what the server tells of itself; "16 bits" where it tells nothing."""
    from mismatch_plugin.sglang.client import RequestError, SGLangClient
    from mismatch_plugin.sglang.control import ServerInfo

    async def ask() -> ServerInfo:
        async with SGLangClient(url, retries=0) as client:
            return await client.server_info()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            info = asyncio.run(ask())
        except (RequestError, ValueError, TypeError, LookupError):
            return "16 bits"
    cache = info.kv_cache_dtype not in (None, "auto", info.dtype, "float32", "bfloat16", "float16")
    if info.quantization or cache:
        return "quantised"
    return "float32" if info.dtype in ("float32", "float") else "16 bits"
