"""SkyRL's own policy worker step on CPU: its batch, micro-batches, model wrapper and metrics; `make test-skyrl`."""

from __future__ import annotations

import os
import pickle
import sys
import typing
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typing_extensions

import mismatch_plugin as mp
from mismatch_plugin.hooks.skyrl import register

SOURCE = os.environ.get("SKYRL_SRC")
if not SOURCE:
    pytest.skip("SkyRL's source is not named: make test-skyrl SKYRL_SRC=CHECKOUT", allow_module_level=True)
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402  # before it finds the stand-ins below

for name in ("flash_attn", "flash_attn.bert_padding"):  # imported, and not called with remove_microbatch_padding off
    sys.modules.setdefault(name, ModuleType(name))
sys.modules["flash_attn.bert_padding"].__dict__.update(pad_input=None, unpad_input=None)
PATH = [SOURCE, str(Path(SOURCE, "skyrl-gym"))]
sys.path[:0] = PATH
typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it before Python 3.12

_WORKERS = "skyrl.backends.skyrl_train.workers"
TrainingInputBatch = import_module("skyrl.backends.skyrl_train.training_batch").TrainingInputBatch
HFModelWrapper = import_module(f"{_WORKERS}.model_wrapper").HFModelWrapper
PolicyWorkerBase = import_module(f"{_WORKERS}.worker").PolicyWorkerBase
SkyRLTrainConfig = import_module("skyrl.train.config").SkyRLTrainConfig
ppo_utils = import_module("skyrl.backends.skyrl_train.utils.ppo_utils")


ROWS, WIDTH, PROMPT, MICRO = 6, 8, 3, 2
SEQUENCE = {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 1.02}}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = Qwen2Config(vocab_size=32, num_key_value_heads=2, initializer_range=0.3, **SIZES)
AGGREGATIONS = {
    "token_mean": {"aggregation": "token-mean"},
    "sequence_mean": {"aggregation": "seq-mean-token-mean"},
    "seq_mean_token_sum_norm": {"aggregation": "seq-mean-token-sum", "length_norm": 20.0},
}


class OneRank:
    """What SkyRL's strategy does on one rank; FSDP's needs a GPU."""

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        loss.backward()

    def all_reduce(self, metrics: dict[str, float], op: str, group: Any) -> dict[str, float]:
        return dict(metrics)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _own_registry() -> Any:
    ppo_utils.PolicyLossRegistry.reset()


def host(*overrides: str, reduction: str = "token_mean") -> Any:
    return SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.algorithm.policy_loss_type=mismatch", f"trainer.algorithm.loss_reduction={reduction}",
            "trainer.algorithm.use_kl_loss=false", "trainer.algorithm.temperature=1.0",
            "trainer.algorithm.max_seq_len=20", f"trainer.micro_train_batch_size_per_gpu={MICRO}",
            "trainer.remove_microbatch_padding=false", *overrides,
        ]
    )  # fmt: skip


def worker(cfg: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    address = {"master_addr": "localhost", "master_port": 1, "sequence_parallel_size": 1}
    made = PolicyWorkerBase(cfg=cfg.trainer, world_size=1, rank=0, local_rank=0, **address)
    torch.manual_seed(0)
    made.model, made.strategy = HFModelWrapper(Qwen2ForCausalLM(MODEL), bf16=False), OneRank()
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    made.scheduler = SimpleNamespace(get_last_lr=lambda: [0.1])
    made.mesh_rank, made.device_mesh = SimpleNamespace(dp_size=1), SimpleNamespace(get_group=lambda name: None)
    return made


def mini_batch(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """SkyRL's tensors: responses end at the right, prompts and padding before them; π_old a step behind the sampler."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, WIDTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) >= WIDTH - lengths.unsqueeze(1)).float()
    data = {
        "sequences": torch.randint(2, 32, (ROWS, PROMPT + WIDTH), generator=generator),
        "attention_mask": torch.ones(ROWS, PROMPT + WIDTH, dtype=torch.long),
        "response_mask": mask.clone(),
        "loss_mask": mask,
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(ROWS, WIDTH).clone(),
    }
    data["loss_mask"][0, -2] = 0.0  # a tool's token
    engine = HFModelWrapper(Qwen2ForCausalLM(MODEL), bf16=True)
    engine.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, policy in (("action_log_probs", model), ("rollout_logprobs", engine.bfloat16())):
            data[name] = policy(data["sequences"], WIDTH, data["attention_mask"]).float()
    return data


@pytest.mark.parametrize("reduction", AGGREGATIONS)
@pytest.mark.parametrize(
    ("given", "overrides"),
    [
        ({"rs": {"criteria": ["sequence_mean:k3:0.0002"]}}, ()),
        ({"use_rollout_log_probs": True}, ("trainer.algorithm.eps_clip_high=0.001",)),
        ({**SEQUENCE, "rs": {"criteria": ["token:k2:0.0001@negative"], "policy": "current"}}, ()),
        ({"use_tis": True, "objective": "cispo", "tis": {"level": "geometric", "mode": "mask"}}, ()),
        ({"use_tis": True, "use_rollout_log_probs": True, "tis": {"level": "turn", "upper_bound": 1.01}}, ()),
    ],
)
def test_a_workers_steps_are_those_of_policy_loss(
    given: dict[str, Any], overrides: tuple[str, ...], reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three optimizer steps, each of three micro-batches of one mini-batch."""
    cfg = host(*overrides, reduction=reduction)
    config = register(cfg, mp.MismatchConfig(**given))
    made = worker(cfg, monkeypatch)
    made.policy_loss_fn = pickle.loads(pickle.dumps(made.policy_loss_fn))  # as through SkyRL's actor
    whole = config.replace(**AGGREGATIONS[reduction])
    for step in range(3):
        data = mini_batch(made.model, step)
        with torch.no_grad():
            for parameter in made.model.parameters():  # the first of an earlier mini-batch's steps lies between
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        log_probs = made.model(data["sequences"], WIDTH, data["attention_mask"])
        packed = mp.PackedSequences.from_padded(
            loss_masks=data["loss_mask"], rollout_log_probs=data["rollout_logprobs"],
            old_log_probs=data["action_log_probs"], advantages=data["advantages"],
        )  # fmt: skip
        ours = mp.policy_loss(log_probs, packed, whole)
        wanted = torch.autograd.grad(ours.loss, list(made.model.parameters()))
        scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            data["advantages"], data["loss_mask"], reduction, MICRO, 20
        )
        batch = TrainingInputBatch({**data, "advantages": scaled})
        batch.metadata = {"response_length": WIDTH}
        metrics = made.forward_backward(batch).metrics
        assert metrics["policy_loss"] == pytest.approx(float(ours.loss.detach()), rel=1e-6, abs=1e-6)
        for parameter, gradient in zip(made.model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6)
        assert metrics["loss_metrics/rollout_corr/k3_kl"] > 0.0
        made.optim_step()
