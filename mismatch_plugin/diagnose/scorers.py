"""What a checkpoint and running servers give: log-probs of a dump's responses."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.sglang.http import shown

if TYPE_CHECKING:
    from mismatch_plugin.sglang.control import ServerInfo


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
        return [log_probs for log_probs, _ in self.distributions(records)]

    def distributions(self, records: Sequence[Sample]) -> Iterator[tuple[Floats, Floats]]:
        """[n] of each: the same log-probs, and entropies."""
        for index, record in enumerate(records):
            log_probs = (self.logits(record, index) / record.log_prob_temperature).log_softmax(-1)
            ids = torch.as_tensor(record.response_ids, dtype=torch.long)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            yield log_probs.gather(-1, ids[:, None])[:, 0].double().numpy(), entropy.double().numpy()

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


def rescore(
    url: str, records: Sequence[Sample], vocab_size: int | None = None
) -> tuple[list[Floats], list[str], ServerInfo]:
    """(the server's own log-probs of the responses, at temperature 1, as its current weights give them; what of its
    settings is known to widen the mismatch; its settings, empty where it tells none).

    Raises InputError where the server does not answer or its answer does not fit.
    """
    from mismatch_plugin.config import MismatchWarning
    from mismatch_plugin.sglang.client import GenerateError, RequestError, SGLangClient
    from mismatch_plugin.sglang.control import ServerInfo

    async def ask() -> tuple[list[Floats], ServerInfo]:
        sequences = [[*one.prompt_ids.tolist(), *one.response_ids.tolist()] for one in records]
        async with SGLangClient(url, retries=1, vocab_size=vocab_size) as client:
            return await client.rescore(sequences), client.info or ServerInfo()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MismatchWarning)
        try:
            scored, info = asyncio.run(ask())
        except (GenerateError, RequestError, ValueError) as error:
            raise InputError(f"the server at {shown(url)} does not rescore: {error}") from None
    found = [values[len(record.prompt_ids) :] for record, values in zip(records, scored, strict=True)]
    return found, [str(note.message) for note in caught if issubclass(note.category, MismatchWarning)], info


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
    samples = [
        with_training(record, log_probs).with_fields(entropy=entropy)
        for record, (log_probs, entropy) in zip(records, model.distributions(records), strict=True)
    ]
    return samples, [f"training side: {model.folder} in float32, at each record's temperature"]


def from_server(url: str, records: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """--url, with notes. It rescores at temperature 1 only."""
    for index, record in enumerate(records):
        if record.log_prob_temperature != 1.0:
            raise InputError(
                f"sample {index} was drawn at temperature {record.temperature:g}, but a server rescores at "
                f"temperature 1 only: give --checkpoint or TRAINING instead of --url."
            )
    scored, risks, _ = rescore(url, records)
    samples = [with_training(sample, values, 1.0) for sample, values in zip(records, scored, strict=True)]
    what = f"the server at {shown(url)}, which rescored with its present weights at temperature 1"
    return samples, [*risks, f"training side: {what}"]
