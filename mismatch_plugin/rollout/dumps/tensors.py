"""Tensors and arrays from files that may be cut, huge or hostile: weights_only, no pickled object, bounds on size."""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch_plugin.files import MIB

MAX_PICKLE = 1024 * MIB
"""Bytes of the objects next to the tensors of a .pt file: 10 M tokens in Python lists are some 200 MiB."""
MAX_ARRAY = 4096 * MIB
"""Bytes of one tensor or array once it is unpacked."""
MAX_REPEATED = 256 * MIB
"""Bytes of all tensors of a file that repeat their values (`expand`), once each value is a value of its own."""
_KINDS = "biuf"
_DTYPES = {
    str(dtype): dtype
    for dtype in (torch.int64, torch.int32, torch.bool, torch.uint8, torch.float64, torch.float32, torch.bfloat16)
}
_INSTEAD = (
    "Save numbers, text and tensors only, for example torch.save({name: tensor, ...}, path) or "
    "numpy.savez(path, name=array, ...)."
)


def zip_names(path: Path) -> list[str]:
    """What a zip file holds. Raises ValueError where it is cut or no zip file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path} is cut or damaged: {error}. Was it still being written?") from None


def refuse_pickle(path: Path, head: bytes) -> None:
    """Raise ValueError for a pickle: loading one may run code."""
    if head[:1] == b"\x80" or path.suffix.lower() in (".pkl", ".pickle"):
        raise ValueError(
            f"{path} is a pickle, which may run code when it is loaded: it was not. verl's DataProto.save_to_disk "
            f"writes such files; save its tensors instead: torch.save(dict(data.batch.items()), path)."
        )


def open_torch(path: Path) -> Any:
    """What torch.save wrote, on the CPU; tensors stay in the file until they are used (mmap).

    Raises ValueError where the file is cut, damaged, larger inside than outside, or holds what would run code.
    """
    _check_torch_zip(path, path.stat().st_size, path)
    return _load(path, str(path), mmap=True)


def inner_torch(path: Path, data: bytes) -> Any:
    """What torch.save wrote into these bytes of a file."""
    _check_torch_zip(io.BytesIO(data), len(data), path)
    return _load(path, io.BytesIO(data), mmap=False)


def _load(path: Path, file: Any, mmap: bool) -> Any:
    try:
        with _only_ours():
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # bytes made up by others can fail in any way; none of them is a fault of ours
        refused = isinstance(error, pickle.UnpicklingError)
        if refused and (named := re.search(r"(?:GLOBAL|class) (\S+)", str(error))):
            raise ValueError(
                f"{path} holds {named[1]}, which is code, not data: nothing was loaded. {_INSTEAD}"
            ) from None
        if refused and "NJT" in str(error):
            raise ValueError(
                f"{path} holds nested (jagged) tensors: save lists instead, torch.save({{name: list(value.unbind()) if "
                f"value.is_nested else value for name, value in data.items()}}, path)."
            ) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} cannot be loaded: {reason}. It is damaged, or no file of torch.save.") from None
    if (repeated := _repeated(content)) > MAX_REPEATED:
        raise ValueError(
            f"{path} holds tensors of {repeated / MIB:.0f} MiB that repeat the values of smaller ones (expand), "
            f"{MAX_REPEATED / MIB:.0f} at most are read: save fewer samples a file, or tensor.contiguous()."
        )
    return content


def _repeated(content: Any) -> int:
    """Bytes of the tensors that have more elements than their storage holds."""
    found, seen, left = 0, {id(content)}, [content]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            if item.layout is torch.strided and not item.is_nested:
                size = item.numel() * item.element_size()
                found += size if size > item.untyped_storage().nbytes() else 0
            continue
        if isinstance(item, DataProto):
            item = item.state
        elif isinstance(item, _Array):
            item = item.value
        inside = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
        for entry in inside:
            if isinstance(entry, _HOLDERS) and id(entry) not in seen:  # lists may hold each other
                seen.add(id(entry))
                left.append(entry)
    return found


@contextmanager
def _only_ours() -> Iterator[None]:
    """What other packages of this process allow torch to load (megatron-core: numpy's own classes) is not allowed; what
    torch itself does (its nested tensors) is."""
    theirs = torch.serialization.get_safe_globals()
    of_torch = [item for item in theirs if str(getattr(item, "__module__", "")).startswith("torch.")]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*of_torch, *_SAFE])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(theirs)


def _check_torch_zip(file: Any, size: int, path: Path) -> None:
    """torch never compresses: what is inside can be no larger than the file, and each checksum must hold."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            inside = sum(member.file_size for member in members)
            if inside > size or any(member.compress_type for member in members):
                raise ValueError(f"{path} is no file of torch.save: {inside / MIB:.0f} MiB are packed into it.")
            objects = max((member.file_size for member in members if member.filename.endswith("data.pkl")), default=0)
            if objects > MAX_PICKLE:
                raise ValueError(
                    f"{path} holds {objects / MIB:.0f} MiB of Python objects, {MAX_PICKLE / MIB:.0f} at most are read: "
                    f"save tensors instead of lists, or fewer samples a file."
                )
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, OSError, EOFError) as error:
        raise ValueError(f"{path} is cut or damaged: {error}. Was it still being written?") from None
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} is another.")


def open_npz(path: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    """The arrays of an .npz file, each read when it is asked for."""
    return _Npz(path)


class _Npz(Mapping[str, Any]):
    def __init__(self, path: Path) -> None:
        self.path = path
        names = [name for name in zip_names(path) if name.endswith(".npy")]
        if not names:
            raise ValueError(f"{path} is a zip file, but neither of torch.save nor of numpy.savez.")
        self.members = {name.removesuffix(".npy"): name for name in names}

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, name: str) -> Any:
        called = f"{self.path}, array {name}"
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.members[name]) as stream:
                size = archive.getinfo(self.members[name]).file_size
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
            wanted = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if dtype.hasobject:
                raise ValueError("it holds Python objects, which may run code: save numbers")
            if max(wanted, size) > MAX_ARRAY:
                raise ValueError(f"it takes {max(wanted, size) / MIB:.0f} MiB, {MAX_ARRAY / MIB:.0f} at most are read")
            if wanted > size:
                raise ValueError(f"its header tells {wanted} bytes, {size} are there")
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays[name]
        except (
            ValueError,
            EOFError,
            OSError,
            zipfile.BadZipFile,
            zlib.error,
            NotImplementedError,
            SyntaxError,
        ) as error:
            raise ValueError(f"{called} cannot be read: {error}.") from None


# What pickles of numpy arrays name, as plain data of our own: numpy's functions get no bytes of others.
class _DType:
    """numpy.dtype: a kind, a size, a byte order."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = str(name), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "="

    @property
    def dtype(self) -> np.dtype[Any]:
        kind = np.dtype(self.name) if re.fullmatch(r"[biuf]\d{1,2}", self.name) else None
        if kind is None or kind.kind not in _KINDS:
            raise ValueError(f"an array of dtype {self.name!r} is not read, only numbers are")
        return kind.newbyteorder(self.order)  # type: ignore[arg-type]


class _Array:
    """numpy.ndarray: `value` is the array, or the list of an array of objects."""

    def __init__(self, *_: Any) -> None:
        self.value: Any = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        if isinstance(data, list):
            self.value = data
        else:
            order = "F" if fortran else "C"
            self.value = np.frombuffer(_latin1(data), dtype=kind.dtype).reshape(tuple(shape), order=order)


class _Name:
    """numpy.ndarray where a pickle names the class."""


class DataProto:
    """verl.protocol.DataProto: `state` is (bytes of its batch, non-tensor batch, meta information)."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _tensordict(_: Any, state: Any) -> Any:
    """tensordict.TensorDict, as the dict that it holds."""
    found = state.get("_tensordict") if isinstance(state, dict) else None
    if not isinstance(found, dict):
        raise ValueError("a TensorDict without tensors")
    return found


def _consolidated(metadata: Any, storage: Any) -> dict[str, torch.Tensor]:
    """A consolidated TensorDict: its tensors lie one behind the other in the bytes of `storage`."""
    found = {}
    for name, (kind, shape, start, stop, _) in metadata["leaves"].items():
        dtype = _DTYPES[kind]
        size = math.prod(shape)
        if not isinstance(name, str) or name.startswith("<NJT"):
            raise pickle.UnpicklingError("NJT")
        found[name] = storage[start:stop].view(dtype)[:size].view(tuple(shape))
    return found


class _Inert:
    """An object of a trainer's own class: kept as nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _latin1(text: Any, encoding: str = "latin1") -> bytes:
    if isinstance(text, bytes):
        return text
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _scalar(kind: _DType, data: Any) -> Any:
    return np.frombuffer(_latin1(data), dtype=kind.dtype)[0].item()


_SAFE = (
    *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_DType, "numpy.dtype"),
    (_Name, "numpy.ndarray"),
    (_latin1, "_codecs.encode"),
    (DataProto, "verl.protocol.DataProto"),
    (_tensordict, "tensordict._reductions._make_td"),
    (_consolidated, "tensordict._reductions._rebuild_tensordict_files_consolidated"),
    (_Name, "tensordict._td.TensorDict"),
    # Of a sample that trains a LoRA adapter; nothing of it is needed.
    (_Inert, "miles.utils.types.AdapterRef"),
    (_Inert, "miles.utils.types.RewardSpec"),
)


_HOLDERS = (torch.Tensor, Mapping, list, tuple, _Array, DataProto)


def plain(value: Any) -> Any:
    """A pickled numpy array as the array, a nested tensor as a list of tensors; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return list(value.unbind())
    return value.value if isinstance(value, _Array) else value
