"""A dump to try `mismatch-plugin inspect` on: from a real SGLang server on CPU and a trainer of megatron-core.

    python -W ignore -m examples.inspect.make_dump runs/dump.jsonl --tokens 1000000

The small model of examples/megatron_core is warmed up, and then, step by step: the server gets its weights and samples,
megatron-core scores the responses with the same weights in float32, both are written, and an optimizer step of GRPO
moves the weights. So the dump is of a healthy run. Each sample in it has both sides. Needs the environments of
`make test` and `make sglang`; memory does not grow with --tokens.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Coroutine, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

import mismatch_plugin as mp
from examples.megatron_core.train import (
    SERVER_ARGUMENTS,
    VOCAB,
    Trainer,
    initialize,
    questions,
    reward,
    warm_up,
    write_checkpoint,
)
from examples.sglang_server import start_cpu_server
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.client import SGLangClient

PROMPTS, SAMPLES, PART = 16, 8, 16
"""Prompts of a step, responses to each, and responses of a micro-batch of the trainer."""
LENGTHS = (64, 512)
"""Shortest and longest response; right answers have 7 tokens, so the model goes on behind them."""
CONTEXT = 1024
T = TypeVar("T")


class Dtype(str, Enum):
    """Precisions of the server."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Run:
    """Trainer and server; `samples` yields what is sampled, with the trainer's side."""

    def __init__(self, url: str, seed: int) -> None:
        initialize()
        self.trainer = Trainer(mp.MismatchConfig(), lr=2e-5, state=warm_up(seed=seed))
        self.draw = random.Random(seed)
        self.loop = asyncio.new_event_loop()
        self.client = SGLangClient(url, vocab_size=VOCAB)
        self.tokens = self.steps = 0
        self.seconds = {"rollout": 0.0, "trainer": 0.0}

    def close(self) -> None:
        self._wait(self.client.close())
        self.loop.close()

    def samples(self, tokens: int) -> Iterator[Sample]:
        """Steps until at least so many response tokens are there."""
        while self.tokens < tokens:
            version = f"step-{self.steps}"
            start = time.perf_counter()
            samples = self._roll_out(version)
            self.seconds["rollout"] += time.perf_counter() - start
            start = time.perf_counter()
            scored = self._score_and_train(samples)
            self.seconds["trainer"] += time.perf_counter() - start
            for sample, values in zip(samples, scored, strict=True):
                yield sample.replace(train_log_probs=values, trainer_version=version)
            self.steps += 1
            self.tokens += sum(map(len, samples))
            print(f"step {self.steps}: {self.tokens} tokens", flush=True)

    def _roll_out(self, version: str) -> list[Sample]:
        """The server takes the weights and answers PROMPTS prompts, each group with a length of its own."""
        self._wait(self.client.update_weights_from_tensors(self.trainer.weights(), version))
        prompts = questions(PROMPTS, self.draw.randrange(2**31))

        async def sample() -> list[Sample]:
            groups = []
            for prompt in prompts:
                length = int(LENGTHS[0] * (LENGTHS[1] / LENGTHS[0]) ** self.draw.random())
                sampling = SamplingParameters(max_new_tokens=length, ignore_eos=True)
                groups.append(self.client.generate([prompt], sampling, samples_per_prompt=SAMPLES))
            return [sample for group in await asyncio.gather(*groups) for sample in group]

        return [
            sample.replace(
                sample_id=f"{version}-{index}",
                request_id=None,
                reward=reward(sample.prompt_ids.tolist(), sample.response_ids[:7].tolist()),
            )
            for index, sample in enumerate(self._wait(sample()))
        ]

    def _score_and_train(self, samples: list[Sample]) -> list[Tensor]:
        """The trainer's log-probs with the weights that sampled; then one optimizer step on them."""
        groups = [row // SAMPLES for row in range(len(samples))]
        advantages = mp.group_advantages([sample.reward or 0.0 for sample in samples], groups).tolist()
        samples = [sample.replace(advantages=a) for sample, a in zip(samples, advantages, strict=True)]
        batches = [self.trainer.batch(samples[start : start + PART]) for start in range(0, len(samples), PART)]
        scored = torch.cat([self.trainer.log_probs(batch) for batch in batches])
        self.trainer.step(batches)
        return list(scored.split([len(sample) for sample in samples]))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)


def make_dump(
    out: Annotated[Path, typer.Argument(help="File to write, .jsonl.")],
    tokens: Annotated[int, typer.Option(min=1, help="Response tokens, at least.")] = 1_000_000,
    dtype: Annotated[Dtype, typer.Option(help="Of the server; the trainer is float32.")] = Dtype.bfloat16,
    seed: Annotated[int, typer.Option(help="Of weights and prompts; SGLang's sampling on CPU follows none.")] = 0,
) -> None:
    """Sample on a real SGLang server, score with megatron-core, write both sides."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, context=CONTEXT)
        with start_cpu_server(folder, dtype=dtype.value, arguments=SERVER_ARGUMENTS) as server:
            run = Run(server.url, seed)
            start = time.perf_counter()
            try:
                count = write_samples(out, run.samples(tokens))
            finally:
                run.close()
    seconds = time.perf_counter() - start
    rates = ", ".join(f"{name} {run.tokens / spent:,.0f} tokens/s" for name, spent in run.seconds.items())
    print(f"{count} responses, {run.tokens} response tokens, {run.steps} steps in {seconds:.0f} s ({rates})")
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    typer.run(make_dump)
