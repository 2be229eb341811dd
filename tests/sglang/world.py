"""A model, the weights that a trainer gives it step by step, and two real SGLang servers that take them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from examples.sglang_server import start_cpu_server
from mismatch_plugin.check.training import TrainingSample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.sglang.client import SGLangClient
from tests.sglang import stories

Size = Literal["mild", "strong"]
SIZES: tuple[Size, ...] = get_args(Size)
State = dict[str, Tensor]
Records = list[RolloutRecord]
Training = list[TrainingSample]
STEPS = 4
"""Optimizer steps that the trainer is ahead of the reference checkpoint at the end."""
LR: dict[Size, float] = {"mild": 1e-4, "strong": 1e-3}
"""Of each step: all of them together move log-probs by about 0.05 and 0.18 nats on average, bfloat16 alone by 0.006."""
PROMPTS, SAMPLES, TOKENS = 32, 4, 96


@dataclass
class World:
    """The model, how its weights moved, and two servers. moved: by size, the weights after 0 to STEPS steps."""

    tokenizer: Any
    model: Any
    moved: dict[Size, list[State]]
    urls: Sequence[str]
    seed: int = 0

    def load(self, states: Sequence[State], version: str) -> None:
        """These weights on each server, under this name, whether they differ from what it has or not."""

        async def run() -> None:
            for url, state in zip(self.urls, states, strict=True):
                async with SGLangClient(url) as client:
                    await client.update_weights_from_tensors(state, version)

        asyncio.run(run())

    def sample(self, prompts: int = PROMPTS, **sampling: Any) -> tuple[Records, list[str]]:
        """SAMPLES answers to each of new prompts, half of the prompts on each server; and the questions."""
        self.seed += 1
        draw = random.Random(self.seed)
        asked = [stories.question_and_answer(draw) for _ in range(prompts)]
        setting = SamplingParameters(max_new_tokens=TOKENS, stop_token_ids=(stories.EOS,), **sampling)

        async def run() -> Records:
            found: Records = []
            for number, url in enumerate(self.urls):
                async with SGLangClient(url, vocab_size=stories.VOCAB) as client:
                    mine = [self.encode(stories.prompt_text(text)) for text, _ in asked[number :: len(self.urls)]]
                    found += await client.generate(mine, setting, samples_per_prompt=SAMPLES)
            return found

        sampled = asyncio.run(run())
        ordered = [pair for number in range(len(self.urls)) for pair in asked[number :: len(self.urls)]]
        pairs = [pair for pair in ordered for _ in range(SAMPLES)]
        numbered = enumerate(zip(sampled, pairs, strict=True))
        return [self._named(index, record, answer) for index, (record, (_, answer)) in numbered], [q for q, _ in pairs]

    def _named(self, index: int, record: RolloutRecord, answer: str) -> RolloutRecord:
        """With the text, and with the share of the right answer's words in it for a reward."""
        text = self.tokenizer.decode(record.response_ids)
        wanted = set(answer.split())
        told = {"text": text, "reward": len(wanted & set(text.split())) / len(wanted)}
        return record.model_copy(update={"sample_id": f"{self.seed}-{index}", "request_id": None, **told})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    @torch.inference_mode()
    def log_probs(
        self,
        state: State,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """log π of each response token in float32."""
        self.model.load_state_dict(state)
        found = []
        for start in range(0, len(prompts), 64):
            part = slice(start, start + 64)
            rows = [(list(p), list(r)) for p, r in zip(prompts[part], responses[part], strict=True)]
            width = max(len(p) + len(r) for p, r in rows)
            padded = torch.tensor([[*p, *r, *[stories.PAD] * (width - len(p) - len(r))] for p, r in rows])
            logits = self.model(padded, use_cache=False).logits  # causal: padding behind changes nothing
            for row, (p, r) in zip(logits, rows, strict=True):
                values = (row[len(p) - 1 : len(p) + len(r) - 1] / temperature).log_softmax(-1)
                found.append(values.gather(1, torch.tensor(r)[:, None])[:, 0].tolist())
        return found

    def score(self, state: State, records: Records, version: str) -> Training:
        """What a trainer without a fault writes, at the temperature of the first record."""
        temperature = records[0].sampling.temperature
        values = self.log_probs(state, [r.prompt_ids for r in records], [r.response_ids for r in records], temperature)
        return [training_sample(record, row, version) for record, row in zip(records, values, strict=True)]

    def clean(self, size: Size = "mild", step: int = STEPS, **sampling: Any) -> tuple[Records, Training, list[str]]:
        """Both servers have the weights of this step, and so has the trainer."""
        state = self.moved[size][step]
        self.load([state] * len(self.urls), f"step-{step}")
        records, questions = self.sample(**sampling)
        return records, self.score(state, records, f"step-{step}"), questions


def training_sample(record: RolloutRecord, values: Sequence[float | None], version: str) -> TrainingSample:
    return TrainingSample(train_log_probs=list(values), sample_id=record.sample_id, weight_version=version)


def make_world(folder: Path, stack: ExitStack) -> World:
    """Train the model, move its weights, write the checkpoints into `folder`, start the servers. About two minutes."""
    tokenizer = stories.make_tokenizer()
    model = stories.make_model(tokenizer)
    _save(folder / "start", tokenizer, model)
    # Faults must be found by what happened alone, so the plugin, which would tell them, is off.
    with ThreadPoolExecutor() as pool, patch.dict(os.environ, {"MISMATCH_PLUGIN_SGLANG": "off"}):
        starting = [
            pool.submit(
                stack.enter_context,
                start_cpu_server(folder / "start", dtype="bfloat16", arguments=("--skip-tokenizer-init",)),
            )
            for _ in range(2)
        ]
        moved: dict[Size, list[State]] = {size: _moved(model, tokenizer, LR[size]) for size in SIZES}
        for size, states in moved.items():
            model.load_state_dict(states[-1])
            _save(folder / size, tokenizer, model)
        urls = [started.result().url for started in starting]
    return World(tokenizer, model.eval(), moved, urls)


def _moved(model: Any, tokenizer: Any, lr: float) -> list[State]:
    """The weights after 0 to STEPS steps of a trainer, which go on from each other."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = [state]
    data = stories.stream(tokenizer, 500, 2)
    for step in range(STEPS):
        stories.train(model, data, 4, lr=lr, rows=8, warm_up=1, seed=10 + step)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.load_state_dict(state)
    return states


def _save(folder: Path, tokenizer: Any, model: Any) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    names = {f"{word.strip('<>')}_token": word for word in stories.SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
