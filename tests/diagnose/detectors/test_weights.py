"""Weights that did not arrive, or in part: by the start's log-probs, by the growth of the gap, by mixed models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import Batch, make_batch
from mismatch_plugin.diagnose.detectors.layers import Mix, way_back
from mismatch_plugin.diagnose.detectors.weights import find_not_updated
from mismatch_plugin.diagnose.findings import Finding
from mismatch_plugin.diagnose.read import check_files
from tests.fixtures.sglang_check.policies import FOLDER, checkpoint, policy, recorded, score, training

QUIET = "bfloat16_temperature_1.0"


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


def _found(batch: Batch) -> list[Finding]:
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
    found = _found(_batch(start, now, labels, models=models))
    assert [(item.fault, item.confidence) for item in found] == ([("weights_not_updated", named)] if named else [])
    for finding in found:
        assert finding.statistics["share"] == pytest.approx(1, abs=0.15)
        assert ("--checkpoint" in finding.fix) == (named == "possible") and "weights_checker" in finding.fix
        assert ("although their labels" in finding.evidence) == (labels[0] is not None)


def test_between_both_without_checkpoints_is_possible():
    batch = _batch("float32", "drift-0.05-7")
    middle = [
        s.with_fields(rollout_log_probs=(s.train_log_probs + s.ref_log_probs) / 2)
        for s in batch
        if s.ref_log_probs is not None
    ]
    (finding,) = _found(replace(batch, samples=tuple(middle)))
    assert (finding.fault, finding.confidence) == ("weights_partly_updated", "possible")
    assert "--reference-checkpoint" in finding.fix and finding.statistics["share"] == pytest.approx(0.5, abs=0.1)
    spans = (WeightSpan(version="1", start=0, end=1),)
    labelled = [sample.with_fields(weight_versions=spans, trainer_version="2") for sample in middle]
    assert _found(replace(batch, samples=tuple(labelled))) == []  # one step of two behind, as the labels say


@pytest.mark.parametrize("size", [0.01, 0.05])
@pytest.mark.parametrize("new", [True, False])
def test_layers_are_named(size: float, new: bool):
    forms = (f"layer-{size}-8", f"others-{size}-7")
    start, now = forms if new else forms[::-1]
    (finding,) = _found(_batch(start, now, models=True))
    assert finding.fault == "weights_partly_updated" and finding.confidence == "likely"
    assert f"only this is {'new' if new else 'old'}: layer 1 (1 of 4 parts)" in finding.evidence
    assert finding.statistics["parts_old"] == (3 if new else 1)


def test_steps_in_between_are_no_parts():
    assert _found(_batch("drift-0.03-7", "drift-0.02-8", models=True)) == []


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


def _run(sizes: list[float], *, lag: int = 0, trainer: bool = True, per_step: int = 24) -> Batch:
    """A step a size: standard deviation of the logits' change between both sides."""
    generator = np.random.default_rng(5)
    samples = []
    for step, size in enumerate(sizes):
        for _ in range(per_step):
            p = generator.uniform(0.05, 0.9, 24)
            span = WeightSpan(version=f"v{step}", start=0, end=24)
            values = np.log(p)
            moved = np.minimum(values + (1 - p) * size * generator.standard_normal(24), 0)
            samples.append(
                Sample(
                    response_ids=np.arange(24),
                    rollout_log_probs=values,
                    weight_versions=(span,),
                    train_log_probs=moved,
                    trainer_version=f"v{step + lag}" if trainer else None,
                )
            )
    return make_batch(samples)


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
    found = _found(_run(sizes, trainer=trainer))
    assert [(item.fault, item.confidence) for item in found] == ([("weights_not_updated", named)] if named else [])
    for finding in found:
        assert "from version 0 to 4" in finding.evidence and finding.first is not None and finding.first.sample == 24
        assert ("--reference-checkpoint" in finding.fix) == (named == "possible")


def test_one_checkpoint_for_all_versions_is_no_growth():
    batch = _run([0.02, 0.05, 0.07, 0.09, 0.1])
    assert _found(replace(batch, from_checkpoint=True)) == []


def test_from_folders_to_the_finding(tmp_path: Path):
    for form in ("layer-0.02-8", "others-0.02-7", "drift-0.02-7"):
        policy(form).save_pretrained(tmp_path / form)
    records = FOLDER / f"{QUIET}.jsonl"
    result = check_files(records, checkpoint=tmp_path / "layer-0.02-8", reference_checkpoint=tmp_path / "others-0.02-7")
    assert [item.fault for item in result.findings] == ["weights_partly_updated"]
    path = tmp_path / "training.jsonl"
    lines = [{"train_log_probs": sample.train_log_probs.tolist()} for sample in training("drift-0.02-7", QUIET)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    policy("float32").save_pretrained(tmp_path / "start")
    for given, confidence in (({}, "possible"), ({"checkpoint": tmp_path / "drift-0.02-7"}, "likely")):
        result = check_files(records, path, reference_checkpoint=tmp_path / "start", **given)
        assert [(item.fault, item.confidence) for item in result.findings] == [("weights_not_updated", confidence)]
        assert any("weights that the run began with" in note for note in result.notes)
    result = check_files(records, path, reference_checkpoint=tmp_path / "others-0.02-7")
    assert [item.fault for item in result.findings] == ["unexplained"]  # a gap of .23, and the start does not fit
