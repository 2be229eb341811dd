"""From a dump or a live server to a `Diagnosis`: cause, size, predictions, recommendation, gate."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config import preset as find
from mismatch_plugin.config.words import config_of_words
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.data.read import Dump, InputError
from mismatch_plugin.data.versions import version_number
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.findings import CheckResult, Finding, Mismatch
from mismatch_plugin.diagnose.flags import config_of
from mismatch_plugin.diagnose.gate import gate as judge_gate
from mismatch_plugin.diagnose.levels import bounds_for, histograms
from mismatch_plugin.diagnose.measure import figures_of, measure
from mismatch_plugin.diagnose.normal import Hints, compare, normality
from mismatch_plugin.diagnose.packing import groups_of, packed_of, subset
from mismatch_plugin.diagnose.predict import predict, predict_one
from mismatch_plugin.diagnose.read import Inputs, read_inputs, refuse_unknown_faults
from mismatch_plugin.diagnose.recommend import recommend
from mismatch_plugin.diagnose.result import Cause, Diagnosis, Histograms, Prediction, Verdict
from mismatch_plugin.diagnose.scorers import Checkpoint
from mismatch_plugin.diagnose.tried import left_out, measurable
from mismatch_plugin.diagnose.words import controls_of
from mismatch_plugin.report.table import figure


class Live(NamedTuple):
    """How servers are sampled where there is no dump."""

    samples: int = 64
    max_new_tokens: int = 128
    temperature: float = 1.0
    prompts: Path | None = None


def own_settings(config: Path | None, preset: str | None, flags: str | None) -> MismatchConfig | None:
    """The user's settings from a file, a preset or flags as on a launch line. None where none is given.

    Raises ValueError where several are given, or for flags that are not ours.
    """
    given = {"--config": config, "--preset": preset, "--flags": flags}
    if len(named := [name for name, value in given.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(named)} all name your settings: give one of them.")
    if config is not None:
        return MismatchConfig.from_file(config)
    if preset is not None:
        return find(preset)
    if flags is None:
        return None
    return config_of_words(shlex.split(flags), f"--flags {flags!r}")


def diagnose(
    inputs: Inputs,
    *,
    own: MismatchConfig | None = None,
    accept: Collection[str] = (),
    gate: bool = False,
    gate_kl: float | None = None,
    hints: Hints | None = None,
    one_step: bool = False,
    expensive_pass: bool = False,
) -> Diagnosis:
    """Everything that `inspect` says of a batch.

    own: the user's settings, whose metrics and prediction are given first; None: no correction. gate, gate_kl: judge
    k3, by the default bar or this one. hints: what is known of the pair, for what is normal. one_step, expensive_pass:
    as in `rules.Figures`.
    Raises InputError where nothing can be compared at all.
    """
    batch = inputs.batch
    if own is not None and own.gate_kl is not None:  # the gate of training, judged once and here
        gate, gate_kl, own = True, own.gate_kl if gate_kl is None else gate_kl, own.replace(gate_kl=None)
    if hints is not None and {hints.engine, hints.trainer} & {"fp8", "fp4", "int8", "int4"}:
        batch = replace(batch, known_quantised=True)
    check = check_batch(batch, accept=accept, notes=inputs.notes, found=inputs.findings)
    common = {
        "source": inputs.source,
        "format": inputs.format,
        "samples": check.samples,
        "tokens": check.tokens,
        # Those that count first; in the order of detection, which is that of cause and effect.
        "findings": tuple(map(_cause, sorted(check.findings, key=lambda item: not item.counts))),
        "undecided": tuple(f"{', '.join(item.faults)}: {item.reason}" for item in check.undecided),
        "check": check,
    }

    def unmeasured() -> Diagnosis:
        verdict: Verdict = "fault" if check.status == "faults" else "undecided"
        return Diagnosis(
            verdict=verdict,
            headline=_headline(verdict, check, None, batch.has_training),
            next_step=_next_step(verdict, batch),
            one_sided=not batch.has_training,
            notes=check.notes,
            **common,
        )

    level = check.mismatch
    if level is None:  # one side alone, or two that have no token in common
        return unmeasured()
    try:
        packed, notes = packed_of(batch)
        part, said = subset(packed)
        metrics, size = measure(batch, measurable(own or MismatchConfig(), packed), packed)
        bounds, groups = bounds_for(part), groups_of(batch, part)
        predictions = predict(part, own, bounds, groups)
    except (ValueError, ArithmeticError):  # numbers too broken to be measured: the finding is what counts
        if check.status != "faults":
            raise
        return unmeasured()
    figures = figures_of(packed, stale=_stale(batch), one_step=one_step, expensive_pass=expensive_pass)
    if all(item.fault != "moe_routing" for item in check.findings):  # near-certain tokens have a tail by themselves
        figures = replace(figures, tail=0.0)
    hints = replace(hints or Hints(), stale=figures.stale)
    tried: dict[MismatchConfig, Prediction] = {}

    def try_setting(config: MismatchConfig) -> Prediction:
        tried[config] = predict_one(part, config, "tried", groups)
        return tried[config]

    advice = recommend(figures, predictions, bounds, status=check.status, predict=try_setting)
    if advice is not None and all(item.setting != advice.setting for item in predictions):
        predictions.append(tried[config_of(advice.settings)].model_copy(update={"setting": advice.setting}))
    answer = normality(level, hints, name_others=check.status != "faults")
    verdict = _verdict(check, answer.normal)
    return Diagnosis(
        verdict=verdict,
        headline=_headline(verdict, check, level),
        next_step=_next_step(verdict, batch, level.abs_max == 0.0),
        metrics=metrics,
        size=size,
        normal=compare(level, hints),
        normality=answer.sentence,
        predictions=tuple(predictions),
        bounds=bounds,
        recommendation=advice,
        gate=judge_gate(level.k3_kl, level.tokens, gate_kl) if gate else None,
        histograms=_histograms(part, predictions),
        notes=tuple(dict.fromkeys((*check.notes, *notes, *said, *left_out(part, own, groups is not None)))),
        **common,
    )


def _stale(batch: Batch) -> float | None:
    """The most steps that a sample's oldest version is behind its trainer's; None where the two are never both told."""
    behind = [
        trainer - min(own)
        for sample in batch
        if (trainer := version_number(sample.trainer_version)) is not None
        and (own := [n for span in sample.weight_versions if (n := version_number(span.version)) is not None])
    ]
    return float(max(0, *behind)) if behind else None


def _cause(item: Finding) -> Cause:
    severity = item.severity if item.counts else "note"  # an accepted fault explains, too
    said = {"evidence": item.evidence, "first": item.first, "fix": item.fix}
    return Cause(kind=item.fault, severity=severity, confidence=item.confidence, **said)


def _verdict(check: CheckResult, normal: bool | None) -> Verdict:
    if check.status == "faults":
        return "fault"
    if check.status == "undecided":
        return "undecided"
    return "large" if normal is False else "normal"


def _next_step(verdict: Verdict, batch: Batch, exact: bool = False) -> str:
    """What more would tell, where something is open. exact: no gap at all."""
    if not batch.has_training:
        return (
            "There is no training side: add TRAINING, --checkpoint NOW or --url, or let the trainer dump its log-probs "
            "too (docs/inspect.md#what-is-read)."
        )
    if verdict == "undecided":
        return "Inspect a larger dump: several hundred tokens at least, better some ten thousand."
    if exact:
        return (
            "Both sides are equal to the last bit: aligned kernels work, or one list was given twice (rollout "
            "log-probs copied into old_log_probs)."
        )
    if verdict != "large":
        return ""
    given = [name for name, there in (("--checkpoint NOW", batch.logits), ("--reference-checkpoint START",
             batch.between)) if there is None]  # fmt: skip
    if not given:
        return "No cause was found: see where it sits on the page, and --accept what is meant."
    return (
        f"No cause shows in these samples alone. {' and '.join(given)} would show weights that did not arrive, wholly "
        f"or in part, and filters or temperatures that the records do not tell."
    )


def _headline(verdict: Verdict, check: CheckResult, level: Mismatch | None, two_sided: bool = True) -> str:
    """One sentence. level: None where no token has both sides."""
    faults = [item for item in check.findings if item.counts]
    counted = f"{check.samples:,} samples, {check.tokens:,} tokens"
    if level is None and not faults:
        one = f"only the rollout side was given; its {counted} have no fault of their own."
        return f"Not decided: {f'no token of {counted} can be compared.' if two_sided else one}"
    figures = f"in {counted}"
    if level is not None:
        figures = f"mean |Δ log p| {figure(level.abs_mean)}, k3 {figure(level.k3_kl)} nats a token"
        figures += f" over {level.tokens:,} tokens"
    if verdict == "fault":
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        return f"Fault: {faults[0].fault}{more}; {figures}."
    said = {"undecided": "Not decided: too little can be compared", "large": "Large mismatch", "normal": "Normal"}
    return f"{said[verdict]}: {figures}."


def _histograms(part: PackedSequences, predictions: Sequence[Prediction]) -> Histograms:
    """For the page's sliders, with the bounds of every predicted setting among the edges."""
    given = [controls_of(item.settings) for item in predictions]
    return histograms(part, [bound for item in given if item for bound in (item.lower, item.upper) if bound])


def diagnose_files(
    path: Path | None,
    training: Path | None = None,
    *,
    urls: Sequence[str] = (),
    checkpoint: Path | None = None,
    live: Live | None = None,
    own: MismatchConfig | None = None,
    gate: bool = False,
    gate_kl: float | None = None,
    accept: Sequence[str] = (),
    hints: Hints | None = None,
    one_step: bool = False,
    expensive_pass: bool = False,
    **reading: Any,
) -> Diagnosis:
    """`read_inputs`, and the diagnosis of it. Without a path the servers are sampled, as `live` says.

    reading: what else `read_inputs` takes. Raises InputError where something cannot be read or compared."""
    refuse_unknown_faults(accept)
    model: Path | Checkpoint | None = checkpoint
    if path is not None:
        source: Path | Dump = path
    elif urls:
        from mismatch_plugin.diagnose.live import sample_live

        model = None if checkpoint is None else Checkpoint(checkpoint)
        source = sample_live(urls, model, **(live or Live())._asdict())
    else:
        raise InputError("there is nothing to inspect: give PATH, or --url to sample from a server.")
    inputs = read_inputs(source, training, urls=urls, checkpoint=model, **reading)
    judged = {"accept": accept, "gate": gate, "gate_kl": gate_kl, "hints": hints}
    return diagnose(inputs, own=own, one_step=one_step, expensive_pass=expensive_pass, **judged)
