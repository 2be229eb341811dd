"""Run a host's training script with the flags of the correction added to its command line, and nothing else changed.

```bash
python -m mismatch_plugin.launch train.py … --use-tis                             # also behind `ray job submit --`
torchrun … -m mismatch_plugin.launch train_rl.py … --use-tis
python -m mismatch_plugin.launch -m verl.trainer.main_ppo … --use-rollout-log-probs --use-tis
```

It takes our flags off the line and refuses what is misspelt or contradictory, sets the host's own arguments for them,
prints one block that says what will run, and runs the script as `python SCRIPT` would. `--mismatch-explain-only` stops
after the block, and `--help` in place of a script lists our flags. The host is found by what the script imports, or
named by `--mismatch-host`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mismatch_plugin.hooks.base import Given, Host, Plan, start_block, stop
from mismatch_plugin.hooks.hosts import HOSTS, find_host
from mismatch_plugin.launch import patched
from mismatch_plugin.launch.command_line import HOST_FLAG, help_text, make_plan, named_host, script_position
from mismatch_plugin.launch.guard import Guard, refusal
from mismatch_plugin.launch.script import Target, is_below

_COMMAND = "python -m mismatch_plugin.launch"
_LINE = f"{_COMMAND} [--mismatch-host NAME] TRAIN_SCRIPT ARGS…   (or -m MODULE ARGS…)"
_DESCRIPTION = (
    "Runs a training script with the flags below taken off its command line, checked, and set in the host's own way; "
    "every other flag is the host's. The host is found by what the script imports, or named by --mismatch-host: "
    f"{', '.join(HOSTS)}."
)


def prepare(argv: Sequence[str]) -> tuple[Target, Host, Given, Plan]:
    """Everything up to the start. Raises ValueError with one sentence for whatever cannot run."""
    at = script_position(argv)
    target, rest = Target.of(argv[at:], f"usage: {_LINE}")
    rest = [*argv[:at], *rest]
    imported = target.imports()
    host = host_of(target.name, imported, named_host(rest))
    given, plan = make_plan(host, rest, target.path)
    starts = next((name for name in sorted(imported) if is_below(name, host.starters)), None)
    if plan.config and starts and given.host is None:  # before it ends what runs on the machine, as miles's scripts do
        script = os.path.basename(target.name)
        raise ValueError(refusal(host, script, f"starts its trainer in another program (it imports {starts})"))
    return target, host, given, plan


def host_of(script: str, imported: set[str], named: str | None = None) -> Host:
    """The host named, or else the one whose package the script imports. Raises ValueError where that is not one."""
    if named is not None:
        return find_host(named, HOST_FLAG)
    found = [host for host in HOSTS.values() if any(is_below(name, host.packages) for name in imported)]
    if len(found) == 1:
        return found[0]
    say = f"say which it is, {HOST_FLAG} {'|'.join(HOSTS)}"
    if found:
        raise ValueError(f"{script} imports {' and '.join(host.name for host in found)}: {say}.")
    raise ValueError(
        f"{script} imports no host that is known: {say}, or, if it only starts a trainer, put the launcher where the "
        f"trainer itself is started."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits 2 with one sentence where the command line cannot mean anything, or never arrived."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[script_position(arguments) :][:1] in (["-h"], ["--help"]):
            _say(help_text(_LINE, _DESCRIPTION))
            return
        target, host, given, plan = prepare(arguments)
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank comes here
            _say(start_block(host.name, plan.lines))
        if given.explain_only:
            return
        guard = _install(target, host, given, plan)
    except ValueError as error:
        more = f" (The plugin's own flags: {_COMMAND} --help)" if {"-h", "--help"}.intersection(arguments) else ""
        stop(f"{error}{more}")
    try:
        target.run(plan.argv)
    except BaseException as ended:  # whatever a script makes of a refusal
        if not guard.refused and not (isinstance(ended, SystemExit) and ended.code in (None, 0)):
            raise
    if guard.refused:
        raise SystemExit(2)
    if plan.config is not None and not guard.read:
        stop(guard.never_read())


def _install(target: Target, host: Host, given: Given, plan: Plan) -> Guard:
    """Put the plan's functions into the host. Raises ValueError where it is not installed."""
    target.put_first_on_path()
    patched.under_launcher()
    guard = Guard(host, os.path.basename(target.name), stops=given.host is None)
    try:
        plan.install()
        if plan.config is not None:
            guard.watch()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{host.name} cannot be imported here ({error}): install it in this Python, or put its checkout first on "
            f"PYTHONPATH."
        ) from None
    return guard


def _say(text: str) -> None:
    """Print it; end quietly where nobody reads on (`… --help | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
