"""Sampling for many runs at once: the log-probs are the model's, the frequencies follow them, an end ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mismatch_plugin.lab.batched.model import OUTPUT, POSITIONS, WORDS, Shape, response_log_probs
from mismatch_plugin.lab.batched.rollout import BatchedEngine, exponential, generate, rollout_weights
from mismatch_plugin.lab.engines import quantised
from tests.lab.batched.problem import SHAPE, random_ids, run_of, weights_of

EOS, PAD = 12, 13


def test_log_probs_are_the_models() -> None:
    weights, prompts = weights_of(0, 1), random_ids(2, 3, 8)
    drawn = generate(SHAPE, weights, prompts, exponential([0, 1], 12, 6, SHAPE.vocab), samples=4, temperature=0.7)
    table = response_log_probs(SHAPE, weights, prompts, drawn.ids, 0.7)
    expected = table.gather(3, drawn.ids[..., None])[..., 0]
    torch.testing.assert_close(drawn.log_probs, expected, atol=1e-5, rtol=0)
    assert drawn.mask.all() and drawn.ids.shape == (2, 12, 6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    """χ² over the 25 responses of two tokens from five: 24 degrees of freedom, of which 51.2 is the .999 quantile."""
    shape = Shape(layers=1, hidden=8, heads=2, ffn=8, vocab=5, max_length=4)
    weights, prompt, count = weights_of(0, shape=shape), torch.tensor([[[1, 3]]]), 20_000
    noise = exponential([1], count, 2, 5)
    drawn = generate(shape, weights, prompt, noise, samples=count, temperature=temperature)
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    table = response_log_probs(shape, weights, prompt, every[None], temperature)
    p = table.gather(3, every[None, ..., None]).sum((2, 3)).exp()[0]
    assert p.sum().item() == pytest.approx(1, abs=1e-5) and p.max() / p.min() > 2
    observed = torch.bincount(drawn.ids[0, :, 0] * 5 + drawn.ids[0, :, 1], minlength=25)
    assert ((observed - count * p).square() / (count * p)).sum().item() < 51.2


def test_an_end_ends_and_what_follows_is_padding() -> None:
    weights, prompts = weights_of(0), random_ids(1, 4, 8)
    noise = exponential([3], 64, 6, SHAPE.vocab)
    free = generate(SHAPE, weights, prompts, noise, samples=16)
    ended = generate(SHAPE, weights, prompts, noise, samples=16, eos=EOS, pad=PAD)
    lengths = set()
    for ids, kept, log_probs, unended in zip(
        ended.ids[0], ended.mask[0], ended.log_probs[0], free.ids[0].tolist(), strict=True
    ):
        length = unended.index(EOS) + 1 if EOS in unended else 6
        lengths.add(length)
        assert ids.tolist() == unended[:length] + [PAD] * (6 - length)
        assert kept.tolist() == [True] * length + [False] * (6 - length)
        assert not log_probs[length:].any() and (log_probs[:length] < 0).all()
    assert {2, 6} < lengths


def test_runs_with_equal_weights_and_noise_draw_the_same() -> None:
    weights = weights_of(5, 5, 6)
    prompts, noise = random_ids(1, 3, 8).repeat(3, 1, 1), exponential([2], 6, 6, SHAPE.vocab).repeat(3, 1, 1, 1)
    drawn = generate(SHAPE, weights, prompts, noise, samples=2)
    assert torch.equal(drawn.ids[0], drawn.ids[1]) and torch.equal(drawn.log_probs[0], drawn.log_probs[1])
    assert not torch.equal(drawn.ids[0], drawn.ids[2])
    other = generate(SHAPE, weights, prompts, exponential([2, 4, 2], 6, 6, SHAPE.vocab), samples=2)
    assert torch.equal(other.ids[0], drawn.ids[0]) and not torch.equal(other.ids[1], drawn.ids[1])


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4), ("int3", 3), ("int2", 2)])
def test_quantised_forms_are_those_of_each_weight(dtype: str, bits: int) -> None:
    weights = weights_of(0, 1)
    rounded = rollout_weights(weights, dtype)
    assert rounded.keys() == weights.keys()
    same = {name for name in weights if torch.equal(rounded[name], weights[name])}
    assert {WORDS, POSITIONS} < same == {name for name in weights if "linear" not in name and name != OUTPUT}
    for name in weights.keys() - same:
        for n in range(2):
            assert torch.equal(rounded[name][n], quantised(weights[name][n], bits))


def test_float32_is_the_weights_and_other_forms_are_refused() -> None:
    weights = weights_of(0)
    assert all(weight is weights[name] for name, weight in rollout_weights(weights, "float32").items())
    with pytest.raises(ValueError, match="rollout_dtype bfloat16 is not this engine's"):
        rollout_weights(weights, "bfloat16")


def test_the_engine_of_one_run_draws_what_many_do() -> None:
    weights, prompts = weights_of(0, 1), random_ids(1, 3, 8)
    for eos in (None, EOS):
        noise = exponential([9], 12, 6, SHAPE.vocab).repeat(2, 1, 1, 1)
        drawn = generate(
            SHAPE,
            rollout_weights(weights, "int3"),
            prompts.repeat(2, 1, 1),
            noise,
            samples=4,
            temperature=0.8,
            eos=eos,
            pad=PAD,
        )
        engine = BatchedEngine(SHAPE, "int3", eos=eos, pad=PAD)
        engine.load_weights(run_of(weights, 1), 3)
        records = engine.generate(prompts[0].tolist(), samples_per_prompt=4, max_new_tokens=6, temperature=0.8, seed=9)
        assert [record.prompt_ids for record in records] == [ids for ids in prompts[0].tolist() for _ in range(4)]
        for record, ids, log_probs, mask in zip(
            records, drawn.ids[1].tolist(), drawn.log_probs[1].tolist(), drawn.mask[1], strict=True
        ):
            length = int(mask.sum())
            assert record.response_ids == ids[:length] and record.loss_mask == [1] * length
            assert record.rollout_log_probs == pytest.approx(log_probs[:length], abs=1e-6)
            assert record.version_of_token == ["3"] * length and not record.faults()
            assert (record.finish_reason == "stop") == (ids[length - 1] == eos)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"temperature": 0.0}])
def test_the_engine_refuses_what_it_does_not_sample(sampling: dict[str, Any]) -> None:
    engine = BatchedEngine(SHAPE, eos=None, pad=PAD)
    with pytest.raises(ValueError, match="samples unfiltered"):
        engine.generate([[1]], max_new_tokens=1, seed=0, **sampling)
