"""What a trainer is to the plugin (`Host`), and what all of them share on the way from flags to a run.

The descriptions are in `hosts.HOSTS`; `hooks/README.md` says how to add one. The way of a flag: the launcher or the
host's own door takes what was given, `resolve` merges it with what the host has, and the process that trains keeps the
one `MismatchConfig` that comes out.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn
from urllib.parse import urlparse
from urllib.request import url2pathname

from mismatch_plugin.config import MismatchConfig, bound_warnings
from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.config.fields import flag_names, value_and_default
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import dotted_fields_set, get_path, ignore_mismatch_warnings, merge, unknown
from mismatch_plugin.hooks.tree import put

Scope = Literal["step", "rollout_batch", "micro_batch"]


@dataclass(frozen=True)
class Method:
    """Something that not every host can do. title: for the table of docs. paths: its settings, which `inspect` leaves
    out where it cannot be had. asked: how a configuration asks for it, `<path>` standing for a setting; "" if not."""

    title: str
    paths: tuple[str, ...]
    asked: Callable[[MismatchConfig], str]


def _setting(title: str, path: str, *more: str, off: Any = None, on: Any = None) -> Method:
    """A method that is one setting, asked for where that is `on`, or where none is given, something else than `off`."""

    def asked(config: MismatchConfig) -> str:
        value = value_and_default(config, path)[0]
        there = value not in (None, off) if on is None else value == on
        return (f"<{path}>" + (f" {value}" if value is not True else "")) * there

    return Method(title, (path, *more), asked)


METHODS: dict[str, Method] = {
    "old_log_probs": Method(
        "algorithms 0 and 2", (), lambda c: f"algorithm {c.algorithm}" * (not c.use_rollout_log_probs)
    ),
    "bypass": Method("algorithms 1 and 3", (), lambda c: f"algorithm {c.algorithm}" * c.use_rollout_log_probs),
    "current_policy": _setting("`--rs-policy current`", "rs.policy", on="current"),
    "conditions": Method(
        "what hangs on the advantage",
        ("rs.criteria@", "tis.lower_bound_positive", "tis.upper_bound_positive"),
        lambda c: ", ".join(c.advantage_readers),
    ),
    "budgets": Method(
        "a budget of a criterion",
        ("rs.criteria:",),
        lambda c: ", ".join(f"criterion {criterion.name} with {criterion.budget}" for criterion in c.budgets),
    ),
    "penalty": _setting("`--mismatch-rollout-kl-coef`", "terms.rollout_kl_coef", "terms.rollout_kl", off=0.0),
    "groups": _setting("`--rs-group`", "rs.group", "rs.min_group", off="keep"),
    "versions": _setting("`--rs-max-staleness`", "rs.max_staleness"),
    "normalisation": _setting("batch normalisation", "tis.batch_normalize", off=False),
    "accepted": _setting("denominator `accepted`", "denominator", on="accepted"),
    "log_probs": Method(
        "log-prob backends, fused head",
        ("log_prob_backend", "inplace_logits", "fused_head"),
        lambda c: (
            f"<log_prob_backend> {c.log_prob_backend}" * (c.log_prob_backend != "auto")
            or f"<inplace_logits> {c.inplace_logits}" * (c.inplace_logits != "auto")
            or "<fused_head>" * c.fused_head
        ),
    ),
    "updates": _setting("`--mismatch-verify-weights`", "verify_weights", off="warn"),
    "report": _setting("`--mismatch-report-dir`", "report_dir"),
    "gate": _setting("`--mismatch-gate-kl`", "gate_kl"),
}


@dataclass(frozen=True)
class Lack:
    """Why a host cannot do a method, a clause with "it" for the host. instead: what to do. when: of the configuration,
    for what can be had with other settings; they are then named by `unless`."""

    why: str
    instead: str = "Leave it out."
    when: Callable[[MismatchConfig], bool] = lambda config: True
    unless: str = ""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One trainer. Nothing of it is imported to describe it.

    name: as --mismatch-host and `inspect --host` take it. spellings: others that are accepted (dashes, underscores and
    case are one). title: as people write it; its folder among checkouts.
    packages: a script that imports one of them, or something inside, is this host's.
    repository, version, commit: what the tests ran with; commit None for a release.
    inside: a folder that only its tree has. distribution: its name on PyPI where that is not `name`.

    owns: start of the path of a setting that the host decides → what sets it there; "" where nothing does.
    shares: the same of settings that are ours to choose where the host's user has not.
    lacks: key of METHODS → why it cannot be had.
    scope: what batch normalisation runs over there.
    block: the mapping that holds our settings in the host's own configuration, in whose names errors speak as well.
    denominator: what divides the loss, one clause.

    launch: the module whose `plan(host, given, script)` and FLAGS (of the host's own flags, those that look like ours)
    the launcher asks; "" for a host that is entered by its own door alone.
    door: what to do without the launcher, one sentence.
    paste: what runs our settings there, `{flags}` or `{python}` standing for them.
    trainer: what the launcher is put before. reads: (module, function) pairs; a call of one means that the command line
    has been read in this process. starters: modules that only scripts import whose trainer runs in another program;
    a patched parser takes our flags there.
    needs_patch: what of a configuration only a patched tree can do; "" where it needs none.

    dumps: names of `data.formats.FORMATS` that it writes. metrics: what it records without us: its name → ours.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    repository: str
    version: str
    commit: str | None = None
    inside: str
    distribution: str = ""
    spellings: tuple[str, ...] = ()
    owns: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, Lack] = field(default_factory=dict)
    scope: Callable[[MismatchConfig], Scope] = lambda config: "step"
    block: str = ""
    denominator: str
    launch: str = ""
    door: str
    paste: str
    trainer: str = "train.py"
    reads: tuple[tuple[str, str], ...] = ()
    starters: tuple[str, ...] = ()
    needs_patch: Callable[[MismatchConfig], str] = lambda config: ""
    dumps: tuple[str, ...] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)

    def spell(self, text: str) -> str:
        """`text` with each `<dotted.path>` as its flag, and as users write it in the host's own configuration."""
        flags, own = flag_names(MismatchConfig), f" ({self.block}.{{}})" if self.block else ""
        return re.sub(r"<([a-z_.]+)>", lambda m: flags.get(m[1], m[1]) + own.format(m[1]), text)

    def lacking(self, config: MismatchConfig) -> dict[str, tuple[str, Lack]]:
        """Key of METHODS → (how the configuration asks for it, why it cannot be had)."""
        asked = {key: (METHODS[key].asked(config), lack) for key, lack in self.lacks.items() if lack.when(config)}
        return {key: found for key, found in asked.items() if found[0]}


# The way of a setting -------------------------------------------------------------------------------------------------


def given_settings(given: MismatchConfig | Mapping[str, Any] | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, base) for `resolve`, from what a host's own door takes.

    given: a configuration, nested settings (`preset: NAME` among them makes the base), flags as one string
    ("--use-tis …"), or the path of a settings file. Raises ValueError for what is none of these.
    """
    if isinstance(given, str) and given.lstrip().startswith("-"):
        given = MismatchConfig.from_words(shlex.split(given))
    if isinstance(given, MismatchConfig):
        whole, ours = given.model_dump(exclude_unset=True), dict[str, Any]()
        for path in dotted_fields_set(whole) if given._by_hand is None else dotted_fields_set(whole) & given._by_hand:
            put(ours, path, get_path(whole, path))
        return ours, whole  # what a preset brought, it may bring where it has no effect
    own = dict(given) if isinstance(given, Mapping) else read_mapping(given)
    name = own.pop("preset", None)
    return own, {} if name is None else find_preset(name).settings()


def resolve(
    host: Host,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    *,
    base: dict[str, Any] | None = None,
    by_hand: Collection[str] | None = None,
) -> MismatchConfig:
    """The one configuration that our settings and the host's give: base < theirs < ours.

    ours, theirs, base: nested settings; base holds defaults, of a preset or of the host, that either may change.
    by_hand: the dotted paths of ours that a person asked for, and that are refused where they have no effect; None:
    all of them.
    Raises: ValueError, one sentence, where the two contradict each other, or ours ask for what the host decides or
    cannot do. Warns: MismatchWarning as building the configuration does.
    """
    validate_owned(host, ours, theirs)
    by_hand = dotted_fields_set(ours) if by_hand is None else by_hand
    if "denominator" in theirs and ours.get("denominator") == "auto":
        ours = {name: value for name, value in ours.items() if name != "denominator"}
    data = merge(merge(base or {}, theirs), ours)
    config = MismatchConfig.build(data, by_hand)
    for asked, lack in host.lacking(config).values():
        without = f" without {lack.unless}" if lack.unless else ""
        raise ValueError(host.spell(f"{asked} cannot be had in {host.title}{without}: {lack.why}. {lack.instead}"))
    if not config.normalizes:
        return config
    wanted, given = config.tis.batch_normalize_scope, host.scope(config)
    if wanted not in ("auto", given) and (given, wanted) != ("step", "micro_batch"):
        named = host.spell(f"<tis.batch_normalize_scope> {wanted}")
        raise ValueError(
            f"{named} is not what {host.title} gives in algorithm {config.algorithm}: choose {given} or auto."
        )
    if given == "step":
        return config
    with ignore_mismatch_warnings():  # said by the first build
        return MismatchConfig.build(merge(data, {"tis": {"batch_normalize_scope": given}}), by_hand)


def validate_owned(host: Host, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that does not exist, or that the host decides otherwise."""
    known = dotted_fields_set(MismatchConfig().model_dump())
    for path in sorted(dotted_fields_set(dict(ours))):
        if path not in known:
            raise unknown("setting" + f" of {host.block}" * bool(host.block), path, sorted(known))
        mine, owned = get_path(ours, path), get_path(theirs, path)
        start = next((start for start in (*host.owns, *host.shares) if path.startswith(start)), None)
        if start is None or mine in (None, owned) or (start in host.shares and owned is None):
            continue
        where = host.owns.get(start, "") or host.shares.get(start, "")
        if not where:
            raise ValueError(host.spell(f"<{path}> {mine} cannot be had in {host.title}: leave it out."))
        if owned is None:
            raise ValueError(host.spell(f"<{path}> {mine} is {host.title}'s to set: leave it out, and set {where}."))
        contradicts = f"<{path}> {mine} contradicts {host.title}'s {where}, which makes it {owned}"
        raise ValueError(host.spell(f"{contradicts}: leave it out, and set that."))


def whole_step_needs(config: MismatchConfig) -> list[str]:
    """What of these settings a loss, which sees one micro-batch at a time, cannot give without hooks around it."""
    asked = {
        "--mismatch-gate-kl": config.gate_kl is not None,
        "a budget of rs.criteria": bool(config.budgets),
        "--tis-batch-normalize-scope step": config.normalizes_step and config.tis.batch_normalize_scope == "step",
    }
    return [name for name, there in asked.items() if there]


def block_lines(
    config: MismatchConfig,
    lines: Sequence[str],
    *,
    divided: str,
    second_pass: str,
    filtered: str = "",
    length: object = None,
    notes: Sequence[str] = (),
    leave_out: tuple[str, ...] = (),
) -> list[str]:
    """The start-up block of a host: what will run, and what of it is the host's. "! " begins a warning.

    lines: what only this host says. divided, second_pass: what follows these words. filtered: the bias of a sampling
    filter, or "". length: tokens of a response, where known. notes: more warnings. leave_out: beginnings of lines of
    `config.describe()`.
    """
    own = [line for line in config.describe().splitlines() if not line.startswith(("loss: ", *leave_out))]
    own += [*lines, f"divided {divided}", f"second forward pass: {second_pass}"]
    warnings = [*[f"sampling filter: {filtered}"] * bool(filtered), *notes, *bound_warnings(config, length)]
    return own + [f"! {warning}" for warning in dict.fromkeys(warnings)]


# The launcher ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What was typed: our flags' configuration and nested settings (by flag, preset or file); the flags, each once, in
    their first spelling; --mismatch-host; whether to stop after the block; every other token, in order."""

    config: MismatchConfig
    settings: dict[str, Any]
    flags: tuple[str, ...]
    host: str | None
    explain_only: bool
    host_argv: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    argv: the host's command line; added: what of it the launcher added. lines: the start-up block, see `start_block`.
    install: called right before the script runs, to change the host's functions. config: what will run; None for a run
    without us. settle: what a host's Namespace goes through once it is parsed, for hosts that have one.
    """

    argv: tuple[str, ...]
    added: tuple[str, ...]
    lines: tuple[str, ...]
    install: Callable[[], None]
    config: MismatchConfig | None = None
    settle: Callable[[Namespace], None] = lambda namespace: None

    @classmethod
    def untouched(cls, host: Host, given: Given, line: str = "") -> Plan:
        """The run as it is without the launcher."""
        line = line or f"none of the plugin's flags is given: {host.title} runs as it is"
        return cls(given.host_argv, (), (line,), lambda: None)


class Parser(ArgumentParser):
    """argparse whose mistakes are ValueErrors, one sentence each."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message[0].upper() + message[1:] + ".")


def peek(argv: Sequence[str], table: Mapping[str, dict[str, Any]]) -> tuple[Namespace, set[str]]:
    """The values of some of the host's own flags (table: flag → options of add_argument), and the destinations that
    were typed. Everything else on the line is passed over; the host's parser reads it."""
    parser = Parser(add_help=False, allow_abbrev=False)
    actions = [parser.add_argument(flag, **options) for flag, options in table.items()]
    values, _ = parser.parse_known_args(list(argv))
    tokens = {token.partition("=")[0] for token in argv}
    return values, {action.dest for action in actions if tokens.intersection(action.option_strings)}


def settled(settle: Callable[[Namespace], None]) -> Callable[..., Namespace]:
    """What to wrap a host's argument parser in, for its Namespace to go through `settle`, whose ValueError ends the
    program with that sentence, before training starts."""

    def parse_and_settle(own: Callable[..., Namespace], *args: Any, **kwargs: Any) -> Namespace:
        namespace = own(*args, **kwargs)
        try:
            settle(namespace)
        except ValueError as error:
            stop(str(error))
        return namespace

    return parse_and_settle


_OWN = "mismatch_plugin_wraps"


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let calls of `owner.name` go through `around(own, *args, **kwargs)`, own being the host's function.

    The same `around` a second time takes the place of the first.
    owner: a class, or a module (itself, or its dotted name); then modules of its package, and the script, that have
    imported the function by name get it too.
    """
    owner = import_module(owner) if isinstance(owner, str) else owner
    found = getattr(owner, name)
    kind = getattr(around, "func", around).__qualname__
    ours, own, before = getattr(found, _OWN, (None, None, ""))
    if ours is not found or before != kind:  # the host may have wrapped ours, and copied its attributes
        own = found

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(own, *args, **kwargs)

    if own is not None:  # a function that may be missing, such as megatron's finalize_model_grads_func
        wraps(own)(wrapped)
    setattr(wrapped, _OWN, (wrapped, own, kind))
    setattr(owner, name, wrapped)
    if isinstance(owner, ModuleType):
        package = owner.__name__.split(".")[0]
        for path, loaded in list(sys.modules.items()):
            if path.split(".")[0] in (package, "__main__") and vars(loaded).get(name) is found:
                setattr(loaded, name, wrapped)


def start_block(host: str, lines: Sequence[str]) -> str:
    """What is printed before training starts. Lines that begin with "! " are warnings."""
    shown = (line if line.startswith("! ") else f"  {line}" for line in lines)
    return "\n".join([f"mismatch_plugin on {host}:", *shown])


def announce(host: Host, lines: Sequence[str]) -> None:
    """Print the block of a run that no launcher starts, which ends in the host's version."""
    print(start_block(host.name, [*lines, version_line(host)]), flush=True)


def stop(message: str) -> NoReturn:
    """End the program with one sentence, before training starts."""
    print(f"mismatch_plugin: {message}", file=sys.stderr)
    raise SystemExit(2)


# The host's version, by what is installed and git; nothing of it is imported ------------------------------------------


def version_line(host: Host, folders: Sequence[Path] = ()) -> str:
    """One line for the start-up block: the host's version, and whether it is the tested one. folders: looked at before
    what is installed, as sys.path will have them."""
    tested, root = _shown(host.version, host.commit), _holder(host.inside, folders)
    if root is None:
        return (
            f"! host: {host.name} is not found here: install it in this Python, or put its checkout on PYTHONPATH. The "
            f"plugin was tested with {tested}"
        )
    version, commit = read_version(host, root)
    found = f"{host.name} {_shown(version, commit)}"
    if commit == host.commit if commit and host.commit else version == host.version:
        return f"host: {found}, the tested version"
    other = "is not" if version or (commit and host.commit) else "may not be"
    return (
        f"! host: {found} {other} the tested version, {tested}. Use that one, or look at the loss and the metrics of "
        f"the first steps before a long run"
    )


def _shown(version: str | None, commit: str | None) -> str:
    known = [version] if version else []
    known += [f"at {commit[:10]}"] if commit else []
    return " ".join(known) or "of unknown version"


def _holder(inside: str, folders: Sequence[Path]) -> Path | None:
    """The first folder, of `folders` or of where the package is installed, that has `inside` below it."""
    try:
        spec = find_spec(inside.split("/")[0])
    except (ImportError, ValueError):
        spec = None
    found = [] if spec is None else [Path(place).parent for place in spec.submodule_search_locations or ()]
    return next((root for root in [*folders, *found] if (root / inside).is_dir()), None)


def read_version(host: Host, root: Path) -> tuple[str | None, str | None]:
    """(version of the distribution that is installed in this folder, or from it to be edited there; commit of a
    checkout, 40 hex digits), each None where there is none. A checkout may hold its packages in src."""
    root = root.resolve()
    checkout = root.parent if root.name == "src" else root
    version = None
    for found in metadata.distributions(name=host.distribution or host.name):
        url = json.loads(found.read_text("direct_url.json") or "{}").get("url")
        edited = url is not None and Path(url2pathname(urlparse(url).path)).resolve() == checkout
        if edited or Path(str(found.locate_file(""))).resolve() == root:
            version = version or found.version
    try:
        words = ["git", f"--git-dir={checkout / '.git'}", "rev-parse", "HEAD"]  # not that of a folder around it
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return version, None
    return version, done.stdout.strip() if done.returncode == 0 else None
