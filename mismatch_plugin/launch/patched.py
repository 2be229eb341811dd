"""For hosts whose argument file is patched instead of launched through us: a decorator on their parser."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

from mismatch_plugin.hooks.base import settled, start_block, stop
from mismatch_plugin.hooks.hosts import find_host
from mismatch_plugin.launch.command_line import make_plan

LAUNCHED: list[bool] = []
"""Not empty where the launcher has read the command line already: the decorator then leaves the parser as it is."""


def with_our_flags(host: str) -> Callable[[Callable[..., Namespace]], Callable[..., Namespace]]:
    """Decorator of a host's `parse_args`: what the launcher does, at the moment the host reads its command line.

    It takes our flags off sys.argv, adds the host's arguments for them, prints the block, and puts the settings on the
    Namespace; `--mismatch-explain-only` ends the program after the block. A mistake ends it with one sentence.
    """

    def decorate(parse_args: Callable[..., Namespace]) -> Callable[..., Namespace]:
        @wraps(parse_args)
        def parse(*args: Any, **kwargs: Any) -> Namespace:
            if LAUNCHED:
                return parse_args(*args, **kwargs)
            try:
                given, plan = make_plan(find_host(host), sys.argv[1:], None)
            except ValueError as error:
                stop(str(error))
            print(start_block(host, plan.lines), flush=True)
            if given.explain_only:
                raise SystemExit(0)
            typed = sys.argv
            sys.argv = [typed[0], *plan.argv]
            try:
                return settled(plan.settle)(parse_args, *args, **kwargs)
            finally:
                sys.argv = typed

        return parse

    return decorate
