"""The command `mismatch-plugin inspect`. Heavy imports wait until it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mismatch_plugin.config.values import host_name
from mismatch_plugin.diagnose.hosts import HOSTS

CANNOT_READ = 2
_DUMP, _SETTINGS, _SERVER, _METRICS, _OUTPUT = "Dump", "Your settings", "Server", "Run's metrics", "Output"

SAMPLES, MAX_NEW_TOKENS = 64, 128
_BEFORE_A_STEP = {"settings.json", "config.json", "plots", ".lock"}
"""What the report folder of a run may hold before its first step."""


class Precision(str, Enum):
    """As inspect.normal has them."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"
    fp4 = "fp4"
    int8 = "int8"
    int4 = "int4"


def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A dump of samples, a folder of dumps, or a run's metrics. Without it, --url samples from a server.",
        ),
    ] = None,
    training: Annotated[
        Path | None, typer.Argument(metavar="TRAINING", help="The training side, where it is in a file of its own.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the trainer's current weights (transformers): scores in float32.", rich_help_panel=_DUMP
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="SGLang server, or a router: rescores the dump, or samples without one. Repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    reference_checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the weights that the run began with, to see whether updates arrived.", rich_help_panel=_DUMP
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="The dump's format, where it is not recognised; docs/inspect.md has the names.",
            rich_help_panel=_DUMP,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON with your settings. Of a run's metrics: default settings.json next to them.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Your settings as a preset.", rich_help_panel=_SETTINGS)] = None,
    flags: Annotated[
        str | None,
        typer.Option(
            metavar="'FLAGS'", help="Your settings as on the launch line: '--use-tis …'.", rich_help_panel=_SETTINGS
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help=f"Whose flags are shown first: {', '.join(HOSTS)}.", rich_help_panel=_SETTINGS)
    ] = "slime",
    engine: Annotated[
        Precision | None,
        typer.Option(help="Precision of the rollout engine, for what is normal.", rich_help_panel=_DUMP),
    ] = None,
    trainer: Annotated[
        Precision | None, typer.Option(help="Precision of the trainer, for what is normal.", rich_help_panel=_DUMP)
    ] = None,
    moe: Annotated[
        bool | None, typer.Option("--moe/--dense", help="A mixture of experts, or not.", rich_help_panel=_DUMP)
    ] = None,
    one_step: Annotated[
        bool, typer.Option("--one-step", help="One optimizer step a rollout batch.", rich_help_panel=_SETTINGS)
    ] = False,
    expensive_pass: Annotated[
        bool, typer.Option("--expensive-pass", help="Save the pass for old log-probs.", rich_help_panel=_SETTINGS)
    ] = False,
    weight_version: Annotated[
        str | None, typer.Option(help="Version of the training side's weights.", rich_help_panel=_DUMP)
    ] = None,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Steps that rollout weights may be behind.", rich_help_panel=_DUMP)
    ] = 1,
    eos_id: Annotated[
        list[int] | None, typer.Option(help="Id that ends a response. Repeatable.", rich_help_panel=_DUMP)
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="A fault that is meant. Repeatable.", rich_help_panel=_DUMP),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Fail (exit status 1) where k3 is above the bar.", rich_help_panel=_OUTPUT)
    ] = False,
    gate_kl: Annotated[
        float | None,
        typer.Option(min=0.0, help="The gate's bar, nats a token. Implies --gate.", rich_help_panel=_OUTPUT),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Without PATH: responses of each server.", rich_help_panel=_SERVER)
    ] = SAMPLES,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Without PATH: tokens of a response.", rich_help_panel=_SERVER)
    ] = MAX_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(help="Without PATH: of the sampling.", rich_help_panel=_SERVER)] = 1.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Without PATH: a JSON list of token ids, or a text, a line.", rich_help_panel=_SERVER),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--pictures",
            help="Folder for page and pictures. Default: PATH_inspect; of a run PATH/plots.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    no_report: Annotated[
        bool,
        typer.Option("--no-report", "--no-pictures", help="Write neither page nor pictures.", rich_help_panel=_OUTPUT),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(help="Which run, where metrics hold several: part of its name.", rich_help_panel=_METRICS),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Of a run: print every metric.", rich_help_panel=_METRICS)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """From a dump, a live server or a run's metrics to the cause, the setting and the flags.

    How large is the mismatch, is that normal, where does it come from, which
    setting fits, what would it cost, and which flags to paste.

    PATH: rollout dumps of slime, miles, verl, NeMo-RL, TRL, vLLM, our JSONL
    or Parquet, padded tensors (.pt, .npz); or the folder of
    --mismatch-report-dir, a CSV or JSONL export of W&B, a folder of its
    charts as CSV, TensorBoard events, also of trainers without the plugin.
    docs/inspect.md lists the formats and how to make each.

    Exit status: 0 nothing wrong; 1 a fault was found, or the gate failed (of
    a run's metrics: broken numbers, a shift of all tokens, a mismatch that has
    grown 100 times, a correction that does not hold); 2 cannot read; 3 not decided: too few tokens, or no
    training side to compare with; 4 stopped before the end (memory, stdout, an error of ours).
    """
    from mismatch_plugin.data.read import InputError
    from mismatch_plugin.diagnose.run_sources import kind_of
    from mismatch_plugin.report.table import printable

    try:
        host = host_name(host)
        if host not in HOSTS:
            raise InputError(f"--host {host} is unknown: choose from {', '.join(HOSTS)}.")
        if no_report and out is not None:
            raise InputError(f"--out {out} and --no-report contradict each other: leave one out.")
        dump_only: dict[str, Any] = {
            "TRAINING": training, "--url": url, "--checkpoint": checkpoint, "--format": format, "--accept": accept,
            "--reference-checkpoint": reference_checkpoint, "--prompts": prompts, "--weight-version": weight_version,
            "--eos-id": eos_id, "--max-staleness": max_staleness != 1, "--samples": samples != SAMPLES,
            "--engine": engine, "--trainer": trainer, "--moe/--dense": moe is not None, "--one-step": one_step,
            "--expensive-pass": expensive_pass,
            "--max-new-tokens": max_new_tokens != MAX_NEW_TOKENS, "--temperature": temperature != 1.0,
        }  # fmt: skip
        if path is not None and not path.exists():
            raise InputError(f"{path} is not there: give a dump, a folder of dumps, or a run's metrics.")
        if path is not None and kind_of(path) == "metrics":
            _refuse(dump_only, f"{path} holds a run's metrics")
            from mismatch_plugin.diagnose.diagnosis import own_settings
            from mismatch_plugin.diagnose.runs import inspect_run

            own, given = own_settings(config, preset, flags), config or preset or flags
            plots = path / "plots" if path.is_dir() else path.with_name(f"{path.stem}_plots")
            status = inspect_run(
                path,
                None if own is None else (own, str(given)),
                run=run,
                pictures=None if no_report else out or plots,
                as_json=as_json,
                host=host,
                gated=gate or gate_kl is not None,
                bar=gate_kl,
                show_all=show_all,
            )
            raise typer.Exit(status)
        if path is not None and path.is_dir() and {file.name for file in path.iterdir()} <= _BEFORE_A_STEP:
            raise InputError(
                f"{path} holds no step yet, and no dump: a run writes its first metrics there after its first step "
                f"(--mismatch-report-dir)."
            )
        if show_all:
            raise InputError("--all is for a run's metrics, and PATH is a dump, which is shown whole: leave it out.")
        if run is not None:
            raise InputError(f"--run {run} chooses among the runs of a metrics file, and PATH is a dump: leave it out.")
        from mismatch_plugin.diagnose.diagnosis import Live, diagnose_files, own_settings
        from mismatch_plugin.diagnose.normal import Hints

        pair: dict[str, Any] = {"engine": engine and engine.value, "trainer": trainer and trainer.value, "moe": moe}

        if not checkpoint and not reference_checkpoint and "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(1)  # several wait for one another: three times the CPU time, and no sooner
        live = Live(samples, max_new_tokens, temperature, prompts)
        diagnosis = diagnose_files(
            path,
            training,
            urls=url or (),
            checkpoint=checkpoint,
            reference_checkpoint=reference_checkpoint,
            format=format,
            needs_training=False,
            own=own_settings(config, preset, flags),
            weight_version=weight_version,
            max_staleness=max_staleness,
            eos_ids=eos_id or (),
            accept=accept or (),
            gate=gate or gate_kl is not None,
            gate_kl=gate_kl,
            live=live,
            hints=Hints(**pair),
            one_step=one_step,
            expensive_pass=expensive_pass,
        )
    except BrokenPipeError:  # of a run's metrics, which are printed in here
        raise
    except (ValueError, ArithmeticError, OSError, ImportError) as error:
        if as_json:
            typer.echo(json.dumps({"verdict": "cannot_read", "headline": str(error)}))
        else:
            typer.echo("cannot inspect: " + printable(str(error), keep="\n"), err=True)
        raise typer.Exit(CANNOT_READ) from None
    from mismatch_plugin.diagnose.output import write_report

    written, note = (None, "") if no_report else write_report(diagnosis, out or _default_folder(path), host)
    if as_json:
        typer.echo(diagnosis.model_dump_json(indent=2))
    else:
        from mismatch_plugin.diagnose.screen import show
        from mismatch_plugin.report.terminal import terminal

        show(diagnosis, terminal(), host=host, report=written)
    if note:
        typer.echo(note, err=True)
    raise typer.Exit(diagnosis.exit_status)


def _refuse(given: Mapping[str, Any], what: str) -> None:
    """Raise InputError, which names the options that were given and have no meaning there."""
    from mismatch_plugin.data.read import InputError

    if named := [name for name, value in given.items() if value is not False and value not in (None, [])]:
        raise InputError(f"{what}: {', '.join(named)} {'is' if len(named) == 1 else 'are'} not for that; leave it out.")


def _default_folder(path: Path | None) -> Path:
    if path is None:
        return Path("live_inspect")
    path = path.resolve()
    return path.with_name(f"{path.name if path.is_dir() else path.stem}_inspect")
