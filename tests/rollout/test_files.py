"""Records in JSONL and Parquet: bit for bit there and back, errors with line and field, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mismatch_plugin import files
from mismatch_plugin.check.training import InputError, read_training
from mismatch_plugin.cli import app
from mismatch_plugin.rollout.files import iter_records, read_records, write_records
from mismatch_plugin.rollout.records import RolloutRecord, SamplingParameters, WeightSpan

RECORD: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}


@pytest.fixture(params=[".jsonl", ".parquet"])
def suffix(request: pytest.FixtureRequest) -> str:
    if request.param == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs the extra [io]")
    return request.param


def full() -> RolloutRecord:
    return RolloutRecord(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        rollout_log_probs=[-0.1, None, math.nan],
        loss_mask=[1, 0, 1],
        sampling=SamplingParameters(
            temperature=0.7,
            top_k=5,
            stop_token_ids=(9,),
            stop=("</s>", "\n"),
            stop_regex=("x+",),
            no_stop_trim=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            stream_interval=2,
            seed=2**62,
            max_new_tokens=3,
        ),
        finish_reason="stop",
        weight_versions=[WeightSpan(version="3", start=0, end=3)],
        kept_ids=[[3, 7], [], [5]],
        behaviour_log_probs=[-0.05, math.inf, -math.inf],
        prompt_log_probs=[None, -4.0],
        top_log_probs=[[(-0.1, 3), (-2.0, 7)], [], [(-0.5, 5)]],
        text='é\u2028 "x"\n',
        request_id="r",
        sample_id="s",
        server="http://10.0.0.1:30000",
        dp_rank=3,
        reward=0.25,
    )


def test_everything_comes_back(tmp_path: Path, suffix: str) -> None:
    records = [full(), RolloutRecord(**RECORD)]
    path = tmp_path / f"records{suffix}"
    assert write_records(path, records) == 2
    back = read_records(path)
    assert [repr(record) for record in back] == [repr(record) for record in records]  # repr: NaN is not equal to itself
    assert back[1].kept_ids is None and back[1].loss_mask == [1, 1]


LOG_PROBS = st.one_of(st.none(), st.floats(width=64))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 2**31), LOG_PROBS), max_size=6), max_size=4))
def test_log_probs_are_kept_to_the_last_bit(tmp_path: Path, suffix: str, rows: list[list[Any]]) -> None:
    records = [
        RolloutRecord(
            prompt_ids=[1], response_ids=[token for token, _ in row], rollout_log_probs=[value for _, value in row]
        )
        for row in rows
    ]
    path = tmp_path / f"records{suffix}"
    write_records(path, records)
    assert [repr(record) for record in read_records(path)] == [repr(record) for record in records]


def test_many_rows_are_read_one_by_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"records{suffix}"
    assert write_records(path, (RolloutRecord(**RECORD, sample_id=str(i)) for i in range(2500))) == 2500
    assert [record.sample_id for record in iter_records(path)] == [str(i) for i in range(2500)]


def test_jsonl_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [full(), full()])
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 and lines[2] == ""
    for line in lines[:2]:
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout_log_probs": [-1.0, "much"]}, r"line 3.*rollout_log_probs\.1.*'much'"),
        ({"surprise": 1}, "line 3.*surprise"),
        ({"loss_mask": [1], "sample_id": "s9"}, r"line 3 \(sample s9\).*loss_mask has 1 entries"),
        ({"response_ids": None}, "line 3.*response_ids"),
        ({"response_ids": [2**70]}, rf"line 3.*response_ids\.0.*less than {2**63} \(value '{2**70}'\)"),
        ({"prompt_ids": [-1]}, r"line 3.*prompt_ids\.0.*'-1'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join([json.dumps(RECORD), "", json.dumps({**RECORD, **change})]))
    with pytest.raises(ValueError, match=says):
        read_records(path)
    path.write_text(path.read_text()[:-3])
    with pytest.raises(ValueError, match=r"records\.jsonl, line 3.*Invalid JSON"):
        read_records(path)


def test_devices_and_pipes_are_refused(tmp_path: Path, suffix: str) -> None:
    """A pipe without a writer would block for ever, a device be read without end."""
    os.mkfifo(pipe := tmp_path / f"pipe{suffix}")
    os.symlink("/dev/zero", device := tmp_path / f"device{suffix}")
    for path, kind in ((pipe, "a pipe"), (device, "a device")):
        with pytest.raises(ValueError, match=rf"{path.name} is {kind}, not a regular file"):
            read_records(path)
        if suffix == ".jsonl":
            with pytest.raises(InputError, match=rf"{path.name} is {kind}, not a regular file"):
                read_training(path)


def test_lines_of_any_shape_end_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORD) + "\n" + '{"prompt_ids": ' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: .*recursion limit"):
        read_records(path)
    with pytest.raises(InputError, match=r"records\.jsonl, line 1"):
        read_training(path)
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2 is longer than 0\.0001"):
        list(files.read_lines(path, limit=105))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """U+2028 and its like are legal inside JSON strings."""
    path = tmp_path / "training.jsonl"
    names = ["a\u2028b", "c\x0bd\x1ee", "f\u0085g"]
    lines = [json.dumps({"train_log_probs": [-1.0], "sample_id": name}, ensure_ascii=False) for name in names]
    lines[1] = json.dumps({"train_log_probs": [-1.0], "sample_id": names[1]})  # control characters must be escaped
    path.write_bytes(("\r\n".join(lines) + "\n").encode())
    assert [sample.sample_id for sample in read_training(path)] == names


def test_two_writers_do_not_meet(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"records{suffix}"

    def during() -> Iterator[RolloutRecord]:
        yield full()
        assert write_records(path, [full()] * 3) == 3  # another one begins and ends meanwhile
        yield full()

    assert write_records(path, during()) == 2
    assert len(read_records(path)) == 2 and list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_the_mode_that_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_records(tmp_path / "records.jsonl", [full()])
    finally:
        os.umask(before)
    assert (tmp_path / "records.jsonl").stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, suffix: str) -> None:
    for path, reason in ((tmp_path / f"none{suffix}", "o such file"), (tmp_path / f"folder{suffix}", "directory")):
        if reason == "directory":
            path.mkdir()
        with pytest.raises(ValueError, match=rf"{path.name}: .*{reason}.* Give a whole"):
            read_records(path)
    path = tmp_path / "utf16.jsonl"
    path.write_text(json.dumps(RECORD), encoding="utf-16")
    with pytest.raises(ValueError, match=r"utf16\.jsonl: .*can't decode"):
        read_records(path)


def test_a_damaged_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs the extra [io]")
    path = tmp_path / "records.parquet"
    write_records(path, [full()] * 50)
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    with pytest.raises(ValueError, match=r"records\.parquet: .* Give a whole"):
        read_records(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="is no Parquet file"):
        read_records(path)


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"suffix '.json' is unknown, use .jsonl or .parquet"):
        write_records(tmp_path / "records.json", [])
    with pytest.raises(ValueError, match=r"use .jsonl or .parquet"):
        read_records(tmp_path / "records")


def test_a_broken_write_leaves_the_old_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"records{suffix}"
    write_records(path, [full()])
    before = path.read_bytes()

    def breaking() -> Iterator[RolloutRecord]:
        yield full()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(path, breaking())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_no_records_make_an_empty_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"records{suffix}"
    assert write_records(path, []) == 0 and read_records(path) == []


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'mismatch-plugin\[io\]'"):
        write_records(tmp_path / "records.parquet", [full()])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("top", [[{"x": 1}], [5], [[5]], [[{"log_prob": -1.0}]], 5, "text", [[{"id": 3, "p": 0.5}]]])
def test_top_log_probs_of_another_form_are_named(tmp_path: Path, top: Any) -> None:
    path = tmp_path / "records.parquet"
    write_rows(path, {**RECORD, "top_log_probs": None}, {**RECORD, "top_log_probs": top})
    with pytest.raises(ValueError, match=r"records\.parquet, row 2: top_log_probs.* It is no rollout record"):
        read_records(path)
    result = CliRunner().invoke(app, ["inspect", str(path), "--brief"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit) and "top_log_probs" in result.output


def test_top_log_probs_may_be_pairs_in_parquet_too(tmp_path: Path) -> None:
    path = tmp_path / "records.parquet"
    write_rows(path, {**RECORD, "top_log_probs": [[[-0.5, 3.0]], []]})
    assert read_records(path)[0].top_log_probs == [[(-0.5, 3)], []]


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra [io]")
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(list(rows)), path)
