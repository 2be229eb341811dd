"""The loss hook in megatron-core's own schedules: every parallel layout gives the gradients and metrics of one process.

The reference has no hook: each sample through the model alone, `log_softmax`, one `policy_loss` on the batch, autograd.
MISMATCH_FULL=1 runs every row in every layout; else a few layouts, each with its share of the rows.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.report.log import read_steps
from tests.data.dumps import spans_of
from tests.distributed.hook_worker import (
    VOCAB,
    Layout,
    Outcome,
    Run,
    initial_log_probs,
    run_layout,
    run_plainly,
)
from tests.distributed.launch import launch
from tests.full import FULL

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

MEAN = {"calculate_per_token_loss": False}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
NO_ROPE = {"position": "none", "cp_layout": "contiguous"}
INTERLEAVED = {"layers": 4, "virtual_stages": 2}
TIED = {"tied_embeddings": True}
SINGLE = {"dtype": "float32"}
LAYOUTS = [
    Layout("one, mean", settings=MEAN),
    Layout("tp2+sp", tp=2, settings=SEQUENCE_PARALLEL),
    Layout("pp2 interleaved, mean", pp=2, settings={**INTERLEAVED, **MEAN}),
    Layout("cp2 zigzag", cp=2),
    Layout("cp2 contiguous, mean", cp=2, settings={**NO_ROPE, **MEAN}),
    Layout("dp2, mean", dp=2, settings=MEAN),
    Layout("tied pp2", pp=2, settings=TIED),
    Layout("experts tp2+sp, float32", tp=2, settings={**SEQUENCE_PARALLEL, **SINGLE, "experts": 4}),
    Layout("cp2 dp2", cp=2, dp=2),
]
PARTS = [Layout("tp2", tp=2), Layout("pp2", pp=2), Layout("cp2", cp=2), Layout("dp2", dp=2)]
if FULL:
    LAYOUTS += [Layout("one"), *PARTS]
    LAYOUTS += [replace(one, name=f"{one.name}, mean", settings=MEAN) for one in PARTS if one.dp == 1]
    LAYOUTS += [
        Layout("experts tp2+sp", tp=2, settings={**SEQUENCE_PARALLEL, "experts": 4}),
        Layout("tp2 pp2", tp=2, pp=2),
        Layout("tp2 cp2", tp=2, cp=2),
        Layout("tp2 dp2", tp=2, dp=2),
        Layout("pp2 cp2", pp=2, cp=2),
    ]


# Data -----------------------------------------------------------------------------------------------------------------


def samples() -> tuple[Sample, ...]:
    """Uneven lengths; one response of one token, one without a trained token, prompts longer than responses. Every
    other sample was drawn from what filters kept."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB - 1, (count,), generator=generator).tolist()

    made = []
    for i, (prompt, response) in enumerate([(3, 9), (5, 14), (2, 1), (7, 6), (4, 11), (1, 5), (16, 3), (2, 8)]):
        mask = (torch.rand(response, generator=generator) < 0.8).int().tolist()
        mask = [1] if response == 1 else [0] * response if i == 5 else mask
        response_ids = ids(response)
        kept = [[k for k in range(VOCAB) if k == token or (k + at) % 3] for at, token in enumerate(response_ids)]
        made.append(
            Sample(
                advantages=float(torch.randn((), generator=generator)),
                weight_versions=spans_of(torch.randint(3, 6, (response,), generator=generator).tolist()),
                prompt_ids=ids(prompt),
                response_ids=response_ids,
                loss_mask=mask,
                sample_id=f"s{i}",
                kept_ids=kept if i % 2 else [[]] * response,
            )
        )
    return tuple(made)


Model = tuple[tuple[str, Any], ...]


def model_of(layout: Layout) -> Model:
    """The settings that change the model itself."""
    names = ("layers", "position", "tied_embeddings", "experts")
    return tuple((name, layout.settings[name]) for name in names if name in layout.settings)


@cache
def data(model: Model = ()) -> tuple[Sample, ...]:
    """The samples with log-probs near the model's own, as another engine would return them."""
    layout = Layout("own", samples=samples(), settings=dict(model))
    generator = torch.Generator().manual_seed(1)

    def near(values: torch.Tensor, scale: float) -> torch.Tensor:
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        return (values + scale * noise).clamp(max=-1e-3)

    made = []
    for sample, values in zip(layout.samples, launch(initial_log_probs, [layout], 1)[0][0], strict=True):
        columns = {"rollout_log_probs": 0.3, "train_log_probs": 0.1, "ref_log_probs": 0.2}
        rows: dict[str, Any] = {name: near(values, scale) for name, scale in columns.items()}
        made.append(sample.replace(**rows, behaviour_log_probs=rows["rollout_log_probs"]))
    return tuple(made)


# The rows -------------------------------------------------------------------------------------------------------------

SEQUENCE = {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 1.3}}
BYPASS = {"use_rollout_log_probs": True}
CRITERIA = {"criteria": ["sequence_mean:ratio:0.9:1.11", "token:ratio:0.6:1.7"]}
CONDITIONS = {"criteria": ["token:k2:0.03@away", "sequence_mean:ratio:0.9:1.1@negative"]}
ALL_REJECTED = {"rs": {"criteria": ["token:ratio:50:60"]}, "denominator": "accepted"}
ACCEPTED, ORIGINAL = {"denominator": "accepted"}, {"denominator": "original"}
BY_SEQUENCE, SUMS = {"aggregation": "seq-mean-token-mean"}, {"aggregation": "seq-mean-token-sum"}
ENTROPY, KL = {"terms": {"entropy_coef": 0.05}}, {"terms": {"kl_coef": 0.1, "kl_type": "k3"}}
FUSED = {"fused_head": True}


def weights(level: str = "sequence", mode: str = "truncate", **more: Any) -> dict[str, Any]:
    bound = 1.1 if level == "geometric" else 1.3
    return {"use_tis": True, "tis": {"level": level, "mode": mode, "upper_bound": bound, **more}}


NORMALIZED = weights(batch_normalize=True)
DISTANCE = {"rollout_kl_coef": 0.5, "rollout_kl_type": "k3"}
CURRENT = {"criteria": ["sequence_max:k2:0.5", "sequence_mean:ratio:0.9:1.1@negative"], "policy": "current"}


def rows() -> dict[str, Run]:
    without_old = tuple(sample.replace(train_log_probs=[]) for sample in data())
    gspo = {"objective": "gspo", "ppo": {"eps_clip_low": 0.1, "eps_clip_high": 0.1}}
    maxima = {"criteria": ["sequence_max:binary_kl:0.004", "token:ratio:0.6:1.7"], "veto_threshold": 0.45}
    return {
        "ppo": Run({}, 4),
        "decoupled, rejection": Run({**SEQUENCE, "rs": CRITERIA, **ACCEPTED}, 4, "bshd"),
        "normalized, entropy, fused": Run({**NORMALIZED, **ENTROPY, **FUSED}, 4),
        "bypass, rejection": Run({**BYPASS, "rs": CRITERIA, **ORIGINAL, **KL}, 4),
        "reinforce by sequence": Run({**SEQUENCE, **BYPASS, **SUMS, "length_norm": 8.0}, 4, "bshd"),
        "old absent": Run({"rs": CRITERIA, **ORIGINAL}, 4, samples=without_old),
        "normalized by micro-batch": Run({**weights(batch_normalize=True, batch_normalize_scope="micro_batch")}),
        "temperature": Run({**weights("token"), **BYPASS, **ENTROPY}, 4, temperature=0.7),
        "everything rejected": Run({**SEQUENCE, **ALL_REJECTED}, 4),
        "everything rejected, terms": Run({**SEQUENCE, **ALL_REJECTED, **KL}, 4, "bshd"),
        "token mask, veto, distance": Run(
            {**weights("token", "mask"), "rs": maxima, **ACCEPTED, "terms": {**DISTANCE, "rollout_kl_on": "accepted"}}
        ),
        "geometric clip, gspo, fused": Run({**weights("geometric", "clip"), **gspo, **BY_SEQUENCE, **FUSED}, 4, "bshd"),
        "conditions, cispo": Run({"rs": CONDITIONS, "objective": "cispo", **ACCEPTED, **BY_SEQUENCE, **ENTROPY}, 4),
        "staleness, gmpo, fused": Run(
            {"rs": {"criteria": ["token:k3:0.3"], "max_staleness": 1}, "objective": "gmpo", **SUMS, **FUSED}, 1, "bshd"
        ),
        "turns, gmpo": Run({**weights("turn", "mask"), "objective": "gmpo", **BY_SEQUENCE, **ACCEPTED}, 4),
        "prefix, fused": Run({**weights("prefix", "clip", bound_growth=0.5), "terms": DISTANCE, **FUSED}, 4),
        "reinforce alone": Run({**weights("none"), **BYPASS, "rs": CRITERIA, **ORIGINAL, **BY_SEQUENCE}, 1, "bshd"),
        "dry run": Run({**SEQUENCE, "rs": CRITERIA, "dry_run": True}, 4),
    }


def per_token_rows() -> dict[str, Run]:
    """Those that need `calculate_per_token_loss`."""
    without_old = tuple(sample.replace(train_log_probs=[]) for sample in data())
    return {
        "reinforce normalized": Run({**NORMALIZED, **BYPASS, "rs": CRITERIA, **ORIGINAL}, 4, "bshd"),
        "normalized, old absent": Run(NORMALIZED, 4, samples=without_old),
        "reinforce, rejection": Run({**weights("geometric", "mask"), **BYPASS, "rs": CRITERIA, **ACCEPTED}, 4),
        "bypass by sequence, rejection": Run({**BYPASS, "rs": CRITERIA, **ACCEPTED, **SUMS, "length_norm": 8.0}, 4),
        "current policy": Run({**weights("token"), "rs": CURRENT, **ACCEPTED, **FUSED}, 4),
    }


@cache
def every_row() -> dict[str, Run]:
    made = {**rows(), **per_token_rows()}
    return {name: replace(run, config={"metrics": "full", **run.config}) for name, run in made.items()}


def rows_of(layout: Layout) -> list[str]:
    """Names of what runs in a layout: what it can have, and of that a share, which starts elsewhere in each."""
    names = list(every_row())
    if not layout.settings.get("calculate_per_token_loss", True):
        names = [name for name in names if name not in per_token_rows()]
    if model_of(layout):  # whose old log-probs are others
        names = [name for name in names if not every_row()[name].samples]
    if "interleaved" in layout.name or layout.dp > 1:  # no single micro-batch there
        names = [name for name in names if every_row()[name].microbatches > 1]
    if FULL:
        return names
    turn = LAYOUTS.index(layout)  # stages before the last learn the step's mean weight late
    return [name for at, name in enumerate(names) if (at - turn) % 3 == 0 or (layout.pp > 1 and "normalized" in name)]


@cache
def reference(model: Model) -> dict[str, Outcome]:
    asked = {name for layout in LAYOUTS if model_of(layout) == model for name in rows_of(layout)}
    wanted = [name for name in every_row() if name in asked or not model]
    runs = tuple(every_row()[name] for name in wanted)
    layout = Layout("plain", settings=dict(model), samples=data(model), runs=runs)
    return dict(zip(wanted, launch(run_plainly, [layout], 1)[0][0], strict=True))


@cache
def outcomes(world: int) -> dict[str, list[list[Outcome]]]:
    """Layout → per rank, per row. All layouts of as many processes in one launch."""
    layouts = [
        replace(layout, samples=data(model_of(layout)), runs=tuple(every_row()[name] for name in rows_of(layout)))
        for layout in LAYOUTS
        if layout.world == world
    ]
    return {layout.name: ranks for layout, ranks in zip(layouts, launch(run_layout, layouts, world), strict=True)}


def assert_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Equal to `tolerance` of each parameter's largest element."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((got[name] - gradient).abs().max()) <= tolerance * scale, name


def assert_reports(reports: list[dict[str, float]], metrics: dict[str, float], run: Run, tp: int) -> None:
    """What loss_func reports, summed over micro-batches and ranks (each of `tp` alike): loss sum and denominator."""
    totals = {name: sum(report[name] for report in reports) / tp for name in ("policy_loss", "denominator")}
    of = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    by_token = run.config.get("aggregation", "token-mean") == "token-mean"
    units, share = ("tokens", "token") if by_token else ("sequences", "seq")
    accepted = run.config.get("denominator") != "original" and not run.config.get("dry_run")
    denominator = of[units] * (of[f"accepted_{share}_fraction"] if accepted else 1.0)
    assert totals["denominator"] == pytest.approx(denominator, rel=1e-6)
    assert totals["policy_loss"] == pytest.approx(of["pg_loss"] * denominator, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same(layout: Layout) -> None:
    """float64 to 1e-7, for megatron divides by the token count in float32; float32 to 1e-5, less fine quantiles."""
    ranks, single = outcomes(layout.world)[layout.name], "dtype" in layout.settings
    tolerance = 1e-5 if single else 1e-6 if "experts" in layout.settings else 1e-7  # routers compute in float32
    for number, name in enumerate(rows_of(layout)):
        expected, got = reference(model_of(layout))[name], [rank[number] for rank in ranks]
        assert not any(rank.error for rank in got), (name, [rank.error for rank in got])
        gradients = next(rank.gradients for rank in got if rank.gradients)
        assert_gradients(gradients, expected.gradients, tolerance)
        reporting = [rank.metrics for rank in got if rank.metrics]
        assert reporting
        for metrics in reporting:
            assert metrics.keys() == expected.metrics.keys()
            for key, value in expected.metrics.items():
                if not (single and "ratio_p" in key):
                    assert metrics[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (name, key)
        if name not in ("reinforce normalized", "normalized, old absent"):  # whose mean weight is known after the step
            reports = [report for rank in got for report in rank.reports]
            assert_reports(reports, expected.metrics, every_row()[name], layout.tp)


# What a step may hold besides -----------------------------------------------------------------------------------------


def planted(layout: Layout, folder: Path) -> dict[str, Run]:
    """Steps that fail, or do something else than train, of two micro-batches a rank."""
    chosen = data()
    without_old = tuple(sample.replace(train_log_probs=[]) for sample in chosen)
    values = chosen[3].rollout_log_probs.copy()
    values[chosen[3].loss_mask.nonzero()[0][-1]] = float("nan")
    broken = (*chosen[:3], chosen[3].replace(behaviour_log_probs=values), *chosen[4:])
    config, k3_kl = {**SEQUENCE, "metrics": "full"}, reference(())["ppo"].metrics["rollout_corr/k3_kl"]
    return {
        "broken": Run(config, 2, samples=broken),
        "sound": Run(config, 2),
        "forward": Run(config, 2, forward_only=True),
        "gate": Run({**config, "gate_kl": 0.999 * k3_kl}, 2),
        "open gate": Run({**config, "gate_kl": 1.001 * k3_kl}, 2),
        "accepted": Run({"rs": CRITERIA, **ACCEPTED, **ENTROPY}, samples=without_old),
        "deferred": Run({**NORMALIZED, **ENTROPY}, samples=without_old),
        "report": Run({**SEQUENCE, "report_dir": str(folder / layout.name)}, 2),
        "again": Run({**SEQUENCE, "report_dir": str(folder / layout.name)}, 2),
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Outcome]]]]:
    """(where reports are, layout → for each rank what came of the planted steps)."""
    folder = tmp_path_factory.mktemp("steps")
    names = list(planted(PARTS[0], folder))
    layouts = [replace(one, samples=data(), runs=tuple(planted(one, folder).values())) for one in PARTS]
    found = launch(run_layout, layouts, 2)
    return folder, {
        layout.name: [dict(zip(names, rank, strict=True)) for rank in ranks]
        for layout, ranks in zip(layouts, found, strict=True)
    }


@pytest.mark.parametrize("name", [layout.name for layout in PARTS])
def test_what_stops_a_step_is_raised_on_every_rank(name: str, steps: Any) -> None:
    """Otherwise one rank stops and the others wait for it for ever. The next step is sound."""
    ranks = steps[1][name]
    position = data()[3].loss_mask.nonzero()[0][-1]
    invalid = [rank["broken"].error for rank in ranks]
    assert all(error.startswith("InvalidLogProbError") for error in invalid), invalid
    assert any(f"position {position}" in error and "s3" in error for error in invalid), invalid
    for rank in ranks:
        assert rank["gate"].error.startswith("GateError: k3_kl ") and "--mismatch-gate-kl" in rank["gate"].error
        assert rank["open gate"].error == "" and rank["open gate"].metrics == rank["sound"].metrics
        assert "old_log_probs is missing in a micro-batch" in rank["accepted"].error
        assert "there is also: an entropy term" in rank["deferred"].error


@pytest.mark.parametrize("name", [layout.name for layout in PARTS])
def test_a_forward_pass_alone_gives_the_metrics_and_one_rank_writes_them(name: str, steps: Any) -> None:
    folder, found = steps
    for rank in found[name]:
        assert rank["sound"].error == rank["forward"].error == ""
        assert rank["forward"].metrics == pytest.approx(rank["sound"].metrics, rel=1e-12, nan_ok=True)
    expected = next(rank["report"].metrics for rank in found[name] if rank["report"].metrics)
    written = list(read_steps(folder / name))
    assert [step.pop("step") for step in written] == [1, 2]
    assert written[0] == pytest.approx(expected, rel=1e-12, nan_ok=True)


# MoE and MTP losses ---------------------------------------------------------------------------------------------------

MOE = {"experts": 4, "moe_aux_loss": 0.3, "moe_z_loss": 0.05}
MTP = {"mtp_layers": 1, "mtp_scale": 0.7}
WITH_LOSSES = [
    Layout("mtp", settings=MTP),
    Layout("moe tp2+sp", tp=2, settings={**MOE, **SEQUENCE_PARALLEL}),
    Layout("moe cp2, mean", cp=2, settings={**MOE, **MEAN}),
    Layout("mtp pp2", pp=2, settings=MTP),
    Layout("mtp cp2", cp=2, settings=MTP),
]
if FULL:
    WITH_LOSSES += [replace(one, name=f"moe {one.name}", settings=MOE) for one in PARTS if one.tp == 1]
    WITH_LOSSES += [replace(one, name=f"mtp {one.name}", settings=MTP) for one in PARTS if 2 in (one.tp, one.dp)]
    WITH_LOSSES.append(Layout("moe dp2, mean", dp=2, settings={**MOE, **MEAN}))
BESIDE = (
    Run({**NORMALIZED, "rs": CRITERIA, **ACCEPTED, **ENTROPY}, 4, "bshd"),
    Run({**BYPASS, "rs": CRITERIA, **ORIGINAL, **BY_SEQUENCE}, 4),
    Run({**weights("token", "mask"), **BYPASS, **ORIGINAL, **KL}, 1, "bshd"),
)
ALONE = tuple(replace(run, policy_loss=False) for run in BESIDE)


@cache
def beside_policy_loss(world: int) -> dict[str, list[list[Outcome]]]:
    layouts = [replace(one, samples=data(), runs=BESIDE + ALONE) for one in WITH_LOSSES if one.world == world]
    return {layout.name: ranks for layout, ranks in zip(layouts, launch(run_layout, layouts, world), strict=True)}


@cache
def policy_alone(experts: int) -> list[Outcome]:
    layout = Layout("plain", settings={"experts": experts}, samples=data(), runs=BESIDE)
    return launch(run_plainly, [layout], 1)[0][0]


@pytest.mark.parametrize("layout", WITH_LOSSES, ids=str)
def test_each_loss_keeps_its_weight(layout: Layout) -> None:
    """The policy's gradients of a model without those losses + what megatron's own loop gives for them alone; megatron
    divides them in float32."""
    ranks = beside_policy_loss(layout.world)[layout.name]
    for number in range(len(BESIDE)):
        assert not any(rank[number].error for rank in ranks), [rank[number].error for rank in ranks]
        policy = policy_alone(layout.settings.get("experts", 0))[number].gradients
        alone = ranks[0][len(BESIDE) + number].gradients
        assert max(float(gradient.norm()) for gradient in alone.values()) > 1e-4
        expected = {name: gradient + policy.get(name, 0.0) for name, gradient in alone.items()}
        assert_gradients(ranks[0][number].gradients, expected, 1e-5)


def test_expert_losses_weigh_the_same_in_every_layout() -> None:
    """One micro-batch without padding: what megatron alone makes weaker by the ranks that share a sequence is not."""
    settings, values = {**MOE, "moe_aux_loss": 3.0}, [-2.0 - 0.1 * i for i in range(12)]
    # Of one length that every layout cuts without padding, which the router would count, too.
    same: Any = {"prompt_ids": [1, 2, 3, 4], "rollout_log_probs": values, "train_log_probs": values}
    even = tuple(Sample(response_ids=[*range(i, i + 12)], advantages=i - 2.5, **same) for i in range(4))
    one = Layout("one", settings=settings, samples=even, runs=(Run(SEQUENCE, 1, "bshd"),))
    others = [
        replace(one, name="tp2+sp", tp=2, settings={**settings, **SEQUENCE_PARALLEL}),
        replace(one, name="cp2", cp=2),
        replace(one, name="cp2 mean", cp=2, settings={**settings, **MEAN}),
    ]
    expected = launch(run_layout, [one], 1)[0][0][0].gradients
    for ranks in launch(run_layout, others, 2):
        assert not ranks[0][0].error, ranks[0][0].error
        assert_gradients(ranks[0][0].gradients, expected, 1e-6)
