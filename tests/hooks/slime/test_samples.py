"""What servers with our SGLang plugin tell, from slime's and miles's samples to our reader of their dumps.

Stand-ins take a reply as the hosts' `Sample` does; the real ones run in a process of their own, from a checkout.
"""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mismatch_plugin.data.read import read
from mismatch_plugin.data.served import META_KEY, Served
from mismatch_plugin.hooks import miles, slime
from mismatch_plugin.hooks.slime.samples import OWN_SOURCE, keep_served, watch_samples, wrap_data_source
from tests.data.test_hosts import write_in_host
from tests.hooks.contracts.launch_trees import launch, ray_tree
from tests.hooks.contracts.slime_source import call_arguments, function, host_root, parameters

HOSTS = ("slime", "miles")
hosts = pytest.mark.parametrize("host", HOSTS)


class Sample:
    def __init__(self, **fields: Any) -> None:
        self.tokens: list[int] = []
        self.response_length, self.metadata = 0, {"mine": 1}
        self.rollout_log_probs: list[float] = []
        vars(self).update(fields)

    def to_dict(self) -> dict[str, Any]:
        return vars(self).copy()


class SlimeSample(Sample):
    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = (),
        log_probs: Any = None,
        meta_info: Any = None,
        trainable: bool = True,
    ) -> None:
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        self.rollout_log_probs = [*self.rollout_log_probs, *(log_probs or [0.0] * len(tokens))]


class MilesSample(Sample):
    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        pass


KINDS: dict[str, type[Any]] = {"slime": SlimeSample, "miles": MilesSample}


def meta(
    tokens: int, *spans: tuple[str | None, int, int], server: str = "a:1/7", listed: bool = False
) -> dict[str, Any]:
    weights = [{"fingerprint": name, "since": "3", "start": start, "end": end} for name, start, end in spans]
    told = {"server": server, "sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "float32", "weights": weights}
    return {"output_token_logprobs": [[-0.5, 7, None]] * tokens, META_KEY: [told] if listed else told}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A host with a fresh `Sample`, which is watched."""
    name = request.param
    types, source = ModuleType(f"{name}.utils.types"), ModuleType(f"{name}.rollout.data_source")
    vars(types)["Sample"] = type("Sample", (KINDS[name],), dict(vars(KINDS[name])))
    vars(source)["RolloutDataSourceWithBuffer"] = lambda args: ("the host's", args)
    for path in (name, f"{name}.utils", f"{name}.rollout"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setitem(sys.modules, f"{name}.utils.types", types)
    monkeypatch.setitem(sys.modules, f"{name}.rollout.data_source", source)
    watch_samples(name)
    watch_samples(name)  # once is enough, twice no harm
    return name


def made(host: str, **fields: Any) -> Any:
    return sys.modules[f"{host}.utils.types"].Sample(**fields)


def call(host: str, sample: Any, reply: dict[str, Any]) -> None:
    """As the host hands a reply to its sample."""
    ids = [token for _, token, _ in reply["output_token_logprobs"]]
    if host == "slime":
        sample.append_response_tokens(None, tokens=ids, log_probs=[-0.5] * len(ids), meta_info=reply)
    else:
        sample.response_length += len(ids)
        sample.update_from_meta_info(None, reply)


def tool(host: str, sample: Any, tokens: int) -> None:
    if host == "slime":
        sample.append_response_tokens(None, tokens=[1] * tokens, trainable=False)
    else:
        sample.response_length += tokens


def spans(sample: Any) -> list[tuple[str | None, int, int]]:
    served = Served.model_validate(sample.metadata[META_KEY])
    return [(span.fingerprint, span.start, span.end) for span in served.weights]


def test_one_call(host: str) -> None:
    sample = made(host)
    call(host, sample, meta(5, ("aa", 0, 3), ("bb", 3, 5)))
    assert spans(sample) == [("aa", 0, 3), ("bb", 3, 5)]
    assert sample.metadata["mine"] == 1 and sample.metadata[META_KEY]["weights"][1]["since"] == "3"


def test_turns_count_the_tool_s_tokens_and_keep_the_last_call_s_facts(host: str) -> None:
    sample = made(host)
    call(host, sample, meta(4, ("aa", 0, 4), server="a:1/7"))
    tool(host, sample, 3)
    call(host, sample, meta(2, ("aa", 0, 1), (None, 1, 2), server="b:1/8", listed=True))
    assert spans(sample) == [("aa", 0, 4), ("aa", 7, 8), (None, 8, 9)]
    assert sample.metadata[META_KEY]["server"] == "b:1/8"


def test_a_call_that_went_on_has_both_parts(host: str) -> None:
    sample = made(host)
    call(host, sample, meta(4, ("aa", 0, 4)))
    call(host, copied := copy.deepcopy(sample), meta(2, ("bb", 0, 2)))
    assert spans(copied) == [("aa", 0, 4), ("bb", 4, 6)] and spans(sample) == [("aa", 0, 4)]


def test_a_reply_without_the_plugin_s_object_changes_nothing(host: str) -> None:
    sample = made(host)
    call(host, sample, {"output_token_logprobs": [[-0.5, 7, None]]})
    assert sample.metadata == {"mine": 1}
    sample = made(host, metadata=None)
    call(host, sample, meta(1, ("aa", 0, 1)))
    assert spans(sample) == [("aa", 0, 1)]


def test_a_sample_that_starts_anew_forgets(host: str) -> None:
    """miles's reset_for_retry keeps the metadata."""
    sample = made(host)
    call(host, sample, meta(9, ("aa", 0, 9)))
    sample.response_length, sample.tokens = 0, []
    call(host, sample, meta(3, ("bb", 0, 3)))
    assert spans(sample) == [("bb", 0, 3)]


def test_streamed_chunks_repeat_the_call() -> None:
    """slime puts the sample back before each chunk, which tells of the whole call."""
    sample = SlimeSample(response_length=2)
    keep_served(sample, meta(2, ("aa", 0, 2)), 0)
    for tokens in (1, 3, 4):
        sample.response_length = 2 + tokens
        keep_served(sample, meta(tokens, ("bb", 0, tokens)), 2)
    assert spans(sample) == [("aa", 0, 2), ("bb", 2, 6)]


def test_spans_end_with_the_tokens_that_were_kept() -> None:
    sample = SlimeSample(response_length=3)
    keep_served(sample, meta(3, ("aa", 0, 2), ("bb", 2, 9), ("cc", 9, 12)))
    assert spans(sample) == [("aa", 0, 2), ("bb", 2, 3)]


def test_replies_of_other_forms() -> None:
    sample = SlimeSample(response_length=2)
    told = meta(2, ("aa", 0, 2), listed=True)
    keep_served(sample, {**told, META_KEY: [None, *told[META_KEY]]})  # of a stream
    assert spans(sample) == [("aa", 0, 2)]
    sample = SlimeSample(response_length=3)
    keep_served(sample, {META_KEY: told[META_KEY], "completion_tokens": 2})  # without log-probs
    assert spans(sample) == [("aa", 1, 3)]
    for metadata in ({META_KEY: "theirs"}, {META_KEY: None}):
        sample = SlimeSample(response_length=2, metadata=metadata)
        keep_served(sample, told)
        assert spans(sample) == [("aa", 0, 2)]
    sample = SlimeSample(response_length=2, metadata="text")
    keep_served(sample, told)
    assert sample.metadata == "text"


# How it comes into the rollout's process ------------------------------------------------------------------------------


def test_our_data_source_is_the_host_s(host: str) -> None:
    args = Namespace()
    ours = {"slime": slime, "miles": miles}[host].data_source
    assert ours(args) == ("the host's", args)
    setattr(args, OWN_SOURCE, "tests.hooks.slime.test_samples.MySource")
    assert isinstance(ours(args), MySource)


class MySource:
    def __init__(self, args: Namespace) -> None: ...


def test_a_data_source_of_one_s_own_is_wrapped_once() -> None:
    args = Namespace(data_source_path="mine.Source")
    for _ in range(2):
        wrap_data_source("slime", args)
        assert vars(args) == {"data_source_path": "mismatch_plugin.hooks.slime.data_source", OWN_SOURCE: "mine.Source"}
    wrap_data_source("slime", args := Namespace())
    assert vars(args) == {}  # an older host without the argument


@hosts
def test_the_launcher_sets_it(host: str, tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", host)
    arguments = tmp_path / "tree" / host / "utils" / "arguments.py"
    text = arguments.read_text()
    head, found, tail = text.rpartition("    return args\n")
    assert found
    arguments.write_text(f'{head}    args.data_source_path = "mine.Source"\n{found}{tail}')
    done = launch(script, "--use-tis")
    assert done.given is not None, done.errors
    assert done.given["args"]["data_source_path"] == f"mismatch_plugin.hooks.{host}.data_source"
    assert done.given["args"][OWN_SOURCE] == "mine.Source"
    assert "weight updates: verified where servers have the SGLang plugin; a difference is a warning" in done.printed
    assert launch(script, "").given["args"]["data_source_path"] == "mine.Source"  # type: ignore[index]


@hosts
def test_the_host_calls_it_so(host: str) -> None:
    root = host_root(host)
    manager = {"slime": "slime/ray/rollout.py", "miles": "miles/ray/rollout/rollout_manager.py"}[host]
    assert call_arguments(function(root / manager, "__init__"), "data_source_cls") == ("args",)
    types = root / host / "utils" / "types.py"
    if host == "slime":
        assert {"args", "tokens", "meta_info"} <= {*parameters(function(types, "append_response_tokens"))}
    else:
        assert parameters(function(types, "update_from_meta_info")) == ("self", "args", "meta_info")


# To our reader --------------------------------------------------------------------------------------------------------


def dumped(folder: Path, *samples: dict[str, Any]) -> Path:
    path = folder / "rollout_3.pt"
    torch.save({"rollout_id": 3, "samples": [*samples]}, path)
    return path


def row(metadata: Any, number: int) -> dict[str, Any]:
    filled = {"tokens": [1, 2, 3, 4, number], "response_length": 3, "rollout_log_probs": [-0.5] * 3, "index": number}
    return {**filled, "metadata": metadata}


def test_a_dump_tells_what_served(tmp_path: Path) -> None:
    told = meta(3, ("aa", 0, 2), ("bb", 2, 5), ("cc", 5, 6))[META_KEY]
    found = read(dumped(tmp_path, row({META_KEY: told}, 5), row({}, 6), row(None, 7), row({META_KEY: {}}, 8)))
    served = [sample.served for sample in found.samples]
    assert served[0] is not None and served[0].server == "a:1/7" and served[1:] == [None] * 3
    assert [(span.fingerprint, span.end) for span in served[0].weights] == [("aa", 2), ("bb", 3)]
    assert "1 samples have metadata mismatch_plugin that cannot be read" in found.notes


REAL = """
def meta(tokens, name):
    told = {"server": "a:1/7", "sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "float32", "newer": 1,
        "weights": [{"fingerprint": name, "start": 0, "end": tokens}]}
    return {"output_token_logprobs": [[-0.5, 7, None]] * tokens, "mismatch_plugin": told, "finish_reason":
        {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": tokens, "weight_version": "3"}
from mismatch_plugin.hooks.slime.samples import watch_samples
args = Namespace(sglang_speculative_algorithm=None)
"""
REAL_SLIME = """
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.utils.types import Sample
watch_samples("slime")
sample = Sample(index=40, tokens=[1, 2, 3])
for tokens, name in ((4, "aa"), (2, "bb")):
    reply = meta(tokens, name)
    sample.append_response_tokens(args, tokens=[7] * tokens, log_probs=[-0.5] * tokens, meta_info=reply, text="x")
    sample.append_response_tokens(args, tokens=[8, 9], trainable=False)
save_debug_rollout_data(out + "/rollout_{rollout_id}.pt", [sample], rollout_id=3, evaluation=False)
"""
REAL_MILES = """
import asyncio
sys.modules.setdefault("pybase64", types.ModuleType("pybase64"))
from miles.ray.rollout.debug_data import save_debug_rollout_data
from miles.rollout.generate_utils import generate_endpoint_utils as endpoint
from miles.utils.types import Sample
watch_samples("miles")
sample = Sample(index=40)
for tokens, name in ((4, "aa"), (2, "bb")):
    reply = {"text": "x", "meta_info": meta(tokens, name)}
    step = endpoint.update_sample_from_response(args, sample, {"input_ids": [1, 2, 3]}, reply, update_loss_mask=True)
    asyncio.run(step)
    sample.tokens, sample.response_length = sample.tokens + [8, 9], sample.response_length + 2
    sample.loss_mask, sample.rollout_log_probs = sample.loss_mask + [0, 0], sample.rollout_log_probs + [0.0, 0.0]
args.save_debug_rollout_data, args.save_debug_trajectory_data = out + "/rollout_{rollout_id}.pt", None
save_debug_rollout_data(args, [sample], 3, evaluation=False)
"""


@pytest.mark.parametrize(("host", "code"), [("slime", REAL_SLIME), ("miles", REAL_MILES)])
def test_the_host_s_own_sample_and_dump(host: str, code: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    write_in_host(host, f"sys.path.append({str(root)!r})\n" + REAL + code, tmp_path)
    (response,) = read(tmp_path / "rollout_3.pt").samples
    assert (
        response.served is not None
        and response.loss_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 2 + [False] * 2
    )
    assert [(span.fingerprint, span.start, span.end) for span in response.served.weights] == [
        ("aa", 0, 4),
        ("bb", 6, 8),
    ]
