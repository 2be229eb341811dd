"""The example that users copy: split over tensors and over data it trains alike, and a Llama takes its weights over."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.data.sample import Sample
from tests.distributed.launch import launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("transformers") is None,
    reason="needs megatron-core and transformers",
)


class Trained(NamedTuple):
    """After a warm-up and steps with the correction. Log-probs of right answers, [responses, 7] each: of this rank's by
    the trainer, and of all by a Llama that was given its weights."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    log_probs: Tensor
    by_llama: Tensor


def train(tp: int) -> Trained:
    """On `tp` tensor-parallel ranks; the others are data parallel. Rollouts are made up, and so no server is needed."""
    from megatron.core import parallel_state
    from transformers import LlamaForCausalLM

    from examples.megatron_core import train as example  # not above: it changes torch.cuda in its process

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    example.initialize(tp)
    config = mp.preset("token_is").replace(metrics="full")
    trainer = example.Trainer(config, lr=2e-3, state=example.warm_up(steps=4))
    prompts = example.questions(16, "held out")
    samples = [
        Sample(
            prompt_ids=prompt,
            response_ids=example.answer(prompt)[: 7 - i % 3],
            advantages=1.0 - i % 2,
            rollout_log_probs=[-1.0 - 0.1 * i] * (7 - i % 3),
        )
        for i, prompt in enumerate(prompts)
    ]
    metrics = [trainer.step([trainer.batch(samples[:10]), trainer.batch(samples[10:])]) for _ in range(3)]
    mine = [Sample(prompt_ids=prompt, response_ids=example.answer(prompt), advantages=0.0) for prompt in prompts]
    log_probs = trainer.log_probs(trainer.batch(mine)).view(-1, 7)
    weights = trainer.weights()
    if dist.get_rank() > 0:  # transformers writes on the first rank alone
        return Trained(metrics, weights, log_probs, torch.empty(0))
    with tempfile.TemporaryDirectory() as folder:
        example.write_checkpoint(folder)
        llama: Any = LlamaForCausalLM.from_pretrained(folder)
    llama.load_state_dict(weights)
    ids = torch.tensor([[*prompt, *example.answer(prompt)] for prompt in prompts])
    with torch.no_grad():
        table = llama(ids).logits[:, -8:-1].log_softmax(-1)
    return Trained(metrics, weights, log_probs, table.gather(2, ids[:, -7:, None])[..., 0])


def test_it_trains_alike_in_every_layout_and_a_llama_takes_its_weights() -> None:
    (one,) = launch(train, [1], 1)[0]
    tensor, data = launch(train, [2, 1], 2)
    assert one.metrics[0]["rollout_corr/rollout_is_weight_after_mean"] != pytest.approx(1.0, abs=0.01)
    for ranks in (tensor, data):
        assert ranks[0].metrics == ranks[1].metrics
        for mine, expected in zip(ranks[0].metrics, one.metrics, strict=True):
            assert mine == pytest.approx(expected, rel=1e-3, abs=1e-4)
        for name, weight in one.weights.items():
            torch.testing.assert_close(ranks[0].weights[name], weight, atol=1e-4, rtol=0)
    both = torch.stack([rank.log_probs for rank in data], dim=1).flatten(0, 1)
    for log_probs in (tensor[0].log_probs, both):
        torch.testing.assert_close(log_probs, one.log_probs, atol=1e-3, rtol=0)

    for rank in (one, tensor[0], data[0]):
        torch.testing.assert_close(rank.by_llama, one.log_probs, atol=1e-3, rtol=0)
    torch.testing.assert_close(one.by_llama, one.log_probs, atol=1e-4, rtol=0)
    assert one.log_probs.max() - one.log_probs.min() > 0.1
