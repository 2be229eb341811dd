"""From files, a checkpoint and a server to a batch with both sides, and the check of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch_plugin.check.batch import DEFAULT_MAX_STALENESS, make_batch
from mismatch_plugin.check.findings import FAULTS, CheckResult
from mismatch_plugin.check.level import mismatch
from mismatch_plugin.check.run import check_batch
from mismatch_plugin.check.sources import ADAPTERS, Checkpoint, TrainingSide, rescore
from mismatch_plugin.check.training import InputError
from mismatch_plugin.rollout.address import shown
from mismatch_plugin.rollout.dumps.registry import read_dump
from mismatch_plugin.rollout.responses import Dump, Response
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
    format: str | None = None,
) -> CheckResult:
    """What the command does. The training side is the file, else the checkpoint, else the server, else the one that
    the dump of the records holds itself. format: of the records, a name of `rollout.dumps.registry.FORMATS`.

    records_only: there is none, and that is meant.

    Raises InputError where something cannot be read, does not fit, or cannot be compared.
    """
    unknown = sorted({*accept} - {*FAULTS})
    if unknown:
        raise InputError(f"--accept {unknown[0]} is no fault: choose from {', '.join(FAULTS)}.")
    if url is not None and training_path is not None and checkpoint is None:
        raise InputError("TRAINING and --url say the same thing twice: leave one out, or add --checkpoint.")
    given: dict[str, Any] = {"TRAINING": training_path, "--checkpoint": checkpoint, "--url": url}
    source = next((name for name, value in given.items() if value is not None), None)
    if records_only and source is not None:
        raise InputError("--records-only compares nothing: leave it out, or TRAINING, --checkpoint and --url.")
    dump = _dump(records_path, format, training_path)
    records = dump.responses
    if source is None and dump.scored is None and not records_only:
        raise InputError(
            "there is no training side: give TRAINING, --checkpoint or --url, or --records-only to check without."
        )
    model = None if checkpoint is None else Checkpoint(checkpoint)
    given["--checkpoint"] = model
    side = None
    if source is not None and source != "TRAINING":
        side = ADAPTERS[source](given[source], records)
    elif dump.scored is not None and not records_only:
        side = TrainingSide(dump.scored, [f"training side: {training_path or records_path}"])
    notes = [f"{len(records)} records of {records_path}", *dump.notes, *(side.notes if side else [])]
    if model is not None and url is not None:
        notes += _server_against(model, url, records)
    known = [*eos_ids, *(model.eos_ids if model else [])]
    batch = make_batch(records, side and side.samples, eos_ids=known, trainer_version=weight_version)
    if not any(sample.mask.any() for sample in batch):
        raise InputError("every loss mask is 0: there is no trained token to check.")
    batch = replace(batch, max_staleness=max_staleness)
    if model is not None:
        own = source == "--checkpoint"
        batch = replace(batch, logits=lambda sample: model.logits(sample.record, sample.index), from_checkpoint=own)
    return check_batch(batch, accept=accept, notes=notes)


def _dump(path: Path, format: str | None, training: Path | None) -> Dump:
    try:
        dump = read_dump(path, format, training)
    except InputError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot read the records: {error}") from None
    if not any(len(record.response_ids) for record in dump.responses):
        raise InputError(f"{path} holds no response: there is nothing to check.")
    return dump


def _server_against(model: Checkpoint, url: str, records: Sequence[Response]) -> list[str]:
    """Does the server hold the checkpoint's weights now? Both at temperature 1, where no sampling setting matters."""
    scored, risks = rescore(url, records, model.vocab)
    neutral = [
        replace(record, sampling=SamplingParameters(), behaviour_log_probs=None, rollout_log_probs=other.log_probs)
        for record, other in zip(records, scored, strict=True)
    ]
    level = mismatch(make_batch(neutral, model.scored(neutral)))
    if level is None:
        return [*risks, f"the server at {shown(url)} rescored, but no token can be compared with the checkpoint"]
    return [*risks, f"the server at {shown(url)}, rescoring at temperature 1, against the checkpoint: {level}"]
