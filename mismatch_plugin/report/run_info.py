"""What `run.json` says of a comparison, read so that nothing in it can raise but what is asked for by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_SEEDS = 10_000


@dataclass(frozen=True)
class AboutSetting:
    """What `run.json` says of a setting: a title, a sentence on it, one on its task, and what of the lab it changes."""

    title: str
    what: str = ""
    task: str = ""
    changes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Outcomes:
    """The outcomes that were named before the run."""

    primary: str
    secondary: tuple[str, ...] = ()


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object as it is; of anything else an empty one."""
    return value if isinstance(value, dict) else {}


def names(value: object) -> list[str]:
    """The members of a list as text; of anything else none."""
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else []


def seeds_of(asked: object) -> list[int]:
    """The seeds that `run.json` asks for, by number or one by one. Raises ValueError for what is neither."""
    if isinstance(asked, int) and 0 <= asked <= MAX_SEEDS:
        return list(range(asked))
    if isinstance(asked, list) and len(asked) <= MAX_SEEDS and all(isinstance(seed, int) for seed in asked):
        return asked
    raise ValueError(f"run.json has {str(asked)[:40]} as seeds, which is not a number of seeds: taken are those found.")
