"""Faults planted in what a real SGLang server returned are found under their names; ordinary mismatch is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.layers import Mix
from mismatch_plugin.diagnose.detectors.run import FAULTS, check_batch
from mismatch_plugin.diagnose.findings import CheckResult
from mismatch_plugin.report.table import Table
from tests.fixtures.sglang_check.plants import CASES, EOS
from tests.fixtures.sglang_check.policies import (
    behaviour_of,
    logits_of,
    recorded,
    sample_locally,
    score,
    training,
)
from tests.fixtures.sglang_check.policies import (
    checkpoint as checkpoint_of,
)


class Base(NamedTuple):
    """Which recorded responses, and which form of the model trains on them."""

    records: str
    trainer: str


QUIET = Base("bfloat16_temperature_1.0", "float32")
BASES = (QUIET, Base("float32_temperature_0.7", "int8"), Base("float32_temperature_1.3", "drift-0.005-2"))
"""Engine noise; quantised weights; weights a little on."""

Run = tuple[int, str, Base]
RUNS: list[Run] = [
    *((index, "mild", QUIET) for index in range(len(CASES))),
    *((index, "strong", base) for index in range(len(CASES)) for base in BASES),
]
RUN_IDS = [f"{CASES[index].fault}-{index}-{strength}-{base.trainer}" for index, strength, base in RUNS]

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
    "float32", "bfloat16", "int8", "drift-0.003-1", "drift-0.01-2", "drift-0.02-3",
    "moe-0.001-1", "moe-0.005-2", "moe-0.02-3",
)  # fmt: skip
"""Engine noise, quantised weights, stale weights, and routers that flip for .1 to 2 % of the tokens."""
CLEAN_BATCHES = 200


def _check(
    samples: Sequence[Sample],
    checkpoint: str = "",
    start: str = "",
    now: str = "",
    quantised: bool = False,
) -> CheckResult:
    """checkpoint: the form of the model whose whole distributions are looked at, and whose log-probs `samples` are.
    start, now: forms of the weights that the run began with, and of the present ones, without whole distributions.
    quantised: the user says that a side is."""
    if start:
        first = score(start, samples)
        samples = [one.with_fields(ref_log_probs=s.train_log_probs) for one, s in zip(samples, first, strict=True)]
    batch = replace(make_batch(samples, eos_ids=[EOS]), known_quantised=quantised)
    if now:
        batch = replace(batch, between=Mix(checkpoint_of(now), checkpoint_of(start)), from_checkpoint=True)
    if checkpoint:
        batch = replace(batch, logits=lambda s: logits_of(checkpoint, [s])[0], from_checkpoint=True)
    return check_batch(batch)


def _names(result: CheckResult, severity: str = "fault") -> list[str]:
    return sorted({item.fault for item in result.findings if item.severity == severity})


class Found(NamedTuple):
    faults: list[str]
    notes: list[str]


def _found(result: CheckResult) -> Found:
    return Found(_names(result), _names(result, "note"))


@pytest.fixture(scope="module")
def planted() -> dict[Run, Found]:
    found = {}
    for index, strength, base in RUNS:
        case, strong = CASES[index], strength == "strong"
        plant = case.strong if strong else case.mild
        samples = plant(list(training(base.trainer, base.records)))
        start, now = (form.format(case.sizes[strong]) for form in (case.start, case.now))
        found[index, strength, base] = _found(_check(samples, start=start, now=now))
    return found


@pytest.fixture(scope="module")
def clean() -> list[Found]:
    """Faults found in 200 batches that have none: 8 to 64 responses of one temperature."""
    found = []
    for seed in range(CLEAN_BATCHES):
        generator = np.random.Generator(np.random.PCG64(seed))
        temperature = (0.7, 1.0, 1.3)[seed // len(TRAINERS) % 3]
        trainer = TRAINERS[seed % len(TRAINERS)]
        size = int(generator.integers(8, 65))
        origin = ("server", "here", "here again")[seed // (3 * len(TRAINERS)) % 3]
        pool = _pool(origin, temperature, trainer)
        chosen = generator.permutation(len(pool))[:size]
        stale = trainer in TRAINERS[4:6]  # so far that labels must tell it
        version = str(2 if stale else 1 + seed % 4 // 2)  # the weights are up to date, or one step old
        ranks = [{"server": f"http://{'ab'[seed % 2]}:1", "dp_rank": int(generator.integers(4))} for _ in chosen]
        named = [
            pool[at].with_fields(trainer_version=version, **(rank if seed % 3 else {}))
            for at, rank in zip(chosen, ranks, strict=True)
        ]
        start = "drift-0.08-9" if seed % 5 == 0 else ""
        found.append(_found(_check(named, start=start, quantised=trainer == "int8")))
    return found


@cache
def _pool(origin: str, temperature: float, trainer: str) -> list[Sample]:
    """Responses of one temperature and version: both servers' or from an engine here, and their training side."""
    if origin == "server":
        names = [f"{dtype}_temperature_{temperature}" for dtype in ("float32", "bfloat16")]
        records = [record for name in names for record in recorded(name)]
    else:
        records = sample_locally("float32", 100 + len(origin), 96, temperature)
    pool = []
    for record in records:
        span = WeightSpan(version="1", start=0, end=len(record))
        pool.append(record.with_fields(weight_versions=(span,), sample_id=None))
    return score(trainer, pool)


@pytest.mark.parametrize("run", RUNS, ids=RUN_IDS)
def test_a_planted_fault_is_found_and_nothing_else(run: Run, planted: dict[Run, Found]):
    case = CASES[run[0]]
    found = planted[run].notes if case.note else planted[run].faults
    assert found == [case.fault]
    assert not (case.note and planted[run].faults)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", SERVED)
def test_what_the_server_did_is_found(name: str, trainer: str):
    assert _names(_check(training(trainer, name))) == [SERVED[name]]


@pytest.mark.parametrize("name", SERVED)
def test_whole_distributions_tell_the_same(name: str):
    result = _check(training("int8", name), "int8")
    assert _names(result) == [SERVED[name]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("trainer", ["float32", "drift-0.003-1"])
def test_whole_distributions_are_silent_on_clean_records(temperature: float, trainer: str):
    name = f"bfloat16_temperature_{temperature}"
    assert _names(_check(training(trainer, name), trainer)) == []


@pytest.mark.parametrize(("name", "cut"), [("float32_top_p_0.8", "top_p=0.8"), ("float32_top_k_5", "top_k=5")])
def test_a_filter_that_no_record_tells_shows_in_where_tokens_fall(name: str, cut: str):
    secret = [
        record.with_fields(sampling=record.sampling.model_copy(update={"top_p": 1.0, "top_k": -1}))
        for record in training("float32", name)
    ]
    assert _names(_check([one.with_fields(entropy=None) for one in secret])) == []  # nothing to see in log-probs alone
    assert _names(_check(secret)) == ["truncation"]  # by the trainer's entropies
    result = _check(secret, "float32")
    assert _names(result) == ["truncation"]
    assert cut in result.findings[0].evidence and "0 of" in result.findings[0].evidence


@pytest.mark.parametrize("trainer", TRAINERS[:4])
@pytest.mark.parametrize("name", ["float32_top_p_0.8", "float32_top_k_5"])
def test_renormalised_log_probs_are_found(name: str, trainer: str):
    records = [
        record.with_fields(
            rollout_log_probs=behaviour_of(record),
            sampling=record.sampling.model_copy(update={"top_p": 1.0, "top_k": -1}),
        )
        for record in training(trainer, name)
    ]
    result = _check(records)
    assert _names(result) == ["truncation"]
    assert result.findings[0].side == "rollout"


def test_a_mild_filter_renormalised_is_found():
    drawn = sample_locally("float32", seed=7, count=64, temperature=1.0, top_p=0.95)
    records = [
        record.with_fields(
            rollout_log_probs=record.behaviour_log_probs,
            behaviour_log_probs=None,
            kept_ids=None,
            sampling=record.sampling.model_copy(update={"top_p": 1.0}),
        )
        for record in drawn
    ]
    assert _names(_check(score("float32", records))) == ["truncation"]


def test_a_replayed_sampling_mask_is_no_fault():
    records = recorded("float32_sampling_mask")
    result = _check([record.with_fields(train_log_probs=behaviour_of(record)) for record in records])
    assert _names(result) == []
    assert result.mismatch is not None and result.mismatch.abs_p50 > 0.1
    assert result.fixed is not None and result.fixed.abs_max < 1e-4  # compared with the behaviour log-probs


def test_a_trainer_that_alone_renormalises_is_found():
    records = [
        record.with_fields(behaviour_log_probs=None, kept_ids=None) for record in recorded("float32_sampling_mask")
    ]
    result = _check([record.with_fields(train_log_probs=behaviour_of(record)) for record in records])
    assert _names(result) == ["truncation"]
    assert result.findings[0].side == "training"


@pytest.mark.parametrize("seed", range(CLEAN_BATCHES))
def test_ordinary_mismatch_is_no_fault(seed: int, clean: list[Found]):
    assert clean[seed].faults == []


def test_table_of_hits_and_false_alarms(
    planted: dict[Run, Found], clean: list[Found], capsys: pytest.CaptureFixture[str]
):
    """Printed whatever happens; the tests above judge each cell."""
    alarms = Counter(name for found in clean for name in found.faults)
    noted = Counter(name for found in clean for name in found.notes)
    named = {run: [*found.faults, *found.notes] for run, found in planted.items()}
    rows = []
    for fault in FAULTS:
        runs = [run for run in RUNS if CASES[run[0]].fault == fault]
        served = [name for name, expected in SERVED.items() if expected == fault]
        cells = [fault]
        for strength in ("mild", "strong"):
            of = [run for run in runs if run[1] == strength]
            cells.append(f"{sum(fault in named[run] for run in of)} of {len(of)}" if of else "–")
        hits = [fault in _names(_check(training("float32", name))) for name in served]
        cells.append(f"{sum(hits)} of {len(hits)}" if hits else "–")
        wrong = sum(fault in planted[run].faults for run in RUNS if CASES[run[0]].fault != fault)
        cells += [f"{wrong} of {len(RUNS) - len(runs)}", f"{alarms[fault]} of {CLEAN_BATCHES}"]
        cells[-1] += f" (noted in {noted[fault]})" if noted[fault] else ""
        rows.append(tuple(cells))
    headers = (
        "fault",
        "found, mild",
        "found, strong",
        "found, by the server",
        "under other faults",
        "in clean batches",
    )
    table = Table("hits and false alarms", headers, tuple(rows)).to_markdown()
    with capsys.disabled():
        print("\n" + table)
    page = Path(__file__).parents[3] / "docs" / "inspect.md"
    assert table in page.read_text(encoding="utf-8"), "the table of docs/inspect.md is another: copy the one above"
    # Told by servers, or of groups: test_servers.py, test_served.py, test_sampler.py.
    elsewhere = {"server_differs", "label_reused", "other_weights"}
    elsewhere |= {"stale_cache", "update_lost_in_precision", "cloned_group", "replay_off"}
    assert {case.fault for case in CASES} | set(SERVED.values()) | elsewhere == set(FAULTS)
    assert sum(alarms.values()) == 0
