"""What only the server knows, in slime's whole loop with our SGLang plugin in its server: one fault of each kind.

Each run is sound up to the rollout `at`. slime itself sends the weights, over a process group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from mismatch_plugin.data.read import read
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from tests.trainers.run import OUT_OF_TIME
from tests.trainers.slime.loop import dumps, inspect, reverse
from tests.trainers.slime.trainer import SERVER, Job
from tests.trainers.whole import Runs, Sources

HOW: dict[str, Any] = {"transport": "nccl", "dtype": "bfloat16", "config": {"bf16": True}, "cache": True}


class Planted(NamedTuple):
    """at: the first rollout with the fault."""

    job: Job
    at: int
    fault: str


def planted(fault: str, flags: str = "", at: int = 1, rollouts: int = 2, **env: str) -> Planted:
    return Planted(
        reverse(f"--use-tis {flags}", rollouts=rollouts, env={**env, "SLIME_FAULT_AT": str(at)}, **HOW), at, fault
    )


GENERATE = "--custom-generate-function-path slime_faults"
RELAUNCHED = SERVER.replace("--disable-radix-cache", "--dtype bfloat16")
SOUND = "sound"
FAULTS = {
    SOUND: planted("", rollouts=8),
    "no flush": planted("stale_cache", SLIME_FAULT="no_flush"),
    "restarted": planted(
        "weights_not_updated", f"{GENERATE}.restarted_server", SLIME_SERVER=" ".join(RELAUNCHED.split())
    ),
    "other writer": planted("other_weights", f"{GENERATE}.other_writer"),
    "rounded away": planted("update_lost_in_precision", "--lr 5e-7"),
}
JOBS = {name: row.job for name, row in FAULTS.items()}
METRICS = "train/rollout_corr/weight_update_"


@pytest.mark.parametrize("name", [name for name in FAULTS if name != SOUND])
def test_it_is_named_at_the_first_reply(name: str, trained: Runs, sources: Sources) -> None:
    run, (_, at, fault) = trained(name), FAULTS[name]
    # A server that started again is not in slime's process group, and its next update ends the run.
    assert run.finished.status != OUT_OF_TIME and (run.finished.status == 0) is (name != "restarted"), run.text[-3000:]
    for rollout in range(at):
        status, found = inspect(sources, dumps(run, [rollout], "rollout"), dumps(run, [rollout]))
        assert (status, found["verdict"]) == (0, "normal"), (rollout, found["findings"])
    sampled, both = dumps(run, [at], "rollout"), dumps(run, [at])
    status, found = inspect(sources, sampled, both)
    assert found["findings"][0]["fault"] == fault, found["findings"]
    assert (status, found["findings"][0]["confidence"]) == (0 if name == "rounded away" else 1, "certain")
    replies, samples = 1, read(sampled, both).samples
    while fault not in [item.fault for item in check_batch(make_batch(samples[:replies])).findings]:
        replies += 1
    print(f"{name}: {fault} after {replies} of {len(samples)} replies: {found['findings'][0]['evidence']}")
    assert replies == 1


def test_a_thousand_sound_replies_give_no_finding(trained: Runs, sources: Sources) -> None:
    run = trained(SOUND)
    assert run.finished.status == 0, run.text[-3000:]
    for rollout in range(8):
        status, found = inspect(sources, dumps(run, [rollout], "rollout"), dumps(run, [rollout]))
        assert (status, found["verdict"]) == (0, "normal"), (rollout, found["findings"])
        assert not [item for item in found["findings"] if item["severity"] == "fault"]


def test_what_an_update_delivers_is_a_metric(trained: Runs) -> None:
    """Steps of 1e-3 arrive in bfloat16, those of 5e-7 are rounded away."""
    for name, arrives in ((SOUND, True), ("rounded away", False)):
        run = trained(name)
        of = {what: [*run.tracked[METRICS + what].values()] for what in ("changed", "cosine", "norm_ratio")}
        print(name, of)
        assert all((share > 0.5) is arrives for share in of["changed"])
        assert all((cosine > 0.9) is arrives for cosine in of["cosine"])
