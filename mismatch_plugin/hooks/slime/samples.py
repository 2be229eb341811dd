"""What servers with our SGLang plugin tell of a response, from their replies to the host's samples and dumps.

The host's `Sample` keeps of a reply's `meta_info` what it knows. Here one object more is kept, in
`Sample.metadata["mismatch_plugin"]`, which the host's rollout dumps carry. A response may be of several calls: turns,
or parts that were aborted and went on. The object is the last call's, its `weights` those of all calls: [start, end)
count the response's tokens, those of tools and the environment included, which lie in no span.

Samples are made in the process of the rollout manager, in which nothing of ours would run: `data_source`, which that
process calls when it starts, is how this comes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from mismatch_plugin.data.served import META_KEY, last_told
from mismatch_plugin.hooks.base import wrap_once

_METHODS = ("append_response_tokens", "update_from_meta_info")
"""Of `Sample`, which take a reply's `meta_info`: slime's, which adds the tokens too, and miles's, called after that."""
OWN_SOURCE = "mismatch_data_source_path"
"""The argument that names the data source which `data_source` makes."""


def keep_served(sample: Any, meta_info: Mapping[str, Any], start: int | None = None) -> None:
    """Keep what the plugin tells in `meta_info` on `sample`, whose response has the call's tokens already.

    For a generate function of your own that fills in the sample itself. Without the plugin's object nothing is done.
    start: where the call's first token is in the response; None: its tokens are the last ones.
    """
    told = last_told(meta_info.get(META_KEY))
    if not told:
        return
    end = sample.response_length
    if start is None:
        count = len(meta_info.get("output_token_logprobs") or ()) or meta_info.get("completion_tokens") or 0
        start = max(0, end - count)
    before = (sample.metadata or {}).get(META_KEY, {}).get("weights") or ()
    # A streamed chunk repeats the call's earlier ones, and a sample that starts anew what it had: both end at `start`.
    spans = [{**span, "end": min(span["end"], start)} for span in before if span["start"] < start]
    for span in told.get("weights") or ():
        moved = {**span, "start": start + span["start"], "end": min(start + span["end"], end)}
        if moved["start"] < moved["end"]:
            spans.append(moved)
    if sample.metadata is None:
        sample.metadata = {}
    sample.metadata[META_KEY] = {**told, "weights": spans}


def watch_samples(host: str) -> None:
    """Let the host's `Sample` keep it wherever it is handed a reply's `meta_info`. Idempotent."""
    kind = import_module(f"{host}.utils.types").Sample
    for name in _METHODS:
        if name in vars(kind):
            wrap_once(kind, name, _keeping)


def _keeping(own: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
    start = sample.response_length if own.__name__ == _METHODS[0] else None
    result = own(sample, *args, **kwargs)
    meta_info = kwargs["meta_info"] if "meta_info" in kwargs else args[1] if len(args) > 1 else None
    if meta_info is not None:
        keep_served(sample, meta_info, start)
    return result


def data_source(host: str, args: Any) -> Any:
    """For `--data-source-path`, when the rollout manager starts: `watch_samples`, and then the host's data source, or
    the one that `OWN_SOURCE` names."""
    watch_samples(host)
    path = getattr(args, OWN_SOURCE, None) or f"{host}.rollout.data_source.RolloutDataSourceWithBuffer"
    return resolve_name(path)(args)


def wrap_data_source(host: str, args: Any) -> None:
    """Put `data_source` in the place of the data source that the arguments name, which it then makes."""
    ours, named = f"mismatch_plugin.hooks.{host}.data_source", getattr(args, "data_source_path", None)
    if named and named != ours:
        setattr(args, OWN_SOURCE, named)
        args.data_source_path = ours
