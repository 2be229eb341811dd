"""TEMPORARY: the old reader's answers as samples, until the new reader is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_plugin.data.arrays import NULL
from mismatch_plugin.data.sample import LogProbsOf, Sample


class InputError(ValueError):
    """A file or source from which nothing can be checked."""


@dataclass(frozen=True, eq=False)
class Dump:
    """What a file or folder holds. has_training: the samples have the training side's log-probs. format: what read it.
    notes: what a reader must know (what was left out and why, what was assumed)."""

    samples: Sequence[Sample]
    has_training: bool = False
    format: str = "records"
    notes: tuple[str, ...] = ()


def read(
    path: str | Path,
    training: str | Path | None = None,
    *,
    format: str | None = None,
    log_probs_of: LogProbsOf | None = None,
    temperature: float | None = None,
) -> Dump:
    from mismatch_plugin.rollout.dumps.registry import read_dump

    old = read_dump(path, format, training, log_probs_of=log_probs_of, temperature=temperature)
    samples = []
    for at, response in enumerate(old.responses):
        values = response.rollout_log_probs.copy()
        if response.nulls is not None:
            values[response.nulls] = NULL
        fields: dict[str, Any] = dict(
            response_ids=response.response_ids,
            prompt_ids=response.prompt_ids,
            loss_mask=response.loss_mask,
            rollout_log_probs=values,
            log_probs_of=response.log_probs_of,
            weight_versions=response.weight_versions,
            behaviour_log_probs=response.behaviour_log_probs,
            advantages=response.advantages,
            sample_id=response.sample_id,
            group=response.group,
            step=response.step,
            server=response.server,
            dp_rank=response.dp_rank,
            served=response.served,
            reward=response.reward,
            finish_reason=response.finish_reason,
        )
        if response.asked:
            fields["sampling"] = response.sampling
        if old.scored is not None:
            s = old.scored[at]
            train = s.log_probs.copy()
            if s.nulls is not None:
                train[s.nulls] = NULL
            fields |= dict(
                train_log_probs=train,
                trained_ids=s.token_ids,
                trained_prompt_ids=s.prompt_ids,
                trained_mask=s.loss_mask,
                trainer_version=s.weight_version,
                trainer_fingerprint=s.weight_fingerprint,
                trainer_temperature=s.temperature,
                entropy=s.entropy,
            )
            if s.advantages is not None:
                fields["advantages"] = s.advantages
        samples.append(Sample(**{name: value for name, value in fields.items() if value is not None}))
    return Dump(samples, old.scored is not None, old.format, old.notes)
