"""How many functions a call makes Python and C run: a gate that work does not grow with the data."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls(run: Callable[[], object]) -> int:
    """Python and C functions called: the fewest of three, as something may be finalised in the middle of one."""
    run()  # what the first call imports or caches
    gc.disable()  # its callbacks are calls too
    try:
        return min(_count(run) for _ in range(3))
    finally:
        gc.enable()


def _count(run: Callable[[], object]) -> int:
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
