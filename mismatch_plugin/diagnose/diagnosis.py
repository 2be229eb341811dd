"""From dumps, checkpoints and servers to a `Diagnosis`: faults, size, predictions, recommendation, gate."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config import preset as find
from mismatch_plugin.data.read import InputError, read
from mismatch_plugin.data.versions import version_number
from mismatch_plugin.diagnose.batch import DEFAULT_MAX_STALENESS, Batch, make_batch
from mismatch_plugin.diagnose.detectors.checkpoints import compare_servers, workers_of
from mismatch_plugin.diagnose.detectors.run import FAULTS, check_batch
from mismatch_plugin.diagnose.detectors.served import note
from mismatch_plugin.diagnose.detectors.size import mismatch
from mismatch_plugin.diagnose.flags import available, config_of, trainer_of
from mismatch_plugin.diagnose.measure import OF_PREDICTIONS, figures_of, groups_of, measure, packed_of, subset
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS, SMALL_K3, UNEXPLAINED, Hints, gate, normality
from mismatch_plugin.diagnose.predict import Predictor, bounds_for, histogram, lacking
from mismatch_plugin.diagnose.recommend import recommend
from mismatch_plugin.diagnose.result import VERDICTS, Diagnosis, Finding, Mismatch, Verdict
from mismatch_plugin.diagnose.scorers import Checkpoint, from_checkpoint, from_server, with_reference
from mismatch_plugin.files import encodable
from mismatch_plugin.hooks.hosts import HOSTS


def own_settings(config: Path | None, preset: str | None, flags: str | None) -> MismatchConfig | None:
    """The user's settings from a file, a preset or flags as on a launch line. None where none is given.

    Raises ValueError where several are given, or for flags that are not ours.
    """
    given = {"--config": config, "--preset": preset, "--flags": flags}
    if len(named := [name for name, value in given.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(named)} name your settings: give one of them.")
    if config is not None:
        return MismatchConfig.from_file(config)
    if preset is not None:
        return find(preset)
    return None if flags is None else MismatchConfig.from_words(shlex.split(flags), f"--flags {flags!r}")


def read_inputs(
    path: Path,
    training: Path | None = None,
    *,
    urls: Sequence[str] = (),
    checkpoint: Path | None = None,
    reference_checkpoint: Path | None = None,
    weight_version: str | None = None,
    max_staleness: int = DEFAULT_MAX_STALENESS,
    eos_ids: Sequence[int] = (),
    format: str | None = None,
) -> tuple[Batch, str, list[str], list[Finding]]:
    """(both sides, format of the dump, notes, what rescoring showed). Arguments are the command's.

    The training side is the file, else the checkpoint, else the first server, else what the dump itself holds.
    Raises InputError where something cannot be read or does not fit.
    """
    if urls and training is not None and checkpoint is None:
        raise InputError("TRAINING and --url say the same thing twice: leave one out, or add --checkpoint.")
    model = None if checkpoint is None else Checkpoint(checkpoint)
    dump = read(path, training, format=format)
    if not any(map(len, dump.samples)):
        raise InputError(f"{path} holds no response: there is nothing to check.")
    samples, notes = dump.samples, [f"{len(dump.samples)} records of {path}", *dump.notes]
    late = sum(bool(sample.mask.any() and not sample.mask[0]) for sample in samples)
    if late > len(samples) / 2:
        notes.append(
            f"in {late} of {len(samples)} responses the first token does not train: if they are padded on the left, "
            "positions are wrong; pad on the right"
        )
    workers = list(dict.fromkeys(worker for url in urls for worker in workers_of(url)))
    scored = training is None and (model is not None or bool(urls))
    if scored:
        samples, said = from_checkpoint(model, samples) if model is not None else from_server(workers[0], samples)
        notes += said
    elif dump.has_training:
        notes.append(f"training side: {training or path}")
    start = None if reference_checkpoint is None else Checkpoint(reference_checkpoint)
    if start is not None:
        samples = with_reference(samples, start)
        notes.append(f"weights that the run began with: {reference_checkpoint}")
    findings: list[Finding] = []
    if workers and (model is not None or len(workers) > 1):
        more, findings = compare_servers(workers, samples, model, start)
        notes += more
    if weight_version is not None:
        samples = [s if s.trainer_version else s.with_fields(trainer_version=weight_version) for s in samples]
    known = [*eos_ids, *(model.eos_ids if model else [])]
    batch = make_batch(samples, eos_ids=known, has_training=scored or dump.has_training)
    batch = replace(batch, max_staleness=max_staleness, now=model, start=start, from_checkpoint=bool(model and scored))
    if not batch.token_count:
        raise InputError("every loss mask is 0: there is no trained token to check.")
    return batch, dump.format, notes, findings


def diagnose_files(
    path: Path,
    training: Path | None = None,
    *,
    urls: Sequence[str] = (),
    checkpoint: Path | None = None,
    reading: Mapping[str, Any] = {},
    own: MismatchConfig | None = None,
    accept: Collection[str] = (),
    bar: float | None = None,
    hints: Hints,
    one_step: bool = False,
    expensive_pass: bool = False,
    brief: bool = False,
    host: str | None = None,
) -> Diagnosis:
    """Everything that `inspect` says of a batch.

    urls, checkpoint, reading: what `read_inputs` takes. own: the user's settings, whose metrics and prediction
    are given first; None: no correction. accept: faults that are meant. bar: of the gate on k3, None
    for no gate. hints: what is known of the pair, for what is normal. one_step, expensive_pass: as in
    `measure.Figures`. brief: findings and size alone, without predictions. host: what is recommended can be had there;
    default: in the trainer whose dump it is.
    Raises InputError where something cannot be read or compared, or where one of the faults to accept is none.
    """
    if unknown := sorted({*accept} - {*FAULTS}):
        raise InputError(f"--accept {unknown[0]} is no fault: choose from {', '.join(FAULTS)}.")
    batch, format, notes, seen = read_inputs(path, training, urls=urls, checkpoint=checkpoint, **reading)
    host = host or trainer_of(format)
    if {hints.engine, hints.trainer} & {"fp8", "fp4", "int8", "int4"}:
        batch = replace(batch, known_quantised=True)
    findings, undecided, undone = check_batch(batch, accept=accept, found=seen)
    level, stale = mismatch(batch), _stale(batch)
    left = level if undone is batch else mismatch(undone)
    # Where verl bypasses the old log-probs it copies the rollout's.
    own_sides = training is None and checkpoint is None and not urls and batch.has_training
    copied = format == "verl" and own_sides and level is not None and level.abs_max == 0.0
    given = [str(path), *([str(training)] if training else []), *(f"--url={url}" for url in urls)]
    command = encodable(shlex.join(["mismatch-plugin", "inspect", *given]))
    answer = None if level is None or copied else normality(level, replace(hints, stale=stale))
    faults = dict.fromkeys(item.fault for item in findings if item.counts)
    if faults:
        verdict: Verdict = "fault"
    elif answer is None or left is None or left.tokens < ENOUGH_TOKENS:
        verdict = "undecided"
    else:
        verdict = "normal" if answer[0] else "large"
    found = Diagnosis(
        verdict=verdict,
        headline=_headline(verdict, batch, faults, level),
        next_step=_next_step(verdict, batch, faults, level, copied, command),
        source=encodable(str(path)),
        format=format,
        host=host,
        samples=len(batch),
        tokens=batch.token_count,
        findings=tuple(sorted(findings, key=lambda item: not item.counts)),
        undecided=tuple(undecided),
        one_sided=not batch.has_training,
        mismatch=level,
        fixed=left if left != level else None,
        normality=answer[1] if answer else "",
        gate=gate(level.k3_kl, level.tokens, bar) if level and bar is not None else None,
        notes=(*map(encodable, notes), *note(batch)),
    )
    if brief or level is None:  # level: one side alone, or two that have no token in common
        return found
    try:
        packed, left_out = packed_of(batch)
        part, said = subset(packed)
        groups = groups_of(batch, part)
        if own is not None and host in HOSTS:
            said += available(own, host)[1]
        if own is not None and (lack := lacking(own, packed, groups)):
            said.append(f"your settings are not measured, nor predicted: the dump lacks {lack}")
            own = None
        metrics, size = measure(batch, packed, own or MismatchConfig())
    except (ValueError, ArithmeticError):  # numbers too broken to be measured: the finding is what counts
        if verdict != "fault":
            raise
        return found
    told: dict[str, Any] = {"metrics": metrics, "level": (own or MismatchConfig()).tis.level, "size": size}
    if verdict in ("fault", "undecided"):  # no setting repairs the one, and nobody knows of the other
        of_tokens = [one for one in left_out if OF_PREDICTIONS not in one]
        told |= {"histogram": histogram(part, MismatchConfig()), "notes": (*found.notes, *of_tokens)}
        return found.model_copy(update=told)
    bounds, predictor = bounds_for(part), Predictor(part, groups)
    predictions = predictor.all(own, bounds)
    tail = sum(item.statistics["fraction"] for item in findings if item.fault == "moe_routing")
    figures = replace(figures_of(packed), tail=tail, stale=stale, one_step=one_step, expensive_pass=expensive_pass)
    advice = None
    if verdict == "normal" or figures.k3_kl >= SMALL_K3:  # larger than such a pair's, and too small to be corrected
        accepted = any(item.accepted for item in findings)
        advice = recommend(figures, bounds, predictor.prediction, accepted=accepted, host=host)
    if advice is not None and all(item.setting != advice.setting for item in predictions):
        predictions.append(predictor.prediction(config_of(advice.settings), advice.setting))
    told |= {
        "predictions": tuple(predictions),
        "bounds": bounds,
        "recommendation": advice,
        "histogram": histogram(part, config_of(advice.settings) if advice else MismatchConfig()),
        "notes": tuple(dict.fromkeys((*found.notes, *left_out, *said))),
    }
    return found.model_copy(update=told)


def _stale(batch: Batch) -> float:
    """The most steps that a sample's oldest version is behind its trainer's; without those the newest minus the oldest;
    0 where no version is a number."""
    pairs = [
        (version_number(sample.trainer_version), number)
        for sample in batch
        for span in sample.weight_versions
        if (number := version_number(span.version)) is not None
    ]
    behind = [trainer - number for trainer, number in pairs if trainer is not None]
    numbers = [number for _, number in pairs]
    return float(max([0, *behind])) if behind or not pairs else float(max(numbers) - min(numbers))


def _headline(verdict: Verdict, batch: Batch, faults: Collection[str], level: Mismatch | None) -> str:
    """One sentence."""
    counted = f"{len(batch):,} samples, {batch.token_count:,} tokens"
    figures = f"{level} over {level.tokens:,} tokens" if level else counted
    if verdict == "fault":
        said = f"{', '.join(faults)}; {figures}"
    elif not batch.has_training:
        said = f"only the rollout side was given; its {figures} have no fault of their own"
    elif level is None:
        said = f"no token of {figures} can be compared"
    elif verdict == "undecided":
        said = "both sides are equal to the last bit" if level.abs_max == 0.0 else "too little can be compared"
        said += f"; {figures}"
    else:
        said = figures
    return f"{VERDICTS[verdict]}: {said}."


def _next_step(
    verdict: Verdict, batch: Batch, faults: Collection[str], level: Mismatch | None, copied: bool, command: str
) -> str:
    """What more would tell, where something is open."""
    if not batch.has_training:
        return (
            "There is no training side: add TRAINING, --checkpoint NOW or --url, or let the trainer dump its log-probs "
            "too (docs/inspect.md#what-is-read)."
        )
    if verdict == "undecided" and copied:
        return (
            "In bypass mode verl copies rollout_log_probs into old_log_probs: nothing was compared. Dump a step with "
            "algorithm.rollout_correction.bypass_mode=False, or add --checkpoint NOW."
        )
    if verdict == "undecided":
        return "Inspect a larger dump: several hundred tokens at least, better some ten thousand."
    if verdict == "normal" and level is not None and level.abs_max == 0.0:
        return (
            "Both sides are equal to the last bit: aligned kernels work, or one list was given twice (rollout "
            "log-probs copied into old_log_probs)."
        )
    if verdict != "large" and UNEXPLAINED not in faults:
        return ""
    if batch.now is not None and batch.start is not None:
        return "No cause was found: see where it sits on the page, and --accept what is meant."
    return (
        "To find the cause (updates that did not arrive, a filter, a temperature), give the trainer's weights of now "
        f"and of the run's start: {command} --checkpoint NOW --reference-checkpoint START"
    )
