"""Files that are read within bounds, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MIB = 1 << 20
MAX_LINE = 256 * MIB
"""Bytes of one line of a JSONL file: a record of a million tokens has some tens of MiB."""
MAX_FILE = 512 * MIB
"""Bytes of a file that is read whole."""
_BUFFER = 1 << 18
"""Bytes read at once: lines of records are longer than Python's own buffer, and are put together from pieces of it."""

_KINDS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def encodable(text: str) -> str:
    r"""Lone surrogates, of broken JSON or of a file name that is not UTF-8, as `\ud800`: no file takes them as such.

    Names that differ still differ.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def validate_regular_file(path: Path) -> None:
    """Raise ValueError for a device, pipe or socket: reading one may never end. What is absent is left to `open`."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise ValueError(f"{path} is {kind}, not a regular file: save what it holds in a file and give that one.")


def read_text(path: Path, limit: int = MAX_FILE, encoding: str = "utf-8") -> str:
    """A file's text. Raises ValueError where it is not a regular file, too large, or not text; OSError as `open`."""
    validate_regular_file(path)
    with path.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit / MIB:g} MiB, the most that is read: is it the right file?")
    return data.decode(encoding)


def read_lines(path: Path, limit: int = MAX_LINE, errors: str = "strict") -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of every line. Only a line feed ends one: U+2028 is legal inside JSON.

    errors: "replace" goes on behind bytes that are not UTF-8.
    Raises ValueError as `read_text`, with the number of a line that is too long; OSError as `open`.
    """
    validate_regular_file(path)
    with path.open("rb", buffering=_BUFFER) as stream:
        number = 0
        while line := stream.readline(limit + 1):
            number += 1
            if len(line) > limit:
                raise ValueError(f"{path}, line {number} is longer than {limit / MIB:g} MiB, the most that is read.")
            yield number, line.decode("utf-8", errors).rstrip("\r\n")


def read_json_object(path: Path, limit: int = MAX_FILE) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ValueError naming the file where it holds none; OSError as `open`."""
    try:
        value = json.loads(read_text(path, limit))
    except RecursionError:
        raise ValueError(f"{path} is damaged: it is nested too deeply.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(value).__name__}, not an object.")
    return value


def lock_file(path: Path, shared: bool = False) -> BinaryIO | None:
    """The file, made and locked until it is closed or this process ends; None where that is impossible.

    shared: of an existing file, next to others that only ask. Raises BlockingIOError where another process has it.
    """
    try:
        import fcntl

        if not shared:
            path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("rb" if shared else "ab")
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):  # Windows, a file system without locks, or no file
        return None
    return stream


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file next to `path` that takes its place when the block ends, and is removed where the block fails.

    Its name is its own, so that two writers do not meet: the last one to end wins.
    """
    temporary = path.with_name(f".{path.name[:64]}-{os.getpid()}-{secrets.token_hex(4)}.part")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the mode that umask leaves
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """All of the file or nothing of it, so that a killed run never leaves half of one."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
