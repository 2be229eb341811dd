"""Tasks of the lab: seeded prompts, a reward that can be verified, and the right answer for the supervised warm-up.

All are about strings of digits, so that a model of 0.1 M parameters learns them in seconds, and neither is
solved at once: partial answers earn partial reward, and the exact match climbs over hundreds of optimizer steps.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Split = Literal["train", "held_out"]

BOS, SEP, EOS, PAD, FILL = 10, 11, 12, 13, 14  # 0 to 9 are the digits


class Score(NamedTuple):
    """dense: share of right positions, which training sees. exact: 1.0 if all of the response is right, else 0.0."""

    dense: float
    exact: float


@dataclass(frozen=True)
class Task:
    """A task on digits, from two functions. All ids are below `vocab`."""

    name: str
    draw: Callable[[random.Random], list[int]]
    """The digits of a prompt."""
    solve: Callable[[list[int]], list[int]]
    """The digits of the right answer."""
    max_response: int
    """Length of the longest right answer, `eos` included."""
    vocab: int = 14
    """Size of the vocabulary, special tokens included."""
    eos: int | None = EOS
    """The id that ends a response and counts as part of it; None: every response has `max_response` tokens."""
    pad: int = PAD
    """An id that never occurs in prompts and answers."""
    about: str = ""
    """A sentence for people."""

    def prompts(self, count: int, seed: int, split: Split = "train") -> list[list[int]]:
        """`count` prompts [BOS, digits, SEP] drawn with `seed`.

        No prompt is in both splits: the split is a property of the prompt, not of the draw.
        """
        generator = random.Random(f"{self.name}.{split}.{seed}")
        found: list[list[int]] = []
        while len(found) < count:
            prompt = [BOS, *self.draw(generator), SEP]
            if _is_held_out(prompt) == (split == "held_out"):
                found.append(prompt)
        return found

    def target(self, prompt: Sequence[int]) -> list[int]:
        """The right answer, `eos` included."""
        answer = self.solve(list(prompt[1:-1]))
        return answer if self.eos is None else [*answer, self.eos]

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> Score:
        """dense = right positions / the longer of answer and response, so that running on costs as much as stopping."""
        target = self.target(prompt)
        right = sum(a == b for a, b in zip(target, response, strict=False))
        return Score(right / max(len(target), len(response)), float(list(response) == target))


def _is_held_out(prompt: Sequence[int]) -> bool:
    return zlib.crc32(bytes(prompt)) % 8 == 0  # one prompt in eight


def _draw_six(generator: random.Random) -> list[int]:
    return generator.choices(range(10), k=6)


def _draw_four_to_seven(generator: random.Random) -> list[int]:
    return generator.choices(range(10), k=generator.randint(4, 7))


def _draw_three_to_nine(generator: random.Random) -> list[int]:
    length = generator.randint(3, 9)
    return [*[FILL] * (9 - length), *generator.choices(range(10), k=length)]


def _reversed_digits(filled: list[int]) -> list[int]:
    return [digit for digit in filled if digit != FILL][::-1]


_TASKS = {
    task.name: task
    for task in (
        Task(
            "reverse6",
            _draw_six,
            lambda digits: digits[::-1],
            max_response=6,
            about="The model is given six digits and answers with the same digits backwards, in six tokens; its reward "
            "is the share of right positions.",
            eos=None,
        ),
        Task(
            "reverse",
            _draw_six,
            lambda digits: digits[::-1],
            max_response=7,
            about="The model is given six digits and answers with the same digits backwards and an end token; its "
            "reward is the share of right positions.",
        ),
        Task(
            "reverse3to9",
            _draw_three_to_nine,
            _reversed_digits,
            max_response=10,
            vocab=15,
            about="The model is given three to nine digits, filled in front to nine, and answers with the same digits "
            "backwards and an end token; its reward is the share of right positions.",
        ),
        Task(
            "swap",
            _draw_four_to_seven,
            lambda x: [x[-1], *x[1:-1], x[0]],
            max_response=8,
            about="The model is given four to seven digits and answers with the first and the last exchanged, and an "
            "end token; its reward is the share of right positions.",
        ),
    )
}
TASKS = tuple(_TASKS)


def get_task(name: str) -> Task:
    """The task of that name. Raises ValueError if there is none.

    reverse6: six digits backwards, in six tokens. reverse: the same, and a token that ends the response. reverse3to9:
    three to nine digits backwards, filled in front: prompts are of one length, answers are not, and a model has to
    learn when to stop. swap: four to seven digits, the first and the last exchanged; prompts and answers differ in
    length.
    """
    if name not in _TASKS:
        raise ValueError(f"task {name!r} is unknown: choose one of {', '.join(TASKS)}.")
    return _TASKS[name]
