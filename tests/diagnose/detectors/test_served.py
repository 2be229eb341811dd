"""What servers told of themselves: each fault named first, with its server, from one record on; no false alarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import LastUpdate, Served, ServedWeights
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.findings import CheckResult

N = 8
Span = tuple[str | None, int, int]
Weights = tuple[str | None, str | None, int, int]


def update(number: int, changed: int = 20, matrices: int = 10, of: int = 20) -> LastUpdate:
    """changed: tensors of `of`; matrices: those of 10."""
    return LastUpdate(number=number, changed=changed, tensors=of, changed_matrices=matrices, matrices=10)


def record(
    label: str | list[Span] | None = "5",
    weights: str | list[Weights] | None = "f5",
    since: str | None = "5",
    *,
    server: str = "a:1",
    dp_rank: int | None = None,
    last: LastUpdate | None = None,
    sampling: dict[str, Any] | None = None,
    mask: list[int] | None = None,
    seed: int = 0,
    **told: Any,
) -> Sample:
    """One response; label and weights: of all tokens, or (name, start, end) and (fingerprint, since, start, end)."""
    labels = label if isinstance(label, list) else [] if label is None else [(label, 0, N)]
    spans = weights if isinstance(weights, list) else [(weights, since, 0, N)]
    log_probs = -np.random.default_rng(seed).uniform(0.1, 3.0, N)
    served = Served(
        server=server,
        dp_rank=dp_rank,
        weights=[ServedWeights(fingerprint=f, since=s, start=start, end=end) for f, s, start, end in spans],
        update=last,
        **{"sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "float32", "temperature": 1.0} | told,
    )
    return Sample(
        prompt_ids=np.array([1]),
        response_ids=np.arange(2, 2 + N),
        rollout_log_probs=log_probs,
        weight_versions=tuple(WeightSpan(version=str(name), start=start, end=end) for name, start, end in labels),
        sampling=SamplingParameters(**(sampling or {})),
        served=served,
        server="http://router:8000",
        loss_mask=np.array(mask or [1] * N, dtype=bool),
    )


def checked(*records: Sample, training: list[dict[str, Any]] | None = None) -> CheckResult:
    if training is not None:
        pairs = zip(records, training, strict=True)
        records = tuple(one.with_fields(train_log_probs=one.rollout_log_probs, **told) for one, told in pairs)
    return check_batch(make_batch(records))


def faults(*records: Sample, training: list[dict[str, Any]] | None = None) -> list[str]:
    return [item.fault for item in checked(*records, training=training).findings if item.counts]


CLEAN = (record(last=update(4)), record(server="b:1", last=update(4)))


def test_a_clean_pair_of_servers_has_no_finding():
    result = checked(*CLEAN)
    assert result.findings == () and result.status == "clean"


def test_fifty_clean_updates_on_two_servers_have_no_finding():
    records = [record("0", "f0", "0"), record("0", "f0", "0", server="b:1")]
    for step in range(1, 51):
        last = update(step, changed=20 if step % 3 else 15)  # a norm in bfloat16 often stays the same
        records += [
            record(str(step), f"f{step}", str(step), server=server, last=last, seed=step) for server in ("a:1", "b:1")
        ]
        old, new = str(step - 1), str(step)
        cut = 1 + step % (N - 1)
        records.append(
            record(
                [(old, 0, cut), (new, cut, N)],
                [(f"f{old}", old, 0, cut), (f"f{new}", new, cut, N)],
                server="ab"[step % 2] + ":1",
                last=last,
            )
        )
    found = checked(*records).findings
    assert {item.fault for item in found} <= {"mixed_versions"}  # that is what labels say, and is true
    labels = [item.weight_versions[-1].version for item in records]
    sent = [{"trainer_fingerprint": f"f{label}", "trainer_version": label} for label in labels]
    assert not {*faults(*records, training=sent)} - {"mixed_versions"}


def test_a_label_that_moved_over_the_same_weights():
    stuck = record("6", "f5", "5", last=update(4))
    result = checked(stuck)
    (finding,) = result.findings
    assert finding.fault == "weights_not_updated" and finding.confidence == "certain" and finding.side == "rollout"
    assert finding.first is not None and (finding.first.sample, finding.first.position) == (0, 0)
    assert finding.first.rollout == "version 6" and finding.tokens == N
    for part in ("a:1", "'6'", "'5'", "f5"):
        assert part in finding.evidence
    assert result.status == "faults"
    assert faults(record("6", "f6", "6", last=update(5))) == []


FIVE, SIX = record("5", "f5", None, last=update(4)), record("6", "f5", None, last=update(4))


@pytest.mark.parametrize(
    ("records", "expected", "said"),
    [
        ([FIVE, SIX], ["weights_not_updated", "mixed_versions"], ["under '6' as under '5'"]),
        ([FIVE, record("6", "f6", None, last=update(5))], ["mixed_versions"], []),
        ([FIVE, record("6", "f5", None, server="b:1", last=update(4))], ["mixed_versions"], []),  # another server
        ([record(None, last=update(2, 0, 0))], ["weights_not_updated"], ["Update 2 of a:1 changed none of 20 tensors"]),
        ([record(None, last=update(2))], [], []),
        ([record("6", "f6", "6", last=update(5))], [], []),
        ([record("5", "f5", "5", last=update(4)), record("5", "f6", "5", last=update(5))], ["label_reused"],
         ["a:1", "f5, f6"]),
        ([record("5", "f5", last=update(4)), record("6", "f6", "6", last=update(5))], ["mixed_versions"], []),
        ([CLEAN[0], record(weights="x5", server="b:1", dtype="float16")], ["server_differs"], []),  # not compared
        ([record(last=update(3, 10, 10))], [], []),
        ([record(last=update(3, 9, 4))], ["weights_partly_updated"], ["a:1", "4 of 10 matrices"]),
        ([record(last=update(3, 5, 0))], ["weights_partly_updated"], ["0 of 10 matrices (5 of 20 tensors)"]),
        ([CLEAN[0], record(weights="x5", server="b:1", last=update(4, 2, 1))], ["weights_partly_updated"], ["b:1"]),
        ([record(weights=[("f5", "5", 0, 4), (None, None, 4, N)])], ["weights_partly_updated"], ["half done", "4 tok"]),
        ([record(weights=None, last=update(3))], ["weights_partly_updated"], []),
        ([record("3", "fa", "3", last=update(3)), record("4", "fb", "4", last=update(4)),
          record("5", "fa", "5", last=update(5))], ["mixed_versions"], []),  # weights that came back
        ([record("3", "fa", "3", last=update(3)), record("4", "fb", "4", last=update(4)),
          record("5", "fa", "3", last=update(5))], ["weights_not_updated", "mixed_versions"], []),
    ],
)  # fmt: skip
def test_what_servers_told_of_weights(records: list[Sample], expected: list[str], said: list[str]):
    result = checked(*records)
    assert [item.fault for item in result.findings if item.counts] == expected
    assert all(part in result.findings[0].evidence for part in said)
    assert result.status == ("faults" if expected else "clean")


def test_an_update_of_some_layers_names_them():
    last = update(3, 9, 4)
    named = last.model_copy(update={"unchanged": ("q.weight", "k.weight", "v.weight")})
    (finding,) = checked(record(last=named)).findings
    assert "; not q.weight, k.weight, v.weight and 3 more)" in finding.evidence
    assert "--accept weights_partly_updated" in finding.fix and finding.confidence == "likely"
    late = [record("5", "f5", "5", last=update(10)), record("6", "f6", "6", last=update(11, 11, 6))]  # one each
    assert "weights_partly_updated" in faults(*late)


def test_an_update_sent_a_second_time_under_its_version_is_a_note():
    nothing = update(7, changed=0, matrices=0)
    result = checked(record("5", "f5", "5", last=nothing))
    (noted,) = result.findings
    assert (noted.fault, noted.severity) == ("weights_not_updated", "note") and result.status == "clean"
    assert "Update 7 of a:1 changed none of 20 tensors, under the version that they had, '5'." in noted.evidence
    for label, since in (("6", "5"), ("default", "default"), (None, "5"), ("5", None)):
        assert "weights_not_updated" in faults(record(label, "f5", since, last=nothing)), (label, since)
    # It says nothing of which of two servers is behind.
    other = record("5", "f4", "5", server="b:1", last=update(4))
    result = checked(record("5", "f5", "5", last=nothing), other)
    (stale,) = [item for item in result.findings if item.fault == "stale_server"]
    assert "Nothing here tells which" in stale.evidence


@pytest.mark.parametrize("last", [None, update(1, changed=0, matrices=0)])
def test_the_first_sync_of_the_loaded_weights_is_a_note(last: LastUpdate | None):
    result = checked(record("1", "f0", "default", last=last), record("default", "f0", "default"))
    noted = [item for item in result.findings if item.fault == "weights_not_updated"]
    assert [item.severity for item in noted] == ["note"] and "first sync" in noted[0].fix
    again = record("2", "f0", "default", last=last)  # the label moved twice
    assert "weights_not_updated" in faults(record("1", "f0", "default", last=last), again)
    assert faults(record("2", "f0", "1", last=last)) == ["weights_not_updated"]  # from one step to the next
    assert faults(record("1", "f0", "default", last=update(1))) == ["weights_not_updated"]
    assert faults(record("1", "f0", "default", last=update(2))) == []  # an update that ended the response
    assert faults(record("1", "f0", "default", last=update(2, changed=0, matrices=0))) == ["weights_not_updated"]


def test_a_first_sync_changes_nothing_else_of_the_check():
    records = [record("1", "f0", "default", seed=seed) for seed in range(40)]
    generator = np.random.default_rng(0)
    far = [one.with_fields(train_log_probs=-generator.uniform(0.1, 9, N)) for one in records]
    result = check_batch(make_batch(far))
    plain = check_batch(make_batch([one.with_fields(served=None) for one in far]))
    assert result.findings[1:] == plain.findings and plain.findings


def test_only_tokens_that_train_are_looked_at():
    half = record([("5", 0, 4), ("6", 4, N)], [("f5", "5", 0, N)], last=update(4), mask=[1, 1, 1, 1, 0, 0, 0, 0])
    assert checked(half).findings == ()
    assert "weights_not_updated" in faults(half.with_fields(loss_mask=np.ones(N, dtype=bool)))
    aborted = record("6", "f5", "5", last=update(4)).with_fields(finish_reason="abort")
    assert faults(aborted) == ["weights_not_updated"]


def test_versions_inside_a_response_with_the_right_weights_are_no_fault_of_weights():
    right = record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 3), ("f6", "6", 3, N)], last=update(5))
    assert faults(right) == ["mixed_versions"]
    late = record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 6), ("f7", "6", 6, N)], last=update(5))
    result = checked(late)
    assert result.findings[0].fault == "weights_not_updated" and result.findings[0].tokens == 3
    assert result.findings[0].first is not None and result.findings[0].first.position == 3


def test_the_server_that_is_behind_is_named():
    good, behind = record("6", "f6", "6", last=update(5)), record("6", "f5", "5", server="b:1", last=update(4))
    result = checked(good, behind)
    (finding,) = result.findings
    assert finding.fault == "stale_server" and "Behind: b:1." in finding.evidence and "f6 on a:1" in finding.evidence
    assert "Send the present weights to b:1 again" in finding.fix
    assert finding.first is not None and finding.first.sample == 1
    most = [record("6", "f5", "5", server=f"{name}:1", last=update(4)) for name in "bcd"]
    assert "Behind: b:1, c:1, d:1." in checked(good, *most).findings[0].evidence  # many may be behind


def test_the_minority_is_named_and_a_tie_is_not_decided():
    def of(server: str, weights: str) -> Sample:
        return record("6", weights, "6", server=server, last=update(5))

    finding = checked(of("a:1", "f6"), of("b:1", "f6"), of("c:1", "x6")).findings[0]
    assert finding.fault == "stale_server" and "In the minority: c:1." in finding.evidence and finding.samples == 1
    finding = checked(of("a:1", "f6"), of("b:1", "x6")).findings[0]
    assert "Nothing here tells which" in finding.evidence and finding.samples == 2
    sent = [{"trainer_fingerprint": "f6", "trainer_version": 6}] * 2
    result = checked(of("a:1", "f6"), of("b:1", "x6"), training=sent)
    assert [item.fault for item in result.findings] == ["stale_server"] and "Behind: b:1." in result.findings[
        0
    ].evidence


def test_data_parallel_workers_of_one_server_are_told_apart():
    ranks = [record("6", "f6" if rank != 2 else "f5", "6", dp_rank=rank, last=update(5)) for rank in range(4)]
    assert "In the minority: a:1 dp_rank 2." in checked(*ranks).findings[0].evidence


def test_a_server_that_cannot_take_fingerprints_has_no_fault():
    result = checked(record(weights=None))
    assert result.findings == () and result.status == "clean"
    assert "a:1 took no fingerprints" in result.undecided[0].reason


@pytest.mark.parametrize(
    ("asked", "told", "said", "fix"),
    [
        (
            {"temperature": 0.7, "top_k": 1},
            {"temperature": 1.0},
            "asked for 0.7, log-probs are at 1 (top_k 1",
            "top_k ≠",
        ),
        ({"temperature": 0.7, "top_k": 1}, {"temperature": None}, "at more than one temperature", "top_k ≠ 1"),
        ({"temperature": 0.7}, {"temperature": 0.9}, "asked for 0.7, log-probs are at 0.9", "one temperature"),
        ({"temperature": 0.7}, {"temperature": 0.7, "log_probs_of": "raw"}, "at 1 (", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
)
def test_a_temperature_that_was_not_applied(asked: dict[str, Any], told: dict[str, Any], said: str, fix: str):
    wrong = record(sampling=asked, **told)
    (finding,) = [item for item in checked(wrong).findings if item.fault == "temperature"]
    assert said in finding.evidence and "a:1" in finding.evidence and fix in finding.fix
    own = wrong.model_copy(update={"log_probs_of": wrong.served.log_probs_of if wrong.served else "tempered"})
    assert faults(own, training=[{}]).count("temperature") == 1
    assert checked(own, training=[{}]).findings[0].fault == "temperature"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 0.7}, {"temperature": 0.7 * (1 + 1e-8)}),
        ({"temperature": 0.0}, {"temperature": 1.0, "filters": ["top_k=1"]}),
        ({"temperature": 1.0}, {"temperature": 1.0, "log_probs_of": "raw"}),
        ({"temperature": 1.0, "top_k": 1}, {"temperature": None}),
    ],
)
def test_a_temperature_that_was_applied(asked: dict[str, Any], told: dict[str, Any]):
    assert (
        "temperature" not in faults(record(sampling=asked, **told)) and not faults(record(sampling=asked, **told))[1:]
    )


def test_what_the_server_tells_of_the_temperature_is_used():
    batch = make_batch([record(sampling={"temperature": 0.7, "top_k": 1}, temperature=0.7)])
    assert batch.samples[0].log_prob_temperature == 0.7
    assert batch.samples[0].sampling.log_prob_temperature == 1.0


def test_filters_and_penalties_of_the_servers_own():
    (finding,) = checked(record(filters=["top_p=0.9"])).findings
    assert finding.fault == "truncation" and "top_p=0.9" in finding.evidence and "a:1" in finding.evidence
    assert "generation_config" in finding.fix
    (finding,) = checked(record(shifts=["repetition_penalty=1.1"])).findings
    assert finding.fault == "penalty" and "repetition_penalty=1.1" in finding.evidence
    asked = record(shifts=["repetition_penalty=1.1"], sampling={"repetition_penalty": 1.1})
    assert checked(asked).findings == ()
    recorded = checked(record(filters=["top_p=0.9"], sampling={"top_p": 0.9})).findings
    assert "a:1" not in recorded[0].evidence  # the finding by what the record itself tells


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float16"), ("head_dtype", "bfloat16"), ("kv_cache_dtype", "fp8_e4m3"), ("quantization", "fp8"),
     ("speculative", "EAGLE"), ("deterministic", True), ("on_policy_target", "fsdp"), ("sglang", "0.5.9")],
)  # fmt: skip
def test_servers_that_differ(field: str, value: Any):
    other = record(server="c:1", **{field: value})
    (finding,) = checked(*CLEAN, other).findings
    assert finding.fault == "server_differs" and finding.samples == 1
    for part in (field, str(value), "a:1, b:1", "c:1"):
        assert part in finding.evidence


def test_other_weights_than_the_trainer_sent():
    sent = {"trainer_fingerprint": "t5", "trainer_version": "5"}
    result = checked(record(last=update(4)), training=[sent])
    (finding,) = result.findings
    assert finding.fault == "other_weights" and "t5" in finding.evidence and "f5" in finding.evidence
    for told in ({"trainer_fingerprint": "f5"}, {**sent, "trainer_version": "6"}, {"trainer_version": "5"}):
        assert "other_weights" not in faults(record(last=update(4)), training=[told])
    assert faults(record(last=update(4)), training=[{"trainer_fingerprint": "t5", "trainer_version": "5"}])
    # An asynchronous trainer has sent newer ones since: without both versions nothing can be told.
    assert faults(record(last=update(4)), training=[{"trainer_fingerprint": "t6"}]) == []
    assert faults(record(None, last=update(4)), training=[sent]) == []
    assert faults(record(last=update(4), quantization="fp8"), training=[sent]) == []  # not the tensors that were sent


def _two_populations(told: dict[str, Any], **fields: Any) -> CheckResult:
    """Server b is further from the trainer than a, as statistics see it."""
    generator = np.random.default_rng(3)
    records = []
    for index in range(48):
        made = record(server=("a:1", "b:1")[index % 2], last=update(4), seed=index, **fields)
        p = np.exp(made.rollout_log_probs)
        gap = (1 - p) * (0.03, 0.4)[index % 2] * generator.standard_normal(N)
        records.append(made.with_fields(train_log_probs=np.minimum(np.log(p) + gap, 0), **told))
    return check_batch(make_batch(records))


def test_what_servers_told_is_not_guessed_again():
    assert [item.fault for item in _two_populations({}).findings][:1] == ["stale_server"]  # by statistics, by worker
    assert "b:1" in _two_populations({}).findings[0].evidence
    # Equal fingerprints exclude old weights, and not a server whose tensors have their elements in another order.
    proven = _two_populations({"trainer_fingerprint": "f5"})
    assert "stale_server" in {item.fault for item in proven.findings}
    stuck = _two_populations({}, label="6")
    assert [item.fault for item in stuck.findings if item.fault.startswith(("w", "stale"))] == ["weights_not_updated"]


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([record("6", "f5", "5", last=update(4))], "weights_not_updated"),
        (
            [record("6", "f6", "6", last=update(5)), record("6", "f5", "5", server="b:1", last=update(4))],
            "stale_server",
        ),
    ],
)
def test_the_command_names_it_first(tmp_path: Path, records: list[Sample], fault: str):
    """From one batch, with and without a training side."""
    path, training = tmp_path / "rollouts.jsonl", tmp_path / "training.jsonl"
    write_samples(path, records)
    lines = [{"train_log_probs": item.rollout_log_probs.tolist()} for item in records]
    training.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for given in ([path], [path, training]):
        words = [str(item) for item in ("inspect", *given)]
        result = CliRunner().invoke(app, [*words, "--brief", "--json"])
        assert result.exit_code == 1 and json.loads(result.stdout)["findings"][0]["fault"] == fault
        shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "page")], env={"TERM": "dumb"})
        assert shown.exit_code == 1 and fault in shown.output
        text = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
        assert f"<strong>{fault}</strong> (certain)" in text


def test_clean_records_alone_are_still_no_comparison(tmp_path: Path):
    write_samples(tmp_path / "rollouts.jsonl", CLEAN)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "rollouts.jsonl"), "--brief"])
    assert result.exit_code == 3 and "There is no training side" in result.output


def test_all_weights_are_old_by_statistics_unless_fingerprints_are_equal():
    draw = np.random.default_rng(5)
    records = []
    for index in range(64):
        made = record("5", "f5", "5", last=update(4), seed=index)
        p = np.exp(made.rollout_log_probs)
        theirs = np.minimum(np.log(p) + 0.3 * (1 - p) * draw.standard_normal(N), 0)
        # The weights of the start are those that sampled.
        records.append(made.with_fields(train_log_probs=theirs, ref_log_probs=made.rollout_log_probs))

    def found(fingerprint: str | None) -> set[str]:
        result = check_batch(make_batch([one.with_fields(trainer_fingerprint=fingerprint) for one in records]))
        return {item.fault for item in result.findings}

    assert "weights_not_updated" in found(None) and "weights_not_updated" not in found("f5")


def test_what_was_asked_for_is_not_made_up():
    """A record without `sampling` says nothing of a temperature or a filter."""
    plain = record(last=update(4), temperature=0.7, filters=["top_p"])
    fields = {name: getattr(plain, name) for name in plain.model_fields_set - {"sampling"}}
    untold = Sample(**fields)
    result = checked(untold)
    assert [item.fault for item in result.findings] == ["truncation"]
    assert result.findings[0].fix.startswith("Record what was asked for (`sampling`")
    assert untold.sampling.temperature == 1.0 and untold.temperature == 0.7
    asked = checked(plain)
    assert [item.fault for item in asked.findings] == ["temperature", "truncation"]
    assert asked.findings[1].fix.startswith("Send every sampling parameter")


@pytest.mark.parametrize(
    ("since", "label", "severity"),
    [("default", "1", "note"), ("default", "run-a", "note"), ("0", "1", "fault"), ("main-abc", "main-abd", "fault")],
)
def test_only_loaded_weights_have_a_first_sync(since: str, label: str, severity: str):
    found = checked(record(label, "f0", since)).findings
    assert [(item.fault, item.severity) for item in found] == [("weights_not_updated", severity)]


def test_a_run_that_counts_anew_has_no_stale_server():
    old, new = record("1", "fa", "1", server="a:1/7"), record("1", "fb", "1", server="a:1/9")
    steps = [old.with_fields(step=1), new.with_fields(step=2)]
    assert "stale_server" not in {item.fault for item in check_batch(make_batch(steps)).findings}
    assert "stale_server" in faults(old, new)
    assert "stale_server" not in faults(old, record("1", "fb", "1", server="a:1/9", tp_size=2))  # sharded otherwise


def test_a_trainer_that_names_no_version():
    one, other = record("default", "fa", "default"), record("default", "fb", "default", last=update(1))
    found = checked(one, other).findings
    assert [(item.fault, item.severity) for item in found] == [("label_reused", "note")]
    named = checked(record("1", "fa", "1"), record("1", "fb", "1", last=update(2))).findings
    assert [(item.fault, item.severity) for item in named] == [("label_reused", "fault")]


def test_a_server_that_started_again_shows_by_its_label_unless_updates_named_none():
    trainer = [{"trainer_version": "21"}]
    restarted = checked(record("default", "f0", "default"), training=trainer)
    (finding,) = [item for item in restarted.findings if item.counts]
    assert finding.fault == "weights_not_updated" and "of a:1," in finding.evidence
    assert "never updated, or restarted" in finding.evidence and "a:1" in finding.fix
    unnamed = checked(record("default", "f9", "default", last=update(20)), training=trainer)
    assert unnamed.findings == () and "send weight_version" in unnamed.undecided[-1].reason


def test_what_was_told_is_noted():
    assert checked(*CLEAN).notes == ("the SGLang plugin told of 2 of 2 samples: a:1, b:1; weights f5.",)
    sent = [{"trainer_fingerprint": "f5", "trainer_version": "5"}]
    (note, *_) = checked(CLEAN[0], training=sent).notes
    assert note.endswith("weights f5, which are what the trainer sent.")
    assert not any("plugin" in note for note in checked(CLEAN[0].with_fields(served=None)).notes)
