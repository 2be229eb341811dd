"""From files, checkpoints and servers to a batch with both sides, and the check of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.read import Dump, InputError, read
from mismatch_plugin.diagnose.batch import DEFAULT_MAX_STALENESS, Batch, make_batch
from mismatch_plugin.diagnose.detectors.layers import Mix
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.detectors.servers import compare_servers, workers_of
from mismatch_plugin.diagnose.findings import FAULTS, CheckResult, Finding
from mismatch_plugin.diagnose.scorers import Checkpoint, from_checkpoint, from_server, with_reference, with_training
from mismatch_plugin.files import encodable

_NO_TRAINING = "there is no training side: give TRAINING, --checkpoint or --url, or --records-only to check without."


class Inputs(NamedTuple):
    """batch: both sides. notes: what was read, and what a reader must know of it. findings: what reading itself showed,
    which no detector of the batch can see. source, format: what was read, and as what."""

    batch: Batch
    notes: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    source: str = ""
    format: str = "records"


def check_files(records_path: Path, training_path: Path | None = None, **sources: Any) -> CheckResult:
    """What the command does: `read_inputs`, and the check of it. accept: as in `check_batch`.

    Raises InputError where something cannot be read, does not fit, or cannot be compared.
    """
    accept = sources.pop("accept", ())
    refuse_unknown_faults(accept)
    inputs = read_inputs(records_path, training_path, **sources)
    result = check_batch(inputs.batch, accept=accept, notes=inputs.notes, found=inputs.findings)
    if not inputs.batch.has_training and not sources.get("records_only") and result.status != "faults":
        raise InputError(_NO_TRAINING)  # what the servers told of themselves is no comparison
    return result


def refuse_unknown_faults(accept: Sequence[str]) -> None:
    """Raise InputError where one of the faults to accept is none."""
    if unknown := sorted({*accept} - {*FAULTS}):
        raise InputError(f"--accept {unknown[0]} is no fault: choose from {', '.join(FAULTS)}.")


def read_inputs(
    records: Path | Dump,
    training_path: Path | None = None,
    *,
    checkpoint: Path | Checkpoint | None = None,
    reference_checkpoint: Path | None = None,
    urls: Sequence[str] = (),
    weight_version: str | None = None,
    max_staleness: int = DEFAULT_MAX_STALENESS,
    eos_ids: Sequence[int] = (),
    records_only: bool = False,
    needs_training: bool = True,
    format: str | None = None,
) -> Inputs:
    """The training side is the file, else the checkpoint, else the first server, else what the dump itself holds.

    records: a file, a folder, or a dump that was read. checkpoint: its folder, or what was loaded of it.
    reference_checkpoint: the weights that the run began with. urls: servers or routers. records_only: no training side,
    and that is meant. needs_training: an error without one, but for records that tell what served them
    (`check.served`). format: of the records, a name of docs/inspect.md.

    Raises InputError where something cannot be read, does not fit, or cannot be compared.
    """
    if urls and training_path is not None and checkpoint is None:
        raise InputError("TRAINING and --url say the same thing twice: leave one out, or add --checkpoint.")
    given: dict[str, Any] = {"TRAINING": training_path, "--checkpoint": checkpoint, "--url": urls[0] if urls else None}
    source = next((name for name, value in given.items() if value is not None), None)
    if records_only and source is not None:
        raise InputError("--records-only compares nothing: leave it out, or TRAINING, --checkpoint and --url.")
    named = "the running servers" if isinstance(records, Dump) else encodable(str(records))
    dump = records if isinstance(records, Dump) else _dump(records, format, training_path)
    samples, has_training = dump.samples, not records_only and (source is not None or dump.has_training)
    needs_training &= not records_only and not has_training
    if needs_training and all(sample.served is None for sample in samples):
        raise InputError(_NO_TRAINING)
    workers = list(dict.fromkeys(worker for url in urls for worker in workers_of(url)))
    model = Checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    notes = [f"{len(samples)} records of {named}", *dump.notes]
    if source == "--checkpoint" and model is not None:
        samples, what = from_checkpoint(model, samples)
        notes.append(what)
    elif source == "--url":
        samples, said = from_server(workers[0], samples)
        notes += said
    elif has_training:
        notes.append(f"training side: {training_path or named}")
    elif dump.has_training:
        samples = [with_training(sample, np.zeros(0)) for sample in samples]
    start = None if reference_checkpoint is None else Checkpoint(reference_checkpoint)
    mix = None if model is None or start is None else Mix(model, start)
    if start is not None:
        samples = with_reference(samples, start)
        notes.append(f"weights that the run began with: {reference_checkpoint}")
    findings: list[Finding] = []
    if workers and (model is not None or len(workers) > 1):
        more, findings = compare_servers(workers, samples, model, start)
        notes += more
    known = [*eos_ids, *(model.eos_ids if model else [])]
    if weight_version is not None:
        samples = [s if s.trainer_version else s.with_fields(trainer_version=weight_version) for s in samples]
    batch = make_batch(samples, eos_ids=known, has_training=has_training)
    if not any(sample.mask.any() for sample in batch):
        raise InputError("every loss mask is 0: there is no trained token to check.")
    batch = replace(batch, max_staleness=max_staleness)
    if model is not None:
        own = source == "--checkpoint"
        batch = replace(
            batch, logits=lambda sample: model.logits(sample, sample.index), from_checkpoint=own, between=mix
        )
    return Inputs(batch, tuple(map(encodable, notes)), tuple(findings), named, dump.format)


def _dump(path: Path, format: str | None, training: Path | None) -> Dump:
    try:
        dump = read(path, training, format=format)
    except InputError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot read the records: {error}") from None
    if not any(map(len, dump.samples)):
        raise InputError(f"{path} holds no response: there is nothing to check.")
    return dump
