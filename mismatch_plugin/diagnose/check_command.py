"""The `check` command. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

FAULTS_FOUND, CANNOT_CHECK, NOT_DECIDED = 1, 2, 3


def check(
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS", help="Rollout records, or a trainer's own dump, or a folder of dumps.")
    ],
    training: Annotated[
        Path | None,
        typer.Argument(metavar="TRAINING", help="The training side's log-probs, as told above or a trainer's dump."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format of RECORDS, if it is not recognised; docs/inspect.md has the names.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a transformers causal LM: it scores the responses in float32 if TRAINING is absent, and "
            "whole distributions show temperatures, filters and penalties more sharply."
        ),
    ] = None,
    reference_checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the weights that the run began with: shows weights that never reached the servers, and "
            "with --checkpoint which layers did not."
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="SGLang server or router, repeatable: rescores the responses (temperature 1, its current weights). "
            "The training side if there is neither TRAINING nor --checkpoint; servers are compared with the "
            "checkpoint and with one another."
        ),
    ] = None,
    weight_version: Annotated[
        str | None, typer.Option(help="Weight version of the training side, if TRAINING does not tell it.")
    ] = None,
    max_staleness: Annotated[int, typer.Option(min=0, help="Steps that rollout weights may be behind.")] = 1,
    eos_id: Annotated[list[int] | None, typer.Option(help="Id that ends a response. May be repeated.")] = None,
    records_only: Annotated[
        bool, typer.Option("--records-only", help="Check RECORDS alone; nothing is compared with a training side.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="A fault that is meant: reported, not counted. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Check that rollout and training log-probs belong together.

    Same tokens, same weights, same distribution? Detects and explains shifts,
    swapped samples, wrong boundaries and ids, another prompt or tokenisation,
    an appended EOS, fills, floors and NaN, wrong units, a temperature, filter
    or penalty on one side only, mixed and stale weights, weights that never
    reached the servers, some layers or one server only, lost digits, and a gap
    larger than any sound pair of engines has. Ordinary mismatch (other kernels,
    bf16, quantised or slightly stale weights, MoE routers) is no fault; its
    size is printed, and its cause where it shows.

    RECORDS is a dump of slime, miles, verl, NeMo-RL, TRL or vLLM (.pt, .npz,
    .parquet, .json, .jsonl; docs/inspect.md lists them; one that holds both
    sides needs no TRAINING), or has one JSON object a line (or a row of Parquet), at least:

    {"prompt_ids":[1,5],"response_ids":[7,2],"rollout_log_probs":[-1.2,-0.3]}

    with a natural log-prob, or null, for each response token. Optional, one
    a response token: "loss_mask" (1 trained, 0 not; default 1), "kept_ids" (ids
    that the filter left), "behaviour_log_probs" (renormalised over those),
    "top_log_probs" (pairs of log-prob and id); one a prompt token:
    "prompt_log_probs"; of the whole: "sampling" (an object: temperature,
    top_p, top_k, penalties and so on), "weight_versions" (a list of {"version",
    "start", "end"}, spans of response tokens), "finish_reason" (stop, length
    or abort), "sample_id", "request_id", "server" and "dp_rank" (which server
    and which of its workers), "log_probs_of" (raw, tempered or filtered: before
    the temperature, after it (the default), or after filters too), "served"
    (what our plugin in the SGLang server told: weights, temperature and
    precision, which need no TRAINING), "text", "reward".

    TRAINING has one JSON object a line, {"train_log_probs": [...], ...}: the
    natural log-probs of the response tokens at the sampling temperature, null
    where there is none. "sample_id" or "index" (place of the record, from 0)
    say whose they are; without, line i belongs to record i. Optional:
    "token_ids" and "prompt_ids" (response and prompt as the trainer sees them),
    "loss_mask", "weight_version", "weight_fingerprint" (of the weights that it
    sent to the servers), "temperature", "advantages".

    Exit status: 0 no fault, 1 faults found, 2 cannot check, for example because
    there is neither TRAINING nor --checkpoint, --url or --records-only, 3 not
    decided: no fault, but fewer than 100 tokens can be compared, 4 stopped
    before the end (memory, stdout, an error of ours).
    """
    from mismatch_plugin.data.read import InputError
    from mismatch_plugin.diagnose.read import check_files
    from mismatch_plugin.report.table import printable

    try:
        result = check_files(
            records,
            training,
            checkpoint=checkpoint,
            reference_checkpoint=reference_checkpoint,
            urls=url or (),
            weight_version=weight_version,
            max_staleness=max_staleness,
            eos_ids=eos_id or (),
            records_only=records_only,
            accept=accept or (),
            format=format,
        )
    except InputError as error:
        if as_json:
            typer.echo(json.dumps({"status": "cannot_check", "verdict": str(error)}))
        else:
            typer.echo("cannot check: " + printable(str(error), keep="\n"), err=True)
        raise typer.Exit(CANNOT_CHECK) from None
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        from mismatch_plugin.diagnose.check_report import show
        from mismatch_plugin.report.terminal import terminal

        show(result, terminal())
    if result.status != "clean":
        raise typer.Exit(FAULTS_FOUND if result.status == "faults" else NOT_DECIDED)
