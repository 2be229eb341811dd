"""What a checkpoint and running servers give: log-probs of a dump's responses, and responses sampled now."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from mismatch_plugin.config.fields import plain_error
from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.read import Dump, InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.files import read_lines
from mismatch_plugin.sglang.http import shown


class Checkpoint:
    """A transformers causal LM in float32, as the training side.

    One response at a time; memory: its tokens × vocabulary × 4 bytes, next to the model.

    Raises InputError where it cannot be loaded, or where its vocabulary lacks an id of the records.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError:
            raise InputError("a checkpoint needs transformers: pip install transformers") from None
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder: --checkpoint wants one with config.json and weights.")
        try:
            logging.disable_progress_bar()
            # Code in the folder is never run, nor asked about.
            given = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
            pair: Any = AutoModelForCausalLM.from_pretrained(folder, **given)
            model, loaded = pair
        except Exception as error:  # whatever a damaged or half-written folder makes transformers raise
            said = " ".join(str(error).split())[:300]
            raise InputError(f"cannot load a causal language model from {folder}: {said}") from None
        if absent := sorted(loaded["missing_keys"]):
            raise InputError(
                f"{folder} lacks {len(absent)} tensors of its model, such as {absent[0]}, which would be random: "
                f"save them under the model's own names (without a prefix such as module.)."
            )
        self.folder, self.model = folder, model.eval().requires_grad_(False)
        self.vocab = int(model.get_output_embeddings().weight.shape[0])

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a response, by the checkpoint's generation settings."""
        told = getattr(self.model.generation_config, "eos_token_id", None)
        return [] if told is None else list(told) if isinstance(told, list) else [told]

    def scored(self, records: Sequence[Sample]) -> list[Floats]:
        """[n] of each: log-softmax(logits / temperature), at 1 where the record is greedy, without penalties."""
        found = []
        for index, record in enumerate(records):
            log_probs = (self.logits(record, index) / record.log_prob_temperature).log_softmax(-1)
            ids = torch.as_tensor(record.response_ids, dtype=torch.long)
            found.append(log_probs.gather(-1, ids[:, None])[:, 0].double().numpy())
        return found

    @torch.inference_mode()
    def logits(self, record: Sample, index: int) -> Tensor:
        """[n, V] float32 logits from which the response tokens are drawn, before temperature. index: of the record."""
        if not len(record.prompt_ids):
            raise InputError(f"sample {index} has no prompt ids: a checkpoint cannot score its first token.")
        sequence = [*record.prompt_ids.tolist(), *record.response_ids.tolist()]
        outside = next((at for at, token in enumerate(sequence) if not 0 <= token < self.vocab), None)
        if outside is not None:
            raise InputError(
                f"sample {index} has id {sequence[outside]} at position {outside} of prompt and response, but the "
                f"checkpoint's vocabulary ends at {self.vocab - 1}: records and checkpoint use different tokenizers."
            )
        if not len(record.response_ids):
            return torch.zeros(0, self.vocab)
        kept = len(record.response_ids) + 1
        return self.model(torch.tensor([sequence]), logits_to_keep=kept, use_cache=False).logits[0, :-1].float()

    @torch.inference_mode()
    def experts(self, record: Sample) -> Ints | None:
        """As `Sample.routed_experts`, chosen by this model's own routers. None where it tells none, or not of all."""
        told = record.routed_experts
        if told is None:
            return None
        sequence = torch.tensor([[*record.prompt_ids.tolist(), *record.response_ids.tolist()]])
        try:
            out = self.model(sequence[:, :-1], use_cache=False, output_router_logits=True)
        except TypeError:
            return None
        logits = getattr(out, "router_logits", None) or ()
        if len(logits) != told.shape[1]:
            return None
        chosen = [layer.reshape(sequence.shape[1] - 1, -1).topk(told.shape[2]).indices for layer in logits]
        return torch.stack(chosen, dim=1).to(torch.int32).numpy()


def _ask(url: str, what: str, question: Callable[[Any], Awaitable[Any]], **settings: Any) -> Any:
    """The answer of a server. question: of its client. Raises InputError: it does not do what was asked."""
    from mismatch_plugin.sglang.client import GenerateError, RequestError, SGLangClient

    async def ask() -> Any:
        async with SGLangClient(url, retries=1, **settings) as client:
            return await question(client)

    try:
        return asyncio.run(ask())
    except (GenerateError, RequestError, ValueError) as error:
        raise InputError(f"the server at {shown(url)} does not {what}: {error}") from None


def rescore(url: str, records: Sequence[Sample], vocab_size: int | None = None) -> tuple[list[Floats], list[str]]:
    """The server's own log-probs of the responses, at temperature 1, as its current weights give them; and what of the
    server's settings is known to widen the mismatch.

    Raises InputError where the server does not answer or its answer does not fit.
    """
    from mismatch_plugin.config import MismatchWarning

    sequences = [[*record.prompt_ids.tolist(), *record.response_ids.tolist()] for record in records]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MismatchWarning)
        scored = _ask(url, "rescore", lambda client: client.rescore(sequences), vocab_size=vocab_size)
    found = [values[len(record.prompt_ids) :] for record, values in zip(records, scored, strict=True)]
    return found, [str(note.message) for note in caught if issubclass(note.category, MismatchWarning)]


def with_training(sample: Sample, log_probs: Floats, temperature: float | None = None) -> Sample:
    """The same with these log-probs for its training side, of which nothing is known but the temperature."""
    told = (name for name in Sample.model_fields if name.startswith("train"))
    fields = {**dict.fromkeys(told), "train_log_probs": log_probs, "trainer_temperature": temperature, "entropy": None}
    return sample.with_fields(**fields)


def with_reference(samples: Sequence[Sample], start: Checkpoint) -> list[Sample]:
    """The same with log-probs under the weights that the run began with."""
    pairs = zip(samples, start.scored(samples), strict=True)
    return [sample.with_fields(ref_log_probs=values) for sample, values in pairs]


def from_checkpoint(model: Checkpoint, records: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """--checkpoint: the records with a training side, and what it is."""
    samples = [with_training(*pair) for pair in zip(records, model.scored(records), strict=True)]
    samples = [one.with_fields(trained_experts=model.experts(one)) for one in samples]
    return samples, [f"training side: {model.folder} in float32, at each record's temperature"]


def from_server(url: str, records: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """--url, with notes. It rescores at temperature 1 only."""
    for index, record in enumerate(records):
        if record.log_prob_temperature != 1.0:
            raise InputError(
                f"sample {index} was drawn at temperature {record.temperature:g}, but a server rescores at "
                f"temperature 1 only: give --checkpoint or TRAINING instead of --url."
            )
    scored, risks = rescore(url, records)
    samples = [with_training(sample, values, 1.0) for sample, values in zip(records, scored, strict=True)]
    what = f"the server at {shown(url)}, which rescored with its present weights at temperature 1"
    return samples, [*risks, f"training side: {what}"]


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


class Live(NamedTuple):
    """How servers are sampled where there is no dump. prompts: a file with a JSON list of token ids, or a text, a line;
    texts need a tokenizer in the checkpoint's folder."""

    samples: int = 64
    max_new_tokens: int = 128
    temperature: float = 1.0
    prompts: Path | None = None


def sample_live(urls: Sequence[str], model: Checkpoint | None, live: Live) -> Dump:
    """At least `live.samples` responses from every server, all of the same prompts, plain sampling without filters.

    Raises InputError naming the server that does not answer, or what cannot be made into ids.
    """
    ids, note = _prompt_ids(live.prompts, model)
    try:
        sampling = SamplingParameters(temperature=live.temperature, max_new_tokens=live.max_new_tokens)
    except ValidationError as error:
        raise InputError(f"--{plain_error(error, SamplingParameters)}") from None
    each, responses = max(1, -(-live.samples // len(ids))), list[Sample]()
    settings = {"vocab_size": model and model.vocab, "rollout_log_prob_policy": "neutral"}
    for number, url in enumerate(urls):
        told = _ask(url, "sample", lambda client: client.generate(ids, sampling, samples_per_prompt=each), **settings)
        responses += [one.with_fields(sample_id=f"live-{number}-{index}") for index, one in enumerate(told)]
    what = f"{len(responses)} responses sampled now from {', '.join(map(shown, urls))}"
    return Dump(responses, format="live", notes=(f"{what} at temperature {live.temperature:g}, {note}",))


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
