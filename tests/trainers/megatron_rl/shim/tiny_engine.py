"""An inference engine for Megatron-LM RL on CPU, which samples from the model that it is given, and a task.

MEGATRON_ROLLOUTS=FILE makes it answer from a file instead (a model that is split over ranks cannot be sampled from on
rank 0 alone), and MEGATRON_ROLLOUTS_TO=FILE write such a file. MEGATRON_ENGINE_BIAS: a bias on each token's logit, this
times a standard normal draw, which makes an engine that does not agree with the trainer.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from megatron.core.inference.inference_request import FinishedRequestRecord
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.rl.agent.reward_only_agent import RewardOnlyAgent
from megatron.rl.inference.inference_interface import (
    InferenceRequest,
    InferenceResponse,
    LLMChatMessage,
    ReturnsRaw,
    ReturnsTokens,
)
from megatron.rl.server.api import InferenceServer
from megatron.training.global_vars import get_args, get_tokenizer
from pydantic import PrivateAttr

RESPONSE = 10


class TinyEngine(InferenceServer, ReturnsTokens, ReturnsRaw):
    """What Megatron-LM RL calls of its engine."""

    _model: Any = PrivateAttr(None)
    _epoch: int = PrivateAttr(0)
    _ledger: dict[str, FinishedRequestRecord] = PrivateAttr(default_factory=dict)
    _draws: Any = PrivateAttr(None)
    _bias: Any = PrivateAttr(None)
    _recorded: list[dict[str, Any]] | None = PrivateAttr(None)
    _served: int = PrivateAttr(0)

    @classmethod
    async def launch(cls, model: Any, **_: Any) -> TinyEngine:
        self = cls()
        self._model = model
        self._draws = torch.Generator().manual_seed(7)
        size = get_args().padded_vocab_size
        noise = torch.randn(size, generator=torch.Generator().manual_seed(11))
        self._bias = float(os.environ.get("MEGATRON_ENGINE_BIAS", "0")) * noise
        file = os.environ.get("MEGATRON_ROLLOUTS")
        if file:
            self._recorded = [json.loads(line) for line in Path(file).read_text().splitlines()]
        return self

    def set_generation_epoch(self, generation_epoch: int) -> None:
        self._epoch = generation_epoch

    async def resume(self) -> None: ...

    async def suspend(self) -> None: ...

    async def kill(self) -> None: ...

    def merge_global_request_ledgers(self) -> dict[str, FinishedRequestRecord]:
        shards: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(shards, self._ledger)
        self._ledger = {}
        return {name: record for shard in shards for name, record in shard.items()}

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        tokenizer = get_tokenizer()
        prompt = tokenizer.tokenize(request.prompt[-1].content)
        if self._recorded is not None:
            line = self._recorded[self._served]
            assert line["tokens"][: len(prompt)] == prompt, "the recorded rollouts are of other prompts"
        else:
            line = self._sample(prompt, tokenizer.eod)
            if file := os.environ.get("MEGATRON_ROLLOUTS_TO"):
                with Path(file).open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
        self._served += 1
        name = f"response-{self._served}"
        self._ledger[name] = FinishedRequestRecord([(0, self._epoch)], [(0, self._epoch)], 0)
        tokens, n = line["tokens"], len(prompt)
        text = tokenizer.detokenize(tokens[n:])
        return InferenceResponse(
            response=LLMChatMessage(role="assistant", content=text),
            raw_text=tokenizer.detokenize(tokens),
            token_ids=tokens,
            prompt_length=n,
            logprobs=line["log_probs"],
            finish_reason="stop",
            completion_id=name,
        )

    def _sample(self, prompt: list[int], eod: int) -> dict[str, Any]:
        """Until EOD, which closes the response at the latest; one forward pass a token."""
        tokens, log_probs = list(prompt), []
        length = int(torch.randint(3, RESPONSE + 1, (), generator=self._draws))
        while len(log_probs) < length and tokens[-1] != eod:
            row = torch.tensor([tokens])
            ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=len(tokens),
                max_seqlen_kv=len(tokens),
            )
            logits = self._model(row, torch.arange(len(tokens))[None], None, packed_seq_params=packed)
            log_p = (logits[0, -1].float() + self._bias).log_softmax(-1)
            forced = len(log_probs) == length - 1
            token = eod if forced else int(torch.multinomial(log_p.exp(), 1, generator=self._draws))
            tokens.append(token)
            log_probs.append(float(log_p[token]))
        return {"tokens": tokens, "log_probs": log_probs, "epoch": self._epoch}


class TinyAgent(RewardOnlyAgent):
    """Sixteen prompts of digits; the reward is the share of the answer's tokens that are digits."""

    env_id: str = "tiny"

    async def get_prompt(self, validation: bool) -> tuple[str, Any]:
        if not hasattr(self, "draws"):
            self.draws = random.Random(1)
        number = self.draws.randrange(16)
        return " ".join(f"{number:04b}"), {"problem_id": str(number)}

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        words = response.split()
        return sum(word.isdigit() for word in words) / max(1, len(words))
