"""What servers told of themselves, and cloned groups: each fault named first, from one record on; no false alarm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import LastUpdate, Served, ServedKV, ServedWeights
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.layers import Mix
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.diagnose.findings import CheckResult
from mismatch_plugin.diagnose.scorers import Checkpoint
from mismatch_plugin.sglang.delivered import of_sums, sums
from tests.fixtures.families import build_family

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
FIVE, SIX = record("5", "f5", None, last=update(4)), record("6", "f5", None, last=update(4))
NOTHING, UP = update(7, changed=0, matrices=0), update(4)
MOVED, MIXED, PARTLY = "weights_not_updated", "mixed_versions", "weights_partly_updated"
SENT = {"trainer_fingerprint": "t5", "trainer_version": "5"}


def of(server: str, weights: str) -> Sample:
    return record("6", weights, "6", server=server, last=update(5))


WEIGHTS: list[tuple[list[Sample], list[str], list[str]]] = [
    ([*CLEAN], [], []),
    ([record("6", "f5", "5", last=UP)], [MOVED], ["a:1", "'6'", "'5'", "f5"]),
    ([record("6", "f5", "5", last=UP).with_fields(finish_reason="abort")], [MOVED], []),
    ([FIVE, SIX], [MOVED, MIXED], ["under '6' as under '5'"]),
    ([FIVE, record("6", "f6", None, last=update(5))], [MIXED], []),
    ([FIVE, record("6", "f5", None, server="b:1", last=UP)], [MIXED], []),  # another server
    ([record(None, last=update(2, 0, 0))], [MOVED], ["Update 2 of a:1 changed none of 20 tensors"]),
    ([record(None, last=update(2))], [], []),
    ([record("6", "f6", "6", last=update(5))], [], []),
    ([record("5", "f5", "5", last=UP), record("5", "f6", "5", last=update(5))], ["label_reused"], ["a:1", "f5, f6"]),
    ([record("5", "f5", last=UP), record("6", "f6", "6", last=update(5))], [MIXED], []),
    ([CLEAN[0], record(weights="x5", server="b:1", dtype="float16")], ["server_differs"], []),  # not compared
    ([record(last=update(3, 10, 10))], [], []),
    ([record(last=update(3, 9, 4))], [PARTLY], ["a:1", "4 of 10 matrices"]),
    ([record(last=update(3, 5, 0))], [PARTLY], ["0 of 10 matrices (5 of 20 tensors)"]),
    ([CLEAN[0], record(weights="x5", server="b:1", last=update(4, 2, 1))], [PARTLY], ["b:1"]),
    ([record(weights=[("f5", "5", 0, 4), (None, None, 4, N)])], [PARTLY], ["half done", "4 tok"]),
    ([record(weights=None, last=update(3))], [PARTLY], []),
    ([record("3", "fa", "3", last=update(3)), record("4", "fb", "4", last=UP),
      record("5", "fa", "5", last=update(5))], [MIXED], []),  # weights that came back
    ([record("3", "fa", "3", last=update(3)), record("4", "fb", "4", last=UP),
      record("5", "fa", "3", last=update(5))], [MOVED, MIXED], []),
    ([record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 3), ("f6", "6", 3, N)], last=update(5))], [MIXED], []),
    ([record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 6), ("f7", "6", 6, N)], last=update(5))],
     [MOVED, "label_reused", MIXED], ["3 tokens of a:1"]),
    # Updates that brought nothing: a later one is a fault unless it was sent again, the first sync of a run a note.
    ([record("5", "f5", "5", last=NOTHING)], [], ["changed none of 20 tensors, under the version that they had, '5'."]),
    *(([record(label, "f5", since, last=NOTHING)], [MOVED], [])
      for label, since in (("6", "5"), ("default", "default"), (None, "5"), ("5", None))),
    ([record("1", "f0", "default"), record("default", "f0", "default")], [MIXED], ["that it had loaded"]),
    ([record("1", "f0", "default", last=update(1, 0, 0))], [], ["that it had loaded"]),
    ([record("run-a", "f0", "default")], [], ["that it had loaded"]),
    ([record("1", "f0", "default"), record("2", "f0", "default")], [MOVED, MIXED], []),  # the label moved twice
    ([record("2", "f0", "1")], [MOVED], []),  # from one step to the next
    ([record("1", "f0", "0")], [MOVED], []),
    ([record("main-abd", "f0", "main-abc")], [MOVED], []),
    ([record("1", "f0", "default", last=update(1))], [MOVED], []),
    ([record("1", "f0", "default", last=update(2))], [], []),  # an update that ended the response
    ([record("1", "f0", "default", last=update(2, 0, 0))], [MOVED], []),
    # Several servers.
    ([of("a:1", "f6"), record("6", "f5", "5", server="b:1", last=UP)], ["stale_server"],
     ["Behind: b:1.", "f6 on a:1"]),
    ([of("a:1", "f6"), *(record("6", "f5", "5", server=f"{name}:1", last=UP) for name in "bcd")], ["stale_server"],
     ["Behind: b:1, c:1, d:1."]),  # many may be behind
    ([of("a:1", "f6"), of("b:1", "f6"), of("c:1", "x6")], ["stale_server"], ["In the minority: c:1."]),
    ([of("a:1", "f6"), of("b:1", "x6")], ["stale_server"], ["Nothing here tells which"]),
    ([record("6", "f6" if rank != 2 else "f5", "6", dp_rank=rank, last=update(5)) for rank in range(4)],
     ["stale_server"], ["In the minority: a:1 dp_rank 2."]),
    ([record("5", "f5", "5", last=NOTHING), record("5", "f4", "5", server="b:1", last=UP)], ["stale_server"],
     ["Nothing here tells which"]),  # an update that was sent again says nothing of who is behind
    ([record("1", "fa", "1", server="a:1/7"), record("1", "fb", "1", server="a:1/9")], ["stale_server"], []),
    ([record("1", "fa", "1", server="a:1/7"), record("1", "fb", "1", server="a:1/9", tp_size=2)], [], []),
    ([record("1", "fa", "1", server="a:1/7").with_fields(step=1),
      record("1", "fb", "1", server="a:1/9").with_fields(step=2)], [], []),  # a run that counts anew
    ([record("default", "fa", "default"), record("default", "fb", "default", last=update(1))], [],
     ["Weights changed under the same label"]),  # a trainer that names no version: a note
    ([record("1", "fa", "1"), record("1", "fb", "1", last=update(2))], ["label_reused"], []),
    ([record(weights=None)], [], []),  # it cannot take fingerprints
]  # fmt: skip


@pytest.mark.parametrize(("records", "expected", "said"), WEIGHTS)
def test_what_servers_told_of_weights(records: list[Sample], expected: list[str], said: list[str]):
    result = checked(*records)
    assert [item.fault for item in result.findings if item.counts] == expected
    assert all(part in result.findings[0].evidence for part in said)
    assert result.status == ("faults" if expected else "clean")


def test_a_finding_of_servers_is_certain_and_names_its_place():
    (finding,) = checked(record("6", "f5", "5", last=UP)).findings
    assert (finding.confidence, finding.side, finding.tokens) == ("certain", "rollout", N)
    assert finding.first is not None and (finding.first.sample, finding.first.rollout) == (0, "version 6")
    late = record([("5", 0, 3), ("6", 3, N)], [("f5", "5", 0, 6), ("f7", "6", 6, N)], last=update(5))
    first = checked(late).findings[0].first
    assert first is not None and first.position == 3
    (finding,) = checked(of("a:1", "f6"), record("6", "f5", "5", server="b:1", last=UP)).findings
    assert finding.first is not None and finding.first.sample == 1 and "to b:1 again" in finding.fix
    unable = checked(record(weights=None))
    assert "a:1 took no fingerprints" in unable.undecided[0].reason
    named = update(3, 9, 4).model_copy(update={"unchanged": ("q.weight", "k.weight", "v.weight")})
    (finding,) = checked(record(last=named)).findings
    assert "; not q.weight, k.weight, v.weight and 3 more)" in finding.evidence
    assert "--accept weights_partly_updated" in finding.fix and finding.confidence == "likely"


def test_fifty_clean_updates_on_two_servers_have_no_finding():
    records = [record("0", "f0", "0"), record("0", "f0", "0", server="b:1")]
    for step in range(1, 51):
        old, new, cut = str(step - 1), str(step), 1 + step % (N - 1)
        last = update(step, changed=20 if step % 3 else 15)  # a norm in bfloat16 often stays the same
        records += [record(new, f"f{new}", new, server=name, last=last, seed=step) for name in ("a:1", "b:1")]
        spans: list[Weights] = [(f"f{old}", old, 0, cut), (f"f{new}", new, cut, N)]
        records.append(record([(old, 0, cut), (new, cut, N)], spans, server="ab"[step % 2] + ":1", last=last))
    assert {item.fault for item in checked(*records).findings} <= {MIXED}  # that is what labels say, and is true
    labels = [item.weight_versions[-1].version for item in records]
    sent = [{"trainer_fingerprint": f"f{label}", "trainer_version": label} for label in labels]
    assert not {*faults(*records, training=sent)} - {MIXED}


def test_a_first_sync_changes_nothing_else_of_the_check():
    records = [record("1", "f0", "default", seed=seed) for seed in range(40)]
    generator = np.random.default_rng(0)
    far = [one.with_fields(train_log_probs=-generator.uniform(0.1, 9, N)) for one in records]
    result = check_batch(make_batch(far))
    plain = check_batch(make_batch([one.with_fields(served=None) for one in far]))
    assert result.findings[1:] == plain.findings and plain.findings


def test_only_tokens_that_train_are_looked_at():
    half = record([("5", 0, 4), ("6", 4, N)], [("f5", "5", 0, N)], last=UP, mask=[1, 1, 1, 1, 0, 0, 0, 0])
    assert checked(half).findings == ()
    assert MOVED in faults(half.with_fields(loss_mask=np.ones(N, dtype=bool)))


@pytest.mark.parametrize(
    ("asked", "told", "said", "fix"),
    [
        ({"temperature": 0.7, "top_k": 1}, {"temperature": 1.0}, "asked for 0.7, log-probs are at 1 (top_k 1", "≠ 1"),
        ({"temperature": 0.7, "top_k": 1}, {"temperature": None}, "at more than one temperature", "top_k ≠ 1"),
        ({"temperature": 0.7}, {"temperature": 0.9}, "asked for 0.7, log-probs are at 0.9", "one temperature"),
        ({"temperature": 0.7}, {"temperature": 0.7, "log_probs_of": "raw"}, "at 1 (", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"temperature": 0.7}, {"temperature": 0.7 * (1 + 1e-8)}, None, ""),
        ({"temperature": 0.0}, {"temperature": 1.0, "filters": ["top_k=1"]}, None, ""),
        ({"temperature": 1.0}, {"temperature": 1.0, "log_probs_of": "raw"}, None, ""),
        ({"temperature": 1.0, "top_k": 1}, {"temperature": None}, None, ""),
    ],
)  # fmt: skip
def test_the_temperature_that_was_applied(asked: dict[str, Any], told: dict[str, Any], said: str | None, fix: str):
    one = record(sampling=asked, **told)
    found = [item for item in checked(one).findings if item.fault == "temperature"]
    assert len(found) == (said is not None)
    if said is not None:
        assert said in found[0].evidence and "a:1" in found[0].evidence and fix in found[0].fix
        own = one.model_copy(update={"log_probs_of": told.get("log_probs_of", "tempered")})
        assert faults(own, training=[{}]).count("temperature") == 1  # not said again by the record


def test_filters_and_penalties_of_the_servers_own():
    (finding,) = checked(record(filters=["top_p=0.9"])).findings
    assert finding.fault == "truncation" and "top_p=0.9" in finding.evidence and "a:1" in finding.evidence
    assert finding.fix.startswith("Send every sampling parameter") and "generation_config" in finding.fix
    (finding,) = checked(record(shifts=["repetition_penalty=1.1"])).findings
    assert finding.fault == "penalty" and "repetition_penalty=1.1" in finding.evidence
    asked = record(shifts=["repetition_penalty=1.1"], sampling={"repetition_penalty": 1.1})
    assert checked(asked).findings == ()
    recorded = checked(record(filters=["top_p=0.9"], sampling={"top_p": 0.9})).findings
    assert "a:1" not in recorded[0].evidence  # the finding by what the record itself tells
    plain = record(last=UP, temperature=0.7, filters=["top_p"])
    untold = Sample(**{name: getattr(plain, name) for name in plain.model_fields_set - {"sampling"}})
    (finding,) = checked(untold).findings  # a record without `sampling` says nothing of a temperature or a filter
    assert finding.fault == "truncation" and finding.fix.startswith("Record what was asked for (`sampling`")


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float16"), ("head_dtype", "bfloat16"), ("kv_cache_dtype", "fp8_e4m3"), ("quantization", "fp8"),
     ("speculative", "EAGLE"), ("deterministic", True), ("on_policy_target", "fsdp"), ("sglang", "0.5.9")],
)  # fmt: skip
def test_servers_that_differ(field: str, value: Any):
    (finding,) = checked(*CLEAN, record(server="c:1", **{field: value})).findings
    assert finding.fault == "server_differs" and finding.samples == 1
    assert all(part in finding.evidence for part in (field, str(value), "a:1, b:1", "c:1"))


def test_other_weights_than_the_trainer_sent():
    (finding,) = checked(record(last=UP), training=[SENT]).findings
    assert finding.fault == "other_weights" and "t5" in finding.evidence and "f5" in finding.evidence
    # An asynchronous trainer has sent newer ones since: without both versions nothing can be told.
    sound = ({"trainer_fingerprint": "f5"}, SENT | {"trainer_version": "6"}, {"trainer_version": "5"})
    for told in (*sound, {"trainer_fingerprint": "t6"}):
        assert "other_weights" not in faults(record(last=UP), training=[told])
    assert faults(record(None, last=UP), training=[SENT]) == []
    assert faults(record(last=UP, quantization="fp8"), training=[SENT]) == []  # not the tensors that were sent
    both = [{"trainer_fingerprint": "f6", "trainer_version": 6}] * 2
    (finding,) = checked(of("a:1", "f6"), of("b:1", "x6"), training=both).findings
    assert finding.fault == "stale_server" and "Behind: b:1." in finding.evidence


def _two_populations(told: dict[str, Any], **fields: Any) -> CheckResult:
    """Server b is further from the trainer than a, as statistics see it."""
    generator = np.random.default_rng(3)
    records = []
    for index in range(48):
        made = record(server=("a:1", "b:1")[index % 2], last=UP, seed=index, **fields)
        p = np.exp(made.rollout_log_probs)
        gap = (1 - p) * (0.03, 0.4)[index % 2] * generator.standard_normal(N)
        records.append(made.with_fields(train_log_probs=np.minimum(np.log(p) + gap, 0), **told))
    return check_batch(make_batch(records))


def test_what_servers_told_is_not_guessed_again():
    first = _two_populations({}).findings[0]
    assert first.fault == "stale_server" and "b:1" in first.evidence  # by statistics, by worker
    # Equal fingerprints exclude old weights, and not a server whose tensors have their elements in another order.
    assert "stale_server" in {item.fault for item in _two_populations({"trainer_fingerprint": "f5"}).findings}
    stuck = _two_populations({}, label="6")
    assert [item.fault for item in stuck.findings if item.fault.startswith(("w", "stale"))] == [MOVED]


def test_all_weights_are_old_by_statistics_unless_fingerprints_are_equal():
    draw = np.random.default_rng(5)
    records = []
    for index in range(64):
        made = record("5", "f5", "5", last=UP, seed=index)
        p = np.exp(made.rollout_log_probs)
        theirs = np.minimum(np.log(p) + 0.3 * (1 - p) * draw.standard_normal(N), 0)
        # The weights of the start are those that sampled.
        records.append(made.with_fields(train_log_probs=theirs, ref_log_probs=made.rollout_log_probs))
    for fingerprint, named in ((None, True), ("f5", False)):
        result = check_batch(make_batch([one.with_fields(trainer_fingerprint=fingerprint) for one in records]))
        assert (MOVED in {item.fault for item in result.findings}) == named


@pytest.mark.parametrize("behind", [False, True])
def test_the_command_names_it_first(tmp_path: Path, behind: bool):
    """From one batch, with and without a training side."""
    stuck = record("6", "f5", "5", last=UP)
    records = [of("a:1", "f6"), stuck.with_fields(served=of("b:1", "f5").served)] if behind else [stuck]
    fault = "stale_server" if behind else MOVED
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


def test_a_server_that_started_again_shows_by_its_label_unless_updates_named_none():
    trainer = [{"trainer_version": "21"}]
    restarted = checked(record("default", "f0", "default"), training=trainer)
    (finding,) = [item for item in restarted.findings if item.counts]
    assert finding.fault == MOVED and "of a:1," in finding.evidence
    assert "never updated, or restarted" in finding.evidence and "a:1" in finding.fix
    unnamed = checked(record("default", "f9", "default", last=update(20)), training=trainer)
    assert unnamed.findings == () and "send weight_version" in unnamed.undecided[-1].reason


def test_what_was_told_is_noted():
    assert checked(*CLEAN).notes == ("the SGLang plugin told of 2 of 2 samples: a:1, b:1; weights f5.",)
    (note, *_) = checked(CLEAN[0], training=[{"trainer_fingerprint": "f5", "trainer_version": "5"}]).notes
    assert note.endswith("weights f5, which are what the trainer sent.")
    assert not any("plugin" in note for note in checked(CLEAN[0].with_fields(served=None)).notes)


# Old keys and values, steps that round away, cloned groups

OLD = [ServedKV(fingerprint="f4", tokens=50, cached=48)]


def test_keys_and_values_of_older_weights_are_named_from_one_reply():
    clean = [record(last=UP, kv=[], seed=seed) for seed in range(8)]
    result = checked(*clean, record(last=UP, kv=OLD, server="b:1"))
    (finding,) = result.findings
    assert (finding.fault, finding.confidence, finding.samples) == ("stale_cache", "certain", 1)
    assert "48 tokens of f4, under responses of f5" in finding.evidence and "b:1" in finding.evidence
    half = record(last=UP, kv=[ServedKV(fingerprint=None, tokens=3, cached=3)])
    assert "3 tokens of a half done update" in checked(half).findings[0].evidence


def test_keys_and_values_that_are_the_responses_own_are_no_fault():
    """From before an update in place; those of an earlier turn, which the cache kept over an update, are one."""
    both: list[Weights] = [("f4", "4", 0, 3), ("f5", "5", 3, 8)]
    spans: list[Span] = [("4", 0, 3), ("5", 3, 8)]
    own = [ServedKV(fingerprint="f4", tokens=48)]
    assert "stale_cache" not in faults(record(spans, both, last=UP, kv=own))
    assert "stale_cache" in faults(record(spans, both, last=UP, kv=OLD))
    assert faults(record(last=UP, kv=OLD, mask=[0] * 8)) == []
    assert faults(record(last=UP, kv=None)) == []


def test_an_update_of_which_most_rounds_away_is_noted():
    def noted(share: float | None, matrices: int = 10, **told: Any) -> list[str]:
        last = update(4, matrices=matrices).model_copy(update={"changed_elements": share})
        found = checked(record(last=last, **told)).findings
        return [item.severity for item in found if item.fault == "update_lost_in_precision"]

    assert noted(0.039) == ["note"] and noted(0.0001) == ["note"]
    assert noted(0.06) == noted(0.9) == noted(None) == []
    assert noted(0.039, dtype="float32") == noted(0.039, quantization="fp8") == []
    assert noted(0.039, matrices=3) == []  # a part that came is another fault
    (finding, *_) = checked(record(last=UP.model_copy(update={"changed_elements": 0.039}))).findings
    assert "a:1 changed 3.90% of the elements" in finding.evidence and "cosine of about .12" in finding.evidence


@pytest.mark.parametrize(("step", "share", "cosine"), [(1e-6, 0.05, 0.12), (1e-5, 0.29, 0.37)])
def test_what_the_note_says_of_shares_and_cosines(step: float, share: float, cosine: float):
    """Of a million Gaussian weights, median .011, in bfloat16."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(1_000_000, generator=draw) * 0.011 / 0.6745
    intended = torch.randn(len(weights), generator=draw).sign() * step
    delivered = (weights + intended).bfloat16().float() - weights.bfloat16().float()
    assert float((delivered != 0).float().mean()) == pytest.approx(share, abs=0.005)
    assert float(torch.cosine_similarity(delivered, intended, dim=0)) == pytest.approx(cosine, abs=0.006)
    found = of_sums(sums(weights, weights + intended, torch.bfloat16))
    assert found is not None and found.changed == pytest.approx(share, abs=0.005)
    assert found.cosine == pytest.approx(cosine, abs=0.006)
    assert found.norm_ratio == pytest.approx(float(delivered.norm() / intended.norm()), rel=0.02)
    assert of_sums(sums(weights, weights, torch.bfloat16)) is None


@pytest.mark.parametrize(("step", "noted"), [(1e-6, True), (1e-4, False), (0.0, False)])
def test_two_checkpoints_show_what_bfloat16_delivers(tmp_path: Path, step: float, noted: bool):
    start = build_family("qwen3", 0)
    start.save_pretrained(tmp_path / "start")
    draw = torch.Generator().manual_seed(1)
    for parameter in start.parameters():
        parameter.data.mul_(1 + 30 * step * torch.randn(parameter.shape, generator=draw).sign())
    start.save_pretrained(tmp_path / "now")
    between = Mix(Checkpoint(tmp_path / "now"), Checkpoint(tmp_path / "start"))
    batch = replace(make_batch([record(last=None)]), between=between)
    found = [item for item in check_batch(batch).findings if item.fault == "update_lost_in_precision"]
    assert [item.severity for item in found] == ["note"] * noted
    if noted:
        assert "Between both checkpoints" in found[0].evidence and "cosine of 0." in found[0].evidence
    wide = replace(make_batch([record(last=None, dtype="float32")]), between=between)
    assert check_batch(wide).findings == ()


def group(ids: list[list[int]], log_prob: float = -1.0, **asked: Any) -> list[Sample]:
    return [
        Sample(
            prompt_ids=[1, 2],
            response_ids=response,
            rollout_log_probs=[log_prob] * len(response),
            group="g",
            sampling=SamplingParameters(**asked),
        )
        for response in ids
    ]


CLONE = [5 + place % 7 for place in range(30)]
OTHERS = [np.random.default_rng(seed).integers(5, 90, 30).tolist() for seed in range(6)]


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        (group([*OTHERS, CLONE, CLONE]), True),
        (group([CLONE] * 8, temperature=0.7), True),
        (group(OTHERS), False),
        (group([CLONE] * 8, log_prob=-0.5), False),  # a chance of e^-15: an answer that is nearly always the same
        (group([CLONE] * 8, temperature=0.0), False),
        (group([CLONE] * 8, top_k=1), False),
        (group([CLONE] * 8, top_p=0.9), False),  # what was cut is not known
        ([one.with_fields(prompt_ids=np.array([1, number])) for number, one in enumerate(group([CLONE] * 4))], False),
        ([one.with_fields(step=number) for number, one in enumerate(group([CLONE] * 4))], False),
    ],
)
def test_responses_that_sampling_does_not_repeat(samples: list[Sample], named: bool):
    found = [item for item in checked(*samples).findings if item.fault == "cloned_group"]
    assert [(item.fault, item.confidence) for item in found] == [("cloned_group", "certain")] * named
    if named:
        assert f"up to {sum(one.response_ids.tolist() == CLONE for one in samples)} times" in found[0].evidence
