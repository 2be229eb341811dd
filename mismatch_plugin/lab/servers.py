"""The SGLang servers of a comparison: one for each rollout precision, started here or reached at a URL."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mismatch_plugin.lab.sglang_engine import SERVER_ARGUMENTS, SGLangEngine, write_checkpoint
from mismatch_plugin.lab.tasks import get_task
from mismatch_plugin.rollout.server import ServerDtype, start_cpu_server
from mismatch_plugin.sglang.client import RequestError
from mismatch_plugin.sglang.http import shown

if TYPE_CHECKING:
    from mismatch_plugin.lab.compare import Job


def server_dtype(url: str) -> str:
    """The precision of the server at `url`; `auto` if it does not tell. Raises RequestError if it does not answer."""
    task: Any = get_task("reverse")
    with SGLangEngine(url, eos=task.eos, vocab=task.vocab) as engine:
        return engine.dtype


@contextmanager
def servers_for(jobs: Sequence[Job], url: str | None) -> Iterator[dict[str, str]]:
    """{rollout_dtype: URL} for the jobs that are not done, none of them for another engine than SGLang.

    url: of a server that is there; None starts one on CPU for each precision, which ends with the block.
    Raises what `start_cpu_server` raises.
    """
    todo = {
        job.settings.rollout_dtype: job.settings for job in jobs if not job.done and job.settings.engine == "sglang"
    }
    if url is not None:
        yield dict.fromkeys(todo, url)
        return
    with ExitStack() as stack:
        urls = {}
        for dtype, settings in todo.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # megatron-core says what CPU lacks
                write_checkpoint(folder, settings)
            started = start_cpu_server(folder, dtype=cast("ServerDtype", dtype), arguments=SERVER_ARGUMENTS)
            urls[dtype] = stack.enter_context(started).url
        yield urls


def server_dtype_of(url: str) -> str:
    """The precision of the server at `url`. Raises ValueError if it does not answer, or computes in another form."""
    try:
        dtype = server_dtype(url)
    except RequestError as error:
        raise ValueError(f"the server at {shown(url)} does not answer: {error}") from None
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"the server at {shown(url)} computes in {dtype}: start it with --dtype float32, bfloat16 or float16."
        )
    return dtype
