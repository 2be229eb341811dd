"""prime-rl's own `train()` as a whole, on CPU: FSDP, packed micro-batches, its loss, optimizer, monitors and token
export, on rollouts that the same model sampled; `make test-prime-rl`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.read import read
from mismatch_plugin.diagnose.run_sources import read_source
from mismatch_plugin.hooks.prime_rl import settings

SOURCE = os.environ.get("PRIME_RL_SRC")
if not SOURCE:
    pytest.skip("prime-rl's source is not named: make test-prime-rl PRIME_RL_SRC=CHECKOUT", allow_module_level=True)

from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from tests.hooks.prime_rl.on_cpu import on_cpu, prepare  # noqa: E402

prime = prepare(SOURCE)
STEPS, MICRO_BATCHES, SEQUENCES, PROMPT, LENGTH = 10, 2, 3, 3, 12
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = Qwen2Config(
    vocab_size=64, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False, eos_token_id=None, **SIZES
)


class Rollouts:
    """In the place of the fake data: packed sequences of a model in fp32 (the trainer's forward is bf16)."""

    engine: Any = None

    def __init__(self, *_: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def wait_for_batch(self) -> None:
        pass

    def get_batch(self) -> list[dict[str, Any]]:
        return [self._micro_batch() for _ in range(MICRO_BATCHES)]

    def _micro_batch(self) -> dict[str, Any]:
        ids = torch.randint(2, 64, (SEQUENCES, 1), generator=self.generator)
        with torch.no_grad():
            for _ in range(LENGTH - 1):
                drawn = self.engine(ids).logits[:, -1].softmax(-1).multinomial(1, generator=self.generator)
                ids = torch.cat([ids, drawn], 1)
            chosen = self.engine(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        log_probs = torch.cat([torch.zeros(SEQUENCES, 1), chosen], 1)
        mask = torch.arange(LENGTH).expand(SEQUENCES, -1) >= PROMPT
        mask = mask & (torch.arange(LENGTH) != PROMPT + 3)  # a tool's token
        rows = {
            "input_ids": ids, "position_ids": torch.arange(LENGTH).expand(SEQUENCES, -1), "loss_mask": mask,
            "advantages": torch.randn(SEQUENCES, 1, generator=self.generator).expand(-1, LENGTH),
            "inference_logprobs": torch.where(mask, log_probs, 0.0), "temperatures": torch.ones(SEQUENCES, LENGTH),
        }  # fmt: skip
        absent = ("ref_logprobs", "routed_experts", "mm_kwargs", "mm_token_type_ids", *WEIGHTS)
        return {
            **{name: value.reshape(1, -1) for name, value in rows.items()},
            **dict.fromkeys(absent),
            "env_names": ["math"] * (SEQUENCES * LENGTH), "sequence_lengths": [LENGTH] * SEQUENCES,
            "seq_lens": torch.full((SEQUENCES,), LENGTH), "lora_num_tokens": torch.tensor([SEQUENCES * LENGTH]),
        }  # fmt: skip


WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
CASES: dict[str, dict[str, Any]] = {
    "1": {"use_rollout_log_probs": True, "rs": {"criteria": ["sequence_mean:k3:0.02"]}},
    "3 sequence": {"preset": "pg_is", "terms": {"rollout_kl_coef": 0.1}},
    "3 token mask": {"flags": "--use-rollout-log-probs --use-tis --tis-mode mask --tis-upper-bound 1.02"},
}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_policy_loss(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    Rollouts.engine = Qwen2ForCausalLM(MODEL)
    Rollouts.engine.save_pretrained(tmp_path / "model")
    ours, compared, own = settings(**CASES[case]), [], prime.compute_loss

    def compute_loss(**given: Any) -> Any:
        loss, metrics = own(**given)
        leaf = torch.cat(given["trainer_logprobs"]).detach().requires_grad_()
        again, _ = own(**{**given, "trainer_logprobs": leaf.split(LENGTH)})
        names = {"loss_masks": "loss_mask", "rollout_log_probs": "inference_logprobs", "advantages": "advantages"}
        rows: dict[str, Any] = {name: list(given[theirs]) for name, theirs in names.items()}
        packed = mp.PackedSequences.from_lists(**rows)
        result = mp.policy_loss(leaf, packed, ours)
        wanted = (result.loss_sum + sum(result.terms.values())) / given["rl_scale"]
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        (theirs,), (mine,) = torch.autograd.grad(again, leaf), torch.autograd.grad(wanted, leaf)
        torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=1e-6)
        compared.append(result.correction.tokens.log_ratio.abs().max())
        return loss, metrics

    prime.monitors.MONITORS.clear()  # of the run before
    monkeypatch.setattr(prime, "compute_loss", compute_loss)
    monkeypatch.setattr(prime, "FakeDataLoader", Rollouts)
    off: dict[str, Any] = {"ac": None, "ac_offloading": None, "compile": None, "optim_cpu_offload": False}
    config = prime.TrainerConfig.model_validate(
        {
            "model": {"name": str(tmp_path / "model"), "impl": "hf", "attn": "flash_attention_2", "seq_len": 64, **off},
            "data": {"fake": {"batch_size": MICRO_BATCHES}}, "max_steps": STEPS, "output_dir": tmp_path,
            "loss": {
                "type": "custom", "import_path": "mismatch_plugin.hooks.prime_rl.policy_loss", "kwargs": CASES[case]
            },
            "optim": {"lr": 1e-3, "max_norm": None}, "enable_token_export": True, "monitors": {"file": {}},
        }
    )  # fmt: skip
    config.model.attn = "sdpa"  # its flash attention has no CPU kernel
    with on_cpu():
        prime.train(config)
    assert len(compared) == STEPS * MICRO_BATCHES and 0.001 < max(compared) < 5.0  # bf16, and an older policy
    rows = read_source(tmp_path).rows
    assert len(rows) == STEPS
    assert all(row["rollout_corr/k3_kl"] > 0.0 and row["rollout_corr/rollout_is_ratio_mean"] > 0.0 for row in rows)
    dump = read(tmp_path / "token_exports" / "step_1")
    assert dump.format == "prime_rl" and len(dump.samples) == MICRO_BATCHES * SEQUENCES and dump.has_training
    gaps = [(s.train_log_probs - s.rollout_log_probs)[s.loss_mask > 0] for s in dump.samples]
    found = torch.cat([torch.as_tensor(gap) for gap in gaps])
    assert float((found.exp() - 1 - found).mean()) == pytest.approx(rows[0]["rollout_corr/k3_kl"], rel=1e-3)
