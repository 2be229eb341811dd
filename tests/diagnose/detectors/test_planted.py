"""Faults planted in what a real SGLang server returned, and in two model families that no detector was fitted on, are
found under their names; batches without one have none.

A part of both tables by default; with MISMATCH_FULL=1 the whole tables of docs/inspect.md and 400 clean batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pytest

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.report.table import Table
from tests.diagnose.door import CLEAN, faults, findings, inspect, run, saved
from tests.fixtures.families import FAMILIES, Family
from tests.fixtures.sglang_check.plants import CASES, EOS
from tests.fixtures.sglang_check.policies import (
    behaviour_of,
    of_family,
    recorded,
    sample_locally,
    score,
    training,
)
from tests.full import FULL

PAGE = Path(__file__).parents[3] / "docs" / "inspect.md"
FAULTS = run(PAGE, "--accept", "none").output.partition("choose from ")[2].rstrip(".\n").replace("\n", " ").split(", ")
Size = Literal["mild", "strong"]
SIZES: tuple[Size, ...] = get_args(Size)


def planted(samples: Sequence[Sample], number: int, size: Size, model: str = "") -> list[dict[str, Any]]:
    """What is found where a case is planted in these samples. model: whose checkpoints are given."""
    case, strong = CASES[number], size == "strong"
    changed = (case.strong if strong else case.mild)([*samples])
    start, now = (form.format(case.sizes[strong]) for form in (case.start, case.now))
    if now:
        return findings(
            changed, "--eos-id", EOS, "--checkpoint", saved(now, model), "--reference-checkpoint", saved(start, model)
        )
    if start:
        first = score(start, changed)
        changed = [one.with_fields(ref_log_probs=s.train_log_probs) for one, s in zip(changed, first, strict=True)]
    return findings(changed, "--eos-id", EOS)


def names(found: list[dict[str, Any]], number: int) -> list[str]:
    """The faults; of a case that is a note, with the notes."""
    return sorted({item["fault"] for item in found if CASES[number].note or item["severity"] == "fault"})


class Base(NamedTuple):
    """Which recorded responses, and which form of the model trains on them."""

    records: str
    trainer: str


QUIET = Base(CLEAN, "float32")
BASES = (QUIET, Base("float32_temperature_0.7", "int8"), Base("float32_temperature_1.3", "drift-0.005-2"))
"""Engine noise; quantised weights; weights a little on."""
RECORDED: list[tuple[int, Size, Base]] = [
    *((number, "mild", QUIET) for number in range(len(CASES))),
    *((number, "strong", base) for number in range(len(CASES)) for base in BASES),
]
SERVED = {
    "float32_top_p_0.8": "truncation",
    "float32_top_k_5": "truncation",
    "float32_sampling_mask": "truncation",
    "float32_repetition_penalty_1.1": "penalty",
    "float32_frequency_penalty_0.5": "penalty",
    "float32_updated_in_flight": "mixed_versions",
    "raw_temperature_0.7": "temperature",
    "raw_temperature_1.3": "temperature",
}
"""What the server was told to do, or how it was started, and what that is to a trainer who does not follow."""
TRAINERS = (
    *("float32", "bfloat16", "int8", "drift-0.003-1", "drift-0.01-2", "drift-0.02-3"),
    *("moe-0.001-1", "moe-0.005-2", "moe-0.02-3"),
)
"""Engine noise, quantised weights, stale weights, and routers that flip for .1 to 2 % of the tokens."""


def _drawn(run: tuple[int, Size, Base]) -> bool:
    number, size, base = run
    return FULL or size == "mild" or base == BASES[number % len(BASES)]


@pytest.mark.parametrize("run", [*filter(_drawn, RECORDED)], ids=lambda run: f"{CASES[run[0]].fault}-{run[0]}-{run[1]}")
def test_a_fault_in_recorded_responses_is_named_and_no_other(run: tuple[int, Size, Base]) -> None:
    number, size, base = run
    found = planted(training(base.trainer, base.records), number, size)
    assert names(found, number) == [CASES[number].fault]
    assert not (CASES[number].note and faults(found))


@pytest.mark.parametrize(("name", "trainer"), [*product(SERVED, TRAINERS if FULL else ("float32", "drift-0.02-3"))])
def test_what_the_server_did_is_found(name: str, trainer: str) -> None:
    assert {*faults(findings(training(trainer, name)))} == {SERVED[name]}


def _untold(records: Sequence[Sample], **fields: Any) -> list[Sample]:
    """The same without a word of filters."""
    off = {"top_p": 1.0, "top_k": -1}
    return [one.with_fields(sampling=one.sampling.model_copy(update=off), **fields) for one in records]


def test_filters_that_no_record_tells_show_in_entropies_or_in_renormalised_log_probs() -> None:
    for name in ("float32_top_p_0.8", "float32_top_k_5"):
        secret = _untold(training("float32", name))
        assert faults(findings(one.with_fields(entropy=None) for one in secret)) == []  # log-probs alone show nothing
        assert faults(findings(secret)) == ["truncation"]  # by the trainer's entropies
        assert faults(findings(secret, "--checkpoint", saved("float32"))) == ["truncation"]  # by the checkpoint's
        for trainer in ("float32", "drift-0.003-1"):
            records = training(trainer, name)
            pairs = zip(_untold(records), records, strict=True)
            (finding,) = findings([one.with_fields(rollout_log_probs=behaviour_of(told)) for one, told in pairs])
            assert (finding["fault"], finding["side"]) == ("truncation", "rollout")
    drawn = sample_locally("float32", seed=7, count=64, temperature=1.0, top_p=0.95)
    mild = [one.with_fields(rollout_log_probs=one.behaviour_log_probs) for one in drawn]
    assert faults(findings(score("float32", _untold(mild, behaviour_log_probs=None)))) == ["truncation"]


def test_a_sampling_mask_that_the_trainer_replays_is_no_fault_and_one_that_it_alone_has_is() -> None:
    records = [one.with_fields(train_log_probs=behaviour_of(one)) for one in recorded("float32_sampling_mask")]
    found = inspect(records, "--brief")
    assert found["findings"] == [] and found["mismatch"]["abs_p50"] > 0.1
    assert found["fixed"]["abs_max"] < 1e-4  # compared with the behaviour log-probs
    (finding,) = findings(one.with_fields(behaviour_log_probs=None, kept_ids=None) for one in records)
    assert (finding["fault"], finding["side"]) == ("truncation", "training")


SEEDS = (0, 1, 2)
TEMPERATURES = (1.0, 0.7, 1.3)
FORMS = ("float32", "bfloat16", "int8", "drift-0.003-1", "adam-0.0001", "adam-0.0003")
"""Training sides without a fault: engine noise, quantised weights, and weights a step on."""


class Run(NamedTuple):
    """One fault in one batch. case: its number in CASES."""

    case: int
    size: Size
    family: Family
    seed: int


HELD_OUT = [Run(*one) for one in product(range(len(CASES)), SIZES, FAMILIES, SEEDS)]
MISSED: dict[Run, list[str]] = {
    Run(50, "mild", "qwen3", 1): ["unexplained"],  # int8 weights: more noise than published pairs have
    Run(50, "mild", "gpt_neox", 0): [],  # and less than the bar of what is small
    Run(50, "mild", "gpt_neox", 2): [],
    Run(53, "mild", "gpt_neox", 0): [],  # weights so near that the gap is one that quantised pairs have
    Run(53, "mild", "gpt_neox", 2): [],
}
"""What these are called instead."""


@lru_cache(8)
def of_model(family: Family, seed: int, form: str = "float32", count: int = 64, length: int = 48) -> tuple[Sample, ...]:
    """Of a model of its own each seed, sampled in bfloat16 and scored in this form."""
    with of_family(family, 40 + seed):
        sampled = sample_locally("float32", 500 + seed, count, TEMPERATURES[seed % 3], tokens=length)
        return tuple(score(form, [one.with_fields(weight_versions=()) for one in sampled]))


def _one_each(run: Run) -> bool:
    """Of every third case one family and seed, in turn."""
    return run.case % 3 == 0 and run[1:] == (SIZES[run.case % 2], FAMILIES[run.case // 2 % 2], SEEDS[0])


@pytest.mark.parametrize(
    "run", HELD_OUT if FULL else [*filter(_one_each, HELD_OUT)], ids=lambda run: "-".join(map(str, run))
)
def test_a_fault_in_other_families_is_named_and_no_other(run: Run) -> None:
    with of_family(run.family, 40 + run.seed):
        found = planted(of_model(run.family, run.seed), run.case, run.size, f"{run.family}-{run.seed}")
    assert names(found, run.case) == MISSED.get(run, [CASES[run.case].fault])


def clean_of_families(seed: int) -> tuple[list[Sample], list[str]]:
    """(8 to 64 responses of up to 16 to 96 tokens, options); the weights are up to date, or one step old."""
    generator = np.random.default_rng([seed, 3])
    form, family = FORMS[seed % len(FORMS)], FAMILIES[seed // len(FORMS) % len(FAMILIES)]
    count, length = int(generator.integers(8, 65)), int(generator.choice([16, 32, 96]))
    behind = form.startswith(("drift", "adam"))
    samples = []
    for at, one in enumerate(of_model(family, 100 + seed, form, count, length)):
        whole = (WeightSpan(version="1", start=0, end=len(one)),)
        server = f"http://{'ab'[at % 2]}:1" if seed % 3 else None
        samples.append(one.with_fields(weight_versions=whole, trainer_version=str(1 + behind), server=server))
    return samples, ["--eos-id", str(EOS), *(["--engine", "int8"] if form == "int8" else [])]


@pytest.mark.parametrize("seed", range(200 if FULL else 20))
def test_a_clean_batch_of_other_families_has_no_fault(seed: int) -> None:
    samples, options = clean_of_families(seed)
    assert faults(findings(samples, *options)) == []


@cache
def _pool(origin: str, temperature: float, trainer: str) -> list[Sample]:
    """Responses of one temperature and version: both servers' or from an engine here, and their training side."""
    if origin == "server":
        files = [f"{dtype}_temperature_{temperature}" for dtype in ("float32", "bfloat16")]
        records = [record for name in files for record in recorded(name)]
    else:
        records = sample_locally("float32", 100 + len(origin), 96, temperature)
    whole = [(WeightSpan(version="1", start=0, end=len(record)),) for record in records]
    pool = [one.with_fields(weight_versions=span, sample_id=None) for one, span in zip(records, whole, strict=True)]
    return score(trainer, pool)


def clean_batch(seed: int) -> tuple[list[Sample], list[str]]:
    """(8 to 64 recorded responses of one temperature, options)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    temperature, trainer = (0.7, 1.0, 1.3)[seed // len(TRAINERS) % 3], TRAINERS[seed % len(TRAINERS)]
    size = int(generator.integers(8, 65))
    pool = _pool(("server", "here", "here again")[seed // (3 * len(TRAINERS)) % 3], temperature, trainer)
    chosen = generator.permutation(len(pool))[:size]
    stale = trainer in TRAINERS[4:6]  # so far that labels must tell it
    version = str(2 if stale else 1 + seed % 4 // 2)  # the weights are up to date, or one step old
    ranks = [{"server": f"http://{'ab'[seed % 2]}:1", "dp_rank": int(generator.integers(4))} for _ in chosen]
    samples = [
        pool[at].with_fields(trainer_version=version, **(rank if seed % 3 else {}))
        for at, rank in zip(chosen, ranks, strict=True)
    ]
    if seed % 5 == 0:
        first = score("drift-0.08-9", samples)
        samples = [one.with_fields(ref_log_probs=s.train_log_probs) for one, s in zip(samples, first, strict=True)]
    return samples, ["--eos-id", str(EOS), *(["--engine", "int8"] if trainer == "int8" else [])]


NOTED = {"quantised": 22, "moe_routing": 14}
"""In how many of the 200 clean recorded batches these are noted."""


def test_clean_recorded_batches_have_no_fault() -> None:
    noted = dict.fromkeys(NOTED, 0)
    for seed in range(200 if FULL else 10):
        samples, options = clean_batch(seed)
        found = findings(samples, *options)
        assert faults(found) == [], seed
        for name in {item["fault"] for item in found}:
            noted[name] += 1
    assert not FULL or noted == NOTED


def recorded_table() -> Table:
    rows = []
    for fault in FAULTS:
        runs = [run for run in RECORDED if CASES[run[0]].fault == fault]
        counts = [sum(size == run[1] for run in runs) for size in SIZES] + [[*SERVED.values()].count(fault)]
        cells = [fault, *(f"{count} of {count}" if count else "–" for count in counts)]
        alarms = f"0 of 200 (noted in {NOTED[fault]})" if fault in NOTED else "0 of 200"
        rows.append((*cells, f"0 of {len(RECORDED) - len(runs)}", alarms))
    headers = ("fault", "found, mild", "found, strong", "found, by the server", "under other faults")
    headers += ("in clean batches",)
    return Table("hits and false alarms", headers, tuple(rows))


def held_out_table() -> Table:
    found = {run: MISSED.get(run, [CASES[run.case].fault]) for run in HELD_OUT}
    rows = []
    for fault in dict.fromkeys(case.fault for case in CASES):
        mine = [run for run in HELD_OUT if CASES[run.case].fault == fault]
        others = [run for run in HELD_OUT if run not in mine]
        groups = [*([run for run in mine if run.size == size] for size in SIZES), mine, others]
        rows.append((fault, *(f"{sum(fault in found[run] for run in group)} of {len(group)}" for group in groups)))
    headers = ("fault", "found, mild", "found, strong", "named first", "under other faults")
    return Table("faults planted in other model families", headers, tuple(rows))


def test_the_page_has_the_tables_of_these_runs_and_every_fault_is_planted_somewhere() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (recorded_table(), held_out_table()):
        assert table.to_markdown() in page, f"the table of docs/inspect.md is another:\n{table.to_markdown()}"
    described = page.partition("## What is found")[2].partition("\nA k3 above")[0]
    assert [line.split("`")[1] for line in described.splitlines() if line.startswith("| `")] == FAULTS
    # Told by servers, or of groups and experts: test_told.py, test_weights.py.
    elsewhere = {"server_differs", "label_reused", "other_weights", "replay_off"}
    elsewhere |= {"stale_cache", "update_lost_in_precision", "cloned_group"}
    assert {case.fault for case in CASES} | {*SERVED.values()} | elsewhere == {*FAULTS}
