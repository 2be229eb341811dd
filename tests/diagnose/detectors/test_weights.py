"""Weights that did not arrive, wholly, in part or on one server; gaps that only their size tells: named so, and silent
where another cause is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.served import Served
from mismatch_plugin.data.versions import WeightSpan
from tests.diagnose.door import CLEAN, faults, findings, inspect, named, samples_of, saved, told
from tests.fixtures.sglang_check.policies import FOLDER, recorded, score, training
from tests.fixtures.sglang_check.serving import serving

MOVED, PARTLY, MIXED = "weights_not_updated", "weights_partly_updated", "mixed_versions"


def labelled(samples: Any, ours: str | None, theirs: str | None) -> list[Sample]:
    """Weight versions of the records and of the trainer."""
    spans = [(WeightSpan(version=ours, start=0, end=len(one)),) if ours else () for one in samples]
    pairs = zip(samples, spans, strict=True)
    return [one.with_fields(weight_versions=span, trainer_version=theirs) for one, span in pairs]


@pytest.mark.parametrize(
    ("start", "now", "labels", "models", "confidence"),
    [
        ("float32", "drift-0.01-7", (None, None), False, "possible"),
        ("float32", "drift-0.01-7", ("step-4", "step-4"), True, "likely"),
        ("drift-0.01-7", "float32", (None, None), True, None),  # they did arrive
        ("drift-0.03-7", "drift-0.01-8", (None, None), True, None),  # a little old, but not the start's
        ("float32", "drift-0.01-7", ("step-3", "step-4"), False, "possible"),  # one step behind is not four
    ],
)
def test_the_start_fits_better(
    start: str, now: str, labels: tuple[str | None, str | None], models: bool, confidence: str | None
) -> None:
    """What the servers sampled is of `float32` in bf16."""
    samples = labelled(training(now, CLEAN), *labels)
    first = training(start, CLEAN)
    samples = [one.with_fields(ref_log_probs=s.train_log_probs) for one, s in zip(samples, first, strict=True)]
    given = ("--checkpoint", saved(now), "--reference-checkpoint", saved(start)) if models else ()
    item = named(findings(samples, *given, *(("--weight-version", labels[1]) if models and labels[1] else ())), MOVED)
    assert (item and item["confidence"]) == confidence
    if item:
        assert item["statistics"]["share"] == pytest.approx(1, abs=0.15) and "weights_checker" in item["fix"]
        assert ("--checkpoint" in item["fix"]) == (confidence == "possible")


Sizes = Callable[[int, int], Any]
Who = Callable[[int], dict[str, Any]]


def made(size: Sizes, who: Who = lambda _: {}, samples: int = 48, length: int = 40) -> list[Sample]:
    """size(sample, position): standard deviation of the logits' change. who: further fields."""
    draw = np.random.default_rng(3)
    rollout, train = [], []
    for index in range(samples):
        p = draw.uniform(0.02, 0.95, length) ** (1 + index % 3)  # some responses are surer than others
        gap = (1 - p) * np.array([size(index, at) for at in range(length)]) * draw.standard_normal(length)
        rollout.append(np.minimum(np.log(p), -1e-3))
        train.append(np.minimum(rollout[-1] + gap, 0))
    return samples_of(rollout, train, each=[who(index) for index in range(samples)])


def of_version(version: str, trainer: str | None) -> dict[str, Any]:
    return {"weight_versions": [WeightSpan(version=version, start=0, end=40)], "trainer_version": trainer}


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize(
    ("sizes", "confidence"),
    [
        ([0.02, 0.05, 0.07, 0.09, 0.1], "likely"),
        ([0.02, 0.024, 0.028, 0.032, 0.036], "possible"),
        ([0.02, 0.02, 0.02, 0.1, 0.3], "possible"),  # it begins late: another cause, perhaps
        ([0.1, 0.09, 0.07, 0.05, 0.02], None),  # it shrinks
    ],
)
def test_a_gap_that_grows_from_the_first_version_on(sizes: list[float], confidence: str | None, is_told: bool) -> None:
    def who(index: int) -> dict[str, Any]:
        label = f"v{index // 24}"
        return of_version(label, label if is_told else None) | {"step": index // 24}

    item = named(findings(made(lambda sample, _: sizes[sample // 24], who, samples=24 * len(sizes))), MOVED)
    assert (item and item["confidence"]) == confidence
    if item:
        assert "from version 0 to 4" in item["evidence"] and item["first"]["sample"] == 24
        assert ("--reference-checkpoint" in item["fix"]) == (confidence == "possible")


def of_two(index: int) -> dict[str, Any]:
    return {"server": f"http://{'ab'[index % 2]}:1"}


def of_eight(index: int) -> dict[str, Any]:
    return {"server": f"http://{'ab'[index // 4 % 2]}:1", "dp_rank": index % 4}


def one_in_two(sample: int, _: int) -> float:
    return (0.03, 0.2)[sample % 2]


def one_in_three(sample: int, _: int) -> float:
    return 0.3 if sample % 3 == 0 else 0.03


def one_in_eight(sample: int, _: int) -> float:
    return 0.2 if sample % 8 == 6 else 0.03


@pytest.mark.parametrize(
    ("samples", "confidence", "said"),
    [
        (made(one_in_two, of_two), "likely", "Responses of http://b:1 (24 samples)"),
        (made(lambda sample, _: (0.02, 0.035)[sample % 2], of_two), "possible", "another precision"),
        (made(one_in_eight, of_eight, 128), "likely", "of http://b:1 dp_rank 2 (16 samples)"),
        (made(one_in_two, lambda i: of_two(i) | of_version(("step-4", "step-3")[i % 2], "step-4")), None, ""),  # told
        # Two populations without names.
        (made(one_in_three), "possible", "16 of 48"),
        (made(lambda sample, _: 0.03 * 10 ** (sample / 48)), None, ""),  # a wide one without a gap
        (made(lambda sample, _: 0.03 if sample % 2 else 1e-6), None, ""),  # bf16 and float32: precision explains both
    ],
)
def test_which_server_is_further_off(samples: list[Sample], confidence: str | None, said: str) -> None:
    item = named(findings(samples), "stale_server")
    assert (item and item["confidence"]) == confidence
    if item:
        assert said in item["evidence"]
        assert ("`dp_rank`" in item["fix"]) if "of 48" in said else ("http://b:1" in item["fix"])


@pytest.mark.parametrize(
    ("version", "trainer", "largest"),
    [("step-7", "7", None), ("step-7", "8", None), ("step-7", "9", 2.0), ("step-7", "6", -1.0), ("default", "1", None)],
)  # fmt: skip
def test_staleness_in_steps(version: str, trainer: str, largest: float | None) -> None:
    (one,) = labelled(samples_of([[-1.0]], [[-1.0]]), version, trainer)
    item = named(findings([one]), "staleness")
    assert (item and item["statistics"]["largest"]) == largest


def test_versions_that_cannot_be_counted_and_those_mixed_inside_a_response() -> None:
    (one,) = labelled(samples_of([[-1.0]], [[-1.0]]), "main-abc", "12")
    reasons = {fault: item["reason"] for item in inspect([one], "--brief")["undecided"] for fault in item["faults"]}
    assert "'main-abc'" in reasons["staleness"] and "12" not in reasons["staleness"]
    inside = [WeightSpan(version="4", start=0, end=2), WeightSpan(version="5", start=2, end=3)]
    item = named(findings(samples_of([[-1.0] * 3], [[-1.1] * 3], weight_versions=inside)), MIXED)
    assert item and item["first"]["position"] == 2 and "'4' 2, '5' 1 tokens" in item["evidence"]


def partial_rollout(seed: int, change: Callable[[Sample], Sample] = lambda one: one, drift: float = 0.03) -> Any:
    """Each response began with weights some steps old and went on with the trainer's. change: of what it scores."""
    samples = [*training("float32", CLEAN)]
    old, now = score(f"drift-{drift}-{seed}", samples), score("float32", [change(one) for one in samples])
    draw = np.random.default_rng(seed)
    partial = []
    for one, before, trained in zip(samples, old, now, strict=True):
        border = int(draw.integers(len(one) // 3, len(one)))
        versions = (WeightSpan(version="4", start=0, end=border), WeightSpan(version="5", start=border, end=len(one)))
        values = np.where(np.arange(len(one)) < border, before.train_log_probs, one.rollout_log_probs)
        given = {"rollout_log_probs": values, "weight_versions": versions, "trainer_version": "5"}
        partial.append(one.with_fields(train_log_probs=trained.train_log_probs, **given))
    return partial


@pytest.mark.parametrize("seed", range(2))
def test_a_partial_rollout_is_no_other_fault_hides_none_and_can_be_accepted(seed: int) -> None:
    found = faults(findings(partial_rollout(seed)))
    assert MIXED in found and not {*found} & {"wrong_prompt", "retokenised", "stale_server"}
    cut = partial_rollout(seed, lambda one: one.with_fields(prompt_ids=one.prompt_ids[2:]))
    assert faults(findings(cut))[0] == "wrong_prompt"
    samples = partial_rollout(seed, drift=0.06)
    samples[::4] = labelled(training("float32", CLEAN)[::4], "5", "5")  # of the trainer's alone: no second population
    assert faults(findings(samples)) == [MIXED]
    found = inspect(samples, "--brief", "--accept", MIXED)
    assert found["status"] == 0 and [item["accepted"] for item in found["findings"]] == [True]


HALF = ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("servers", "model", "start", "odd"),
    [
        ([("bfloat16", "float32")], "float32", "", [0]),  # and does not where the server says float32
        ([("drift-0.003-7", "bfloat16")], "float32", "", []),  # as far off as bf16: one server alone cannot tell
        ([("int8", "w8a8_int8")], "float32", "", []),  # a quantised one has a wider bar
        ([HALF, ("drift-0.005-7", "bfloat16"), HALF], "float32", "", [1]),  # below the bar, but the odd one
        ([("float32", "float32"), ("float32", "float32"), ("drift-0.01-7", "float32")], "", "", [2]),
        ([("float32", "bfloat16")], "drift-0.003-7", "", []),
        ([("float32", "bfloat16")], "drift-0.003-7", "float32", [0]),  # it kept the first weights
    ],
)
def test_servers_against_the_checkpoint_or_one_another(
    servers: list[tuple[str, str]], model: str, start: str, odd: list[int], tmp_path: Path
) -> None:
    """servers: (form, what it tells of its precision)."""
    write_samples(tmp_path / "few.jsonl", recorded("float32_temperature_1.0")[:16])
    given = ["--checkpoint", saved(model)] if model else []
    given += ["--reference-checkpoint", saved(start)] if start else []
    with ExitStack() as stack:
        infos = [{"dtype": d} if d[0] != "w" else {"dtype": "bfloat16", "quantization": d} for _, d in servers]
        urls = [stack.enter_context(serving(form, info)) for (form, _), info in zip(servers, infos, strict=True)]
        found = told(tmp_path / "few.jsonl", "--brief", *given, *(word for url in urls for word in ("--url", url)))
    items = [item for item in found["findings"] if item["fault"] == "server_differs"]
    assert [at for at, url in enumerate(urls) if any(f"server at {url} " in item["evidence"] for item in items)] == odd
    if start:
        assert "fit the weights that the run began with better" in items[0]["evidence"]
    if len(servers) == 3 and model and odd:
        assert items[0]["statistics"]["gap"] < items[0]["statistics"]["bar"] and items[0]["confidence"] == "possible"


def test_a_router_stands_for_its_workers() -> None:
    records = FOLDER / "float32_temperature_1.0.jsonl"
    given = (records, "--brief", "--checkpoint", saved("float32"), "--url")
    with serving("float32") as good, serving("drift-0.02-7") as bad:
        workers = {"workers": [{"url": f"{good}@0"}, {"url": f"{bad}@1"}, {"id": 3}], "total": 3}
        for path, listed in (("/list_workers", {"urls": [good, bad]}), ("/workers", workers)):
            with serving(routes={path: listed}) as url:
                found = told(*given, url)
            assert faults(found["findings"]) == ["server_differs"] and bad in found["findings"][0]["evidence"]
            assert found["verdict"] == "fault" and found["findings"][0]["first"] is not None
        with serving(routes={"/workers": {"urls": [3, "file:///etc"]}}) as url:
            assert told(*given, url)["findings"] == []  # it is a server itself
        refused = told(*given, good, "--url", "http://127.0.0.1:9")
        assert "server at http://127.0.0.1:9 does not rescore" in refused["headline"] and refused["status"] == 2


SHAPE = (32, 80)
PLACE, SAMPLE = np.arange(SHAPE[1])[None, :], np.arange(SHAPE[0])[:, None]
Noise = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def gaps(noise: Noise, deep: float = 0.06, **fields: Any) -> list[Sample]:
    """deep: no token is likelier than e^−deep."""
    draw = np.random.default_rng(0)
    rollout = -draw.exponential(1.2, SHAPE) - deep
    train = np.minimum(rollout + noise(draw, rollout), -1e-4)
    return samples_of(rollout.tolist(), train.tolist(), draw.integers(0, 500, SHAPE).tolist(), **fields)


def of_logits(scale: float, **fields: Any) -> list[Sample]:
    """Independent noise on each logit: in proportion to 1 − p, and what Σ p e^noise takes away again."""
    return gaps(lambda draw, rollout: (draw.normal(0, scale, SHAPE) - scale**2 / 2) * -np.expm1(rollout), **fields)


def tokens(where: Any, nats: float, **fields: Any) -> list[Sample]:
    """Quiet but for chosen tokens."""
    return gaps(lambda draw, _: np.where(where, nats, draw.normal(0, 0.01, SHAPE)), **fields)


def rare(draw: np.random.Generator, _: np.ndarray) -> np.ndarray:
    return np.where(draw.random(SHAPE) < 0.01, draw.normal(-0.5, 1.0, SHAPE), draw.normal(0, 0.01, SHAPE))


def often(draw: np.random.Generator, _: np.ndarray) -> np.ndarray:
    chosen, size = draw.random(SHAPE) < 0.045, draw.choice([-4.0, 2.5], SHAPE)
    return np.where(chosen, size, draw.normal(0, 0.01, SHAPE))


UNEXPLAINED, QUANTISED = ("unexplained", "fault", "possible"), ("quantised", "note", "possible")
OF_VERSION_4 = {"weight_versions": (WeightSpan(version="4", start=0, end=SHAPE[1]),)}
IN_BF16 = {"server": "a", "sglang": "1", "dtype": "bfloat16", "head_dtype": "float32", "weights": ()}
LARGE = ("K and V", "RoPE", "LoRA", "--checkpoint NOW --reference-checkpoint START", "--engine fp8")


@pytest.mark.parametrize(
    ("samples", "options", "expected", "said"),
    [
        (gaps(rare), (), ("moe_routing", "note", "likely"), ("routing replay",)),
        (gaps(often, deep=3.0), (), ("moe_routing", "fault", "likely"), ()),
        # Few tokens by a pattern are no routers.
        (tokens((SAMPLE < 4) & (PLACE % 5 == 0), -4.0), (), None, ()),
        # Even noise: of bf16, of quantised pairs, of those alone that are known to be quantised, of none.
        (of_logits(0.03), (), None, ()),
        (of_logits(0.09), (), QUANTISED, ()),
        (of_logits(0.25), ("--engine", "fp8"), QUANTISED, ()),
        (of_logits(0.25, served=Served(**IN_BF16, kv_cache_dtype="float8_e4m3fn")), (), QUANTISED, ()),
        (of_logits(0.25, served=Served(**IN_BF16, kv_cache_dtype="bf16")), (), UNEXPLAINED, ()),
        (of_logits(0.25), (), UNEXPLAINED, LARGE),
        (of_logits(0.8), (), UNEXPLAINED,
         ("k3 0.127 is above 0.1 and mean |gap| 0.396 is above 0.35", "the median one has k3")),
        # Noise that likely tokens do not have, or that labels explain.
        (gaps(lambda draw, rollout: draw.normal(0, 0.08, SHAPE) * -rollout), (), None, ()),
        (of_logits(0.25, **OF_VERSION_4, trainer_version="5"), (), None, ()),
        (of_logits(0.25, **OF_VERSION_4, trainer_version="4"), (), UNEXPLAINED, ()),
        # Equal sides.
        (gaps(lambda _, rollout: np.zeros(SHAPE)), (), None, ()),
    ],
)  # fmt: skip
def test_what_a_size_is_called(
    samples: list[Sample], options: tuple[str, ...], expected: tuple[str, ...] | None, said: tuple[str, ...]
) -> None:
    found = inspect(samples, "--brief", *options)
    items = found["findings"]
    assert [(one["fault"], one["severity"], one["confidence"]) for one in items] == ([expected] if expected else [])
    for part in said:
        assert part in items[0]["evidence"] + items[0]["fix"], items[0]
    assert ("kernels" in found["next_step"]) == (found["mismatch"]["abs_max"] == 0.0)
