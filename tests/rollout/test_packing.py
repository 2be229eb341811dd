"""From records to packed tensors: the policy's four answers, weight versions, and the kept ids on the training side."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.parallel.log_probs import vocab_parallel_log_probs
from mismatch_plugin.rollout.packing import number_versions, sampling_mask, to_packed
from mismatch_plugin.rollout.records import RolloutRecord, SamplingParameters, WeightSpan
from mismatch_plugin.sglang.replies import parse_exchange

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang_generate"


def record(log_probs: list[float | None], **fields: Any) -> RolloutRecord:
    ids = fields.pop("response_ids", list(range(10, 10 + len(log_probs))))
    return RolloutRecord(prompt_ids=[1], response_ids=ids, rollout_log_probs=log_probs, **fields)


def config(policy: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig(rollout_log_prob_policy=policy, use_tis=True)


def test_values_masks_names_and_rewards_arrive() -> None:
    records = [
        record([-1.0, -2.0], loss_mask=[1, 0], sample_id="a", reward=0.5),
        record([-3.0], sample_id="b", reward=1.0),
    ]
    packed = to_packed(records, [[-1.5, -2.5], [-3.5]], advantages=[1.0, -1.0])
    assert packed.rollout_log_probs is not None and packed.rollout_log_probs.tolist() == [-1.0, -2.0, -3.0]
    assert packed.loss_mask.tolist() == [True, False, True] and packed.sequence_ids == ("a", "b")
    assert packed.rewards is not None and packed.rewards.tolist() == [0.5, 1.0]
    assert packed.weight_versions is None
    metrics = mp.correct(packed, config("error")).statistics.metrics()
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(-0.5), rel=1e-6)


BAD = [-1.0, None, math.inf, -9999.0, 0.0]
TRAIN = [-1.0, -1.0, -1.0, -1.0, -8.0]


def test_the_default_policy_names_sample_position_and_kind() -> None:
    records = [record([-1.0]), record(BAD, sample_id="q3")]
    with pytest.raises(mp.InvalidLogProbError, match=r"sample q3, position 1 is missing.*and 1 more") as caught:
        to_packed(records, [[-1.0], TRAIN])
    assert "--rollout-log-prob-policy" in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("neutral", [True] * 6),
        ("drop-token", [True, True, False, False, False, False]),
        ("drop-sequence", [True, *[False] * 5]),
    ],
)
def test_the_other_policies_count_each_kind_and_do_what_they_say(policy: str, kept: list[bool]) -> None:
    packed = to_packed([record([-1.0]), record(BAD)], [[-1.0], TRAIN], config(policy))
    correction = mp.correct(packed, config(policy))
    assert (correction.keep != 0).tolist() == kept
    metrics = correction.statistics.metrics()
    counts = {kind: metrics[f"rollout_corr/invalid_{kind}"] for kind in ("nan", "positive", "floor", "zero_fill")}
    assert counts == {"nan": 1, "positive": 1, "floor": 1, "zero_fill": 1}
    if policy == "neutral":
        assert correction.weights.tolist() == pytest.approx([1.0] * 6)


def test_a_list_of_another_length_is_lost_as_a_whole() -> None:
    records = [record([-1.0, -1.0], response_ids=[1, 2, 3]), record([-1.0])]
    train = [[-1.0, -1.0, -1.0], [-1.0]]
    with pytest.raises(mp.InvalidLogProbError, match=r"2 for 3 response tokens.*kind length"):
        to_packed(records, train)
    correction = mp.correct(to_packed(records, train, config("drop-token")), config("drop-token"))
    assert (correction.keep != 0).tolist() == [False, False, False, True]
    assert correction.statistics.metrics()["rollout_corr/invalid_nan"] == 3


def test_an_end_token_appended_by_the_trainer() -> None:
    sampled = record([-1.0, -2.0], response_ids=[5, 6])
    trained = [[5, 6, 2]]
    train = [[-1.0, -2.0, -9.0]]
    with pytest.raises(mp.InvalidLogProbError, match="2 tokens were sampled, 3 are trained on"):
        to_packed([sampled], train, trained_ids=trained)
    packed = to_packed([sampled], train, config("drop-token"), trained_ids=trained)
    assert packed.lengths == (3,)
    assert (mp.correct(packed, config("drop-token")).keep != 0).tolist() == [True, True, False]


def test_other_ids_are_lost_from_the_first_difference_on() -> None:
    sampled = record([-1.0, -2.0, -3.0], response_ids=[5, 6, 7])
    with pytest.raises(mp.InvalidLogProbError, match="position 1: 6 was sampled, 9 is trained on"):
        to_packed([sampled], [[-1.0, -2.0, -3.0]], trained_ids=[[5, 9, 7]])
    packed = to_packed([sampled], [[-1.0, -2.0]], config("neutral"), trained_ids=[[5, 9]])
    assert packed.rollout_log_probs is not None and packed.rollout_log_probs[0] == -1.0
    assert packed.rollout_log_probs.isnan().tolist() == [False, True]


def spans(*parts: tuple[str, int, int]) -> list[WeightSpan]:
    return [WeightSpan(version=version, start=start, end=end) for version, start, end in parts]


def test_versions_reach_the_metrics() -> None:
    records = [
        record([-1.0, -1.0, -1.0], weight_versions=spans(("step_7", 0, 1), ("step_8", 1, 3))),
        record([-1.0], weight_versions=spans(("default", 0, 1))),
    ]
    train = [[-1.0, -1.5, -1.5], [-3.0]]
    packed = to_packed(records, train)
    assert packed.weight_versions is not None and packed.weight_versions.tolist() == [7, 8, 8, -1]
    metrics = mp.correct(packed, mp.MismatchConfig(use_tis=True, metrics="full")).statistics.metrics()
    by_version = {name: value for name, value in metrics.items() if "version" in name}
    assert by_version and len({round(value, 6) for value in by_version.values()}) >= 3


def test_an_update_in_flight_reaches_the_packed_tensors() -> None:
    logged = json.loads((FIXTURES / "weights_updated_in_flight.json").read_text())
    (flight,) = parse_exchange(logged["request"], logged["response"])
    packed = to_packed([flight], [flight.rollout_log_probs])
    assert packed.weight_versions is not None
    assert packed.weight_versions.tolist() == [-1] * 163 + [2] * 237


def test_versions_are_numbered_by_step_or_by_hand() -> None:
    assert number_versions(["step_9", "default", "step_10", "step_9"]) == {"step_9": 9, "default": -1, "step_10": 10}
    with pytest.raises(ValueError, match="'latest' does not end in a number"):
        number_versions(["latest"])
    with pytest.raises(ValueError, match="'a1' and 'a01' both mean 1"):
        number_versions(["a1", "a01"])
    with pytest.raises(ValueError, match="'3fa92b17' and '9bc81d4' are not one name with two numbers"):
        number_versions(["default", "3fa92b17", "9bc81d4"])  # the second would count as the older one
    named = record([-1.0], weight_versions=spans(("latest", 0, 1)))
    packed = to_packed([named], version_numbers={"latest": 4})
    assert packed.weight_versions is not None and packed.weight_versions.tolist() == [4]
    with pytest.raises(ValueError, match=r"lacks weight versions .'latest'."):
        to_packed([named], version_numbers={"other": 4})


def test_tool_tokens_need_no_version_but_sampled_ones_do() -> None:
    first = record([-1.0], weight_versions=spans(("3", 0, 1)))
    both = RolloutRecord(
        prompt_ids=[1],
        response_ids=[10, 77, 11],
        rollout_log_probs=[-1.0, None, -1.0],
        loss_mask=[1, 0, 1],
        weight_versions=spans(("3", 0, 1), ("4", 2, 3)),
    )
    packed = to_packed([both], [[-1.0] * 3])
    assert packed.weight_versions is not None and packed.weight_versions[[0, 2]].tolist() == [3, 4]
    with pytest.warns(mp.MismatchWarning, match="no weight version"):
        assert to_packed([first, record([-1.0])]).weight_versions is None


def filtered(temperature: float = 0.8) -> tuple[torch.Tensor, RolloutRecord]:
    """Logits [3, 8] and a response drawn from what top-k 3 keeps of them."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    full = (logits / temperature).log_softmax(-1)
    kept = logits.topk(3).indices
    ids = [int(row[1]) for row in kept]
    inside = full.gather(-1, kept).log_softmax(-1)
    return logits, RolloutRecord(
        prompt_ids=[1],
        response_ids=ids,
        rollout_log_probs=[float(full[i, token]) for i, token in enumerate(ids)],
        behaviour_log_probs=inside[:, 1].tolist(),
        kept_ids=kept.tolist(),
        sampling=SamplingParameters(temperature=temperature, top_k=3),
    )


def test_replaying_the_kept_ids_takes_the_bias_away() -> None:
    logits, drawn = filtered()
    mask = sampling_mask([drawn])
    assert mask is not None
    train = vocab_parallel_log_probs(
        logits, torch.tensor(drawn.response_ids), temperature=0.8, sampling_mask=mask
    ).log_probs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = to_packed([drawn], [train])
    torch.testing.assert_close(packed.rollout_log_probs, train, rtol=0, atol=1e-6)
    with pytest.warns(mp.MismatchWarning, match="top_k=3 without the sampling mask"):
        packed = to_packed([drawn], [train], which="full")
    assert packed.rollout_log_probs is not None and bool((packed.rollout_log_probs < train - 0.01).all())


def test_the_mask_follows_the_rows_that_train() -> None:
    _, drawn = filtered()
    second = record([-1.0, -1.0], loss_mask=[0, 1])
    mask = sampling_mask([drawn, second])
    assert mask is not None and mask.offsets.tolist() == [0, 3, 6, 9, 9, 9]
    assert drawn.kept_ids is not None and mask.token_ids.tolist() == [i for row in drawn.kept_ids for i in row]
    only = sampling_mask([drawn, second], trained_only=True)
    assert only is not None and only.offsets.tolist() == [0, 3, 6, 9, 9]
    assert sampling_mask([second]) is None
    lost = record([-1.0], sampling=SamplingParameters(top_k=3))
    with pytest.raises(ValueError, match="sample 1 was sampled with filters"):
        sampling_mask([drawn, lost])


def test_log_probs_over_kept_ids_that_the_trainer_is_not_told_leave_the_kept_mass() -> None:
    _, drawn = filtered()
    untold = drawn.model_copy(update={"kept_ids": None})
    with pytest.warns(mp.MismatchWarning, match="top_k 3 without a sampling mask.*rollout_is_ratio_mean shows it"):
        to_packed([untold], [drawn.rollout_log_probs])


def test_kept_ids_that_lack_the_sampled_one_are_refused() -> None:
    _, drawn = filtered()
    assert drawn.kept_ids is not None
    lost = [*drawn.kept_ids[:2], [drawn.response_ids[2] + 1]]
    wrong = drawn.model_copy(update={"kept_ids": lost, "sample_id": "q5"})
    with pytest.raises(
        ValueError, match=r"kept_ids of sample q5, position 2: the sampled id \d+ is not among the 1 kept"
    ):
        sampling_mask([drawn, wrong])
    untrained = wrong.model_copy(update={"loss_mask": [1, 1, 0]})
    assert sampling_mask([untrained]) is not None


STALE = mp.MismatchConfig(use_tis=True, rs=mp.Rejection(max_staleness=1))


def test_tokens_that_are_too_old_are_rejected_from_records_on() -> None:
    records = [
        record([-1.0, -1.0, -1.0], weight_versions=spans(("v5", 0, 1), ("v6", 1, 3)), loss_mask=[1, 1, 1]),
        record([-1.0, -1.0], weight_versions=spans(("v7", 1, 2)), loss_mask=[0, 1]),
    ]
    for trainer in ("v7", 7):
        packed = to_packed(records, [[-1.0] * 3, [-1.0] * 2], STALE, trainer_version=trainer)
        assert packed.trainer_version == 7
        assert mp.correct(packed, STALE).keep.tolist() == [0, 1, 1, 0, 1]
    numbers = {"v5": 1, "v6": 2, "v7": 3, "v8": 4}
    packed = to_packed(records, [[-1.0] * 3, [-1.0] * 2], STALE, trainer_version="v8", version_numbers=numbers)
    assert mp.correct(packed, STALE).keep.tolist() == [0, 0, 0, 0, 1]


def test_what_staleness_needs_and_a_record_lacks_is_named() -> None:
    known = record([-1.0], weight_versions=spans(("v6", 0, 1)))
    lost = record([-1.0, -1.0], weight_versions=spans(("v6", 0, 1)), sample_id="q2")
    train = [[-1.0], [-1.0, -1.0]]
    with pytest.raises(
        ValueError, match=r"sample q2, position 1 has no weight version.*or leave --rs-max-staleness out"
    ):
        to_packed([known, lost], train, STALE, trainer_version=7)
    with pytest.raises(ValueError, match="trainer_version, which is missing"):
        to_packed([known], train[:1], STALE)
    with pytest.raises(ValueError, match="version_numbers lacks trainer_version 'v9'"):
        to_packed([known], train[:1], STALE, trainer_version="v9", version_numbers={"v6": 0})
    with pytest.raises(ValueError, match="'v6' and 'step7' are not one name"):
        to_packed([known], train[:1], STALE, trainer_version="step7")


def test_mixtures_of_log_probs_are_refused() -> None:
    _, drawn = filtered()
    plain = record([-1.0])
    with pytest.raises(ValueError, match="some records have behaviour_log_probs"):
        to_packed([drawn, plain])
    with pytest.raises(ValueError, match="sample 1 has no behaviour_log_probs"):
        to_packed([drawn, plain], which="behaviour")
    with pytest.raises(ValueError, match="which='best' is unknown"):
        to_packed([plain], which="best")  # pyright: ignore[reportArgumentType]
