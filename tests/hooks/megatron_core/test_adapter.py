"""The loss hook through the real megatron-core: the same gradients and metrics for every parallel layout.

The reference is one process without the hook: each sample through the model alone, plain `log_softmax`, one
`policy_loss` on the whole batch, autograd. Every other sample was drawn from what filters kept. Every layout runs the
hook in megatron's schedules, with 1 and 4 micro-batches, packed or padded. In float64 all agree to 1e-7: megatron
divides gradients by the token count in float32. In float32 they agree to 1e-5.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import spans_of
from tests.distributed.hook_worker import VOCAB, Layout, Outcome, Run, initial_log_probs, run_layout, run_plainly
from tests.distributed.launch import launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

Gradients = dict[str, torch.Tensor]
NO_ROPE = {"position": "none", "cp_layout": "contiguous"}
LAYOUTS = [
    Layout("dp1"),
    Layout("tp2", tp=2),
    Layout("tp2+sp", tp=2, settings={"sequence_parallel": True}),
    Layout("pp2", pp=2),
    Layout("cp2 zigzag", cp=2),
    Layout("cp2 contiguous", cp=2, settings=NO_ROPE),
    Layout("dp2", dp=2),
    Layout("tp2 pp2", tp=2, pp=2),
    Layout("tp2 cp2", tp=2, cp=2),
    Layout("tp2 dp2", tp=2, dp=2),
    Layout("pp2 cp2", pp=2, cp=2),
    Layout("cp2 dp2", cp=2, dp=2),
]
FACTORS: dict[str, list[Any]] = {
    "rejection": [
        {},
        {"criteria": ["sequence_mean:ratio:0.9:1.11"], "veto_threshold": 0.4},
        {"criteria": ["token:k3:0.2", "sequence_max:ratio:0.3:1.9"]},
        {"criteria": ["sequence_max:binary_kl:0.004", "token:ratio:0.6:1.7"], "veto_threshold": 0.45},
        {"criteria": ["token:k3:0.3"], "max_staleness": 1},
        {"criteria": ["token:k2:0.03@away", "sequence_mean:ratio:0.9:1.1@negative"]},
        {"criteria": ["sequence_max:k2:0.5", "sequence_mean:ratio:0.9:1.1@negative"], "policy": "current"},
    ],
    "batch_normalize": [False, True],
    "denominator": ["accepted", "original"],
    "aggregation": ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"],
    "terms": [
        {},
        {"entropy_coef": 0.01},
        {"kl_coef": 0.1, "kl_type": "k3"},
        {"rollout_kl_coef": 0.5, "rollout_kl_type": "k3"},
    ],
    "objective": ["ppo", "gspo", "cispo", "gmpo", "reinforce"],
    "microbatches": [1, 4],
    "form": ["thd", "bshd"],
    "fused_head": [False, True],
}


def samples() -> tuple[Sample, ...]:
    """Uneven lengths; one response of one token, one without a trained token, prompts longer than responses."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB - 1, (count,), generator=generator).tolist()

    made = []
    for i, (prompt, response) in enumerate([(3, 9), (5, 14), (2, 1), (7, 6), (4, 11), (1, 5), (16, 3), (2, 8)]):
        mask = (torch.rand(response, generator=generator) < 0.8).int().tolist()
        mask = [1] if response == 1 else [0] * response if i == 5 else mask
        sample = Sample(
            advantages=float(torch.randn((), generator=generator)),
            weight_versions=spans_of(torch.randint(3, 6, (response,), generator=generator).tolist()),
            prompt_ids=ids(prompt),
            response_ids=ids(response),
            loss_mask=mask,
            sample_id=f"s{i}",
        )
        made.append(sample.replace(kept_ids=kept_ids(sample.response_ids.tolist(), filtered=i % 2 == 1)))
    return tuple(made)


def kept_ids(response_ids: Sequence[int], filtered: bool) -> list[list[int]]:
    """What a sampler's filters may have left at each token: the sampled id and two thirds of the others, or all."""
    if not filtered:
        return [[] for _ in response_ids]
    return [[token, *(i for i in range(VOCAB) if (i + at) % 3 and i != token)] for at, token in enumerate(response_ids)]


@cache
def data(position: str) -> tuple[Sample, ...]:
    """The samples with log-probs near the model's own, as another engine would return them."""
    layout = Layout("dp1", samples=samples(), settings={"position": position})
    own = launch(initial_log_probs, [layout], 1)[0][0]
    generator = torch.Generator().manual_seed(1)

    def near(values: torch.Tensor, scale: float) -> torch.Tensor:
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        return (values + scale * noise).clamp(max=-1e-3)

    return tuple(rescored(sample, values, near) for sample, values in zip(layout.samples, own, strict=True))


def rescored(sample: Sample, values: torch.Tensor, near: Callable[[torch.Tensor, float], torch.Tensor]) -> Sample:
    """The sample with log-probs of three policies near `values`, the sampler's over its kept ids."""
    sampled = near(values, 0.3)
    return sample.replace(
        rollout_log_probs=sampled,
        behaviour_log_probs=sampled,
        train_log_probs=near(values, 0.1),
        ref_log_probs=near(values, 0.2),
    )


def runs() -> list[tuple[dict[str, Any], Run]]:
    """Every algorithm × level × mode twice (turn, prefix once), the other factors so that all pairs of values occur."""
    cores: list[dict[str, Any]] = [{"algorithm": a, "level": "token", "mode": "truncate"} for a in (0, 1)]
    cores += [{"algorithm": 3, "level": "none", "mode": "truncate"}]
    for algorithm, level, mode in product((2, 3), ("token", "sequence", "geometric"), ("truncate", "clip", "mask")):
        cores.append({"algorithm": algorithm, "level": level, "mode": mode})
    parts = [
        {"algorithm": algorithm, "level": level, "mode": mode}
        for algorithm, level, mode in product((2, 3), ("turn", "prefix"), ("clip", "mask"))
    ]
    chosen: list[tuple[dict[str, Any], Run]] = []
    seen: set[Any] = set()
    for index, core in enumerate(
        [*cores, *cores, *(cores[:1] * 2), *cores[3:8], *parts]
    ):  # with objectives more to pair
        options = [
            dict(zip(FACTORS, values, strict=True)) for values in product(*(range(len(v)) for v in FACTORS.values()))
        ]
        options = [{**core, **option} for option in options if legal({**core, **option})]
        start = 17 * index % len(options)
        best = max(options[start:] + options[:start], key=lambda option: gain(option, seen))
        seen |= pairs(best)
        chosen.append((best, run_of(best)))
    return chosen


def gain(option: dict[str, Any], seen: set[Any]) -> int:
    """Pairs that are new; those of two factors, all of which must occur, count three times."""
    return sum(3 if pair[0][0] in FACTORS and pair[1][0] in FACTORS else 1 for pair in pairs(option) - seen)


def legal(option: dict[str, Any]) -> bool:
    """What the hook can make exact."""
    current = "policy" in FACTORS["rejection"][option["rejection"]]
    if current and option["algorithm"] in (1, 3):
        return False
    late = current or option["algorithm"] in (1, 3)
    if option["algorithm"] == 3 and option["objective"]:
        return False
    rejects = option["rejection"] or option["mode"] == "mask"
    if option["batch_normalize"] and (option["algorithm"] < 2 or option["level"] == "none"):
        return False
    if option["batch_normalize"] and option["algorithm"] == 3 and option["terms"]:
        return False
    return not (late and rejects and option["terms"] and option["denominator"] == 0)


def pairs(option: dict[str, Any]) -> set[Any]:
    return {tuple(sorted(pair)) for pair in combinations(((k, str(v)) for k, v in option.items()), 2)}


def run_of(option: dict[str, Any]) -> Run:
    value = {name: choices[option[name]] for name, choices in FACTORS.items()}
    algorithm, geometric = option["algorithm"], option["level"] == "geometric"
    tis = {"level": option["level"], "mode": option["mode"], "upper_bound": 1.1 if geometric else 1.3}
    tis["batch_normalize"] = value["batch_normalize"]
    tis |= {"bound_growth": 0.5} if option["level"] == "prefix" else {}
    terms = value["terms"]
    if "rollout_kl_coef" in terms and (value["rejection"] or option["mode"] == "mask"):
        terms = terms | {"rollout_kl_on": "accepted"}
    config = {
        "objective": value["objective"],
        "ppo": {"eps_clip_low": 0.03, "eps_clip_high": 0.04} if value["objective"] == "gspo" else {},
        "use_rollout_log_probs": bool(algorithm & 1),
        "use_tis": bool(algorithm & 2),
        "tis": tis if algorithm > 1 else {},
        "rs": value["rejection"],
        "terms": terms,
        "denominator": value["denominator"],
        "aggregation": value["aggregation"],
        "length_norm": 8.0 if value["aggregation"] == "seq-mean-token-sum" and algorithm % 2 else None,
        "metrics": "full",
        "fused_head": value["fused_head"],
    }
    if value["objective"] == "gspo":  # its own 3e-4 clips all that these rejections leave
        config["ppo"] = {"eps_clip_low": 0.1, "eps_clip_high": 0.1}
    return Run(config, value["microbatches"], value["form"])


RUNS = runs()
SINGLE: list[Run] = [run for _, run in RUNS[3:21:4]]
"""A few of them again in float32."""


def position_of(layout: Layout) -> str:
    return layout.settings.get("position", "rope")


@cache
def reference(position: str) -> list[Outcome]:
    layout = Layout("plain", settings={"position": position}, samples=data(position), runs=tuple(r for _, r in RUNS))
    return launch(run_plainly, [layout], 1)[0][0]


@cache
def outcomes(world: int) -> dict[str, list[list[Outcome]]]:
    """Layout name -> per rank, per run. One launch: all layouts in float64, then all in float32."""
    layouts = [layout for layout in LAYOUTS if layout.world == world]
    double = [replace(x, samples=data(position_of(x)), runs=tuple(r for _, r in RUNS)) for x in layouts]
    single = [
        replace(x, name=f"{x.name} float32", runs=tuple(SINGLE), settings={**x.settings, "dtype": "float32"})
        for x in double
    ]
    every = [*double, *single]
    return {layout.name: ranks for layout, ranks in zip(every, launch(run_layout, every, world), strict=True)}


def assert_gradients(got: Gradients, expected: Gradients, tolerance: float, label: object) -> None:
    """Equal to `tolerance` of each parameter's largest element."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((got[name] - gradient).abs().max()) <= tolerance * scale, (name, label)


def compare(got: list[Outcome], expected: Outcome, tolerance: float, label: str) -> None:
    assert not any(rank.error for rank in got), [rank.error for rank in got]
    assert_gradients(next(rank.gradients for rank in got if rank.gradients), expected.gradients, tolerance, label)
    reporting = [rank.metrics for rank in got if rank.metrics]
    assert reporting
    for metrics in reporting:
        assert metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (name, label)


def compare_reports(got: list[Outcome], metrics: dict[str, float], run: Run, tp: int, label: str) -> None:
    """What loss_func reports, summed over micro-batches and ranks (each of `tp` alike): loss sum and denominator."""
    reports = [report for rank in got for report in rank.reports]
    totals = {name: sum(report[name] for report in reports) / tp for name in ("policy_loss", "denominator")}
    config, of = run.config, {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    units, share = ("tokens", "token") if config["aggregation"] == "token-mean" else ("sequences", "seq")
    denominator = of[units] * (of[f"accepted_{share}_fraction"] if config["denominator"] == "accepted" else 1.0)
    late = config["use_rollout_log_probs"] and config["use_tis"]
    # Algorithm 3's mean weight is known, and divides the gradients, only after the micro-batches.
    factor = of["rollout_is_batch_norm_factor"] if late and config["tis"]["batch_normalize"] else 1.0
    assert totals["denominator"] == pytest.approx(denominator, rel=1e-9), label
    assert totals["policy_loss"] == pytest.approx(of["pg_loss"] * denominator * factor, rel=1e-7, abs=1e-9), label


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same(layout: Layout) -> None:
    ranks = outcomes(layout.world)[layout.name]
    for number, (_, run) in enumerate(RUNS):
        got, expected = [rank[number] for rank in ranks], reference(position_of(layout))[number]
        compare(got, expected, 1e-7, str(run))
        compare_reports(got, expected.metrics, run, layout.tp, str(run))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same_in_single_precision(layout: Layout) -> None:
    """The model in float32: quantiles, whose bins are finer than its rounding, are compared in float64 only."""
    numbers = [number for number, (_, run) in enumerate(RUNS) if run in SINGLE]
    for place, number in enumerate(numbers):
        expected = reference(position_of(layout))[number]
        coarse = {k: v for k, v in expected.metrics.items() if "ratio_p" not in k}
        got = [rank[place] for rank in outcomes(layout.world)[f"{layout.name} float32"]]
        trimmed = [replace(o, metrics={k: v for k, v in o.metrics.items() if k in coarse}) for o in got]
        compare(trimmed, replace(expected, metrics=coarse), 1e-5, str(RUNS[number]))


def test_the_runs_differ_and_reject_something() -> None:
    """A reference in which nothing is rejected, weighted or clipped would prove nothing."""
    metrics = [outcome.metrics for outcome in reference("rope")]
    accepted = [m["rollout_corr/accepted_token_fraction"] for m in metrics]
    assert sum(0 < share < 1 for share in accepted) >= 20
    assert max(m.get("rollout_corr/rollout_is_weight_after_std", 0) for m in metrics) > 0.1
    norms = [sum(float(g.norm()) for g in outcome.gradients.values()) for outcome in reference("rope")]
    assert min(norms) > 1e-3 and len({round(norm, 9) for norm in norms}) > 30


def test_every_pair_of_settings_occurs() -> None:
    counts = Counter((o["algorithm"], o["level"], o["mode"]) for o, _ in RUNS)
    wanted = set(product((2, 3), ("token", "sequence", "geometric"), ("truncate", "clip", "mask")))
    assert all(counts[core] >= 2 for core in wanted)
    assert set(product((2, 3), ("turn", "prefix"), ("clip", "mask"))) <= counts.keys()
    covered = set().union(*(pairs(option) for option, _ in RUNS))
    values = [[(name, str(i)) for i in range(len(choices))] for name, choices in FACTORS.items()]
    needed = {tuple(sorted((a, b))) for x, y in combinations(values, 2) for a, b in product(x, y)}
    assert needed <= covered, sorted(needed - covered)
