"""Our own files: RolloutRecords as JSONL or Parquet, and JSONL of the training side's log-probs."""

from __future__ import annotations

from dataclasses import replace

from mismatch_plugin.rollout.dumps.names import NAMES
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.source import Source
from mismatch_plugin.rollout.dumps.training import InputError, read_training
from mismatch_plugin.rollout.files import iter_records
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.responses import Response


def _is_records(source: Source) -> bool:
    keys, fields = {*source.keys}, RolloutRecord.model_fields
    if source.kind not in ("jsonl", "parquet"):
        return False
    if keys >= _REQUIRED:
        return not keys & {*NAMES["log_probs"]}
    return keys <= {*fields} and bool(keys & _OWN)  # prompt ids may lack where nothing is told that only we write


def _read(source: Source, options: Options) -> Part:
    """One record at a time: a list of records is several times larger than the arrays."""
    part = Part()
    for record in iter_records(source.path, source.kind == "jsonl"):
        response = Response.of(record)
        if options.log_probs_of is not None:
            response = replace(response, log_probs_of=options.log_probs_of)
        if options.temperature is not None:
            sampling = response.sampling.model_copy(update={"temperature": options.temperature})
            response = replace(response, sampling=sampling)
        part.responses.append(response)
    return part


def _read_training(source: Source, options: Options) -> Part:
    samples = read_training(source.path)
    for index, sample in enumerate(samples):
        count = len(sample.train_log_probs)
        if sample.loss_mask is not None and (len(sample.loss_mask) != count or not {0, 1}.issuperset(sample.loss_mask)):
            raise InputError(
                f"the training side's loss_mask of sample {index} has {len(sample.loss_mask)} entries for {count} "
                f"log-probs, or others than 0 and 1: give one for each."
            )
        if isinstance(sample.advantages, list) and len(sample.advantages) != count:
            raise InputError(
                f"the training side's advantages of sample {index} have {len(sample.advantages)} entries for {count} "
                f"log-probs: give one for each, or one number."
            )
    return Part(
        scored=[sample.scored() for sample in samples],
        sample_ids=[sample.sample_id for sample in samples],
        indexes=[sample.index for sample in samples],
        missing="it holds the training side's log-probs alone: give the rollout records first and it as TRAINING",
    )


_REQUIRED = {name for name, field in RolloutRecord.model_fields.items() if field.is_required()}
_OWN = {"sampling", "log_probs_of", "weight_versions", "kept_ids", "behaviour_log_probs", "top_log_probs", "served"}
RECORDS = Format("records", "rollout records of this package, .jsonl or .parquet", _is_records, _read)
TRAINING = Format(
    "training",
    "the training side's log-probs, .jsonl",
    lambda source: source.kind == "jsonl" and "train_log_probs" in source.keys and "response_ids" not in source.keys,
    _read_training,
)
