"""`--mismatch-log-prob-backend`: which backend the hook asks for, what is refused, and where it has no effect."""

from __future__ import annotations

from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.hooks.megatron_core import MegatronLoss, adapter, make_batch
from mismatch_plugin.log_probs import Backend, LogProbs
from mismatch_plugin.parallel.groups import ParallelGroups

FLAG = "--mismatch-log-prob-backend"

VALUES = [-1.0, -0.5]
SAMPLE = Sample(prompt_ids=[1], response_ids=[2, 3], advantages=1.0, rollout_log_probs=VALUES, train_log_probs=VALUES)


def config_of(line: str) -> mp.MismatchConfig:
    return mp.MismatchConfig.from_args(mp.add_arguments(ArgumentParser()).parse_args(line.split()))


def hook_of(config: mp.MismatchConfig) -> MegatronLoss:
    model = SimpleNamespace(calculate_per_token_loss=True, finalize_model_grads_func=None)
    return MegatronLoss(config, model, ParallelGroups())


def asked_for(hook: MegatronLoss, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend with which the hook calls `vocab_parallel_log_probs` in a step."""
    asked: list[str] = []

    def compute(logits: torch.Tensor, targets: torch.Tensor, *, backend: str, **options: Any) -> LogProbs:
        asked.append(backend)
        return LogProbs(logits.sum(-1)[: len(targets)], None)

    monkeypatch.setattr(adapter, "vocab_parallel_log_probs", compute)
    batch = make_batch([SAMPLE])
    hook.start([batch])
    hook.loss_func(batch, torch.zeros(1, 3, 5, requires_grad=True))
    (name,) = asked
    return name


@pytest.mark.parametrize("name", get_args(Backend))
def test_every_choice_reaches_the_log_probs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(hook_of(config_of(f"{FLAG} {name}")), monkeypatch) == name


def test_the_default_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(hook_of(config_of("--use-tis")), monkeypatch) == "auto"


def test_the_start_block_names_a_backend_that_was_chosen() -> None:
    assert "log-probs from logits: triton" in config_of(f"{FLAG} triton").describe()
    assert "log-probs from logits" not in mp.MismatchConfig().describe()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{FLAG} megatron --mismatch-entropy-coef 0.1", "megatron gives no entropy, which an entropy term needs"),
        (f"{FLAG} transformer-engine --mismatch-metrics full", "no entropy, which --mismatch-metrics full shows"),
    ],
)
def test_contradictions_are_refused_before_training(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hook_of(config_of(line))


def test_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(f"{FLAG} liger")
    assert "invalid choice: 'liger'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"log_prob_backend is 'liger': it should be 'auto', 'torch', 'triton'"):
        mp.MismatchConfig.build({"log_prob_backend": "liger"})


@pytest.mark.parametrize(("line", "overwrites"), [("", True), ("--mismatch-inplace-logits off", False)])
def test_the_gradient_is_written_over_logits_that_a_model_made(line: str, overwrites: bool) -> None:
    """Never over the caller's own."""
    batch = make_batch([SAMPLE])
    gradients = []
    for leaf in (True, False):
        hook = hook_of(config_of(line))
        hook.start([batch])
        weight = torch.linspace(-1, 1, 15).view(1, 3, 5).requires_grad_()
        logits = weight if leaf else weight * 2
        before = logits.detach().clone()
        hook.loss_func(batch, logits)[0].backward()
        assert torch.equal(logits, before) == (leaf or not overwrites)
        gradients.append(weight.grad)
        if not leaf and overwrites:
            assert weight.grad is not None and torch.equal(logits * 2, weight.grad)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
