"""What servers told of themselves, cloned groups and experts of both sides: each fault from one record on, and what is
sound is not named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.arrays import Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import LastUpdate, Served, ServedKV, ServedWeights
from mismatch_plugin.data.versions import WeightSpan
from tests.diagnose.door import faults, findings, inspect, named, samples_of
from tests.fixtures.families import build_family

N = 8
Span = tuple[str | None, int, int]
Weights = tuple[str | None, str | None, int, int]


def update(number: int, changed: int = 20, matrices: int = 10, of: int = 20, share: float | None = None) -> LastUpdate:
    """changed: tensors of `of`; matrices: those of 10; share: of the elements."""
    told = {"number": number, "changed": changed, "tensors": of, "changed_matrices": matrices, "matrices": 10}
    return LastUpdate.model_validate(told | {"changed_elements": share})


def record(
    label: str | list[Span] | None = "5",
    weights: str | list[Weights] | None = "f5",
    since: str | None = "5",
    *,
    server: str = "a:1",
    dp_rank: int | None = None,
    last: LastUpdate | None = None,
    sampling: dict[str, Any] | None = None,
    mask: list[int] | None = None,
    seed: int = 0,
    **told: Any,
) -> Sample:
    """One response; label and weights: of all tokens, or (name, start, end) and (fingerprint, since, start, end)."""
    labels = label if isinstance(label, list) else [] if label is None else [(label, 0, N)]
    spans = weights if isinstance(weights, list) else [(weights, since, 0, N)]
    served = Served(
        server=server,
        dp_rank=dp_rank,
        weights=[ServedWeights(fingerprint=f, since=s, start=start, end=end) for f, s, start, end in spans],
        update=last,
        **{"sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "float32", "temperature": 1.0} | told,
    )
    return Sample(
        prompt_ids=[1],
        response_ids=[*range(2, 2 + N)],
        rollout_log_probs=-np.random.default_rng(seed).uniform(0.1, 3.0, N),
        weight_versions=tuple(WeightSpan(version=str(name), start=start, end=end) for name, start, end in labels),
        sampling=SamplingParameters(**(sampling or {})),
        served=served,
        server="http://router:8000",
        loss_mask=mask or [1] * N,
    )


def trained(one: Sample, **told: Any) -> Sample:
    """With a training side that agrees."""
    return one.with_fields(train_log_probs=one.rollout_log_probs, **told)


def of(server: str, weights: str) -> Sample:
    return record("6", weights, "6", server=server, last=update(5))


def group(ids: list[list[int]], log_prob: float = -1.0, **asked: Any) -> list[Sample]:
    fields = {"prompt_ids": [1, 2], "group": "g", "sampling": SamplingParameters(**asked)}
    return samples_of([[log_prob] * len(one) for one in ids], ids=ids, **fields)


NOTHING, UP = update(7, changed=0, matrices=0), update(4)
CLEAN = (record(last=UP), record(server="b:1", last=UP))
FIVE, SIX = record("5", "f5", None, last=UP), record("6", "f5", None, last=UP)
MOVED, MIXED, PARTLY = "weights_not_updated", "mixed_versions", "weights_partly_updated"
SENT = {"trainer_fingerprint": "t5", "trainer_version": "5"}
OLD = [ServedKV(fingerprint="f4", tokens=50, cached=48)]
BOTH: list[Weights] = [("f4", "4", 0, 3), ("f5", "5", 3, N)]
COLD = {"temperature": 0.7}
CLONE = [5 + place % 7 for place in range(30)]
OTHERS = [np.random.default_rng(seed).integers(5, 90, 30).tolist() for seed in range(6)]

CASES: list[tuple[list[Sample], list[str], list[str]]] = [
    ([*CLEAN], [], []),
    ([record("6", "f5", "5", last=UP)], [MOVED], ["a:1", "'6'", "'5'", "f5"]),
    ([FIVE, SIX], [MOVED, MIXED], ["under '6' as under '5'"]),
    ([FIVE, record("6", "f6", None, last=update(5))], [MIXED], []),
    ([FIVE, record("6", "f5", None, server="b:1", last=UP)], [MIXED], []),  # another server
    ([record(None, last=update(2, 0, 0))], [MOVED], ["The last update of a:1 changed no tensor"]),
    ([record("5", "f5", "5", last=UP), record("5", "f6", "5", last=update(5))], ["label_reused"], ["a:1", "f5, f6"]),
    ([record("5", "f5", last=UP), record("6", "f6", "6", last=update(5))], [MIXED], []),
    ([CLEAN[0], record(weights="x5", server="b:1", dtype="float16")], ["server_differs"], []),  # not compared
    ([record(last=update(3, 9, 4))], [PARTLY], ["a:1", "4 of 10 matrices"]),
    ([CLEAN[0], record(weights="x5", server="b:1", last=update(4, 2, 1))], [PARTLY], ["b:1"]),
    ([record(weights=[("f5", "5", 0, 4), (None, None, 4, N)])], [PARTLY], ["half done", "4 tok"]),
    ([record("3", "fa", "3", last=update(3)), record("4", "fb", "4", last=UP),
      record("5", "fa", "5", last=update(5))], [MIXED], []),  # weights that came back
    ([record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 6), ("f7", "6", 6, N)], last=update(5))],
     [MOVED, "label_reused", MIXED], ["3 tokens of a:1"]),
    # Only tokens that train are looked at.
    ([record([("5", 0, 4), ("6", 4, N)], [("f5", "5", 0, N)], last=UP, mask=[1, 1, 1, 1, 0, 0, 0, 0])], [], []),
    # Updates that brought nothing: a later one is a fault unless it was sent again, the first sync of a run a note.
    ([record("5", "f5", "5", last=NOTHING)], [], []),
    *(([record(label, "f5", since, last=NOTHING)], [MOVED], [])
      for label, since in (("6", "5"), ("default", "default"), (None, "5"), ("5", None))),
    ([record("1", "f0", "default"), record("default", "f0", "default")], [MIXED], ["that it had loaded"]),
    ([record("1", "f0", "default", last=update(1, 0, 0))], [], ["that it had loaded"]),
    ([record("1", "f0", "default"), record("2", "f0", "default")], [MOVED, MIXED], []),  # the label moved twice
    ([record("2", "f0", "1")], [MOVED], []),  # from one step to the next
    ([record("1", "f0", "default", last=update(2))], [], []),  # an update that ended the response
    ([record("1", "f0", "default", last=update(2, 0, 0))], [MOVED], []),
    # Several servers.
    ([of("a:1", "f6"), record("6", "f5", "5", server="b:1", last=UP)], ["stale_server"],
     ["Behind: b:1.", "f6 on a:1"]),
    ([of("a:1", "f6"), *(record("6", "f5", "5", server=f"{name}:1", last=UP) for name in "bcd")], ["stale_server"],
     ["Behind: b:1, c:1, d:1."]),  # many may be behind
    ([of("a:1", "f6"), of("b:1", "f6"), of("c:1", "x6")], ["stale_server"], ["In the minority: c:1."]),
    ([of("a:1", "f6"), of("b:1", "x6")], ["stale_server"], ["Nothing here tells which"]),
    ([record("6", "f6" if rank != 2 else "f5", "6", dp_rank=rank, last=update(5)) for rank in range(4)],
     ["stale_server"], ["In the minority: a:1 dp_rank 2."]),
    ([record("5", "f5", "5", last=NOTHING), record("5", "f4", "5", server="b:1", last=UP)], ["stale_server"],
     ["Nothing here tells which"]),  # an update that was sent again says nothing of who is behind
    ([record("1", "fa", "1", server="a:1/7"), record("1", "fb", "1", server="a:1/9")], ["stale_server"], []),
    ([record("1", "fa", "1", server="a:1/7"), record("1", "fb", "1", server="a:1/9", tp_size=2)], [], []),
    ([record("1", "fa", "1", server="a:1/7").with_fields(step=1),
      record("1", "fb", "1", server="a:1/9").with_fields(step=2)], [], []),  # a run that counts anew
    ([record("default", "fa", "default"), record("default", "fb", "default", last=update(1))], [],
     ["Weights changed under the same label"]),  # a trainer that names no version: a note
    *(([*CLEAN, record(server="c:1", **dict[str, Any]({field: value}))], ["server_differs"],
       [field, str(value), "a:1, b:1", "c:1"])
      for field, value in (
          ("dtype", "float16"), ("kv_cache_dtype", "fp8_e4m3"), ("speculative", "EAGLE"), ("sglang", "0.5.9"))),
    # Other weights than the trainer sent. An asynchronous one has sent newer ones since.
    ([trained(record(last=UP), **SENT)], ["other_weights"], ["t5", "f5"]),
    ([trained(record(last=UP), trainer_fingerprint="f5")], [], []),
    ([trained(record(last=UP), **SENT | {"trainer_version": "6"})], [], []),
    ([trained(record(None, last=UP), **SENT)], [], []),
    ([trained(record(last=UP, quantization="fp8"), **SENT)], [], []),  # not the tensors that were sent
    ([trained(one, trainer_fingerprint="f6", trainer_version=6) for one in (of("a:1", "f6"), of("b:1", "x6"))],
     ["stale_server"], ["Behind: b:1."]),
    # Old keys and values, unless they are of the response's own beginning.
    ([*(record(last=UP, kv=[], seed=seed) for seed in range(8)), record(last=UP, kv=OLD, server="b:1")],
     ["stale_cache"], ["48 tokens of f4", "b:1"]),
    ([record(last=UP, kv=[ServedKV(fingerprint=None, tokens=3, cached=3)])], ["stale_cache"],
     ["3 tokens of a half done update"]),
    ([record([("4", 0, 3), ("5", 3, N)], BOTH, last=UP, kv=[ServedKV(fingerprint="f4", tokens=48)])], [MIXED], []),
    ([record([("4", 0, 3), ("5", 3, N)], BOTH, last=UP, kv=OLD)], ["stale_cache", MIXED], []),
    # Filters and penalties of the server's own.
    ([record(filters=["top_p=0.9"])], ["truncation"], ["top_p=0.9", "a:1"]),
    ([record(shifts=["repetition_penalty=1.1"], sampling={"repetition_penalty": 1.1})], [], []),
    # The temperature that was applied.
    ([record(sampling=COLD | {"top_k": 1})], ["temperature"], ["asked for 0.7, log-probs are at 1 on a:1"]),
    ([record(sampling=COLD | {"top_k": 1}, temperature=None)], ["temperature"], ["in batches that were all greedy"]),
    ([record(sampling=COLD, temperature=0.9)], ["temperature"], ["asked for 0.7, log-probs are at 0.9"]),
    ([record(sampling=COLD, temperature=0.7 * (1 + 1e-8))], [], []),
    ([record(sampling={"temperature": 0.0}, filters=["top_k=1"])], [], []),
    # A server that started again shows by its label, unless updates named no version.
    ([trained(record("default", "f0", "default"), trainer_version="21")], [MOVED], ["never updated, or restarted"]),
    ([trained(record("default", "f9", "default", last=update(20)), trainer_version="21")], [], []),
    # Responses that sampling does not repeat.
    (group([*OTHERS, CLONE, CLONE]), ["cloned_group"], ["up to 2 times"]),
    (group([CLONE] * 8, temperature=0.7), ["cloned_group"], ["up to 8 times"]),
    (group(OTHERS), [], []),
    (group([CLONE] * 8, log_prob=-0.5), [], []),  # a chance of e^-15: an answer that is nearly always the same
    (group([CLONE] * 8, temperature=0.0), [], []),
    ([one.with_fields(prompt_ids=np.array([1, number])) for number, one in enumerate(group([CLONE] * 4))], [], []),
    ([one.with_fields(step=number) for number, one in enumerate(group([CLONE] * 4))], [], []),
]  # fmt: skip


@pytest.mark.parametrize(("records", "expected", "said"), CASES)
def test_what_servers_told(records: list[Sample], expected: list[str], said: list[str]) -> None:
    found = inspect(records, "--brief")
    assert [fault for fault in faults(found["findings"]) if fault != "truncation" or expected] == expected
    for part in said:
        assert any(part in item["evidence"] for item in found["findings"]), found["findings"]
    if expected:
        assert found["status"] == 1 and found["findings"][0]["confidence"] in ("certain", "likely")


def test_a_finding_names_its_place_and_its_fix() -> None:
    (finding,) = findings([record("6", "f5", "5", last=UP)])
    assert (finding["confidence"], finding["side"], finding["tokens"]) == ("certain", "rollout", N)
    assert finding["first"]["sample"] == 0 and finding["first"]["rollout"] == "version 6"
    late = record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 6), ("f7", "6", 6, N)], last=update(5))
    assert findings([late])[0]["first"]["position"] == 3
    (finding,) = findings([of("a:1", "f6"), record("6", "f5", "5", server="b:1", last=UP)])
    assert finding["first"]["sample"] == 1 and "to b:1 again" in finding["fix"]
    unchanged = update(3, 9, 4).model_copy(update={"unchanged": ("q.weight", "k.weight", "v.weight")})
    (finding,) = findings([record(last=unchanged)])
    assert ", not q.weight, k.weight, v.weight, …" in finding["evidence"]
    assert "--accept weights_partly_updated" in finding["fix"] and finding["confidence"] == "likely"
    (finding,) = findings([record(filters=["top_p=0.9"])])
    assert "generation_config" in finding["fix"]
    plain = record(last=UP, temperature=0.7, filters=["top_p"])
    untold = Sample(**{name: getattr(plain, name) for name in plain.model_fields_set - {"sampling"}})
    (finding,) = findings([untold])  # a record without `sampling` says nothing of a temperature or a filter
    assert finding["fault"] == "truncation" and finding["fix"].startswith("Record what was asked for (`sampling`")
    sent = inspect([trained(CLEAN[0], trainer_fingerprint="f5", trainer_version="5")], "--brief")["notes"]
    assert any(note.endswith("weights f5, which are what the trainer sent.") for note in sent)


@pytest.mark.parametrize(
    ("share", "matrices", "told", "is_noted"),
    [
        (0.039, 10, {}, True),
        (0.06, 10, {}, False),
        (None, 10, {}, False),
        (0.039, 10, {"quantization": "fp8"}, False),
        (0.039, 3, {}, False),  # a part that came is another fault
    ],
)
def test_an_update_of_which_most_rounds_away_is_noted(
    share: float | None, matrices: int, told: dict[str, Any], is_noted: bool
) -> None:
    found = findings([record(last=update(4, matrices=matrices, share=share), **told)])
    item = named(found, "update_lost_in_precision")
    assert (item is not None and item["severity"] == "note") == is_noted
    if share == 0.039 and item:
        assert "a:1 changed 3.90% of the elements" in item["evidence"] and "cosine of about .12" in item["evidence"]


@pytest.mark.parametrize(("step", "is_noted"), [(1e-6, True), (1e-4, False)])
def test_two_checkpoints_show_what_bfloat16_delivers(tmp_path: Path, step: float, is_noted: bool) -> None:
    model = build_family("qwen3", 0)
    model.save_pretrained(tmp_path / "start")
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.mul_(1 + 30 * step * torch.randn(parameter.shape, generator=draw).sign())
    model.save_pretrained(tmp_path / "now")
    given = ("--checkpoint", tmp_path / "now", "--reference-checkpoint", tmp_path / "start")
    item = named(findings([record(last=None)], *given), "update_lost_in_precision")
    assert (item is not None) == is_noted
    if item:
        assert "Between both checkpoints" in item["evidence"] and "cosine of 0." in item["evidence"]
    assert named(findings([record(last=None, dtype="float32")], *given), "update_lost_in_precision") is None


PROMPT, LENGTH, LAYERS, K, EXPERTS = 6, 20, 3, 2, 16
ROWS = PROMPT + LENGTH - 1


def routes(seed: int) -> Ints:
    """[ROWS, LAYERS, K], no expert twice in a row."""
    chosen = np.random.default_rng(seed).random((ROWS, LAYERS, EXPERTS)).argsort(axis=-1)
    return chosen[..., :K].astype(np.int32)


def routed(seed: int, trained: Ints | None) -> Sample:
    """A clean pair of log-probs, with routes."""
    draw = np.random.default_rng(seed)
    log_probs = -draw.uniform(0.1, 3.0, LENGTH)
    return Sample(
        prompt_ids=np.arange(PROMPT),
        response_ids=draw.integers(9, 99, LENGTH),
        rollout_log_probs=log_probs,
        train_log_probs=log_probs + draw.normal(0, 1e-3, LENGTH),
        routed_experts=routes(seed),
        trained_experts=trained,
        index=seed,
    )


OFF: dict[str, tuple[Callable[[Ints], Ints], str]] = {
    "one earlier": (lambda own: np.roll(own, -1, axis=0), "one position earlier 100.0% agree"),
    "of another layer": (lambda own: np.concatenate([own[:, :2], own[:, 1:2]], axis=1), "99.9% or more was expected"),
}


@pytest.mark.parametrize("name", OFF)
def test_a_replay_that_does_not_replay_is_named_with_its_cause(name: str) -> None:
    change, said = OFF[name]
    sound = [routed(seed, routes(seed)) for seed in range(8)]
    item = named(findings([*sound, *(routed(s, change(routes(s))) for s in range(8, 12))]), "replay_off")
    assert item and said in item["evidence"], item
    assert (item["samples"], item["of_samples"], item["confidence"]) == (4, 12, "certain")


def test_replays_that_are_sound_or_not_told_are_no_fault() -> None:
    only_prompt = routes(3)
    only_prompt[: PROMPT - 1] = 0  # rows that made no token of the response
    masked = routed(0, routes(1)).with_fields(loss_mask=np.array([False] * LENGTH))
    for samples in (
        [routed(seed, routes(seed)) for seed in range(12)],
        [routed(seed, routes(seed)[..., ::-1].copy()) for seed in range(12)],  # a set of experts
        [masked, routed(2, routes(2))],
        [routed(seed, None) for seed in range(4)],
        [routed(3, only_prompt)],
    ):
        assert named(findings(samples), "replay_off") is None


def cached(tokens: int | None, noise: float, seed: int) -> Sample:
    draw = np.random.default_rng(seed)
    log_probs = -draw.uniform(0.5, 3.0, 40)
    sides = [log_probs], [log_probs + draw.normal(0, noise, 40)]
    return samples_of(*sides, ids=[draw.integers(9, 99, 40)], cached_tokens=tokens, prompt_ids=np.arange(PROMPT))[0]


@pytest.mark.parametrize(
    ("samples", "is_named"),
    [
        ([cached(5 * (seed % 2), 0.2 if seed % 2 else 0.02, seed) for seed in range(40)], True),
        ([cached(5 * (seed % 2), 0.02 if seed % 2 else 0.2, seed) for seed in range(40)], False),  # the others are
        ([cached(5 * (seed < 6), 0.2 if seed < 6 else 0.02, seed) for seed in range(40)], False),  # too few
        ([cached(5 * (seed % 2), 0.004 if seed % 2 else 0.001, seed) for seed in range(40)], False),  # kernels do so
    ],
)
def test_cached_samples_that_lie_further_off(samples: list[Sample], is_named: bool) -> None:
    found = [item for item in findings(samples) if item["fault"] == "stale_cache"]
    assert [(item["confidence"], item["samples"]) for item in found] == [("possible", 20)] * is_named
    if is_named:
        assert "samples with most of the prompt cached lie" in found[0]["evidence"]
