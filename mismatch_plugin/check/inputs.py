"""From files, a checkpoint and a server to a batch with both sides, and the check of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mismatch_plugin.check.batch import make_batch
from mismatch_plugin.check.findings import FAULTS, CheckResult
from mismatch_plugin.check.hypotheses import Examination
from mismatch_plugin.check.level import mismatch
from mismatch_plugin.check.run import Step, check_batch
from mismatch_plugin.check.sources import Checkpoint, rescore
from mismatch_plugin.check.training import InputError, TrainingSample, match, read_training
from mismatch_plugin.check.versions import DEFAULT_MAX_STALENESS
from mismatch_plugin.rollout.address import shown
from mismatch_plugin.rollout.files import read_records
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.sampling import SamplingParameters


def check_files(
    records_path: Path,
    training_path: Path | None = None,
    *,
    checkpoint: Path | None = None,
    url: str | None = None,
    weight_version: str | None = None,
    max_staleness: int = DEFAULT_MAX_STALENESS,
    eos_ids: Sequence[int] = (),
    records_only: bool = False,
    accept: Sequence[str] = (),
) -> CheckResult:
    """What the command does. The training side is the file, else the checkpoint, else the server.

    records_only: there is none, and that is meant.

    Raises InputError where something cannot be read, does not fit, or cannot be compared.
    """
    unknown = sorted(set(accept) - set(FAULTS))
    if unknown:
        raise InputError(f"--accept {unknown[0]} is no fault: choose from {', '.join(FAULTS)}.")
    if url is not None and training_path is not None and checkpoint is None:
        raise InputError("TRAINING and --url say the same thing twice: leave one out, or add --checkpoint.")
    sources = (training_path, checkpoint, url)
    if records_only == any(source is not None for source in sources):
        raise InputError(
            "--records-only compares nothing: leave it out, or TRAINING, --checkpoint and --url."
            if records_only
            else "there is no training side: give TRAINING, --checkpoint or --url, or --records-only to check without."
        )
    records = _records(records_path)
    notes = [f"{len(records)} records of {records_path}"]
    samples: list[TrainingSample] | None = None
    if training_path is not None:
        lines = read_training(training_path)
        samples = match(records, lines)
        _refuse_masks(samples)
        notes.append(f"training side: {training_path}")
        if len(lines) > len(records):
            notes.append(f"{len(lines) - len(records)} of its lines belong to no record and were not looked at")
    vocabulary: Step | None = None
    if checkpoint is not None:
        model = Checkpoint(checkpoint)
        eos_ids = [*eos_ids, *model.eos_ids]
        vocabulary = Examination(model.logits, from_checkpoint=samples is None)
        if samples is None:
            samples = model.training_samples(records)
            notes.append(f"training side: {checkpoint} in float32, at each record's temperature")
        if url is not None:
            notes += _server_against(model, url, records)
    elif url is not None:
        _refuse_temperatures(records)
        samples, risks = rescore(url, records)
        notes += risks
        notes.append(
            f"training side: the server at {shown(url)}, which rescored with its present weights at temperature 1"
        )
    batch = make_batch(records, samples, eos_ids=eos_ids)
    if not any(sample.mask.any() for sample in batch.samples):
        raise InputError("every loss mask is 0: there is no trained token to check.")
    return check_batch(
        batch,
        vocabulary=vocabulary,
        trainer_version=weight_version,
        max_staleness=max_staleness,
        accept=accept,
        notes=notes,
    )


def _records(path: Path) -> list[RolloutRecord]:
    try:
        records = read_records(path)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot read the records: {error}") from None
    if not any(record.response_ids for record in records):
        raise InputError(f"{path} holds no response: there is nothing to check.")
    return records


def _refuse_masks(samples: Sequence[TrainingSample]) -> None:
    for index, sample in enumerate(samples):
        mask, values = sample.loss_mask, len(sample.train_log_probs)
        if mask is not None and (len(mask) != values or not {0, 1}.issuperset(mask)):
            raise InputError(
                f"the training side's loss_mask of sample {index} has {len(mask)} entries for {values} log-probs, or "
                f"others than 0 and 1: give one for each."
            )


def _refuse_temperatures(records: Sequence[RolloutRecord]) -> None:
    for index, record in enumerate(records):
        if record.sampling.log_prob_temperature != 1.0:
            raise InputError(
                f"sample {index} was drawn at temperature {record.sampling.temperature:g}, but a server rescores at "
                f"temperature 1 only: give --checkpoint or TRAINING instead of --url."
            )


def _server_against(model: Checkpoint, url: str, records: Sequence[RolloutRecord]) -> list[str]:
    """Does the server hold the checkpoint's weights now? Both at temperature 1, where no sampling setting matters."""
    scored, risks = rescore(url, records, model.vocab)
    neutral = [
        record.model_copy(
            update={
                "sampling": SamplingParameters(),
                "rollout_log_probs": other.train_log_probs,
                "behaviour_log_probs": None,
            }
        )
        for record, other in zip(records, scored, strict=True)
    ]
    level = mismatch(make_batch(neutral, model.training_samples(neutral)))
    if level is None:
        return [*risks, f"the server at {shown(url)} rescored, but no token can be compared with the checkpoint"]
    return [
        *risks,
        f"the server at {shown(url)}, rescoring at temperature 1, against the checkpoint: k3 {level.k3_kl:.3g}, 99 % "
        f"of gaps below {level.abs_p99:.3g} nats",
    ]
