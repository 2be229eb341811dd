"""An engine of NeMo-RL's own abstract type, and what sends it weights: it samples from its own copy of the model.

NEMO_RL_ENGINE_BIAS: a bias on each token's logit, this times a standard normal draw, which makes an engine that does
not agree with the trainer. NEMO_RL_NAN=1: a log-prob of each rollout that it did not return.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import math
import os
from typing import Any

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.weight_sync.interfaces import WeightSynchronizer
from tiny_policy import MODELS, load


class Copies(WeightSynchronizer):
    """The policy's weights into the engine's model, when `grpo_train` says so."""

    def __init__(self, model: Any) -> None:
        self.model, self._stale = model, True

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, float]:
        self.model.load_state_dict(MODELS[0].state_dict())
        self._stale = False
        return {}

    @property
    def is_stale(self) -> bool:
        return self._stale

    def init_communicator(self) -> None: ...

    def shutdown(self) -> None: ...


class TinyEngine(GenerationInterface):
    def __init__(self, cluster: Any, config: Any) -> None:
        self.cfg = config
        self.model = load(config)
        with torch.no_grad():  # nothing agrees until weights have been sent
            for parameter in self.model.parameters():
                parameter.zero_()
        self.weight_synchronizer = Copies(self.model)
        self.draws = torch.Generator().manual_seed(7)

    def generate(self, data: Any, greedy: bool) -> Any:
        ids, lengths = data["input_ids"], data["input_lengths"]
        noise = torch.randn(self.model.config.vocab_size, generator=torch.Generator().manual_seed(11))
        bias = float(os.environ.get("NEMO_RL_ENGINE_BIAS", "0")) * noise
        most = self.cfg["max_new_tokens"]
        output = torch.full((len(ids), ids.shape[1] + most), self.cfg["_pad_token_id"])
        found, made = torch.zeros(output.shape), torch.zeros(len(ids), dtype=torch.long)
        for row, length in enumerate(lengths.tolist()):
            tokens = ids[row, :length].tolist()
            for _ in range(int(torch.randint(2, most + 1, (), generator=self.draws))):
                with torch.no_grad():
                    log_p = (self.model(torch.tensor([tokens])).logits[0, -1].float() + bias).log_softmax(-1)
                token = int(torch.multinomial(log_p.exp(), 1, generator=self.draws))
                found[row, len(tokens)] = log_p[token]
                tokens.append(token)
            if row == 0 and "NEMO_RL_NAN" in os.environ:
                found[row, length] = math.nan
            made[row] = len(tokens) - length
            output[row, : len(tokens)] = torch.tensor(tokens)
        return BatchedDataDict(
            {
                "output_ids": output,
                "logprobs": found,
                "generation_lengths": made,
                "unpadded_sequence_lengths": lengths + made,
                "truncated": torch.zeros(len(ids), dtype=torch.bool),
            }
        )

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def _true(self, *args: Any, **kwargs: Any) -> bool:
        return True

    prepare_for_generation = finish_generation = shutdown = _true

    def clear_logger_metrics(self) -> None: ...

    def get_logger_metrics(self) -> dict[str, Any]:
        return {}
