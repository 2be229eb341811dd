"""Lists that are not as long as the response: an appended EOS, prompt tokens, or simply another length."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.alignment import FACTOR, MIN_TOKENS, MINIMUM_GAIN, MOST, STANDARD_ERRORS, moved
from mismatch_plugin.diagnose.detectors.distance import compare, distances
from mismatch_plugin.diagnose.detectors.eos import appended_finding
from mismatch_plugin.diagnose.detectors.pairing import MAX_LAG, lag_findings, shifted
from mismatch_plugin.diagnose.findings import Finding, Item, LogProbSide, place_of


def find_lengths(batch: Batch) -> Outcome:
    """Name them; afterwards both lists of each sample are as long as its response."""
    found: list[Item] = []
    changed: dict[int, dict[str, Any]] = defaultdict(dict)
    short = [sample for sample in batch if len(sample.rollout_log_probs) != len(sample)]
    appended = [sample for sample in short if len(sample.rollout_log_probs) == len(sample) - 1]
    other = [sample for sample in short if len(sample.rollout_log_probs) != len(sample) - 1]
    for sample in short:
        changed[sample.index]["rollout_log_probs"] = shifted(sample.rollout_log_probs, 0, len(sample))
    if appended:
        found.append(appended_finding(batch, appended, "rollout", "one token more than the server has log-probs for"))
    if other:
        found.append(_length_finding(batch, other, "rollout"))
    uneven = [sample for sample in batch if _surplus(sample)]
    offsets = _offsets(uneven)
    for sample in uneven:
        changed[sample.index]["train_log_probs"] = shifted(sample.train_log_probs, offsets[sample.index], len(sample))
    longer = [(sample, lag) for sample in uneven if (lag := offsets[sample.index])]
    unmoved = [sample for sample in uneven if not offsets[sample.index]]
    extra = [sample for sample in unmoved if _surplus(sample) == 1]
    wrong = [sample for sample in unmoved if _surplus(sample) != 1]
    if extra:
        found.append(appended_finding(batch, extra, "training", "one token more than was sampled"))
    if longer:
        first = longer[0][0]
        prompt = len(first.prompt_ids)
        included = f" (its prompt has {prompt} tokens)" if abs(_surplus(first) - prompt) <= 1 else ""
        why = f"it is {_surplus(first):+d} tokens longer than the response in sample {first.index}{included}; lists "
        found += lag_findings(batch, longer, len(batch), why, boundary=True)
    if wrong:
        found.append(_length_finding(batch, wrong, "training"))
    return found, batch.with_values(changed)


def _surplus(sample: Sample) -> int:
    return len(sample.train_log_probs) - len(sample)


def _offsets(samples: list[Sample]) -> dict[int, int]:
    """By index, the k with rollout[t] closest to training[t + k]; samples too short to tell follow most others."""
    offsets = {sample.index: _best_offset(sample) for sample in samples}
    whole_prompt = [sample for sample in samples if offsets[sample.index] == _surplus(sample)]
    vague = [sample for sample in samples if not offsets[sample.index] and distances(sample).tokens < MIN_TOKENS]
    if len(whole_prompt) > MOST * (len(samples) - len(vague)):
        offsets |= {sample.index: _surplus(sample) for sample in vague if _surplus(sample) > 0}
    return offsets


def _best_offset(sample: Sample) -> int:
    """The k with rollout[t] closest to training[t + k]; 0 if nothing is clear."""
    surplus = _surplus(sample)
    near = {*range(min(0, surplus) - MAX_LAG, max(0, surplus) + MAX_LAG + 1)}
    if surplus > 4 * MAX_LAG:  # a whole prompt: the two ends are where a response can start
        near = {*range(-MAX_LAG, MAX_LAG + 1), *range(surplus - MAX_LAG, surplus + MAX_LAG + 1)}
    own = distances(sample)
    clear = {}
    for lag in sorted(near - {0}):
        item = compare(own, moved(sample, lag))
        needed = 2.0 if lag == surplus else STANDARD_ERRORS
        if item.tokens >= 4 and item.clearly_better(FACTOR, needed, MINIMUM_GAIN):
            clear[lag] = item.other
    return min(clear, key=clear.__getitem__, default=0)


def _length_finding(batch: Batch, samples: list[Sample], side: LogProbSide) -> Finding:
    first = samples[0]
    count = len(first.values(side))
    dropped = " (the last token, perhaps EOS, was dropped)" if count == len(first) - 1 else ""
    return batch.finding(
        "length",
        side,
        f"The {side} side's log-probs of {len(samples)} of {len(batch)} samples are not as many as the response "
        f"tokens: {count} for {len(first)} in sample {first.index}{dropped}.",
        "Give exactly one log-prob a response token: keep the lists together when responses are cut, continued or "
        "padded.",
        samples,
        tokens=sum(len(sample) for sample in samples),
        first=place_of(first, min(count, len(first))),
        statistics={"fraction": len(samples) / len(batch)},
    )
