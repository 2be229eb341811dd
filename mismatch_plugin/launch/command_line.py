"""From a command line to a run that is ready: our flags are taken off it, all the rest stays as it is, the host's."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import runpy
import sys
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.config.flags import add_arguments, underscored_spellings
from mismatch_plugin.config.model import Once
from mismatch_plugin.hooks.base import Given, Host, Parser, Plan, peek, version_line
from mismatch_plugin.patching import manifest
from mismatch_plugin.report.log import validate_same_settings

HOST_FLAG = "--mismatch-host"
# Nothing else begins like this in any host but the flags that the host itself declares.
_FAMILIES = ("--tis-", "--rs-", "--mismatch-", "--use-tis", "--use-rs", "--use-rollout-log", "--rollout-log-prob")
_SIMILAR = 0.88
_DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-")  # what editors and web pages make of one
_SWITCHED = ("true", "false", "yes", "no", "on", "off", "0", "1")
_OF_THE_LAUNCHER = (HOST_FLAG, "--mismatch-explain-only")


def make_plan(host: Host, argv: Sequence[str], script: Path | None) -> tuple[Given, Plan]:
    """Read a command line and plan the run; its lines end in what was warned about, the host's version, and what is
    added. Raises: ValueError, also where the report folder holds steps of other settings, or for hosts not launched."""
    if not host.launch:
        raise ValueError(f"{host.title} takes the plugin without the launcher: {host.door}.")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        part, groups = import_module(host.launch), host.lacks.get("groups")
        # What the host lacks comes before mistakes in its options.
        if groups and (asked := peek(argv, {"--rs-group": {}})[0].rs_group) not in (None, "keep"):
            raise ValueError(f"--rs-group {asked} cannot be had in {host.title}: {groups.why}. {groups.instead}")
        given = read_command_line(argv, part.FLAGS)
        plan = part.plan(host, given, script)
    lines = list(plan.lines)
    for message in (str(warning.message) for warning in found if issubclass(warning.category, MismatchWarning)):
        if not any(message in line for line in lines):
            lines.append(f"! {message}")
    if plan.config is not None:
        if plan.config.report_dir is not None:
            validate_same_settings(plan.config.report_dir, plan.config)
        lines.append(version_line(host, [script.parent] if script is not None else []))
    if plan.added:
        lines.append(f"added to the command line: {' '.join(plan.added)}")
    return given, replace(plan, lines=tuple(lines))


def read_command_line(argv: Sequence[str], host_flags: Collection[str] = ()) -> Given:
    """Take our flags out of a command line.

    host_flags: those that the host declares itself; the ones it shares with us (slime's --use-tis) are still ours to
    read. Raises: ValueError for a flag that looks like one of ours and is unknown (with the one that may be meant), one
    behind `--`, one given twice with two values, an invalid value, and whatever `MismatchConfig.from_args` refuses.
    """
    parser = _parser()
    known = sorted(name for name in parser._option_string_actions if "_" not in name)
    ours, theirs, rest = divide(argv)
    for token in rest:
        if _action(parser, token) is not None:
            raise ValueError(f"{token} stands behind --, where it would not be read: put it before the --.")
    for token in (*theirs, *rest):
        _validate_spelling(token.partition("=")[0], known, host_flags)
    namespace = parser.parse_args(list(chain(*ours)), Once())
    host, explain_only = namespace.mismatch_host, bool(namespace.mismatch_explain_only)
    config = MismatchConfig.from_args(Namespace(**vars(namespace) | {"mismatch_explain_only": None}))
    first = {action.dest: action.option_strings[0] for action in reversed(parser._actions)}  # underscores come behind
    spelled = dict.fromkeys(first[_action(parser, tokens[0]).dest] for tokens in ours)
    flags = tuple(flag for flag in spelled if flag not in _OF_THE_LAUNCHER)
    settings = config.model_dump(mode="json", exclude_unset=True)
    return Given(config, settings, flags, host, explain_only, (*theirs, *rest))


def help_text(usage: str, description: str) -> str:
    """What --help prints: usage, description, and every flag of ours."""
    parser = _parser()
    parser.usage, parser.description = usage, description
    return parser.format_help()


def divide(argv: Sequence[str]) -> tuple[list[list[str]], list[str], list[str]]:
    """(flags of ours, each with its value; the other tokens; all from `--` on, which is the host's)."""
    parser = _parser()
    ours: list[list[str]] = []
    theirs: list[str] = []
    rest = list(argv)
    while rest and rest[0] != "--":
        token = rest.pop(0)
        action = _action(parser, token)
        if action is None:
            theirs.append(token)
            continue
        ours.append([token])
        if action.nargs == 0 and rest and rest[0].lower() in _SWITCHED:
            raise ValueError(
                f"{token} is a switch and takes no value, but {rest[0]} follows it: write {token} alone to switch it "
                f"on, and leave it out to have it off."
            )
        if action.nargs != 0 and "=" not in token and rest and not rest[0].startswith("--"):
            ours[-1].append(rest.pop(0))
    return ours, theirs, rest


def named_host(argv: Sequence[str]) -> str | None:
    """The value of --mismatch-host."""
    (underscored,) = underscored_spellings([HOST_FLAG])
    return peek(argv, {HOST_FLAG: {}, underscored: {}})[0].mismatch_host


def _parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument(HOST_FLAG, metavar="NAME", default=None, help="host that the script starts, named by hand")
    parser.add_argument(*underscored_spellings([HOST_FLAG]), default=None, help=SUPPRESS)
    return parser


def _action(parser: ArgumentParser, token: str) -> Any:
    return parser._option_string_actions.get(token.partition("=")[0])


def _validate_spelling(flag: str, known: Sequence[str], host_flags: Collection[str]) -> None:
    plain = "--" + flag.translate(_DASHES).lstrip("-").replace("_", "-")
    dashed = flag.startswith("--")
    if flag.translate(_DASHES)[:1] != "-" or flag in host_flags:
        return
    if not dashed and plain in host_flags and plain not in known:
        return
    similar = difflib.get_close_matches(plain, known, n=1, cutoff=_SIMILAR)
    # With other dashes it may be a value, which begins like a flag of ours by chance.
    if not similar and not (dashed and plain.startswith(_FAMILIES)):
        return
    # What is misspelt may also be the host's: --tis_clip for slime's --tis-clip.
    meant = difflib.get_close_matches(plain, [*known, *host_flags], n=1, cutoff=0.5)
    fix = f"did you mean {meant[0]}?" if meant else "mismatch-plugin has no such flag."
    raise ValueError(f"{flag} is unknown: {fix} (The host would ignore it, or stop.)")


# The script -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A script, or a module (`-m`), whose source is `path` where it can be found. source: what runs in its place."""

    name: str
    module: bool
    path: Path | None
    source: str | None = None

    @property
    def script(self) -> str:
        """Its name in sentences, without folders."""
        return os.path.basename(self.name)

    @classmethod
    def of(cls, words: Sequence[str], usage: str) -> tuple[Target, list[str]]:
        """What a command line names first, and the rest of the line. Raises ValueError where that does not exist."""
        if not words:
            raise ValueError(f"no training script is given. {usage}")
        if words[0] == "-m":
            if len(words) < 2:
                raise ValueError(f"-m names no module. {usage}")
            return cls(words[1], True, _module_path(words[1])), list(words[2:])
        path = Path(words[0])
        if not path.is_file():
            raise ValueError(f"training script {path} does not exist. {usage}")
        return cls(words[0], False, path.resolve()), list(words[1:])

    def imports(self) -> set[str]:
        """Dotted names of all modules that it imports anywhere, of what it takes from them, and its own if a module.

        The source is parsed and not run. Raises: ValueError for what is no Python: a shell script, most often.
        """
        found = {self.name} if self.module else set[str]()
        try:
            tree = ast.parse(self.path.read_bytes() if self.path is not None else b"")
        except (SyntaxError, ValueError) as error:
            raise ValueError(
                f"{self.path} is no Python script ({error}). If it starts one, put the launcher inside it, before "
                f"that one: `python -m mismatch_plugin.launch train.py …`."
            ) from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found

    def patched(self, host: Host) -> Target:
        """With the host's patch of its training script made in memory, where it has one and the script has it not.
        Raises: ValueError for a script that the patch is not for."""
        patch = next((patch for patch in manifest() if (patch.host, patch.file) == (host.name, host.trainer)), None)
        text = "" if self.path is None else self.path.read_text(encoding="utf-8")
        if patch is None or "mismatch_plugin" in text:
            return self
        if (source := patch.changed(text)) is None:
            raise ValueError(
                f"{self.path or self.name} is not the {host.trainer} that the plugin's patch is for, of "
                f"{host.repository} at {(host.commit or '')[:10]}: use that one, or make the edits of "
                f"patches/manifest.json in it by hand."
            )
        return replace(self, source=source)

    def put_first_on_path(self) -> None:
        """`python SCRIPT` has the script's folder first on sys.path; here the current folder is there instead."""
        if not self.module and self.path is not None:
            if sys.path[:1] in ([""], [os.getcwd()]):
                sys.path.pop(0)
            sys.path.insert(0, str(self.path.parent))

    def run(self, argv: Sequence[str]) -> None:
        """Run it as `python SCRIPT ARGS` or `python -m MODULE ARGS` would, in this process."""
        sys.argv = [str(self.path or self.name) if self.module else self.name, *argv]
        if self.source is not None:
            main = sys.modules["__main__"] = ModuleType("__main__")
            main.__file__ = sys.argv[0]
            exec(compile(self.source, str(self.path), "exec", dont_inherit=True), vars(main))
        elif self.module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")


def is_below(name: str, packages: Sequence[str]) -> bool:
    """Whether a module is one of the packages, or inside one."""
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


def _module_path(name: str) -> Path | None:
    """The source of a module, found without importing its package where that is possible."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    first, *others = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        raise ValueError(f"module {name} is not found: is its package installed, or on PYTHONPATH?")
    inside = [Path(folder, *others) for folder in spec.submodule_search_locations or ()]
    found = [file for path in inside for file in (path.with_suffix(".py"), path / "__main__.py")]
    if not others and spec.origin:
        found.append(Path(spec.origin))
    return next((file for file in found if file.is_file()), None)
