"""What our plugin in the server told: read from replies, kept in files and joined turns, refused where malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mismatch_plugin.data.read import read
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.diagnose.batch import make_batch
from mismatch_plugin.diagnose.detectors.run import check_batch
from mismatch_plugin.rollout.dumps.registry import read_dump
from mismatch_plugin.rollout.files import read_records, write_records
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.responses import Response
from mismatch_plugin.sglang.replies import ReplyError, parse_generate

SERVED: dict[str, Any] = {
    "server": "10.0.0.1:30000 4711",
    "dp_rank": 1,
    "sglang": "0.5.23",
    "dtype": "bfloat16",
    "head_dtype": "float32",
    "temperature": 0.1 + 0.2,
    "filters": ["top_p=0.9"],
    "weights": [
        {"fingerprint": "00f1", "since": "4", "start": 0, "end": 1},
        {"fingerprint": None, "since": None, "start": 1, "end": 2},
    ],
    "update": {"number": 5, "changed": 20, "tensors": 20, "changed_matrices": 10, "matrices": 10},
}
RECORD: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}


def told(**changed: Any) -> RolloutRecord:
    return RolloutRecord(**RECORD, served={**SERVED, **changed})  # pyright: ignore[reportArgumentType]


def reply(value: Any, **meta: Any) -> Any:
    logged = [[-1.0, 2, None], [-2.0, 3, None]]
    meta = {"id": "r", "output_token_logprobs": logged, "completion_tokens": 2, META_KEY: value, **meta}
    return {"output_ids": [2, 3], "text": "", "meta_info": meta}


@pytest.mark.parametrize("value", [SERVED, [SERVED], {**SERVED, "of_a_newer_plugin": 1}])
def test_it_is_read_from_a_reply(value: Any):
    (record,) = parse_generate(reply(value), [[1]])
    assert record.served == told().served and record.log_probs_of == "tempered"
    (raw,) = parse_generate(reply([{**SERVED, "log_probs_of": "raw"}]), [[1]])
    assert raw.log_probs_of == "raw"


@pytest.mark.parametrize("value", [None, []])
def test_a_reply_without_it(value: Any):
    (record,) = parse_generate(reply(value), [[1]])
    assert record.served is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({**SERVED, "sglang": None}, f"{META_KEY}.sglang: "),
        ([{**SERVED, "weights": [{"fingerprint": "a", "start": -1, "end": 2}]}], f"{META_KEY}.weights.0.start: "),
        ({name: value for name, value in SERVED.items() if name != "dtype"}, f"{META_KEY}.dtype: Field required"),
        ([SERVED, SERVED], f"{META_KEY}: "),
        ("text", f"{META_KEY}: "),
        ({**SERVED, "weights": [{"fingerprint": "a", "start": 0, "end": 3}]}, "served.weights: 'a' spans"),
    ],
)
def test_a_malformed_one_is_an_error_that_names_the_field(value: Any, says: str):
    with pytest.raises(ReplyError) as error:
        parse_generate(reply(value), [[1]], samples=["s7"])
    assert error.value.kind == "form" and error.value.sample == "s7" and says in str(error.value)


@pytest.mark.parametrize("spans", [[(0, 3)], [(1, 0)], [(0, 2), (1, 2)], [(1, 2), (0, 1)]])
def test_spans_are_in_order_and_inside_the_response(spans: list[tuple[int, int]]):
    weights = [{"fingerprint": "a", "start": start, "end": end} for start, end in spans]
    with pytest.raises(ValidationError, match=r"served\.weights: 'a' spans .* half-open, in order and inside"):
        told(weights=weights)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_keep_it(tmp_path: Path, suffix: str):
    pytest.importorskip("pyarrow", reason="Parquet needs the extra [io]")
    path = tmp_path / f"records{suffix}"
    bare = told(update=None, dp_rank=None, temperature=None, filters=[], weights=[])
    records = [told(), RolloutRecord(**RECORD), bare]
    write_records(path, records)
    assert read_records(path) == records
    assert [item.served for item in read_dump(path).responses] == [item.served for item in records]


def test_older_files_without_the_column_are_read(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_records(tmp_path / "new.parquet", [RolloutRecord(**RECORD)])
    table = parquet.read_table(tmp_path / "new.parquet").drop(["served"])
    assert isinstance(table, pa.Table)
    parquet.write_table(table, tmp_path / "old.parquet")
    (tmp_path / "old.jsonl").write_text(json.dumps(RECORD) + "\n")
    for name in ("old.parquet", "old.jsonl"):
        assert read_records(tmp_path / name) == [RolloutRecord(**RECORD)]


def test_arrays_carry_it_and_call_the_worker_by_it():
    through_router = told().model_copy(update={"server": "http://router:1", "dp_rank": 0})
    response = Response.of(through_router)
    assert response.served == told().served and response.worker == ("10.0.0.1:30000 4711", 1)
    assert response.log_prob_temperature == SERVED["temperature"]
    plain = Response.of(through_router.model_copy(update={"served": None}))
    assert plain.worker == ("http://router:1", 0) and plain.log_prob_temperature == 1.0
    assert Response.of(told(temperature=None)).log_prob_temperature == 1.0


def test_a_dump_that_tells_no_temperature_takes_the_servers(tmp_path: Path):
    tokens = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
    tempered = {**SERVED, "temperature": 0.7, "filters": [], "weights": SERVED["weights"][:1]}
    samples = [{**tokens, "metadata": {META_KEY: told} if told else None} for told in (tempered, None)]
    for name, chosen in (("told.pt", samples[:1]), ("half.pt", samples)):
        torch.save({"rollout_id": 0, "samples": chosen}, tmp_path / name)
    dump = read_dump(tmp_path / "told.pt")
    assert dump.responses[0].sampling.temperature == 0.7 and not [n for n in dump.notes if "temperature" in n]
    assert check_batch(make_batch(read(tmp_path / "told.pt").samples)).findings == ()
    half = read_dump(tmp_path / "half.pt")
    assert [item.sampling.temperature for item in half.responses] == [0.7, 1.0]
    assert [note for note in half.notes if "temperature 1 without filters is assumed" in note]
