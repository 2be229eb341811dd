"""From samples to packed tensors: the policy's four answers, weight versions, and the kept ids on the training side."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.pack import pack, sampling_mask
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.log_probs import vocab_parallel_log_probs
from mismatch_plugin.sglang.replies import parse_generate
from tests.data.dumps import spans_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang_generate"


def sampled(log_probs: Any, train: Any = (), **fields: Any) -> Sample:
    ids = fields.pop("response_ids", range(10, 10 + len(log_probs)))
    return Sample(prompt_ids=[1], response_ids=[*ids], rollout_log_probs=log_probs, train_log_probs=[*train], **fields)


def config(policy: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig(rollout_log_prob_policy=policy, use_tis=True)


def spans(*parts: tuple[str, int, int]) -> list[WeightSpan]:
    return [WeightSpan(version=version, start=start, end=end) for version, start, end in parts]


def test_values_masks_names_and_rewards_arrive() -> None:
    samples = [
        sampled([-1.0, -2.0], [-1.5, -2.5], loss_mask=[1, 0], sample_id="a", reward=0.5, advantages=1.0, entropy=0.5),
        sampled([-3.0], [-3.5], sample_id="b", reward=1.0, advantages=[-1.0], entropy=[0.25], ref_log_probs=[-4.0]),
    ]
    with pytest.raises(ValueError, match="ref_log_probs is missing in sample a and present in others"):
        pack(samples)
    packed = pack([samples[0], samples[1].replace(ref_log_probs=None)])
    expected = {
        "rollout_log_probs": [-1.0, -2.0, -3.0],
        "old_log_probs": [-1.5, -2.5, -3.5],
        "advantages": [1.0, 1.0, -1.0],
        "entropy": [0.5, 0.5, 0.25],
        "loss_mask": [True, False, True],
        "rewards": [0.5, 1.0],
    }
    assert {name: getattr(packed, name).tolist() for name in expected} == expected
    assert packed.sequence_ids == ("a", "b") and packed.weight_versions is packed.ref_log_probs is None
    metrics = mp.correct(packed, config("error")).statistics.metrics()
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(-0.5), rel=1e-6)


BAD, TRAIN = [-1.0, None, math.inf, -9999.0, 0.0], [-1.0, -1.0, -1.0, -1.0, -8.0]


def test_the_default_policy_names_sample_position_and_kind() -> None:
    bad = [sampled([-1.0], [-1.0]), sampled(BAD, TRAIN, sample_id="q3")]
    with pytest.raises(mp.InvalidLogProbError) as caught:
        pack(bad)
    for says in ("sequence q3, position 1 is missing or NaN", "kind positive", "kind floor", "and 1 more"):
        assert says in str(caught.value)
    assert "--rollout-log-prob-policy" in str(caught.value)
    with pytest.raises(mp.InvalidLogProbError, match="position 0 is missing or NaN"):
        pack([sampled([None])])  # without a training side too
    assert pack(bad, checked=False).invalid and pack(bad, mp.MismatchConfig()).invalid  # the second only reports


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("neutral", [True] * 6),
        ("drop-token", [True, True, False, False, False, False]),
        ("drop-sequence", [True, *[False] * 5]),
    ],
)
def test_the_other_policies_count_each_kind_and_do_what_they_say(policy: str, kept: list[bool]) -> None:
    packed = pack([sampled([-1.0], [-1.0]), sampled(BAD, TRAIN)], config(policy))
    correction = mp.correct(packed, config(policy))
    assert (correction.keep != 0).tolist() == kept
    metrics = correction.statistics.metrics()
    assert [metrics[f"rollout_corr/invalid_{kind}"] for kind in ("nan", "positive", "floor", "zero_fill")] == [1] * 4
    assert policy != "neutral" or correction.weights.tolist() == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(
    ("sample", "says", "kept", "lost"),
    [
        (sampled([-1.0] * 2, [-1.0] * 3, response_ids=[1, 2, 3]),
         "sample 1: 2 for 3 response tokens (kind length)", [0, 0, 0], 3),
        (sampled([-1.0, -2.0], [-1.0, -2.0, -9.0], response_ids=[5, 6], trained_ids=[5, 6, 2]),
         "sample 1: 2 tokens were sampled, 3 are trained on (kind length)", [1, 1, 0], 1),
        (sampled([-1.0, -2.0, -3.0], [-1.0, -2.0], trained_ids=[10, 9]),
         "sample 1, position 1: 11 was sampled, 9 is trained on (kind token_ids)", [1, 0], 1),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_lost_from_the_first_difference_on(
    sample: Sample, says: str, kept: list[int], lost: int
) -> None:
    with pytest.raises(mp.InvalidLogProbError) as caught:
        pack([sampled([-1.0], [-1.0]), sample])
    assert says in str(caught.value)
    correction = mp.correct(pack([sample], config("drop-token")), config("drop-token"))
    assert (correction.keep != 0).int().tolist() == kept
    assert correction.statistics.metrics()["rollout_corr/invalid_nan"] == lost


def test_the_trainer_s_view_decides_what_is_packed() -> None:
    """Its ids, its mask, its advantages; kept ids follow. What does not train may disagree."""
    longer = sampled(
        [-1.0, -2.0], [-1.0, -2.0, -3.0], trained_ids=[10, 11, 2], trained_mask=[0, 1, 0], advantages=[1.0, 2.0, 3.0]
    )
    packed = pack([longer], dtype=torch.float64)  # the appended token does not train
    assert packed.loss_mask.tolist() == [False, True, False]
    assert packed.advantages is not None and packed.advantages.tolist() == [1.0, 2.0, 3.0]
    assert packed.old_log_probs is not None and packed.old_log_probs.dtype == torch.float64
    kept = longer.replace(kept_ids=[[10], [11, 5]])
    rows = sampling_mask([kept])
    assert rows is not None and rows.offsets.tolist() == [0, 1, 3, 3]
    with pytest.raises(mp.InvalidLogProbError, match="2 tokens were sampled, 3 are trained on"):
        pack([longer.replace(trained_mask=[0, 1, 1])])
    with pytest.raises(ValueError, match="trained_mask has 1 entries, the trainer sees 3 tokens"):
        pack([longer.replace(trained_mask=[1])])
    other = sampled([-1.0, -2.0], [-1.0, -2.0], trained_ids=[10, 9], trained_mask=[1, 0])
    assert pack([other]).loss_mask.tolist() == [True, False]


# Weight versions ------------------------------------------------------------------------------------------------------


def versions_of(samples: list[Sample], **options: Any) -> list[int] | None:
    found = pack(samples, **options).weight_versions
    return None if found is None else found.tolist()


def test_versions_arrive_by_number_or_as_they_are_numbered() -> None:
    two = sampled([-1.0] * 3, [-1.0, -1.5, -1.5], weight_versions=spans(("step_7", 0, 1), ("step_8", 1, 3)))
    first = sampled([-1.0], [-3.0], weight_versions=spans_of(["default"]))
    assert versions_of([two, first]) == [7, 8, 8, -1]
    full = mp.MismatchConfig(use_tis=True, metrics="full")
    metrics = mp.correct(pack([two, first], trainer_version="step_8"), full).statistics.metrics()
    assert len({round(value, 6) for name, value in metrics.items() if "version" in name}) >= 3
    with pytest.raises(ValueError, match="'latest' does not end in a number: name versions by step"):
        pack([sampled([-1.0], weight_versions=spans_of(["latest"]))])
    logged = json.loads((FIXTURES / "weights_updated_in_flight.json").read_text())
    flight = parse_generate(logged["response"], logged["request"]["input_ids"])
    assert versions_of([flight]) == [-1] * 163 + [2] * 237
    # Tool tokens need no version, but sampled ones do.
    both = sampled([-1.0, None, -1.0], loss_mask=[1, 0, 1], weight_versions=spans(("3", 0, 1), ("4", 2, 3)))
    assert (versions_of([both]) or [])[::2] == [3, 4]
    with pytest.warns(mp.MismatchWarning, match="no weight version"):
        assert versions_of([both, sampled([-1.0])]) is None


STALE = mp.MismatchConfig(use_tis=True, rs=mp.Rejection(max_staleness=1))


def test_tokens_that_are_too_old_are_rejected_and_what_that_needs_is_named() -> None:
    samples = [
        sampled([-1.0] * 3, [-1.0] * 3, weight_versions=spans(("v5", 0, 1), ("v6", 1, 3))),
        sampled([-1.0] * 2, [-1.0] * 2, weight_versions=spans(("v7", 1, 2)), loss_mask=[0, 1]),
    ]
    for trainer in ("v7", 7):
        packed = pack(samples, STALE, trainer_version=trainer)
        assert packed.trainer_version == 7
        assert mp.correct(packed, STALE).keep.tolist() == [0, 1, 1, 0, 1]
    packed = pack(samples, STALE, trainer_version="v8")
    assert mp.correct(packed, STALE).keep.tolist() == [0, 0, 0, 0, 1]
    known = sampled([-1.0], [-1.0], weight_versions=spans_of(["v6"]))
    lost = sampled([-1.0] * 2, [-1.0] * 2, weight_versions=spans_of(["v6"]), sample_id="q2")
    given: list[tuple[list[Sample], dict[str, Any], str]] = [
        ([known, lost], {"trainer_version": 7}, "sample q2, position 1 has no weight version.*or leave --rs-max-stal"),
        ([known], {}, "trainer_version, which is missing"),
        ([known], {"trainer_version": "step7"}, "'v6' and 'step7' are not one name"),
    ]
    for records, options, says in given:
        with pytest.raises(ValueError, match=says):
            pack(records, STALE, **options)


# Kept ids -------------------------------------------------------------------------------------------------------------


def filtered(temperature: float = 0.8) -> tuple[torch.Tensor, Sample]:
    """Logits [3, 8] and a response drawn from what top-k 3 keeps of them."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    full = (logits / temperature).log_softmax(-1)
    kept = logits.topk(3).indices
    ids = [int(row[1]) for row in kept]
    inside = full.gather(-1, kept).log_softmax(-1)
    fields = {"response_ids": ids, "behaviour_log_probs": inside[:, 1], "kept_ids": kept.tolist()}
    full_of = [float(full[i, token]) for i, token in enumerate(ids)]
    return logits, sampled(full_of, sampling={"temperature": temperature, "top_k": 3}, **fields)


def test_replaying_the_kept_ids_takes_the_bias_away() -> None:
    logits, drawn = filtered()
    mask = sampling_mask([drawn])
    assert mask is not None
    targets = torch.from_numpy(drawn.response_ids).long()
    train = vocab_parallel_log_probs(logits, targets, temperature=0.8, sampling_mask=mask).log_probs
    drawn = drawn.replace(train_log_probs=train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = pack([drawn])
    torch.testing.assert_close(packed.rollout_log_probs, train, rtol=0, atol=1e-6)
    with pytest.warns(mp.MismatchWarning, match="top_k 3 without a sampling mask.*does not show it"):
        packed = pack([drawn.replace(kept_ids=None, behaviour_log_probs=None)])
    assert packed.rollout_log_probs is not None and bool((packed.rollout_log_probs < train - 0.01).all())
    with pytest.warns(mp.MismatchWarning, match="top_k 3 without a sampling mask.*rollout_is_ratio_mean shows it"):
        pack([drawn.replace(kept_ids=None)])  # log-probs over kept ids that the trainer is not told


def test_the_mask_follows_the_rows_that_train() -> None:
    _, drawn = filtered()
    second = sampled([-1.0, -1.0], loss_mask=[0, 1])
    mask = sampling_mask([drawn, second])
    assert mask is not None and mask.offsets.tolist() == [0, 3, 6, 9, 9, 9]
    assert drawn.kept_ids is not None and mask.token_ids.tolist() == [i for row in drawn.kept_ids for i in row]
    assert sampling_mask([second]) is None
    with pytest.raises(ValueError, match="some samples have behaviour_log_probs"):
        pack([drawn, second])
    with pytest.raises(ValueError, match="sample 1 was sampled with filters"):
        sampling_mask([drawn, sampled([-1.0], sampling={"top_k": 3})])
    lost = [*drawn.kept_ids[:2], [int(drawn.response_ids[2]) + 1]]
    wrong = drawn.replace(kept_ids=lost, sample_id="q5")
    with pytest.raises(ValueError, match=r"sample q5, position 2: the sampled id \d+ is not among the 1 kept"):
        sampling_mask([drawn, wrong])
    assert sampling_mask([wrong.replace(loss_mask=[1, 1, 0])]) is not None
