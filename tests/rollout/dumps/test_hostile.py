"""Files that are cut, empty, huge or made to do harm: a message with the file's name, and nothing of them is run."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.rollout.dumps.registry import read_dump

GOOD: dict[str, Any] = {"response_ids": [[1, 2, 3]], "rollout_log_probs": [[-1.0, -2.0, -3.0]]}


def _arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """For numpy.savez, whose keywords may be anything but are typed as one flag."""
    return arrays


class _Harm:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.made = (call, arguments)

    def __reduce__(self) -> Any:
        return self.made


def _refused(path: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_dump(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("call", [os.system, eval, exec, os.mkdir])
def test_code_is_not_run(tmp_path: Path, call: Any):
    ran = tmp_path / "ran"
    argument = {os.system: f"touch {ran}", os.mkdir: str(ran)}.get(call, f"open({str(ran)!r}, 'w')")
    torch.save({**GOOD, "more": _Harm(call, argument)}, tmp_path / "a.pt")
    _refused(tmp_path / "a.pt", "which is code, not data: nothing was loaded")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(_Harm(call, argument)))
    _refused(tmp_path / "a.pkl", "is a pickle, which may run code")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(_Harm(call, argument), protocol=2))
    _refused(tmp_path / "old.pt", "is a pickle")
    array = np.array([_Harm(call, argument)], dtype=object)
    np.savez(tmp_path / "a.npz", response_ids=array, rollout_log_probs=array)
    _refused(tmp_path / "a.npz", "Python objects, which may run code")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["numpy.core.multiarray._reconstruct", "numpy.dtype", "numpy._core.multiarray.scalar"])
def test_what_stands_for_numpy_takes_no_call_of_others(tmp_path: Path, name: str):
    """A pickle that calls an allowed name with what numpy would never be given."""
    module, attribute = name.rsplit(".", 1)
    made = f"c{module}\n{attribute}\n(S'x'\nS'y'\nS'z'\ntR.".encode()
    _torch_zip(tmp_path / "a.pt", b"\x80\x02}X\x04\x00\x00\x00more" + made[:-1] + b"s.")
    _refused(tmp_path / "a.pt", "a.pt")


def test_numpy_in_pickles_is_the_same_and_objects_are_lists(tmp_path: Path):
    arrays = {
        "response_ids": np.array([[1, 2, 3], [4, 5, 6]], dtype=">i4"),
        "rollout_log_probs": np.asfortranarray(np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], dtype=np.float32)),
        "uid": np.array(["a", "b"], dtype=object),
        "temperature": np.float64(0.5),
    }
    torch.save(arrays, tmp_path / "a.pt")
    dump = read_dump(tmp_path / "a.pt")
    assert [response.response_ids.tolist() for response in dump.responses] == [[1, 2, 3], [4, 5, 6]]
    assert [response.rollout_log_probs.tolist() for response in dump.responses] == [[-1, -2, -3], [-4, -5, -6]]
    assert [response.group for response in dump.responses] == ["a", "b"]
    assert dump.responses[0].sampling.temperature == 0.5


def test_what_other_packages_allow_to_be_loaded_is_not_allowed_here(tmp_path: Path):
    torch.save(
        {"response_ids": np.array([[1, 2]], dtype=np.int32), "rollout_log_probs": [[-1.0, -2.0]]}, tmp_path / "a.pt"
    )
    torch.save({"path": Path("x")}, tmp_path / "b.pt")
    theirs = [np.dtype, np.ndarray, type(np.dtype("int32")), type(Path("x"))]  # as megatron-core does
    with torch.serialization.safe_globals([*theirs]):
        before = set(torch.serialization.get_safe_globals())
        assert read_dump(tmp_path / "a.pt").responses[0].response_ids.tolist() == [1, 2]
        _refused(tmp_path / "b.pt", "code, not data")
        assert set(torch.serialization.get_safe_globals()) == before


def _torch_zip(path: Path, objects: bytes, compress: int = zipfile.ZIP_STORED, **more: bytes) -> None:
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in {"data.pkl": objects, "version": b"3\n", "byteorder": b"little", **more}.items():
            archive.writestr(f"archive/{name}", data)


def test_bombs(tmp_path: Path):
    _torch_zip(tmp_path / "a.pt", b"]" * 50_000_000, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "a.pt").stat().st_size < 100_000
    _refused(tmp_path / "a.pt", "48 MiB are packed into it")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("response_ids.npy", header.getvalue() + b"0" * 64)
        archive.writestr("rollout_log_probs.npy", header.getvalue() + b"0" * 64)
    _refused(tmp_path / "a.npz", "it takes 8388608 MiB")
    shared: Any = [1]
    for _ in range(60):
        shared = [shared] * 10
    torch.save({**GOOD, "response_ids": [shared]}, tmp_path / "b.pt")
    _refused(tmp_path / "b.pt", "position 0 is a list, not an integer")
    torch.save({**GOOD, "response_ids": torch.zeros(1, 1).expand(1 << 20, 1 << 20)}, tmp_path / "c.pt")
    _refused(tmp_path / "c.pt", "c.pt")


def test_nesting(tmp_path: Path):
    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "a.jsonl").write_text('{"response_ids": ' + deep + ', "rollout_log_probs": [1], "x": 1}\n')
    with pytest.raises(ValueError, match="nested too deeply"):
        read_dump(tmp_path / "a.jsonl")
    good = '{"prompt_ids": [1], "response_ids": [1], "rollout_log_probs": [-1]}\n'
    (tmp_path / "b.jsonl").write_text(good + '{"prompt_ids": ' + deep + ', "response_ids": [1]}\n')
    _refused(tmp_path / "b.jsonl", "line 2")
    objects = b"\x80\x02}X\x0c\x00\x00\x00response_ids" + b"]" * 100_000 + b"a" * 99_999 + b"s."
    _torch_zip(tmp_path / "a.pt", objects)
    _refused(tmp_path / "a.pt", "a.pt")


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "a.parquet", "a.jsonl"])
def test_cut_files_are_not_passed_off_as_whole(tmp_path: Path, name: str):
    whole = tmp_path / name
    _write(whole)
    data = whole.read_bytes()
    read_dump(whole)
    for keep in (0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 20, len(data) - 3):
        cut = tmp_path / f"cut_{keep}{whole.suffix}"
        cut.write_bytes(data[:keep])
        with pytest.raises(ValueError, match=f"cut_{keep}") as caught:
            read_dump(cut)
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "a.parquet"])
def test_damaged_files_are_refused_or_the_same(tmp_path: Path, name: str):
    """One byte turned, anywhere: an error of ours, or the numbers as they were."""
    whole = tmp_path / name
    _write(whole)
    data, right = whole.read_bytes(), _numbers(whole)
    generator = np.random.default_rng(0)
    damaged = tmp_path / f"damaged{whole.suffix}"
    refused = 0
    for at in generator.integers(0, len(data), 150):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            numbers = _numbers(damaged)
        except ValueError:
            refused += 1
            continue
        assert numbers == right
    assert refused


def _write(path: Path) -> None:
    columns = {"response_ids": torch.arange(300).reshape(3, 100), "rollout_log_probs": -torch.rand(3, 100)}
    if path.suffix == ".pt":
        torch.save(columns, path)
    elif path.suffix == ".npz":
        np.savez(path, **_arrays({name: value.numpy() for name, value in columns.items()}))
    elif path.suffix == ".jsonl":
        rows = [{name: value[at].tolist() for name, value in columns.items()} | {"prompt_ids": [1]} for at in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pytest.importorskip("pyarrow", reason="pyarrow")
        import pyarrow as pa
        import pyarrow.parquet as parquet

        table = pa.table({name: value.tolist() for name, value in columns.items()})
        parquet.write_table(table, path, write_page_checksum=True)


def _numbers(path: Path) -> list[list[float]]:
    responses = read_dump(path).responses
    return [[*response.response_ids.tolist(), *response.rollout_log_probs.tolist()] for response in responses]


def test_things_that_are_no_dump(tmp_path: Path):
    (tmp_path / "empty.pt").touch()
    _refused(tmp_path / "empty.pt", "is empty")
    (tmp_path / "text.pt").write_text("hello")
    _refused(tmp_path / "text.pt", "of no kind that is read")
    np.save(tmp_path / "one.npy", np.zeros(3))
    _refused(tmp_path / "one.npy", "of no kind that is read")
    (tmp_path / "folder").mkdir()
    _refused(tmp_path / "folder", "holds no dump")
    _refused(tmp_path / "absent.pt", "is not there")
    for name, content in (("list", [1, 2]), ("tensor", torch.zeros(3)), ("none", None), ("nothing", [])):
        torch.save(content, tmp_path / f"{name}.pt")
        _refused(tmp_path / f"{name}.pt", "give a dict of columns or samples")
    torch.save({"rollout_id": 1, "samples": [1, 2]}, tmp_path / "samples.pt")
    _refused(tmp_path / "samples.pt", "holds no list of samples")
    torch.save({"rollout_id": 1, "rollout_data": 3}, tmp_path / "rank.pt")
    _refused(tmp_path / "rank.pt", "no rollout_data")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model.pt")
    _refused(tmp_path / "model.pt", "holds torch.nn.modules.linear.Linear, which is code")
    os.mkfifo(tmp_path / "pipe.pt")
    _refused(tmp_path / "pipe.pt", "is a pipe")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    _refused(tmp_path / "other.zip", "neither of torch.save nor of numpy.savez")


def test_sparse_nested_and_complex_tensors_are_named(tmp_path: Path):
    for name, tensor in {
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.zeros(1, 3, dtype=torch.complex64),
    }.items():
        torch.save({**GOOD, "rollout_log_probs": tensor}, tmp_path / f"{name}.pt")
        _refused(tmp_path / f"{name}.pt", name)


def test_jagged_tensors_are_read_where_torch_can_and_named_elsewhere(tmp_path: Path):
    path = tmp_path / "a.pt"
    values = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0, -5.0])]
    ids = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    torch.save({"responses": ids, "rollout_log_probs": torch.nested.nested_tensor(values, layout=torch.jagged)}, path)
    code = "import sys; from mismatch_plugin.rollout.dumps.registry import read_dump as r; r(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "holds nested (jagged) tensors: save lists" in done.stderr
    importlib.import_module("torch._dynamo")
    lists = [response.rollout_log_probs.tolist() for response in read_dump(path).responses]
    assert lists == [value.tolist() for value in values]


def test_nan_and_infinities_are_passed_on(tmp_path: Path):
    values = [float("nan"), float("-inf"), 0.0]
    torch.save({**GOOD, "rollout_log_probs": [values]}, tmp_path / "a.pt")
    (tmp_path / "a.jsonl").write_text(json.dumps({"response_ids": [1, 2, 3], "rollout_logprobs": values}) + "\n")
    for name in ("a.pt", "a.jsonl"):
        np.testing.assert_array_equal(read_dump(tmp_path / name).responses[0].rollout_log_probs, values)
