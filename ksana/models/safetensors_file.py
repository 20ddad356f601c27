"""Safetensors checkpoints, one file or shards with an index: read through a map, without torch.

Format: u64 little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, the data. Lengths
are checked against the file before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ksana.errors import ModelLoadError

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 100_000_000
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class SafeTensor:
    """One tensor of a file. `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One .safetensors file, mapped read-only.

    Invariant: every tensor of `tensors` lies wholly inside the file; for supported dtypes its size is what
    its shape gives. Raises ModelLoadError for anything malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from error
        if len(self._data) < 8:
            raise ModelLoadError(f"{path}: cut off: only {len(self._data)} bytes")
        length = int.from_bytes(self._data[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > len(self._data):
            raise ModelLoadError(
                f"{path}: the header claims {length} bytes; the file has {len(self._data)} and at most "
                f"{MAX_HEADER_BYTES} are allowed. Truncated, or not a safetensors file"
            )
        self._start = 8 + length
        header = _decode_object(self._data[8 : self._start], path, "the header")
        self.tensors = {
            name: self._entry(name, entry) for name, entry in header.items() if name != "__metadata__"
        }

    def _entry(self, name: str, entry: Any) -> SafeTensor:
        try:
            raw = msgspec.convert(entry, _HeaderEntry)
        except msgspec.ValidationError as error:
            raise ModelLoadError(f"{self.path}: tensor {name!r} is described wrongly: {error}") from None
        begin, end = raw.data_offsets
        if any(size < 0 for size in raw.shape) or not 0 <= begin <= end:
            raise ModelLoadError(f"{self.path}: tensor {name!r} is described wrongly: {entry}")
        if self._start + end > len(self._data):
            raise ModelLoadError(
                f"{self.path}: cut off: tensor {name!r} needs bytes up to {self._start + end}, "
                f"the file has {len(self._data)}"
            )
        if raw.dtype in ITEM_BYTES and math.prod(raw.shape) * ITEM_BYTES[raw.dtype] != end - begin:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} of {raw.dtype} and shape {list(raw.shape)} "
                f"has {end - begin} bytes"
            )
        return SafeTensor(name, raw.shape, raw.dtype, self._start + begin, end - begin)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a view into the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 in its shape. May be a read-only view into the file."""
        tensor = self.tensors[name]
        raw = self.raw(name)
        if tensor.type_name == "F32":
            values = raw.view("<f4")
        elif tensor.type_name == "F16":
            values = raw.view("<f2").astype(np.float32)
        elif tensor.type_name == "BF16":  # the upper half of a float32
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has dtype {tensor.type_name}; "
                f"supported: {', '.join(ITEM_BYTES)}"
            )
        return values.reshape(tensor.shape)


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _decode_object(data: bytes, path: Path, what: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: {what} is not a JSON object: {error}") from None


def open_directory(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name to the file that holds it, for a Hugging Face directory.

    With an index, exactly the files and names it lists count, and stray files are not looked at. Without one
    there must be a single file. Raises ModelLoadError, also for directories with pickled weights only.
    """
    index_path = directory / INDEX_NAME
    if index_path.is_file():
        return _open_index(directory, index_path)
    single = directory / SINGLE_NAME
    if single.is_file():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(others) == 1:
        file = SafetensorsFile(directory / others[0])
        return dict.fromkeys(file.tensors, file)
    if others:
        raise ModelLoadError(
            f"{directory}: {len(others)} safetensors files ({', '.join(others[:3])}, ...) and no "
            f"{INDEX_NAME} that says which belong together"
        )
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ModelLoadError(
            f"{directory}: only pickled weights ({pickled[0]}); they can run code and are not read. "
            f"Convert them to safetensors"
        )
    raise ModelLoadError(f"{directory}: no {SINGLE_NAME} and no {INDEX_NAME}")


def _open_index(directory: Path, index_path: Path) -> dict[str, SafetensorsFile]:
    if index_path.stat().st_size > MAX_INDEX_BYTES:
        raise ModelLoadError(f"{index_path}: larger than {MAX_INDEX_BYTES} bytes")
    weight_map = _decode_object(index_path.read_bytes(), index_path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index_path}: weight_map must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise ModelLoadError(f"{index_path}: {file_name!r} is not the plain name of a safetensors file")
        if not (directory / file_name).is_file():
            missing = next(name for name, holder in weight_map.items() if holder == file_name)
            raise ModelLoadError(f"{directory / file_name}: missing; it should hold tensor {missing!r}")
        files[file_name] = SafetensorsFile(directory / file_name)
    for name, file_name in weight_map.items():
        if name not in files[file_name].tensors:
            raise ModelLoadError(
                f"{files[file_name].path}: tensor {name!r} is missing; the index says it is here"
            )
    return {name: files[file_name] for name, file_name in weight_map.items()}
