"""TRL's own GRPOTrainer as a whole, on CPU: a tiny model, real generation in bf16, ten steps; `make test-trl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.health import GateError
from mismatch_plugin.hooks.trl import CorrectionMixin

trl = pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
Dataset = pytest.importorskip("datasets").Dataset
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

STEPS = 10
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = Qwen2Config(
    vocab_size=len(WORDS), num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=1, **SIZES
)
SEQUENCE = {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 1.02}}


class Recording(trl.GRPOTrainer):
    """TRL's batch keeps what it held before the correction; TRL shuffles and splits every tensor of it alike."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output["plain_advantages"] = output["advantages"].clone()
        if "old_per_token_logps" in output:
            output["plain_old"] = output["old_per_token_logps"].clone()
        return output


class Checked(CorrectionMixin, Recording):
    """Every loss that TRL computes, and its gradients, against `policy_loss` of the same micro-batch."""

    aggregation = "token-mean"
    compared = 0
    rejected = 0
    furthest = 0.0

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        log_probs = self._get_per_token_logps_and_entropies(model, ids, seen, inputs["completion_ids"].size(1))[0]
        packed = mp.PackedSequences.from_padded(
            loss_masks=inputs["completion_mask"] * inputs.get("tool_mask", 1),
            rollout_log_probs=inputs["sampling_per_token_logps"],
            old_log_probs=inputs.get("plain_old", log_probs.detach()),
            advantages=inputs["plain_advantages"],
        )
        clip = {"eps_clip_low": self.epsilon_low, "eps_clip_high": self.epsilon_high}
        ours = mp.policy_loss(log_probs, packed, self.mismatch.replace(aggregation=self.aggregation, ppo=clip))
        parameters = list(model.parameters())
        theirs = torch.autograd.grad(loss, parameters, retain_graph=True)
        torch.testing.assert_close(loss, ours.loss, rtol=1e-6, atol=1e-6)
        for one, other in zip(theirs, torch.autograd.grad(ours.loss, parameters), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        self.compared += 1
        self.rejected += int(ours.correction.tokens_N.sum() - ours.correction.kept_N.sum())
        self.furthest = max(self.furthest, float(ours.correction.tokens.log_ratio.abs().max()))
        return super()._compute_loss(model, inputs)  # its graph was used up


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def sample(prompt_ids: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]]]:
    """(ids, log-probs) of the policy in bf16, sampled by transformers."""
    engine: Any = Qwen2ForCausalLM(MODEL)
    engine.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
    inputs, length = torch.tensor(prompt_ids), trainer.args.max_completion_length
    made = engine.bfloat16().eval().generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=length, do_sample=True, top_k=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    ids = made.sequences[:, inputs.shape[1] :]
    log_probs = torch.stack(made.logits, 1).float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ends = [[*row, 1].index(1) + 1 for row in ids.tolist()]
    cut = [(row[:end], values[:end]) for row, values, end in zip(ids.tolist(), log_probs.tolist(), ends, strict=True)]
    return [row for row, _ in cut], [values for _, values in cut]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`. The second token of a response is a tool's."""
    prompt_ids = tokenizer()(prompts)["input_ids"]
    ids, log_probs = sample(prompt_ids, trainer)
    tools = [[0 if at == 1 else 1 for at, _ in enumerate(row)] for row in ids]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": log_probs, "env_mask": tools}


class Engine:
    """In the place of vLLM: what it generates, and its log-probs in vLLM's form."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        ids, log_probs = sample(prompts, self.trainer)
        return prompts, ids, [[[value] for value in row] for row in log_probs], None


def build(folder: Path, settings: dict[str, Any], *, vllm: bool = False, **host: Any) -> Any:
    torch.manual_seed(0)
    given = {"loss_type": "bnpo", "steps_per_generation": 2, "max_steps": STEPS, **host}
    args = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        learning_rate=1e-2, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", disable_tqdm=True,
        report_to=[], **given,
    )  # fmt: skip
    trainer = Checked(
        model=Qwen2ForCausalLM(MODEL),
        reward_funcs=lambda completions, **_: [float(text.count("w1")) for text in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"w{n} w{n + 1} w{n + 2}"} for n in range(20)]),
        processing_class=tokenizer(),
        rollout_func=None if vllm else rollout,
        mismatch=mp.MismatchConfig(**settings),
    )
    if vllm:  # which is not here; TRL asks nothing else of it
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(trainer), -1
    return trainer


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0 rejection": ({"rs": {"criteria": ["sequence_mean:k3:0.0002", "token:k2:0.01"]}}, {}),
    "1": ({"use_rollout_log_probs": True}, {}),
    "1 vllm": ({"use_rollout_log_probs": True}, {"vllm": True}),
    "2 sequence": (SEQUENCE, {}),
    "2 vllm": ({**SEQUENCE, "rs": {"criteria": ["token:k2:0.01@negative"]}}, {"vllm": True}),
    "2 geometric mask": (
        {"use_tis": True, "tis": {"level": "geometric", "mode": "mask", "upper_bound": 1.002}},
        {"vllm": True, "loss_type": "grpo"},
    ),
    "2 turn": ({"use_tis": True, "tis": {"level": "turn", "upper_bound": 1.01}}, {"loss_type": "grpo"}),
    "2 one step a generation": (SEQUENCE, {"steps_per_generation": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_policy_loss(case: str, tmp_path: Path) -> None:
    settings, host = CASES[case]
    trainer = build(tmp_path, settings, **host)
    trainer.aggregation = "seq-mean-token-mean" if host.get("loss_type") == "grpo" else "token-mean"
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert trainer.compared == STEPS and trainer.furthest > 0.005  # bf16 against fp32
    assert any(not torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))
    if trainer.mismatch.rejects:
        assert trainer.rejected > 0


def test_what_stops_a_run(tmp_path: Path) -> None:
    missing = build(tmp_path, SEQUENCE)
    missing.rollout_func = None  # then TRL generates with transformers
    with pytest.raises(ValueError, match=r"algorithm 2 needs the sampler's log-probs.*set use_vllm=True"):
        missing.train()
    with pytest.raises(GateError):
        build(tmp_path, {"gate_kl": 1e-9}).train()
