"""Where the training side's log-probs come from if no file holds them: a checkpoint, or the server itself."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.check.batch import Sample
from mismatch_plugin.check.training import InputError, TrainingSample
from mismatch_plugin.rollout.address import shown
from mismatch_plugin.rollout.records import RolloutRecord


class Checkpoint:
    """A transformers causal LM in float32, as the training side.

    One response at a time; memory: its tokens × vocabulary × 4 bytes, next to the model.

    Raises InputError where it cannot be loaded, or where its vocabulary lacks an id of the records.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise InputError("a checkpoint needs transformers: pip install transformers") from None
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder: --checkpoint wants one with config.json and weights.")
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"cannot load a causal language model from {folder}: {str(error)[:300]}") from None
        self.model = model.eval().requires_grad_(False)
        self.vocab = int(model.get_output_embeddings().weight.shape[0])

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a response, by the checkpoint's generation settings."""
        told = getattr(self.model.generation_config, "eos_token_id", None)
        return [] if told is None else list(told) if isinstance(told, list) else [told]

    @torch.inference_mode()
    def logits(self, sample: Sample) -> Tensor:
        """[n, V] float32 logits from which the sample's response tokens are drawn, before temperature."""
        return self._logits(sample.record, sample.index)

    def training_samples(self, records: Sequence[RolloutRecord]) -> list[TrainingSample]:
        """The training side: log-softmax(logits / temperature), at 1 where the record is greedy, without penalties."""
        samples = []
        for index, record in enumerate(records):
            logits = self._logits(record, index) / record.sampling.log_prob_temperature
            ids = torch.tensor(record.response_ids, dtype=torch.long)
            values = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            samples.append(TrainingSample(train_log_probs=values.tolist(), index=index))
        return samples

    def _logits(self, record: RolloutRecord, index: int) -> Tensor:
        if not record.prompt_ids:
            raise InputError(f"sample {index} has no prompt ids: a checkpoint cannot score its first token.")
        sequence = [*record.prompt_ids, *record.response_ids]
        outside = next((at for at, token in enumerate(sequence) if not 0 <= token < self.vocab), None)
        if outside is not None:
            raise InputError(
                f"sample {index} has id {sequence[outside]} at position {outside} of prompt and response, but the "
                f"checkpoint's vocabulary ends at {self.vocab - 1}: records and checkpoint use different tokenizers."
            )
        response = len(record.response_ids)
        if response == 0:
            return torch.zeros(0, self.vocab)
        with torch.inference_mode():
            output = self.model(torch.tensor([sequence]), logits_to_keep=response + 1, use_cache=False)
        return output.logits[0, :-1].float()


class Rescored(NamedTuple):
    """samples: as the training side. notes: what of the server's settings is known to widen the mismatch."""

    samples: list[TrainingSample]
    notes: list[str]


def rescore(url: str, records: Sequence[RolloutRecord], vocab_size: int | None = None) -> Rescored:
    """The server's own log-probs of the responses, at temperature 1, as its current weights give them.

    Raises InputError where the server does not answer or its answer does not fit.
    """
    from mismatch_plugin.config import MismatchWarning
    from mismatch_plugin.rollout.client import GenerateError, RequestError, SGLangClient

    async def ask() -> list[list[float | None]]:
        async with SGLangClient(url, retries=1, vocab_size=vocab_size) as client:
            return await client.rescore([[*record.prompt_ids, *record.response_ids] for record in records])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MismatchWarning)
        try:
            scored = asyncio.run(ask())
        except (GenerateError, RequestError, ValueError) as error:
            raise InputError(f"the server at {shown(url)} does not rescore: {error}") from None
    samples = [
        TrainingSample(train_log_probs=values[len(record.prompt_ids) :], index=index, temperature=1.0)
        for index, (record, values) in enumerate(zip(records, scored, strict=True))
    ]
    return Rescored(samples, [str(note.message) for note in caught if issubclass(note.category, MismatchWarning)])
