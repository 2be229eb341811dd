"""Weights that did not arrive, wholly, in part or on one server: named so, and silent where another cause is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch, make_batch
from mismatch_plugin.diagnose.detectors.layers import Mix, way_back
from mismatch_plugin.diagnose.detectors.weights import find_not_updated, find_split, find_stale_server, mann_whitney
from mismatch_plugin.diagnose.diagnosis import diagnose_files
from mismatch_plugin.diagnose.findings import Finding
from tests.fixtures.sglang_check.policies import FOLDER, checkpoint, policy, recorded, score, training

QUIET = "bfloat16_temperature_1.0"
Sizes = Callable[[int, int], Any]


def _batch(
    start: str | None, now: str, labels: tuple[str | None, str | None] = (None, None), *, models: bool = False
) -> Batch:
    """What the servers sampled from `float32` in bf16; labels: of the records and of the trainer."""
    ours, theirs = labels
    samples = [
        one.with_fields(
            weight_versions=(WeightSpan(version=ours, start=0, end=len(one)),) if ours else (), trainer_version=theirs
        )
        for one in training(now, QUIET)
    ]
    if start:
        first = training(start, QUIET)
        samples = [one.with_fields(ref_log_probs=s.train_log_probs) for one, s in zip(samples, first, strict=True)]
    batch = make_batch(samples)
    mix = Mix(checkpoint(now), checkpoint(start)) if models and start else None
    return replace(batch, between=mix, from_checkpoint=models)


def _found_in(batch: Batch) -> list[Finding]:
    items, after = find_not_updated(batch)
    assert after is batch
    return [item for item in items if isinstance(item, Finding)]


def test_the_way_back_is_one_at_the_start_and_zero_now():
    at_start, at_now = _batch("float32", "drift-0.02-7"), _batch("drift-0.02-7", "float32")
    for batch, share in ((at_start, 1.0), (at_now, 0.0)):
        way = way_back(batch.samples, [sample.train_log_probs for sample in batch])
        assert way is not None and way.share == pytest.approx(share, abs=0.1) and way.error < 0.05
        assert (way.nearer > 10) == bool(share) and (way.to_start < way.to_now) == bool(share)
    assert way_back(at_now.samples[:4], [sample.train_log_probs for sample in at_now][:4]) is None


@pytest.mark.parametrize(
    ("start", "now", "labels", "models", "named"),
    [
        ("float32", "drift-0.01-7", (None, None), False, "possible"),
        ("float32", "drift-0.01-7", (None, None), True, "likely"),
        ("float32", "drift-0.01-7", ("step-4", "step-4"), True, "likely"),
        ("float32", "drift-0.002-7", (None, None), True, "likely"),  # far below the engine's noise
        ("drift-0.01-7", "float32", (None, None), True, None),  # they did arrive
        ("drift-0.03-7", "drift-0.01-8", (None, None), True, None),  # a little old, but not the start's
        ("float32", "drift-0.01-7", ("0", "0"), True, None),  # it is the start
        ("float32", "drift-0.01-7", ("step-0", "step-1"), True, None),  # and says so
        ("float32", "drift-0.01-7", ("step-3", "step-4"), True, "likely"),  # one step behind is not four
        ("float32", "bfloat16", (None, None), False, None),  # the trainer's own rounding, nothing was updated
        ("float32", "float32", (None, None), True, None),  # learning rate 0
    ],
)
def test_the_start_fits_better(
    start: str, now: str, labels: tuple[str | None, str | None], models: bool, named: str | None
):
    found = _found_in(_batch(start, now, labels, models=models))
    assert [(item.fault, item.confidence) for item in found] == ([("weights_not_updated", named)] if named else [])
    for finding in found:
        assert finding.statistics["share"] == pytest.approx(1, abs=0.15)
        assert ("--checkpoint" in finding.fix) == (named == "possible") and "weights_checker" in finding.fix
        assert ("although their labels" in finding.evidence) == (labels[0] is not None)


def test_between_both_without_checkpoints_is_possible():
    batch = _batch("float32", "drift-0.05-7")
    middle = {s.index: {"rollout_log_probs": (s.train_log_probs + s.ref_log_probs) / 2} for s in batch}  # pyright: ignore
    (finding,) = _found_in(batch.with_values(middle))
    assert (finding.fault, finding.confidence) == ("weights_partly_updated", "possible")
    assert "--reference-checkpoint" in finding.fix and finding.statistics["share"] == pytest.approx(0.5, abs=0.1)
    labels = {"weight_versions": (WeightSpan(version="1", start=0, end=1),), "trainer_version": "2"}
    labelled = {index: fields | labels for index, fields in middle.items()}
    assert _found_in(batch.with_values(labelled)) == []  # one step of two behind, as the labels say


@pytest.mark.parametrize("size", [0.01, 0.05])
@pytest.mark.parametrize("new", [True, False])
def test_layers_are_named(size: float, new: bool):
    forms = (f"layer-{size}-8", f"others-{size}-7")
    start, now = forms if new else forms[::-1]
    (finding,) = _found_in(_batch(start, now, models=True))
    assert finding.fault == "weights_partly_updated" and finding.confidence == "likely"
    assert f"only this is {'new' if new else 'old'}: layer 1 (1 of 4 parts)" in finding.evidence
    assert finding.statistics["parts_old"] == (3 if new else 1)


def test_steps_in_between_are_no_parts():
    assert _found_in(_batch("drift-0.03-7", "drift-0.02-8", models=True)) == []


def test_a_mix_is_what_it_says_and_leaves_the_model_as_it_was():
    now, start = checkpoint("drift-0.05-7"), checkpoint("float32")
    mix, batch = Mix(now, start), _batch("float32", "drift-0.05-7")
    by_layer, by_kind = mix.parts
    assert list(by_layer) == ["embeddings", "layer 0", "layer 1", "output head"]
    assert by_kind["mlp.up_proj.weight"] == tuple(f"model.layers.{at}.mlp.up_proj.weight" for at in (0, 1))
    sample, before = batch.samples[0], policy("drift-0.05-7").state_dict()
    before = {name: value.clone() for name, value in before.items()}
    every = [name for names in by_layer.values() for name in names]
    for names, form in (((), "drift-0.05-7"), (every, "float32"), (by_layer["layer 1"], "")):
        expected = score(form, [recorded(QUIET)[0]])[0].train_log_probs if form else None
        values = mix.log_probs(sample, names)
        assert expected is None or np.allclose(values, expected, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in policy("drift-0.05-7").state_dict().items())


def test_checkpoints_of_two_models_are_refused():
    one, other = checkpoint("float32"), checkpoint("float32")
    other.model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"another shape of \S+ than --checkpoint"):
        Mix(one, other)


def _made(size: Sizes, who: Callable[[int], dict[str, Any]], samples: int = 48, length: int = 40) -> Batch:
    """size(sample, position): standard deviation of the logits' change. who: fields of the record, and `trainer`."""
    generator = np.random.default_rng(3)
    made = []
    for index in range(samples):
        p = generator.uniform(0.02, 0.95, length) ** (1 + index % 3)  # some responses are surer than others
        sizes = np.array([size(index, at) for at in range(length)])
        gap = (1 - p) * sizes * generator.standard_normal(length)
        rollout = np.minimum(np.log(p), -1e-3)
        told = dict(who(index))
        trainer = told.pop("trainer", None)
        made.append(
            Sample(
                response_ids=np.arange(length),
                rollout_log_probs=rollout,
                train_log_probs=np.minimum(rollout + gap, 0),
                trainer_version=trainer,
                **told,
            )
        )
    return make_batch(made)


def _run(sizes: list[float], *, trainer: bool = True, per_step: int = 24) -> Batch:
    """A step a size, whose labels say so."""

    def who(index: int) -> dict[str, Any]:
        label = f"v{index // per_step}"
        spans = [WeightSpan(version=label, start=0, end=40)]
        return {"weight_versions": spans} | ({"trainer": label} if trainer else {})

    return _made(lambda sample, _: sizes[sample // per_step], who, samples=per_step * len(sizes))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([0.02, 0.05, 0.07, 0.09, 0.1], "likely"),
        ([0.02, 0.024, 0.028, 0.032, 0.036], "possible"),
        ([0.02, 0.02, 0.02, 0.1, 0.3], "possible"),  # it begins late: another cause, perhaps
        ([0.02] * 5, None),
        ([0.1, 0.09, 0.07, 0.05, 0.02], None),  # it shrinks
        ([0.02, 0.1], None),  # two versions are no trend
    ],
)
@pytest.mark.parametrize("trainer", [True, False])
def test_a_gap_that_grows_from_the_first_version_on(sizes: list[float], named: str | None, trainer: bool):
    found = _found_in(_run(sizes, trainer=trainer))
    assert [(item.fault, item.confidence) for item in found] == ([("weights_not_updated", named)] if named else [])
    for finding in found:
        assert "from version 0 to 4" in finding.evidence and finding.first is not None and finding.first.sample == 24
        assert ("--reference-checkpoint" in finding.fix) == (named == "possible")


def test_one_checkpoint_for_all_versions_is_no_growth():
    batch = _run([0.02, 0.05, 0.07, 0.09, 0.1])
    assert _found_in(replace(batch, from_checkpoint=True)) == []


def test_from_folders_to_the_finding(tmp_path: Path):
    for form in ("layer-0.02-8", "others-0.02-7", "drift-0.02-7"):
        policy(form).save_pretrained(tmp_path / form)
    records = FOLDER / f"{QUIET}.jsonl"
    start = {"reference_checkpoint": tmp_path / "others-0.02-7"}
    result = diagnose_files(records, checkpoint=tmp_path / "layer-0.02-8", reading=start, brief=True)
    assert [item.fault for item in result.findings] == ["weights_partly_updated"]
    path = tmp_path / "training.jsonl"
    lines = [{"train_log_probs": sample.train_log_probs.tolist()} for sample in training("drift-0.02-7", QUIET)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    policy("float32").save_pretrained(tmp_path / "start")
    begun = {"reference_checkpoint": tmp_path / "start"}
    for now, confidence in ((None, "possible"), (tmp_path / "drift-0.02-7", "likely")):
        result = diagnose_files(records, path, checkpoint=now, reading=begun, brief=True)
        assert [(item.fault, item.confidence) for item in result.findings] == [("weights_not_updated", confidence)]
        assert any("weights that the run began with" in note for note in result.notes)
    begun = {"reference_checkpoint": tmp_path / "others-0.02-7"}
    result = diagnose_files(records, path, reading=begun, brief=True)
    assert [item.fault for item in result.findings] == ["unexplained"]  # a gap of .23, and the start does not fit


def _stale(batch: Batch) -> Finding | None:
    (finding,) = find_stale_server(batch)[0] or [None]
    assert finding is None or isinstance(finding, Finding)
    return finding


def _of_two(index: int) -> dict[str, Any]:
    return {"server": f"http://{'ab'[index % 2]}:1"}


def _of_eight(index: int) -> dict[str, Any]:
    return {"server": f"http://{'ab'[index // 4 % 2]}:1", "dp_rank": index % 4}


def _labelled(index: int) -> dict[str, Any]:
    span = WeightSpan(version=("step-4", "step-3")[index % 2], start=0, end=40)
    return {**_of_two(index), "weight_versions": [span], "trainer": "step-4"}


def test_the_server_that_is_further_off_is_named():
    finding = _stale(_made(lambda sample, _: (0.03, 0.2)[sample % 2], _of_two))
    assert finding is not None and finding.confidence == "likely" and finding.samples == 24
    assert finding.evidence.startswith("Responses of http://b:1 (24 samples)") and "http://a:1" in finding.evidence
    assert finding.statistics["ratio"] == pytest.approx(0.2 / 0.03, rel=0.25)
    assert finding.first is not None and finding.first.sample == 1 and "http://b:1" in finding.fix


@pytest.mark.parametrize(
    ("size", "who", "samples", "named"),
    [
        (lambda sample, _: (0.02, 0.035)[sample % 2], _of_two, 48, "another precision"),
        (lambda sample, _: (0.02, 0.0215)[sample % 2], _of_two, 48, None),
        (lambda sample, _: 0.2 if sample % 8 == 6 else 0.03, _of_eight, 128, "of http://b:1 dp_rank 2 (16 samples)"),
        (lambda *_: 0.03, _of_eight, 128, None),
        (lambda sample, _: 0.2 if sample % 8 == 6 else 0.03, _of_eight, 40, None),  # 5 samples each
        (lambda sample, _: (0.03, 0.2)[sample % 2], lambda index: {**_of_two(index), "dp_rank": index % 16}, 48,
         "of http://b:1 (24 samples)"),  # too few samples a worker
        (lambda sample, _: (0.03, 0.2)[sample % 2], _labelled, 48, None),  # what labels tell is no surprise
        (lambda *_: 0.05, lambda index: {"server": f"http://{'abc'[index % 3]}:1"}, 60, None),  # one is surer
        (lambda sample, at: 1.5 if sample % 2 and at >= 20 else 0.03, _of_two, 48, None),  # it begins in the middle
    ],
)  # fmt: skip
def test_which_server_is_named(size: Sizes, who: Callable[[int], dict[str, Any]], samples: int, named: str | None):
    finding = _stale(_made(size, who, samples=samples))
    assert (named in finding.evidence) if named and finding else (finding is None and named is None)
    assert finding is None or (finding.confidence == "possible") == (named == "another precision")


def test_two_populations_without_names_are_possible_and_ask_for_records():
    batch = _made(lambda sample, _: 0.3 if sample % 3 == 0 else 0.03, lambda _: {})
    assert _stale(batch) is None
    (finding,) = find_split(batch)[0]
    assert isinstance(finding, Finding) and finding.confidence == "possible" and finding.samples == 16
    assert "`dp_rank`" in finding.fix and "16 of 48" in finding.evidence


@pytest.mark.parametrize(
    "size",
    [
        lambda sample, _: 0.05,  # one population
        lambda sample, _: 0.03 * 10 ** (sample / 48),  # a wide one without a gap
        lambda sample, _: 0.03 if sample % 2 else 1e-6,  # bf16 and float32 servers: precision explains both
        lambda sample, _: 0.3 if sample == 0 else 0.03,  # one sample
        lambda sample, at: 1.5 if sample % 2 and at >= 20 else 0.03,  # another fault, from the middle on
    ],
)
def test_no_two_populations(size: Sizes):
    assert find_split(_made(size, lambda _: {}))[0] == []


def test_two_populations_are_left_to_the_workers_where_they_are_named():
    def size(sample: int, _: int) -> float:
        return 0.3 if sample % 3 == 0 else 0.03

    assert _stale(_made(size, _of_two)) is None
    assert find_split(_made(size, lambda index: {**_of_two(index), "dp_rank": 0}))[0] == []
    assert find_split(_made(size, _of_two))[0]  # a worker of each server, perhaps


def test_responses_that_changed_version_are_no_second_population():
    """Early or late in the response: a third of them are mostly of the older weights."""
    ends = [35 if index % 3 == 0 else 10 for index in range(48)]
    batch = _made(lambda sample, at: 0.3 if at < ends[sample] else 0.03, lambda _: {})
    assert find_split(batch)[0] != []
    spans = [(WeightSpan(version="4", start=0, end=end), WeightSpan(version="5", start=end, end=40)) for end in ends]
    mixed = {index: {"weight_versions": span} for index, span in enumerate(spans)}
    assert find_split(batch.with_values(mixed))[0] == []


def test_samples_with_other_values_are_no_stale_server():
    batch = _made(lambda sample, _: 0.03, lambda _: {})
    other = {at: {"train_log_probs": np.roll(batch.samples[at + 1].train_log_probs, 7)} for at in range(0, 48, 6)}
    assert find_split(batch.with_values(other))[0] == []


def test_mann_whitney_counts_pairs_and_is_close_to_the_exact_test():
    stats = pytest.importorskip("scipy.stats", reason="the comparison's statistics need scipy (extra lab)")
    a, b = np.array([3.0, 5.0, 6.0, 7.0]), np.array([1.0, 2.0, 4.0, 5.0])
    area, p = mann_whitney(a, b)
    exact = stats.mannwhitneyu(a, b, alternative="greater", method="asymptotic", use_continuity=False)
    assert (16 * area, p) == pytest.approx((exact.statistic, exact.pvalue))
    assert mann_whitney(np.ones(9), np.ones(9)) == (0.5, 0.5)
