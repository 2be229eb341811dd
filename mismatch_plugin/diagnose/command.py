"""The command `mismatch-plugin inspect`. Heavy imports wait until it runs."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

CANNOT_READ = 2
_dump = partial(typer.Option, rich_help_panel="Dump")
_settings = partial(typer.Option, rich_help_panel="Your settings")
_output = partial(typer.Option, rich_help_panel="Output")
Precision = Literal["fp32", "fp16", "bf16", "fp8", "fp4", "int8", "int4"]
_OF_BOTH = {"path", "config", "preset", "flags", "gate", "gate_kl", "out", "no_report", "as_json"}


def inspect(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A dump of samples, a folder of dumps, or a run's metrics.")
    ],
    training: Annotated[Path | None, typer.Argument(metavar="TRAINING", help="The training side's own file.")] = None,
    checkpoint: Annotated[
        Path | None, _dump(help="Folder of the trainer's current weights (transformers): scores in float32.")
    ] = None,
    url: Annotated[list[str] | None, _dump(help="SGLang server or router: rescores the dump. Repeatable.")] = None,
    reference_checkpoint: Annotated[
        Path | None, _dump(help="Folder of the weights that the run began with: did updates arrive?")
    ] = None,
    format: Annotated[str | None, _dump(help="Where it is not recognised; docs/inspect.md has the names.")] = None,
    config: Annotated[
        Path | None, _settings(help="YAML or JSON with your settings. Of a run: default settings.json next to it.")
    ] = None,
    preset: Annotated[str | None, _settings(help="Your settings as a preset.")] = None,
    flags: Annotated[
        str | None, _settings(metavar="'FLAGS'", help="Your settings as on the launch line: '--use-tis …'.")
    ] = None,
    host: Annotated[
        str | None,
        _settings(
            help="Whose flags and settings: a trainer (slime, trl, …), python, any. Default: the dump's trainer."
        ),
    ] = None,
    engine: Annotated[Precision | None, _dump(help="Precision of the rollout engine, for what is normal.")] = None,
    trainer: Annotated[Precision | None, _dump(help="Precision of the trainer, for what is normal.")] = None,
    moe: Annotated[bool | None, _dump("--moe/--dense", help="A mixture of experts, or not.")] = None,
    one_step: Annotated[bool, _settings("--one-step", help="One optimizer step per rollout batch.")] = False,
    expensive_pass: Annotated[bool, _settings("--expensive-pass", help="Save the pass for old log-probs.")] = False,
    weight_version: Annotated[str | None, _dump(help="Version of the training side's weights.")] = None,
    max_staleness: Annotated[int, _dump(min=0, help="Steps that rollout weights may be behind.")] = 1,
    eos_id: Annotated[list[int] | None, _dump(help="Id that ends a response. Repeatable.")] = None,
    accept: Annotated[list[str] | None, _dump(metavar="FAULT", help="A fault that is meant. Repeatable.")] = None,
    gate: Annotated[bool, _output("--gate", help="Fail (exit status 1) where k3 is above the bar.")] = False,
    gate_kl: Annotated[float | None, _output(min=0.0, help="The gate's bar, nats per token. Implies --gate.")] = None,
    out: Annotated[
        Path | None, _output(help="Folder of the page, or of a run's picture. Default: PATH_inspect, PATH/plots.")
    ] = None,
    no_report: Annotated[bool, _output("--no-report", help="Write neither page nor picture.")] = False,
    brief: Annotated[bool, _output("--brief", help="Findings and size alone: no prediction, no page.")] = False,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object.")] = False,
    run: Annotated[
        str | None, typer.Option(help="Which run, where metrics of runs hold several: part of its name.")
    ] = None,
) -> None:
    """From a dump to the cause, the setting and the flags; from a run's metrics to size and trend.

    How large is the mismatch, is that normal, where does it come from, which
    setting fits, what would it cost, and which flags to paste.

    PATH: rollout dumps of slime, miles, verl, NeMo-RL, TRL, our JSONL, rows
    of Parquet, padded tensors (.pt, .npz); or the folder of
    --mismatch-report-dir, a CSV or JSONL export of W&B, a folder of its
    charts as CSV, TensorBoard events, also of trainers without the plugin.
    A setting is recommended from a dump alone.
    docs/inspect.md lists the formats, and the fields of our own:

    {"prompt_ids":[1,5],"response_ids":[7,2],"rollout_log_probs":[-1.2,-0.3]}

    TRAINING, line by line: {"train_log_probs":[-1.1,-0.3]}

    Exit status: 0 nothing wrong; 1 a fault was found, or the gate failed (of
    a run's metrics: broken numbers, a shift of all tokens, a mismatch that has
    grown 100 times, a correction that does not hold); 2 cannot read; 3 not
    decided: too few tokens, or no training side to compare with; 4 stopped
    before the end (memory, stdout, an error of ours).
    """
    from mismatch_plugin.core.health import DEFAULT_GATE_KL
    from mismatch_plugin.data.read import InputError
    from mismatch_plugin.diagnose.diagnosis import diagnose_files, own_settings
    from mismatch_plugin.diagnose.flags import TITLES
    from mismatch_plugin.diagnose.normal import Hints
    from mismatch_plugin.diagnose.run_sources import kind_of
    from mismatch_plugin.diagnose.runs import inspect_run
    from mismatch_plugin.hooks.hosts import host_name
    from mismatch_plugin.report.log import SETTINGS
    from mismatch_plugin.report.table import printable

    try:
        host = None if host is None else host_name(host)
        if host is not None and host not in TITLES:
            raise InputError(f"--host {host} is unknown: choose from {', '.join(TITLES)}.")
        if out is not None and (brief or no_report):
            word = "--brief" if brief else "--no-report"
            raise InputError(f"--out {out} and {word} contradict each other: leave one out.")
        if not path.exists():
            raise InputError(f"{path} is not there: give a dump, a folder of dumps, or a run's metrics.")
        own = own_settings(config, preset, flags)
        bar = gate_kl if gate_kl is not None or own is None else own.gate_kl
        bar = DEFAULT_GATE_KL if gate and bar is None else bar
        if kind_of(path) == "metrics":
            _refuse(context, {"run"} | _OF_BOTH, f"{path} holds a run's metrics")
            plots = path / "plots" if path.is_dir() else path.with_name(f"{path.stem}_plots")
            status = inspect_run(
                path,
                own,
                run=run,
                pictures=None if no_report else out or plots,
                as_json=as_json,
                bar=bar,
            )
            raise typer.Exit(status)
        if (path / SETTINGS).exists():
            raise InputError(f"{path} holds no step yet: a run writes its metrics there after its first step.")
        _refuse(context, {*context.params} - {"run"}, f"{path} is a dump")
        if not checkpoint and not reference_checkpoint and "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(1)  # several wait for one another: three times the CPU time, and no sooner
        diagnosis = diagnose_files(
            path,
            training,
            urls=url or (),
            checkpoint=checkpoint,
            reading={
                "reference_checkpoint": reference_checkpoint,
                "format": format,
                "weight_version": weight_version,
                "max_staleness": max_staleness,
                "eos_ids": eos_id or (),
            },
            own=own,
            accept=accept or (),
            bar=bar,
            hints=Hints(engine, trainer, moe),
            one_step=one_step,
            expensive_pass=expensive_pass,
            brief=brief,
            host=host,
        )
    except BrokenPipeError:  # of a run's metrics, which are printed in here
        raise
    except (ValueError, ArithmeticError, OSError, ImportError) as error:
        if as_json:
            typer.echo(json.dumps({"verdict": "cannot_read", "headline": str(error)}))
        else:
            typer.echo("cannot inspect: " + printable(str(error), keep="\n"), err=True)
        raise typer.Exit(CANNOT_READ) from None
    written, note = None, ""
    if not (no_report or brief):
        where = path.resolve()  # "." has no name
        folder = out or where.with_name(f"{where.name if path.is_dir() else where.stem}_inspect")
        try:
            from mismatch_plugin.diagnose.page import write_page

            folder.mkdir(parents=True, exist_ok=True)
            written = write_page(diagnosis, folder / "report.html")
        except ImportError as error:
            note = f"no page: {error}: pip install 'mismatch-plugin[lab]'"
        except OSError as error:
            note = f"no page: {error.filename} cannot be written ({error.strerror}); choose another folder with --out"
    if as_json:
        typer.echo(diagnosis.model_dump_json(indent=2))
    else:
        from mismatch_plugin.diagnose.screen import show
        from mismatch_plugin.report.table import terminal

        show(diagnosis, terminal(), report=written, brief=brief)
    if note:
        typer.echo(note, err=True)
    raise typer.Exit(diagnosis.exit_status)


def _refuse(context: typer.Context, meant: set[str], what: str) -> None:
    """Raise InputError, which names the options that were given and have no meaning there."""
    from mismatch_plugin.data.read import InputError

    given = [option for option in context.command.params if option.name not in meant]
    given = [option for option in given if context.params.get(option.name or "") not in (option.default, None, [], ())]
    if named := [option.opts[0] if option.param_type_name == "option" else "TRAINING" for option in given]:
        raise InputError(f"{what}: {', '.join(named)} {'is' if len(named) == 1 else 'are'} not for that; leave it out.")
