"""Whether the text of a command, with … for what its source does not tell, looks like the start of a trainer."""

from __future__ import annotations

import re
import shlex

UNKNOWN = "…"
_SEPARATORS = ";&|()"
_PYTHON = re.compile(r"(python|pythonw|pypy)[\d.]*(\.exe)?")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_LAUNCHERS = ("torchrun", "deepspeed", "torchx", "horovodrun", "sbatch", "qsub")
# What runs the command among its own arguments.
_WRAPPERS = (
    *("env", "exec", "sudo", "nohup", "time", "timeout", "nice", "numactl", "taskset", "setsid", "stdbuf", "xargs"),
    *("srun", "salloc", "mpirun", "mpiexec", "docker", "podman", "apptainer", "singularity", "kubectl", "ssh", "eval"),
)
_ENVIRONMENTS = ("uv", "poetry", "pixi", "conda", "mamba", "micromamba", "hatch", "pdm", "pipenv")  # … run COMMAND
# Module that `python -m` runs next to a training, or before it.
_NO_TRAINERS = ("pip", "venv", "ensurepip", "compileall", "json", "http", "sglang", "sglang_router", "vllm", "zipfile")
# They name a training script without running it.
_READERS = (
    *("cat", "cp", "mv", "ls", "rm", "git", "grep", "pkill", "pgrep", "kill", "head", "tail", "wc", "diff", "test"),
    *("echo", "printf", "touch", "chmod", "rsync", "scp", "md5sum", "sha256sum", "sed", "find", "stat", "tar", "which"),
)
_SHELL_WORDS = ("if", "then", "else", "do", "while", "until", "!", "{", "$", "command")
_ASSIGNMENT = re.compile(r"\w+=.*", re.S)
_TRAINER = re.compile(r"(train[\w-]*\.py|main_ppo(\.py)?)$")


def starts_trainer(text: str) -> bool:
    """Whether one of the commands in a line of shell starts a trainer, or something that may start one."""
    text = text.replace("\\\n", " ").replace("\n", " ; ").replace("`", " ; ")
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
        lexer.whitespace_split, lexer.commenters = True, ""
        words = list(lexer)
    except ValueError:  # a quote whose other half the source does not show
        words = re.sub(f"([{re.escape(_SEPARATORS)}]+)", r" \1 ", re.sub("[\"']", "", text)).split()
    command: list[str] = []
    for word in [*words, ";"]:
        if not word.strip(_SEPARATORS):
            if _starts(command):
                return True
            command = []
        else:
            command.append(word)
    return False


def _starts(words: list[str]) -> bool:
    while words and (words[0] in _SHELL_WORDS or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    if not words:
        return False
    program = re.split(rf"[/{UNKNOWN}]", words[0])[-1]
    rest = words[1:]
    plain = [word for word in rest if not word.startswith("-")]
    if _PYTHON.fullmatch(program):
        return _python_starts(rest)
    if program in _SHELLS:
        at = next((i for i, word in enumerate(rest) if re.fullmatch(r"-\w*c", word)), None)
        return bool(plain) if at is None else starts_trainer(" ".join(rest[at + 1 : at + 2]))
    if program == "ray":
        return plain[:1] in ([], [UNKNOWN], ["exec"], ["submit"]) or (
            plain[0] == "job" and plain[1:2] in ([], [UNKNOWN], ["submit"])
        )
    if program == "accelerate":
        return plain[:1] in ([], [UNKNOWN], ["launch"])
    if program in _ENVIRONMENTS:
        return plain[:1] in ([], [UNKNOWN]) or ("run" in plain and _any_starts(rest[rest.index("run") + 1 :]))
    if program in _LAUNCHERS or program.endswith(".py") or _TRAINER.search(program):
        return True
    if program in _WRAPPERS or not program:  # "" is …: words that the source does not tell
        return _any_starts(rest)
    return program not in _READERS and any(_TRAINER.search(word) for word in rest)


def _any_starts(words: list[str]) -> bool:
    """Whether a command begins at one of the words, or is written inside one."""
    if any(" " in word and starts_trainer(word) for word in words):
        return True
    reader = next((index for index, word in enumerate(words) if word in _READERS), len(words))
    return any(_starts(words[index:reader]) for index in range(reader))


def _python_starts(rest: list[str]) -> bool:
    """Whether an interpreter with these arguments runs a program of its own: a script, a module, or an unknown one."""
    words = iter(rest)
    for word in words:
        if word in ("-c", "-V", "-VV", "--version", "-h", "--help"):
            return False
        if word == "-m":
            return next(words, UNKNOWN).split(".")[0] not in _NO_TRAINERS
        if word in ("-X", "-W"):
            next(words, None)
        elif not word.startswith("-"):
            return True
    return True
