"""Responses sampled here and now from running servers, for `inspect --url` without a dump."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mismatch_plugin.config.fields import plain_error
from mismatch_plugin.data.read import Dump, InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.diagnose.scorers import Checkpoint
from mismatch_plugin.files import read_lines
from mismatch_plugin.sglang.http import shown

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Solve step by step: a train travels 180 km in 2.5 hours. What is its average speed?",
    "Explain why the sky is blue to a ten-year-old.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the prime numbers between 50 and 100 and say how you found them.",
    "Summarise the water cycle in five sentences.",
    "What is 17 * 23 - 48 / 6? Show your work.",
    "Translate into French: the weather will be better tomorrow morning.",
)
"""Sampled when nobody gives prompts and there is a tokenizer."""
RANDOM_PROMPTS, RANDOM_LENGTH = 16, 12


def sample_live(
    urls: Sequence[str],
    model: Checkpoint | None,
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    prompts: Path | None,
) -> Dump:
    """At least `samples` responses from every server, all of the same prompts, plain sampling without filters.

    prompts: a file with a JSON list of token ids, or a text, a line. Texts need a tokenizer in the checkpoint's folder.
    Raises InputError naming the server that does not answer, or what cannot be made into ids.
    """
    ids, note = _prompt_ids(prompts, model)
    try:
        sampling = SamplingParameters(temperature=temperature, max_new_tokens=max_new_tokens)
    except ValidationError as error:
        raise InputError(f"--{plain_error(error, SamplingParameters)}") from None
    each = max(1, -(-samples // len(ids)))
    responses = [
        record.with_fields(sample_id=f"live-{number}-{index}")
        for number, url in enumerate(urls)
        for index, record in enumerate(_generate(url, ids, sampling, each, model))
    ]
    what = f"{len(responses)} responses sampled now from {', '.join(map(shown, urls))} at temperature {temperature:g}"
    return Dump(responses, format="live", notes=(f"{what}, {note}",))


def _generate(
    url: str, ids: list[list[int]], sampling: SamplingParameters, each: int, model: Checkpoint | None
) -> list[Sample]:
    from mismatch_plugin.sglang.client import GenerateError, RequestError, SGLangClient

    async def ask() -> list[Sample]:
        async with SGLangClient(
            url, retries=1, vocab_size=model and model.vocab, rollout_log_prob_policy="neutral"
        ) as client:
            return await client.generate(ids, sampling, samples_per_prompt=each)

    try:
        return asyncio.run(ask())
    except (GenerateError, RequestError, ValueError) as error:
        raise InputError(f"the server at {shown(url)} does not sample: {error}") from None


def _prompt_ids(path: Path | None, model: Checkpoint | None) -> tuple[list[list[int]], str]:
    """Token ids of the prompts, and where they come from."""
    tokenizer = None if model is None else _tokenizer(model.folder)
    if path is not None:
        try:
            lines = [line for _, line in read_lines(path) if line.strip()]
        except (OSError, ValueError) as error:
            raise InputError(f"the prompts {path} cannot be read: {error}") from None
        if not lines:
            raise InputError(f"{path} holds no prompt: give a JSON list of token ids, or a text, a line.")
        return [_ids_of(path, at, line, tokenizer) for at, line in enumerate(lines, start=1)], f"prompts of {path}"
    if tokenizer is not None:
        return [list(tokenizer(text)["input_ids"]) for text in PROMPTS], f"{len(PROMPTS)} built-in prompts"
    if model is None:
        raise InputError("sampling needs prompts: give --prompts FILE with token ids, --checkpoint, or a dump as PATH.")
    drawn = np.random.default_rng(0).integers(0, model.vocab, (RANDOM_PROMPTS, RANDOM_LENGTH))
    return drawn.tolist(), f"{RANDOM_PROMPTS} prompts of random ids: the checkpoint has no tokenizer"


def _ids_of(path: Path, number: int, line: str, tokenizer: Any) -> list[int]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = line
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return value
    if not isinstance(value, str):
        raise InputError(f"{path}, line {number} is neither a JSON list of token ids nor a text: {line[:60]!r}.")
    if tokenizer is None:
        raise InputError(
            f"{path}, line {number} is a text, and there is no tokenizer: give --checkpoint with one, or token ids."
        )
    return list(tokenizer(value)["input_ids"])


def _tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, None without one."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"the tokenizer in {folder} cannot be loaded: {str(error)[:200]}") from None
