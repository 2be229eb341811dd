"""megatron-core's view of what a server sampled, and the cases that run in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.rollout.records import RolloutRecord


@dataclass
class Scored:
    """Weights under Hugging Face's names, and the log-probs that megatron-core gives to each response with them."""

    state: dict[str, Tensor]
    log_probs: list[list[float]]


def score(seed: int, records: Sequence[RolloutRecord] = (), temperature: float = 1.0) -> Scored:
    """The lab's model with the weights of a seed: exported, and as the training side's log-probs of `records`."""
    from mismatch_plugin.hooks.megatron_core.batch import Sample
    from mismatch_plugin.lab.policy import Policy

    policy = Policy(LabSettings.model_validate({"seed": seed, "temperature": temperature}), None, lr=1.0)
    if not records:
        return Scored(policy.export(), [])
    batches = policy.batches([Sample(record.prompt_ids, record.response_ids, 0.0) for record in records])
    (batch,) = policy.with_old_log_probs(batches)
    assert batch.packed.old_log_probs is not None
    lengths = [len(record.response_ids) for record in records]
    parts = batch.packed.old_log_probs.split(lengths)
    return Scored(policy.export(), [part.tolist() for part in parts])


@dataclass(frozen=True)
class ServerCase:
    """A training run that rolls out with the server at `url`."""

    url: str
    settings: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


def train_on_server(case: ServerCase) -> list[dict[str, Any]]:
    """What `train` reported on this rank (rank 0 alone reports), from weights drawn from the seed."""
    from mismatch_plugin.lab.policy import Policy
    from mismatch_plugin.lab.run import server_engine
    from mismatch_plugin.lab.trainer import is_first_rank, train

    settings = LabSettings.model_validate({"engine": "sglang", **case.settings})
    weights = Policy(settings, None, lr=1.0).weights()
    records: list[dict[str, Any]] = []
    with server_engine(settings, case.url if is_first_rank() else None) as engine:
        train(settings, mp.MismatchConfig.model_validate(case.config), weights, records.append, engine=engine)
    return records
