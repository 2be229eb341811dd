"""Tasks of the lab: seeded prompts, a reward that can be verified, and the right answer for the supervised warm-up.

Both tasks are about strings of digits, so that a model of 0.1 M parameters learns them in seconds, and neither is
solved at once: partial answers earn partial reward, and the exact match climbs over hundreds of optimizer steps.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Split = Literal["train", "held_out"]

BOS, SEP, EOS, PAD = 10, 11, 12, 13  # 0 to 9 are the digits
_VOCAB = 14
_HELD_OUT_SHARE = 8  # one prompt in this many is held out


class Score(NamedTuple):
    """dense: share of right positions, which training sees. exact: 1.0 if all of the response is right, else 0.0."""

    dense: float
    exact: float


class Task(Protocol):
    """What the lab needs of a task. All ids are below `vocab`; a response ends with `eos`."""

    @property
    def name(self) -> str:
        """As `get_task` knows it."""
        ...

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, special tokens included."""
        ...

    @property
    def eos(self) -> int:
        """The id that ends a response and counts as part of it."""
        ...

    @property
    def pad(self) -> int:
        """An id that never occurs in prompts and answers."""
        ...

    @property
    def max_response(self) -> int:
        """Length of the longest right answer, `eos` included."""
        ...

    def prompts(self, count: int, seed: int, split: Split = "train") -> list[list[int]]:
        """`count` prompts drawn with `seed`. No prompt is in both splits."""
        ...

    def target(self, prompt: Sequence[int]) -> list[int]:
        """The right answer, `eos` included."""
        ...

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Score:
        """The reward of a response."""
        ...


@dataclass(frozen=True)
class DigitTask:
    """A task on digits, from two functions.

    draw: the digits of a prompt, from a random generator. solve: the digits of the right answer.
    """

    name: str
    draw: Callable[[random.Random], list[int]]
    solve: Callable[[list[int]], list[int]]
    max_response: int
    vocab: int = _VOCAB
    eos: int = EOS
    pad: int = PAD

    def prompts(self, count: int, seed: int, split: Split = "train") -> list[list[int]]:
        """`count` prompts [BOS, digits, SEP]. The split is a property of the prompt, not of the draw."""
        generator = random.Random(f"{self.name}.{split}.{seed}")
        found: list[list[int]] = []
        while len(found) < count:
            prompt = [BOS, *self.draw(generator), SEP]
            if _is_held_out(prompt) == (split == "held_out"):
                found.append(prompt)
        return found

    def target(self, prompt: Sequence[int]) -> list[int]:
        """The right answer, `eos` included."""
        return [*self.solve(list(prompt[1:-1])), self.eos]

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Score:
        """dense = right positions / the longer of answer and response, so that running on costs as much as stopping."""
        target = self.target(prompt)
        right = sum(a == b for a, b in zip(target, response, strict=False))
        return Score(right / max(len(target), len(response)), float(list(response) == target))


def _is_held_out(prompt: Sequence[int]) -> bool:
    return zlib.crc32(bytes(prompt)) % _HELD_OUT_SHARE == 0


def _draw_six(generator: random.Random) -> list[int]:
    return generator.choices(range(10), k=6)


def _reverse(digits: list[int]) -> list[int]:
    return digits[::-1]


def _draw_four_to_seven(generator: random.Random) -> list[int]:
    return generator.choices(range(10), k=generator.randint(4, 7))


def _swap(digits: list[int]) -> list[int]:
    return [digits[-1], *digits[1:-1], digits[0]]


_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        DigitTask("reverse", _draw_six, _reverse, max_response=7),
        DigitTask("swap", _draw_four_to_seven, _swap, max_response=8),
    )
}
TASKS = tuple(_TASKS)


def get_task(name: str) -> Task:
    """The task of that name. Raises ValueError if there is none.

    reverse: six digits backwards. swap: four to seven digits, the first and the last exchanged; prompts and answers
    differ in length, and a model has to learn when to stop.
    """
    if name not in _TASKS:
        raise ValueError(f"task {name!r} is unknown: choose one of {', '.join(TASKS)}.")
    return _TASKS[name]
