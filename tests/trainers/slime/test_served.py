"""What only the server knows, in slime's whole loop with our SGLang plugin in its server: one fault of each kind.

slime itself sends the weights, over a process group. The fault happens before the second rollout; the first is sound.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from mismatch_plugin.data.read import read
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from tests.trainers.run import OUT_OF_TIME
from tests.trainers.slime.loop import dumps, inspect, reverse
from tests.trainers.slime.trainer import SERVER, Trained
from tests.trainers.whole import Runs, Sources

SOUND = "sound"
HOW: dict[str, Any] = {"transport": "nccl", "dtype": "bfloat16", "config": {"bf16": True}, "cache": True}
GENERATE = "--custom-generate-function-path slime_faults"
RELAUNCHED = " ".join(SERVER.replace("--disable-radix-cache", "--dtype bfloat16").split())


class Planted(NamedTuple):
    """status: the exit status of `inspect`; lost precision is a note."""

    fault: str
    confidence: str
    flags: str = ""
    env: tuple[tuple[str, str], ...] = ()
    status: int = 1


FAULTS = {
    "no flush": Planted("stale_cache", "certain", env=(("SLIME_FAULT", "no_flush"),)),
    "restarted": Planted(
        "weights_not_updated", "likely", f"{GENERATE}.restarted_server", (("SLIME_SERVER", RELAUNCHED),)
    ),
    "other writer": Planted("other_weights", "certain", f"{GENERATE}.other_writer"),
    "rounded away": Planted("update_lost_in_precision", "likely", "--lr 5e-7", status=0),
}
JOBS = {
    **{name: reverse(f"--use-tis {row.flags}", env=dict(row.env), **HOW) for name, row in FAULTS.items()},
    SOUND: reverse("--use-tis", rollouts=8, **HOW),
}


def sides(run: Trained, rollout: int) -> tuple[Any, Any]:
    """slime's dumps of what was sampled, and of what it trained on."""
    return dumps(run, [rollout], "rollout"), dumps(run, [rollout])


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_named_at_the_first_reply(name: str, trained: Runs, sources: Sources) -> None:
    run, planted = trained(name), FAULTS[name]
    # A server that started again is not in slime's process group, and its next update ends the run.
    assert run.finished.status != OUT_OF_TIME and (run.finished.status == 0) is (name != "restarted"), run.text[-3000:]
    status, found = inspect(sources, *sides(run, 0))
    assert (status, found["verdict"]) == (0, "normal"), found["findings"]
    status, found = inspect(sources, *sides(run, 1))
    first = found["findings"][0]
    assert (first["fault"], first["confidence"], status) == planted[:2] + planted[-1:], found["findings"]
    samples, replies = read(*sides(run, 1)).samples, 1
    while planted.fault not in [item.fault for item in check_batch(make_batch(samples[:replies]))[0]]:
        replies += 1
    print(f"{name}: {planted.fault} after {replies} of {len(samples)} replies: {first['evidence']}")
    assert replies == 1


def test_a_thousand_sound_replies_give_no_finding(trained: Runs, sources: Sources) -> None:
    run = trained(SOUND)
    assert run.finished.status == 0, run.text[-3000:]
    for rollout in range(8):
        status, found = inspect(sources, *sides(run, rollout))
        assert (status, found["verdict"]) == (0, "normal"), (rollout, found["findings"])
    status, found = inspect(sources, run.folder / "report")
    assert (status, found["verdict"]) == (0, "normal"), found
    status, found = inspect(sources, sides(run, 1)[0])
    assert (status, found["verdict"]) == (3, "undecided"), found  # one side alone: no fault, and nothing to compare


def test_what_an_update_delivers_is_a_metric(trained: Runs) -> None:
    """Steps of 1e-3 arrive in bfloat16, those of 5e-7 are rounded away."""
    for name, arrives in (("no flush", True), ("rounded away", False)):
        tracked = trained(name).tracked
        of = {what: tracked[f"train/rollout_corr/weight_update_{what}"].values() for what in ("changed", "cosine")}
        print(name, of)
        assert all((share > 0.5) is arrives for share in of["changed"])
        assert all((cosine > 0.9) is arrives for cosine in of["cosine"])
