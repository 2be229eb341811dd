"""Flags of ours that would go nowhere: a script that starts a trainer in another program, or never reads its arguments.

What the launcher changes holds in its own process. Until the host has read its command line there, a Python audit hook
looks at every program that the script starts and ends the run before the first that looks like a trainer. Ray jobs that
are submitted over HTTP (`JobSubmissionClient.submit_job`) raise no such event; like everything that no event tells,
they are found when the script has ended and `Guard.read` is still false. A script may also end by `os._exit` or by
becoming another program (`os.exec*`), after which nothing of the launcher runs: both are refused until then.
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
from functools import wraps
from importlib import import_module
from typing import Any, NoReturn

from mismatch_plugin.hooks.base import Host

# Audit event → which of its arguments are the words of the command. os.spawn is Windows'; elsewhere it is os.exec.
_EVENTS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "subprocess.Popen": lambda args: args[1],
    "os.system": lambda args: ["sh", "-c", args[0]],
    "os.exec": lambda args: [args[0], *args[1][1:]],
    "os.posix_spawn": lambda args: [args[0], *args[1][1:]],
    "os.spawn": lambda args: [args[1], *args[2][1:]],
}
_SEPARATORS = ";&|()"
_PYTHON = re.compile(r"(python|pythonw|pypy)[\d.]*(\.exe)?")
_SHELL = re.compile("bash|sh|zsh|dash|ksh")
# Program → what behind it starts a trainer.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "deepspeed", "torchx", "horovodrun", "sbatch", "qsub"), r"\S+"),
    "accelerate": "launch",
    "ray": "submit|exec",
}
# Modules that `python -m` runs next to a training, or before it.
_TOOLS = re.compile(
    "pip|venv|ensurepip|compileall|json|http|zipfile|site|sysconfig|platform|timeit|sglang|sglang_router|vllm|ray|torch"
    "|wandb|tensorboard|ninja|numpy|huggingface_hub|pytest|mypy|nltk|spacy|grpc_tools|mismatch_plugin"
)
# They may name a trainer, and do not run it.
_READERS = re.compile(
    r"cat|cp|mv|ls|ln|rm|mkdir|git|grep|find|pkill|pgrep|kill|killall|head|tail|wc|diff|echo|printf|touch|chmod|rsync|scp"
    r"|md5sum|sha256sum|sed|awk|sort|stat|tar|zip|which|test|\[|realpath|dirname|basename|file|cmp|less|install|curl|wget"
    r"|vim|ruff|black|isort|dvc|pip|nvidia-smi|tensorboard"
)
_TRAINER = re.compile(r"(train[\w-]*\.py|main_ppo(\.py)?)$")
_LAUNCHER = "mismatch_plugin.launch"  # a script may start itself anew through it
_SCRIPT = re.compile(r"\.(py|sh)$")
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
            owner = import_module(module)
            setattr(owner, name, self._noting(getattr(owner, name)))
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

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.read = True
            return function(*args, **kwargs)

        return noting

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
    ways = [
        f"put the launcher where the trainer itself is started (`python -m mismatch_plugin.launch {host.trainer} …`)"
    ]
    if host.hands_on:
        ways.append(
            f"or patch the checkout once (`mismatch-plugin patch apply --host {host.name} --root DIR`) and write the "
            f"flags {host.hands_on}"
        )
    ways.append(f"or, if {script} does train in its own process, say so with --mismatch-host {host.name}")
    return f"{script} {what}, where the plugin's flags would not arrive: {', '.join(ways)}."


def starts_trainer(words: Sequence[str]) -> bool:
    """Whether a command starts a trainer, or something that may start one, itself or behind `env`, `srun`, `ssh` …

    The first word that is a program known here decides; without one, a word that is a training script does. What is
    taken for harmless and is none is found when the script has ended.
    """
    for at, word in enumerate(words):
        program, rest = os.path.basename(word), words[at + 1 :]
        if _READERS.fullmatch(program):
            return False
        if _SHELL.fullmatch(program) or _PYTHON.fullmatch(program):
            return _script_starts(rest, shell=_SHELL.fullmatch(program) is not None)
        if program in _LAUNCHERS:
            return re.search(rf"(^| )({_LAUNCHERS[program]})( |$)", " ".join(rest)) is not None
        if word.endswith(".py") and (at == 0 or words[at - 1] == "run"):  # uv run x.py
            return True
    return any(_TRAINER.search(word) or (" " in word and _line_starts(word)) for word in words)


def _line_starts(text: str) -> bool:
    """`starts_trainer` of the commands in a line of shell."""
    text = text.replace("\\\n", " ").replace("\n", " ; ").replace("`", " ; ")
    try:
        words = _split(text)
    except ValueError:  # an odd quote, in a comment or a here-document
        words = _split(re.sub("[\"']", "", text))
    command: list[str] = []
    for word in [*words, ";"]:
        if word.strip(_SEPARATORS):
            command.append(word)
        elif starts_trainer(command):
            return True
        else:
            command = []
    return False


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def _script_starts(rest: Sequence[str], shell: bool) -> bool:
    """Whether a shell or Python with these arguments runs a script, module or line that may train."""
    for word, following in zip(rest, [*rest[1:], ""], strict=False):
        if re.fullmatch(r"-\w*c", word):
            return shell and _line_starts(following)
        if word.startswith("-m"):
            module = word[2:] or following
            return module.startswith("torch.distributed") or not _TOOLS.fullmatch(module.split(".")[0])
        if _SCRIPT.search(word):
            return not _HARMLESS.search(word)
    return False
