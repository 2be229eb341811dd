"""The command `mismatch-plugin explain`. Heavy imports wait until it runs."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

_OWN, _EXAMPLE, _OUTPUT = "Numbers of your own", "Worked example", "Output"
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Typer's: what is no option here is a flag of the launch line."""


def _own(help: str) -> Any:
    return typer.Option(help=help, metavar="NUMBERS", rich_help_panel=_OWN)


Numbers = list[str] | None


def explain(
    context: typer.Context,
    train: Annotated[Numbers, _own("log π_θ of each token, the trainer's current policy.")] = None,
    rollout: Annotated[Numbers, _own("log π_rollout of the same tokens, what the engine returned.")] = None,
    old: Annotated[Numbers, _own("log π_old, before the step. Default: --train, as in a first step.")] = None,
    mask: Annotated[Numbers, _own("1 where a token trains, 0 where a tool wrote it. Default: 1.")] = None,
    advantages: Annotated[Numbers, _own("One a token, a sequence, or for all. Default: 1.")] = None,
    rewards: Annotated[Numbers, _own("One a sequence, in place of advantages: those of GRPO are made of them.")] = None,
    groups: Annotated[Numbers, _own("The group of each sequence, a number. Default: one group.")] = None,
    ref: Annotated[Numbers, _own("log π_ref, for --mismatch-kl-coef.")] = None,
    entropy: Annotated[Numbers, _own("Entropy of π_θ at each token, for --mismatch-entropy-coef.")] = None,
    versions: Annotated[Numbers, _own("Weight version that sampled each token, for --rs-max-staleness.")] = None,
    trainer_version: Annotated[
        int | None, typer.Option(help="Weight version that trains.", rich_help_panel=_OWN, metavar="NUMBER")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE", help="Show only this --tis-mode. May be repeated.", rich_help_panel=_EXAMPLE),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(metavar="LEVEL", help="Show only this --tis-level. May be repeated.", rich_help_panel=_EXAMPLE),
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print GitHub markdown instead of terminal tables.", rich_help_panel=_OUTPUT),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Of one setting: print one JSON object.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Show what a setting makes of every token: weight, rejection, loss and gradient.

    Alone: a worked example, eight tokens under every mode and level,
    criterion and objective. With settings as on a launch line (--use-tis
    --tis-level sequence, or --mismatch-preset NAME; docs/settings.md has them
    all): those eight tokens under these settings, from ratio to gradient.

    With --train and --rollout: numbers of your own in place of the example's.
    Commas stand between tokens, semicolons between sequences, or the option
    is repeated:

    mismatch-plugin explain --train '-1.2,-0.3; -0.7' --rollout '-1.0,-0.4;
    -2.3' --advantages '1; -1' --use-tis --rs-veto-threshold 0.1

    Everything is computed by the functions that the training loss uses.
    """
    given = {
        "train": train, "rollout": rollout, "old": old, "mask": mask, "advantages": advantages, "ref": ref,
        "entropy": entropy, "versions": versions, "rewards": rewards, "groups": groups,
    }  # fmt: skip
    try:
        if not any(given.values()) and not context.args and trainer_version is None:
            if as_json:
                raise ValueError("--json is for one setting: give its flags, as --use-tis, or leave --json out.")
            _example(mode or (), level or (), markdown)
            return
        if mode or level:
            raise ValueError("--mode and --level narrow the table of all settings: write --tis-mode and --tis-level.")
        _one_setting(given, trainer_version, context.args, markdown, as_json)
    except ValueError as error:
        typer.echo(f"cannot explain: {error}", err=True)
        raise typer.Exit(2) from None


def _one_setting(
    given: dict[str, Numbers], trainer_version: int | None, flags: list[str], markdown: bool, as_json: bool
) -> None:
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.explain.account import account
    from mismatch_plugin.explain.example import example_numbers
    from mismatch_plugin.explain.numbers import read_numbers
    from mismatch_plugin.explain.tables import tables
    from mismatch_plugin.report.terminal import show

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        config = MismatchConfig.from_words(flags)
    if any(given.values()) or trainer_version is not None:
        numbers = read_numbers(given, trainer_version=trainer_version)
        _validate_used(given, trainer_version, config)
    else:
        numbers = example_numbers(config)
    found = account(numbers, config)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    typer.echo(config.describe())
    for note in notes:
        typer.echo(f"note: {note.message}")
    for table in tables(found, config):
        typer.echo()
        show(table, markdown)
    if config.gate_kl is not None:
        k3_kl = found.metrics["rollout_corr/k3_kl"]
        verdict = "goes on" if k3_kl <= config.gate_kl else "stops here, before the optimizer's step"
        typer.echo(f"\ngate: k3_kl {k3_kl:.4g} nats per token, the bar is {config.gate_kl:g}: training {verdict}.")


def _validate_used(given: dict[str, Numbers], trainer_version: int | None, config: MismatchConfig) -> None:
    """Raise ValueError for numbers that no setting reads."""
    unread = {
        "ref": (given["ref"] and not config.terms.kl_coef, "--mismatch-kl-coef"),
        "entropy": (given["entropy"] and not config.terms.entropy_coef, "--mismatch-entropy-coef"),
        "versions": (given["versions"] and config.rs.max_staleness is None, "--rs-max-staleness"),
        "trainer-version": (trainer_version is not None and config.rs.max_staleness is None, "--rs-max-staleness"),
    }
    for name, (idle, flag) in unread.items():
        if idle:
            raise ValueError(f"--{name} is for {flag}: give it, or leave --{name} out.")
    if config.rs.max_staleness is not None:
        for name, missing in (("versions", not given["versions"]), ("trainer-version", trainer_version is None)):
            if missing:
                raise ValueError(f"--rs-max-staleness compares --versions with --trainer-version: give --{name}.")


def _example(modes: Collection[str], levels: Collection[str], markdown: bool) -> None:
    from mismatch_plugin.config.units import LEVELS
    from mismatch_plugin.config.values import unknown
    from mismatch_plugin.explain.example import MODES, example_tables, explain_table
    from mismatch_plugin.report.terminal import show

    for flag, names, known in (("--mode", modes, MODES), ("--level", levels, LEVELS)):
        for name in names:
            if name not in known:
                raise unknown(flag, name, known)
    narrowed = explain_table(
        [name for name in MODES if name in (modes or MODES)], [name for name in LEVELS if name in (levels or LEVELS)]
    )
    for place, table in enumerate((narrowed,) if modes or levels else example_tables()):
        if place:
            typer.echo()
        show(table, markdown)
