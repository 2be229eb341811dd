"""The commands `mismatch-plugin bisect` and `certify`. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_plugin.bisect.certify import Certificate, Place
    from mismatch_plugin.bisect.verdict import Step, Verdict

CANNOT, _MOST_SHOWN = 2, 9
_URL = typer.Option(help="An idle SGLang server that runs with this plugin.")
_CHECKPOINT = typer.Option(help="Folder of the trainer's model (transformers).")
_IDS = typer.Option("--ids", metavar="FILE", help="JSON list of token ids to compute. Default: drawn at random.")
_CHECK = typer.Option("--check", metavar="FILE", help="Compute a certificate again, and compare.")
_UPDATE = typer.Option(help="Folder of the weights that serve, which the server loads again.")


class Dtype(str, Enum):
    """In which a model of --checkpoint computes."""

    float32, bfloat16, float16 = "float32", "bfloat16", "float16"


def bisect(
    url: Annotated[str, _URL],
    checkpoint: Annotated[Path, _CHECKPOINT],
    ids: Annotated[Path | None, _IDS] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many ids are drawn.")] = 64,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the trainer's model. Default: the server's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Name the module of server and trainer that differs first, and its part of the log-prob gap.

    The same ids go through both. Modules are paired by their weights, and
    each is compared on the same inputs. docs/bisect.md has an example.

    Exit status: 0 nothing differs but by rounding; 1 a module does; 2 cannot compare.
    """
    import torch

    from mismatch_plugin.bisect.engines import Engine, from_checkpoint
    from mismatch_plugin.bisect.verdict import bisect as compare
    from mismatch_plugin.data.read import InputError

    try:
        engine = Engine(url)
        facts = engine.facts()
        served = getattr(torch, facts["dtype"])
        trainer = from_checkpoint(checkpoint, served if dtype is None else getattr(torch, dtype.value))
        given = drawn(facts["vocab"], 1, tokens)[0] if ids is None else read_ids(ids, facts["vocab"])
        verdict = compare(trainer, engine.capture(given), served)
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
        told.append(f"The trainer has nothing like the server's {', '.join(verdict.unpaired[:_MOST_SHOWN])}.")
    for index, step in enumerate(verdict.jumps[:_MOST_SHOWN]):
        told += ["", *_told(step, "Then" if index else "First difference")]
    if verdict.jumps:
        more = len(verdict.jumps) - _MOST_SHOWN
        told += [
            "",
            f"Together they explain {verdict.explained:.0%} of the gap." + f" {more} are not shown." * (more > 0),
        ]
    else:
        told.append("No module differs by more than its dtype explains.")
    told += ["", "Largest of the others, and what their dtype explains:"]
    return told + [f"  {one.module} {one.which}: {one.ratio:.1e} of {one.allowed:.1e}" for one in verdict.largest]


def _told(step: Step, which: str) -> list[str]:
    part = "not measured" if step.part is None else f"{step.part:.0%}"
    return [
        f"{which}: {step.what}",
        f"  trainer: {step.module} ({step.which}){step.why and '; ' + step.why}; server: {step.server}",
        f"  from equal inputs: {step.ratio:.1e} apart, {step.dtype} explains {step.allowed:.1e}, {step.ulp:.1e} ulp",
        f"  part of the gap: {part}",
    ]


def certify(
    url: Annotated[str | None, _URL] = None,
    checkpoint: Annotated[Path | None, _CHECKPOINT] = None,
    check: Annotated[Path | None, _CHECK] = None,
    out: Annotated[Path, typer.Option(help="Where the certificate is written.")] = Path("certificate.json"),
    sequences: Annotated[int, typer.Option(min=2, help="How many sequences are drawn.")] = 4,
    tokens: Annotated[int, typer.Option(min=6, help="Ids of each.")] = 48,
    update: Annotated[Path | None, _UPDATE] = None,
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
        if url is not None and checkpoint is None:
            engine = of.Served(Engine(url), None if update is None else str(update))
        elif checkpoint is not None and url is None and update is None:
            kind = getattr(torch, dtype.value)
            engine = of.InProcess(from_checkpoint(checkpoint, kind), kind)
        else:
            raise InputError("a certificate is of one engine: give --url (and --update, if wanted) or --checkpoint.")
        if check is not None:
            told = [f"  {name:8} {_where(place)}" for name, place in of.check(of.read_certificate(check), engine)]
            typer.echo("\n".join(told) or "All bits are those of the certificate.")
            raise typer.Exit(1 if told else 0)
        certificate = of.certify(engine, drawn(engine.vocab, sequences, tokens))
        out.write_text(certificate.model_dump_json(indent=1) + "\n")
    except (InputError, OSError) as error:
        typer.echo(f"cannot certify: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo("\n".join([*_conditions(certificate), f"written: {out}"]))
    raise typer.Exit(0 if certificate.zero else 1)


def _conditions(certificate: Certificate) -> list[str]:
    told = [f"{certificate.engine}, weights {certificate.fingerprint}, {len(certificate.prompts)} sequences"]
    for one in certificate.results[1:]:
        found = f"not run: {one.not_run}" if one.not_run else _where(one.differs or "equal to the last bit")
        told.append(f"  {one.condition:8} {found}")
    return told


def _where(place: Place | str) -> str:
    if isinstance(place, str):
        return place
    at = "" if place.token is None else f", sequence {place.sequence}, token {place.token}"
    return f"differs first at {place.tap}{at}" + ("" if place.logits else "; the logits are equal all the same")
