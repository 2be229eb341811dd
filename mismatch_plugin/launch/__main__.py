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
from itertools import chain

from mismatch_plugin.hooks.base import Given, Host, Plan, start_block, stop
from mismatch_plugin.hooks.hosts import HOSTS, find_host
from mismatch_plugin.launch import patched
from mismatch_plugin.launch.command_line import HOST_FLAG, Target, divide, help_text, is_below, make_plan, named_host
from mismatch_plugin.launch.guard import Guard, refusal

LAUNCHABLE = [host.name for host in HOSTS.values() if host.launch]
_LINE = "python -m mismatch_plugin.launch [--mismatch-host NAME] TRAIN_SCRIPT ARGS…   (or -m MODULE ARGS…)"
_DESCRIPTION = (
    "Runs a training script with the flags below taken off its command line, checked, and set in the host's own way; "
    "every other flag is the host's. The host is found by what the script imports, or named by --mismatch-host: "
    f"{', '.join(LAUNCHABLE)}."
)


def prepare(argv: Sequence[str]) -> tuple[Target, Host, Given, Plan]:
    """Everything up to the start. Raises ValueError with one sentence for whatever cannot run."""
    ours, theirs, rest = divide(argv)
    target, left = Target.of([*theirs, *rest], f"usage: {_LINE}")
    line = [*chain(*ours), *left]
    imported = target.imports()
    host = host_of(target.name, imported, named_host(line))
    given, plan = make_plan(host, line, target.path)
    if plan.config is not None:
        target = target.patched(host)
    starts = next((name for name in sorted(imported) if is_below(name, host.starters)), None)
    if plan.config and starts and given.host is None:  # before it ends what runs on the machine, as miles's scripts do
        raise ValueError(refusal(host, target.script, f"starts its trainer in another program (it imports {starts})"))
    return target, host, given, plan


def host_of(script: str, imported: set[str], named: str | None = None) -> Host:
    """The host named, or else the one whose package the script imports. Raises ValueError where that is not one."""
    if named is not None:
        return find_host(named)
    found = [host for host in HOSTS.values() if any(is_below(name, host.packages) for name in imported)]
    if len(found) == 1:
        return found[0]
    say = f"say which it is, {HOST_FLAG} {'|'.join(LAUNCHABLE)}"
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
        if divide(arguments)[1][:1] in (["-h"], ["--help"]):
            print(help_text(_LINE, _DESCRIPTION))
            return
        target, host, given, plan = prepare(arguments)
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank comes here
            print(start_block(host.name, plan.lines), flush=True)
        if given.explain_only:
            return
        target.put_first_on_path()
        patched.LAUNCHED.append(True)
        guard = Guard(host, target.script, stops=given.host is None)
        try:
            plan.install()
            if plan.config is not None:
                guard.watch()
        except ModuleNotFoundError as error:
            where = "install it in this Python, or put its checkout first on PYTHONPATH"
            stop(f"{host.name} cannot be imported here ({error}): {where}.")
    except ValueError as error:
        stop(str(error))
    try:
        target.run(plan.argv)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if plan.config is not None and not guard.read:
        stop(guard.never_read())


if __name__ == "__main__":
    main()
