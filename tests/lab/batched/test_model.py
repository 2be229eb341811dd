"""The model with a leading run dimension: runs are independent, and prompts, caches and responses fit together.

That its numbers are megatron's is shown in test_megatron.py.
"""

from __future__ import annotations

import torch

from mismatch_plugin.lab.batched.model import (
    forward,
    initial_weights,
    map_weights,
    repeated,
    response_log_probs,
    token_log_probs,
)
from tests.lab.batched.problem import SHAPE, random_ids, weights_of


def test_runs_together_are_runs_alone() -> None:
    weights, ids = weights_of(0, 1, 2), random_ids(3, 4, SHAPE.max_length)
    together, _ = forward(SHAPE, weights, ids)
    for n in range(3):
        alone, _ = forward(SHAPE, map_weights(weights, lambda w, n=n: w[n : n + 1]), ids[n : n + 1])
        torch.testing.assert_close(together[n], alone[0], atol=1e-6, rtol=0)
    assert (together[0] - forward(SHAPE, weights, ids[:1].expand(3, -1, -1))[0][1]).abs().max() > 0.1


def test_gradients_stay_in_their_run() -> None:
    weights = map_weights(weights_of(0, 1), lambda w: w.requires_grad_())
    logits, _ = forward(SHAPE, weights, random_ids(2, 4, SHAPE.max_length))
    gradients = torch.autograd.grad(logits[0].square().sum(), list(weights.values()))
    assert all(gradient[0].any() and not gradient[1].any() for gradient in gradients)


def test_a_cache_continues_a_pass() -> None:
    weights, ids = weights_of(0, 1), random_ids(2, 3, SHAPE.max_length)
    whole, _ = forward(SHAPE, weights, ids)
    for cuts in ((8,), (1, 2, 9), tuple(range(1, SHAPE.max_length))):
        cache, parts = None, []
        for start, end in zip((0, *cuts), (*cuts, SHAPE.max_length), strict=True):
            part, cache = forward(SHAPE, weights, ids[:, :, start:end], cache)
            last, _ = forward(SHAPE, weights, ids[:, :, :end], last_only=True)
            torch.testing.assert_close(last, part[:, :, -1:], atol=1e-5, rtol=0)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, atol=1e-5, rtol=0)


def test_a_position_sees_no_later_one() -> None:
    weights, ids = weights_of(0), random_ids(1, 2, SHAPE.max_length)
    other = ids.clone()
    other[:, :, 9:] = (other[:, :, 9:] + 1) % SHAPE.vocab
    one, two = forward(SHAPE, weights, ids)[0], forward(SHAPE, weights, other)[0]
    torch.testing.assert_close(one[:, :, :9], two[:, :, :9], atol=1e-6, rtol=0)
    assert (one[:, :, 9:] - two[:, :, 9:]).abs().amax(-1).min() > 1e-2


def test_log_probs_of_responses_to_shared_prompts() -> None:
    weights, prompts, responses = weights_of(0, 1), random_ids(2, 2, 8), random_ids(2, 6, 6, seed=1)
    whole = torch.cat([prompts.repeat_interleave(3, dim=1), responses], dim=2)  # three responses a prompt
    expected = (forward(SHAPE, weights, whole)[0][:, :, 7:-1] / 1.3).log_softmax(-1)
    found = response_log_probs(SHAPE, weights, prompts, responses, 1.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    own = token_log_probs(SHAPE, weights, prompts, responses, 1.3)
    torch.testing.assert_close(own, expected.gather(3, responses[..., None])[..., 0], atol=1e-5, rtol=0)
    short = response_log_probs(SHAPE, weights, prompts, responses[:, :, :1], 1.3)
    torch.testing.assert_close(short, expected[:, :, :1], atol=1e-5, rtol=0)


def test_repeated_keeps_a_prompts_samples_together() -> None:
    keys = torch.arange(3.0).view(3, 1, 1, 1)
    ((k, v),) = repeated([(keys, keys + 10)], 2)
    assert k.flatten().tolist() == [0, 0, 1, 1, 2, 2] and v.flatten().tolist() == [10, 10, 11, 11, 12, 12]


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    one, two = initial_weights(SHAPE, [7, 3]), initial_weights(SHAPE._replace(layers=1, max_length=9), [3])
    for name, weight in two.items():
        length = min(len(weight[0]), len(one[name][1]))
        assert torch.equal(weight[0][:length], one[name][1][:length]) or name == "embedding.position_embeddings.weight"
        assert "norm" in name or not torch.equal(one[name][0], one[name][1])
