"""A process group of this process alone, for tests of what asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def process_group_of_one(folder: Path) -> Iterator[None]:
    """That of an earlier test, if it left one (trainers do, for as long as they live), else one until the end."""
    if dist.is_initialized():
        assert dist.get_world_size() == 1
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
