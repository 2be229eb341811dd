"""Weight versions: which tokens were sampled from which, and the number that a version's name ends with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mismatch_plugin.data.arrays import Ids
from mismatch_plugin.files import encodable

INITIAL_VERSION = "default"
"""What SGLang calls the weights it was started with: number −1, before every update."""


class WeightSpan(BaseModel):
    """Response tokens [start, end) were sampled from the weights called `version`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[str, AfterValidator(encodable)]
    start: int = Field(ge=0)
    end: int = Field(ge=0)


def version_number(version: str | int | None) -> int | None:
    """The number at the end of a version's name ("v12", "step-12", 12); None if there is none.

    More than 18 digits are a hash or a time, no count of steps, and do not fit 64 bits.
    """
    found = re.search(r"(?<![0-9])[0-9]{1,18}$", str(version))
    return int(found[0]) if found else None


def number_versions(versions: Sequence[str]) -> dict[str, int]:
    """A number for each weight version, in the order of training: the integer that its name is or ends with.

    SGLang's own "default" is −1. Raises ValueError for any other name, for two of one number, and where what stands
    before the number is not the same in all of them: hexadecimal digests end in digits that mean nothing.
    """
    numbers: dict[str, int] = {}
    stems: dict[str, str] = {}
    for version in dict.fromkeys(versions):
        number = -1 if version == INITIAL_VERSION else version_number(version)
        if number is None:
            raise ValueError(f"weight version {version!r} does not end in a number: name versions by step.")
        if version != INITIAL_VERSION:
            stems.setdefault(version.rstrip("0123456789"), version)
        if number in numbers.values():
            raise ValueError(f"weight version {version!r} has the number of another one: name versions by step.")
        numbers[version] = number
    if len(stems) > 1:
        first, second, *_ = stems.values()
        raise ValueError(
            f"weight versions {first!r} and {second!r} are not one name with two numbers: name versions by step."
        )
    return numbers


def version_of_tokens(spans: Sequence[WeightSpan], numbers: Mapping[str, int], length: int, other: int = -1) -> Ids:
    """[length] int64: the number of each token's version, `other` where none is told."""
    found = np.full(length, other, dtype=np.int64)
    for span in spans:
        found[span.start : span.end] = numbers[span.version]
    return found
