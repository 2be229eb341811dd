"""Small files that tell of huge sizes: a message with the file's name in a moment, never all of the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_plugin.rollout import files
from mismatch_plugin.rollout.dumps.registry import read_dump

_LIMITED = """
import resource, sys
import mismatch_plugin.diagnose.diagnosis, mismatch_plugin.rollout.dumps.registry
from mismatch_plugin.cli import main
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (24 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
"""


def _refused(path: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_dump(path)
    assert str(path) in str(caught.value)


def _rank(**fields: Any) -> dict[str, Any]:
    columns = {"tokens": [[1, 2, 3]], "response_lengths": [2], "log_probs": [[-1.0, -2.0]], "sample_indices": [0]}
    columns["rollout_log_probs"] = columns["log_probs"]
    pack = {name: fields.pop(name) for name in ("cp_size",) if name in fields}
    return {"rollout_id": 0, "rank": 0, "cp_rank": 0, "cp_size": 1, "rollout_data": columns | fields} | pack


def test_a_rank_of_more_ranks_than_there_can_be(tmp_path: Path):
    torch.save(_rank(), tmp_path / "good.pt")
    assert len(read_dump(tmp_path / "good.pt").responses) == 1
    torch.save(_rank(cp_size=10**12), tmp_path / "a.pt")
    _refused(tmp_path / "a.pt", "the slice of context parallel rank 1 of 1000000000000 is not there")


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_response_longer_than_its_sample(tmp_path: Path, cp_size: int):
    torch.save(_rank(cp_size=cp_size, response_lengths=[10**11]), tmp_path / "a.pt")
    _refused(tmp_path / "a.pt", "sample 0: response_lengths is 100000000000, the sample has 3 tokens")


def test_tensors_that_repeat_a_value(tmp_path: Path):
    ids, log_probs = torch.ones(2, 3, dtype=torch.int64), -torch.ones(1)
    torch.save({"response_ids": ids, "rollout_log_probs": log_probs.expand(2, 3)}, tmp_path / "small.pt")
    assert [response.rollout_log_probs.tolist() for response in read_dump(tmp_path / "small.pt").responses] == [
        [-1.0] * 3
    ] * 2
    huge = log_probs.expand(200_000, 20_000)
    for name, content in {
        "column": {"response_ids": ids, "rollout_log_probs": huge},
        "inner": {"response_ids": ids, "rollout_log_probs": [huge[0], huge]},
        "samples": [{"response_ids": ids[0], "rollout_log_probs": huge}],
        "several": {"response_ids": ids, "rollout_log_probs": [log_probs.expand(30_000, 100) for _ in range(23)]},
    }.items():
        torch.save(content, tmp_path / f"{name}.pt")
        _refused(tmp_path / f"{name}.pt", "repeat the values of smaller ones")


@pytest.mark.parametrize("kind", ["dump", "records"])
def test_parquet_that_packs_many_equal_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    pytest.importorskip("pyarrow", reason="pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    monkeypatch.setattr(files, "MAX_ROW_GROUP", 8 << 20)  # writing what is above the real limit takes a minute
    zeros = pa.nulls(1_000_000, pa.int8()).fill_null(0)
    rows = pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros)
    names = ["response_ids", "rollout_log_probs", *(["prompt_ids"] if kind == "records" else [])]
    parquet.write_table(pa.table(dict.fromkeys(names, rows)), path, compression="zstd", write_page_checksum=True)
    assert path.stat().st_size < 10_000
    _refused(path, "has a row group of .* MiB, 8 at most are read")


@pytest.mark.parametrize("more", [[], ["--brief"]])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on Linux")
def test_more_memory_than_there_is_is_no_crash(tmp_path: Path, more: list[str]):
    path, count = tmp_path / "a.jsonl", 4_000_000
    path.write_text('{"prompt_ids": [1], "response_ids": [' + "1," * count + '1], "rollout_log_probs": [-1]}\n')
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, "inspect", str(path), *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr[-2000:]
    assert done.stderr == "mismatch-plugin: stopped, there is not enough memory: give fewer files or samples.\n"
