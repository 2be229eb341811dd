"""Flags of ours that would go nowhere: a script that starts a trainer in another program, or never reads its arguments.

What the launcher changes holds in its own process. Until the host has read its command line there, a Python audit hook
looks at every program that the script starts and ends the run before the first that looks like a trainer. What no event
tells (a job submitted over HTTP) is found when the script has ended and `Guard.read` is still false. A script may also
end by `os._exit` or by becoming another program (`os.exec*`), after which nothing of the launcher runs: both are
refused until then.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mismatch_plugin.hooks.base import Host, wrap_once

# Audit event → which of its arguments are the words of the command. os.spawn is Windows'; elsewhere it is os.exec.
_EVENTS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "subprocess.Popen": lambda args: args[1],
    "os.system": lambda args: ["sh", "-c", args[0]],
    "os.exec": lambda args: [args[0], *args[1][1:]],
    "os.posix_spawn": lambda args: [args[0], *args[1][1:]],
    "os.spawn": lambda args: [args[1], *args[2][1:]],
}
_LAUNCHER = "mismatch_plugin.launch"  # a script may start itself anew through it
_PYTHON = re.compile(r"(python|pythonw|pypy)[\d.]*(\.exe)?")
# Programs that may name a trainer and do not run it, and modules that `python -m` runs next to a training.
_READERS = re.compile(
    r"cat|cp|mv|ls|ln|rm|mkdir|git|grep|find|p?kill|killall|pgrep|head|tail|wc|diff|echo|printf|touch|chmod|rsync|scp|sed"
    r"|awk|sort|stat|tar|zip|which|test|\[|realpath|dirname|basename|less|install|curl|wget|vim|ruff|dvc|pip|tensorboard"
)
_TOOLS = re.compile(
    "pip|venv|ensurepip|compileall|json|http|zipfile|site|sysconfig|platform|timeit|sglang|sglang_router|vllm|ray|torch"
    "|wandb|tensorboard|ninja|numpy|huggingface_hub|pytest|mypy|nltk|spacy|grpc_tools|mismatch_plugin"
)
_HARMLESS = re.compile(r"(^|/)setup\.py$|(site|dist)-packages/")  # the latter is what Ray and torch run of their own


class Guard:
    """Whether the host has read its command line in this process, and whether a trainer was refused before that.

    stops: False where the host was named by hand, which says that the script does train in its own process.
    """

    def __init__(self, host: Host, script: str, stops: bool) -> None:
        self.host, self.script, self.stops = host, script, stops
        self.read = self.refused = False
        self.process = os.getpid()

    def watch(self) -> None:
        """Note the first call of what the host declares as `reads`, and listen. Both stay until the process ends.

        Raises: ModuleNotFoundError where the host is not installed.
        """
        for module, name in self.host.reads:
            wrap_once(module, name, self._note)
        sys.addaudithook(self._hear)
        leave = os._exit

        def exit_process(status: int) -> NoReturn:
            if self._unread() and not status:
                print(f"mismatch_plugin: {self.never_read()}", file=sys.stderr, flush=True)
            leave(status or 2 * self._unread())

        os._exit = exit_process

    def never_read(self) -> str:
        """One sentence for a script that has ended."""
        return (
            f"{self.script} has ended and never read {self.host.name}'s command line in this process, so that the "
            f"plugin's flags did nothing: put the launcher before the script that trains."
        )

    def _unread(self) -> bool:
        """True in the launcher's own process (what it forks may end as it likes) until the command line was read."""
        return not self.read and os.getpid() == self.process

    def _note(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.read = True
        return own(*args, **kwargs)

    def _hear(self, event: str, args: Sequence[Any]) -> None:
        """Raises SystemExit, which `except Exception` lets pass, before the program is started."""
        if self.read or event not in _EVENTS:
            return
        words = [os.fsdecode(word) for word in _EVENTS[event](args)]
        becomes = event == "os.exec" and self._unread() and _LAUNCHER not in words
        if not becomes and not (self.stops and starts_trainer(words)):
            return
        if not self.refused:  # a script that goes on regardless may come here again
            command = textwrap.shorten(shlex.join(words), 160, placeholder=" …")
            what = f"has not read {self.host.name}'s command line and starts another program ({command})"
            print(f"mismatch_plugin: {refusal(self.host, self.script, what)}", file=sys.stderr, flush=True)
        self.refused = True
        main = threading.main_thread()
        if threading.current_thread() is not main and main.ident is not None:
            signal.pthread_kill(main.ident, signal.SIGINT)  # SystemExit would end this thread alone
        raise SystemExit(2)


def refusal(host: Host, script: str, what: str) -> str:
    """One sentence for a script whose trainer runs elsewhere: `what` it does, and where the flags go instead."""
    ways = [f"put the launcher where the trainer itself is started (`python -m {_LAUNCHER} {host.trainer} …`)"]
    if host.hands_on:
        ways.append(
            f"or patch the checkout once (`mismatch-plugin patch apply --host {host.name} --root DIR`) and write the "
            f"flags {host.hands_on}"
        )
    ways.append(f"or, if {script} does train in its own process, say so with --mismatch-host {host.name}")
    return f"{script} {what}, where the plugin's flags would not arrive: {', '.join(ways)}."


def starts_trainer(words: Sequence[str]) -> bool:
    """Whether a command starts a script that may train, itself or behind `env`, `srun`, `ssh`, a line of shell …

    What is taken for harmless and is none is found when the script has ended.
    """
    if _READERS.fullmatch(os.path.basename(words[0])):
        return False
    text = re.sub("[\"']", "", " ".join(words).replace("\\\n", " "))
    return any(_trains(line.split()) for line in re.split("[;&|()`\n]+", text))


def _trains(words: Sequence[str]) -> bool:
    """Of one simple command: the first reader, module or script in it decides."""
    python = False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        program = os.path.basename(word)
        python = python or _PYTHON.fullmatch(program) is not None
        module = following if word == "-m" else word[2:] if python and word.startswith("-m") else ""
        if _READERS.fullmatch(program) or (python and re.fullmatch(r"-\w*c", word)):
            return False
        if module:
            return module.startswith("torch.distributed") or not _TOOLS.fullmatch(module.split(".")[0])
        if word.endswith((".py", ".sh")):
            return not _HARMLESS.search(word)
        if program in ("sbatch", "qsub") or (program == "ray" and {"submit", "exec"} & {*words}):
            return True
    return False
