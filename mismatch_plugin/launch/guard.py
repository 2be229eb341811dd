"""Flags of ours that would go nowhere: a script that starts a trainer in another program, or never reads its arguments.

What the launcher changes holds in its own process. Until the host has read its command line there, a Python audit hook
looks at every program that the script starts and ends the run before the first that looks like a trainer. What no event
tells (a job submitted over HTTP) is found when the script has ended and `Guard.read` is still false. Nothing of the
launcher runs after `os.exec*`, which the launcher's own process is refused until then.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from mismatch_plugin.hooks.base import Host, wrap_once

# Audit event → the words of the command.
_EVENTS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "subprocess.Popen": lambda args: args[1],
    "os.system": lambda args: ["sh", "-c", args[0]],
    "os.exec": lambda args: [args[0], *args[1][1:]],
}
_LAUNCHER = "mismatch_plugin.launch"  # a script may start itself anew through it
_HARMLESS = re.compile(r"\S*((site|dist)-packages/|setup\.py)\S*")  # what Ray, torch and pip start of their own
_TRAINER = re.compile(
    r"^ *(\S*sh -\w*c +)?(\w+=\S* +)*\S+\.(py|sh) "  # ./train.py
    r"|[ /](python[\d.]*|bash|sh|torchrun|accelerate|deepspeed|srun) (?!-\w*c )(.* )?\S+\.(py|sh) "
    r"|[ /]python[\d.]* (.* )?-m *(torch\.distributed|slime|miles|megatron|verl|nemo_rl)\b"
    r"|[ /](sbatch|ray (.* )?job submit) "
)
_READER = re.compile(r" *(p?kill|pgrep|echo|printf|e?grep|git|ps|rsync|ls|cp|mv|cat|find|tail) ")


class Guard:
    """Whether the host has read its command line in this process; until then no trainer is started.

    stops: False where the host was named by hand, which says that the script does train in its own process.
    """

    def __init__(self, host: Host, script: str, stops: bool) -> None:
        self.host, self.script, self.stops = host, script, stops
        self.read, self.process = False, os.getpid()

    def watch(self) -> None:
        """Note the first call of what the host declares as `reads`, and listen. Both stay until the process ends.
        Raises: ModuleNotFoundError where the host is not installed."""
        for module, name in self.host.reads:
            wrap_once(module, name, self._note)
        sys.addaudithook(self._hear)

    def never_read(self) -> str:
        """One sentence for a script that has ended."""
        return (
            f"{self.script} has ended and never read {self.host.name}'s command line in this process, so that the "
            f"plugin's flags did nothing: put the launcher before the script that trains."
        )

    def _note(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.read = True
        return own(*args, **kwargs)

    def _hear(self, event: str, args: Sequence[Any]) -> None:
        """Ends the process before a trainer is started, in whatever thread, and whatever the script makes of errors."""
        if self.read or event not in _EVENTS:
            return
        words = [os.fsdecode(word) for word in _EVENTS[event](args)]
        becomes = event == "os.exec" and os.getpid() == self.process and _LAUNCHER not in words
        if becomes or (self.stops and starts_trainer(words)):
            command = textwrap.shorten(shlex.join(words), 160, placeholder=" …")
            what = f"has not read {self.host.name}'s command line and starts another program ({command})"
            sys.stdout.flush()
            print(f"mismatch_plugin: {refusal(self.host, self.script, what)}", file=sys.stderr, flush=True)
            os._exit(2)


def refusal(host: Host, script: str, what: str) -> str:
    """One sentence for a script whose trainer runs elsewhere: `what` it does, and where the flags go instead."""
    ways = [f"put the launcher where the trainer itself is started (`python -m {_LAUNCHER} {host.trainer} …`)"]
    if host.starters:
        ways.append(
            f"or patch the checkout once (`mismatch-plugin patch apply --host {host.name} --root DIR`) and write the "
            f"flags among the arguments that the script hands on (miles: --extra-args)"
        )
    ways.append(f"or, if {script} does train in its own process, say so with --mismatch-host {host.name}")
    return f"{script} {what}, where the plugin's flags would not arrive: {', '.join(ways)}."


def starts_trainer(words: Sequence[str]) -> bool:
    """Whether a command starts a script that may train, itself or in a line of shell. What is taken for harmless and is
    none is found when the script has ended."""
    text = re.sub("[\"']", "", " ".join(words).replace("\\\n", " "))
    lines = (f" {_HARMLESS.sub('', line)} " for line in re.split("[;&|()`\n]+", text))
    return _LAUNCHER not in text and any(_TRAINER.search(line) and not _READER.match(line) for line in lines)
