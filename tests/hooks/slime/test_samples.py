"""What servers with our SGLang plugin tell: from their replies to slime's and miles's samples.

Stand-ins take a reply as the hosts' `Sample` does. The hosts' own samples and dumps run in the whole trainers' tests.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from mismatch_plugin.data.served import META_KEY, Served
from mismatch_plugin.hooks import miles, slime
from mismatch_plugin.hooks.slime.samples import OWN_SOURCE, keep_served, watch_samples, wrap_data_source

HOSTS = ("slime", "miles")
Span = tuple[str | None, int, int]


class Sample:
    def __init__(self, response_length: int = 0) -> None:
        self.response_length, self.metadata = response_length, {"mine": 1}


class SlimeSample(Sample):
    def append_response_tokens(self, args: Any = None, *, tokens: Any = (), meta_info: Any = None) -> None:
        self.response_length += len(tokens)


class MilesSample(Sample):
    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        pass


def meta(tokens: int, *spans: Span, server: str = "a:1/7") -> dict[str, Any]:
    weights = [{"fingerprint": name, "since": "3", "start": start, "end": end} for name, start, end in spans]
    told = {"server": server, "sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "float32", "weights": weights}
    return {"output_token_logprobs": [[-0.5, 7, None]] * tokens, META_KEY: told}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A host with a fresh `Sample`, which is watched."""
    name, kind = request.param, {"slime": SlimeSample, "miles": MilesSample}[request.param]
    types, source = ModuleType(f"{name}.utils.types"), ModuleType(f"{name}.rollout.data_source")
    vars(types)["Sample"] = type("Sample", (kind,), dict(vars(kind)))
    vars(source)["RolloutDataSourceWithBuffer"] = lambda args: ("the host's", args)
    for module in (*(ModuleType(path) for path in (name, f"{name}.utils", f"{name}.rollout")), types, source):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    watch_samples(name)
    watch_samples(name)  # once is enough, twice no harm
    return name


def spans(sample: Any) -> list[Span]:
    served = Served.model_validate(sample.metadata[META_KEY])
    return [(span.fingerprint, span.start, span.end) for span in served.weights]


ONE, TWO = meta(4, ("aa", 0, 4)), meta(2, ("aa", 0, 1), (None, 1, 2), server="b:1/8")
CALLS: dict[str, tuple[list[Any], list[Span]]] = {
    "turns count the tool's three tokens": ([ONE, 3, TWO], [("aa", 0, 4), ("aa", 7, 8), (None, 8, 9)]),
    "a call that went on": ([ONE, meta(2, ("bb", 0, 2))], [("aa", 0, 4), ("bb", 4, 6)]),
    "a sample that starts anew": ([ONE, "reset", meta(3, ("bb", 0, 3))], [("bb", 0, 3)]),
    "the last chunk of a stream": ([ONE | {META_KEY: [None, ONE[META_KEY]]}], [("aa", 0, 4)]),
    "no object of the plugin": ([ONE, {"output_token_logprobs": [[-0.5, 7, None]]}], [("aa", 0, 4)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_spans_of_a_response_of_several_calls(host: str, name: str) -> None:
    """An integer: tokens of a tool, which lie in no span."""
    calls, expected = CALLS[name]
    sample = sys.modules[f"{host}.utils.types"].Sample()
    for call in calls:
        if call == "reset":  # miles's reset_for_retry keeps the metadata
            sample.response_length = 0
        elif isinstance(call, int):
            sample.response_length += call
        elif host == "slime":
            sample.append_response_tokens(None, tokens=call["output_token_logprobs"], meta_info=call)
        else:
            sample.response_length += len(call["output_token_logprobs"])
            sample.update_from_meta_info(None, call)
    assert spans(sample) == expected
    assert sample.metadata["mine"] == 1
    assert sample.metadata[META_KEY]["server"] == ("b:1/8" if TWO in calls else "a:1/7")


def test_streamed_chunks_repeat_the_call_and_spans_end_with_the_tokens_that_were_kept() -> None:
    """slime puts the sample back before each chunk, which tells of the whole call."""
    sample = SlimeSample(response_length=2)
    keep_served(sample, meta(2, ("aa", 0, 2)), 0)
    for tokens in (1, 3, 4):
        sample.response_length = 2 + tokens
        keep_served(sample, meta(tokens, ("bb", 0, tokens)), 2)
    assert spans(sample) == [("aa", 0, 2), ("bb", 2, 6)]
    sample = SlimeSample(response_length=3)
    keep_served(sample, meta(3, ("aa", 0, 2), ("bb", 2, 9), ("cc", 9, 12)))
    assert spans(sample) == [("aa", 0, 2), ("bb", 2, 3)]


class MySource:
    def __init__(self, args: Namespace) -> None: ...


def test_our_data_source_is_the_host_s_or_the_user_s(host: str) -> None:
    args = Namespace(data_source_path=f"{__name__}.MySource")
    ours = {"slime": slime, "miles": miles}[host].data_source
    assert ours(Namespace())[0] == "the host's"
    for _ in range(2):  # once is enough
        wrap_data_source(host, args)
        path = f"mismatch_plugin.hooks.{host}.data_source"
        assert vars(args) == {"data_source_path": path, OWN_SOURCE: f"{__name__}.MySource"}
    assert isinstance(ours(args), MySource)
