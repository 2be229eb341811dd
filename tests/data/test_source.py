"""Files that are cut, damaged, too large, hold code or are no dump: refused by name. All else is read as written."""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatch_plugin import files
from mismatch_plugin.data import files as data_files
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.read import read
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import WeightSpan
from tests.calls import calls
from tests.data import dumps
from tests.data.dumps import save

GOOD: dict[str, Any] = {"response_ids": [[1, 2, 3]], "rollout_log_probs": [[-1.0, -2.0, -3.0]]}
OWN: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}


def refused(path: Path, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)


class _Harm:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.made = (call, arguments)

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("call", [os.system, eval, os.mkdir])
def test_code_is_not_run(tmp_path: Path, call: Any) -> None:
    ran = tmp_path / "ran"
    harm = _Harm(call, {os.system: f"touch {ran}", os.mkdir: str(ran)}.get(call, f"open({str(ran)!r}, 'w')"))
    refused(save(tmp_path / "a.pt", {**GOOD, "more": harm}), "which is code, not data: nothing was loaded")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(harm))
    refused(tmp_path / "a.pkl", "is a pickle, which may run code")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(harm, protocol=2))
    refused(tmp_path / "old.pt", "is a pickle")
    array = np.array([harm], dtype=object)
    refused(
        save(tmp_path / "a.npz", {"response_ids": array, "rollout_log_probs": array}), "Object arrays cannot be loaded"
    )
    assert not ran.exists()


def test_what_pickles_of_trainers_hold_is_read(tmp_path: Path) -> None:
    """Arrays of numpy, of any byte order and of objects; nothing stays allowed for other loads."""
    arrays = {
        "response_ids": np.array([[1, 2, 3], [4, 5, 6]], dtype=">i4"),
        "rollout_log_probs": np.asfortranarray(np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], dtype=np.float32)),
        "uid": np.array(["a", "b"], dtype=object),
        "temperature": np.float64(0.5),
    }
    before = set(torch.serialization.get_safe_globals())
    samples = read(save(tmp_path / "a.pt", arrays)).samples
    assert [[*one.response_ids, *one.rollout_log_probs] for one in samples] == [
        [1, 2, 3, -1, -2, -3],
        [4, 5, 6, -4, -5, -6],
    ]
    assert [(one.group, one.temperature) for one in samples] == [("a", 0.5), ("b", 0.5)]
    assert set(torch.serialization.get_safe_globals()) == before
    refused(save(tmp_path / "b.pt", {"share": Fraction(1, 2)}), "code, not data")
    data = zipfile.ZipFile(tmp_path / "a.pt").read("a/data.pkl").replace(b"numpy._core.", b"numpy.core.")  # of numpy 1
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "c.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name == "a/data.pkl" else old.read(name))
    assert len(read(tmp_path / "c.pt").samples) == 2


def test_what_expands_far_beyond_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, one = torch.ones(2, 3, dtype=torch.int64), -torch.ones(1)
    small = read(save(tmp_path / "small.pt", {"response_ids": ids, "rollout_log_probs": one.expand(2, 3)}))
    assert [sample.rollout_log_probs.tolist() for sample in small.samples] == [[-1.0] * 3] * 2
    huge = one.expand(200_000, 20_000)
    for name, content in {
        "column": {"response_ids": ids, "rollout_log_probs": huge},
        "inner": {"response_ids": ids, "rollout_log_probs": [huge[0], huge]},
        "samples": [{"response_ids": ids[0], "rollout_log_probs": huge}],
    }.items():
        refused(save(tmp_path / f"{name}.pt", content), "15259 MiB that repeats the values of a smaller one")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 45,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in GOOD:
            archive.writestr(f"{name}.npy", header.getvalue() + b"0" * 64)
    refused(tmp_path / "a.npz", r"MemoryError: Unable to allocate 256. TiB")
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"]" * 50_000_000)
    refused(tmp_path / "b.pt", "48 MiB are packed into it")
    monkeypatch.setattr(data_files, "MAX_ROW_GROUP", 8 << 20)  # writing what is above the real limit takes a minute
    pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra [io]")
    zeros = pa.nulls(1_000_000, pa.int8()).fill_null(0)
    rows = pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros)
    table = pa.table(dict.fromkeys(("response_ids", "rollout_log_probs", "prompt_ids"), rows))
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet", compression="zstd")
    refused(tmp_path / "a.parquet", "has a row group of .* MiB, 8 at most are read")


def test_things_that_are_no_dump(tmp_path: Path) -> None:
    for name, content, says in (
        ("empty.pt", b"", "is empty"),
        ("blank.jsonl", b" \n", "is empty"),
        ("text.pt", b"hello", "of no kind that is read"),
        ("utf16.jsonl", json.dumps(OWN).encode("utf-16"), "of no kind that is read"),
        ("latin.jsonl", b'{"text": "\xb7"}\n', "is not text"),
        ("list.json", b"[1, 2]", "holds a list: give a dict of columns or samples"),
        ("none.json", b"[]", "holds an empty list"),
        ("cut.json", b'{\n"a": [1, 2', "is neither JSON nor JSONL"),
        ("lines.jsonl", b'{"response_ids": [1], "rollout_logprobs": [-1]}\n[1]\n', "line 2 is a list, not an object"),
        ("deep.jsonl", b'{"response_ids": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", "nested too deeply"),
    ):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, says)
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "holds no dump")
    refused(tmp_path / "absent.pt", "is not there")
    for at, content in enumerate(([1, 2], torch.zeros(3), None, [])):
        torch.save(content, tmp_path / f"{at}.pt")
        refused(tmp_path / f"{at}.pt", "give a dict of columns or samples")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "holds torch.nn.modules.linear.Linear, which is code")
    os.mkfifo(tmp_path / "pipe.pt")
    refused(tmp_path / "pipe.pt", "is a pipe")
    refused(Path("/dev/zero"), "is a device")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    refused(tmp_path / "other.zip", "neither of torch.save nor of numpy.savez")
    for name, tensor in (("sparse", torch.eye(3).to_sparse()), ("complex", torch.zeros(1, 3, dtype=torch.complex64))):
        refused(save(tmp_path / f"{name}.pt", {**GOOD, "rollout_log_probs": tensor}), name)
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 1 is longer than"):
        list(files.read_lines(tmp_path / "lines.jsonl", limit=20))


def test_jagged_tensors_are_read_where_torch_can_and_named_elsewhere(tmp_path: Path) -> None:
    values = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0, -5.0])]
    ids = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    jagged = torch.nested.nested_tensor(values, layout=torch.jagged)
    path = save(tmp_path / "a.pt", {"responses": ids, "rollout_log_probs": jagged})
    code = "import sys; from mismatch_plugin.data.read import read as r; r(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "holds nested (jagged) tensors: save lists" in done.stderr
    importlib.import_module("torch._dynamo")
    assert [one.rollout_log_probs.tolist() for one in read(path).samples] == [value.tolist() for value in values]


def _numbers(path: Path) -> list[list[float]]:
    return [[*sample.response_ids.tolist(), *sample.rollout_log_probs.tolist()] for sample in read(path).samples]


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".parquet", ".jsonl"])
def test_files_that_are_cut_or_damaged_are_refused_or_the_same(tmp_path: Path, suffix: str) -> None:
    columns = {"response_ids": torch.arange(300).reshape(3, 100), "rollout_log_probs": -torch.rand(3, 100)}
    data = save(tmp_path / f"whole{suffix}", columns).read_bytes()
    right, changed = _numbers(tmp_path / f"whole{suffix}"), tmp_path / f"changed{suffix}"
    for keep in (0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 20, len(data) - 3):
        changed.write_bytes(data[:keep])
        refused(changed, "changed")
    seen = 0
    for at in np.random.default_rng(0).integers(0, len(data), 150) if suffix != ".jsonl" else ():
        changed.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            assert _numbers(changed) == right
        except ValueError:
            seen += 1
    assert seen or suffix == ".jsonl"


N = 3
STRANGE: list[Any] = [
    *(None, "text", -1, 1e308, True, [], {}, [[]], [None], ["a", {}], {"a": 1}, {1: 2}, [1, 2, 3], float("nan")),
    *(torch.tensor(3), torch.zeros(0), torch.zeros(N, 2, 2), torch.ones(N, dtype=torch.bfloat16), (1.5, 2.5, 3.5)),
    *(np.zeros(N), np.array(["a", "b", "c"], dtype=object), [torch.zeros(2, 2)] * N),
]
PLAIN = STRANGE[:14]
CHOICE = dumps.vllm("completion")[0]
MADE: list[Any] = [
    dumps.slime(),
    dumps.slime_train(),
    dumps.rank(cp_rank=0, cp_size=1, qkv_format="thd", max_seq_lens=[5, 5]),
    {**dumps.verl(), "uid": ["a", "b"], "step": 3, "weight_version": [1, 1], "response_length": [3, 2]},
    {**dumps.nemo(), "sample_mask": torch.ones(2), "prompt_length": [2, 1], "entropy": torch.ones(2, 6)},
    *([dumps.vllm(kind)[0], dumps.vllm(kind)[1]] for kind in ("completion", "chat", "output", "batch")),
    dumps.nemo_log(),
    [{**OWN, "sampling": {"temperature": 1.0}}] * 2,
    [{**OWN, "train_log_probs": [-1.0, -2.0], "weight_versions": ["1"]}] * 2,
]


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested dicts and lists of dicts."""
    of_dicts = isinstance(content, list) and content and isinstance(content[0], dict)
    items = content.items() if isinstance(content, dict) else enumerate(content) if of_dicts else ()
    inner = [place for key, value in items for place in _places(value, (*path, key))]
    return [path, *inner] if path else inner


@pytest.mark.parametrize("made", MADE)
def test_strange_values_are_read_or_refused_with_a_value_error_that_names_the_file(tmp_path: Path, made: Any) -> None:
    is_json = isinstance(made, list)
    path = save(tmp_path / ("a.jsonl" if is_json else "a.pt"), copy.deepcopy(made))
    read(path)
    draw = random.Random(0)
    for _ in range(200):
        content = copy.deepcopy(made)
        for place in draw.sample(_places(made), draw.choice([1, 1, 2, 3])):
            holder = content
            try:
                for key in place[:-1]:
                    holder = holder[key]
                if draw.random() < 0.2 and not isinstance(holder, list):
                    del holder[place[-1]]
                else:
                    holder[place[-1]] = copy.deepcopy(draw.choice(PLAIN if is_json else STRANGE))
            except (KeyError, TypeError, IndexError, ValueError):
                continue  # what holds it was replaced
        save(path, content)
        try:
            read(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017


LOG_PROBS = st.floats(-50, 0, width=32)
ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2**40), LOG_PROBS, LOG_PROBS, st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_what_is_written_is_read(tmp_path: Path, rows: list[list[tuple[int, float, float, bool]]]) -> None:
    """Ragged rows in every kind of file, and padded ones as tensors and arrays, are the same numbers."""
    names = ("response_ids", "rollout_log_probs", "old_log_probs", "loss_mask")
    columns = {name: [[token[at] for token in row] for row in rows] for at, name in enumerate(names)}
    width = max(map(len, rows))
    wide = {name: np.array([row + [0] * (width - len(row)) for row in values]) for name, values in columns.items()}
    wide["response_length"] = np.array([len(row) for row in rows])
    tensors = {name: torch.from_numpy(value) for name, value in wide.items()}
    kinds = {"a.pt": columns, "b.pt": tensors, "a.npz": wide, "a.jsonl": columns, "a.json": columns}
    for name, content in kinds.items():
        dump = read(save(tmp_path / name, copy.deepcopy(content)))
        computed = any(any(row) for row in columns["old_log_probs"])
        assert dump.has_training == computed
        for at, sample in enumerate(dump.samples):
            assert sample.response_ids.tolist() == columns["response_ids"][at]
            assert sample.rollout_log_probs.tolist() == columns["rollout_log_probs"][at]
            assert sample.loss_mask.tolist() == columns["loss_mask"][at]
            assert sample.train_log_probs.tolist() == (columns["old_log_probs"][at] if computed else [])


def test_nan_and_infinities_are_passed_on(tmp_path: Path) -> None:
    values = [float("nan"), float("-inf"), 0.0]
    save(tmp_path / "a.pt", {**GOOD, "rollout_log_probs": [values]})
    save(tmp_path / "a.jsonl", [{"response_ids": [1, 2, 3], "rollout_logprobs": values}])
    for name in ("a.pt", "a.jsonl"):
        np.testing.assert_array_equal(read(tmp_path / name).samples[0].rollout_log_probs, values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout_log_probs": [-1.0, "much"]}, "line 3: rollout_log_probs, position 1 is 'much', not a number"),
        ({"rollout_log_probs": [[-1.0]]}, "line 3: rollout_log_probs, position 0 is a list, not a number"),
        ({"response_ids": None}, "line 3 has no response_ids"),
        ({"response_ids": [2, "x"]}, "line 3: response_ids, position 1 is 'x', not an integer"),
        ({"response_ids": [2, 2**70]}, f"line 3: response_ids, position 1 is {2**70}, not an integer"),
        ({"prompt_ids": [-1]}, "line 3: prompt_ids, position 0 is -1, no token id"),
        ({"loss_mask": [1]}, "line 3: loss_mask has 1 entries, response_ids 2"),
        ({"loss_mask": [1, 2]}, "line 3: loss_mask holds 2 at position 1"),
        ({"surprise": 1}, "line 3: surprise is no field of a sample"),
        ({"sampling": 3}, "line 3: sampling: Input should be a valid dictionary"),
    ],
)
def test_a_bad_line_of_our_own_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(OWN), "", json.dumps({**OWN, **change})]))
    refused(path, says)


def test_only_a_line_feed_ends_a_line_and_ids_may_have_40_bits(tmp_path: Path) -> None:
    names = ["a\u2028b", "c\x0bd\x1ee", "f\u0085g", "h\ud800"]
    lines = [json.dumps({**OWN, "sample_id": name}, ensure_ascii=name in names[1::2]) for name in names]
    (tmp_path / "a.jsonl").write_bytes(("\r\n".join(lines) + "\n").encode())
    assert [sample.sample_id for sample in read(tmp_path / "a.jsonl").samples] == [*names[:3], "h\\ud800"]
    large = save(tmp_path / "b.jsonl", [{**OWN, "response_ids": [2**40, 2**62], "loss_mask": None}])
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

    few, many = reading(8), reading(2000)
    assert many - few < 60  # a longer file is read in more pieces


_LIMITED = """
import resource, sys
import mismatch_plugin.diagnose.diagnosis, mismatch_plugin.data.read
from mismatch_plugin.cli import main
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (24 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
"""


@pytest.mark.parametrize("brief", [[], ["--brief"]])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on Linux")
def test_more_memory_than_there_is_is_no_crash(tmp_path: Path, brief: list[str]) -> None:
    path, count = tmp_path / "a.jsonl", 4_000_000
    path.write_text('{"prompt_ids": [1], "response_ids": [' + "1," * count + '1], "rollout_log_probs": [-1]}\n')
    run = [sys.executable, "-c", _LIMITED, "inspect", *brief, str(path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr[-2000:]
    assert done.stderr == "mismatch-plugin: stopped, there is not enough memory: give fewer files or samples.\n"
