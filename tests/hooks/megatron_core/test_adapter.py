"""The hook for megatron-core by itself: what is refused, logits that are overwritten, budgets from step to step."""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.hooks import megatron_core
from mismatch_plugin.hooks.megatron_core import MegatronLoss, make_batch
from mismatch_plugin.hooks.megatron_core.model import logits_with_labels
from mismatch_plugin.parallel.groups import ParallelGroups

BACKEND, HEAD = "--mismatch-log-prob-backend", "--mismatch-fused-head"
BYPASS = "--use-rollout-log-probs"
NORMALIZED = "--use-tis --tis-level sequence --tis-batch-normalize"
REJECTS = "--rs-criterion token:ratio:0.6:1.7 --mismatch-denominator accepted"
CURRENT = f"{REJECTS} --rs-policy current"
MEAN, MOE = {"calculate_per_token_loss": False}, {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}
VALUES = [-1.0, -0.5]
SAMPLE = Sample(prompt_ids=[1], response_ids=[2, 3], advantages=1.0, rollout_log_probs=VALUES, train_log_probs=VALUES)


def hook_of(line: str, **model: Any) -> MegatronLoss:
    config = mp.MismatchConfig.from_args(mp.add_arguments(ArgumentParser()).parse_args(line.split()))
    fields = {"calculate_per_token_loss": True, "finalize_model_grads_func": None, **model}
    return MegatronLoss(config, SimpleNamespace(**fields), ParallelGroups())


@pytest.mark.parametrize(
    ("line", "model", "sentence"),
    [
        (f"{NORMALIZED} --tis-batch-normalize-scope rollout_batch", {}, "use step"),
        ("", {**MEAN, "mtp_num_layers": 1}, "switch calculate_per_token_loss on, or MTP off"),
        (f"{NORMALIZED} {BYPASS} --mismatch-entropy-coef 0.1", {}, "there is also: an entropy term"),
        (f"{NORMALIZED} {BYPASS}", MOE, "there is also: MoE aux loss"),
        (f"{BYPASS} {REJECTS}", MEAN, "algorithm 1 knows .*calculate_per_token_loss is off"),
        (f"{BYPASS} --use-tis {REJECTS} --mismatch-kl-coef 0.1", {}, "a KL term"),
        (f"{CURRENT} --mismatch-kl-coef 0.1", {}, r"--rs-policy current knows .*\(a KL term"),
        ("--rs-criterion token:k2:0.5 --rs-group exclude", {}, "--rs-group exclude cannot be had in the megatron-core"),
        (f"{BACKEND} megatron --mismatch-entropy-coef 0.1", {}, "megatron gives no entropy, which an entropy term nee"),
        (f"{HEAD} {BACKEND} megatron", {}, f"{HEAD} .*{BACKEND} megatron"),
        (HEAD, {"mtp_num_layers": 1}, "MTP gives the head other hidden states.*: leave it out"),
        (HEAD, {"defer_embedding_wgrad_compute": True}, r"exact here \(defer_embedding_wgrad_compute.*: leave it out"),
        (HEAD, {"use_mup": True}, "use_mup changes the logits after the head.*: leave it out"),
    ],
)
@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_what_cannot_be_exact_is_refused_before_training(line: str, model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        hook_of(line, **model)
    if HEAD in line or "mtp" not in str(model):
        hook_of("--use-tis", **model)  # the model by itself is fine


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_a_head_that_is_no_plain_column_parallel_linear_is_refused() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from mismatch_plugin.hooks.megatron_core.model import hidden_states

    class Scaled(ColumnParallelLinear):
        pass

    heads: dict[str, Any] = {
        "is a Linear": torch.nn.Linear(2, 3, bias=False),
        "has a bias": torch.nn.Linear(2, 3),
        "is a Scaled": Scaled.__new__(Scaled),
        "is a NoneType": None,
    }
    for message, head in heads.items():
        model = SimpleNamespace(post_process=True, output_layer=head)
        with pytest.raises(ValueError, match=f"this one {message}: leave it out"), hidden_states(model, []):
            pass


def test_another_number_of_losses_than_expected_is_refused() -> None:
    model = SimpleNamespace(compute_language_model_loss=lambda labels, logits: logits.sum())
    found: list[torch.Tensor] = []

    def run(layers: int) -> None:
        with logits_with_labels(SimpleNamespace(module=model), layers):
            found.extend(model.compute_language_model_loss(None, torch.zeros(2, 1, 3)) for _ in range(2))

    run(1)
    assert [one.shape for one in found] == [(), (1, 2, 3)]
    model.compute_language_model_loss = lambda labels, logits: logits.sum()
    with pytest.raises(RuntimeError, match="megatron computed 2 losses for 2 MTP layers and one head"):
        run(2)


@pytest.mark.parametrize(("line", "backend"), [("--use-tis", "auto"), (f"{BACKEND} torch", "torch")])
def test_the_backend_reaches_the_log_probs(line: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(*args: Any, backend: str, **options: Any) -> Any:
        raise RuntimeError(backend)

    monkeypatch.setattr(megatron_core, "vocab_parallel_log_probs", compute)
    hook, batch = hook_of(line), make_batch([SAMPLE])
    hook.start([batch])
    with pytest.raises(RuntimeError, match=backend):
        hook.loss_func(batch, torch.zeros(1, 3, 5, requires_grad=True))


@pytest.mark.parametrize(("line", "overwrites"), [("", True), ("--mismatch-inplace-logits off", False)])
def test_the_gradient_is_written_over_logits_that_a_model_made(line: str, overwrites: bool) -> None:
    """Never over the caller's own."""
    batch = make_batch([SAMPLE])
    for leaf in (True, False):
        hook = hook_of(line)
        hook.start([batch])
        weight = torch.linspace(-1, 1, 15).view(1, 3, 5).requires_grad_()
        logits = weight if leaf else weight * 2
        before = logits.detach().clone()
        hook.loss_func(batch, logits)[0].backward()
        assert torch.equal(logits, before) == (leaf or not overwrites)
        assert weight.grad is not None and weight.grad.abs().sum() > 0
        if not leaf and overwrites:
            assert torch.equal(logits * 2, weight.grad)


def packed(rollout: list[float], old: list[float]) -> mp.PackedSequences:
    rows: Any = {"rollout_log_probs": [torch.tensor(rollout)], "old_log_probs": [torch.tensor(old)]}
    return mp.PackedSequences.from_lists(**rows, loss_masks=[[1] * len(old)], advantages=[torch.tensor(1.0)])


def test_the_scale_of_expert_losses_needs_the_fed_tokens() -> None:
    with pytest.raises(ValueError, match="pass MegatronBatch"):
        hook_of("", **MOE).start([packed(VALUES, VALUES)])
    with pytest.raises(ValueError, match=r"call start\(batches\) before the schedule"):
        hook_of("").loss_func(make_batch([SAMPLE]), torch.zeros(1, 3, 5))


def test_a_budget_goes_from_step_to_step() -> None:
    """The first step has the bound as written, which rejects all but the token that is equal; the next keep half."""
    hook = hook_of("--rs-criterion token:k2:1e-30:share=0.5", finalize_model_grads_func=lambda *_, **__: None)
    old, chunk = [-1.0, -2.0, -3.0, -4.0], torch.nn.Linear(1, 1)
    batch, kept = packed([-1.0, -2.1, -3.2, -4.3], old), []
    for _ in range(3):
        hook.start([batch])
        hook.from_log_probs(torch.tensor(old).requires_grad_(), batch)
        hook.finalize_model_grads([chunk])
        kept.append(hook.metrics()["rollout_corr/accepted_token_fraction"])
    assert kept == [0.25, 0.5, 0.5]


# Samples of a batch ---------------------------------------------------------------------------------------------------

MASKED = SAMPLE.replace(kept_ids=[[2, 4], [3]], behaviour_log_probs=[-0.5, 0.0], sample_id="q7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept_ids": None}, "sample q7 has no kept_ids and others have"),
        ({"behaviour_log_probs": None}, "sample q7 has kept_ids and no behaviour_log_probs, the log-probs over them"),
    ],
)
def test_masks_of_other_tokens_are_refused_by_sample_and_position(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch([MASKED, MASKED.replace(**change)])


def test_samples_keep_the_log_probs_that_fit_and_say_what_is_biased() -> None:
    """Those over the kept ids where there are any. Tokens under the loss mask need no mask of their own."""
    packed = make_batch([MASKED.replace(sampling={"top_p": 0.9})]).packed
    assert packed.rollout_log_probs is not None and packed.rollout_log_probs.tolist() == [-0.5, 0.0]
    with pytest.warns(mp.MismatchWarning, match="top_p 0.9 without a sampling mask"):
        packed = make_batch([SAMPLE.replace(sampling={"top_p": 0.9})]).packed
    assert packed.rollout_log_probs is not None and packed.rollout_log_probs.tolist() == VALUES
    mask = make_batch([MASKED.replace(loss_mask=[0, 1], kept_ids=[[], [3, 4]])]).sampling_mask
    assert mask is not None and (mask.offsets.tolist(), mask.token_ids.tolist()) == ([0, 2], [3, 4])
    assert make_batch([SAMPLE]).sampling_mask is None
