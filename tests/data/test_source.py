"""Files that are cut, too large, hold code or are no dump: refused by name. All else is read as written."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from tests.calls import calls
from tests.data.dumps import save

GOOD: dict[str, Any] = {"response_ids": [[1, 2, 3]], "rollout_log_probs": [[-1.0, -2.0, -3.0]]}
OWN: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}


def refused(path: Path, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)


def _numbers(path: Path) -> list[list[float]]:
    return [[*sample.response_ids.tolist(), *sample.rollout_log_probs.tolist()] for sample in read(path).samples]


class _Harm:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / 'ran'}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_code_is_not_run(tmp_path: Path) -> None:
    harm = _Harm(tmp_path)
    refused(save(tmp_path / "a.pt", {**GOOD, "more": harm}), "which is code, not data: nothing was loaded")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(harm))
    refused(tmp_path / "a.pkl", "is a pickle, which may run code")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(harm, protocol=2))
    refused(tmp_path / "old.pt", "is a pickle")
    array = np.array([harm], dtype=object)
    columns = {"response_ids": array, "rollout_log_probs": array}
    refused(save(tmp_path / "a.npz", columns), "Object arrays cannot be loaded")
    assert not (tmp_path / "ran").exists()


def test_what_pickles_of_trainers_hold_is_read(tmp_path: Path) -> None:
    """Arrays of numpy, of any byte order and of objects; nothing stays allowed for other loads."""
    arrays = {
        "response_ids": np.array([[1, 2, 3], [4, 5, 6]], dtype=">i4"),
        "rollout_log_probs": np.asfortranarray(np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], dtype=np.float32)),
        "uid": np.array(["a", "b"], dtype=object),
        "temperature": np.float64(0.5),
    }
    before = set(torch.serialization.get_safe_globals())
    path = save(tmp_path / "a.pt", arrays)
    assert _numbers(path) == [[1, 2, 3, -1, -2, -3], [4, 5, 6, -4, -5, -6]]
    assert [(one.group, one.temperature) for one in read(path).samples] == [("a", 0.5), ("b", 0.5)]
    assert set(torch.serialization.get_safe_globals()) == before
    refused(save(tmp_path / "b.pt", {"share": Fraction(1, 2)}), "code, not data")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "c.pt", "w") as new:  # of numpy 1
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"numpy._core.", b"numpy.core."))
    assert _numbers(tmp_path / "c.pt") == _numbers(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.pt", b"", "is empty"),
        ("blank.jsonl", b" \n", "is empty"),
        ("text.pt", b"hello", "of no kind that is read"),
        ("list.json", b"[1, 2]", "holds a list: give a dict of columns or samples"),
        ("none.json", b"[]", "holds an empty list"),
        ("cut.json", b'{\n"a": [1, 2', "is neither JSON nor JSONL"),
        ("lines.jsonl", b'{"response_ids": [1], "rollout_logprobs": [-1]}\n[1]\n', "line 2 is a list, not an object"),
        ("a.pt", torch.zeros(3), "give a dict of columns or samples"),
        ("model.pt", torch.nn.Linear(1, 1), "holds torch.nn.modules.linear.Linear, which is code"),
        # Lines of our own.
        *(("own.jsonl", f"{json.dumps(OWN)}\n\n{json.dumps({**OWN, **change})}".encode(), f"line 3{says}")
          for change, says in (
              ({"rollout_log_probs": [-1.0, "much"]}, ": rollout_log_probs: position 1 is 'much', not a number"),
              ({"response_ids": None}, " has no response_ids"),
              ({"surprise": 1}, ": surprise is no field of a sample"))),
    ],
)  # fmt: skip
def test_things_that_are_no_dump(name: str, content: Any, says: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    refused(tmp_path / name, says)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no dump")
    refused(tmp_path / "absent.pt", "is not there")
    refused(Path("/dev/zero"), "is a device")


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".parquet", ".jsonl"])
def test_files_that_are_cut_are_refused(tmp_path: Path, suffix: str) -> None:
    columns = {"response_ids": torch.arange(300).reshape(3, 100), "rollout_log_probs": -torch.rand(3, 100)}
    data = save(tmp_path / f"whole{suffix}", columns).read_bytes()
    changed = tmp_path / f"changed{suffix}"
    for keep in (0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 20, len(data) - 3):
        changed.write_bytes(data[:keep])
        refused(changed, "changed")


def test_infinities_large_ids_and_strange_line_ends_are_passed_on(tmp_path: Path) -> None:
    values = [float("nan"), float("-inf"), 0.0]
    save(tmp_path / "a.pt", {**GOOD, "rollout_log_probs": [values]})
    save(tmp_path / "a.jsonl", [{"response_ids": [1, 2, 3], "rollout_logprobs": values}])
    for name in ("a.pt", "a.jsonl"):
        np.testing.assert_array_equal(read(tmp_path / name).samples[0].rollout_log_probs, values)
    names = ["a\u2028b", "c\x0bd\x1ee", "f\u0085g", "h\ud800"]  # only a line feed ends a line
    lines = [json.dumps({**OWN, "sample_id": name}, ensure_ascii=name in names[1::2]) for name in names]
    (tmp_path / "b.jsonl").write_bytes(("\r\n".join(lines) + "\n").encode())
    assert [sample.sample_id for sample in read(tmp_path / "b.jsonl").samples] == [*names[:3], "h\\ud800"]
    large = save(tmp_path / "c.jsonl", [{**OWN, "response_ids": [2**40, 2**62], "loss_mask": None}])
    assert read(large).samples[0].response_ids.tolist() == [2**40, 2**62]


def test_reading_calls_nothing_a_token(tmp_path: Path) -> None:
    def reading(n: int) -> int:
        spans = [WeightSpan(version="3", start=0, end=5), WeightSpan(version="4", start=5, end=n)]
        values = [-0.5 - at / 7 for at in range(n)]
        sample = Sample(response_ids=[*range(n)], rollout_log_probs=values, weight_versions=spans)
        write_samples(tmp_path / f"{n}.jsonl", [sample] * 3)
        columns = {"response_ids": torch.arange(3 * n).reshape(3, n), "rollout_log_probs": -torch.rand(3, n)}
        save(tmp_path / f"{n}.pt", columns)
        return calls(lambda: (read(tmp_path / f"{n}.jsonl"), read(tmp_path / f"{n}.pt")))

    assert reading(2000) - reading(8) < 60  # a longer file is read in more pieces
