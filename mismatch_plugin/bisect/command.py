"""The commands `mismatch-plugin bisect` and `certify`. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mismatch_plugin.bisect.certify import Certificate, Place
    from mismatch_plugin.bisect.verdict import Step, Verdict

CANNOT = 2
_IDS = "A JSON list of token ids to compute. Default: --tokens ids that are drawn at random."
_CHECKPOINT = "Folder of the trainer's model (transformers)."


class Dtype(str, Enum):
    """In which the trainer's model computes."""

    float32, bfloat16, float16 = "float32", "bfloat16", "float16"


def bisect(
    url: Annotated[str, typer.Option(help="An idle SGLang server that runs with this plugin.")],
    checkpoint: Annotated[Path, typer.Option(help=_CHECKPOINT)],
    megatron: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Called with the folder and the torch dtype; returns a megatron-core GPTModel with its weights.",
        ),
    ] = None,
    ids: Annotated[Path | None, typer.Option("--ids", metavar="FILE", help=_IDS)] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many ids are drawn.")] = 64,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the trainer's model. Default: the server's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Which module of server and trainer differs first, by how much, and what of the log-prob gap it makes.

    The same ids go through both. Modules are paired by their weights, and
    each is compared on the same inputs. docs/bisect.md has an example.

    Exit status: 0 nothing differs but by rounding; 1 a module does; 2 cannot compare.
    """
    import torch

    from mismatch_plugin.bisect.engines import Engine, from_checkpoint, from_function
    from mismatch_plugin.bisect.verdict import bisect as compare
    from mismatch_plugin.data.read import InputError

    try:
        engine = Engine(url)
        facts = engine.facts()
        kind = getattr(torch, dtype.value) if dtype is not None else facts.dtype
        trainer = from_checkpoint(checkpoint, kind) if megatron is None else from_function(megatron, checkpoint, kind)
        given = drawn(facts.vocab, 1, tokens)[0] if ids is None else read_ids(ids, facts.vocab)
        verdict = compare(trainer, engine.capture(given), facts.dtype)
    except InputError as error:
        typer.echo(f"cannot bisect: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(verdict.model_dump_json(indent=2) if as_json else "\n".join(lines(verdict)))
    raise typer.Exit(1 if verdict.jumps else 0)


def read_ids(path: Path, vocab: int) -> list[int]:
    """Raises InputError."""
    from mismatch_plugin.data.read import InputError

    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--ids {path} cannot be read: {error}") from None
    known = isinstance(found, list) and all(type(one) is int and 0 <= one < vocab for one in found)
    if not known or len(found) < 2:
        raise InputError(f"--ids {path} wants a JSON list of at least two ids from 0 to {vocab - 1}.")
    return found


def drawn(vocab: int, sequences: int, tokens: int) -> list[list[int]]:
    """The same ids every time."""
    import numpy as np

    return np.random.default_rng(0).integers(0, vocab, (sequences, tokens)).tolist()


def lines(verdict: Verdict) -> list[str]:
    """The verdict in sentences."""
    told = [f"{verdict.tokens} tokens, mean |log-prob gap| {verdict.gap:.2g} nats; {verdict.watched} steps compared."]
    if verdict.unpaired:
        told.append(f"The trainer has nothing like {', '.join(verdict.unpaired[:4])}.")
    if (first := verdict.first) is None:
        told.append("No module differs by more than its dtype explains.")
    else:
        told += ["", f"First difference: {_sentence(first)}"]
        told += [f"Then: {_sentence(step)}" for step in verdict.jumps[1:9]]
        if len(verdict.jumps) > 9:
            told.append(f"And {len(verdict.jumps) - 9} more.")
        told.append(f"Together these explain {verdict.explained:.0%} of the gap.")
    told += ["", "Largest of the others:"]
    told += [
        f"  {_place(step)}: {step.ratio:.1e} of {step.allowed:.1e} that {step.dtype} explains"
        for step in verdict.largest
    ]
    return told


def _place(step: Step) -> str:
    return f"{step.module} {step.which}"


def _sentence(step: Step) -> str:
    part = "" if step.part is None else f" Part of the gap: {step.part:.0%}."
    why = f" {step.why[0].upper()}{step.why[1:]}." if step.why else ""
    return (
        f"{_place(step)}, the {step.what} (server: {step.server}). From equal inputs they are {step.ratio:.1e} apart, "
        f"up to {step.ulp:.1e} ulp; {step.dtype} explains {step.allowed:.1e}.{why}{part}"
    )


def certify(
    url: Annotated[str | None, typer.Option(help="An idle SGLang server that runs with this plugin.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help=_CHECKPOINT)] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Compute a certificate again, and compare.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where the certificate is written.")] = Path("certificate.json"),
    sequences: Annotated[int, typer.Option(min=2, help="How many are drawn.")] = 4,
    tokens: Annotated[int, typer.Option(min=6, help="Ids of each that is drawn.")] = 48,
    update: Annotated[
        Path | None, typer.Option(help="Folder of the weights that serve, which the server loads again.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the model of --checkpoint.")] = Dtype.float32,
) -> None:
    """Certify that next-token distributions are the same to the last bit however they are computed.

    Alone, again, in a batch, prefilled in parts, decoded, after an update.
    --check computes a certificate again, on another machine or engine.

    Exit status: 0 all bits are equal; 1 some are not; 2 cannot certify.
    """
    import torch

    from mismatch_plugin.bisect import certify as of
    from mismatch_plugin.bisect.engines import Engine, from_checkpoint
    from mismatch_plugin.data.read import InputError

    try:
        if (url is None) == (checkpoint is None):
            raise InputError("give either --url or --checkpoint: a certificate is of one engine.")
        if update is not None and url is None:
            raise InputError(f"--update {update} is for a server: give --url, or leave it out.")
        if checkpoint is not None:
            kind = getattr(torch, dtype.value)
            engine = of.InProcess(from_checkpoint(checkpoint, kind), kind)
        else:
            engine = of.Served(Engine(str(url)), None if update is None else str(update))
        if check is not None:
            told = of.check(read_certificate(check), engine)
            typer.echo("\n".join(_checked(told)))
            raise typer.Exit(1 if told else 0)
        certificate = of.certify(engine, drawn(engine.vocab, sequences, tokens))
        out.write_text(certificate.model_dump_json(indent=1) + "\n")
    except (InputError, OSError) as error:
        typer.echo(f"cannot certify: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo("\n".join([*_conditions(certificate), f"written: {out}"]))
    raise typer.Exit(0 if certificate.zero else 1)


def read_certificate(path: Path) -> Certificate:
    """Raises InputError for a file of another form."""
    from pydantic import ValidationError

    from mismatch_plugin.bisect.certify import Certificate
    from mismatch_plugin.data.read import InputError

    try:
        return Certificate.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        said = str(error).partition("\n")[0]
        raise InputError(f"--check {path} is no certificate of `mismatch-plugin certify`: {said}.") from None


def _conditions(certificate: Certificate) -> list[str]:
    told = [f"{certificate.engine}, weights {certificate.fingerprint}, {len(certificate.prompts)} sequences"]
    for one in certificate.results[1:]:
        if one.not_run:
            told.append(f"  {one.condition:8} not run: {one.not_run}")
        else:
            told.append(
                f"  {one.condition:8} {'equal to the last bit' if one.differs is None else _where(one.differs)}"
            )
    return told


def _where(place: Place) -> str:
    at = "" if place.token is None else f", sequence {place.sequence}, token {place.token}"
    return f"differs first at {place.tap}{at}" + ("" if place.logits else "; the logits are equal all the same")


def _checked(told: list[tuple[Any, Place | str]]) -> list[str]:
    if not told:
        return ["All bits are those of the certificate."]
    return [f"  {name:8} {place if isinstance(place, str) else _where(place)}" for name, place in told]
