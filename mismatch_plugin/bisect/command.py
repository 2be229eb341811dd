"""The commands `mismatch-plugin bisect` and `certify`. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch_plugin.bisect.certify import Place
    from mismatch_plugin.bisect.verdict import Verdict

CANNOT, _MOST_SHOWN = 2, 9
_URL = typer.Option(help="An idle SGLang server that runs with this plugin.")
_CHECKPOINT = typer.Option(help="Folder of the trainer's model (transformers).", exists=True, file_okay=False)
_IDS = typer.Option("--ids", metavar="FILE", help="JSON list of token ids to compute. Default: drawn at random.")
_CHECK = typer.Option("--check", metavar="FILE", exists=True, help="Compute a certificate again, and compare.")
_UPDATE = typer.Option(help="Folder of the weights that serve, which the server loads again.")
_MEGATRON = typer.Option(
    metavar="FILE.py:FUNCTION", help="Makes megatron-core's GPTModel of the folder. Or MODULE:FUNCTION."
)


def bisect(
    url: Annotated[str, _URL],
    checkpoint: Annotated[Path, _CHECKPOINT],
    megatron: Annotated[str | None, _MEGATRON] = None,
    ids: Annotated[Path | None, _IDS] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many ids are drawn.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Name the module of server and trainer that differs first, and its part of the log-prob gap.

    The same ids go through both. Modules are paired by their weights, and
    each is compared on the same inputs. docs/bisect.md has an example.

    Exit status: 0 nothing differs but by rounding; 1 a module does; 2 cannot compare.
    """
    import torch

    from mismatch_plugin.bisect.engines import Engine, from_checkpoint, from_megatron
    from mismatch_plugin.bisect.verdict import bisect as compare
    from mismatch_plugin.data.read import InputError

    try:
        engine = Engine(url)
        facts = engine.facts()
        dtype = getattr(torch, facts["dtype"])
        if megatron is None:
            trainer = from_checkpoint(checkpoint, dtype)
        else:
            trainer = from_megatron(megatron, checkpoint, dtype, facts["vocab"])
        given = drawn(facts["vocab"], 1, tokens)[0] if ids is None else read_ids(ids, facts["vocab"])
        verdict = compare(trainer, engine.capture(given), dtype)
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
        if len(found) > 1 and all(type(one) is int and 0 <= one < vocab for one in found):
            return found
    except (OSError, TypeError, ValueError):
        pass
    raise InputError(f"--ids {path} wants a JSON list of at least two ids from 0 to {vocab - 1}.")


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
        part = "not measured" if step.part is None else f"{step.part:.0%}"
        told += [
            "",
            f"{'Then' if index else 'First difference'}: {step.what}",
            f"  trainer: {step.module} ({step.which}){step.why and '; ' + step.why}; server: {step.server}",
            f"  from equal inputs: {step.ratio:.1e} apart, {step.dtype} explains {step.allowed:.1e}",
            f"  part of the gap: {part}",
        ]
    if (more := len(verdict.jumps) - _MOST_SHOWN) > 0:
        told.append(f"{more} more are not shown.")
    together = f"Together they explain {verdict.explained:.0%} of the gap."
    told += ["", together if verdict.jumps else "No module differs by more than its dtype explains."]
    told += ["", "Largest of the others, and what their dtype explains:"]
    return told + [f"  {one.module} {one.which}: {one.ratio:.1e} of {one.allowed:.1e}" for one in verdict.largest]


def certify(
    url: Annotated[str, _URL],
    check: Annotated[Path | None, _CHECK] = None,
    out: Annotated[Path, typer.Option(help="Where the certificate is written.")] = Path("certificate.json"),
    sequences: Annotated[int, typer.Option(min=2, help="How many sequences are drawn.")] = 4,
    tokens: Annotated[int, typer.Option(min=6, help="Ids of each.")] = 48,
    update: Annotated[Path | None, _UPDATE] = None,
) -> None:
    """Certify that next-token distributions are the same to the last bit however they are computed.

    Alone, again, in a batch, prefilled in parts, decoded, after an update.
    --check computes a certificate again, on another machine.

    Exit status: 0 all bits are equal; 1 some are not; 2 cannot certify.
    """
    from mismatch_plugin.bisect import certify as of
    from mismatch_plugin.bisect.engines import Engine
    from mismatch_plugin.data.read import InputError

    try:
        engine = of.Served(Engine(url), None if update is None else str(update))
        if check is not None:
            told = [f"  {name:8} {_where(place)}" for name, place in of.check(of.read_certificate(check), engine)]
            typer.echo("\n".join(told) or "All bits are those of the certificate.")
            raise typer.Exit(1 if told else 0)
        certificate = of.certify(engine, drawn(engine.vocab, sequences, tokens))
        out.write_text(certificate.model_dump_json(indent=1) + "\n")
    except (InputError, OSError) as error:
        typer.echo(f"cannot certify: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(f"{certificate.engine}, weights {certificate.fingerprint}, {len(certificate.prompts)} sequences")
    for one in certificate.results[1:]:
        found = f"not run: {one.not_run}" if one.not_run else _where(one.differs or "equal to the last bit")
        typer.echo(f"  {one.condition:8} {found}")
    typer.echo(f"written: {out}")
    raise typer.Exit(0 if certificate.zero else 1)


def _where(place: Place | str) -> str:
    if isinstance(place, str):
        return place
    if place.token is None:
        return f"differs first at {place.tap}; the logits are equal all the same"
    return f"differs first at {place.tap}; its logits at sequence {place.sequence}, token {place.token}"
