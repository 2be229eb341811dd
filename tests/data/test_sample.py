"""A sample: what is refused, what arrays become, and the round trip through our own files."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.arrays import NULL, is_null
from mismatch_plugin.data.files import row_of, write_samples
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import number_versions, version_number
from tests.data.dumps import spans_of

VALUES = [None, math.nan, math.inf, -math.inf, -0.1, -1e-300, 0.0, -0.0]
SERVED = {
    "server": "host:1",
    "sglang": "0.5.23",
    "dtype": "bfloat16",
    "head_dtype": "float32",
    "temperature": 0.7,
    "weights": [{"fingerprint": "80d44b3730457e7e", "since": "3", "start": 0, "end": 8}],
    "update": {"number": 1, "changed": 2, "tensors": 3, "changed_matrices": 1, "matrices": 2},
}
FULL: dict[str, Any] = {
    "prompt_ids": [1, 2**40], "response_ids": [*range(8)], "loss_mask": [1, 0] * 4, "rollout_log_probs": VALUES,
    "sampling": {"temperature": 0.7, "top_p": 0.9, "stop": ["</s>"]}, "log_probs_of": "filtered",
    "weight_versions": [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 3, "end": 8}],
    "kept_ids": [[0, 1], *[[]] * 7], "behaviour_log_probs": [-1.0] * 8, "finish_reason": "length", "text": "é\u2028",
    "request_id": "r", "sample_id": "s7", "server": "host:1", "dp_rank": 1, "cached_tokens": 2,
    "routed_experts": [[[0, 3]]] * 9, "served": SERVED, "group": 3, "reward": 0.1 + 0.2, "step": 5,
    "train_log_probs": [-0.1 - 1e-16] * 8, "ref_log_probs": [-1.5] * 8, "advantages": [1 / 3] * 8, "entropy": 0.25,
    "trained_ids": [*range(7)], "trained_prompt_ids": [1], "trained_mask": [1] * 7, "trainer_version": 12,
    "trainer_fingerprint": "80d44b3730457e7e", "trainer_temperature": 0.7, "trained_experts": [[[0, 2]]] * 9,
}  # fmt: skip


def same(a: Sample, b: Sample) -> None:
    """Every field, every array bit for bit and of the same dtype; and what was told at all."""
    for name in Sample.model_fields.keys() - {"index"}:
        mine, theirs = getattr(a, name), getattr(b, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes(), name
        else:
            assert mine == theirs, name
    assert a.asked == b.asked


def test_a_sample_survives_our_own_file_bit_for_bit(tmp_path: Path) -> None:
    full, bare = Sample(**FULL), Sample(response_ids=[5], rollout_log_probs=[-1.0])
    both = bare.replace(prompt_ids=[1], train_log_probs=[0.0], ref_log_probs=[-2.0], text="x")
    assert full.model_fields_set == {*Sample.model_fields} - {"index"}  # a new field belongs into FULL
    path = tmp_path / "samples.jsonl"
    assert write_samples(path, [full, full.replace(group="g", sample_id="s8", step=6)]) == 2
    one, two = read(path).samples
    same(one, full)
    assert two.group == "g" and two.replace(group=3, sample_id="s7", step=5).trainer_version == "12"
    write_samples(path, [bare, both])
    (back, other) = read(path).samples
    same(back, bare)
    same(other, both)
    assert (back.index, other.index) == (0, 1)
    assert not back.asked and not len(back.train_log_probs) and back.loss_mask.tolist() == [True]


def test_json_is_strict_and_null_is_not_nan() -> None:
    sample = Sample(**FULL)
    assert is_null(sample.rollout_log_probs).tolist() == [True, *[False] * 7]
    assert is_null(sample.rollout_log_probs[:1].copy()).all() and not is_null(np.array([math.nan])).any()
    row = row_of(sample)
    assert repr(row["rollout_log_probs"]) == repr(VALUES) and row["loss_mask"] == [1, 0] * 4
    assert "text" not in row_of(Sample(response_ids=[1], text=None)) and math.isnan(NULL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "loss_mask has 1 entries, response_ids 2: give one for each"),
        ({"loss_mask": [1, 2]}, "loss_mask: holds 2 at position 1: 1 where a token trains"),
        ({"kept_ids": [[1]]}, "kept_ids has 1 entries"),
        ({"advantages": [1.0]}, "advantages has 1 entries, the response 2 tokens"),
        ({"routed_experts": [[[1]], [[2]]]}, "routed_experts has 2 entries: give one for each of the first 1 tokens"),
        ({"routed_experts": [[1, 2]]}, "routed_experts: has the shape [1, 2] of int64: give integers"),
        ({"trained_experts": [[[-1]]]}, "trained_experts: holds -1: experts are numbered from 0"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 3}]}, r"'a' spans [0, 3)"),
        ({"weight_versions": spans_of(["a", "b"])[::-1]}, r"'a' spans [0, 1) after token 2"),
        ({"served": SERVED}, "served.weights: '80d44b3730457e7e' spans [0, 8) after token 0 of 2"),
        ({"response_ids": [1, -2]}, "response_ids: position 1 is -2, no token id"),
        ({"response_ids": [1, 2.5]}, "response_ids: position 1 is 2.5, not an integer"),
        ({"rollout_log_probs": [-1.0, "x"]}, "rollout_log_probs: position 1 is 'x', not a number"),
        ({"train_log_probs": torch.zeros(2, 2)}, "train_log_probs: has the shape [2, 2], not one row"),
        ({"trainer_temperature": 0.0}, "trainer_temperature: Input should be greater than 0"),
        ({"surprise": 1}, "surprise is no field of a sample"),
        ({"train_logprobs": [-1.0] * 2}, "train_logprobs is no field of a sample: did you mean train_log_probs?"),
        ({"finish_reason": "tired"}, "finish_reason: Input should be 'stop', 'length' or 'abort' (value 'tired')"),
    ],
)
def test_contradictions_are_refused_with_field_position_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Sample(**{"response_ids": [10, 11], "rollout_log_probs": [-1.0, -2.0]} | fields)


def test_lists_tensors_and_arrays_are_one() -> None:
    of_lists = Sample(response_ids=[1, 2], rollout_log_probs=[-1, -0.5], loss_mask=[0, 1], advantages=2)
    of_tensors = Sample(
        response_ids=torch.tensor([1, 2]),
        rollout_log_probs=torch.tensor([-1.0, -0.5], dtype=torch.bfloat16),
        loss_mask=torch.tensor([False, True]),
        advantages=torch.tensor(2.0),
    )
    same(of_lists, of_tensors)
    assert of_lists.advantages is not None and of_lists.advantages.tolist() == [2.0, 2.0]


def test_what_is_known_of_both_sides_follows_replaced_fields() -> None:
    sample = Sample(response_ids=[1, 2, 3], rollout_log_probs=[-1.0, None, -3.0])
    assert not sample.comparable and not sample.usable.any()
    both = sample.replace(train_log_probs=[-1.0, -2.0, -3.0], trained_mask=[1, 1, 0])
    assert both.usable.tolist() == [True, False, False] and both.mask.tolist() == [True, True, False]
    assert sample.mask.all()  # the first one is as it was
    told = both.replace(served=SERVED | {"weights": []})
    assert (both.temperature, told.temperature, told.log_prob_temperature) == (1.0, 0.7, 0.7)
    asked = told.replace(sampling={"temperature": 0.9})
    assert (asked.temperature, asked.log_prob_temperature, asked.worker) == (0.9, 0.7, ("host:1", None))


def test_versions_are_numbered_by_step() -> None:
    assert number_versions(["step_9", "default", "step_10", "step_9"]) == {"step_9": 9, "default": -1, "step_10": 10}
    with pytest.raises(ValueError, match="'latest' does not end in a number"):
        number_versions(["latest"])
    with pytest.raises(ValueError, match="'3fa92b17' and '9bc81d4' are not one name with two numbers"):
        number_versions(["default", "3fa92b17", "9bc81d4"])  # the second would count as the older one
    with pytest.raises(ValueError, match="'v01' has the number of another one"):
        number_versions(["v1", "v01"])
    assert [version_number(v) for v in ("v12", 12, "x", "7" * 19, None)] == [12, 12, None, None, None]
